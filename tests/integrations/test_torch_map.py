"""Placements become device maps and split points that PyTorch takes."""

import json
import textwrap

import numpy as np
import pytest

from simdev import sim
from simdev.cli import main as cli
from simdev.errors import InvalidInput
from simdev.integrations.torch_map import _collapsed, device_map, map_placement, write_device_map
from simdev.placers import registry
from simdev.placers.budget import Budget
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology

MODEL = """
    import torch
    from simdev import TrainingStep

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Linear(64, 256)
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
                for _ in range(4)
            )
            self.head = torch.nn.Linear(256, 10)

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    def make_step():
        model = Net()
        loss = lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y)
        data = torch.randn(32, 64), torch.randint(0, 10, (32,))
        return TrainingStep(model, data, loss, torch.optim.Adam(model.parameters()))
"""


def test_parents_stand_for_children_that_agree():
    modules = {"a.x": 1, "a.y": 1, "b.x": 0, "b.y": 2, "b.z.q": 2, "b.z.r": 2}
    assert _collapsed(modules) == {"a": 1, "b.x": 0, "b.y": 2, "b.z": 2}
    assert _collapsed({"a.x": 3, "b": 3}) == {"": 3}


@pytest.mark.parametrize("name", ["transformer-xl-2", "inception-v3", "nmt"])
def test_each_module_on_one_device_and_no_slower_than_said(name):
    problem = Problem.build(registry.load_workload(name), load_topology("p100x4"))
    rng = np.random.default_rng(0)
    placement = Placement.of_units(problem, rng.integers(1, 5, problem.graph.n_units))
    found = device_map(problem, placement)
    assert not found.aligned and found.step_ns < found.placed_ns
    assert sim.simulate(problem, found.placement).step_ns == found.step_ns
    graph = problem.graph
    for op in np.flatnonzero([graph.kinds[kind] == "parameter" for kind in graph.op_kind]):
        path = graph.layers[graph.op_layer[op]]
        while path not in found.modules:
            assert path, f"{graph.op_names[op]} has no device"
            path = path.rpartition(".")[0]
        assert found.modules[path] == found.placement.devices[op]
    again = device_map(problem, found.placement)
    assert again.aligned and again.step_ns <= found.step_ns
    assert len(found.splits) == len(set(found.placement.devices.tolist())) - 1


@pytest.mark.parametrize("blocks, machine", [(12, "v100x8-dgx1"), (4, "p100x4"), (9, "p100x4")])
def test_a_model_with_as_many_blocks_as_accelerators_is_cut_between_them(blocks, machine):
    """An embedding of several modules, blocks of two layers, a head: no block is divided, nor the embedding cut off."""
    topology, builder = load_topology(machine), GraphBuilder("model")
    gpus = list(topology.accelerators)
    layers = [("embed.words", 9), ("embed.norm", 1)]
    layers += [(f"h.{n}.{part}", 5) for n in range(blocks) for part in ("attn", "mlp")]
    each = int(0.6 * topology.memory_bytes[gpus].sum() / (len(layers) + 1))  # one GPU cannot hold the model
    x = builder.outputs(builder.op("input", "input", outputs=[4]))
    for layer, weight in [*layers, ("head", 9)]:
        w = builder.outputs(builder.op(f"{layer}/w", "parameter", outputs=[4], layer=layer, persistent_bytes=each))
        op = builder.op(f"{layer}/mm", "mm", inputs=x + w, outputs=[4], layer=layer, flops=weight * 10**9)
        x = builder.outputs(op)
    problem = Problem.build(builder.build(), topology)
    rng = np.random.default_rng(0)
    found = device_map(problem, Placement(rng.choice(gpus, problem.graph.n_ops)))
    assert not [path for path in found.modules if path.startswith("h.") and path.count(".") > 1], "a block is divided"
    assert all(path.startswith("h.") and path.count(".") == 1 for path in found.splits)
    assert len(found.splits) == len(set(found.placement.devices.tolist())) - 1 > 0


def test_a_map_gives_back_the_placement_that_it_was_made_from():
    problem = Problem.build(registry.load_workload("transformer-xl-2"), load_topology("p100x4"))
    rng = np.random.default_rng(0)
    found = device_map(problem, Placement.of_units(problem, rng.integers(1, 5, problem.graph.n_units)))
    again = map_placement(problem, found.modules)
    assert sim.simulate(problem, again).step_ns == found.step_ns
    assert set(map_placement(problem, {"": 2}).devices.tolist()) == {2}
    with pytest.raises(InvalidInput, match="no path of the map"):
        map_placement(problem, {"nowhere": 1})


def test_a_graph_without_modules_is_one_sentence():
    builder = GraphBuilder("bare")
    builder.op("a", "mm", flops=1, outputs=[4])
    problem = Problem.build(builder.build(), load_topology("p100x2"))
    with pytest.raises(InvalidInput, match="module"):
        device_map(problem, Placement(np.zeros(1, np.int32)))


@pytest.mark.slow
def test_pytorch_takes_the_map_and_the_splits(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    file = tmp_path / "my_model.py"
    file.write_text(textwrap.dedent(MODEL), encoding="utf-8")
    out = tmp_path / "map.json"
    asked = ["place", f"{file}:make_step", "--topology", "p100x2", "-p", "round-robin", "--device-map", str(out)]
    monkeypatch.setattr("sys.argv", ["simdev", *asked])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code, capsys.readouterr().err
    outcome = json.loads(out.read_text(encoding="utf-8"))
    scope = {}
    exec(textwrap.dedent(MODEL), scope)
    step = scope["make_step"]()
    for name, device in outcome["device_map"].items():
        step.model.get_submodule(name)
        assert device in (0, 1, "cpu")
    covered = [
        any(not path or name == path or name.startswith(f"{path}.") for path in outcome["device_map"])
        for name, _ in step.model.named_parameters()
    ]
    assert all(covered)
    from torch.distributed.pipelining import SplitPoint, pipeline

    assert outcome["split_spec"]
    spec = {name: SplitPoint[point] for name, point in outcome["split_spec"].items()}
    stages = pipeline(step.model, mb_args=(step.inputs[0],), split_spec=spec)
    assert stages.num_stages == len(spec) + 1
    torch.testing.assert_close(stages(step.inputs[0]), (step.model(step.inputs[0]),), check_device=False)


def test_written_map_names_devices(tmp_path):
    problem = Problem.build(registry.load_workload("transformer-xl-2"), load_topology("p100x2"))
    found = device_map(problem, Placement(np.full(problem.graph.n_ops, 2, np.int32)))
    write_device_map(tmp_path / "map.json", problem, found)
    outcome = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))
    assert outcome["device_map"] == {"": 1} and outcome["devices"] == {"": "gpu1"} and outcome["aligned"]
    assert outcome["split_spec"] == {} and outcome["step_time_s"] == outcome["placement_step_time_s"]


HUGGING_FACE = {
    "GPT2LMHeadModel": dict(n_layer=6, n_embd=64, n_head=2, vocab_size=100, n_positions=32),
    "T5ForConditionalGeneration": dict(
        num_layers=4, num_decoder_layers=4, d_model=32, d_kv=8, d_ff=64, num_heads=2, vocab_size=100
    ),
    "BertForSequenceClassification": dict(
        num_hidden_layers=6, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=100
    ),
    "ViTForImageClassification": dict(
        num_hidden_layers=6, hidden_size=32, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=16
    ),
    "ConvBertForSequenceClassification": dict(
        num_hidden_layers=6, hidden_size=32, embedding_size=32, num_attention_heads=2, intermediate_size=64,
        vocab_size=100,
    ),
    "LlamaForCausalLM": dict(
        num_hidden_layers=6, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=100,
    ),
    "OPTForCausalLM": dict(
        num_hidden_layers=6, hidden_size=32, word_embed_proj_dim=32, num_attention_heads=2, ffn_dim=64, vocab_size=100
    ),
    "GPTNeoXForCausalLM": dict(
        num_hidden_layers=6, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=100
    ),
    "DistilBertForSequenceClassification": dict(n_layers=6, dim=32, hidden_dim=64, n_heads=2, vocab_size=100),
    "ElectraForSequenceClassification": dict(
        num_hidden_layers=6, hidden_size=32, embedding_size=32, num_attention_heads=2, intermediate_size=64,
        vocab_size=100,
    ),
}  # fmt: skip
FEW = ("GPT2LMHeadModel", "BertForSequenceClassification")  # of which each run of the tests makes a map
TEN = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in HUGGING_FACE]


@pytest.mark.parametrize("name", TEN)
def test_accelerate_loads_the_map(name, tmp_path):
    torch = pytest.importorskip("torch")
    accelerate = pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package

    fields = ",".join(f"{key}={value}" for key, value in HUGGING_FACE[name].items())
    graph = capture_package(f"transformers:{name}[{fields}]", batch=2, length=16)
    problem = Problem.build(graph, load_topology("p100x2"))
    rng = np.random.default_rng(0)
    found = device_map(problem, Placement.of_units(problem, rng.integers(1, 3, problem.graph.n_units)))
    again = map_placement(problem, found.modules)
    assert sim.simulate(problem, again).step_ns == found.step_ns
    write_device_map(tmp_path / "map.json", problem, found)
    places = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))["device_map"]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**HUGGING_FACE[name])).eval()
    accelerate.utils.check_device_map(model, places)
    blocks = {path for path in places if ".0." in path or ".1." in path}
    assert not blocks, "no block is cut"
    if name.startswith("ViT"):
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    else:
        inputs = {"input_ids": torch.randint(3, 99, (2, 16))}
        if name.startswith("T5"):
            inputs["decoder_input_ids"] = inputs["input_ids"]
    automatic = accelerate.infer_auto_device_map(
        model, max_memory={0: 120_000, 1: 1 << 30}, no_split_module_classes=model._no_split_modules
    )
    theirs = map_placement(problem, {path: 1 + device for path, device in automatic.items()})
    assert set(theirs.devices.tolist()) == {1 + device for device in automatic.values()}
    expert = registry.find_placer("expert")[0].place(problem, rng=rng, budget=Budget(problem))
    stages = device_map(problem, expert)
    assert set(expert.devices.tolist()) == {1, 2} and len(set(stages.modules.values())) <= 2
    with torch.no_grad():
        wanted = model(**inputs).logits
        mapped = accelerate.dispatch_model(model, dict.fromkeys(places, "cpu"), main_device="cpu", force_hooks=True)
        torch.testing.assert_close(mapped(**inputs).logits, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_pytorch_pipelines_a_hugging_face_model_between_its_blocks(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.distributed.pipelining import SplitPoint, pipeline

    from simdev.graphs.capture import capture_package

    fields = ",".join(f"{key}={value}" for key, value in HUGGING_FACE[name].items())
    problem = Problem.build(
        capture_package(f"transformers:{name}[{fields}]", batch=2, length=16), load_topology("p100x2")
    )
    expert = registry.find_placer("expert")[0].place(problem, rng=np.random.default_rng(0), budget=Budget(problem))
    splits = device_map(problem, expert).splits
    assert len(splits) == 1 and splits[0].rpartition(".")[2].isdigit(), "cut before a block"
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**HUGGING_FACE[name])).eval()
    if name.startswith("ViT"):
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    else:
        inputs = {"input_ids": torch.randint(3, 99, (2, 16))}
        if "Classification" not in name:
            inputs["use_cache"] = False
        if name.startswith("T5"):
            inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        wanted = model(**inputs).logits
        stages = pipeline(model, mb_args=(), mb_kwargs=inputs, split_spec={splits[0]: SplitPoint.BEGINNING})
        assert stages.num_stages == 2
        held = [sum(p.numel() for p in stages.get_stage_module(stage).parameters()) for stage in range(2)]
        assert min(held) > 0.2 * sum(held), "both stages hold blocks"
        torch.testing.assert_close(stages(**inputs)[0], wanted)
