"""Capture of a user's own parallel step: ``make_step(mesh)`` builds the model with the code that trains it, on a fake
process group of any size, and returns the step. No GPU and no other process is needed.

The step runs twice on fake tensors: the first run creates optimizer state, buckets and prefetch orders, the second one
is recorded. Each pipeline rank is captured on its own; inside a stage all ranks run the program of its first rank, and
:mod:`simdev.parallel.capture.matching` checks that the collectives of the last rank are the same.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from simdev.errors import InvalidInput, SimdevError, Unsupported
from simdev.graphs.workload import CustomStep, InferenceStep, TrainingStep
from simdev.parallel.capture.cut import cut
from simdev.parallel.capture.matching import check_matching
from simdev.parallel.capture.stage import forget_meshes, new_objects_only
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import Action
from simdev.parallel.program import Segment
from simdev.parallel.rank_program import Piece, RankProgram
from simdev.user_file import import_file, sentence


def capture_step_file(target: str, mesh: Mesh, *, name: str | None = None, batch: int = 0, length: int = 0):
    """Capture ``my_model.py:make_step`` on ``mesh`` as a :class:`RankProgram`. The file is executed.

    Raises :class:`InvalidInput` naming the file, and the line where building the model or running its step failed.
    """
    if importlib.util.find_spec("torch") is None:
        raise Unsupported("capturing a parallel step needs PyTorch: pip install 'simdev[capture]'")
    path, _, function = target.rpartition(":")
    if not path or not function.isidentifier():
        raise InvalidInput("expected FILE.py:FUNCTION", source=target)
    make = getattr(import_file(Path(path)), function, None)
    if not callable(make):
        raise InvalidInput("no such function", source=path, field=function)
    return capture_step(make, mesh, name or f"{Path(path).stem}-{function}", source=path, batch=batch, length=length)


def capture_package_step(target: str, mesh: Mesh, *, name: str | None = None, batch: int = 0, length: int = 0):
    """Capture a training step of ``transformers:LlamaForCausalLM`` on ``mesh`` (see
    :mod:`simdev.parallel.capture.packages`)."""
    from simdev.parallel.capture.packages import package_make_step

    make, own_name = package_make_step(target, batch or None, length or None)
    return capture_step(make, mesh, name or own_name, source=target, batch=batch, length=length)


def capture_step(
    make: Callable, mesh: Mesh, name: str, *, source: str | None = None, batch: int = 0, length: int = 0
) -> RankProgram:
    """Capture the step that ``make(mesh)`` returns: a function of no arguments, or a ``TrainingStep``,
    ``InferenceStep`` or ``CustomStep``. ``make`` gets PyTorch's device mesh, whose axes are those of ``mesh``."""
    from simdev.parallel.capture.libraries import Chunks

    source, chunks = source or name, Chunks()

    def run_of(rank: int, member: int) -> RankRun:
        return RankRun(make, mesh, rank, chunks, source, member)

    found = program_of(run_of, mesh, name, source, batch=batch, length=length)
    _check_stages(found.pieces, chunks.stages, source)
    return found


def program_of(
    run_of: Callable[[int, int], RankRun], mesh: Mesh, name: str, source: str, *, batch: int = 0, length: int = 0
) -> RankProgram:
    """The program of all ranks. ``run_of(pipeline rank, member)`` is what runs the step of one of them."""
    segments: list[Segment] = []
    numbers: dict[tuple, int] = {}  # a segment -> its place in the list
    pieces, resident = [], []
    for rank in range(mesh["pp"]):
        run = run_of(rank, 0)
        mine, found = [], run.pieces()
        if mesh.stage_ranks > 1:
            last = run_of(rank, mesh.stage_ranks - 1)
            ends = rank * mesh.stage_ranks, (rank + 1) * mesh.stage_ranks - 1
            check_matching([s for _, s, _ in found], [s for _, s, _ in last.pieces()], ends, source)
        for action, segment, sent in found:
            key = segment.calls, tuple(call.live_bytes for call in segment.calls), segment.live_bytes
            if key not in numbers:
                numbers[key] = len(segments)
                segments.append(segment)
            mine.append(Piece(action, numbers[key], sent))
        if not mine:
            raise InvalidInput("the step executes nothing on a device", source=source)
        pieces.append(tuple(mine))
        resident.append(run.resident_bytes)
    _check_spread(segments, pieces, mesh, source)
    return RankProgram(name, mesh, tuple(segments), tuple(pieces), tuple(resident), batch, length)


def _check_stages(pieces: Sequence[tuple[Piece, ...]], stages: int, source: str) -> None:
    """Raise :class:`InvalidInput` for a pipeline stage that no rank executes, or whose forward pass is empty."""
    there = {piece.action[1] for row in pieces for piece in row if piece.action[0] == "F"}
    missing = sorted(set(range(stages)) - there)
    if missing:
        message = f"of the {stages} pipeline stages, stage {missing[0]} has no work on any rank"
        raise InvalidInput(message, source=source)


def _check_spread(segments: list[Segment], pieces: list[tuple[Piece, ...]], mesh: Mesh, source: str) -> None:
    """Raise :class:`InvalidInput` for a step of several ranks that neither calls a collective of more than one number
    (a mean loss to print is one) nor sends anything: its ranks would train models of their own."""
    sent = any(piece.sent_bytes for row in pieces for piece in row)
    if mesh.ranks == 1 or sent or any(call.payload_bytes > 8 for segment in segments for call in segment.calls):
        return
    raise InvalidInput(
        f"no rank calls a collective of more than one number, so the {mesh.ranks} ranks of {mesh} would train without "
        "each other: the code does not use the mesh or the process group that it gets; wrap the model in it "
        "(fully_shard, DistributedDataParallel, parallelize_module)",
        source=source,
    )


class RankRun:
    """Builds and runs the step of one pipeline rank, as its ``member``-th rank sees it."""

    def __init__(self, make, mesh: Mesh, rank: int, chunks, source: str, member: int = 0):
        self.make, self.mesh, self.rank, self.chunks, self.source = make, mesh, rank, chunks, source
        self.member = member
        self.resident_bytes = 0
        self._marks: list[tuple[Action, int, int]] = []  # action, first entry, bytes in use

    def pieces(self) -> list[tuple[Action, Segment, int]]:
        """``(action, segment, bytes sent)`` of the rank, in order."""
        import torch

        default = torch.get_default_dtype()
        lowest = self.rank * self.mesh.stage_ranks
        with fake_process_group(self.mesh, lowest + self.member) as torch_mesh:
            try:
                recorder = self._record(torch_mesh)
            finally:
                torch.set_default_dtype(default)
            if not self._marks and recorder.sends:
                message = "it sends to other ranks outside of torch.distributed.pipelining, which is not simulated"
                raise InvalidInput(message, source=self.source)
            end = len(recorder.entries)
            marks = self._marks or [(("S", 0, 0), self._first, self.resident_bytes)]
            marks = [(marks[0][0], self._first, self.resident_bytes), *marks[1:]]
            found = []
            for (action, first, base), following in zip(marks, [*marks[1:], None], strict=True):
                last, live = (following[1], following[2]) if following else (end, recorder.live_bytes)
                if last > first:
                    segment = cut(_title(action), recorder.entries[:last], first, self.mesh, base, live, lowest)
                    found.append((action, segment, self.chunks.sent_bytes.get(action, 0)))
        return found

    def _record(self, torch_mesh):
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        from simdev.graphs.capture.rewrites import as_on_gpu, fake_construction
        from simdev.parallel.capture.libraries import recordable
        from simdev.parallel.capture.record import RankRecorder

        recorder = RankRecorder()
        with (
            warnings.catch_warnings(),
            FakeTensorMode(allow_non_fake_inputs=True),
            fake_construction(),
            as_on_gpu(ranks=True),
            recordable(self.chunks),
        ):
            warnings.simplefilter("ignore")
            with self._blamed("building the model failed"):
                run = _runnable(self.make(torch_mesh), self.source)
            with recorder, self._blamed("the model was built, but running its step failed"):
                run()
                gc.collect()
                for item in gc.get_objects():
                    if issubclass(type(item), FakeTensor) and item.fake_device.type != "meta":
                        recorder.see(item)
                recorder.sends = 0
                self._first, self.resident_bytes = len(recorder.entries), recorder.live_bytes
                self._watch(recorder)
                run()
        return recorder

    def _watch(self, recorder) -> None:
        """Note where the chunks of a pipeline schedule begin; what follows the last one ends the step."""

        def mark(action):
            if self._marks and self._marks[-1][0][0] == "U":
                self._marks.pop()
            self._marks.append((action, len(recorder.entries), recorder.live_bytes))

        self.chunks.begin = mark
        self.chunks.end = lambda action: self._marks.append(
            (("U", action[1], 0), len(recorder.entries), recorder.live_bytes)
        )

    @contextmanager
    def _blamed(self, what: str):
        """Any failure of the user's code as one sentence."""
        try:
            yield
        except SimdevError:
            raise
        except (Exception, SystemExit) as error:
            where = [
                f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == Path(self.source).resolve()
            ]
            field = f"line {where[-1].lineno}, in {where[-1].name}" if where else None
            message = f"{what} on {self.mesh}: {sentence(error)}{_remedy(error)}"
            raise InvalidInput(message, source=self.source, field=field) from error
        finally:
            self.chunks.begin = self.chunks.end = lambda action: None


def _remedy(error: BaseException) -> str:
    """What to pass where torchtitan and this release of PyTorch do not agree; empty for all other errors."""
    if "torchtitan" not in sys.modules or "dp_mesh_dims" not in str(error):
        return ""
    why = f"FSDP of PyTorch {version('torch')} does not take parameters of torchtitan's spmd_backend='spmd_types'"
    return f" {why}: pass spmd_backend='partial_dtensor' to ParallelDims, ParallelismConfig and set_spmd_backend"


def _runnable(step, source: str) -> Callable[[], object]:
    """What runs the step once."""
    if isinstance(step, CustomStep):
        return lambda: step.run(step.model, *step.inputs)
    if isinstance(step, InferenceStep):
        return lambda: _infer(step)
    if isinstance(step, TrainingStep):
        return lambda: _train(step)
    if not callable(step):
        wanted = "expected a function of no arguments, a TrainingStep, an InferenceStep or a CustomStep"
        raise InvalidInput(f"make_step returned {type(step).__name__}, {wanted}", source=source)
    return step


def _train(step: TrainingStep) -> None:
    given = step.optimizer
    optimizers = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    step.loss(step.model, *step.inputs).backward()
    for optimizer in optimizers:
        optimizer.step()
    step.model.zero_grad()


def _infer(step: InferenceStep) -> None:
    import torch

    with torch.no_grad():
        step.forward(step.model, *step.inputs) if step.forward else step.model(*step.inputs)


@contextmanager
def fake_process_group(mesh: Mesh, rank: int = 0):
    """PyTorch's device mesh over all ranks of ``mesh`` on a fake process group, seen by ``rank``."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from simdev.graphs.capture.rewrites import fused_norms

    if dist.is_initialized():
        raise Unsupported("a process group exists already; a rank program is captured in a process without one")
    forget_meshes()
    drawn = random.getstate()  # PyTorch draws a number for each collective on a fake group
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.ranks)
    end = dist.destroy_process_group
    try:
        with new_objects_only(), fused_norms(), _launched(mesh.ranks, rank):
            yield init_device_mesh("cpu", tuple(mesh.ordered.values()), mesh_dim_names=tuple(mesh.ordered))
    finally:
        end()
        random.setstate(drawn)
        sys.excepthook = hook  # which PyTorch replaced


@contextmanager
def _launched(ranks: int, rank: int):
    """What ``torchrun`` gives a script: its rank in the environment. A script that makes the process group itself gets
    the one that is there."""
    import torch
    import torch.distributed as dist

    given: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    given["GROUP_RANK"] = 0
    given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}  # which nothing connects to
    given |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": torch.get_num_threads()}  # as Accelerate asks for ranks
    before = {name: os.environ.get(name) for name in given}
    functions = {name: getattr(dist, name) for name in ("init_process_group", "destroy_process_group")}
    os.environ.update({name: str(value) for name, value in given.items()})
    try:
        for name in functions:
            setattr(dist, name, lambda *_, **__: None)
        yield
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _title(action: Action) -> str:
    names = {
        "S": "step",
        "F": "forward",
        "B": "backward",
        "I": "backward input",
        "W": "backward weights",
        "U": "finish",
    }
    return names[action[0]]
