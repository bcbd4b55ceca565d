"""The validator: checks that a finished schedule obeys the rules of MODEL.md. It shares no code with the engines."""

from __future__ import annotations

import heapq

import numpy as np

from simdev.analysis.levels import average_durations, b_level
from simdev.errors import SimdevError
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.schedule import Schedule


class InvalidSchedule(SimdevError):
    """A schedule that breaks ``rule`` (``R1`` ...)."""

    def __init__(self, rule: str, message: str):
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def validate(problem: Problem, placement: Placement, schedule: Schedule) -> None:
    """Check that ``schedule`` is the one that the rules R1-R8 and R11 give for ``placement``.

    Raises :class:`InvalidSchedule`, which names the rule and the op, if it is not, and :class:`InvalidInput` for a
    placement that breaks its contract.
    """
    placement.check(problem)
    check = _Check(problem, placement, schedule)
    check.shapes()
    check.durations()
    check.sends()
    check.inputs_are_there()
    check.links()
    if problem.rules.runtime == "eager":
        check.eager_order()
    else:
        check.slots()
        check.no_idle_slot()
        check.order()
    check.totals()
    check.memory()


class _Check:
    """A schedule and what it is checked against. ``ready`` is the time at which all inputs of an op are on its
    device."""

    def __init__(self, problem: Problem, placement: Placement, schedule: Schedule):
        self.problem, self.graph, self.topology, self.costs = problem, problem.graph, problem.topology, problem.costs
        self.placement, self.schedule = placement, schedule
        self.device = placement.devices
        self.eager = problem.rules.runtime == "eager"
        self.home = self.device[self.graph.tensor_producer]

    def fail(self, rule: str, op: int, message: str):
        raise InvalidSchedule(rule, f"op {self.graph.op_names[op]!r} (number {op}) {message}")

    def fail_where(self, rule: str, bad: np.ndarray, ops: np.ndarray, message: str):
        """Fail for the op in ``ops`` at the first True of ``bad``."""
        if bad.any():
            self.fail(rule, int(ops[np.argmax(bad)]), message)

    def shapes(self) -> None:
        n, x, d = self.graph.n_ops, len(self.schedule.transfer_tensor), self.topology.n_devices
        for name in self.schedule.ARRAYS:
            length = x if name.startswith("transfer") else n if name in ("op_start", "op_finish") else d
            array = getattr(self.schedule, name)
            if array.shape != (length,) or array.dtype.kind != "i":
                raise InvalidSchedule(
                    "R6", f"{name} has shape {array.shape} {array.dtype}, expected ({length},) integers"
                )

    def durations(self) -> None:
        """R1: an op occupies its slot for its duration, and none starts before time 0."""
        s, ops = self.schedule, np.arange(self.graph.n_ops)
        self.fail_where("R1", s.op_start < 0, ops, "starts before time 0")
        duration = self.costs.of_ops(self.device)
        self.fail_where("R1", s.op_finish - s.op_start != duration, ops, "does not run for its duration")

    def sends(self) -> None:
        """R3: each tensor is sent once to each other device with a consumer, and there is no other transfer."""
        graph, s, d = self.graph, self.schedule, self.topology.n_devices
        target = self.device[graph.consumers]
        remote = target != self.home[graph.edge_tensor]
        wanted = np.unique(graph.edge_tensor[remote].astype(np.int64) * d + target[remote])
        valid = (s.transfer_tensor >= 0) & (s.transfer_tensor < graph.n_tensors)
        if not (valid & (s.transfer_target >= 0) & (s.transfer_target < d)).all():
            raise InvalidSchedule("R3", "a transfer names a tensor or device that does not exist")
        made = s.transfer_tensor.astype(np.int64) * d + s.transfer_target
        producer = graph.tensor_producer
        if np.any(np.diff(made) <= 0):
            where = int(made[1:][np.diff(made) <= 0][0]) // d
            self.fail("R3", int(producer[where]), "has a tensor sent twice, or its transfers are not sorted")
        for pair in np.setdiff1d(wanted, made)[:1].tolist():
            self.fail("R3", int(producer[pair // d]), f"has a tensor that is not sent to device {pair % d}")
        for pair in np.setdiff1d(made, wanted)[:1].tolist():
            self.fail("R3", int(producer[pair // d]), f"has a tensor sent to device {pair % d}, where nothing reads it")
        owner = producer[s.transfer_tensor]
        self.fail_where("R3", s.transfer_source != self.device[owner], owner, "has a tensor sent from another device")
        self.made = made

    def inputs_are_there(self) -> None:
        """R1: no op starts before all its inputs are on its device."""
        graph, s = self.graph, self.schedule
        arrival = s.op_finish[graph.edge_source].copy()
        target = self.device[graph.consumers]
        remote = target != self.home[graph.edge_tensor]
        key = graph.edge_tensor[remote].astype(np.int64) * self.topology.n_devices + target[remote]
        arrival[remote] = s.transfer_finish[np.searchsorted(self.made, key)]
        self.ready = np.zeros(graph.n_ops, np.int64)
        np.maximum.at(self.ready, graph.consumers, arrival)
        self.fail_where("R1", s.op_start < self.ready, np.arange(graph.n_ops), "starts before its inputs are there")
        if self.eager:
            self.issue = self._issue_times()

    def _issue_times(self) -> np.ndarray:
        """R11: the host issues in op order; after an op of its own, it issues the next one at the finish of that op."""
        free, issue = 0, np.zeros(self.graph.n_ops, np.int64)
        on_host = (self.device == self.topology.host).tolist()
        for op, dispatch in enumerate(self.costs.dispatch_ns.tolist()):
            free += dispatch
            issue[op] = free
            if on_host[op]:
                free = int(self.schedule.op_finish[op])
        return issue

    def _requests(self) -> np.ndarray:
        """R3, R11: the time at which each transfer is requested."""
        graph, s = self.graph, self.schedule
        request = s.op_finish[graph.tensor_producer[s.transfer_tensor]].copy()
        if self.eager:
            target = self.device[graph.consumers]
            remote = target != self.home[graph.edge_tensor]
            key = graph.edge_tensor[remote].astype(np.int64) * self.topology.n_devices + target[remote]
            first = np.full(len(request), graph.n_ops - 1)
            np.minimum.at(first, np.searchsorted(self.made, key), graph.consumers[remote])
            request = np.maximum(request, self.issue[first])
        return request

    def links(self) -> None:
        """R4: the durations of transfers, and the contention for channels."""
        s, rules = self.schedule, self.problem.rules
        owner = self.graph.tensor_producer[s.transfer_tensor]
        request = self._requests()
        self.fail_where("R4", s.transfer_start < request, owner, "has a transfer that starts before its request")
        if rules.contention == "fair":
            self.fail_where("R4", s.transfer_start != request, owner, "has a transfer that waits under fair contention")
            self._fair_links(owner)
            return
        pair_class = self.costs.pair_class[s.transfer_source, s.transfer_target]
        duration = self.costs.transfer_ns[pair_class, s.transfer_tensor]
        wrong = s.transfer_finish - s.transfer_start != duration
        self.fail_where("R4", wrong, owner, "has a transfer that does not take its duration")
        if rules.contention == "none":
            self.fail_where("R4", s.transfer_start != request, owner, "has a transfer that waits for nothing")
            return
        line = np.lexsort((s.transfer_target, s.transfer_tensor, request))
        held_up = s.transfer_start == request
        for users in self._channel_users():
            users = users[np.argsort(np.argsort(line)[users])]  # in the order of their requests
            before, after = users[:-1], users[1:]
            early = s.transfer_start[after] < s.transfer_finish[before]
            self.fail_where("R4", early, owner[after], "has a transfer that overtakes or overlaps on a channel")
            held_up[after] |= s.transfer_start[after] == s.transfer_finish[before]
        self.fail_where("R4", ~held_up, owner, "has a transfer that starts later than its channels allow")

    def _channel_users(self) -> list[np.ndarray]:
        """The transfers that cross each channel."""
        users: list[list[int]] = [[] for _ in self.topology.channels]
        pairs = zip(self.schedule.transfer_source.tolist(), self.schedule.transfer_target.tolist(), strict=True)
        for transfer, pair in enumerate(pairs):
            for channel in self.topology.routes.get(pair, ()):
                users[channel].append(transfer)
        return [np.array(list_, np.int64) for list_ in users]

    def _fair_links(self, owner: np.ndarray) -> None:
        """R4, ``fair``: integrate the max-min rates over the flows that the schedule contains."""
        s, topology = self.schedule, self.topology
        join = s.transfer_start + topology.pair_latency_ns[s.transfer_source, s.transfer_target]
        size = self.graph.tensor_bytes[s.transfer_tensor]
        empty = size == 0
        wrong = empty & (s.transfer_finish != np.maximum(join, s.transfer_start + 1))
        self.fail_where("R4", wrong, owner, "has a control edge that does not take the latency")
        self.fail_where("R4", ~empty & (s.transfer_finish <= join), owner, "has a transfer faster than the latency")
        flows = np.flatnonzero(~empty)
        left = {flow: int(size[flow]) * 10**9 for flow in flows.tolist()}
        instants = np.unique(np.concatenate([join[flows], s.transfer_finish[flows]])).tolist()
        for now, then in zip(instants[:-1], instants[1:], strict=True):
            active = flows[(join[flows] <= now) & (s.transfer_finish[flows] > now)].tolist()
            for flow, rate in self._max_min(active).items():
                if left[flow] - rate * (then - now - 1) <= 0:
                    self.fail("R4", int(owner[flow]), "has a transfer that ends later than its share allows")
                left[flow] -= rate * (then - now)
                if (left[flow] <= 0) != (s.transfer_finish[flow] == then):
                    self.fail("R4", int(owner[flow]), "has a transfer that does not end when its bytes are through")

    def _max_min(self, flows: list[int]) -> dict[int, int]:
        """Whole rates by progressive filling, on an incidence matrix of channels and flows."""
        s, topology = self.schedule, self.topology
        crosses = np.zeros((len(topology.channels), len(flows)), bool)
        for column, flow in enumerate(flows):
            crosses[list(topology.routes[int(s.transfer_source[flow]), int(s.transfer_target[flow])]), column] = True
        capacity = [channel[3] for channel in topology.channels]
        rate, is_open = [0] * len(flows), np.ones(len(flows), bool)
        while is_open.any():
            load = (crosses & is_open).sum(axis=1)
            best = min(np.flatnonzero(load).tolist(), key=lambda c: (capacity[c] // int(load[c]), c))
            share = max(1, capacity[best] // int(load[best]))
            for column in np.flatnonzero(crosses[best] & is_open).tolist():
                rate[column] = share
                for channel in np.flatnonzero(crosses[:, column]).tolist():
                    capacity[channel] = max(0, capacity[channel] - share)
            is_open &= ~crosses[best]
        return dict(zip(flows, rate, strict=True))

    def eager_order(self) -> None:
        """R11: each device runs its ops in issue order, one at a time, as early as issue and inputs allow."""
        s = self.schedule
        earliest = np.maximum(self.ready, self.issue)
        for device in range(self.topology.n_devices):
            ops = np.flatnonzero(self.device == device)
            earliest[ops[1:]] = np.maximum(earliest[ops[1:]], s.op_finish[ops[:-1]])
        ops = np.arange(self.graph.n_ops)
        self.fail_where("R11", s.op_start < earliest, ops, "starts before its issue or out of order")
        self.fail_where("R11", s.op_start > earliest, ops, "starts later than issue, inputs and order allow")

    def _busy(self, ops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The instants at which the number of slots in use (or closed after an op) changes, and that number."""
        times = np.concatenate([self.schedule.op_start[ops], self.schedule.op_finish[ops] + self.costs.gap_ns[ops]])
        change = np.repeat([1, -1], len(ops))
        instants, where = np.unique(times, return_inverse=True)
        return instants, np.cumsum(np.bincount(where, change, len(instants))).astype(np.int64)

    def slots(self) -> None:
        """R1: a device never runs more ops at once than it has slots."""
        for device in range(self.topology.n_devices):
            ops = np.flatnonzero(self.device == device)
            instants, busy = self._busy(ops)
            crowded = instants[busy > self.topology.slots[device]]
            for now in crowded[:1]:
                self.fail_where("R1", self.schedule.op_start[ops] == now, ops, "starts without a free slot")

    def no_idle_slot(self) -> None:
        """R1, R2: while an op that may start waits, every slot of its device is busy."""
        s = self.schedule
        for device in range(self.topology.n_devices):
            ops = np.flatnonzero(self.device == device)
            if not len(ops):
                continue
            since = self.ready[ops].copy()
            if self.problem.rules.order == "program":
                self.fail_where("R2", np.diff(s.op_start[ops]) < 0, ops[1:], "starts out of program order")
                since[1:] = np.maximum(since[1:], s.op_start[ops[:-1]])
            instants, busy = self._busy(ops)
            spare = busy < self.topology.slots[device]
            idle = np.concatenate([[0], np.cumsum(np.diff(instants) * spare[:-1])])

            def idle_before(times, instants=instants, idle=idle, spare=spare):
                # Idle time from 0 to each of ``times``; before the first start all slots are idle.
                spot = np.searchsorted(instants, times, side="right") - 1
                inside = np.maximum(spot, 0)
                total = instants[0] + idle[inside] + (times - instants[inside]) * spare[inside]
                return np.where(spot < 0, times, total)

            waited = idle_before(s.op_start[ops]) > idle_before(since)
            self.fail_where("R2", waited, ops, "waits although its device has a free slot")

    def order(self) -> None:
        """R2: the ops that start at an instant are the first of the ready ops, by the order of the rules."""
        if self.problem.rules.order == "program":
            return  # no_idle_slot has checked it
        start, ready = self.schedule.op_start.tolist(), self.ready.tolist()
        key = ready
        if self.problem.rules.order == "priority":
            given = self.placement.priority
            if given is None:
                given = b_level(self.graph, average_durations(self.problem))
            key = [-value for value in given.tolist()]
        for device in range(self.topology.n_devices):
            ops = np.flatnonzero(self.device == device).tolist()
            by_ready, by_start = sorted(ops, key=ready.__getitem__, reverse=True), sorted(ops, key=start.__getitem__)
            waiting: list[tuple[int, int]] = []
            first = 0
            while first < len(by_start):
                now = start[by_start[first]]
                stop = first
                while stop < len(by_start) and start[by_start[stop]] == now:
                    stop += 1
                while by_ready and ready[by_ready[-1]] <= now:
                    op = by_ready.pop()
                    heapq.heappush(waiting, (key[op], op))
                chosen = {heapq.heappop(waiting)[1] for _ in range(stop - first)}
                for op in sorted(chosen.symmetric_difference(by_start[first:stop]))[:1]:
                    self.fail("R2", op, f"does not start in its turn at {now} ns ({self.problem.rules.order})")
                first = stop

    def totals(self) -> None:
        """R6, and the sum of the bytes sent."""
        s = self.schedule
        last = int(max(s.op_finish.max(), s.transfer_finish.max(initial=0)))
        if s.step_ns != last:
            raise InvalidSchedule("R6", f"step_ns is {s.step_ns}, the last completion is at {last}")
        sent = int(self.graph.tensor_bytes[s.transfer_tensor].sum())
        if s.comm_bytes != sent:
            raise InvalidSchedule("R3", f"comm_bytes is {s.comm_bytes}, the transfers carry {sent}")

    def memory(self) -> None:
        """R7, R8: list every allocation with its interval, and sum those in use at each begin."""
        for device in range(self.topology.n_devices):
            size, born, freed, owner, turn = self._instances(device)
            base = int(self._rounded(self.graph.op_persistent_bytes[self.device == device], device).sum())
            capacity = int(self.topology.memory_bytes[device])
            instants = np.unique(born)
            by_birth, by_death = np.argsort(born, kind="stable"), np.argsort(freed, kind="stable")
            total_born = np.concatenate([[0], np.cumsum(size[by_birth])])
            total_freed = np.concatenate([[0], np.cumsum(size[by_death])])

            def alive(now, right, born=born[by_birth], freed=freed[by_death], a=total_born, b=total_freed):
                return a[np.searchsorted(born, now, side=right)] - b[np.searchsorted(freed, now, side="right")]

            used = base + alive(instants, "right")
            peak = int(max(base, used.max(initial=0)))
            found = self.schedule.peak_bytes[device], self.schedule.overflow_bytes[device]
            name = self.topology.devices[device].name
            if found[0] != peak:
                raise InvalidSchedule("R7", f"the peak of device {name!r} is given as {found[0]}, but is {peak} bytes")
            if found[1] != max(0, peak - capacity):
                raise InvalidSchedule("R8", f"the overflow of device {name!r} is given as {found[1]} bytes")
            culprit = -1
            if base <= capacity < peak:
                now = instants[np.argmax(used > capacity)]
                level = base + int(alive(now, "left"))
                for item in np.flatnonzero(born == now)[np.argsort(turn[born == now], kind="stable")]:
                    level += int(size[item])
                    if level > capacity:
                        culprit = int(owner[item])
                        break
            if self.schedule.overflow_op[device] != culprit:
                raise InvalidSchedule("R8", f"overflow_op of device {name!r} is not op {culprit}")

    def _instances(self, device: int) -> tuple[np.ndarray, ...]:
        """All allocations on ``device``: size, begin, end, owning op, and rank among those of the same instant (R8)."""
        graph, s = self.graph, self.schedule
        ops = np.flatnonzero(self.device == device)
        workspace = self._rounded(graph.op_workspace_bytes[ops], device)
        local_edge = self.device[graph.consumers] == device
        last_read = np.full(graph.n_tensors, -1, np.int64)
        np.maximum.at(last_read, graph.edge_tensor[local_edge], s.op_finish[graph.consumers[local_edge]])
        sent = np.full(graph.n_tensors, -1, np.int64)
        np.maximum.at(sent, s.transfer_tensor, s.transfer_finish)
        own = np.flatnonzero((self.home == device) & ~graph.tensor_persistent)
        maker = graph.tensor_producer[own]
        death = np.maximum(np.maximum(s.op_finish[maker], last_read[own]), sent[own])
        death[graph.tensor_result[own]] = np.iinfo(np.int64).max
        copies = np.flatnonzero(s.transfer_target == device)
        copied = s.transfer_tensor[copies]
        return (
            np.concatenate(
                [
                    workspace,
                    self._rounded(graph.tensor_bytes[own], device),
                    self._rounded(graph.tensor_bytes[copied], device),
                ]
            ),
            np.concatenate([s.op_start[ops], s.op_start[maker], s.transfer_start[copies]]),
            np.concatenate([s.op_finish[ops], death, last_read[copied]]),
            np.concatenate([ops, maker, graph.tensor_producer[copied]]),
            np.concatenate([ops, maker, graph.n_ops + copied]),
        )

    def _rounded(self, size: np.ndarray, device: int) -> np.ndarray:
        grain = int(self.topology.granularity[device])
        return (size + grain - 1) // grain * grain
