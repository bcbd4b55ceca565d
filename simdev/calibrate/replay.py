"""Replay a trace: turn its host, streams and device work into a problem for the simulator.

The host is one thread that issues the calls of the trace in their order, even if several threads take turns, as the
forward pass and autograd do. Threads whose calls overlap in time are replayed as one host each, a *lane*: a call
follows the previous call of its thread or, if its thread had been idle meanwhile, the last call of another one. The
cost of a call is the time since the call that it follows (Python and dispatch) plus its own time, both without
*waiting*. The simulator computes the waiting:

* a synchronising call, and a copy from or to pageable memory, wait for the work on their stream;
* a loop of ``cudaEventQuery`` waits for the work that ended before its last query (:func:`polls_as_calls`);
* a launch waits while :data:`QUEUE_DEPTH` earlier launches on its stream are unfinished;
* work waits for its launch, for the previous work on its stream and, after ``cudaStreamWaitEvent``, for the work that
  was launched last on the other stream.

Kernels keep their measured times. The host costs of a step can be taken from the other steps, so that the prediction of
a step does not use its own host times (:func:`host_costs`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

import numpy as np

from simdev.calibrate.traces import DEVICE_KINDS, Trace
from simdev.errors import InvalidInput
from simdev.problem.costs import CostTable
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.sim import simulate

QUEUE_DEPTH = 1024  # launches in flight on a stream; traces whose host runs ahead show about this number
FOUND_BUSY_NS = 1_000_000  # an idle stream begins its work a thousand times sooner
SYNC = ("Synchronize", "cudaMemcpy", "hipMemcpy")
WAIT_EVENT = ("cudaStreamWaitEvent", "cuStreamWaitEvent", "hipStreamWaitEvent")
QUERY = tuple(f"{api}{what}Query" for api in ("cuda", "cu", "hip") for what in ("Event", "Stream"))
POLLED = "queries until work has ended"  # the name of the one call that stands for a loop of queries
POLLS = 3  # queries of a loop, at least
EACH_NS = 10_000  # from one query of a loop to the next, at least: the caching allocator asks for 800 events in a row,
# one every 2.4 us (df_index_resolver of HTA), and does not wait for them; loops that ask as often look the same
CLOCK_NS = 2000  # the clocks of calls and work differ by up to this
OVERLAPS = 0.01  # share of calls that begin during a call of another thread, from which on threads are lanes
IDLE_NS = 300_000  # a thread of a lane without calls for longer has waited for another thread that made calls
MARK, LAUNCH, RETURN, WAIT = range(4)  # kinds of host events
RULES = Rules(order="program", contention="none")


@dataclass(frozen=True, eq=False)
class Line:
    """The ``n`` events of the host, in order of time.

    * ``kind`` int8 ``(n,)``: the border of a step (MARK), a call that launches work (LAUNCH), a call that waits for
      work (RETURN; also the second half of a blocking copy), or a call that orders streams (WAIT).
    * ``key``: the identity of the event, equal in each step. ``step`` int32 ``(n,)``: the position of its step, or -1
      before the first step.
    * ``gap_ns``, ``own_ns`` int64 ``(n,)``: the time since the previous event, and the time in the call without
      waiting. ``own_ns`` is -1 if a full queue delayed the call, because its own time is then unknown.
    * ``work``: the rows of ``trace.work`` that the event launches; ``waits``: the rows that it waits for.
    * ``wait_for`` maps a row of work to the rows on other streams that it waits for.
    * ``lane``, ``after`` int32 ``(n,)``: the host thread of the event, and the event of another lane that it follows
      (-1: it follows the previous one of its lane).
    * ``before``, for each stream: the ends of the work that was launched before the first event, in order, in ns after
      that event.
    * ``launch_ns``: the time from the end of a call to the begin of its work on an idle stream. ``between_ns``, for
      each stream: the time from the end of queued work to the begin of the next work.
    """

    trace: Trace
    kind: np.ndarray
    key: tuple
    step: np.ndarray
    gap_ns: np.ndarray
    own_ns: np.ndarray
    work: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    wait_for: dict[int, tuple[int, ...]]
    before: tuple[tuple[int, ...], ...]
    launch_ns: int
    between_ns: np.ndarray
    lane: np.ndarray
    after: np.ndarray

    @property
    def lanes(self) -> int:
        return int(self.lane.max(initial=0)) + 1


def host_line(trace: Trace) -> Line:
    """The events of the host in ``trace``, from the begin of the first step to the end of the last (or in all of
    it)."""
    begin, end = _window(trace)
    trace = polls_as_calls(trace)
    calls, work = trace.calls, trace.work
    launched: dict[int, list[int]] = {}
    for row, correlation in enumerate(work.correlation.tolist()):
        launched.setdefault(correlation, []).append(row)
    name = [trace.names[number] for number in calls.name.tolist()]
    inside = (calls.begin >= begin) & (calls.begin < end)
    busy = {calls.thread[row] for row in range(len(calls)) if calls.correlation[row] in launched}
    rows = [row for row in np.flatnonzero(inside).tolist() if calls.thread[row] in busy]
    several = len(trace.streams) > 1
    events = [(int(calls.begin[row]), 1, row) for row in rows]
    events += [(edge, 0, 2 * k + side) for k, step in enumerate(trace.steps) for side, edge in enumerate(step[1:])]
    mine = {item for row in rows for item in launched.get(int(calls.correlation[row]), ())}
    edge = min((int(work.begin[item]) for item in mine), default=0)
    earlier = (item for item in np.flatnonzero((work.end > begin) & (work.begin < edge)).tolist() if item not in mine)
    draft = _Draft(trace, begin, mine, list(earlier), _lanes(trace, rows))
    for edge, is_call, row in sorted(events):
        if not is_call:
            draft.mark(edge, row // 2, ("begin", "end")[row % 2])
        elif int(calls.correlation[row]) in launched:
            draft.launch(row, name[row], launched[int(calls.correlation[row])])
        elif name[row] == POLLED:
            draft.poll(row)
        elif any(part in name[row] for part in SYNC):
            draft.sync(row, name[row])
        elif several and name[row] in WAIT_EVENT:
            draft.wait(row, name[row])
    return draft.line()


def _window(trace: Trace) -> tuple[int, int]:
    if trace.steps:
        return trace.steps[0][1], trace.steps[-1][2] + 1
    if not len(trace.calls):
        raise InvalidInput("no calls of the host in the trace: nothing to replay", source=trace.name)
    return int(trace.calls.begin.min()), int(trace.calls.end.max()) + 1


def polls_as_calls(trace: Trace) -> Trace:
    """``trace`` with one call, named :data:`POLLED`, in place of each loop in which a thread asks whether work has
    ended until it has.

    A loop is a run of at least :data:`POLLS` queries without another call of the thread, :data:`EACH_NS` apart or more
    on average, between whose last two queries work has ended. Other queries stay as they are: time of the host.
    """
    calls, ends = trace.calls, np.sort(trace.work.end)
    is_query = np.array([name in QUERY for name in trace.names], bool)[calls.name]
    if not is_query.any():
        return trace
    order = np.lexsort((calls.begin, calls.thread))
    query, thread = is_query[order], calls.thread[order]
    starts = np.flatnonzero(np.r_[True, ~(query[1:] & query[:-1] & (thread[1:] == thread[:-1]))])
    name, end, kept = calls.name.copy(), calls.end.copy(), np.ones(len(calls), bool)
    for first, stop in zip(starts, np.r_[starts[1:], len(order)], strict=True):
        if stop - first < POLLS:
            continue
        row, last, before = order[first], order[stop - 1], order[stop - 2]
        until, apart = calls.end[last], (calls.begin[last] - calls.begin[row]) / (stop - first - 1)
        ended = np.searchsorted(ends, (calls.begin[before] - CLOCK_NS, until + CLOCK_NS))
        if apart >= EACH_NS and ended[0] < ended[1]:
            name[row], end[row] = len(trace.names), until
            kept[order[first + 1 : stop]] = False
    merged = replace(calls, name=name, end=end)[kept]
    return replace(trace, calls=merged, names=(*trace.names, POLLED))


def _lanes(trace: Trace, rows: list[int]) -> dict[int, int]:
    """The lane of each thread with calls in ``rows``: 0 for all unless calls of several threads overlap in time."""
    thread, begin, end = (values[rows] for values in (trace.calls.thread, trace.calls.begin, trace.calls.end))
    order = np.argsort(begin, kind="stable")
    overlaps, running = 0, dict[int, int]()
    for row in order.tolist():
        mine = int(thread[row])
        overlaps += any(until > begin[row] + CLOCK_NS for other, until in running.items() if other != mine)
        running[mine] = max(running.get(mine, 0), int(end[row]))
    several = overlaps > max(10, OVERLAPS * len(rows))
    return {number: lane if several else 0 for lane, number in enumerate(running)}


def as_one_step(trace: Trace) -> Trace:
    """``trace`` with all its calls as one step. Raises :class:`InvalidInput` if it has no calls."""
    begin, end = _window(trace)
    return replace(trace, steps=((0, begin, end - 1),))


class _Draft:
    """Collects the events of a :class:`Line`."""

    def __init__(self, trace: Trace, begin: int, mine: set[int], earlier: list[int], lanes: dict[int, int]):
        """``mine`` holds the rows of work that the events launch, ``earlier`` the rows that were launched before."""
        if not mine:
            raise InvalidInput("no call of the host is joined to work of a GPU: nothing to replay", source=trace.name)
        self.trace, self.begin, self.mine, self.lanes = trace, begin, mine, lanes
        self.now: dict[int, int] = {0: begin}  # lane -> end of its last event
        self.row_of: dict[int, int] = {}  # lane -> its last event
        self.rows: list[tuple] = []  # kind, key, gap, own, work, waits, lane, after
        self.last: dict[int, int] = {}  # stream -> row of the work last launched
        self.sent: dict[int, list[int]] = {}  # stream -> ends of its work, in order
        self.sent_rows: dict[int, list[int]] = {}  # stream -> the rows of that work that the events launch
        for item in earlier:
            self.sent.setdefault(int(trace.work.thread[item]), []).append(int(trace.work.end[item]))
        self.before = [sorted(self.sent.get(stream, ())) for stream in range(len(trace.streams))]
        self.pending_waits: set[int] = set()  # lanes
        self.after_wait: list[tuple[int, int]] = []  # (work, last work on another stream)

    def add(self, lane, kind, key, begin, own, work=(), waits=()) -> None:
        since, after = self._follows(lane, begin)
        self._append(lane, (kind, key, max(0, begin - since), own, tuple(work), tuple(waits), lane, after))

    def _append(self, lane: int, row: tuple) -> None:
        self.row_of[lane] = len(self.rows)
        self.rows.append(row)

    def _follows(self, lane: int, begin: int) -> tuple[int, int]:
        """The end of the event that an event at ``begin`` follows, and its row if it is one of another lane."""
        since = self.now.get(lane, self.begin - IDLE_NS)
        others = [(end, other) for other, end in self.now.items() if other != lane and since < end <= begin + CLOCK_NS]
        if others and begin - since > IDLE_NS:
            end, other = max(others)
            return end, self.row_of.get(other, -1)
        return max(since, self.begin), -1

    def mark(self, edge: int, number: int, side: str) -> None:
        """A border of a step, on lane 0, follows the last event of any lane."""
        end, lane = max([(end, lane) for lane, end in self.now.items() if end <= edge], default=(self.now[0], 0))
        after = self.row_of.get(lane, -1) if lane else -1
        self._append(0, (MARK, (side, number), max(0, edge - end), 0, (), (), 0, after))
        self.now[0] = max(self.now[0], edge)

    def launch(self, row: int, name: str, work: list[int]) -> None:
        trace, calls = self.trace, self.trace.calls
        begin, end = int(calls.begin[row]), int(calls.end[row])
        lane, stream = self.lanes[int(calls.thread[row])], int(trace.work.thread[work[0]])
        now = self.now.get(lane, self.begin)
        if lane in self.pending_waits:
            self._orders(lane, work[0], stream)
        blocking = self._blocks(row, work)
        key = (name, trace.names[trace.work.name[work[0]]], stream)
        own = end - max(begin, now) if end > now else 0
        if blocking:
            idle = stream in self.last and trace.work.end[self.last[stream]] < begin
            self.add(lane, LAUNCH, key, begin, max(0, int(trace.work.begin[work[0]]) - begin) if idle else -1, work)
            self.add(lane, RETURN, (*key, "returns"), 0, max(0, end - int(trace.work.end[work[-1]])), (), work[-1:])
        else:
            self.add(lane, LAUNCH, key, begin, -1 if self._full(stream, end) else own, work)
        self._branches(work)
        for item in work:
            self.last[int(trace.work.thread[item])] = item
        self.sent.setdefault(stream, []).append(int(trace.work.end[work[-1]]))
        self.sent_rows.setdefault(stream, []).append(work[-1])
        self.now[lane] = max(now, end)

    def _branches(self, work: list[int]) -> None:
        """Order the work of one call that launches a CUDA graph on several streams: work waits for the work that had
        ended on the other streams."""
        events = self.trace.work
        ends: dict[int, list[int]] = {}
        rows: dict[int, list[int]] = {}
        for item in work if len(work) > 1 else ():
            mine = int(events.thread[item])
            for stream, sorted_ends in ends.items():
                done = bisect_right(sorted_ends, events.begin[item])
                if stream != mine and done:
                    self.after_wait.append((item, rows[stream][done - 1]))
            ends.setdefault(mine, []).append(int(events.end[item]))
            rows.setdefault(mine, []).append(item)

    def _full(self, stream: int, end: int) -> bool:
        """Whether the queue of ``stream`` was full, or nearly full, when the call returned."""
        ends = self.sent.get(stream, ())
        nearly = max(1, QUEUE_DEPTH - 4)
        return len(ends) >= nearly and ends[-nearly] > end - CLOCK_NS

    def _blocks(self, row: int, work: list[int]) -> bool:
        """Whether the call waited for its copy from or to pageable memory. It does not wait for small copies, which
        CUDA stages."""
        trace, item = self.trace, work[-1]
        if DEVICE_KINDS[trace.work_kind[item]] != "copy" or "Pageable" not in trace.names[trace.work.name[item]]:
            return False
        return bool(2 * trace.calls.end[row] >= trace.work.begin[item] + trace.work.end[item])

    def sync(self, row: int, name: str) -> None:
        ends, end = self.trace.work.end, int(self.trace.calls.end[row])
        possible = [item for item in self.last.values() if ends[item] <= end + CLOCK_NS]
        if "Device" not in name and possible:  # one stream: the stream whose end explains the return
            possible = [max(possible, key=lambda item: ends[item])]
        self._returns(row, name, possible)

    def poll(self, row: int) -> None:
        """A loop of queries returns when the work has ended that ended last before it, of all that was launched: the
        event may be one amid a stream."""
        ends, limit = self.trace.work.end, int(self.trace.calls.end[row]) + CLOCK_NS
        ended = [
            items[place - 1]
            for items in self.sent_rows.values()
            if (place := bisect_right(items, limit, key=lambda item: int(ends[item])))
        ]
        self._returns(row, POLLED, [max(ended, key=lambda item: ends[item])] if ended else [])

    def _returns(self, row: int, name: str, possible: list[int]) -> None:
        """A call that returns when the ``possible`` work has ended."""
        calls, ends = self.trace.calls, self.trace.work.end
        begin, end = int(calls.begin[row]), int(calls.end[row])
        lane = self.lanes[int(calls.thread[row])]
        now = self.now.get(lane, self.begin)
        waited = max((int(ends[item]) for item in possible), default=begin)
        own = max(0, end - max(begin, now, waited))
        self.add(lane, RETURN, (name,), begin, own, (), possible)
        self.now[lane] = max(now, end)

    def wait(self, row: int, name: str) -> None:
        calls = self.trace.calls
        begin, end = int(calls.begin[row]), int(calls.end[row])
        lane = self.lanes[int(calls.thread[row])]
        now = self.now.get(lane, self.begin)
        self.pending_waits.add(lane)
        self.add(lane, WAIT, (name,), begin, end - max(begin, now) if end > now else 0)
        self.now[lane] = max(now, end)

    def _orders(self, lane: int, item: int, stream: int) -> None:
        """Order the next launch after a wait: it is on the waiting stream, unless the times contradict that."""
        work = self.trace.work
        for other, last in self.last.items():
            if other != stream and work.begin[item] >= work.end[last] - CLOCK_NS // 2:
                self.after_wait.append((item, last))
        self.pending_waits.discard(lane)

    def line(self) -> Line:
        trace = self.trace
        self._found_busy()
        step, current = [], -1
        for kind, key, *_ in self.rows:
            current = key[1] if kind == MARK else current
            step.append(current)
        wait_for: dict[int, tuple[int, ...]] = {}
        for item, last in self.after_wait:
            wait_for[item] = (*wait_for.get(item, ()), last)
        kind, key, gap, own, items, waits, lane, after = zip(*self.rows, strict=True)
        key = tuple((k[0],) if kind[number] == MARK else k for number, k in enumerate(key))
        launch, between = self._latencies()
        before = tuple(tuple(end - self.begin for end in ends) for ends in self.before)
        return Line(
            trace,
            np.array(kind, np.int8),
            key,
            np.array(step, np.int32),
            np.array(gap, np.int64),
            np.array(own, np.int64),
            items,
            waits,
            wait_for,
            before,
            launch,
            between,
            np.array(lane, np.int32),
            np.array(after, np.int32),
        )

    def _found_busy(self) -> None:
        """Find streams whose first work starts late after its call: they were busy with work that the trace does not
        show."""
        work, calls, seen = self.trace.work, self.trace.calls, set()
        begin = dict(zip(calls.correlation.tolist(), calls.begin.tolist(), strict=True))
        for item in sorted(item for row in self.rows for item in row[4]):
            stream = int(work.thread[item])
            if stream not in seen and work.begin[item] - begin[int(work.correlation[item])] > FOUND_BUSY_NS:
                self.before[stream] = [end for end in self.before[stream] if end < work.begin[item]]
                self.before[stream].append(int(work.begin[item]))
            seen.add(stream)

    def _latencies(self) -> tuple[int, np.ndarray]:
        """The mean time from a call to its work on an idle stream, and between queued work, over the whole trace."""
        trace, work = self.trace, self.trace.work
        end_of_call = dict(zip(trace.calls.correlation.tolist(), trace.calls.end.tolist(), strict=True))
        idle: list[int] = []
        queued: list[list[int]] = [[] for _ in trace.streams]
        first = {row[4][0] for row in self.rows if row[4]}  # only the first work of a launched graph
        last = {stream: ends[-1] for stream, ends in enumerate(self.before) if ends}
        for item in sorted(self.mine):
            stream = int(work.thread[item])
            call, before = end_of_call[int(work.correlation[item])], last.get(stream)
            if item in first and (before is None or before < call - CLOCK_NS):
                idle.append(int(work.begin[item]) - call)
            elif before is not None and before > call + 10 * CLOCK_NS:
                queued[stream].append(int(work.begin[item]) - before)
            last[stream] = int(work.end[item])
        launch = int(max(0, np.median(idle))) if idle else 2000
        between = [_typical(values) for values in queued]
        known = [value for value in between if value >= 0]
        return launch, np.array([value if value >= 0 else (known or [1000])[0] for value in between], np.int64)


def _typical(values: list[int]) -> int:
    """The mean of the lower nine tenths, because the others waited for something; -1 if there are too few values."""
    if len(values) < 20:
        return -1
    lower = sorted(values)[: max(1, len(values) * 9 // 10)]
    return int(max(0.0, float(np.mean(lower))))


def host_costs(line: Line, leave_one_out: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """``(gap_ns, own_ns)`` int64 ``(n,)`` for a replay.

    With ``leave_one_out``, the cost of an event is the mean cost of the events with the same key in the other steps. If
    there are four or more of them, the slowest and the fastest are left out; if there is none, the event keeps its own
    time. Without ``leave_one_out``, every event keeps its own time. The own time of a call that a full queue delayed is
    the median over the calls of its name.
    """
    own = line.own_ns.astype(float)
    own[own < 0] = np.nan
    gap = line.gap_ns.astype(float)
    if leave_one_out:
        gap, own = _from_other_steps(line, gap, own)
    medians: dict[str, float] = {}
    for row in np.flatnonzero(np.isnan(own)).tolist():
        call = line.key[row][0]
        if call not in medians:
            same = [line.own_ns[r] for r in range(len(own)) if line.key[r][0] == call and line.own_ns[r] >= 0]
            same = same or line.own_ns[(line.kind == LAUNCH) & (line.own_ns >= 0)].tolist() or [5000]
            medians[call] = float(np.median(same))
        own[row] = medians[call]
    return np.rint(gap).astype(np.int64), np.rint(own).astype(np.int64)


def _from_other_steps(line: Line, gap: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    steps = [np.flatnonzero(line.step == number) for number in range(line.step.max(initial=-1) + 1)]
    parts = [([line.key[row] for row in rows], gap[rows], own[rows]) for rows in steps]
    for rows, (_, gaps, owns) in zip(steps, from_others(parts), strict=True):
        gap[rows], own[rows] = gaps, owns
    return gap, own


def from_others(parts: list[tuple[list, np.ndarray, np.ndarray]]) -> list[tuple[list, np.ndarray, np.ndarray]]:
    """Replace the costs in each of several repetitions ``(keys, gap, own)`` by the means over the other repetitions."""
    numbers: dict[tuple, int] = {}
    coded = [tuple(numbers.setdefault(key, len(numbers)) for key in keys) for keys, _, _ in parts]
    order = np.argsort([gap.sum() + np.nansum(own) for _, gap, own in parts], kind="stable").tolist()
    answers = []
    for me, (keys, gap, own) in enumerate(parts):
        others = [part for part in order if part != me]
        gaps, owns = [], []
        for other in others[1:-1] if len(others) >= 4 else others:
            match = _aligned(coded[me], coded[other])
            gaps.append(np.where(match >= 0, parts[other][1][match], np.nan))
            owns.append(np.where(match >= 0, parts[other][2][match], np.nan))
        answers.append((keys, _mean(gaps, gap), _mean(owns, own)) if others else (keys, gap, own))
    return answers


def _mean(samples: list[np.ndarray], default: np.ndarray) -> np.ndarray:
    table = np.stack(samples)
    count = (~np.isnan(table)).sum(axis=0)
    return np.where(count > 0, np.nansum(table, axis=0) / np.maximum(count, 1), default)


def _aligned(mine: tuple, other: tuple) -> np.ndarray:
    """int ``(len(mine),)``: the position in ``other`` of each element of ``mine``, or -1 if it has none."""
    match, shorter = np.full(len(mine), -1), min(len(mine), len(other))
    head = next((k for k in range(shorter) if mine[k] != other[k]), shorter)  # steps differ in few places
    tail = next((k for k in range(shorter - head) if mine[-1 - k] != other[-1 - k]), shorter - head)
    match[:head] = np.arange(head)
    match[len(mine) - tail :] = np.arange(len(other) - tail, len(other))
    middle = mine[head : len(mine) - tail], other[head : len(other) - tail]
    for block in SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
        match[head + block.a : head + block.a + block.size] = np.arange(head + block.b, head + block.b + block.size)
    return match


def rank_costs(lines: list[Line], leave_one_out: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
    """As :func:`host_costs` for one step of several ranks: the host costs of a rank are those of the other ranks."""
    costs = []
    for line in lines:
        gap, own = host_costs(line, leave_one_out=False)
        costs.append((gap.astype(float), own.astype(float)))
    if leave_one_out and len(lines) > 1:
        parts = [(list(line.key), gap, own) for line, (gap, own) in zip(lines, costs, strict=True)]
        costs = [(gap, own) for _, gap, own in from_others(parts)]
    return [(np.rint(gap).astype(np.int64), np.rint(own).astype(np.int64)) for gap, own in costs]


def replay_problem(line: Line, gap_ns: np.ndarray, own_ns: np.ndarray) -> tuple[Problem, Placement, np.ndarray]:
    """The trace as a problem, its placement, and int ``(n,)`` the op of each host event."""
    builder = Builder(line.trace.name)
    ops = builder.add(line, gap_ns, own_ns)
    return *builder.problem(line.launch_ns), builder.number[ops]


class Builder:
    """Puts one or more lines into one problem: a host and a device per stream for each."""

    def __init__(self, name: str, collectives: dict[tuple[int, int], tuple[int, int]] | None = None):
        """``collectives`` maps (position of the rank, row of its work) to (number, ns after the last rank has
        arrived)."""
        self.graph = GraphBuilder(name)
        self.devices: list[str] = []
        self.device: list[int] = []
        self.device_last: dict[int, int] = {}
        self.ns: list[int] = []
        self.collectives = collectives or {}
        self.arrivals: dict[int, list[int]] = {}
        self.members: dict[int, list[int]] = {}
        self.ranks = 0

    def op(self, name: str, kind: str, device: int, ns: int, after=()) -> int:
        op = self.graph.op(f"{len(self.ns)} {name[:60]}", kind)
        self.ns.append(max(1, int(ns)))
        after = set(after)
        if device in self.device_last:  # in order, even after the graph is renumbered
            after.add(self.device_last[device])
        self.device.append(device)
        self.device_last[device] = op
        for cause in sorted(after):
            self.graph.control(cause, op)
        return op

    def add(self, line: Line, gap_ns: np.ndarray, own_ns: np.ndarray, begin_ns: int = 0) -> np.ndarray:
        """Add a rank whose host begins at ``begin_ns``. Returns int ``(n,)``: the op of each of its events."""
        trace, rank, host = line.trace, self.ranks, len(self.devices)
        self.ranks += 1
        self.devices += [f"host{rank}", *(f"host{rank}.{lane}" for lane in range(1, line.lanes))]
        first_stream = len(self.devices)
        self.devices += [f"stream{rank}:{device}/{stream}" for device, stream in trace.streams]
        if begin_ns:
            self.op("before", "host", host, begin_ns)
        op_of: dict[int, int] = {}
        queue: list[list[int]] = [[] for _ in trace.streams]
        for stream, ends in enumerate(line.before):
            for begin, end in zip((-begin_ns, *ends), ends, strict=False):
                queue[stream].append(self.op("before", "before", first_stream + stream, end - begin))
        duration = trace.work.duration
        place = np.empty(len(line.kind), np.int64)
        for row, key in enumerate(line.key):
            after = [op_of[item] for item in line.waits[row] if item in op_of]
            for item in line.work[row][:1]:
                queued = queue[int(trace.work.thread[item])]
                after += queued[-QUEUE_DEPTH:][:1] if len(queued) >= QUEUE_DEPTH else []
            cost, lane = gap_ns[row] + own_ns[row], host + int(line.lane[row])
            follows = [place[line.after[row]]] if line.after[row] >= 0 else []
            if after and gap_ns[row]:  # the wait begins after the gap
                self.op(f"{row}", "host", lane, gap_ns[row], follows)
                cost, follows = own_ns[row], []
            place[row] = self.op(f"{row} {key[0]}", "host", lane, cost, [*after, *follows])
            for item in line.work[row]:
                stream = int(trace.work.thread[item])
                causes = [place[row], *(op_of[other] for other in line.wait_for.get(item, ()) if other in op_of)]
                name = trace.names[trace.work.name[item]]
                number, ns = self.collectives.get((rank, item), (-1, duration[item]))
                if number >= 0:  # holds its stream from its arrival until the last rank has arrived
                    causes = [self.op(f"{name} arrives", "arrival", first_stream + stream, 1, causes)]
                    self.arrivals.setdefault(number, []).extend(causes)
                ns += line.between_ns[stream]
                op_of[item] = self.op(name, DEVICE_KINDS[trace.work_kind[item]], first_stream + stream, ns, causes)
                if number >= 0:
                    self.members.setdefault(number, []).append(op_of[item])
            for item in line.work[row][-1:]:  # a launch takes one place in the queue, even if it launches a whole graph
                queue[int(trace.work.thread[item])].append(op_of[item])
        return place

    def problem(self, launch_ns: int) -> tuple[Problem, Placement]:
        kind = DeviceKind("replayed", 1 << 40, {"f32": 1.0}, 1.0)
        hub = "hub"
        topology = Topology(
            "replay",
            tuple(Device(name, kind, name.startswith("host")) for name in self.devices),
            tuple(Link((name, hub), 1 << 40, 0) for name in self.devices),
            (hub,),
        )
        for number, members in self.members.items():
            for arrival in self.arrivals[number]:
                for member in members:
                    self.graph.control(arrival, member)
        graph = self.graph.build()
        order = np.array([int(name.split(" ", 1)[0]) for name in graph.op_names])
        self.number = np.empty(len(order), np.int64)
        self.number[order] = np.arange(len(order))
        host = np.array([name.startswith("host") for name in self.devices])
        pair = np.where(host[:, None] & ~host[None, :], 0, 1).astype(np.int32)
        transfer = np.ones((2, graph.n_tensors), np.int64)
        transfer[0] = max(1, launch_ns)
        row = np.zeros(len(self.devices), np.int32)
        costs = CostTable(
            np.array(self.ns, np.int64)[order][None], row, transfer, pair, np.zeros(graph.n_ops, np.int64)
        )
        return Problem(graph, topology, costs, RULES), Placement(np.array(self.device, np.int32)[order])


@dataclass(frozen=True, eq=False)
class Replay:
    """The measured and the simulated duration of each step, int64 ns ``(steps,)``, and two baselines: ``sum_ns`` is the
    sum of the durations of the step's work, ``no_host_ns`` the time of that work on its streams without a host."""

    name: str
    device_name: str
    measured_ns: np.ndarray
    predicted_ns: np.ndarray
    sum_ns: np.ndarray
    no_host_ns: np.ndarray

    @property
    def noise(self) -> float:
        return noise(self.measured_ns)


def is_collective(name: str) -> bool:
    return "nccl" in name.lower() and "kernel" in name.lower()


def match_collectives(lines: list[Line]) -> dict[tuple[int, int], tuple[int, int]]:
    """Match the collectives of the ranks: ``(position of the rank, row of its work) -> (number, ns)``.

    The k-th collectives of all ranks are one collective. Its time is the median, over the ranks, of the time from the
    last arrival to the end. Raises :class:`InvalidInput` if the ranks do not run the same collectives.
    """
    rows = []
    for line in lines:
        work = [item for items in line.work for item in items]
        rows.append([item for item in work if is_collective(line.trace.names[line.trace.work.name[item]])])
    names = [
        [line.trace.names[line.trace.work.name[item]] for item in items]
        for line, items in zip(lines, rows, strict=True)
    ]
    if any(other != names[0] for other in names):
        raise InvalidInput("the ranks do not run the same collectives", source=lines[0].trace.name)
    answer = {}
    for number in range(len(names[0])):
        items = [row[number] for row in rows]
        arrival = max(int(line.trace.work.begin[item]) for line, item in zip(lines, items, strict=True))
        ns = int(np.median([int(line.trace.work.end[item]) - arrival for line, item in zip(lines, items, strict=True)]))
        for rank, item in enumerate(items):
            answer[rank, item] = number, max(1, ns)
    return answer


def replay_ranks(traces: list[Trace], leave_one_out: bool = True) -> list[Replay]:
    """Simulate the steps of all ranks together and return one :class:`Replay` for each rank.

    A collective starts on a rank when the rank reaches it. It ends on all ranks when its time has passed since the last
    rank reached it. The begin of each rank is taken from its trace. Raises :class:`InvalidInput` if the ranks differ in
    the number of steps or in their collectives.
    """
    if len({len(trace.steps) for trace in traces}) > 1 or not traces[0].steps:
        raise InvalidInput("the ranks do not have the same number of steps", source=traces[0].name)
    lines = [host_line(trace) for trace in traces]
    zero = min(trace.steps[0][1] for trace in traces)
    builder = Builder("ranks", match_collectives(lines))
    places = [
        builder.add(line, gap, own, line.trace.steps[0][1] - zero)
        for line, (gap, own) in zip(lines, rank_costs(lines, leave_one_out), strict=True)
    ]
    problem, placement = builder.problem(int(np.median([line.launch_ns for line in lines])))
    finish = simulate(problem, placement).op_finish
    return [_compared(line, finish[builder.number[ops]]) for line, ops in zip(lines, places, strict=True)]


def _compared(line: Line, finish: np.ndarray) -> Replay:
    """Compare the measured steps with ``finish`` int64 ``(n,)``, the simulated end of each event of the host."""
    trace, work = line.trace, line.trace.work
    marks = finish[line.kind == MARK].reshape(-1, 2)
    totals = np.zeros((len(trace.steps), len(trace.streams)), np.int64)
    for row in np.flatnonzero(line.kind == LAUNCH):
        for item in line.work[row]:
            totals[line.step[row], work.thread[item]] += work.end[item] - work.begin[item]
    return Replay(
        trace.name, trace.device_name, trace.step_ns, marks[:, 1] - marks[:, 0], totals.sum(axis=1), totals.max(axis=1)
    )


def noise(values: np.ndarray) -> float:
    """The relative spread of repeated measurements: 1.4826 times the median distance to the median, divided by the
    median."""
    middle = np.median(values)
    return float(1.4826 * np.median(np.abs(values - middle)) / middle)


def replay(trace: Trace, leave_one_out: bool = True) -> Replay:
    """Simulate all steps of ``trace`` in order. Raises :class:`InvalidInput` if it has no step."""
    if not trace.steps:
        raise InvalidInput("no step in the trace", source=trace.name)
    line = host_line(trace)
    problem, placement, ops = replay_problem(line, *host_costs(line, leave_one_out))
    return _compared(line, simulate(problem, placement).op_finish[ops])
