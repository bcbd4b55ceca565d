"""Where graphs come from: training steps captured from PyTorch, files of other tools, and random generators.

A workload is a registered training step with its published figures. Capture and each importer end in a
:class:`~simdev.problem.graph.ComputationGraph`.
"""
