"""Models of Hugging Face: found by their configuration, built and parallelised by transformers, nothing downloaded."""

import json
import re
from collections import Counter

import pytest

from simdev.errors import InvalidInput, UnknownName, Unsupported
from simdev.graphs.parallel_model import Part
from simdev.parallel import Plan, find_model, load_cluster, parse_mesh, simulate_plan
from simdev.parallel.capture.stage import capture_stage, few_parts
from simdev.parallel.hugging_face import hugging_face_model
from simdev.parallel.mesh import Mesh
from simdev.parallel.passes import STEP
from simdev.parallel.typed_plan import TypedPlan

LAYERS = 3
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 128,
}  # fmt: skip


def written(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    return str(path)


def llama_parameters(tied):
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    return LAYERS * (attention + 3 * 64 * 128 + 2 * 64) + 64 + 512 * 64 * (1 if tied else 2)


@pytest.fixture(autouse=True)
def library(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def captured(entry, mesh="dp_shard=2", **part):
    model, parameters = find_model(entry)
    whole = model.part(parameters, parameters["layers"])
    return capture_stage(model, parameters, parse_mesh(mesh), Part(**part) if part else whole, order="FB")


def collectives(program):
    calls = (*program.forward.calls, *program.backward[program.ONLY].calls)
    found = {}
    for call in calls:
        if call.is_collective:
            found[call.kind, call.stream] = found.get((call.kind, call.stream), 0) + 1
    return found


def test_a_tied_embedding_counts_once(tmp_path):
    whole = captured(written(tmp_path, tie_word_embeddings=False)).parameters
    tied = captured(written(tmp_path, tie_word_embeddings=True)).parameters
    assert (2 * whole, 2 * tied) == (llama_parameters(False), llama_parameters(True))


def test_flops_are_those_of_the_products(tmp_path):
    model, parameters = find_model(f"{written(tmp_path)}[length=128]")
    products = LAYERS * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 512 * 64
    attention = LAYERS * 14 * 64 * 128  # two products forward; backward four, and the scores once more
    assert model.flops(parameters) == 128 * (6 * products + attention)


def test_collectives_of_fsdp_and_tensor_parallelism(tmp_path):
    path = written(tmp_path, tie_word_embeddings=False, num_hidden_layers=6)
    found = collectives(captured(path, "dp_shard=2,tp=2"))
    # FSDP groups: each layer, the embedding, norm and head together, which stay gathered
    assert found["reduce_scatter", "dp_shard"] == 6 + 2
    assert found["all_gather", "dp_shard"] == 2 * 6 + 3
    # of each layer: two outputs forward, the gradients of five inputs backward; the embedding, the head
    assert found["all_reduce", "tp"] == 7 * 6 + 2


@pytest.mark.parametrize("kind, unread", [("llama", 1), ("olmo2", 0)])  # OLMo 2 normalises the last product's result
def test_a_compiled_layer_keeps_what_its_backward_pass_reads(tmp_path, kind, unread):
    path = written(tmp_path, model_type=kind, architectures=None)
    live = {}
    for framework in ("eager", "compiled"):
        typed = TypedPlan(f"{path}[length=32,recompute=selective]", "dgx-h100", "dp_shard=8", framework=framework)
        plan = typed.plan
        stage = capture_stage(plan.model, plan.parameters_of(0), parse_mesh("dp_shard=2"), plan.parts[0], order="FB")
        live[framework] = stage.forward.live_bytes
    assert live["eager"] - live["compiled"] == unread * LAYERS * 2 * 32 * 64


def test_fields_of_the_configuration_and_sequences_follow_in_brackets(tmp_path):
    model, parameters = find_model(f"{written(tmp_path)}[num_hidden_layers=5,length=32]")
    assert (parameters["layers"], parameters["length"]) == (5, 32)
    assert find_model(str(tmp_path))[1]["layers"] == LAYERS
    assert find_model("transformers:LlamaForCausalLM[num_hidden_layers=2,hidden_size=64]")[1]["layers"] == 2


def test_what_a_configuration_derives_fits_the_fields_in_brackets(tmp_path):
    """The width of a head follows from that of the model, unless the file gives it."""
    alone, _ = find_model(written(tmp_path, hidden_size=32))
    model, _ = find_model(f"{written(tmp_path)}[hidden_size=32]")
    assert model.function.parameters == alone.function.parameters
    model, _ = find_model(f"{written(tmp_path, head_dim=16)}[hidden_size=32]")
    assert model.function.parameters > alone.function.parameters


def test_fields_of_an_inner_configuration_follow_with_a_dot():
    name = "transformers:LlavaForConditionalGeneration"
    config = json.loads(find_model(f"{name}[text_config.num_hidden_layers=2,length=32]")[0].function.config)
    assert config["text_config"]["num_hidden_layers"] == 2
    for field, message in (
        ("vision_config.hidden_sze", "'vision_config.hidden_sze'; did you mean 'hidden_size'"),
        ("visin_config.hidden_size", "unknown configuration 'visin_config'; did you mean 'vision_config'"),
    ):
        with pytest.raises(UnknownName, match=message):
            find_model(f"{name}[{field}=64]")


def test_an_id_is_looked_up_in_the_cache_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidInput, match="nothing is downloaded"):
        find_model("meta-llama/Llama-3.1-70B")
    snapshot = tmp_path / "models--meta-llama--Llama-3.1-70B" / "snapshots" / "000"
    snapshot.mkdir(parents=True)
    written(snapshot)
    assert find_model("meta-llama/Llama-3.1-70B")[1]["layers"] == LAYERS


def test_mixed_layers_repeat_by_their_period():
    kinds = (0, 0, 0, 0, 0, 1) * 10 + (0, 0)
    few, more = few_parts(Part(62, kinds=kinds))
    assert [part.layers for part in few] == [8, 14] and more == 9
    assert few[0].kinds == (0, 0, 0, 0, 0, 1, 0, 0)
    dense_first = (0,) * 3 + (1,) * 58
    few, more = few_parts(Part(61, kinds=dense_first))
    assert [part.layers for part in few] == [6, 7] and more == 55
    assert few_parts(Part(4)) == ((Part(4),), 0)
    assert few_parts(Part(5)) == ((Part(3), Part(4)), 2)


@pytest.mark.long
def test_a_stretched_period_is_the_whole_capture(tmp_path):
    pattern = (["sliding_attention"] * 2 + ["full_attention"]) * 4
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3_text", "num_hidden_layers": 12, "intermediate_size": 128,
        "vocab_size": 512, "sliding_window": 16, "layer_types": pattern, **sizes}), encoding="utf-8")  # fmt: skip
    model, parameters = find_model(f"{path}[length=64]")
    from simdev.parallel.capture.stage import captured as whole

    part = model.part(parameters, 12)
    assert few_parts(part)[1] > 0
    key = tuple(sorted((name, value) for name, value in parameters.items() if name != "layers"))
    mesh = parse_mesh("dp_shard=2,tp=2")
    one, other = capture_stage(model, parameters, mesh, part), whole(model, key, mesh, part, STEP)
    assert one.parameters == other.parameters and one.resident_bytes == other.resident_bytes
    assert one.forward == other.forward and one.backward == other.backward


def test_pipeline_stages_hold_their_part(tmp_path):
    path = written(tmp_path, tie_word_embeddings=True)
    first = captured(path, "tp=2", layers=2, first=True, last=False)
    last = captured(path, "tp=2", layers=2, first=False, last=True)
    layer = (llama_parameters(True) - 64 - 512 * 64) // LAYERS
    norms = 2 * 2 * 64  # on each rank of tp
    half = (2 * (layer - 128) + 512 * 64) // 2 + norms
    assert (first.parameters, last.parameters) == (half, half + 64)
    assert first.output_bytes == 128 * 64 * 2


def test_a_plan_is_simulated(tmp_path):
    model, parameters = find_model(f"{written(tmp_path)}[recompute=full,num_hidden_layers=2]")
    plan = Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("pp=2,dp_shard=2,tp=2"), 2)
    report = simulate_plan(plan)
    assert report.step_ns > 0 and report.fits


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"model_type": "unknown"}, UnknownName, "unknown"),
        ({"hidden_size": "8192"}, InvalidInput, "hidden_size"),
        ({"num_attention_heads": 6}, InvalidInput, "64|hidden|divisible|multiple"),
    ],
)
def test_what_transformers_refuses_is_one_sentence(changes, error, message, tmp_path):
    with pytest.raises(error, match=message):
        find_model(written(tmp_path, **changes))


def test_an_axis_without_a_plan_is_not_offered():
    entry = (
        "transformers:BertForMaskedLM[num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=128]"
    )
    model, parameters = find_model(entry)
    assert model.axes == ("dp_replicate", "dp_shard")
    assert any("tensor" in note for note in model.notes) and any("pipeline" in note for note in model.notes)
    with pytest.raises(InvalidInput, match="not parallelised along it"):
        Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("tp=8"))


def test_heads_that_do_not_divide_are_named(tmp_path):
    model, parameters = find_model(written(tmp_path))
    with pytest.raises(InvalidInput, match="num_key_value_heads.*2 does not divide by 4"):
        Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("tp=4,dp_shard=2"))


def test_a_captured_step_has_its_mesh():
    with pytest.raises(Unsupported, match="captured"):
        find_model("step.npz")


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": ["llama"]}, "model_type: expected a text, got ['llama']"),
        ({"model_type": {}}, "model_type: expected a text"),
        ({"model_type": "llama", "num_hidden_layers": 10**8}, "num_hidden_layers: 100000000 is too large"),
        ({"model_type": "llama", "text_config": {"n_layer": 10**12}}, "n_layer: 1000000000000 is too large"),
        ({"model_type": "llama", "num_local_experts": 10**7}, "num_local_experts: 10000000 is too large"),
        ({"model_type": "llama", "hidden_size": 10**12}, "hidden_size: 1000000000000 is too large; at most 2147483648"),
        ({"model_type": "llama", "layer_types": ["x"] * (1 << 17)}, "layer_types: 131072 entries; at most 65536"),
    ],
)
def test_numbers_that_no_model_has_are_refused_before_anything_is_built(config, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=re.escape(message)):
        find_model(str(path))


def test_numbers_of_real_configurations_are_accepted():
    from simdev.parallel.hugging_face import check_numbers

    real = {"vocab_size_per_layer_input": 262_144, "num_hidden_layers": 126, "rope_theta": 1e12, "eos_token_id": -1}
    more = {"max_position_embeddings": 10_485_760, "num_experts": 384, "use_cache": True, "block_size": 131_072}
    check_numbers(real | more, "config.json")


@pytest.mark.parametrize(
    "name", ["Llama 3.2 1B", "Gemma 3 1B", "Qwen3 30B-A3B", "GPT-OSS 20B", "BERT large", "T5 large"]
)
def test_parameters_are_those_of_the_published_model(name):
    from simdev.parallel.hugging_face import TransformersModel, configuration
    from simdev.studies.any_model import published

    entry = published()[name]
    model = TransformersModel(name, *configuration(entry["config"], {}, name, ""))
    assert sum(parameter.numel() for parameter in model.build().parameters()) == entry["parameters"]


def test_a_model_without_a_decoder_gets_its_own_inputs(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 2,
        "max_position_embeddings": 32, **sizes}), encoding="utf-8")  # fmt: skip
    program = captured(str(path), "dp_shard=2")
    assert collectives(program)["reduce_scatter", "dp_shard"] == 2 + 2  # layers, tied embedding and head, the others


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # Gemma multiplies partial embeddings: DTensor reduces inside
def test_collectives_of_the_library_are_those_of_the_capture(tmp_path, kind):
    from simdev.studies import any_model

    given = {"tie_word_embeddings": False}
    if kind == "gemma2":
        given |= {"model_type": kind, "architectures": ["Gemma2ForCausalLM"], "head_dim": 16}
    model, parameters = find_model(f"{written(tmp_path, **given)}[length=32]")
    mesh = parse_mesh("dp_shard=2,tp=2")
    part = model.part(parameters, parameters["layers"])
    program = capture_stage(model, parameters, mesh, part, order="FB")
    ours = {kind: 0 for kind, _ in any_model.collectives(program)}
    for (kind, _), number in any_model.collectives(program).items():
        ours[kind] += number
    assert any_model.collectives_of_the_library(model, parameters, mesh) == ours
    row = {
        "stated": 2,
        "buffers": 1,
        "library": 1,
        "captured": 1,
        "flops": 100.0,
        "captured_flops": 102,
        "collectives": {"": [1, 2]},
    }
    assert any_model.verdicts(row) == {"parameters": True, "FLOPs": False, "collectives": False}


def test_latent_attention_is_the_kernel_that_a_gpu_chooses():
    """Its values are narrower than its queries, which FlashAttention does not take."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 128, "q_lora_rank": 32}
    config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2,
        "first_k_dense_replace": 2, "kv_lora_rank": 32, **sizes}  # fmt: skip
    model, parameters = hugging_face_model(config, {"length": 32}, "deepseek")
    program = capture_stage(model, parameters, Mesh({}), model.part(parameters, 2), order="FB")
    calls = (*program.forward.calls, *program.backward[-1].calls)
    attention = Counter(call.kind for call in calls if "attention" in call.kind)
    name = "_scaled_dot_product_efficient_attention"
    assert attention == {name: 2, f"{name}_backward": 2}
    counted = sum(call.flops for call in calls if call.kind in ("mm", "bmm") or "attention" in call.kind)
    assert counted == model.function.whole_flops(parameters)


@pytest.mark.parametrize(("kind", "frames"), [("t5", 0), ("whisper", 8)])
def test_an_encoder_and_a_decoder_get_their_inputs_on_one_rank(kind, frames):
    sizes = {"d_model": 64, "vocab_size": 512}
    if kind == "t5":
        cls, sizes = "T5ForConditionalGeneration", {**sizes, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16}
    else:
        heads = {f"{side}_{what}": 4 for side in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
        cls = "WhisperForConditionalGeneration"
        sizes |= {**heads, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": frames, "pad_token_id": 0}
    config = {"model_type": kind, "architectures": [cls], **sizes}
    model, parameters = hugging_face_model(config, {"length": 16}, kind)
    whole = model.part(parameters, parameters["layers"])
    program = capture_stage(model, parameters, Mesh({}), whole, order="FB")
    assert program.parameters == model.function.parameters


@pytest.mark.long
def test_a_short_step_of_several_kinds():
    from simdev.studies.any_model import try_kind

    for kind in ("qwen3", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "smollm3"):
        found = try_kind(kind)
        assert "reduce_scatter dp_shard" in found and "all_reduce tp" in found, found
