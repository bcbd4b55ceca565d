"""Parallel models: one file a model, each with the parallelism that its users run; see simdev.graphs.parallel_model."""
