"""Placements and plans executed on real devices, and compared with their simulation.

``execute/`` runs a training step under a placement on the cores and GPUs of this computer; the files beside it profile
this computer, run one placement, or compare many placements with their simulation.
"""

from simdev.measure.compare import compare_placements
from simdev.measure.profiles import profile_machine
from simdev.measure.programs import load_program, measured_problem
from simdev.measure.report import report
from simdev.measure.run import execute_placement

__all__ = [
    "compare_placements",
    "execute_placement",
    "load_program",
    "measured_problem",
    "profile_machine",
    "report",
]
