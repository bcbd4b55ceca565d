"""Everything on one device: the baselines to which every paper compares."""

from __future__ import annotations

import numpy as np

from simdev.baselines._units import copyable
from simdev.errors import Unsupported
from simdev.exact.training import alike_accelerators
from simdev.placers.placer import placer
from simdev.problem.placement import Placement


@placer("single-cpu", version=1, family="single", memory_aware=False)
def single_cpu(problem, *, rng, budget):
    """All ops on the first host."""
    if problem.topology.host < 0:
        raise Unsupported(f"{problem.topology.name} has no host device")
    return _all_on(problem, [problem.topology.host])


@placer("single-gpu", version=1, family="single", memory_aware=False, defaults={"replicas": False})
def single_gpu(problem, *, rng, budget, replicas):
    """All ops on the accelerator where their total time is least, whether they fit in memory or not.

    If ``replicas`` is true, all accelerators of the same kind are replicas of it: data parallelism. What the backward
    phase changes in place is on the first alone (R10). This needs the objective throughput or serve; for the time of
    one step, it raises :class:`Unsupported`.
    """
    alone = _all_on(problem, problem.topology.accelerators)
    if not replicas:
        return alone
    if not budget.microbatches:
        raise Unsupported("replicas need microbatches: use the objective throughput or serve")
    of, alike = np.arange(problem.topology.n_devices), alike_accelerators(problem)
    if alone.devices[0] in alike:
        of[alike] = alone.devices[0]
    return Placement(alone.devices, replica_of=of, replicated=copyable(problem))


def _all_on(problem, candidates):
    durations = problem.costs.device_op_ns[list(candidates)]
    total = np.where((durations < 0).any(axis=1), np.iinfo(np.int64).max, durations.sum(axis=1))
    if total.min() == np.iinfo(np.int64).max:
        raise Unsupported("no single device supports every op")
    device = list(candidates)[int(np.argmin(total))]
    return Placement(np.full(problem.graph.n_ops, device))
