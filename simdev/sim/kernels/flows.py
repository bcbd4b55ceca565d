"""Fair contention for the event-driven kernel (R4): flows between the same two devices always have the same rate.

So each such pair keeps one count of the work served to any of its flows, and a heap of its flows by the count at which
they end; an instant costs a few steps per pair in use instead of per flow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.sim.inputs import Inputs
from simdev.sim.kernels.heap import part, pop, push

NANO = 1_000_000_000
REBASE = 1 << 58  # counts are set back to 0 beyond this; with the largest tensor and rate they stay below 2**63


class Flows(NamedTuple):
    """``end`` and ``transfer`` are heaps, pair ``q`` from ``base[q]`` on with ``size[q]`` entries;
    ``active[:count[0]]`` are the pairs that have flows."""

    end: np.ndarray
    transfer: np.ndarray
    base: np.ndarray
    size: np.ndarray
    served: np.ndarray
    rate: np.ndarray
    active: np.ndarray
    count: np.ndarray
    seen: np.ndarray
    channel_left: np.ndarray
    channel_flows: np.ndarray


def new_flows(n_transfers: int, n_devices: int, n_channels: int) -> Flows:
    """Room for ``n_transfers`` flows."""
    pairs = [np.zeros(n_devices * n_devices + 1, np.int64) for _ in range(5)]
    return Flows(
        np.zeros(n_transfers, np.int64), np.zeros(n_transfers, np.int64), *pairs, np.zeros(1, np.int64),
        np.zeros(n_devices, np.int64), np.zeros(n_channels, np.int64), np.zeros(n_channels, np.int64),
    )  # fmt: skip


@part
def reset(p: Inputs, devices, f: Flows):
    """No flows; each pair gets as much room as it has transfers."""
    n_devices = len(p.slots)
    f.base[:] = 0
    f.size[:] = 0
    f.seen[:] = -1
    f.count[0] = 0
    for tensor in range(len(p.tensor_producer)):
        source = devices[p.tensor_producer[tensor]]
        for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
            target = devices[p.consumers[edge]]
            if target != source and f.seen[target] != tensor:
                f.seen[target] = tensor
                f.base[source * n_devices + target + 1] += 1
    for pair in range(n_devices * n_devices):
        f.base[pair + 1] += f.base[pair]


@part
def join(f: Flows, pair, transfer, size):
    """A transfer of ``size`` bytes begins to flow."""
    if f.size[pair] == 0:
        f.active[f.count[0]] = pair
        f.count[0] += 1
        f.served[pair] = f.rate[pair] = 0
    f.size[pair] = push(f.end, f.transfer, f.base[pair], f.size[pair], f.served[pair] + size * NANO, transfer)


@part
def advance(f: Flows, elapsed):
    """``elapsed`` ns pass at the present rates."""
    for index in range(f.count[0]):
        pair = f.active[index]
        f.served[pair] += f.rate[pair] * elapsed
        if f.served[pair] > REBASE:
            for flow in range(f.base[pair], f.base[pair] + f.size[pair]):
                f.end[flow] -= f.served[pair]
            f.served[pair] = 0


@part
def pop_ended(f: Flows):
    """Take out one flow that has no work left: its transfer, or -1."""
    for index in range(f.count[0]):
        pair = f.active[index]
        first = f.base[pair]
        if f.end[first] <= f.served[pair]:
            transfer = f.transfer[first]
            f.size[pair] = pop(f.end, f.transfer, first, f.size[pair])
            if f.size[pair] == 0:
                f.count[0] -= 1
                f.active[index] = f.active[f.count[0]]
            return transfer
    return -1


@part
def next_end(f: Flows, now):
    """The first instant at which a flow has no work left."""
    first = np.iinfo(np.int64).max
    for index in range(f.count[0]):
        pair = f.active[index]
        left = f.end[f.base[pair]] - f.served[pair]
        first = min(first, now + (left + f.rate[pair] - 1) // f.rate[pair])
    return first


@part
def share(route_ptr, route, channel_rate, f: Flows):
    """Set every pair's rate by progressive filling in whole bytes/s."""
    for channel in range(len(channel_rate)):
        f.channel_left[channel] = channel_rate[channel]
        f.channel_flows[channel] = 0
    for index in range(f.count[0]):
        pair = f.active[index]
        f.rate[pair] = 0
        for hop in range(route_ptr[pair], route_ptr[pair + 1]):
            f.channel_flows[route[hop]] += f.size[pair]
    frozen = 0
    while frozen < f.count[0]:
        narrowest, quotient = -1, 0
        for channel in range(len(channel_rate)):
            if f.channel_flows[channel] > 0:
                each = f.channel_left[channel] // f.channel_flows[channel]
                if narrowest < 0 or each < quotient:
                    narrowest, quotient = channel, each
        rate = max(quotient, 1)
        for index in range(f.count[0]):
            pair = f.active[index]
            crosses = False
            for hop in range(route_ptr[pair], route_ptr[pair + 1]):
                crosses = crosses or route[hop] == narrowest
            if f.rate[pair] > 0 or not crosses:
                continue
            f.rate[pair] = rate
            frozen += 1
            for hop in range(route_ptr[pair], route_ptr[pair + 1]):
                channel = route[hop]
                f.channel_flows[channel] -= f.size[pair]
                f.channel_left[channel] = max(0, f.channel_left[channel] - rate * f.size[pair])
