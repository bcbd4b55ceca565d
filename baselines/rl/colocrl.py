"""ColocRL (Mirhoseini et al. 2017): a sequence-to-sequence network names the device of each group of ops."""

from __future__ import annotations

from simdev.baselines.rl._case import device_columns, make_case
from simdev.baselines.rl._groups import coarse_groups
from simdev.baselines.rl._train import Learner, search, with_policy_settings
from simdev.placer import placer

DEFAULTS = {"groups": 64, "hidden": 64, "samples": 10, "rate": 0.003, "entropy": 0.0, "policy": ""}


def learner(problems, *, groups, hidden, samples, rate, entropy, devices=0) -> Learner:
    """What ``simdev train`` and the placer share; ``devices`` at most, 0: what ``problems`` need."""
    from simdev.baselines.rl._colocrl import learner_functions

    settings = {
        "groups": groups, "hidden": hidden, "samples": samples, "rate": rate, "entropy": entropy,
        "devices": device_columns(problems, devices),
    }  # fmt: skip
    functions = learner_functions(**settings)

    def case(problem):
        return make_case(problem, coarse_groups(problem, groups), rows=groups, columns=settings["devices"])

    return Learner("colocrl", 1, settings, case, functions.init, functions.step, functions.greedy)


@placer(
    "colocrl", version=1, family="learned", searches=True, defaults=DEFAULTS, learner=learner,
    source="Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning, ICML 2017",
)  # fmt: skip
def colocrl(problem, *, rng, budget, policy, **params):
    """Sample ``samples`` placements at a time, and follow the policy gradient of ``-sqrt(step time)``.

    The paper's: groups of ops by single readers; group embeddings of kinds (learned), output shapes and neighbours; an
    LSTM encoder; an attentional LSTM decoder, fed the learned embedding of the device it named last; REINFORCE with a
    moving average as baseline; failing placements given a large constant, and left out once the policy has learned.
    """
    return search(
        learner([problem], **with_policy_settings(params, policy)), problem, rng=rng, budget=budget, policy=policy
    )
