"""Models of Hugging Face's transformers on a mesh, as their users run them: the tensor-parallel plan that the model's
class brings, FSDP2 around the blocks that the class names as not to be split, and around the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from simdev.errors import InvalidInput
from simdev.graphs.capture import is_package_model
from simdev.graphs.capture.packages import package_step
from simdev.graphs.workload import TrainingStep

AXES = ("dp_replicate", "dp_shard", "tp")


def package_make_step(target: str, batch: int | None, length: int | None) -> tuple[Callable, str]:
    """``make_step(mesh)`` for a training step of ``transformers:LlamaForCausalLM[num_hidden_layers=2]``, and its name.

    Parameters are float32 in storage and bfloat16 in computation; AdamW is fused. Raises :class:`InvalidInput` for an
    id that does not exist.
    """
    if not is_package_model(target) or not target.startswith("transformers:"):
        raise InvalidInput("only models of transformers bring a plan for a mesh", source=target)
    build, name, _ = package_step(target, batch=batch, length=length)

    def make(mesh) -> TrainingStep:
        import torch

        unknown = [axis for axis in mesh.mesh_dim_names if axis not in AXES]
        if unknown:
            known = ", ".join(AXES)
            raise InvalidInput(f"it is not parallelised along it; known: {known}", source=target, field=unknown[0])
        step = build()
        if "tp" in mesh.mesh_dim_names:
            _tensor_parallel(step.model, mesh["tp"], target)
        _sharded(step.model, mesh, target)
        return replace(step, optimizer=torch.optim.AdamW(step.model.parameters(), lr=1e-4, fused=True))

    return make, name


def _tensor_parallel(model, mesh, target: str) -> None:
    """Apply the model's own plan, in the words of :mod:`torch.distributed.tensor.parallel`."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise InvalidInput(f"{type(model).__name__} brings no tensor-parallel plan", source=target, field="tp")
    whole = Replicate()
    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=whole),
        "colwise_gather_output": ColwiseParallel(output_layouts=whole),
        "rowwise_rep": RowwiseParallel(input_layouts=whole),
        "embedding_rowwise": RowwiseParallel(input_layouts=whole),
    }
    for name, style in plan.items():
        if style not in styles:
            message = f"its tensor-parallel plan has the style {style!r} for {name}, which simdev does not know"
            raise InvalidInput(message, source=target, field="tp")
    parallelize_module(model, mesh, {name: styles[style] for name, style in plan.items()})


def _sharded(model, mesh, target: str) -> None:
    import torch
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    axes = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis in mesh.mesh_dim_names)
    if not axes:
        return
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    blocks = [module for row in lists for module in row if type(module).__name__ in names]  # others may share weights
    if not blocks:
        raise InvalidInput(f"{type(model).__name__} names no blocks that FSDP could wrap", source=target)
    for module in (*blocks, model):
        if "dp_shard" in axes:
            fully_shard(module, mesh=mesh[axes] if len(axes) > 1 else mesh[axes[0]], mp_policy=policy)
        else:
            replicate(module, mesh=mesh[axes[0]], mp_policy=policy)
