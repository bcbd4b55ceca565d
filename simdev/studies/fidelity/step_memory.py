"""Peak memory of one rank of a transformer's training step with sharded data parallelism (FSDP), in bytes.

All sizes follow from shapes. The model counts the rank's shard of f32 weights, gradients and two Adam moments; the
gathered bf16 weights of two layers and the gathered f32 gradient of one; the tensors that each layer keeps for its
backward pass; and the loss. The bf16 logits, f32 logits, log-probabilities and f32 gradient of the loss are in memory
at the same time, and they are the peak of models with a large vocabulary. Sizes are rounded up to the granularity of
the allocator. Fragmentation is not modelled: an eager step reserves some per cent more than it allocates.
"""

from __future__ import annotations

from simdev.calibrate.whole_steps import Transformer

GRANULARITY = 512  # bytes: PyTorch's allocator
HALF, FULL = 2, 4
STATES = 4  # weight, gradient, two moments, in f32
RESERVED_BYTES = 1 << 30  # CUDA context, libraries and NCCL's buffers


def _rounded(size: int) -> int:
    return -(-size // GRANULARITY) * GRANULARITY


def layer_bytes(model: Transformer, tokens: int, recompute: str) -> int:
    """The bytes that one layer keeps for its backward pass. ``recompute`` is ``none``, ``selective`` (attention and
    every second product are kept, as in torchtitan) or ``full`` (only the input of the layer is kept)."""
    head = model.width // model.heads
    wide, groups = HALF * tokens * model.inner, HALF * tokens * model.kv_heads * head
    narrow, row = HALF * tokens * model.width, FULL * tokens * model.heads
    ups = [wide] * (2 if model.gated else 1)
    products = [narrow, groups, groups, narrow, *ups, narrow]  # q, k, v, projection, up, down
    if recompute == "full":
        return _rounded(narrow)
    if recompute == "selective":
        return sum(map(_rounded, (narrow, *products[::2], narrow, row)))
    norms = [narrow, narrow, narrow, narrow]  # two norms' inputs and results
    return sum(map(_rounded, (*norms, *products[:3], narrow, row, *ups, wide)))


def peak_bytes(
    model: Transformer, batch: int, sequence: int, *, shards: int, recompute: str, embeddings: int = 1
) -> int:
    """The peak of one rank in bytes. ``embeddings`` is 2 if the output layer has weights of its own."""
    tokens = batch * sequence
    table = model.vocabulary * model.width
    parameters = model.parameters + (embeddings - 1) * table
    layer = (model.parameters - table) // model.layers
    states = STATES * FULL * parameters // shards
    gathered = HALF * 2 * layer + FULL * layer + HALF * table
    kept = model.layers * layer_bytes(model, tokens, recompute)
    logits = tokens * model.vocabulary
    loss = _rounded(HALF * logits) + 3 * _rounded(FULL * logits)
    return states + gathered + kept + loss + RESERVED_BYTES
