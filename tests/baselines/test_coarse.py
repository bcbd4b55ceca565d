"""The coarse search: groups of ops that do the same work, and what it finds that moves of single ops do not."""

import numpy as np
import pytest

from simdev.baselines import _coarse, _guided, _search
from simdev.baselines._units import choices
from simdev.placers.budget import Budget
from simdev.placers.registry import graph_path, load_workload
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology

STEPS, MB = 20, 1 << 20


def recurrent():
    """A layer that runs ``STEPS`` steps back in time and adds up the gradients of its weight."""
    b = GraphBuilder("recurrent")
    weight = b.op("w", "parameter", persistent_bytes=3 * MB, layer="lstm")
    tensor = b.tensor(weight, 2 * MB, persistent=True)
    state = b.outputs(b.op("x", "op", outputs=[64], layer="lstm"))
    total = None
    for step in range(STEPS):
        state = b.outputs(
            b.op(f"dx{step}", "mm", inputs=[*state, tensor], outputs=[64], flops=10**9, phase="backward", layer="lstm")
        )
        part = b.op(f"dw{step}", "mm", inputs=state, outputs=[2 * MB], flops=10**9, phase="backward", layer="lstm")
        if total is not None:
            part = b.op(
                f"sum{step}", "add", inputs=[total, *b.outputs(part)], outputs=[2 * MB], phase="backward", layer="lstm"
            )
        total = b.outputs(part)[0]
    b.op("adam", "adam", inputs=[total], phase="update", layer="lstm", group="w")
    return Problem.build(b.build(), load_topology("p100x4"))


def test_gradients_of_a_weight_are_a_group_of_their_own_in_parts():
    problem = recurrent()
    around = _coarse.Groups(problem, choices(problem))
    names, unit = problem.graph.op_names, problem.graph.unit_of_op
    kind = np.array([name.rstrip("0123456789") for name in names])
    group, part = around.group[unit], around.part[unit]
    assert set(group[kind == "dw"]) == set(group[kind == "sum"]) and len(set(group[kind == "dw"])) == 1
    assert set(group[kind == "dx"]).isdisjoint(group[kind == "dw"])
    numbers = part[kind == "dx"]
    assert (np.diff(numbers) >= 0).all() and len(set(numbers)) == numbers[-1] - numbers[0] + 1 == _coarse.PARTS
    assert around.reader[unit[names.index("w")]] == unit[names.index("dx0")]


def test_groups_are_moved_whole():
    problem, rng = recurrent(), np.random.default_rng(0)
    search = _coarse.Coarse(problem, choices(problem), Budget(problem, evaluations=1), rng)
    around, devices = search.around, search._even(rng.integers(1, 5, problem.graph.n_units).astype(np.int32))
    for _ in range(300):
        for part in range(int(around.part.max()) + 1):
            assert len(set(devices[(around.part == part) & (around.reader == np.arange(len(devices)))])) <= 1
        devices = around.draw(rng, devices)


def test_hosts_take_what_they_do_not_do_too_slowly():
    if not graph_path("rnnlm").is_file():
        pytest.skip("the graph of rnnlm is not shipped")
    problem = Problem.build(load_workload("rnnlm"), load_topology("k80x4"), rules=Rules("priority"))
    search = _coarse.Coarse(problem, choices(problem), Budget(problem, evaluations=1), np.random.default_rng(0))
    host, accelerator = problem.unit_op_ns[0], problem.unit_op_ns[1]
    assert not choices(problem)[0].any() and np.array_equal(search.allowed[0], host <= _coarse.SLOWER * accelerator)
    assert search.allowed[0].mean() > 0.5 and search.allowed[1:].all()


def test_whole_groups_find_what_single_ops_do_not():
    """Both layers of rnnlm take equally long; a quarter of the weights' gradients must leave both devices."""
    if not graph_path("rnnlm").is_file():
        pytest.skip("the graph of rnnlm is not shipped")
    problem = Problem.build(load_workload("rnnlm"), load_topology("k80x4"), rules=Rules("priority"))
    allowed, found = choices(problem), {}
    for kind in (_coarse.Coarse, _guided.Guided):
        budget = Budget(problem, evaluations=1500)
        search = kind(problem, allowed, budget, np.random.default_rng(1))
        start = search.state(_search.starts(problem, allowed)[1])
        found[kind.__name__] = search.improve(start, budget.share(1)).score.step_ns
    assert found["Coarse"] < 0.97 * found["Guided"], found  # at 1,500 evaluations 0.962
