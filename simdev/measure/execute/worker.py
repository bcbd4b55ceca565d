"""One device of an execution: a process that runs the ops placed on it and sends what others need.

It follows the execution model (``simdev/sim/MODEL.md``): an op starts when its inputs are there (R1), the ready op that
comes first by the policy is taken (R2), a tensor is sent once to each other device (R3), a tensor is freed after its
last use (R7). Where a CPU differs: it has no copy engine, so its worker copies what it sends itself, between two ops.
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
from simdev.measure.execute.program import Call, Layout, Program, Ref
from simdev.measure.execute.shared import Shared

clock = time.perf_counter_ns
GO, STOP, FIRST = 0, 1, 8  # words of the array ``control``; from FIRST on one row of 8 words per worker
ARRIVED, DONE, FAILED = 0, 1, 2  # words of a worker's row


class Stopped(Exception):
    """Another worker failed, or the caller is gone."""


@dataclass(frozen=True)
class Job:
    """What a worker is to do. ``devices`` int ``(n,)`` is the placement, ``steps`` how often the step is run (the last
    time to see its memory); ``priority`` orders ready ops under the policy of that name."""

    program: Program
    devices: np.ndarray
    units: tuple[str, ...]
    policy: str
    priority: np.ndarray | None
    steps: int
    shared: Shared


class Worker:
    """Runs the ops of device ``number`` on a CPU core."""

    device = torch.device("cpu")

    def __init__(self, job: Job, number: int):
        self.job, self.number, self.parent = job, number, os.getppid()
        self.program, self.graph = job.program, job.program.graph
        self.local = job.devices == number
        shared = job.shared
        self.control = shared.words("control")
        self.row = FIRST + 8 * number
        n = self.graph.n_ops
        self.start, self.finish = shared.words("op_start"), shared.words("op_finish")
        self.sent_start, self.sent_finish = shared.words("sent_start"), shared.words("sent_finish")
        self.n, self.m, self.d = n, self.graph.n_tensors, len(job.units)
        self.incoming = [
            (shared.words(f"log.{source}.{number}"), source) for source in range(self.d) if source != number
        ]
        self.outgoing = {target: shared.words(f"log.{number}.{target}") for target in range(self.d) if target != number}
        self.copies: dict[int, torch.Tensor] | None = None
        self.fitted = False
        self.misfits: set[int] = set()

    # Before the first step -------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Translate the ops placed here into calls with their arguments in place."""
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
            for op in self.mine for tensor, target in self.sends[op] if program.tensor_value[tensor] >= 0
        }  # fmt: skip
        self.results = [
            (program.tensor_value[tensor], tensor) for tensor in np.flatnonzero(graph.tensor_result)
            if self.local[producer[tensor]]
        ]  # fmt: skip

    def storage(self, array: np.ndarray) -> torch.Tensor:
        """uint8 tensor on the device with the bytes of ``array`` (shared with it on a CPU)."""
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
        """The argument, where it lies in the same place in every step."""
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

    def _translate(self, call: Call) -> _Step:
        over = {}  # in-place writes: value that was there -> whether its bytes must be kept for others
        for ref, after in call.written:
            if ref.source == "value" and ref.key not in self.program.value_home and after != ref.key:
                over[ref.key] = ref.key in self.program.given
        holes: list[tuple] = []
        args = [self._argument(item, (position,), holes, over) for position, item in enumerate(call.args)]
        kwargs = {
            key: self.device if key == "device" else self._argument(item, (key,), holes, over)
            for key, item in call.kwargs.items()
        }  # fmt: skip
        written = [
            (ref, value) for ref, value in call.written if value not in self.program.value_home
        ]  # fmt: skip
        made = [(position, value, self.program.layouts[value], self.program.value_bytes[value])
                for position, value in call.made]  # fmt: skip
        return _Step(call.function, args, kwargs, holes, made, written, tuple(over), call.seed, self.device)

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
        """All steps; between the first and the second the caller may look at what it computed."""
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
        in_order = self.job.policy == "program"
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
        policy = self.job.policy
        key = now if policy == "fifo" else op if policy == "program" else -int(self.job.priority[op])
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
        """A tensor of another device is in its slot, which has no other use: as long as the tensor would be here as a
        copy, the step that is watched holds as many bytes."""
        if self.copies is not None:
            self.copies[tensor] = torch.empty(int(self.graph.tensor_bytes[tensor]), dtype=torch.uint8)
            self.now_left[tensor] = len(self.readers[tensor])

    def peak_of(self, step) -> int:
        """Most bytes in use while ``step()`` runs: what is there before it, and what PyTorch's allocator hands out."""
        self.copies = {}
        silence()  # the profiler writes notes to stderr
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        events = profiler.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), -event.nbytes()) for event in events if event.name() == "[memory]")
        total = np.cumsum([0] + [-size for _, size in changes])
        return self.persistent_bytes() + int(total.max())

    def persistent_bytes(self) -> int:
        """Bytes that are here before the step: parameters, optimiser state, the batch."""
        homes = sum(len(home.before) for home in self.program.homes.values() if self.local[home.op])
        given = sum(tensor.numel() for tensor in self.given_tensor.values())
        return homes + given

    def send(self, tensor: int, target: int) -> None:
        """Copy a tensor into the memory of another device and say so."""
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
        """The storage that holds a value made here."""
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
                if len(step.made) == 1 and isinstance(out, torch.Tensor):
                    made = (out,)
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
        args = out = made = tensor = None  # what the op used goes before memory is next asked for
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
        """Put the results of the step where the caller finds them."""
        for value, tensor in self.results:
            held = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._source(value))
            target = self.job.shared.array(f"result.{tensor}")
            target[:] = held[: len(target)].cpu().numpy()


class _Step:
    """A call with its arguments in place but for ``holes``: (path, ref, whether the register is the argument)."""

    __slots__ = ("function", "args", "kwargs", "holes", "made", "written", "over", "seed", "filled", "flat", "scrap",
                 "device")  # fmt: skip

    def __init__(self, function, args, kwargs, holes, made, written, over, seed, device):
        self.function, self.args, self.kwargs, self.holes = function, args, kwargs, holes
        self.made, self.written, self.over, self.seed, self.device = made, written, over, seed, device
        self.scrap: list[int] = []  # values that nobody needs after this call
        self.filled: dict[Ref, torch.Tensor] = {}  # arguments that the call overwrites
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
    """Nothing that this process writes from now on is seen."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _view(storage: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor of ``layout`` over the storage of a uint8 tensor (or one that begins where its storage does)."""
    tensor = torch.empty(0, dtype=layout.dtype, device=storage.device)
    return tensor.set_(storage.untyped_storage(), layout.offset, layout.size, layout.stride)


def _restride(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    if tensor.dtype == layout.dtype:
        return tensor.as_strided(layout.size, layout.stride, layout.offset)
    return _view(tensor, layout)


def _blank(ref: Ref, device) -> torch.Tensor:
    return _view(torch.empty(max(ref.key, 1), dtype=torch.uint8, device=device), ref.layout)


def _fits(tensor: torch.Tensor, layout: Layout, size: int) -> bool:
    """Whether a result lies in its storage as it did when the step was recorded."""
    strides = all(
        a == b for a, b, extent in zip(tensor.stride(), layout.stride, layout.size, strict=True) if extent > 1
    )
    if tuple(tensor.shape) != layout.size or tensor.dtype != layout.dtype:
        raise Unsupported(f"an op made {tuple(tensor.shape)} {tensor.dtype}, recorded as {layout}")
    return strides and tensor.storage_offset() == layout.offset and tensor.untyped_storage().nbytes() >= size


def _fit(tensor: torch.Tensor, layout: Layout, size: int) -> torch.Tensor:
    fitted = _view(torch.empty(max(size, 1), dtype=torch.uint8, device=tensor.device), layout)
    return fitted.copy_(tensor)
