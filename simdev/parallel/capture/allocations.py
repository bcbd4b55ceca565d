"""Records the allocations of a stage: each storage that appears, changes its size or goes, and its stream."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.parallel.capture.fakes import to_fakes
from simdev.parallel.capture.record import RankRecorder
from simdev.parallel.capture.ring import ring_attention
from simdev.parallel.capture.stage import Options, StageRun, fake_process_group, keep_recorded, local_of, program_of
from simdev.parallel.mesh import Mesh
from simdev.parallel.passes import STEP

Row = tuple[int, int, int, int]  # (segment and position of the key's first event, bytes, stream); 0 bytes: release


class AllocationRecorder(RankRecorder):
    """``events`` are ``(key, bytes, stream)``, with 0 bytes for a release; a key is the number of its first event."""

    def __init__(self, rows: int | None = 1):
        super().__init__(rows)
        self.events: list[tuple[int, int, int]] = []
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
        self.optimizer, self.marks = optimizer, [len(self.recorder.events)]

    def _cut(self, kind: str, base: int, state: str = "") -> None:
        super()._cut(kind, base, state)
        self.marks.append(len(self.recorder.events))

    def step(self, order: str, part: Part) -> tuple[int, int, int]:
        figures = super().step(order, part)
        if order == STEP and self.stage.sync is None and not self.gathered:  # a capture runs two microbatches
            *begun, (_, name, further), _, _, finish = self._cuts
            last = name.replace("further", "last"), replace(further, name="backward last")
            self._cuts = [*begun, ("backward last", *last), finish]
        return figures


def record(
    model: ParallelModel,
    parameters: dict,
    mesh: Mesh,
    part: Part,
    microbatches: int,
    each: bool,
    gathered: bool = False,
) -> tuple[tuple[tuple[Row, ...], ...], tuple[int, ...], int]:
    """Rows of the segments (parameters, passes, end of the step), bytes of the optimizer's tensors, and the number of
    parameters. ``each``: gradients are reduced after each microbatch; ``gathered``: parameters are gathered once.

    The program of the stage is recorded as well, and kept as if it had been captured."""
    default, order = torch.get_default_dtype(), STEP[: 2 * microbatches]
    with fake_process_group(mesh) as torch_mesh:
        try:
            made = model.function(torch_mesh, part, **parameters)
            recorder = AllocationRecorder(made.rows)
            made = replace(made, sync=None) if each else made
            with FakeTensorMode(allow_non_fake_inputs=True), ring_attention():
                to_fakes(made.module)
                run = _Marks(made, recorder, mesh, gathered)
                figures = run.step(order, part)
        finally:
            torch.set_default_dtype(default)
    program = program_of(made, mesh, run, figures)
    keep_recorded(model, parameters, mesh, part, Options(order, False, each, gathered), program)
    tensors = [t for state in run.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return rows_of(recorder.events, run.marks), tuple(_local_bytes(t) for t in tensors), program.parameters


def _local_bytes(tensor) -> int:
    local = local_of(tensor)
    return local.numel() * local.element_size()


def rows_of(events: list[tuple[int, int, int]], marks: list[int]) -> tuple[tuple[Row, ...], ...]:
    """Events, whose keys are numbers of events, as rows of the segments that end at ``marks``."""
    place: dict = {}
    segments = []
    for number, (begin, end) in enumerate(pairwise([0, *marks])):
        rows = []
        for position, (key, size, stream) in enumerate(events[begin:end]):
            rows.append((*place.setdefault(key, (number, position)), size, stream))
        segments.append(tuple(rows))
    return tuple(segments)
