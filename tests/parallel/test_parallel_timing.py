"""Host times of collectives by group size, products with odd sides, and the rate of sends."""

from dataclasses import replace

import pytest

from simdev.graphs.parallel_model import Part
from simdev.parallel import Host, Mesh, Plan, Prices, find_model, load_cluster, simulate_plan
from simdev.parallel.costs.collectives import send_ns
from simdev.parallel.framework import find_framework
from simdev.parallel.program import COMPUTE, Call

HOST = Host(forward_ns=5, backward_ns=3, update_ns=2, collective_ns=10, wide_collective_ns=30)


def test_a_collective_of_eight_ranks_takes_the_host_longer():
    call = Call("tp", "all_reduce", "all_reduce", axes=("tp",), payload_bytes=8)
    times = {ways: HOST.dispatch_ns("forward", call, Mesh({"dp_replicate": 2, "tp": ways})) for ways in (2, 4, 8)}
    assert times == {2: 10, 4: 10, 8: 40}


def priced(signature, **more):
    call = Call(COMPUTE, signature.partition("(")[0], signature, 10**12, 10**8, 10**8)
    return Prices(load_cluster("dgx-a100"), **more).of((call,), Mesh({"tp": 2}), 0)[0]


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_a_product_with_an_odd_side_is_slower(half):
    even, odd = (priced(f"mm({half}[1024,2048],{half}[2048,{n}])->{half}[1024,{n}]") for n in (50304, 50257))
    assert 1.8 < odd / even < 2.2
    even, odd = (priced(f"add({half}[1024,{n}],{half}[1024,{n}])->{half}[1024,{n}]") for n in (50304, 50257))
    assert odd == pytest.approx(even, rel=0.01)


def test_sends_may_be_slower_than_the_link():
    cluster = load_cluster("dgx-a100")
    slow = replace(cluster, send_bytes_per_s=10**9)
    assert send_ns(10**9, 0, 1, slow) > 0.99e9 > 10 * send_ns(10**9, 0, 1, cluster)


def test_a_host_fitted_without_a_model_is_used_for_that_model_alone():
    left_out, all_rows = (find_framework(name).host for name in ("megatron[without-1024x24]", "megatron"))
    assert (left_out.collective_ns, all_rows.collective_ns) == (68_000, 77_000)
    assert (left_out.update_ns, left_out.wait_ns) == (all_rows.update_ns, all_rows.wait_ns) == (5_000, 1)


def test_the_update_of_gpt_is_one_kernel_or_also_copies():
    pytest.importorskip("torch")
    from simdev.parallel.capture.stage import capture_stage

    kinds = {}
    for update in ("fused", "mixed"):
        model, parameters = find_model(f"gpt[width=64,layers=1,heads=4,length=64,vocabulary=128,update={update}]")
        program = capture_stage(model, parameters, Mesh({"tp": 2}), Part(1, True, True))
        kinds[update] = [call.kind for call in program.finish.calls]
    assert "_fused_adamw_" in kinds["fused"] and "_foreach_copy_" not in kinds["fused"]
    assert {"_fused_adamw_", "_foreach_copy_", "_foreach_norm"} <= set(kinds["mixed"])


def test_a_host_that_waits_never_runs_ahead_of_the_device():
    pytest.importorskip("torch")
    model, parameters = find_model("gpt[width=256,layers=2,heads=4,length=256,vocabulary=512]")
    cluster, mesh = load_cluster("dgx-a100"), Mesh({"pp": 2})
    host = Host(forward_ns=20_000, backward_ns=1_000, update_ns=1_000, collective_ns=1_000)
    steps = {}
    for wait_ns in (0, 1, 50_000):
        plan = Plan(model, parameters, cluster, mesh, 4, host=replace(host, wait_ns=wait_ns))
        steps[wait_ns] = simulate_plan(plan).step_ns
    assert steps[0] < steps[1]  # the forward kernels of a microbatch are not issued during the backward pass before it
    assert steps[50_000] >= steps[1] + 7 * 50_000  # each rank waits after eight passes, the last beside its kernels
