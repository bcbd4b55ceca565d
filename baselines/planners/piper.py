"""Piper (Tarnawski, Narayanan, Phanishayee 2021): a dynamic program over contiguous layers gives each pipeline stage
its own data degree, tensor degree and recomputation, so that the slowest stage takes the least time per sample.

A stage takes the passes of its layers, the transfers over its borders, and its share of the exchange of gradients
(section 4, "time per sample"); its memory holds all microbatches in progress.

In the paper each layer is recomputed or not. Here a stage recomputes all of its layers or none, because that is what a
:class:`~simdev.planners.Choice` can say and what the captured models execute. A stage that lacks a little memory
recomputes more than in the paper. The published program, which chooses for each layer, is
:func:`simdev.exact.piper.piper`.
"""

from simdev.baselines.planners._stages import bottleneck_plan, first_that_fits, in_progress, pipelines, with_borders
from simdev.planners import planner


@planner(
    "piper",
    version=1,
    family="dynamic",
    source="Tarnawski et al., Piper: Multidimensional Planner for DNN Parallelization, NeurIPS 2021, section 4",
    departures=(
        "the state counts stages, not the sum of data degrees: replicas divide a microbatch, so a stage that is the "
        "last but s keeps s + 1 microbatches",
        "a stage recomputes all of its layers or none; the paper chooses for each layer, by a knapsack, so that a "
        "stage that lacks a little memory recomputes less",
        "layers form a chain; the exchange of gradients and the update are those of the captured program",
        "the sequences of a microbatch are enumerated; stages fit a node or fill nodes",
    ),
)
def piper(job, *, rng, budget):
    plan = bottleneck_plan(with_borders, in_progress)
    return first_that_fits("piper", job, budget, pipelines(job, budget), plan)
