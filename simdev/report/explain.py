"""Explain why a step takes as long as it does: the critical chain, memory over time, and changes that would help."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from simdev.parallel import PlanReport
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim import Schedule, simulate, simulate_many

REASONS = {
    "compute": "computing the ops of the critical chain",
    "device": "queueing: an op of the chain is ready, but its device computes other ops",
    "transfer": "transferring tensors of the chain",
    "link": "queueing: a tensor of the chain is ready, but its link carries other tensors",
    "launch": "waiting until the host launches an op of the chain",
}
TRIES = 400  # moves that explain may simulate


@dataclass(frozen=True)
class Stretch:
    """A part of the critical chain, from ``begin_ns`` to ``end_ns`` after the start of the step.

    ``reason`` is a key of :data:`REASONS`. ``item`` is the number of an op or, for the reasons ``transfer`` and
    ``link``, the number of a transfer in the schedule.
    """

    reason: str
    item: int
    begin_ns: int
    end_ns: int


class Explanation:
    """Answers questions about one schedule: which events form its critical chain, how much memory is in use, which
    transfers cross which channel. ``schedule`` must be the schedule of ``placement`` on ``problem``.

    ``pipeline`` says what runs if that is not one step: microbatches or queries. ``problem`` is then the graph of all
    of them (:func:`simdev.sim.pipeline.simulate_pipeline`), and ``each_ns`` the steady time of each."""

    def __init__(
        self, problem: Problem, placement: Placement, schedule: Schedule, pipeline: str = "", each_ns: int = 0
    ):
        self.problem, self.placement, self.schedule = problem, placement, schedule
        self.pipeline, self.each_ns = pipeline, each_ns
        self.graph, self.topology, self.device = problem.graph, problem.topology, placement.devices
        self.device_names = [device.name for device in self.topology.devices]

    @cached_property
    def chain(self) -> tuple[Stretch, ...]:
        """The critical chain, in order of time. It covers the step without a gap.

        It is traced backwards from the last completion: from an op to the input that arrived last, or else to the op
        that freed its device; from a transfer to its producer, or else to the transfer that freed its channel.
        """
        stretches: list[Stretch] = []
        reason: str | None = None
        kind, item, time = self._last()
        while time > 0:
            if kind == "issue":
                begin, kind, item = self._before_issue(item)
                stretches.append(Stretch("launch", stretches[-1].item if stretches else item, begin, time))
                time, reason = begin, None
                continue
            begin = int((self.schedule.op_start if kind == "op" else self.schedule.transfer_start)[item])
            name = reason or ("compute" if kind == "op" else "transfer")
            stretches.append(Stretch(name, item, begin, time))
            if begin == 0:
                break
            kind, item, time, reason = (self._before_op if kind == "op" else self._before_transfer)(item, begin)
            if time < begin:  # a rule delayed it, not an event (program order with several slots)
                stretches.append(Stretch("device", stretches[-1].item, time, begin))
        return tuple(reversed(stretches))

    @property
    def whole(self) -> str:
        """What shares are shares of."""
        return "run" if self.pipeline else "step"

    def times(self) -> dict[str, float]:
        """What JSON answers: the time of a step, or of all microbatches or queries and of each, in seconds."""
        whole = self.schedule.step_time_s
        return {"total_s": whole, "steady_s": self.each_ns / 1e9} if self.pipeline else {"step_time_s": whole}

    def heading(self) -> str:
        """What runs where, and how long it takes."""
        text = f"{self.graph.name} {self.pipeline}".rstrip() + f" on {self.topology.name}: {_ms(self.schedule.step_ns)}"
        return text + f" ({self.each_ns / 1e6:,.3f} ms each in the steady state)" if self.pipeline else text

    @cached_property
    def attribution(self) -> dict[str, int]:
        """Nanoseconds of the step by reason, in the order of :data:`REASONS`. Their sum is the step time."""
        total = dict.fromkeys(REASONS, 0)
        for stretch in self.chain:
            total[stretch.reason] += stretch.end_ns - stretch.begin_ns
        return total

    @cached_property
    def channel_of_transfer(self) -> list[tuple[int, ...]]:
        """The channels that each transfer occupies."""
        pairs = zip(self.schedule.transfer_source.tolist(), self.schedule.transfer_target.tolist(), strict=True)
        return [self.topology.routes.get(pair, ()) for pair in pairs]

    @cached_property
    def channel_users(self) -> dict[int, np.ndarray]:
        """The numbers of the transfers that cross each channel, int64, by channel. Unused channels are absent."""
        users = defaultdict(list)
        for transfer, channels in enumerate(self.channel_of_transfer):
            for channel in channels:
                users[channel].append(transfer)
        return {channel: np.array(users[channel]) for channel in sorted(users)}

    def channel_name(self, channel: int) -> str:
        """``a > b``, or ``a - b`` for both directions of a half-duplex link."""
        a, b, *_ = self.topology.channels[channel]
        both = any({a, b} == set(link.ends) and link.duplex == "half" for link in self.topology.links)
        return f"{a} {'-' if both else '>'} {b}"

    def memory(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory of ``device`` over time (R7): int64 times in ns, and the bytes in use from each of them on."""
        size, born, freed, _ = self.allocations(device)
        grain = int(self.topology.granularity[device])
        persistent = self.graph.op_persistent_bytes[self.device == device]
        base = int((-(-persistent // grain) * grain).sum())
        freed = np.minimum(freed, self.schedule.step_ns)
        times, place = np.unique(np.concatenate([[0], born, freed]), return_inverse=True)
        change = np.zeros(len(times), np.int64)
        np.add.at(change, place[1 : len(born) + 1], size)
        np.subtract.at(change, place[len(born) + 1 :], size)
        return times, base + np.cumsum(change)

    def allocations(self, device: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The allocations on ``device`` during the step, as four int64 arrays: rounded bytes, begin in ns, end in ns,
        and the op that owns each."""
        graph, s = self.graph, self.schedule
        ops = np.flatnonzero(self.device == device)
        readers = graph.consumers[self.device[graph.consumers] == device]
        read = graph.edge_tensor[self.device[graph.consumers] == device]
        last_read = np.full(graph.n_tensors, -1, np.int64)
        np.maximum.at(last_read, read, s.op_finish[readers])
        last_sent = np.full(graph.n_tensors, -1, np.int64)
        np.maximum.at(last_sent, s.transfer_tensor, s.transfer_finish)
        at_home = self.device[graph.tensor_producer] == device
        own = np.flatnonzero(at_home & ~graph.tensor_persistent)
        maker = graph.tensor_producer[own]
        death = np.maximum.reduce([s.op_finish[maker], last_read[own], last_sent[own]])
        death[graph.tensor_result[own]] = s.step_ns
        copies = np.flatnonzero(s.transfer_target == device)
        copied = s.transfer_tensor[copies]
        grain = int(self.topology.granularity[device])
        size = np.concatenate([graph.op_workspace_bytes[ops], graph.tensor_bytes[own], graph.tensor_bytes[copied]])
        return (
            -(-size // grain) * grain,
            np.concatenate([s.op_start[ops], s.op_start[maker], s.transfer_start[copies]]),
            np.concatenate([s.op_finish[ops], death, last_read[copied]]),
            np.concatenate([ops, maker, graph.tensor_producer[copied]]),
        )

    # Tracing the chain backwards

    def _last(self) -> tuple[str, int, int]:
        op = int(np.argmax(self.schedule.op_finish))
        if len(self.schedule.transfer_finish):
            transfer = int(np.argmax(self.schedule.transfer_finish))
            if self.schedule.transfer_finish[transfer] > self.schedule.op_finish[op]:
                return "transfer", transfer, self.schedule.step_ns
        return "op", op, self.schedule.step_ns

    @cached_property
    def _transfer_number(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.schedule.transfer_tensor.tolist(), self.schedule.transfer_target.tolist(), strict=True)
        return {pair: number for number, pair in enumerate(pairs)}

    @cached_property
    def _issue(self) -> np.ndarray:
        """The time in ns at which the host has issued each op (R11), int64 ``(n,)``."""
        free, issue = 0, np.zeros(self.graph.n_ops, np.int64)
        on_host = (self.device == self.topology.host).tolist()
        for op, dispatch in enumerate(self.problem.costs.dispatch_ns.tolist()):
            issue[op] = free = free + dispatch
            if on_host[op]:
                free = int(self.schedule.op_finish[op])
        return issue

    @property
    def _eager(self) -> bool:
        return self.problem.rules.runtime == "eager"

    def _before_issue(self, op: int) -> tuple[int, str, int]:
        begin = int(self._issue[op] - self.problem.costs.dispatch_ns[op])
        on_host = op > 0 and self.device[op - 1] == self.topology.host
        return begin, "op" if on_host else "issue", op - 1

    def _before_op(self, op: int, begin: int):
        """The event that an op starting at ``begin`` waited for: its kind, number and end, and the reason, or ``None``
        if the op waited for data."""
        graph, s, here = self.graph, self.schedule, int(self.device[op])
        best = ("op", op, -1)
        for tensor in graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]].tolist():
            maker = int(graph.tensor_producer[tensor])
            if self.device[maker] == here:
                found = ("op", maker, int(s.op_finish[maker]))
            else:
                transfer = self._transfer_number[tensor, here]
                found = ("transfer", transfer, int(s.transfer_finish[transfer]))
            best = max(best, found, key=lambda candidate: candidate[2])
        if best[2] == begin:
            return (*best, None)
        if self._eager and self._issue[op] == begin:
            return "issue", op, begin, None
        freed = np.flatnonzero((self.device == here) & (s.op_finish == begin))
        if len(freed):
            return "op", int(freed[0]), begin, "device"
        return (*best[:2], max(best[2], 0), None)

    def _before_transfer(self, transfer: int, begin: int):
        s, tensor = self.schedule, int(self.schedule.transfer_tensor[transfer])
        maker = int(self.graph.tensor_producer[tensor])
        if s.op_finish[maker] == begin:
            return "op", maker, begin, None
        for channel in self.channel_of_transfer[transfer]:
            users = self.channel_users[channel]
            freed = users[s.transfer_finish[users] == begin]
            if len(freed):
                return "transfer", int(freed[0]), begin, "link"
        if self._eager:
            first = self.graph.consumers[self.graph.consumer_ptr[tensor] : self.graph.consumer_ptr[tensor + 1]]
            first = first[self.device[first] == s.transfer_target[transfer]]
            if len(first) and self._issue[first.min()] == begin:
                return "issue", int(first.min()), begin, None
        return "op", maker, int(s.op_finish[maker]), None


@dataclass(frozen=True)
class Finding:
    """A sentence about a schedule. ``ns`` is the part of the step that the sentence is about."""

    ns: int
    text: str


def explain(explanation: Explanation, most: int = 10) -> list[Finding]:
    """The bottlenecks, at most ``most`` of them and the largest first; then the changes that were tried, with what each
    saves. Savings are simulated, not estimated. If no change helps, the last finding says how many were tried. For a
    pipeline, no change is tried: its unrolled graph limits what each stage has in progress, and a move changes that."""
    found = [
        *_overflows(explanation),
        *_reasons(explanation),
        *_layers(explanation),
        *_transfers(explanation),
        *_idle(explanation),
    ]
    changes = [] if explanation.pipeline else _changes(explanation)
    return [*sorted(found, key=lambda finding: -finding.ns)[:most], *changes]


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms"


def _share(explanation: Explanation, ns: int) -> str:
    return f"{_ms(ns)} ({ns / max(1, explanation.schedule.step_ns):.0%} of the {explanation.whole})"


def _overflows(explanation: Explanation) -> list[Finding]:
    found = []
    for device in np.flatnonzero(explanation.schedule.overflow_bytes):
        over, op = int(explanation.schedule.overflow_bytes[device]), int(explanation.schedule.overflow_op[device])
        cause = f"first at op {explanation.graph.op_names[op]!r}" if op >= 0 else "the persistent bytes alone exceed it"
        text = f"{explanation.device_names[device]} runs out of memory by {over / 2**20:,.1f} MiB; {cause}"
        found.append(Finding(explanation.schedule.step_ns + over, text))
    return found


def _reasons(explanation: Explanation) -> list[Finding]:
    return [
        Finding(ns, f"{REASONS[reason]}: {_share(explanation, ns)}")
        for reason, ns in explanation.attribution.items()
        if ns > 0
    ]


def _layers(explanation: Explanation) -> list[Finding]:
    """The layers with the longest compute time on the critical chain."""
    total: dict[tuple[str, int], int] = defaultdict(int)
    for stretch in explanation.chain:
        if stretch.reason in ("compute", "device"):
            layer = (
                explanation.graph.layers[explanation.graph.op_layer[stretch.item]]
                or explanation.graph.op_names[stretch.item]
            )
            total[layer, int(explanation.device[stretch.item])] += stretch.end_ns - stretch.begin_ns
    largest = sorted(total.items(), key=lambda item: -item[1])[:3]
    names = explanation.device_names
    return [
        Finding(ns, f"layer {layer!r} on {names[device]} fills {_share(explanation, ns)} of the critical chain")
        for (layer, device), ns in largest
    ]


def _transfers(explanation: Explanation) -> list[Finding]:
    """The transfers that take the longest part of the critical chain."""
    found = []
    s = explanation.schedule
    stretches = sorted(
        (stretch for stretch in explanation.chain if stretch.reason in ("transfer", "link")),
        key=lambda stretch: stretch.begin_ns - stretch.end_ns,
    )
    for stretch in stretches[:2]:
        tensor, ns = int(s.transfer_tensor[stretch.item]), stretch.end_ns - stretch.begin_ns
        maker = explanation.graph.op_names[explanation.graph.tensor_producer[tensor]]
        size = int(explanation.graph.tensor_bytes[tensor]) / 2**20
        source, target = (
            explanation.device_names[ends[stretch.item]] for ends in (s.transfer_source, s.transfer_target)
        )
        way = f"{source} to {target}"
        what = "occupies the link that another one waits for" if stretch.reason == "link" else "is waited for"
        found.append(
            Finding(ns, f"the output of {maker!r} ({size:,.1f} MiB) from {way} {what}: {_share(explanation, ns)}")
        )
    return found


def _idle(explanation: Explanation) -> list[Finding]:
    """The load of each accelerator; ``ns`` of the finding is their average idle time."""
    busy = explanation.schedule.busy_ns(explanation.device, explanation.topology.n_devices) / explanation.topology.slots
    shares = busy[list(explanation.topology.accelerators)] / max(1, explanation.schedule.step_ns)
    names = [explanation.device_names[device] for device in explanation.topology.accelerators]
    each = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, shares, strict=True))
    idle = int((1 - shares.mean()) * explanation.schedule.step_ns) if len(shares) else 0
    return (
        [Finding(idle, f"accelerators compute nothing for {_share(explanation, idle)} on average; computing: {each}")]
        if names
        else []
    )


def _changes(explanation: Explanation) -> list[Finding]:
    """The changes that save the most: moves of a placement unit or a layer, another order of ready ops, links without
    queues. Each is simulated."""
    tried = _moves(explanation)
    moves = [finding for finding in _best_moves(explanation, tried) if finding.ns > 0]
    rules = [finding for finding in _other_rules(explanation) if finding.ns > 0]
    none = [] if moves else [Finding(0, f"none of {len(tried)} tried moves of ops and layers of the chain helps")]
    return [*sorted([*moves, *rules], key=lambda finding: -finding.ns), *none]


def _moves(explanation: Explanation) -> list[tuple[np.ndarray, int]]:
    """Moves of the units and layers that fill most of the critical chain: the ops that move, and the device that they
    move to. At most :data:`TRIES`."""
    graph, n_devices = explanation.graph, explanation.topology.n_devices
    unit_of_op = graph.unit_of_op
    weight: dict[tuple[str, int, int], int] = defaultdict(int)  # by kind, number, device
    for stretch in explanation.chain:
        op = stretch.item if stretch.reason in ("compute", "device", "launch") else None
        if op is None:
            op = int(graph.tensor_producer[explanation.schedule.transfer_tensor[stretch.item]])
        here, ns = int(explanation.device[op]), stretch.end_ns - stretch.begin_ns
        weight["unit", int(unit_of_op[op]), here] += ns
        if graph.layers[graph.op_layer[op]]:
            weight["layer", int(graph.op_layer[op]), here] += ns
    moves: list[tuple[np.ndarray, int]] = []
    for kind in ("layer", "unit"):
        heaviest = sorted((key for key in weight if key[0] == kind), key=lambda key: -weight[key])
        for _, number, here in heaviest[: TRIES // 2 // max(1, n_devices - 1)]:
            whole = graph.op_layer == number if kind == "layer" else unit_of_op == number
            units = np.unique(unit_of_op[whole & (explanation.device == here)])
            ops = np.flatnonzero(np.isin(unit_of_op, units))
            for device in range(n_devices):
                if device != here and (explanation.problem.unit_op_ns[device, units] >= 0).all():
                    moves.append((ops, device))
    return moves


def _best_moves(explanation: Explanation, moves: list[tuple[np.ndarray, int]], most: int = 3) -> list[Finding]:
    if not moves:
        return []
    devices = np.tile(explanation.device, (len(moves), 1))
    for row, (ops, device) in zip(devices, moves, strict=True):
        row[ops] = device
    step_ns, overflow_bytes = _simulated(explanation, devices)
    fits = overflow_bytes <= int(explanation.schedule.overflow_bytes.sum())
    saved = np.where(fits, explanation.schedule.step_ns - step_ns, 0)
    found = []
    for number in np.argsort(-saved, kind="stable")[:most]:
        ops, device = moves[number]
        more = f" and {len(ops) - 1:,} more op{'s' if len(ops) > 2 else ''}" if len(ops) > 1 else ""
        way = f"from {explanation.device_names[int(explanation.device[ops[0]])]} to {explanation.device_names[device]}"
        ns = int(saved[number])
        first = explanation.graph.op_names[ops[0]]
        found.append(Finding(ns, f"moving {first!r}{more} {way} saves {_share(explanation, ns)}"))
    return found


def _simulated(explanation: Explanation, devices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step time in ns and overflow in bytes of each row of ``devices``, int64, with the placement's own priorities."""
    priority = explanation.placement.priority
    if priority is None:
        outcome = simulate_many(explanation.problem, devices)
        return outcome.step_ns, outcome.overflow_bytes
    found = [simulate(explanation.problem, Placement(row, priority)) for row in devices]
    return np.array([s.step_ns for s in found]), np.array([s.overflow_bytes.sum() for s in found])


def _other_rules(explanation: Explanation) -> list[Finding]:
    """What the same placement gains if ready ops are taken by priority, and if links never queue."""
    problem, found = explanation.problem, []
    variants = (
        ("order", "priority", "taking ready ops by priority instead of in order of arrival"),
        ("contention", "none", "links that carry any number of tensors at full speed"),
    )
    for name, value, what in variants:
        if getattr(problem.rules, name) == value:
            continue
        changed = replace(problem, rules=replace(problem.rules, **{name: value}))
        ns = explanation.schedule.step_ns - simulate(changed, explanation.placement).step_ns
        found.append(Finding(ns, f"{what} would save {_share(explanation, ns)}"))
    return found


ADVICE = {
    "kernels": "less recomputation, other kernels or more devices would shorten it",
    "communication that no kernel hides": "a mesh with smaller groups or faster links would shorten it",
    "idle (waiting for other pipeline ranks or the host)": "more microbatches or even stages would shorten it",
}


def explain_plan(report: PlanReport) -> list[str]:
    """What the step of a plan consists of, the largest part first, then how full the fullest pipeline rank is."""
    idle = report.step_ns - report.compute_ns - report.exposed_ns
    parts = dict(zip(ADVICE, (report.compute_ns, report.exposed_ns, idle), strict=True))
    found = []
    for name, ns in sorted(parts.items(), key=lambda part: -part[1].mean()):
        share, most = float(ns.mean()) / report.step_ns, int(np.argmax(ns))
        where = f", most on pipeline rank {most} ({ns[most] / report.step_ns:.1%})" if len(ns) > 1 else ""
        advice = f": {ADVICE[name]}" if share >= 0.05 else ""
        found.append(f"{share:.1%} of the step, {ns.mean() / 1e6:,.1f} ms, {name}{where}{advice}")
    full, capacity = int(np.argmax(report.peak_bytes)), report.plan.cluster.kind.memory_bytes
    peak = report.peak_bytes[full]
    rank = f" of pipeline rank {full}" if len(idle) > 1 else ""
    found.append(f"memory{rank} is filled to {peak / capacity:.1%}: {peak / 2**30:.1f} of {capacity / 2**30:.1f} GiB")
    return found
