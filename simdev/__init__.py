"""simdev: a discrete-event simulator and benchmark suite for DNN device placement.

The names below are the front door; they load what they need when first used.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

from simdev import _cache

_HOME = {
    "ComputationGraph": "problem.graph",
    "GraphBuilder": "problem.graph",
    "load_graph": "problem.graph_file",
    "save_graph": "problem.graph_file",
    "Topology": "problem.topology",
    "load_topology": "problem.topology",
    "CostModel": "problem.costs",
    "CostTable": "problem.costs",
    "Problem": "problem.problem",
    "Rules": "problem.problem",
    "Placement": "problem.placement",
    "Budget": "placers.budget",
    "Score": "placers.score",
    "TrainingStep": "graphs.workload",
    "find_placer": "placers.registry",
    "load_workload": "placers.registry",
    "import_graph": "graphs.importers",
    "from_networkx": "graphs.importers.networkx_graph",
    "to_networkx": "graphs.importers.networkx_graph",
    "Simulator": "sim",
    "simulate": "sim",
    "simulate_many": "sim",
    "validate": "sim",
    "lower_bound": "analysis.levels",
    "InvalidInput": "errors",
    "SimdevError": "errors",
    "Unsupported": "errors",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(_import_module(f"simdev.{_HOME[name]}"), name)
    raise AttributeError(f"module 'simdev' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})


# The shelves install as simdev.workloads and simdev.baselines; in an uninstalled checkout they lie beside this folder.
if _find_spec("simdev.workloads") is None and (_Path(__file__).parents[1] / "workloads" / "__init__.py").is_file():
    __path__.append(str(_Path(__file__).parents[1]))

_cache.ensure()
_shelf = _find_spec("simdev.baselines")
_cache.drop_stale(_Path(__file__).parent / "sim" / "kernels", *map(_Path, _shelf.submodule_search_locations if _shelf else []))
