"""Doppler (Yao et al. 2026): one policy picks the next group of ops, another its device; a scheduler teaches both."""

from __future__ import annotations

from simdev.baselines.rl._grouped import group_problem
from simdev.baselines.rl._groups import coarse_groups, fine_groups
from simdev.baselines.rl._train import Learner, learn, learned

DEFAULTS = {
    "groups": 64, "layers": True, "hidden": 128, "rounds": 6, "episodes": 16, "imitation": 40,
    "imitation_rate": 0.001, "rate": 0.001, "epsilon": 0.2, "epsilon_updates": 100, "history": 64, "policy": "",
}  # fmt: skip
SHAPE = ("groups", "layers", "hidden", "rounds")  # settings that a policy file stores


def learner(problems, *, groups, layers, **given) -> Learner:
    """The learner for ``simdev train`` and the placer."""
    from simdev.baselines.rl._doppler import learner_functions, with_dag

    settings = {"groups": groups, "layers": layers, **given}
    functions = learner_functions(**given)

    def grouped(problem):
        group = coarse_groups(problem, groups) if layers else fine_groups(problem, groups)
        return with_dag(group_problem(problem, group, columns=4))

    stored = {name: settings[name] for name in SHAPE}
    return Learner("doppler", 2, stored, grouped, functions.init, functions.step, functions.greedy)


@learned(
    "doppler",
    version=2,
    defaults=DEFAULTS,
    learner=learner,
    source="Yao et al.: Doppler: Dual-Policy Learning for Device Assignment in Asynchronous Dataflow Graphs, ICLR 2026",
)
def doppler(problem, *, rng, budget, policy, **params):
    """Learn to schedule: SEL repeatedly picks a ready group and PLC its device; the simulator scores the result.

    From the paper: each policy has message passing of its own (``rounds`` rounds, width ``hidden``), run once for an
    episode. SEL scores a group whose parents are all placed by its embedding, the embeddings along its longest path to
    an end (b-level) and from a start (t-level), and its features (time, transfers in and out, both levels). PLC scores
    a device by the group's embedding and features, the embeddings of the groups on the device, and five numbers: work
    assigned, work of the group's inputs there, start of the first and end of the last of them, and the earliest start
    there. Stage I imitates critical-path list scheduling (the ready group with the highest b-level, on the device where
    it ends first) by cross-entropy; it simulates nothing. Stage II is REINFORCE on the simulated step time of whole
    episodes; the reward is the running mean less the cost, and choices are random with a probability that falls
    linearly from ``epsilon`` to 0 over ``epsilon_updates`` updates. Stage III, learning on the real system, does not
    exist here. No number depends on the identity of a device, so a policy works on any topology. It departs from the
    paper, or fills a gap in it, as follows:

    * ``episodes`` episodes run side by side with one policy, then it is updated with Adam; stage I is ``imitation``
      such updates (seconds; the paper's is 2,000 episodes, and as many or more in the stages after it), once for each
      problem; ``imitation=0`` leaves it out, as does ``policy``. Both stages learn at 0.001, the paper's stage II at
      0.0001, which moves little in 100 updates. Nothing is discounted: the reward comes at the end.
    * Costs are relative to the time of all ops on their fastest devices, and count at most 20 times that; a placement
      that does not fit counts as 10 times, plus a part that grows with its overflow (the paper ignores memory). The
      running mean is over the last ``history`` episodes; rewards are divided by their deviation and clipped at 3,
      gradients at 1.
    * A choice that is not random is drawn from the policy; the gradient is that of the mixture of both.
    * The simulator decides for itself when an op runs: the order in which groups were picked only shapes the estimate,
      in which a device runs groups in that order and transfers do not wait. Teacher and device numbers come from it.
    * Device numbers are relative: start and end of inputs to the end of the group's last input anywhere, the earliest
      start to that on the best device. A sixth tells how full the memory would be; the teacher passes over full
      devices, and breaks ties at random. Embeddings along a path and on a device are averaged; messages are averaged
      over parents and over children apart; layers have residual connections and normalisation.
    * Groups are the layers of the source model (in graphs that name none, ops with their only reader), merged to at
      most ``groups``, or with ``layers=false`` single forward ops that share traffic; backward and update ops go with
      their forward op. So groups depend on one another in circles: each pair is one edge, from the first in
      running order to the second, with the tensors of both ways.

    If ``policy``, a folder that ``simdev train`` wrote, is given, learning starts from it.
    """
    if policy:
        params = {**params, "imitation": 0}
    return learn(learner, problem, rng, budget, policy, params)
