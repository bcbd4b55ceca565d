"""Steps as people train: mixed precision, checkpoints, loops of their own, inference; each small enough to count."""

import numpy as np
import pytest

from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.capture import capture, capture_file
from simdev.graphs.workload import CustomStep, InferenceStep, TrainingStep
from simdev.report.describe import peak_bytes

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional


def kinds(graph, phase=None):
    return [
        graph.kinds[kind]
        for kind, of in zip(graph.op_kind, graph.op_phase, strict=True)
        if phase in (None, ("forward", "backward", "update")[of])
    ]


def signatures(graph, kind):
    return [
        graph.signatures[signature]
        for signature, op in zip(graph.op_signature, graph.op_kind, strict=True)
        if graph.kinds[op] == kind
    ]


def classifier():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def classify(model, x, y):
    return functional.cross_entropy(model(x), y)


DATA = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)


# Construction --------------------------------------------------------------------------------------------------


def test_constructors_may_look_at_small_tensors_and_draw_truncated_normals():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            rates = torch.linspace(0, 4, 3).tolist()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(int(rates[-1])))
            self.table = nn.Parameter(torch.empty(300, 300))
            nn.init.trunc_normal_(self.table, std=0.02)
            index = torch.arange(4)[:, None] - torch.arange(4)
            self.width = int(index.max().item())

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x[:, : self.width] @ self.table[:3]

    from simdev.graphs.capture.run import run

    graph = run(lambda: TrainingStep(Odd(), (torch.zeros(2, 8),), lambda model, x: model(x).sum()), "odd", {})
    assert kinds(graph, "forward").count("addmm") == 4
    assert graph.meta["parameters"] == 4 * 72 + 300 * 300


def test_values_written_through_a_known_mask_stay_known():
    """As detection models match boxes: the mask chooses what is written, and the result chooses what is read."""
    from simdev.graphs.capture.run import run

    def loss(model, x, labels):
        marks = labels.clone()
        marks[labels > 1] = 0
        return model(x)[torch.where(marks > 0)[0]].sum()

    def make():
        return TrainingStep(nn.Linear(8, 4), (torch.zeros(5, 8), torch.tensor([0, 1, 2, 1, 3])), loss)

    graph = run(make, "masked", {})
    assert "values" not in graph.meta and signatures(graph, "sum")[0] == "sum(f32[2,4])->f32[]"


def test_a_known_mask_of_another_shape_is_refused_as_by_pytorch():
    from simdev.graphs.capture.run import run

    def make(rows=5):
        mask = torch.tensor([True, False, True, False, True])
        return TrainingStep(nn.Linear(8, 4), (torch.zeros(rows, 8), mask), lambda model, x, m: model(x)[m].sum())

    assert "sum(f32[3,4])->f32[]" in run(make, "masked", {}).signatures
    with pytest.raises(IndexError, match=r"the mask \[5\] is not that of what it masks, \[3\]"):
        run(lambda: make(3), "masked", {})


class Picks(nn.Module):
    """Keeps the rows that a random projection likes, and runs as many layers as their mean asks for."""

    def __init__(self):
        super().__init__()
        self.score, self.layer, self.asks = nn.Linear(64, 1), nn.Linear(64, 64), ()

    def forward(self, x):
        x = x[self.score(x).squeeze(1) > 0.3]
        if isinstance(x, self.asks):
            x = x[x[:, 0] > 0]
        for _ in range(int(x.abs().mean() * 3)):
            x = self.layer(x)
        return x[torch.nonzero(x[:, 0] > 0)[:, 0]], x.sum(1).tolist()[0]


def pick():
    return TrainingStep(Picks(), (torch.randn(256, 64),), lambda model, x: model(x)[0].sum())


def test_a_step_that_asks_for_values_takes_them_from_a_real_forward_pass():
    from simdev.graphs.capture.run import _run_for_real, run

    graph, real = run(pick, "picks", {}), _run_for_real(pick, "picks", {})
    assert graph.meta["values"] == "forward" and real.meta["values"] == "real"
    assert graph.fingerprint == real.fingerprint
    assert kinds(graph, "forward").count("addmm") > 1 and "f32[256,64]" not in signatures(graph, "sum")[-1]


def test_a_step_that_asks_other_questions_on_fake_tensors_runs_for_real():
    from torch._subclasses.fake_tensor import FakeTensor

    from simdev.graphs.capture.run import run

    def odd():
        step = pick()
        step.model.asks = FakeTensor
        return step

    assert run(odd, "odd", {}).meta["values"] == "real"


def test_copied_layers_are_the_layers_of_a_model_built_for_real():
    """``nn.TransformerEncoder`` deep-copies its layer; the views of a copied weight are no ops."""
    from simdev.graphs.capture.run import run

    def make():
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        return TrainingStep(model, (torch.zeros(2, 3, 8),), lambda model, x: model(x).sum())

    graph = run(make, "copied", {})
    assert not {"t", "transpose", "detach"} & set(graph.kinds)
    assert graph.fingerprint == run(make(), "copied", {}).fingerprint


def test_the_first_reader_of_a_constant_makes_its_own_result():
    table = torch.randn(2, 4)
    graph = capture(
        TrainingStep(nn.Linear(8, 4), (torch.zeros(2, 8),), lambda model, x: (model(x) * table).sum()), "constant"
    )
    assert kinds(graph, "forward") == ["parameter", "parameter", "input", "addmm", "constant", "mul", "sum"]
    constant, mul = graph.op_names.index("constant"), graph.op_names.index("loss/mul")
    read = graph.tensor_producer[graph.inputs[graph.input_ptr[mul] : graph.input_ptr[mul + 1]]].tolist()
    assert constant in read and graph.op_names.index("addmm") in read


def test_a_step_that_branches_on_small_given_values_takes_that_branch():
    def loss(model, x, lengths):
        return sum(model(x[:, :length]).sum() for length in lengths.tolist())

    from simdev.graphs.capture.run import run

    def make(lengths=(2, 5, 8)):
        model = nn.Sequential(nn.LazyLinear(4)) if not lengths else nn.Conv1d(1, 1, 1)
        return TrainingStep(model, (torch.zeros(1, 8), torch.tensor(lengths)), loss)

    graph = run(make, "lengths", {})
    assert kinds(graph, "forward").count("convolution") == 3


def test_a_model_that_cannot_be_built_from_fake_tensors_is_built_for_real():
    def make():
        model = nn.Linear(8, int((torch.zeros(1 << 17) + 1).sum().item()) >> 15)  # the sum of a large tensor
        return TrainingStep(model, (torch.zeros(2, 8),), lambda model, x: model(x).sum())

    from simdev.graphs.capture.run import run

    assert run(make, "real", {}).meta["parameters"] == 8 * 4 + 4


# Mixed precision -----------------------------------------------------------------------------------------------


def autocast_loss(device, dtype):
    def loss(model, x, y):
        with torch.autocast(device, dtype):
            return classify(model, x, y)

    return loss


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_autocast_casts_as_a_gpu_does(device, dtype):
    model = classifier()
    named = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    step = TrainingStep(model, DATA, autocast_loss(device, named), torch.optim.SGD(model.parameters()))
    graph = capture(step, "mixed")
    assert all(text.startswith(f"addmm({dtype}[") for text in signatures(graph, "addmm"))
    assert all(text.startswith("native_layer_norm(f32[") for text in signatures(graph, "native_layer_norm"))
    assert all(text.startswith((f"gelu({dtype}[", "gelu(f32[")) for text in signatures(graph, "gelu"))
    # PyTorch's cross_entropy names the dtype of its logarithms: a GPU computes them in that of the logits.
    assert signatures(graph, "_log_softmax")[0].startswith(f"_log_softmax({dtype}[")
    assert signatures(graph, "nll_loss_forward")[0].startswith("nll_loss_forward(f32[")
    casts = signatures(graph, "_to_copy")
    assert f"_to_copy(f32[8,8])->{dtype}[8,8]" in casts and f"_to_copy({dtype}[8,8])->f32[8,8]" in casts
    assert graph.meta["precision_of_classes"]["gemm"] == {dtype: 5}
    assert graph.meta["precision_of_classes"]["norm"] == {"f32": 1}
    plain = capture(TrainingStep(model, DATA, classify, torch.optim.SGD(model.parameters())), "mixed")
    assert plain.fingerprint != graph.fingerprint and "_to_copy" not in plain.kinds


def test_the_table_of_casts_is_that_of_pytorch():
    from simdev.graphs.capture import autocast

    known = {*autocast.LOWER, *autocast.SINGLE, *autocast.SINGLE_RESULT, *autocast.WIDEST}
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    missing = {name for name in names if autocast._casts(name, "AutocastCUDA")} - known
    # An error, and kernels that only CUDA tensors reach.
    beside = {"binary_cross_entropy", "_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}
    named = {name for name in missing if "dimname" in name.lower() or "names_" in name}  # of named tensors
    assert not missing - beside - named - {"linalg_matrix_sqrth"}


def test_autocast_of_the_cpu_is_as_before_after_a_capture():
    capture(TrainingStep(classifier(), DATA, autocast_loss("cuda", torch.bfloat16)), "mixed")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.softmax(torch.ones(2, dtype=torch.bfloat16), 0).dtype == torch.bfloat16
    assert torch.autocast("cpu").device == "cpu"


# Checkpoints ---------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self, checkpointing=None, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8))
        self.checkpointing = checkpointing

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        for layer in self.layers:
            x = checkpoint(layer, x, **self.checkpointing) if self.checkpointing else layer(x)
        return x


def only_products(ctx, op, *args, **kwargs):
    from torch.utils.checkpoint import CheckpointPolicy

    kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def deep_step(checkpointing):
    model = Deep(checkpointing)
    x = torch.zeros(512, 64, requires_grad=bool(checkpointing and checkpointing["use_reentrant"]))
    return TrainingStep(model, (x,), lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_compute_again_and_save_memory(reentrant):
    plain, saved = capture(deep_step(None), "deep"), capture(deep_step({"use_reentrant": reentrant}), "deep")
    again = [name for name in saved.op_names if ".recomputed" in name]
    assert {name.rpartition("/")[0] for name in again} >= {f"layers.{i}.0" for i in range(8)}
    assert saved.meta["recomputed_ops"] == len(again) and saved.meta["recomputed_flops"] >= 8 * 2 * 512 * 64 * 64
    phases = {int(saved.op_phase[saved.op_names.index(name)]) for name in again}
    assert phases == {1}
    of_input = int(reentrant)  # a reentrant checkpoint computes the gradient of its input, which asks for one here
    assert kinds(saved, "backward").count("mm") == kinds(plain, "backward").count("mm") + of_input
    assert peak_bytes(saved) < 0.65 * peak_bytes(plain)


def test_selective_checkpoints_keep_what_the_policy_keeps():
    from functools import partial

    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    context = partial(create_selective_checkpoint_contexts, only_products)
    graph = capture(deep_step({"use_reentrant": False, "context_fn": context}), "deep")
    again = [name.rpartition("/")[2] for name in graph.op_names if ".recomputed" in name]
    assert not any(name.startswith("addmm") for name in again)


def test_gradients_of_gradients_compute_nothing_again():
    """With ``create_graph``, the ops of a backward pass have gradients, as those of a checkpoint do."""
    from torch.utils.checkpoint import checkpoint

    def penalised(checkpointed):
        model, x = Deep(None), torch.zeros(512, 64, requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters())

        def run(model, x):
            score = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            torch.autograd.grad(score.square().sum(), x, create_graph=True)[0].square().sum().backward()
            optimizer.step()

        return CustomStep(model, (x,), run)

    plain, saved = capture(penalised(False), "plain"), capture(penalised(True), "saved")
    assert "recomputed_ops" not in plain.meta
    assert saved.meta["recomputed_ops"] > 0


def test_gradients_of_each_sample_compute_nothing_again():
    """Under vmap, PyTorch runs backward nodes of its own by functions in Python."""
    from torch.func import functional_call, grad, vmap

    def run(model, x, labels):
        def loss(weights, x, label):
            return nn.functional.cross_entropy(functional_call(model, weights, (x[None],)), label[None])

        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        gradients = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, labels)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].mean(0)
        optimizer.step()

    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(CustomStep(model, (torch.rand(5, 8), torch.randint(0, 4, (5,))), run), "private")
    assert "recomputed_ops" not in graph.meta and graph.meta["flops"] > 0


def test_an_update_that_is_mostly_products_has_them_as_ops():
    """Muon's iterations multiply matrices; all of it lies with its parameter, as one update."""
    model = nn.Linear(32, 48, bias=False)

    def trained_by(optimizer):
        step = TrainingStep(model, (torch.rand(8, 32),), lambda model, x: model(x).square().mean(), optimizer)
        return capture(step, "linear")

    graph = trained_by(torch.optim.Muon(model.parameters()))
    update = np.flatnonzero(graph.op_phase == 2)
    products = [number for number in update if graph.kinds[graph.op_kind[number]] in ("mm", "addmm")]
    assert len(products) == 15 and graph.op_flops[products].sum() > graph.op_flops[update].sum() / 2
    assert all(graph.op_names[number].startswith("weight/") for number in update)
    assert len(set(graph.unit_of_op[[graph.op_names.index("weight"), *update]])) == 1
    plain = trained_by(torch.optim.Adam(model.parameters()))
    assert "adam" in plain.kinds and graph.meta["flops"] > plain.meta["flops"]


# Inference -----------------------------------------------------------------------------------------------------


def test_a_forward_pass_alone():
    graph = capture(InferenceStep(classifier().eval(), (DATA[0],)), "inference")
    assert set(kinds(graph)) == {"parameter", "input", "addmm", "native_layer_norm", "gelu"}
    assert graph.meta["optimizer"] == "none" and graph.tensor_result.sum() == 1
    assert set(graph.op_phase.tolist()) == {0}
    named = capture(InferenceStep(classifier(), (DATA[0],), lambda model, x: {"logits": model(x), "x": [x]}), "named")
    assert named.tensor_result.sum() == 2, "tensors inside dictionaries and lists leave the step"
    with pytest.raises(InvalidInput, match="forward: returned no tensor"):
        capture(InferenceStep(classifier(), (DATA[0],), lambda model, x: None), "nothing")


# Loops of one's own --------------------------------------------------------------------------------------------


def loop(**options):
    """Two micro-batches with a gradient scaler, clipping, two optimizers, a schedule and averaged weights."""
    model = classifier()
    first = torch.optim.AdamW(model[0].parameters(), **options)
    second = torch.optim.SGD(model[3].parameters(), momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    schedule = torch.optim.lr_scheduler.StepLR(first, 1)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def run(model, x, y):
        for _ in range(2):
            with torch.autocast("cuda", torch.float16):
                loss = classify(model, x, y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(first)
        scaler.unscale_(second)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        schedule.step()
        averaged.update_parameters(model)
        first.zero_grad()
        second.zero_grad()
        model[1].zero_grad()

    return CustomStep(model, DATA, run)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_a_written_out_step(options):
    from simdev.graphs.capture.run import run

    graph = run(lambda: loop(**options), "loop", {})
    names = list(graph.op_names)
    assert kinds(graph, "forward").count("addmm") == 4, "two micro-batches"
    assert graph.meta["optimizer"] == "adamw+sgd"
    assert {f"0/{name}/adamw" for name in ("weight", "bias")} | {f"3/{name}/sgd" for name in ("weight", "bias")} <= {
        *names
    }
    state = 2 * (64 + 8) + 32 + 4
    assert graph.meta["optimizer_state_bytes"] == 4 * state
    assert {"stack", "linalg_vector_norm"} <= set(kinds(graph, "update")), "the norm that clips"
    assert graph.n_units > 12, "multi-tensor kernels join nothing"
    assert sum(name.startswith("constant") and "/update" in name for name in names) == 6, "averaged weights"
    assert not np.any(graph.tensor_result & (graph.tensor_bytes > 64)), "no gradient is left behind"


def test_optimizers_in_a_list():
    model = classifier()
    optimizers = [torch.optim.SGD(model[0].parameters()), torch.optim.Adam(model[3].parameters())]
    graph = capture(TrainingStep(model, DATA, classify, optimizers), "two")
    assert graph.meta["optimizer"] == "sgd+adam" and graph.meta["optimizer_state_bytes"] == 2 * 36 * 4


def test_a_compiled_model_is_captured_op_by_op():
    model = classifier()
    compiled = capture(TrainingStep(torch.compile(model), DATA, classify), "compiled")
    assert compiled.fingerprint == capture(TrainingStep(model, DATA, classify), "compiled").fingerprint


def test_what_cannot_be_captured_says_so():
    model = classifier()
    with pytest.raises(Unsupported, match="LBFGS evaluates the loss"):
        capture(TrainingStep(model, DATA, classify, torch.optim.LBFGS(model.parameters())), "lbfgs")
    with pytest.raises(InvalidInput, match="InferenceStep"):
        capture(TrainingStep(model, DATA, None), "no loss")


def test_a_graph_is_named_as_asked(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(
        "import torch\nfrom simdev import InferenceStep\n"
        "def small():\n    return InferenceStep(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))\n"
    )
    assert capture_file(f"{path}:small").name == "nets-small"
    assert capture_file(f"{path}:small", name="mine").name == "mine"


def test_places_may_be_a_list_of_numbers_that_are_tensors():
    """A tensor like another has known values, and so has a mask into which such places are written."""
    from simdev.graphs.capture.run import run

    def loss(model, x, places):
        seen = model(x)
        left = torch.full_like(seen[:, 0], True).bool()
        rows, columns = zip(*places, strict=True)
        left[list(rows),] = False
        return seen[left].sum() + seen[rows, columns].sum() + seen[[0, 1]].sum()

    def make():
        return TrainingStep(nn.Linear(8, 6), (torch.zeros(5, 8), torch.tensor([[0, 1], [3, 2]])), loss)

    graph = run(make, "places", {})
    assert {"sum(f32[3,6])->f32[]", "sum(f32[2])->f32[]", "sum(f32[2,6])->f32[]"} <= set(graph.signatures)
    assert "values" not in graph.meta, "nothing ran for real"


def test_a_known_mask_selects_as_many_numbers_of_other_values():
    from simdev.graphs.capture.run import run

    def make():
        mask = torch.tensor([[True], [False], [True]])
        return TrainingStep(
            nn.Linear(8, 4), (torch.zeros(3, 8), mask), lambda model, x, m: model(x).masked_select(m).sum()
        )

    graph = run(make, "selected", {})
    assert "sum(f32[8])->f32[]" in graph.signatures and "values" not in graph.meta


def test_a_step_may_convert_a_layer_that_is_of_this_type():
    from simdev.graphs.capture.run import run

    class Routes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            self.layer = self.layer.to(torch.float32)
            return self.layer(x)

    def make():
        model = Routes()
        optimizer = torch.optim.AdamW(model.parameters())
        return TrainingStep(model, (torch.zeros(2, 8),), lambda model, x: model(x).sum(), optimizer)

    graph = run(make, "cast", {})
    assert sum(graph.op_phase == 2) == 2 and "values" not in graph.meta, "both parameters are updated"


def test_a_mask_of_given_values_selects_as_many_rows_as_it_has():
    from simdev.graphs.capture.run import run

    def loss(model, x, mask, labels, lengths):
        assert labels.max() < 4
        x = x.clone()
        x[mask] = model.weight[0].detach()
        chosen = model(x[mask])
        table = model(x).transpose(0, 1).log_softmax(-1)
        taken = labels.masked_select(labels > 0)
        return chosen.sum() + functional.ctc_loss(table, taken, torch.full((2,), 4), lengths)

    def make():
        mask = torch.tensor([[True, False, True, False], [False, True, False, False]])
        labels, lengths = torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])
        return TrainingStep(nn.Linear(8, 8), (torch.zeros(2, 4, 8), mask, labels, lengths), loss)

    graph = run(make, "masked", {})
    assert "values" not in graph.meta, "fake tensors are enough"
    assert any(text.startswith("addmm(") and "f32[3,8]" in text for text in graph.signatures)
    assert "_ctc_loss_backward" in kinds(graph, "backward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_experts_of_a_mixture_are_one_grouped_product(dtype):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 8, 16, dtype=dtype))

        def forward(self, x, ends):
            return torch._grouped_mm(x, self.weight, offs=ends)

    data = torch.zeros(12, 8, dtype=dtype, requires_grad=True), torch.tensor([4, 8, 12], dtype=torch.int32)
    graph = capture(TrainingStep(Experts(), data, lambda model, *data: model(*data).float().sum()), "experts")
    flops = {graph.kinds[kind]: count for kind, count in zip(graph.op_kind, graph.op_flops, strict=True)}
    assert flops["_grouped_mm"] == 2 * 12 * 8 * 16


# FP8, checkpoints of Hugging Face, recurrent layers -------------------------------------------------------------


class Float8Linear(nn.Linear):
    """A linear layer that casts its input and weight to FP8 with one scale each, as torchao's dynamic scaling does."""

    def forward(self, x):
        return Float8Product.apply(x, self.weight)


class Float8Product(torch.autograd.Function):
    @staticmethod
    def product(first, second, kinds=(torch.float8_e4m3fn, torch.float8_e4m3fn)):
        scales = [tensor.abs().amax().float().clamp(min=1e-12) / 448 for tensor in (first, second)]
        cast = [(t / scale).to(kind) for t, scale, kind in zip((first, second), scales, kinds, strict=True)]
        columns = cast[1].t().contiguous().t()
        return torch._scaled_mm(cast[0], columns, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return Float8Product.product(x, weight.t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        kinds = torch.float8_e5m2, torch.float8_e4m3fn
        return Float8Product.product(gradient, weight, kinds), Float8Product.product(gradient.t(), x, kinds)


def test_fp8_products_are_captured_as_such():
    model = Float8Linear(32, 48, bias=False, dtype=torch.bfloat16)
    x = torch.zeros(64, 32, dtype=torch.bfloat16, requires_grad=True)
    graph = capture(TrainingStep(model, (x,), lambda model, x: model(x).float().sum()), "fp8")
    products = signatures(graph, "_scaled_mm")
    assert products[0].startswith("_scaled_mm(f8e4m3[64,32],f8e4m3[32,48]") and products[0].endswith("->bf16[64,48]")
    assert (
        set(kinds(graph, "backward")) >= {"_scaled_mm"}
        and sum(text.startswith("_scaled_mm(f8e5m2") for text in products) == 2
    ), "the gradients of weight and input: the function computes both"
    flops = {graph.kinds[kind]: count for kind, count in zip(graph.op_kind, graph.op_flops, strict=True)}
    assert flops["_scaled_mm"] == 2 * 64 * 32 * 48
    assert graph.meta["precision_of_classes"]["gemm"] == {"f8e4m3": 1, "f8e5m2": 2}
    assert any("->f8e4m3[64,32]" in text for text in signatures(graph, "_to_copy")), "the casts are ops"


def test_hugging_face_checkpoints_its_blocks():
    transformers = pytest.importorskip("transformers")

    def step(checkpointed):
        config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50, n_positions=32)
        model = transformers.GPT2LMHeadModel(config).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        ids = torch.zeros(2, 32, dtype=torch.int64)
        return TrainingStep(model, (ids,), lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss)

    plain, saved = capture(step(False), "gpt2"), capture(step(True), "gpt2")
    again = {name.split("/")[0] for name in saved.op_names if ".recomputed" in name}
    assert all(any(name.startswith(f"transformer.h.{block}.") for name in again) for block in range(3))
    assert "recomputed_flops" not in plain.meta and saved.meta["recomputed_flops"] > 0
    assert peak_bytes(saved) < peak_bytes(plain)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_run_in_the_low_precision_under_autocast(layer):
    model = layer(8, 16, num_layers=2, batch_first=True)

    def loss(model, x):
        with torch.autocast("cuda", torch.bfloat16):
            return model(x)[0].float().sum()

    graph = capture(TrainingStep(model, (torch.zeros(2, 5, 8),), loss, torch.optim.SGD(model.parameters())), "rnn")
    assert set(graph.meta["precision_of_classes"]["gemm"]) == {"bf16"}
    assert graph.meta["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_a_schedule_and_averaged_weights_beside_fused_adam():
    def make():
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        average = torch.optim.swa_utils.AveragedModel(model)

        def run(model, x, y):
            classify(model, x, y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            optimizer.zero_grad(set_to_none=False)

        return CustomStep(model, DATA, run)

    from simdev.graphs.capture.run import run

    graph = run(make, "schedule", {})
    parameters = 6
    assert kinds(graph, "update").count("adamw") == parameters
    assert sum(name.startswith("constant") for name in graph.op_names if name.endswith("update")) <= parameters


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchaos_fp8_layers_show_their_casts_and_products(recipe):
    float8 = pytest.importorskip("torchao.float8")
    from simdev.graphs.capture.run import run

    def make():
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(torch.bfloat16)
        float8.convert_to_float8_training(model, config=float8.Float8LinearConfig.from_recipe_name(recipe))
        x = torch.zeros(32, 64, dtype=torch.bfloat16)
        return TrainingStep(model, (x,), lambda model, x: model(x).float().sum())

    graph = run(make, "fp8", {})
    products = signatures(graph, "_scaled_mm")
    assert len(products) == 6, "two forward, two for the weights, two for the inputs: torchao computes both"
    assert all(product.startswith("_scaled_mm(f8") for product in products) and "mm" not in graph.kinds
    assert not any("constant" in kind for kind in graph.kinds)
    assert graph.meta["flops"] >= 6 * 2 * 32 * 64 * 128


def test_sizes_that_python_draws_are_said_to_vary():
    """As a replay buffer gives batches: the second call has other sizes than the first, and no counter is at fault."""
    import random

    from simdev.graphs.capture.run import run

    def make():
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model):
            optimizer.zero_grad()
            model(torch.zeros(random.randrange(1, 1000), 64)).sum().backward()
            optimizer.step()

        return CustomStep(model, (), step)

    graph = run(make, "drawn", {})
    assert graph.meta["first_call_flops"] != graph.op_flops[[kind in ("mm", "addmm") for kind in kinds(graph)]].sum()


def test_contents_that_replace_a_parameter_are_its_update():
    """``parameter.data = other`` is no op: what made the other tensor is the update."""

    def step(model, x):
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad
            parameter.grad = None

    graph = capture(CustomStep(nn.Linear(8, 4), DATA[:1], step), "replaced")
    assert [graph.op_names[op] for op in np.flatnonzero(graph.op_phase == 2)] == ["weight/update", "bias/update"]


WIDE = 2048  # so wide that the values of the router's weights are not known


class Routed(torch.nn.Module):
    """Experts as transformers' eager code runs them: a loop over those that a token goes to."""

    def __init__(self, experts: int):
        super().__init__()
        self.num_experts = experts
        self.router = torch.nn.Linear(WIDE, experts)
        self.up = torch.nn.Parameter(torch.randn(experts, WIDE, 16))
        self.down = torch.nn.Parameter(torch.randn(experts, 16, WIDE))

    dim = -1

    def forward(self, tokens):
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=self.dim)
        mask = torch.nn.functional.one_hot(chosen, num_classes=self.up.shape[0]).permute(2, 1, 0)
        out = torch.zeros_like(tokens)
        for (expert,) in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            place, row = torch.where(mask[expert])
            hidden = torch.nn.functional.silu(tokens[row] @ self.up[expert])
            out.index_add_(0, row, hidden @ self.down[expert] * weights[row, place, None])
        return out


def routed_step():
    return TrainingStep(Routed(4), (torch.randn(64, WIDE),), lambda model, tokens: model(tokens).sum())


def test_routers_of_experts_too_large_to_run_send_tokens_evenly(monkeypatch):
    """The products of a token have the same FLOPs whichever experts it goes to, if every expert gets one."""
    from simdev.graphs.capture import run as runs

    real = runs.run(routed_step, "routed", {})
    assert real.meta["values"] in ("forward", "real")
    monkeypatch.setattr(runs, "MOST_REAL_BYTES", 0)
    even = runs.run(routed_step, "routed", {})
    assert even.meta["values"] == "even routers"
    products = [
        sum(flops for flops, op in zip(graph.op_flops, graph.op_kind, strict=True) if "mm" in graph.kinds[op])
        for graph in (even, real)
    ]
    assert products[0] == products[1] > 0
    rows = [text for text in signatures(even, "mm") if text.startswith("mm(f32[32,2048],")]
    assert len(rows) >= 4, "64 tokens with two choices each, on four experts"
    monkeypatch.setattr(Routed, "dim", 0)  # experts choose tokens
    with pytest.raises(Unsupported, match="smaller model"):
        runs.run(routed_step, "routed", {})
    monkeypatch.undo()
    monkeypatch.setattr(runs, "MOST_REAL_BYTES", 0)
    monkeypatch.setattr(runs, "MOST_EXPERTS", 3)
    with pytest.raises(Unsupported, match="smaller model"):
        runs.run(routed_step, "routed", {})


def test_a_short_list_of_places_is_a_tuple():
    """As for PyTorch; a list inside a tuple is one of numbers."""
    from simdev.graphs.capture.run import run

    def loss(model, x, places):
        table, (row, column) = model(x), places
        picked, listed = table[[row, column]], table[:, [row, column]]  # the first is table[row, column]
        assert picked.shape == (4,) and listed.shape == (3, 2, 4)
        return picked.sum() + listed.sum()

    def make():
        return TrainingStep(nn.Linear(8, 4), (torch.zeros(3, 5, 8), torch.tensor([1, 2])), loss)

    assert {"sum(f32[4])->f32[]", "sum(f32[3,2,4])->f32[]"} <= set(run(make, "picks", {}).signatures)


def test_a_module_with_tensors_of_its_own_is_converted():
    """``Module.to`` in a step calls the ``_apply`` of its parts, where one has its own."""

    class Holds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.table = torch.nn.Linear(8, 8), torch.randn(8, dtype=torch.float64)

        def _apply(self, function, recurse=True):
            super()._apply(function, recurse)
            self.table = function(self.table)
            return self

        def forward(self, x):
            return self.layer(x) * self.table

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Holds()

        def forward(self, x):
            out = self.to(torch.float32).inner(x)
            assert out.dtype == torch.float32
            return out

    assert capture(TrainingStep(Outer(), (torch.randn(2, 8),), lambda model, x: model(x).sum()), "outer").meta["flops"]
