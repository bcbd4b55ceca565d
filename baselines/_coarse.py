"""Coarse search: a placement of groups of ops that do the same work, before single ops move.

In a recurrent network, every layer runs forward, then sends gradients back through time, and meanwhile adds up the
gradients of its weights. If two layers take equally long, a move that helps one of them does not make the step shorter,
and a placement whose single ops have been tuned gets worse with every large move. So the search first forgets the
tuning: it puts each group on one device and moves whole groups by annealing.
"""

from __future__ import annotations

import numpy as np

from simdev.baselines._climb import Neighbourhood
from simdev.baselines._guided import GROUPS, HEAT, Guided
from simdev.baselines._search import PARTS, SearchState, groups, units_by_group
from simdev.baselines._units import HUGE, choices, fastest_ns
from simdev.placers.budget import Share
from simdev.problem.problem import Problem

SLOWER = 5  # a host may take a unit if it is at most so many times slower than the best accelerator
FEWEST = 16  # units of a group of which runs are drawn
SINGLE, WHOLE = 0.35, 0.2  # shares of the moves of Neighbourhood and of Groups beside runs
AT_END = 0.25  # share of runs that begin where the group begins on a device, and of runs that end where it ends
COARSE_HEAT = 0.01  # mean slack at the start of the annealing of groups, as a share of the best step time


class Coarse(Guided):
    """Moves whole groups, also to hosts that do not run them too slowly."""

    around: Groups

    def __init__(self, problem: Problem, allowed: np.ndarray, budget, rng):
        super().__init__(problem, with_near_hosts(problem, allowed), budget, rng, GROUPS)
        self.near = with_near_hosts(problem, self.near)
        self.around = Groups(problem, self.near)

    def improve(self, start: SearchState, share: Share, heat: float = COARSE_HEAT) -> SearchState:
        """The best state that annealing finds from the groups of ``start``."""
        return super().improve(self.state(self._even(start.devices)), share, heat)

    def _even(self, devices: np.ndarray) -> np.ndarray:
        """Each group on the device that runs most of it, and parameters with their first readers."""
        around, time = self.around, fastest_ns(self.problem).astype(float) + 1
        work = np.zeros((len(self.allowed), int(around.part.max()) + 1))
        np.add.at(work, (devices, around.part), time)
        moved = work.argmax(axis=0)[around.part].astype(np.int32)
        moved = moved[around.reader]
        wrong = ~self.allowed[moved, np.arange(len(moved))]
        moved[wrong] = devices[wrong]
        return moved


class Fine(Guided):
    """Moves single ops, modules and groups, and runs of what a group does on a device, also to hosts that do not run
    them too slowly."""

    heat = HEAT
    ends_late = True

    def __init__(self, problem: Problem, allowed: np.ndarray, budget, rng):
        super().__init__(problem, with_near_hosts(problem, allowed), budget, rng)
        self.near = with_near_hosts(problem, self.near)
        self.around = Runs(problem, self.near)


def with_near_hosts(problem: Problem, allowed: np.ndarray) -> np.ndarray:
    """``allowed`` bool ``(D, units)``, and hosts for units that they run at most :data:`SLOWER` times slower than the
    best allowed device."""
    best_ns = np.where(allowed, problem.unit_op_ns, HUGE).min(axis=0)
    near = np.maximum(problem.unit_op_ns, 0) <= SLOWER * best_ns
    return allowed | choices(problem, hosts=True) & near


class Groups(Neighbourhood):
    """Draws neighbours of a unit placement by moves of groups, parts of groups, and modules.

    A group is the units of one layer and phase that produce gradients of a weight of the layer, or those that do not.
    A group with much work is divided into ``PARTS`` parts of equal work, in topological order.
    """

    def __init__(self, problem: Problem, allowed: np.ndarray):
        super().__init__(problem, allowed)
        self.group, self.part = groups(problem, self.rank)
        self.reader = self._readers(problem)

    def _readers(self, problem: Problem) -> np.ndarray:
        """int64 ``(units,)``: the unit that says where each unit is: of a parameter its first reader, else itself."""
        graph, reader = problem.graph, np.arange(problem.graph.n_units)
        holder, target = graph.unit_of_op[graph.edge_source], graph.unit_of_op[graph.consumers]
        tied = (self.atoms[holder] == self.atoms[target]) & (holder != target)
        tied &= np.diff(graph.input_ptr)[graph.edge_source] == 0
        first_last = np.flatnonzero(tied)[np.argsort(-graph.consumers[tied], kind="stable")]
        reader[holder[first_last]] = target[first_last]
        return reader

    def members(self, rng: np.random.Generator, pivot: int, devices: np.ndarray) -> np.ndarray:
        pivot, scale = int(self.reader[pivot]), int(rng.integers(len(self.modules) + 2))
        if scale < len(self.modules):
            members = np.flatnonzero(self.modules[scale] == self.modules[scale][pivot])
        elif scale == len(self.modules):
            members = np.flatnonzero(self.group == self.group[pivot])
        else:
            length = 2 ** int(rng.integers(PARTS.bit_length()))
            low = int(self.part[pivot]) - int(rng.integers(length))
            near = (self.part >= low) & (self.part < low + length)
            members = np.flatnonzero(near & (self.group == self.group[pivot]))
        members = self._whole_atoms(members[self.reader[members] == members])
        return members[devices[members] == devices[pivot]]


class Runs(Groups):
    """Draws moves of :class:`Neighbourhood`, of :class:`Groups`, and runs: units of a group on one device that follow
    each other in topological order. A sum over all time steps is then divided over devices at any step."""

    def __init__(self, problem: Problem, allowed: np.ndarray):
        super().__init__(problem, allowed)
        self.in_order, self.first = units_by_group(self.group, self.rank)

    def members(self, rng: np.random.Generator, pivot: int, devices: np.ndarray) -> np.ndarray:
        reader = int(self.reader[pivot])
        group = self.in_order[self.first[self.group[reader]] : self.first[self.group[reader] + 1]]
        draw = rng.random() if len(group) >= FEWEST else 0.0
        if draw < SINGLE:
            return Neighbourhood.members(self, rng, pivot, devices)
        if draw < SINGLE + WHOLE:
            return super().members(rng, pivot, devices)
        here = group[devices[group] == devices[reader]]
        length = 2 ** int(rng.integers(1, min(9, len(here).bit_length() + 1)))
        low = int(np.searchsorted(self.rank[here], self.rank[reader])) - int(rng.integers(length))
        end = rng.random()
        low = 0 if end < AT_END else len(here) - length if end < 2 * AT_END else low
        members = self._whole_atoms(here[max(0, low) : max(0, low) + length])
        return members[devices[members] == devices[reader]]
