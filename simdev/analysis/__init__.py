"""What can be said about a problem without a simulation: levels, critical paths, proven lower bounds, coarser graphs.

Placers read levels and coarse graphs; tables of results show the bounds. A bound holds for every feasible placement.
"""

from simdev.analysis.bounds import Bound, lower_bound, lower_bounds
from simdev.analysis.feasible import check_feasible
from simdev.analysis.levels import b_level, critical_path, t_level

__all__ = ["Bound", "b_level", "check_feasible", "critical_path", "lower_bound", "lower_bounds", "t_level"]
