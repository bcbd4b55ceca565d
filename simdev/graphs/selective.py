"""Selective recomputation: which results of a layer are kept, and which are computed again in its backward pass."""

from __future__ import annotations

from functools import partial

SELECTIVE = "selective"
READ = "selective-read"  # what torch.compile makes of it


def selective_contexts(read: bool = False):
    """Contexts of a layer's forward pass and of its recomputation, by torchtitan's policy: keep attention,
    reduce-scatters and the first of every two products, recompute the rest (``selective_ac_option = "op"``).

    ``read``: of these results, keep those that the backward pass reads, as a compiled layer does
    (:mod:`simdev.graphs.capture.compiled_checkpoint`). Eager PyTorch keeps all, also the result of a last product that
    is only added to the layer's input.

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
    met = {False: 0, True: 0}  # products so far, in the forward pass and in its recomputation

    def keep(op, again: bool) -> bool:
        if op == product:
            met[again] += 1
        return op in kept or (op == product and met[again] % 2 == 1)

    def policy(context, op, *_, **__):
        return CheckpointPolicy.MUST_SAVE if keep(op, context.is_recompute) else CheckpointPolicy.PREFER_RECOMPUTE

    if read:
        from simdev.graphs.capture.compiled_checkpoint import contexts_of_read

        return contexts_of_read(keep)
    return create_selective_checkpoint_contexts(policy)


CONTEXTS = {SELECTIVE: selective_contexts, READ: partial(selective_contexts, read=True)}  # by kind of recomputation


def eager_kind(recompute: str) -> str:
    """The kind of recomputation that a user names, of which :data:`READ` is what a compiler leaves."""
    return SELECTIVE if recompute == READ else recompute
