import importlib.util
import json
import pickle
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from simdev.cli import main as cli
from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.parallel_model import Part, parallel_model
from simdev.parallel import Mesh, Plan, find_model, load_cluster, parallel_models
from simdev.parallel.capture import kept
from simdev.parallel.costs.reserved import reserved_bytes
from simdev.parallel.models import find_packed, split_size
from simdev.parallel.plan import capture_stages
from simdev.parallel.program import Call, Segment
from simdev.studies.packed_programs import JOBS

MODEL = """
from simdev.graphs.parallel_model import Stage, parallel_model

@parallel_model(
    "mine",
    sizes={"big": {"width": 64}},
    defaults={"width": 16, "layers": 2, "length": 8, "microbatch": 2},
    axes=("dp_shard",),
    flops=lambda p: 6.0 * p["layers"] * p["width"] ** 2 * p["length"],
)
def mine(mesh, part, *, width, layers, length, microbatch):
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(part.layers)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.sum() if part.last else x

    with torch.device("meta"):
        model = Model()
    if "dp_shard" in mesh.mesh_dim_names:
        fully_shard(model, mesh=mesh["dp_shard"])
    return Stage(
        model,
        lambda: (torch.zeros(microbatch, length, width, requires_grad=True),),
        lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    )
"""
ARGUMENTS = ("dgx-h100", "--mesh", "dp_shard=2")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["simdev", "simulate-plan", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code or 0, capsys.readouterr()
    return 0, capsys.readouterr()


def test_a_model_of_a_file_has_sizes_and_parameters(file):
    model, parameters = find_model(f"{file}:mine-big[layers=3]")
    assert model.name == "mine" and parameters["width"] == 64 and parameters["layers"] == 3
    assert "mine" not in parallel_models()


def test_a_plan_of_a_model_of_a_file(file, monkeypatch, capsys):
    pytest.importorskip("torch")
    code, printed = run(monkeypatch, capsys, f"{file}:mine[layers=2]", *ARGUMENTS)
    assert code == 0 and "mine on 2 x dgx-h100" in printed.out


def test_a_file_may_name_its_model_like_a_shipped_one(file):
    shipped, _ = find_model("llama3-8b")
    file.write_text(MODEL.replace('"mine"', '"llama3"'))
    assert find_model(f"{file}:llama3")[0] is not shipped and find_model("llama3-8b")[0] is shipped


@pytest.mark.parametrize(
    "change, name, message",
    [
        (("", ""), "other", "unknown parallel model 'other'.*mine"),
        (("", ""), "mine[colour=1]", "unknown parameter 'colour'"),
        (("", ""), "", "expected NAME"),
        (("@parallel_model", "@str"), "mine", "cannot be imported"),
        (('"layers": 2, ', ""), "mine", "whole number 'layers'"),
        ((MODEL, "x = 1"), "mine", "no such function"),
        ((MODEL, "def"), "mine", "line 1: not Python"),
        (("    return Stage(", "    return str("), "mine", "TypeError"),
        (("    import torch\n", "    return None\n    import torch\n"), "mine", "returned NoneType, not a Stage"),
        (("    import torch\n", "    mesh.nothing\n    import torch\n"), "mine", "AttributeError.*nothing"),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(file, monkeypatch, capsys, change, name, message):
    pytest.importorskip("torch")
    file.write_text(MODEL.replace(*change))
    code, printed = run(monkeypatch, capsys, f"{file}:{name}", *ARGUMENTS)
    assert code == 2 and printed.err.count("\n") == 1
    assert re.search(message, printed.err), printed.err


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidInput, match="nothing.py: no such file"):
        find_model(f"{tmp_path}/nothing.py:mine")


def test_defaults_need_what_plans_read():
    with pytest.raises(InvalidInput, match="'layers'"):
        parallel_model("m", sizes={}, defaults={}, axes=(), flops=lambda p: 1.0)


def test_a_size_may_have_hyphens_and_the_longest_model_wins():
    model, parameters = find_model("qwen3-moe-30b-a3b[layers=2]")
    assert (model.name, parameters["hidden"], parameters["layers"]) == ("qwen3-moe", 768, 2)
    assert find_model("qwen3-moe")[1] == find_model("qwen3-moe-30b-a3b")[1]
    assert split_size("a-b-c-d", ("a", "a-b", "a-b-")) == ("a-b", "c-d") and split_size("ab", ("a",)) == ("", "")
    with pytest.raises(InvalidInput, match="qwen3-moe: unknown size '30b'.*30b-a3b"):
        find_model("qwen3-moe-30b")


def test_a_helper_beside_a_model_is_part_of_its_fingerprint(file, monkeypatch):
    pytest.importorskip("torch")  # its version is part of the fingerprint
    import sys

    from simdev.graphs.parallel_model import Part
    from simdev.parallel import parse_mesh
    from simdev.parallel.capture.kept import fingerprint

    monkeypatch.syspath_prepend(file.parent)
    folder = file.with_name("parts_of_mine")
    folder.mkdir()
    # One is imported at once, one by it, and one only when the model is built.
    helpers = file.with_name("helper_of_mine.py"), folder / "a.py", file.with_name("late_helper.py")
    file.write_text("import helper_of_mine\n" + MODEL + "def later():\n    from late_helper import x\n")
    found = []
    for x, y, z in ((1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)):
        texts = f"from parts_of_mine import a\nx = {x}", f"x = {y}", f"x = {z}"
        for helper, text in zip(helpers, texts, strict=True):
            helper.write_text(text)
        model, parameters = find_model(f"{file}:mine")
        found.append(fingerprint(model, parameters, parse_mesh("dp_shard=2"), Part(2)))
        for name in ("helper_of_mine", "parts_of_mine", "parts_of_mine.a"):
            sys.modules.pop(name, None)
    assert found[0] == found[1] and len(set(found)) == 4


# models whose programs ship packed

WITHOUT = """
import sys

sys.modules.update(torch=None, transformers=None)  # as if they were not installed
from simdev.__main__ import main

main()
"""


def test_a_packed_model_is_planned_without_torch():
    command = [sys.executable, "-c", WITHOUT, "plan", "llama3-8b", "dgx-h100[nodes=4]", "--batch", "256", "--json"]
    done = subprocess.run([*command, "-j", "1"], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    best = found["plans"][0]
    assert best["fits"] and best["plan"]["mesh"]["dp_shard"] == 32
    assert 0.3 < best["mfu"] < 0.6
    assert {plan["plan"]["recompute"] for plan in found["plans"]} >= {"selective", "full"}


def test_what_is_not_packed_is_refused_with_the_remedy():
    model, parameters = find_packed("llama3-8b", {})
    with pytest.raises(InvalidInput, match=r"do not cover this plan; to capture it: pip install 'simdev\[capture\]'"):
        find_packed("llama3-8b", {"length": 4096})
    cluster = load_cluster("dgx-h100")
    for mesh in ({"dp_shard": 4, "tp": 2}, {"dp_shard": 1}, {"dp_shard": 24}):
        with pytest.raises(InvalidInput):
            Plan(model, parameters, replace(cluster, nodes=3), Mesh(mesh), 2, reduce_each=True)
    with pytest.raises(Unsupported, match="only packed programs"):
        model.function(None, None)


def test_padded_programs_are_packed_by_their_number_of_shards():
    model, parameters = find_packed("vit-l", {"microbatch": 8})
    cluster = replace(load_cluster("dgx-h100"), nodes=0)

    def plan(shards):
        return Plan(model, parameters, cluster, Mesh({"dp_shard": shards}), 2, reduce_each=True)

    elements = {shards: shards * capture_stages(plan(shards), {})[0].parameters for shards in (8, 16, 32, 64)}
    head = 1024 + 1  # weights and bias of a class, of which there are 29,593: 29,600, but for 64 shards 29,632
    assert elements[8] == elements[16] == elements[32] == elements[64] - 32 * head
    assert reserved_bytes(plan(64))[0].reserved < reserved_bytes(plan(8))[0].reserved
    for shards in (2, 4, 128):
        with pytest.raises(InvalidInput, match="do not cover this plan"):
            plan(shards)
    whole, parameters = find_packed("deepseek-v3", {})
    assert Plan(
        whole, parameters | {"recompute": "full"}, cluster, Mesh({"dp_shard": 32, "ep": 8}), 4, reduce_each=True
    )


def test_a_published_step_is_planned_from_its_packed_programs(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "diffusers" else found(name))
    model, parameters = pickle.loads(pickle.dumps(find_model("flux", packed=True)))  # as workers get it
    assert parameters["layers"] == 57 == len(model.kinds(parameters)) and not model.pipeline
    assert model.precision(Mesh({"dp_shard": 8})) == "mixed" and model.precision(Mesh({})) == "float32"
    plan = Plan(
        model, parameters | {"recompute": "full"}, load_cluster("dgx-h100"), Mesh({"dp_shard": 8}), 4, reduce_each=True
    )
    assert 8 * capture_stages(plan, {})[0].parameters >= 11_901_408_320
    with pytest.raises(InvalidInput, match="do not cover this plan"):
        replace(plan, parameters=parameters | {"recompute": "none"})


def test_a_damaged_archive_is_refused(tmp_path, monkeypatch):
    for name, message in (("llama3-8b", "corrupted"), ("mine", "its digest differs"), ("old", "of format 0, not")):
        path = tmp_path / f"{name}.zip"
        member = kept.packed_model("llama3-8b" if name == "mine" else name, {"format": 0}, {"a": "{}"})
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}.xz", member[:-20] if name == "llama3-8b" else member)
        monkeypatch.setattr(kept, "PACK", path)
        with pytest.raises(InvalidInput, match=message):
            find_packed(name, {})


def test_programs_are_packed_as_they_were_captured(tmp_path, monkeypatch):
    segment = Segment("forward", (Call("compute", "mm", "f32[2,3]", 12, waits=(("dp_shard", 1),), live_bytes=8),), 8)
    place = kept.place({"microbatch": 1}, Mesh({"dp_shard": 2}), Part(3))
    text = kept.stage_text([segment], {"parameters": 6})
    monkeypatch.setattr(kept, "PACK", tmp_path / "packed.zip")
    with zipfile.ZipFile(kept.PACK, "w") as archive:
        archive.writestr("mine.xz", kept.packed_model("mine", {"accumulates": True}, {place: text}))
    packed = kept.Packed("mine")
    model = SimpleNamespace(function=packed)
    found = kept.find(model, {"microbatch": 1}, Mesh({"dp_shard": 2}), Part(3))
    assert found == {"segments": [segment], "parameters": 6} and packed.accumulates
    assert found["segments"][0].calls[0].live_bytes == 8
    with pytest.raises(InvalidInput, match="do not cover"):
        kept.find(model, {"microbatch": 2}, Mesh({"dp_shard": 2}), Part(3))


OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in kept.packed_names() if name != "llama3-8b"]


@pytest.mark.parametrize("name", [pytest.param("llama3-8b", marks=pytest.mark.slow), *OTHERS])
def test_packed_programs_are_those_that_are_captured_today(name, tmp_path, monkeypatch):
    """One program and its allocations of each model, captured anew."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from simdev.studies.packed_programs import MODELS, first_stage

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = list(first_stage(name, MODELS[name]))
    assert len(found) == 2
    for place, text, _ in found:
        assert kept.Packed(name).text(place) == text


@pytest.mark.parametrize("name", JOBS)
def test_captures_that_ship_are_those_of_todays_code(name, tmp_path, monkeypatch):
    """After a change of the code that captures, ``simdev study packed`` with the job's name packs them again."""
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13.0"):
        pytest.skip("the captures that ship are those of PyTorch 2.13.0")
    from simdev.parallel.capture.stage import captured
    from simdev.planners import Choice, Job
    from simdev.planners.estimate import captures_are_kept

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(kept.APART, raising=False)
    model, parameters = find_model(JOBS[name][0])
    job = Job(model, parameters, load_cluster(JOBS[name][1]), 1024)
    assert captures_are_kept(job, Choice(Mesh({"dp_shard": job.ranks}), 1, "full")), f"simdev study packed '{name}'"
    key = tuple(sorted({**parameters, "microbatch": 1, "recompute": "full"}.items()))
    key = tuple(pair for pair in key if pair[0] != "layers")
    how = model, key, Mesh({"dp_shard": 2}), model.part(parameters, 3), "FBFBFB"
    shipped = captured.__wrapped__(*how)
    with kept.apart():
        assert captured.__wrapped__(*how) == shipped


@pytest.mark.slow
def test_a_packed_plan_is_the_plan_of_pytorch(tmp_path, monkeypatch):
    """To the nanosecond and to the byte, on eight shards, which were not packed."""
    pytest.importorskip("torch")
    from simdev.planners import Choice, Evaluator, Job

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choice = Choice(Mesh({"dp_shard": 8}), 1, "selective", reduce_each=True)
    cluster = load_cluster("dgx-h100")
    live, packed = (
        Evaluator(Job(model, parameters, cluster, 1024)).outcome(choice)
        for model, parameters in (find_model("llama3-8b"), find_packed("llama3-8b", {}))
    )
    assert live == packed and live.reserved_bytes
