"""The worker of a GPU.

Ops go to one stream, in the order in which they become ready. Copies go to side streams, through pinned memory that all
workers share. A tensor for another device is copied to the host when its op has finished, and the other worker is
notified when the copy has finished. A tensor from another device is copied to the GPU as soon as it is in the shared
memory; its readers wait for this copy on the stream, not on the host. CUDA events measure the times. Two GPUs exchange
tensors through the host.
"""

from __future__ import annotations

import numpy as np
import torch

from simdev.errors import Unsupported
from simdev.measure.execute.worker import BoundCall, Worker, WorkerTask, clock


class CudaWorker(Worker):
    """Runs the ops of device ``number`` on GPU ``index``. Create it in the worker's own process."""

    def __init__(self, job: WorkerTask, number: int, index: int):
        super().__init__(job, number)
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        self.generator = torch.cuda.default_generators[index]
        self.compute, self.outward, self.inward = (torch.cuda.Stream(self.device) for _ in range(3))
        address, size = job.shared.span()
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(error):
            raise Unsupported(f"the shared memory ({size} bytes) cannot be pinned: CUDA error {int(error)}")
        self.slot_tensor: dict[int, torch.Tensor] = {}
        self.there: dict[int, torch.cuda.Event] = {}
        self.pending: list[tuple] = []

    def storage(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _slot(self, tensor: int) -> torch.Tensor:
        if tensor not in self.slot_tensor:
            size = self.program.value_bytes[self.program.tensor_value[tensor]]
            self.slot_tensor[tensor] = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
        return self.slot_tensor[tensor]

    def _translate(self, call) -> BoundCall:
        if call.function._opname.endswith("_for_cpu") or "_for_cpu_" in call.function._opname:
            raise Unsupported(f"{call.function} has no kernel on a GPU")
        return super()._translate(call)

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def _step(self, step: int) -> None:
        self.there.clear()
        self.marks: list[tuple] = []
        self.base_event = self._mark(self.compute)
        self.base_event.synchronize()
        self.base_ns = clock() - self.t0
        with torch.cuda.stream(self.compute):
            super()._step(step)
        while self.pending:
            self._receive()
        torch.cuda.synchronize(self.device)
        for words, at, event in self.marks:
            words[at] = self.base_ns + round(self.base_event.elapsed_time(event) * 1e6)

    def _mark(self, stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _execute(self, op: int) -> None:
        for tensor in self.inputs[op]:
            if tensor in self.there:
                self.compute.wait_event(self.there[tensor])
        if any(step.over for step in self.steps_of[op]):
            self.compute.wait_stream(self.outward)  # a tensor to overwrite may still be in an outgoing copy
        self.marks.append((self.start, self.base + op, self._mark(self.compute)))
        super()._execute(op)
        self.done = self._mark(self.compute)
        self.marks.append((self.finish, self.base + op, self.done))

    def _finished(self, op: int, now: int) -> None:
        if not self.program.calls[op]:
            self.done = self.base_event
        super()._finished(op, now)

    def send(self, tensor: int, target: int) -> None:
        """Copy a tensor to the host when its op has finished; notify the other worker when the copy has finished."""
        at, value = self.sent_base + tensor * self.d + target, self.program.tensor_value[tensor]
        self.outward.wait_event(self.done)
        self.marks.append((self.sent_start, at, self._mark(self.outward)))
        if value >= 0:
            storage = self._source(value)
            source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            source = source[: self.program.value_bytes[value]]
            with torch.cuda.stream(self.outward):
                slot = torch.from_numpy(self.job.shared.array(f"slot.{tensor}.{target}"))
                slot.copy_(source, non_blocking=True)
        else:
            source = None
        event = self._mark(self.outward)
        self.marks.append((self.sent_finish, at, event))
        self.pending.append((event, tensor, target, source))  # ``source`` keeps the memory alive until the copy is done

    def _receive(self) -> None:
        while self.pending and self.pending[0][0].query():
            _, tensor, target, _ = self.pending.pop(0)
            self.notify(tensor, target)
        super()._receive()

    def arrived(self, tensor: int) -> None:
        """Copy a tensor of another device from the host to this GPU; its readers wait for the copy's event."""
        if self.program.tensor_value[tensor] >= 0:
            with torch.cuda.stream(self.inward):
                host = torch.from_numpy(self.job.shared.array(f"slot.{tensor}.{self.number}"))
                self._slot(tensor)[: len(host)].copy_(host, non_blocking=True)
            self.there[tensor] = self._mark(self.inward)

    def peak_of(self, step) -> int:
        """The most bytes that PyTorch's allocator had handed out while ``step()`` ran, with copies and parameters."""
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        return int(torch.cuda.max_memory_allocated(self.device))

    def _keep_results(self) -> None:
        torch.cuda.synchronize(self.device)
        super()._keep_results()
        for key, tensor in self.home_tensor.items():
            target = self.job.shared.array(f"home.{key}")
            target[:] = tensor[: len(target)].cpu().numpy()
