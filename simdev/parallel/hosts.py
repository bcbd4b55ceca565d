"""How long a host thread takes to issue a kernel, by framework: measured or fitted figures with their source."""

from __future__ import annotations

from simdev.errors import UnknownName
from simdev.parallel.timing import Host
from simdev.problem.costs import OP_CLASSES

# eager: est. from public traces of eager PyTorch: an ATen op with its Python frame 5-8 us, in autograd's thread 4-6 us,
# a collective through DTensor or FSDP 20-40 us.
# megatron: chosen on 40 rows of vTrain on one node (docs, "Simulate a training job"); Python issues a layer slowly.
# compiled: kernels are issued from generated code or a CUDA graph; what is left is the collectives' own host time.
HOSTS = {
    "eager": Host(forward_ns=6_000, backward_ns=5_000, update_ns=3_000, collective_ns=25_000),
    "megatron": Host(forward_ns=75_000, backward_ns=18_000, update_ns=5_000, collective_ns=90_000),
    "compiled": Host(),
}

# By how much the kernels of a framework take longer than the cost model says, by class of op; ``rest`` is all others.
# llm-foundry: fitted to 26 rows of its benchmarks of 2023 (MPT 760m, 7b, 30b; A100 and H100): Triton attention, eager
# elementwise kernels, products that slow down beside FSDP's collectives. With one model left out in turn (linearised):
# 9.0 % (30b), 6.6 % (760m), 3.2 % (7b).
SCALES = {"llm-foundry": {"gemm": 1.138, "attention": 1.738, "rest": 1.177}}
HOSTS["llm-foundry"] = HOSTS["eager"]


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
