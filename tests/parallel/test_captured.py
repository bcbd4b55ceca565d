"""Captured stages: what the cache keeps, and which stages are the same."""

import gzip
import json
import os
import zipfile
from pathlib import Path

import pytest

from simdev.cli import main as cli
from simdev.errors import InvalidInput
from simdev.files import private
from simdev.graphs.parallel_model import Part
from simdev.parallel import find_model, parallel_models, parse_mesh
from simdev.parallel.capture import kept
from simdev.parallel.capture.matching import check_matching
from simdev.parallel.program import Call, Segment

# kept captures: read back, refused where they were altered, and made anew where nothing may be trusted


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """A kept stage without calls, and its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept.save("name", [Segment("forward", (), 7)], {"parameters": 3})
    return kept.folder() / "name.json.gz"


def test_a_stage_is_read_back(stored):
    assert kept.load("name") == {"parameters": 3, "segments": [Segment("forward", (), 7)]}
    assert kept.load("other") is None


@pytest.mark.parametrize("old, new", [(b'"parameters":3', b'"parameters":0'), (b",7,", b",8,"), (b"\n", b" ")])
def test_an_altered_file_is_captured_anew(stored, old, new):
    text = gzip.decompress(stored.read_bytes())
    assert old in text
    stored.write_bytes(gzip.compress(text.replace(old, new)))
    assert kept.load("name") is None


def test_the_file_of_another_capture_is_captured_anew(stored):
    stored.rename(stored.with_name("other.json.gz"))
    assert kept.load("other") is None


def test_apart_nothing_older_is_loaded(stored):
    with kept.apart():
        assert kept.load("name") is None
        kept.save("name", [], {"parameters": 4})
        assert kept.load("name") == {"parameters": 4, "segments": []}
        place = kept.folder()
    assert not place.exists() and kept.load("name")["parameters"] == 3


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """An archive with the capture ``name`` of one job, beside an empty folder of captures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(kept.APART, raising=False)
    monkeypatch.setattr(kept, "SHIPPED", tmp_path / "captures.zip")
    monkeypatch.setattr(kept, "_index", kept._index.__wrapped__)
    member = kept.packed_model("a job", {}, {"name": '{"segments":[],"parameters":5}'})
    with zipfile.ZipFile(kept.SHIPPED, "w") as archive:
        archive.writestr("a job.xz", member)
        archive.writestr(kept.INDEX, json.dumps({"a job": ["name"]}))
    return kept.SHIPPED


def test_captures_that_ship_are_read_and_the_users_own_before_them(shipped):
    assert kept.has("name") and kept.load("name")["parameters"] == 5
    assert not kept.has("other") and kept.load("other") is None
    kept.save("name", [], {"parameters": 6})
    assert kept.load("name")["parameters"] == 6


def test_a_pipe_among_captures_is_not_opened(shipped):
    kept.folder().mkdir(parents=True, exist_ok=True)
    for name in ("name", "other"):
        os.mkfifo(kept.folder() / f"{name}.json.gz")
    assert kept.load("name")["parameters"] == 5 and kept.load("other") is None
    kept.save("other", [], {"parameters": 6})
    assert (kept.folder() / "other.json.gz").is_fifo() and not kept.has("other")


def test_a_cache_that_may_not_be_searched_keeps_nothing(shipped, monkeypatch):
    kept.save("other", [], {"parameters": 6})
    monkeypatch.setattr(os, "stat", forbidden(os.stat, kept.folder()))
    assert kept.has("name") and kept.load("name")["parameters"] == 5
    assert not kept.has("other") and kept.load("other") is None
    kept.save("other", [], {"parameters": 7})


def forbidden(stat, folder):
    """``os.stat`` that refuses all that is in ``folder``, also to a user who may read everything."""

    def refusing(path, **options):
        if Path(os.fsdecode(path)).parent == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    return refusing


def test_apart_nothing_that_ships_is_loaded(shipped):
    with kept.apart():
        assert not kept.has("name") and kept.load("name") is None


def test_shipped_captures_of_another_job_are_refused(shipped):
    member = kept.packed_model("another job", {}, {"name": '{"segments":[],"parameters":5}'})
    with zipfile.ZipFile(shipped, "w") as archive:
        archive.writestr("a job.xz", member)
        archive.writestr(kept.INDEX, json.dumps({"a job": ["name"]}))
    kept._unpacked.cache_clear()
    with pytest.raises(InvalidInput, match="its digest differs"):
        kept.load("name")


@pytest.mark.slow
def test_a_job_is_packed_with_all_captures_that_its_plan_asks_for(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    from simdev.studies import packed_programs

    monkeypatch.setattr(kept, "SHIPPED", tmp_path / "captures.zip")
    monkeypatch.setattr(kept, "_index", kept._index.__wrapped__)
    small = "gpt-3.6b[width=256,layers=4,heads=4,length=256,vocabulary=1024]"
    only = ["--planner", "megatron", "--microbatch", "1", "--recompute", "none"]
    monkeypatch.setattr(packed_programs, "JOBS", {"tiny": [small, "dgx-a100", "--batch", "8", *only]})
    packed_programs.pack(["tiny"], lambda *_: None)
    names = list(kept._index())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.delenv(kept.APART, raising=False)
    assert len(names) > 3 and all(map(kept.has, names)) and not kept.folder().exists()
    assert any("segments" in json.loads(kept.content(name)) for name in names)


def test_a_cache_that_others_can_write_to_is_refused(stored):
    os.chmod(stored.parent, 0o777)
    with pytest.raises(InvalidInput, match="captures: other users can write"):
        kept.load("name")
    os.chmod(stored.parent, 0o755)
    assert private(stored.parent) == stored.parent


# ranks that call different collectives are found and named


def segment(*calls):
    return Segment(
        "forward", tuple(Call(axis, kind, kind, axes=(axis,), payload_bytes=size) for axis, kind, size in calls)
    )


def test_the_first_difference_is_named():
    one = segment(("tp", "all_reduce", 2048), ("dp_shard", "all_gather", 64))
    check_matching([one], [one], (0, 7), "mine")
    cases = {
        (
            ("tp", "all_gather", 2048),
            ("dp_shard", "all_gather", 64),
        ): "along tp: call 1 is all_reduce of 2,048 bytes on rank 0, and all_gather of 2,048 bytes on rank 7",
        (
            ("tp", "all_reduce", 2048),
            ("dp_shard", "all_gather", 32),
        ): "along dp_shard: call 1 is all_gather of 64 bytes",
        (
            ("tp", "all_reduce", 2048),
        ): "along dp_shard: call 1 is all_gather of 64 bytes on rank 0, and missing on rank 7",
    }
    for calls, words in cases.items():
        with pytest.raises(InvalidInput, match=words):
            check_matching([one], [segment(*calls)], (0, 7), "mine")
    swapped = segment(("dp_shard", "all_gather", 64), ("tp", "all_reduce", 2048))
    words = "different orders, and may wait .*: call 1 is all_reduce along tp on rank 0, and all_gather along dp_shard"
    with pytest.raises(InvalidInput, match=words):
        check_matching([one], [swapped], (0, 7), "mine")
    check_matching([segment(("ep", "all_to_all", 64))], [segment(("ep", "all_to_all", 96))], (0, 7), "mine")


UNEQUAL = """
import torch
import torch.distributed as dist
from torch import nn


def make_step(mesh):
    model = nn.Linear(64, 64).to("cuda")
    x = torch.randn(8, 64, device="cuda")
    group = mesh["dp_replicate"].get_group()

    def step():
        model(x).sum().backward()
        for parameter in model.parameters():
            if dist.get_rank() == 0 or parameter.ndim == 2:
                dist.all_reduce(parameter.grad, group=group)

    return step
"""


def test_a_step_whose_ranks_differ_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(UNEQUAL)
    command = ["simdev", "capture", f"{tmp_path}/mine.py:make_step", "--mesh", "dp_replicate=4", "-o", "out.json.gz"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capsys.readouterr().err
    assert stop.value.code == 2 and len(shown.strip().splitlines()) == 1
    assert "ranks 0 and 3 call different collectives along dp_replicate: call 2 is all_reduce of 256 bytes" in shown
    assert "and missing on rank 3" in shown


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "dp_replicate=2"])
@pytest.mark.parametrize("name", ["gpt", "llama3", "mpt", "small"])
def test_all_ranks_of_shipped_models_call_the_same_collectives(name, mesh):
    pytest.importorskip("torch")
    from simdev.parallel.capture.stage import _capture, segments_of

    mesh = parse_mesh(mesh)
    model = parallel_models()[name]
    if any(axis not in model.axes for axis, _ in mesh.inner):
        pytest.skip(f"{name} does not know all axes of {mesh}")
    sizes = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 128, "vocabulary": 256, "length": 32}
    parameters = {**find_model(name)[1], **{key: value for key, value in sizes.items() if key in find_model(name)[1]}}
    last = mesh.stage_ranks - 1
    programs = [_capture(model, parameters, mesh, Part(2), ("FB", False, False, False), rank) for rank in (0, last)]
    check_matching(*map(segments_of, programs), (0, last), name)
