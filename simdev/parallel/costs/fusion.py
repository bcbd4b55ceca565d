"""What ``torch.compile`` leaves of elementwise kernels: an estimate of the share of their time that remains, and rank
programs whose runs of kernels are one kernel each.

A compiler merges elementwise kernels and reductions that follow each other into one. Results that only the next kernel
reads then stay on the chip. A run of kernels reads what no kernel before it in the run has written, and writes the
result of the last one. Calls do not say which tensors they share, so a kernel is taken to read what the kernel before
it has written, as far as the bytes allow. A sum with which a forward run begins is that of a residual connection: what
follows its next products reads it again, so it is written, too. Sums of gradients over microbatches lie between
compiled graphs and are left as they are.

Inductor generates no code for complex numbers ("does not support code generation for complex operators"), so that
kernels on them stay alone. It computes the activation of a gated layer where it is multiplied by the other half: the
product of that half lies between the two kernels, which are one all the same, and so are those of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simdev.parallel.program import COMPUTE, Call, Segment
from simdev.problem.opcost.signature import parse_signature

ASSUMPTION = (
    "elementwise ops and reductions that follow each other are one kernel, but for those on complex numbers; a "
    "compiled region ends at products, attention, collectives, and kernels that wait for another stream; the optimizer "
    "is not compiled"
)

COMPLEX = ("c64[", "c128[")  # in signatures
PRODUCTS = frozenset({"mm", "addmm", "bmm", "linear"})
GATES = frozenset({("silu", "mul"), ("gelu", "mul"), ("mul", "silu_backward"), ("mul", "gelu_backward")})

FUSED = frozenset(
    """_fused_rms_norm _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _softmax
    _softmax_backward_data _to_copy add add_ clone div div_ exp exp_ gelu gelu_backward mean mul mul_
    native_layer_norm native_layer_norm_backward neg nll_loss_backward nll_loss_forward pow rsqrt silu
    silu_backward sub sub_ sum""".split()
)


def remaining_shares(calls: Sequence[Call], real_rotation: bool = False) -> list[float]:
    """The share of each call's time that is left if the runs of kernels in :data:`FUSED` are one kernel each.
    ``real_rotation``: kernels on complex numbers stand for those of a program that turns pairs of real ones."""
    shares = [1.0] * len(calls)
    for run in _with_gates(calls, _runs(calls, by_pass=False, real_rotation=real_rotation)):
        parts = [calls[number] for number in run]
        alone = sum(call.bytes_read + call.bytes_written for call in parts)
        for number in run:
            shares[number] = sum(_moved(parts)) / alone if alone else 1.0
    return shares


def fused_segment(segment: Segment) -> Segment:
    """The segment with one call of the kind ``fused`` for each run of several kernels.

    The call reads and writes what the run moves, has the run's FLOPs, and leaves as much memory in use as the run.
    Who waited for a kernel of the run waits for the call. Kernels of the optimizer (segments ``U``, and calls that are
    neither forward nor backward) stay as they are.
    """
    calls = segment.calls
    runs = {run[0]: run for run in _runs(calls, by_pass=True) if len(run) > 1 and _is_pass(calls[run[0]])}
    followers = {number for run in runs.values() for number in run[1:]}
    position: dict[str, list[int]] = {}  # by stream: the new position of each of its calls
    made: list[Call] = []
    for number, call in enumerate(calls):
        own = position.setdefault(call.stream, [])
        if number in followers:
            own.append(own[-1])
            continue
        waits = []
        for stream, back in call.waits:
            there = position.get(stream, [])
            issued = there[-1] + 1 if there else 0
            waits.append((stream, issued - 1 - there[-1 - back] if back < len(there) else issued))
        if number in runs:
            call = _as_one([calls[part] for part in runs[number]])
        made.append(replace(call, waits=tuple(waits)))
        own.append(own[-1] + 1 if own else 0)
    return replace(segment, calls=tuple(made))


def _is_pass(call: Call) -> bool:
    return call.is_forward or call.in_backward


def _runs(calls: Sequence[Call], *, by_pass: bool, real_rotation: bool = False) -> list[list[int]]:
    """Positions of kernels that follow each other and can be one kernel. With ``by_pass`` a run ends where the forward
    pass does, as both passes are compiled apart."""
    runs: list[list[int]] = []
    last: Call | None = None
    for number, call in enumerate(calls):
        accumulates = call.kind == "add_" and call.in_backward and not call.is_forward
        joins = call.stream == COMPUTE and call.kind in FUSED and not accumulates
        if joins and not real_rotation and any(kind in call.signature for kind in COMPLEX):
            joins = False
        if joins:
            apart = by_pass and last and (call.is_forward, call.in_backward) != (last.is_forward, last.in_backward)
            if last is None or apart or call.waits:
                runs.append([])
            runs[-1].append(number)
        last = call if joins else None
    return runs


def _with_gates(calls: Sequence[Call], runs: list[list[int]]) -> list[list[int]]:
    """The runs, with those merged that only the product of a gate's other half parts."""
    merged: list[list[int]] = []
    for run in runs:
        before = merged[-1] if merged else []
        between = calls[before[-1] + 1 : run[0]] if before else ()
        parted = between and all(call.kind in PRODUCTS and not call.waits for call in between)
        if parted and (calls[before[-1]].kind, calls[run[0]].kind) in GATES and not calls[run[0]].waits:
            before += run
        else:
            merged.append(run)
    return merged


def _moved(run: Sequence[Call]) -> tuple[int, int]:
    """The bytes that the run reads and writes as one kernel."""
    read = written = 0
    for call in run:
        read += max(0, call.bytes_read - written)
        written = call.bytes_written
    residual = len(run) > 1 and run[0].kind == "add" and run[0].is_forward
    return read, written + (run[0].bytes_written if residual else 0)


def _as_one(run: Sequence[Call]) -> Call:
    read, written = _moved(run)
    dtype = parse_signature(run[0].signature).dtype
    width = {"f64": 8, "f16": 2, "bf16": 2}.get(dtype, 4)
    signature = f"fused({dtype}[{read // width}])->{dtype}[{written // width}]"
    return replace(run[-1], kind="fused", signature=signature, flops=sum(call.flops for call in run),
                   bytes_read=read, bytes_written=written)  # fmt: skip
