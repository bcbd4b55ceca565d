"""What a workload is: a step of a PyTorch model, by name and parameters, with the published figures.

A workload is one file of ``workloads/`` (a family may register several)::

    @workload("inception-v3", family="inception", defaults={"batch": 32}, published={"parameters": 23_834_568})
    def inception_v3(batch):
        import torch            # torch is optional, so it is imported inside
        ...
        return TrainingStep(model, inputs=(images, labels), loss=loss, optimizer=optimizer)

The captured graph of the default parameters ships as ``workloads/graphs/<name>.npz``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from simdev.shelf import Shelf, with_sizes

Function = TypeVar("Function", bound=Callable[..., Any])

SHELF: Shelf[WorkloadSpec] = Shelf("workload", "workloads", "simdev.workloads", "workload")


@dataclass(frozen=True)
class TrainingStep:
    """One training step: ``loss(model, *inputs)`` forward and backward, then ``optimizer.step()``.

    ``model`` is a ``torch.nn.Module``, ``inputs`` a tuple of tensors, ``optimizer`` a ``torch.optim.Optimizer`` over
    the model's parameters, a list of such optimizers, or None for forward and backward alone.

    ``tp_plan`` says how ``simdev plan`` divides the model among tensor-parallel ranks: names of modules (with ``*`` for
    a number) and styles of ``torch.distributed.tensor.parallel``, or ``"colwise"`` and ``"rowwise"``. None: simdev
    derives a plan; an empty one: no tensor parallelism.
    """

    model: Any
    inputs: tuple
    loss: Callable[..., Any]
    optimizer: Any = None
    tp_plan: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class InferenceStep:
    """One forward pass without gradients: ``forward(model, *inputs)``, or ``model(*inputs)`` if ``forward`` is None.

    The tensors that it returns (also inside dictionaries, tuples and key-value caches) leave the step. Switch the
    model to ``eval()`` first: simdev runs it as it is.
    """

    model: Any
    inputs: tuple
    forward: Callable[..., Any] | None = None


@dataclass(frozen=True)
class CustomStep:
    """One step of a training loop, written out: ``run(model, *inputs)`` calls ``backward()``, clips, steps the
    optimizers and the schedulers, clears the gradients, averages weights.

    ``run`` is called twice: the first call creates the optimizer state, the second call is captured. If several models
    are trained, ``model`` is a ``torch.nn.ModuleDict`` of them.
    """

    model: Any
    inputs: tuple
    run: Callable[..., Any]


Step = TrainingStep | InferenceStep | CustomStep


@dataclass(frozen=True)
class WorkloadSpec:
    """A registered workload. ``published`` holds the figures of the paper (``parameters``, ``flops`` ...) and
    ``source`` cites it."""

    name: str
    family: str
    function: Callable[..., Step]
    defaults: Mapping[str, object] = field(default_factory=dict)
    published: Mapping[str, object] = field(default_factory=dict)
    source: str = ""

    def parameters(self, changes: Mapping[str, object]) -> dict[str, object]:
        """The defaults with ``changes``. Raises :class:`InvalidInput` where a value is not of its default's type, a
        number is negative, or a count zero."""
        return with_sizes(f"workload {self.name}", self.defaults, changes)


def workload(
    name: str,
    *,
    family: str,
    defaults: Mapping[str, object] | None = None,
    published: Mapping[str, object] | None = None,
    source: str = "",
) -> Callable[[Function], Function]:
    """Register a workload under ``name``; one function may be registered several times with other defaults."""

    def register(function: Function) -> Function:
        SHELF.add(WorkloadSpec(name, family, function, dict(defaults or {}), dict(published or {}), source))
        return function

    return register
