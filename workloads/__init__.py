"""Workloads: one file a model family; see simdev.graphs.workload for how to add one."""
