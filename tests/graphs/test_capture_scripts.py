"""Training scripts as they are: each runs unchanged, and the FLOPs of its step are counted by hand or by PyTorch."""

import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.graphs.capture import capture_script
from simdev.parallel import parse_mesh

torch = pytest.importorskip("torch")
SCRIPTS = Path(__file__).parent / "scripts"


def captured(name, *arguments, **options):
    before = torch.Tensor.backward, torch.optim.Optimizer.__init__, torch.compile, torch.backends.mkldnn.enabled
    graph = capture_script(SCRIPTS / f"{name}.py", list(arguments), **options)
    after = torch.Tensor.backward, torch.optim.Optimizer.__init__, torch.compile, torch.backends.mkldnn.enabled
    assert before == after, "PyTorch is as it was"
    return graph


def of(graph, *kinds):
    """FLOPs and number of the ops of some kinds."""
    chosen = np.array([kind in kinds for kind in graph.kinds])[graph.op_kind]
    return int(graph.op_flops[chosen].sum()), int(chosen.sum())


def linear(rows, *layers):
    """FLOPs of forward and backward of linear layers, whose input has no gradient."""
    return sum(2 * rows * wide * high * (2 if not number else 3) for number, (wide, high) in enumerate(layers))


def test_a_script_without_an_optimizer(capsys):
    graph = captured("regression")
    assert of(graph, "addmm", "mm")[0] == 2 * 32 * 4 + linear(32, (4, 1)), "the targets, and the line"
    assert graph.meta["marked_by"] == "backward" and of(graph, "update")[1] == 2
    assert set(graph.op_phase.tolist()) == {0, 1, 2}


def test_two_optimizers_are_one_step(capsys):
    graph = captured("dcgan", "--niter", "1", step=4)
    assert of(graph, "adam")[1] == 2 + 4, "discriminator and generator"
    names = set(graph.op_names)
    assert {"netD.main.0/weight", "netG.main.0/weight"} <= names, "named as in the script"
    assert sum(kind == "input" for kind in np.array(graph.kinds)[graph.op_kind]) == 1, "the batch of the loader"
    assert "step_before_flops" not in graph.meta
    smaller = captured("dcgan", "--niter", "2", step=4, batch=4)
    assert of(graph, "convolution")[0] == 2 * of(smaller, "convolution")[0]
    assert "netG/step" not in names and capsys.readouterr().out


@pytest.mark.parametrize(("step", "fake"), [(3, False), (4, True)])
def test_a_step_ends_with_the_outer_of_two_optimizers(step, fake):
    graph = captured("wrapped", step=step, fake=fake)
    assert of(graph, "addmm", "mm")[0] == linear(8, (16, 32), (32, 4))
    phases = {phase: {graph.kinds[kind] for kind in graph.op_kind[graph.op_phase == phase]} for phase in (0, 1, 2)}
    assert {"addmm", "relu"} <= phases[0] and "mm" in phases[1] and not {"addmm", "mm"} & phases[2]
    assert graph.meta["marked_by"] == "Lookahead"
    updated = of(graph, "adamw")[1]
    assert updated == 4 * (2 if step == 4 else 1), "every second step, the weights move back as well"
    assert graph.meta["optimizer_state_bytes"] == 2 * graph.meta["parameter_bytes"]


def test_values_that_fake_tensors_lack_inside_pytorch_are_refused_with_a_remedy(tmp_path):
    path = tmp_path / "packs.py"
    path.write_text(
        "import torch\nlayer = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(layer.parameters())\n"
        "for _ in range(4):\n    lengths = torch.tensor([3, 1])\n    made = layer(torch.randn(2, 3, 4))\n"
        "    packed = torch.nn.utils.rnn.pack_padded_sequence(made, lengths, batch_first=True)\n"
        "    packed.data.sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    with pytest.raises(InvalidInput, match=r"line \d, .*run the script without --fake"):
        capture_script(path, fake=True)
    assert of(capture_script(path), "addmm")[0] == 2 * 6 * 4 * 4


@pytest.mark.slow
def test_a_step_that_draws_samples_besides_says_that_steps_vary(capsys):
    assert captured("dcgan").meta["step_before_flops"] > 0, "step 2 holds what the script does after its first step"


def test_a_classifier_with_a_loader_and_a_test(capsys):
    graph = captured("mnist", "--epochs", "1", batch=4)
    forward = 2 * 4 * (8 * 9 * 26 * 26 + 16 * 8 * 9 * 24 * 24)
    assert of(graph, "convolution") == (forward, 2)
    assert of(graph, "convolution_backward")[0] == forward + 2 * 4 * 16 * 8 * 9 * 24 * 24
    assert of(graph, "addmm", "mm")[0] == 3 * 2 * 4 * 16 * 12 * 12 * 10
    assert of(graph, "adadelta")[1] == 6 and graph.meta["arguments"] == ["--epochs", "1", "--batch-size=4"]
    assert of(graph, "native_dropout")[1] == 1


def test_a_language_model_with_a_state_that_outlives_the_step(capsys):
    assert of(captured("words"), "_cudnn_rnn", "_cudnn_rnn_backward")[1] == 2, "two layers in one call"
    graph = captured("words", unroll=True)
    assert of(graph, "update")[1] == 10, "eight weights of the LSTM, the tied table, a bias"
    gates = 2 * 4 * 64 * 16 * 6  # four rows, six words; of the input or of the state of one layer
    decoder = 2 * 24 * 16 * 50
    products = of(graph, "addmm", "mm", "bmm")[0]
    # Each product has two gradients, but for the first state, which has none.
    assert products == pytest.approx(3 * (4 * gates + decoder), rel=0.05)


@pytest.mark.slow
def test_a_small_gpt_that_asks_for_an_accelerator(capsys):
    graph = captured("nanogpt")
    assert of(graph, "adamw")[1] == 2 * 10 + 2 and graph.meta["precision_of_classes"]["gemm"].keys() == {"bf16"}
    block = 32 * 96 + 32 * 32 + 2 * 32 * 128
    assert of(graph, "addmm", "mm")[0] == 2 * 3 * 2 * 64 * (2 * block + 32 * 64), "two micro-batches"
    assert of(graph, "_scaled_dot_product_flash_attention")[1] == 4
    assert {"h.0.attn/mm", "h.1.mlp.2/addmm.1"} <= set(graph.op_names)


def test_a_closure_is_evaluated_inside_the_optimizer(capsys):
    graph = captured("closure")
    assert of(graph, "addmm", "mm")[0] % linear(8, (16, 4)) == 0 < of(graph, "addmm", "mm")[0]
    assert graph.meta["optimizer"] == "lbfgs" and of(graph, "lbfgs")[1] >= 2
    assert {0, 1, 2} == set(graph.op_phase.tolist())


@pytest.mark.parametrize("arguments", [(), ("--by-hand",)])
def test_a_process_for_each_rank_is_one_replica(arguments, capsys):
    graph = captured("spawned", *arguments)
    assert of(graph, "addmm", "mm")[0] == linear(8, (16, 4)) and of(graph, "sgd")[1] == 2
    assert torch.multiprocessing.Process.start.__module__ == "multiprocessing.process"


NET = "import torch\nmodel = torch.nn.Linear(16, 4)\nx = torch.ones(8, 16)\n"
ODD = {  # scripts, and the FLOPs of a step
    "a generator after its critics": (
        """
judge = torch.nn.Linear(4, 1)
critics, makes = torch.optim.Adam(judge.parameters()), torch.optim.Adam(model.parameters())
for _ in range(5):
    for _ in range(4):
        critics.zero_grad()
        judge(model(x).detach()).mean().backward()
        critics.step()
    makes.zero_grad()
    judge(model(x)).mean().backward()
    makes.step()
""",
        4 * (2 * 8 * 16 * 4 + 2 * 2 * 8 * 4) + linear(8, (16, 4), (4, 1)),
    ),
    "optimizers that step inside the backward pass": (
        """
own = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
for one in own:
    one.register_post_accumulate_grad_hook(lambda one: own[one].step())
for _ in range(5):
    model(x).sum().backward()
""",
        linear(8, (16, 4)),
    ),
    "a sparse matrix from outside": (
        """
near = torch.eye(8).to_sparse()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(5):
    torch.sparse.mm(near, model(x)).sum().backward()
    optimizer.step()
""",
        linear(8, (16, 4)) + 2 * (2 * 8 * 4),  # eight elements, not 64
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_steps_that_were_lost_or_refused(case, tmp_path):
    text, flops = ODD[case]
    path = tmp_path / "train.py"
    path.write_text(NET + text)
    graph = capture_script(path)
    assert of(graph, "addmm", "mm", "_sparse_addmm")[0] == flops
    assert set(graph.op_phase.tolist()) == {0, 1, 2}


def test_gradients_accumulate_under_accelerate(capsys):
    pytest.importorskip("accelerate")
    graph = captured("accelerated")
    assert of(graph, "addmm", "mm")[0] == 2 * linear(8, (16, 32), (32, 4))
    assert of(graph, "adamw")[1] == 4


@pytest.mark.slow
def test_the_trainer_of_transformers(capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    graph = captured("trainer", "--gradient_accumulation_steps", "2", batch=4)
    assert graph.meta["arguments"][-1] == "--per_device_train_batch_size=4"
    block = 12 * 32 * 32
    assert of(graph, "addmm", "mm")[0] == 2 * 3 * 2 * 4 * 16 * (2 * block + 32 * 50)
    assert of(graph, "adamw")[1] == 2 * 12 + 4 and "transformer.h.0.attn.c_attn/weight" in graph.op_names


def ranks(name, mesh, *arguments, **options):
    """The calls of a step of rank 0, and its collectives with their bytes."""

    from simdev.parallel.capture.script import capture_script_ranks  # imports PyTorch

    def state():
        variables = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")]
        return variables, torch.distributed.init_process_group, torch.cuda.device_count, torch.cpu.Stream

    before = state()
    program = capture_script_ranks(SCRIPTS / f"{name}.py", parse_mesh(mesh), arguments, **options)
    assert before == state() and not torch.distributed.is_initialized()
    calls = [call for piece in program.pieces[0] for call in program.segments[piece.segment].calls]
    return calls, [(call.kind, call.payload_bytes) for call in calls if call.is_collective]


def products(calls):
    return sum(call.flops for call in calls if call.kind in ("mm", "addmm"))


PARAMETERS = 3 * 2 * 64 * 256  # of the script that shards
STEP = linear(4, *[(64, 256), (256, 64)] * 3)


def test_a_script_on_ranks_with_ddp(capsys):
    calls, collectives = ranks("sharded", "dp_replicate=4")
    assert collectives == [("all_reduce", 4), ("all_reduce", 4 * PARAMETERS)], "the mean to print, and the bucket"
    assert products(calls) == STEP


def test_a_script_on_ranks_with_fsdp2(capsys):
    calls, collectives = ranks("sharded", "dp_shard=4", "--wrap", "fsdp2", scale=8)
    assert Counter(kind for kind, _ in collectives) == {"all_gather": 6, "reduce_scatter": 3, "all_reduce": 2}
    assert {size for kind, size in collectives if kind == "all_gather"} == {2 * PARAMETERS // 3}, "bf16"
    assert {size for kind, size in collectives if kind == "reduce_scatter"} == {4 * PARAMETERS // 3}, "f32"
    assert products(calls) == 2 * STEP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "arguments", "step"),
    [
        ("sharded", "dp_replicate=4", (), 3),
        ("sharded", "dp_shard=4", ("--wrap", "fsdp2"), 3),
        ("accelerated", "dp_replicate=4", (), 2),
        ("spawned", "dp_replicate=4", (), 3),
    ],
)
def test_a_script_on_ranks_of_fake_tensors(name, mesh, arguments, step, capsys):
    """The same collectives, products and kernels; a fake run knows no number of steps, and PyTorch's fake backward pass
    of a loss casts once more."""
    if name == "accelerated":
        pytest.importorskip("accelerate")
    (fake, sent), (real, expected) = (ranks(name, mesh, *arguments, step=step, fake=fake) for fake in (True, False))
    assert sent == expected and products(fake) == products(real)
    kinds = [Counter(call.kind for call in calls if call.kind != "_to_copy") for calls in (fake, real)]
    assert kinds[0] == kinds[1]
    assert "?" in capsys.readouterr().out or name == "spawned"


SYNCHRONISED = """
torch.distributed.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU())
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
"""


def test_norms_of_all_ranks(tmp_path):
    """Means, inverses and the count of a rank are gathered; two sums are reduced on the way back."""
    (tmp_path / "train.py").write_text(NET + SYNCHRONISED)
    for fake in (False, True):
        calls, collectives = ranks(tmp_path / "train", "dp_replicate=4", fake=fake)
        assert ("all_gather", 4 * 4 * (2 * 16 + 1)) in collectives and ("all_reduce", 4 * 2 * 16) in collectives
        norms = Counter(call.kind for call in calls if call.kind.startswith("batch_norm_"))
        assert set(norms.values()) == {1} and len(norms) == 5


def test_norms_of_ranks_compute_what_norms_of_one_do():
    """The kernels against PyTorch's norm, forward and backward, on a batch that one rank has alone."""
    from simdev.graphs.capture.rewrites import norms_of_ranks

    norm, batch, sent = torch.nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    norm.weight.data.uniform_()
    batch.requires_grad_()
    out = norm(batch)
    expected = torch.autograd.grad(out, (batch, norm.weight, norm.bias), sent)
    with norms_of_ranks(), torch.no_grad():
        mean, inverse = torch.batch_norm_stats(batch, norm.eps)
        found = torch.batch_norm_elemt(batch, norm.weight, norm.bias, mean, inverse, norm.eps)
        total, product, *rest = torch.batch_norm_backward_reduce(
            sent, batch, mean, inverse, norm.weight, True, True, True
        )
        count = torch.tensor([100], dtype=torch.int32)
        back = torch.batch_norm_backward_elemt(sent, batch, mean, inverse, norm.weight, total, product, count)
    torch.testing.assert_close(found, out.detach())
    torch.testing.assert_close((back, *rest), expected)


def test_a_value_that_fake_ranks_lack_never_steers_a_script(tmp_path):
    from simdev.parallel.capture.script import capture_script_ranks

    text = (SCRIPTS / "sharded.py").read_text(encoding="utf-8")
    line = "            loss.backward()\n"
    path = tmp_path / "train.py"
    path.write_text(text.replace(line, f"            assert loss.item() < 9\n{line}"), encoding="utf-8")
    with pytest.raises(InvalidInput, match="line 57 compares a number of the run"):
        capture_script_ranks(path, parse_mesh("dp_replicate=4"), fake=True)


def test_a_script_on_ranks_with_accelerate(capsys):
    pytest.importorskip("accelerate")
    calls, collectives = ranks("accelerated", "dp_replicate=4", step=2)  # a rank has two batches: one step of an epoch
    parameters = 16 * 32 + 32 + 32 * 4 + 4
    assert collectives.count(("all_reduce", 4 * parameters)) == 1, "of two micro-batches only the last is reduced"
    assert products(calls) == 2 * linear(8, (16, 32), (32, 4))


def test_a_script_that_starts_the_process_of_each_rank(capsys):
    calls, collectives = ranks("spawned", "dp_replicate=4")
    assert collectives == [("all_reduce", 4 * (16 * 4 + 4))] and products(calls) == linear(8, (16, 4))


def test_scripts_that_no_mesh_fits(capsys):
    with pytest.raises(InvalidInput, match="no rank calls a collective .* train without each other"):
        ranks("sharded", "dp_replicate=4", "--wrap", "none")
    with pytest.raises(InvalidInput, match="pipeline stages; for these give FILE.py:FUNCTION"):
        ranks("sharded", "pp=2")


def test_a_step_after_the_end_of_a_script_is_refused(capsys):
    pytest.importorskip("accelerate")
    with pytest.raises(InvalidInput, match="made 2 training steps before it ended"):
        ranks("accelerated", "dp_replicate=4")


def test_a_command_captures_a_script_on_ranks_and_scales_it(tmp_path, capfd):
    from simdev.cli.main import main

    out = tmp_path / "step.rank.json.gz"
    command = ["capture", str(SCRIPTS / "sharded.py"), "--mesh", "dp_replicate=2", "--scale", "batch=2", "-o", str(out)]
    with mock.patch.object(sys, "argv", ["simdev", *command, "--", "--wrap=ddp"]), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None) and out.is_file()
    assert "2 ranks (dp_replicate=2)" in capfd.readouterr().out


def test_a_layer_of_e3nn(tmp_path):
    pytest.importorskip("e3nn")
    path = tmp_path / "train.py"
    path.write_text(EQUIVARIANT)
    graph = capture_script(path)
    assert of(graph, "adam")[1] == 2 and graph.meta["values"] == "real"
    assert of(graph, "bmm", "mm")[0] > 0


EQUIVARIANT = """
import torch
from e3nn import o3

near = o3.Irreps.spherical_harmonics(2)
product, last = o3.FullyConnectedTensorProduct("8x0e + 4x1o", near, "8x0e + 4x1o"), o3.Linear("8x0e + 4x1o", "1x0e")
optimizer = torch.optim.Adam([*product.parameters(), *last.parameters()])
for _ in range(5):
    x, places = product.irreps_in1.randn(16, -1), torch.randn(16, 3)
    optimizer.zero_grad()
    last(product(x, o3.spherical_harmonics(near, places, normalize=True))).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\nprint('ready')", "made no training step .* CustomStep"),
        ("import torch\nraise KeyError('x')", "line 2, in <module>: the script failed before its step 3 .* KeyError"),
        ("import sys\nsys.exit(2)", "ended with exit code 2"),
    ],
)
def test_what_a_script_lacks(tmp_path, text, message, capsys):
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        capture_script(path)
    with pytest.raises(InvalidInput, match="found none"):
        capture_script(path, batch=8)


def test_the_command_takes_a_scripts_arguments(tmp_path, capfd):
    from simdev.cli.main import main

    out = tmp_path / "mnist.npz"
    command = ["capture", str(SCRIPTS / "mnist.py"), "--step", "2", "-o", str(out), "--", "--epochs", "1"]
    with mock.patch.object(sys, "argv", ["simdev", *command]), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None) and out.is_file()
    assert "which ends with a step of Adadelta" in capfd.readouterr().out


WIDE = """
import math
import torch
model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.BatchNorm1d(100), torch.nn.Linear(100, 4))
optimizer = torch.optim.Adam(model.parameters())
x, y, total, best = torch.randn(8, 100), torch.randint(0, 4, (8,)), torch.zeros(1), 1.0
for _ in range(6):
    optimizer.zero_grad()
    out = model(x[y < 9])
    loss = torch.nn.functional.cross_entropy(out, y)
    loss.backward()
    {}
    optimizer.step()
"""
LOG = 'print(f"{loss.item():.3f} {loss:.2f}", "%.1f" % loss.item(), round(loss.item() / 3, 2), out.tolist()[0])'
STEERED = [
    "if loss.item() > 2: model(x)",
    "if loss > 2: model(x)",
    "best = min(best, loss.item())",
    "size = int(loss)",
    "if math.exp(loss.item()) > 2: model(x)",
    "size = math.floor(math.exp(loss.item()))",
    "size = float(loss)",
    "model(x[out[:, 0] > 0])",
    "if out.detach().numpy()[0, 0] > 0: model(x)",
    "total += loss.detach(); assert total.item() > 0",
    "scaled = total * loss.item(); assert scaled == 0",
    "assert model[1].running_mean.sum() > 9",
    "model[1].bias.data = x[0] * loss.item(); assert model[1].bias.sum() > 0",
    "if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 9: model(x)",
    "losses = {loss.item(): 1}",
    "total[0] = loss.item(); assert total.item() > 0",
    "if torch.tensor([loss.item(), 0.0]).mean() > 0: model(x)",
]


def script_of_one(tmp_path, line):
    path = tmp_path / "train.py"
    path.write_text(WIDE.replace("{}", line))
    return path


@pytest.mark.parametrize("line", STEERED)
def test_a_value_that_fake_tensors_lack_never_steers_a_script(line, tmp_path):
    with pytest.raises(InvalidInput, match="(line 12 .*; a run on fake|depends on the values).*without --fake"):
        capture_script(script_of_one(tmp_path, line), fake=True)


def test_a_refused_value_stays_refused_when_the_script_catches_the_error(tmp_path):
    path = script_of_one(tmp_path, "\n    try: loss.item() > 2\n    except Exception: model(x)")
    with pytest.raises(InvalidInput, match="line 13 compares a number"):
        capture_script(path, fake=True)


def test_fake_tensors_give_the_graph_of_the_real_run(tmp_path, capsys):
    guards = "; assert math.isfinite(loss.item()) and not torch.isnan(out).any() and (y < 9).all()"
    computed = '; import numpy; print("%.1f" % loss, math.exp(loss.item()), numpy.log(loss.item()), math.sqrt(4.0))'
    path = script_of_one(tmp_path, LOG + computed + guards)
    fake, real = (capture_script(path, fake=fake) for fake in (True, False))
    assert capsys.readouterr().out.splitlines()[:2] == ["? ? nan ? [?, ?, ?, ?]", "nan ? ? 2.0"]
    same_graph(fake, real)
    assert set(fake.meta["unknown_numbers"]) == {"line 12"} == set(fake.meta["taken_as_finite"])


WEIGHTS = """
import torch
weight = torch.nn.Parameter(torch.randn(128, 128))
optimizer = torch.optim.SGD([weight], lr=1e-6)
for _ in range(4):
    loss = (torch.ones(64, 128) @ weight).square().mean()
    loss.backward()
    if loss.item() < 1e4:
        (torch.ones(64, 128) @ weight).square().mean().backward()
    optimizer.step()
"""


LOGGED = """
    import json
    losses = torch.zeros(3)
    losses[1] = loss.item()
    drawn = torch.distributions.Categorical(logits=out).sample()
    print(json.dumps({"loss": loss.item()}), torch.tensor([loss.item()]).tolist(), f"{losses.mean():.3f}", len(drawn))
"""


def test_logs_hold_no_value_of_a_fake_run(tmp_path, capsys):
    path = script_of_one(tmp_path, LOGGED)
    fake, real = (capture_script(path, fake=fake) for fake in (True, False))
    assert capsys.readouterr().out.splitlines()[0] == '{"loss": null} [?] ? 8'
    same_graph(fake, real)


SPARSE = """
import torch
torch.manual_seed(0)
adjacency = torch.eye(8).to_sparse()
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(4):
    torch.sparse.mm(adjacency, layer(torch.randn(8, 8))).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "said"), [(WEIGHTS, "line 8 compares a number"), (SPARSE, "line 8.*run the script without --fake")]
)
def test_a_script_that_asks_for_values_of_large_draws_or_sparse_products_runs_without_fake(text, said, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=said):
        capture_script(path, fake=True)
    assert capture_script(path).meta["flops"] > 0


SCRIPTED = """
import math, torch

@torch.jit.script
def gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))

model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = gelu(model(torch.randn(8, 100))).mean()
    loss.backward()
    optimizer.step()
    print(math.log(loss.item()))
"""


def test_torchscript_knows_the_functions_of_math_in_a_run_on_fake_tensors(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPTED)
    found = len(torch.jit._builtins._get_builtin_table())
    assert capture_script(path, fake=True).meta["flops"] > 0
    assert len(torch.jit._builtins._get_builtin_table()) == found


SHARED = """
model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.BatchNorm1d(4)).share_memory()
torch.distributed.init_process_group("nccl")
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
"""


def test_norms_of_all_replicas_and_shared_memory(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(NET + SHARED)
    forward = torch.nn.SyncBatchNorm.forward
    fake, real = (capture_script(path, fake=fake) for fake in (True, False))
    same_graph(fake, real)
    assert of(real, "native_batch_norm")[1] == 1 and of(real, "addmm", "mm")[0] == linear(8, (16, 4))
    assert forward is torch.nn.SyncBatchNorm.forward


def test_a_picture_of_unknown_values_is_not_written(tmp_path):
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    text = "\nfrom torchvision.utils import save_image\n"
    for file, shown in ("known.png", "torch.rand(3, 4, 4)"), ("unknown.png", "torch.nn.Linear(512, 512).weight"):
        text += f"save_image({shown}.detach(), {str(tmp_path / file)!r}, normalize=True)\n"
    path = tmp_path / "train.py"
    path.write_text(NET + text + SHARED)
    graph = capture_script(path, fake=True)
    assert (tmp_path / "known.png").exists() and not (tmp_path / "unknown.png").exists()
    assert graph.meta["unknown_numbers"] == {"line 7": 1}


CHECKPOINTS = """
import pathlib
file = pathlib.Path(__file__).parent / "last.pt"
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters())
for number in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "number": number}, file)
    loaded = torch.load(f=str(file))
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["number"] == number
"""


def test_a_checkpoint_without_values_is_not_written(tmp_path):
    path, file = tmp_path / "train.py", tmp_path / "last.pt"
    path.write_text(NET + CHECKPOINTS)
    real = capture_script(path)
    written = file.read_bytes()
    fake = capture_script(path, fake=True)
    assert file.read_bytes() == written
    assert of(fake, "addmm", "mm") == of(real, "addmm", "mm") and of(fake, "adam") == of(real, "adam")
    assert fake.meta["optimizer_state_bytes"] == real.meta["optimizer_state_bytes"] == 2 * fake.meta["parameter_bytes"]
    assert list(fake.meta["unknown_numbers"]) == [f"line {1 + path.read_text().split(chr(10)).index(SAVES)}"]


SAVES = next(line for line in CHECKPOINTS.split("\n") if "torch.save" in line)


def same_graph(fake, real):
    assert fake.op_names == real.op_names and (fake.op_flops == real.op_flops).all()
    assert (fake.op_persistent_bytes == real.op_persistent_bytes).all()
    assert (fake.meta["values"], real.meta["values"]) == ("fake", "real")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "dcgan", "words", "nanogpt", "accelerated", "trainer"])
def test_a_script_has_the_same_graph_on_fake_tensors(name, capsys):
    if name in ("accelerated", "trainer"):
        pytest.importorskip("accelerate")
    same_graph(*(captured(name, fake=fake) for fake in (True, False)))
