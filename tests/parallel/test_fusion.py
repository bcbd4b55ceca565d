"""Shares of time that are left when a compiler fuses elementwise kernels."""

from simdev.parallel.fusion import remaining_shares
from simdev.parallel.program import COMPUTE, Call


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
