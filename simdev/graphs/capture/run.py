"""Runs a step once under the tape: on fake tensors, after a real forward pass where the step depends on values, or
wholly for real where that does not suffice."""

from __future__ import annotations

import gc
import random
import re
import sys
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from simdev.errors import InvalidInput, SimdevError, Unsupported
from simdev.graphs.capture.assemble import Assembly, assemble
from simdev.graphs.capture.attention import flash_everywhere
from simdev.graphs.capture.build import build_fake, build_real, named_tensors, optimizers_of
from simdev.graphs.capture.optimizers import (
    forget_state,
    has_own_rules,
    kind_of,
    make_state,
    one_by_one,
    register_state,
    trained_by,
    update,
)
from simdev.graphs.capture.precision import precision_of_classes, precision_of_parameters
from simdev.graphs.capture.rehearse import rehearse
from simdev.graphs.capture.rewrites import as_on_gpu, one_replica, unlogged_failures
from simdev.graphs.capture.selfcheck import (
    TOLERANCE,
    Counted,
    Expected,
    Versions,
    check,
    check_not_empty,
    check_repeats,
    held_bytes,
)
from simdev.graphs.capture.shadows import MOST_ROUTED, Shadows
from simdev.graphs.capture.trace import (
    RECOMPUTED,
    STEERED,
    MadeUp,
    NeedsValues,
    Tape,
    is_sparse,
    other_guesses,
    plain_tensors,
    storage_bytes,
    touched_bytes,
)
from simdev.graphs.workload import CustomStep, InferenceStep, Step
from simdev.problem.graph import ComputationGraph

EXPERTS = re.compile(r"(?!.*shared)\w*experts")  # a field with how many there are
MOST_EXPERTS = 8192  # of all modules that know them: of more, a graph would have hundreds of thousands of ops
ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
MOST_REAL_BYTES = 2 << 30  # of parameters: larger models are not run for real
REMEDIES = {  # by a word of PyTorch's message
    "HigherOrderOperator": "the step calls a control-flow operator (while_loop, scan, map), which only compilers take "
    "apart; for the capture, write it with Python's own for or while",
}


@dataclass(frozen=True)
class Ran:
    """What a step leaves: the values that leave it, the value of each parameter's final gradient (by the op of the
    parameter), the gradients' bytes, how many parameters had a gradient, the kinds of optimizers that stepped in a loop
    (by the op of the parameter), and the bytes of the optimizer states that the step made and leaves."""

    results: set
    final: dict[int, int]
    gradient_bytes: int
    gradients: int
    kinds: dict[int, str] = field(default_factory=dict)
    state_bytes: int = 0


@dataclass(frozen=True)
class Held:
    """What is there before a step: parameters and buffers by name, the op of each parameter, the optimizers, the
    parameters that are not stepped because they are like another (by optimizer), the bytes of all states, those of all
    that is held, and the parameters whose state was there when the step was built."""

    named: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    homes: dict
    optimizers: list
    alike: dict
    state_bytes: int
    persistent_bytes: int
    given: set


def run(make: Callable[[], Step] | Step, name: str, meta: dict, *, allow_empty: bool = False) -> ComputationGraph:
    """Capture a step, or a function that builds one (then large tensors are never allocated).

    If a step depends on the values of its tensors, its forward pass runs for real beforehand, or else all of it. If its
    parameters are too large for that and it has experts, its routers send tokens to all of them evenly. A step that
    fake tensors cannot run (NumPy arrays, sparse gradients) runs for real.
    Raises :class:`InvalidInput` for a graph without a product or an update, unless ``allow_empty``.
    """
    with unlogged_failures(), one_replica():  # a process group that the build makes is there while the step runs
        return _run(make, name, meta, allow_empty)


def _run(make: Callable[[], Step] | Step, name: str, meta: dict, allow_empty: bool) -> ComputationGraph:
    with seeded():
        built = build_fake(make, name)
    reads = MadeUp.reads
    try:
        graph = _run_fake(built, name, meta, allow_empty)
        if MadeUp.reads != reads:
            _check_steered_by_nothing(graph, make, name, meta, allow_empty)
        return graph
    except Exception as error:
        if isinstance(error, SimdevError) and not isinstance(error, NeedsValues):
            raise
        held = sum(storage_bytes(parameter) for parameter in built.step.model.parameters())
        if held > MOST_REAL_BYTES or not isinstance(make, Callable):
            if not isinstance(error, ON_VALUES):
                raise
            if isinstance(make, Callable) and (experts := numbers_of_experts(built.step.model)):
                del built
                if graph := _run_with_even_routers(make, name, meta, experts, allow_empty):
                    return graph
            raise Unsupported(f"{name}: {values_sentence(error)}") from error
        on_values, first = isinstance(error, ON_VALUES), error
    del built
    rehearsed = _run_rehearsed(make, name, meta, allow_empty) if on_values else None
    try:
        return rehearsed or _run_for_real(make, name, meta, allow_empty)
    except NotImplementedError as error:
        if remedy := remedy_of(error):
            raise Unsupported(f"{name}: {remedy}") from error
        raise
    except Exception as error:
        if type(error) is type(first):  # the step is at fault; fake tensors say more
            raise first from None
        raise


def _check_steered_by_nothing(graph: ComputationGraph, make, name: str, meta: dict, allow_empty: bool) -> None:
    """Raise :class:`NeedsValues` if the step is another one when the numbers that were made up for it are others."""
    with other_guesses():
        with seeded():
            built = build_fake(make, name)
        try:
            same = _run_fake(built, name, meta, allow_empty).fingerprint == graph.fingerprint
        except Exception:
            same = False
    if not same:
        raise NeedsValues(STEERED)


def remedy_of(error: Exception) -> str | None:
    """What to write in place of something that a CPU, or an eager run, does not do."""
    if not isinstance(error, NotImplementedError):
        return None
    return next((remedy for word, remedy in REMEDIES.items() if word in str(error)), None)


def _run_rehearsed(make, name: str, meta: dict, allow_empty: bool) -> ComputationGraph | None:
    """Capture on fake tensors with the answers of a real forward pass; None if they do not lead through the step."""
    try:
        with seeded():
            step = build_real(make, name)
        if isinstance(step, CustomStep):
            return None
        with seeded(), _as_captured(step.model):
            answers = rehearse(step)
        del step
        with seeded():
            built = build_fake(make, name)
        built.shadows.answers = answers
        return _run_fake(built, name, {**meta, "values": "forward"}, allow_empty)
    except Exception:  # the real run tells what is wrong
        return None


def numbers_of_experts(model) -> frozenset[int]:
    """The numbers of experts that the modules of a model know; none if there are too many experts in all layers."""
    known = [
        [value for name, value in vars(module).items() if EXPERTS.fullmatch(name) and type(value) is int and value > 1]
        for module in model.modules()
    ]
    few = sum(max(values, default=0) for values in known) <= MOST_EXPERTS
    return frozenset(value for values in known for value in values) if few else frozenset()


def _run_with_even_routers(
    make, name: str, meta: dict, experts: frozenset[int], allow_empty: bool
) -> ComputationGraph | None:
    """Capture on fake tensors as if each of the ``experts`` got as many tokens as any other; None if that does not lead
    through the step."""
    with seeded():
        built = build_fake(make, name)
    built.shadows.experts, built.shadows.most_elements = experts, MOST_ROUTED
    try:
        return _run_fake(built, name, {**meta, "values": "even routers"}, allow_empty)
    except Exception:  # of routes that a step would not choose, too
        return None


def _run_for_real(make, name: str, meta: dict, allow_empty: bool = False) -> ComputationGraph:
    with seeded():
        step = build_real(make, name)
        return capture_step(Tape(), step, name, {**meta, "values": "real"}, allow_empty=allow_empty).graph


def _run_fake(built, name: str, meta: dict, allow_empty: bool) -> ComputationGraph:
    if isinstance(built.step, CustomStep) and not any(
        isinstance(parameter, FakeTensor) for parameter in built.step.model.parameters()
    ):
        with seeded():
            return capture_step(Tape(), built.step, name, {**meta, "values": "real"}, allow_empty=allow_empty).graph
    with seeded(), built.mode, built.shadows:
        return capture_step(Tape(), built.step, name, meta, quiet=built.shadows, allow_empty=allow_empty).graph


def run_real(make, name: str, meta: dict, tape: Tape) -> Assembly:
    """Run the step that ``make`` builds once under ``tape``, on real tensors: the same graph, with values."""
    return capture_step(tape, build_real(make, name), name, meta, allow_empty=True)


def values_sentence(error: BaseException) -> str:
    """Why a step cannot be captured without values, and what to do."""
    call = str(getattr(error, "func", error)).removeprefix("aten.").removesuffix(".default")
    asked = {"_local_scalar_dense": "reads a number out of a tensor", "nonzero": "counts the non-zeros of a tensor"}
    does = asked.get(call, f"calls {call}, whose result has a size that the values decide")
    return (
        f"the step depends on the values of its tensors: it {does}; use torch.where or fixed sizes there, or capture a "
        "smaller model, which simdev runs for real"
    )


def capture_step(tape: Tape, step: Step, name: str, meta: dict, *, quiet=None, allow_empty: bool = False) -> Assembly:
    """Run ``step`` under ``tape``. ``quiet`` are shadows, which rest after the forward pass."""
    model, optimizers, counted = step.model, optimizers_of(step), Counted()
    with ExitStack() as stack:
        stack.enter_context(_as_captured(model))
        if "workload" in meta:  # shipped graphs keep their kernels and edges
            stack.enter_context(flash_everywhere())
            tape.keeps_saved = False
        if isinstance(step, CustomStep):
            optimizers, first = _warm_up(step, quiet)
            drawn_before = _python_draws()
        named = named_parameters(model, optimizers)
        given = {parameter for one in optimizers for parameter, state in one.state.items() if state}
        alike = {} if isinstance(step, CustomStep) else {one: make_state(one, quiet) for one in optimizers}
        held = hold(tape, named, dict(model.named_buffers()), optimizers, alike, given)
        for label, tensor in _inputs(step.inputs):
            tape.input(tensor, label)
        versions = Versions(named)
        stack.enter_context(counted)
        stack.enter_context(tape)
        stack.enter_context(_layers(tape, model))
        if isinstance(step, InferenceStep):
            ran = _infer(tape, step, name)
        elif isinstance(step, CustomStep):
            loop = Loop(tape, held.homes, versions, quiet)
            with loop:
                outcome = step.run(step.model, *step.inputs)
            ran = loop.ran(outcome)
        else:
            ran = _train(tape, step, held, name, quiet, versions)
    if isinstance(step, CustomStep):
        if quiet is not None and not quiet.asked and drawn_before == _python_draws():
            check_repeats(name, first, counted.total)
        elif abs(first - counted.total) > TOLERANCE * max(first, counted.total):
            meta = {**meta, "first_call_flops": first}
    meta = {**facts_of_state(model, {**held.named, **held.buffers}), **meta}
    assembly = assembled(tape, held, ran, name, meta, counted.total, versions.updates)
    if not allow_empty:
        wants_update = isinstance(step, CustomStep) or bool(optimizers)
        check_not_empty(name, assembly.products, sum(assembly.updates.values()), wants_update)
    return assembly


def hold(tape: Tape, named: dict, buffers: dict, optimizers: list, alike: dict, given: Collection = ()) -> Held:
    """Tell the tape what is there before the step."""
    homes = {parameter: tape.persistent(parameter, label) for label, parameter in named.items()}
    buffers = {label: buffer for label, buffer in buffers.items() if buffer.numel() > 1}
    for label, buffer in buffers.items():
        tape.persistent(buffer, label)
    state_bytes = sum(register_state(tape, one, homes, alike.get(one, {})) for one in optimizers)
    states = [tensor for one in optimizers for _, tensor in named_tensors(dict(one.state), "state")]
    copies = [
        tensor
        for one in optimizers
        for parameter, model in alike.get(one, {}).items()
        if parameter not in one.state
        for _, tensor in named_tensors(one.state.get(model, {}), "state")
    ]
    own = [*named.values(), *buffers.values()]
    persistent = held_bytes(own, scalars=True) + held_bytes(states, besides=own)
    persistent += sum(held_bytes([tensor]) for tensor in copies)
    return Held(named, buffers, homes, optimizers, alike, state_bytes, persistent, set(given))


def assembled(
    tape: Tape, held: Held, ran: Ran, name: str, meta: dict, counted: int, updates: dict[str, int]
) -> Assembly:
    """The graph of a recorded step, checked against its run: the FLOPs that PyTorch ``counted``, and how often it
    changed each parameter (``updates``)."""
    homes, optimizers = held.homes, held.optimizers
    kinds = {homes[parameter]: kind_of(optimizer) for optimizer in optimizers for parameter in trained_by(optimizer)}
    kinds |= ran.kinds
    kind = "+".join(dict.fromkeys([*map(kind_of, optimizers), *ran.kinds.values()])) or "none"
    facts = {
        "torch": torch.__version__.split("+")[0],
        "precision": precision_of_parameters(held.named.values()),
        "optimizer": kind,
        "parameters": sum(parameter.numel() for parameter in held.named.values()),
        "parameter_bytes": held_bytes(held.named.values(), scalars=True),
        "gradient_bytes": ran.gradient_bytes,
        "optimizer_state_bytes": held.state_bytes + ran.state_bytes,
        "buffer_bytes": held_bytes(held.buffers.values(), scalars=True),
    }
    assembly = assemble(
        tape, name, results=ran.results - {None}, gradients=ran.final, updates=kinds, meta={**facts, **meta}
    )
    graph = assembly.graph
    graph.meta["flops"] = int(graph.op_flops.sum())
    graph.meta["precision_of_classes"] = precision_of_classes(graph)
    if tape.uncounted:
        graph.meta["uncounted_ops"] = dict(sorted(tape.uncounted.items()))
    recomputed = np.array([RECOMPUTED in label for label in graph.op_names])
    if recomputed.any():
        graph.meta["recomputed_ops"] = int(recomputed.sum())
        graph.meta["recomputed_flops"] = int(graph.op_flops[recomputed].sum())
    label = {home: label for label, parameter in held.named.items() for home in [homes[parameter]]}
    found = {label[home]: count for home, count in assembly.updates.items() if home in label}
    persistent = held.persistent_bytes + ran.state_bytes
    expected = Expected(counted + tape.repeated, updates, persistent, ran.gradients)
    check(name, expected, assembly.products, found, graph, len(ran.final))
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


def _train(tape: Tape, step, held: Held, name: str, quiet, versions: Versions) -> Ran:
    outcome = step.loss(step.model, *step.inputs)
    if not isinstance(outcome, torch.Tensor) or outcome.numel() != 1 or not outcome.requires_grad:
        raise InvalidInput("must return one number that depends on the parameters", source=name, field="loss")
    tape.phase = "backward"
    if quiet is not None:
        quiet.active = False
    trained = [parameter for parameter in held.named.values() if parameter.requires_grad]
    if _needs_whole_backward(outcome, trained):
        outcome.backward()
        gradients = [parameter.grad for parameter in trained]
    else:
        gradients = torch.autograd.grad(outcome, trained, allow_unused=True)
    tape.phase = "update"
    final = {}
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
        if gradient is not None:
            final[held.homes[parameter]] = tape.value_of(gradient)
    forgotten = 0
    for optimizer in held.optimizers:
        forgotten += forget_state(tape, optimizer, held.homes, held.alike[optimizer], held.given)
        versions.start()
        update(tape, optimizer, held.homes, held.alike[optimizer])
        versions.stop()
    tape.settle(held.homes)
    left = [tensor.grad for _, tensor in _inputs(step.inputs) if tensor.is_leaf and tensor.grad is not None]
    results = {tape.value_of(outcome), *map(tape.value_of, left)}
    if not held.optimizers:
        results |= set(final.values())
    found = [gradient for gradient in gradients if gradient is not None]
    size = sum(map(gradient_bytes, found))
    return Ran(results, final, size, len(found), state_bytes=-forgotten)


def _needs_whole_backward(outcome, trained) -> bool:
    """Whether ``torch.autograd.grad`` of the ``trained`` parameters would leave out a part of the backward pass: the
    gradients of other leaves (an input that requires one), and those that a function written in Python, such as a
    reentrant checkpoint or a reversible block, accumulates by a backward pass of its own."""
    known, stack, seen = set(map(id, trained)), [outcome.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        if hasattr(node, "variable") and id(node.variable) not in known:
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
    return Ran(results, {}, 0, 0)


class Loop:
    """While active, a step that is written out runs under ``tape``: each op's phase follows from who calls it."""

    def __init__(self, tape: Tape, homes: dict, versions: Versions | None = None, shadows: Shadows | None = None):
        self._tape, self._homes, self._versions, self._shadows = tape, homes, versions, shadows
        self._final: dict[int, int | None] = {}
        self._sizes: dict[int, int] = {}
        self.kinds: dict[int, str] = {}
        self._stateless: list[tuple[weakref.ref, list]] = []
        self._hooks = ExitStack()

    def __enter__(self):
        self._tape.phase = "loop"
        self._hooks.enter_context(optimizer_hooks(self.before, self.after))
        return self

    def __exit__(self, *error):
        return self._hooks.__exit__(*error)

    def before(self, optimizer, args, kwargs):
        """An optimizer begins its step."""
        self._note_gradients(optimizer)
        self._tape.follow(self._homes)
        trained = [parameter for parameter in trained_by(optimizer) if parameter in self._homes]
        self.kinds |= {self._homes[parameter]: kind_of(optimizer) for parameter in trained}
        if first := [parameter for parameter in trained if not optimizer.state.get(parameter)]:
            self._stateless.append((weakref.ref(optimizer), first))
        if self._versions is not None:
            self._versions.start()
        self._tape.updating += 1
        self._tape.own_rules.append(has_own_rules(optimizer))
        self._tape.turn += 1
        changed = with_closure(args, kwargs, lambda closure: self._evaluate(optimizer, closure))
        self._tape.searching = changed is not None
        return changed

    def after(self, optimizer, *_):
        """It has ended. After a made-up number, the values of its parameters are not those of a real step."""
        if self._tape.guessed and self._shadows is not None:
            self._shadows.outdate(trained_by(optimizer))
        self._tape.guessed = False
        self._tape.updating -= 1
        self._tape.own_rules.pop()
        if self._tape.updating:  # what the optimizer around it writes from now on is another update
            self._tape.turn += 1
        self._tape.searching = False
        self._tape.settle(self._homes)
        if self._versions is not None:
            self._versions.stop()

    def _evaluate(self, optimizer, closure):
        """Forward and backward inside an optimizer's step."""
        updating, self._tape.updating = self._tape.updating, 0
        try:
            return closure()
        finally:
            self._note_gradients(optimizer)
            self._tape.updating = updating
            self._tape.turn += 1

    def _note_gradients(self, optimizer) -> None:
        for parameter in trained_by(optimizer):
            if parameter.grad is not None and parameter in self._homes:
                self._final[self._homes[parameter]] = self._tape.value_of(parameter.grad)
                self._sizes[self._homes[parameter]] = gradient_bytes(parameter.grad)

    def ran(self, outcome) -> Ran:
        """What the step leaves, which returned ``outcome``: its tensors, and the gradients that it did not clear."""
        self._tape.settle(self._homes)
        left = [parameter.grad for parameter in self._homes if parameter.grad is not None]
        results = {self._tape.value_of(tensor) for _, tensor in named_tensors(outcome, "output")}
        results |= {self._tape.value_of(gradient) for gradient in left}
        final = {home: value for home, value in self._final.items() if value is not None}
        return Ran(results, final, sum(self._sizes.values()), len(self._final), self.kinds, self._register_states())

    def _register_states(self) -> int:
        """Tell the tape which states optimizers made in this step, as those do that step in every second call only or
        whose parameter had no gradient before; returns their bytes. A state that goes with an optimizer which the step
        made for itself (an inner loop's) is none of them."""
        made = []
        if self._stateless:
            gc.collect()
        for known, parameters in self._stateless:
            optimizer = known()
            for parameter in parameters if optimizer is not None else ():
                found = [tensor for _, tensor in named_tensors(optimizer.state.get(parameter, {}), "state")]
                made += found
                for whole in found:
                    for tensor in plain_tensors(whole):
                        self._tape.state(tensor, self._homes[parameter])
        return held_bytes(made)


def gradient_bytes(gradient) -> int:
    """Bytes of a gradient's elements; of a sparse one, its rows and their numbers."""
    if is_sparse(gradient):
        return touched_bytes(gradient)
    return gradient.numel() * gradient.element_size()


def with_closure(args, kwargs, wrap):
    """The arguments of an optimizer's step with ``wrap(closure)`` in place of its closure; None without one."""
    if len(args) > 1 and callable(args[1]):
        return (args[0], lambda: wrap(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": lambda: wrap(kwargs["closure"])}
    return None


def _warm_up(step: CustomStep, shadows: Shadows | None) -> tuple[list, int]:
    """Run a written-out step once without recording it; the optimizers that it stepped, with their state, and the FLOPs
    of its products."""
    found: list[weakref.ref] = []  # an optimizer that the step makes for itself (an inner loop's) goes with it
    quiet, counted = Tape(), Counted()
    quiet.recording = False

    def before(optimizer, *_):
        if not any(known() is optimizer for known in found):
            found.append(weakref.ref(optimizer))
        one_by_one(optimizer)

    with counted, quiet, optimizer_hooks(before, lambda *_: None), Loop(quiet, {}, shadows=shadows):
        step.run(step.model, *step.inputs)
    gc.collect()
    return [optimizer for known in found if (optimizer := known()) is not None], counted.total


def _python_draws() -> tuple:
    """The states of the random generators of Python and NumPy, which change where a step draws sizes or its course."""
    kind, keys, place, *_ = np.random.get_state()
    return random.getstate(), kind, keys.tobytes(), place


@contextmanager
def optimizer_hooks(before, after):
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _inputs(inputs):
    for number, item in enumerate(inputs):
        yield from named_tensors(item, f"input.{number}")


def named_parameters(model, optimizers) -> dict[str, torch.Tensor]:
    """Parameters by module path; those that only an optimizer knows come last."""
    named = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for optimizer in optimizers:
        for parameter in trained_by(optimizer):
            if id(parameter) not in known:
                known.add(id(parameter))
                named[f"optimizer.parameter{len(named)}"] = parameter
    return named


def facts_of_state(model, seen: dict) -> dict[str, object]:
    """State of the model that is no op of the graph, for maps that must name it: ``tied`` is the name of the parameter
    that each tied parameter is, ``unread_state`` the other names (scalar buffers). And the kinds of recurrent layers,
    by name: ``recurrent``."""
    owner = {id(tensor): label for label, tensor in seen.items()}
    tied, unread = {}, []
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for label, tensor in tensors:
        if id(tensor) not in owner:
            unread.append(label)
        elif owner[id(tensor)] != label:
            tied[label] = owner[id(tensor)]
    recurrent = {label: module.mode for label, module in model.named_modules() if isinstance(module, torch.nn.RNNBase)}
    facts = ("tied", tied), ("unread_state", unread), ("recurrent", recurrent)
    return {key: value for key, value in facts if value}


@contextmanager
def seeded():
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
