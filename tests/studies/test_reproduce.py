"""The experiments' arithmetic by hand, and the smallest of them from end to end."""

import json
import math
import re
from pathlib import Path

import drawn
import numpy as np
import pytest
import small_board

from simdev.bench.bench import Observer
from simdev.errors import InvalidInput, UnknownName
from simdev.placers.registry import find_placer, placers
from simdev.problem.placement import Placement
from simdev.sim.simulator import Simulator
from simdev.studies.reproduce import ablations, gdp, lab, learned, mirhoseini, placeto, reproduce
from simdev.studies.reproduce.lab import VERSIONS, Lab, LabCase, RunResult
from simdev.studies.reproduce.speed import TimedBudget


def found(placer, points, *, seed=0, workload="w", params="{}"):
    step_ns = points[-1][2] if points else None
    fields = {"workload": workload, "params": params, "budget": "evaluations=9", "evaluations": 9}
    row = small_board.row(placer, step_ns, seed=seed, **fields)
    return RunResult(row, tuple(points))


def test_intervals():
    assert lab.interval([3.0]) == (3.0, 3.0, 3.0)
    mean, low, high = lab.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0 and 1.0 < low < 2.5 and 3.5 < high < 5.0
    assert lab.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (mean, low, high)
    assert all(math.isnan(value) for value in lab.interval([]))
    assert lab.geometric([1.0, 4.0])[0] == pytest.approx(2.0)
    assert (
        lab.interval_text((1234.5, 1.0, 2000.0), 0) == "1,234 [1, 2,000]" and lab.interval_text(lab.interval([])) == "-"
    )


def test_evaluations_until_a_target():
    points = [(1, 0.1, 100), (5, 0.2, 80), (9, 0.3, 70)]
    assert [lab.evaluations_to(points, target) for target in (200, 80, 79.5, 60)] == [1, 5, 9, None]
    assert [lab.best_at(points, used) for used in (0, 1, 8, 50)] == [None, 100, 80, 70]


def test_the_papers_own_numbers_have_the_papers_signs():
    lines = mirhoseini.signs(mirhoseini.PAPER)
    assert len(lines) == 28
    no = {(line["finding"], line["workload"], line["GPUs"]) for line in lines if line["holds"] != "yes"}
    assert not no


def test_signs_change_with_the_numbers():
    numbers = {("inception-v3", 4): (26.0, 4.6, 4.0, 5.0, None, 4.58)}
    assert {line["finding"]: line["holds"] for line in mirhoseini.signs(numbers)} == {
        "Scotch is slower than one GPU": "no",
        "min-cut is slower than one GPU": "yes",
        "the expert is slower than one GPU": "-",
        "four GPUs beat one": "no",
    }


def test_evaluations_needed_by_hand():
    runs = [
        found("placeto", [(1, 0, 90_000_000), (2, 0, 50_000_000)]),
        found("colocrl", [(4, 0, 90_000_000), (8, 0, 60_000_000)]),
        found("colocrl", [(6, 0, 80_000_000)], seed=1),
    ]
    lines = {line["placer"]: line for line in placeto.evaluations_needed("w", runs, 10)}
    assert lines["placeto"]["target, ms"] == "70.0"  # the mean of colocrl's 60 and 80
    assert lines["placeto"]["evaluations"] == "2 [2, 2]" and lines["placeto"]["reached by"] == "1/1"
    assert lines["colocrl"]["evaluations"].startswith("9 ") and lines["colocrl"]["reached by"] == "1/2"  # (8 + 10) / 2
    assert lines["colocrl"]["times placeto's"] == "4.50" and "hdp" not in lines


def test_ratios_to_the_best_known_by_hand():
    runs = {
        "a": [found("a", [(1, 0, 100)], workload=w, seed=s) for w in "xy" for s in (0, 1)],
        "b": [found("b", [(1, 0, 400)], workload="x"), found("b", [], workload="y")],
    }
    ratios = placeto.ratios_to_best(runs)
    assert ratios["a"] == [1.0, 1.0] and ratios["b"] == [pytest.approx(math.sqrt(4 * 10))]


def test_a_shorter_run_by_its_curve():
    (cut,) = gdp._cut([found("gdp", [(1, 0, 100), (5, 0, 80)])], 4)
    assert cut.step_ms == 100 / 1e6 and len(cut.points) == 1
    (none,) = gdp._cut([found("gdp", [(5, 0, 80)])], 4)
    assert none.points == () and math.isnan(none.step_ms)


class Recorder(Observer):
    def __init__(self):
        self.rows = []

    def row(self, done, total, row):
        self.rows.append((row.placer, row.seed))


def test_runs_are_kept_and_not_made_twice(tmp_path):
    observer = Recorder()
    for _ in range(2):
        with Lab(tmp_path, mirhoseini.SIZES["tiny"], observer) as lab:
            runs = lab.runs([LabCase("transformer-xl-2", "p100x4")], ["single-gpu", "local-search"], 5, 2)
    assert observer.rows == [("local-search", 0), ("local-search", 1), ("single-gpu", 0)]
    assert [run.row.placer for run in runs] == ["local-search", "local-search", "single-gpu"]
    assert runs[0].points[-1] == (5, runs[0].row.place_seconds, runs[0].row.step_ns)
    assert (tmp_path / "results.csv").is_file()


def test_graphs_without_a_name_are_kept_beside_the_results(tmp_path):
    from simdev.graphs.random_graphs import family_graph

    graph = family_graph("inception", 0)
    with Lab(tmp_path, mirhoseini.SIZES["tiny"], Observer()) as lab:
        (run,) = lab.runs([LabCase("inception-0.npz", "p100x4", graph)], ["single-gpu"], 1, 1)
    assert run.row.workload == "inception-0.npz" and run.row.step_ns
    assert (tmp_path / "graphs" / f"{graph.fingerprint}.npz").is_file()


def test_trainings_of_two_lengths_are_two_policies(tmp_path, monkeypatch):
    names = []
    with Lab(tmp_path, lab.Size(), Observer()) as folder:
        monkeypatch.setattr(folder, "policy", lambda name, *_, **__: names.append(name) or name)
        monkeypatch.setattr(folder, "runs", lambda *_: [])
        for evaluations in (60, 600):
            folder.trained("placeto", "nmt", [], [], seeds=2, evaluations=evaluations, tuning=1)
    assert len(set(names)) == 4


def test_unknown_experiments_and_scales(tmp_path):
    with pytest.raises(UnknownName, match="did you mean 'placeto'"):
        reproduce("placetto", tmp_path)
    with pytest.raises(UnknownName, match="small"):
        reproduce("gdp", tmp_path, scale="smal")


@pytest.mark.slow
def test_the_smallest_experiment_from_end_to_end(tmp_path):
    report = reproduce("mirhoseini", tmp_path, scale="tiny").read_text()
    assert "| rnnlm | 2 |" in report and "What a crossing would have to cost" in report
    tables = [line.partition(",")[0] for line in (tmp_path / "tables.csv").read_text().splitlines()[1:]]
    assert {"table1-dataflow", "signs", "dear-crossings"} <= set(tables)
    assert (tmp_path / "curves-eager.png").stat().st_size > 100
    assert {json.loads(line)["kind"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()} == {"row"}


def test_tarnawski_needs_the_folder_of_its_inputs(tmp_path):
    with pytest.raises(InvalidInput, match="tarnawski: needs the folder of its public inputs"):
        reproduce("tarnawski", tmp_path / "out", scale="tiny")
    with pytest.raises(InvalidInput, match="speed: takes no folder"):
        reproduce("speed", tmp_path / "out", scale="tiny", data=tmp_path)
    with pytest.raises(InvalidInput, match="holds no throughput-inputs"):
        reproduce("tarnawski", tmp_path / "out", scale="tiny", data=tmp_path)


def test_tarnawski_makes_its_tables_and_resumes(tmp_path):
    for folder in ("throughput-inputs", "latency-inputs"):
        (tmp_path / folder / "LayerGraphs").mkdir(parents=True)
        nodes = [
            {"id": i, "cpuLatency": 20, "fpgaLatency": 2, "supportedOnFpga": 1, "size": 1, "isBackwardNode": 0}
            for i in range(4)
        ]
        edges = [{"sourceId": i, "destId": i + 1, "cost": 1} for i in range(3)]
        document = {"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 3, "nodes": nodes, "edges": edges}
        (tmp_path / folder / "LayerGraphs" / "toy_inference.json").write_text(json.dumps(document))
    (tmp_path / "human-experts").mkdir()
    split = {"fpgas": [{"nodes": [0, 1, 2]}, {"nodes": [3]}], "cpus": []}
    (tmp_path / "human-experts" / "toy_inference_expert.json").write_text(json.dumps(split))
    report = reproduce("tarnawski", tmp_path / "out", scale="tiny", data=tmp_path).read_text()
    row = "| LayerGraphs/toy_inference | 4 | 2 | 8 OOM | 7 | 5 | 5 | 5 | "
    assert row in report and "| 5 | 5 | proven |" in report
    assert "| LayerGraphs/toy_inference | 4 | 2 | 80 | 10 | 10 | 10 | 10 | proven | 10 | 10 | proven |" in report
    for kept in (tmp_path / "out" / "instances").glob("throughput*.json"):
        kept.write_text(kept.read_text().replace('"7"', '"77"'))
    assert "| 77 |" in reproduce("tarnawski", tmp_path / "out", scale="tiny", data=tmp_path).read_text()


# the controls of the learned search: the tables by hand, and the smallest study from end to end

SIZE = learned.Size(
    evaluations=9, seeds=1, workloads=("w",), workloads_of_all_seeds=("w",), topologies=("t",), checkpoints=(5, 9)
)


def test_the_tables_by_hand():
    runs = {
        learned.LEARNED: [found("learned-search", [(1, 0, 400), (6, 0, 100)])],
        "portfolio": [found("portfolio", [(1, 0, 200)])],
        "single-gpu": [found("single-gpu", [(0, 0, 300)])],
    }
    best = learned.best_known(runs)
    assert best == {("w", "t"): 100 / 1e6}
    mine, other = learned.ratios_of(runs, best, SIZE, "portfolio")
    assert mine["placer"] == "`learned-search`" and mine["ratio after 5"].startswith("4.000 ")
    assert mine["ratio after 9"].startswith("1.000 ")
    assert (mine["shorter than portfolio"], mine["longer"]) == ("1 of 1", 0)
    assert (other["shorter than portfolio"], other["longer"]) == ("0 of 1", 0)
    (line,) = learned.families(runs, best, SIZE)
    assert line == {
        "workload": "w",
        "worst after 5": "4.000",
        "worst after 9": "1.000",
        "least speedup over one GPU": "3.00",
    }


def test_what_does_not_fit_counts_as_ten():
    fits, never = found("a", [(1, 0, 100)]), found("b", [])
    best = learned.best_known({"a": [fits], "b": [never]})
    assert (
        learned.ratio(never, best, 9) == 10 and learned.ratio(fits, best, 0) == 10 and learned.ratio(fits, best, 1) == 1
    )
    runs = {learned.LEARNED: [fits], "single-gpu": [never]}
    assert learned.families(runs, best, SIZE)[0]["least speedup over one GPU"] == ""


def test_the_smallest_study_from_end_to_end(tmp_path):
    report = reproduce("learned", tmp_path, scale="tiny").read_text()
    assert "`learned-search[choice=untrained]`" in report and "| transformer-xl-2 |" in report
    tables = [line.partition(",")[0] for line in (tmp_path / "tables.csv").read_text().splitlines()[1:]]
    assert list(dict.fromkeys(tables)) == ["board", "families", "controls"]


def test_the_simulators_share_of_a_search_counts_its_moves():
    problem = drawn.problem(drawn.chain(10, 10), drawn.machine(), [100, 100])
    for spend in (
        lambda budget: budget.evaluate(np.zeros(2, int)),
        lambda budget: budget.move(Simulator(problem, Placement(np.zeros(2, int))), np.array([0]), np.array([1])),
    ):
        budget = TimedBudget(problem, evaluations=1)
        spend(budget)
        assert budget.simulating_s > 0 and budget.used == 1


# ablations: the table by hand, and the parameters that they name


def test_the_table_of_an_ablation_by_hand(monkeypatch):
    entries = ("gdp", "gdp[edits=0.0]", "group-climb")
    monkeypatch.setattr(ablations, "PAPERS", {"gdp": ("Zhou et al.", "What it does.", entries)})
    runs = [found("gdp", [(1, 0, 2_000_000)]), found("gdp", [(1, 0, 4_000_000)], seed=1)]
    runs += [
        found("gdp", [(1, 0, 5_000_000)], params='{"edits": 0.0}'),
        found("gdp", [], seed=1, params='{"edits": 0.0}'),
    ]
    runs += [found("group-climb", [(1, 0, 1_000_000)])]

    class Stub:
        size = lab.Size(
            evaluations=9, seeds=2, workloads=("w",), topologies=("t",), papers=("gdp",), batches=("w",), unequal="u"
        )

        def runs(self, cases, planned, evaluations, seeds):
            assert ([case.label for case in cases], planned, evaluations, seeds) == (["w on t"], entries, 9, 2)
            return runs

        def table(self, name, lines):
            return json.dumps(lines)

    parts = ablations.run(Stub())
    next(parts)
    title, _, table = next(parts)
    assert title == "## `gdp` (Zhou et al.)\n"
    assert [list(line.values()) for line in json.loads(table)] == [
        ["`gdp`", "3.0 [2.0, 4.0]"], ["`gdp[edits=0.0]`", "fits in 1 of 2"], ["`group-climb`", "1.0 [1.0, 1.0]"]
    ]  # fmt: skip


def test_ablations_change_parameters_that_the_placers_have():
    for name, (_, _, entries) in ablations.PAPERS.items():
        assert entries[0] == name and len(set(entries)) == len(entries)
        for entry in entries:
            spec, params = find_placer(entry)
            assert all(spec.defaults[key] != value for key, value in params.items()), entry


REPRODUCED = Path(__file__).parents[2] / "leaderboard" / "reproduced"


def older(report: Path) -> dict[str, tuple[int, int | None]]:
    """The placers of a stored report that have changed since: the version that the report states, and the version now,
    None if the placer is gone. Empty for a report without placers."""
    line = next((line for line in report.read_text(encoding="utf-8").splitlines() if line.startswith(VERSIONS)), "")
    made = {name: int(number) for name, number in re.findall(r"([\w-]+) (\d+)[,.]", line.removeprefix(VERSIONS))}
    now = {name: spec.version for name, spec in placers().items()}
    return {name: (number, now.get(name)) for name, number in made.items() if now.get(name) != number}


def test_reports_that_are_older_than_the_code_are_named():
    """A report of changed placers is made again, or the README says which of its placers have changed."""
    text = (REPRODUCED / "README.md").read_text(encoding="utf-8")
    for report in sorted(REPRODUCED.glob("*/README.md")):
        stale = ", ".join(f"`{name}` {made}" for name, (made, _) in sorted(older(report).items()))
        named = re.findall(rf"^\| {report.parent.name} \| (`.*) \|$", text, re.MULTILINE)
        assert named == [stale] * bool(stale), report.parent.name
        assert " --scale full`." in report.read_text(encoding="utf-8").splitlines()[2], report.parent.name
        assert VERSIONS in report.read_text(encoding="utf-8") or report.parent.name in ("piper", "tarnawski"), (
            "which have no placers"
        )


def test_what_is_older_than_the_code(tmp_path):
    report = tmp_path / "README.md"
    report.write_text(f"# Title\n\n{VERSIONS} expert 1, gone 2, placeto 1, single-gpu 1.\n")
    assert older(report) == {"gone": (2, None), "placeto": (1, find_placer("placeto")[0].version)}
    report.write_text("# Title\n")
    assert older(report) == {}
