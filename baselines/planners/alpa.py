"""Alpa (Zheng et al. 2022): pipeline stages on submeshes of the cluster, chosen by a dynamic program over contiguous
layers; on each submesh, the best way to divide the layers' ops.

With ``B`` microbatches and stages that take ``t_1 ... t_S``, a step takes ``t_1 + ... + t_S + (B - 1) max t`` (equation
2). The program enumerates the largest ``t`` and minimises the sum under it (section 5.2). A submesh is a power of two
of accelerators in a node, or whole nodes (section 5.2); together they are the cluster. A stage's memory holds its
microbatches in progress.
"""

from simdev.baselines.planners._alpa import least_step, submeshes
from simdev.baselines.planners._stages import first_that_fits, pipelines
from simdev.planners import planner


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
    return first_that_fits("alpa", job, budget, pipelines(job, budget, sizes=submeshes(job)), least_step)
