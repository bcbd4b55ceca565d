"""How long a host thread takes to issue a kernel, by framework, and by how much a framework's kernels are slower than
costed. Where each figure comes from, and on which measured runs it was chosen:

``eager``
    Estimated, not fitted to any run: public traces of eager PyTorch show 5-8 us for an ATen op with its Python frame,
    4-6 us in autograd's thread, and 20-40 us for a collective issued through DTensor or FSDP.
``megatron``
    Fitted to vTrain's one-node set (GPT 1,024 and 2,048 wide, 540 rows): time of a forward kernel, of a collective, and
    what a collective of eight ranks takes in addition. A backward kernel takes 0.45 of a forward one; this ratio was
    chosen with all rows of the set in view. The host waits for each pass of a microbatch: the times of that set add up
    so, and Megatron-LM waits (``torch.cuda.synchronize()``) after each exchange between stages. ``WITHOUT`` holds the
    fit without the rows of each model in turn. The many-node rows, of another model, were not used.
``llm-foundry``
    Host times as ``eager``. The three factors in ``SCALES`` are fitted to 26 of the 52 rows of llm-foundry's
    benchmarks of 2023, with all its three models among them (MPT 760m, 7b, 30b; A100 and H100): Triton attention,
    eager elementwise kernels, products that slow down beside FSDP's collectives. With one model left out in turn, by a
    linear estimate: 9.0 % (30b), 6.6 % (760m), 3.2 % (7b).
``fsdp``
    As ``llm-foundry``, for FlashAttention 2: the factor of attention, which was that of Triton's kernel, is 1.
``nemo``
    NeMo after release 24.07, with the vendor's attention in place of FlashAttention 2 on Hopper: the inverse of the
    ratios 1.75 (forward) and 1.625 (backward) of Shah et al. 2024, weighted by a backward pass of 2.5 forward ones. No
    run was used. Transformer Engine's own benchmark on H100 has 1.59 and 1.60 for both passes.
``compiled``
    No time for any kernel: they are issued from generated code or a CUDA graph. Not compared with any run.
"""

from __future__ import annotations

from simdev.errors import UnknownName
from simdev.parallel.costs.timing import Host
from simdev.problem.costs import OP_CLASSES

HOSTS = {
    "eager": Host(forward_ns=6_000, backward_ns=5_000, update_ns=3_000, collective_ns=25_000),
    "megatron": Host(99_000, 45_000, 5_000, 77_000, 1, wide_collective_ns=300_000),
    "compiled": Host(),
}

WITHOUT = {
    ("megatron", "gpt 1024 x 24"): Host(98_900, 44_500, 5_000, 68_000, 1, wide_collective_ns=316_000),
    ("megatron", "gpt 2048 x 12"): Host(99_200, 44_600, 5_000, 77_700, 1, wide_collective_ns=291_500),
    ("megatron", "gpt 2048 x 20"): Host(98_700, 44_400, 5_000, 83_200, 1, wide_collective_ns=289_000),
}

# By how much the kernels of a framework take longer than the cost model says, by class of op; ``rest`` is all others.
FSDP = {"gemm": 1.138, "rest": 1.177}
SCALES = {"llm-foundry": {**FSDP, "attention": 1.738}, "fsdp": {**FSDP, "attention": 1.0}, "nemo": {"attention": 0.6}}
HOSTS["llm-foundry"] = HOSTS["fsdp"] = HOSTS["eager"]


def find_scale(name: str) -> dict[str, float]:
    """Factors of kernel times by class of op for a framework; empty for most."""
    found = SCALES.get(name, {})
    rest = found.get("rest", 1.0)
    return {kind: found.get(kind, rest) for kind in (*OP_CLASSES, "elementwise")} if found else {}


def find_host(name: str, without: str = "") -> Host:
    """The host figures of a framework; fitted without the rows of the model ``without`` if it is one of those that
    they are fitted to. Raises :class:`UnknownName`."""
    if name not in HOSTS:
        raise UnknownName("host", name, HOSTS)
    return WITHOUT.get((name, without), HOSTS[name])
