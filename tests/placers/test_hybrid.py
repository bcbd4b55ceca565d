"""``hybrid``: copies of all layers but the heaviest; and what a budget says of placements with replicas."""

import numpy as np
import pytest
from drawn import machine
from drawn import problem as drawn_problem

from simdev.errors import InvalidInput
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer, load_workload
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim.pipeline import simulate_pipeline


def two_tables(held, memory, devices=2):
    """Two tables of ``held`` bytes with short look-ups, and a layer that takes ten times as long."""
    b = GraphBuilder("tables")
    found = []
    for name in ("first", "second"):
        table = b.op(f"{name}/table", "parameter", outputs=[0], persistent_bytes=held, layer=name)
        found += b.outputs(b.op(f"{name}/look-up", "op", inputs=b.outputs(table), outputs=[1], layer=name))
    y = b.op("dense/y", "op", inputs=found, outputs=[1], layer="dense")
    b.op("dense/back", "op", inputs=b.outputs(y), phase="backward", layer="dense")
    return drawn_problem(b, machine(devices, memory=memory), [1, 50, 1, 50, 400, 600])


def place(problem, evaluations=50, microbatches=12, name="hybrid"):
    from simdev.bench.objective import Objective

    objective = Objective("1f1b", microbatches)
    given = {"simulate": objective.simulate_many, "microbatches": microbatches} if microbatches else {}
    budget = Budget(problem, evaluations=evaluations, **given)
    spec, params = find_placer(name)
    placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget, **params)
    placement.check(problem)
    return placement, budget


def steady_ns(problem, placement, microbatches=12):
    report = simulate_pipeline(problem, placement, microbatches, "1f1b")
    assert report.feasible
    return report.steady_ns


def test_tables_that_fit_together_are_copied():
    problem = two_tables(400, 1000)
    placement, budget = place(problem)
    assert placement.replica_of.tolist() == [0, 0] and placement.replicated is None
    assert 550 <= steady_ns(problem, placement) < 552 and budget.best_placement.hash == placement.hash


@pytest.mark.parametrize("evaluations", [0, 50])
def test_tables_that_do_not_are_divided_and_the_rest_is_copied(evaluations):
    problem = two_tables(700, 1000)
    placement, budget = place(problem, evaluations)
    at = dict(zip(problem.graph.op_names, placement.devices.tolist(), strict=True))
    copied = dict(zip(problem.graph.op_names, placement.replicated.tolist(), strict=True))
    assert {at["first/table"], at["second/table"]} == {0, 1} and not (copied["first/table"] or copied["second/look-up"])
    assert copied["dense/y"] and copied["dense/back"]
    divided = steady_ns(problem, Placement(np.array([0, 0, 1, 1, 0, 0])))
    assert steady_ns(problem, placement) < 0.7 * divided
    assert (budget.used > 0) == (evaluations > 0)


def test_a_portfolio_knows_placements_with_copies():
    for held, partly in ((400, False), (700, True)):
        problem = two_tables(held, 1000)
        placement, budget = place(problem, name="portfolio")
        assert placement.replica_of is not None and (placement.replicated is not None) == partly
        assert budget.best_placement.hash == placement.hash


def test_layers_without_copies_change_places():
    """Four tables of equal size, of which two send much: by bytes alone, both would be on the first device."""
    b = GraphBuilder("tables")
    found = []
    for number, sent in enumerate([2000, 1, 2000, 1]):
        table = b.op(f"t{number}/table", "parameter", outputs=[0], persistent_bytes=400, layer=f"t{number}")
        found += b.outputs(b.op(f"t{number}/up", "op", inputs=b.outputs(table), outputs=[sent], layer=f"t{number}"))
    y = b.op("dense/y", "op", inputs=found, outputs=[1], layer="dense")
    b.op("dense/back", "op", inputs=b.outputs(y), phase="backward", layer="dense")
    problem = drawn_problem(b, machine(2, memory=9000), [1, 50, 1, 50, 1, 50, 1, 50, 400, 600])
    problem.graph.__dict__["updated_in_backward"] = np.array([True] * 8 + [False] * 2)  # so that no table is copied
    scores = [place(problem, evaluations)[1].best_step_ns for evaluations in (1, 60)]
    assert scores[1] < scores[0]


def test_one_step_has_no_copies():
    placement, budget = place(two_tables(700, 1000), microbatches=0)
    assert placement.replica_of is None and len(set(placement.devices.tolist())) == 2 and budget.used


def test_dlrm_fits_and_is_faster_than_without_copies():
    problem = Problem.build(load_workload("dlrm"), load_topology("p100x4"))
    placement, budget = place(problem, 12, 8)
    assert not placement.replicated.all() and placement.replica_of is not None
    spec, params = find_placer("dpl")
    straight = spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem), **params)
    assert budget.best_step_ns < 0.7 * steady_ns(problem, straight, 8)


def test_inputs_are_where_layers_without_copies_read_them():
    """A look-up on the host would otherwise wait until a replica begins the microbatch, and with it the replica."""
    problem = Problem.build(load_workload("dlrm"), load_topology("p100x4"))
    placement, budget = place(problem, 1, 32)
    graph = problem.graph
    fed = np.array([name.startswith("input") for name in graph.op_names])[graph.edge_source]
    fed &= ~placement.replicated[graph.consumers]
    source, reader = graph.edge_source[fed], graph.consumers[fed]
    assert len(source) >= 8 and (placement.devices[source] == placement.devices[reader]).all()
    inputs = np.isin(np.arange(graph.n_ops), source)
    devices = np.where(inputs, placement.devices[placement.replicated][0], placement.devices)
    waiting = Placement(devices, replica_of=placement.replica_of, replicated=placement.replicated | inputs)
    assert budget.best_step_ns < 0.85 * steady_ns(problem, waiting, 32)


def test_a_budget_simulates_replicas_only_with_microbatches():
    problem = two_tables(400, 1000)
    copied = Placement(np.zeros(6, int), replica_of=np.zeros(2, int))
    with pytest.raises(InvalidInput, match="replica_of: replicas need microbatches"):
        Budget(problem, evaluations=1).evaluate_placement(copied)
    straight, budget = Placement(np.zeros(6, int)), Budget(problem, evaluations=1)
    assert budget.evaluate_placement(straight).fits and budget.best.tolist() == [0] * 6


def test_of_unequal_accelerators_the_faster_kind_has_the_copies():
    topology = load_topology("p100x2-v100x2")
    placement, _ = place(Problem.build(load_workload("transformer-xl-2"), topology), 0)
    team = np.flatnonzero(placement.replica_of == placement.devices[0])
    assert [topology.devices[device].kind.name for device in team] == ["v100-pcie-16gb"] * 2
