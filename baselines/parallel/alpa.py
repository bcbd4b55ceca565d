"""Alpa (Zheng et al. 2022): pipeline stages on submeshes of the cluster, chosen by a dynamic program over contiguous
layers; on each submesh, the best way to divide the layers' ops.

With ``B`` microbatches and stages that take ``t_1 ... t_S``, a step takes ``t_1 + ... + t_S + (B - 1) max t`` (equation
2). The program enumerates the largest ``t`` and minimises the sum under it (section 5.2). A submesh is a power of two
of accelerators in a node, or whole nodes (section 5.2); together they are the cluster. A stage's memory holds its
microbatches in progress.
"""

import numpy as np

from simdev.baselines.parallel._stages import (
    all_loads,
    first_that_fits,
    in_progress,
    least_bottleneck,
    least_sum,
    pipelines,
)
from simdev.planners import planner

STEP = 1.01  # between two values of the largest stage that are tried


@planner(
    "alpa",
    version=1,
    family="dynamic",
    source="Zheng et al., Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning, "
    "OSDI 2022, section 5",
    departures=(
        "the integer program for the ops of a stage is an enumeration of what captured models offer: data degree, "
        "tensor degree and recomputation, the same for all layers of the stage",
        "layers are the model's own; the paper clusters ops into layers",
        "the largest stage is enumerated in steps of 1 %, from the least that is possible",
        "the sequences of a microbatch are enumerated; recomputation is a choice (Alpa always recomputes)",
    ),
)
def alpa(job, *, rng, budget):
    return first_that_fits("alpa", job, budget, pipelines(job, budget, sizes=submeshes(job)), plan)


def submeshes(job):
    """Numbers of ranks of the submeshes: powers of two in a node, and whole nodes."""
    gpus = min(job.cluster.gpus, job.ranks)
    inside = {1 << power for power in range(gpus.bit_length()) if 1 << power <= gpus}
    return inside | {gpus * nodes for nodes in range(1, job.ranks // gpus + 1)}


def plan(pipeline, limit):
    """``(ns of a microbatch, stages)`` of the least step time."""
    job, count = pipeline.job, pipeline.microbatches
    tables = all_loads(pipeline, stage_ns, in_progress, limit)
    largest, _ = least_bottleneck(tables, job.layers, job.ranks)
    top = max((float(times[np.isfinite(times)].max(initial=0.0)) for times, _, _ in tables), default=0.0)
    best, chosen = np.inf, []
    while largest < STEP * top and (count - 1) * largest / STEP < best:
        total, stages = least_sum(tables, job.layers, job.ranks, largest)
        if stages:
            times = [tables[len(stages) - 1 - s][0] for s in range(len(stages))]
            rows = [tables[0][2].index(pipeline.options[option].ranks) for option, _ in stages]
            slowest = max(table[row, n] for table, row, (_, n) in zip(times, rows, stages, strict=True))
            if total + (count - 1) * slowest < best:
                best, chosen = total + (count - 1) * slowest, stages
        largest *= STEP
    return best / count, chosen


def stage_ns(pipeline, option, last):
    """Passes, the transfer of activations and gradients to the next stage, and the share of what a step adds."""
    costs = pipeline.costs[option]
    border = 0.0 if last else 2 * pipeline.sent_ns[option]
    return costs.pass_ns[last] + border + costs.step_ns[last] / pipeline.microbatches
