"""The dynamic program of Alpa (Zheng et al. 2022, section 5.2), shared by ``alpa`` and planners that start from it."""

from __future__ import annotations

import numpy as np

from simdev.baselines.planners._stages import Pipeline, all_loads, in_progress, least_bottleneck, least_sum
from simdev.planners import Job

STEP = 1.01  # between two values of the largest stage that are tried


def submeshes(job: Job) -> set[int]:
    """Numbers of ranks of the submeshes: powers of two in a node, and whole nodes."""
    gpus = min(job.cluster.gpus, job.ranks)
    inside = {1 << power for power in range(gpus.bit_length()) if 1 << power <= gpus}
    return inside | {gpus * nodes for nodes in range(1, job.ranks // gpus + 1)}


def least_step(pipeline: Pipeline, limit: float, below: float = np.inf) -> tuple[float, list[tuple[int, int]]]:
    """``(ns of a microbatch, stages)`` of the least step time with at most ``limit`` bytes, if it is less than
    ``below`` ns; otherwise there are no stages."""
    job, count = pipeline.job, pipeline.microbatches
    tables = all_loads(pipeline, stage_ns, in_progress, limit)
    largest, _ = least_bottleneck(tables, job.layers, job.ranks)
    top = max((float(times[np.isfinite(times)].max(initial=0.0)) for times, _, _ in tables), default=0.0)
    best, chosen = below, []
    while largest < STEP * top and count * largest / STEP < best:
        total, stages = least_sum(tables, job.layers, job.ranks, largest)
        if stages:
            times = [tables[len(stages) - 1 - s][0] for s in range(len(stages))]
            rows = [tables[0][2].index(pipeline.options[option].ranks) for option, _ in stages]
            slowest = max(table[row, n] for table, row, (_, n) in zip(times, rows, stages, strict=True))
            if total + (count - 1) * slowest < best:
                best, chosen = total + (count - 1) * slowest, stages
        largest *= STEP
    return best / count, chosen


def stage_ns(pipeline: Pipeline, option: int, last: int) -> np.ndarray:
    """Passes, the transfer of activations and gradients to the next stage, and the share of what a step adds."""
    costs = pipeline.costs[option]
    border = 0.0 if last else 2 * pipeline.sent_ns[option]
    return costs.pass_ns[last] + border + costs.step_ns[last] / pipeline.microbatches
