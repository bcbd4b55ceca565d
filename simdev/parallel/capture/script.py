"""One training step of a script on every rank: ``simdev capture train.py --mesh dp_shard=4 --step 3 -- --epochs 1``.

The script runs unchanged on the CPU, for real or on fake tensors, as the first rank of a fake process group, and once
more as the last one: their collectives have to be the same. Environment variables, ``init_process_group``,
``torch.cuda.device_count``, ``torch.multiprocessing.spawn`` and exchanges of Python objects answer as on the ranks of
the mesh. The fake group moves no data: a gathered parameter has its own part and arbitrary numbers. Steps are marked as
in :mod:`simdev.graphs.capture.script`; what the ranks execute is recorded as in
:mod:`simdev.parallel.capture.record`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from simdev.errors import InvalidInput
from simdev.graphs.capture import script_of
from simdev.graphs.capture.optimizers import trained_by
from simdev.graphs.capture.rewrites import as_on_gpu
from simdev.graphs.capture.run import seeded
from simdev.graphs.capture.script import Recording, Watch, refused_values, run_watched
from simdev.graphs.capture.trace import plain_tensors
from simdev.graphs.capture.unknown import Fakes
from simdev.parallel.capture.libraries import Chunks, recordable
from simdev.parallel.capture.record import RankRecorder
from simdev.parallel.capture.step import RankRun, program_of
from simdev.parallel.mesh import Mesh
from simdev.parallel.rank_program import RankProgram


def capture_script_ranks(
    path: str | Path,
    mesh: Mesh,
    arguments: Sequence[str] = (),
    *,
    step: int = 3,
    scale: int | None = None,
    fake: bool = False,
    name: str | None = None,
    **sizes: int,
) -> RankProgram:
    """Run a script on ``mesh`` up to the end of its ``step``-th training step, and return the program of that step.
    ``scale`` sets the script's own option for the batch size. With ``fake``, tensors have neither memory nor values
    (:mod:`simdev.graphs.capture.unknown`), but for what a ``DataLoader`` computes. ``sizes`` are ``batch`` and
    ``length``, the sequences of a replica and their tokens.

    Raises :class:`InvalidInput` naming the script and its line if it fails before or makes fewer steps, if no rank
    calls a collective, and for a mesh with pipeline stages.
    """
    path, given = script_of(path, arguments, step, scale)
    if mesh["pp"] > 1:
        message = "a script is captured without pipeline stages; for these give FILE.py:FUNCTION, a make_step(mesh)"
        raise InvalidInput(message, source=path, field="--mesh")

    def run_of(rank: int, member: int) -> RankRun:
        return _ScriptRun(path, given, step, mesh, rank, member, fake)

    return program_of(run_of, mesh, name or path.stem, str(path), **sizes)


class _ScriptRun(RankRun):
    """Runs a script as the ``member``-th rank."""

    def __init__(self, path: Path, arguments: list[str], step: int, mesh: Mesh, rank: int, member: int, fake: bool):
        super().__init__(None, mesh, rank, Chunks(), str(path), member)
        self.path, self.arguments, self.step, self.fake = path, arguments, step, fake

    def _record(self, torch_mesh):
        recorder = RankRecorder(rows=None)
        recorder.paused = True

        def recording(roots, optimizers, lasting):
            return _RankRecording(recorder, roots, optimizers)

        fakes = Fakes(self.path) if self.fake else None
        watch = Watch(self.path, self.step, recording, prepare=lambda optimizer: None, rank=self.member, fakes=fakes)
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if fakes is not None:
                enter(refused_values(fakes, self.path))
            enter(seeded())
            if fakes is not None:
                enter(fakes.mode)
            enter(as_on_gpu(ranks=True))
            enter(recordable(self.chunks))
            enter(_ranks_that_answer(self.mesh.ranks))
            if fakes is not None:
                enter(fakes)
            enter(recorder)
            run_watched(self.path, self.arguments, watch)
            last = watch.finished()
        assert isinstance(last, _RankRecording)
        self._first, self.resident_bytes = last.first, last.resident_bytes
        return recorder


class _RankRecording(Recording):
    """One step among the entries of a recorder, which records only while a step does."""

    def __init__(self, recorder: RankRecorder, roots: dict, optimizers: list):
        self._recorder = recorder
        for root in roots.values():
            for tensor in (*root.parameters(), *root.buffers()):
                self.loaded([tensor, tensor.grad])
        for optimizer in optimizers:
            self.loaded([trained_by(optimizer), [list(state.values()) for state in optimizer.state.values()]])
        recorder.sends = 0
        self.first, self.resident_bytes = len(recorder.entries), recorder.live_bytes
        recorder.paused = False

    def begin_update(self, optimizer, args, kwargs):
        return None

    def end_update(self, optimizer) -> None:
        pass

    def enter(self, label: str) -> None:
        pass

    def leave(self) -> None:
        pass

    def lasting(self) -> set[int]:
        return set()

    def loaded(self, batch) -> None:
        for whole in tree_leaves(batch):
            if isinstance(whole, torch.Tensor):
                for tensor in plain_tensors(whole):
                    if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta" and tensor.numel() > 1:
                        self._recorder.see(tensor)

    def stop(self) -> None:
        self._recorder.paused = True

    @contextmanager
    def paused(self):
        self._recorder.paused = True
        try:
            yield
        finally:
            self._recorder.paused = False


@contextmanager
def _ranks_that_answer(ranks: int):
    """While active, each rank has a GPU, and the objects of other ranks are those of this one."""

    def gather(objects, own, *_, **__):
        objects[:] = [own] * len(objects)

    def gather_to_one(own, objects=None, *_, **__):
        if objects is not None:
            gather(objects, own)

    def scatter(received, objects=None, *_, **__):
        if objects:
            received[0] = objects[min(dist.get_rank(), len(objects) - 1)]

    def nothing(*_, **__):
        return None

    answers: dict[str, Callable] = dict.fromkeys(("barrier", "monitored_barrier", "broadcast_object_list"), nothing)
    answers |= {"all_gather_object": gather, "gather_object": gather_to_one, "scatter_object_list": scatter}
    places = [(owner, name, value) for owner in (dist, dist.distributed_c10d) for name, value in answers.items()]
    places.append((torch.cuda, "device_count", lambda: ranks))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
