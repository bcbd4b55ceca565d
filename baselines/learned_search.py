"""Learned search: a search with the simulator, whose moves a network chooses that was trained on drawn graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simdev.baselines._guided import search_from
from simdev.baselines._members import constructed
from simdev.baselines._order import ordered
from simdev.baselines._proposals import CHOICES, MOST_DEVICES, Proposed, random_network, read_network
from simdev.errors import InvalidInput
from simdev.placers.placer import placer

CLIMBS = 3
WEIGHTS = Path(__file__).with_suffix(".npz")


@placer(
    "learned-search",
    version=5,
    family="learned",
    searches=True,
    defaults={"choice": "learned", "width": 24, "weights": ""},
    source="after Khalil et al., Learning to Branch in Mixed Integer Programming, AAAI 2016, and Paliwal et al., "
    "Reinforced Genetic Algorithm Learning for Optimizing Computation Graphs (REGAL), ICLR 2020",
)
def learned_search(problem, *, rng, budget, choice, width, weights):
    """Evaluate the placements of the constructive placers, and improve the best ones by moves that a network chooses.

    For each evaluation, ``width`` moves are drawn from those of ``long-search``: units around an op or a transfer of
    the critical path, around a tensor that is cut, two groups that change places, or the groups of ``local-search``. A
    network of two layers scores each move by 46 features: load and memory of both devices, time and slack of the moved
    ops, transfers saved and added, and the like. The move with the best score is simulated; in a tenth of the
    evaluations, a random one is. The search around it is that of ``portfolio``, in which single moves compete
    with those of the network; if both gain little, the moves of ``local-search`` take turns with them. The features
    read the schedule of the present placement, which was evaluated before, so reading it costs no evaluation.

    The network was trained before, and learns nothing more during the search. Its lessons come from searches on
    hundreds of drawn graphs and machines, none of which is a workload, a family or a machine of simdev. There, several
    moves from one placement are simulated, and the network learns which of them saves the most. The ideas:

    * look ahead at several candidates, and learn to rank them by cheap features: learning to branch (Khalil et al.
      2016), which imitates strong branching in this way, on each instance anew;
    * the loss is the cross-entropy between two softmax distributions over a list, its gains and its scores: the top-one
      probabilities of ListNet (Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach", ICML 2007);
    * half of the lessons come from states that the network of the first half leads to: DAgger (Ross, Gordon, Bagnell,
      "A Reduction of Imitation Learning and Structured Prediction to No-Regret Online Learning", AISTATS 2011);
    * a network that was trained on other graphs proposes, and a search decides: REGAL (Paliwal et al. 2020).

    ``choice`` replaces the network for comparisons: ``untrained`` has random weights, ``estimate`` takes the move whose
    ops wait longest for their device on urgent paths, ``uniform`` a random move. If ``weights`` is given, it is used
    instead of the file that ships: a file that ``python -m simdev.baselines._lessons -o FILE --seed 0`` wrote (90
    seconds; on the same kind of processor, this command makes the file that ships again, bit for bit).

    If the placement brings its order of ops (rules ``priority``), or more than 64 devices exist, the search is that of
    ``long-search``.
    """
    if choice not in CHOICES:
        raise InvalidInput(f"{choice!r}; expected {', '.join(CHOICES)}", source="placer learned-search", field="choice")
    if type(width) is not int or not 1 <= width <= 1000:
        raise InvalidInput(f"{width!r}; expected 1 to 1000", source="placer learned-search", field="width")
    given = constructed(problem, rng, budget.microbatches)
    if ordered(problem) or problem.topology.n_devices > MOST_DEVICES:
        return search_from(problem, budget, rng, given, CLIMBS)
    network = None
    width = 1 if choice == "uniform" else width
    if choice == "learned":
        network = read_network(Path(weights) if weights else WEIGHTS)
    elif choice == "untrained":
        network = random_network(np.random.default_rng(0))
    options = {"network": network, "choice": choice, "width": width}
    return search_from(problem, budget, rng, given, CLIMBS, Proposed, **options)
