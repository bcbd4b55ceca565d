"""Shares of time that are left when a compiler fuses elementwise kernels."""

from simdev.parallel.costs.fusion import fused_segment, remaining_shares
from simdev.parallel.program import COMPUTE, Call, Segment


def call(kind, read, written, **more):
    return Call(more.pop("stream", COMPUTE), kind, kind, 0, read, written, **more)


def test_a_run_reads_its_inputs_and_writes_its_last_result():
    run = [call("_to_copy", 2, 4), call("mul", 4, 4), call("_to_copy", 4, 2)]
    assert remaining_shares(run) == [4 / 20] * 3


def test_a_second_operand_is_read():
    assert remaining_shares([call("silu", 4, 4), call("mul", 8, 4)]) == [12 / 20] * 2


def test_products_and_waits_end_a_run_and_keep_their_time():
    calls = [call("add", 8, 4), call("mm", 4, 4), call("add", 8, 4), call("mul", 4, 4, waits=(("tp", 0),))]
    assert remaining_shares(calls) == [1.0] * 4


def test_sums_of_gradients_are_not_fused():
    calls = [call("add_", 8, 4, in_backward=True), call("add_", 8, 4, in_backward=True)]
    assert remaining_shares(calls) == [1.0, 1.0]
    assert remaining_shares([call("add_", 8, 4), call("add_", 8, 4)]) == [2 / 3] * 2


def test_a_kernel_of_another_stream_is_not_fused():
    assert remaining_shares([call("add", 8, 4, stream="stream 1"), call("mul", 4, 4, stream="stream 1")]) == [1.0, 1.0]


def test_a_fused_segment_keeps_who_waits_for_whom():
    """mm, [add mul], all_gather waits for add, mm; [silu mul] in the backward pass waits for the gather; then a send
    that waits for the first mm, two calls of which are one now."""
    calls = (
        call("mm", 9, 9, is_forward=True),
        call("add", 8, 4, is_forward=True, live_bytes=8),
        call("mul", 4, 4, is_forward=True, live_bytes=4),
        call("all_gather", 0, 0, stream="dp", axes=("dp",), waits=((COMPUTE, 1),)),
        call("mm", 9, 9, is_forward=True, waits=((COMPUTE, 0),)),
        call("silu", 4, 4, in_backward=True, waits=(("dp", 0),)),
        call("mul", 8, 4, in_backward=True),
        call("all_reduce", 0, 0, stream="tp", axes=("tp",), waits=((COMPUTE, 5), (COMPUTE, 9), ("dp", 3))),
        call("add", 4, 4),
        call("add", 4, 4),
    )
    fused = fused_segment(Segment("S", calls, 4))
    assert [one.kind for one in fused.calls] == ["mm", "fused", "all_gather", "mm", "fused", "all_reduce", "add", "add"]
    assert [one.waits for one in fused.calls] == [
        (), (), ((COMPUTE, 0),), ((COMPUTE, 0),), (("dp", 0),), ((COMPUTE, 3), (COMPUTE, 4), ("dp", 1)), (), ()
    ]  # fmt: skip
    first = fused.calls[1]
    assert (first.bytes_read, first.bytes_written, first.live_bytes, first.is_forward) == (8, 4, 4, True)
    assert fused.peak_bytes == 4 and fused.live_bytes == 4
