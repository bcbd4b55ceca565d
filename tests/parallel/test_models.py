import re

import pytest

from simdev.cli import main as cli
from simdev.errors import InvalidInput
from simdev.graphs.parallel_model import parallel_model
from simdev.parallel import find_model, parallel_models

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
        ((MODEL, "def"), "mine", "cannot be imported: SyntaxError"),
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
