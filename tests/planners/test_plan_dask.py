"""Plans evaluated on a Dask cluster."""

import pytest

from simdev.planners import Evaluator


def test_a_cluster_gives_the_same_outcomes_and_estimates(tiny_job, tiny_evaluator):
    pytest.importorskip("distributed")
    from distributed import LocalCluster

    from simdev.bench.dask_cluster import dask_executor

    choices = list(tiny_job.choices())[:6]
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": True, "dashboard_address": None}
    with LocalCluster(**options) as cluster, dask_executor(cluster.scheduler_address) as executor:
        with Evaluator(tiny_job, executor=executor) as away:
            assert list(away.outcomes(choices)) == list(tiny_evaluator.outcomes(choices))
            assert list(away.estimates(choices)) == list(tiny_evaluator.estimates(choices))
