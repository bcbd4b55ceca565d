import pytest


@pytest.fixture(scope="session")
def tiny_job():
    pytest.importorskip("torch")
    from simdev.planners.testing import small_job

    return small_job()


@pytest.fixture(scope="session")
def tiny_evaluator(tiny_job):
    from simdev.planners import Evaluator

    return Evaluator(tiny_job)
