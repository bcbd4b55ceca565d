"""Whether a placement may run."""

from __future__ import annotations

from simdev.sim.kernels.compiled import part
from simdev.sim.kernels.state import Inputs


@part
def is_valid(inputs: Inputs, devices):
    """True if every op is on a device with a kernel for it, colocated ops share a device, and every tensor has a route.
    The caller has checked that the devices exist."""
    if not inputs.anywhere:
        for op in range(len(devices)):
            device = devices[op]
            if inputs.op_ns[inputs.device_row[device], op] < 0 or devices[inputs.unit_first[op]] != device:
                return False
    if inputs.all_routed:
        return True
    for tensor in range(len(inputs.tensor_producer)):
        source = devices[inputs.tensor_producer[tensor]]
        for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
            target = devices[inputs.consumers[edge]]
            if target != source and inputs.pair_class[source, target] < 0:
                return False
    return True
