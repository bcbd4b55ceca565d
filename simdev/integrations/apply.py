"""Does to a model of the user's what a plan says, inside the user's own training script or notebook."""

from __future__ import annotations

from typing import Any

from simdev.errors import Unsupported
from simdev.planners import Choice, Job


def apply(
    model: Any,
    choice: Choice,
    job: Job | None = None,
    *,
    device: str = "cuda",
    reshard_after_forward: bool | None = None,
) -> Any:
    """Recompute, divide, shard and replicate ``model``, a ``torch.nn.Module``, in place, as the plan's simulation did.

    Call it on each rank after ``torch.distributed.init_process_group``, and build the optimizer afterwards: sharded
    parameters are new objects. Load or make ``job`` before the process group. ``device`` is the kind of the ranks'
    devices.

    A model of transformers is divided by the plans that its class brings (tp, ep) and sharded by transformers. Of any
    other module, each block is wrapped by itself, then the model, with FSDP2's mixed precision if the model's
    parameters are float32. Its products are divided by the tensor-parallel plan of ``job``
    (:func:`simdev.load_plan` returns job and choice): run each step within
    ``torch.distributed.tensor.experimental.implicit_replication()`` then. ``reshard_after_forward``: whether a plain
    module's gathered parameters are freed after a forward pass; by default as in the job, else they are. If the job's
    framework compiles, each block is compiled by itself.

    Returns PyTorch's device mesh. Before the backward pass of each microbatch, call ``model.set_is_last_backward`` and
    ``model.set_requires_gradient_sync`` with ``last or choice.reduce_each``, as the script of ``simdev plan --write
    pytorch`` does.
    Raises :class:`Unsupported`, naming the part, for a plan that divides more (pipeline stages are several modules and
    a schedule, which the script has), for parameters that stay gathered, a distributed optimizer, every n-th layer
    recomputed, and a compiled model that is one of transformers or has no blocks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from simdev.parallel.capture import packages
    from simdev.parallel.capture.blocks import lists_of_blocks
    from simdev.parallel.hugging_face import recompute_layers
    from simdev.parallel.plain import AXES, PlainModel, recompute_blocks, spread

    is_transformers = hasattr(model, "maybe_distribute_model")
    plain = job.model.function if job is not None and isinstance(job.model.function, PlainModel) else None
    plan = plain.tp_plan if plain else {}
    lists = plain.lists if plain else [blocks.name for blocks in lists_of_blocks(model)]
    known = packages.AXES if is_transformers else (*AXES, "tp") if plan else AXES
    others = [f"{axis}={size}" for axis, size in choice.mesh.sizes.items() if axis not in known and size > 1]
    if others or choice.stage_meshes:
        what = ", ".join(others) or "stages with meshes of their own"
        kind = "a model of transformers" if is_transformers else "a plain module"
        raise Unsupported(f"apply() divides {kind} along {', '.join(known)}, and this plan has {what}")
    if choice.reshard != "always" and choice.mesh["dp_shard"] > 1:
        raise Unsupported(f"apply() cannot say that parameters stay gathered (reshard={choice.reshard})")
    if choice.recompute.startswith("every"):
        raise Unsupported(
            f"apply() recomputes all blocks or none, and this plan every n-th (recompute={choice.recompute})"
        )
    spreads_updates = job is not None and job.software.distributed_optimizer
    if spreads_updates and choice.mesh["dp_replicate"] > 1:
        raise Unsupported("apply() has no distributed optimizer, and the job's framework has (dp_replicate)")
    compiled = job is not None and job.software.fused and not spreads_updates
    if compiled and (is_transformers or not lists):
        what = "transformers recomputes layers outside of compiled code" if is_transformers else "this model has none"
        raise Unsupported(f"apply() compiles each block of a plain module (torch.compile), and {what}")
    sizes = {axis: choice.mesh[axis] for axis in known if choice.mesh[axis] > 1} or {"dp_shard": 1}
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if is_transformers:
        if choice.recompute != "none":
            recompute_layers(model, choice.recompute, preserve_rng_state=True)
        packages.distribute(model.train(), mesh, type(model).__name__)
        return mesh
    if choice.mesh["tp"] > 1:
        from simdev.parallel.capture.tensor_rule import apply_plan

        apply_plan(model, mesh["tp"], plan)
    if choice.recompute != "none":
        recompute_blocks(model, choice.recompute, lists, preserve_rng_state=True)
    for name in lists if compiled else ():
        for block in model.get_submodule(name).children():
            block.compile()  # before it is sharded
    if reshard_after_forward is None:
        reshard_after_forward = bool(job is None or job.parameters.get("reshard_after_forward", True))
    spread(model, mesh, reshard_after_forward, lists, plain.outside if plain else ())
    return mesh
