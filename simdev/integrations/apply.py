"""Does to a model of the user's what a plan says, inside the user's own training script or notebook."""

from __future__ import annotations

from typing import Any

from simdev.errors import Unsupported
from simdev.planners import Choice


def apply(model: Any, choice: Choice, *, device: str = "cuda", reshard_after_forward: bool = True) -> Any:
    """Recompute, shard and replicate ``model``, a ``torch.nn.Module``, in place, as the plan's simulation did.

    Call it on each rank after ``torch.distributed.init_process_group``, and build the optimizer afterwards: sharded
    parameters are new objects. Each block is wrapped by itself, then the model, with FSDP2's mixed precision if the
    model's parameters are float32. ``device`` is the kind of the ranks' devices.

    Returns PyTorch's device mesh. Before the backward pass of each microbatch, call
    ``model.set_requires_gradient_sync(last or choice.reduce_each)``, as the script of ``simdev plan --write pytorch``.
    Raises :class:`Unsupported`, naming the axes, for a plan that divides more than the data.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from simdev.parallel.plain import AXES, recompute_blocks, spread

    others = [f"{axis}={size}" for axis, size in choice.mesh.sizes.items() if axis not in AXES and size > 1]
    if others or choice.stage_meshes:
        what = ", ".join(others) or "stages with meshes of their own"
        raise Unsupported(
            f"a plain module brings no plan for {what}; apply() replicates and shards ({', '.join(AXES)})"
        )
    sizes = {axis: choice.mesh[axis] for axis in AXES if choice.mesh[axis] > 1} or {"dp_shard": 1}
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if choice.recompute != "none":
        recompute_blocks(model, choice.recompute)
    spread(model, mesh, reshard_after_forward)
    return mesh
