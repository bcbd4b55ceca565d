"""What a placer receives: the graph, the topology, the costs and the rules, joined in a :class:`Problem`.

A graph, a topology and a problem are frozen and checked once, when they are built. Costs are whole nanoseconds, from
measured tables, device files or rooflines. A placement names a device for each op.
"""

from simdev.problem.costs import CostModel, CostTable
from simdev.problem.graph import ComputationGraph, GraphBuilder
from simdev.problem.graph_file import load_graph, save_graph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Topology, load_topology

__all__ = [
    "ComputationGraph",
    "CostModel",
    "CostTable",
    "GraphBuilder",
    "Placement",
    "Problem",
    "Rules",
    "Topology",
    "load_graph",
    "load_topology",
    "save_graph",
]
