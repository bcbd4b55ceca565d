"""The critical chain covers the step, memory over time has the simulator's peak, and the words say what is so."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from simdev import sim
from simdev.cli import main as cli
from simdev.errors import InvalidInput
from simdev.placers.testing import random_placement, random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.report.explain import REASONS, Explanation, explain
from simdev.report.timeline import draw, draw_before, modules, sentence
from simdev.sim.plot import merged

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
