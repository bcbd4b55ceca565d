"""The picture of a plan: passes and memory of each pipeline rank over time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from simdev.files import write_picture
from simdev.parallel.plan import PlanReport
from simdev.parallel.unroll import name_of
from simdev.sim.plot import hue, new_figure

# Okabe and Ito (2008): colour-blind readers can tell them apart.
COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#d55e00", "W": "#009e73", "U": "#666666", "S": "#0072b2"}
MEANING = {
    "S": "step",
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "U": "update",
}
BUBBLE = "#eeeeee"
NARROW = 0.02  # boxes below this share of the step have no number


def draw_pipeline(report: PlanReport, path: str | os.PathLike) -> None:
    """Draw a plan to ``path``, whose ending (png, svg or pdf) gives the format: a row for each pipeline rank, a box for
    each action, from the first start to the last finish of its kernels. What no box covers is idle (a bubble). Below,
    the memory of each rank. Raises :class:`InvalidInput` for another ending or without matplotlib."""
    ranks, step_ns = len(report.peak_bytes), report.step_ns
    heights = [0.42 * ranks + 0.6, 1.8]
    figure = new_figure(12, sum(heights) + 1.2, path)
    axes, below = figure.subplots(2, 1, height_ratios=heights, sharex=True)
    idle = float(report.bubble_ns.sum()) / max(1, ranks * step_ns)
    name = report.unrolled.problem.graph.name.replace("$", r"\$")
    figure.suptitle(f"{name}: {step_ns / 1e6:,.1f} ms, {idle:.0%} of it idle", fontweight="bold")
    for rank in range(ranks):
        axes.broken_barh([(0, step_ns / 1e6)], (rank - 0.4, 0.8), facecolors=BUBBLE)
    for letter, begin, finish, rank, label in _boxes(report):
        box = axes.broken_barh(
            [(begin / 1e6, (finish - begin) / 1e6)],
            (rank - 0.4, 0.8),
            facecolors=COLOURS[letter],
            edgecolor="white",
            lw=0.4,
        )
        box.set_gid(label)
        if finish - begin > NARROW * step_ns:
            middle = (begin + finish) / 2e6
            axes.text(middle, rank, label[1:].removeprefix("0."), ha="center", va="center", fontsize=8, color="black")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, step_ns / 1e6)
    _draw_memory(below, report)
    below.set_xlabel("ms after the start of the step")
    _legend(figure, report)
    write_picture(figure, path, dpi=110)


def _draw_memory(axes: Any, report: PlanReport) -> None:
    found, schedule = report.unrolled, report.schedule
    number = {action: place for place, action in enumerate(found.actions)}
    capacity = report.plan.cluster.kind.memory_bytes
    for rank, steps in enumerate(report.memory):
        times, used = [], []
        for action, most, after in steps:
            mine = (found.action == number[action]) & found.is_compute & (found.rank == found.first[rank])
            if mine.any():
                times += [int(schedule.op_start[mine].min()) / 1e6, int(schedule.op_finish[mine].max()) / 1e6]
                used += [most / 2**30, after / 2**30]
        peak = int(report.peak_bytes[rank]) / 2**30
        axes.step(times, used, where="post", color=hue(rank), lw=1.2, label=f"rank {rank}: peak {peak:.1f} GiB")
    axes.axhline(capacity / 2**30, color="black", lw=1, ls=":")
    axes.set_ylabel("memory, GiB")
    axes.set_ylim(0, None)
    if 0 < len(report.memory) <= 8:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _legend(figure: Any, report: PlanReport) -> None:
    from matplotlib.patches import Patch

    letters = sorted({action[0] for action in report.unrolled.actions}, key="SFBIWU".index)
    handles = [Patch(color=COLOURS[letter], label=MEANING[letter]) for letter in letters]
    figure.legend(
        handles=[*handles, Patch(color=BUBBLE, label="idle")], loc="outside lower center", ncols=7, frameon=False
    )


def _boxes(report: PlanReport) -> Iterator[tuple[str, int, int, int, str]]:
    """``(letter, begin, finish, pipeline rank, label)`` of each action, on the first copy of each pipeline rank."""
    found, schedule = report.unrolled, report.schedule
    row = np.full(sum(found.copies), -1)
    row[found.first] = np.arange(len(found.copies))  # of the first copy of each pipeline rank
    mine = np.flatnonzero(found.is_compute & (row[found.rank] >= 0))
    action = found.action[mine]
    begin = np.full(len(found.actions), np.iinfo(np.int64).max)
    finish, rank = np.zeros(len(found.actions), np.int64), np.zeros(len(found.actions), np.int64)
    np.minimum.at(begin, action, schedule.op_start[mine])
    np.maximum.at(finish, action, schedule.op_finish[mine])
    rank[action] = row[found.rank[mine]]
    for number in np.unique(action).tolist():
        yield (
            found.actions[number][0],
            int(begin[number]),
            int(finish[number]),
            int(rank[number]),
            name_of(found.actions[number]),
        )
