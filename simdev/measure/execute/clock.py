"""Times the kernels of a rank program: real tensors, and PyTorch's fake process group in place of the other ranks.

The program is the one that :mod:`simdev.parallel.capture` records. It runs twice: with a clock in each kernel, and
without any, for the time between kernels (Python, autograd, dispatch).
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.parallel.capture import StageRun, fake_process_group
from simdev.parallel.mesh import Mesh
from simdev.parallel.record import Recorder


class _Clock(TorchDispatchMode):
    """Times every op that reaches it."""

    def __init__(self):
        super().__init__()
        self.ns = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begin = time.perf_counter_ns()
        result = func(*args, **(kwargs or {}))
        self.ns = time.perf_counter_ns() - begin
        return result


class _Stopwatch(Recorder):
    """A recorder that also keeps the time of each kernel."""

    def __init__(self, clock: _Clock):
        super().__init__()
        self.clock, self.kernels = clock, []

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

    def __init__(self, stage, recorder):
        super().__init__(stage, recorder, None, {})
        self.marks: list[tuple[str, int, int]] = []

    def _forward(self, part: Part, which: str = "") -> tuple:
        if not self.marks:
            self.begin = time.perf_counter_ns()
        return super()._forward(part, which)

    def _cut(self, name: str, base: int) -> None:
        self.marks.append((name, time.perf_counter_ns(), len(getattr(self.recorder, "kernels", ()))))


@dataclass
class Kernels:
    """``ns`` maps signatures to the median time of a kernel; ``gap_ns`` maps ``forward``, ``backward`` and ``finish``
    to the time between two calls of such a segment."""

    ns: dict[str, float] = field(default_factory=dict)
    gap_ns: dict[str, float] = field(default_factory=dict)


def time_kernels(
    model: ParallelModel, parameters: dict, mesh: Mesh, part: Part, split: bool, repeats: int = 5
) -> Kernels:
    """Run the stage ``part`` of ``model`` on one rank, in this process."""
    samples: dict[str, list[int]] = defaultdict(list)
    sums: dict[str, list[int]] = defaultdict(list)
    counts: dict[str, int] = {}
    walls: dict[str, list[int]] = defaultdict(list)
    with fake_process_group(mesh) as torch_mesh:
        for repeat in range(repeats + 1):
            clock = _Clock()
            watch = _Stopwatch(clock)
            timed = _Timed(_stage(model, parameters, torch_mesh, part), watch)
            with clock:
                _run(timed, part, split)
            first = 0
            for name, _, end in timed.marks:
                piece, first = watch.kernels[first:end], end
                if repeat:
                    sums[name].append(sum(ns for _, ns, _ in piece))
                    counts[name] = len(piece)
                    for signature, ns, is_collective in piece:
                        if not is_collective:
                            samples[signature].append(ns)
            timed = _Timed(_stage(model, parameters, torch_mesh, part), _Nothing())
            _run(timed, part, split)
            begin = timed.begin
            for name, end, _ in timed.marks:
                if repeat:
                    walls[name].append(end - begin)
                begin = end
    found = Kernels({signature: float(np.median(values)) for signature, values in samples.items()})
    for phase in ("forward", "backward", "finish"):
        names = [name for name in walls if name.startswith(phase)]
        left = sum(np.median(walls[name]) - np.median(sums[name]) for name in names)
        found.gap_ns[phase] = max(0.0, float(left)) / max(1, sum(counts[name] for name in names))
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
    timed.split_step(part) if split else timed.step(3, part)
