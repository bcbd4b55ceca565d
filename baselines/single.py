"""Everything on one device: the baselines to which every paper compares."""

from __future__ import annotations

import numpy as np

from simdev.errors import Unsupported
from simdev.placers.placer import placer
from simdev.problem.placement import Placement


@placer("single-cpu", version=1, family="single", memory_aware=False)
def single_cpu(problem, *, rng, budget):
    """All ops on the first host."""
    if problem.topology.host < 0:
        raise Unsupported(f"{problem.topology.name} has no host device")
    return _all_on(problem, [problem.topology.host])


@placer("single-gpu", version=1, family="single", memory_aware=False)
def single_gpu(problem, *, rng, budget):
    """All ops on the accelerator where their total time is least, whether they fit in memory or not."""
    return _all_on(problem, problem.topology.accelerators)


def _all_on(problem, candidates):
    durations = problem.costs.device_op_ns[list(candidates)]
    total = np.where((durations < 0).any(axis=1), np.iinfo(np.int64).max, durations.sum(axis=1))
    if total.min() == np.iinfo(np.int64).max:
        raise Unsupported("no single device supports every op")
    device = list(candidates)[int(np.argmin(total))]
    return Placement(np.full(problem.graph.n_ops, device))
