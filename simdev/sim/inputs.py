"""A problem as the flat arrays that the kernels read: built once per problem, shared by all runs and threads."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from simdev.analysis.levels import average_durations, b_level
from simdev.analysis.transfers import MAX_FAIR_BYTES, times_alone
from simdev.errors import InvalidInput
from simdev.problem.problem import CONTENTIONS, ORDERS, Problem, Rules
from simdev.sim.kernels.state import FAIR_LOOP, FIFO_LOOP, GENERAL_LOOP, IN_ORDER_LOOP, PRIORITY_LOOP, SHIFT, Inputs

MAX_TIME_NS = 1 << 62
KEY_BITS = 63
MAX_FAIR_RATE = 1 << 58


_CACHE: WeakKeyDictionary[Problem, Inputs] = WeakKeyDictionary()
_RANKS: WeakKeyDictionary[Problem, np.ndarray] = WeakKeyDictionary()


def problem_arrays(problem: Problem) -> Inputs:
    """The arrays of ``problem``. Raises :class:`InvalidInput` if times or sizes could exceed 62 bits, or if a problem
    under ``fair`` exceeds the limits of that contention (R4)."""
    if problem not in _CACHE:
        _CACHE[problem] = _build(problem)
    return _CACHE[problem]


def default_priority(problem: Problem) -> np.ndarray:
    """int64 ``(n,)``: b-levels with average durations and without transfers (R2)."""
    return b_level(problem.graph, average_durations(problem))


def default_rank(problem: Problem) -> np.ndarray:
    """:func:`priority_rank` of the default priorities."""
    if problem not in _RANKS:
        _RANKS[problem] = priority_rank(default_priority(problem))
    return _RANKS[problem]


def priority_rank(priority: np.ndarray) -> np.ndarray:
    """int64 ``(n,)``: the position of each op in the order (highest priority, lowest op number)."""
    n = len(priority)
    if n and priority.min() == 0 and priority.max() == n - 1 and (np.bincount(priority, minlength=n) == 1).all():
        return n - 1 - priority.astype(np.int64)  # a permutation, as searches give it, needs no sorting
    rank = np.empty(n, np.int64)
    # ~p reverses the order of int64 without overflow (-p would overflow at the minimum).
    rank[np.argsort(~priority.astype(np.int64), kind="stable")] = np.arange(n)
    return rank


def _build(problem: Problem) -> Inputs:
    graph, topology, costs, rules = problem.graph, problem.topology, problem.costs, problem.rules
    route_ptr, route = topology.route_csr if rules.contention == "fair" else _even_routes(*topology.route_csr)
    longest = _check_range(problem)
    granularities, granule = np.unique(topology.granularity, return_inverse=True)
    tensor_size = _rounded(graph.tensor_bytes, granularities)
    home_size = np.where(graph.tensor_persistent, 0, tensor_size)
    workspace_size = _rounded(graph.op_workspace_bytes, granularities)
    made = np.concatenate([np.zeros((len(granularities), 1), np.int64), np.cumsum(home_size, axis=1)], axis=1)
    # In C order: NumPy may keep the order of its temporary array, and each kernel would be compiled for that order too.
    start_size = np.ascontiguousarray(workspace_size + np.diff(made[:, graph.output_ptr], axis=1))
    slots = np.ones_like(topology.slots) if rules.runtime == "eager" else topology.slots
    first = np.zeros(graph.n_units, np.int32)
    first[graph.unit_of_op[::-1]] = np.arange(graph.n_ops, dtype=np.int32)[::-1]  # of equal places the last counts
    fair = rules.contention == "fair"
    # Rates are rounded down to whole bytes/s. A channel still gives at least half of its bandwidth, so that a step
    # takes at most twice as long.
    most_inputs = int(np.diff(graph.input_ptr).max(initial=0)) + 1  # under ``eager``, the issue counts as one
    loop, alone = _loop(rules, bool((slots == 1).all())), _alone(problem, slots)
    shift = max(SHIFT, (graph.n_ops - 1).bit_length(), most_inputs.bit_length())
    if loop == IN_ORDER_LOOP and (rules.runtime == "eager" or alone.all()):
        shift = most_inputs.bit_length()
    if costs.gap_ns.any() or longest << fair >= (1 << KEY_BITS - shift) - 1:
        loop = GENERAL_LOOP
    return Inputs(
        shift=shift,
        mask=(1 << shift) - 1,
        line_mask=(1 << 32) - 1 if loop in (GENERAL_LOOP, IN_ORDER_LOOP) else (1 << shift) - 1,
        loop=loop,
        weightless=not (start_size.any() or tensor_size.any() or graph.op_persistent_bytes.any()),
        anywhere=graph.n_units == graph.n_ops and bool((costs.op_ns >= 0).all()),
        all_routed=bool(((costs.pair_class >= 0) | np.eye(topology.n_devices, dtype=bool)).all()),
        order=ORDERS.index("program" if rules.runtime == "eager" else rules.order),
        contention=CONTENTIONS.index(rules.contention),
        host=topology.host if rules.runtime == "eager" else -1,
        op_ns=costs.op_ns,
        device_row=costs.device_row.view(np.uint32),
        transfer_ns=costs.transfer_ns,
        pair_class=costs.pair_class,
        dispatch_ns=costs.dispatch_ns,
        gap_ns=costs.gap_ns,
        output_ptr=graph.output_ptr.view(np.uint32),
        input_ptr=graph.input_ptr.view(np.uint32),
        inputs=graph.inputs.view(np.uint32),
        tensor_producer=graph.tensor_producer.view(np.uint32),
        tensor_bytes=graph.tensor_bytes,
        tensor_result=graph.tensor_result,
        consumer_ptr=graph.consumer_ptr.view(np.uint32),
        consumers=graph.consumers.view(np.uint32),
        unit_first=first[graph.unit_of_op].view(np.uint32),
        slots=slots,
        slot_ptr=np.concatenate([[0], np.cumsum(slots)]).astype(np.int64),
        alone=alone,
        route_ptr=route_ptr.view(np.uint32),
        route=route.view(np.uint32),
        pair_latency=topology.pair_latency_ns,
        channel_rate=np.array([channel[3] for channel in topology.channels], np.int64),
        granule=granule.astype(np.uint32),
        tensor_size=tensor_size,
        home_size=home_size,
        start_size=start_size,
        workspace_size=workspace_size,
        persistent_size=_rounded(graph.op_persistent_bytes, granularities),
        capacity=topology.memory_bytes,
    )


def _loop(rules: Rules, single: bool) -> int:
    """The loop that serves ``rules``; ``single``: every device has one slot."""
    fair, eager = rules.contention == "fair", rules.runtime == "eager"
    if rules.order == "fifo" and not eager:
        return FAIR_LOOP if fair else FIFO_LOOP
    if fair or not single:
        return GENERAL_LOOP
    return PRIORITY_LOOP if rules.order == "priority" and not eager else IN_ORDER_LOOP


def _alone(problem: Problem, slots: np.ndarray) -> np.ndarray:
    """bool ``(D,)``: True if no other device sends over the channels that this device sends over, and it has one slot:
    then its transfers follow from its own ops."""
    if problem.rules.contention == "none":
        return np.ones(len(slots), bool)
    ptr, route = problem.topology.route_csr
    source = np.repeat(np.arange(len(slots)), np.diff(ptr[:: len(slots)]))
    first, last = np.full(len(problem.topology.channels), len(slots)), np.full(len(problem.topology.channels), -1)
    np.minimum.at(first, route, source)
    np.maximum.at(last, route, source)
    shared = np.zeros(len(slots), bool)
    shared[source[(first != last)[route]]] = True
    return ~shared & (slots == 1)


def _even_routes(ptr: np.ndarray, route: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Routes of equal length with the same waiting times; the kernels loop over them faster. A channel is left out if
    all routes over it share another channel, because it is never the last to be free. Then short routes repeat a
    channel."""
    pair = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    routes: dict[int, set[int]] = {}
    for channel, number in zip(route.tolist(), pair.tolist(), strict=True):
        routes.setdefault(channel, set()).add(number)
    needless = []
    for channel, over in routes.items():
        some = next(iter(over))  # a channel that is on all these routes is on this one
        beside = route[ptr[some] : ptr[some + 1]].tolist()
        if any(over < routes[other] or (over == routes[other] and other < channel) for other in beside):
            needless.append(channel)
    kept = ~np.isin(route, needless)
    pair, route = pair[kept], route[kept]
    length = np.bincount(pair, minlength=len(ptr) - 1)
    longest, first = int(length.max(initial=0)), np.cumsum(length) - length
    take = first[:, None] + np.minimum(np.arange(longest), np.maximum(length[:, None] - 1, 0))
    even = route[np.minimum(take, max(len(route) - 1, 0))] if len(route) else np.zeros((len(length), 0), np.int32)
    return np.arange(len(ptr), dtype=np.int32) * longest, even.ravel().astype(np.int32)


def _rounded(size: np.ndarray, granularities: np.ndarray) -> np.ndarray:
    return -(-size[None, :] // granularities[:, None]) * granularities[:, None]


def _check_range(problem: Problem) -> int:
    """Refuse problems whose sums could exceed 62 bits; return an upper bound on the step time in ns."""
    graph, topology, costs = problem.graph, problem.topology, problem.costs
    if problem.rules.contention == "fair":
        if graph.tensor_bytes.max(initial=0) > MAX_FAIR_BYTES:
            raise InvalidInput(
                "a tensor is larger than 8 GiB, which the contention 'fair' does not support", source=graph.name
            )
        if any(link.bytes_per_s > MAX_FAIR_RATE for link in topology.links):
            raise InvalidInput(
                "a link is faster than 2**58 bytes/s, which the contention 'fair' does not support",
                source=topology.name,
            )
        routed = np.diff(topology.route_csr[0]).reshape(topology.n_devices, -1) > 0
        if np.any((costs.pair_class >= 0) & ~routed & ~np.eye(topology.n_devices, dtype=bool)):
            raise InvalidInput(
                "two devices have a transfer cost but no route, which the contention 'fair' does not support",
                source=topology.name,
            )
    # No schedule lasts longer than all its work in turn: every op, every issue, every tensor to every device.
    longest = _total(np.maximum(costs.op_ns.max(axis=0), 0)) + _total(costs.dispatch_ns) + _total(costs.gap_ns)
    slowest = (
        costs.transfer_ns.max(axis=0, initial=0) if len(costs.transfer_ns) else np.zeros(graph.n_tensors, np.int64)
    )
    if problem.rules.contention == "fair":  # the cost table is not used (R4)
        slowest = np.zeros(graph.n_tensors, np.int64)
        for _, alone in times_alone(problem):
            slowest = np.maximum(slowest, alone)
    readers = np.minimum(np.diff(graph.consumer_ptr), topology.n_devices - 1)
    longest += _total(slowest, readers)
    if longest >= MAX_TIME_NS:
        raise InvalidInput(f"the durations sum to {longest} ns; a step must take less than 2**62 ns", source=graph.name)
    total = _total(graph.op_persistent_bytes) + _total(graph.op_workspace_bytes) + _total(graph.tensor_bytes)
    total += int(topology.granularity.max()) * (2 * graph.n_ops + graph.n_tensors)
    if total >= MAX_TIME_NS:
        raise InvalidInput(f"the sizes sum to {total} bytes; the sum must be less than 2**62", source=graph.name)
    return int(longest)


def _total(values: np.ndarray, times: np.ndarray | int = 1) -> int:
    """The exact sum of ``values * times``, neither negative."""
    largest = int(values.max(initial=0)) * int(np.max(times, initial=0)) * max(len(values), 1)
    return int((values * times).sum()) if largest < 1 << 63 else int((values.astype(object) * times).sum())
