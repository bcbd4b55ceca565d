"""What a collective takes: measured inside a node where a table has the GPU, NCCL's algorithms over the links
elsewhere.

A ring of ``n`` ranks moves ``2 (n - 1) / n`` of an all-reduced buffer over every link, ``(n - 1) / n`` of a gathered or
scattered one. Across nodes NCCL builds as many rings as a group has ranks in a node, each with an adapter of its own,
so that the ring is as fast as the slower of a node's links and the adapters of a node. A tree takes ``2 log2(nodes)``
steps between nodes instead of ``2 (ranks - 1)``, and the quicker algorithm wins (NCCL ``tuning.cc``, version 2.18).

Where the figures come from; no training run was used to choose any of them:

``links.csv``
    Measured all-reduces inside a node of A100 or H100, 2 to 8 ranks (its first lines name the sources; H100 above
    64 MiB continues the last rate). Other sizes are interpolated, other group sizes scaled by the ring's traffic.
    Gathers and scatters take half of the part that depends on size: no row for them is measured.
``RING_SHARE``, ``STEP_NS``, ``NETWORK_STEP_NS``, ``BASE_NS``
    After the constants of NCCL's own model in ``tuning.cc``, rounded.
``NETWORK_SHARE``
    Estimated from what nccl-tests commonly report on 200 and 400 Gbit/s adapters (0.8 to 0.92 of the rate). No
    measured collective across nodes is in the table, so that times across nodes are not checked by themselves.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput
from simdev.parallel.cluster import Cluster

TABLE = Path(__file__).with_name("links.csv")
PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "broadcast": 1.0}
RING_SHARE = 0.92  # of a link's rate, that NCCL's simple protocol carries as payload (tuning.cc: 0.92)
NETWORK_SHARE = 0.85  # of an adapter's rate; est.: nccl-tests on 200 and 400 Gbit/s adapters reach 0.8 to 0.92
STEP_NS = 600  # a ring step between accelerators of a node (tuning.cc: hardware latency of NVLink, LL128 to simple)
NETWORK_STEP_NS = 8_000  # a step between nodes (tuning.cc: network latency, simple protocol: 14 us with its base)
BASE_NS = 10_000  # begin of a collective: kernel launch and its synchronisation


def collective_ns(kind: str, payload_bytes: int, members: np.ndarray, cluster: Cluster) -> int:
    """Whole ns of a collective of ``kind`` over the ranks ``members`` (global numbers, one group).

    ``payload_bytes`` is the largest buffer on one rank: the reduced one, the gathered one, the one before scattering.
    """
    if kind not in PASSES:
        raise InvalidInput(f"no cost model for the collective {kind!r}", source=cluster.name)
    ranks = len(members)
    node, in_node = np.unique(np.asarray(members) // cluster.gpus, return_counts=True)
    inside = _node_ns(kind, payload_bytes, int(in_node.max()), cluster) if in_node.max() > 1 else 0.0
    if len(node) == 1:
        return max(1, round(inside))
    wire = PASSES[kind] * (ranks - 1) / ranks * payload_bytes
    rings = int(in_node.min())
    rate = cluster.network_bytes_per_s * NETWORK_SHARE * rings
    if cluster.node_bytes_per_s and in_node.max() > 1:
        rate = min(rate, cluster.node_bytes_per_s * RING_SHARE)
    steps = (PASSES[kind] * (len(node) - 1), PASSES[kind] * ranks - len(node))
    ring = (
        BASE_NS
        + steps[0] * (NETWORK_STEP_NS / 2 + cluster.network_latency_ns / 4)
        + steps[1] * STEP_NS
        + wire / rate * 1e9
    )
    tree = math.inf
    if kind == "all_reduce":
        hops = 2 * math.log2(len(node))
        latency = hops * (NETWORK_STEP_NS + cluster.network_latency_ns / 4) + 2 * (in_node.max() - 1) * STEP_NS
        tree = BASE_NS + latency + 2 * payload_bytes / (0.92 * rate) * 1e9
    return max(1, round(min(ring, tree)))


def send_ns(payload_bytes: int, source: int, target: int, cluster: Cluster) -> int:
    """Whole ns of a send between two ranks (global numbers)."""
    if source // cluster.gpus == target // cluster.gpus:
        rate, latency = cluster.node_bytes_per_s, cluster.node_latency_ns
    else:
        rate, latency = cluster.network_bytes_per_s * NETWORK_SHARE, cluster.network_latency_ns
    rate = min(rate, cluster.send_bytes_per_s or rate)
    return max(1, round(latency + payload_bytes / rate * 1e9))


def _node_ns(kind: str, size: int, ranks: int, cluster: Cluster) -> float:
    """float ns inside a node."""
    known = _table().get(cluster.kind.name.partition("-")[0], {})
    if known and kind != "all_to_all":
        near = min(known, key=lambda n: (abs(math.log(n / ranks)), n))
        sizes, ns = known[near]
        ring = 2 * (ranks - 1) / ranks / (2 * (near - 1) / near)
        whole = float(np.interp(size, sizes, ns)) if size <= sizes[-1] else ns[-1] * size / sizes[-1]
        whole = ns[0] + (whole - ns[0]) * ring if whole > ns[0] else whole
        return whole if kind == "all_reduce" else ns[0] + (whole - ns[0]) / 2
    wire = PASSES[kind] * (ranks - 1) / ranks * size
    rate = cluster.node_bytes_per_s * RING_SHARE
    return BASE_NS + PASSES[kind] * (ranks - 1) * STEP_NS + wire / rate * 1e9


@cache
def _table() -> dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """All-reduce inside a node: GPU -> ranks -> (bytes, ns)."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows: dict[str, dict[int, list]] = {}
    for row in csv.DictReader(lines):
        rows.setdefault(row["gpu"], {}).setdefault(int(row["ranks"]), []).append(
            (int(row["bytes"]), 1e3 * float(row["us"]))
        )
    return {gpu: {n: tuple(np.array(sorted(pairs)).T) for n, pairs in groups.items()} for gpu, groups in rows.items()}
