from types import SimpleNamespace

import numpy as np
import pytest

from simdev.parallel.mesh import Mesh
from simdev.studies.plan_rankings import _best_of, rankings
from simdev.studies.training_runs import Prediction, TrainingRun


def prediction(measured, predicted, batch=8, **sizes):
    cluster = SimpleNamespace(name="c")
    plan = SimpleNamespace(cluster=cluster, mesh=Mesh(sizes), parameters={"length": 4}, sequences=batch)
    return Prediction(TrainingRun("vtrain-single", "row", "m", SimpleNamespace(plan=plan), measured), predicted, 0.0)


def test_regret_and_tau_of_a_group():
    group = [
        prediction(100.0, 90.0, dp_replicate=4),
        prediction(110.0, 80.0, dp_replicate=2, tp=2),  # predicted to be the best
        prediction(150.0, 140.0, tp=4),
        prediction(200.0, 210.0, pp=4),
        prediction(50.0, 10.0, batch=4, pp=4),  # another batch: another group, and too small
    ]
    (found,) = rankings(group)
    assert found.plans == 4
    assert found.regret == pytest.approx(0.10)
    assert found.megatron_regret == 0.0  # no model parallelism
    assert found.tau == pytest.approx(4 / 6)  # one of six pairs is in the wrong order
    assert found.median_regret == pytest.approx(0.30)


def test_the_best_of_random_plans_is_the_mean_over_all_draws():
    from itertools import combinations

    regret = np.array([0.0, 0.3, 0.1, 0.7, 0.2])
    every = [min(draw) for draw in combinations(regret, 3)]
    assert _best_of(regret, 3) == pytest.approx(np.mean(every))
