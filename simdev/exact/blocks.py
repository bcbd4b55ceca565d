"""BlockProblem of ops to place as one: classes of the forward order, split by phase so that they can be scheduled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.analysis.coarsen import coarse_problem
from simdev.exact.contract import contract, without_cycles
from simdev.exact.merge import merge_cheapest, merge_dominated
from simdev.exact.training import alike_accelerators, load_of
from simdev.problem.problem import Problem


@dataclass(frozen=True, eq=False)
class BlockProblem:
    """A problem over blocks of ops, and the way back to the ops.

    ``block_of`` int ``(n,)`` is the block of each op. ``problem`` has one op for each phase of a block, in a unit of
    its own; ``tie`` int ``(units,)`` is the block of each such unit, and ``size`` int ``(units,)`` the bytes that it
    keeps.
    """

    block_of: np.ndarray
    problem: Problem
    tie: np.ndarray
    size: np.ndarray

    @property
    def count(self) -> int:
        return int(self.block_of.max()) + 1

    def expand(self, devices: np.ndarray) -> np.ndarray:
        """int32 ``(n,)``: the device of each op, for ``devices`` of the units of :attr:`problem`."""
        home = np.zeros(self.count, np.int32)
        home[self.tie] = devices
        return home[self.block_of]

    def project(self, problem: Problem, devices: np.ndarray) -> np.ndarray:
        """int ``(units,)``: each block on the device of most of its time under ``devices`` int ``(n,)`` of the ops."""
        time = np.maximum(problem.costs.device_op_ns[devices, np.arange(len(devices))], 0)
        share = np.zeros((self.count, problem.topology.n_devices))
        np.add.at(share, (self.block_of, devices), time)
        return np.argmax(share, axis=1)[self.tie]


def blocks(problem: Problem, count: int) -> BlockProblem:
    """Merge the classes of the max-load model to about ``count`` blocks.

    Merges that lose nothing come first, then the cheapest neighbours, which may lose the optimum.
    """
    load = load_of(problem, alike_accelerators(problem))
    classes = merge_cheapest(merge_dominated(contract(load)), count)
    parts = classes.class_of.astype(np.int64) * 3 + problem.graph.op_phase
    label = np.unique(parts, return_inverse=True)[1]
    label = without_cycles(label, label[problem.graph.edge_source], label[problem.graph.consumers])
    block = _tied(classes.class_of, label)
    coarse, numbers = coarse_problem(problem, label)
    tie = np.zeros(coarse.graph.n_units, np.int64)
    tie[coarse.graph.unit_of_op[numbers]] = block
    size = np.bincount(coarse.graph.unit_of_op[numbers], load.size, coarse.graph.n_units).astype(np.int64)
    return BlockProblem(block, coarse, tie, size)


def _tied(class_of: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Merge classes that share a part into one block."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    classes, parts = int(class_of.max()) + 1, int(label.max()) + 1
    shape = (classes + parts,) * 2
    arcs = coo_array((np.ones(len(label)), (class_of, classes + label)), shape)
    joined = connected_components(arcs, directed=False)[1]
    return np.unique(joined[class_of], return_inverse=True)[1]
