"""Workloads: one file a model family; see simdev.workload for how to add one."""
