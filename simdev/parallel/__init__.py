"""Parallel training programs: what each rank of a training job executes, and how long a step of the whole job takes.

A rank program is captured from PyTorch's own parallel libraries on a fake process group. Ranks, streams and collectives
become ops on devices, so that the engines of :mod:`simdev.sim` time them.
"""
