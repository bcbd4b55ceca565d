"""The report on measured and simulated placements: tables, figures, pictures."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput, quoted
from simdev.files import guarded, parse_json, read_json, read_text, write_text

MEASURED = {
    "placement",
    "unit_devices",
    "measured_ns",
    "samples_ns",
    "ops_ns",
    "channel_ns",
    "copies_ns",
    "gaps_ns",
    "peak_bytes",
}


# Column of the report -> name of the figure, and its format in the report (figures.csv holds plain numbers).
COLUMNS = {
    "graph": ("graph", ""), "predictor": ("predictor", ""), "placements": ("placements", ""),
    "step ms": ("step_ms", ".0f"), "noise": ("noise", ".1%"), "error": ("error", ".1%"), "worst": ("worst", ".1%"),
    "bias": ("bias", "+.1%"), "tau": ("tau", ".3f"), "tau p10": ("tau_p10", ".3f"),
    "tau noise": ("tau_noise", ".3f"), "pairs": ("pairs", ".1%"), "regret": ("regret", ".1%"),
    "peak error": ("peak_error", ".1%"), "missed OOM": ("missed", ".1%"), "false alarms": ("false_alarms", ".1%"),
}  # fmt: skip


PREDICTORS = {"simulated_ns": "model", "machine_ns": "model + machine"}  # simulate, simulate_workers


# Cells with numbers, and those of them that hold a list.
LISTS = {"samples_ns", "peak_bytes", "simulated_peak_bytes"}
TEXTS = {"graph", "placement", "unit_devices", "name"}
PREDICTED = {*PREDICTORS, "simulated_peak_bytes"}
NUMBERS = LISTS | {"round", "disturbed", *(key for key in MEASURED if key.endswith("_ns")), *PREDICTORS}
PARTS = {"ops": "#d62728", "channel": "#1f77b4", "copies": "#9467bd", "dispatch": "#7f7f7f", "rest": "#c7c7c7"}


def report(folders: list[Path], out: Path) -> list[dict[str, str]]:
    """Write one report over several comparisons, and return the lines of its table.

    ``folders`` are those of :func:`~simdev.measure.compare.compare_placements`. ``out`` receives ``report.md``,
    ``figures.csv``, ``scatter.png`` and ``parts.png``. Raises :class:`InvalidInput` if no folder has rows.
    """
    from simdev.measure.execute.figures import error_parts, figures, over_rounds

    found, loads = {}, {}
    for folder in folders:
        about, cases = read_comparisons(folder)
        for graph, rows in cases.items():
            found[graph] = over_rounds([row for row in rows if "simulated_ns" in row])
            loads[graph] = about[graph]["loaded"]
    if not found:
        raise InvalidInput("the folder holds no cases.jsonl", source=folders[0])
    lines, parts = [], {}
    for graph, rows in found.items():
        parts[graph] = error_parts(rows)
        step_ms = float(np.median([row["measured_ns"] for row in rows]) / 1e6)
        for key, predictor in PREDICTORS.items():
            got = {**figures(rows, key), "graph": graph.partition("[")[0], "predictor": predictor, "step_ms": step_ms}
            lines.append({column: got[name] for column, (name, _) in COLUMNS.items()})
    out.mkdir(parents=True, exist_ok=True)
    _draw_scatter(found, out / "scatter.png")
    _draw_parts(parts, out / "parts.png")
    _write_figures(lines, out / "figures.csv")
    cells = [{column: format(line[column], form) for column, (_, form) in COLUMNS.items()} for line in lines]
    write_text(out / "report.md", _markdown(cells, parts, loads))
    return cells


def read_comparisons(folder: Path) -> tuple[dict[str, dict], dict[str, list[dict]]]:
    """What ``about.json`` says of each graph, and the rows of ``cases.jsonl`` of each graph, none if there are no such
    files. In a folder of one graph, as earlier versions wrote it, rows need not name the graph."""
    path = folder / "cases.jsonl"
    rows = read_rows(path)
    about = read_about(folder / "about.json") if rows or (folder / "about.json").exists() else {}
    only = next(iter(about)) if len(about) == 1 else None
    found: dict[str, list[dict]] = {}
    for number, row in enumerate(rows, 1):
        graph = row.get("graph", only)
        if graph not in about:
            raise InvalidInput("about.json has no such graph", source=path, field=f"line {number}: graph")
        found.setdefault(graph, []).append(row)
    return about, found


def read_about(path: Path) -> dict[str, dict]:
    """For each graph what ``about.json`` says of it: at least ``loaded``, the slowdown beside a busy neighbour."""
    try:
        about = read_json(path)
        about = {about["graph"]: about} if "loaded" in about else about
        return {str(graph): {**found, "loaded": float(found["loaded"])} for graph, found in about.items()}
    except (AttributeError, ValueError, KeyError, TypeError, OverflowError):
        raise InvalidInput(
            "expected JSON with graphs and loaded, as simdev study compare-real writes it", source=path
        ) from None


def read_rows(path: Path) -> list[dict]:
    """The rows of ``cases.jsonl``, none if there is no such file. Raises :class:`InvalidInput` that names the line."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        row = parse_json(line, path, f"line {number}")
        missing = MEASURED - set(row) if isinstance(row, dict) else MEASURED
        if not missing and "simulated_ns" in row:
            missing = PREDICTED - set(row)
        if missing:
            raise InvalidInput(f"missing: {', '.join(sorted(missing))}", source=path, field=f"line {number}")
        for key in row.keys() & TEXTS:
            if not isinstance(row[key], str):
                raise InvalidInput(f"{quoted(row[key])} is no text", source=path, field=f"line {number}: {key}")
        for key in row.keys() & NUMBERS:
            if not _numbers(row[key], key in LISTS):
                raise InvalidInput(f"{quoted(row[key])} is no time or size", source=path, field=f"line {number}: {key}")
        rows.append(row)
    return rows


def _numbers(value: object, several: bool) -> bool:
    """Whether a cell is a number of at least 0 that a double holds, or a list of such numbers."""
    if several:
        return isinstance(value, list) and bool(value) and all(_numbers(one, False) for one in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _write_figures(lines: list[dict], path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            rounded = {column: round(x, 5) if isinstance(x, float) else guarded(x) for column, x in line.items()}
            writer.writerow(rounded)


def _markdown(lines: list[dict[str, str]], parts: dict[str, dict[str, float]], loads: dict[str, float]) -> str:
    def table(header, rows):
        return ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]

    text = [
        "# Simulated against measured",
        "",
        *table(list(lines[0]), [list(line.values()) for line in lines]),
        "",
        "![Simulated against measured step times](scatter.png)",
        "",
        "## The parts of the error",
        "",
        "Each part is a mean signed share of the measured step. The parts add up to the bias.",
        "",
    ]
    text += table(
        ["graph", *PARTS],
        [[graph.partition("[")[0], *(f"{part[key]:+.1%}" for key in PARTS)] for graph, part in parts.items()],
    )
    text += [
        "",
        "Slowdown of the ops beside a core that runs the same step, summed over the step: "
        + ", ".join(f"{graph.partition('[')[0]} {load:+.1%}" for graph, load in loads.items())
        + ".",
    ]
    return "\n".join([*text, "", "![Parts of the error](parts.png)", ""])


def _draw_scatter(found: dict[str, list[dict]], path: Path) -> None:
    from matplotlib.figure import Figure

    columns = min(4, len(found))
    down = -(-len(found) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.4 * down), layout="constrained")
    for number, (graph, rows) in enumerate(found.items(), 1):
        axes = figure.add_subplot(down, columns, number)
        measured = np.array([row["measured_ns"] for row in rows]) / 1e6
        low, high = np.transpose([np.percentile(row["samples_ns"], [10, 90]) / 1e6 for row in rows])
        for (key, label), colour in zip(PREDICTORS.items(), ("#1f77b4", "#d62728"), strict=True):
            predicted = np.array([row[key] for row in rows]) / 1e6
            reach = [np.maximum(measured - low, 0), np.maximum(high - measured, 0)]
            axes.errorbar(measured, predicted, xerr=reach, fmt="o", ms=3, lw=0.5, color=colour, label=label)
        ends = [0.9 * min(measured.min(), predicted.min()), 1.05 * max(measured.max(), predicted.max())]
        axes.plot(ends, ends, color="black", lw=0.8)
        axes.set_title(graph.partition("[")[0], fontsize=9)
        axes.set_xlabel("measured step, ms (bar: 10 to 90 % of repeats)", fontsize=7)
        axes.set_ylabel("simulated step, ms", fontsize=7)
        axes.tick_params(labelsize=7)
        if number == 1:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def _draw_parts(parts: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.5 * len(parts) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for row, part in enumerate(parts.values()):
        ends = {True: 0.0, False: 0.0}
        for label, colour in PARTS.items():
            share = part[label]
            axes.barh(row, 100 * share, left=100 * ends[share > 0], color=colour, label=label if not row else None)
            ends[share > 0] += share
    axes.set_yticks(range(len(parts)), [graph.partition("[")[0] for graph in parts], fontsize=8)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_xlabel("simulated minus measured, % of the measured step, mean over placements")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
