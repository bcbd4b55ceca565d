from functools import partial

import pytest

from simdev.graphs.parallel_model import Part
from simdev.parallel import Mesh, find_model, load_cluster, parse_mesh
from simdev.parallel.capture import resize
from simdev.parallel.capture.stage import capture_stage, captured, is_kept
from simdev.parallel.costs.reserved import record_stage
from simdev.parallel.passes import PIPELINE, STEP
from simdev.parallel.program import NotRepeating
from simdev.planners import Choice, Evaluator, Job

pytest.importorskip("torch")
TINY = "llama3-8b[width=64,layers=2,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32,recompute=full]"
pytestmark = pytest.mark.usefixtures("own_captures")


def all_of(program):
    segments = program.forward, *program.backward, program.finish, *program.split, *dict(program.others).values()
    calls = [segment.calls for segment in segments]
    return calls, program.resident_bytes, program.output_bytes, program.parameters, program.shard_unit


def memory_of(program):
    segments = program.forward, *program.backward, program.finish, *program.split, *dict(program.others).values()
    return [live for segment in segments for live in (segment.live_bytes, *(call.live_bytes for call in segment.calls))]


@pytest.mark.parametrize(
    "mesh, sizes, options, part",
    [
        ("dp_shard=8,tp=2", (2, 4), (STEP,), Part(2)),
        ("dp_shard=32", (2, 16), ("FB",), Part(2)),
        ("dp_shard=8", (16, 32), (STEP, True), Part(2, first=False)),
        ("dp_shard=8,tp=2", (4, 16), (PIPELINE,), Part(2)),
        ("dp_replicate=2,dp_shard=16", (2, 4), (STEP,), Part(2, last=False)),
    ],
)
def test_a_resized_program_is_the_one_that_is_captured(mesh, sizes, options, part, monkeypatch):
    model, parameters = find_model(TINY)
    wanted = capture_stage(model, parameters, parse_mesh(mesh), part, *options)
    asked = []

    def watched(model, parameters, mesh, part, *options):
        asked.append(mesh["dp_shard"])
        return captured(model, parameters, mesh, part, *options)

    monkeypatch.setattr(resize, "captured", watched)
    monkeypatch.setattr(resize, "is_kept", lambda *how: how[2]["dp_shard"] in sizes)
    found = resize.capture_resized(model, parameters, parse_mesh(mesh), part, *options)
    assert set(asked) == set(sizes)
    assert all_of(found) == all_of(wanted)
    assert memory_of(found) == pytest.approx(memory_of(wanted), abs=4)  # the first capture of a process keeps a scalar
    assert wanted.shard_unit == (16 if "tp" in mesh else 32)


@pytest.mark.parametrize("options", [(False, False), (True, False), (False, True)])
def test_a_recording_of_allocations_keeps_the_program_that_a_capture_has(options, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, parameters = find_model(TINY)
    key, mesh, part = tuple(sorted((k, v) for k, v in parameters.items() if k != "layers")), "dp_shard=8", Part(2)
    how = model, key, parse_mesh(mesh), part, STEP, False, *options
    wanted = captured.__wrapped__(*how)
    for file in (tmp_path / "simdev" / "captures").iterdir():
        file.unlink()
    assert not is_kept(*how)
    record_stage(model, tuple(sorted(parameters.items())), parse_mesh(mesh), (True, *options), part)
    assert is_kept(*how)
    found = captured.__wrapped__(*how)
    assert all_of(found) == all_of(wanted) and memory_of(found) == memory_of(wanted)
    assert resize._resized_few(*how) == found  # and nothing is derived


def test_a_plan_takes_as_long_if_its_stages_were_recorded_as_if_they_were_resized(tmp_path, monkeypatch):
    model, parameters = find_model(TINY)
    outcomes = []
    for memory in ("reserved", "allocated"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / memory))
        captured.cache_clear()
        job = Job(model, parameters, load_cluster("dgx-h100"), 16, memory=memory)
        outcomes.append(Evaluator(job).outcome(Choice(Mesh({"dp_shard": 8}), 1, "full", reduce_each=True)))
    recorded, resized = outcomes
    assert recorded == resized and recorded.time_ns > 0


@pytest.mark.parametrize("mesh, sizes", [("dp_shard=2", (1, 2)), ("dp_shard=2,tp=2", (2, 4))])
def test_two_microbatches_determine_larger_ones(mesh, sizes):
    model, parameters = find_model(TINY)
    few = [capture_stage(model, {**parameters, "microbatch": n}, parse_mesh(mesh), Part(2)) for n in (*sizes, 8)]
    found = resize.of_microbatch(few[0], few[1], sizes, 8)
    assert all_of(found) == all_of(few[2]) and all_of(found) != all_of(few[1])
    assert memory_of(found) == pytest.approx(memory_of(few[2]), abs=28)  # see above; 4 bytes become 28 in 8 sequences


def test_a_microbatch_of_one_sequence_may_run_other_kernels():
    model, parameters = find_model(TINY)
    mesh = parse_mesh("dp_shard=2,tp=2")
    few = [capture_stage(model, {**parameters, "microbatch": n}, mesh, Part(2)) for n in (1, 2)]
    with pytest.raises(NotRepeating, match="numbers of calls"):
        resize.of_microbatch(*few, (1, 2), 4)


def test_stages_are_captured_as_they_are_until_two_sizes_are_kept(monkeypatch):
    model, parameters = find_model(TINY)
    kept = []

    def watched(model, parameters, mesh, part, *options):
        kept.append(mesh)
        return captured(model, parameters, mesh, part, *options)

    monkeypatch.setattr(resize, "captured", watched)
    monkeypatch.setattr(resize, "is_kept", lambda *how: how[2] in kept)
    for size in (32, 8, 16):
        resize.capture_resized(model, parameters, Mesh({"dp_shard": size}), Part(2), "FB")
    assert [mesh["dp_shard"] for mesh in kept] == [32, 8, 8, 8, 32]  # the unit of shards is that of the smaller one


def test_sizes_that_do_not_divide_are_captured():
    model, parameters = find_model(TINY)
    mesh = parse_mesh("dp_shard=6")
    wanted = capture_stage(model, parameters, mesh, Part(1), "FB")
    assert all_of(resize.capture_resized(model, parameters, mesh, Part(1), "FB")) == all_of(wanted)


def test_numbers_are_constant_proportional_or_shares():
    assert resize.of_shares(7, 7, 16) == 7
    assert resize.of_shares(10, 20, 16) == 80
    assert resize.of_shares(100 + 48 // 2, 100 + 48 // 4, 16) == 103
    assert resize.of_shares(100 + 48 // 16, 100 + 48 // 24, 4, (16, 24)) == 112
    assert resize.of_shares(80, 120, 4, (16, 24)) == 20
    assert resize._signature("f32[2,8] 5", "f32[4,4] 5", partial(resize.of_shares, ranks=8)) == "f32[8,2] 5"
    for small, large, sizes in ((124, 112, (2, 4)), (103, 102, (16, 24))):
        with pytest.raises(NotRepeating):
            resize.of_shares(small, large, 32, sizes)
    with pytest.raises(NotRepeating):
        resize._signature("a 1", "b 2", partial(resize.of_shares, ranks=8))
