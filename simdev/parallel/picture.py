"""A picture of a pipeline: one row for each pipeline rank, forward and backward passes of microbatches along time."""

from __future__ import annotations

from html import escape

import numpy as np

from simdev.parallel.plan import PlanReport
from simdev.parallel.unroll import name_of

WIDTH, ROW, LEFT, TOP = 1100, 34, 80, 40
COLOURS = {"S": "#9d755d", "F": "#4c78a8", "B": "#e45756", "I": "#f58518", "W": "#54a24b", "U": "#72b7b2"}
MEANING = {
    "S": "step",
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "U": "update",
}


def pipeline_svg(report: PlanReport) -> str:
    """The SVG text. Each box is an action: from the first start to the last finish of its kernels on the compute
    stream."""
    found, step_ns = report.unrolled, report.step_ns
    ranks = len(report.peak_bytes)
    height = TOP + ROW * ranks + 40
    scale = (WIDTH - LEFT - 20) / step_ns
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(found.problem.graph.name)}: {step_ns / 1e6:,.1f} ms</text>',
    ]
    for letter, begin, finish, rank, label in _boxes(report):
        x, width = LEFT + begin * scale, max(0.5, (finish - begin) * scale)
        y = TOP + ROW * rank
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 6}" fill="{COLOURS[letter]}" stroke="white" '
            f'stroke-width="0.4"><title>{label}: {begin / 1e6:.2f} to {finish / 1e6:.2f} ms</title></rect>'
        )
        if width > 22:
            parts.append(
                f'<text x="{x + width / 2:.2f}" y="{y + 18}" text-anchor="middle" fill="white">{label[1:]}</text>'
            )
    for rank in range(ranks):
        parts.append(f'<text x="8" y="{TOP + ROW * rank + 18}">rank {rank}</text>')
    shown = sorted({action[0] for action in found.actions}, key="SFBIWU".index)
    for place, letter in enumerate(shown):
        x, y = LEFT + 170 * place, TOP + ROW * ranks + 12
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[letter]}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{MEANING[letter]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _boxes(report: PlanReport):
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
