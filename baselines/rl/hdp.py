"""HDP (Mirhoseini et al. 2018): one network groups the ops, a second places the groups, both learn together."""

from __future__ import annotations

from simdev.baselines.rl._grouped import device_columns, group_problem
from simdev.baselines.rl._groups import coarse_groups, colocation_groups
from simdev.baselines.rl._train import Learner, learn, learned

DEFAULTS = {
    "groups": 64,
    "hidden": 64,
    "samples": 10,
    "rate": 0.003,
    "entropy": 0.0,
    "reach": 2.5,
    "sharpness": 2.0,
    "layers": True,
    "most_layers": 64,
    "policy": "",
}


def learner(problems, *, layers, most_layers, devices=0, **given) -> Learner:
    """The learner for ``simdev train`` and the placer; it names at most ``devices`` (0: as many as needed)."""
    from simdev.baselines.rl._hdp import learner_functions

    settings = {**given, "devices": device_columns(problems, devices)}
    functions = learner_functions(**settings)
    settings |= {"layers": layers, "most_layers": most_layers}

    def grouped(problem):
        group = coarse_groups(problem, most_layers) if layers else colocation_groups(problem)
        return group_problem(problem, group, columns=settings["devices"])

    return Learner("hdp", 3, settings, grouped, functions.init, functions.step, functions.greedy)


@learned(
    "hdp",
    version=3,
    defaults=DEFAULTS,
    learner=learner,
    source="Mirhoseini et al.: A Hierarchical Model for Device Placement, ICLR 2018; "
    "constants from TensorFlow's grappler",
)
def hdp(problem, *, rng, budget, policy, **params):
    """Sample groupings and then placements, ``samples`` at a time, and follow the joint policy gradient.

    As in the paper: a feed-forward grouper (64 hidden units) with a softmax over groups; group embeddings of their ops'
    features and of their neighbours; a placer with an LSTM encoder in both directions and an attentional LSTM decoder;
    logits through a hyperbolic tangent; REINFORCE on ``-sqrt(step time)`` with an exponential baseline of decay 0.9;
    Adam with clipped gradients. Placements that do not fit are left out after many updates.

    Departures. The grouper groups the layers of the source model, at most ``most_layers``, gradients included, or with
    ``layers=false`` the finer colocation groups (an op with its only reader, gradients with their ops). The paper gives
    an op the numbers of 20 neighbours; here it has the mean features of its producers and of its readers, which mean
    the same in every graph. ``groups`` and ``hidden`` are 64, not 20 a device and 512; ``rate`` is 0.003, not 0.1 with
    decay; the logits have no noise. A few thousand samples from a near-uniform grouping lead nowhere: each scatters
    neighbours over all devices. The grouper's logits therefore have a term that starts as runs of ops with an even
    share of the time: less a learned multiple, ``sharpness`` at first, of the squared distance from the group's middle
    in the running sum of the time. Advantages are divided by their standard deviation. Empty groups are not counted.
    The baseline starts at the mean of the first batch, and the cost of a placement that does not fit grows with its
    overflow.
    """
    return learn(learner, problem, rng, budget, policy, params)
