"""Write the fidelity report: goals met and missed, fitted constants, cases and a picture."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from simdev.files import markdown_table, write_picture, write_table, write_text
from simdev.studies.fidelity.cases import GOALS, Case, Group, groups
from simdev.studies.fidelity.constants import ROOFLINES, constants

MOST_SHOWN = 30  # cases of a group that the text lists one by one


def write(cases: list[Case], notes: list[str], folder: Path) -> None:
    """Write ``cases.csv``, ``groups.csv``, ``README.md`` and ``scatter.png`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [field.name for field in fields(Case)]
    lines = [[*(getattr(case, name) for name in names), case.error, int(case.over)] for case in cases]
    write_table(folder / "cases.csv", [*names, "error", "over"], lines)
    names = [field.name for field in fields(Group)]
    write_table(folder / "groups.csv", names, [[getattr(group, name) for name in names] for group in groups(cases)])
    write_text(folder / "README.md", markdown(cases, notes))
    draw(cases, folder / "scatter.png")


def _percent(value: float) -> str:
    return "" if np.isnan(value) else f"{100 * value:.2f}"


def markdown(cases: list[Case], notes: list[str]) -> str:
    """The report as text."""
    lines = ["# Fidelity", ""]
    lines += ["`simdev study fidelity` wrote this report. Errors are in %. A goal is met if the mean of its counted"]
    lines += ["cases is within it and, for F1, if the worst case is within 5 %; it is not tried if constants were"]
    lines += ["fitted to the cases themselves. The list of the files that fits may use is"]
    lines += ["`simdev/calibrate/manifest.csv`.", ""]
    lines += ["## Goals", ""]
    columns = "goal, what, group, cases, left out, mean, 95 %, worst, goal %, met, sum of ops, roofline, no host"
    found = groups(cases)
    lines += markdown_table(columns.split(", "), [_group_row(group) for group in found])
    absent = [goal for goal in GOALS if goal not in {group.goal for group in found}]
    lines += ["", *(f"* {goal} ({GOALS[goal][0]}): no case, its data or packages are not there" for goal in absent)]
    lines += ["", "## What was fitted, and to which rows", ""]
    lines += markdown_table(["constant", "value", "fitted to", "judged by"], constants())
    lines += ["", "No measurement stands behind the kernels below; they are rooflines or estimates:", ""]
    lines += [f"* {text}" for text in ROOFLINES]
    over = [case for case in cases if case.over]
    lines += ["", f"## Over the goal: {len(over)}", ""]
    lines += _over(over)
    text = f"Op tables, single steps and groups of more than {MOST_SHOWN} cases are in `cases.csv`."
    lines += ["", "## Cases", "", text, ""]
    few = {(group.goal, group.group) for group in found if group.cases + group.left_out <= MOST_SHOWN}
    shown = [case for case in cases if (case.goal, case.group) in few and case.goal and case.goal[:2] != "F5"]
    columns = (
        "goal, group, case, role, noise, measured, predicted, unit, error, table, fit, fallback, sum of ops, roofline"
    )
    lines += markdown_table([*columns.split(", "), "no host", "left out"], [_case_row(case) for case in shown])
    if notes:
        lines += ["", "## What could not be used", "", *(f"* {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _over(cases: list[Case]) -> list[str]:
    """The cases over their goal by name. If a goal has more than ten, their number and the worst ten are listed."""
    lines = []
    for goal in GOALS:
        mine = sorted((case for case in cases if case.goal == goal), key=lambda case: -abs(case.error))
        if len(mine) > 10:
            lines.append(f"* {goal}: {len(mine)} cases, the worst ten (all: `cases.csv`, column `over`):")
        lines += [f"* {goal}, {case.group}: {case.case}: {100 * case.error:+.1f} %" for case in mine[:10]]
    return lines or ["None."]


def _group_row(group: Group) -> list[str]:
    interval = "" if np.isnan(group.low) else f"{100 * group.low:.2f} to {100 * group.high:.2f}"
    what = GOALS[group.goal][0] if group.goal else "for information"
    baselines = map(_percent, (group.sum_of_ops, group.roofline, group.no_host))
    met = "**no**" if group.met == "no" else group.met
    return [
        group.goal,
        what,
        group.group,
        str(group.cases),
        str(group.left_out),
        _percent(group.error),
        interval,
        _percent(group.worst),
        _percent(group.limit),
        met,
        *baselines,
    ]


def _case_row(case: Case) -> list[str]:
    numbers = [case.measured, case.predicted]
    shares = [case.table, case.fit, case.fallback]
    bases = [case.sum_of_ops, case.roofline, case.no_host]
    return [
        case.goal,
        case.group,
        case.case,
        case.role,
        _percent(case.noise),
        *(f"{value:.4g}" for value in numbers),
        case.unit,
        _percent(case.error),
        *map(_percent, shares),
        *("" if np.isnan(value) else f"{value:.4g}" for value in bases),
        case.left_out,
    ]


def draw(cases: list[Case], path: Path) -> None:
    """Draw predicted over measured times with the baselines, on logarithmic axes, in one panel for each goal with
    times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    panels = [goal for goal in GOALS if any(case.goal == goal and case.unit != "MiB" for case in cases)]
    columns = min(4, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure, axes = plt.subplots(rows, columns, figsize=(4.4 * columns, 4.2 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, goal in zip(axes.flat, panels, strict=False):
        chosen = [case for case in cases if case.goal == goal]
        measured = np.array([case.measured for case in chosen])
        for key, mark in (("sum_of_ops", "^"), ("roofline", "v"), ("no_host", "s")):
            values = np.array([getattr(case, key) for case in chosen])
            if not np.isnan(values).all():
                axis.plot(measured, values, mark, ms=4, alpha=0.5, color="0.6", label=key.replace("_", " "))
        counted = np.array([not case.left_out for case in chosen])
        predicted = np.array([case.predicted for case in chosen])
        axis.plot(measured[counted], predicted[counted], "o", ms=4, color="tab:blue", label="simdev")
        if (~counted).any():
            axis.plot(
                measured[~counted], predicted[~counted], "o", ms=5, mfc="none", color="tab:blue", label="left out"
            )
        ends = [measured.min() / 1.2, measured.max() * 1.2]
        axis.plot(ends, ends, "-", color="0.3", lw=0.8)
        axis.set(xscale="log", yscale="log", xlabel=f"measured ({chosen[0].unit})", ylabel="predicted")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(f"{goal}: {GOALS[goal][0]}", fontsize=8, wrap=True)
        axis.legend(fontsize=7)
    figure.tight_layout()
    write_picture(figure, path, dpi=110)
    plt.close(figure)
