"""Mars (Lan, Chen and Li 2021): a self-supervised graph encoder, and a sequence-to-sequence placer over segments."""

from __future__ import annotations

from simdev.baselines.rl._grouped import device_columns, group_problem
from simdev.baselines.rl._groups import coarse_groups
from simdev.baselines.rl._train import Learner, learn, learned

DEFAULTS = {
    "groups": 64,
    "segment": 32,
    "hidden": 64,
    "samples": 10,
    "rate": 0.003,
    "entropy": 0.0,
    "reach": 2.5,
    "pretrain": 300,
    "policy": "",
}


def learner(problems, *, groups, devices=0, **given) -> Learner:
    """The learner for ``simdev train`` and the placer; it names at most ``devices`` (0: as many as needed)."""
    from simdev.baselines.rl._mars import learner_functions

    settings = {"devices": device_columns(problems, devices), **given}
    functions = learner_functions(**settings)
    settings["groups"] = groups

    def grouped(problem):
        return group_problem(problem, coarse_groups(problem, groups), rows=groups, columns=settings["devices"])

    return Learner("mars", 1, settings, grouped, functions.init, functions.step, functions.greedy)


@learned(
    "mars",
    version=1,
    defaults=DEFAULTS,
    learner=learner,
    source="Lan, Chen, Li: Accelerated Device Placement Optimization with Contrastive Learning, ICPP 2021; "
    "Velickovic et al.: Deep Graph Infomax, ICLR 2019; Schulman et al.: Proximal Policy Optimization, 2017",
)
def mars(problem, *, rng, budget, policy, **params):
    """Pre-train a graph encoder without any placement, then sample placements and improve them by proximal policy
    optimisation.

    Of the paper, its abstract and the description on the authors' page (iqua.ece.toronto.edu, "Device Placement
    Optimization with Deep Reinforcement Learning") were read. From these: a graph network encodes the ops; its
    pre-training is self-supervised and contrastive; a sequence-to-sequence placer with attention works segment by
    segment; proximal policy optimisation trains all of it. The pre-training is that of Deep Graph Infomax:
    ``pretrain`` updates, before the first placement of a problem, of three graph convolutions and of a discriminator
    that tells the groups from groups with shuffled features by the mean of the graph. The placer is that of ``hdp``
    and ``colocrl``, an LSTM encoder in both directions and an attentional LSTM decoder, over ``segment`` groups at a
    time; the states go on from segment to segment. ``mars[pretrain=0]`` is the control of the pre-training,
    ``group-climb[by=coarse]`` that of the learning.

    Departures, and what our sources leave open. It places at most ``groups`` groups of ops, those of ``colocrl`` and
    ``placeto``, and not single ops, so that a segment has 32 groups. The placer sees a group's features beside its
    embedding, otherwise it would know nothing but the embedding when ``pretrain`` is 0. All sizes, the four epochs,
    the clipping at 0.2 and both rates (0.001 for the pre-training) are our choices; of 0.001 and 0.003, ``rate`` is
    the better one after 500 evaluations on four workloads. Reward, baseline and bounded logits are those of
    ``colocrl``. Accelerators only.
    """
    return learn(learner, problem, rng, budget, policy, params)
