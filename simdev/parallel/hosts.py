"""How long a host thread takes to issue a kernel, by framework: measured or fitted figures with their source."""

from __future__ import annotations

from simdev.errors import UnknownName
from simdev.parallel.timing import Host

# eager: est. from public traces of eager PyTorch: an ATen op with its Python frame 5-8 us, in autograd's thread 4-6 us,
# a collective through DTensor or FSDP 20-40 us.
# megatron: fitted to vTrain's rows on one node with microbatch 1 and 2 (see docs, "Simulate a training job").
# compiled: kernels are issued from generated code or a CUDA graph; what is left is the collectives' own host time.
HOSTS = {
    "eager": Host(forward_ns=6_000, backward_ns=5_000, update_ns=3_000, collective_ns=25_000),
    "megatron": Host(forward_ns=35_000, backward_ns=15_000, update_ns=10_000, collective_ns=60_000),
    "compiled": Host(),
}


def find_host(name: str) -> Host:
    """The host figures of a framework. Raises :class:`UnknownName`."""
    if name not in HOSTS:
        raise UnknownName("host", name, HOSTS)
    return HOSTS[name]
