"""The pictures of experiments: learning curves, and bars with confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from simdev.files import write_picture
from simdev.sim.plot import new_figure
from simdev.studies.reproduce.lab import RunResult, best_at, interval

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # the palette of Okabe and Ito, which colour-blind readers can distinguish


def learning_curves(
    path: Path, panels: Mapping[str, Sequence[RunResult]], references: Sequence[str] = (), *, title: str = ""
) -> None:
    """Draw the best step time against evaluations: a panel for each case, a curve for each placer that searches.

    A curve is the mean over the seeds with its bootstrap interval. ``references`` are placers that are drawn as
    horizontal lines, at the mean over their seeds.
    """
    figure, axes = _figure(len(panels))
    entries = sorted({run.row.entry for runs in panels.values() for run in runs} - set(references))
    for axis, (name, runs) in zip(axes, panels.items(), strict=False):
        most = max([run.row.evaluations or 0 for run in runs], default=1)
        for number, entry in enumerate(entries):
            _curve(axis, [run for run in runs if run.row.entry == entry], entry, COLOURS[number % 7], most)
        steps = {entry: [run.step_ms for run in runs if run.row.entry == entry and run.points] for entry in references}
        levels = [(sum(values) / len(values), entry) for entry, values in steps.items() if values]
        axis.set(title=name, xscale="log", xlabel="evaluations")
        axis.set_ylim(*_window(axis, [level for level, _ in levels]))
        _level_lines(axis, sorted(levels))
    _finish(figure, axes, len(panels), "best step time so far (ms)", title, path)


def _curve(axis, runs: Sequence[RunResult], label: str, colour: str, most: int) -> None:
    if not any(run.points for run in runs):
        return
    grid = np.unique(np.geomspace(1, max(2, most), 60).astype(int))
    columns = []
    for used in grid:
        values = [value / 1e6 for run in runs if (value := best_at(run.points, int(used))) is not None]
        columns.append(interval(values) if len(values) == len(runs) else (np.nan,) * 3)
    mean, low, high = np.array(columns).T
    axis.plot(grid, mean, color=colour, label=label, linewidth=1.6)
    axis.fill_between(grid, low, high, color=colour, alpha=0.18, linewidth=0)


def _window(axis, levels: Sequence[float]) -> tuple[float, float]:
    """Limits of the y axis: from just below the lowest curve or level to the highest, at most 2.2 times the lowest."""
    values = np.concatenate([*(np.asarray(line.get_ydata(), float) for line in axis.get_lines()), levels])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.9, 1.1
    near = values[values <= 2.2 * values.min()]
    room = 0.06 * (near.max() - near.min()) or 0.05 * near.min()
    return near.min() - room, near.max() + 1.5 * room


def _level_lines(axis, levels: Sequence[tuple[float, str]]) -> None:
    """Draw a horizontal line for each level in the window; lines that are too close share one label."""
    low, high = axis.get_ylim()
    groups: list[list[tuple[float, str]]] = []
    for level in [level for level in levels if low <= level[0] <= high]:
        axis.axhline(level[0], color="0.45", linewidth=0.9, linestyle=(0, (4, 3)))
        near = groups and level[0] - groups[-1][0][0] < 0.05 * (high - low)
        groups[-1].append(level) if near else groups.append([level])
    for group in groups:
        note = axis.annotate(
            ", ".join(name for _, name in group),
            (1, group[-1][0]),
            (-2, 2),
            fontsize=7,
            color="0.3",
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
        )
        note.set_in_layout(False)


def bars(
    path: Path,
    groups: Mapping[str, Mapping[str, tuple[float, float, float]]],
    *,
    ylabel: str,
    title: str = "",
    level: float | None = None,
) -> None:
    """Draw groups of bars, each ``(mean, low, high)``; ``level`` draws a horizontal line, such as at 1."""
    figure, axes = _figure(1, width=1.6 + 1.5 * len(groups))
    axis = axes[0]
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        for place, group in enumerate(groups.values()):
            if name not in group or not np.isfinite(group[name][0]):
                continue
            mean, low, high = group[name]
            at = place + (number - (len(names) - 1) / 2) * width
            axis.bar(
                at,
                mean,
                width * 0.92,
                color=COLOURS[number % 7],
                label=name,
                yerr=[[max(0, mean - low)], [max(0, high - mean)]],
                error_kw={"elinewidth": 1},
            )
    axis.set_xticks(range(len(groups)), list(groups), fontsize=8)
    if level is not None:
        axis.axhline(level, color="0.3", linewidth=0.9)
    _finish(figure, axes, 1, ylabel, title, path)


def _figure(panels: int, width: float = 4.2):
    columns = min(3, panels)
    rows = -(-panels // columns)
    figure = new_figure(max(5.5, width * columns), 3.4 * rows + 0.5)
    return figure, figure.subplots(rows, columns, squeeze=False).ravel().tolist()


def _finish(figure, axes, used: int, ylabel: str, title: str, path: Path) -> None:
    for axis in axes[used:]:
        axis.remove()
    handles: dict = {}
    for axis in axes[:used]:
        axis.grid(alpha=0.25)
        axis.set_ylabel(ylabel, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.title.set_fontsize(10)
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10)
    write_picture(figure, path, dpi=110)
