"""Stages that are not captured: programs for other numbers of ranks, and results of ops that are repeated."""

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

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from simdev.parallel.capture import remembered  # noqa: E402

aten = torch.ops.aten
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


# results of ops on fake tensors that are repeated: they are those of PyTorch, and nothing else is repeated


@pytest.fixture
def fake(monkeypatch):
    """Makes fake tensors, in a mode that is active; nothing is remembered yet."""
    monkeypatch.setattr(remembered, "_RESULTS", {})
    with FakeTensorMode():
        yield lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype)


def meta(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("op", "make"),
    [
        (aten.mm.default, lambda fake: (fake(2, 3), fake(3, 4))),
        (aten.clone.default, lambda fake: (fake(4, 6).t(),)),
        (aten.add.Tensor, lambda fake: (fake(2, 1), fake(3))),
        (aten.native_layer_norm.default, lambda fake: (fake(5, 8), [8], fake(8), fake(8), 1e-5)),
        (aten._foreach_add.Scalar, lambda fake: ([fake(3), fake(2, 2)], 1)),
        (aten._to_copy.default, lambda fake: (fake(3).expand(4, 3),)),
    ],
)
def test_a_repeated_result_is_that_of_pytorch(fake, op, make):
    args = make(fake)
    own = op(*args)
    for _ in range(2):
        out, known = remembered.run(op, args, {})
        assert known.made and type(out) is type(own)
        outs, owns = (list(remembered.tensors_in(one)) for one in (out, own))
        assert [meta(one) for one in outs] == [meta(one) for one in owns]
        storages = {one.untyped_storage()._cdata for one in (*outs, *remembered.tensors_in(args))}
        assert len(storages) == len(outs) + len(list(remembered.tensors_in(args)))
    assert len(remembered._RESULTS) == 1


def test_what_differs_in_anything_that_counts_is_asked_for_again(fake):
    whole = fake(3, dtype=torch.int64)
    kinds = [remembered.run(aten.add.Tensor, (whole, other), {})[0].dtype for other in (1, 1.0, True)]
    assert kinds == [torch.int64, torch.float32, torch.int64]
    torch.set_default_dtype(torch.float64)
    try:
        assert remembered.run(aten.add.Tensor, (whole, 1.0), {})[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    strides = [remembered.run(aten.clone.default, (one,), {})[0].stride() for one in (fake(4, 6), fake(6, 4).t())]
    assert strides == [(6, 1), (1, 4)]
    casts = [
        remembered.run(aten._to_copy.default, (whole,), {"dtype": kind})[0].dtype for kind in (torch.half, torch.int)
    ]
    assert casts == [torch.half, torch.int]


def test_an_op_in_place_returns_the_argument_that_it_overwrites(fake):
    for _ in range(2):
        first, second = fake(3), fake(3)
        out, known = remembered.run(aten.add_.Tensor, (first, second), {})
        assert out is first and not known.made


@pytest.mark.parametrize(
    ("op", "make"),
    [
        (aten.view.default, lambda fake: ((fake(6), [2, 3]), {})),
        (aten.split.Tensor, lambda fake: ((fake(6), 2), {})),
        (aten.add.out, lambda fake: ((fake(6), fake(6)), {"out": fake(6)})),
        (aten.resize_.default, lambda fake: ((fake(6), [12]), {})),
        (aten.empty.memory_format, lambda fake: (([6],), {})),
    ],
)
def test_views_and_other_storages_are_not_repeated(fake, op, make):
    args, kwargs = make(fake)
    assert remembered.run(op, args, kwargs)[1] is None
    assert not remembered._RESULTS


def test_real_tensors_are_computed():
    out, known = remembered.run(aten.add.Tensor, (torch.ones(2), 1), {})
    assert known is None and out.tolist() == [2.0, 2.0]
