"""Planners that divide layers among stages: the division by enumeration, and what each of them may choose."""

import itertools

import numpy as np
import pytest

from simdev.baselines.parallel._stages import divide
from simdev.planners import PlanBudget, planners


def test_divisions_are_the_best_of_all():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        stages, layers = int(rng.integers(1, 4)), int(rng.integers(3, 7))
        cost = np.cumsum(rng.integers(1, 9, (stages, layers + 1)), axis=1).astype(float)
        cost[rng.random(cost.shape) < 0.15] = np.inf
        every = [
            max(cost[s, n] for s, n in enumerate(split))
            for split in itertools.product(range(1, layers + 1), repeat=stages)
            if sum(split) == layers
        ]
        slowest, split = divide(cost)
        assert slowest == min(every)
        if np.isfinite(slowest):
            assert sum(split) == layers and slowest == max(cost[s, n] for s, n in enumerate(split))


def test_a_slow_last_stage_gets_fewer_layers():
    cost = np.array([np.arange(9) * 1.0, np.arange(9) + 4.0])
    assert divide(cost) == (6.0, (6, 2))


@pytest.mark.parametrize(
    "name, tensor", [("piper-uniform", (1, 2, 4)), ("pipedream-uniform", (1,)), ("dp-hybrid-uniform", (1,))]
)
def test_what_the_planners_choose(name, tensor, tiny_job, tiny_evaluator):
    choice = planners()[name].plan(tiny_job, rng=np.random.default_rng(0), budget=PlanBudget(tiny_evaluator))
    outcome = tiny_evaluator.outcome(choice)
    assert outcome.fits and choice.mesh["tp"] in tensor
    assert name == "piper-uniform" or choice.recompute == "none"


def test_the_profile_of_even_stages_is_what_was_captured(tiny_job, tiny_evaluator):
    from simdev.baselines.parallel._stages import profile
    from simdev.parallel.mesh import Mesh
    from simdev.planners import Choice
    from simdev.planners.bounds import span_ns

    choice = Choice(Mesh({"pp": 2, "dp_replicate": 2}))
    known, program = profile(tiny_job, PlanBudget(tiny_evaluator), choice), tiny_evaluator.program(choice)
    passes = [span_ns(f) + min(map(span_ns, b)) for f, b in zip(program.forward, program.backward, strict=True)]
    assert known.of("pass_ns")[[0, 1], [3, 3]] == pytest.approx(passes)
    assert known.of("held_bytes")[[0, 1], [3, 3]] == pytest.approx([s.resident_bytes for s in program.stages])
    assert known.replicas == 2 and known.sent_ns[0] > 0 == known.sent_ns[1] and (known.exchange_ns > 0).any()
