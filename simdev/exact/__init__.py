"""Optimal placements of simpler models: the largest load of a pipeline, the latency of one sample, the makespan.

The dynamic program, integer programs and constraint programs are here, with the proofs of their bounds. README.md
compares their results with published ones.
"""
