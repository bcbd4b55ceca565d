"""Minimises the latency of one step in which each accelerator is called once (training: forward once, backward
once)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simdev.baselines._load import place_by_load
from simdev.exact.contract import Classes, contract
from simdev.exact.dp import Split
from simdev.exact.latency import best_latency
from simdev.exact.load import LoadProblem
from simdev.exact.merge import merge_cheapest, merge_dominated
from simdev.placers.placer import placer


@placer(
    "ip-latency",
    version=2,
    family="exact",
    repeatable=False,
    searches=True,
    defaults={"effort": 3.0, "classes": 60},
    needs=("ortools",),
    source="Tarnawski et al., NeurIPS 2020, section 4.2, as a constraint program",
)
def ip_latency(problem, *, rng, budget, effort, classes):
    """Give each accelerator one contiguous subgraph, called once, with its transfers before and after its work.

    In a training step, a class holds a forward op with its backward and update ops, and its time is the time of all:
    the backward pass runs through the calls in reverse order and takes its part of each. Larger graphs are merged to
    ``classes`` classes: merges that lose nothing come first, then the cheapest neighbours, which may lose the optimum.
    The model runs in sequence what the simulator overlaps. ``effort`` is CP-SAT's deterministic time. A solve also ends
    after 20 s of wall-clock time; if that happens, on a busy host, the row need not repeat.
    """
    seed = int(rng.integers(1 << 30))

    def solve(load):
        whole = merge_dominated(contract(_with_host(problem, load)))
        few = merge_cheapest(whole, classes)
        coarse = _load_of_classes(load, few)
        coarse = _with_host(problem, coarse)
        found = best_latency(coarse, effort=effort, seconds=min(20.0, 0.2 * budget.seconds), seed=seed)
        merged = f"coarsened to {few.n_classes} classes, " if few.n_classes < whole.n_classes else ""
        proof = merged + ("optimal" if found.status == "optimal" else f"gap {found.gap:.1%}")
        return Split(found.processor[few.class_of], found.latency, 0, 0), proof

    return place_by_load(problem, budget, solve)


def _with_host(problem, load: LoadProblem) -> LoadProblem:
    """``load`` with the host as its CPU, if the topology has a host apart from the accelerators."""
    host = problem.topology.host
    if host < 0 or host in problem.topology.accelerators:
        return load
    return replace(load, cpus=1)


def _load_of_classes(load: LoadProblem, classes: Classes) -> LoadProblem:
    """The problem with classes as nodes.

    A border becomes a tensor from the first of its classes to the others; a precedence without a border becomes a
    tensor that costs nothing.
    """
    ptr = classes.member_ptr.tolist()
    tensors = [
        (members[0], members[1:], cost)
        for first, last, cost in zip(ptr, ptr[1:], classes.border_cost.tolist(), strict=False)
        for members in [sorted(classes.members[first:last].tolist())]
    ]
    tensors += [(p, [c], 0.0) for c, before in enumerate(classes.predecessors) for p in sorted(before)]
    return LoadProblem(
        name=load.name,
        accelerators=load.accelerators,
        cpus=load.cpus,
        memory=load.memory,
        accelerator_time=classes.accelerator_time,
        cpu_time=classes.cpu_time,
        size=classes.size,
        backward=np.zeros(classes.n_classes, bool),
        group=np.arange(classes.n_classes),
        tensor_producer=np.array([producer for producer, _, _ in tensors], np.int64),
        tensor_cost=np.array([cost for _, _, cost in tensors], float),
        consumer_ptr=np.cumsum([0, *(len(readers) for _, readers, _ in tensors)]).astype(np.int64),
        consumers=np.array([reader for _, readers, _ in tensors for reader in readers], np.int64),
    )
