"""Reports about simdev itself, on small inputs."""

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from simdev.bench.rows import Row, read_rows, write_rows
from simdev.errors import InvalidInput
from simdev.parallel.mesh import Mesh
from simdev.placers import registry
from simdev.placers.testing import training_graph
from simdev.planners import Choice, Outcome
from simdev.problem.placement import Placement
from simdev.problem.placement_file import store_placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim import simulate
from simdev.sim.presets import PRESETS
from simdev.studies import cost_report, perf
from simdev.studies import physics as physics_report
from simdev.studies.cost_report import PlacerTimes
from simdev.studies.physics import FULL, LEAST, CaseTimes, agreements, markdown, matrix, read_cases
from simdev.studies.plan_rankings import (
    CHOSEN,
    GATHERED,
    LARGER,
    LIGHTER,
    LOOPED,
    WIDER,
    Chosen,
    _best_of,
    chosen_lines,
    differences,
    left_out,
    rankings,
)
from simdev.studies.training_runs import Prediction, TrainingRun

# the speed table has a row per contender, size and kind of placement; no test here times anything


def test_rows_and_files(tmp_path):
    rows = perf.measure([40], rounds=1)
    names = {row["contender"] for row in rows}
    assert {"fast", "fast, step time only", "fast, priority", "moves", "reference", "networkx longest path"} <= names
    assert len(rows) == 2 * len(names) and all(row["us"] > 0 for row in rows)
    perf.write(rows, tmp_path / "new")
    with open(tmp_path / "new" / "perf.csv", newline="", encoding="utf-8") as file:
        assert [row["contender"] for row in csv.DictReader(file)] == [row["contender"] for row in rows]
    assert (tmp_path / "new" / "perf.png").read_bytes()[:4] == b"\x89PNG"


def test_placements_leave_the_host_alone():
    problem = Problem.build(training_graph(np.random.default_rng(0), 4), load_topology("p100x4"))
    for how in ("random", "contiguous"):
        rows = perf.placements(np.random.default_rng(0), problem, how)
        assert rows.shape == (perf.PLACEMENTS, problem.graph.n_ops) and rows.dtype == np.int32
        assert set(np.unique(rows)) == {1, 2, 3, 4}
    assert (np.diff(rows, axis=1) != 0).mean() < 0.2


# rankings


def prediction(measured, predicted, batch=8, **sizes):
    cluster = SimpleNamespace(name="c")
    plan = SimpleNamespace(cluster=cluster, mesh=Mesh(sizes), parameters={"length": 4}, sequences=batch)
    return Prediction(TrainingRun("vtrain-single", "row", "m", SimpleNamespace(plan=plan), measured), predicted, 0.0)


def test_regret_and_tau_of_a_group():
    group = [
        prediction(100.0, 90.0, dp_replicate=4),
        prediction(110.0, 80.0, dp_replicate=2, tp=2),  # predicted to be the best
        prediction(150.0, 140.0, tp=4),
        prediction(200.0, 210.0, pp=4),
        prediction(50.0, 10.0, batch=4, pp=4),  # another batch: another group, and too small
    ]
    (found,) = rankings(group)
    assert found.plans == 4
    assert found.regret == pytest.approx(0.10)
    assert found.megatron_regret == 0.0  # no model parallelism
    assert found.tau == pytest.approx(4 / 6)  # one of six pairs is in the wrong order
    assert found.median_regret == pytest.approx(0.30)


def test_the_best_of_random_plans_is_the_mean_over_all_draws():
    from itertools import combinations

    regret = np.array([0.0, 0.3, 0.1, 0.7, 0.2])
    every = [min(draw) for draw in combinations(regret, 3)]
    assert _best_of(regret, 3) == pytest.approx(np.mean(every))


def test_what_a_choice_has_otherwise_and_what_may_explain_it():
    mesh = Mesh({"pp": 2, "dp_replicate": 4, "tp": 8})
    ran = Choice(mesh, 1, "full", "interleaved", 2)
    wide = Choice(Mesh({"pp": 2, "dp_replicate": 16, "tp": 2}), 2, "none", "interleaved", 4)
    assert differences(ran, wide) == [
        "dp_replicate 4 -> 16", "tp 8 -> 2", "microbatch 1 -> 2", "recompute full -> none", "stages per rank 2 -> 4",
    ]  # fmt: skip
    assert left_out(ran, wide) == [WIDER, LIGHTER, LOOPED]
    assert left_out(wide, ran) == [] and differences(ran, ran) == [] == left_out(ran, ran)
    assert left_out(ran, Choice(mesh, 2, "full", "interleaved", 2)) == [LARGER]
    sharded = Choice(Mesh({"pp": 2, "dp_shard": 4, "tp": 8}), 1, "full", "1f1b")
    assert differences(sharded, replace(sharded, reshard="never", reduce_each=True)) == [
        "reduce each False -> True", "reshard always -> never",
    ]  # fmt: skip
    assert left_out(sharded, replace(sharded, reshard="never")) == [GATHERED]
    assert differences(sharded, replace(sharded, stage_layers=(3, 5))) == ["other layers of stages"]


def test_reasons_are_named_where_the_choice_is_quicker():
    choices = Choice(Mesh({"tp": 8}), 1, "full"), Choice(Mesh({"dp_replicate": 8}), 1, "none")
    run = TrainingRun("s", "row 1", "m", None, 2e9)
    ran, fast, slow = (Outcome(c, ns, over, (2**30,)) for c, ns, over in ((choices[0], 100, 0), (choices[1], 90, 0),
                       (choices[1], 110, 7)))  # fmt: skip
    quick, late = (dict(zip(CHOSEN, chosen_lines([Chosen(run, ran, one, 3)])[0], strict=True)) for one in (fast, slow))
    assert quick["quicker %"] == "10.0" and quick["left out of the simulation"] == f"{WIDER}; {LIGHTER}"
    assert late["quicker %"] == "-10.0" and late["left out of the simulation"] == ""
    assert quick["GiB of search"] == "1.0" and late["GiB of search"] == "1.0 (!)" and quick["GPUs"] == "8"
    same = dict(zip(CHOSEN, chosen_lines([Chosen(run, ran, ran, 3)])[0], strict=True))
    assert same["differs"] == "nothing" and same["quicker %"] == "0.0"


# the bench before and after calibration: which placers trade places


def case(before, after, moved):
    return PlacerTimes("w", "t", tuple("abcde"[: len(before)]), *(np.array(times) for times in (before, after, moved)))


def test_pairs_that_trade_places_and_the_regret_of_the_old_favourite():
    one = case([10, 20, 30], [25, 20, 30], [24, 20, 31])
    assert one.changed == 1 and one.kendall == pytest.approx(1 / 3)
    assert one.regret == pytest.approx(0.2)  # a looked best before; its placement takes 24 now, the best 20
    assert case([10, 10, 30], [25, 20, 30], [25, 20, 30]).changed == 0  # a tie is nobody's place
    assert [row[:4] for row in cost_report.ranks([one])] == [
        ["b", "1", "2.0", "1.0"],
        ["a", "1", "1.0", "2.0"],
        ["c", "1", "3.0", "3.0"],
    ]


def test_a_case_of_the_bench(tmp_path):
    placers = ["single-gpu", "single-cpu", "round-robin", "heft", "m-topo", "expert"]
    cases, notes = cost_report.compare(["rnnlm"], ["p100x2"], placers, 1)
    (one,) = cases
    assert one.placers == tuple(placers) and notes == []
    assert [p for p, a, b in zip(placers, one.before, one.after, strict=True) if a == b] == [
        "single-cpu"
    ]  # no device file
    assert one.moved[0] == one.after[0]  # the same placement, whatever the costs
    cost_report.write(cases, ["n"], tmp_path, 1)
    assert "pairs of placers" in (tmp_path / "README.md").read_text() and "* n" in (tmp_path / "README.md").read_text()
    (p100,) = cost_report.sources(["rnnlm"], ["p100-pcie"])
    assert sum(map(float, p100[2:5])) == pytest.approx(100, abs=0.2) and float(p100[3]) > 95
    (k80,) = cost_report.sources(["rnnlm"], ["k80"])
    assert k80[2:5] == ["0.0", "0.0", "100.0"] and k80[5].startswith("mm ")
    assert len((tmp_path / "times.csv").read_text().splitlines()) == 7


def test_a_placer_that_refuses_is_left_out_with_its_reason(tmp_path):
    lines = [
        "from simdev import placer",
        "from simdev.errors import Unsupported",
        "@placer('no', version=1, family='f')",
    ]
    lines += ["def no(problem, *, rng, budget):", "    raise Unsupported('needs a torus')"]
    (tmp_path / "no.py").write_text("\n".join(lines))
    with pytest.raises(InvalidInput, match=r"no, rnnlm on p100x2: needs a torus"):
        cost_report.compare(["rnnlm"], ["p100x2"], [f"{tmp_path / 'no.py'}:no"], 1)


def test_too_few_placers_are_refused():
    with pytest.raises(InvalidInput, match="only 1 placers"):
        cost_report.compare(["rnnlm"], ["p100x2"], ["single-gpu"], 1)


# ranking placements under other rules


TIMES = {FULL: [100, 120, 140, 300, 900]} | {
    "placeto": [10, 20, 30, 40, 50],
    "baechi": [50, 40, 30, 20, 10],
    "load": [20, 10, 30, 40, 50],
    "ideal-links": [7, 7, 7, 7, 7],
}
CASE = CaseTimes("w", "t", tuple("abcde"), {name: np.array(ns) for name, ns in TIMES.items()})


def test_agreement_is_by_rank_and_regret_by_the_full_rules():
    rows = {row.preset: row for row in agreements([CASE])}
    assert [rows["placeto"].kendall, rows["placeto"].spearman] == pytest.approx([1, 1]) and rows["placeto"].regret == 1
    assert [rows["baechi"].kendall, rows["baechi"].kendall_good] == pytest.approx([-1, -1]) and rows[
        "baechi"
    ].regret == 9
    assert rows["baechi"].favourite == "e"
    # one of ten pairs is turned around, one of the three good ones
    assert rows["load"].kendall == pytest.approx(0.8) and rows["load"].kendall_good == pytest.approx(1 / 3)
    assert rows["load"].regret == pytest.approx(1.2)
    assert np.isnan(rows["ideal-links"].kendall) and np.isnan(rows["ideal-links"].spearman)


def test_the_matrix_is_symmetric():
    pairs = matrix([CASE])
    assert pairs["placeto", "baechi"] == pairs["baechi", "placeto"] == pytest.approx(-1)
    text = markdown([CASE], ["w2 on t: too few"])
    assert all(name in text for name in PRESETS) and "too few" in text


def test_a_folder_of_rows_is_timed(tmp_path):
    made = Problem.build(registry.load_workload("inception-v3"), load_topology("p100x2"))
    (tmp_path / "placements").mkdir()
    step, found = {}, []
    for number in range(LEAST):
        devices = np.full(made.graph.n_ops, 1, np.int32)
        devices[made.graph.unit_of_op > made.graph.n_units - 50 * number] = 2
        placement = Placement(devices)
        store_placement(tmp_path, placement)
        schedule = simulate(made, placement)
        step[f"p{number}"] = schedule.step_ns
        key = dict(
            workload="inception-v3", topology="p100x2", rules="fifo/fifo/dataflow", placer=f"p{number}", version=1
        )
        more = dict(params="{}", budget="evaluations=1", seed=0, fingerprint=made.graph.fingerprint, cost_hash="")
        found.append(Row(**key, **more, status="ok", feasible=True, placement=placement.hash))
    write_rows(tmp_path / "results.csv", found)
    (case,), notes = read_cases(tmp_path)
    assert not notes and dict(zip(case.placers, case.ns[FULL].tolist(), strict=True)) == step
    assert (case.ns["ideal-links"] <= case.ns[FULL]).all() and set(case.ns) == {FULL, *PRESETS}


def test_a_folder_without_enough_is_refused(tmp_path):
    write_rows(tmp_path / "results.csv", [])
    with pytest.raises(InvalidInput, match="no case"):
        read_cases(tmp_path)


def test_writes_three_files(tmp_path):
    physics_report.write([CASE], [], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "physics.csv", "times.csv"}
    assert len((tmp_path / "times.csv").read_text().splitlines()) == 6


def test_the_stored_report_ranks_the_placements_of_the_board_of_today():
    boards = Path(__file__).parents[2] / "leaderboard"
    stored: dict[tuple[str, str], set[str]] = {}
    for row in read_rows(boards / "standard" / "results.csv"):
        if row.status == "ok" and row.feasible and row.rules == "fifo/fifo/dataflow":
            stored.setdefault((row.workload, row.topology), set()).add(row.placement)
    with (boards / "physics" / "times.csv").open(encoding="utf-8") as file:
        ranked = Counter((line["workload"], line["topology"]) for line in csv.DictReader(file))
    assert ranked == {case: len(found) for case, found in stored.items()}, "simdev study physics-report"


def test_rows_of_earlier_code_stay_in_the_table_and_say_so(tmp_path, monkeypatch):
    from simdev.studies import any_model

    monkeypatch.setattr(any_model, "code", lambda: "these libraries")
    same = {"table": "published", "seconds": 1.0, "refused": "no memory"}
    rows = [{**same, "name": name, "code": code} for name, code in (
        ("Phi-4", "older libraries"), ("Qwen3 8B", "older libraries"), ("Qwen3 8B", "these libraries"))]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    names = ["Phi-4", "Qwen3 8B", "MPT 7B"]
    found, left = any_model.study(tmp_path, ["published"], names, lambda *_: None, seconds=0)
    assert {row["name"]: row["code"] for row in found} == {
        "Qwen3 8B": "these libraries", "Phi-4": "older libraries"}  # fmt: skip
    assert left == 2, "one was never computed, and one by other code"
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| Phi-4<sup>1</sup> |" in page and "| Qwen3 8B |" in page
    assert "<sup>1</sup> computed with older libraries." in page
