"""A training step of a PyTorch model, captured as a computation graph.

The step runs once on fake tensors: no memory, no arithmetic, no accelerator (a device that the model asks for becomes
the CPU). Every ATen op that PyTorch dispatches becomes an op of the graph: forward, loss, backward and optimiser
update.

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
* FLOPs are PyTorch's own count for matrix products, convolutions and attention, none for data movement, else one per
  element of the largest tensor. Bytes are those that a kernel over the arguments touches.
* Ops are those that PyTorch's CPU backend dispatches, which are the ATen ops of other backends but for a few; of
  these, dropout is the one op that it is on accelerators, and ``scaled_dot_product_attention`` is the flash variant
  wherever that variant exists (dropout inside it is left out). Recurrent layers are unrolled.
"""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from simdev.errors import InvalidInput, SimdevError, Unsupported
from simdev.problem.graph import ComputationGraph

if TYPE_CHECKING:
    from simdev.graphs.workload import TrainingStep, WorkloadSpec


def capture(step: TrainingStep, name: str, meta: dict | None = None) -> ComputationGraph:
    """Capture one training step.

    ``step`` may be built from real tensors (it is copied, not touched) or under a ``FakeTensorMode``. ``meta`` is
    added to the graph's own: torch version, precision, optimizer, parameters (count), bytes, flops.
    Raises :class:`Unsupported` without PyTorch, or for a step that depends on the values of its tensors.
    """
    _need_torch()
    from simdev.graphs.capture.run import run

    return run(step, name, meta or {})


def capture_workload(spec: WorkloadSpec, params: dict | None = None) -> ComputationGraph:
    """Capture a workload with ``params`` in place of its defaults.

    Raises :class:`InvalidInput` for values that are out of range or do not go together.
    """
    _need_torch()
    from simdev.graphs.capture.run import run

    make, name, meta = workload_step(spec, params or {})
    try:
        return run(make, name, meta)
    except (RuntimeError, TypeError, ValueError) as error:
        if meta["params"] == dict(spec.defaults) or isinstance(error, SimdevError):
            raise
        raise InvalidInput(f"cannot be built: {_sentence(error)}", source=name) from error


def workload_step(spec: WorkloadSpec, params: dict) -> tuple[Callable[[], TrainingStep], str, dict]:
    """What builds the step of a workload with ``params`` in place of its defaults, the graph's name and its meta."""
    chosen = spec.parameters(params)
    changed = {key: value for key, value in chosen.items() if value != spec.defaults[key]}
    name = spec.name + (f"[{','.join(f'{key}={value}' for key, value in sorted(changed.items()))}]" if changed else "")
    meta = {"workload": spec.name, "family": spec.family, "params": chosen, "batch": chosen.get("batch")}
    return lambda: spec.function(**chosen), name, meta


def capture_file(target: str) -> ComputationGraph:
    """Capture ``my_model.py:make_step``: a function of no arguments that returns a ``TrainingStep``.

    The file is executed. Raises :class:`InvalidInput` naming the file and what is wrong with it.
    """
    _need_torch()
    from simdev.graphs.capture.run import run

    build, name, meta = file_step(target)
    path, function = target.rpartition(":")[::2]
    try:
        return run(build, name, meta)
    except InvalidInput as error:
        raise InvalidInput(error.message, source=path, field=error.field) from error
    except Unsupported as error:
        raise InvalidInput(str(error), source=path, field=function) from error
    except Exception as error:  # the user's own code failed
        raise InvalidInput(_sentence(error), source=path, field=function) from error


def file_step(target: str) -> tuple[Callable[[], TrainingStep], str, dict]:
    """What builds the step of ``my_model.py:make_step``, the graph's name and its meta. The file is executed."""
    from simdev.graphs.workload import TrainingStep

    path, _, function = target.rpartition(":")
    if not path or not function.isidentifier():
        raise InvalidInput("expected FILE.py:FUNCTION", source=target)
    if not Path(path).is_file():
        raise InvalidInput("no such file", source=path)
    module = import_file(Path(path))
    make = getattr(module, function, None)
    if not callable(make):
        raise InvalidInput("no such function", source=path, field=function)

    def build():
        step = make()
        if not isinstance(step, TrainingStep):
            found = type(step).__name__
            raise InvalidInput(
                f"{function}() returned {found}, expected simdev.graphs.workload.TrainingStep", source=path
            )
        return step

    return build, Path(path).stem, {"source": Path(path).name, "function": function}


def import_file(path: Path):
    spec = importlib.util.spec_from_file_location(f"_captured_{uuid.uuid4().hex}", path)
    if spec is None:
        raise InvalidInput("not a Python file", source=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidInput(f"cannot be imported: {_sentence(error)}", source=path) from error
    finally:
        sys.path.pop(0)
    return module


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".strip(": ")


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Unsupported("capturing a model needs PyTorch: pip install 'simdev[capture]'")
