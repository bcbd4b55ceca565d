"""What a parallel model is: a function that builds one pipeline stage of a model on one rank, with PyTorch's own
parallel libraries. Files of ``workloads/models/`` register such functions::

    @parallel_model("gpt", sizes={"3.6b": {"width": 3072, ...}}, defaults={"length": 2048, ...})
    def gpt(mesh, part, *, width, ...):
        import torch
        ...
        return Stage(module, inputs, optimizer)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from simdev.errors import InvalidInput, UnknownName
from simdev.shelf import Shelf, with_sizes

SHELF: Shelf[ParallelModel] = Shelf("parallel model", "workloads", "simdev.models", "parallel_model")
# ``mixed`` is bfloat16 in computation and float32 in storage, ``mixed-float16`` the same with float16.
PRECISIONS = ("mixed", "mixed-float16", "bfloat16", "float32", "float64", "float16")
NEEDED = ("layers", "length", "microbatch")  # parameters that plans read: layers, tokens, sequences of a microbatch


@dataclass(frozen=True)
class Part:
    """The piece of a model that one pipeline stage holds: ``layers`` consecutive layers; the ``first`` piece also
    embeds the tokens, the ``last`` one also computes the loss. ``kinds`` is the kind of each layer in a model whose
    layers differ (:attr:`ParallelModel.kinds`); it is empty where all layers are alike."""

    layers: int
    first: bool = True
    last: bool = True
    kinds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stage:
    """One stage on one rank, ready to be captured.

    ``module`` maps the stage's input to its output (the last stage: the loss). Its parameters are on ``meta``.
    ``inputs`` builds the tensors of one microbatch; it is called on fake tensors. ``targets`` does the same for further
    arguments of the module. ``optimizer`` builds the optimizer from the module. ``sync(module, last)`` is called before
    each microbatch's backward pass and says whether it is the step's last one (FSDP reduces gradients then);
    ``finish(module)`` runs after the last backward pass and before the optimizer (gradient reductions of the program's
    own). ``context()`` is entered around everything that is recorded. ``rows`` answers the host where the program asks
    a device for a whole number: how many tokens go to each expert-parallel rank, if the router is even.
    """

    module: Any
    inputs: Callable[[], tuple]
    optimizer: Callable[[Any], Any]
    sync: Callable[[Any, bool], None] | None = None
    finish: Callable[[Any], None] | None = None
    context: Callable[[], AbstractContextManager] = nullcontext
    rows: int = 1


def usual_precision(mesh: Any) -> str:
    """The rule of most models: float32 weights that the data-parallel ranks shard or replicate, computation in
    bfloat16; on a mesh without such ranks, bfloat16 alone."""
    data = any(mesh[axis] > 1 for axis in ("dp_replicate", "dp_shard", "cp", "ep"))
    return "mixed" if data else "bfloat16"


def _always(precision: str, mesh: Any) -> str:
    return precision


@dataclass(frozen=True, eq=False)
class ParallelModel:
    """A registered model. ``sizes`` maps the name of a published size to parameters; ``defaults`` are the others.

    ``axes`` are the mesh axes that the function knows, besides ``pp``. ``flops(parameters)`` counts the model FLOPs of
    one sequence, forward and backward, without recomputation: what MFU is measured against. ``checks(parameters,
    mesh)`` raises :class:`InvalidInput` where a dimension does not divide.

    ``kinds(parameters)`` is the kind of each layer as small whole numbers, in a model whose layers differ (None: all
    layers are alike). ``identity`` names all that a capture depends on beside the parameters, for a model that no
    source file of its own builds. ``splits_tokens``: the ranks of ``tp`` divide the tokens between layers (sequence
    parallelism). ``pipeline``: the function builds stages. ``notes`` are sentences about what is not offered, and why.
    ``precision(mesh)`` is the data type of weights and computation on the ranks of a mesh, one of :data:`PRECISIONS`.
    ``selective``: it offers the selective recomputation of :mod:`simdev.graphs.selective`, also as ``torch.compile``
    leaves it.
    """

    name: str
    function: Callable[..., Stage]
    sizes: Mapping[str, Mapping[str, object]]
    defaults: Mapping[str, object]
    axes: tuple[str, ...]
    flops: Callable[[Mapping[str, Any]], float]
    source: str = ""
    checks: Callable[[Mapping[str, Any], Any], None] | None = None
    kinds: Callable[[Mapping[str, Any]], tuple[int, ...]] | None = None
    identity: str = ""
    splits_tokens: bool = True
    pipeline: bool = True
    notes: tuple[str, ...] = ()
    precision: Callable[[Any], str] = usual_precision
    selective: bool = False

    def part(self, parameters: Mapping[str, Any], layers: int, start: int = 0) -> Part:
        """``layers`` layers from number ``start`` on; first and last as they are in the whole model. If every n-th
        layer is recomputed, the first of them included, these are of kind 1 and the others of kind 0."""
        kinds, every = self.kinds(parameters)[start : start + layers] if self.kinds else (), every_nth(parameters)
        if every and not self.kinds:
            kinds = tuple(int(number % every == 0) for number in range(start, start + layers))
        return Part(layers, not start, start + layers == int(parameters["layers"]), kinds)

    def parameters(self, size: str, changes: Mapping[str, object]) -> dict[str, Any]:
        """The parameters of ``size`` with ``changes``. Raises :class:`UnknownName` or :class:`InvalidInput`."""
        if size and size not in self.sizes:
            raise UnknownName("size", size, self.sizes, source=self.name)
        return with_sizes(self.name, {**self.defaults, **(self.sizes[size] if size else {})}, changes)


EVERY = re.compile(r"every-([2-9]|[1-9]\d)")  # of the parameter recompute


def every_nth(parameters: Mapping[str, Any]) -> int:
    """The n of a model of which every n-th layer is recomputed (``recompute="every-2"``); 0 of any other."""
    found = EVERY.fullmatch(str(parameters.get("recompute", "")))
    return int(found[1]) if found else 0


def parallel_model(
    name: str,
    *,
    sizes: Mapping[str, Mapping[str, object]],
    defaults: Mapping[str, object],
    axes: tuple[str, ...],
    flops: Callable[[Mapping[str, Any]], float],
    source: str = "",
    checks: Callable[[Mapping[str, Any], Any], None] | None = None,
    **further: Any,
) -> Callable[[Callable[..., Stage]], Callable[..., Stage]]:
    """Register a parallel model under ``name``. ``defaults`` has at least the parameters ``layers``, ``length`` and
    ``microbatch``; ``further`` are other fields of :class:`ParallelModel`, of which ``precision`` may be a name, the
    same on all meshes."""
    for parameter in NEEDED:
        if type(defaults.get(parameter)) is not int:
            raise InvalidInput(f"defaults need a whole number {parameter!r}", source=f"parallel model {name!r}")

    def register(function):
        model = ParallelModel(name, function, sizes, defaults, axes, flops, source, checks, **further)
        if isinstance(model.precision, str):
            model = replace(model, precision=partial(_always, model.precision))
        SHELF.add(model)
        return function

    return register
