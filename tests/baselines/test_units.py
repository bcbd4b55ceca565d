"""Where a placement unit may go, and what placers read off a problem."""

import numpy as np
import pytest

from simdev.baselines import _units
from simdev.errors import Unsupported
from simdev.problem.costs import CostTable
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology


def problem(op_ns, routed=None, groups=None):
    """Two ops, a tensor between them; a host (device 0) and two accelerators; ``op_ns`` per device."""
    builder = GraphBuilder("pair")
    first = builder.op("first", "mm", outputs=[100], group=(groups or [None, None])[0])
    builder.op("second", "mm", inputs=builder.outputs(first), group=(groups or [None, None])[1])
    kind = DeviceKind("kind", 1 << 30, {"f32": 1e12}, 1e12)
    devices = tuple(Device(name, kind, host=name == "cpu") for name in ("cpu", "a", "b"))
    topology = Topology("three", devices, (Link(("cpu", "a"), 10**9, 0), Link(("cpu", "b"), 10**9, 0)))
    pairs = np.where(np.eye(3, dtype=bool), -1, 0) if routed is None else np.array(routed)
    costs = CostTable(np.array(op_ns), np.arange(3), np.array([[7]]), pairs.astype(np.int32), np.zeros(2, np.int64))
    return Problem(builder.build(), topology, costs)


def test_accelerators_only_unless_hosts_are_asked_for():
    here = problem([[5, 5], [1, 1], [1, 1]])
    assert _units.choices(here).T.tolist() == [[False, True, True]] * 2
    assert _units.choices(here, hosts=True).all()


def test_host_serves_what_no_accelerator_supports():
    assert _units.choices(problem([[5, 5], [1, -1], [1, -1]])).T.tolist() == [[False, True, True], [True, False, False]]


def test_a_group_needs_a_device_for_all_its_ops():
    allowed = _units.choices(problem([[5, 5], [1, -1], [-1, 1]], groups=["g", "g"]))
    assert allowed.T.tolist() == [[True, False, False]]


def test_devices_without_a_route_are_not_mixed():
    apart = [[-1, 0, -1], [0, -1, -1], [-1, -1, -1]]  # only cpu and a reach each other
    assert _units.choices(problem([[5, 5], [1, 1], [1, 1]], routed=apart)).T.tolist() == [[False, True, False]] * 2


def test_no_devices_together_support_all():
    apart = [[-1, -1, -1]] * 3
    with pytest.raises(Unsupported, match="reach"):
        _units.choices(problem([[5, -1], [-1, 1], [5, -1]], routed=apart))


def test_traffic_counts_a_tensor_once_per_reading_unit():
    builder = GraphBuilder("fan")
    first = builder.op("first", "mm", outputs=[100])
    for name in ("x", "y"):
        builder.op(name, "mm", inputs=builder.outputs(first), group="readers")
    kind = DeviceKind("kind", 1 << 30, {"f32": 1e12}, 1e12)
    fan = Problem.build(builder.build(), Topology("one", (Device("d", kind),)))
    ptr, neighbour, size = _units.unit_adjacency(fan)
    assert ptr.tolist() == [0, 1, 2] and neighbour.tolist() == [1, 0] and size.tolist() == [100, 100]


def test_misplaced_units_go_where_least_is_to_do():
    here = problem([[5, 5], [3, 3], [3, 3]])
    allowed = _units.choices(here)
    assert _units.move_to_allowed(here, np.array([0, 1]), allowed).tolist() == [2, 1]


def test_shrunk_weights_stay_positive_and_small():
    weights = _units.shrunk(np.array([0, 10**12, 10**12]))
    assert weights[0] == 1 and weights.sum() <= (1 << 30) + 3 and weights[1] == weights[2]
