"""Describe a graph or a topology in numbers and in text, and draw a topology."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np

from simdev.analysis.levels import levels
from simdev.files import write_picture
from simdev.problem.costs import FREE_KINDS, op_class
from simdev.problem.graph import PHASES, ComputationGraph
from simdev.problem.topology import Topology
from simdev.sim.plot import new_figure


def summarise_graph(graph: ComputationGraph) -> dict:
    """The figures that ``simdev show`` prints for a graph, as a dictionary for JSON.

    ``depth_ops`` is the number of ops on the longest path. ``width_ops`` is the largest number of ops on one level,
    that is, at the same distance from the inputs. ``peak_bytes`` is the result of :func:`peak_bytes`.
    """
    level = levels(graph)
    by_class = {}
    classes = np.array([op_class(kind) if kind not in FREE_KINDS else "data" for kind in graph.kinds])[graph.op_kind]
    for name in sorted(set(classes.tolist())):
        by_class[name] = _part(graph, classes == name)
    return {
        "name": graph.name,
        "fingerprint": graph.fingerprint,
        "ops": graph.n_ops,
        "tensors": graph.n_tensors,
        "edges": graph.n_edges,
        "placement_units": graph.n_units,
        "colocation_groups": len(set(graph.op_group[graph.op_group >= 0].tolist())),
        "depth_ops": int(level.max()) + 1,
        "width_ops": int(np.bincount(level).max()),
        "flops": int(graph.op_flops.sum()),
        "bytes_read": int(graph.op_bytes_read.sum()),
        "bytes_written": int(graph.op_bytes_written.sum()),
        "persistent_bytes": int(graph.op_persistent_bytes.sum()),
        "tensor_bytes": int(graph.tensor_bytes.sum()),
        "peak_bytes": peak_bytes(graph),
        "phases": {phase: _part(graph, graph.op_phase == number) for number, phase in enumerate(PHASES)},
        "classes": by_class,
        "kinds": dict(
            Counter({k: int(c) for k, c in zip(graph.kinds, np.bincount(graph.op_kind), strict=True)}).most_common()
        ),
        "meta": graph.meta,
    }


def _part(graph: ComputationGraph, mask: np.ndarray) -> dict:
    moved = graph.op_bytes_read[mask].sum() + graph.op_bytes_written[mask].sum()
    return {"ops": int(mask.sum()), "flops": int(graph.op_flops[mask].sum()), "bytes": int(moved)}


def peak_bytes(graph: ComputationGraph) -> int:
    """The peak memory of the graph on one device that runs the ops in program order: the persistent bytes plus the
    largest number of other bytes in use at once, without rounding."""
    size = np.where(graph.tensor_persistent, 0, graph.tensor_bytes)
    last = graph.tensor_producer.copy()
    np.maximum.at(last, graph.edge_tensor, graph.consumers)
    last = np.where(graph.tensor_result, graph.n_ops, last)
    change = np.zeros(graph.n_ops + 2, np.int64)
    np.add.at(change, graph.tensor_producer, size)
    np.subtract.at(change, last + 1, size)
    live = np.cumsum(change)[: graph.n_ops] + graph.op_workspace_bytes
    return int(graph.op_persistent_bytes.sum() + live.max())


def graph_text(summary: dict) -> str:
    """The result of :func:`summarise_graph` as text."""
    lines = [
        f"{summary['name']}  ({summary['fingerprint']})",
        f"  ops            {summary['ops']:,} in {summary['placement_units']:,} placement units"
        f" ({summary['colocation_groups']:,} colocation groups)",
        f"  tensors        {summary['tensors']:,}, read {summary['edges']:,} times",
        f"  depth, width   {summary['depth_ops']:,} ops on the longest path, {summary['width_ops']:,} on one level",
        f"  work           {_scaled(summary['flops'], 'FLOP')},"
        f" {_scaled(summary['bytes_read'] + summary['bytes_written'], 'B')} moved",
        f"  memory         {_scaled(summary['persistent_bytes'], 'B')} persistent,"
        f" {_scaled(summary['peak_bytes'], 'B')} at the peak of one device",
        "",
        *_table(("phase", "ops", "FLOP", "bytes"), summary["phases"]),
        "",
        *_table(("class", "ops", "FLOP", "bytes"), summary["classes"]),
        "",
    ]
    most = list(summary["kinds"].items())
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in most[:12])
    lines.append(f"  kinds: {kinds}" + (f" and {len(most) - 12} more" if len(most) > 12 else ""))
    compiled = summary["meta"].get("compiled")
    if isinstance(compiled, dict):
        counts = f"{compiled.get('ops')} ops in {compiled.get('kernels')} fused kernels"
        lines.append(f"  compiled: an estimate of {counts}; {compiled.get('assumption')}")
    facts = [f"{key}={value}" for key, value in summary["meta"].items() if isinstance(value, (str, int, float))]
    return "\n".join(lines + ([f"  source: {', '.join(facts)}"] if facts else []))


def _table(head: tuple[str, ...], parts: dict[str, dict]) -> list[str]:
    rows = [
        (name, f"{part['ops']:,}", _scaled(part["flops"], ""), _scaled(part["bytes"], ""))
        for name, part in sorted(parts.items(), key=lambda item: -item[1]["flops"])
        if part["ops"]
    ]
    return _aligned([head, *rows])


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _scaled(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}".rstrip()
        value /= 1000
    return f"{value:,.0f} P{unit}"


def describe_topology(topology: Topology) -> dict:
    """The figures of a topology as a dictionary for JSON: its devices, links and routes.

    ``gb_per_s`` is the matrix of the bandwidth between each two devices, in 1e9 bytes per second. It is 0 on the
    diagonal and -1 for two devices without a route.
    """
    names = [device.name for device in topology.devices]
    return {
        "name": topology.name,
        "description": topology.description,
        "devices": [
            {
                "name": device.name,
                "kind": device.kind.name,
                "host": device.host,
                "memory_gib": round(device.kind.memory_bytes / 2**30, 3),
                "memory_gb_per_s": device.kind.memory_bandwidth / 1e9,
                "peak_tflops": {dtype: rate / 1e12 for dtype, rate in device.kind.peak_flops.items()},
            }
            for device in topology.devices
        ],
        "switches": list(topology.switches),
        "links": [
            {
                "ends": list(link.ends),
                "gb_per_s": link.bytes_per_s / 1e9,
                "latency_us": link.latency_ns / 1e3,
                "duplex": link.duplex,
            }
            for link in topology.links
        ],
        "routes": [
            {
                "from": names[source],
                "to": names[target],
                "through": _stops(topology, source, target)[1:-1],
                "gb_per_s": int(topology.pair_bytes_per_s[source, target]) / 1e9,
                "latency_us": int(topology.pair_latency_ns[source, target]) / 1e3,
            }
            for source, target in sorted(topology.routes)
        ],
        "gb_per_s": [[rate / 1e9 if rate >= 0 else -1 for rate in row] for row in topology.pair_bytes_per_s.tolist()],
    }


def _stops(topology: Topology, source: int, target: int) -> list[str]:
    stops = [topology.devices[source].name]
    for channel in topology.routes[source, target]:
        a, b, _, _ = topology.channels[channel]
        stops.append(b if a == stops[-1] else a)
    return stops


def topology_text(summary: dict) -> str:
    """The result of :func:`describe_topology` as text."""
    devices = summary["devices"]
    rows: list[tuple[str, ...]] = [("device", "kind", "memory GiB", "GB/s", "TFLOP/s")]
    for device in devices:
        rates = ", ".join(f"{dtype} {rate:g}" for dtype, rate in device["peak_tflops"].items())
        kind = device["kind"] + (" (host)" if device["host"] else "")
        rows.append((device["name"], kind, f"{device['memory_gib']:.2f}", f"{device['memory_gb_per_s']:g}", rates))
    links: Counter[tuple[str, str, str, str]] = Counter()
    for link in summary["links"]:
        kinds = sorted(end.rstrip("0123456789") or end for end in link["ends"])
        links[(" - ".join(kinds), f"{link['gb_per_s']:g}", f"{link['latency_us']:g}", link["duplex"])] += 1
    link_rows: list[tuple[str, ...]] = [("links", "number", "GB/s", "us", "duplex")]
    link_rows += [(what, str(count), rate, delay, duplex) for (what, rate, delay, duplex), count in links.items()]
    names = [device["name"] for device in devices]
    latency = {(route["from"], route["to"]): route["latency_us"] for route in summary["routes"]}
    matrix: list[tuple[str, ...]] = [("GB/s; us", *names)]
    for a, row in zip(names, summary["gb_per_s"], strict=True):
        cells = [
            f"{rate:g}; {latency[a, b]:g}" if (a, b) in latency else "-" for b, rate in zip(names, row, strict=True)
        ]
        matrix.append((a, *cells))
    head = [summary["name"], f"  {summary['description']}", ""]
    return "\n".join([*head, *_aligned(rows), "", *_aligned(link_rows), "", *_aligned(matrix)])


def draw_topology(topology: Topology, path: str | os.PathLike) -> None:
    """Draw the devices, switches and links of a topology to ``path``; its ending (png, svg or pdf) gives the format.

    Hosts are at the top and accelerators below them. Fabrics, the switches that join accelerators, are at the bottom.
    The colour and the width of a line show its bandwidth. Raises :class:`InvalidInput` for an unknown ending.
    """
    place, fabrics = _layout(topology)
    across = [x for x, _ in place.values()]
    width, height = (
        max(across) - min(across) + 2.2,
        max(y for _, y in place.values()) - min(y for _, y in place.values()),
    )
    figure = new_figure(max(6.0, 0.92 * width + 0.6), 1.5 * height + 2.2)
    axes = figure.add_subplot()
    _draw_links(axes, topology, place, fabrics)
    _draw_nodes(axes, topology, place, fabrics)
    axes.set_title(plain(f"{topology.name}: {topology.description}"), fontsize=10, wrap=True)
    axes.set_axis_off()
    axes.margins(0.04)
    if len(topology.devices) > 1:
        spare = max(0.0, 4.0 - width) / 2  # a narrow topology keeps its proportions
        axes.set_xlim(min(across) - 1.1 - spare, max(across) + 1.1 + spare)
    write_picture(figure, path, dpi=150)


def _layout(topology: Topology) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    """``(x, y)`` of every node, and ``(left, right)`` of the bar of every fabric (a switch below the accelerators).

    The links from the hosts down to the accelerators form trees. The parent of an accelerator is the neighbouring
    switch with the fewest links among those that a host reaches. Switches that are in no tree are fabrics.
    """
    near: dict[str, set[str]] = {}
    for link in topology.links:
        for a, b in (link.ends, link.ends[::-1]):
            near.setdefault(a, set()).add(b)
    leaves = [topology.devices[number].name for number in topology.accelerators]
    roots = [device.name for device in topology.devices if device.host and device.name not in leaves]
    depth, parent = dict.fromkeys(roots, 0), {}
    queue = list(roots)
    while queue:
        here = queue.pop(0)
        for there in sorted(near.get(here, ())):
            if there in topology.switches and there not in depth:
                depth[there], parent[there] = depth[here] + 1, here
                queue.append(there)
    for leaf in leaves:
        above = [node for node in near.get(leaf, ()) if node in depth]
        if above:
            parent[leaf] = min(above, key=lambda node: (len(near[node]), depth[node], node))
    trunk = set(roots)
    for leaf in leaves:
        node = leaf
        while node in parent:
            node = parent[node]
            trunk.add(node)
    fabric = [switch for switch in topology.switches if switch not in trunk]
    return _positions(topology, near, leaves, roots, trunk, parent, depth, fabric)


def _positions(topology, near, leaves, roots, trunk, parent, depth, fabric):
    children: dict[str, list[str]] = {}
    for child, above in parent.items():
        if child in trunk or child in leaves:
            children.setdefault(above, []).append(child)
    rank = {leaf: number for number, leaf in enumerate(leaves)}

    def below(node: str) -> list[str]:
        parts = [[node]] if node in rank else [below(child) for child in children.get(node, ())]
        return [leaf for part in sorted(parts, key=lambda part: [rank[leaf] for leaf in part]) for leaf in part]

    order = [leaf for root in roots for leaf in below(root)]
    order += [leaf for leaf in leaves if leaf not in order]
    place = {leaf: (float(x), 0.0) for x, leaf in enumerate(order)}
    top = max((depth[node] for node in trunk), default=0) + 1
    for node in sorted(trunk, key=lambda one: -depth[one]):
        xs = [place[child][0] for child in children.get(node, ())]
        place[node] = (float(np.mean(xs)) if xs else len(order) / 2, float(top - depth[node]))
    crowded: dict[float, list[str]] = {}
    for node in sorted(trunk, key=lambda one: place[one]):
        crowded.setdefault(place[node][1], []).append(node)
    for y, row in crowded.items():  # nodes of one row that would overlap are moved apart
        for left, right in zip(row, row[1:], strict=False):
            if place[right][0] - place[left][0] < 1.0:
                place[right] = (place[left][0] + 1.0, y)
    bars: dict[str, tuple[float, float]] = {}
    lanes: list[list[tuple[float, float]]] = []  # the bars that share a height
    for switch in fabric:
        xs = [place[node][0] for node in near.get(switch, ()) if node in leaves] or [0.0]
        span = (min(xs) - 0.4, max(xs) + 0.4)
        free = (n for n, taken in enumerate(lanes) if all(span[0] > b or span[1] < a for a, b in taken))
        lane = next(free, len(lanes))
        lanes += [[]] if lane == len(lanes) else []
        lanes[lane].append(span)
        bars[switch] = span
        place[switch] = (sum(span) / 2, -1.1 - 0.8 * lane)
    return place, bars


def _draw_links(axes, topology: Topology, place, fabrics) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    classes = sorted({(link.bytes_per_s, link.latency_ns, link.duplex) for link in topology.links})
    colour = {key: colormaps["viridis_r"](0.12 + 0.8 * n / max(1, len(classes) - 1)) for n, key in enumerate(classes)}
    leaves = {topology.devices[number].name for number in topology.accelerators}
    left, right = min(x for x, _ in place.values()), max(x for x, _ in place.values())
    rows = sorted({place[fabric][1] for fabric in fabrics}, reverse=True)
    outside: Counter = Counter()
    for link in topology.links:
        key = (link.bytes_per_s, link.latency_ns, link.duplex)
        dashes = "--" if link.duplex == "half" else "-"
        style = dict(color=colour[key], lw=max(0.8, 0.8 + 0.6 * np.log(key[0] / 3e9)), ls=dashes, zorder=1)
        a, b = sorted(link.ends, key=lambda end: -place[end][1])
        (xa, ya), (xb, yb) = place[a], place[b]
        if a in leaves and b in leaves:  # between accelerators: an arc below the row, deeper for larger distances
            dip = ya - 0.5 - 0.33 * abs(xa - xb)
            curve = [(xa + 0.07 * (xb - xa), ya - 0.2), (xa, dip), (xb, dip), (xb - 0.07 * (xb - xa), yb - 0.2)]
            path = Path(curve, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
            axes.add_patch(PathPatch(path, fill=False, **style))
        elif b in fabrics and a in leaves:
            shift = 0.16 * (1 - 2 * rows.index(yb)) if len(rows) > 1 else 0.0
            axes.plot([xa + shift, xa + shift], [ya, yb], **style)
        elif b in fabrics:  # a link from a host to a fabric: a line around the outside
            end, sign = (0, -1) if xa <= (left + right) / 2 else (1, 1)
            outside[sign] += 1
            x = (left, right)[end] + sign * (0.4 + 0.3 * outside[sign])
            axes.plot([xa, x, x, fabrics[b][end]], [ya, ya, yb, yb], **style)
        else:
            axes.plot([xa, xb], [ya, yb], **style)
    for key in reversed(classes):
        label = f"{key[0] / 1e9:g} GB/s, {key[1] / 1e3:g} µs" + (", half duplex" if key[2] == "half" else "")
        axes.plot([], [], color=colour[key], lw=3, ls="--" if key[2] == "half" else "-", label=label)
    if classes:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=min(3, len(classes)), fontsize=8, frameon=False
        )


def _draw_nodes(axes, topology: Topology, place, fabrics) -> None:
    from matplotlib.patches import FancyBboxPatch

    for name, (x, y) in place.items():
        if name in fabrics:
            begin, end = fabrics[name]
            box = FancyBboxPatch(
                (begin, y - 0.13), end - begin, 0.26, boxstyle="round,pad=0.02", fc="#e8e8e8", ec="#666", zorder=2
            )
            text = name
        elif name in topology.switches:
            box = FancyBboxPatch(
                (x - 0.36, y - 0.13), 0.72, 0.26, boxstyle="round,pad=0.02", fc="#e8e8e8", ec="#666", zorder=2
            )
            text = name
        else:
            device = topology.devices[topology.device_index[name]]
            fill = "#cfe3f7" if device.host else "#d9f0d3"
            box = FancyBboxPatch(
                (x - 0.42, y - 0.24), 0.84, 0.48, boxstyle="round,pad=0.02", fc=fill, ec="#333", zorder=2
            )
            kind = device.kind.name.replace("-", "-\n", 1) if len(device.kind.name) > 12 else device.kind.name
            text = f"{name}\n{kind}\n{device.kind.memory_bytes / 2**30:.4g} GiB"
        axes.add_patch(box)
        axes.text(x, y, plain(text), ha="center", va="center", fontsize=6.5, zorder=3, linespacing=1.05)


def plain(text: str) -> str:
    """``text`` with dollar signs escaped: matplotlib would read the text between two of them as a formula."""
    return text.replace("$", r"\$")
