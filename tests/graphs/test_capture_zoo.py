"""A dozen models of tests/zoo.py: parameters exact, FLOPs those of PyTorch's counter; and the ids of packages."""

import importlib.util

import pytest

from simdev.errors import InvalidInput, UnknownName

pytest.importorskip("torch")

DOZEN = """
timm:resnet50 timm:vit_base_patch16_224 timm:beit_base_patch16_224 timm:swin_tiny_patch4_window7_224
torchvision:squeezenet1_1 torchvision:swin_t torchvision:vit_b_16 transformers:GPT2LMHeadModel
transformers:AlbertForMaskedLM transformers:T5ForConditionalGeneration transformers:ViTForImageClassification
diffusers:UNet2DModel
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("target", DOZEN)
def test_parameters_and_flops_of_a_packages_model(target):
    pytest.importorskip(target.partition(":")[0])
    import zoo

    row = zoo.measure(target)
    assert zoo.right(row), row


def test_the_page_of_the_documentation_shows_the_stored_rows():
    import json
    from pathlib import Path

    import zoo

    here = Path(zoo.__file__).parent
    rows = [json.loads(line) for line in (here / "zoo.jsonl").read_text(encoding="utf-8").splitlines()]
    page = here.parent / "docs" / "pages" / "zoo.md"
    assert page.read_text(encoding="utf-8") == zoo.report(rows), "run tests/zoo.py tests/zoo.jsonl --report"


SMALL = "transformers:GPT2LMHeadModel[n_layer=2,n_embd=32,n_head=2,vocab_size=50,n_positions=64]"


def test_prefill_and_decode_keep_a_cache():
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    prefill = capture_package(SMALL, mode="prefill", batch=1, length=16)
    decode = capture_package(SMALL, mode="decode", batch=1, length=16)
    kept = sorted(prefill.tensor_bytes[prefill.tensor_result].tolist())
    assert kept.count(1 * 16 * 32 * 4) >= 2, "keys and values of the prompt leave the step"
    shapes = " ".join(decode.signatures)
    assert "f32[1,2,16,16]" in shapes and "f32[1,2,17,16]" in shapes, "one token is appended to the cache"
    assert prefill.meta["flops"] > 8 * decode.meta["flops"]
    assert prefill.name.endswith("prefill-n_layer=2,n_embd=32,n_head=2,vocab_size=50,n_positions=64")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("target", "options", "error"),
    [
        ("transformers:GPT2LMHedModel", {}, UnknownName),
        ("transformers:GPT2LMHeadModel[layers=3]", {}, InvalidInput),
        ("transformers:GPT2LMHeadModel[3]", {}, InvalidInput),
        ("transformers:GPT2LMHeadModel", {"mode": "sleep"}, UnknownName),
        ("timm:resnet50", {"mode": "decode"}, InvalidInput),
    ],
)
def test_what_a_package_does_not_have(target, options, error):
    from simdev.graphs.capture import capture_package

    with pytest.raises(error):
        capture_package(target, **options)


def test_inputs_that_simdev_does_not_make_up_are_named():
    pytest.importorskip("diffusers")
    from simdev.graphs.capture import capture_package

    with pytest.raises(InvalidInput, match=r"needs .*target_input_ids.* FILE\.py:FUNCTION"):
        capture_package("diffusers:AnimaTextConditioner[num_layers=1]")


def test_time_series_get_inputs():
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    series = capture_package("transformers:InformerModel", batch=2)
    assert series.meta["parameters"] > 0
    assert {"input.0.past_values", "input.0.future_values"} <= set(series.op_names)
