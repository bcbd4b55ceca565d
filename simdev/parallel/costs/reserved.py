"""The memory that a rank's training steps reserve: the allocations of a stage, recorded in full, replayed by PyTorch's
allocator.

:func:`reserved_bytes` records one step of a stage with all its layers, because the free blocks differ from layer to
layer. It replays what a training job does: parameters, a first step in whose end the optimizer allocates its state
among the freed activations, and further steps.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simdev.parallel.capture.record import RankRecorder
from simdev.parallel.capture.ring import ring_attention
from simdev.parallel.capture.stage import StageRun, fake_process_group
from simdev.parallel.costs.allocator import CachingAllocator, Event
from simdev.parallel.plan import Plan

STEPS = 3  # replayed steps; a later one reserves nothing more in the plans that were tried


class Allocations(RankRecorder):
    """Also remembers each storage that appears, changes its size or goes, and the stream that it belongs to."""

    def __init__(self):
        super().__init__()
        self.events: list[Event] = []
        self._keys: dict[int, int] = {}

    def _see(self, storage) -> None:
        address = storage._cdata
        known = self._sizes.get(address)
        before, size = known[0] if known else -1, int(storage.nbytes())
        super()._see(storage)
        if size == before:
            return
        if before < 0:
            self._keys[address] = len(self.events)
        stream = getattr(torch.cpu.current_stream(), "number", 0)
        self.events.append((self._keys[address], size, stream))

    def _forget(self, key: int) -> None:
        super()._forget(key)
        if key in self._keys:
            self.events.append((self._keys.pop(key), 0, 0))


class _Marks(StageRun):
    """Remembers how many events there were before the step and at the end of each segment."""

    def _warm(self, optimizer, module) -> None:
        super()._warm(optimizer, module)
        self.optimizer, self.marks = optimizer, {"begin": len(self.recorder.events)}

    def _cut(self, name: str, base: int) -> None:
        super()._cut(name, base)
        self.marks[name] = len(self.recorder.events)


def reserved_bytes(plan: Plan, stage: int = 0) -> tuple[int, int]:
    """``(peak allocated, peak reserved)`` bytes of a rank that holds ``stage``, one microbatch a step."""
    mesh, part = plan.captured_mesh(plan.rank_of(stage)), plan.parts[stage]
    recorder = Allocations()
    default = torch.get_default_dtype()
    with fake_process_group(mesh) as torch_mesh:
        try:
            made = plan.model.function(torch_mesh, part, **{**plan.parameters, "layers": part.layers})
            with FakeTensorMode(allow_non_fake_inputs=True), ring_attention():
                made.module.to_empty(device="cpu")
                run = _Marks(made, recorder, mesh, {})
                run.step(1, part)
        finally:
            torch.set_default_dtype(default)
    tensors = [t for state in run.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    sizes = [_local_bytes(t) for t in tensors]
    return replay_steps(recorder.events, run.marks["begin"], run.marks["backward only"], sizes)


def _local_bytes(tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def replay_steps(events: list[Event], begin: int, update: int, state_sizes: list[int]) -> tuple[int, int]:
    """``(peak allocated, peak reserved)`` bytes of :data:`STEPS` steps. ``events[:begin]`` allocate the parameters, the
    rest is one step; before ``events[update]`` the first step allocates the optimizer's state."""
    allocator = CachingAllocator()
    allocator.replay(events[:update])
    allocator.replay((-1 - number, size, 0) for number, size in enumerate(state_sizes))
    allocator.replay(events[update:])
    for _ in range(STEPS - 1):
        allocator.replay(events[begin:])
    return allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
