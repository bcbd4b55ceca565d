"""Capture of a stage: its forward and backward segments and the end of the step, from PyTorch on a fake process group.

Meshes, sharding and FSDP wrapping happen outside of the fake mode with parameters on ``meta``; then the parameters
become fake tensors and the stage runs microbatches as a pipeline schedule would: forward and backward, gradients
accumulated, reduced with the last one. Passes of a stage that FSDP divides depend on the passes before them: in a
pipeline, such a stage is captured in an order with all passes of its schedule (:mod:`simdev.parallel.passes`). The
stage is captured with three and with four layers; further layers repeat the additional one
(:func:`simdev.parallel.program.stretch`), in each of several lists of layers.

A planner that compares many sizes of the data-parallel axes calls
:func:`simdev.parallel.capture.resize.capture_resized` instead: two captured sizes serve all others.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from inspect import signature
from math import gcd, prod
from typing import Any, NamedTuple

from simdev.errors import InvalidInput, SimdevError, Unsupported
from simdev.graphs.parallel_model import ParallelModel, Part, Stage
from simdev.parallel.capture import kept
from simdev.parallel.capture.cut import cut
from simdev.parallel.capture.fakes import to_fakes
from simdev.parallel.capture.matching import check_matching
from simdev.parallel.capture.split import SplitBackward, idle_parts, keep_gathered, reduce_gradients
from simdev.parallel.mesh import Mesh
from simdev.parallel.passes import STEP, pass_names
from simdev.parallel.program import NotRepeating, Segment, once_for_each, stretch
from simdev.user_file import sentence

PLANNING_MIB = 950  # of address space: PyTorch, and the compiled engine with LLVM and SciPy
FEW = 3  # layers in the shorter capture: a first one, a last one, and one in between (FSDP prefetches across layers)
LISTS = 6  # that the part of PyTorch's Adam which makes its state takes; other releases may take others
KINDS = ("backward first", "backward further", "backward last", "backward only")
FIRST_FORWARD = "forward after start"
TIMES = ("first", "second", "further")
SPLIT = tuple(f"backward {half} {time}" for half in ("input", "weights") for time in TIMES)

SHIPPED = (
    "simdev.workloads.",
    "simdev.parallel.",
)  # modules whose models are known to run the same program on all ranks of a stage


class Options(NamedTuple):
    """How a stage is captured: see :func:`capture_stage`."""

    order: str
    split: bool = False
    each: bool = False
    gathered: bool = False


@dataclass(frozen=True)
class StageProgram:
    """The segments of one stage: ``forward``; ``backward`` of the first microbatch, of a further one and of the last
    one (of the only one, where there is one); ``finish``, after the last backward pass. ``resident_bytes`` are
    parameters, optimizer state and inputs; ``output_bytes`` is what the stage sends to the next one for each
    microbatch. ``shard_unit`` is the greatest number of ranks among which FSDP divides each parameter without padding
    (0 without FSDP). ``split`` are the halves of a backward pass (:mod:`simdev.parallel.capture.split`), if they were
    asked for: gradients of the input in the first microbatch, the second and a further one; gradients of the weights in
    these three. No backward pass of such a program reduces gradients: ``finish`` does. ``others`` are the passes that
    execute other calls than those above because of what ran before them, by their names; if parameters stay gathered
    until the end of the step, the forward pass of the first microbatch is one. ``forgets``: see
    :func:`simdev.parallel.passes.pass_names`."""

    forward: Segment
    backward: tuple[Segment, Segment, Segment, Segment]
    finish: Segment
    resident_bytes: int
    output_bytes: int
    parameters: int
    shard_unit: int = 0
    split: tuple[Segment, ...] = ()
    others: tuple[tuple[str, Segment], ...] = ()
    forgets: bool = False

    FIRST, FURTHER, LAST, ONLY = range(4)

    @property
    def first_forward(self) -> Segment | None:
        """The first forward pass of a step, if it executes other calls than further ones."""
        return dict(self.others).get(FIRST_FORWARD)

    @cached_property
    def passes(self) -> dict[str, Segment]:
        """All forward and whole backward passes by name; ``forward`` and the kinds of backward pass are those that have
        no segment of their own."""
        return {"forward": self.forward, **dict(zip(KINDS, self.backward, strict=True)), **dict(self.others)}

    def named(self, order: str) -> list[str]:
        """The name in :attr:`passes` of each pass of an order."""
        own = dict(self.others)
        names = ((kind, f"{kind} {state}") for kind, state in pass_names(order, self.forgets))
        return [name if name in own else kind for kind, name in names]


def capture_stage(
    model: ParallelModel,
    parameters: dict,
    mesh: Mesh,
    part: Part,
    order: str = STEP,
    split: bool = False,
    each: bool = False,
    gathered: bool = False,
) -> StageProgram:
    """The program of one rank of the stage ``part``. ``order`` is that of its passes (:mod:`simdev.parallel.passes`):
    ``FB`` for a step of one microbatch, :data:`STEP <simdev.parallel.passes.STEP>` for several without a pipeline.
    ``split`` if its schedule splits backward passes; ``each`` if gradients are reduced after each microbatch;
    ``gathered`` if FSDP gathers parameters once and keeps them until the last backward pass. Raises
    :class:`Unsupported` without PyTorch, :class:`InvalidInput` for a model that cannot be built on ``mesh``."""
    return stage_of_few(captured, model, parameters, mesh, part, Options(order, split, each, gathered))


def stage_of_few(
    capture: Callable[..., StageProgram],
    model: ParallelModel,
    parameters: dict,
    mesh: Mesh,
    part: Part,
    options: Options,
) -> StageProgram:
    """:func:`capture_stage` with ``capture`` in place of :func:`captured`, for stages of a few layers."""
    if not isinstance(model.function, kept.Packed):
        kept.need_to_capture(PLANNING_MIB)
    key = tuple(sorted((name, value) for name, value in parameters.items() if name != "layers"))

    def of(one: Part) -> StageProgram:
        if len(_fewer(one)) == 1:
            return capture(model, key, mesh, one, *options)
        return stage_of_few(capture, model, parameters, mesh, one, options)

    few, more = few_parts(part)
    if not more:
        return capture(model, key, mesh, part, *options)
    short, long = map(of, few)
    join = once_for_each(partial(stretch, more=more))
    try:
        first, further, last, only = map(join, short.backward, long.backward)
        return StageProgram(
            join(short.forward, long.forward),
            (first, further, last, only),
            join(short.finish, long.finish),
            short.resident_bytes + (long.resident_bytes - short.resident_bytes) * more,
            short.output_bytes,
            short.parameters + (long.parameters - short.parameters) * more,
            shard_unit=short.shard_unit,
            split=tuple(map(join, short.split, long.split)),
            others=alike_others(short, long, join),
            forgets=short.forgets,
        )
    except NotRepeating:
        return capture(model, key, mesh, part, *options)


def alike_others(
    one: StageProgram, two: StageProgram, join: Callable[[Segment, Segment], Segment]
) -> tuple[tuple[str, Segment], ...]:
    """The other passes of two captures, joined by name. Raises :class:`NotRepeating` if they have other names."""
    a, b = dict(one.others), dict(two.others)
    if a.keys() != b.keys():
        raise NotRepeating(f"passes that differ in one capture and not in the other: {', '.join(a.keys() ^ b.keys())}")
    return tuple((name, join(a[name], b[name])) for name in a)


@lru_cache(maxsize=64)
def accumulates(model: ParallelModel, parameters: tuple) -> bool:
    """Whether the model's ranks keep whole gradients until the last microbatch, unless they are asked to reduce each
    (:attr:`Plan.reduce_each <simdev.parallel.plan.Plan>`); ``parameters`` as for :func:`captured`."""
    if isinstance(model.function, kept.Packed):
        return model.function.accumulates
    mesh, part = Mesh({"dp_shard": 1}), Part(1)
    name = kept.fingerprint(model, {**dict(parameters), "accumulates": True}, mesh, part)
    found = kept.remembered(name, lambda: {"accumulates": _builds_sync(model, parameters, mesh, part)})
    return bool(found["accumulates"])


def _builds_sync(model: ParallelModel, parameters: tuple, mesh: Mesh, part: Part) -> bool:
    """Whether a stage of the model, which is built for this, can leave gradients unreduced."""
    kept.need_to_capture(PLANNING_MIB)
    import torch

    default = torch.get_default_dtype()
    try:
        with fake_process_group(mesh) as torch_mesh:
            stage = model.function(torch_mesh, part, **{**dict(parameters), "layers": part.layers})
    except Exception as error:  # of the model's own code, which may be the user's
        raise InvalidInput(f"cannot be built: {sentence(error)}", source=model.name) from error
    finally:
        torch.set_default_dtype(default)
    return getattr(stage, "sync", None) is not None


@lru_cache(maxsize=4096)
def few_parts(part: Part) -> tuple[tuple[Part, ...], int]:
    """The parts with which ``part`` is captured, and how often the second one's further layers are repeated: a few
    layers, and as many with one more *period* of layers. ``((part,), 0)`` where a part is captured with all its layers.

    A period is one layer where all are alike. Layers of several kinds may repeat after some layers (five of local
    attention and one of global attention), with other layers before and after (a first layer without experts).
    """
    kinds, n = part.kinds or (0,) * part.layers, part.layers
    best: tuple[int, int, int, int, int] = (2 * n, 0, 0, 0, 0)
    for period in range(1, n // 2 + 1):
        same = [a == b for a, b in zip(kinds, kinds[period:], strict=False)]
        begin = 0
        while begin < len(same):
            end = begin
            while end < len(same) and same[end]:
                end += 1
            keep = -(-FEW // period)
            more = (end - begin + period) // period - keep
            best = min(best, (2 * (n - more * period) + period, period, begin, keep, more)) if more > 1 else best
            begin = end + 1
    _, period, begin, keep, more = best
    if not more:
        return (part,), 0

    def shortened(periods: int) -> Part:
        left = kinds[:begin] + kinds[begin : begin + period] * periods
        left += kinds[begin + (keep + more) * period :]
        return replace(part, layers=len(left), kinds=left if part.kinds else ())

    return (shortened(keep), shortened(keep + 1)), more


@lru_cache(maxsize=4096)
def few_captures(part: Part) -> tuple[Part, ...]:
    """All parts that are captured for ``part``. Each of :func:`few_parts` may repeat other layers (in a model with two
    lists of blocks): it is then made from captures of even fewer layers, if these are fewer in all."""
    few, more = few_parts(part)
    return tuple(fewer for one in few for fewer in _fewer(one)) if more else (part,)


def _fewer(part: Part) -> tuple[Part, ...]:
    fewer = few_captures(part)
    return fewer if sum(one.layers for one in fewer) < part.layers else (part,)


@lru_cache(maxsize=256)
def captured(model: ParallelModel, parameters: tuple, mesh: Mesh, part: Part, *given: Any) -> StageProgram:
    """The program of a stage with all its layers, kept from an earlier capture or captured; ``parameters`` are pairs
    in order of their names, ``given`` are the fields of :class:`Options`."""
    options = Options(*given)
    found = kept.find(model, known_by(parameters, options), mesh, part)
    if found is not None:
        forward, *backward, finish = found.pop("segments")
        halves = tuple(backward[len(KINDS) : len(KINDS) + len(SPLIT)]) if options.split else ()
        others = tuple(zip(found.pop("others", ()), backward[len(KINDS) + len(halves) :], strict=True))
        return StageProgram(forward, tuple(backward[: len(KINDS)]), finish, split=halves, others=others, **found)
    try:
        how = model, {**dict(parameters), "layers": part.layers}, mesh, part, options
        program = _capture(*how)
        last = mesh.stage_ranks - 1
        if last and not alike_on_all_ranks(model):
            check_matching(segments_of(program), segments_of(_capture(*how, rank=last)), (0, last), model.name)
        keep(_name_of(model, parameters, mesh, part, options), program)
        return program
    except SimdevError:
        raise
    except (Exception, SystemExit) as error:  # of the model's own code, which may be the user's
        raise InvalidInput(f"cannot be built on {mesh}: {sentence(error)}", source=model.name) from error


def alike_on_all_ranks(model: ParallelModel) -> bool:
    """Whether the model is known to run the same program on all ranks of a stage."""
    return model.function.__module__.startswith(SHIPPED)


def known_by(parameters: tuple, options: tuple) -> dict[str, object]:
    """The parameters and options that the names of kept and packed programs state."""
    order, split, each, gathered = options
    several = {STEP[:2]: False, STEP: True}.get(order, order)
    return {**dict(parameters), "several": several, "split": split, "each": each, "gathered": gathered}


def _name_of(model: ParallelModel, parameters: tuple, mesh: Mesh, part: Part, options: Options) -> str:
    """The name under which the program of :func:`captured` is kept."""
    return kept.fingerprint(model, known_by(parameters, options), mesh, part)


def is_kept(model: ParallelModel, parameters: tuple, mesh: Mesh, part: Part, *given: Any) -> bool:
    """Whether :func:`captured` has the program of a stage on disk, or packed."""
    options = Options(*given)
    if isinstance(model.function, kept.Packed):
        return model.function.has(kept.place(known_by(parameters, options), mesh, part))
    return kept.has(_name_of(model, parameters, mesh, part, options))


def keep(name: str, program: StageProgram) -> None:
    """Keep a program on disk."""
    kept.save(name, list(segments_of(program)), figures_of(program))


def keep_recorded(
    model: ParallelModel, parameters: dict, mesh: Mesh, part: Part, options: Options, program: StageProgram
) -> None:
    """Keep the program of a stage whose allocations were recorded, so that it need not be captured; not that of a
    user's model, which is captured on two ranks."""
    if alike_on_all_ranks(model):
        key = tuple(sorted((name, value) for name, value in parameters.items() if name != "layers"))
        keep(_name_of(model, key, mesh, part, options), program)


def _capture(
    model: ParallelModel,
    parameters: dict,
    mesh: Mesh,
    part: Part,
    options: Options,
    rank: int = 0,
) -> StageProgram:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.parallel.capture.record import RankRecorder
    from simdev.parallel.capture.ring import ring_attention

    order, split, each, gathered = options
    default = torch.get_default_dtype()
    with fake_process_group(mesh, rank) as torch_mesh:
        try:
            stage = model.function(torch_mesh, part, **parameters)
            if not isinstance(stage, Stage):
                message = f"the function returned {type(stage).__name__}, not a Stage"
                raise InvalidInput(message, source=model.name)
            stage = replace(stage, sync=None) if each else stage
            order = STEP[:4] if order == STEP and stage.sync is None and not gathered else order
            with FakeTensorMode(allow_non_fake_inputs=True), ring_attention():
                to_fakes(stage.module)
                run = StageRun(stage, RankRecorder(stage.rows), mesh, gathered)
                figures = run.split_step(part) if split else run.step(order, part)
        finally:
            torch.set_default_dtype(default)
    return program_of(stage, mesh, run, figures)


def program_of(stage: Stage, mesh: Mesh, run: StageRun, figures: tuple[int, int, int]) -> StageProgram:
    """The program of a stage that ran, and the figures that the run returned."""
    segments = run.segments
    only = segments.get("backward only") or segments["backward first"]
    last = segments.get("backward last", only)
    backward = segments.get("backward first", only), segments.get("backward further", last), last, only
    unit = _shard_unit(stage.module, mesh)
    halves = tuple(segments[name] for name in SPLIT if name in segments)
    forward, finish, others = segments["forward"], segments["finish"], tuple(run.others.items())
    forgets = stage.sync is None
    return StageProgram(forward, backward, finish, *figures, unit, halves, others, forgets)


def figures_of(program: StageProgram) -> dict[str, object]:
    """What is kept of a stage beside its segments."""
    names = "resident_bytes", "output_bytes", "parameters", "shard_unit"
    others = {"others": [name for name, _ in program.others], "forgets": program.forgets} if program.others else {}
    return {**{name: getattr(program, name) for name in names}, **others}


def segments_of(program: StageProgram) -> tuple[Segment, ...]:
    """All segments of a stage."""
    others = (segment for _, segment in program.others)
    return (program.forward, *program.backward, *program.split, *others, program.finish)


@contextlib.contextmanager
def fake_process_group(mesh: Mesh, rank: int = 0):
    """The PyTorch mesh of one stage on a fake process group, seen by ``rank``."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from simdev.graphs.capture.rewrites import fused_norms

    if dist.is_initialized():
        raise Unsupported("a process group exists already; a rank program is captured in a process without one")
    forget_meshes()
    drawn = random.getstate()  # PyTorch draws a number for each collective on a fake group
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.stage_ranks)
    try:
        names, shape = zip(*(mesh.inner or (("dp_shard", 1),)), strict=True)
        with new_objects_only(), fused_norms(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's libraries: nothing is trained here
            yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        random.setstate(drawn)
        sys.excepthook = hook  # which PyTorch replaced


@contextlib.contextmanager
def new_objects_only():
    """Inside the block, the garbage collector sees only objects that are made there, not all that was imported."""
    own = not gc.get_freeze_count()
    if own:
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()


def forget_meshes() -> None:
    """Clear what DTensor remembers of earlier meshes: a mesh of the same shape is taken for them, and their process
    groups are gone."""
    import torch
    from torch.distributed.tensor import DTensor, _redistribute

    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
        # as torch.distributed.tensor.debug does, whose import takes seconds
        torch._C._clear_DTensor_sharding_propagator_cache()
    else:  # PyTorch 2.9
        _redistribute._gen_transform_infos.cache_clear()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


class StageRun:
    """Runs the microbatches of a stage and cuts what is recorded into segments. ``gathered``: FSDP keeps parameters
    gathered from the first forward pass until the last backward pass."""

    def __init__(self, stage, recorder, mesh: Mesh, gathered: bool = False):
        self.stage, self.recorder, self.mesh = stage, recorder, mesh
        self.gathered = gathered
        self._begin = 0
        self._cuts: list[tuple[str, str, Segment]] = []  # kind, name, segment

    @property
    def segments(self) -> dict[str, Segment]:
        """A segment of each kind: the first backward passes, the last one of everything else."""
        found = {kind: segment for kind, _, segment in self._cuts}
        return found | {kind: segment for kind, _, segment in reversed(self._cuts) if kind in KINDS}

    @property
    def others(self) -> dict[str, Segment]:
        """The passes that execute other calls than the segment of their kind, by name."""
        usual = {kind: _executed(segment) for kind, segment in self.segments.items()}
        return {name: found for kind, name, found in self._cuts if name != kind and _executed(found) != usual[kind]}

    def step(self, order: str, part: Part) -> tuple[int, int, int]:
        """Run a step whose backward passes are whole, in this order of forward (F) and backward passes (B)."""
        optimizer, recorder = self._begin_step(order.count("F")), self.recorder
        if self.gathered:
            keep_gathered(self.stage.module)
        running: list[tuple] = []
        with self.stage.context(), recorder:
            for kind, state in pass_names(order, self.stage.sync is None):
                if kind == "forward":
                    running.append(self._forward(part, kind, state))
                    continue
                last = kind in ("backward last", "backward only")
                if self.gathered and last:
                    keep_gathered(self.stage.module, after_backward=False)
                output, inputs = running.pop(0)
                gradient = self._gradient(part, output)
                base = recorder.live_bytes
                if self.stage.sync is not None:
                    self._need_all_parts(last)
                    self.stage.sync(self.stage.module, last)
                output.backward(gradient)
                del output, gradient, inputs
                self._cut(kind, base, state)
            self._finish(optimizer)
        return self._figures(optimizer)

    def split_step(self, part: Part) -> tuple[int, int, int]:
        """Run whole and split backward passes, each as the first one of a step and as a further one."""
        optimizer, recorder, stage = self._begin_step(5), self.recorder, self.stage
        keep_gathered(stage.module)
        with stage.context(), recorder:
            for name in ("whole first", "whole further", "finish", *TIMES, "finish"):
                if name == "finish":
                    self._finish(optimizer, reduce=True)
                    continue
                output, inputs = self._forward(part, "forward", "after start" if name.endswith("first") else "")
                gradient = self._gradient(part, output)
                base = recorder.live_bytes
                if stage.sync is not None:
                    stage.sync(stage.module, False)
                halves = SplitBackward(stage.module, output, gradient, inputs)
                if name.startswith("whole"):
                    output.backward(gradient)
                    del halves, output, gradient, inputs
                    self._cut(f"backward {name.removeprefix('whole ')}", base)
                    continue
                del output, gradient, inputs
                halves.of_input()
                self._cut(f"backward input {name}", base)
                base = recorder.live_bytes
                halves.of_weights()
                self._cut(f"backward weights {name}", base)
        return self._figures(optimizer)

    def _begin_step(self, microbatches: int):
        """Build inputs and the optimizer with its state, before anything is recorded; returns the optimizer."""
        module, recorder = self.stage.module, self.recorder
        for tensor in (*module.parameters(), *module.buffers()):
            recorder.see(local_of(tensor))
        optimizer = self.stage.optimizer(module)
        self._count = sum(local_of(p).numel() for p in module.parameters())
        self._warm(optimizer, module)
        self._batches = [self.stage.inputs() for _ in range(microbatches)]
        return optimizer

    def _need_all_parts(self, last: bool) -> None:
        """Raise :class:`InvalidInput` if a backward pass that is not the last one would fail in PyTorch."""
        idle = [] if last else idle_parts(self.stage.module)
        if idle:
            message = (
                f"{idle[0]} does not run with the inputs that were made up, and FSDP cannot accumulate gradients "
                "beside it: plan the model without it, or a step of your own that passes its inputs (FILE.py:make_step)"
            )
            raise InvalidInput(message, source=type(self.stage.module).__name__.removeprefix("FSDP"))

    def _forward(self, part: Part, kind: str, state: str) -> tuple:
        """Run a forward pass: ``(output, inputs)``."""
        inputs = self._batches.pop()
        base, self._begin = self.recorder.live_bytes, len(self.recorder.entries)
        output = self.stage.module(*inputs)
        self._cut(kind, base, state)
        self._output_bytes = local_of(output).numel() * local_of(output).element_size()
        return output, inputs

    def _gradient(self, part: Part, output):
        """The gradient of the output that the next stage sends; None on the last stage."""
        import torch

        return None if part.last else torch.empty_like(output, requires_grad=False)

    def _finish(self, optimizer, reduce: bool = False) -> None:
        stage, base = self.stage, self.recorder.live_bytes
        if reduce:
            if stage.sync is not None:
                stage.sync(stage.module, True)
            reduce_gradients(stage.module)
        if stage.finish is not None:
            stage.finish(stage.module)
        optimizer.step()
        optimizer.zero_grad()
        self._cut("finish", base)

    def _figures(self, optimizer) -> tuple[int, int, int]:
        import torch

        state = sum(
            local_of(t).numel() * local_of(t).element_size()
            for s in optimizer.state.values()
            for t in s.values()
            if isinstance(t, torch.Tensor)
        )
        weights = sum(local_of(p).numel() * local_of(p).element_size() for p in self.stage.module.parameters())
        return weights + state, self._output_bytes, self._count

    def _warm(self, optimizer, module) -> None:
        """A step before the recorded one, so that the optimizer has its state; of PyTorch's Adam only the part that
        makes the state."""
        import torch

        from simdev.parallel.capture.record import HostAnswers

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        with HostAnswers(), torch.no_grad():
            adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            if adam and len(signature(optimizer._init_group).parameters) == 1 + LISTS:
                for group in optimizer.param_groups:
                    optimizer._init_group(group, *([] for _ in range(LISTS)))
            else:
                optimizer.step()
        optimizer.zero_grad()

    def _cut(self, kind: str, base: int, state: str = "") -> None:
        entries = self.recorder.entries
        first, self._begin = self._begin, len(entries)
        found = cut(kind, entries, first, self.mesh, base, self.recorder.live_bytes)
        self._cuts.append((kind, f"{kind} {state}".rstrip(), found))


def _executed(segment: Segment) -> list[tuple]:
    """What a segment executes, without what its calls wait for."""
    return [(call.kind, call.signature, call.stream, call.axes) for call in segment.calls]


def _shard_unit(module, mesh: Mesh) -> int:
    """The greatest common divisor of what FSDP divides of each parameter."""
    unit = 0
    for parameter in module.parameters():
        names = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ()
        dims = [getattr(placement, "dim", None) for placement in getattr(parameter, "placements", ())]
        for name, dim in zip(names, dims, strict=True):
            # of all kinds of shards, strided ones too; transformers calls the axis fsdp
            if ("dp_shard" in name or name in ("fsdp", "efsdp")) and dim is not None:
                sizes = parameter.device_mesh.shape
                shards = prod(size for size, other in zip(sizes, dims, strict=True) if other == dim)
                whole, rest = divmod(parameter.shape[dim] * mesh["dp_shard"], shards)
                unit = gcd(unit, 1 if rest else whole)
    return unit


def local_of(tensor):
    """The part of a tensor that this rank holds."""
    return getattr(tensor, "_local_tensor", tensor)  # to_local() makes a view, for autograd
