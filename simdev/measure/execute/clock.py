"""Times the kernels of a rank program: real tensors, and PyTorch's fake process group in place of the other ranks.

The program is the one that :mod:`simdev.parallel.capture.stage` records. It runs twice: with a clock in each kernel,
and without any, for the time between kernels (Python, autograd, dispatch). All times are processor time of the thread,
which other processes do not lengthen by taking the core for a while.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.stats import trim_mean
from torch.utils._python_dispatch import TorchDispatchMode

from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.parallel.capture.record import RankRecorder
from simdev.parallel.capture.stage import StageRun, fake_process_group
from simdev.parallel.mesh import Mesh
from simdev.parallel.passes import STEP


class _Clock(TorchDispatchMode):
    """Times every op that reaches it."""

    def __init__(self):
        super().__init__()
        self.ns = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begin = time.thread_time_ns()
        result = func(*args, **(kwargs or {}))
        self.ns = time.thread_time_ns() - begin
        return result


class _Stopwatch(RankRecorder):
    """A recorder that also keeps the time of each kernel."""

    def __init__(self, clock: _Clock):
        super().__init__()
        self.clock = clock
        self.kernels: list[tuple[str, int, bool]] = []  # signature, ns, and whether it is a collective

    def _append(self, entry, stream) -> None:
        super()._append(entry, stream)
        self.kernels.append((entry.signature, 0 if entry.ranks else self.clock.ns, bool(entry.ranks)))


class _Nothing(nullcontext):
    """Stands where a recorder would, and records nothing."""

    def __init__(self):
        super().__init__()
        self.entries, self.live_bytes = [], 0

    def see(self, tensor) -> None:
        pass


class _Timed(StageRun):
    """A run that notes when each segment ends, and how many kernels were recorded by then."""

    def __init__(self, stage, recorder, mesh: Mesh):
        super().__init__(stage, recorder, mesh)
        self.marks: list[tuple[str, int, int]] = []

    def _forward(self, part: Part, kind: str, state: str) -> tuple:
        if not self.marks:
            self.begin = time.thread_time_ns()
        return super()._forward(part, kind, state)

    def _cut(self, kind: str, base: int, state: str = "") -> None:
        self.marks.append((kind, time.thread_time_ns(), len(getattr(self.recorder, "kernels", ()))))


PHASES = ("forward", "backward", "finish")


@dataclass
class Samples:
    """What runs of a rank's stages took: ``kernel_ns`` by signature; ``wall_ns`` by ``(stage, segment)``, without a
    clock in each kernel; ``calls`` by ``(stage, segment)``: how often each signature is in it, collectives as ``""``.
    """

    kernel_ns: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    wall_ns: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[tuple[int, str], Counter] = field(default_factory=dict)

    def add(self, other: Samples) -> None:
        """Take the samples of another rank of the same stages, or of another round, as well."""
        for signature, values in other.kernel_ns.items():
            self.kernel_ns.setdefault(signature, []).extend(values)
        for segment, values in other.wall_ns.items():
            self.wall_ns.setdefault(segment, []).extend(values)
        self.calls.update(other.calls)


@dataclass(frozen=True)
class Kernels:
    """``ns`` maps signatures to the time of a kernel. ``gap_ns`` maps ``forward``, ``backward`` and ``finish`` to the
    time between two calls of such a segment, and ``scale`` to the factor of its kernels: below 1 where they are slower
    with a clock in each of them than the segment is without. Kernels and gaps add up to the time of the segment."""

    ns: dict[str, float] = field(default_factory=dict)
    gap_ns: dict[str, float] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)


def kernels_of(samples: Samples) -> Kernels:
    """Kernels and gaps that add up to the segments as they ran without a clock."""
    found = Kernels({signature: float(np.median(values)) for signature, values in samples.kernel_ns.items()})
    for phase in PHASES:
        keys = [key for key in samples.wall_ns if key[1].startswith(phase)]
        wall = sum(_typical(samples.wall_ns[key]) for key in keys)
        counts = sum((samples.calls[key] for key in keys), Counter())
        kernels = sum(count * found.ns.get(signature, 0.0) for signature, count in counts.items())
        found.gap_ns[phase] = max(0.0, wall - kernels) / max(1, counts.total())
        found.scale[phase] = min(1.0, wall / kernels) if kernels else 1.0
    return found


def _typical(values: list[int]) -> float:
    """The mean of the middle four fifths: a step is a sum of segments, and means add up."""
    return float(trim_mean(values, 0.1))


def time_kernels(
    model: ParallelModel, parameters: dict, mesh: Mesh, part: Part, split: bool, stage: int = 0, warm_up: bool = True
) -> Samples:
    """Run the stage ``part`` of ``model``, which is number ``stage``, on one rank, in this process, with a clock and
    without; before that once more if it has to ``warm_up``."""
    found = Samples()
    with fake_process_group(mesh) as torch_mesh:
        for measured in (False, True) if warm_up else (True,):
            clock = _Clock()
            watch = _Stopwatch(clock)
            timed = _Timed(_stage(model, parameters, torch_mesh, part), watch, mesh)
            with clock:
                _run(timed, part, split)
            first = 0
            for name, _, end in timed.marks:
                piece, first = watch.kernels[first:end], end
                found.calls[stage, name] = Counter("" if is_collective else text for text, _, is_collective in piece)
                for text, ns, is_collective in piece:
                    if measured and not is_collective:
                        found.kernel_ns[text].append(ns)
            timed = _Timed(_stage(model, parameters, torch_mesh, part), _Nothing(), mesh)
            _run(timed, part, split)
            begin = timed.begin
            for name, end, _ in timed.marks:
                if measured:
                    found.wall_ns[stage, name].append(end - begin)
                begin = end
    found.kernel_ns, found.wall_ns = dict(found.kernel_ns), dict(found.wall_ns)
    return found


def _stage(model: ParallelModel, parameters: dict, torch_mesh, part: Part):
    stage = model.function(torch_mesh, part, **{**parameters, "layers": part.layers})
    fill(stage.module)
    return stage


def fill(module) -> None:
    """Give a module on ``meta`` its parameters: small numbers, the same on each rank."""
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        with torch.no_grad():
            local.normal_(0.0, 0.02) if local.is_floating_point() else local.zero_()


def _run(timed: _Timed, part: Part, split: bool) -> None:
    timed.split_step(part) if split else timed.step(STEP, part)
