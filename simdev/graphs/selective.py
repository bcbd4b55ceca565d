"""Selective recomputation: which results of a layer are kept, and which are computed again in its backward pass."""

from __future__ import annotations

READ = "selective-read"  # what torch.compile makes of selective recomputation


def selective_contexts(products: int | None = None):
    """Contexts of a layer's forward pass and of its recomputation, by torchtitan's policy: keep attention,
    reduce-scatters and the first of every two products, recompute the rest (``selective_ac_option = "op"``).

    ``products`` is how many a layer has, if what the backward pass does not read is not kept: the result of the last
    one, which is added to the layer's input, and of the reduce-scatter behind it. Eager PyTorch keeps both; the
    partitioner of ``torch.compile`` cuts the graph between what a backward pass needs and the rest
    (torch/_functorch/partitioners.py).

    Pass it as ``context_fn`` of ``torch.utils.checkpoint``.
    """
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten, product = torch.ops.aten, torch.ops.aten.mm.default
    kept = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    added = {product, torch.ops._c10d_functional.reduce_scatter_tensor.default}  # by the last product to the input
    met = {False: 0, True: 0}  # products so far, in the forward pass and in its recomputation

    def policy(context, op, *_, **__):
        if op == product:
            met[context.is_recompute] += 1
        number = met[context.is_recompute]
        keep = op in kept or (op == product and number % 2 == 1)
        keep = keep and not (op in added and number == products)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
