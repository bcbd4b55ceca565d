"""Post (Gao et al. 2018): a distribution over the devices of each group, by cross-entropy minimisation and PPO."""

from __future__ import annotations

from simdev.baselines.rl._grouped import device_columns, group_problem
from simdev.baselines.rl._groups import coarse_groups
from simdev.baselines.rl._train import Learner, learned, search
from simdev.errors import InvalidInput

DEFAULTS = {
    "groups": 64,
    "samples": 10,
    "pool": 100,
    "elite": 0.1,
    "mix": 0.05,
    "epochs": 10,
    "rate": 0.3,
    "penalty": 0.1,
}


def learner(problems, **params):
    """Refuses: a distribution over the devices of one graph's groups says nothing about another graph."""
    raise InvalidInput("learns each problem from the start: there is no policy to train", source="placer post")


@learned(
    "post",
    version=2,
    defaults=DEFAULTS,
    learner=learner,
    source="Gao, Chen, Li: Post: Device Placement with Cross-Entropy Minimization and Proximal Policy Optimization, "
    "NeurIPS 2018",
)
def post(problem, *, rng, budget, groups, elite, **params):
    """Learn, without a network, how probable each device is for each group.

    From the paper (its algorithm 1): each group has an independent distribution over the devices, a softmax of
    parameters that are 0 at first. After every ``samples`` placements, ``epochs`` steps of gradient ascent improve the
    objective of proximal policy optimisation. After every ``pool`` placements instead, the distribution becomes the
    nearest one in cross-entropy to the best ``elite`` of them (in closed form: how often the elite uses each device),
    mixed with ``mix`` of the uniform one. The elite is the best tenth, as in the paper. Nothing transfers to another
    graph, so there is no policy to train, to store or to start from. It departs from the paper, or fills a gap in our
    sources, as follows:

    * ``samples``, ``pool``, ``mix``, ``rate`` and ``penalty`` are our choices. The paper spent 2,400 placements.
    * The objective of PPO is the form with a penalty, ``penalty`` times the distance (Kullback-Leibler) from the old
      distribution, group by group, not the clipped one. Gradient ascent is plain, with step ``rate``.
    * Advantages are rewards less the batch's mean, over its deviation; the reward is minus the square root of the step
      time, and a placement that does not fit counts ten times the time of all ops, plus a part that grows with its
      overflow.
    * The elite is ordered by overflow, then by step time; placements equal to its last one belong to it too. All
      placements since the last minimisation count alike, although the updates between them moved the distribution.
    * ``groups`` at most, from one rule for all graphs (see :func:`~simdev.baselines.rl._groups.coarse_groups`), and
      accelerators only: no CPU among the devices.
    """
    from simdev.baselines.rl._post import learner_functions

    columns = device_columns([problem])
    functions = learner_functions(groups=groups, devices=columns, share=elite, **params)

    def grouped(problem):
        return group_problem(problem, coarse_groups(problem, groups), rows=groups, columns=columns)

    described = Learner("post", 2, {}, grouped, functions.init, functions.step, functions.greedy)
    return search(described, problem, rng=rng, budget=budget)
