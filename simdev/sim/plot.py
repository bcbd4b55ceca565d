"""Bars over time, one row for each device: what pictures of schedules are drawn with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from simdev.errors import InvalidInput
from simdev.problem.graph import PHASES

# A device has one hue in every panel, a phase one shade of it. The hues are those of Okabe and Ito (2008), which
# colour-blind readers can tell apart.
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7a00", "#666666")
SHADES = (0.55, 0.0, -0.45)  # forward is lighter, update is darker
PIXELS = 1600  # intervals closer than a pixel are drawn as one


def new_figure(width: float, height: float, path: str | os.PathLike | None = None) -> Any:
    """A matplotlib figure without a window, for :func:`simdev.files.write_picture`. Raises :class:`InvalidInput`
    without matplotlib, and if ``path`` has another ending than png, svg or pdf."""
    if path is not None and not str(path).lower().endswith((".png", ".svg", ".pdf")):
        raise InvalidInput("pictures end in .png, .svg or .pdf", source=path)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput("pictures need matplotlib: pip install matplotlib", source=path) from None
    return Figure(figsize=(width, height), layout="constrained")


def hue(device: int, shade: float = 0.0) -> tuple[float, float, float]:
    """The colour of a device, as red, green and blue from 0 to 1: mixed with white (``shade`` > 0) or black (< 0)."""
    text = HUES[device % len(HUES)]
    parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part + (1 - part) * shade if shade > 0 else part * (1 + shade) for part in parts)
    return red, green, blue


def merged(begin: np.ndarray, end: np.ndarray, gap_ns: int) -> np.ndarray:
    """Join intervals that are at most ``gap_ns`` apart. Returns int64 ``(k, 2)``: begin and end in ns, sorted by
    begin."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], begin[1:] > end[:-1] + gap_ns])[: len(begin)]
    starts = np.flatnonzero(first)
    return np.stack([begin[starts], np.concatenate([end[starts[1:] - 1], end[-1:]])], axis=1)


def bars(axes: Any, row: float, begin: np.ndarray, end: np.ndarray, gap_ns: int, colour: Any, height: float = 0.72):
    """Draw intervals (ns) as bars of one colour on a row of matplotlib axes, whose horizontal unit is a ms. An
    interval is ``gap_ns`` wide at least: it is seen."""
    if len(begin):
        spans = merged(begin, end, gap_ns) / 1e6
        axes.broken_barh(
            np.stack([spans[:, 0], np.maximum(spans[:, 1] - spans[:, 0], max(gap_ns / 1e6, 1e-9))], axis=1),
            (row - height / 2, height),
            facecolors=colour,
            linewidth=0,
        )


def device_rows(axes: Any, schedule: Any, devices: np.ndarray, shown: Sequence[int], phases: np.ndarray | None) -> None:
    """Draw the ops of each device of ``shown`` on a row, the first one on top. ``devices`` and ``phases`` are int
    ``(n,)``; without phases, all ops have the plain hue of their device."""
    gap = schedule.step_ns // PIXELS
    for row, device in enumerate(shown):
        ops = np.flatnonzero(devices == device)
        kinds = np.ones(len(ops), int) if phases is None else phases[ops]
        for phase, shade in enumerate(SHADES):
            mine = ops[kinds == phase]
            bars(axes, row, schedule.op_start[mine], schedule.op_finish[mine], gap, hue(device, shade))
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, max(1, schedule.step_ns) / 1e6)
    axes.set_xlabel("ms")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)


def phase_handles(device: int) -> list:
    """What the shades of a legend mean, on the hue of a device."""
    from matplotlib.patches import Patch

    return [Patch(color=hue(device, shade), label=phase) for phase, shade in zip(PHASES, SHADES, strict=True)]
