"""A step of a PyTorch model, captured as a computation graph.

The step runs once on fake tensors: no memory, no arithmetic, no accelerator (a device that the model asks for becomes
the CPU). Every ATen op that PyTorch dispatches becomes an op of the graph: forward, loss, backward and optimiser
update. If a step depends on the values of large tensors, its forward pass runs for real beforehand.

* Views, aliases and detached tensors are folded into the tensor whose storage they share. A consumer of a slice reads
  the slice's bytes, but depends on (and, on another device, receives) the whole tensor.
* An in-place write to a transient tensor makes a new tensor of the same bytes, colocated with the op that made the old
  one. An in-place write to a parameter or buffer makes none.
* A parameter or buffer is an op of kind ``parameter`` whose persistent bytes include its optimiser state. Parameter,
  final gradient and update are colocated. Tensors that were there before the step and are none of these are
  ``constant``; scalars are folded away.
* The optimiser's ops for one parameter are merged into one op named after the optimiser (``adam``), as fused
  implementations run it.
* A backward op has the layer of the forward op that it belongs to; the sum of a tensor's gradients has that of the
  last one added.
* An op that an activation checkpoint computes again is in the backward phase and has a name that ends in
  ``.recomputed``. Mixed precision (``torch.autocast``, ``GradScaler``) is captured with the casts of a GPU.
* An op whose result nothing reads is left out, unless it is a product or is computed again by a checkpoint.
* FLOPs are PyTorch's own count for matrix products, convolutions and attention, none for data movement, else one per
  element of the largest tensor. Bytes are those that a kernel over the arguments touches.
* Ops are those that PyTorch's CPU backend dispatches, which are the ATen ops of other backends but for a few; of
  these, dropout is the one op that it is on accelerators, and ``scaled_dot_product_attention`` is the flash variant
  wherever that variant exists (dropout inside it is left out).
* A call of ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` is one op forward and one backward, as in cuDNN. It is unrolled with
  ``unroll``, and in graphs of shipped workloads.
* Each graph is compared with its own run (:mod:`simdev.graphs.capture.selfcheck`).
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simdev.errors import InvalidInput, Unsupported, need_memory, shortened
from simdev.problem.graph import ComputationGraph
from simdev.user_file import import_file, line_of, neighbours, sentence

if TYPE_CHECKING:
    from simdev.graphs.workload import Step, WorkloadSpec


def capture(
    step: Step, name: str, meta: dict | None = None, *, allow_empty: bool = False, unroll: bool = False
) -> ComputationGraph:
    """Capture one step: a ``TrainingStep``, an ``InferenceStep`` or a ``CustomStep``.

    ``step`` may be built from real tensors (it is copied, not touched) or under a ``FakeTensorMode``. ``meta`` is
    added to the graph's own: torch version, precision (of the parameters and of each class of ops), optimizer,
    parameters (count), bytes, flops. Raises :class:`Unsupported` without PyTorch, for a step that depends on the
    values of its tensors, or if the graph differs by more than 1 % from what PyTorch counts in the run;
    :class:`InvalidInput` for a graph without a product or an update, unless ``allow_empty``. ``unroll`` keeps every op
    of recurrent layers.
    """
    need_torch()
    from simdev.graphs.capture.run import run

    return _on_gpu(run(step, name, meta or {}, allow_empty=allow_empty), unroll)


def _on_gpu(graph: ComputationGraph, unroll: bool) -> ComputationGraph:
    """Recurrent layers as cuDNN runs them, unless ``unroll``."""
    from simdev.graphs.capture.fuse import join_recurrent

    return graph if unroll else join_recurrent(graph)


def capture_workload(spec: WorkloadSpec, params: dict | None = None) -> ComputationGraph:
    """Capture a workload with ``params`` in place of its defaults.

    Raises :class:`InvalidInput` for values that are out of range or do not go together.
    """
    need_torch()
    from simdev.graphs.capture.build import BuildFailed
    from simdev.graphs.capture.run import run

    make, name, meta = workload_step(spec, params or {})
    try:
        return run(make, name, meta)
    except (BuildFailed, RuntimeError, TypeError, ValueError) as error:
        if meta["params"] == dict(spec.defaults) or isinstance(error, (InvalidInput, Unsupported)):
            raise
        raise InvalidInput(f"cannot be built: {sentence(error)}", source=name) from error


def workload_step(spec: WorkloadSpec, params: dict) -> tuple[Callable[[], Step], str, dict]:
    """What builds the step of a workload with ``params`` in place of its defaults, the graph's name and its meta."""
    chosen = spec.parameters(params)
    changed = {key: value for key, value in chosen.items() if value != spec.defaults[key]}
    name = spec.name + (f"[{','.join(f'{key}={value}' for key, value in sorted(changed.items()))}]" if changed else "")
    meta = {"workload": spec.name, "family": spec.family, "params": chosen, "batch": chosen.get("batch")}
    return lambda: spec.function(**chosen), name, meta


def capture_file(
    target: str, *, name: str | None = None, allow_empty: bool = False, unroll: bool = False
) -> ComputationGraph:
    """Capture ``my_model.py:make_step``: a function of no arguments that returns a step. The file is executed.

    The graph is named after file and function, or ``name``. Raises :class:`InvalidInput` naming the file, the line of
    it where building the model or running the step failed, and what is wrong.
    """
    need_torch()
    build, own_name, meta = file_step(target)
    path, function = target.rpartition(":")[::2]
    with neighbours(Path(path)):
        graph = _captured(build, name or own_name, meta, path, function, allow_empty)
    return _on_gpu(graph, unroll)


def capture_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    *,
    step: int = 3,
    batch: int | None = None,
    fake: bool = False,
    name: str | None = None,
    allow_empty: bool = False,
    unroll: bool = False,
) -> ComputationGraph:
    """Run a training script unchanged, for real, on the CPU, and capture its training step number ``step``. With
    ``fake``, parameters and all that follows from them are tensors without memory and values; the script's data are
    real, and a value that it does not have must not steer it.

    The script hears ``arguments``, as in ``python train.py ARGUMENTS``, and is stopped after the step. ``batch`` sets
    the script's own option for the batch size. The graph is named after the file, or ``name``. Raises
    :class:`InvalidInput` naming the file, and the line of it that failed.
    """
    path, given = script_of(path, arguments, step, batch)
    from simdev.graphs.capture.script import run_script

    meta = {"source": path.name, "arguments": given, "step": step}
    return _on_gpu(run_script(path, given, step, name or path.stem, meta, fake=fake, allow_empty=allow_empty), unroll)


def script_of(path: str | Path, arguments: Sequence[str], step: int, batch: int | None) -> tuple[Path, list[str]]:
    """The path of a script and its arguments, with its own option for the ``batch`` size. Raises :class:`InvalidInput`
    if there is no such file or option, or the first step is asked for."""
    need_torch()
    from simdev.graphs.capture.script import batch_arguments

    path = Path(path)
    if not path.is_file():
        raise InvalidInput("no such file", source=path)
    if step < 2:
        raise InvalidInput("expected at least 2: the first step makes the optimizer's state", source=path, field="step")
    return path, [*arguments, *(batch_arguments(path, batch) if batch else ())]


def capture_package(
    target: str, *, name: str | None = None, allow_empty: bool = False, unroll: bool = False, **choices
) -> ComputationGraph:
    """Capture a model of an installed package by its id, such as ``timm:resnet50``; ``choices`` are those of
    :func:`simdev.graphs.capture.packages.package_step`. A model that uses arguments which it may be called without is
    captured again with them, one whose default configuration fails with the fields that its error asks for, or with
    small values of those that are open. The graph's meta (``source``, ``inputs_from``) and its name say so."""
    need_torch()
    from simdev.graphs.capture.packages import FINAL, needed_arguments, package_step, whole_layers, with_field

    try:
        build, own_name, meta = package_step(target, **choices)
    except ImportError as error:  # of what stands in for a class whose packages are not installed
        from simdev.graphs.capture.remedies import missing_package

        raise Unsupported(f"{target} needs the package {missing_package(error) or sentence(error)}") from error
    try:
        graph = _captured(build, name or own_name, meta, target, None, allow_empty)
    except InvalidInput as error:
        if error.field == FINAL:
            raise InvalidInput(error.message, source=error.source) from error
        tried = choices.get("optional", ())
        counted = choices.get("length") or any(item.startswith("length[") for item in tried)
        needed = [item for item in needed_arguments(error) if item not in tried]
        needed = [item for item in needed if not (counted and item.startswith("length["))]
        if needed and not choices.get("inputs"):
            choices = {**choices, "optional": (*tried, *needed)}
            return capture_package(target, name=name, allow_empty=allow_empty, unroll=unroll, **choices)
        from simdev.graphs.capture.remedies import fields_that_follow

        if follows := fields_that_follow(target, error):
            whole = functools.reduce(lambda id, field: with_field(id, *field), follows, target)
            graph = capture_package(whole, name=name, allow_empty=allow_empty, unroll=unroll, **choices)
            graph.meta["inputs_from"] += (
                f" (the model has {_more_fields(target, whole)}, without which its default configuration fails)"
            )
            return graph
        refusal, example = _refusal(target, error, bool(choices.get("inputs")))
        if example is None:
            raise refusal from error
        try:
            graph = capture_package(example, name=name, allow_empty=allow_empty, unroll=unroll, **choices)
        except (InvalidInput, Unsupported) as other:
            raise (other if "smaller model" in str(other) else refusal) from error
        graph.meta["inputs_from"] += (
            f" (without more fields its step does not run; it has {_more_fields(target, example)}, which is made up)"
        )
        return graph
    if dropped := whole_layers(target):
        graph.meta["whole_layers"] = dropped
    return _on_gpu(graph, unroll)


def _more_fields(target: str, whole: str) -> str:
    """The fields that ``whole``, the id of a model, has more than ``target``, which are its last ones."""
    return whole[len(target.removesuffix("]")) + 1 : -1]


def _refusal(target: str, error: InvalidInput, inputs_given: bool) -> tuple[InvalidInput | Unsupported, str | None]:
    """The ``error`` of a package's model, with what to do about it; and the id of a model whose step runs, where fields
    have no values, and small ones make it whole."""
    from simdev.graphs.capture.build import BuildFailed
    from simdev.graphs.capture.packages import (
        GIVE,
        cause_of,
        fields_read,
        keys_read,
        smaller_model,
        unset_fields,
        with_field,
    )
    from simdev.graphs.capture.remedies import example_of, missing_package
    from simdev.graphs.capture.run import MOST_REAL_BYTES

    def refused(message: str, example: str | None = None) -> tuple[InvalidInput, str | None]:
        return InvalidInput(message, source=error.source, field=error.field), example

    if "smaller model" in error.message and target.startswith("transformers"):
        fewer = smaller_model(target, MOST_REAL_BYTES)
        message = error.message.replace("use torch.where or fixed sizes there, or ", "")  # in the package's code
        return refused(message + (f", such as {fewer}" if fewer else ""))
    if error.field == "loss":
        return refused(f"{error.message}, which the model's outputs do not; capture it with --mode inference")
    cause = cause_of(error)
    if keys := keys_read(cause):
        return refused(f"{error.message}{keys}")
    if absent := missing_package(cause):
        return Unsupported(f"{target} needs the package {absent}"), None
    if inputs_given or "=..." in error.message or "in brackets" in error.message:
        return error, None if inputs_given else example_of(target)
    unset = unset_fields(target, cause)
    fields = fields_read(target, cause)
    if "may not fit" in error.message and fields and not unset:
        return refused(f"{error.message}; or give other fields of its configuration in brackets{fields}")
    if "--" in error.message and not unset:
        return error, None
    if unset:
        whole = functools.reduce(with_field, unset, target)
        named = ", ".join(unset) if len(unset) < 4 else f"{len(unset)} fields"
        asked = f"{error.message}; its configuration leaves {named} open: capture {whole}"
        return refused(asked, example_of(target, unset))
    if isinstance(error.__cause__, BuildFailed) and target.startswith(("transformers", "diffusers")):
        return refused(f"{error.message}; give other fields of its configuration in brackets{fields}")
    remedy = f"if the inputs that simdev makes up do not fit, {GIVE}"
    if target.startswith(("transformers", "diffusers")):
        remedy += f"; if the fields of its default configuration do not, give others in brackets{fields}"
    return refused(f"{error.message}; {remedy}")


def is_package_model(target: str) -> bool:
    """Whether ``target`` is an id such as ``transformers:GPT2LMHeadModel``."""
    from simdev.graphs.capture.packages import PACKAGES

    return target.partition(":")[0] in PACKAGES


def _captured(build, name: str, meta: dict, source: str, function: str | None, allow_empty: bool) -> ComputationGraph:
    """Capture, with every failure as one sentence."""
    from simdev.graphs.capture.build import BuildFailed
    from simdev.graphs.capture.run import run

    try:
        return run(build, name, meta, allow_empty=allow_empty)
    except BuildFailed as error:
        what, cause = "building the model failed", error.__cause__
        raise InvalidInput(
            f"{what}: {sentence(cause)}", source=source, field=line_of(cause, source, function)
        ) from error
    except InvalidInput as error:
        raise InvalidInput(error.message, source=source, field=error.field) from error
    except Unsupported as error:
        message = str(error).removeprefix(f"{name}: ")
        raise InvalidInput(message, source=source, field=line_of(error, source, function)) from error
    except Exception as error:  # the user's own code failed
        message = f"the model was built, but running its step failed: {sentence(error)}"
        raise InvalidInput(message, source=source, field=line_of(error, source, function)) from error


def file_step(target: str) -> tuple[Callable[[], Step], str, dict]:
    """What builds the step of ``my_model.py:make_step``, the graph's name (``my_model-make_step``) and its meta. The
    file is executed."""
    from simdev.graphs.workload import Step

    path, _, function = target.rpartition(":")
    if not path or not function.isidentifier():
        example = f"{target}:make_step" if target.endswith(".py") else f"torchvision:{target}"
        message = "expected FILE.py:FUNCTION, or PACKAGE:MODEL of timm, torchvision, transformers or diffusers"
        raise InvalidInput(f"{message}, such as {shortened(example, 100)}", source=target)
    from simdev.graphs.capture.autocast import gpu_autocast

    with gpu_autocast():  # also for decorators
        module = import_file(Path(path))
    make = getattr(module, function, None)
    if not callable(make):
        raise InvalidInput("no such function", source=path, field=function)

    def build():
        with neighbours(Path(path)):
            step = make()
        if not isinstance(step, Step):
            wanted = "expected a TrainingStep, an InferenceStep or a CustomStep of simdev"
            raise InvalidInput(f"{function}() returned {type(step).__name__}, {wanted}", source=path)
        return step

    return build, f"{Path(path).stem}-{function}", {"source": Path(path).name, "function": function}


def need_torch(mib: int = 600) -> None:
    """Raise :class:`Unsupported` without PyTorch, and :class:`MemoryError` under a limit on the address space that
    leaves less than ``mib`` MiB for its libraries and what follows."""
    if importlib.util.find_spec("torch") is None:
        raise Unsupported("capturing a model needs PyTorch: pip install 'simdev[capture]'")
    if "torch" not in sys.modules:
        need_memory(mib)
