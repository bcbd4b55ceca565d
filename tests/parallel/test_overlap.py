import pytest
from drawn import two_streams

from simdev.errors import InvalidInput
from simdev.parallel.costs.overlap import simulate_unrolled


@pytest.mark.parametrize("copies", [1, 2])
def test_a_kernel_beside_a_collective_loses_time_until_the_collective_ends(copies):
    kernel, collective, factor = 9_000, 6_000, 1.5
    found, schedule = simulate_unrolled(two_streams(kernel, collective, copies), factor)
    begin, end = 1 + 1, 1 + 1 + collective  # the collective starts a hop of 1 ns after the first kernel
    lost = (end - begin) * (1 - 1 / factor)
    assert schedule.step_ns == pytest.approx(1 + kernel + lost, abs=2)
    assert (found.problem.costs.op_ns[0][found.is_compute] >= [1] * copies + [kernel] * copies).all()


def test_a_kernel_all_of_which_is_beside_a_collective_takes_the_factor():
    _, schedule = simulate_unrolled(two_streams(10_000, 50_000, 1), 1.2)
    kernel = schedule.op_finish[-1] - schedule.op_start[-1]
    assert kernel == pytest.approx(12_000, rel=1e-3)


def test_without_a_slowdown_nothing_changes_and_bad_factors_are_refused():
    unrolled = two_streams(9_000, 6_000, 1)
    same, schedule = simulate_unrolled(unrolled)
    assert same is unrolled and schedule.step_ns == 9_001
    for factor in (0.9, 11, float("nan")):
        with pytest.raises(InvalidInput, match="slowdown"):
            simulate_unrolled(unrolled, factor)
