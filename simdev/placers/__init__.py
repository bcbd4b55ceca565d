"""What a placer is: the protocol, its budget and score, the registry that finds placers, and the conformance check.

The placers themselves are in ``baselines/``, one file each. Trained policies are stored in a format of this room.
"""

from simdev.placers.budget import Budget
from simdev.placers.placer import PlacerFunction, PlacerSpec
from simdev.placers.registry import find_placer, find_workload, load_workload, placers, workloads
from simdev.placers.score import Score

__all__ = [
    "Budget",
    "PlacerFunction",
    "PlacerSpec",
    "Score",
    "find_placer",
    "find_workload",
    "load_workload",
    "placers",
    "workloads",
]
