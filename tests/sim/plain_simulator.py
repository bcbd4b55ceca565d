"""A third simulator, written from MODEL.md alone: no speed, no shared code, one step of the clock after another.

It proves that MODEL.md says everything that decides a schedule. Nothing here may be copied from an engine; where the
text leaves a question open, the text must be mended.
"""

from collections import defaultdict
from math import inf

NS = 10**9


def simulate_plainly(problem, placement):
    """All fields of a schedule as plain lists and numbers, in a dict."""
    return Step(problem, placement).run()


class Step:
    def __init__(self, problem, placement):
        graph, topology, costs = problem.graph, problem.topology, problem.costs
        self.graph, self.topology, self.rules = graph, topology, problem.rules
        self.n, self.device = graph.n_ops, [int(d) for d in placement.devices]
        self.duration = [int(costs.op_ns[costs.device_row[d]][v]) for v, d in enumerate(self.device)]
        self.gap = [int(g) for g in costs.gap_ns]
        self.dispatch = [int(g) for g in costs.dispatch_ns]
        self.made, self.read = defaultdict(list), defaultdict(list)
        self.readers = []
        for t, producer in enumerate(graph.tensor_producer.tolist()):
            self.made[producer].append(t)
            ops = graph.consumers[graph.consumer_ptr[t] : graph.consumer_ptr[t + 1]].tolist()
            self.readers.append(ops)
            for v in ops:
                self.read[v].append(t)
        self.home = [self.device[v] for v in graph.tensor_producer.tolist()]
        self.send_ns = lambda t, d: int(costs.transfer_ns[costs.pair_class[self.home[t]][d]][t])
        self.eager = self.rules.runtime == "eager"
        self.priority = self._priorities(problem, placement)

        self.start, self.finish, self.issued = [None] * self.n, [None] * self.n, [None] * self.n
        self.arrived = {}  # (tensor, device) -> time
        self.requested, self.waiting, self.sent = set(), [], {}  # sent: (tensor, device) -> [start, finish or None]
        self.flows, self.joins, self.rate, self.work, self.clock = [], {}, {}, {}, 0

    def _priorities(self, problem, placement):
        if placement.priority is not None:
            return placement.priority.tolist()
        level, table = [0] * self.n, problem.costs.op_ns[problem.costs.device_row]
        for v in reversed(range(self.n)):
            known = [int(row[v]) for row in table if row[v] >= 0]
            below = [level[c] for t in self.made[v] for c in self.readers[t]]
            level[v] = sum(known) // len(known) + max(below, default=0)
        return level

    def run(self):
        now = 0
        while now < inf:
            self._complete(now)
            self._request(now)
            self._start_transfers(now)
            self._start_ops(now)
            now = self._next(now)
        return self._schedule()

    # R5: completions first. A finish that is known beforehand counts from its instant on. -----------------------------
    def _complete(self, now):
        for key, (_, finish) in self.sent.items():
            if finish is not None and finish <= now:
                self.arrived.setdefault(key, finish)
        for flow in list(self.flows):  # the work left falls by rate times ns
            self.work[flow] -= self.rate[flow] * (now - self.clock)
            if self.work[flow] <= 0:
                self.flows.remove(flow)
                self.sent[flow][1] = self.arrived[flow] = now
        self.clock = now
        for v in range(self.n):
            if self.eager and self.issued[v] is None:
                self._issue(v)

    def _issue(self, v):
        """R11: issuing v begins when v - 1 is issued, or has finished where it runs on the issuing host."""
        if v == 0:
            began = 0
        elif self.device[v - 1] == self.topology.host:
            began = self.finish[v - 1]
        else:
            began = self.issued[v - 1]
        if began is not None:
            self.issued[v] = began + self.dispatch[v]

    def _done(self, v, now):
        return self.finish[v] is not None and self.finish[v] <= now

    # R3 ---------------------------------------------------------------------------------------------------------------
    def _request(self, now):
        for t, producer in enumerate(self.graph.tensor_producer.tolist()):
            if not self._done(producer, now):
                continue
            for d in sorted({self.device[c] for c in self.readers[t]} - {self.home[t]}):
                first = min(c for c in self.readers[t] if self.device[c] == d)
                late = self.eager and (self.issued[first] is None or self.issued[first] > now)
                if (t, d) not in self.requested and not late:
                    self.requested.add((t, d))
                    self.waiting.append((t, d))

    # R4 ---------------------------------------------------------------------------------------------------------------
    def _route(self, key):
        return self.topology.routes[self.home[key[0]], key[1]]

    def _start_transfers(self, now):
        how = self.rules.contention
        if how == "none":
            for key in self.waiting:
                self.sent[key] = [now, now + self.send_ns(*key)]
            self.waiting = []
        elif how == "fifo":
            held = {c for key, (_, end) in self.sent.items() if end > now for c in self._route(key)}
            for key in list(self.waiting):
                if not held & set(self._route(key)):
                    self.sent[key] = [now, now + self.send_ns(*key)]
                    self.waiting.remove(key)
                held |= set(self._route(key))  # a waiting request holds its place on every channel
        else:
            for key in self.waiting:
                latency = sum(self.topology.channels[c][2] for c in self._route(key))
                empty = self.graph.tensor_bytes[key[0]] == 0
                self.sent[key] = [now, now + max(latency, 1) if empty else None]
                if not empty:
                    self.joins[key] = now + latency
            self.waiting = []
            self._share(now)

    def _share(self, now):
        for key in [key for key, time in self.joins.items() if time == now]:
            del self.joins[key]
            self.flows.append(key)
            self.work[key] = int(self.graph.tensor_bytes[key[0]]) * NS
        left, open_ = [c[3] for c in self.topology.channels], list(self.flows)
        while open_:
            users = {c: [f for f in open_ if c in self._route(f)] for f in open_ for c in self._route(f)}
            quotient, channel = min((left[c] // len(flows), c) for c, flows in users.items())
            for flow in users[channel]:
                self.rate[flow] = max(quotient, 1)
                for c in self._route(flow):
                    left[c] = max(left[c] - self.rate[flow], 0)
                open_.remove(flow)

    # R1, R2, R11 ------------------------------------------------------------------------------------------------------
    def _ready(self, v):
        """When the last input is on the device of v; None if one is missing."""
        times = [0]
        for t in self.read[v]:
            here = self.home[t] == self.device[v]
            times.append(self.finish[self.graph.tensor_producer[t]] if here else self.arrived.get((t, self.device[v])))
        return None if None in times else max(times)

    def _start_ops(self, now):
        for d in range(self.topology.n_devices):
            mine = [v for v in range(self.n) if self.device[v] == d]
            gap = [0] * self.n if self.eager else self.gap
            busy = sum(self.start[v] is not None and self.finish[v] + gap[v] > now for v in mine)
            free = (1 if self.eager else int(self.topology.slots[d])) - busy
            while free > 0:
                rest = [v for v in mine if self.start[v] is None]
                ready = {v: self._ready(v) for v in rest}
                can = [v for v in rest if ready[v] is not None and ready[v] <= now]
                if self.eager:
                    can = [v for v in can if self.issued[v] is not None and self.issued[v] <= now]
                if self.eager or self.rules.order == "program":
                    can = [v for v in can if v == rest[0]]
                if not can:
                    break
                by_priority = self.rules.order == "priority" and not self.eager
                first = min(can, key=lambda v: (-self.priority[v] if by_priority else ready[v], v))
                self.start[first], self.finish[first] = now, now + self.duration[first]
                free -= 1

    def _next(self, now):
        gap = [0] * self.n if self.eager else self.gap
        times = [end for _, end in self.sent.values() if end is not None]
        times += [
            t for v in range(self.n) if self.finish[v] is not None for t in (self.finish[v], self.finish[v] + gap[v])
        ]
        times += [t for t in self.issued if t is not None]
        if self.eager and self.n and any(t is None for t in self.issued):  # what was issued just now may allow the next
            self._complete(now)
            times += [t for t in self.issued if t is not None]
        times += list(self.joins.values())
        times += [now + -(-self.work[f] // self.rate[f]) for f in self.flows]
        return min((t for t in times if t > now), default=inf)

    # R6, R7, R8 -------------------------------------------------------------------------------------------------------
    def _schedule(self):
        assert None not in self.finish, "an op never ran"
        keys = sorted(self.sent)
        ends = [*self.finish, *(self.sent[key][1] for key in keys)]
        result = dict(
            op_start=self.start,
            op_finish=self.finish,
            step_ns=max(ends, default=0),
            transfer_tensor=[t for t, _ in keys],
            transfer_source=[self.home[t] for t, _ in keys],
            transfer_target=[d for _, d in keys],
            transfer_start=[self.sent[key][0] for key in keys],
            transfer_finish=[self.sent[key][1] for key in keys],
            comm_bytes=sum(int(self.graph.tensor_bytes[t]) for t, _ in keys),
        )
        memory = [self._memory(d) for d in range(self.topology.n_devices)]
        result["peak_bytes"], result["overflow_bytes"], result["overflow_op"] = map(list, zip(*memory, strict=True))
        return result

    def _memory(self, d):
        graph, capacity = self.graph, int(self.topology.memory_bytes[d])
        unit = int(self.topology.granularity[d])

        def rounded(size):
            return -(-int(size) // unit) * unit

        ops = [v for v in range(self.n) if self.device[v] == d]
        always = sum(rounded(graph.op_persistent_bytes[v]) for v in ops)
        held = []  # (begin, end, bytes, place in the order of allocations, op at fault)
        for v in ops:
            held.append((self.start[v], self.finish[v], rounded(graph.op_workspace_bytes[v]), (0, v), v))
        for t, producer in enumerate(graph.tensor_producer.tolist()):
            here = [self.finish[c] for c in self.readers[t] if self.device[c] == d]
            if self.home[t] == d:
                if not graph.tensor_persistent[t]:
                    sends = [finish for key, (_, finish) in self.sent.items() if key[0] == t]
                    end = inf if graph.tensor_result[t] else max([self.finish[producer], *here, *sends])
                    held.append((self.start[producer], end, rounded(graph.tensor_bytes[t]), (0, producer), producer))
            elif here:
                held.append((self.sent[t, d][0], max(here), rounded(graph.tensor_bytes[t]), (1, t), producer))
        peak, fault = always, -1
        for instant in sorted({begin for begin, *_ in held}):
            used = always + sum(size for begin, end, size, *_ in held if begin < instant < end)
            new = sorted((place, size, op) for begin, _, size, place, op in held if begin == instant)
            for index, (place, size, op) in enumerate(new):
                used += size
                whole = index + 1 == len(new) or new[index + 1][0] != place  # an op's workspace and outputs together
                if whole and used > capacity and fault < 0 and always <= capacity:
                    fault = op
            peak = max(peak, used)
        return peak, max(peak - capacity, 0), fault
