"""What reports say: critical chains, memory over time, summaries of graphs and machines, curves. Traces follow the
Trace Event Format: every box is on a named track, every arrow begins and ends in a box."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_board
from PIL import Image

from simdev import sim
from simdev.bench import rows, score
from simdev.bench.journal import CURVES
from simdev.cli import main as cli
from simdev.errors import InvalidInput, UnknownName
from simdev.placers.testing import random_placement, random_problem
from simdev.problem.costs import CostModel
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology, topology_names
from simdev.report import curve
from simdev.report.describe import (
    describe_topology,
    draw_topology,
    graph_text,
    peak_bytes,
    summarise_graph,
    topology_text,
)
from simdev.report.explain import REASONS, Explanation, explain
from simdev.report.perfetto import trace_events, write_trace
from simdev.report.timeline import draw, draw_before, modules, sentence
from simdev.sim import simulate
from simdev.sim.plot import merged

BOARDS = Path(__file__).parents[2] / "leaderboard"
KIND = DeviceKind("tiny", 1 << 20, {"f32": 1e12}, 1e11)


def two_devices(durations, edges, devices, transfer_bytes=10**6):
    """A problem with the given op durations (ns), one slot, and a link of 1 byte/ns without latency."""
    builder, outputs = GraphBuilder("hand"), {}
    for op in range(len(durations)):
        inputs = [outputs[source] for source, target in edges if target == op]
        number = builder.op(f"op{op}", "mm", inputs=inputs, flops=1, outputs=[transfer_bytes])
        (outputs[op],) = builder.outputs(number)
    topology = Topology("pair", (Device("a", KIND), Device("b", KIND)), (Link(("a", "b"), 10**9, 0),))
    problem = Problem.build(builder.build(), topology)
    op_ns = np.array([durations] * len(problem.costs.op_ns), np.int64)
    problem = replace(problem, costs=replace(problem.costs, op_ns=op_ns))
    placement = Placement(np.array(devices, np.int32))
    return Explanation(problem, placement, sim.simulate(problem, placement))


def test_chain_by_hand():
    """op0 (5) and op1 (7) share device a; op1's output (1 ms) goes to op2 (3) on b."""
    explanation = two_devices([5, 7, 3], [(1, 2)], [0, 0, 1])
    assert [(link.reason, link.item, link.end_ns - link.begin_ns) for link in explanation.chain] == [
        ("device", 0, 5),
        ("compute", 1, 7),
        ("transfer", 0, 10**6),
        ("compute", 2, 3),
    ]
    assert explanation.attribution == {"compute": 10, "device": 5, "transfer": 10**6, "link": 0, "launch": 0}


def test_a_transfer_that_waits_for_another():
    """Both outputs of device a cross one link; the second waits for the first."""
    explanation = two_devices([5, 7, 3, 4], [(0, 2), (1, 3)], [0, 0, 1, 1])
    assert explanation.attribution["link"] == 10**6 and explanation.attribution["transfer"] == 10**6


@pytest.mark.parametrize("contention", ["fifo", "none", "fair"])
@pytest.mark.parametrize("runtime", ["dataflow", "eager"])
@pytest.mark.parametrize("policy", ["fifo", "priority", "program"])
def test_chain_covers_the_step_and_memory_has_its_peak(policy, runtime, contention):
    rules = Rules(policy, contention, runtime)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, rules=rules)
        placement = random_placement(rng, problem)
        schedule = sim.simulate(problem, placement)
        explanation = Explanation(problem, placement, schedule)
        assert sum(explanation.attribution.values()) == schedule.step_ns
        ends = [link.end_ns for link in explanation.chain]
        assert [link.begin_ns for link in explanation.chain[1:]] == ends[:-1] and ends[-1] == schedule.step_ns
        for device in range(problem.topology.n_devices):
            times, used = explanation.memory(device)
            assert used.max() == schedule.peak_bytes[device] and (np.diff(times) > 0).all()


def test_a_move_that_helps_is_named_with_what_it_saves():
    explanation = two_devices([10**7, 10**7, 1], [(0, 2), (1, 2)], [0, 0, 0])
    (best, *_) = [finding for finding in explain(explanation) if finding.text.startswith("moving")]
    moved = Placement(np.array([1 if "'op0'" in best.text else 0, 1 if "'op1'" in best.text else 0, 0], np.int32))
    assert explanation.schedule.step_ns - sim.simulate(explanation.problem, moved).step_ns == best.ns > 0


def test_the_last_finding_is_about_a_change_that_was_tried():
    cut = two_devices([10**7, 10**7], [(0, 1)], [0, 1])  # together, the ops need no transfer
    assert "saves" in explain(cut)[-1].text or "would save" in explain(cut)[-1].text
    best = two_devices([10**7, 10**7], [(0, 1)], [0, 0])
    assert explain(best)[-1].text == "none of 2 tried moves of ops and layers of the chain helps"


def test_a_whole_layer_moves_where_no_single_op_helps():
    """The layer's ops exchange so much that only both together gain by leaving the busy device."""
    builder = GraphBuilder("hand")
    (x,) = builder.outputs(builder.op("first", "mm", inputs=[], flops=1, outputs=[1]))
    for branch in ("left", "right"):
        (y,) = builder.outputs(builder.op(f"{branch}0", "mm", inputs=[x], flops=1, outputs=[10**9], layer=branch))
        builder.op(f"{branch}1", "mm", inputs=[y], flops=1, outputs=[1], layer=branch)
    topology = Topology("pair", (Device("a", KIND), Device("b", KIND)), (Link(("a", "b"), 10**9, 0),))
    problem = Problem.build(builder.build(), topology)
    op_ns = np.full_like(problem.costs.op_ns, 10**7)
    problem = replace(problem, costs=replace(problem.costs, op_ns=op_ns))
    placement = Placement(np.zeros(5, np.int32))
    findings = explain(Explanation(problem, placement, sim.simulate(problem, placement)))
    (move,) = [finding.text for finding in findings if finding.text.startswith("moving")][:1]
    assert "and 1 more op from a to b" in move


def test_modules_are_prefixes_of_layers():
    builder = GraphBuilder("hand")
    for op, layer in enumerate(("a.x.0", "a.x.1", "a.y.0", "b.0", "a.x.0")):
        builder.op(f"op{op}", "mm", inputs=[], flops=1, outputs=[1], layer=layer)
    graph = builder.build()
    names, numbers = modules(graph, most=3)
    assert names == ["a.x", "a.y.0", "b.0"] and numbers.tolist() == [0, 0, 1, 2, 0]
    names, numbers = modules(graph, most=1)
    assert names == ["(all others)"] and not numbers.any()


def test_out_of_memory_comes_first():
    explanation = two_devices([5, 5], [(0, 1)], [0, 0], transfer_bytes=2 << 20)
    assert "out of memory" in explain(explanation)[0].text and "op0" in explain(explanation)[0].text


def test_merged_intervals():
    spans = merged(np.array([10, 0, 3]), np.array([12, 2, 6]), 1)
    assert spans.tolist() == [[0, 6], [10, 12]]


def test_pictures(tmp_path):
    explanation = two_devices([5, 7, 3, 4], [(0, 2), (1, 3)], [0, 0, 1, 1])
    draw(explanation, tmp_path / "run.png")
    assert np.asarray(Image.open(tmp_path / "run.png").convert("L")).std() > 5
    draw(explanation, tmp_path / "run.svg")
    text = (tmp_path / "run.svg").read_text(encoding="utf-8")
    assert text.lstrip().startswith("<?xml") and len(text) > 5000
    with pytest.raises(InvalidInput, match="end in"):
        draw(explanation, tmp_path / "run.gif")


def test_two_placements_over_the_same_time(tmp_path):
    """One device computes 5 + 7 ns; on two devices, a transfer of 10^6 ns follows the first op."""
    before = two_devices([5, 7], [(0, 1)], [0, 0])
    after = two_devices([5, 7], [(0, 1)], [0, 1])
    draw_before(before, after, ("single-gpu", "mine"), tmp_path / "two.png")
    picture = Image.open(tmp_path / "two.png")
    wanted = "hand on pair: single-gpu 12 ns, mine 1000012 ns"
    assert picture.size == (1200, 500) and picture.text["Description"] == wanted
    assert sentence(before, after, ("single-gpu", "mine")) == wanted


def test_a_schedule_is_drawn_on_axes():
    explanation = two_devices([5, 7, 3, 4], [(0, 2), (1, 3)], [0, 0, 1, 1])
    axes = explanation.schedule.plot(explanation.problem, explanation.placement)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.get_xlim()[1] == pytest.approx(explanation.schedule.step_ns / 1e6)
    again = explanation.schedule.plot(explanation.problem, explanation.placement, axes)
    assert again is axes


def test_an_outcome_is_drawn_on_axes():
    from simdev.parallel.mesh import Mesh
    from simdev.planners.job import Choice
    from simdev.planners.outcome import Outcome

    choice = Choice(Mesh({"pp": 2}))
    found = Outcome(
        choice, 10 * 10**6, 0, (2**30, 2**31), 0, (6 * 10**6, 8 * 10**6), (10**6, 0), (3 * 10**6, 2 * 10**6)
    )
    axes = found.plot()
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([6, 8, 1, 0, 3, 2])
    assert [text.get_text().strip() for text in axes.texts] == ["1 GiB", "2 GiB"]
    with pytest.raises(ValueError, match="not simulated"):
        Outcome(choice, None, 1, (2**30, 2**31)).plot()


def test_step_times_are_drawn_by_mesh():
    from simdev.parallel.mesh import Mesh
    from simdev.planners import Choice, Outcome, plot_meshes

    def outcome(pp, microbatch, seconds, overflow=0):
        step_ns = None if seconds is None else int(seconds * 1e9)
        return Outcome(Choice(Mesh({"pp": pp}), microbatch), step_ns, overflow, (2**30,))

    found = [outcome(2, 1, 3.0), outcome(2, 2, 2.0), outcome(4, 1, 1.5), outcome(8, 1, 1.0, 5), outcome(16, 1, None)]
    axes = plot_meshes(found, title="mine")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pp=4", "pp=2", "pp=8"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([1.5, 2.0, 1.0])
    assert [list(line.get_xdata()) for line in axes.lines] == [[], [3.0], []]  # other plans of the mesh
    assert "too much" in axes.texts[2].get_text() and "microbatch=2" in axes.texts[1].get_text()
    assert axes.get_title(loc="left") == "mine: pp=4 is fastest, 1.5 s"
    with pytest.raises(ValueError, match="no plan was simulated"):
        plot_meshes(found[-1:])


def run(capsys, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["simdev", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0, *capsys.readouterr()


def test_commands_on_a_placement_file_and_a_folder(tmp_path, capsys, monkeypatch):
    file = tmp_path / "found.json"
    assert run(capsys, monkeypatch, "place", "transformer-xl-2", "p100x2", "-p", "expert", "-o", file)[0] == 0
    code, out, _ = run(capsys, monkeypatch, "explain", file, "--json")
    outcome = json.loads(out)
    assert code == 0 and 1 <= len(outcome["findings"]) <= 16 and outcome["step_time_s"] > 0
    assert run(capsys, monkeypatch, "view", file, "-o", tmp_path / "run.png")[0] == 0
    assert (tmp_path / "run.png").stat().st_size > 10_000
    folder = tmp_path / "results"
    asked = ("-w", "transformer-xl-2", "-t", "p100x2", "-p", "single-gpu", "-p", "expert", "-b", "evaluations=1")
    assert run(capsys, monkeypatch, "bench", *asked, "-o", folder)[0] == 0
    code, out, _ = run(capsys, monkeypatch, "explain", folder, "-p", "single-gpu")
    assert code == 0 and REASONS["compute"] in out
    code, _, error = run(capsys, monkeypatch, "explain", folder, "-p", "singel-gpu")
    assert code == 2 and "single-gpu" in error
    code, _, error = run(capsys, monkeypatch, "explain", tmp_path / "nothing.json")
    assert code == 2 and "nothing.json" in error


def test_a_row_of_throughput_is_explained_as_a_pipeline(tmp_path, capsys, monkeypatch):
    """With copies of ops, and with the score of the row; a placement without copies is no step there, either."""
    board = BOARDS / "throughput"
    found = [row for row in rows.read_rows(board / "results.csv") if row.workload == "dlrm" and row.step_ns]
    scores = {name: min(row.step_ns for row in found if row.entry == name) / 1e9 for name in ("hybrid", "dpl")}
    for name in scores:
        asked = (board, "-w", "dlrm", "-t", "p100x4", "-p", name)
        code, out, _ = run(capsys, monkeypatch, "explain", *asked, "--json")
        answer = json.loads(out)
        assert code == 0 and answer["steady_s"] == scores[name] and answer["total_s"] > 16 * scores[name]
        assert all("saves" not in finding["text"] for finding in answer["findings"])
    code, out, _ = run(capsys, monkeypatch, "explain", *asked)
    assert code == 0 and out.startswith("dlrm x 32 microbatches on p100x4: ") and "of the run" in out
    assert run(capsys, monkeypatch, "view", *asked, "--before", "hybrid", "-o", tmp_path / "run.png")[0] == 0


@pytest.mark.parametrize("name", ["$x$", "a$\\frac{$", "__a  b"])
def test_any_name_can_be_drawn(tmp_path, name):
    """matplotlib would take a name between dollar signs for a formula."""
    from small_board import small_board

    from simdev.cli.chosen_run import chosen_run
    from simdev.report.curve import draw as draw_curve
    from simdev.report.curve import searches

    small_board(tmp_path / "board", workload=f"{name}.npz", topology=f"{name}.toml", placers=(name, "single-gpu"))
    explanation = chosen_run(tmp_path / "board", None, None, name)
    for part in (explanation.graph, explanation.topology):
        object.__setattr__(part, "name", name)
    explanation.device_names = [name, "b"]
    draw(explanation, tmp_path / "run.png")
    draw_curve(searches(tmp_path / "board", f"{name}.npz", f"{name}.toml"), name, tmp_path / "curve.png")


def diamond():
    """x -> a, b -> c; a has a workspace, c is the update and keeps its result."""
    builder = GraphBuilder("diamond", meta={"batch": 2})
    x = builder.op("x", "input", outputs=[100])
    a = builder.op("a", "mm", inputs=builder.outputs(x), outputs=[40], flops=1000, workspace_bytes=500, group="g")
    b = builder.op("b", "relu", inputs=builder.outputs(x), outputs=[60], phase="backward", flops=10, group="g")
    c = builder.op("c", "sgd", inputs=builder.outputs(a) + builder.outputs(b), phase="update", persistent_bytes=1000)
    builder.tensor(c, 7, result=True)
    return builder.build()


def test_the_figures_of_a_graph():
    summary = summarise_graph(diamond())
    expected = dict(
        ops=4,
        tensors=4,
        edges=4,
        placement_units=3,
        colocation_groups=1,
        depth_ops=3,
        width_ops=2,
        flops=1010,
        bytes_read=300,
        bytes_written=207,
        persistent_bytes=1000,
        tensor_bytes=207,
        peak_bytes=1640,
    )
    assert {key: summary[key] for key in expected} == expected
    assert summary["phases"]["backward"] == {"ops": 1, "flops": 10, "bytes": 160}
    assert summary["classes"]["gemm"] == {"ops": 1, "flops": 1000, "bytes": 140}
    assert summary["kinds"] == {"input": 1, "mm": 1, "relu": 1, "sgd": 1}
    assert json.loads(json.dumps(summary)) == summary
    text = graph_text(summary)
    for part in (
        "diamond",
        "4 in 3 placement units",
        "3 ops on the longest path, 2 on one level",
        "1.01 kFLOP",
        "batch=2",
    ):
        assert part in text


def test_the_peak_is_the_simulator_s_on_one_device():
    from simdev.sim import simulate

    device = Device("d", DeviceKind("k", 2**40, {"f32": 1e12}, 1e11, granularity=1))
    rng = np.random.default_rng(3)
    for _ in range(20):
        builder = GraphBuilder("random")
        tensors = []
        for number in range(30):
            chosen = rng.choice(tensors, min(len(tensors), 2), replace=False).tolist() if tensors else []
            sizes = rng.integers(0, 1000, 3).tolist()
            op = builder.op(f"{number}", "add", inputs=chosen, persistent_bytes=sizes[0], workspace_bytes=sizes[1])
            tensors.append(
                builder.tensor(op, sizes[2], result=bool(rng.random() < 0.2), persistent=bool(rng.random() < 0.1))
            )
        graph = builder.build()
        problem = Problem.build(graph, Topology("one", (device,)), CostModel(), Rules(order="program"))
        schedule = simulate(problem, Placement(np.zeros(graph.n_ops, int)), engine="reference")
        assert peak_bytes(graph) == int(schedule.peak_bytes[0])


@pytest.mark.parametrize("name", topology_names())
def test_a_topology_in_words(name):
    topology = load_topology(name)
    summary = describe_topology(topology)
    assert json.loads(json.dumps(summary)) == summary
    assert len(summary["routes"]) == topology.n_devices * (topology.n_devices - 1)
    text = topology_text(summary)
    for device in topology.devices:
        assert device.name in text and device.kind.name in text


def test_routes_name_what_they_pass():
    routes = {(route["from"], route["to"]): route for route in describe_topology(load_topology("k80x4"))["routes"]}
    assert routes["gpu0", "gpu1"]["through"] == ["plx0"]
    assert routes["gpu0", "gpu3"]["through"] == ["plx0", "cpu0", "plx1"]
    assert routes["gpu0", "gpu3"]["gb_per_s"] == 7.8 and routes["gpu0", "gpu3"]["latency_us"] == 12


@pytest.mark.parametrize("name", ["p100x4", "v100x8-dgx1", "h100x16", "cpu-h200"])
def test_a_drawing_names_every_device_and_switch(tmp_path, name, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    topology = load_topology(name)
    draw_topology(topology, tmp_path / "t.svg")
    text = (tmp_path / "t.svg").read_text()
    for node in [device.name for device in topology.devices] + list(topology.switches):
        assert f">{node}<" in text
    for link in topology.links:
        assert f"{link.bytes_per_s / 1e9:g} GB/s" in text


def test_any_topology_can_be_drawn(tmp_path):
    kind = DeviceKind("k", 2**30, {"f32": 1e12}, 1e11)
    alone = Topology("alone", (Device("d", kind),))
    devices = tuple(Device(name, kind) for name in "abcd")
    ring = Topology("ring", devices, tuple(Link(ends, 10**9, 5) for ends in ("ab", "bc", "cd", "da")))
    star = Topology("star", devices, tuple(Link((name, "s"), 10**9, 5) for name in "abcd"), ("s", "unused"))
    hosts = Topology(
        "hosts", tuple(Device(name, kind, host=True) for name in "abc"), (Link("ab", 1, 0), Link("bc", 1, 0))
    )
    for topology in (alone, ring, star, hosts):
        draw_topology(topology, tmp_path / f"{topology.name}.png")
        assert (tmp_path / f"{topology.name}.png").read_bytes().startswith(b"\x89PNG")
        assert topology.name in topology_text(describe_topology(topology))
    with pytest.raises(InvalidInput, match="No such file"):
        draw_topology(alone, tmp_path / "no" / "t.png")
    with pytest.raises(InvalidInput, match="t.xyz: cannot draw 'xyz'"):
        draw_topology(alone, tmp_path / "t.xyz")


def row(placer, step_ns, *, evaluations=10, seconds=2.0, **more):
    fields = {"budget": "evaluations=10", "evaluations": evaluations, "place_seconds": seconds}
    return small_board.row(placer, step_ns, **{**fields, **more})


def folder(tmp_path, found, curves):
    rows.write_rows(tmp_path / "results.csv", found)
    score.write(tmp_path, found)
    lines = [
        dict(zip(CURVES, (*key, used, f"{seconds:.3f}", rows.seconds_text(ns)), strict=True))
        for key, points in curves.items()
        for used, seconds, ns in points
    ]
    rows.write_csv(tmp_path / "curves.csv", CURVES, lines)
    return tmp_path


@pytest.fixture
def results(tmp_path):
    searcher = [row("search", ns, seed=seed) for seed, ns in enumerate((70_000_000, 60_000_000, 80_000_000))]
    found = [
        *searcher,
        row("rule", 90_000_000, evaluations=0, seconds=0.1),
        row("big", None),
        row("x", 1, topology="u"),
    ]
    curves = {run.key: [(1, 0.2, 100_000_000), (7, 1.5, run.step_ns)] for run in searcher}
    return folder(tmp_path, found, curves)


def test_points_end_with_what_was_returned(results):
    found = {(run.placer, run.seed): run for run in curve.searches(results, "w", "t")}
    assert found["search", 0].points == ((1, 0.2, 100_000_000), (7, 1.5, 70_000_000), (10, 2.0, 70_000_000))
    assert found["rule", 0].points == ((0, 0.1, 90_000_000),)
    assert found["big", 0].points == () and found["big", 0].step_ns is None
    assert len(found) == 5


def test_table_is_of_medians_fastest_first(results):
    lines = curve.table(curve.searches(results, "w", "t"))
    assert [line["placer"] for line in lines] == ["search", "rule", "big"]
    assert lines[0] == {
        "placer": "search",
        "runs": "3",
        "solved": "3",
        "evaluations": "10",
        "seconds": "2.00",
        "improvements": "2",
        "step_time_ms": "70.000",
    }
    assert (lines[2]["solved"], lines[2]["step_time_ms"]) == ("0", "")


def test_some_placers_only(results):
    assert {run.placer for run in curve.searches(results, "w", "t", placers=["rule"])} == {"rule"}


@pytest.mark.parametrize(
    "arguments, word",
    [
        (dict(workload="v", topology="t"), "workload"),
        (dict(workload="w", topology="v"), "topology"),
        (dict(workload="w", topology="t", budget="evaluations=3"), "budget"),
        (dict(workload="w", topology="t", placers=["serach"]), "did you mean 'search'"),
    ],
)
def test_what_the_folder_does_not_hold(results, arguments, word):
    with pytest.raises(UnknownName, match=word):
        curve.searches(results, **arguments)


def test_a_damaged_curve_names_its_line(results):
    path = results / "curves.csv"
    path.write_text(path.read_text().replace("0.200", "soon", 1))
    with pytest.raises(InvalidInput, match="curves.csv: line 2: not a number"):
        curve.searches(results, "w", "t")


def test_command_prints_and_draws(results, capsys, monkeypatch, tmp_path):
    import sys

    from simdev.cli import main as cli

    picture = tmp_path / "curve.svg"
    base = ["simdev", "curve", str(results), "-w", "w", "-t", "t"]
    for extra in (["-o", str(picture)], ["--json"]):
        monkeypatch.setattr(sys, "argv", base + extra)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, None)
        text = capsys.readouterr().out
        assert ("70.000" in text) if extra[0] == "-o" else json.loads(text)[0]["placer"] == "big"
    drawn = picture.read_text()
    assert drawn.startswith("<?xml") and len(drawn) > 5000


def test_seeds_are_one_line(results):
    """Each seed has 100 ms after one evaluation, and 60, 70 or 80 ms from the seventh on."""
    runs = [run for run in curve.searches(results, "w", "t") if run.placer == "search"]
    assert curve.median_curve(runs, 0, 1) == ([1, 7, 10], [100, 60, 60], [100, 70, 70], [100, 80, 80])


def test_at_most_eight_placers_are_drawn(tmp_path):
    found = [curve.Search(f"placer {n}", 0, 10**6 + n, 1, 1.0, ((1, 1.0, 10**6 + n),)) for n in range(12)]
    curve.draw(found, "many", tmp_path / "many.svg")
    drawn = (tmp_path / "many.svg").read_text(encoding="utf-8")
    assert "placer 7  1.0" in drawn and "placer 8" not in drawn and "the best 8 of 12 placers" in drawn
    curve.draw(found, "many", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == drawn


def test_nothing_to_draw_and_unknown_formats(results, tmp_path):
    found = curve.searches(results, "w", "t")
    with pytest.raises(InvalidInput, match="no run has a score"):
        curve.draw([run for run in found if run.placer == "big"], "w", tmp_path / "a.png")
    with pytest.raises(InvalidInput, match="cannot draw 'txt'"):
        curve.draw(found, "w", tmp_path / "a.txt")


NEEDED = {
    "M": {"pid", "name", "args"},
    "X": {"pid", "tid", "ts", "dur", "name", "args"},
    "s": {"pid", "tid", "ts", "name", "cat", "id"},
    "f": {"pid", "tid", "ts", "name", "cat", "id", "bp"},
    "C": {"pid", "ts", "name", "args"},
}


def check(events):
    """Every event has the fields of its phase; boxes are on named tracks; arrows connect boxes, forwards in time."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    boxes = {}
    for event in events:
        assert event.keys() >= NEEDED[event["ph"]]
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in named
            boxes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    ends = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert len(ends["s"]) == sum(e["ph"] == "s" for e in events)
    for label, first in ends["s"].items():
        assert first["ts"] <= ends["f"][label]["ts"]
        for end in (first, ends["f"][label]):
            assert any(a <= end["ts"] <= b for a, b in boxes[end["pid"], end["tid"]])
    return boxes


def test_transfers_have_arrows_and_devices_have_memory(tmp_path):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng)
        placement = random_placement(rng, problem)
        schedule = simulate(problem, placement)
        if len(schedule.transfer_tensor) > 3:
            break
    found = Explanation(problem, placement, schedule)
    memory = {device.name: found.memory(number) for number, device in enumerate(problem.topology.devices)}
    events = trace_events(problem.graph, problem.topology, placement.devices, schedule, "drawn", memory=memory)
    other = trace_events(problem.graph, problem.topology, placement.devices, schedule, "again", 1)
    write_trace(tmp_path / "trace.json", events, other)
    check(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    transfers = len(schedule.transfer_tensor)
    assert transfers > 3
    assert sum(e["ph"] == "s" for e in events) == 2 * transfers
    assert sum(e["ph"] == "X" for e in events) == problem.graph.n_ops + transfers
    for number, device in enumerate(problem.topology.devices):
        values = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == f"memory of {device.name}"]
        assert max(values) == schedule.peak_bytes[number]


@pytest.mark.parametrize("unfolded", [False, True])
def test_a_plan_has_a_process_for_each_rank_and_arrows_along_communication(unfolded, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from simdev.parallel import Host, Plan, find_model, load_cluster, parse_mesh, simulate_plan
    from simdev.report.perfetto import plan_trace_events

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiny = "llama3-8b[width=64,layers=2,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32]"
    spec, parameters = find_model(tiny)
    mesh = parse_mesh("dp_shard=2,pp=2")
    plan = Plan(spec, parameters, load_cluster("dgx-h100"), mesh, 2, host=Host(3000, 2000, 1000, 9000))
    report = simulate_plan(plan, unfolded=unfolded)
    events = plan_trace_events(report)
    boxes = check(json.loads(json.dumps(events)))
    assert {process for process, _ in boxes} == set(range(4 if unfolded else 2))
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(names & {"compute", "host", "send to 1"}) >= 2 and any("dp_shard" in name for name in names)
    first = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(first) == report.peak_bytes[0]
    assert first[-1] == report.memory[0][-1][2]
    for span in (span for spans in boxes.values() for span in [sorted(spans)]):
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(span, span[1:], strict=False))  # a stream runs one at a time
