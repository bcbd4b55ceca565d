"""Flows under ``fair`` contention for the general loop (R4).

Flows between the same two devices always have the same rate. Each such pair keeps one count of the work served to any
one of its flows, and a heap of its flows by the count at which they end. An instant costs a few steps per pair in use
instead of per flow. This is the plain form of what :mod:`simdev.sim.kernels.fair` does with more bookkeeping.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.sim.kernels.compiled import part
from simdev.sim.kernels.heap import pop, push
from simdev.sim.kernels.state import Inputs

NANO = 1_000_000_000
REBASE = 1 << 58  # beyond it, a count starts from 0 again: with the largest tensor and rate it stays below 2**63


class Flows(NamedTuple):
    """By pair ``q`` of devices: ``end`` and ``transfer``, from ``base[q]`` on, are a heap of ``size[q]`` flows by the
    count of work at which they end; ``served`` counts the work, ``rate`` is in bytes/s. ``active[:count[0]]`` are the
    pairs that have flows. ``channel_left`` and ``channel_flows``: while rates are set, bandwidth left and flows without
    one."""

    end: np.ndarray
    transfer: np.ndarray
    base: np.ndarray
    size: np.ndarray
    served: np.ndarray
    rate: np.ndarray
    active: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count, which no one calls
    seen: np.ndarray
    channel_left: np.ndarray
    channel_flows: np.ndarray


def new_flows(n_transfers: int, n_devices: int, n_channels: int) -> Flows:
    """Arrays for ``n_transfers`` flows."""
    n_pairs = n_devices * n_devices + 1

    def ints(length):
        return np.zeros(length, np.int64)

    return Flows(
        end=ints(n_transfers),
        transfer=ints(n_transfers),
        base=ints(n_pairs),
        size=ints(n_pairs),
        served=ints(n_pairs),
        rate=ints(n_pairs),
        active=ints(n_pairs),
        count=ints(1),
        seen=ints(n_devices),
        channel_left=ints(n_channels),
        channel_flows=ints(n_channels),
    )


@part
def reset(inputs: Inputs, devices, flows: Flows):
    """Before a run: no flows, and for each pair as much of the heaps as it has transfers."""
    n_devices = len(inputs.slots)
    flows.base[:] = 0
    flows.size[:] = 0
    flows.seen[:] = -1
    flows.count[0] = 0
    for tensor in range(len(inputs.tensor_producer)):
        source = devices[inputs.tensor_producer[tensor]]
        for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
            target = devices[inputs.consumers[edge]]
            if target != source and flows.seen[target] != tensor:
                flows.seen[target] = tensor
                flows.base[source * n_devices + target + 1] += 1
    for pair in range(n_devices * n_devices):
        flows.base[pair + 1] += flows.base[pair]


@part
def join(flows: Flows, pair, transfer, size):
    """Add a flow of ``size`` bytes."""
    if flows.size[pair] == 0:
        flows.active[flows.count[0]] = pair
        flows.count[0] += 1
        flows.served[pair] = flows.rate[pair] = 0
    flows.size[pair] = push(
        flows.end, flows.transfer, flows.base[pair], flows.size[pair], flows.served[pair] + size * NANO, transfer
    )


@part
def advance(flows: Flows, elapsed):
    """Serve all flows for ``elapsed`` ns at the present rates."""
    for index in range(flows.count[0]):
        pair = flows.active[index]
        flows.served[pair] += flows.rate[pair] * elapsed
        if flows.served[pair] > REBASE:
            for flow in range(flows.base[pair], flows.base[pair] + flows.size[pair]):
                flows.end[flow] -= flows.served[pair]
            flows.served[pair] = 0


@part
def pop_ended(flows: Flows):
    """Remove one flow that has no work left; return its transfer, or -1 if there is none."""
    for index in range(flows.count[0]):
        pair = flows.active[index]
        first = flows.base[pair]
        if flows.end[first] <= flows.served[pair]:
            transfer = flows.transfer[first]
            flows.size[pair] = pop(flows.end, flows.transfer, first, flows.size[pair])
            if flows.size[pair] == 0:
                flows.count[0] -= 1
                flows.active[index] = flows.active[flows.count[0]]
            return transfer
    return -1


@part
def next_end(flows: Flows, now):
    """The first instant at which a flow has no work left."""
    first = np.iinfo(np.int64).max
    for index in range(flows.count[0]):
        pair = flows.active[index]
        left = flows.end[flows.base[pair]] - flows.served[pair]
        first = min(first, now + (left + flows.rate[pair] - 1) // flows.rate[pair])
    return first


@part
def share(route_ptr, route, channel_rate, flows: Flows):
    """Set every pair's rate by progressive filling in whole bytes/s."""
    for channel in range(len(channel_rate)):
        flows.channel_left[channel] = channel_rate[channel]
        flows.channel_flows[channel] = 0
    for index in range(flows.count[0]):
        pair = flows.active[index]
        flows.rate[pair] = 0
        for hop in range(route_ptr[pair], route_ptr[pair + 1]):
            flows.channel_flows[route[hop]] += flows.size[pair]
    frozen = 0
    while frozen < flows.count[0]:
        narrowest, quotient = -1, 0
        for channel in range(len(channel_rate)):
            if flows.channel_flows[channel] > 0:
                each = flows.channel_left[channel] // flows.channel_flows[channel]
                if narrowest < 0 or each < quotient:
                    narrowest, quotient = channel, each
        rate = max(quotient, 1)
        for index in range(flows.count[0]):
            pair = flows.active[index]
            crosses = False
            for hop in range(route_ptr[pair], route_ptr[pair + 1]):
                crosses = crosses or route[hop] == narrowest
            if flows.rate[pair] > 0 or not crosses:
                continue
            flows.rate[pair] = rate
            frozen += 1
            for hop in range(route_ptr[pair], route_ptr[pair + 1]):
                channel = route[hop]
                flows.channel_flows[channel] -= flows.size[pair]
                flows.channel_left[channel] = max(0, flows.channel_left[channel] - rate * flows.size[pair])
