"""Data parallelism of the shipped models, with FSDP2."""

from __future__ import annotations

SHARDED = ("dp_shard", "cp", "ep")  # the axes over which parameters are sharded: their ranks hold different tokens


def axis_size(mesh, axis: str) -> int:
    """Ranks along ``axis``; 1 where the mesh has no such axis."""
    return mesh[axis].size() if axis in (mesh.mesh_dim_names or ()) else 1


def recomputed(model, recompute: str, context_fn=None, kinds: tuple[int, ...] = ()) -> None:
    """Keep the input of each layer and recompute the layer in its backward pass, unless ``recompute`` is ``none``;
    ``context_fn`` says which results are kept all the same (``torch.utils.checkpoint``). ``kinds`` is 1 for each layer
    that is recomputed, where not all are (``Part.kinds``)."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if recompute == "none":
        return
    how = {"context_fn": context_fn} if context_fn else {}
    for number, layer in enumerate(model.layers):
        if kinds and not kinds[number]:
            continue
        model.layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False, **how)


def over_data(model, layers, mesh, policy=None, experts=()) -> None:
    """Shard or replicate ``model`` and each of its ``layers`` over the data-parallel axes of ``mesh``.

    Parameters are sharded over ``dp_shard``, ``cp`` and ``ep`` together, as torchtitan does it, and replicated over
    ``dp_replicate``. ``experts`` are modules whose parameters the ranks of ``ep`` divide already: they are sharded over
    the other axes, by rows where there are fewer experts than ranks. Without ranks along any of these axes, the
    model gets the data type of the ``policy``, which is bfloat16 in computation and float32 in reductions unless
    another one is given.
    """
    import torch
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = policy or MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    names = mesh.mesh_dim_names or ()
    sharded = [axis for axis in SHARDED if axis_size(mesh, axis) > 1]
    outer = axis_size(mesh, "dp_replicate") > 1
    if not sharded and not outer:
        model.to(policy.param_dtype)
        return

    def wrap(module, axes, **options):
        if axes:
            fully_shard(module, mesh=_grid(mesh, axes, outer), mp_policy=policy, **options)
        elif outer:
            replicate(module, mesh=mesh["dp_replicate"], mp_policy=policy, **options)

    whole = set()  # of experts that no axis shards any further
    if "ep" in names:
        rest = [axis for axis in sharded if axis != "ep"]
        for module in experts:
            wrap(module, rest, **_by_rows([module], mesh, rest))
            if not rest and not outer:
                module.to(policy.param_dtype)
                whole.update(module.parameters())
    options: dict = {"ignored_params": whole} if whole else {}
    if "ep" not in names:
        options |= _by_rows(experts, mesh, sharded)
    for layer in layers:
        wrap(layer, sharded, **options)
    wrap(model, sharded, **options)


def _by_rows(experts, mesh, axes) -> dict:
    """Shard the rows of each expert where there are fewer experts than ranks: FSDP would pad the experts."""
    from math import prod

    from torch.distributed.tensor import Shard

    found = {parameter for module in experts for parameter in module.parameters()}
    few = found and axes and min(p.shape[0] for p in found) < prod(mesh[axis].size() for axis in axes)
    return {"shard_placement_fn": lambda parameter: Shard(1) if parameter in found else None} if few else {}


def _grid(mesh, axes, outer: bool):
    """The mesh over ``axes`` as one dimension, and over ``dp_replicate`` as another if it is there."""
    name = "_".join(axes)
    flat = mesh[axes[0]] if len(axes) == 1 else mesh[tuple(axes)]._flatten(name)
    if not outer:
        return flat
    return mesh["dp_replicate", axes[0]] if len(axes) == 1 else mesh._concatenate([mesh["dp_replicate"], flat])


def last_gradient(module, last: bool) -> None:
    """Say before a backward pass whether it is the step's last one: FSDP reduces gradients then."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last)


def adam(module):
    """Fused AdamW with two groups of parameters: DTensors, and plain tensors. One fused kernel cannot take both."""
    import torch
    from torch.distributed.tensor import DTensor

    groups = [[p for p in module.parameters() if isinstance(p, DTensor) == spread] for spread in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-4, fused=True)
