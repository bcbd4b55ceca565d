"""Rules of the execution model, and of other simulators, on graphs whose answers are computed by hand."""

import numpy as np
import pytest
from drawn import chain, machine, problem

from simdev.errors import InvalidInput, UnknownName
from simdev.placers.testing import random_problem
from simdev.problem.costs import CostTable, transfer_durations
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.sim import ENGINES, simulate, simulate_many, validate
from simdev.sim.presets import PRESETS, step_ns, under


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


def branches(count, sizes=None):
    """Independent ops o0, o1 ...; each makes one tensor (``sizes``, default 5 bytes)."""
    b = GraphBuilder("branches")
    for i in range(count):
        b.op(f"o{i}", "op", outputs=[5 if sizes is None else sizes[i]])
    return b


def fan(n, size=5):
    """o0 makes one tensor, read by o1 ... on."""
    b = GraphBuilder("fan")
    source = b.outputs(b.op("o0", "op", outputs=[size]))
    for i in range(1, n + 1):
        b.op(f"o{i}", "op", inputs=source)
    return b


def test_r1_slots_run_ops_at_once(run):
    schedule = run(problem(branches(5), machine(1, slots=2), [4, 6, 3, 1, 1]), [0] * 5)
    assert schedule.op_start.tolist() == [0, 0, 4, 6, 7]


def test_r2_fifo_takes_the_earliest_ready_then_the_lowest_number(run):
    # o3 waits for o0 (until 2), o2 for o1 (until 7): at 7 both o2 and o3 wait, o3 has been ready since 2.
    b = GraphBuilder("fifo")
    x, y = b.op("o0", "op", outputs=[0]), b.op("o1", "op", outputs=[0])
    b.op("o2", "op", inputs=b.outputs(y))
    b.op("o3", "op", inputs=b.outputs(x))
    assert run(problem(b, machine(1), [2, 5, 1, 1]), [0] * 4).op_start.tolist() == [0, 2, 8, 7]
    assert run(problem(branches(2), machine(1), [2, 5]), [0, 0]).op_start.tolist() == [0, 2]


def test_r2_priority_given_and_default(run):
    p = problem(branches(3), machine(1), [2, 5, 1], rules=Rules(order="priority"))
    assert run(p, [0] * 3, priority=np.array([1, 7, 7])).op_start.tolist() == [6, 0, 5]
    # Default: the b-level. o0 -> o3 makes 2 + 9; then o1 (5), o2 (1).
    b = branches(3)
    b.op("o3", "op", inputs=b.outputs(0))
    p = problem(b, machine(1), [2, 5, 1, 9], rules=Rules(order="priority"))
    assert run(p, [0] * 4).op_start.tolist() == [0, 11, 16, 2]


def test_r2_program_order_waits_for_an_op_that_is_not_ready(run):
    b = GraphBuilder("program")
    x = b.op("o0", "op", outputs=[5])
    b.op("o1", "op", inputs=b.outputs(x))
    b.op("o2", "op")
    devices = [1, 0, 0]
    assert run(problem(b, machine(), [3, 4, 2]), devices).op_start.tolist() == [0, 18, 0]
    p = problem(b, machine(), [3, 4, 2], rules=Rules(order="program"))
    assert run(p, devices).op_start.tolist() == [0, 18, 22]


def test_r3_a_tensor_is_sent_once_to_each_device(run):
    schedule = run(problem(fan(4), machine(3), [1] * 5), [0, 1, 2, 1, 0])
    assert schedule.transfer_tensor.tolist() == [0, 0] and schedule.transfer_target.tolist() == [1, 2]
    assert schedule.comm_bytes == 10
    assert schedule.op_start.tolist() == [0, 16, 16, 17, 1]


def test_r3_zero_bytes_cost_the_latency(run):
    assert run(problem(chain(0, 0), machine(), [3, 4]), [0, 1]).step_ns == 3 + 10 + 4


def test_r4_one_channel_serves_requests_in_order(run):
    # Both ops end at 2 and send over the same channel: the lower tensor first, 15 ns each.
    b = branches(2)
    b.op("o2", "op", inputs=b.outputs(0))
    b.op("o3", "op", inputs=b.outputs(1))
    p = problem(b, machine(2, slots=2), [2, 2, 1, 1])
    schedule = run(p, [0, 0, 1, 1])
    assert schedule.transfer_start.tolist() == [2, 17] and schedule.transfer_finish.tolist() == [17, 32]
    free = problem(b, machine(2, slots=2), [2, 2, 1, 1], rules=Rules(contention="none"))
    assert run(free, [0, 0, 1, 1]).transfer_start.tolist() == [2, 2]


def star(latency=0, rate=10**9, duplex="full"):
    """d0, d1, d2 around a switch."""
    kind = DeviceKind("toy", 10**6, {"f32": 1e9}, 1e9, granularity=1)
    links = tuple(Link((f"d{i}", "s"), rate, latency, duplex) for i in range(3))
    return Topology("star", tuple(Device(f"d{i}", kind) for i in range(3)), links, ("s",))


def test_r4_a_waiting_request_holds_its_place_on_idle_channels(run):
    # t0: d0 -> d2 from 1 to 101; t1: d1 -> d2 asked at 2 waits for the channel into d2 until 101 and keeps the channel
    # out of d1; t2: d1 -> d0 asked at 3 comes after it although its own way is free.
    b = branches(3, sizes=[100, 10, 10])
    for i in range(3):
        b.op(f"r{i}", "op", inputs=b.outputs(i))
    schedule = run(problem(b, star(), [1, 2, 1, 1, 1, 1]), [0, 1, 1, 2, 2, 0])
    assert schedule.transfer_start.tolist() == [1, 101, 111]


def test_r4_half_duplex_shares_one_channel(run):
    b = branches(2, sizes=[50, 50])
    b.op("r0", "op", inputs=b.outputs(0))
    b.op("r1", "op", inputs=b.outputs(1))
    for duplex, expected in (("full", [1, 1]), ("half", [1, 51])):
        schedule = run(problem(b, star(duplex=duplex), [1, 1, 1, 1]), [0, 1, 1, 0])
        assert schedule.transfer_start.tolist() == expected


def test_r4_fair_flows_share_the_channel(run):
    # 100 and 40 bytes over one 1 byte/ns channel from 1 on: 40 + 40 until 81, then the rest of 60 alone until 141.
    b = branches(2, sizes=[100, 40])
    b.op("r0", "op", inputs=b.outputs(0))
    b.op("r1", "op", inputs=b.outputs(1))
    p = problem(b, machine(2, slots=2), [1, 1, 1, 1], rules=Rules(contention="fair"))
    schedule = run(p, [0, 0, 1, 1])
    assert schedule.transfer_start.tolist() == [1, 1]
    assert schedule.transfer_finish.tolist() == [151, 91]  # 10 ns latency first


def test_r4_fair_rates_are_whole_and_at_least_one(run):
    # Three flows on 10 bytes/s get 3 each: 3 bytes take 1 s; on 2 bytes/s the quotient 0 is raised to 1.
    b = branches(3, sizes=[3, 3, 3])
    for i in range(3):
        b.op(f"r{i}", "op", inputs=b.outputs(i))
    kind = DeviceKind("toy", 10**6, {"f32": 1e9}, 1e9, slots=3, granularity=1)
    for rate, seconds in ((10, 1), (2, 3)):
        topology = Topology("t", (Device("a", kind), Device("b", kind)), (Link(("a", "b"), rate, 0),))
        p = problem(b, topology, [1] * 6, rules=Rules(contention="fair"))
        assert run(p, [0, 0, 0, 1, 1, 1]).transfer_finish.tolist() == [1 + seconds * 10**9] * 3


def test_r4_fair_refuses_what_its_arithmetic_cannot_hold(run):
    p = problem(chain(9 << 30, 0), machine(memory=1 << 40), [1, 1], rules=Rules(contention="fair"))
    with pytest.raises(InvalidInput, match="8 GiB"):
        run(p, [0, 1])


def test_r5_a_slot_freed_now_is_taken_now_by_the_first_of_all_ready(run):
    # At 5 o0 ends, and the transfer for o2 arrives; o2 (ready at 5) loses to o1 (ready at 0), both start in turn.
    b = GraphBuilder("instant")
    b.op("o0", "op")
    x = b.op("x", "op", outputs=[0])
    b.op("o1", "op")
    b.op("o2", "op", inputs=b.outputs(x))
    schedule = run(problem(b, star(latency=2), [5, 1, 3, 1]), [0, 1, 0, 0])
    assert schedule.transfer_finish.tolist() == [5]
    assert schedule.op_start.tolist() == [0, 0, 5, 8]


def test_r6_the_last_completion_counts(run):
    # Every copy has a reader, so an op ends the step.
    schedule = run(problem(fan(2), machine(), [1, 1, 1]), [0, 1, 0])
    assert schedule.step_ns == schedule.op_finish.max() == 17


def test_r7_copies_workspaces_persistent_bytes_and_granularity(run):
    b = GraphBuilder("memory")
    w = b.op("w", "parameter", persistent_bytes=20)
    weight = b.tensor(w, 20, persistent=True)
    x = b.op("x", "op", inputs=[weight], outputs=[5], workspace_bytes=3)
    b.op("y", "op", inputs=b.outputs(x), outputs=[9])
    # d0: 20 always, 3 + 5 while x runs; 5 until the transfer is over. d1: 5 from the transfer on, 9 more while y runs.
    assert run(problem(b, machine(), [1, 4, 2]), [0, 0, 1]).peak_bytes.tolist() == [28, 14]
    # In grains of 8: 24 + 8 + 8; 8 + 16.
    assert run(problem(b, machine(granularity=8), [1, 4, 2]), [0, 0, 1]).peak_bytes.tolist() == [40, 24]
    # The weight's copy is no alias.
    assert run(problem(b, machine(), [1, 4, 2]), [1, 0, 0]).peak_bytes.tolist() == [28, 20]


def test_r7_a_result_stays_and_other_tensors_go(run):
    for result, peak in ((False, 100), (True, 107)):
        b = GraphBuilder("result")
        x = b.op("x", "op")
        out = b.tensor(x, 7, result=result)
        y = b.op("y", "op", inputs=[out], outputs=[0])
        b.op("z", "op", inputs=b.outputs(y), outputs=[100])
        assert run(problem(b, machine(1), [1, 1, 1]), [0, 0, 0]).peak_bytes.tolist() == [peak]


def test_r7_frees_come_before_allocations(run):
    # y frees x's 40 bytes at the instant z allocates its 50.
    b = chain(40, 0)
    b.op("z", "op", inputs=b.outputs(1), outputs=[50])
    assert run(problem(b, machine(1), [1, 1, 1]), [0, 0, 0]).peak_bytes.tolist() == [50]


def test_r8_overflow_and_the_op_at_fault(run):
    p = problem(branches(3, sizes=[30, 30, 30]), machine(1, memory=70, slots=3), [1, 1, 1])
    schedule = run(p, [0, 0, 0])
    assert not schedule.feasible and schedule.overflow_bytes.tolist() == [20] and schedule.overflow_op.tolist() == [2]
    assert schedule.step_ns == 1
    b = GraphBuilder("persistent")
    b.op("w", "op", persistent_bytes=100, outputs=[1])
    schedule = run(problem(b, machine(1, memory=70), [1]), [0])
    assert schedule.overflow_bytes.tolist() == [31] and schedule.overflow_op.tolist() == [-1]


def test_r8_a_copy_blames_its_producer(run):
    schedule = run(problem(chain(80, 1), machine(memory=79), [1, 1]), [0, 1])
    assert schedule.overflow_bytes.tolist() == [1, 2] and schedule.overflow_op.tolist() == [0, 0]


def eager(builder, durations, dispatch, n_devices=2):
    return problem(builder, machine(n_devices, host=True), durations, rules=Rules(runtime="eager"), dispatch=dispatch)


def test_r11_an_accelerator_waits_for_the_host(run):
    # Issues end at 7, 14, 21; the ops take 3 each on d1.
    schedule = run(eager(branches(3), [3] * 3, 7), [1] * 3)
    assert schedule.op_start.tolist() == [7, 14, 21]
    # Slower than the host: in issue order, one at a time.
    assert run(eager(branches(3), [30] * 3, 7), [1] * 3).op_start.tolist() == [7, 37, 67]


def test_r11_an_op_on_the_host_holds_up_the_issues(run):
    # o0 on d1 runs 2 to 12 and sends until 12 + 15; o1 on the host is issued at 4, runs at 27; o2 is issued at 37 + 2.
    b = chain(5, 0)
    b.op("o2", "op")
    schedule = run(eager(b, [10] * 3, 2), [1, 0, 1])
    assert schedule.op_start.tolist() == [2, 27, 39]


def test_r11_a_copy_is_issued_with_its_first_consumer(run):
    # o0 ends at 3; o1 is issued at 4, o2 (first consumer on d2) at 6: the copy starts at 6.
    b = GraphBuilder("copy")
    x = b.op("o0", "op", outputs=[5])
    b.op("o1", "op")
    b.op("o2", "op", inputs=b.outputs(x))
    b.op("o3", "op", inputs=b.outputs(x))
    schedule = run(eager(b, [1] * 4, 2, n_devices=3), [1, 1, 2, 2])
    assert schedule.transfer_start.tolist() == [6] and schedule.op_start.tolist() == [2, 4, 21, 22]


def test_too_long_a_step_is_refused(run):
    with pytest.raises(InvalidInput, match="2\\*\\*62"):
        run(problem(chain(0, 0), machine(), [2**61, 2**61]), [0, 0])


def test_a_tensor_is_freed_once_if_its_reader_and_its_transfer_end_together():
    """o0 (0 to 2) sends 5 bytes (2 to 17); o1 reads them at home (2 to 17). Then o2 makes 20 bytes."""
    b = GraphBuilder("tie")
    made = b.outputs(b.op("o0", "op", outputs=[5]))
    here = b.outputs(b.op("o1", "op", inputs=made, outputs=[0]))
    b.op("o2", "op", inputs=here, outputs=[20])
    b.op("o3", "op", inputs=made)
    schedule = simulate(problem(b, machine(), [2, 15, 1, 1]), Placement(np.array([0, 0, 0, 1])))
    assert schedule.op_finish[1] == schedule.transfer_finish[0] == 17
    assert schedule.peak_bytes.tolist() == [20, 5]


def test_r8_the_op_that_fills_the_memory_is_not_at_fault():
    """Two ops start at once: the first fills the 10 bytes, the second exceeds them."""
    b = GraphBuilder("full")
    b.op("o0", "op", outputs=[10])
    b.op("o1", "op", outputs=[5])
    schedule = simulate(problem(b, machine(1, memory=10, slots=2), [2, 2]), Placement(np.zeros(2, int)))
    assert schedule.peak_bytes.tolist() == [15] and schedule.overflow_op.tolist() == [1]


def test_r1_under_priority_an_op_that_becomes_ready_waits_for_the_busy_device():
    """o0 on d1 (0 to 1) sends 5 bytes to d0 (1 to 16), where o1 runs until 20; then o2 runs."""
    b = GraphBuilder("busy")
    made = b.outputs(b.op("o0", "op", outputs=[5]))
    b.op("o1", "op")
    b.op("o2", "op", inputs=made)
    p = problem(b, machine(), [1, 20, 3], rules=Rules("priority"))
    assert simulate(p, Placement(np.array([1, 0, 0]))).op_start.tolist() == [0, 0, 20]


KIND = DeviceKind("k", 1 << 30, {"f32": 1.0}, 1.0)
MB = 7_600_000  # 1,000 us on Placeto's bus


def build(edges, ns, sizes, devices=3, host=False):
    """Ops of ``ns``; ``edges`` maps an op to its readers; ``sizes`` the bytes of its one tensor."""
    builder = GraphBuilder("g")
    for op in range(len(ns)):
        builder.op(f"op{op}", "mm")
    for op, readers in edges.items():
        tensor = builder.tensor(op, sizes[op])
        for reader in readers:
            builder.connect(tensor, reader)
    graph = builder.build()
    names = [f"d{number}" for number in range(devices)]
    topology = Topology(
        "t",
        tuple(Device(name, KIND, host and name == "d0") for name in names),
        tuple(Link((name, "s"), 10**9, 500) for name in names),
        ("s",),
    )
    transfer, pair = transfer_durations(graph.tensor_bytes, topology)
    costs = CostTable(np.array([ns]), np.zeros(devices, np.int32), transfer, pair, np.zeros(len(ns), np.int64))
    return Problem(graph, topology, costs)


def times(problem, devices, preset):
    """Step time and op starts; both engines agree and the schedule obeys the rules."""
    inner, placed = under(problem, Placement(np.array(devices)), preset)
    fast, slow = (simulate(inner, placed, engine=engine) for engine in ("fast", "reference"))
    assert np.array_equal(fast.op_start, slow.op_start) and fast.step_ns == slow.step_ns
    validate(inner, placed, fast)
    assert step_ns(problem, Placement(np.array(devices)), preset) == fast.step_ns
    return fast.step_ns


def test_placeto_a_chain_over_two_devices_costs_its_ops_and_its_bytes():
    problem = build({0: [1]}, [1000, 2000], {0: MB})
    assert (
        times(
            problem,
            [
                0,
                1,
            ],
            "placeto",
        )
        == 1000 + 1_000_000 + 2000
    )


def test_placeto_a_device_is_closed_for_5_7_us_after_each_op():
    problem = build({}, [1000, 2000, 3000], {})
    assert times(problem, [0, 0, 0], "placeto") == 1000 + 5700 + 2000 + 5700 + 3000
    assert times(problem, [0, 1, 2], "placeto") == 3000


def test_placeto_one_transfer_feeds_all_devices():
    problem = build({0: [1, 2]}, [1000, 2000, 2000], {0: MB})
    assert times(problem, [0, 1, 2], "placeto") == 1000 + 1_000_000 + 2000


def test_placeto_the_next_transfer_waits_25_us_and_nothing_waits_to_receive():
    problem = build({0: [2], 1: [3]}, [1000, 1000, 2000, 2000], {0: MB, 1: MB})
    # both send from one device: the second op ends at 7,700, the bus is free at 1,001,000 + 25,000
    assert times(problem, [0, 0, 1, 2], "placeto") == 1000 + 1_000_000 + 25_000 + 1_000_000 + 2000
    # two devices send to one: side by side, then two ops in turn
    assert times(problem, [0, 1, 2, 2], "placeto") == 1000 + 1_000_000 + 2000 + 5700 + 2000


def test_placeto_ops_cost_what_they_cost_on_an_accelerator():
    problem = build({}, [1000], {}, host=True)
    old = problem.costs
    ns, row = np.array([[9000], [1000]]), np.array([0, 1, 1])
    costs = CostTable(ns, row, old.transfer_ns, old.pair_class, old.dispatch_ns)
    assert times(Problem(problem.graph, problem.topology, costs), [0], "placeto") == 1000


def test_baechi_both_directions_share_a_device_channel():
    ns_per_byte, latency = 0.1754, 134_000
    size = 10_000_000
    one = latency + round(size * ns_per_byte)
    problem = build({0: [2], 1: [3]}, [1000, 1000, 2000, 2000], {0: size, 1: size})
    # 0 -> 1 and 1 -> 0 at once: in turn, as both hold both channels
    assert times(problem, [0, 1, 1, 0], "baechi") == pytest.approx(1000 + 2 * one + 2000, abs=20)
    # 0 -> 1 and 2 -> 2: one transfer
    assert times(problem, [0, 2, 1, 2], "baechi") == pytest.approx(1000 + one + 2000, abs=20)


def test_load_is_the_largest_sum_of_ops_and_crossings():
    problem = build({0: [1, 2]}, [1000, 2000, 3000], {0: 4000})
    cross = 1000 + 4000  # two links of 500 ns, 1 GB/s
    assert times(problem, [0, 1, 1], "load") == 2000 + 3000 + cross
    assert times(problem, [0, 0, 0], "load") == 6000
    assert times(problem, [0, 1, 2], "load") == 3000 + cross


def test_load_a_host_bears_no_crossings():
    problem = build({0: [1]}, [9000, 1000], {0: 4000}, host=True)
    assert times(problem, [0, 1], "load") == 9000
    assert times(problem, [1, 0], "load") == 9000 + 5000


def test_ideal_links_do_not_queue():
    problem = build({0: [2], 1: [3]}, [1000, 1000, 2000, 2000], {0: 10**6, 1: 10**6})
    devices = [0, 0, 1, 1]
    one = 1000 + 10**6
    assert simulate(problem, Placement(np.array(devices))).step_ns == 1000 + 2 * one + 2000
    assert times(problem, devices, "ideal-links") == 1000 + one + 2000 + 2000


def test_another_name_is_refused():
    problem = build({}, [1], {})
    with pytest.raises(UnknownName, match="placeto"):
        step_ns(problem, Placement(np.array([0])), "placet")


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("seed", range(6))
def test_both_engines_agree_on_random_problems(preset, seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    for _ in range(20):
        units = rng.integers(problem.topology.n_devices, size=problem.graph.n_units)
        placement = Placement(units[problem.graph.unit_of_op].astype(np.int32))
        try:
            placement.check(problem)
        except ValueError:
            continue
        times(problem, placement.devices, preset)
        return
