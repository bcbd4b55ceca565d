"""Selective recomputation: which results of a layer are kept, and which are computed again in its backward pass."""

from __future__ import annotations


def selective_contexts():
    """Contexts of a layer's forward pass and of its recomputation, by torchtitan's policy: keep attention,
    reduce-scatters and the first of every two products, recompute the rest (``selective_ac_option = "op"``).

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
    products = {False: 0, True: 0}  # met so far, in the forward pass and in its recomputation

    def policy(context, op, *_, **__):
        if op == product:
            products[context.is_recompute] += 1
        keep = op in kept or (op == product and products[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
