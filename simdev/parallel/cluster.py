"""A cluster for training jobs: nodes of one kind, joined by a network. Its figures come from a topology file.

A topology file with one node, or with ``nodes = N``, describes the cluster: the accelerators of a node, the link
between two of them, and the link from an accelerator to the network (any switch that all nodes share; in a file with
one node, a switch named ``network``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from simdev.errors import InvalidInput
from simdev.problem.topology import NETWORK, DeviceKind, Topology, load_topology


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

    def __hash__(self) -> int:
        return hash((self.name, self.gpus, self.nodes, self.network_bytes_per_s))

    def check(self, ranks: int) -> None:
        """Raise :class:`InvalidInput` unless a job of ``ranks`` ranks fits the cluster."""
        nodes = -(-ranks // self.gpus)
        if self.nodes and ranks != self.nodes * self.gpus:
            raise InvalidInput(
                f"the mesh has {ranks} ranks, the cluster {self.nodes * self.gpus} accelerators "
                f"({self.nodes} nodes of {self.gpus})",
                source=self.name,
                field="mesh",
            )
        if nodes > 1 and ranks % self.gpus:
            raise InvalidInput(f"{ranks} ranks do not fill nodes of {self.gpus}", source=self.name, field="mesh")
        if nodes > 1 and not self.network_bytes_per_s:
            raise InvalidInput(
                f"{ranks} ranks need {nodes} nodes, and this topology has no network between nodes", source=self.name
            )


def load_cluster(text: str) -> Cluster:
    """``dgx-h100``, ``dgx-h100[nodes=8]``, or a topology file by path."""
    found = re.fullmatch(r"(.+?)(?:\[nodes=(\d+)\])?", text)
    cluster = cluster_of(load_topology(found[1]))
    if found[2] is not None:
        if int(found[2]) < 1:
            raise InvalidInput("expected a whole number from 1 on", source=text, field="nodes")
        cluster = replace(cluster, nodes=int(found[2]))
    return cluster


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
    return Cluster(topology.name, kind, len(node), count, rate, latency, far, far_latency, host)


def _route(topology: Topology, source: int, target: int) -> tuple[int, int]:
    return int(topology.pair_bytes_per_s[source, target]), int(topology.pair_latency_ns[source, target])
