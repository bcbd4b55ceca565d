"""FlexFlow's search (Jia, Zaharia, Aiken 2019): Markov chain Monte Carlo over the devices of layers."""

from __future__ import annotations

import math

import numpy as np

from simdev.baselines._search import Incumbent, draw_device, layer_of_unit, starts
from simdev.baselines._units import choices
from simdev.placers.placer import placer
from simdev.placers.score import Score
from simdev.problem.placement import Placement

MB_PENALTY_MS = 1.0  # per MB over memory
RETURNS, LONGEST_WALK = 100, 1000


@placer(
    "annealing",
    version=2,
    family="search",
    searches=True,
    defaults={"alpha": 1.2},
    source="Jia, Zaharia, Aiken: Beyond Data and Model Parallelism for Deep Neural Networks, MLSys 2019, section 6.2; "
    "constants from the FlexFlow program",
)
def annealing(problem, *, rng, budget, alpha):
    """Change the device of one random layer; accept with probability ``exp(-alpha * difference in ms)``.

    The search returns to the best placement after every hundredth of the budget (at most 1,000 steps). A MB over memory
    counts as 1 ms.

    Departures: FlexFlow also splits each op over devices and starts from data parallelism. A placement puts an op on
    one device, so the search starts from the better of a single device and a contiguous split. Ops that share a layer
    name in the graph, backward ops included, form a layer.
    """
    allowed = choices(problem)
    begin = starts(problem, allowed, room=True)
    incumbent = Incumbent(problem, budget, begin[0])
    if not budget.open:
        return Placement.of_units(problem, incumbent.devices)
    scores = incumbent.evaluate(np.stack(begin))
    layers = _members(layer_of_unit(problem))
    walk = max(1, int(min(budget.evaluations, LONGEST_WALK * RETURNS)) // RETURNS)
    current = best = incumbent.devices
    cost = least = _cost_ms(min(scores))
    steps = 0
    while budget.open:
        proposal = _propose(rng, allowed, layers, current)
        if proposal is None:
            break
        found = _cost_ms(incumbent.evaluate(proposal[None])[0])
        if found <= cost or rng.random() < math.exp(-alpha * (found - cost)):
            current, cost = proposal, found
        if cost < least:
            best, least = current, cost
        steps += 1
        if steps % walk == 0:
            current, cost = best, least
    return Placement.of_units(problem, incumbent.devices)


def _cost_ms(score: Score) -> float:
    return score.step_ns / 1e6 + MB_PENALTY_MS * score.known_overflow_bytes / 1e6


def _members(group: np.ndarray) -> list[np.ndarray]:
    """The units of each group."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _propose(rng, allowed, layers, current, tries=20):
    for _ in range(tries):
        units = layers[int(rng.integers(len(layers)))]
        device = draw_device(rng, allowed, units, int(current[units[0]]))
        if device >= 0:
            proposal = current.copy()
            proposal[units] = device
            return proposal
    return None
