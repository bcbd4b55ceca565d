"""MODEL.md is complete: a simulator written from its text alone agrees with the engines in every field."""

import numpy as np
import pytest
from plain_simulator import simulate_plainly

from simdev.placers.testing import random_placement, random_problem
from simdev.sim import simulate


@pytest.mark.parametrize("block", range(4))
def test_the_text_decides_every_field_of_a_schedule(block):
    for seed in range(50 * block, 50 * block + 50):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng)
        placement = random_placement(rng, problem)
        schedule = simulate(problem, placement)
        for name, expected in simulate_plainly(problem, placement).items():
            found = getattr(schedule, name)
            found = found.tolist() if isinstance(found, np.ndarray) else found
            assert found == expected, f"seed {seed}, {problem.rules}: {name}"
