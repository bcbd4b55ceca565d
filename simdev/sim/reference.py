"""The reference engine: MODEL.md as SimPy processes, written to be read. Each method cites the rule that it follows.

Ops, transfers and the issuing host are processes; channels are queues. Each completion schedules a *settling* of its
instant: an event with a lower priority than any completion, which decides the requests and starts of that instant (R5).
"""

from __future__ import annotations

import gc
import heapq
from collections import deque

import numpy as np
import simpy

from simdev.errors import InvalidInput
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.inputs import default_priority, problem_arrays
from simdev.sim.schedule import Schedule

SETTLE = 2  # below simpy's URGENT (0) and NORMAL (1)
NANO = 10**9


def simulate_reference(problem: Problem, placement: Placement) -> Schedule:
    """See :func:`simdev.sim.simulate`."""
    placement.check(problem)
    problem_arrays(problem)  # refuses what the fast engine refuses
    collects = gc.isenabled()
    gc.disable()  # the events of a step live as long as the step, so a search for garbage only doubles the time
    try:
        return _Step(problem, placement).run()
    finally:
        if collects:
            gc.enable()


class _Step:
    """The state of one simulated step."""

    def __init__(self, problem: Problem, placement: Placement):
        self.problem, self.graph, self.topology, self.rules = problem, problem.graph, problem.topology, problem.rules
        self.device = placement.devices.tolist()
        self.op_ns = problem.costs.of_ops(placement.devices).tolist()
        self.eager = self.rules.runtime == "eager"
        self.key = self._order_keys(placement)
        graph, n, n_devices = self.graph, self.graph.n_ops, self.topology.n_devices

        self.env = simpy.Environment()
        self.settling = False
        self.finished = [self.env.event() for _ in range(n)]
        self.issued = [self.env.event() for _ in range(n)] if self.eager else []
        self.go = [self.env.event() for _ in range(n)]
        self.start, self.finish = [None] * n, [None] * n
        self.ready: list[list[tuple]] = [[] for _ in range(n_devices)]
        self.free_slots = [1] * n_devices if self.eager else self.topology.slots.tolist()  # R11: one at a time
        self.program = [deque(np.flatnonzero(placement.devices == d).tolist()) for d in range(n_devices)]

        self.arrived: dict[tuple[int, int], simpy.Event] = {}  # (tensor, device): the tensor is there
        self.requests: list[tuple[int, int]] = []
        self.channels: dict[int, deque] = {c: deque() for c in range(len(self.topology.channels))}
        self.transfers: dict[tuple[int, int], list] = {}  # (tensor, target): [start, finish]
        self.flows = _Flows(self)

        self.holds: dict[tuple[int, int], int] = {}  # (tensor, device): reasons to keep the instance
        self.persistent: list[list[int]] = [[] for _ in range(n_devices)]
        for op in range(n):
            self.persistent[self.device[op]].append(self._rounded(graph.op_persistent_bytes[op], self.device[op]))
        self.used = [sum(sizes) for sizes in self.persistent]
        self.peak = list(self.used)
        self.capacity = self.topology.memory_bytes.tolist()
        self.overflow_op = [-1] * n_devices
        self.overflowed = [used > capacity for used, capacity in zip(self.used, self.capacity, strict=True)]

    def _order_keys(self, placement: Placement) -> list[int]:
        """R2: under ``priority``, the op with the smallest key starts first. The other orders need no key."""
        if self.rules.order != "priority":
            return [0] * self.graph.n_ops
        given = placement.priority if placement.priority is not None else default_priority(self.problem)
        return [-value for value in given.tolist()]

    def run(self) -> Schedule:
        graph = self.graph
        for tensor in range(graph.n_tensors):
            home = self.device[graph.tensor_producer[tensor]]
            readers: dict[int, list[int]] = {}
            for op in graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]].tolist():
                readers.setdefault(self.device[op], []).append(op)
            self.arrived[tensor, home] = self.env.event()
            self.holds[tensor, home] = 1 + len(readers.pop(home, ())) + bool(graph.tensor_result[tensor])
            for target, ops in sorted(readers.items()):
                self.arrived[tensor, target] = self.env.event()
                self.holds[tensor, target] = len(ops)
                self.holds[tensor, home] += 1
                self.env.process(self._send(tensor, target, first_reader=ops[0]))
        for op in range(graph.n_ops):
            self.env.process(self._op(op))
        if self.eager:
            self.env.process(self._host())
        self.env.run()
        if None in self.finish:
            raise InvalidInput("an op can never run", source=graph.name)
        return self._schedule()

    # Processes ------------------------------------------------------------------------------------------------------

    def _op(self, op: int):
        """R1: wait for the inputs (and the issue), then for a slot; run; make the outputs available."""
        graph, device = self.graph, self.device[op]
        reads = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]].tolist()
        writes = range(graph.output_ptr[op], graph.output_ptr[op + 1])
        causes = [self.arrived[tensor, device] for tensor in reads]
        if self.eager:
            causes.append(self.issued[op])
        yield self.env.all_of(causes)
        key = self.env.now if self.rules.order == "fifo" else self.key[op]
        heapq.heappush(self.ready[device], (op,) if self._in_program_order() else (key, op))
        self._settle()
        yield self.go[op]
        yield self.env.timeout(self.op_ns[op])
        self.finish[op] = self.env.now
        gap = int(self.problem.costs.gap_ns[op])
        if gap:
            self.env.process(self._gap(device, gap))
        else:
            self.free_slots[device] += 1
        self.used[device] -= self._rounded(graph.op_workspace_bytes[op], device)
        for tensor in reads:
            self._release(tensor, device)
        for tensor in writes:
            self._release(tensor, device)
            self.arrived[tensor, device].succeed()
        self.finished[op].succeed()
        self._settle()

    def _gap(self, device: int, gap: int):
        """R1: open the slot again after the op's gap."""
        yield self.env.timeout(gap)
        self.free_slots[device] += 1
        self._settle()

    def _send(self, tensor: int, target: int, first_reader: int):
        """R3: request the transfer when the producer has finished (R11: and the first consumer there is issued)."""
        causes = [self.finished[self.graph.tensor_producer[tensor]]]
        if self.eager:
            causes.append(self.issued[first_reader])
        yield self.env.all_of(causes)
        self.requests.append((tensor, target))
        self._settle()

    def _host(self):
        """R11: one thread issues the ops in order, and runs those of the host inline."""
        for op in range(self.graph.n_ops):
            yield self.env.timeout(int(self.problem.costs.dispatch_ns[op]))
            self.issued[op].succeed()
            if self.device[op] == self.topology.host:
                yield self.finished[op]

    def _transfer(self, tensor: int, target: int):
        """R4, ``fifo`` and ``none``: occupy the route for the whole duration."""
        pair_class = self.problem.costs.pair_class[self._home(tensor), target]
        yield self.env.timeout(int(self.problem.costs.transfer_ns[pair_class, tensor]))
        for channel in self._route(tensor, target):
            if self.rules.contention == "fifo":
                self.channels[channel].popleft()
        self.transfer_done(tensor, target)

    def transfer_done(self, tensor: int, target: int) -> None:
        """The end of a transfer: the copy has arrived, and the transfer no longer needs the tensor at home."""
        self.transfers[tensor, target][1] = self.env.now
        self._release(tensor, self._home(tensor))
        self.arrived[tensor, target].succeed()
        self._settle()

    # One instant ----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if not self.settling:
            self.settling = True
            event = simpy.Event(self.env)
            event._ok, event._value = True, None
            event.callbacks.append(self._settled)
            self.env.schedule(event, priority=SETTLE)

    def _settled(self, _) -> None:
        """R5: all completions of this instant have happened; process the requests, then the starts."""
        self.settling = False
        sent = self._start_transfers()
        started = [op for device in range(self.topology.n_devices) for op in self._start_ops(device)]
        self._allocate(sorted(started), sorted(sent))

    def _start_transfers(self) -> list[tuple[int, int]]:
        """R3, R4: queue the requests of this instant in order; start those that are first on every channel of their
        route."""
        now, requests = self.env.now, sorted(self.requests)
        self.requests = []
        if self.rules.contention == "fifo":
            for request in requests:
                for channel in self._route(*request):
                    self.channels[channel].append(request)
            waiting = {queue[0] for queue in self.channels.values() if queue} | set(requests)
            starting = [
                request
                for request in sorted(waiting)
                if request not in self.transfers
                and all(self.channels[channel][0] == request for channel in self._route(*request))
            ]
        else:
            starting = requests
        for request in starting:
            self.transfers[request] = [now, None]
            if self.rules.contention == "fair":
                self.env.process(self.flows.transfer(*request))
            else:
                self.env.process(self._transfer(*request))
        return starting

    def _start_ops(self, device: int) -> list[int]:
        """R1, R2: start the first ready ops, by the order of the rules, on the open slots."""
        started, ready = [], self.ready[device]
        while self.free_slots[device] and ready:
            op = ready[0][-1]
            if self._in_program_order() and self.program[device][0] != op:
                break
            heapq.heappop(ready)
            if self._in_program_order():
                self.program[device].popleft()
            self.free_slots[device] -= 1
            self.start[op] = self.env.now
            self.go[op].succeed()
            started.append(op)
        return started

    def _in_program_order(self) -> bool:
        return self.eager or self.rules.order == "program"

    def _allocate(self, ops: list[int], transfers: list[tuple[int, int]]) -> None:
        """R7, R8: allocate outputs and workspaces of starting ops, then copies; record who first exceeds a capacity."""
        graph = self.graph
        for op in ops:
            device = self.device[op]
            size = self._rounded(graph.op_workspace_bytes[op], device)
            for tensor in range(graph.output_ptr[op], graph.output_ptr[op + 1]):
                size += self._size(tensor, device)
            self._take(device, size, op)
        for tensor, target in transfers:
            self._take(target, self._size(tensor, target), int(graph.tensor_producer[tensor]))

    def _take(self, device: int, size: int, op: int) -> None:
        self.used[device] += size
        self.peak[device] = max(self.peak[device], self.used[device])
        if self.used[device] > self.capacity[device] and not self.overflowed[device]:
            self.overflowed[device] = True
            self.overflow_op[device] = op

    def _release(self, tensor: int, device: int) -> None:
        """R7: remove one reason to keep a tensor on a device; without reasons, free it."""
        self.holds[tensor, device] -= 1
        if self.holds[tensor, device] == 0:
            self.used[device] -= self._size(tensor, device)

    # Look-ups -------------------------------------------------------------------------------------------------------

    def _home(self, tensor: int) -> int:
        return self.device[self.graph.tensor_producer[tensor]]

    def _route(self, tensor: int, target: int) -> tuple[int, ...]:
        return self.topology.routes.get((self._home(tensor), target), ())

    def _size(self, tensor: int, device: int) -> int:
        if self.graph.tensor_persistent[tensor] and device == self._home(tensor):
            return 0
        return self._rounded(self.graph.tensor_bytes[tensor], device)

    def _rounded(self, size, device: int) -> int:
        grain = int(self.topology.granularity[device])
        return -(-int(size) // grain) * grain

    def _schedule(self) -> Schedule:
        pairs = sorted(self.transfers)
        tensor = np.array([pair[0] for pair in pairs], np.int32)
        times = np.array([self.transfers[pair] for pair in pairs], np.int64).reshape(-1, 2)
        peak = np.array(self.peak, np.int64)
        return Schedule(
            step_ns=max([*self.finish, *times[:, 1].tolist()]),
            op_start=np.array(self.start, np.int64),
            op_finish=np.array(self.finish, np.int64),
            transfer_tensor=tensor,
            transfer_source=np.array([self._home(pair[0]) for pair in pairs], np.int32),
            transfer_target=np.array([pair[1] for pair in pairs], np.int32),
            transfer_start=times[:, 0].copy(),
            transfer_finish=times[:, 1].copy(),
            peak_bytes=peak,
            overflow_bytes=np.maximum(peak - self.topology.memory_bytes, 0),
            overflow_op=np.array(self.overflow_op, np.int32),
            comm_bytes=sum(int(self.graph.tensor_bytes[pair[0]]) for pair in pairs),
        )


class _Flows:
    """R4, ``fair``: flows share the channels max-min fairly, in whole bytes per second."""

    def __init__(self, step: _Step):
        self.step = step
        self.left: dict[tuple[int, int], int] = {}  # bytes * 1e9
        self.rate: dict[tuple[int, int], int] = {}
        self.since = 0
        self.changed = False
        self.generation = 0

    def transfer(self, tensor: int, target: int):
        """Wait for the latency, then flow until no work is left."""
        step = self.step
        latency = int(step.topology.pair_latency_ns[step._home(tensor), target])
        size = int(step.graph.tensor_bytes[tensor])
        if size == 0:
            yield step.env.timeout(max(1, latency))
            step.transfer_done(tensor, target)
            return
        yield step.env.timeout(latency)
        self._advance()
        self.left[tensor, target], self.rate[tensor, target] = size * NANO, 0
        self._change()

    def _advance(self) -> None:
        """Subtract the work done since the last call."""
        elapsed, self.since = self.step.env.now - self.since, self.step.env.now
        for flow in self.left:
            self.left[flow] -= self.rate[flow] * elapsed

    def _change(self) -> None:
        """Compute the rates anew at the end of this instant, after all its completions, requests and begins of
        flows."""
        if not self.changed:
            self.changed = True
            event = simpy.Event(self.step.env)
            event._ok, event._value = True, None
            event.callbacks.append(self._share)
            self.step.env.schedule(event, priority=SETTLE + 1)

    def _share(self, _) -> None:
        """Progressive filling: the narrowest channel fixes the rates of its flows at equal whole shares; repeat."""
        self.changed = False
        self._advance()
        left = {number: channel[3] for number, channel in enumerate(self.step.topology.channels)}
        open_flows = {flow: set(self.step._route(*flow)) for flow in self.left}
        while open_flows:
            count = {c: sum(c in route for route in open_flows.values()) for c in left}
            share, narrowest = min((left[c] // count[c], c) for c in left if count[c])
            for flow in [flow for flow, route in open_flows.items() if narrowest in route]:
                self.rate[flow] = max(1, share)
                for channel in open_flows.pop(flow):
                    left[channel] = max(0, left[channel] - self.rate[flow])
        self.generation += 1
        if self.left:
            wait = min(-(-self.left[flow] // self.rate[flow]) for flow in self.left)
            self.step.env.process(self._end(wait, self.generation))

    def _end(self, wait: int, generation: int):
        """Finish the flows without work left, unless the rates have changed since this end was computed."""
        yield self.step.env.timeout(wait)
        if generation != self.generation:
            return
        self._advance()
        for flow in [flow for flow in self.left if self.left[flow] <= 0]:
            del self.left[flow], self.rate[flow]
            self.step.transfer_done(*flow)
        self._change()
