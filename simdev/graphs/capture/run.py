"""Runs a step once under the tape: on fake tensors, after a real forward pass where the step depends on values, or
wholly for real where that does not suffice."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.capture.assemble import Assembly, assemble
from simdev.graphs.capture.attention import flash_everywhere
from simdev.graphs.capture.build import build_fake, build_real, named_tensors, optimizers_of
from simdev.graphs.capture.optimizers import kind_of, make_state, one_by_one, register_state, trained_by, update
from simdev.graphs.capture.precision import precision_of_classes, precision_of_parameters
from simdev.graphs.capture.rehearse import rehearse
from simdev.graphs.capture.rewrites import as_on_gpu
from simdev.graphs.capture.trace import Tape, storage_bytes
from simdev.graphs.workload import CustomStep, InferenceStep, Step
from simdev.problem.graph import ComputationGraph

ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
MOST_REAL_BYTES = 2 << 30  # of parameters: larger models are not run for real


@dataclass(frozen=True)
class Ran:
    """What a step leaves: the values that leave it, the value of each parameter's final gradient (by the op of the
    parameter), and the gradients' bytes."""

    results: set
    final: dict[int, int]
    gradient_bytes: int


def run(make: Callable[[], Step] | Step, name: str, meta: dict) -> ComputationGraph:
    """Capture a step, or a function that builds one (then large tensors are never allocated).

    If a step depends on the values of its tensors, its forward pass runs for real beforehand, or else all of it, unless
    its parameters are too large.
    """
    with _seeded():
        built = build_fake(make, name)
    try:
        return _run_fake(built, name, meta)
    except ON_VALUES as error:
        held = sum(storage_bytes(parameter) for parameter in built.step.model.parameters())
        if held > MOST_REAL_BYTES or not isinstance(make, Callable):
            raise Unsupported(f"{name}: {values_sentence(error)}") from error
    del built
    return _run_rehearsed(make, name, meta) or _run_for_real(make, name, meta)


def _run_rehearsed(make, name: str, meta: dict) -> ComputationGraph | None:
    """Capture on fake tensors with the answers of a real forward pass; None if they do not lead through the step."""
    try:
        with _seeded():
            step = build_real(make, name)
        if isinstance(step, CustomStep):
            return None
        with _seeded(), _as_captured(step.model):
            answers = rehearse(step)
        del step
        with _seeded():
            built = build_fake(make, name)
        built.shadows.answers = answers
        return _run_fake(built, name, {**meta, "values": "forward"})
    except Exception:  # the real run tells what is wrong
        return None


def _run_for_real(make, name: str, meta: dict) -> ComputationGraph:
    with _seeded():
        step = build_real(make, name)
        return capture_step(Tape(), step, name, {**meta, "values": "real"}).graph


def _run_fake(built, name: str, meta: dict) -> ComputationGraph:
    if isinstance(built.step, CustomStep) and not any(
        isinstance(parameter, FakeTensor) for parameter in built.step.model.parameters()
    ):
        with _seeded():
            return capture_step(Tape(), built.step, name, {**meta, "values": "real"}).graph
    with _seeded(), built.mode, built.shadows:
        return capture_step(Tape(), built.step, name, meta, quiet=built.shadows).graph


def run_real(make, name: str, meta: dict, tape: Tape) -> Assembly:
    """Run the step that ``make`` builds once under ``tape``, on real tensors: the same graph, with values."""
    return capture_step(tape, build_real(make, name), name, meta)


def values_sentence(error: BaseException) -> str:
    """Why a step cannot be captured without values, and what to do."""
    call = str(getattr(error, "func", error)).removeprefix("aten.").removesuffix(".default")
    asked = {"_local_scalar_dense": "reads a number out of a tensor", "nonzero": "counts the non-zeros of a tensor"}
    does = asked.get(call, f"calls {call}, whose result has a size that the values decide")
    return (
        f"the step depends on the values of its tensors: it {does}; use torch.where or fixed sizes there, or capture a "
        "smaller model, which simdev runs for real"
    )


def capture_step(tape: Tape, step: Step, name: str, meta: dict, *, quiet=None) -> Assembly:
    """Run ``step`` under ``tape``. ``quiet`` are shadows, which rest after the forward pass."""
    model, optimizers = step.model, optimizers_of(step)
    with ExitStack() as stack:
        stack.enter_context(_as_captured(model))
        if "workload" in meta:  # shipped graphs keep their kernels
            stack.enter_context(flash_everywhere())
        if isinstance(step, CustomStep):
            optimizers = _warm_up(step)
        named = _parameters(model, optimizers)
        alike = {} if isinstance(step, CustomStep) else {one: make_state(one, quiet) for one in optimizers}
        homes = {parameter: tape.persistent(parameter, label) for label, parameter in named.items()}
        buffers = {label: buffer for label, buffer in model.named_buffers() if buffer.numel() > 1}
        for label, buffer in buffers.items():
            tape.persistent(buffer, label)
        state_bytes = sum(register_state(tape, one, homes, alike.get(one, {})) for one in optimizers)
        for label, tensor in _inputs(step.inputs):
            tape.input(tensor, label)
        stack.enter_context(tape)
        stack.enter_context(_layers(tape, model))
        if isinstance(step, InferenceStep):
            ran = _infer(tape, step, name)
        elif isinstance(step, CustomStep):
            ran = _loop(tape, step, homes)
        else:
            ran = _train(tape, step, named, homes, name, quiet, alike)
    kind = "+".join(dict.fromkeys(map(kind_of, optimizers))) or "none"
    kinds = {homes[parameter]: kind_of(optimizer) for optimizer in optimizers for parameter in trained_by(optimizer)}
    facts = {
        "torch": torch.__version__.split("+")[0],
        "precision": precision_of_parameters(named.values()),
        "optimizer": kind,
        "parameters": sum(parameter.numel() for parameter in named.values()),
        "parameter_bytes": sum(storage_bytes(parameter) for parameter in named.values()),
        "gradient_bytes": ran.gradient_bytes,
        "optimizer_state_bytes": state_bytes,
        "buffer_bytes": sum(storage_bytes(buffer) for buffer in buffers.values()),
        **_unseen_state(model, {**named, **buffers}),
    }
    assembly = assemble(
        tape, name, results=ran.results - {None}, gradients=ran.final, updates=kinds, meta={**facts, **meta}
    )
    graph = assembly.graph
    graph.meta["flops"] = int(graph.op_flops.sum())
    graph.meta["precision_of_classes"] = precision_of_classes(graph)
    recomputed = np.array([".recomputed" in label for label in graph.op_names])
    if recomputed.any():
        graph.meta["recomputed_ops"] = int(recomputed.sum())
        graph.meta["recomputed_flops"] = int(graph.op_flops[recomputed].sum())
    return assembly


@contextmanager
def _as_captured(model):
    """Run the ops of an accelerator one by one."""
    with ExitStack() as stack:
        stack.enter_context(as_on_gpu(cpu_kernels=_convolves_for_real(model)))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _convolves_for_real(model) -> bool:
    """Whether the step runs on real tensors and has no recurrent layer."""
    fake = any(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    return not fake and not any(isinstance(module, torch.nn.RNNBase) for module in model.modules())


def _train(tape: Tape, step, named: dict, homes: dict, name: str, quiet, alike: dict) -> Ran:
    outcome = step.loss(step.model, *step.inputs)
    if not isinstance(outcome, torch.Tensor) or outcome.numel() != 1 or not outcome.requires_grad:
        raise InvalidInput("must return one number that depends on the parameters", source=name, field="loss")
    tape.phase = "backward"
    if quiet is not None:
        quiet.active = False
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    if _hides_parameters(outcome):
        outcome.backward()
        gradients = [parameter.grad for parameter in trained]
    else:
        gradients = torch.autograd.grad(outcome, trained, allow_unused=True)
    tape.phase = "update"
    final = {}
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
        if gradient is not None:
            final[homes[parameter]] = tape.value_of(gradient)
    optimizers = optimizers_of(step)
    for optimizer in optimizers:
        update(tape, optimizer, homes, alike[optimizer])
    results = {tape.value_of(outcome)}
    if not optimizers:
        results |= set(final.values())
    size = sum(gradient.numel() * gradient.element_size() for gradient in gradients if gradient is not None)
    return Ran(results, final, size)


def _hides_parameters(outcome) -> bool:
    """Whether a reentrant checkpoint made ``outcome``: ``torch.autograd.grad`` finds no parameter behind one."""
    stack, seen = [outcome.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if "CheckpointFunction" in node.name():
            return True
        seen.add(node)
        stack += [parent for parent, _ in node.next_functions]
    return False


def _infer(tape: Tape, step: InferenceStep, name: str) -> Ran:
    with torch.no_grad():
        outcome = step.forward(step.model, *step.inputs) if step.forward else step.model(*step.inputs)
    results = {tape.value_of(tensor) for _, tensor in named_tensors(outcome, "output")}
    if not results - {None}:
        raise InvalidInput("returned no tensor", source=name, field="forward")
    return Ran(results, {}, 0)


def _loop(tape: Tape, step: CustomStep, homes: dict) -> Ran:
    """The recorded call of a written-out step: each op's phase follows from who calls it."""
    final: dict[int, int] = {}
    sizes: dict[int, int] = {}

    def before(optimizer, *_):
        for parameter in trained_by(optimizer):
            if parameter.grad is not None and parameter in homes:
                final[homes[parameter]] = tape.value_of(parameter.grad)
                sizes[homes[parameter]] = parameter.grad.numel() * parameter.grad.element_size()
        tape.updating += 1

    def after(*_):
        tape.updating -= 1

    tape.phase = "loop"
    with _optimizer_hooks(before, after):
        outcome = step.run(step.model, *step.inputs)
    left = [parameter.grad for parameter in homes if parameter.grad is not None]
    results = {tape.value_of(tensor) for _, tensor in named_tensors(outcome, "output")}
    results |= {tape.value_of(gradient) for gradient in left}
    return Ran(results, {home: value for home, value in final.items() if value is not None}, sum(sizes.values()))


def _warm_up(step: CustomStep) -> list:
    """Run a written-out step once without recording it; the optimizers that it stepped, with their state."""
    found: dict[int, torch.optim.Optimizer] = {}
    quiet = Tape()
    quiet.phase, quiet.recording = "loop", False

    def before(optimizer, *_):
        found.setdefault(id(optimizer), optimizer)
        one_by_one(optimizer)
        quiet.updating += 1

    def after(*_):
        quiet.updating -= 1

    with quiet, _optimizer_hooks(before, after):
        step.run(step.model, *step.inputs)
    return list(found.values())


@contextmanager
def _optimizer_hooks(before, after):
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _inputs(inputs):
    for number, item in enumerate(inputs):
        yield from named_tensors(item, f"input.{number}")


def _parameters(model, optimizers) -> dict[str, torch.Tensor]:
    """Parameters by module path; those that only an optimizer knows come last."""
    named = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for optimizer in optimizers:
        for parameter in trained_by(optimizer):
            if id(parameter) not in known:
                known.add(id(parameter))
                named[f"optimizer.parameter{len(named)}"] = parameter
    return named


def _unseen_state(model, seen: dict) -> dict[str, object]:
    """State of the model that is no op of the graph, for maps that must name it: ``tied`` is the name of the parameter
    that each tied parameter is, ``unread_state`` the other names (scalar buffers)."""
    owner = {id(tensor): label for label, tensor in seen.items()}
    tied, unread = {}, []
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for label, tensor in tensors:
        if id(tensor) not in owner:
            unread.append(label)
        elif owner[id(tensor)] != label:
            tied[label] = owner[id(tensor)]
    return {key: value for key, value in (("tied", tied), ("unread_state", unread)) if value}


@contextmanager
def _seeded():
    """Steps that draw sizes at random are the same at every capture; the generators are left as they were."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


@contextmanager
def _layers(tape: Tape, model):
    """Tell the tape which module of ``model`` runs."""
    path = {id(module): label for label, module in model.named_modules()}

    def before(module, _):
        if id(module) in path:
            tape.enter(path[id(module)])

    def after(module, _, __):
        if id(module) in path:
            tape.leave()

    # A module that a checkpoint stops early is left, too.
    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
