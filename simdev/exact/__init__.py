"""Optimal placements of simpler models: the largest load of a pipeline, the latency of one sample, the makespan.

The dynamic program, integer programs and constraint programs are here, with the proofs of their bounds. README.md
compares their results with published ones.
"""

from simdev.exact.dp import best_contiguous, best_linear
from simdev.exact.latency import best_latency, split_latency
from simdev.exact.load import LoadProblem, processor_loads, read_load_problem
from simdev.exact.makespan import solve_makespan
from simdev.exact.throughput import best_split

__all__ = [
    "LoadProblem",
    "best_contiguous",
    "best_latency",
    "best_linear",
    "best_split",
    "processor_loads",
    "read_load_problem",
    "solve_makespan",
    "split_latency",
]
