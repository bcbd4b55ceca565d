"""GiPH (Hu et al. 2023): a policy that moves one group of ops at a time, over a graph of all possible moves."""

from __future__ import annotations

from simdev.baselines.rl._grouped import bucket, group_problem
from simdev.baselines.rl._groups import coarse_groups, fine_groups
from simdev.baselines.rl._train import Learner, learn, learned

DEFAULTS = {
    "groups": 64,
    "layers": True,
    "hidden": 16,
    "output": 10,
    "episodes": 4,
    "length": 2,
    "every": 16,
    "from_best": True,
    "discount": 0.97,
    "rate": 0.01,
    "policy": "",
}
SHAPE = ("groups", "layers", "hidden", "output")  # settings that a policy file stores


def learner(problems, *, groups, layers, **given) -> Learner:
    """The learner for ``simdev train`` and the placer."""
    from simdev.baselines.rl._giph import learner_functions, with_net

    settings = {"groups": groups, "layers": layers, **given}
    functions = learner_functions(rows=bucket(groups), **given)

    def grouped(problem):
        group = coarse_groups(problem, groups) if layers else fine_groups(problem, groups)
        return with_net(group_problem(problem, group, columns=4))

    stored = {name: settings[name] for name in SHAPE}
    return Learner("giph", 2, stored, grouped, functions.init, functions.step, functions.greedy)


@learned(
    "giph",
    version=2,
    defaults=DEFAULTS,
    learner=learner,
    source="Hu et al.: GiPH: Generalizable Placement Learning for Adaptive Heterogeneous Computing, MLSys 2023",
)
def giph(problem, *, rng, budget, policy, **params):
    """Learn which group to move where: scores of all moves from one graph of all groups on all devices.

    From the paper: gpNet has a node for each group on each device that may take it, those of the placement being
    pivots; edges join each pivot to the nodes of the groups behind it, and the other nodes to the pivots behind them.
    Messages pass along the edges and against them, in running order of the groups, with separate weights for each
    direction; an embedding of ``output`` numbers gives a node's score, and a softmax over all nodes the move. A move
    that changes nothing or moves the same group again is excluded. The reward of a move is the decrease of the step
    time; learning is REINFORCE with Adam; an episode is ``length`` moves a group. No number depends on the identity of
    a device, so a policy works on any topology. It departs from the paper, or fills a gap in it, as follows:

    * Learning does not wait for the end of an episode: after every ``every`` moves the policy is updated, with returns
      that end there. The mean reward over those moves is subtracted from the rewards; returns are divided by
      their deviation and clipped at 3; gradients are clipped at 1.
    * ``episodes`` episodes run side by side with one policy. They start from the best placement so far; with
      ``from_best=false`` they start from random ones, as in the paper.
    * Step times are relative to the time of all ops on their fastest devices, and count at most 20 times that; a
      placement that does not fit counts as 10 times, plus a part that grows with its overflow (the paper ignores
      memory).
    * The start-time potential of a node is the time when its inputs could be there less the start of its group. It
      comes from an estimated schedule of groups (in order, without contention), not from the simulator's schedule.
    * Node features are times relative to the mean of a group, not work and speed; a pivot is marked; load and memory of
      the device and the group's start are added. Edge features are bytes, transfer time and whether there is any.
      Logarithms replace the scaling to the range of the graph. Messages are averaged over a node's edges.
    * Groups are the layers of the source model (in graphs that name none, ops with their only reader), merged to at
      most ``groups``, or with ``layers=false`` single forward ops that share traffic; backward and update ops go with
      their forward op. So groups depend on one another in circles: each pair is one edge, from the first in
      topological order of forward ops to the second, with the tensors of both ways.
    * The most probable placement of a trained policy is, of those that its most probable moves lead through, the one
      that fits best and ends first by that estimate.

    If ``policy``, a folder that ``simdev train`` wrote, is given, learning starts from it.
    """
    return learn(learner, problem, rng, budget, policy, params)
