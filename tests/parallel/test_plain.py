"""A plain module without parallel code: its blocks are found, sharded, recomputed."""

from dataclasses import replace
from pathlib import Path

import pytest

from simdev.errors import InvalidInput
from simdev.graphs.workload import TrainingStep
from simdev.parallel import Plan, find_model, load_cluster, parse_mesh, plain, simulate_plan
from simdev.parallel.capture.stage import capture_stage, few_captures, segments_of
from simdev.parallel.capture.stage import captured as captured_whole
from simdev.parallel.mesh import Mesh
from simdev.parallel.passes import STEP
from simdev.parallel.plan import prepare
from simdev.planners.estimate import _sent_bytes

PLAIN = """
import torch
from torch import nn
from simdev import TrainingStep

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 512, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss(model, x):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

def make_step():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainingStep(model, (torch.zeros(4, 32, dtype=torch.int64),), loss, optimizer)

def nothing():
    return 3
"""
BLOCK = 2 * 64 + 2 * 64 * 256 + 256 + 64
BLOCKS = 4
PARAMETERS = BLOCKS * BLOCK + 2 * 512 * 64


@pytest.fixture
def entry(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my_model.py").write_text(PLAIN, encoding="utf-8")
    return f"{tmp_path}/my_model.py:make_step"


def captured(entry, mesh, order="FB"):
    """The whole model: a step of one microbatch, or of several with ``STEP``."""
    model, parameters = find_model(entry)
    part = model.part(parameters, parameters["layers"])
    return capture_stage(model, parameters, parse_mesh(mesh), part, order)


def count(program, kind):
    return sum(call.kind == kind for call in (*program.forward.calls, *program.backward[2].calls))


def test_blocks_and_the_rest_are_sharded(entry):
    """Six blocks, which are captured with three and with four of them."""
    path, _, _ = entry.rpartition(":")
    Path(path).write_text(PLAIN.replace("range(4)", "range(6)"), encoding="utf-8")
    program = captured(entry, "dp_shard=2", STEP)
    assert program.parameters == (PARAMETERS + 2 * BLOCK) // 2
    assert program.resident_bytes == (PARAMETERS + 2 * BLOCK) // 2 * 8  # SGD keeps the momentum
    assert count(program, "all_gather") == 2 * 6 + 1 and count(program, "reduce_scatter") == 6 + 1


def test_parameters_may_stay_gathered(entry):
    assert count(captured(f"{entry}[reshard_after_forward=false]", "dp_shard=2"), "all_gather") == BLOCKS + 1


def test_replicas_reduce_gradients(entry):
    program = captured(entry, "dp_replicate=2")
    assert program.parameters == PARAMETERS and count(program, "all_reduce") == BLOCKS + 1


def test_blocks_are_recomputed(entry):
    kept, again = captured(entry, "dp_shard=2"), captured(f"{entry}[recompute=full]", "dp_shard=2")
    assert again.forward.live_bytes < kept.forward.live_bytes
    assert count(again, "addmm") == count(kept, "addmm") + BLOCKS  # the block's last product is not needed again


def test_a_compiled_block_keeps_no_product_that_is_only_added(entry):
    path, _, _ = entry.rpartition(":")
    Path(path).write_text(PLAIN.replace("nn.Linear(256, 64)", "nn.Linear(256, 64, bias=False)"), encoding="utf-8")
    eager, compiled = (captured(f"{entry}[recompute={kind}]", "dp_shard=2") for kind in ("selective", "selective-read"))
    assert eager.forward.live_bytes - compiled.forward.live_bytes == BLOCKS * 2 * 32 * 64


def test_a_plan_and_its_figures(entry):
    model, parameters = find_model(f"{entry}[length=32]")
    tokens = 32
    assert model.flops(parameters) == 6 * tokens * (BLOCKS * 2 * 64 * 256 + 512 * 64)
    report = simulate_plan(Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("dp_shard=8")))
    assert report.fits and report.step_ns > 0
    assert model.axes == ("dp_replicate", "dp_shard", "tp") and model.pipeline and not model.notes


def test_two_products_are_divided_by_columns_and_rows(entry):
    model, parameters = find_model(entry)
    assert model.function.tp_plan == {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    program = captured(entry, "tp=2")
    assert program.parameters == PARAMETERS - BLOCKS * (2 * 64 * 256 + 256) // 2
    reduced = [call.payload_bytes for call in program.forward.calls if call.kind == "all_reduce"]
    assert reduced == [1 * 32 * 64 * 4] * BLOCKS  # one of f32[1,32,64] for each block
    assert count(program, "all_reduce") == 2 * BLOCKS
    with pytest.raises(InvalidInput, match="256 heads or columns do not divide by 3"):
        model.checks(parameters, parse_mesh("tp=3"))


def test_a_plan_of_the_step_comes_first(entry):
    path, _, _ = entry.rpartition(":")
    given = PLAIN.replace(
        "loss, optimizer)", 'loss, optimizer, tp_plan={"blocks.*.up": "colwise", "head": "nonsense"})'
    )
    Path(path).write_text(given, encoding="utf-8")
    with pytest.raises(InvalidInput, match="'nonsense' is no style"):
        find_model(entry)
    Path(path).write_text(given.replace(', "head": "nonsense"', ""), encoding="utf-8")
    assert find_model(entry)[0].function.tp_plan == {"blocks.*.up": "colwise"}
    Path(path).write_text(given.replace('"blocks.*.up": "colwise", "head": "nonsense"', ""), encoding="utf-8")
    model, _ = find_model(entry)
    assert "tp" not in model.axes and model.notes == ("no tensor parallelism: its step asks for none",)


def test_stages_share_the_model(entry):
    model, parameters = find_model(entry)
    mesh = parse_mesh("dp_shard=2")
    first, middle, last = (
        capture_stage(model, parameters, mesh, model.part(parameters, layers, start), order="FB")
        for start, layers in ((0, 1), (1, 2), (3, 1))
    )
    assert first.parameters == (BLOCK + 512 * 64) // 2
    assert middle.parameters == 2 * BLOCK // 2
    assert last.parameters == (BLOCK + 512 * 64) // 2
    assert first.output_bytes == middle.output_bytes == 32 * 64 * 2  # bf16, as FSDP computes
    kinds = [[call.kind for call in stage.forward.calls] for stage in (first, middle, last)]
    assert [("embedding" in some, some.count("addmm"), "nll_loss_forward" in some) for some in kinds] == [
        (True, 2, False),
        (False, 4, False),
        (False, 2, True),
    ]
    report = simulate_plan(Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("pp=2,dp_shard=2,tp=2"), 4))
    assert report.step_ns > 0


def test_tied_parameters_are_on_both_ends_and_skips_are_refused(entry):
    path, _, _ = entry.rpartition(":")
    tied = PLAIN.replace(
        "    def forward(self, x):\n        x = self.emb",
        "        self.head.weight = self.embedding.weight\n\n    def forward(self, x):\n        x = self.emb",
    )
    assert tied != PLAIN
    Path(path).write_text(tied, encoding="utf-8")
    model, parameters = find_model(entry)
    programs = [
        capture_stage(model, parameters, Mesh({}), model.part(parameters, n, start), order="FB")
        for start, n in ((0, 1), (1, 2), (3, 1), (0, 4))
    ]
    assert [p.parameters for p in programs] == [BLOCK + 512 * 64, 2 * BLOCK, BLOCK + 512 * 64, 4 * BLOCK + 512 * 64]
    skip = PLAIN.replace("x = self.embedding(x)", "x = y = self.embedding(x)").replace(
        "self.head(x)", "self.head(x + y)"
    )
    Path(path).write_text(skip, encoding="utf-8")
    model, _ = find_model(entry)
    assert model.notes == ("no pipeline: what is computed before its blocks is read within or after them",)


SHARED = "self.blocks = nn.ModuleList([Block()] * 4)"
PARTS = """self.blocks = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks[1:]:
            block.up = self.blocks[0].up"""


@pytest.mark.parametrize(
    ("blocks", "notes", "parameters", "gathers"),
    [
        (
            SHARED,
            ("tensor parallelism: blocks.0.down runs", "pipeline: blocks.0 runs"),
            BLOCK,
            1 + 2 * 4,  # what is outside of blocks is gathered once; the block, for each of its passes
        ),
        (
            PARTS,
            ("tensor parallelism: blocks.0.up runs", "pipeline: blocks.0 shares parameters with"),
            4 * BLOCK - 3 * (64 * 256 + 256),
            1,  # blocks with parts in common belong to the model
        ),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_that_share_parameters_are_wrapped_once(entry, blocks, notes, parameters, gathers, recompute):
    path, _, _ = entry.rpartition(":")
    shared = PLAIN.replace("self.blocks = nn.ModuleList(Block() for _ in range(4))", blocks)
    assert shared != PLAIN
    Path(path).write_text(shared, encoding="utf-8")
    model, _ = find_model(entry)
    assert [note.partition(" several")[0].partition(" other")[0] for note in model.notes] == [f"no {n}" for n in notes]
    whole, sharded, replicated = (
        captured(f"{entry}[recompute={recompute}]", mesh) for mesh in ("pp=1", "dp_shard=2", "dp_replicate=2")
    )
    assert whole.parameters == replicated.parameters == 2 * sharded.parameters == parameters + 2 * 512 * 64
    assert count(sharded, "all_gather") == gathers
    products = 3 if recompute == "full" else 2  # the last product of a block is not recomputed: nothing reads it
    assert count(sharded, "addmm") == count(whole, "addmm") == products * BLOCKS


def test_frozen_weights_have_no_gradients_and_no_state(entry):
    path, _, _ = entry.rpartition(":")
    frozen = PLAIN.replace("model = Model()", "model = Model()\n    model.blocks.requires_grad_(False)")
    frozen = frozen.replace("SGD(model.parameters()", "SGD([p for p in model.parameters() if p.requires_grad]")
    Path(path).write_text(frozen, encoding="utf-8")
    program = captured(entry, "dp_shard=2")
    assert program.parameters == PARAMETERS // 2
    assert program.resident_bytes == 4 * (PARAMETERS + 2 * 512 * 64) // 2  # SGD keeps the momentum of two matrices
    assert count(program, "reduce_scatter") == 1


ATTENTION = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.kv = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))

    def forward(self, x, angles):
        q = self.q(x).view(*x.shape[:2], 4, 16) * angles
        k, v = (part(x).view(*x.shape[:2], 2, 16).repeat_interleave(2, 2) for part in self.kv)
        y = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))
"""


@pytest.mark.parametrize(
    "optimizer, bytes_each, kernels",
    [("SGD(p, lr=0.1)", 4, {"_foreach_add_"}), ("AdamW(p)", 12, None), ("Adafactor(p)", None, None)],
)
def test_an_optimizer_keeps_its_own_state(entry, optimizer, bytes_each, kernels):
    path = Path(entry.rpartition(":")[0])
    line = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
    changed = f"p = list(model.parameters())\n    optimizer = torch.optim.{optimizer}"
    path.write_text(PLAIN.replace(line, changed), encoding="utf-8")
    model, parameters = find_model(entry)
    program = capture_stage(model, parameters, Mesh({}), model.part(parameters, parameters["layers"]), order="FB")
    tensors = 6 * BLOCKS + 2
    steps = 4 * tensors if "Ad" in optimizer else 0  # one number for each tensor
    factors = BLOCKS * (256 + 64) * 2 + 2 * (512 + 64)  # Adafactor keeps rows and columns of each matrix ...
    vectors = BLOCKS * (256 + 64 + 2 * 64)  # ... and vectors whole
    state = 4 * (factors + vectors) if bytes_each is None else (bytes_each - 4) * PARAMETERS
    assert program.resident_bytes == 4 * PARAMETERS + state + steps
    if kernels:  # PyTorch updates all parameters in one kernel on a GPU
        assert {call.kind for call in program.finish.calls} == kernels


def test_several_optimizers_update_their_parameters(entry):
    path = Path(entry.rpartition(":")[0])
    line = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
    split = "torch.optim.Muon([p for p in model.blocks.parameters() if p.dim() == 2]), torch.optim.SGD(rest, lr=0.1)"
    rest = "rest = [*model.embedding.parameters(), *model.head.parameters()]"
    path.write_text(PLAIN.replace(line, f"{rest}\n    optimizer = [{split}]"), encoding="utf-8")
    model, parameters = find_model(entry)
    program = capture_stage(model, parameters, Mesh({}), model.part(parameters, parameters["layers"]), order="FB")
    assert program.resident_bytes == 4 * PARAMETERS + 4 * BLOCKS * 2 * 64 * 256  # Muon's momentum alone
    kinds = [call.kind for call in program.finish.calls]
    assert kinds.count("_foreach_add_") == 1 and kinds.count("mm") > 0  # SGD; Newton and Schulz's products


def test_a_block_that_is_read_elsewhere_belongs_to_the_model(entry):
    path = Path(entry.rpartition(":")[0])
    read = PLAIN.replace("return self.head(x)", "return self.head(self.blocks[0].norm(x))")
    path.write_text(read, encoding="utf-8")
    program = captured(entry, "dp_shard=2")
    assert count(program, "all_gather") == 2 * (BLOCKS - 1) + 1 and count(program, "reduce_scatter") == BLOCKS


def test_attention_is_divided_by_heads(entry):
    path, _, _ = entry.rpartition(":")
    text = PLAIN.replace("class Model(", f"{ATTENTION}\nclass Model(").replace(
        "class Block", f"{ATTENTION}\nclass Block", 1
    )
    text = text.replace("nn.Linear(256, 64)\n", "nn.Linear(256, 64)\n        self.attention = Attention()\n")
    text = text.replace(
        "def forward(self, x):\n        return x +",
        "def forward(self, x, angles):\n        x = x + self.attention(x, angles)\n        return x +",
    )
    text = text.replace(
        "x = block(x)", "x = block(x, torch.arange(x.shape[1], device=x.device)[None, :, None, None].to(x.dtype).cos())"
    )
    Path(path).write_text(text, encoding="utf-8")
    model, parameters = find_model(entry)
    assert model.notes == () and model.function.tp_plan["blocks.*.attention"] == "input 1 of 2"
    program = captured(entry, "tp=2")
    # As in Megatron-LM: two in the forward pass, two in the backward pass.
    assert count(program, "all_reduce") == 4 * BLOCKS
    assert any("flash" in call.kind and "[1,2,32,16]" in call.signature for call in program.forward.calls)
    with pytest.raises(InvalidInput, match="2 heads"):
        model.checks(parameters, parse_mesh("tp=4"))


def test_what_is_no_training_step_is_named(entry):
    with pytest.raises(InvalidInput, match="expected a TrainingStep, got int"):
        find_model(entry.replace("make_step", "nothing"))
    with pytest.raises(InvalidInput, match="no such function"):
        find_model(entry.replace("make_step", "missing"))


TRAINED = """
import torch
from torch import nn
from simdev import TrainingStep

class Adapted(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.whole = whole.requires_grad_(False)
        self.down = nn.Linear(whole.in_features, 4, bias=False)
        self.up = nn.Linear(4, whole.out_features, bias=False)

    def forward(self, x):
        return self.whole(x) + self.up(self.down(x))

class Block(nn.Module):
    def __init__(self, adapted):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        if adapted:
            self.up, self.down = Adapted(self.up), Adapted(self.down)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def step(adapted=False, frozen=0):
    blocks = nn.ModuleList(Block(adapted) for _ in range(4))
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(*blocks), nn.Linear(64, 64))
    model[0].requires_grad_(not adapted)
    for block in blocks[:frozen]:
        block.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return TrainingStep(model, (torch.randn(8, 64),), lambda model, x: model(x).square().sum(), optimizer)

def whole():
    return step()

def lora():
    return step(adapted=True)

def frozen():
    return step(frozen=2)
"""


@pytest.mark.parametrize("name", ["whole", "lora", "frozen"])
def test_what_is_trained_is_what_pytorch_trains(entry, name):
    """Memory of parameters and states, and FLOPs, against a step that PyTorch executes."""
    from torch.utils.flop_counter import FlopCounterMode

    path = Path(entry.rpartition(":")[0]).with_name("trained.py")
    path.write_text(TRAINED, encoding="utf-8")
    model, parameters = find_model(f"{path}:{name}")
    program = capture_stage(model, parameters, Mesh({}), model.part(parameters, 4), order="FB")

    scope: dict = {}
    exec(compile(TRAINED, str(path), "exec"), scope)
    step = scope[name]()
    with FlopCounterMode(display=False) as counter:
        step.loss(step.model, *step.inputs).backward()
    step.optimizer.step()
    held = list(step.model.parameters())
    held += [value for state in step.optimizer.state.values() for value in state.values()]
    assert program.resident_bytes == sum(tensor.nbytes for tensor in held)
    calls = (*program.forward.calls, *program.backward[program.ONLY].calls)
    assert (
        sum(call.flops for call in calls if call.kind in ("mm", "addmm")) == counter.get_total_flops() // 8
    )  # samples
    trained = sum(parameter.numel() for parameter in step.model.parameters() if parameter.grad is not None)
    assert trained == sum(p.numel() for group in step.optimizer.param_groups for p in group["params"])
    assert (trained < model.function.parameters) == (name != "whole")


SMALL = """
import torch
from torch import nn
from simdev import TrainingStep

class {name}(torch.optim.{base}):
    pass

{name}.__module__ = "{module}"

def make_step():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return TrainingStep(model, (torch.zeros(2, 8),), lambda model, x: model(x).sum(), {name}(model.parameters()))
"""


@pytest.mark.parametrize("module", ["torchao.optim.adam", "bitsandbytes.optim.adamw"])
def test_states_of_8_bits_are_refused_with_what_to_do(entry, module):
    path = Path(entry.rpartition(":")[0])
    path.write_text(SMALL.format(name="AdamW8bit", base="AdamW", module=module), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"optimizer: the update of \w+'s optimizers cannot .* torch.optim.AdamW"):
        find_model(entry)


def test_tensors_of_other_packages_are_recorded_as_the_ops_that_they_run(entry):
    """Such as torchao's tensors of 8 bits, of which PyTorch would otherwise say that they are float32."""
    import torch
    from torch.testing._internal.two_tensor import TwoTensor

    from simdev.parallel.capture.record import RankRecorder

    recorder = RankRecorder()
    a = TwoTensor(torch.ones(2, 3), torch.ones(2, 3))
    with recorder:
        a @ torch.ones(3, 4)
    assert [entry.kind for entry in recorder.entries].count("mm") == 2


FP8 = """
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from simdev import TrainingStep

def make_step():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(4)))
    convert_to_float8_training(blocks, config=Float8LinearConfig())
    model = nn.Sequential(nn.Linear(64, 64), blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return TrainingStep(model, (torch.randn(16, 64),), lambda model, x: model(x).square().sum(), optimizer)
"""


def test_products_of_8_bits_are_those_of_the_library(entry):
    pytest.importorskip("torchao")
    path = Path(entry.rpartition(":")[0])
    path.write_text(FP8, encoding="utf-8")
    model, parameters = find_model(f"{entry}[microbatch=16]")
    program = capture_stage(model, parameters, Mesh({}), model.part(parameters, parameters["layers"]), order="FB")
    calls = (*program.forward.calls, *program.backward[program.ONLY].calls)
    products = [call for call in calls if call.kind == "_scaled_mm"]
    assert len(products) == 3 * 4 and all("f8e4m3" in call.signature for call in products)
    assert sum(call.flops for call in products) == 3 * 4 * 2 * 16 * 64 * 64


def test_inputs_of_a_package_may_lack_a_batch():
    """Flux takes the positions of its tokens, which all samples share; in a user's own step this is a mistake."""
    torch = pytest.importorskip("torch")
    inputs = torch.zeros(plain.SAMPLES, 16, 64), torch.zeros(16, 3), torch.zeros(plain.SAMPLES)
    step = TrainingStep(None, inputs, None)
    assert plain._samples(step, "diffusers:FluxTransformer2DModel") == plain.SAMPLES
    with pytest.raises(InvalidInput, match="none is the batch"):
        plain._samples(step, "my_model.py:make_step")
    with pytest.raises(InvalidInput, match="none of its inputs has samples as its first axis"):
        plain._samples(TrainingStep(None, inputs[1:2], None), "diffusers:FluxTransformer2DModel")


TWO_LISTS = (
    PLAIN.replace(
        "self.head =",
        "self.others = nn.ModuleList(Other() for _ in range(COUNTS[1]))\n        self.head =",
    )
    .replace(
        "        return self.head(x)",
        "        for block in self.others:\n            x = block(x)\n        return self.head(x)",
    )
    .replace("range(4)", "range(COUNTS[0])")
    .replace(
        "class Model",
        """class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Model""",
    )
)


def test_blocks_that_do_not_run_are_not_repeated(entry, tmp_path):
    """Nine blocks, of which the forward pass runs four: a capture of three and of four would run three and four."""
    code = PLAIN.replace("range(4)", "range(9)").replace("in self.blocks:", "in self.blocks[:4]:")
    (tmp_path / "sliced.py").write_text(code, encoding="utf-8")
    (tmp_path / "short.py").write_text(PLAIN, encoding="utf-8")
    sliced = f"{tmp_path}/sliced.py:make_step"
    program, short = captured(sliced, "dp_shard=1"), captured(f"{tmp_path}/short.py:make_step", "dp_shard=1")
    assert find_model(sliced)[0].function.parameters == PARAMETERS + 5 * BLOCK
    assert sum(call.flops for call in program.forward.calls) == sum(call.flops for call in short.forward.calls) > 0
    with pytest.raises(InvalidInput, match=r"blocks\.4 does not run"):
        captured(sliced, "dp_shard=2", STEP)


@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize("recompute, order", [pytest.param("none", STEP, marks=pytest.mark.long), ("full", "FB")])
def test_two_lists_of_blocks_are_captured_with_few_of_each(entry, mesh, recompute, order):
    path, _, _ = entry.rpartition(":")
    Path(path).write_text(TWO_LISTS.replace("class Block", "COUNTS = 15, 14\n\nclass Block", 1), encoding="utf-8")
    model, parameters = find_model(f"{entry}[recompute={recompute}]")
    part = model.part(parameters, parameters["layers"])
    assert part.kinds == (0,) * 15 + (1,) * 14
    assert [few.layers for few in few_captures(part)] == [6, 7, 7, 8]
    few = capture_stage(model, parameters, parse_mesh(mesh), part, order)
    key = tuple(sorted((name, value) for name, value in parameters.items() if name != "layers"))
    whole = captured_whole(model, key, parse_mesh(mesh), part, order)
    assert (few.parameters, few.resident_bytes, few.output_bytes, few.shard_unit) == (
        whole.parameters,
        whole.resident_bytes,
        whole.output_bytes,
        whole.shard_unit,
    )
    for one, other in zip(segments_of(few), segments_of(whole), strict=True):
        alike = [replace(b, signature=a.signature) for a, b in zip(one.calls, other.calls, strict=True)]
        assert one.calls == tuple(alike) and one.live_bytes == other.live_bytes
        assert [call.live_bytes for call in one.calls] == [call.live_bytes for call in other.calls]
        assert one.name == other.name
        assert one.name == "finish" or one.calls == other.calls  # an update of all parameters has no shapes of its own


@pytest.mark.slow
def test_short_lists_of_blocks_are_recomputed(entry):
    """Captures leave out none of them."""
    path, _, _ = entry.rpartition(":")
    Path(path).write_text(TWO_LISTS.replace("class Block", "COUNTS = 2, 3\n\nclass Block", 1), encoding="utf-8")
    kept, again = captured(entry, "dp_shard=2"), captured(f"{entry}[recompute=full]", "dp_shard=2")
    assert again.forward.live_bytes < kept.forward.live_bytes
    assert count(again, "addmm") == count(kept, "addmm") + 2 + 3


ENCODER = {
    "nn.ModuleList(Block() for _ in range(4))": "nn.TransformerEncoder(layer, 4)",
    "        self.embedding": "        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)\n"
    "        self.embedding",
    "for block in self.blocks:\n            x = block(x)": "x = self.blocks(x, torch.ones(32, 32).triu(1) == 1)",
}


def test_code_that_reads_values_of_its_mask_is_analysed_as_it_is_captured(entry):
    """nn.TransformerEncoder compares a mask with the causal one."""
    path, _, _ = entry.rpartition(":")
    asks = PLAIN
    for old, new in ENCODER.items():
        assert old in asks
        asks = asks.replace(old, new, 1)
    Path(path).write_text(asks, encoding="utf-8")
    model, _ = find_model(entry)
    assert model.notes == () and model.pipeline and model.function.layers == 4
    assert model.function.tp_plan == {"blocks.layers.*.linear1": "colwise", "blocks.layers.*.linear2": "rowwise"}


def test_products_of_an_odd_size_are_named(entry):
    path, _, _ = entry.rpartition(":")
    Path(path).write_text(PLAIN.replace("256", "33"), encoding="utf-8")
    model, _ = find_model(entry)
    assert model.notes == ("no tensor parallelism: 33 heads or columns do not divide by 2 tensor-parallel ranks",)


def test_a_block_that_does_not_run_is_named(entry):
    path, _, _ = entry.rpartition(":")
    Path(path).write_text(
        PLAIN.replace("self.head =", "self.idle = nn.ModuleList([Block(), Block()])\n        self.head ="),
        encoding="utf-8",
    )
    with pytest.raises(InvalidInput, match=r"idle\.0 does not run with the inputs that were made up, and FSDP"):
        captured(entry, "dp_shard=2", STEP)


def test_an_estimate_knows_what_a_stage_sends(entry):
    model, parameters = find_model(f"{entry}[microbatch=2]")
    plan = Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("pp=2,dp_shard=4"), 4)
    assert _sent_bytes(plan, 0) == prepare(plan).stages[0].output_bytes == 2 * 32 * 64 * 2
