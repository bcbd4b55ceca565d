"""The least latency of one inference, each accelerator called once."""

from __future__ import annotations

import numpy as np

from simdev.errors import Unsupported
from simdev.exact.latency import best_latency
from simdev.exact.load import LoadProblem
from simdev.exact.training import alike_accelerators, load_of
from simdev.placement import Placement
from simdev.placer import placer

NODES = 400  # the model has a condition for each edge and accelerator


@placer(
    "ip-latency",
    version=1,
    family="exact",
    repeatable=False,
    defaults={"seconds": 20.0},
    source="Tarnawski et al., NeurIPS 2020, section 4.2, as a constraint program",
)
def ip_latency(problem, *, rng, budget, seconds):
    """One contiguous subgraph an accelerator, called once, its transfers before and after its work.

    An inference graph only: in a training step a forward op and its gradient would share a call. The simulator overlaps
    what the model takes in turn, so its step time is no more than the model's on free links. The solver stops by the
    clock: a row that did not reach its proof need not repeat.
    """
    if (problem.graph.op_phase > 0).any():
        raise Unsupported("ip-latency places inference graphs: a training step calls an accelerator twice")
    if problem.graph.n_units > NODES:
        raise Unsupported(f"{problem.graph.n_units} units are more than ip-latency takes ({NODES})")
    accelerators = alike_accelerators(problem)
    load = _with_host(problem, load_of(problem, accelerators))
    found = best_latency(load, seconds=min(seconds, 0.5 * budget.seconds), seed=int(rng.integers(1 << 30)))
    devices = np.array([*accelerators, problem.topology.host], np.int32)
    return Placement(devices[found.machine])


def _with_host(problem, load: LoadProblem) -> LoadProblem:
    """The host serves as the CPU, where there is one apart from the accelerators."""
    host = problem.topology.host
    if host < 0 or host in problem.topology.accelerators:
        return load
    from dataclasses import replace

    return replace(load, cpus=1)
