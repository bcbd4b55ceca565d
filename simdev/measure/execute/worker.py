"""The worker of a device: a process that runs the ops on that device and sends tensors to the other workers.

A worker follows the execution model (``simdev/sim/MODEL.md``). An op starts when its inputs have arrived (R1). Of the
ready ops, the order of the rules decides which one runs next (R2). A tensor is sent once to each other device (R3) and
is freed after its last use (R7). A CPU differs in one point: it has no copy engine, so its worker makes the copies
itself, between two ops.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import time
from dataclasses import dataclass

import numpy as np
import torch

from simdev.errors import Unsupported
from simdev.graphs.capture.trace import tensors_in
from simdev.measure.execute.program import AtenCall, Layout, Program, Ref
from simdev.measure.execute.shared import Shared

clock = time.perf_counter_ns
GO, STOP, FIRST = 0, 1, 8  # words of the array ``control``; from FIRST on one row of 8 words per worker
ARRIVED, DONE, FAILED = 0, 1, 2  # words of a worker's row


class Stopped(Exception):
    """Raised in a worker if another worker has failed or the calling process has ended."""


@dataclass(frozen=True)
class WorkerTask:
    """The task of all workers of an execution.

    ``devices`` int ``(n,)`` is the placement, and ``workers`` names the worker of each device. The step runs ``steps``
    times; the last time measures memory. ``order`` decides which ready op runs next, and ``priority`` int ``(n,)`` is
    used by the order of that name.
    """

    program: Program
    devices: np.ndarray
    workers: tuple[str, ...]
    order: str
    priority: np.ndarray | None
    steps: int
    shared: Shared


class Worker:
    """Runs the ops of device ``number`` on a CPU core."""

    device = torch.device("cpu")

    def __init__(self, job: WorkerTask, number: int):
        self.job, self.number, self.parent = job, number, os.getppid()
        self.program, self.graph = job.program, job.program.graph
        self.local = job.devices == number
        shared = job.shared
        self.control = shared.words("control")
        self.row = FIRST + 8 * number
        n = self.graph.n_ops
        self.start, self.finish = shared.words("op_start"), shared.words("op_finish")
        self.sent_start, self.sent_finish = shared.words("sent_start"), shared.words("sent_finish")
        self.n, self.m, self.d = n, self.graph.n_tensors, len(job.workers)
        self.incoming = [
            (shared.words(f"log.{source}.{number}"), source) for source in range(self.d) if source != number
        ]
        self.outgoing = {target: shared.words(f"log.{number}.{target}") for target in range(self.d) if target != number}
        self.copies: dict[int, torch.Tensor] | None = None
        self.fitted = False
        self.misfits: set[int] = set()

    # Before the first step -------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Bind the arguments of all calls of this worker's ops; called once, before the first step."""
        graph, program, shared = self.graph, self.program, self.job.shared
        self.value_tensor = {value: tensor for tensor, value in enumerate(program.tensor_value) if value >= 0}
        self.home_tensor: dict[int, torch.Tensor] = {}
        self.given_tensor: dict[int, torch.Tensor] = {}
        self.registers: list = [None] * (max(program.value_bytes, default=0) + 1)
        producer = graph.tensor_producer
        self.missing = [0] * self.n
        self.readers: list[list[int]] = [[] for _ in range(self.m)]
        self.left = [0] * self.m
        self.sends: list[list[tuple[int, int]]] = [[] for _ in range(self.n)]
        for tensor in range(self.m):
            consumers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
            here = [int(op) for op in consumers if self.local[op]]
            self.readers[tensor] = here
            for op in here:
                self.missing[op] += 1
            maker = int(producer[tensor])
            if self.local[maker]:
                self.left[tensor] = len(here) + (1 << 40 if graph.tensor_result[tensor] else 0)
                for target in sorted({int(self.job.devices[op]) for op in consumers} - {self.number}):
                    self.sends[maker].append((tensor, target))
        self.outputs = [range(int(graph.output_ptr[op]), int(graph.output_ptr[op + 1])) for op in range(self.n)]
        self.inputs = [
            [int(t) for t in graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]] if self.local[op] else []
            for op in range(self.n)
        ]
        self.mine = [op for op in range(self.n) if self.local[op]]
        self.free = [op for op in self.mine if not program.calls[op]]
        self.work = [op for op in self.mine if program.calls[op]]
        self.steps_of = {}
        for op in self.work:
            steps = [self._translate(call) for call in program.calls[op]]
            for step, values in zip(steps, program.scrap(op), strict=True):
                step.scrap = values
            self.steps_of[op] = steps
        self.unread = [
            [program.tensor_value[t] for t in self.outputs[op] if not self.left[t] and program.tensor_value[t] >= 0]
            for op in range(self.n)
        ]
        self.address = {
            (tensor, target): shared.array(f"slot.{tensor}.{target}").ctypes.data
            for op in self.mine
            for tensor, target in self.sends[op]
            if program.tensor_value[tensor] >= 0
        }
        self.results = [
            (program.tensor_value[tensor], tensor)
            for tensor in np.flatnonzero(graph.tensor_result)
            if self.local[producer[tensor]]
        ]

    def storage(self, array: np.ndarray) -> torch.Tensor:
        """The bytes of ``array`` as a uint8 tensor on the device; on a CPU it shares the memory of ``array``."""
        return torch.from_numpy(array)

    def _home(self, key: int) -> torch.Tensor:
        if key not in self.home_tensor:
            self.home_tensor[key] = self.storage(self.job.shared.array(f"home.{key}"))
        return self.home_tensor[key]

    def _slot(self, tensor: int) -> torch.Tensor:
        return self.storage(self.job.shared.array(f"slot.{tensor}.{self.number}"))

    def _given(self, value: int) -> torch.Tensor:
        if value not in self.given_tensor:
            self.given_tensor[value] = self.storage(self.program.given[value].copy())
        return self.given_tensor[value]

    def _fixed(self, ref: Ref) -> torch.Tensor | None:
        """The argument as a tensor if it has the same address in every step, otherwise None."""
        program = self.program
        if ref.source == "home":
            return _view(self._home(ref.key), ref.layout)
        if ref.source == "scalar":
            return _view(self.storage(program.scalars[ref.key].copy()), ref.layout)
        if ref.source == "blank":
            return None
        tensor = self.value_tensor.get(ref.key)
        if tensor is not None and not self.local[self.graph.tensor_producer[tensor]]:
            return _view(self._slot(tensor), ref.layout)
        if ref.key in program.value_home:
            return _view(self._home(program.value_home[ref.key]), ref.layout)
        if ref.key in program.given:
            return _view(self._given(ref.key), ref.layout)
        return None

    def _translate(self, call: AtenCall) -> BoundCall:
        over = {}  # overwritten value -> whether its old bytes must be kept for other readers
        for ref, after in call.written:
            if ref.source == "value" and ref.key not in self.program.value_home and after != ref.key:
                over[ref.key] = ref.key in self.program.given
        holes: list[tuple] = []
        args = [self._argument(item, (position,), holes, over) for position, item in enumerate(call.args)]
        kwargs = {
            key: self.device if key == "device" else self._argument(item, (key,), holes, over)
            for key, item in call.kwargs.items()
        }
        written = [(ref, value) for ref, value in call.written if value not in self.program.value_home]
        made = [
            (position, value, self.program.layouts[value], self.program.value_bytes[value])
            for position, value in call.made
        ]
        return BoundCall(call.function, args, kwargs, holes, made, written, tuple(over), call.seed, self.device)

    def _argument(self, item, path, holes, over):
        if isinstance(item, Ref):
            fixed = None if item.source == "value" and item.key in over else self._fixed(item)
            if fixed is None:
                same = item.source == "value" and item.layout == self.program.layouts[item.key]
                holes.append((path, item, same))
            return fixed
        if isinstance(item, list):
            return [self._argument(part, (*path, position), holes, over) for position, part in enumerate(item)]
        return item

    # A step ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all steps. After the first one, the calling process may read its results."""
        with torch.inference_mode():
            for step in range(self.job.steps):
                self._wait_for_start(step)
                if step == self.job.steps - 1:
                    self.job.shared.words("peak")[self.number] = self.peak_of(lambda number=step: self._step(number))
                else:
                    self._step(step)
                if step == 0:
                    self._keep_results()
                self.control[self.row + DONE] = step + 1

    def _wait_for_start(self, step: int) -> None:
        control, t0 = self.control, self.job.shared.words("t0")
        while control[GO] <= step:
            self._pause()
        self._clear(step)
        control[self.row + ARRIVED] = step + 1
        others = [FIRST + 8 * other + ARRIVED for other in range(self.d)]
        while any(control[word] <= step for word in others):
            self._pause()
        if self.number == 0:
            t0[step] = clock() + 300_000
        while not t0[step]:
            self._pause()
        self.t0 = t0[step]
        while clock() < self.t0:
            pass

    def _pause(self) -> None:
        if self.control[STOP] or os.getppid() != self.parent:
            raise Stopped
        time.sleep(20e-6)

    def _clear(self, step: int) -> None:
        for log, _ in self.incoming:
            log[0] = 0
        self.now_missing, self.now_left = list(self.missing), list(self.left)
        self.seen = [0] * len(self.incoming)
        self.ready: list[tuple[int, int]] = []
        self.base, self.sent_base = step * self.n, step * self.m * self.d

    def _step(self, step: int) -> None:
        ready, control, base, t0 = self.ready, self.control, self.base, self.t0
        start, finish = self.start, self.finish
        in_order = self.job.order == "program"
        for op in self.mine:
            if not self.now_missing[op] and self.program.calls[op]:
                self._make_ready(op, t0)
        for op in self.free:
            start[base + op] = clock() - t0
            finish[base + op] = now = clock() - t0
            self._finished(op, now + t0)
        position, todo = 0, len(self.work)
        while position < todo:
            self._receive()
            if not ready or (in_order and ready[0][1] != self.work[position]):
                if control[STOP]:
                    raise Stopped
                os.sched_yield()
                continue
            op = heapq.heappop(ready)[1]
            start[base + op] = clock() - t0
            self._execute(op)
            now = clock()
            finish[base + op] = now - t0
            self._finished(op, now)
            position += 1
        self._receive()
        self.fitted = True

    def _make_ready(self, op: int, now: int) -> None:
        key, priority = op, self.job.priority
        if self.job.order == "fifo":
            key = now
        elif self.job.order == "priority" and priority is not None:
            key = -int(priority[op])
        heapq.heappush(self.ready, (key, op))

    def _receive(self) -> None:
        for channel, (log, _) in enumerate(self.incoming):
            count = log[0]
            while self.seen[channel] < count:
                self.seen[channel] += 1
                tensor = log[self.seen[channel]]
                self.arrived(tensor)
                self._available(tensor, clock())

    def _available(self, tensor: int, now: int) -> None:
        missing = self.now_missing
        for op in self.readers[tensor]:
            missing[op] -= 1
            if not missing[op]:
                self._make_ready(op, now)

    def _finished(self, op: int, now: int) -> None:
        for tensor, target in self.sends[op]:
            self.send(tensor, target)
        for value in self.unread[op]:
            self.registers[value] = None
        for tensor in self.outputs[op]:
            self._available(tensor, now)

    def arrived(self, tensor: int) -> None:
        """Account for the memory of a tensor that has arrived in its slot of the shared memory.

        While memory is measured, a dummy tensor of the same size exists for as long as the copy would.
        """
        if self.copies is not None:
            self.copies[tensor] = torch.empty(int(self.graph.tensor_bytes[tensor]), dtype=torch.uint8)
            self.now_left[tensor] = len(self.readers[tensor])

    def peak_of(self, step) -> int:
        """The most bytes in use while ``step()`` runs: persistent bytes, and those of PyTorch's allocator."""
        self.copies = {}
        silence()  # the profiler prints to stderr
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        events = profiler.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), -event.nbytes()) for event in events if event.name() == "[memory]")
        total = np.cumsum([0] + [-size for _, size in changes])
        return self.persistent_bytes() + int(total.max())

    def persistent_bytes(self) -> int:
        """Bytes that this worker holds before the step: parameters, optimizer state, the batch."""
        homes = sum(len(home.before) for home in self.program.homes.values() if self.local[home.op])
        given = sum(tensor.numel() for tensor in self.given_tensor.values())
        return homes + given

    def send(self, tensor: int, target: int) -> None:
        """Copy a tensor into the shared memory of another worker, and notify that worker."""
        at = self.sent_base + tensor * self.d + target
        self.sent_start[at] = clock() - self.t0
        value = self.program.tensor_value[tensor]
        if value >= 0:
            size = self.program.value_bytes[value]
            ctypes.memmove(self.address[tensor, target], self._source(value).data_ptr(), size)
        self.sent_finish[at] = clock() - self.t0
        self.notify(tensor, target)

    def notify(self, tensor: int, target: int) -> None:
        log = self.outgoing[target]
        log[1 + log[0]] = tensor
        log[0] += 1

    def _source(self, value: int):
        """The storage of a value that this worker has computed."""
        if value in self.program.value_home:
            return self._home(self.program.value_home[value]).untyped_storage()
        if value in self.program.given:
            return self._given(value).untyped_storage()
        return self.registers[value].untyped_storage()

    # An op -----------------------------------------------------------------------------------------------------

    def _execute(self, op: int) -> None:
        registers, left, values = self.registers, self.now_left, self.program.tensor_value
        for step in self.steps_of[op]:
            saved = [(value, registers[value]) for value in step.over] if step.over else ()
            for value in step.over:
                tensor = self.value_tensor.get(value)
                if value in self.program.given or (tensor is not None and left[tensor] > 1):
                    registers[value] = self._copy(value)
            args, kwargs = step.arguments(registers)
            if step.seed is not None:
                self.seed(step.seed)
            out = step.function(*args, **kwargs)
            for ref, value in step.written:
                registers[value] = step.filled[ref]
            if step.written:
                step.filled.clear()
            for value, old in saved:
                registers[value] = old
            if step.made:
                made: list | None
                if len(step.made) == 1 and isinstance(out, torch.Tensor):
                    made = [out]
                else:
                    made = list(tensors_in(out))
                for position, value, layout, size in step.made:
                    tensor = made[position]
                    if not self.fitted and not _fits(tensor, layout, size):
                        self.misfits.add(value)
                    if value in self.misfits:
                        tensor = _fit(tensor, layout, size)
                    registers[value] = tensor
            for value in step.scrap:
                registers[value] = None
        args = out = made = tensor = None  # free the op's tensors before the next allocation
        if self.copies:
            for tensor in self.inputs[op]:
                if tensor in self.copies:
                    left[tensor] -= 1
                    if not left[tensor]:
                        del self.copies[tensor]
        for tensor in self.inputs[op]:
            if self.local[self.graph.tensor_producer[tensor]]:
                left[tensor] -= 1
                if not left[tensor] and values[tensor] >= 0:
                    registers[values[tensor]] = None

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def _copy(self, value: int) -> torch.Tensor:
        size, layout = self.program.value_bytes[value], self.program.layouts[value]
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._source(value))[:size]
        return _view(source.clone(), layout)

    def _keep_results(self) -> None:
        """Copy the results of the step to the shared memory, where the calling process reads them."""
        for value, tensor in self.results:
            held = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._source(value))
            target = self.job.shared.array(f"result.{tensor}")
            target[:] = held[: len(target)].cpu().numpy()


class BoundCall:
    """A call whose arguments are bound, except those that change from step to step.

    ``holes`` lists these arguments: their position in the arguments, their :class:`Ref`, and whether the register holds
    the argument as it is (otherwise a new view is made).
    """

    __slots__ = ("function", "args", "kwargs", "holes", "made", "written", "over", "seed", "filled", "flat", "scrap",
                 "device")  # fmt: skip

    def __init__(self, function, args, kwargs, holes, made, written, over, seed, device):
        self.function, self.args, self.kwargs, self.holes = function, args, kwargs, holes
        self.made, self.written, self.over, self.seed, self.device = made, written, over, seed, device
        self.scrap: list[int] = []  # values that are not needed after this call
        self.filled: dict[Ref, torch.Tensor] = {}  # arguments that the call overwrites, by their reference
        self.flat = all(len(path) == 1 and isinstance(path[0], int) for path, _, _ in holes)

    def arguments(self, registers):
        if not self.holes:
            return self.args, self.kwargs
        args, kwargs = self.args.copy(), self.kwargs
        if not self.flat:
            args = [item.copy() if isinstance(item, list) else item for item in args]
            kwargs = {key: item.copy() if isinstance(item, list) else item for key, item in kwargs.items()}
        for path, ref, same in self.holes:
            if ref.source == "blank":
                tensor = _blank(ref, self.device)
            else:
                tensor = registers[ref.key]
                if not same:
                    tensor = _restride(tensor, ref.layout)
            if self.written:
                self.filled[ref] = tensor
            if len(path) == 1:
                if isinstance(path[0], int):
                    args[path[0]] = tensor
                else:
                    kwargs[path[0]] = tensor
            else:
                (args if isinstance(path[0], int) else kwargs)[path[0]][path[1]] = tensor
        return args, kwargs


def silence() -> None:
    """Discard everything that this process prints from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _view(storage: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor of ``layout`` over a storage, or over the storage of a tensor."""
    tensor = torch.empty(0, dtype=layout.dtype, device=storage.device)
    return tensor.set_(storage.untyped_storage(), layout.offset, layout.size, layout.stride)


def _restride(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    if tensor.dtype == layout.dtype:
        return tensor.as_strided(layout.size, layout.stride, layout.offset)
    return _view(tensor, layout)


def _blank(ref: Ref, device) -> torch.Tensor:
    return _view(torch.empty(max(ref.key, 1), dtype=torch.uint8, device=device), ref.layout)


def _fits(tensor: torch.Tensor, layout: Layout, size: int) -> bool:
    """Whether a result has the same layout and size as when the step was recorded."""
    strides = all(
        a == b for a, b, extent in zip(tensor.stride(), layout.stride, layout.size, strict=True) if extent > 1
    )
    if tuple(tensor.shape) != layout.size or tensor.dtype != layout.dtype:
        raise Unsupported(f"an op made {tuple(tensor.shape)} {tensor.dtype}, recorded as {layout}")
    return strides and tensor.storage_offset() == layout.offset and tensor.untyped_storage().nbytes() >= size


def _fit(tensor: torch.Tensor, layout: Layout, size: int) -> torch.Tensor:
    fitted = _view(torch.empty(max(size, 1), dtype=torch.uint8, device=tensor.device), layout)
    return fitted.copy_(tensor)
