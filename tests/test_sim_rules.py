"""Each rule of the execution model on a graph small enough to work out by hand."""

import numpy as np
import pytest

from simdev.costs import CostTable
from simdev.errors import InvalidInput
from simdev.graph import GraphBuilder
from simdev.placement import Placement
from simdev.problem import Problem, Rules
from simdev.sim import ENGINES, simulate, simulate_many
from simdev.topology import Device, DeviceKind, Link, Topology


def machine(n_devices=2, *, memory=1000, slots=1, granularity=1, links=None, host=False):
    """``n_devices`` equal devices d0, d1 ...; by default each two joined by a 1 byte/ns link with 10 ns latency."""
    kind = DeviceKind("toy", memory, {"f32": 1e9}, 1e9, slots=slots, granularity=granularity)
    devices = tuple(Device(f"d{i}", kind, host and i == 0) for i in range(n_devices))
    if links is None:
        links = [(a, b) for a in range(n_devices) for b in range(a + 1, n_devices)]
    return Topology("toy", devices, tuple(Link((f"d{a}", f"d{b}"), 10**9, 10) for a, b in links))


def problem(builder, topology, durations, *, rules=None, dispatch=0):
    """A problem whose ops take ``durations`` ns on every device, and whose transfers cost 10 ns + 1 ns per byte."""
    from simdev.costs import transfer_durations

    graph = builder.build()
    transfer, pair = transfer_durations(graph.tensor_bytes, topology)
    costs = CostTable(
        np.array([durations]), np.zeros(topology.n_devices, np.int32), transfer, pair,
        np.full(graph.n_ops, dispatch, np.int64),
    )  # fmt: skip
    return Problem(graph, topology, costs, rules or Rules())


def chain(*sizes):
    """Ops o0 -> o1 -> ...; op i makes one tensor of ``sizes[i]`` bytes, which op i + 1 reads."""
    b, last = GraphBuilder("chain"), []
    for i, size in enumerate(sizes):
        last = b.outputs(b.op(f"o{i}", "op", inputs=last, outputs=[size]))
    return b


@pytest.fixture(params=ENGINES)
def run(request):
    return lambda p, devices, **kw: simulate(p, Placement(np.array(devices), **kw), engine=request.param)


def test_r1_chain_on_one_device_takes_the_sum(run):
    schedule = run(problem(chain(5, 5, 5), machine(), [3, 4, 5]), [0, 0, 0])
    assert schedule.op_start.tolist() == [0, 3, 7] and schedule.step_ns == 12


def test_r3_r4_a_transfer_takes_latency_plus_bytes(run):
    schedule = run(problem(chain(5, 5), machine(), [3, 4]), [0, 1])
    assert schedule.transfer_start.tolist() == [3] and schedule.transfer_finish.tolist() == [18]
    assert schedule.step_ns == 22 and schedule.comm_bytes == 5


def test_r7_peak_memory_of_a_chain(run):
    # o0's 5 bytes live until o1 ends, o1's 7 until o2 ends, o2's 2 from its start: 5, 5 + 7, 7 + 2.
    assert run(problem(chain(5, 7, 2), machine(), [1, 1, 1]), [0, 0, 0]).peak_bytes.tolist() == [12, 0]


def test_bad_placement_is_named():
    p = problem(chain(5, 5), machine(), [3, 4])
    with pytest.raises(InvalidInput, match="device 2"):
        simulate_many(p, np.array([[0, 0], [0, 2]]))
