"""What a planner is: a function from a training job to the plan that the job should run with.

The planners themselves stand in ``baselines/planners/``, one file each. :mod:`simdev.parallel` simulates what they
choose.
"""

from simdev.planners.budget import PlanBudget
from simdev.planners.evaluate import Evaluator
from simdev.planners.job import Choice, Job
from simdev.planners.outcome import Outcome, plot_meshes
from simdev.planners.planner import PlannerSpec, find_planner, planner, planners
from simdev.planners.proof import Proof, prove

__all__ = [
    "Choice",
    "Evaluator",
    "Job",
    "Outcome",
    "PlanBudget",
    "PlannerSpec",
    "Proof",
    "find_planner",
    "planner",
    "planners",
    "plot_meshes",
    "prove",
]
