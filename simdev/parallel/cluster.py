"""A cluster for training jobs: nodes of one kind, joined by a network. Its figures come from a topology file.

A topology file with one node, or with ``nodes = N``, describes the cluster: the accelerators of a node, the link
between two of them, and the link from an accelerator to the network (any switch that all nodes share; in a file with
one node, a switch named ``network``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from simdev.errors import InvalidInput, UnknownName
from simdev.parallel.mesh import DIGITS
from simdev.problem.costs import calibration_of
from simdev.problem.topology import NETWORK, DeviceKind, Topology, load_topology, split_choices


@dataclass(frozen=True)
class Cluster:
    """``gpus`` accelerators of ``kind`` in each node; ``nodes`` 0 means as many as a job needs.

    ``node_bytes_per_s`` and ``node_latency_ns`` are those of the route between two accelerators of a node,
    ``network_bytes_per_s`` and ``network_latency_ns`` those of the route between two nodes, for each accelerator;
    ``network_bytes_per_s`` is 0 where a topology has no network. ``host`` is the kind of the host processor, if there
    is one.
    """

    name: str
    kind: DeviceKind
    gpus: int
    nodes: int
    node_bytes_per_s: int
    node_latency_ns: int
    network_bytes_per_s: int
    network_latency_ns: int
    host: DeviceKind | None = None
    send_bytes_per_s: int = 0  # the most that a send between two ranks reaches; 0: what the link allows
    topology: Topology | None = field(default=None, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash((self.name, self.gpus, self.nodes, self.network_bytes_per_s))

    @property
    def ranks(self) -> int:
        """The accelerators of all nodes; of one node if a job takes as many as it needs."""
        return max(1, self.nodes) * self.gpus

    def ring_bytes_per_s(self, members: np.ndarray) -> float:
        """The rate of a ring over ``members`` (numbers inside a node), in bytes/s: that of its slowest channel.

        The groups of a job work at the same time: all groups of a node that have the same size and stride share the
        channels. Without a topology every channel serves one pair. Where each pair of a group has a link of its own,
        rings use all of them, and a rank's rate is that of all its links. NCCL also builds several rings where some
        pairs have direct links (DGX-1); here there is one.
        """
        members = np.sort(members)
        stride = int(members[1] - members[0]) if len(members) > 1 else 1
        shape = len(members), stride
        if shape not in self._shares:
            even = bool((np.diff(members) == stride).all())
            groups = _sibling_groups(*shape, self.gpus) if even else [members.tolist()]
            self._shares[shape] = self._share(groups)
        return self.node_bytes_per_s * self._shares[shape]

    @cached_property
    def _shares(self) -> dict[tuple[int, int], float]:
        """Of the rate between the first two accelerators, what a ring has, by its size and stride."""
        return {}

    def _share(self, groups: list[list[int]]) -> float:
        if self.topology is None or not self.node_bytes_per_s:
            return 1.0
        devices = [n for n in self.topology.accelerators if self.topology.devices[n].node == 0][: self.gpus]
        if len(devices) < 2:
            return 1.0
        alone, _ = _route(self.topology, devices[0], devices[1])
        own = [self.topology.routes.get((devices[a], devices[b]), ()) for g in groups for a in g for b in g if a != b]
        used = [channel for route in own for channel in route]
        if all(len(route) == 1 for route in own) and len(set(used)) == len(used) and alone > 0:
            slowest = min(self.topology.channels[channel][3] for channel in used)
            return slowest / alone * (len(groups[0]) - 1)
        users: dict[int, int] = {}
        for group in groups:
            ring = _widest_ring([devices[number] for number in group], self.topology.pair_bytes_per_s)
            for pair in zip(ring, ring[1:] + ring[:1], strict=True):
                for channel in self.topology.routes.get(pair, ()):
                    users[channel] = users.get(channel, 0) + 1
        rates = [self.topology.channels[channel][3] / count for channel, count in users.items()]
        return min(rates) / alone if rates and alone > 0 else 1.0

    def check(self, ranks: int, fewer: bool = False) -> None:
        """Raise :class:`InvalidInput` unless a job of ``ranks`` ranks fits the cluster; with ``fewer`` it may leave
        accelerators idle."""
        nodes = -(-ranks // self.gpus)
        if self.nodes and (ranks > self.nodes * self.gpus or (ranks < self.nodes * self.gpus and not fewer)):
            raise InvalidInput(
                f"the mesh has {ranks} ranks, the cluster {self.nodes * self.gpus} accelerators "
                f"({self.nodes} nodes of {self.gpus})",
                source=self.name,
                field="mesh",
            )
        if nodes > 1 and ranks % self.gpus and not fewer:
            raise InvalidInput(f"{ranks} ranks do not fill nodes of {self.gpus}", source=self.name, field="mesh")
        if nodes > 1 and not self.network_bytes_per_s:
            message = f"{ranks} ranks need {nodes} nodes, and this topology has no network between nodes"
            remedy = f"use {self.gpus} ranks, or a topology that has one, such as dgx-h100"
            raise InvalidInput(f"{message}: {remedy}", source=self.name)


def load_cluster(text: str, *, kept: bool = False) -> Cluster:
    """``dgx-h100``, ``dgx-h100[nodes=8]``, or a topology file by path; ``kept`` as in :func:`load_topology`.

    ``network_gb_per_s`` in the brackets is what a node reaches the network with (1e9 bytes/s each way), if that is not
    what its accelerators' adapters sum up to; they share it. ``oversubscription=2`` halves what each of them has while
    all send between nodes. ``watts=500`` limits the power of each accelerator."""
    name, choices = split_choices(text)
    if not name:
        raise InvalidInput("expected a cluster such as dgx-h100[nodes=8], or a topology file", source=repr(text))
    cluster = cluster_of(load_topology(name, kept=kept))
    if not choices:
        return cluster
    given: dict[str, str] = {}
    for part in choices[1:-1].split(","):
        key, _, value = (side.strip() for side in part.partition("="))
        if key not in CHOICES:
            known = [f"nodes={key}"] if key.isdecimal() else CHOICES
            raise UnknownName("choice of a cluster", key, known, source=text)
        given[key] = value
    if "nodes" in given:
        nodes = given["nodes"]
        if not nodes.isdecimal() or len(nodes) > DIGITS or not 1 <= int(nodes) <= MOST_NODES:
            raise InvalidInput(f"expected a whole number from 1 to {MOST_NODES}", source=text, field="nodes")
        cluster = replace(cluster, nodes=int(nodes))
    if "watts" in given:
        cluster = replace(cluster, kind=_limited(cluster.kind, given["watts"], text))
    rate: float = cluster.network_bytes_per_s
    if not rate and set(given) - {"nodes", "watts"}:
        raise InvalidInput("this topology has no network between nodes", source=text)
    if "network_gb_per_s" in given:
        rate = 1e9 * _positive(given["network_gb_per_s"], text, "network_gb_per_s", 1e-3) / cluster.gpus
    if "oversubscription" in given:
        rate /= _positive(given["oversubscription"], text, "oversubscription", 1.0)
    return replace(cluster, network_bytes_per_s=round(rate))


CHOICES = ("nodes", "network_gb_per_s", "oversubscription", "watts")
LEAST_POWER = 0.5  # of a board's own limit: the rule was judged at 0.79 and 0.83 (simdev.studies.fidelity.kernels)


def _limited(kind: DeviceKind, watts: str, source: str) -> DeviceKind:
    """The accelerators of ``kind`` under a lower power limit (``nvidia-smi -pl``)."""
    file = calibration_of(kind) if kind.calibrated else None
    if file is None or not file.watts or "product bf16" not in file.own:  # power slows kernels on matrix units alone
        message = f"{kind.name} has no device file of its own chip with products in bf16, which a limit slows down"
        raise InvalidInput(message, source=source, field="watts")
    return replace(kind, watts=_positive(watts, source, "watts", LEAST_POWER * kind.watts, kind.watts))


def _positive(value: str, source: str, field: str, least: float, most: float = 1e6) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        text = "1e6" if most == 1e6 else f"{most:g}"
        raise InvalidInput(f"expected a number from {least:g} to {text}, got {value!r}", source=source, field=field)
    return number


def cluster_of(topology: Topology) -> Cluster:
    """The cluster that a topology describes. Raises :class:`InvalidInput` where its accelerators are of several
    kinds."""
    accelerators = topology.accelerators
    kinds = {topology.devices[number].kind.name: topology.devices[number].kind for number in accelerators}
    if len(kinds) > 1:
        raise InvalidInput(
            f"accelerators of several kinds ({', '.join(kinds)}); a cluster has one",
            source=topology.name,
            field="device",
        )
    nodes = {topology.devices[number].node for number in accelerators}
    node = [number for number in accelerators if topology.devices[number].node == min(nodes)]
    kind = next(iter(kinds.values()))
    host = topology.devices[topology.host].kind if topology.host >= 0 else None
    rate, latency = (0, 0) if len(node) < 2 else _route(topology, node[0], node[1])
    network = [link for link in topology.links if NETWORK in link.ends and topology.devices[node[0]].name in link.ends]
    far, far_latency = (network[0].bytes_per_s, 2 * network[0].latency_ns) if network else (0, 0)
    count = len(nodes) if len(nodes) > 1 else 0 if network else 1
    return Cluster(topology.name, kind, len(node), count, rate, latency, far, far_latency, host, topology=topology)


MOST_NODES = 1 << 20
MOST_SEARCHED = 8  # members of a ring whose order is searched


def _widest_ring(group: list[int], rates: np.ndarray) -> list[int]:
    """``group`` (devices) in the order of a ring whose slowest pair is as fast as possible by ``rates`` ``(D, D)``; the
    given order if it is as good, or for groups of more than :data:`MOST_SEARCHED`."""
    if not 3 < len(group) <= MOST_SEARCHED:
        return group
    for floor in sorted({int(rates[a, b]) for a in group for b in group if a != b}, reverse=True):
        ring = _ring_from([group[0]], group[1:], rates >= floor)
        if ring:
            return ring
    return group


def _ring_from(begun: list[int], rest: list[int], joined: np.ndarray) -> list[int]:
    """``begun`` continued to a ring over ``rest`` along pairs that are ``joined``; empty if there is none."""
    if not rest:
        return begun if joined[begun[-1], begun[0]] else []
    for place, device in enumerate(rest):
        if joined[begun[-1], device]:
            ring = _ring_from([*begun, device], rest[:place] + rest[place + 1 :], joined)
            if ring:
                return ring
    return []


def _sibling_groups(size: int, stride: int, gpus: int) -> list[list[int]]:
    """All groups of ``size`` accelerators ``stride`` apart that a node of ``gpus`` holds side by side."""
    block = size * stride
    starts = (base + offset for base in range(0, gpus - block + 1, block) for offset in range(stride))
    return [list(range(start, start + block, stride)) for start in starts] or [list(range(0, block, stride))]


def _route(topology: Topology, source: int, target: int) -> tuple[int, int]:
    return int(topology.pair_bytes_per_s[source, target]), int(topology.pair_latency_ns[source, target])
