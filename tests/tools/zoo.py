"""Captures models of timm, torchvision, transformers and diffusers and compares them with PyTorch's own counts.

``python tests/tools/zoo.py OUT.jsonl [PATTERN]`` captures every configuration below that OUT does not have yet, each
in a process of its own, and appends a row per model. ``--memory`` in place of a pattern compares the peak memory of ten
models with what a real step allocates (``--memory SEED COUNT``: of drawn models up to 200 M parameters), ``--maps`` the
device maps of Hugging Face models with Accelerate's, ``--onnx`` the FLOPs of models that PyTorch's exporters write,
``--self-check`` what the self-check of a capture costs.
``python tests/tools/zoo.py OUT.jsonl --draw SEED [COUNT]`` draws 40 models from all that the packages name, captures
them and prints a table: captured, refused (with the sentence), or wrong.
``python tests/tools/zoo.py OUT.jsonl --report zoo.md`` writes the tables.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import resource
import signal
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path

TIMM = """
resnet50 resnext50_32x4d wide_resnet50_2 seresnet50 resnetv2_50 densenet121 vgg16 inception_v4 xception41
efficientnet_b0 efficientnetv2_rw_s mobilenetv3_large_100 mobilenetv4_conv_small regnety_032 convnext_tiny
convnextv2_tiny
vit_base_patch16_224 vit_small_patch14_dinov2 deit3_small_patch16_224 beit_base_patch16_224 eva02_small_patch14_224
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 maxvit_tiny_tf_224 coatnet_0_rw_224 pvt_v2_b2 mobilevit_s
mixer_b16_224 nfnet_f0 ghostnet_100 hrnet_w18 repvgg_b0 cspdarknet53 levit_128s xcit_tiny_12_p16_224 cait_xxs24_224
crossvit_tiny_240 edgenext_small fastvit_t8 volo_d1_224 twins_svt_small poolformer_s12 davit_tiny tiny_vit_5m_224
hiera_tiny_224 dla34
""".split()
TORCHVISION = """
alexnet googlenet inception_v3 squeezenet1_1 shufflenet_v2_x1_0 mnasnet1_0 vit_b_16 swin_t swin_v2_t convnext_tiny
maxvit_t regnet_y_8gf deeplabv3_resnet50 fcn_resnet50 lraspp_mobilenet_v3_large r3d_18 mvit_v2_s raft_small
fasterrcnn_mobilenet_v3_large_fpn retinanet_resnet50_fpn ssdlite320_mobilenet_v3_large
""".split()
TRANSFORMERS = """
GPT2LMHeadModel BertForMaskedLM BertForSequenceClassification RobertaForTokenClassification
DistilBertForQuestionAnswering AlbertForMaskedLM ElectraForPreTraining DebertaV2ForMaskedLM
T5ForConditionalGeneration BartForConditionalGeneration
PegasusForConditionalGeneration MarianMTModel MBartForConditionalGeneration
LlamaForCausalLM[num_hidden_layers=4] MistralForCausalLM[num_hidden_layers=4] Qwen2ForCausalLM[num_hidden_layers=4]
Qwen3ForCausalLM[num_hidden_layers=4] GemmaForCausalLM[num_hidden_layers=4] Gemma2ForCausalLM[num_hidden_layers=4]
PhiForCausalLM[num_hidden_layers=4] GPTNeoXForCausalLM[num_hidden_layers=4] OPTForCausalLM
BloomForCausalLM FalconForCausalLM[num_hidden_layers=4] MixtralForCausalLM[num_hidden_layers=2]
Qwen3MoeForCausalLM[num_hidden_layers=2,num_experts=16] MambaForCausalLM[num_hidden_layers=4]
RwkvForCausalLM[num_hidden_layers=4] ViTForImageClassification DeiTForImageClassification
SwinForImageClassification ConvNextForImageClassification
BeitForImageClassification SegformerForSemanticSegmentation ViTMAEForPreTraining Dinov2Model CLIPModel SiglipModel
BlipForConditionalGeneration WhisperForConditionalGeneration Wav2Vec2ForCTC[layerdrop=0.0]
HubertForCTC[layerdrop=0.0] ASTForAudioClassification LayoutLMForTokenClassification
""".split()
DIFFUSERS = """
UNet2DModel UNet2DConditionModel AutoencoderKL VQModel DiTTransformer2DModel PixArtTransformer2DModel
SD3Transformer2DModel[num_layers=4] UNet1DModel UNet1DModel[extra_in_channels=64] ConsistencyDecoderVAE
""".split()
DRAWN = """
timm:starnet_s1 timm:swinv2_cr_base_224 timm:mobilenetv2_100 timm:resnetaa50 timm:lambda_resnet50ts timm:sehalonet33ts
torchvision:quantized_resnet50 torchvision:vgg13_bn
transformers:T5GemmaForTokenClassification transformers:VoxtralForConditionalGeneration transformers:GraniteModel
transformers:Glm4vModel transformers:SplinterModel transformers:Gemma3nForConditionalGeneration transformers:AlbertModel
transformers:InformerModel transformers:InstructBlipModel transformers:Lfm3VlVisionModel
diffusers:AutoencoderOobleck diffusers:I2VGenXLUNet diffusers:AnimaTextConditioner diffusers:Cosmos3OmniTransformer
timm:tinynet_b timm:resnet50x64_clip_gap timm:mobilevitv2_150
transformers:IBertForTokenClassification transformers:Exaone4_5_ForConditionalGeneration
transformers:VisionTextDualEncoderModel transformers:VipLlavaModel
diffusers:StableAudioProjectionModel diffusers:HiDreamImageTransformer2DModel diffusers:AutoencoderKLMagvit
timm:gernet_l timm:efficientnet_b8 timm:starnet_s100 torchvision:quantized_resnext101_64x4d
transformers:GlmOcrVisionModel transformers:GPTBigCodeForSequenceClassification transformers:PeVideoEncoder
transformers:T5ForSequenceClassification transformers:PerceiverForMaskedLM transformers:Ernie4_5_MoeForCausalLM
diffusers:SkyReelsV2Transformer3DModel diffusers:Kandinsky3UNet
""".split()
MODELS = [
    *(f"timm:{name}" for name in TIMM),
    *(f"torchvision:{name}" for name in TORCHVISION),
    *(f"transformers:{name}" for name in TRANSFORMERS),
    *(f"diffusers:{name}" for name in DIFFUSERS),
    *DRAWN,
]
MEMORY = [  # ten models that run for real within seconds: id, batch, tokens
    ("timm:resnet50", 2, None),
    ("timm:vit_tiny_patch16_224", 4, None),
    ("timm:convnext_atto", 4, None),
    ("timm:efficientnet_b0", 2, None),
    ("torchvision:squeezenet1_1", 4, None),
    ("torchvision:swin_t", 1, None),
    ("transformers:GPT2LMHeadModel[n_layer=4]", 2, 256),
    ("transformers:BertForMaskedLM[num_hidden_layers=4]", 2, 256),
    ("transformers:T5ForConditionalGeneration[num_layers=3]", 2, 256),
    ("transformers:LlamaForCausalLM[num_hidden_layers=2,hidden_size=512,intermediate_size=1024]", 2, 256),
]
MAPS = [  # Hugging Face models that four GPUs of 16 GB train: id, batch, tokens
    ("transformers:GPT2LMHeadModel[n_layer=36,n_embd=1280,n_head=20]", 4, 512),
    ("transformers:LlamaForCausalLM[num_hidden_layers=16,hidden_size=2048,intermediate_size=5632]", 4, 512),
    ("transformers:OPTForCausalLM[num_hidden_layers=24,hidden_size=1024,num_attention_heads=16,ffn_dim=4096]", 8, 512),
    ("transformers:T5ForConditionalGeneration[num_layers=24,num_decoder_layers=24,d_model=1024,d_ff=4096]", 4, 512),
    ("transformers:BartForConditionalGeneration", 8, 512),
    (
        "transformers:BertForMaskedLM[num_hidden_layers=24,hidden_size=1024,num_attention_heads=16,intermediate_size=4096]",
        16,
        512,
    ),
    (
        "transformers:ViTForImageClassification[num_hidden_layers=24,hidden_size=1024,num_attention_heads=16,intermediate_size=4096]",
        64,
        None,
    ),
]
EXPORTED = """
timm:resnet18 timm:mobilenetv3_small_050 timm:efficientnet_b0 timm:convnext_atto timm:vit_tiny_patch16_224
timm:deit_tiny_patch16_224 timm:swin_tiny_patch4_window7_224 timm:mixer_s32_224 timm:regnetx_002 timm:densenet121
torchvision:squeezenet1_1 torchvision:shufflenet_v2_x1_0 torchvision:vgg11 torchvision:googlenet
transformers:GPT2LMHeadModel[n_layer=2] transformers:BertForMaskedLM[num_hidden_layers=2]
transformers:DistilBertForQuestionAnswering[n_layers=2] transformers:ElectraForPreTraining[num_hidden_layers=2]
transformers:LlamaForCausalLM[num_hidden_layers=1,hidden_size=512,intermediate_size=1024]
transformers:ViTForImageClassification[num_hidden_layers=2]
""".split()  # exported to ONNX by both of PyTorch's exporters
NEWEST_OPSET = 25  # the newest that the dynamo exporter writes, by the version converter of onnxscript 0.7
EAGER = " (PyTorch fails with the same message when it runs the model without simdev.)"
MOST_REAL_BYTES = 4 << 30  # of parameters
MOST_PARAMETERS_FOR_MEMORY = 200_000_000
MOST_PEAK_FOR_MEMORY = 6 << 30  # bytes
SECONDS = 600  # processor time after which a model is given up
SECONDS_OF_A_DRAW = 240  # for each half of a drawn one
SHARES = {"timm": 0.3, "torchvision": 0.1, "transformers": 0.4, "diffusers": 0.2}  # of a draw
VERDICTS = ("captured", "not counted", "refused", "wrong")


def measure(target: str) -> dict:
    """Capture one model and count it again with PyTorch."""
    row = captured(target)
    return row | recounted(row.get("captured_as", target), 4 * row["parameters"], row.get("optional_inputs", ()))


def captured(target: str) -> dict:
    """Capture one model: its figures, and what the capture took."""
    import torch

    from simdev.graphs.capture import capture_package

    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    torch.set_num_threads(1)
    graph = capture_package(target)
    seconds, after = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "model": target,
        "ops": graph.n_ops,
        "parameters": graph.meta["parameters"],
        "flops": product_flops(graph),
        "seconds": round(seconds, 2),
        "mb": (after - before) // 1024,
        "values": graph.meta.get("values", "fake"),
        "inputs": ", ".join(
            f"{label.rpartition('.')[2]} {graph.signatures[number].removeprefix('input()->')}"
            for label, number in zip(graph.op_names, graph.op_signature, strict=True)
            if graph.signatures[number].startswith("input()")
        ),
    } | {
        name: graph.meta[key]
        for name, key in (("optional_inputs", "optional_inputs"), ("captured_as", "source"))
        if graph.meta.get(key, target) != target
    }


def import_package(target: str) -> None:
    """Import the package beforehand: its import is not part of the capture."""
    import importlib

    import simdev.graphs.capture.run  # noqa: F401
    from simdev.graphs.capture.vision_ops import define_missing_operators

    package = target.partition(":")[0]
    define_missing_operators()
    module = importlib.import_module(package)
    if package in ("transformers", "diffusers"):
        getattr(module, target.partition(":")[2].partition("[")[0], None)


def product_flops(graph) -> int:
    """FLOPs of the ops that PyTorch's counter knows (products, convolutions, attention) and of grouped products."""
    import numpy as np
    from torch.utils.flop_counter import flop_registry

    known = {packet.__name__ for packet in flop_registry} | {"_scaled_dot_product_flash_attention"}
    known |= {f"{name}_backward" for name in known if "dot_product" in name} | {"_grouped_mm"}
    return int(graph.op_flops[np.array([kind in known for kind in graph.kinds])[graph.op_kind]].sum())


def recounted(target: str, held_bytes: int, optional: list[str] | tuple = ()) -> dict:
    """Parameters and FLOPs of a training step of the model, counted by ``FlopCounterMode``. The model is built for
    real unless its parameters, ``held_bytes``, are too large. It gets the ``optional`` inputs that the capture gave it.

    PyTorch's formula for the backward of grouped convolutions counts every filter as if it read every channel; here it
    is twice the forward's. Attention is counted without its dropout, with which the CPU has no kernel for all of it. A
    grouped product, which the counter does not know, is two FLOPs per number of its result and number of a row.
    """
    import copy

    import torch
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode, conv_backward_flop, sdpa_backward_flop_count, sdpa_flop_count

    from simdev.graphs.capture.packages import package_step
    from simdev.graphs.capture.rewrites import fake_construction, grouped_products
    from simdev.graphs.capture.run import numbers_of_experts
    from simdev.graphs.capture.shadows import MOST_ROUTED, Shadows
    from simdev.graphs.capture.trace import grouped_backward_flops

    def backward(gradient, image, weight, *rest, out_val=None, **kwargs):
        transposed, groups, mask = rest[4], rest[6], rest[7]
        if groups > 1:
            return grouped_backward_flops(image, gradient, weight, transposed, mask)
        return conv_backward_flop(gradient, image, weight, *rest, out_val=out_val)

    def attend(query, key, value, *rest, out_val=None, **kwargs):
        return sdpa_flop_count(query.shape, key.shape, value.shape)

    def attend_backward(gradient, query, key, value, *rest, out_val=None, **kwargs):
        return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)

    def grouped(first, second, *rest, out_val=None, **kwargs):
        return 2 * first.shape[-1] * (out_val.numel() if second.dim() == 3 else out_val[0].numel())

    for formula in (backward, attend, attend_backward, grouped):
        formula._get_raw = True
    torch.manual_seed(0)
    mode, values = FakeTensorMode(allow_non_fake_inputs=True), Shadows()  # of small tensors, which models look at
    if held_bytes > MOST_REAL_BYTES:
        with mode, values, fake_construction():
            step = package_step(target, optional=optional)[0]()
    else:
        step = package_step(target, optional=optional)[0]()
    counted = {"pytorch_parameters": sum(parameter.numel() for parameter in step.model.parameters())}
    mapping = {
        torch.ops.aten.convolution_backward: backward,
        torch.ops.aten._grouped_mm: grouped,
        # the CPU's kernel, which the counter of some versions does not know
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attend,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attend_backward,
    }

    def count(model, inputs):
        counter = FlopCounterMode(display=False, custom_mapping=mapping)
        with grouped_products(), whole_attention() as again, counter:
            step.loss(model, *inputs).backward()
        return counter.get_total_flops() + sum(again)

    if held_bytes > MOST_REAL_BYTES:
        values.experts, values.most_elements = numbers_of_experts(step.model), MOST_ROUTED
        with mode, values:
            return counted | {"pytorch_flops": count(step.model, step.inputs)}
    try:
        with FakeCopyMode(mode):
            model, inputs = copy.deepcopy((step.model, step.inputs))
        with mode:
            return counted | {"pytorch_flops": count(model, inputs)}
    except Exception:  # it looks at values
        return counted | {"pytorch_flops": count(step.model, step.inputs)}


def mapped(target: str, batch: int | None, length: int | None) -> dict:
    """Step times of device maps on four P100s: Accelerate's balanced one, one after simdev's `expert`, and one after
    200 simulations of local search. Accelerate checks simdev's maps, dispatches the model by them and runs it."""
    import numpy as np
    import torch
    from accelerate import infer_auto_device_map, init_empty_weights
    from accelerate.utils import check_device_map, get_balanced_memory

    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.packages import package_step
    from simdev.integrations.torch_map import device_map, map_placement
    from simdev.placers.budget import Budget
    from simdev.placers.registry import find_placer
    from simdev.problem.placement import Placement
    from simdev.problem.problem import Problem
    from simdev.problem.topology import load_topology
    from simdev.sim import simulate

    torch.set_num_threads(1)
    problem = Problem.build(capture_package(target, batch=batch, length=length), load_topology("p100x4"))
    gpus = problem.topology.accelerators
    with init_empty_weights():
        step = package_step(target, batch=1, length=8)[0]()
    model, whole = step.model, step.model._no_split_modules
    model.tie_weights()
    limits = get_balanced_memory(model, dict.fromkeys(range(len(gpus)), 16 << 30), no_split_module_classes=whole)
    theirs = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole)
    auto = simulate(problem, map_placement(problem, {path: int(gpus[place]) for path, place in theirs.items()}))
    one = simulate(problem, Placement(np.full(problem.graph.n_ops, gpus[0], np.int32)))
    row = {
        "mapped": target,
        "batch": problem.graph.meta["batch"] or len(next(iter(step_inputs(target).values()))),
        "auto_ns": auto.step_ns,
        "auto_overflow": int(np.sum(auto.overflow_bytes)),
        "one_ns": one.step_ns,
        "one_overflow": int(np.sum(one.overflow_bytes)),
    }
    maps = []
    for name in ("expert", "local-search"):
        spec, params = find_placer(name)
        placed = spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem, evaluations=200), **params)
        found = device_map(problem, placed)
        check_device_map(model, found.modules)
        maps.append(found.modules)
        row |= {
            f"{name}_ns": found.step_ns,
            f"{name}_overflow": int(np.sum(simulate(problem, found.placement).overflow_bytes)),
            f"{name}_devices": len(set(found.modules.values())),
        }
    return row | {"dispatched": dispatched(step, max(maps, key=lambda places: len(set(places.values()))))}


def step_inputs(target: str) -> dict:
    """The inputs that a package's model gets where no batch is given."""
    from accelerate import init_empty_weights

    from simdev.graphs.capture.packages import package_step

    with init_empty_weights():
        return package_step(target)[0]().inputs[0]


def dispatched(step, places: dict) -> bool:
    """Accelerate dispatches the model by the map, onto the CPU, and runs its forward pass; the weights are zeros."""
    import torch
    from accelerate import dispatch_model

    made = {}
    for module in step.model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                zeros = torch.nn.Parameter(torch.zeros_like(parameter, device="cpu"), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), zeros)
    model = dispatch_model(
        step.model.eval(),
        dict.fromkeys(places, "cpu"),
        main_device="cpu",
        force_hooks=True,
        skip_keys="past_key_values",
    )
    with torch.no_grad():
        model(**step.inputs[0])
    return True


def exported(target: str, exporter: str) -> dict:
    """FLOPs of the products of an exported and imported model, against PyTorch's count of its forward pass."""
    import tempfile

    import numpy as np
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from simdev.graphs.capture.packages import package_step
    from simdev.graphs.importers import import_graph

    torch.set_num_threads(1)
    step = package_step(target, mode="inference", batch=1, length=64)[0]()
    inputs = step.inputs[0] if isinstance(step.inputs[0], dict) else None
    model, args = step.model, step.inputs
    if inputs is not None:
        model.config.use_cache = False
        if "input_ids" in inputs:  # without a mask, transformers looks for packed sequences by aten::diff
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        model, args = by_position(model, list(inputs)), tuple(inputs.values())
    options = {"dynamo": exporter == "dynamo", "opset_version": NEWEST_OPSET if exporter == "dynamo" else 17}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "model.onnx"
        torch.onnx.export(model, args, f=str(path), external_data=exporter == "dynamo", **options)
        started = time.process_time()
        graph = import_graph(path, "onnx", device_kind="accelerator", fix_units=False).graph
        seconds = time.process_time() - started
        with whole_attention(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(*args)
    kinds = ["Conv", "Gemm", "MatMul", "Einsum", "Attention", "ConvTranspose"]
    products = np.isin([graph.kinds[kind] for kind in graph.op_kind], kinds)
    return {"exported": target, "exporter": exporter, "ops": graph.n_ops, "opset": graph.meta["opsets"].get("ai.onnx"),
            "flops": int(graph.op_flops[products].sum()), "pytorch_flops": counter.get_total_flops(),
            "seconds": round(seconds, 2), "unknown": len(graph.meta["values_without_shape"])}  # fmt: skip


def by_position(model, names: list[str]):
    """The model with its named arguments in order. The older exporter turns the defaults of all other arguments into
    inputs: with ``logits_to_keep=0`` a tensor, a language model computes the logits of one token."""
    import torch

    class ByPosition(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *args):
            return self.model(**dict(zip(names, args, strict=True)))

    return ByPosition()


def memory(target: str, batch: int, length: int | None) -> dict:
    """Peak bytes of the captured step, run in program order on one device, and of the same step run on the CPU:
    parameters, buffers, optimizer state, inputs, and the most that PyTorch's allocator holds beyond them. Without
    oneDNN, whose convolutions hold copies in another layout, without the workspace of the CPU's own convolutions, and
    without dropout in attention, for which the CPU has no fused kernel. The optimizer is PyTorch's fused one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.build import build_fake, named_tensors
    from simdev.graphs.capture.packages import package_step
    from simdev.report.describe import peak_bytes

    torch.set_num_threads(1)
    import_package(target)
    make = package_step(target, batch=batch, length=length)[0]
    parameters = sum(parameter.numel() for parameter in build_fake(make, target).step.model.parameters())
    if parameters > MOST_PARAMETERS_FOR_MEMORY:
        return {"error": f"{parameters:,} parameters: not run"}
    graph = capture_package(target, batch=batch, length=length)
    if peak_bytes(graph) > MOST_PEAK_FOR_MEMORY:
        return {"error": f"a peak of {peak_bytes(graph):,} bytes: not run"}
    step = make()
    for group in step.optimizer.param_groups:
        group["fused"] = True  # as the graph has it: an update holds nothing beside what it reads and writes

    def run():
        step.loss(step.model, *step.inputs).backward()
        step.optimizer.step()
        step.optimizer.zero_grad()

    torch.backends.mkldnn.enabled = False
    with whole_attention():
        run()  # makes the optimizer's state
    state = [item for of in step.optimizer.state.values() for item in of.values() if isinstance(item, torch.Tensor)]
    held = [*step.model.parameters(), *step.model.buffers(), *state, *(t for _, t in named_tensors(step.inputs, ""))]
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
    with whole_attention(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    allocated = max(itertools.accumulate(without_workspaces(profiler.profiler.kineto_results.events())))
    return {"memory_of": target, "batch": batch, "length": length, "graph_bytes": peak_bytes(graph),
            "real_bytes": sum(sizes.values()) + allocated, "held_bytes": sum(sizes.values())}  # fmt: skip


def without_workspaces(events) -> list[int]:
    """The changes of allocated bytes that a profiler saw, in order of time, but for those of tensors that begin and end
    within one of the CPU's own convolutions: it unfolds its whole input, which a GPU's kernel does not."""
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    convolutions = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if re.match("aten::_?slow_conv", event.name())
    )
    kept, inside = [], []  # the numbers of allocations of the current convolution that are not freed
    end = 0
    for start, size in changes:
        while convolutions and convolutions[0][0] <= start:
            before, (_, end) = end, convolutions.pop(0)
            if end > before:
                inside = []
        if start > end:
            inside = []
        paired = [number for number in inside if kept[number] == -size] if size < 0 else []
        if paired:  # the newest of its size
            kept[paired[-1]], size = 0, 0
            inside.remove(paired[-1])
        elif start <= end and size > 0:
            inside.append(len(kept))
        kept.append(size)
    return kept


def self_check(target: str, batch: int, length: int | None) -> dict:
    """Processor seconds of a capture with its self-check and without: the least of three in turn."""
    from unittest import mock

    from simdev.graphs.capture import capture_package, run

    class Uncounted:
        total = 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    class Unseen:
        updates: dict = {}  # noqa: RUF012

        def __init__(self, named):
            pass

        def start(self):
            pass

        stop = start

    import_package(target)
    ops = capture_package(target, batch=batch, length=length).n_ops
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for checks in (True, False) * 3:
        patches = {} if checks else {"Counted": Uncounted, "Versions": Unseen, "check": lambda *_: None}
        with mock.patch.multiple(run, **patches) if patches else nullcontext():
            began = time.process_time()
            capture_package(target, batch=batch, length=length)
            seconds[checks].append(time.process_time() - began)
    return {"self_check_of": target, "ops": ops, "with_s": round(min(seconds[True]), 2),
            "without_s": round(min(seconds[False]), 2)}  # fmt: skip


@contextmanager
def whole_attention():
    """Attention without dropout, and any other dropout as the one op that it is on a GPU. Yields FLOPs that the CPU
    does not compute: with a mask that wants a gradient, or values of another width than keys, it keeps the weights in
    memory; the kernel that a GPU chooses computes the product of queries and keys again in the backward pass."""
    import torch
    from torch.nn import functional

    original, again = functional.scaled_dot_product_attention, []
    dropout_of_cpu = functional.dropout

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, *rest, **options):
        other_width = value.shape[-1] != key.shape[-1] and query.requires_grad
        if other_width or (attn_mask is not None and attn_mask.requires_grad):
            again.append(2 * query.numel() * key.shape[-2])
        return original(query, key, value, attn_mask, 0.0, *rest, **options)

    def dropout(input, p=0.5, training=True, inplace=False):
        if not training or p == 0 or inplace:
            return dropout_of_cpu(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    functional.scaled_dot_product_attention, functional.dropout = attention, dropout
    try:
        yield again
    finally:
        functional.scaled_dot_product_attention, functional.dropout = original, dropout_of_cpu


def run(out: Path, pattern: str) -> None:
    done = {json.loads(line).get("model") for line in out.read_text().splitlines()} if out.exists() else set()
    for target in MODELS:
        if target in done or not re.search(pattern, target):
            continue
        import_package(target)
        row = in_a_fork(lambda model=target: measure(model)) | {"model": target}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def run_each(out: Path, models: list, key: str, work) -> None:
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row[key], row.get("exporter")) for row in rows if key in row}
    for model in models:
        exporter = model[1] if key == "exported" else None
        if (model[0], exporter) in done:
            continue
        import_package(model[0])
        row = in_a_fork(lambda model=model: work(*model)) | {key: model[0]}
        row |= {"exporter": exporter} if exporter else {}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def in_a_fork(work, seconds: int = SECONDS) -> dict:
    """What ``work`` returns in a child process that has the packages loaded, or its error. It has ``seconds`` of
    processor time."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time: a busy machine refuses no model
        signal.alarm(20 * seconds)
        try:
            row = work()
        except BaseException as error:
            row = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"killed, or more than {seconds} processor seconds"}


def drawn(seed: int, count: int = 40) -> list[str]:
    """Models drawn from all that the installed packages name and that are not listed above: of 40, 12 of timm, 4 of
    torchvision, 16 of transformers and 8 of diffusers. Without torchvision, which timm needs, too, the other two have
    the same share of each other. torchvision's detectors are left out if its operators do not load beside this
    PyTorch."""
    import importlib.util

    vision = ("timm", "torchvision") if importlib.util.find_spec("torchvision") else ()
    packages = [(name, share) for name, share in SHARES.items() if name in (*vision, "transformers", "diffusers")]
    draw, found, whole = random.Random(seed), [], sum(share for _, share in packages)
    for package, share in packages:
        known = sorted({f"{package}:{name}" for name in named_models(package)} - set(MODELS))
        found += draw.sample(known, min(len(known), round(share / whole * count)))
    draw.shuffle(found)  # a part of a draw has models of every package
    return found


def named_models(package: str) -> list[str]:
    """All models that an installed package names."""
    import importlib

    from simdev.graphs.capture.vision_ops import define_missing_operators

    names_only = define_missing_operators()
    module = importlib.import_module(package)
    if package == "timm":
        return module.list_models()
    if package == "torchvision":
        detectors = module.models.list_models(module.models.detection) if names_only else []
        return [name for name in module.models.list_models() if name not in detectors]
    if package == "diffusers":
        parts = (getattr(module, name) for name in dir(module) if re.search("Transformer|UNet|Autoencoder", name))
        return [part.__name__ for part in parts if isinstance(part, type) and issubclass(part, module.ModelMixin)]
    from transformers.models.auto import modeling_auto

    tables = [table for key, table in vars(modeling_auto).items() if re.fullmatch(r"MODEL_\w*MAPPING_NAMES", key)]
    entries = [entry for table in tables for entry in table.values()]
    names = {name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)}
    return [name for name in names if hasattr(module, name)]


def judged(target: str) -> dict:
    """A drawn model, captured in a process of its own and counted again in another: a row with its ``verdict``, which
    is ``captured``, ``refused``, ``wrong`` or ``not counted`` (by PyTorch: only the self-check has judged it)."""
    import_package(target)
    row = in_a_fork(lambda: captured(target), SECONDS_OF_A_DRAW)
    if "error" in row:
        return row | {"verdict": "refused"}
    optional, source = row.get("optional_inputs", ()), row.get("captured_as", target)
    again = in_a_fork(lambda: recounted(source, 4 * row["parameters"], optional), SECONDS_OF_A_DRAW)
    if "error" in again:
        return row | {"verdict": "not counted", "why": again["error"]}
    row |= again
    return row | {"verdict": "captured" if right(row) else "wrong"}


def run_drawn(out: Path, seed: int, count: int) -> int:
    """Judge the drawn models that ``out`` does not have yet, and print a table. A model may be refused; 1 if a captured
    one is wrong."""
    targets = drawn(seed, count)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for target in targets:
        if target not in {row.get("model") for row in rows if row.get("draw") == seed}:
            row = {"model": target, "draw": seed, **judged(target)}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    rows = {row["model"]: row for line in out.read_text().splitlines() if (row := json.loads(line)).get("draw") == seed}
    rows = [rows[target] for target in targets if target in rows]
    print(f"\n## Draw {seed}\n\n| model | verdict | FLOPs | PyTorch's | inputs, or why |\n|---|---|--:|--:|---|")
    for row in rows:
        flops = " | ".join(f"{row[key]:,}" if key in row else "" for key in ("flops", "pytorch_flops"))
        note = row.get("error") or row.get("why") or row.get("inputs", "")
        print(f"| `{row['model']}` | {row['verdict']} | {flops} | {note.replace('|', chr(92) + '|')} |")
    totals = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    print(
        f"\ndraw {seed}, {len(rows)} models: {', '.join(f'{number} {verdict}' for verdict, number in totals.items())}"
    )
    return 1 if totals["wrong"] else 0


def main(arguments: list[str]) -> int | None:
    warnings.simplefilter("ignore")
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
    elif "--report" in arguments:
        rows = [json.loads(line) for line in Path(arguments[0]).read_text().splitlines()]
        Path(arguments[2]).write_text(report(rows), encoding="utf-8")
    elif "--draw" in arguments:
        return run_drawn(Path(arguments[0]), int(arguments[2]), int(arguments[3]) if arguments[3:] else 40)
    elif "--memory" in arguments:
        seeds = [int(text) for text in arguments[arguments.index("--memory") + 1 :]]
        small = [(model, 2, None) for model in drawn(*seeds)] if seeds else MEMORY
        run_each(Path(arguments[0]), small, "memory_of", memory)
    elif "--self-check" in arguments:
        run_each(Path(arguments[0]), MEMORY, "self_check_of", self_check)
    elif "--onnx" in arguments:
        pairs = [(target, exporter) for target in EXPORTED for exporter in ("torchscript", "dynamo")]
        run_each(Path(arguments[0]), pairs, "exported", exported)
    elif "--maps" in arguments:
        small = [(model, None, None) for model in MODELS if model.startswith("transformers")]
        run_each(Path(arguments[0]), [*MAPS, *small], "mapped", mapped)
    else:
        run(Path(arguments[0]), arguments[1] if len(arguments) > 1 else "")
    return None


def right(row: dict) -> bool:
    """Whether parameters are exact and FLOPs within 1 %."""
    return (
        "pytorch_flops" in row
        and row["parameters"] == row["pytorch_parameters"]
        and abs(row["flops"] - row["pytorch_flops"]) <= 0.01 * row["pytorch_flops"]
    )


def report(given: list[dict]) -> str:
    """The page of the documentation: one line per model, failures with their sentence."""
    order = {target: number for number, target in enumerate(MODELS)}
    rows = sorted((row for row in given if row.get("model") in order), key=lambda row: order[row["model"]])
    captured = [row for row in rows if "error" not in row]
    good = [row for row in captured if right(row)]
    counted = [row for row in captured if "pytorch_flops" in row]
    seconds = sorted(row["seconds"] for row in captured)
    megabytes = sorted(row["mb"] for row in captured)
    lines = [
        "# The zoo",
        "",
        "Models of timm, torchvision, transformers and diffusers, captured as one training step with random weights.",
        "`python tests/tools/zoo.py rows.jsonl` captures them (`pip install '.[zoo]'`), and",
        "`python tests/tools/zoo.py tests/tools/zoo.jsonl --report docs/pages/zoo.md` writes this page from the stored",
        "rows. Seconds are processor seconds on a busy machine: upper bounds.",
        "",
        f"Of {len(MODELS)} configurations in the list, {len(rows)} were tried: {len(captured)} were captured, and",
        f"{len(counted)} of these were counted again with PyTorch. {len(good)} have exactly the parameters of the",
        "model and, within 1 %, the FLOPs that PyTorch's",
        "`FlopCounterMode` counts in a step of the same model, built for real. (PyTorch's formula for the backward of",
        "grouped convolutions counts every filter as if it read every channel; the comparison corrects it, and leaves",
        "dropout out of attention. For a learned bias of attention, and for values of another width than keys, it adds",
        "the product of queries and keys that the kernel of a GPU computes again in the backward pass, and the CPU's",
        "does not.)",
        f"A capture took {seconds[len(seconds) // 2]} processor seconds in the median and",
        f"{seconds[-1]} at most; the process grew by {megabytes[len(megabytes) // 2]} MB in the median and",
        f"{megabytes[-1]} MB at most. *Forward* marks steps that depend on values, whose forward pass",
        "ran for real beforehand, *real* those of which all did.",
        "",
        "| model | ops | parameters | TFLOP | FLOPs against PyTorch | seconds | MB | |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in captured:
        compared = "pytorch_flops" in row
        off = f"{row['flops'] / max(1, row['pytorch_flops']) - 1:+.2%}" if compared else "not counted"
        wrong = "**off**" if compared and not right(row) else ""
        note = " ".join(filter(None, ("" if row["values"] == "fake" else row["values"], wrong)))
        lines.append(
            f"| `{row['model']}` | {row['ops']:,} | {row['parameters']:,} | {row['flops'] / 1e12:.3f} | {off} |"
            f" {row['seconds']} | {row['mb']} | {note} |"
        )
    failed = [row for row in rows if "error" in row]
    if failed:
        lines += ["", "## Failures", ""]
        lines += [f"* `{row['model']}`: {row['error']}{EAGER * ('eager' in row)}" for row in failed]
    missing = [target for target in MODELS if target not in {row["model"] for row in rows}]
    if missing:
        lines += ["", f"Not tried yet: {', '.join(f'`{target}`' for target in missing)}."]
    return "\n".join(
        [
            *lines,
            *draw_lines(given),
            *memory_lines(given),
            *self_check_lines(given),
            *map_lines(given),
            *onnx_lines(given),
            "",
        ]
    )


def draw_lines(given: list[dict]) -> list[str]:
    """What became of drawn models: a row's ``first`` is the verdict before general rules were mended, its ``remedy``
    what its refusal says and was typed, with which the model is captured."""
    draws: dict[int | str, list[dict]] = {}
    for row in given:
        if "draw" in row:
            draws.setdefault(row["draw"], []).append(row)
    if not draws:
        return []
    lines = [
        "",
        "## Draws",
        "",
        "Models drawn by a seed from all that transformers and diffusers name, and in the draws 20261130, 20261201 and",
        "those *of four* timm and torchvision, too, captured by their plain ids",
        "(`python tests/tools/zoo.py rows.jsonl --draw SEED 25`). No",
        "graph differs by more than 1 % from what PyTorch counts in the run that was recorded; else it would be",
        "refused. *First run* is before a rule was mended, the other columns are after it; the last draw was made",
        "after the mends of those before it. A remedy *works* if a model was captured once its refusal was obeyed.",
        "",
        "| draw | models | captured in the first run | captured | refused, remedy works | refused |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for seed, rows in draws.items():  # in the order of their making
        done = [row for row in rows if row["verdict"] in ("captured", "not counted")]
        first = [row for row in rows if row.get("first", row["verdict"]) in ("captured", "not counted")]
        obeyed = [row for row in rows if "remedy" in row]
        left = len(rows) - len(done) - len(obeyed)
        lines.append(f"| {seed} | {len(rows)} | {len(first)} | {len(done)} | {len(obeyed)} | {left} |")
    drawn_rows = [row for rows in draws.values() for row in rows]
    uncounted = {row["model"]: row["why"] for row in drawn_rows if row["verdict"] == "not counted"}
    if uncounted:
        named = ", ".join(f"`{model}` ({why.partition(':')[0]})" for model, why in uncounted.items())
        lines += ["", f"PyTorch could not count a second run of {named}, so that only the self-check judged them."]
    refused = {row["model"]: row for row in drawn_rows if row["verdict"] in ("refused", "wrong")}
    lines += ["", "Refused:", ""]
    for model, row in refused.items():
        lines.append(f"* `{model}`: " + (f"works with {row['remedy']}" if "remedy" in row else row["error"]))
    return lines


def onnx_lines(given: list[dict]) -> list[str]:
    order = {target: number for number, target in enumerate(EXPORTED)}
    rows = sorted((row for row in given if row.get("exported") in order), key=lambda row: order[row["exported"]])
    if not rows:
        return []
    lines = [
        "",
        "## ONNX",
        "",
        "Forward passes written by PyTorch's exporters (`torch.onnx.export`: TorchScript with opset 17, and dynamo",
        f"with opset {NEWEST_OPSET}, the newest that it writes, and weights in a file of their own) and imported:",
        "FLOPs of convolutions, products, attention and Einsum against `FlopCounterMode`",
        "(`python tests/tools/zoo.py rows.jsonl --onnx`).",
        f"{len({row['exported'] for row in rows})} of the {len(EXPORTED)} models in the list were tried.",
        "",
        "| model | exporter | opset | ops | FLOPs against PyTorch | seconds |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| `{row['exported']}` | {row.get('exporter', '')} | | | {row['error'][:120]} | |")
        else:
            off = row["flops"] / max(1, row["pytorch_flops"]) - 1
            found = f"{row['opset']} | {row['ops']:,} | {off:+.2%} | {row['seconds']}"
            lines.append(f"| `{row['exported']}` | {row['exporter']} | {found} |")
    return lines


def map_lines(given: list[dict]) -> list[str]:
    rows = [row for row in given if "auto_ns" in row]
    failed = [row for row in given if "mapped" in row and "error" in row]
    gain = sorted(row["auto_ns"] / best_map(row)[1] for row in rows if not row["auto_overflow"])
    if not gain:
        return []
    faster, slower = sum(ratio > 1.005 for ratio in gain), sum(ratio < 0.995 for ratio in gain)
    n_models = len(MAPS) + sum(model.startswith("transformers") for model in MODELS)
    lines = [
        "",
        "## Device maps",
        "",
        "Simulated step times, in ms, of a training step on `p100x4` (four GPUs of 16 GB) by device maps: Accelerate's",
        "own (`infer_auto_device_map` within `get_balanced_memory`, blocks whole), and the maps that",
        "`simdev place --device-map` writes after the placers `expert` and `local-search` (200 simulations). A star:",
        "the step needs more memory than a GPU has. (`python tests/tools/zoo.py rows.jsonl --maps`)",
        "",
        f"{len(rows) + len(failed)} of the {n_models} models were tried.",
        f"Accelerate's `check_device_map` accepts both maps of {len(rows)} of {len(rows) + len(failed)} models, and",
        f"`dispatch_model` runs {sum(row['dispatched'] for row in rows)} of them by the map of more devices. A map has",
        "no microbatches: its GPUs work one after another, so that a step gains by fewer transfers alone.",
        f"{len(gain)} models fit by Accelerate's map. simdev's is faster for {faster} of them and slower for {slower};",
        f"it is {gain[len(gain) // 2]:.3f} times as fast in the median ({gain[0]:.2f} to {gain[-1]:.2f} times).",
        "",
        "| model | batch | one GPU | Accelerate | after expert | after local-search | times as fast |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        ways = [(row[f"{way}_overflow"] > 0, row[f"{way}_ns"]) for way in ("one", "auto", "expert", "local-search")]
        cells = " | ".join(f"{ns / 1e6:,.1f}{' *' if over else ''}" for over, ns in ways)
        lines.append(f"| `{row['mapped']}` | {row['batch']} | {cells} | {row['auto_ns'] / best_map(row)[1]:.3f} |")
    return [*lines, *(["", *(f"* `{row['mapped']}`: {row['error'][:300]}" for row in failed)] if failed else [])]


def best_map(row: dict) -> tuple[bool, int]:
    """Whether the better of simdev's two maps overflows, and its step time."""
    return min((row[f"{way}_overflow"] > 0, row[f"{way}_ns"]) for way in ("expert", "local-search"))


def memory_lines(given: list[dict]) -> list[str]:
    rows = [row for row in given if "real_bytes" in row]
    if not rows:
        return []
    offs = [row["graph_bytes"] / row["real_bytes"] - 1 for row in rows]
    lines = [
        "",
        "## Peak memory",
        "",
        "The peak of the captured step, run in program order on one device, against the same step run for real on the",
        "CPU: parameters, buffers, optimizer state and inputs, and the most that PyTorch's allocator holds beyond them",
        "(`python tests/tools/zoo.py rows.jsonl --memory`, and `--memory 20261215 60` for drawn models of at most",
        f"{MOST_PARAMETERS_FOR_MEMORY // 10**6} M parameters and {MOST_PEAK_FOR_MEMORY >> 30} GiB). Of {len(rows)}",
        f"models, {sum(abs(off) <= 0.01 for off in offs)} are within 1 %; the largest difference is",
        f"{max(offs, key=abs):+.1%}.",
        "",
        "The real steps run PyTorch's own kernels, attention without dropout, which the CPU computes with all weights",
        "in memory and a GPU does not, any other dropout with a mask of one byte per element, as on a GPU, and the",
        "fused AdamW, which a captured update is. In the older rows (timm, torchvision, models with fields and",
        "`DistilBertForMaskedLM`), AdamW runs op by op, with tensors of its own. The AdamW that PyTorch takes on a GPU",
        "by default, of multi-tensor",
        "kernels, holds as many bytes more as the parameters take while it updates them; a graph with an op for each",
        "parameter does not show this. oneDNN's convolutions hold copies of their arguments in another layout while",
        "they run: with oneDNN, `timm:convnext_atto` takes 189.8 MB, at a copy of 16.1 MB inside the backward of a",
        "convolution, and 175.8 MB without. PyTorch adds up the gradients of a tensor in place, and a captured step",
        "makes a new tensor for the sum: `transformers:PLBartForSequenceClassification`, whose tied embedding has two",
        "gradients, has too large a peak for this reason.",
        "",
        "| model | batch | graph, MB | real, MB | graph against real | without what is held throughout |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        graph, real, held = (row[f"{name}_bytes"] for name in ("graph", "real", "held"))
        lines.append(
            f"| `{row['memory_of']}` | {row['batch']} | {graph / 1e6:,.1f} | {real / 1e6:,.1f} |"
            f" {graph / real - 1:+.1%} | {(graph - held) / (real - held) - 1:+.1%} |"
        )
    return lines


def self_check_lines(given: list[dict]) -> list[str]:
    rows = [row for row in given if "with_s" in row]
    if not rows:
        return []
    lines = [
        "",
        "## What the self-check costs",
        "",
        "Each capture is compared with what PyTorch counts in the same run: FLOPs, updates and bytes. Processor",
        "seconds of a capture with this check and without, the least of three",
        "(`python tests/tools/zoo.py rows.jsonl --self-check`):",
        "",
        "| model | ops | with, s | without, s | the check's share |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        both, share = f"{row['with_s']:.2f} | {row['without_s']:.2f}", max(0.0, 1 - row["without_s"] / row["with_s"])
        lines.append(f"| `{row['self_check_of']}` | {row['ops']:,} | {both} | {share:.0%} |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
