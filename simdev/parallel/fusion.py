"""What ``torch.compile`` leaves of elementwise kernels: an estimate of the share of their time that remains.

A compiler merges elementwise kernels and reductions that follow each other into one. Results that only the next kernel
reads then stay on the chip. A run of kernels reads what no kernel before it in the run has written, and writes the
result of the last one. Calls do not say which tensors they share, so a kernel is taken to read what the kernel before
it has written, as far as the bytes allow. Sums of gradients over microbatches lie between compiled graphs and are left
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from simdev.parallel.program import COMPUTE, Call

FUSED = frozenset(
    """_fused_rms_norm _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _softmax
    _softmax_backward_data _to_copy add add_ clone div div_ exp exp_ gelu gelu_backward mean mul mul_
    native_layer_norm native_layer_norm_backward neg nll_loss_backward nll_loss_forward pow rsqrt silu
    silu_backward sub sub_ sum""".split()
)


def remaining_shares(calls: Sequence[Call]) -> list[float]:
    """The share of each call's time that is left if the runs of kernels in :data:`FUSED` are one kernel each."""
    shares = [1.0] * len(calls)
    run: list[int] = []
    for number, call in enumerate(calls):
        accumulates = call.kind == "add_" and call.in_backward and not call.is_forward
        joins = call.stream == COMPUTE and call.kind in FUSED and not accumulates
        if run and (not joins or call.waits):
            _fuse(calls, run, shares)
            run = []
        if joins:
            run.append(number)
    _fuse(calls, run, shares)
    return shares


def _fuse(calls: Sequence[Call], run: list[int], shares: list[float]) -> None:
    written = 0
    alone = moved = 0
    for number in run:
        call = calls[number]
        moved += max(0, call.bytes_read - written)
        alone += call.bytes_read + call.bytes_written
        written = call.bytes_written
    share = (moved + written) / alone if alone else 1.0
    for number in run:
        shares[number] = share
