"""Results of ops on fake tensors that are repeated: they are PyTorch's own, and nothing else is repeated."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from simdev.parallel.capture import remembered  # noqa: E402

aten = torch.ops.aten


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
