"""The leaderboard in the repository still follows from the shipped graphs, machines, costs and engines."""

import json
import re
from pathlib import Path

import pytest

from simdev.bench import rows, score
from simdev.bench.run import load_problem
from simdev.bench.verify import verify
from simdev.problem.placement_file import placement_file, stored_placement

FOLDER = Path(__file__).parents[2] / "leaderboard" / "standard"
ORDER, LONG = FOLDER.parent / "order", FOLDER.parent / "long"


def test_it_covers_eight_workloads_on_three_machines_with_every_classical_placer():
    found = rows.read_rows(FOLDER / "results.csv")
    assert len({row.workload for row in found}) >= 8 and len({row.topology for row in found}) >= 3
    placers = {row.placer for row in found}
    runs = {(row.workload, row.topology, row.placer) for row in found}
    assert len(runs) == len(placers) * len({(row.workload, row.topology) for row in found})
    assert {
        "single-cpu", "single-gpu", "random", "round-robin", "m-topo", "expert", "scotch", "min-cut", "heft", "peft",
        "m-etf", "m-sct", "critical-path", "local-search", "annealing", "genetic", "portfolio",
    } <= placers  # fmt: skip


def test_no_placement_beats_its_bound_and_every_placement_is_there():
    for row in rows.read_rows(FOLDER / "results.csv"):
        if row.status == "ok":
            assert placement_file(FOLDER, row.placement).is_file()
            assert row.lower_bound_ns <= row.simulated_ns or not row.feasible


def test_the_costs_of_each_machine_are_those_of_its_rows():
    for row in {row.topology: row for row in rows.read_rows(FOLDER / "results.csv") if row.workload == "dlrm"}.values():
        assert load_problem(row.workload, row.topology, row.rules).costs.hash == row.cost_hash, row.topology


def result_table(text):
    """The first table of a page that has a column "placer": its workloads, and its lines by their first cell."""
    head, _, *lines = re.search(r"^\| placer \|.*\n(?:\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    _, _, *workloads, _, _, _ = (cell.strip() for cell in head.split("|"))
    return workloads, {line.split("|")[1].strip(" `"): line for line in lines}


def expected_lines(workloads, topology="p100x4"):
    """The lines of such a table as they follow from the rows: step times in ms, mean ratio to the best, what fits."""
    found = rows.read_rows(FOLDER / "results.csv")
    case = {(line["workload"], entry(line)): line for line in score.leaderboard(found) if line["topology"] == topology}
    lines = {}
    for place in score.ranking(found):
        name = entry(place)
        cells = [milliseconds(case[workload, name], "step_time_s") for workload in workloads]
        cells += [f"{float(place['geomean_ratio_to_best']):.3f}", f"{place['solved']}/{place['instances']}"]
        lines[name] = f"| `{name}` | {' | '.join(cells)} |"
    bounds = [milliseconds(case[workload, "single-gpu"], "lower_bound_s") for workload in workloads]
    lines["proven lower bound"] = f"| proven lower bound | {' | '.join(bounds)} | | |"
    return lines


def entry(line):
    """The placer of a line with its parameters, as on a command line."""
    parameters = json.loads(line["params"])
    return line["placer"] + f"[{','.join(f'{key}={value}' for key, value in parameters.items())}]" * bool(parameters)


def milliseconds(line, column):
    value = float(line[column] or "nan") * 1e3
    return line["status"].upper() if value != value else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def test_the_tables_of_readme_and_docs_follow_from_the_rows():
    root = FOLDER.parents[1]
    for page, whole in (("README.md", False), ("docs/pages/results.md", True)):
        workloads, lines = result_table((root / page).read_text(encoding="utf-8"))
        expected = expected_lines(workloads)
        assert {name: expected[name] for name in lines} == lines, "\n".join(expected.values())
        assert not whole or list(lines) == list(expected)


@pytest.mark.slow
def test_a_sample_of_its_rows_holds():
    differences = verify(FOLDER, engine="fast", sample=24, jobs=2)
    assert not differences, [str(difference) for difference in differences]


def best_times(folder):
    """The shortest step time of each case of a board, ns."""
    best = {}
    for row in rows.read_rows(folder / "results.csv"):
        if row.step_ns is not None:
            case = row.workload, row.topology
            best[case] = min(row.step_ns, best.get(case, row.step_ns))
    return best


def test_the_order_track_loses_no_result_of_fifo():
    """On these machines a placement can repeat its schedule of ``fifo``, so the best known result is never slower."""
    best, found = best_times(FOLDER), rows.read_rows(ORDER / "results.csv")
    assert {row.rules for row in found} == {"priority/fifo/dataflow"}
    for row in found:
        assert row.status == "ok" and row.feasible and row.lower_bound_ns <= row.step_ns, row
        assert stored_placement(ORDER, row.placement).priority is not None
    found = best_times(ORDER)
    assert found.keys() == best.keys()
    assert {case: ns for case, ns in found.items() if ns > best[case]} == {}


def test_long_searches_beat_the_standard_board_under_its_own_rules():
    best, found = best_times(FOLDER), rows.read_rows(LONG / "results.csv")
    assert {row.rules for row in found} == {"fifo/fifo/dataflow"}
    for row in found:
        assert row.status == "ok" and row.lower_bound_ns <= row.step_ns, row
    assert {case: ns for case, ns in best_times(LONG).items() if ns > best[case]} == {}


@pytest.mark.parametrize("folder", [ORDER, LONG], ids=lambda folder: folder.name)
def test_rows_of_the_searched_boards_hold(folder):
    assert not verify(folder, engine="fast", sample=6, jobs=1)
