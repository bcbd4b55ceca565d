"""A hill climb over the groups of a learned placer: the control that shows what its learning adds."""

from __future__ import annotations

from simdev.baselines.rl._edits import Edits, first_placements
from simdev.baselines.rl._grouped import device_columns, group_problem
from simdev.baselines.rl._groups import coarse_groups, fine_groups, layer_groups
from simdev.baselines.rl._train import Episodes
from simdev.errors import InvalidInput
from simdev.placers.placer import placer
from simdev.problem.placement import Placement

GROUPS = {"layers": layer_groups, "coarse": coarse_groups, "fine": fine_groups}


@placer(
    "group-climb",
    version=1,
    family="search",
    searches=True,
    defaults={"groups": 64, "by": "layers", "wide": True},
    source="a control, not a published method",
)
def group_climb(problem, *, rng, budget, groups, by, wide):
    """Climb over the placements of at most ``groups`` groups, without learning.

    The groups are those of ``gdp`` (``by="layers"``), of ``placeto``, ``post`` and ``colocrl`` (``by="coarse"``), or
    single forward ops that share traffic (``by="fine"``). The climb starts from the best of three placements: all
    groups on one device, an even share of the time for each device, and a random one. An edit moves a group, the groups
    of a module, or a run of groups to a device that is drawn uniformly; with ``wide=false`` it moves a group alone.
    Edits that do not make the placement worse are kept.
    """
    if by not in GROUPS:
        raise InvalidInput(f"{by!r} is none of {', '.join(GROUPS)}", source="placer group-climb", field="by")
    grouped = group_problem(problem, GROUPS[by](problem, groups), columns=device_columns([problem]))
    evaluate, edits = Episodes(grouped, budget), Edits(grouped, wide)
    best = score = None
    for actions in (*first_placements(grouped), _random(rng, grouped)):
        if budget.open:
            found = evaluate.edit(actions, score)
            if score is None or found < score:
                best, score = actions, found
    while budget.open and best is not None and score is not None:
        edit = edits.draw(rng, best)
        if edit is None:
            break
        actions = best.copy()
        actions[edit[0]] = edit[1]
        found = evaluate.edit(actions, score)
        if found <= score:
            best, score = actions, found
    return evaluate.best or Placement(grouped.placements(first_placements(grouped)[:1])[0])


def _random(rng, grouped):
    """int32 ``(G,)``: a device for each group, drawn uniformly from those that it may go to."""
    allowed = grouped.inputs.allowed
    return (allowed * rng.random(allowed.shape)).argmax(axis=1).astype("int32")
