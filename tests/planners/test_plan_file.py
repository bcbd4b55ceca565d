"""A plan is written, read back, and refused where it is damaged."""

import json
from itertools import islice

import numpy as np
import pytest

from simdev.errors import InvalidInput, UnknownName
from simdev.parallel import Mesh
from simdev.planners import Choice
from simdev.planners.plan_file import is_plan_file, load_plan, make_job, save_plan

MODEL, CLUSTER = "llama3-8b[length=4096]", "dgx-h100[nodes=2]"
CHOICES = [
    Choice(Mesh({"dp_shard": 16}), 2, "full", reduce_each=True),
    Choice(Mesh({"pp": 2, "dp_shard": 4, "tp": 2}), 1, "selective", "interleaved", 2),
    Choice(Mesh({"pp": 2, "dp_shard": 8}), 1, stage_layers=(17, 15)),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_plan_is_read_back(tmp_path, choice):
    if choice.schedule == "interleaved":
        pytest.importorskip("torch")  # whose order of microbatches it is
    job, path = make_job(MODEL, CLUSTER, 64), tmp_path / "plan.json"
    save_plan(path, MODEL, CLUSTER, job, choice, step_time_s=1.5)
    found, again = load_plan(path)
    assert again == choice and found == job and is_plan_file(str(path))


DRAWN = {
    ("llama3-8b[length=32768]", "dgx-h100[nodes=2]", "eager"): {"schedules": ("1f1b", "interleaved", "zero-bubble")},
    ("mixtral-8x7b", "dgx-h100[nodes=2]", "eager"): {"wide": True},
    ("gpt-1.3b", "dgx-a100", "megatron"): {},
    ("deepseek-v2lite", "l40sx8-pcie", "compiled"): {"schedules": ("gpipe", "1f1b")},
}


def test_drawn_plans_are_read_back(tmp_path):
    """200 plans of four jobs: meshes, stages of other depths, schedules, recomputation, gathered parameters."""
    pytest.importorskip("torch")  # whose orders of microbatches some schedules have
    rng, path, kinds = np.random.default_rng(0), tmp_path / "plan.json", set()
    for (model, cluster, framework), options in DRAWN.items():
        job = make_job(model, cluster, 256, framework, **options)
        some = list(islice(job.choices(), 1000))
        for choice in (some[n] for n in rng.integers(len(some), size=50)):
            save_plan(path, model, cluster, job, choice)
            again, found = load_plan(path)
            assert found == choice and again.plan(found) == job.plan(choice)
            kinds |= {*choice.mesh.sizes} | {choice.schedule, choice.recompute, choice.reshard}
    assert kinds >= {
        "pp",
        "dp_replicate",
        "dp_shard",
        "tp",
        "cp",
        "ep",
        "1f1b",
        "interleaved",
        "full",
        "selective",
        "never",
    }


@pytest.mark.parametrize(
    "change, field",
    [
        ({"format": "x"}, "format"),
        ({"version": 2}, "version"),
        ({"batch": "64"}, "batch"),
        ({"batch": True}, "batch"),
        ({"batch": 7}, "microbatch"),
        ({"choice": []}, "choice"),
        ({"model": "evil.py:model"}, "model"),
        ({"model": "/etc/config.json"}, "model"),
        ({"cluster": "mine.toml[nodes=2]"}, "cluster"),
    ],
)
def test_a_damaged_plan_is_one_sentence(tmp_path, change, field):
    path = tmp_path / "plan.json"
    save_plan(path, MODEL, CLUSTER, make_job(MODEL, CLUSTER, 64), CHOICES[0])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidInput, match=rf"plan\.json: {field}"):
        load_plan(path)


def test_names_that_do_not_exist(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(path, MODEL, CLUSTER, make_job(MODEL, CLUSTER, 64), CHOICES[0])
    for name in ("model", "cluster", "framework"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: "nothing"}))
        with pytest.raises((UnknownName, InvalidInput), match="nothing"):
            load_plan(path)
        save_plan(path, MODEL, CLUSTER, make_job(MODEL, CLUSTER, 64), CHOICES[0])


def test_a_model_of_the_users_own_is_passed_by_name(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(path, "my.py:llama", CLUSTER, make_job(MODEL, CLUSTER, 64), CHOICES[0])
    assert load_plan(path, model=MODEL)[1] == CHOICES[0]
