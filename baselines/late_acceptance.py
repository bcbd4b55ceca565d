"""Late acceptance: a plain local search in compiled code, for budgets of many thousand evaluations."""

from __future__ import annotations

from simdev.baselines._late import MEMORY, LateWalk, best_start
from simdev.baselines._members import constructed
from simdev.baselines._search import starts as simple_starts
from simdev.baselines._units import choices
from simdev.errors import InvalidInput
from simdev.placers.placer import placer
from simdev.placers.starts import stored_starts
from simdev.problem.placement import Placement


@placer(
    "late-acceptance",
    version=2,
    family="search",
    searches=True,
    defaults={"starts": "", "memory": MEMORY},
    source="late acceptance hill climbing: Burke, Bykov, European Journal of Operational Research 258(1), 2017",
)
def late_acceptance(problem, *, rng, budget, starts, memory):
    """Change the best start by random moves, and keep a move if the step is no longer than it was some moves ago.

    The starts are those of ``long-search``: the constructive placements or, if ``starts`` names result folders with
    ``+`` between them, the placements that those hold. A move takes one of these to another device: a random unit and
    up to 127 units around it; one end of a tensor that is cut, and up to 31 units around it; the units that do the same
    work for a layer (the groups of ``long-search``), a run of them or all; or a whole module, from a single layer up.
    Groups and modules move whole in one move of seven, and more often, the more units a group has: in half of the moves
    in recurrent networks, whose layers do their work in many time steps. Under rules ``priority``, some moves shift one
    op in the order of all ops instead. A move is kept if the step is no longer than the present one, or than the one
    ``L`` moves ago; ``L`` is the number of moves in the budget divided by ``memory``, 50,000 at most. A shorter step
    replaces the one ``L`` moves ago, as in the paper; the paper's search ends when it gains nothing, this one with the
    budget.

    The search knows nothing of critical paths or of what has paid so far. Under the orders ``fifo`` and ``priority``,
    on devices of one slot, it draws, simulates and keeps moves in compiled code. Under other rules, and for throughput,
    each move is an evaluation like those of other placers.
    """
    if not memory > 0:
        raise InvalidInput(f"{memory} is not positive", source="late-acceptance", field="memory")
    stored = (found for folder in starts.split("+") for found in stored_starts(folder, problem))
    given = stored if starts else constructed(problem, rng, budget.microbatches)
    begin = best_start(problem, budget, given)
    if begin is None:
        return Placement.of_units(problem, simple_starts(problem, choices(problem))[0])
    return LateWalk(problem, budget, rng, *begin, memory=memory).run()
