"""ColocRL (Mirhoseini et al. 2017): a sequence-to-sequence network chooses the device of each group of ops."""

from __future__ import annotations

from simdev.baselines.rl._grouped import device_columns, group_problem
from simdev.baselines.rl._groups import coarse_groups
from simdev.baselines.rl._train import Learner, learn, learned

DEFAULTS = {
    "groups": 64,
    "hidden": 64,
    "samples": 10,
    "rate": 0.003,
    "entropy": 0.0,
    "reach": 2.5,
    "hosts": False,
    "attention": True,
    "policy": "",
}


def learner(problems, *, groups, hosts=False, attention=True, devices=0, **given) -> Learner:
    """The learner for ``simdev train`` and the placer; it names at most ``devices`` (0: as many as needed)."""
    from simdev.baselines.rl._colocrl import learner_functions

    settings = {"groups": groups, **given, "devices": device_columns(problems, devices, hosts=hosts)}
    functions = learner_functions(**settings, attention=attention)

    def grouped(problem):
        group = coarse_groups(problem, groups)
        return group_problem(problem, group, hosts=hosts, rows=groups, columns=settings["devices"])

    # Policies of the defaults keep the settings that they were stored with.
    if hosts:
        settings = {**settings, "hosts": hosts}
    if not attention:
        settings = {**settings, "attention": attention}
    return Learner("colocrl", 2, settings, grouped, functions.init, functions.step, functions.greedy)


@learned(
    "colocrl",
    version=2,
    defaults=DEFAULTS,
    learner=learner,
    source="Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning, ICML 2017",
)
def colocrl(problem, *, rng, budget, policy, **params):
    """Sample ``samples`` placements at a time, and follow the policy gradient of ``-sqrt(step time)``.

    As in the paper: groups by single readers; embeddings of a group's kinds (learned), output shapes and neighbours; an
    LSTM encoder; an attentional LSTM decoder whose input is the learned embedding of the device that it chose last;
    REINFORCE with a moving average as baseline; Adam. Placements that do not fit count as a large constant at first,
    and not at all after many updates.

    Departures, for a budget of a few thousand simulations (the paper ran twelve hours and more on at least 80
    machines): there is one controller, not 20 asynchronous ones. ``groups`` and ``hidden`` are 64 (the paper's groups
    came from rules by hand, see :func:`~simdev.baselines.rl._groups.coarse_groups`). Only accelerators are used, as by
    the other placers here, unless ``hosts`` is true: then a group may go to the CPU, as in the paper. With
    ``attention=false`` the decoder knows of the groups no more than the last state of the encoder. A group's
    embedding also has its time, memory and place in the graph, and kinds are hashed into buckets. Advantages are
    divided by their standard deviation. Logits stay within ``reach`` (a hyperbolic tangent, from HDP's program), which
    keeps the policy exploring. The cost of a placement that does not fit grows with its overflow.
    """
    return learn(learner, problem, rng, budget, policy, params)
