"""simdev: a discrete-event simulator and benchmark suite for device placement and parallel training.

The names of ``__all__`` are the front door. Each is loaded from its room when it is first used, so that importing
simdev is fast. ARCHITECTURE.md describes the rooms.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import TYPE_CHECKING

from simdev import _cache

if TYPE_CHECKING:  # what type checkers and editors see; _HOME says the same to the interpreter
    from simdev.analysis.bounds import lower_bound as lower_bound
    from simdev.errors import InvalidInput as InvalidInput
    from simdev.errors import SimdevError as SimdevError
    from simdev.errors import Unsupported as Unsupported
    from simdev.graphs.importers import import_graph as import_graph
    from simdev.graphs.importers.networkx_graph import from_networkx as from_networkx
    from simdev.graphs.importers.networkx_graph import to_networkx as to_networkx
    from simdev.graphs.workload import CustomStep as CustomStep
    from simdev.graphs.workload import InferenceStep as InferenceStep
    from simdev.graphs.workload import TrainingStep as TrainingStep
    from simdev.graphs.workload import workload as workload
    from simdev.integrations.apply import apply as apply
    from simdev.parallel.mesh import Mesh as Mesh
    from simdev.parallel.plan import Plan as Plan
    from simdev.parallel.plan import simulate_plan as simulate_plan
    from simdev.placers.budget import Budget as Budget
    from simdev.placers.placer import placer as placer
    from simdev.placers.registry import find_placer as find_placer
    from simdev.placers.registry import load_workload as load_workload
    from simdev.placers.score import Score as Score
    from simdev.planners.job import Choice as Choice
    from simdev.planners.job import Job as Job
    from simdev.planners.plan_file import load_plan as load_plan
    from simdev.planners.plan_file import make_job as make_job
    from simdev.planners.planner import find_planner as find_planner
    from simdev.planners.planner import planner as planner
    from simdev.problem.costs import CostModel as CostModel
    from simdev.problem.costs import CostTable as CostTable
    from simdev.problem.graph import ComputationGraph as ComputationGraph
    from simdev.problem.graph import GraphBuilder as GraphBuilder
    from simdev.problem.graph_file import load_graph as load_graph
    from simdev.problem.graph_file import save_graph as save_graph
    from simdev.problem.placement import Placement as Placement
    from simdev.problem.problem import Problem as Problem
    from simdev.problem.problem import Rules as Rules
    from simdev.problem.topology import Topology as Topology
    from simdev.problem.topology import load_topology as load_topology
    from simdev.sim import Simulator as Simulator
    from simdev.sim import simulate as simulate
    from simdev.sim import simulate_many as simulate_many
    from simdev.sim.validate import validate as validate

__version__ = "0.2.0"

_HOME = {
    "Budget": "placers.budget",
    "Choice": "planners.job",
    "ComputationGraph": "problem.graph",
    "CostModel": "problem.costs",
    "CostTable": "problem.costs",
    "CustomStep": "graphs.workload",
    "GraphBuilder": "problem.graph",
    "InferenceStep": "graphs.workload",
    "InvalidInput": "errors",
    "Job": "planners.job",
    "Mesh": "parallel.mesh",
    "Placement": "problem.placement",
    "Plan": "parallel.plan",
    "Problem": "problem.problem",
    "Rules": "problem.problem",
    "Score": "placers.score",
    "SimdevError": "errors",
    "Simulator": "sim",
    "Topology": "problem.topology",
    "TrainingStep": "graphs.workload",
    "Unsupported": "errors",
    "apply": "integrations.apply",
    "find_placer": "placers.registry",
    "find_planner": "planners.planner",
    "from_networkx": "graphs.importers.networkx_graph",
    "import_graph": "graphs.importers",
    "load_graph": "problem.graph_file",
    "load_plan": "planners.plan_file",
    "load_topology": "problem.topology",
    "load_workload": "placers.registry",
    "lower_bound": "analysis.bounds",
    "make_job": "planners.plan_file",
    "placer": "placers.placer",
    "planner": "planners.planner",
    "save_graph": "problem.graph_file",
    "simulate": "sim",
    "simulate_many": "sim",
    "simulate_plan": "parallel.plan",
    "to_networkx": "graphs.importers.networkx_graph",
    "validate": "sim.validate",
    "workload": "graphs.workload",
}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

if not TYPE_CHECKING:  # a type checker must find a misspelt name

    def __getattr__(name: str):
        if name in _HOME:
            return getattr(_import_module(f"simdev.{_HOME[name]}"), name)
        raise AttributeError(f"module 'simdev' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The shelves install as simdev.workloads and simdev.baselines; in an uninstalled checkout they lie beside this folder.
if _find_spec("simdev.workloads") is None and (_Path(__file__).parents[1] / "workloads" / "__init__.py").is_file():
    __path__.append(str(_Path(__file__).parents[1]))

_cache.ensure()
_shelf = _find_spec("simdev.baselines")
_cache.drop_stale(
    _Path(__file__).parent / "sim" / "kernels", *map(_Path, (_shelf and _shelf.submodule_search_locations) or ())
)
