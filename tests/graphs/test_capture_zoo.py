"""A dozen models of tests/tools/zoo.py: parameters exact, FLOPs those of PyTorch's counter; and the ids of packages."""

import importlib.util
import sys

import pytest

from simdev.errors import InvalidInput, UnknownName

pytest.importorskip("torch")

DOZEN = """
timm:resnet50 timm:vit_base_patch16_224 timm:beit_base_patch16_224 timm:swin_tiny_patch4_window7_224
torchvision:squeezenet1_1 torchvision:swin_t torchvision:vit_b_16 transformers:GPT2LMHeadModel
transformers:AlbertForMaskedLM transformers:T5ForConditionalGeneration transformers:ViTForImageClassification
diffusers:UNet2DModel
""".split()
LONG = {"transformers:AlbertForMaskedLM", "transformers:T5ForConditionalGeneration", "diffusers:UNet2DModel"}
MARKED = [pytest.param(target, marks=pytest.mark.long if target in LONG else pytest.mark.slow) for target in DOZEN]


@pytest.mark.parametrize("target", MARKED)
def test_parameters_and_flops_of_a_packages_model(target):
    from simdev.graphs.capture.vision_ops import define_missing_operators

    define_missing_operators()  # torchvision may be there without the PyTorch that its wheel was built for
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
    page = here.parents[1] / "docs" / "pages" / "zoo.md"
    assert page.read_text(encoding="utf-8") == zoo.report(rows), "run tests/tools/zoo.py tests/tools/zoo.jsonl --report"


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


def test_a_model_computes_positions_that_transformers_keeps_for_all_models():
    torch = pytest.importorskip("torch")
    cached = pytest.importorskip("transformers.pytorch_utils").compile_compatible_method_lru_cache
    from simdev.graphs.capture.rewrites import as_on_gpu

    positions = cached(maxsize=2)(torch.zeros)
    kept = positions(3)
    with as_on_gpu():
        assert positions(3) is not kept
    assert positions(3) is kept


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
    import torch

    from simdev.graphs.capture.packages import _check_complete

    class Model(torch.nn.Module):
        def forward(self, hidden_states, und_len, vision_tokens, mask=None):
            return hidden_states

    message = r"needs und_len, vision_tokens, which simdev does not make up.* FILE\.py:FUNCTION"
    with pytest.raises(InvalidInput, match=message):
        _check_complete(Model(), {"hidden_states": None}, "diffusers:Model")
    _check_complete(Model(), dict.fromkeys(("hidden_states", "und_len", "vision_tokens")), "diffusers:Model")


def test_a_field_that_the_default_configuration_leaves_open_is_named():
    pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import unset_fields, with_field

    def unset(target, name):
        return unset_fields(target, ValueError(f"Could not find a `{name}` argument in the config"))

    model = "transformers:Gemma3TextModel"
    assert unset(model, "sliding_window") == [], "it has a default"
    assert unset(model, "final_logit_softcapping") == ["final_logit_softcapping"]
    assert unset(f"{model}[final_logit_softcapping=30]", "final_logit_softcapping") == []
    assert unset("timm:resnet50", "sliding_window") == []
    assert with_field(model, "a") == f"{model}[a=...]"
    assert with_field(f"{model}[b=1]", "a", "2") == f"{model}[b=1,a=2]"


def test_the_width_of_heads_that_a_failing_constructor_reads_is_given():
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    small = "num_hidden_layers=1,hidden_size=64,intermediate_size=64,num_attention_heads=4,num_key_value_heads=2"
    target = f"transformers:MinistralForCausalLM[vocab_size=50,{small}]"
    graph = capture_package(target, length=8)
    assert graph.meta["source"] == f"{target[:-1]},head_dim=16]"
    assert graph.meta["inputs_from"].endswith(
        "(the model has head_dim=16, without which its default configuration fails)"
    )
    assert graph.meta["flops"] == capture_package(f"{target[:-1]},head_dim=16]", length=8).meta["flops"]


def test_all_fields_that_a_configuration_lacks_are_named_at_once(monkeypatch):
    """One is missing when the model is built, the next behind it, the last when its step runs."""
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    class Wide(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.widths = [config.first_width, config.second_width]

        def forward(self, input_ids, labels=None):
            assert self.config.third_width
            return super().forward(input_ids=input_ids, labels=labels)

    monkeypatch.setattr(sys.modules["transformers"], "Wide", Wide, raising=False)  # it replaces itself as it loads
    small = "num_hidden_layers=1,hidden_size=32,intermediate_size=32,num_attention_heads=2,num_key_value_heads=2"
    target = f"transformers:Wide[vocab_size=50,{small}]"
    graph = capture_package(target, length=8)
    fields = "first_width=1,second_width=1,third_width=1"
    assert graph.meta["source"] == f"{target[:-1]},{fields}]" and fields in graph.name
    assert f"its step does not run; it has {fields}, which is made up)" in graph.meta["inputs_from"]
    monkeypatch.setattr("simdev.graphs.capture.remedies.values_that_run", lambda target, unset: None)
    with pytest.raises(InvalidInput, match=r"leaves first_width, second_width, third_width open.*third_width=\.\.\.\]"):
        capture_package(target, length=8)
    given = f"{target[:-1]},first_width=2,second_width=4,third_width=8]"
    assert capture_package(given, length=8).meta["flops"] > 0


def test_a_field_that_a_configuration_lacks_is_named_and_may_be_given():
    """The class of the configuration has no ``num_key_value_heads``, which its model reads: checkpoints bring it."""
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import package_step, unset_fields
    from simdev.graphs.capture.vision_ops import define_missing_operators

    define_missing_operators()
    model = "transformers:MoonshineStreamingForConditionalGeneration"
    if not hasattr(transformers, model.partition(":")[2]):
        pytest.skip("this release of transformers does not have the model")
    small = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,vocab_size=50"
    with pytest.raises(AttributeError) as failed:
        package_step(f"{model}[{small}]")[0]()
    assert unset_fields(model, failed.value) == ["num_key_value_heads"]
    step = package_step(f"{model}[{small},num_key_value_heads=2]")[0]()
    assert step.model.config.num_key_value_heads == 2
    with pytest.raises(UnknownName, match="num_kv_heads"):
        package_step(f"{model}[num_kv_heads=2]")[0]()


def test_a_field_of_a_configuration_inside_another_is_named_with_both_names():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.packages import package_step, unset_fields

    model = "transformers:CLIPModel"
    assert package_step(f"{model}[vision_config.num_hidden_layers=1,text_config.num_hidden_layers=1]")[0]()
    with pytest.raises(UnknownName, match="num_layers"):
        package_step(f"{model}[vision_config.num_layers=1]")[0]()
    with pytest.raises(UnknownName, match="image_config"):
        package_step(f"{model}[image_config.num_hidden_layers=1]")[0]()
    with pytest.raises(AttributeError) as failed:
        _ = transformers.CLIPVisionConfig().rope_theta
    assert unset_fields(model, failed.value) == ["vision_config.rope_theta"]
    small = "n_layers=1,d_model=64,n_heads=2,ffn_config.hidden_size=64,ffn_config.ffn_hidden_size=64,vocab_size=50"
    graph = capture_package(f"transformers:DbrxForCausalLM[{small}]", length=8)
    assert graph.meta["source"].endswith("attn_config.rope_theta=10000.0,attn_config.clip_qkv=1]")


def test_a_field_of_diffusers_that_an_error_names_is_given_in_brackets():
    diffusers = pytest.importorskip("diffusers")
    from simdev.graphs.capture.packages import unset_fields

    assert hasattr(diffusers, "Transformer2DModel")
    error = ValueError("`in_channels` must be provided, `num_layers` need not")
    assert unset_fields("diffusers:Transformer2DModel", error) == ["in_channels"]
    assert unset_fields("diffusers:Transformer2DModel[in_channels=4]", error) == []


def test_images_of_their_own_sizes_are_rows_of_patches():
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    small = "num_hidden_layers=1,hidden_size=32,intermediate_size=32,num_attention_heads=2,num_patches=16"
    graph = capture_package(f"transformers:Siglip2VisionModel[{small}]", batch=2)
    assert {"input()->f32[2,16,768]", "input()->i64[2,2]"} <= set(graph.signatures)


def test_a_field_may_be_a_list():
    from simdev.graphs.capture.packages import TARGET, given_fields

    def fields(target):
        return given_fields(TARGET.fullmatch(target)["fields"], target)

    assert fields('diffusers:Model[axes=[2,3],mask=[[true],[false,true]],rope={"a":1,"b":2},name=x]') == {
        "axes": [2, 3], "mask": [[True], [False, True]], "rope": {"a": 1, "b": 2}, "name": "x",
    }  # fmt: skip
    with pytest.raises(InvalidInput, match=r"'3' is not field=value"):
        fields("diffusers:Model[n=[1,2],3]")


def test_a_video_model_gets_its_frames():
    from types import SimpleNamespace

    from simdev.graphs.capture.transformers_inputs import _frames

    videos, tower = (SimpleNamespace(num_frames=8, base_config_key=key) for key in ("", "vision_config"))
    both = SimpleNamespace(vision_config=tower, base_config_key="")
    assert _frames(videos, {"pixel_values"}) == _frames(both, {"input_ids", "pixel_values"}) == (8,)
    assert _frames(tower, {"pixel_values"}) == () == _frames(SimpleNamespace(base_config_key=""), {"pixel_values"})
    assert _frames(videos, {"pixel_values", "pixel_values_videos"}) == ()


def test_layers_are_left_out_only_where_the_id_says_so():
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    target = "transformers:TimeSeriesTransformerModel"
    graph = capture_package(target, batch=2)
    assert graph.meta["whole_layers"] == {"encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1}
    whole = capture_package(f"{target}[encoder_layerdrop=0.0,decoder_layerdrop=0.0]", batch=2)
    assert "whole_layers" not in whole.meta and whole.meta["flops"] == graph.meta["flops"]
    fewer = capture_package(f"{target}[encoder_layerdrop=0.9,decoder_layerdrop=0.9]", batch=2)
    assert fewer.meta["flops"] < 0.7 * graph.meta["flops"]


def test_layers_of_parts_and_of_planned_models_are_kept():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import keep_layers, layer_drops
    from simdev.parallel.hugging_face import hugging_face_model

    config = transformers.ParakeetCTCConfig()
    assert [(name, share) for _, _, name, share in layer_drops(config)] == [("encoder_config.layerdrop", 0.1)]
    keep_layers(config)
    assert list(layer_drops(config)) == []
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50, "encoder_layerdrop": 0.5}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model, _ = hugging_face_model({"model_type": "m2m_100", **sizes, **heads}, {"length": 8}, "m2m")
    assert list(layer_drops(model.function.build().config)) == []


def test_a_question_has_a_text_for_each_choice():
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    target = "transformers:BertForMultipleChoice[num_hidden_layers=1,hidden_size=64,intermediate_size=64,vocab_size=50]"
    graph = capture_package(target.replace("vocab_size", "num_attention_heads=2,vocab_size"), batch=3, length=8)
    kinds = [graph.kinds[kind] for kind in graph.op_kind]
    inputs = {graph.signatures[graph.op_signature[op]] for op, kind in enumerate(kinds) if kind == "input"}
    assert inputs == {"input()->i64[3,2,8]", "input()->i64[3]"}


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ("(`torch.Tensor` of shape `(batch_size, num_frames, num_channels, height, width)`)", True),
        ("(`torch.Tensor` of shape `(batch_size, num_channels, num_frames, height, width)`)", False),
        ("latents of shape ``(B, F, C, H, W)``", True),
        ("`(batch_size, num_frames)`", False),
    ],
)
def test_a_video_has_its_frames_where_the_model_says(shape, first):
    from simdev.graphs.capture.diffusion_inputs import _frames_first

    def forward(hidden_states):
        pass

    forward.__doc__ = f"hidden_states {shape}"
    assert _frames_first(type("Model", (), {"forward": staticmethod(forward)})) is first


def test_a_flow_map_has_a_noise_level_for_each_frame():
    import inspect

    from simdev.graphs.capture.diffusion_inputs import _conditions

    def forward(hidden_states, timestep, r_timestep):
        """``hidden_states`` of shape ``(B, F, C, H, W)``."""

    model, takes = type("Model", (), {"forward": staticmethod(forward)}), inspect.signature(forward).parameters
    made = _conditions(model, {}, takes, (1, 2, 16, 32, 32))
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {"timestep": (1, 2), "r_timestep": (1, 2)}


def test_inputs_of_a_function(tmp_path):
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n\n\ndef make(model):\n    ids = torch.zeros(2, 24, dtype=torch.int64)\n"
        "    assert model.config.n_layer == 2\n    return {'input_ids': ids, 'labels': ids.clone()}\n"
    )
    graph = capture_package(SMALL, inputs=f"{path}:make")
    rows = {graph.op_names[op]: graph.signatures[graph.op_signature[op]] for op in range(graph.n_ops)}
    assert rows["input.0.input_ids"] == rows["input.0.labels"] == "input()->i64[2,24]"
    assert graph.meta["inputs_from"].startswith("those of")
    assert capture_package(SMALL, batch=2).meta["inputs_from"].startswith("made up")
    for text, message in ((f"{path}:none", "no such function"), (str(path), "expected FILE.py:FUNCTION")):
        with pytest.raises(InvalidInput, match=message):
            capture_package(SMALL, inputs=text)
    with pytest.raises(InvalidInput, match="decides over the batch"):
        capture_package(SMALL, inputs=f"{path}:make", batch=3)


@pytest.mark.parametrize("takes", ["", "model, batch", "*, model"])
def test_a_function_of_inputs_must_take_the_model(tmp_path, takes):
    pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import package_step

    path = tmp_path / "mine.py"
    path.write_text(f"def make({takes}):\n    return {{}}\n")
    with pytest.raises(InvalidInput, match=r"mine\.py.*make\(\) cannot be called .* must take one argument, the model"):
        package_step(SMALL, inputs=f"{path}:make")


def test_a_torchvision_whose_operators_do_not_load_is_imported():
    """In a process of its own: a package called torchvision that describes an operator when it is imported."""
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "torchvision"
        package.mkdir()
        (package / "__init__.py").write_text(
            "import torch\n\n\n@torch.library.register_fake('torchvision::nms')\ndef nms(*args):\n    raise KeyError\n"
        )
        (package / "_C.so").write_bytes(b"of another PyTorch")
        code = (
            "import sys\nfrom simdev.graphs.capture.vision_ops import define_missing_operators\n"
            f"sys.path.insert(0, {folder!r})\nassert define_missing_operators() and define_missing_operators()\n"
            "import torchvision"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_without_a_forward_pass_names_its_parts():
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    with pytest.raises(InvalidInput, match="has no forward pass of its own; capture one of .*BarkSemanticModel"):
        capture_package("transformers:BarkModel")
    part = "transformers:BarkSemanticModel[num_layers=1,num_heads=2,hidden_size=32,input_vocab_size=50]"
    with pytest.raises(InvalidInput, match="Training is not implemented.* capture it with --mode inference"):
        capture_package(part, length=8)
    assert capture_package(part, length=8, mode="inference").meta["flops"] > 0


def test_a_failing_module_names_the_fields_that_it_reads():
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    small = (
        "num_hidden_layers=1,hidden_size=64,num_attention_heads=2,num_key_value_heads=2,vocab_size=50,pad_token_id=0"
    )
    target = f"transformers:GlmImageTextModel[{small}]"
    with pytest.raises(InvalidInput, match=r"rope_parameters, hidden_size, num_attention_heads\)"):
        capture_package(f"{target[:-1]},head_dim=16]", length=8)
    assert capture_package(target, length=8).meta["source"].endswith("head_dim=64]"), "as wide as its sections"
    rope = '{"rope_type":"default","rope_theta":10000,"mrope_section":[4,6,6]}'
    assert capture_package(f"{target[:-1]},rope_parameters={rope}]", length=8).meta["flops"] > 0

    pytest.importorskip("diffusers")
    target = "diffusers:Transformer2DModel"  # its norm has 32 groups
    with pytest.raises(InvalidInput, match=r"in brackets \(Transformer2DModel reads .*norm_num_groups"):
        capture_package(f"{target}[in_channels=4]")
    assert capture_package(f"{target}[in_channels=4,norm_num_groups=2]").meta["flops"] > 0


def test_a_missing_key_names_all_that_are_read():
    from simdev.graphs.capture.packages import keys_read

    def read(features, others):
        features["made"] = 1
        return others["other"] + features["first"] + features["second"] + features.get("third", 0)

    for features, said in ({"second": 1}, "; the keys that its code reads are first, second"), ({"first": 1}, None):
        with pytest.raises(KeyError) as caught:
            read(features, {"other": 1} if said else {})
        assert keys_read(caught.value).startswith(said or "; the keys that its code reads are other")
    with pytest.raises(TypeError) as caught:
        read({"first": None}, {"other": 1})
    assert keys_read(caught.value) == ""


def test_a_model_that_computes_token_by_token_gets_few_tokens():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    def tokens(name, **fields):
        cls = getattr(transformers, name)
        model = cls(cls.config_class(num_hidden_layers=2, hidden_size=32, vocab_size=50, **fields))
        return made_up_inputs(model, 1, None)["input_ids"].shape[1]

    assert tokens("MambaModel", intermediate_size=64, state_size=4) == 16
    chunks = {"num_experts": 2, "num_experts_per_tok": 1, "layer_types": ["linear_attention", "full_attention"]}
    assert tokens("Qwen3NextModel", intermediate_size=32, **chunks) == 512, "its loop over tokens is for decoding"


def test_time_series_get_inputs():
    pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    series = capture_package("transformers:InformerModel", batch=2)
    assert series.meta["parameters"] > 0
    assert {"input.0.past_values", "input.0.future_values"} <= set(series.op_names)


def test_inputs_whose_names_say_what_they_are():
    from simdev.graphs.capture.diffusion_inputs import by_name

    config, latent = (
        {"source_dim": 48, "target_vocab_size": 9, "cross_attention_dim": 24, "sound_in_channels": 6},
        (2, 4, 3, 8, 8),
    )
    sizes = {
        "source_hidden_states": (2, 77, 48),
        "target_input_ids": (2, 77),
        "image_latents": latent,
        "image_embeddings": (2, 24),
        "fps": (2,),
        "controlnet_cond": (2, 3, 24, 64, 64),
        "source_embeds": (2, 77, 48),
        "sound_hidden_states": (2, 77, 6),
        "sound_encoder_hidden_states": (2, 77, 24),
        "indices_latents": (3,),
        "latents_history_2x": latent,
        "img_mask": (2, 77 + 256),
    }
    assert {name: tuple(by_name(name, config, latent).shape) for name in sizes} == sizes
    assert by_name("target_input_ids", config, latent).max() < 9
    assert by_name("img_mask", config, latent).sum() == 2 * 256
    image = {"prior_vq_codebook_size": 5, "patch_size": 2}
    ids, drop = (by_name(f"prior_token_{end}", image, (2, 4, 8, 6)) for end in ("id", "drop"))
    assert ids.shape == drop.shape == (2, 4 * 3) and ids.max() < 5 and not drop.any()
    assert by_name("other_hidden_states", config, latent) is None and by_name("und_len", config, latent) is None


def test_fields_without_a_default_are_named():
    from simdev.graphs.capture.packages import _check_fields

    class Model:
        def __init__(self, width: int, depth: int = 2):
            pass

    _check_fields(Model, {"width": 3}, "diffusers:Model")
    with pytest.raises(InvalidInput, match=r"has no default for width: capture diffusers:Model\[width=...\]"):
        _check_fields(Model, {}, "diffusers:Model")
    with pytest.raises(UnknownName, match="unknown field 'dept'; did you mean 'depth'"):
        _check_fields(Model, {"width": 3, "dept": 4}, "diffusers:Model")


def test_positions_begin_after_the_padding():
    """RoBERTa has 512 positions, of which tokens use those from 2 on: a real step of 512 tokens fails."""
    import torch

    from simdev.graphs.capture.transformers_inputs import _positions

    model = torch.nn.Module()
    model.position_embeddings = torch.nn.Embedding(512, 4, padding_idx=1)
    assert _positions(model) == 510
    model.position_embeddings = torch.nn.Embedding(512, 4)
    assert _positions(model) > 512


def test_a_model_of_several_models_has_a_loss_over_each():
    import torch

    from simdev.graphs.capture.packages import _mean_of

    parts = {"vision": {"last": torch.ones(3), "pooled": torch.ones(2)}, "text": {"last": torch.full((4,), 2.0)}}
    assert _mean_of(parts) == 3 and _mean_of({"last": torch.ones(3), "pooled": torch.full((2,), 5.0)}) == 1


def test_conditions_that_a_configuration_asks_for():
    import torch

    from simdev.graphs.capture.diffusion_inputs import diffusion_inputs

    class Pieces(torch.nn.Module):
        config = {"in_channels": 4, "concat_padding_mask": True, "text_encoder_dim": 6}

        def __init__(self):
            super().__init__()
            self.transformer_blocks = torch.nn.ModuleList([torch.nn.Conv3d(4, 4, 1)])
            self.single_transformer_blocks = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])

        def forward(
            self, hidden_states, indices_latents, latents_clean=None, indices_latents_clean=None, padding_mask=None,
            text_encoder_layers=None, latents_other=None,
        ):  # fmt: skip
            return hidden_states

    class Clips(torch.nn.Module):
        config, encode = {"in_channels": 3, "clip_length": 17}, None

        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv3d(3, 4, 3)

        def forward(self, sample):
            return sample

    made = diffusion_inputs(Pieces(), 2)
    assert [tuple(text.shape) for text in made.pop("text_encoder_layers")] == [(2, 77, 6)] * 3
    video = (2, 4, 2, 32, 32)
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
        "hidden_states": video, "indices_latents": (2,), "latents_clean": video, "indices_latents_clean": (2,),
        "padding_mask": (1, 1, 32, 32),
    }  # fmt: skip
    assert diffusion_inputs(Clips(), 2)["sample"].shape == (2, 3, 34, 128, 128)


def test_patches_and_frames_that_a_configuration_or_an_argument_asks_for():
    import torch

    from simdev.graphs.capture.diffusion_inputs import diffusion_inputs

    class Rows(torch.nn.Module):
        config = {"in_channels": 4, "patch_size": (1, 2, 2)}

        def forward(self, hidden_states, shape_list=None):
            return hidden_states

    class Video3D(torch.nn.Module):
        config = {"in_channels": 4, "chunk_partition": (1, 3, 2)}

        def forward(self, hidden_states, chunk_partition):
            return hidden_states

    made = diffusion_inputs(Rows(), 2)
    assert made["hidden_states"].shape == (2, 256, 4, 1, 2, 2) and made["shape_list"] == [[(1, 16, 16)]] * 2
    made = diffusion_inputs(Video3D(), 1)
    assert made["hidden_states"].shape == (1, 4, 6, 32, 32) and made["chunk_partition"] == (1, 3, 2)


def test_a_spectrogram_has_the_shape_that_a_model_takes():
    """The configurations say little: which axis comes first, and how many bins are stacked, show when a model runs."""
    import torch
    import transformers

    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Listens(torch.nn.Module):
        main_input_name, axis = "input_features", 1

        def __init__(self, width):
            super().__init__()
            self.first = torch.nn.Linear(width, 4)

    class BinsFirst(Listens):
        def forward(self, input_features):
            return self.first(input_features.mT)

    class FramesFirst(Listens):
        def forward(self, input_features, input_features_mask):
            return self.first(input_features) * input_features_mask[..., None]

    def shapes(model, **fields):
        made = hf_inputs(model, transformers.PretrainedConfig(**fields), 2, None)
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    masked = {"input_features_mask": (2, 1000)}
    assert shapes(BinsFirst(80)) == {"input_features": (2, 80, 1000)}
    assert shapes(BinsFirst(20), num_mel_bins=20) == {"input_features": (2, 20, 1000)}
    assert shapes(FramesFirst(20), num_mel_bins=20) == {"input_features": (2, 1000, 20)} | masked

    class Mel(Listens):
        main_input_name = "audio_mel"

        def forward(self, audio_mel, audio_mel_mask):
            return self.first(audio_mel) * audio_mel_mask[..., None].logical_not()

    assert shapes(Mel(128)) == {"audio_mel": (2, 1000, 128), "audio_mel_mask": (2, 1000)}
    inside = transformers.WhisperConfig(num_mel_bins=24)
    assert shapes(FramesFirst(24), audio_config=inside) == {"input_features": (2, 1000, 24)} | masked
    assert shapes(FramesFirst(60), num_mel_bins=20) == {"input_features": (2, 1000, 60)} | masked, "three are stacked"


def test_a_model_of_an_encoder_and_a_decoder_has_their_tokens():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import fill_tokens

    parts = transformers.BertConfig(), transformers.BertConfig(is_decoder=True, pad_token_id=3)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    fill_tokens(config)
    assert config.pad_token_id == config.decoder_start_token_id == 3


def test_the_tuples_of_a_configuration_are_lists_as_in_a_checkpoint():
    pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import package_step

    model = package_step("transformers:ConvNextBackbone[hidden_sizes=[4,4,8,8],depths=[1,1,1,1]]")[0]().model
    assert model.num_features == [4, 4, 4, 8, 8]
    assert isinstance(package_step("transformers:ConvNextBackbone")[0]().model.config.hidden_sizes, list)


def test_a_library_that_a_model_needs_is_named(monkeypatch):
    """The sentence of transformers, without the fields that its model reads."""
    transformers = pytest.importorskip("transformers")
    from simdev.errors import Unsupported
    from simdev.graphs.capture import capture_package

    class Lacks(transformers.GPT2Model):
        def __init__(self, config):
            raise ImportError("Lacks requires the seen library but it was not found in your environment.")

    monkeypatch.setattr(sys.modules["transformers"], "Lacks", Lacks, raising=False)
    with pytest.raises(Unsupported, match="transformers:Lacks needs the package seen: pip install seen"):
        capture_package("transformers:Lacks")


def test_arguments_that_a_model_asks_for_are_made_by_their_documentation():
    """A decision transformer may be called without any argument; another model names the one that it wants."""
    pytest.importorskip("transformers")
    import torch

    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.packages import NeedsArguments, _call

    graph = capture_package("transformers:DecisionTransformerModel[n_layer=1,hidden_size=16]", batch=2)
    assert set(graph.meta["optional_inputs"]) == {"actions", "returns_to_go", "timesteps"}
    assert {f"input.0.{name}" for name in ("states", "actions", "returns_to_go")} <= set(graph.op_names)

    class Model(torch.nn.Module):
        def forward(self, x, waves=None, spectrum=None):
            if waves is None and spectrum is None:
                raise ValueError("give either waves or spectrum")
            raise ValueError("waves of 3 channels")

    with pytest.raises(NeedsArguments, match="may need waves,") as caught:
        _call(Model(), {"x": 1})
    assert caught.value.names == ("waves",)
    with pytest.raises(ValueError, match="waves of 3 channels"):
        _call(Model(), {"x": 1, "waves": 2})


def test_the_smaller_model_that_a_refusal_names_has_each_kind_of_layer():
    """The fourth layer is the first of its kind; words and experts are the larger part of the model."""
    pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import smaller_model

    def smaller(fields, most_bytes=2 << 30):
        target = "transformers:Qwen3NextForCausalLM"
        found = smaller_model(f"{target}[{fields}]", most_bytes)
        return found and found.removeprefix(f"{target}[{fields},")

    assert smaller("moe_intermediate_size=128") == "num_hidden_layers=4,vocab_size=8000,num_experts=32]"
    assert smaller("num_hidden_layers=5,num_experts=4").startswith("vocab_size=8000")
    assert smaller("num_hidden_layers=5", 1) is None
    found = smaller_model("transformers:NllbMoeModel", 2 << 30)
    assert found.startswith("transformers:NllbMoeModel[num_hidden_layers=4,decoder_layers=4,"), "experts in the fourth"
    assert found.endswith("num_experts=32,encoder_ffn_dim=1024,decoder_ffn_dim=1024,d_model=256]")


def test_an_argument_that_a_model_uses_without_being_given_it_is_named():
    import torch

    from simdev.graphs.capture.packages import _call

    class Model(torch.nn.Module):
        def forward(self, x, scale=2, mask=None):
            return x * (mask + 0 if scale == 3 else mask.to(x.dtype) if scale == 2 else x.nothing)

    for scale in (2, 3):
        with pytest.raises(InvalidInput, match=r"NoneType.*may need mask, .*FILE\.py:FUNCTION"):
            _call(Model(), {"x": torch.ones(2), "scale": scale})
    with pytest.raises(AttributeError, match="nothing"):
        _call(Model(), {"x": torch.ones(2), "scale": 1})


def test_fields_of_a_part_that_a_step_calls_are_named():
    import torch

    from simdev.graphs.capture.packages import _call

    class Model(torch.nn.Module):
        config = {"has_clean": False, "has_image": True, "width": 0}

        def __init__(self, part=None):
            super().__init__()
            self.clean = None
            self.image = torch.nn.Identity() if part is None else part

        def forward(self, x, mask=None):
            return self.clean(self.image(x))

    message = r"calls a part that its fields leave out, of clean; .* in brackets, of Model\[has_clean=true\]"
    with pytest.raises(InvalidInput, match=message):
        _call(Model(), {"x": torch.ones(2)})


def test_inputs_that_a_model_refuses_are_not_called_labels():
    import torch

    from simdev.graphs.capture.packages import _call

    class Model(torch.nn.Module):
        def forward(self, x, labels):
            frames, height, width = x.shape

    with pytest.raises(InvalidInput, match=r"expected 3, got 1\)\): what simdev makes up may not fit; .*--inputs FILE"):
        _call(Model(), {"x": torch.ones(2), "labels": torch.ones(2)})


def test_a_text_to_classify_has_one_end():
    import torch

    from simdev.graphs.capture.transformers_inputs import _end

    class Config:
        eos_token_id = 5

    tokens = torch.tensor([[5, 7, 5, 9], [3, 4, 5, 6]])
    _end(tokens, Config)
    assert tokens.tolist() == [[3, 7, 3, 5], [3, 4, 3, 5]]
    Config.eos_token_id = None
    _end(tokens, Config)
    assert tokens.tolist() == [[3, 7, 3, 5], [3, 4, 3, 5]]


def test_the_size_of_images_is_that_of_a_model_of_timm_inside():
    import torch

    from simdev.graphs.capture.transformers_inputs import _image_shape

    class Config:
        image_size, num_channels = 64, 1

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert _image_shape(model, Config) == (1, 64, 64)
    model[0].pretrained_cfg = {"input_size": (3, 336, 336)}
    assert _image_shape(model, Config) == (3, 336, 336)


def test_the_width_of_a_text_is_that_before_its_projection():
    import torch

    from simdev.graphs.capture.diffusion_inputs import diffusion_inputs

    class Model(torch.nn.Module):
        config = {"in_channels": 4, "cross_attention_dim": 6, "text_dim": 5}

        def forward(self, hidden_states, timestep, encoder_hidden_states):
            return hidden_states

    assert diffusion_inputs(Model(), 2)["encoder_hidden_states"].shape == (2, 77, 5)


def test_a_sample_has_the_layout_of_its_family():
    import torch

    from simdev.graphs.capture.diffusion_inputs import diffusion_inputs

    class Patches(torch.nn.Module):
        config = {"in_channels": 16, "guidance_embeds": True, "axes_dims_rope": (2, 3, 3, 4)}

        def __init__(self):
            super().__init__()
            self.x_embedder = torch.nn.Linear(16, 8)

        def forward(self, hidden_states, timestep, img_ids, txt_ids, guidance=None):
            return hidden_states

    class FramesFirst(torch.nn.Module):
        config = {
            "in_channels": 4, "sample_frames": 9, "temporal_compression_ratio": 4, "sample_height": 6,
            "sample_width": 10, "max_text_seq_length": 11, "text_embed_dim": 5,
        }  # fmt: skip

        def forward(self, hidden_states, encoder_hidden_states):
            return hidden_states

    class Rows(torch.nn.Module):
        config = {"in_channels": 3, "latent_channels": 4}
        encode = None

        def forward(self, sample, num_frames=1):
            return sample

    class RowsOfLatents(torch.nn.Module):
        config = {"in_channels": 4}

        def forward(self, hidden_states, num_frames=1):
            return hidden_states

    class Encoder(torch.nn.Module):
        config = {"in_channels": 3, "z_dim": 4}
        encode = None

        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv3d(3, 4, 3)

        def forward(self, sample):
            return sample

    def shapes(model):
        return {name: tuple(tensor.shape) for name, tensor in diffusion_inputs(model, 2).items()}

    patches = {"hidden_states": (2, 1024, 16), "timestep": (2,), "img_ids": (1024, 4), "txt_ids": (77, 4)}
    assert shapes(Patches()) == patches | {"guidance": (2,)}
    video = {"hidden_states": (2, 3, 4, 6, 10), "encoder_hidden_states": (2, 11, 5)}
    assert shapes(type("Video3D", (FramesFirst,), {})()) == video
    assert shapes(type("TemporalDecoder", (Rows,), {})()) == {"sample": (2, 3, 128, 128)}
    assert shapes(type("TransformerTemporal", (RowsOfLatents,), {})()) == {"hidden_states": (2, 4, 32, 32)}
    assert shapes(Encoder()) == {"sample": (2, 3, 9, 128, 128)}
    single = type("CausalConv3d", (torch.nn.Conv2d,), {})
    of_single_frames = Encoder()
    of_single_frames.first = single(3, 4, 3)
    assert shapes(of_single_frames) == {"sample": (2, 3, 1, 128, 128)}

    class Conditioned(torch.nn.Module):
        config = {"in_visual_dim": 4, "patch_size": (1, 2, 2)}

        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(9 * 4, 8)

        def forward(self, hidden_states):
            return hidden_states

    assert shapes(Conditioned()) == {"hidden_states": (2, 2, 32, 32, 9)}, "its latent, a condition and a mask"


def test_an_optional_argument_that_a_model_uses_is_made_up(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    import torch

    from simdev.graphs.capture import capture_package

    class Controlled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = {"ctrl_conditioning_channels": 3}
            self.conv_in, self.hint = torch.nn.Conv2d(4, 8, 3), torch.nn.Conv2d(3, 8, 8, stride=8)

        def forward(self, sample, timestep, controlnet_cond=None, mask=None, other=None):
            found = self.hint(
                controlnet_cond,
            )
            return self.conv_in(sample).mean() + found.mean()

    monkeypatch.setattr(diffusers, "ControlledModel", Controlled, raising=False)
    graph = capture_package("diffusers:ControlledModel")
    assert graph.meta["optional_inputs"] == ["controlnet_cond"]
    assert {"input()->f32[1,4,32,32]", "input()->f32[1,3,256,256]"} <= set(graph.signatures)


def test_shapes_that_the_documentation_gives_by_fields_are_kept():
    import torch

    from simdev.graphs.capture.diffusion_inputs import diffusion_inputs

    class Model(torch.nn.Module):
        config = {"in_channels": 8, "text_dim": 5, "layer_ids": (2, 4), "width": 6}

        def forward(self, hidden_states, encoder_hidden_states, position_ids, other, sound=None):
            """
            Args:
                hidden_states (`torch.Tensor` of shape `(batch_size, image_seq_len, 2 * in_channels + 1)`):
                    Patches.
                encoder_hidden_states (`torch.Tensor` of shape `(batch_size, 1 + len(layer_ids), text_len, text_dim)`):
                    Texts.
                position_ids (`torch.Tensor` of shape `(text_len + image_seq_len, 3)`):
                    Places.
                other (`torch.Tensor` of shape `(batch_size, something, text_dim)`):
                    Nobody knows.
                sound (`torch.Tensor` of shape `(batch_size, text_len, text_dim)`, *optional*):
                    Not needed.
            """
            return hidden_states

    shapes = {name: tuple(tensor.shape) for name, tensor in diffusion_inputs(Model(), 2).items()}
    texts = {"encoder_hidden_states": (2, 3, 77, 5), "position_ids": (77 + 1024, 3)}
    assert shapes == {"hidden_states": (2, 1024, 17), **texts}


def test_the_size_of_an_axis_is_a_sum_of_fields():
    from simdev.graphs.capture.documented_inputs import _evaluated

    fields = {"width": 6, "layers": (2, 4), "name": "text", "rate": 0.5}
    sizes = {"12": 12, "2 * width + 1": 13, "1 + len(layers)": 3, "width // 4 - 1": 0}
    assert {axis: _evaluated(axis, fields) for axis in sizes} == sizes
    for axis in ("words of text", "height", "name", "rate * 2", "width / 2", "width ** 9", "layers * 2", "-width"):
        assert _evaluated(axis, fields) is None, axis
    for axis in ("len(layers, 2)", "max(width, 3)", "width.bit_length()", "layers[0]", "exit()", "(lambda: 3)()"):
        assert _evaluated(axis, fields) is None, axis


def test_tokens_of_sounds_have_a_dimension_of_codebooks():
    pytest.importorskip("transformers")
    import torch
    from transformers import BertConfig

    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    class Sounds(torch.nn.Module):
        main_input_name, config = "input_ids", BertConfig(num_codebooks=5)

        def forward(self, input_ids, labels=None):
            """
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length, num_codebooks) or (batch_size, n)`):
                Codes.
            labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
                Text.
            """

    class Rows(Sounds):
        def forward(self, input_ids, labels=None):
            """
            input_ids (`torch.LongTensor` of shape `(batch_size * num_codebooks, sequence_length)`):
                Codes.
            labels (`torch.LongTensor` of shape `(batch_size, sequence_length, num_codebooks)`, *optional*):
                Codes, too.
            """

    def shapes(model):
        return {name: tuple(tensor.shape) for name, tensor in made_up_inputs(model, 3, 7).items()}

    assert shapes(Sounds()) == {"input_ids": (3, 7, 5), "labels": (3, 7, 5)}
    assert shapes(Rows()) == {"input_ids": (15, 7), "labels": (3, 7, 5)}


@pytest.mark.slow
def test_models_of_codebooks_are_captured():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.build import build_fake
    from simdev.graphs.capture.packages import package_step
    from simdev.graphs.capture.vision_ops import define_missing_operators

    define_missing_operators()
    small = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,vocab_size=50"
    target = f"transformers:CsmBackboneModel[{small},num_key_value_heads=2,intermediate_size=32,head_dim=16]"
    if not hasattr(transformers, "CsmBackboneModel"):
        pytest.skip("this release of transformers does not have the model")
    graph = capture_package(target, batch=2, length=8)
    assert "input()->i64[2,8,32]" in graph.signatures
    made = package_step("transformers:MusicgenForConditionalGeneration", batch=2, length=8)[0]
    inputs = build_fake(made, "musicgen").step.inputs[0]
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    assert shapes == {"input_ids": (2, 8), "labels": (2, 8, 4)}, "a model that has several text parts"


def test_an_argument_of_a_part_has_the_shape_of_its_documentation():
    pytest.importorskip("transformers")
    import torch
    from transformers import BertConfig

    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Decoder(torch.nn.Module):
        main_input_name = "latents"

        def forward(self, latents, unknown, padding_mask=None):
            """
            latents (`torch.Tensor` of shape `(batch_size, hidden_size, frames)`):
                What a codec decodes.
            """
            return latents

    inputs = hf_inputs(Decoder(), BertConfig(hidden_size=24), 3, None)
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {"latents": (3, 24, 77)}


def test_attention_with_a_learned_bias_is_counted_as_on_a_gpu():
    """The kernel computes queries times keys again in its backward pass, a product that the CPU does not repeat."""
    pytest.importorskip("transformers")
    import zoo

    row = zoo.measure(
        "transformers:UMT5EncoderModel[num_layers=1,d_model=32,d_kv=16,num_heads=2,d_ff=32,vocab_size=50]"
    )
    assert row["flops"] == row["pytorch_flops"] > 0


def test_a_large_model_that_reads_shares_of_dropped_layers_is_counted():
    from simdev.graphs.capture.vision_ops import define_missing_operators

    define_missing_operators()
    pytest.importorskip("timm")
    import zoo

    zoo.import_package("timm:vit_tiny_patch16_224")
    target = "timm:vit_tiny_patch16_224[depth=2,drop_path_rate=0.1]"
    assert zoo.recounted(target, zoo.MOST_REAL_BYTES + 1)["pytorch_flops"] > 0
