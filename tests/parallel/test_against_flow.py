import numpy as np

from simdev.parallel.against_flow import ops_against_flow
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim.pipeline import simulate_pipeline


def two_stages():
    """A mask that belongs to no layer is read by the first of two stages."""
    b = GraphBuilder("masked")
    mask = b.op("mask", "mul", outputs=[64], flops=10)
    first = b.op("first", "mm", inputs=b.outputs(mask), outputs=[1 << 20], flops=10**10, layer="first")
    second = b.op("second", "mm", inputs=b.outputs(first), outputs=[1 << 20], flops=10**10, layer="second")
    back = b.op(
        "back", "mm", inputs=b.outputs(second), outputs=[1 << 20], flops=10**10, phase="backward", layer="second"
    )
    b.op("end", "mm", inputs=b.outputs(back), outputs=[64], flops=10**10, phase="backward", layer="first")
    return Problem.build(b.build(), load_topology("p100x2"))


def place(problem, mask):
    where = {"mask": mask, "first": 1, "second": 2, "back": 2, "end": 1}
    return Placement(np.array([where[name] for name in problem.graph.op_names]))


def test_an_op_on_a_later_stage_than_its_reader_is_named():
    problem = two_stages()
    (found,) = ops_against_flow(problem, place(problem, 2), (1, 2))
    assert (found.op, found.layer, found.stage, found.reader, found.reader_stage) == ("mask", "", 1, "first", 0)
    assert ops_against_flow(problem, place(problem, 1), (1, 2)) == []


def test_it_costs_time_in_1f1b():
    problem = two_stages()
    good, bad = (simulate_pipeline(problem, place(problem, mask), 16, "1f1b") for mask in (1, 2))
    assert bad.total_ns > 1.2 * good.total_ns
