"""Products of linear layers in FP8."""

from dataclasses import replace

import pytest

from simdev.errors import UnknownName
from simdev.parallel import Mesh, Prices, load_cluster
from simdev.parallel.costs.float8 import Float8
from simdev.parallel.program import COMPUTE, Call


def product(m, k, n, kind="mm"):
    half = f"bf16[{m},{k}],bf16[{k},{n}]"
    return Call(COMPUTE, kind, f"{kind}({half})->bf16[{m},{n}]", 2 * m * n * k, 2 * k * (m + n), 2 * m * n)


def test_a_product_becomes_an_fp8_product_and_a_cast():
    call = product(4096, 1024, 2048)
    fp8, cast = Float8("delayed").calls_of(call)
    assert fp8.signature == "_scaled_mm(f8e4m3[4096,1024],f8e4m3[1024,2048])->bf16" and fp8.flops == call.flops
    assert fp8.bytes_read == call.bytes_read // 2  # an FP8 element is half of a 16-bit one
    elements = (4096 * 1024 + 1024 * 2048) // 2
    assert (cast.bytes_read, cast.bytes_written, cast.flops) == (2 * elements, 2 * elements, 0)
    assert Float8("dynamic").calls_of(call)[1].bytes_read == 4 * elements


def test_weights_that_keep_their_cast_are_not_cast_again():
    recipe, tokens = Float8("delayed", tokens=8192), 8192
    forward = replace(product(tokens, 1024, 2048), is_forward=True)
    of_input, of_weight = product(tokens, 2048, 1024), product(2048, tokens, 1024)
    halves = [tokens * 1024, tokens * 2048, tokens * (1024 + 2048)]  # activations among the operands
    for call, activations in zip((forward, of_input, of_weight), halves, strict=True):
        assert recipe.calls_of(call)[1].bytes_read == activations  # half of them, two bytes each
    square = product(tokens, tokens, tokens)
    assert recipe.calls_of(square)[1].bytes_read == 1.5 * tokens**2  # on average over both sorts
    assert recipe.calls_of(replace(square, is_forward=True))[1].bytes_read == tokens**2


@pytest.mark.parametrize("call", [product(4096, 1024, 50257), product(4096, 1024, 32000), product(64, 64, 64, "bmm")])
def test_odd_sides_the_vocabulary_and_attention_stay_in_16_bit(call):
    assert Float8(keep=32000).calls_of(call) == [call]


def test_large_products_are_faster_in_fp8_and_small_ones_are_not():
    cluster, mesh = load_cluster("dgx-h100"), Mesh({"dp_shard": 8})
    large, small = product(16384, 4096, 14336), product(256, 256, 256)
    times = {}
    for float8 in (None, Float8()):
        times[float8 is None] = Prices(cluster, float8=float8).of((large, small), mesh, 0)
    assert 1.3 < times[True][0] / times[False][0] < 2 and times[True][1] < times[False][1]


def test_an_unknown_recipe_is_refused():
    with pytest.raises(UnknownName, match="recipe"):
        Float8("guessed")
