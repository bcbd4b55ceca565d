"""What a collective takes: measured inside a node where a table has the GPU and its links, NCCL's algorithms over the
links elsewhere.

A ring of ``n`` ranks moves ``2 (n - 1) / n`` of an all-reduced buffer over every link, ``(n - 1) / n`` of a gathered or
scattered one. Across nodes NCCL builds as many rings as a group has ranks in a node, each with an adapter of its own,
so that the ring is as fast as the slower of a node's links and the adapters of a node. A tree takes ``2 log2(nodes)``
steps between nodes instead of ``2 (ranks - 1)``, and the quicker algorithm wins (NCCL ``tuning.cc``, version 2.18).
Of the ``2 (ranks - 1)`` steps of a ring, ``2 (nodes - 1)`` are between nodes (``nInterSteps`` in ``tuning.cc``; some
versions count ``2 nodes``). Where each pair of a group has a link of its own (four GPUs without a switch), NCCL builds
rings over all of them: ``ranks - 1`` links carry a rank's traffic (:meth:`Cluster.ring_bytes_per_s`).

An all-to-all is no ring: each rank sends every other rank a piece of its own. What leaves the node goes through the
rank's own adapter and cannot use those of other ranks (NVIDIA/nccl-tests issue 267), beside what stays on the node's
links; the slower of the two decides. DeepEP sends a token once to each node with any of its experts, to the rank with
the sender's number there, which passes it on over the node's links meanwhile (DeepSeek-V3 report, section 3.2.2).

Where the figures come from; no training run was used to choose any of them:

``links.csv``
    Measured collectives inside nodes joined by NVSwitch: A100, H100, H200 and B200, 2, 4 and 8 ranks, and GB200, 2 and
    4 (its first lines name the sources). Sizes between are interpolated, larger ones continue the last rate, and other
    group sizes are scaled by the ring's traffic; a group larger than any measured one takes the further steps of its
    ring. A broadcast is priced as a gather. The table serves only if the slowest channel of the ring is at least
    :data:`LIKE` times as fast as the measured one (:data:`MEASURED_BYTES_PER_S`): the same GPUs joined by PCIe are
    priced by their links.
``RING_SHARE``, ``STEP_NS``, ``PCIE_STEP_NS``, ``NETWORK_STEP_NS``, ``BASE_NS``
    Between the constants that NCCL's own model has for its protocols in ``tuning.cc``, where a ring step takes 0.6
    (LL), 1.9 (LL128) or 3.4 us (simple) over NVLink and 2.7, 4.0 or 14.0 us over a network. Not modelled is that NCCL
    takes the quickest protocol for each size. On four A100 of which two pairs are joined by PCIe 4
    (vidur, links of 25.6 GB/s as in ``a100x8-nvswitch``) they are off by 0.9 % on average above 16 MiB, by 3.2 % from
    1 MiB on, and by 17 % (too fast) from 64 KiB on. Servers without peer access can be far slower: eight L40S of
    aiconfigurator's table reach 20, 5 and 1.5 GB/s with 2, 4 and 8 ranks. Declare such links as measured.
``NETWORK_SHARE``
    Estimated from what nccl-tests commonly report on 200 and 400 Gbit/s adapters (0.8 to 0.92 of the rate). vidur's
    all-reduces over two nodes of A100 whose adapters it does not name cannot judge it: with 64 MiB, 1, 2, 4 and 8 ranks
    a node reach 5.9, 11.9, 22.4 and 17.5 GB/s, between 0.18 and 0.47 of an adapter of 100 Gbit/s for each rank. Declare
    ``network_gb_per_s`` for such nodes (:func:`load_cluster <simdev.parallel.cluster.load_cluster>`).
    Sends have it, too, although one send reaches less: vidur's between two nodes of H100 with adapters of 400 Gbit/s
    reach 35.9 GB/s with 64 MiB. They are simulated 14 % too fast on average (993 sizes from 2 KiB on); a share of 0.72
    behind the same latency would be off by 4.3 %. A framework file may state ``send_gb_per_s``.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput
from simdev.graphs.routing import Routing
from simdev.parallel.cluster import Cluster

TABLE = Path(__file__).with_name("links.csv")
PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "broadcast": 1.0}
RING_SHARE = 0.92  # of a link's rate, that is payload (tuning.cc: 0.92 by LL128, which carries 120 of 128 bytes)
NETWORK_SHARE = 0.85  # of an adapter's rate; est.: nccl-tests on 200 and 400 Gbit/s adapters reach 0.8 to 0.92
STEP_NS = 600  # a ring step between accelerators of a node (tuning.cc: hardware latency of NVLink, ring, LL)
PCIE_STEP_NS = 5_700  # the same over PCIe (tuning.cc: hardware latency of PCI, ring, simple protocol)
PCIE_BYTES_PER_S = 64_000_000_000  # a ring below this rate is taken to run over PCIe (5.0 x16: 63 GB/s)
NETWORK_STEP_NS = 8_000  # a step between nodes (tuning.cc: hardware latency of NET, ring: 2.7 to 14 us by protocol)
BASE_NS = 10_000  # begin of a collective: kernel launch and its synchronisation
# The rate between two accelerators of the machines in the table, as shipped topologies declare it.
MEASURED_BYTES_PER_S = {"a100": 245e9, "h100": 353e9, "h200": 353e9, "b200": 706e9, "gb200": 706e9}
LIKE = 0.8


def collective_ns(
    kind: str, payload_bytes: int, members: np.ndarray, cluster: Cluster, routing: Routing | None = None
) -> int:
    """Whole ns of a collective of ``kind`` over the ranks ``members`` (global numbers, one group).

    ``payload_bytes`` is the largest buffer on one rank: the reduced one, the gathered one, the one before scattering.
    With ``routing``, an all-to-all sends tokens of experts once to each node.
    """
    if kind not in PASSES:
        raise InvalidInput(f"no cost model for the collective {kind!r}", source=cluster.name)
    ranks = len(members)
    node, in_node = np.unique(np.asarray(members) // cluster.gpus, return_counts=True)
    here = np.asarray(members)[np.asarray(members) // cluster.gpus == node[in_node.argmax()]] % cluster.gpus
    inside = _node_ns(kind, payload_bytes, here, cluster) if len(here) > 1 else 0.0
    if len(node) == 1:
        return max(1, round(inside))
    wire = PASSES[kind] * (ranks - 1) / ranks * payload_bytes
    rings = int(in_node.min())
    adapter = cluster.network_bytes_per_s * NETWORK_SHARE
    near = cluster.ring_bytes_per_s(here) * RING_SHARE if cluster.node_bytes_per_s and len(here) > 1 else math.inf
    rate = min(adapter * rings, near)
    wire_s = wire / rate
    if kind == "all_to_all":
        away, beside = (ranks - in_node.min()) / ranks, (in_node.max() - 1) / ranks
        if routing is not None:  # the rank that receives a token sends it to the other ranks of its node
            beside += away * (in_node.max() - 1) / in_node.max()
            away *= routing.node_share(ranks, len(node))
        wire_s = max(away * payload_bytes / adapter, beside * payload_bytes / near)
    steps = PASSES[kind] * (len(node) - 1), PASSES[kind] * (ranks - len(node))  # between nodes, inside them
    ring = (
        BASE_NS + steps[0] * (NETWORK_STEP_NS / 2 + cluster.network_latency_ns / 4) + steps[1] * STEP_NS + wire_s * 1e9
    )
    tree = math.inf
    if kind == "all_reduce":
        hops = 2 * math.log2(len(node))
        latency = hops * (NETWORK_STEP_NS + cluster.network_latency_ns / 4) + 2 * (in_node.max() - 1) * STEP_NS
        tree = BASE_NS + latency + 2 * payload_bytes / (0.92 * rate) * 1e9
    return max(1, round(min(ring, tree)))


def adapter_share(
    kind: str,
    payload_bytes: int,
    members: np.ndarray,
    cluster: Cluster,
    ns: int | None = None,
    routing: Routing | None = None,
) -> float:
    """How much of a rank's adapter to the network a collective over the ranks ``members`` takes while it runs alone, in
    each direction: 0 inside a node, 1 where nothing but the adapter decides how long it takes. ``ns`` is its
    :func:`collective_ns`, if that is known already."""
    _, in_node = np.unique(np.asarray(members) // cluster.gpus, return_counts=True)
    ranks = len(members)
    if len(in_node) == 1:
        return 0.0
    if kind == "all_to_all":
        sent = (ranks - in_node.min()) / ranks * payload_bytes
        sent *= routing.node_share(ranks, len(in_node)) if routing is not None else 1.0
    else:
        sent = PASSES[kind] * (ranks - 1) / ranks * payload_bytes / in_node.min()
    return _share(sent, ns or collective_ns(kind, payload_bytes, members, cluster, routing), cluster)


def send_share(payload_bytes: int, source: int, target: int, cluster: Cluster) -> float:
    """How much of both ranks' adapters a send takes, like :func:`adapter_share`."""
    if source // cluster.gpus == target // cluster.gpus:
        return 0.0
    return _share(payload_bytes, send_ns(payload_bytes, source, target, cluster), cluster)


def _share(sent_bytes: float, ns: int, cluster: Cluster) -> float:
    return min(1.0, sent_bytes / (cluster.network_bytes_per_s * NETWORK_SHARE) * 1e9 / ns)


def send_ns(payload_bytes: int, source: int, target: int, cluster: Cluster) -> int:
    """Whole ns of a send between two ranks (global numbers)."""
    rate, latency = route(source, target, cluster)
    return max(1, round(latency + payload_bytes / rate * 1e9))


def route(source: int, target: int, cluster: Cluster) -> tuple[float, float]:
    """Bytes/s and latency in ns of a send between two ranks (global numbers)."""
    inside = source // cluster.gpus == target // cluster.gpus
    rate = cluster.node_bytes_per_s if inside else cluster.network_bytes_per_s * NETWORK_SHARE
    latency_ns = cluster.node_latency_ns if inside else cluster.network_latency_ns
    return min(rate, cluster.send_bytes_per_s or rate), latency_ns


def _node_ns(kind: str, size: int, members: np.ndarray, cluster: Cluster) -> float:
    """float ns inside a node, over its accelerators ``members`` (numbers inside the node)."""
    ranks, rate = len(members), cluster.ring_bytes_per_s(members)
    gpu = cluster.kind.name.partition("-")[0]
    if rate >= LIKE * MEASURED_BYTES_PER_S.get(gpu, math.inf):
        return _measured_ns(kind, size, ranks, _table()[gpu])
    step_ns = PCIE_STEP_NS if rate < PCIE_BYTES_PER_S else STEP_NS
    wire = PASSES[kind] * (ranks - 1) / ranks * size
    return BASE_NS + PASSES[kind] * (ranks - 1) * step_ns + wire / max(1.0, rate * RING_SHARE) * 1e9


def _measured_ns(kind: str, size: int, ranks: int, table: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]) -> float:
    """float ns of a collective by a table of ``collective -> ranks -> (bytes, ns)``."""
    known = table["all_gather" if kind == "broadcast" else kind]
    near = min(known, key=lambda n: (abs(math.log(n / ranks)), n))
    further_ns = PASSES[kind] * max(0, ranks - max(known)) * STEP_NS  # steps of a ring that is longer than any measured
    sizes, ns = known[near]
    ring = (ranks - 1) / ranks / ((near - 1) / near)
    whole = float(np.interp(size, sizes, ns)) if size <= sizes[-1] else ns[-1] * size / sizes[-1]
    return further_ns + (ns[0] + (whole - ns[0]) * ring if whole > ns[0] else whole)


@cache
def _table() -> dict[str, dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]]:
    """Collectives inside a node: GPU -> collective -> ranks -> (bytes, ns)."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows: dict[str, dict[str, dict[int, list]]] = {}
    for row in csv.DictReader(lines):
        groups = rows.setdefault(row["gpu"], {}).setdefault(row["collective"], {})
        groups.setdefault(int(row["ranks"]), []).append((int(row["bytes"]), 1e3 * float(row["us"])))
    return {
        gpu: {
            kind: {n: tuple(np.array(sorted(pairs)).T) for n, pairs in groups.items()} for kind, groups in kinds.items()
        }
        for gpu, kinds in rows.items()
    }
