"""The bound of a saturated pipeline, beside steady times that are no whole numbers."""

import numpy as np
import pytest
from drawn import machine, problem

from simdev.analysis.steady import steady_bound
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.sim.pipeline import simulate_pipeline


def one_op(ns, n_devices):
    b = GraphBuilder("one")
    b.op("o", "op")
    return problem(b, machine(n_devices), [ns])


@pytest.mark.parametrize("ns, n_devices, bound", [(3, 2, 1), (4, 2, 2), (10, 3, 3), (11, 3, 3), (5, 1, 5)])
def test_the_bound_is_rounded_down(ns, n_devices, bound):
    p = one_op(ns, n_devices)
    placement = Placement(np.zeros(1, int), replica_of=np.zeros(n_devices, int))
    report = simulate_pipeline(p, placement, 8 * n_devices)
    assert report.steady_ns == ns / n_devices
    assert steady_bound(p).ns == bound <= report.steady_ns
