"""What the engines are measured against: other ways to compute the same step times, and a cheaper one that does not."""

from __future__ import annotations

import ctypes
import heapq
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from numba import njit

from simdev.problem.problem import Problem
from simdev.sim.inputs import problem_arrays

YARDSTICK = Path(__file__).with_name("yardstick.c")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


def tables(problem: Problem, devices: np.ndarray) -> tuple:
    """What the functions below read: a placement and the parts of the problem, as arrays."""
    p = problem_arrays(problem)
    names = (
        "device_row",
        "op_ns",
        "transfer_ns",
        "pair_class",
        "input_ptr",
        "output_ptr",
        "consumer_ptr",
        "consumers",
        "route_ptr",
        "route",
    )
    return devices.astype(np.uint32), *(getattr(p, name) for name in names), int(p.contention == 0)


def plain(tables: tuple) -> tuple:
    """The same with signed indices, as one would write it at first."""
    return tuple(table.astype(np.int64) if isinstance(table, np.ndarray) else table for table in tables)


def event_heap(
    devices,
    device_row,
    op_ns,
    transfer_ns,
    pair_class,
    input_ptr,
    output_ptr,
    consumer_ptr,
    consumers,
    route_ptr,
    route,
    shared,
):
    """Step time by a heap of (time, kind, op) events and a heap of (ready, op) per device, one slot a device: the
    textbook way. Plain Python, or compiled as it is."""
    n, n_devices = len(devices), len(device_row)
    missing = [0] * n
    ready = [0] * n
    busy = [False] * n_devices
    queues = [[(0, 0)] for _ in range(n_devices)]
    for queue in queues:
        queue.pop()
    channel_end = [0] * (int(max(route)) + 1 if len(route) else 1)
    events = [(0, 0, 0)]
    events.pop()
    for op in range(n):
        missing[op] = int(input_ptr[op + 1]) - int(input_ptr[op])
        if missing[op] == 0:
            heapq.heappush(events, (0, 1, op))
    step = 0
    while len(events) > 0:
        now = events[0][0]
        touched = [0]
        touched.pop()
        while len(events) > 0 and events[0][0] == now:
            _, kind, op = heapq.heappop(events)
            device = int(devices[op])
            touched.append(device)
            if kind == 1:
                heapq.heappush(queues[device], (now, op))
                continue
            busy[device] = False
            step = max(step, now)
            for tensor in range(int(output_ptr[op]), int(output_ptr[op + 1])):
                arrival = [-1] * n_devices
                arrival[device] = now
                first, stop = int(consumer_ptr[tensor]), int(consumer_ptr[tensor + 1])
                for edge in range(first, stop):
                    arrival[int(devices[int(consumers[edge])])] = now
                for target in range(n_devices):
                    if arrival[target] < 0 or target == device:
                        continue
                    pair = device * n_devices + target
                    start = now
                    if shared:
                        for hop in range(int(route_ptr[pair]), int(route_ptr[pair + 1])):
                            start = max(start, channel_end[int(route[hop])])
                    finish = start + int(transfer_ns[pair_class[device, target], tensor])
                    if shared:
                        for hop in range(int(route_ptr[pair]), int(route_ptr[pair + 1])):
                            channel_end[int(route[hop])] = finish
                    arrival[target] = finish
                    step = max(step, finish)
                for edge in range(first, stop):
                    consumer = int(consumers[edge])
                    ready[consumer] = max(ready[consumer], arrival[int(devices[consumer])])
                    missing[consumer] -= 1
                    if missing[consumer] == 0:
                        heapq.heappush(events, (ready[consumer], 1, consumer))
        for device in touched:
            if not busy[device] and len(queues[device]) > 0:
                _, op = heapq.heappop(queues[device])
                busy[device] = True
                heapq.heappush(events, (now + int(op_ns[device_row[device], op]), 0, op))
    return step


naive_numba = njit(event_heap)


@njit
def static_order(
    devices,
    device_row,
    op_ns,
    transfer_ns,
    pair_class,
    input_ptr,
    output_ptr,
    consumer_ptr,
    consumers,
    route_ptr,
    route,
    shared,
    ready,
    free,
    channel_end,
    arrival,
    stamp,
):
    """A lower yardstick, not the step time: ops start in order of number on each device, sends go in the same order."""
    n_devices, step, mark = len(device_row), np.int64(0), np.int64(0)
    ready[:], free[:], channel_end[:], stamp[:] = 0, 0, 0, 0
    for op in range(np.uint64(len(devices))):
        device = devices[op]
        now = max(ready[op], free[device]) + op_ns[device_row[device], op]
        free[device] = now
        step = max(step, now)
        for tensor in range(output_ptr[op], output_ptr[op + 1]):
            mark += 1
            stamp[device], arrival[device] = mark, now
            for edge in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
                consumer = consumers[edge]
                target = devices[consumer]
                if stamp[target] != mark:
                    pair = np.uint32(device * n_devices + target)
                    start = now
                    if shared:
                        for hop in range(route_ptr[pair], route_ptr[pair + np.uint32(1)]):
                            start = max(start, channel_end[route[hop]])
                    finish = start + transfer_ns[pair_class[device, target], tensor]
                    if shared:
                        for hop in range(route_ptr[pair], route_ptr[pair + np.uint32(1)]):
                            channel_end[route[hop]] = finish
                    stamp[target], arrival[target] = mark, finish
                ready[consumer] = max(ready[consumer], arrival[target])
    return step


def static_room(problem: Problem) -> tuple[np.ndarray, ...]:
    """The working arrays of :func:`static_order`."""
    d = problem.topology.n_devices
    sizes = (problem.graph.n_ops, d, len(problem.topology.channels), d, d)
    return tuple(np.zeros(size, np.int64) for size in sizes)


class Yardstick:
    """The kernel in C, or ``None`` from :meth:`build` where there is no compiler."""

    def __init__(self, library: Path):
        self._run = ctypes.CDLL(str(library)).run
        self._run.restype = ctypes.c_int64

    @classmethod
    def build(cls) -> Yardstick | None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            return None
        library = Path(tempfile.mkdtemp(prefix="simdev-perf-")) / "yardstick.so"
        subprocess.run([compiler, *FLAGS, str(YARDSTICK), "-o", str(library)], check=True)
        return cls(library)

    def prepare(self, problem: Problem, rows: np.ndarray):
        """A function from row number to step time."""
        p = problem_arrays(problem)
        d, channels = problem.topology.n_devices, len(problem.topology.channels)
        n, m, e = problem.graph.n_ops, problem.graph.n_tensors, problem.graph.n_edges
        scratch, log = np.zeros(5 * n + 8 * d + channels + 1, np.int64), np.zeros(3 * n + 2 * m, np.int64)
        log_of_transfers = np.zeros(2 * e, np.int64), np.zeros(2 * e, np.uint32)
        route_ptr = p.route_ptr if p.contention == 0 else np.zeros_like(p.route_ptr)
        pair_class = np.ascontiguousarray(p.pair_class, np.int32)
        kept = [p.op_ns, p.device_row, p.transfer_ns, pair_class, p.input_ptr, p.output_ptr, p.consumer_ptr]
        kept += [p.consumers, route_ptr, p.route, p.alone, scratch, log, *log_of_transfers]
        kept = [np.ascontiguousarray(array) for array in kept]
        at = [ctypes.c_void_p(array.ctypes.data) for array in kept]
        sizes = [ctypes.c_uint64(value) for value in (n, d, channels)]
        tensors = ctypes.c_uint64(m)
        at_row = [ctypes.c_void_p(row.ctypes.data) for row in rows]

        def run(row: int) -> int:
            assert len(kept) and len(rows)  # the arrays live as long as this function
            return self._run(*sizes, at_row[row], *at[:3], tensors, *at[3:])

        return run
