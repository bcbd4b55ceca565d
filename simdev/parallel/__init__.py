"""Parallel training programs: what each rank of a training job executes, and how long a step of the whole job takes.

A rank program is captured from PyTorch's own parallel libraries on a fake process group, one pipeline stage at a time.
Streams, communicators and hosts become devices, kernels and collectives become ops, so that the engines of
:mod:`simdev.sim` time them.
"""

from simdev.parallel.cluster import Cluster, load_cluster
from simdev.parallel.costs.timing import Host, Prices
from simdev.parallel.mesh import Mesh, parse_mesh
from simdev.parallel.models import find_model, model_names, parallel_models
from simdev.parallel.plan import Plan, PlanReport, simulate_plan

__all__ = [
    "Cluster",
    "Host",
    "Mesh",
    "Plan",
    "PlanReport",
    "Prices",
    "find_model",
    "load_cluster",
    "model_names",
    "parallel_models",
    "parse_mesh",
    "simulate_plan",
]
