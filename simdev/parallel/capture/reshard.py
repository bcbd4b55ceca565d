"""Activations between pipeline stages with different meshes: each rank of the receiving stage takes its slice from the
ranks that hold it.

A slice is what a rank of a stage has of the activations of a microbatch. The ranks of a stage are taken to hold the
slices in the order of their numbers, neighbours the same one where fewer slices than ranks are there (tensor
parallelism without sequence parallelism). Where several ranks hold what a rank needs, the receivers take turns among
them. All pairs send at the same time; what one rank sends, and what one rank receives, passes its link piece by piece.
The redistribution begins when all ranks of the sending stage have come and ends for all at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from simdev.errors import InvalidInput
from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.parallel.capture import kept
from simdev.parallel.capture.stage import fake_process_group
from simdev.parallel.cluster import Cluster
from simdev.parallel.costs.collectives import route
from simdev.parallel.mesh import Mesh
from simdev.user_file import sentence


@dataclass(frozen=True)
class Slice:
    """What each of ``ranks`` ranks of a stage holds of the activations of a microbatch: one of ``slices`` slices of
    ``size`` bytes."""

    ranks: int
    slices: int
    size: int


def slice_of(model: ParallelModel, parameters: dict, mesh: Mesh) -> Slice:
    """What a rank of a stage on ``mesh`` receives from the stage before it. ``parameters["microbatch"]`` is its share
    of the sequences. Raises :class:`InvalidInput` for a model that cannot be built."""
    fixed = tuple(sorted((name, value) for name, value in parameters.items() if name != "layers"))
    one = _input_bytes(model, fixed, Mesh({}))
    here = _input_bytes(model, fixed, mesh)
    return Slice(mesh.stage_ranks, max(1, mesh.replicas * one // here), here)


def _input_bytes(model: ParallelModel, parameters: tuple, mesh: Mesh) -> int:
    """Bytes of the inputs of a middle stage that need a gradient; all numbers of replicas have the same."""
    return _bytes_on(model, parameters, Mesh({axis: 2 if axis.startswith("dp") else size for axis, size in mesh.inner}))


@lru_cache(maxsize=1024)
def _bytes_on(model: ParallelModel, parameters: tuple, small: Mesh) -> int:
    name = kept.fingerprint(model, {**dict(parameters), "inputs": True}, small, Part(1, False, False))
    return int(kept.remembered(name, lambda: {"bytes": _built_bytes(model, parameters, small)})["bytes"])


def _built_bytes(model: ParallelModel, parameters: tuple, small: Mesh) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    default = torch.get_default_dtype()
    try:
        with fake_process_group(small) as torch_mesh:
            stage = model.function(torch_mesh, Part(1, False, False), **{**dict(parameters), "layers": 1})
            with FakeTensorMode(allow_non_fake_inputs=True):
                inputs = [x for x in stage.inputs() if getattr(x, "requires_grad", False)]
    except Exception as error:  # of the model's own code, which may be the user's
        raise InvalidInput(f"cannot be built on {small}: {sentence(error)}", source=model.name) from error
    finally:
        torch.set_default_dtype(default)
    return sum(x.numel() * x.element_size() for x in inputs)


def reshard_ns(source: Slice, target: Slice, first_source: int, first_target: int, cluster: Cluster) -> int:
    """Whole ns until each rank of the target has its slice; ``first_source`` and ``first_target`` are the global
    numbers of the first ranks."""
    sent, received = np.zeros(source.ranks), np.zeros(target.ranks)
    latency, whole = 0.0, float(target.size * target.slices)
    holders = source.ranks // source.slices
    for rank in range(target.ranks):
        begin = rank * target.slices // target.ranks / target.slices
        end = begin + 1 / target.slices
        for number in range(int(begin * source.slices + 1e-9), int(np.ceil(end * source.slices - 1e-9))):
            share = min(end, (number + 1) / source.slices) - max(begin, number / source.slices)
            holder = number * holders + rank % holders
            rate, wait = route(first_source + holder, first_target + rank, cluster)
            ns = share * whole / rate * 1e9
            sent[holder] += ns
            received[rank] += ns
            latency = max(latency, wait)
    return max(1, round(latency + max(sent.max(), received.max())))
