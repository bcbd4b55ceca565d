"""Hand-written training loops, judged by PyTorch: each graph has the FLOPs of products that ``FlopCounterMode`` counts
when the loop's second call runs without simdev, and an update of every parameter that this call changed."""

import gc
import random
import weakref

import pytest

from simdev.graphs.workload import CustomStep

torch = pytest.importorskip("torch")
import loops  # noqa: E402  (needs PyTorch)
from torch.utils._pytree import tree_leaves  # noqa: E402

from simdev.graphs.capture.selfcheck import _NoModules  # noqa: E402

QUICK = """
lbfgs gan proximal_policy_minibatches sparse_table reentrant_checkpoints metrics_in_numpy updated_by_hand
steps_inside_the_backward_pass gradient_penalty inner_optimizer exchanged_contents
line_search_along_the_natural_gradient stops_by_a_divergence input_with_a_gradient leaf_of_the_forward_pass
optimizers_in_hooks_of_a_training_step an_optimizer_inside_another reversible_blocks
old_weights_in_the_state
""".split()
ROOTS = ("roots_until_they_are_near", "roots_until_their_squares_are_near", "roots_until_plain_numbers_are_near")
OWN_PRODUCTS = ("optimizer_Adafactor", *ROOTS)  # in the update, which is one op of another kind
GROWING = ("lbfgs",)  # a history of steps, longer after each call
OTHER_PARAMETERS = {}  # numbers that only an optimizer knows


def counted(make):
    """FLOPs of the second call, the parameters that it changed, how many numbers the parameters hold, and the bytes of
    the states that optimizers have after it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    def attend(query, key, value, *_, out_val=None, **__):
        return sdpa_flop_count(query.shape, key.shape, value.shape)

    def attend_backward(gradient, query, key, value, *_, out_val=None, **__):
        return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)

    def bilinear(*tensors, out_val=None, **_):  # PyTorch counts none; the weight, or its gradient, is the largest
        return 2 * 8 * max(tensor.numel() for tensor in (*tensors[:3], out_val))  # eight rows

    attend._get_raw = attend_backward._get_raw = bilinear._get_raw = True
    aten = torch.ops.aten
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: attend,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attend_backward,
        aten._trilinear: bilinear,
    }
    torch.manual_seed(0)
    random.seed(0)
    step = make()
    stepped = weakref.WeakSet()
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.add(optimizer))

    def call():
        if isinstance(step, CustomStep):
            step.run(step.model, *step.inputs)
            return
        step.loss(step.model, *step.inputs).backward()
        for optimizer in step.optimizer:
            optimizer.step()
            optimizer.zero_grad()

    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False  # an LSTM is no single op
    try:
        call()
        versions = {name: state_of(parameter) for name, parameter in step.model.named_parameters()}
        counter = FlopCounterMode(display=False, custom_mapping=mapping)
        counter.mod_tracker = _NoModules()
        with counter:
            call()
    finally:
        torch.backends.mkldnn.enabled = before
        hook.remove()
    changed = {name for name, parameter in step.model.named_parameters() if state_of(parameter) != versions[name]}
    numbers = sum(parameter.numel() for parameter in step.model.parameters())
    gc.collect()
    return counter.get_total_flops(), changed, numbers, sum(map(bytes_of_states, stepped))


def bytes_of_states(optimizer):
    """Bytes of an optimizer's states without its step counters."""
    held = [item for state in optimizer.state.values() for item in tree_leaves(state) if isinstance(item, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor.numel() > 1)


def state_of(parameter):
    """What changes with a write into a parameter, or with ``parameter.data = other``."""
    return parameter._version, parameter.data_ptr()


def product_kinds():
    """The kinds of ops whose FLOPs PyTorch counts, under their names in a graph."""
    from torch.utils import flop_counter

    from simdev.graphs.capture.attention import KINDS
    from simdev.graphs.capture.trace import FORMULAS

    known = {packet.__name__.replace("_for_cpu", "") for packet in (*flop_counter.flop_registry, *FORMULAS)}
    return known | {f"{name}_backward" for name in KINDS.values()} | set(KINDS.values())


def of_products(graph):
    return sum(
        int(flops)
        for flops, kind in zip(graph.op_flops, graph.op_kind, strict=True)
        if graph.kinds[kind] in product_kinds()
    )


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(loops.LOOPS)]
)
def test_a_loop_has_the_products_and_updates_of_its_run(name):
    from simdev.graphs.capture.run import run

    graph = run(loops.LOOPS[name], name, {})
    flops, changed, numbers, state_bytes = counted(loops.LOOPS[name])
    updated = {
        label.rpartition("/")[0].replace("/", ".")
        for label, phase in zip(graph.op_names, graph.op_phase, strict=True)
        if phase == 2
    }
    assert changed <= updated
    assert graph.meta["parameters"] - numbers == OTHER_PARAMETERS.get(name, 0)
    if name not in GROWING:
        assert graph.meta["optimizer_state_bytes"] == state_bytes
    if name not in OWN_PRODUCTS:
        assert of_products(graph) == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("name", ROOTS)
def test_numbers_that_steer_an_optimizer_are_true(name):
    """The step of the optimizer ends its search by a number that it reads: 60 rounds with a made-up one."""
    from simdev.graphs.capture.run import run

    make = loops.LOOPS[name]
    graph, (flops, *_) = run(make, "roots", {}), counted(make)
    updates = sum(int(flops) for flops, phase in zip(graph.op_flops, graph.op_phase, strict=True) if phase == 2)
    products = sum(int(flops) for flops, phase in zip(graph.op_flops, graph.op_phase, strict=True) if phase < 2)
    assert products + updates == pytest.approx(flops, rel=0.01)


def test_the_set_is_as_large_as_it_says():
    assert len(loops.LOOPS) >= 60
