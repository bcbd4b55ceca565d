"""Why a step takes as long as it does: the chain of events that ends last, memory over time, and what would help."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim import Schedule, simulate_many

REASONS = {
    "compute": "compute on the critical path",
    "device": "waiting for a busy device",
    "transfer": "transfers on the critical path",
    "link": "waiting for a busy link",
    "launch": "waiting for the host to launch",
}
TRIES = 400  # single moves that explain may simulate


@dataclass(frozen=True)
class Link:
    """A stretch of the critical chain: ``item`` is an op, for ``transfer`` and ``link`` a row of the schedule's
    transfers; ``begin_ns`` and ``end_ns`` from the start of the step."""

    reason: str
    item: int
    begin_ns: int
    end_ns: int


class Story:
    """A schedule with what explains it. ``problem``, ``placement`` and ``schedule`` belong together."""

    def __init__(self, problem: Problem, placement: Placement, schedule: Schedule):
        self.problem, self.placement, self.schedule = problem, placement, schedule
        self.graph, self.topology, self.device = problem.graph, problem.topology, placement.devices
        self.device_names = [device.name for device in self.topology.devices]

    @cached_property
    def chain(self) -> tuple[Link, ...]:
        """The critical chain, in order of time: it covers the step without a gap. From the last completion backwards,
        each op is traced to the input that came last, else to the op that freed its device; each transfer to its
        producer, else to the transfer that freed its channel."""
        links, reason = [], None
        kind, item, time = self._last()
        while time > 0:
            if kind == "issue":
                begin, kind, item = self._before_issue(item)
                links.append(Link("launch", links[-1].item if links else item, begin, time))
                time, reason = begin, None
                continue
            begin = int((self.schedule.op_start if kind == "op" else self.schedule.transfer_start)[item])
            name = reason or ("compute" if kind == "op" else "transfer")
            links.append(Link(name, item, begin, time))
            if begin == 0:
                break
            kind, item, time, reason = (self._before_op if kind == "op" else self._before_transfer)(item, begin)
            if time < begin:  # held back by a rule, not by an event (program order with several slots)
                links.append(Link("device", links[-1].item, time, begin))
        return tuple(reversed(links))

    @cached_property
    def attribution(self) -> dict[str, int]:
        """Nanoseconds of the step by reason, in the order of :data:`REASONS`; they add up to the step."""
        total = dict.fromkeys(REASONS, 0)
        for link in self.chain:
            total[link.reason] += link.end_ns - link.begin_ns
        return total

    @cached_property
    def channel_of_transfer(self) -> list[tuple[int, ...]]:
        """The channels that each transfer occupies."""
        pairs = zip(self.schedule.transfer_source.tolist(), self.schedule.transfer_target.tolist(), strict=True)
        return [self.topology.routes.get(pair, ()) for pair in pairs]

    @cached_property
    def channel_users(self) -> dict[int, np.ndarray]:
        """Transfers that cross each channel, int64, by channel; channels without any are left out."""
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
        """int64 times (ns) and the bytes in use on ``device`` from each of them on (R7)."""
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
        """Rounded bytes, birth, death (ns) and owning op of all that is allocated on ``device`` while the step runs."""
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

    # the way back along the chain

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
        """R11: when the host has issued each op, int64 ``(n,)``."""
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
        """What an op that starts at ``begin`` waited for: kind, number, when it ended, and the reason if it is not
        data."""
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
    """A sentence, and the nanoseconds of the step that it is about; sorted by them, most first."""

    ns: int
    text: str


def explain(story: Story, most: int = 10) -> list[Finding]:
    """The bottlenecks and single changes that matter most, at most ``most``. What a change saves is simulated, not
    estimated."""
    found = [*_overflows(story), *_reasons(story), *_layers(story), *_transfers(story), *_idle(story), *_moves(story)]
    return sorted(found, key=lambda finding: -finding.ns)[:most]


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms"


def _share(story: Story, ns: int) -> str:
    return f"{_ms(ns)} ({ns / max(1, story.schedule.step_ns):.0%} of the step)"


def _overflows(story: Story) -> list[Finding]:
    found = []
    for device in np.flatnonzero(story.schedule.overflow_bytes):
        over, op = int(story.schedule.overflow_bytes[device]), int(story.schedule.overflow_op[device])
        cause = f"first at op {story.graph.op_names[op]!r}" if op >= 0 else "the persistent bytes alone exceed it"
        text = f"{story.device_names[device]} runs out of memory by {over / 2**20:,.1f} MiB; {cause}"
        found.append(Finding(story.schedule.step_ns + over, text))
    return found


def _reasons(story: Story) -> list[Finding]:
    return [
        Finding(ns, f"{REASONS[reason]}: {_share(story, ns)}")
        for reason, ns in story.attribution.items() if ns > 0
    ]  # fmt: skip


def _layers(story: Story) -> list[Finding]:
    """Layers with the most compute on the critical chain."""
    total: dict[tuple[str, int], int] = defaultdict(int)
    for link in story.chain:
        if link.reason in ("compute", "device"):
            layer = story.graph.layers[story.graph.op_layer[link.item]] or story.graph.op_names[link.item]
            total[layer, int(story.device[link.item])] += link.end_ns - link.begin_ns
    largest = sorted(total.items(), key=lambda item: -item[1])[:3]
    return [
        Finding(ns, f"layer {layer!r} on {story.device_names[device]} fills {_share(story, ns)} of the critical chain")
        for (layer, device), ns in largest
    ]


def _transfers(story: Story) -> list[Finding]:
    """Transfers that take the most of the critical chain."""
    found = []
    s = story.schedule
    stretches = sorted(
        (link for link in story.chain if link.reason in ("transfer", "link")),
        key=lambda link: link.begin_ns - link.end_ns,
    )
    for link in stretches[:2]:
        tensor, ns = int(s.transfer_tensor[link.item]), link.end_ns - link.begin_ns
        maker = story.graph.op_names[story.graph.tensor_producer[tensor]]
        size = int(story.graph.tensor_bytes[tensor]) / 2**20
        way = (
            f"{story.device_names[s.transfer_source[link.item]]} to {story.device_names[s.transfer_target[link.item]]}"
        )
        what = "occupies the link another one waits for" if link.reason == "link" else "is waited for"
        found.append(Finding(ns, f"the output of {maker!r} ({size:,.1f} MiB) from {way} {what}: {_share(story, ns)}"))
    return found


def _idle(story: Story) -> list[Finding]:
    """How busy the accelerators are; what they idle on average counts."""
    busy = story.schedule.busy_ns(story.device, story.topology.n_devices) / story.topology.slots
    shares = busy[list(story.topology.accelerators)] / max(1, story.schedule.step_ns)
    names = [story.device_names[device] for device in story.topology.accelerators]
    each = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, shares, strict=True))
    idle = int((1 - shares.mean()) * story.schedule.step_ns) if len(shares) else 0
    return [Finding(idle, f"accelerators idle for {_share(story, idle)} on average; busy: {each}")] if names else []


def _moves(story: Story) -> list[Finding]:
    """The single moves of a placement unit on the critical chain that save the most, each simulated."""
    unit_of_op, n_devices = story.graph.unit_of_op, story.topology.n_devices
    weight: dict[int, int] = defaultdict(int)
    for link in story.chain:
        op = link.item if link.reason in ("compute", "device", "launch") else None
        if op is None:
            op = int(story.graph.tensor_producer[story.schedule.transfer_tensor[link.item]])
        weight[int(unit_of_op[op])] += link.end_ns - link.begin_ns
    heaviest = sorted(weight, key=lambda unit: -weight[unit])[: TRIES // n_devices]
    tries = []
    for unit in heaviest:
        here = int(story.device[np.argmax(unit_of_op == unit)])
        for device in range(n_devices):
            if device != here and story.problem.unit_op_ns[device, unit] >= 0:
                tries.append((unit, here, device))
    if not tries:
        return []
    devices = np.tile(story.device, (len(tries), 1))
    for row, (unit, _, device) in zip(devices, tries, strict=True):
        row[unit_of_op == unit] = device
    outcome = simulate_many(story.problem, devices)
    fits = outcome.overflow_bytes <= int(story.schedule.overflow_bytes.sum())
    saved = np.where(fits, story.schedule.step_ns - outcome.step_ns, 0)
    found = []
    for number in np.argsort(-saved, kind="stable")[:3]:
        if saved[number] <= 0:
            break
        unit, here, device = tries[number]
        ops = np.flatnonzero(unit_of_op == unit)
        more = f" and {len(ops) - 1} more ops" if len(ops) > 1 else ""
        way = f"from {story.device_names[here]} to {story.device_names[device]}"
        text = f"moving {story.graph.op_names[ops[0]]!r}{more} {way} saves {_share(story, int(saved[number]))}"
        found.append(Finding(int(saved[number]), text))
    if not found:
        found.append(Finding(0, f"none of {len(tries)} single moves of ops on the critical chain helps"))
    return found
