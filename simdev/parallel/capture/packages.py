"""Models of Hugging Face's transformers on a mesh, parallelised by transformers itself.

``maybe_distribute_model`` with a ``DistributedConfig`` applies the plans that the model's class brings: tensor and
expert parallelism, FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from simdev.errors import InvalidInput
from simdev.graphs.capture import is_package_model
from simdev.graphs.capture.packages import package_step
from simdev.graphs.workload import TrainingStep
from simdev.parallel.capture.blocks import lists_of_blocks

AXES = ("dp_replicate", "dp_shard", "ep", "tp")


def package_make_step(target: str, batch: int | None, length: int | None) -> tuple[Callable, str]:
    """``make_step(mesh)`` for a training step of ``transformers:LlamaForCausalLM[num_hidden_layers=2]``, and its name.

    Parameters are float32 in storage and bfloat16 in computation; AdamW is fused. Raises :class:`InvalidInput` for an
    id that does not exist.
    """
    if not is_package_model(target) or not target.startswith("transformers:"):
        raise InvalidInput("only models of transformers bring a plan for a mesh", source=target)
    build, name, _ = package_step(target, batch=batch, length=length)

    def make(mesh) -> TrainingStep:
        step = build()
        if not isinstance(step, TrainingStep):
            raise InvalidInput("its step does not train", source=target)
        distribute(step.model, mesh, target)

        def loss(*inputs):
            with unpacked():
                return step.loss(*inputs)

        return replace(step, loss=loss, optimizer=grouped_adam(step.model))

    return make, name


@contextmanager
def unpacked() -> Iterator[None]:
    """While active, transformers takes each row as one sequence. It looks at position ids to find several sequences in
    a row, cannot look at those of fake tensors, and would then mask attention where a real run needs no mask."""
    from transformers import masking_utils

    find, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def distribute(model, mesh, source: str) -> None:
    """Parallelise a model of transformers over ``mesh``, a PyTorch mesh with axes of :data:`AXES`.

    Experts are divided among the ranks of ``ep`` and ``tp`` together, and sharded over ``dp_shard``. A model on a mesh
    without data-parallel axes becomes bfloat16; otherwise FSDP computes in bfloat16. Raises :class:`InvalidInput` for
    an axis for which the class brings no plan.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    names = mesh.mesh_dim_names or ()
    for axis in names:
        if axis not in AXES:
            known = ", ".join(AXES)
            raise InvalidInput(f"it is not parallelised along it; known: {known}", source=source, field=axis)
    replicas, shards, ep, tp = (mesh[axis].size() if axis in names else 1 for axis in AXES)
    for axis, size, plan in (("tp", tp, model.tp_plan), ("ep", ep, model.ep_plan)):
        if size > 1 and not plan:
            message = f"{type(model).__name__} brings no plan for it; use dp_shard"
            raise InvalidInput(message, source=source, field=axis)
    if replicas * shards * ep == 1:
        model.to(torch.bfloat16)
    if replicas * shards * ep * tp == 1:
        return
    config = DistributedConfig(
        tp_size=tp,
        fsdp_size=shards * ep,
        dp_replicate_size=replicas,
        pp_size=1,
        ep_size=ep * tp if ep > 1 else 1,
        ep_implementation="all_to_all",
        fsdp_mixed_precision=True,
        fsdp_plan=plan_of_blocks(model) or None,
    )
    device = mesh.device_type
    dense = init_device_mesh(
        device, (1, replicas, shards * ep, tp), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
    )
    sizes = (shards, ep * tp) if ep > 1 else (shards * tp, 1)
    expert = init_device_mesh(device, (1, replicas, *sizes), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))
    with _tied_again(model):
        type(model).maybe_distribute_model(model, config, TransformersDeviceMesh(dense, expert))


def plan_of_blocks(model) -> dict[str, str]:
    """An entry of the FSDP plan for each list of blocks that the class's own plan leaves out."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    lists = {replace_layer_number_by_wildcard(f"{blocks.name}.0") for blocks in lists_of_blocks(model)}
    return {name: "free_full_weight" for name in sorted(lists) if name not in (model.fsdp_plan or {})}


@contextmanager
def _tied_again(model):
    """transformers distributes a model before it ties weights: its plans name both owners of a tied weight. Here the
    weights are untied for tensor parallelism and tied again before FSDP, which keeps their owners in one group."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from transformers.distributed import fsdp, mixin

    pairs = []
    for target, origin in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        (there, name), (here, own) = (_owner(model, key) for key in (target, origin))
        weight = getattr(here, own)
        if getattr(there, name) is weight:
            pairs.append((there, name, here, own))
            setattr(there, name, nn.Parameter(weight.detach().clone(), weight.requires_grad))

    def tie() -> list:
        tied = []
        for there, name, here, own in pairs:
            one, two = getattr(there, name), getattr(here, own)
            if getattr(one, "placements", None) == getattr(two, "placements", None):
                setattr(there, name, two)
                tied += [here, there]
        return tied

    shard = mixin.apply_fully_sharded_data_parallelism

    def apply(model, meshes, plan, *rest):
        tied = tie()
        if tied:
            config = model.config.distributed_config
            axes = ("dp_replicate", "fsdp") if config.dp_replicate_size > 1 else "fsdp"
            names = {id(module): name for name, module in model.named_modules()}
            kept = [model.get_submodule(name) for name, style in plan.items() if style == "keep_full_weight"]
            group = list({id(module): module for module in (*tied, *kept)}.values())
            plan = {name: style for name, style in plan.items() if model.get_submodule(name) not in group}
            group.sort(key=lambda module: list(names).index(id(module)))
            options = fsdp._get_fsdp_policy_kwargs(config)
            fully_shard(group, mesh=meshes.get_mesh(axes), reshard_after_forward=False, **options)
        return shard(model, meshes, plan, *rest)

    mixin.apply_fully_sharded_data_parallelism = apply
    keys, model.all_tied_weights_keys = getattr(model, "all_tied_weights_keys", None), {}
    try:
        yield
        tie()
    finally:
        mixin.apply_fully_sharded_data_parallelism = shard
        model.all_tied_weights_keys = keys


def _owner(model, key: str):
    """The module that holds the parameter ``key``, and the parameter's name there."""
    path, _, name = key.rpartition(".")
    return model.get_submodule(path), name


def grouped_adam(module):
    """Fused AdamW with a group of parameters for each mesh: one kernel cannot take DTensors of several meshes."""
    import torch

    groups: dict[tuple, list] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups.setdefault((getattr(parameter, "device_mesh", None), parameter.dtype), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)
