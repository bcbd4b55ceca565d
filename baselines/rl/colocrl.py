"""ColocRL (Mirhoseini et al. 2017): a sequence-to-sequence network names the device of each group of ops."""

from __future__ import annotations

from simdev.baselines.rl._grouped import device_columns, group_problem
from simdev.baselines.rl._groups import coarse_groups
from simdev.baselines.rl._train import Learner, search, with_policy_settings
from simdev.placers.placer import placer

DEFAULTS = {"groups": 64, "hidden": 64, "samples": 10, "rate": 0.003, "entropy": 0.0, "reach": 2.5, "policy": ""}


def learner(problems, *, groups, hidden, samples, rate, entropy, reach, devices=0) -> Learner:
    """What ``simdev train`` and the placer share; ``devices`` at most, 0: what ``problems`` need."""
    from simdev.baselines.rl._colocrl import learner_functions

    settings = {
        "groups": groups,
        "hidden": hidden,
        "samples": samples,
        "rate": rate,
        "entropy": entropy,
        "reach": reach,
        "devices": device_columns(problems, devices),
    }
    functions = learner_functions(**settings)

    def grouped(problem):
        return group_problem(problem, coarse_groups(problem, groups), rows=groups, columns=settings["devices"])

    return Learner("colocrl", 1, settings, grouped, functions.init, functions.step, functions.greedy)


@placer(
    "colocrl",
    version=1,
    family="learned",
    same_processor=True,
    searches=True,
    defaults=DEFAULTS,
    learner=learner,
    source="Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning, ICML 2017",
)
def colocrl(problem, *, rng, budget, policy, **params):
    """Sample ``samples`` placements at a time, and follow the policy gradient of ``-sqrt(step time)``.

    As in the paper: groups by single readers; embeddings of a group's kinds (learned), output shapes and neighbours; an
    LSTM encoder; an attentional LSTM decoder that is fed the learned embedding of the device it named last; REINFORCE
    with a moving average as baseline; Adam; failing placements count as a large constant, and not at all once the
    policy has been updated often.

    Departures, for a budget of a few thousand simulations where the paper ran twelve hours and more on 80 and more
    machines. One controller, not 20 asynchronous ones. ``groups`` and ``hidden`` (64; the paper's groups came from
    rules by hand, see :func:`~simdev.baselines.rl._groups.coarse_groups`). Accelerators only, as all placers here: no
    CPU among the devices. A group's embedding also has its time, memory and place in the graph, and kinds are hashed
    into buckets. Advantages are divided by their standard deviation. Logits stay within ``reach`` (a hyperbolic
    tangent, from HDP's program), which keeps the policy exploring. What fails costs more the less it fits.
    """
    return search(
        learner([problem], **with_policy_settings(params, policy)), problem, rng=rng, budget=budget, policy=policy
    )
