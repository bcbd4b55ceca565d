"""A plain PyTorch module as a parallel model: ``my_model.py:make_step`` returns the ``TrainingStep`` that ``simdev
capture`` takes, without any parallel code, and simdev spreads it.

Its repeated blocks are found (:mod:`simdev.parallel.capture.blocks`). ``dp_shard`` is FSDP2 around each block and the
whole model, ``dp_replicate`` alone is a replica on each rank (FSDP2's ``replicate``). ``recompute=full`` keeps the
input of each block and computes the block again; ``selective`` also keeps attention and every second product.
``reshard_after_forward=false`` keeps the gathered parameters of a block until its backward pass (ZeRO-2). Parameters
keep the data type that the code gives them in storage; FSDP computes in bfloat16 if they are float32.

A model of timm, torchvision or diffusers is such a module, too: ``timm:vit_large_patch16_224``.

A pipeline needs to know what runs before and after the blocks, which a plain module does not say: it is not offered.
``length`` is the tokens of a sample, for the throughput that the table shows; the code decides what a sample is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput, SimdevError, UnknownName, Unsupported
from simdev.graphs.capture import is_package_model, sentence
from simdev.graphs.parallel_model import ParallelModel, Part, Stage
from simdev.graphs.selective import selective_contexts
from simdev.graphs.workload import Step, TrainingStep
from simdev.parallel.capture.blocks import Blocks, kinds_of, lists_of_blocks
from simdev.parallel.mesh import Mesh
from simdev.user_file import import_file

RECOMPUTE = ("none", "selective", "full")
AXES = ("dp_replicate", "dp_shard")


def find_plain(name: str, changes: Mapping[str, object]) -> tuple[ParallelModel, dict[str, Any]]:
    """The parallel model of ``FILE.py:make_step`` or of a package's model. The file is executed. Raises
    :class:`InvalidInput` naming it, :class:`Unsupported` without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(f"{name}: building the model needs PyTorch: pip install torch")
    built = PlainModel(name, _digest(name))
    parameters: dict[str, Any] = {
        "layers": built.layers,
        "length": 1,
        "microbatch": 1,
        "recompute": "none",
        "reshard_after_forward": True,
    }
    model = ParallelModel(
        name,
        built,
        {},
        parameters,
        AXES,
        built.flops,
        source=name,
        checks=built.check,
        identity=f"{name} {built.digest}",
        pipeline=False,
        notes=built.notes,
    )
    return model, model.parameters("", changes)


def _digest(name: str) -> str:
    """Of the file; of the package's version for a package's model."""
    if is_package_model(name):
        return version(name.partition(":")[0])
    path = Path(name.rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


@dataclass(frozen=True)
class PlainModel:
    """Builds a rank's part of a plain step. ``digest`` is that of the file."""

    name: str
    digest: str

    @property
    def layers(self) -> int:
        return _facts(self)[0]

    @property
    def notes(self) -> tuple[str, ...]:
        return _facts(self)[1]

    def check(self, p: Mapping[str, Any], mesh: Mesh) -> None:
        """Raise :class:`InvalidInput` for what is not offered."""
        if p["recompute"] not in (RECOMPUTE if self.layers > 1 else RECOMPUTE[:1]):
            raise UnknownName("recompute", str(p["recompute"]), RECOMPUTE, source=self.name)

    def flops(self, p: Mapping[str, Any]) -> float:
        """Model FLOPs of one sample, forward and backward: counted by PyTorch's ``FlopCounterMode`` on the plain model,
        without recomputation."""
        return _flops(self)

    def __call__(self, mesh, part: Part, *, layers, length, microbatch, recompute, reshard_after_forward) -> Stage:
        run, inputs, rebuild = _prepared(self, microbatch)
        blocks = _blocks(run.model)
        if blocks is not None and part.layers < len(blocks.modules):
            _shorten(run.model, blocks, part.layers)
        if recompute != "none":
            recompute_blocks(run.model, recompute)
        spread(run.model, mesh, reshard_after_forward)
        return Stage(run, inputs, lambda run: rebuild(run.model), _sync, context=on_gpu)


def _make(model: PlainModel) -> TrainingStep:
    """The step as the code builds it, on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture.packages import package_step
    from simdev.graphs.capture.rewrites import as_on_gpu, fake_construction

    build: Callable[[], Step] | None
    if is_package_model(model.name):
        build = package_step(model.name)[0]
    else:
        path, _, function = model.name.rpartition(":")
        build = getattr(import_file(Path(path)), function, None)
        if not callable(build):
            raise InvalidInput("no such function", source=path, field=function)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), fake_construction(), as_on_gpu(ranks=True):
            step = build()
    except SimdevError:
        raise
    except (Exception, SystemExit) as error:  # of the user's code
        raise InvalidInput(f"building the model failed: {sentence(error)}", source=model.name) from error
    if not isinstance(step, TrainingStep):
        message = f"expected a TrainingStep, got {type(step).__name__}: simdev can only spread a loss over one model"
        raise InvalidInput(message, source=model.name)
    return step


def _prepared(model: PlainModel, microbatch: int):
    """The step as a module that maps its inputs to the loss, with parameters on ``meta``; the function of its inputs;
    and what builds the step's own optimizer for the parameters as they are later."""
    import torch
    from torch import nn
    from torch.utils._pytree import tree_map

    step = _make(model)
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    optimizers = step.optimizer if isinstance(step.optimizer, (list, tuple)) else [step.optimizer]
    if len(optimizers) != 1 or optimizers[0] is None:
        raise InvalidInput("expected one optimizer", source=model.name, field="optimizer")
    kind = type(optimizers[0])
    groups = [
        ([names[id(p)] for p in group["params"] if id(p) in names], {k: v for k, v in group.items() if k != "params"})
        for group in optimizers[0].param_groups
    ]
    samples = _samples(step, model.name)
    _on_meta(step.model)

    class Run(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = step.model

        def forward(self, *inputs):
            return step.loss(self.model, *inputs)

    def resized(value):
        if not isinstance(value, torch.Tensor):
            return value
        shape = (microbatch, *value.shape[1:]) if value.dim() and value.shape[0] == samples else value.shape
        return torch.zeros(shape, dtype=value.dtype)

    def optimizer(built):
        now = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in built.named_parameters()}
        found = [{"params": [now[name] for name in some if name in now], **rest} for some, rest in groups]
        return kind([group for group in found if group["params"]])

    return Run(), lambda: tuple(tree_map(resized, value) for value in step.inputs), optimizer


def _samples(step: TrainingStep, source: str) -> int:
    """Samples of the step's batch: the first size that all of its inputs have."""
    import torch
    from torch.utils._pytree import tree_leaves

    sizes = [t.shape[0] for t in tree_leaves(step.inputs) if isinstance(t, torch.Tensor) and t.dim()]
    if not sizes or len(set(sizes)) > 1:
        message = f"its inputs have different first sizes ({', '.join(map(str, sizes))}), so that none is the batch"
        raise InvalidInput(message, source=source, field="inputs")
    return sizes[0]


def _on_meta(model) -> None:
    """Replace fake parameters and buffers by ones on ``meta``; what was tied stays tied."""
    import torch

    replaced: dict[int, Any] = {}

    def meta(tensor):
        if id(tensor) not in replaced:
            plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            replaced[id(tensor)] = (
                tensor,
                torch.nn.Parameter(plain, tensor.requires_grad) if is_parameter else plain,
            )
        return replaced[id(tensor)][1]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = meta(tensor)


def _blocks(model) -> Blocks | None:
    """The one list of alike blocks of a model; None where it has several, or none."""
    found = lists_of_blocks(model)
    return found[0] if len(found) == 1 and len(set(kinds_of(found[0].modules))) == 1 else None


def _shorten(model, blocks: Blocks, count: int) -> None:
    parent, _, name = blocks.name.rpartition(".")
    holder = model.get_submodule(parent)
    setattr(holder, name, type(getattr(holder, name))(*_listed(getattr(holder, name), blocks.modules[:count])))


def _listed(module, members) -> tuple:
    from torch import nn

    return (list(members),) if isinstance(module, nn.ModuleList) else tuple(members)


def recompute_blocks(model, recompute: str) -> None:
    """Recompute each block of each list."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    options: dict[str, Any] = {"context_fn": selective_contexts} if recompute == "selective" else {}
    for blocks in lists_of_blocks(model):
        holder = model.get_submodule(blocks.name)
        for name, block in list(holder.named_children()):
            setattr(holder, name, checkpoint_wrapper(block, preserve_rng_state=False, **options))


def spread(model, mesh, reshard: bool) -> None:
    """FSDP2 (or replication) around each block and around the model."""
    import torch
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    axes = tuple(axis for axis in AXES if axis in (mesh.mesh_dim_names or ()) and mesh[axis].size() > 1)
    if not axes:
        return
    stored = {parameter.dtype for parameter in model.parameters()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if torch.float32 in stored else None)
    if policy.param_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    inside = [module for blocks in lists_of_blocks(model) for module in model.get_submodule(blocks.name).children()]
    for module in (*inside, model):
        if "dp_shard" in axes:
            grid = mesh[axes] if len(axes) > 1 else mesh[axes[0]]
            keep = reshard if module is not model else None  # FSDP2's default keeps what is outside of blocks
            fully_shard(module, mesh=grid, mp_policy=policy, reshard_after_forward=keep)
        else:
            replicate(module, mesh=mesh[axes[0]], mp_policy=policy)


def _sync(run, last: bool) -> None:
    if hasattr(run.model, "set_requires_gradient_sync"):
        run.model.set_is_last_backward(last)
        run.model.set_requires_gradient_sync(last)


@contextmanager
def on_gpu() -> Iterator[None]:
    """What a stage of a plain model runs inside: kernels as a GPU chooses them, and no warnings of the libraries."""
    from simdev.graphs.capture.rewrites import as_on_gpu

    with warnings.catch_warnings(), as_on_gpu(ranks=True):
        warnings.simplefilter("ignore")
        yield


@lru_cache(maxsize=64)
def _facts(model: PlainModel) -> tuple[int, tuple[str, ...]]:
    """The number of blocks that a capture may leave out and repeat (1: none), and what is not offered."""
    whole = _prepared(model, 1)[0].model
    blocks, lists = _blocks(whole), lists_of_blocks(whole)
    notes = ["no tensor parallelism and no pipeline: a plain module brings no plan for them"]
    if not lists:
        notes.append("no recomputation: no repeated blocks were found")
    layers = len(blocks.modules) if blocks else 1
    if layers > 1:
        try:  # a forward pass that counts its blocks itself cannot do with fewer
            _count(model, 2)
        except Exception:
            layers = 1
    return layers, tuple(notes)


def _count(model: PlainModel, layers: int) -> float:
    """FLOPs of forward and backward pass of one sample with so many blocks (0: all)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture.trace import flop_counter_mode

    run, inputs, _ = _prepared(model, 1)
    blocks = _blocks(run.model)
    if blocks is not None and layers:
        _shorten(run.model, blocks, layers)
    with FakeTensorMode(allow_non_fake_inputs=True), on_gpu():
        run.to_empty(device="cpu")
        tensors = inputs()
        with flop_counter_mode() as counter:
            run(*tensors).backward()
    return float(counter.get_total_flops())


@lru_cache(maxsize=64)
def _flops(model: PlainModel) -> float:
    try:
        return _count(model, 0)
    except Exception as error:  # of the user's code
        raise InvalidInput(f"running its step failed: {sentence(error)}", source=model.name) from error
