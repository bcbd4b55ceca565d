"""A third simulator, written from MODEL.md alone: no speed, no shared code, one step of the clock after another.

It proves that MODEL.md says everything that decides a schedule. Nothing here may be copied from an engine; where the
text leaves a question open, the text must be mended."""

from collections import defaultdict
from fractions import Fraction
from math import inf, lcm
from types import SimpleNamespace

import numpy as np

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


NOT_WORK = {"input", "parameter", "constant", "barrier"}
FORWARD, BACKWARD, UPDATE = 0, 1, 2


class Op:
    """An op of the unrolled graph. ``place`` decides its number; ``of`` is the op that it is a copy of, -1 for none."""

    def __init__(self, place, device, of=-1, microbatch=-1, added=""):
        self.place, self.device, self.of, self.microbatch, self.added = place, device, of, microbatch, added
        self.tensors, self.signal = [], None


class Tensor:
    """A tensor of the unrolled graph: one of ``parts`` of the tensor ``of``; a signal is of none."""

    def __init__(self, of=-1, parts=1):
        self.of, self.parts, self.readers = of, parts, []


class Pipeline:
    def __init__(self, problem, placement, count, order):
        self.problem, self.graph, self.count, self.order = problem, problem.graph, count, order
        self.home = placement.devices.tolist()
        self.phase = self.graph.op_phase.tolist()
        self.kind = [self.graph.kinds[k] for k in self.graph.op_kind.tolist()]
        self.producer = self.graph.tensor_producer.tolist()
        ptr, consumers = self.graph.consumer_ptr.tolist(), self.graph.consumers.tolist()
        self.readers = [sorted(set(consumers[ptr[t] : ptr[t + 1]])) for t in range(len(self.producer))]
        self.outputs = [[t for t, p in enumerate(self.producer) if p == v] for v in range(self.graph.n_ops)]
        self.reads = [[t for t in range(len(self.producer)) if v in self.readers[t]] for v in range(self.graph.n_ops)]
        self.replica_of = placement.replica_of
        self.teams = [self._team(d) for d in range(problem.topology.n_devices)]
        copied = [True] * len(self.home) if placement.replicated is None else placement.replicated.tolist()
        self.team_of = [self.teams[d] if copies else [d] for d, copies in zip(self.home, copied, strict=True)]
        self.stage_of = self.home if self.replica_of is None else [int(self.replica_of[d]) for d in self.home]
        self.given = [self._is_given(v) for v in range(self.graph.n_ops)]
        self.is_update = [self.phase[v] == UPDATE and not self.given[v] for v in range(self.graph.n_ops)]
        self.ops, self.copy = [], {}  # copy: (op, microbatch) or (op, "once", number)
        self._copies()
        self._reads()
        self.stages = self._stages()
        self._gradients()
        self._gpipe() if order == "gpipe" else self._one_f_one_b()

    # -- teams and copies ------------------------------------------------------------------------------------------
    def _team(self, device):
        if self.replica_of is None or self.replica_of[device] != device:
            return [device]
        team = sorted(d for d, of in enumerate(self.replica_of.tolist()) if of == device)
        return team[: self.count]

    def _is_given(self, v):
        holds = self.graph.op_persistent_bytes[v] > 0 or self.kind[v] in ("parameter", "constant")
        return not self.reads[v] and bool(holds)

    def _once(self, v):
        return self.given[v] or self.is_update[v]

    def _add(self, *args, **rest):
        self.ops.append(Op(*args, **rest))
        return self.ops[-1]

    def _copies(self):
        for v in range(self.graph.n_ops):
            team = self.team_of[v]
            if self._once(v):
                for j, device in enumerate(team):
                    self.copy[v, "once", j] = self._add((0 if self.given[v] else 9, v, j), device, v)
            else:
                for m in range(self.count):
                    self.copy[v, m] = self._add(self._place(m, 1, v, self.phase[v]), team[m % len(team)], v, m)
        for op in self.ops:
            op.tensors = [Tensor(t) for t in self.outputs[op.of]]

    def _place(self, m, rank, number, phase=BACKWARD):
        """Second group: under 1f1b by microbatch; under gpipe the forward ops, the barriers, the rest."""
        if self.order == "1f1b":
            return (1, m, rank, number)
        return (1 if phase == FORWARD else 3, m, rank, number)

    def _tensor(self, t, m):
        """Tensor ``t`` as microbatch ``m``, or copy ``m`` of an update, reads it."""
        v = self.producer[t]
        number = self.outputs[v].index(t)
        key = (v, "once", m % len(self.team_of[v])) if self._once(v) else (v, m)
        return self.copy[key].tensors[number]

    def _reads(self):
        for key, op in self.copy.items():
            for t in self.reads[op.of]:
                if self._once(self.producer[t]) or not self.is_update[op.of]:
                    self._tensor(t, key[-1]).readers.append(op)

    def _waits(self, later, earlier):
        if earlier.signal is None:
            earlier.signal = Tensor()
        if later not in earlier.signal.readers:
            earlier.signal.readers.append(later)

    # -- gradients and their exchange ------------------------------------------------------------------------------
    def _gradients(self):
        for t, maker in enumerate(self.producer):
            updates = [v for v in self.readers[t] if self.is_update[v]]
            if self._once(maker) or not updates:
                continue
            waiting = [op for key, op in self.copy.items() if op.of in updates]
            team = self.team_of[maker]
            mine = [self._tensor(t, m) for m in range(self.count)]
            if self.graph.tensor_bytes[t] == 0:
                for tensor in mine:
                    tensor.readers += waiting
                continue
            added = []
            for m in range(len(team), self.count):
                op = self._add(self._place(m, 2, t), team[m % len(team)], microbatch=m, added="accumulate")
                mine[m % len(team)].readers.append(op)
                mine[m].readers.append(op)
                added.append(op)
            if len(team) == 1:
                mine[0].readers += waiting
                for op in added:
                    for update in waiting:
                        self._waits(update, op)
            else:
                self._exchange(t, team, mine, added, waiting)

    def _exchange(self, t, team, buffers, added, waiting):
        r = len(team)
        split = [self._add((5, t, j), d, added="split") for j, d in enumerate(team)]
        total = [self._add((6, t, j), d, added="sum") for j, d in enumerate(team)]
        for j in range(r):
            buffers[j].readers += [split[j], total[j]]
            for op in added:
                if op.device == team[j]:
                    self._waits(split[j], op)
            self._waits(total[j], split[j])
            for other in range(r):
                if other != j:
                    part = Tensor(t, r)
                    part.readers = [total[other]]
                    split[j].tensors.append(part)
            whole = Tensor(t, r)
            whole.readers = list(waiting)
            total[j].tensors.append(whole)

    # -- stages and barriers ---------------------------------------------------------------------------------------
    def _stages(self):
        work = [v for v in range(self.graph.n_ops) if self.kind[v] not in NOT_WORK]
        forward = [self.stage_of[v] for v in work if self.phase[v] == FORWARD]
        backward = {self.stage_of[v] for v in work if self.phase[v] == BACKWARD}
        stages = list(dict.fromkeys(forward))
        return [d for d in stages if d in backward] if backward else stages

    def _ends(self, stage, phase):
        """The first and the last ops of a phase on a stage."""
        here = [v for v in range(self.graph.n_ops) if self.stage_of[v] == stage and self.phase[v] == phase]
        here = [v for v in here if not self._once(v)]
        first = [v for v in here if not any(self.producer[t] in here for t in self.reads[v])]
        last = [v for v in here if not any(reader in here for t in self.outputs[v] for reader in self.readers[t])]
        return first, last

    def _barrier(self, place, device, before, after):
        if before and after:
            barrier = self._add(place, device, added="barrier")
            for op in before:
                self._waits(barrier, op)
            for op in after:
                self._waits(op, barrier)

    def _gpipe(self):
        for stage in self.stages:
            (_, last), (first, _) = self._ends(stage, FORWARD), self._ends(stage, BACKWARD)
            team = self.teams[stage]
            for j, device in enumerate(team):
                mine = range(j, self.count, len(team))
                before, after = ([self.copy[v, m] for m in mine for v in ops] for ops in (last, first))
                self._barrier((2, device), device, before, after)

    def _one_f_one_b(self):
        for number, stage in enumerate(self.stages):
            (first, _), (_, last) = self._ends(stage, FORWARD), self._ends(stage, BACKWARD)
            team = self.teams[stage]
            w, r = sum(len(self.teams[s]) for s in self.stages[number:]), len(team)
            k = -(-w // r) * r
            for m in range(k, self.count):
                before, after = [self.copy[v, m - k] for v in last], [self.copy[v, m] for v in first]
                self._barrier((1, m, 0, team[m % r]), team[m % r], before, after)

    # -- the unrolled problem --------------------------------------------------------------------------------------
    def unrolled(self):
        """What the plain simulator reads of a problem and a placement, and the ops in order of their numbers."""
        graph, ops = self.graph, sorted(self.ops, key=lambda op: op.place)
        number = {op: i for i, op in enumerate(ops)}
        tensors = [(op, t) for op in ops for t in [*op.tensors, *([op.signal] if op.signal else [])]]
        readers = [sorted({number[op] for op in t.readers}) for _, t in tensors]
        whole = [t.of >= 0 and t.parts == 1 for _, t in tensors]
        unrolled = SimpleNamespace(
            n_ops=len(ops),
            tensor_producer=np.array([number[op] for op, _ in tensors], int),
            consumer_ptr=np.cumsum([0, *map(len, readers)]),
            consumers=np.array([v for some in readers for v in some], int),
            tensor_bytes=np.array([self._bytes(t) for _, t in tensors], int),
            tensor_persistent=[
                w and bool(graph.tensor_persistent[t.of]) for w, (_, t) in zip(whole, tensors, strict=True)
            ],
            tensor_result=[w and bool(graph.tensor_result[t.of]) for w, (_, t) in zip(whole, tensors, strict=True)],
            op_workspace_bytes=[0 if op.of < 0 else int(graph.op_workspace_bytes[op.of]) for op in ops],
            op_persistent_bytes=[self._held(op) for op in ops],
        )
        costs = self.problem.costs
        op_ns = np.array([[1 if op.of < 0 else int(row[op.of]) for op in ops] for row in costs.op_ns])
        rows = [[self._send_ns(number, t) for _, t in tensors] for number in range(len(costs.transfer_ns))]
        table = SimpleNamespace(
            op_ns=op_ns,
            device_row=costs.device_row,
            transfer_ns=np.array(rows, int),
            pair_class=costs.pair_class,
            dispatch_ns=np.zeros(len(ops), int),
            gap_ns=np.zeros(len(ops), int),
        )
        rules = SimpleNamespace(order="priority", contention=self.problem.rules.contention, runtime="dataflow")
        problem = SimpleNamespace(graph=unrolled, topology=self.problem.topology, costs=table, rules=rules)
        order = sorted(range(len(ops)), key=lambda i: (*self._rank(ops[i]), i))
        priority = np.zeros(len(ops), int)
        priority[order] = -np.arange(len(ops))
        return problem, SimpleNamespace(devices=[op.device for op in ops], priority=priority), ops

    def _bytes(self, tensor):
        return -(-int(self.graph.tensor_bytes[tensor.of]) // tensor.parts) if tensor.of >= 0 else 0

    def _held(self, op):
        if op.of < 0:
            return 0
        first = op.microbatch < len(self.team_of[op.of])
        return int(self.graph.op_persistent_bytes[op.of]) if first else 0

    def _send_ns(self, row, tensor):
        topology, classes = self.problem.topology, self.problem.costs.pair_class
        routes = [route for pair, route in topology.routes.items() if pair[0] != pair[1] and classes[pair] == row]
        ways = [sum(topology.channels[c][2] for c in route) for route in routes]
        latency = max([1, *ways])
        if tensor.of < 0:
            return latency
        whole = int(self.problem.costs.transfer_ns[row][tensor.of])
        if tensor.parts == 1 or whole < latency:
            return whole
        return latency - (latency - whole) // tensor.parts

    def _rank(self, op):
        if op.of < 0:
            return 0, op.microbatch, -1
        groups = [FORWARD, BACKWARD, UPDATE] if self.order == "gpipe" else [BACKWARD, FORWARD, UPDATE]
        return 1 + groups.index(self.phase[op.of]), op.microbatch, op.of


def pipeline_plainly(problem, placement, count, order):
    """The fields of the schedule of the unrolled pipeline, and the figures of R10, in one dict."""
    pipeline = Pipeline(problem, placement, count, order)
    unrolled, where, ops = pipeline.unrolled()
    schedule = simulate_plainly(unrolled, where)
    phase = [BACKWARD if op.added == "accumulate" else pipeline.phase[op.of] if op.of >= 0 else -1 for op in ops]
    ends = {FORWARD: [0] * count, BACKWARD: [0] * count}
    for op, part, finish in zip(ops, phase, schedule["op_finish"], strict=True):
        if op.microbatch >= 0:
            ends[part][op.microbatch] = max(ends[part][op.microbatch], finish)
    return {
        "schedule": schedule,
        "devices": list(where.devices),
        "total_ns": schedule["step_ns"],
        "stages": tuple(pipeline.stages),
        "exchange_ns": (exchange := _exchange(ops, unrolled, schedule)),
        "steady_ns": max(_distance(pipeline, schedule, ends), _load(pipeline)) + Fraction(exchange, count),
    }


def _exchange(ops, unrolled, schedule):
    of_exchange = [op.added in ("split", "sum") for op in ops]
    producer = unrolled.graph.tensor_producer
    ends = [f for f, mine in zip(schedule["op_finish"], of_exchange, strict=True) if mine]
    sent = zip(schedule["transfer_tensor"], schedule["transfer_finish"], strict=True)
    ends += [finish for t, finish in sent if of_exchange[producer[t]]]
    last = max([f for op, f in zip(ops, schedule["op_finish"], strict=True) if op.microbatch >= 0], default=0)
    return max(0, max(ends) - last) if ends else 0


def _distance(pipeline, schedule, ends):
    count = pipeline.count
    if count < 3:
        return Fraction(schedule["step_ns"])
    half = count - 1 - count // 2
    period = lcm(*map(len, pipeline.team_of))
    h = half - half % period or half
    per = {part: Fraction(done[count - 1] - done[count - 1 - h], h) for part, done in ends.items()}
    if not any(ends[BACKWARD]):
        return per[FORWARD]
    return per[FORWARD] + per[BACKWARD] if pipeline.order == "gpipe" else per[BACKWARD]


def _load(pipeline):
    costs, slots = pipeline.problem.costs, pipeline.problem.topology.slots
    loads = [Fraction(0)] * len(slots)
    for v, team in enumerate(pipeline.team_of):
        for device in team if not pipeline._once(v) else ():
            work = int(costs.op_ns[costs.device_row[device]][v])
            loads[device] += Fraction(work, len(team) * int(slots[device]))
    return max(loads)
