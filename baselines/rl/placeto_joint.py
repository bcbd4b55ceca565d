"""Placeto with a learned grouping: one policy joins nodes into groups and visits the groups."""

from __future__ import annotations

from simdev.baselines.rl._grouped import bucket, device_columns, group_problem
from simdev.baselines.rl._groups import fine_groups
from simdev.baselines.rl._train import Learner, learn, learned

DEFAULTS = {
    "nodes": 128, "hidden": 16, "rounds": 4, "episodes": 4, "every": 8, "from_best": True,
    "discount": 1.0, "history": 16, "rate": 0.003, "entropy": 0.02, "entropy_updates": 20, "policy": "",
}  # fmt: skip
SHAPE = ("nodes", "hidden", "rounds", "devices")  # settings that a policy file stores


def learner(problems, *, nodes, devices=0, **given) -> Learner:
    """The learner for ``simdev train`` and the placer; it names at most ``devices`` (0: as many as needed)."""
    from simdev.baselines.rl._placeto_joint import learner_functions, with_nodes

    devices = device_columns(problems, devices)
    settings = {"nodes": nodes, "devices": devices, **given}
    group_of = {id(problem): fine_groups(problem, nodes) for problem in problems}
    rows = bucket(max(int(group.max()) + 1 for group in group_of.values()))
    functions = learner_functions(devices=devices, rows=rows, **given)

    def grouped(problem):
        return with_nodes(group_problem(problem, group_of[id(problem)], rows=rows, columns=devices))

    stored = {name: settings[name] for name in SHAPE}
    return Learner("placeto-joint", 1, stored, grouped, functions.init, functions.step, functions.greedy)


@learned(
    "placeto-joint",
    version=1,
    defaults=DEFAULTS,
    learner=learner,
    source="an extension of Addanki et al.: Placeto: Learning Generalizable Device Placement Algorithms for "
    "Distributed Machine Learning, NeurIPS 2019; not a published method",
)
def placeto_joint(problem, *, rng, budget, policy, **params):
    """Learn to group and to place together: an episode draws a grouping, then visits its groups as ``placeto`` does.

    Placeto takes its groups as given by a heuristic. Here the graph has up to ``nodes`` nodes: single forward ops,
    merged by traffic if there are more, with their backward and update ops, and without regard to the layers of the
    source model. A network decides for each node whether it joins its partner: of the nodes
    before it in running order, the one that it exchanges most with. It reads the features of both nodes, the time of
    the exchange, and whether both are on the same device now. Nodes that joined are a group.

    The groups are then visited in running order by the policy of ``placeto``, over the graph of groups: amounts are
    summed over members, other features are means weighted by time. A group whose members are on several devices counts
    as being where most of its time is. If this device is chosen again, the members stay where they are; otherwise all
    of them move. Each episode has its own grouping, so that nothing is fixed by an early one.

    Both networks learn by REINFORCE from the same episodes: a device from the return since its step, a grouping from
    the return of the whole episode. The logits of joining are bounded to -3 to 3. The step time is measured after every
    ``every``-th node. Everything else is as in ``placeto``. With ``rate=0`` nothing is learned.

    If ``policy``, a folder that ``simdev train`` wrote, is given, learning starts from it.
    """
    return learn(learner, problem, rng, budget, policy, params)
