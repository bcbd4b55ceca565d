"""Nothing is silently wrong: steps that once lost or gained work without a word, and the self-check itself."""

import pytest

from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.workload import CustomStep, InferenceStep, TrainingStep

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional
FORWARD = 2 * 8 * (16 * 32 + 32 * 4)  # FLOPs of `net` for eight rows; the input's gradient is not computed
TRAINED = 3 * FORWARD - 2 * 8 * 16 * 32


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def captured(make, **options):
    from simdev.graphs.capture.run import run

    return run(make, "step", {}, **options)


def products(graph):
    names = ("addmm", "mm", "bmm", "convolution", "convolution_backward")
    return sum(
        int(flops) for flops, kind in zip(graph.op_flops, graph.op_kind, strict=True) if graph.kinds[kind] in names
    )


def updates(graph, kind):
    return sum(graph.kinds[one] == kind for one in graph.op_kind)


def custom(run, *, optimizer=torch.optim.SGD, inputs=None, model=net):
    def make():
        built = model()
        stepped = optimizer(built.parameters(), lr=0.1)
        data = inputs() if inputs else (torch.randn(8, 16),)
        return CustomStep(built, data, lambda module, *data: run(module, stepped, *data))

    return make


# Numbers that lead into Python ---------------------------------------------------------------------------------


def test_a_guard_by_the_gradients_norm_sees_the_norm():
    def run(model, optimizer, x):
        model(x).pow(2).mean().backward()
        with torch.no_grad():
            norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
        if norm < 100:
            optimizer.step()
        optimizer.zero_grad()

    graph = captured(custom(run))
    assert products(graph) == TRAINED and updates(graph, "sgd") == 4


def test_an_early_stop_by_a_small_number_does_not_stop():
    def run(model, optimizer, x):
        for _ in range(4):
            loss = model(x).pow(2).mean()
            with torch.no_grad():
                distance = (loss - loss * 1.001).abs().item()
            if distance > 10:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    graph = captured(custom(run, optimizer=torch.optim.Adam))
    assert products(graph) == 4 * TRAINED and updates(graph, "adam") == 4 * 4


def test_a_batch_is_trimmed_to_the_length_that_its_mask_has():
    """The mask is too large for a value beside its fake tensor: the step runs for real."""

    def run(model, optimizer, x, mask):
        with torch.no_grad():
            longest = mask.sum(1).max().item()
        model(x[:longest]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def inputs():
        mask = torch.zeros(4, 1 << 19, dtype=torch.int64)
        mask[:, :5] = 1
        return torch.randn(8, 16), mask

    graph = captured(custom(run, inputs=inputs))
    assert graph.meta["values"] == "real" and products(graph) == TRAINED * 5 // 8


def test_numpy_in_the_loop_runs_for_real():
    def run(model, optimizer, x):
        out = model(x)
        weight = torch.from_numpy((out.detach().cpu().numpy() > 0).astype("float32"))
        (out * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    graph = captured(custom(run))
    assert graph.meta["values"] == "real" and products(graph) == TRAINED


# Work that was hidden or dropped -------------------------------------------------------------------------------


def test_lbfgs_shows_every_evaluation():
    from torch.utils.flop_counter import FlopCounterMode

    def make(count=None):
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        x, y = torch.randn(8, 16), torch.randn(8, 4)

        def run(model, x, y):
            def closure():
                optimizer.zero_grad()
                loss = functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

        return CustomStep(model, (x, y), run)

    step = make()
    step.run(step.model, *step.inputs)
    with FlopCounterMode(display=False) as counter:
        step.run(step.model, *step.inputs)
    graph = captured(make)
    assert products(graph) == counter.get_total_flops() == 3 * TRAINED
    assert {0, 1, 2} == set(graph.op_phase.tolist()) and updates(graph, "lbfgs") == 2 * 4, "between evaluations"
    assert graph.meta["optimizer_state_bytes"] > 3 * 4 * (17 * 32 + 33 * 4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_its_last_product_again_if_it_is_reentrant(reentrant):
    from torch.utils.checkpoint import checkpoint

    def make():
        model = net()
        x = torch.randn(8, 16, requires_grad=True)
        loss = lambda model, x: checkpoint(model, x, use_reentrant=reentrant).sum()  # noqa: E731
        return TrainingStep(model, (x,), loss, torch.optim.SGD(model.parameters()))

    recomputed = FORWARD if reentrant else 2 * 8 * 16 * 32  # the other kind stops once it has what it needs
    of_input = 2 * 8 * 16 * 32
    assert products(captured(make)) == TRAINED + recomputed + of_input


def test_parts_of_a_sequence_are_checkpointed_with_an_input_that_has_a_gradient():
    from torch.utils.checkpoint import checkpoint_sequential

    def make():
        model = net()
        x = torch.randn(8, 16, requires_grad=True)
        loss = lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=True).sum()  # noqa: E731
        return TrainingStep(model, (x,), loss, torch.optim.SGD(model.parameters()))

    first, last = 2 * 8 * 16 * 32, 2 * 8 * 32 * 4
    assert products(captured(make)) == 3 * first + 3 * last + first, "the first of two parts runs again"


def test_gradients_that_are_thrown_away_were_computed():
    """As in a GAN: the generator's loss also makes gradients of the discriminator, which are cleared unused."""

    def make():
        first, second = nn.Linear(16, 4), nn.Linear(4, 2)
        optimizer = torch.optim.SGD(first.parameters())

        def run(model, x):
            second(first(x)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            second.zero_grad()

        return CustomStep(nn.ModuleDict({"first": first, "second": second}), (torch.randn(8, 16),), run)

    assert products(captured(make)) == 2 * 8 * (2 * 16 * 4 + 3 * 4 * 2)


# Several updates of a parameter --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_each_minibatch_has_its_update(optimizer):
    def run(model, stepped, x):
        for rows in x.split(4):
            stepped.zero_grad()
            model(rows).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stepped.step()

    graph = captured(custom(run, optimizer=optimizer))
    name = optimizer.__name__.lower()
    assert updates(graph, name) == 2 * 4 and products(graph) == TRAINED
    first, second = (graph.op_names.index(f"0/weight/{name}{end}") for end in ("", ".1"))
    between = [number for number, op in enumerate(graph.op_names) if op == "0/addmm.1"]
    assert first < between[0] < second
    read = graph.tensor_producer[graph.inputs[graph.input_ptr[between[0]] : graph.input_ptr[between[0] + 1]]]
    assert first in read, "the second minibatch reads the weight that the first update wrote"


# The self-check ------------------------------------------------------------------------------------------------


def test_a_graph_that_lost_a_product_is_refused(monkeypatch):
    from simdev.graphs.capture import assemble, run

    alive = assemble._alive

    def forgetful(tape, results):
        found = alive(tape, results)
        last = max(number for number in found if tape.ops[number].products)
        tape.ops[last].products = 0
        return found

    monkeypatch.setattr(assemble, "_alive", forgetful)
    step = TrainingStep(net(), (torch.randn(8, 16),), lambda model, x: model(x).sum(), None)
    with pytest.raises(Unsupported, match=r"the graph has [\d,]+ FLOPs of products, its run [\d,]+"):
        run.run(step, "lost", {})


def test_a_graph_that_lost_an_update_is_refused(monkeypatch):
    from simdev.graphs.capture import run
    from simdev.graphs.capture.trace import Tape

    write = Tape._write

    def forgetful(tape, tensor, op, number):
        if tensor.shape != (4,) or op.phase != "update":
            write(tape, tensor, op, number)

    monkeypatch.setattr(Tape, "_write", forgetful)
    model = net()
    step = TrainingStep(model, (torch.randn(8, 16),), lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()))
    with pytest.raises(Unsupported, match="the graph has 3 updates of parameters, its run 4"):
        run.run(step, "lost", {})


def test_a_graph_that_lost_state_is_refused(monkeypatch):
    from simdev.graphs.capture import run
    from simdev.graphs.capture.trace import Tape

    monkeypatch.setattr(Tape, "state", lambda tape, tensor, home: tape.keep(tensor, home))
    model = net()
    step = TrainingStep(model, (torch.randn(8, 16),), lambda m, x: m(x).sum(), torch.optim.Adam(model.parameters()))
    with pytest.raises(Unsupported, match="bytes of parameters, buffers and optimizer states"):
        run.run(step, "lost", {})


def test_a_step_that_counts_its_calls_is_refused():
    def counting():
        calls = []

        def run(model, optimizer, x):
            calls.append(x)
            for _ in calls:
                model(x).sum().backward()
            optimizer.step()

        return custom(run)()

    with pytest.raises(InvalidInput, match=r"its first call has [\d,]+ FLOPs of products, its second [\d,]+"):
        captured(counting)


@pytest.mark.parametrize("lacks", ["matrix product", "update"])
def test_an_empty_graph_must_be_meant(lacks):
    def run(model, optimizer, x):
        if lacks == "update":
            model(x).sum().backward()
        else:
            model[0].weight.sum().backward()
            optimizer.step()

    with pytest.raises(InvalidInput, match=f"has no {lacks}.*--allow-empty"):
        captured(custom(run))
    assert captured(custom(run), allow_empty=True).n_ops > 4
    norm = InferenceStep(nn.LayerNorm(4), (torch.zeros(2, 4),))
    with pytest.raises(InvalidInput, match="has no matrix product"):
        captured(lambda: norm)


# What PyTorch has on GPUs, and what was refused ----------------------------------------------------------------


def test_calls_that_order_a_gpus_work_do_nothing():
    def make():
        model = net().to(torch.device("cuda", 0))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        torch.cuda.set_device(0)

        def run(model, x):
            stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(stream):
                x = x.pin_memory().to(0, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            x.record_stream(stream)
            with torch.cuda.nvtx.range("forward"):
                loss = model(x).sum() + torch.zeros(1, device=torch.device("cuda", index=0)).sum()
            torch.cuda.nvtx.range_push("backward")
            loss.backward()
            torch.cuda.nvtx.range_pop()
            torch.cuda.synchronize()
            optimizer.step()
            optimizer.zero_grad()
            event.record()
            torch.cuda.reset_peak_memory_stats()

        return CustomStep(model, (torch.randn(8, 16),), run)

    before = torch.cuda.synchronize
    graph = captured(make)
    assert "values" not in graph.meta and products(graph) == TRAINED and torch.cuda.synchronize is before


@pytest.mark.parametrize("holder", ["none", "model", "optimizer"])
def test_a_process_group_of_the_builder_is_one_replica(holder):
    """The group that the builder makes is there while the step runs: an optimizer that holds it sends by it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make():
        torch.distributed.init_process_group("nccl", rank=0, world_size=8)
        model = net()
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0]) if holder == "model" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if holder == "optimizer":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
        return TrainingStep(model, (torch.randn(8, 16),), lambda model, x: model(x).sum(), optimizer)

    assert products(captured(make)) == TRAINED and not torch.distributed.is_initialized()
    assert products(captured(make)) == TRAINED, "a second capture makes its own"


@pytest.mark.parametrize("way", ["loop", "step"])
def test_sparse_embeddings_update_rows(way):
    def make():
        model = nn.Sequential(nn.Embedding(500, 16, sparse=True), nn.Linear(16, 4))
        both = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters())]
        rows = torch.randint(0, 500, (3, 5))
        if way == "step":
            return TrainingStep(model, (rows,), lambda model, rows: model(rows).sum(), both)

        def run(model, rows):
            model(rows).sum().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()

        return CustomStep(model, (rows,), run)

    graph = captured(make)
    assert graph.meta["values"] == "real" and graph.meta["optimizer_state_bytes"] == 2 * 4 * (500 * 16 + 16 * 4 + 4)
    update = graph.op_names.index("0/weight/sparseadam")
    assert graph.op_bytes_written[update] < 20 * 15 * 16 * 4 < 3 * 4 * 500 * 16, "rows, not tables"
    assert products(graph) == 3 * 2 * 15 * 16 * 4


def test_jagged_tensors_run_for_real():
    def make():
        model = nn.Linear(16, 4)

        def loss(model, first, second):
            return model(torch.nested.nested_tensor([first, second], layout=torch.jagged)).values().sum()

        data = torch.randn(3, 16), torch.randn(5, 16)
        return TrainingStep(model, data, loss, torch.optim.SGD(model.parameters()))

    graph = captured(make)
    assert graph.meta["values"] == "real" and graph.meta["flops"] > 2 * 2 * 8 * 16 * 4


def test_attention_of_jagged_tensors_has_the_flops_of_each_sequence():
    def make():
        model = nn.Linear(16, 48)

        def loss(model, first, second):
            rows = model(torch.nested.nested_tensor([first, second], layout=torch.jagged))
            parts = (part.contiguous().unflatten(-1, [2, 8]).transpose(1, 2) for part in rows.chunk(3, -1))
            return functional.scaled_dot_product_attention(*parts).values().sum()

        data = torch.randn(3, 16), torch.randn(5, 16)
        return TrainingStep(model, data, loss, torch.optim.SGD(model.parameters()))

    graph = captured(make)
    attention = [
        int(flops)
        for flops, kind in zip(graph.op_flops, graph.op_kind, strict=True)
        if "attention" in graph.kinds[kind]
    ]
    forward = [4 * length * length * 16 for length in (3, 5)]  # two products, forward; five of the same size, backward
    assert sorted(attention) == sorted([*forward, *(5 * flops // 2 for flops in forward)])
    assert products(graph) == 2 * 2 * 8 * 16 * 48  # the input needs no gradient


def test_products_that_the_counter_does_not_know():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bilinear = nn.Linear(32, 4), nn.Bilinear(4, 4, 2, bias=False)
            self.register_buffer("weight", torch.ones(32, 32, dtype=torch.int8))

        def forward(self, x):
            narrow = self.linear(torch._int_mm(x.to(torch.int8), self.weight).float())
            return self.bilinear(narrow, narrow)

    graph = captured(lambda: InferenceStep(Whole(), (torch.ones(32, 32),)))
    flops = {graph.kinds[kind]: int(flops) for flops, kind in zip(graph.op_flops, graph.op_kind, strict=True)}
    assert flops["_int_mm"] == 2 * 32 * 32 * 32 and flops["_trilinear"] == 2 * 32 * 2 * 4 * 4
    assert "uncounted_ops" not in graph.meta


def test_ops_of_a_library_whose_flops_are_unknown_are_named():
    @torch.library.custom_op("simdev_tests::product", mutates_args=())
    def product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first @ second

    @product.register_fake
    def _(first, second):
        return first.new_empty(len(first), second.shape[1])

    model = net()
    step = InferenceStep(model, (torch.ones(8, 16),), lambda model, x: model(product(x, x.t().contiguous() @ x)))
    assert captured(lambda: step).meta["uncounted_ops"] == {"simdev_tests::product": 1}


def test_a_branch_of_torch_cond_is_the_one_that_is_taken():
    def loss(model, x):
        return torch.cond(x.sum() > 0, lambda x: model(x), lambda x: x, (x,)).sum()

    def make():
        model = net()
        return TrainingStep(model, (torch.ones(8, 16),), loss, torch.optim.SGD(model.parameters()))

    assert products(captured(make)) == TRAINED


@pytest.mark.parametrize(("what", "remedy"), [("while_loop", "own for or while"), ("CUDAGraph", "function that the")])
def test_what_no_capture_sees_is_refused_with_a_remedy(what, remedy):
    def forward(model, x):
        if what == "CUDAGraph":
            torch.cuda.CUDAGraph()
        from torch._higher_order_ops import while_loop

        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.tanh()), (torch.tensor(0), model(x)))[1]

    with pytest.raises(Unsupported, match=remedy):
        captured(lambda: InferenceStep(net(), (torch.ones(8, 16),), forward))


def flexible(flex):
    """A step whose attention is FlexAttention with a causal mask, or the same by the usual function."""
    from torch.nn.attention import flex_attention

    def loss(model, x):
        query, key, value = model(x).view(2, 128, 1, 24).transpose(1, 2).chunk(3, -1)
        if not flex:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum()
        blocks = flex_attention.create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
        return torch.compile(flex_attention.flex_attention)(query, key, value, block_mask=blocks).sum()

    model = nn.Linear(16, 24)
    return TrainingStep(model, (torch.randn(2, 128, 16),), loss, torch.optim.SGD(model.parameters()))


def test_flex_attention_is_one_fused_attention():
    one, other = (captured(lambda flex=flex: flexible(flex)) for flex in (True, False))
    assert "_scaled_dot_product_efficient_attention" in one.kinds
    assert one.fingerprint == other.fingerprint
    assert torch.nn.attention.flex_attention.flex_attention_hop.__class__.__name__ == "FlexAttentionHOP"


def test_causal_masks_of_flex_attention_are_known():
    from torch.nn.attention.flex_attention import and_masks, or_masks

    from simdev.graphs.capture.attention import is_causal

    def document(b, h, q, k):
        return torch.zeros(8, dtype=torch.int64)[q] == torch.zeros(8, dtype=torch.int64)[k]

    def unknown(b, h, q, k):
        return torch.zeros(8, device="meta")[q] == torch.zeros(8, device="meta")[k]

    def causal(b, h, q, k):
        return q >= k

    masks = [causal, lambda b, h, q, k: (q >= k) & (q - k < 2), and_masks(unknown, causal), and_masks(document, causal)]
    assert all(map(is_causal, masks))
    prefix = or_masks(causal, lambda b, h, q, k: k < 2)
    assert not any(map(is_causal, [document, unknown, prefix, and_masks(document, document)]))


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
def test_states_of_eight_bits_have_their_bytes(package):
    if package == "torchao":
        optim = pytest.importorskip("torchao.optim")
    else:
        optim = pytest.importorskip("bitsandbytes.optim")

    def make():
        model = nn.Linear(256, 256, bias=False)
        optimizer = optim.AdamW8bit(model.parameters())
        return TrainingStep(model, (torch.randn(8, 256),), lambda model, x: model(x).sum(), optimizer)

    graph = captured(make)
    blocks = 65536 // 256
    assert graph.meta["optimizer_state_bytes"] == 2 * (65536 + 4 * blocks + 4 * 256), "codes, scales, tables"
    assert updates(graph, "adamw8bit") == 1
