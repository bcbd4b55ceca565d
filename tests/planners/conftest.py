import pytest


@pytest.fixture(scope="session")
def tiny_job():
    pytest.importorskip("torch")
    from simdev.parallel import find_model, load_cluster
    from simdev.planners import Job

    model, parameters = find_model("gpt-3.6b[width=256,layers=6,heads=4,length=256,vocabulary=1024]")
    small = {"ranks": 4, "framework": "megatron", "microbatches": (1, 2), "schedules": ("1f1b",)}
    return Job(model, parameters, load_cluster("dgx-a100"), 8, **small)


@pytest.fixture(scope="session")
def tiny_evaluator(tiny_job):
    from simdev.planners import Evaluator

    return Evaluator(tiny_job)
