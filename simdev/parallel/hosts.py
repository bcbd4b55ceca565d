"""How long a host thread takes to issue a kernel, by framework, and by how much a framework's kernels are slower than
costed. Where each figure comes from, and on which measured runs it was chosen:

``eager``
    Estimated, not fitted to any run: public traces of eager PyTorch show 5-8 us for an ATen op with its Python frame,
    4-6 us in autograd's thread, and 20-40 us for a collective issued through DTensor or FSDP.
``megatron``
    Chosen by hand on 40 rows of vTrain's one-node set, spread over all three of its models (GPT 1,024 to 2,048 wide).
    ``send_ns`` alone was chosen later, on 29 rows with pipelines among 60 of that set, again of all three models: that
    the host waits is Megatron's own ``torch.cuda.synchronize()`` after each exchange between stages
    (``p2p_communication.py``), and halves the error of these rows by itself; from 0 to 0.9 ms more the error is flat.
    No row of that set is held out from it; the many-node rows, of another model, were not used.
``llm-foundry``
    Host times as ``eager``. The three factors in ``SCALES`` are fitted to 26 of the 52 rows of llm-foundry's
    benchmarks of 2023, with all its three models among them (MPT 760m, 7b, 30b; A100 and H100): Triton attention,
    eager elementwise kernels, products that slow down beside FSDP's collectives. With one model left out in turn, by a
    linear estimate: 9.0 % (30b), 6.6 % (760m), 3.2 % (7b).
``fsdp``
    As ``llm-foundry``, for FlashAttention 2: the factor of attention, which was that of Triton's kernel, is 1.
``compiled``
    No time for any kernel: they are issued from generated code or a CUDA graph. Not compared with any run.
"""

from __future__ import annotations

from simdev.errors import UnknownName
from simdev.parallel.timing import Host
from simdev.problem.costs import OP_CLASSES

HOSTS = {
    "eager": Host(forward_ns=6_000, backward_ns=5_000, update_ns=3_000, collective_ns=25_000),
    "megatron": Host(forward_ns=75_000, backward_ns=18_000, update_ns=5_000, collective_ns=90_000, send_ns=300_000),
    "compiled": Host(),
}

# By how much the kernels of a framework take longer than the cost model says, by class of op; ``rest`` is all others.
FSDP = {"gemm": 1.138, "rest": 1.177}
SCALES = {"llm-foundry": {**FSDP, "attention": 1.738}, "fsdp": {**FSDP, "attention": 1.0}}
HOSTS["llm-foundry"] = HOSTS["fsdp"] = HOSTS["eager"]


def find_scale(name: str) -> dict[str, float]:
    """Factors of kernel times by class of op for a framework; empty for most."""
    found = SCALES.get(name, {})
    rest = found.get("rest", 1.0)
    return {kind: found.get(kind, rest) for kind in (*OP_CLASSES, "elementwise")} if found else {}


def find_host(name: str) -> Host:
    """The host figures of a framework. Raises :class:`UnknownName`."""
    if name not in HOSTS:
        raise UnknownName("host", name, HOSTS)
    return HOSTS[name]
