"""Draw a schedule: devices and links over time, memory and capacity, what the critical chain consists of, and which
device computes which module."""

from __future__ import annotations

import os

import numpy as np

from simdev.errors import InvalidInput
from simdev.files import replacing
from simdev.problem.graph import PHASES, ComputationGraph
from simdev.report.explain import REASONS, Explanation
from simdev.report.labels import plain

PHASE_COLOURS = ("#4477aa", "#ee6677", "#228833")
REASON_COLOURS = {
    "compute": "#4477aa",
    "device": "#ccbb44",
    "transfer": "#ee6677",
    "link": "#aa3377",
    "launch": "#66ccee",
}
MOST_CHANNELS = 16  # only the busiest channels are drawn
MOST_MODULES = 20
LEAST_SHARE = 0.005  # of the compute time: smaller modules are not drawn
PIXELS = 1600  # intervals closer than a pixel are drawn as one


def draw(explanation: Explanation, path: str | os.PathLike) -> None:
    """Draw a schedule to ``path``; its ending (png, svg or pdf) gives the format. Raises :class:`InvalidInput` for
    another ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kind = os.path.splitext(path)[1].lower().lstrip(".")
    if kind not in ("png", "svg", "pdf"):
        raise InvalidInput("pictures end in .png, .svg or .pdf", source=path)
    rows = explanation.topology.n_devices + min(MOST_CHANNELS, len(explanation.channel_users))
    names, numbers = modules(explanation.graph)
    heights = [0.3 * rows + 0.8, 0.35 * explanation.topology.n_devices + 1.2, 0.55, 0.2 * len(names) + 0.4]
    figure, (gantt, memory, why, where) = pyplot.subplots(
        4, 1, figsize=(12, sum(heights) + 2.2), height_ratios=heights, layout="constrained"
    )
    s = explanation.schedule
    fits = "" if s.feasible else "  OUT OF MEMORY"
    figure.suptitle(plain(f"{explanation.graph.name} on {explanation.topology.name}: {s.step_ns / 1e6:,.3f} ms{fits}"))
    memory.sharex(gantt)
    _draw_gantt(gantt, explanation)
    _draw_memory(memory, explanation)
    _draw_reasons(why, explanation)
    _draw_modules(where, explanation, names, numbers)
    with replacing(path) as file:
        figure.savefig(file, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    pyplot.close(figure)


def merged(begin: np.ndarray, end: np.ndarray, gap_ns: int) -> np.ndarray:
    """Join intervals that are at most ``gap_ns`` apart. Returns int64 ``(k, 2)``: begin and end in ns, sorted by
    begin."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], begin[1:] > end[:-1] + gap_ns])[: len(begin)]
    starts = np.flatnonzero(first)
    return np.stack([begin[starts], np.concatenate([end[starts[1:] - 1], end[-1:]])], axis=1)


def _bars(axes, row: float, begin, end, gap: int, colour: str, height: float = 0.72) -> None:
    if len(begin):
        spans = merged(begin, end, gap) / 1e6
        axes.broken_barh(
            np.stack([spans[:, 0], np.maximum(spans[:, 1] - spans[:, 0], 1e-9)], axis=1),
            (row - height / 2, height),
            facecolors=colour,
            linewidth=0,
        )


def _draw_gantt(axes, explanation: Explanation) -> None:
    from matplotlib.patches import Patch

    s, gap = explanation.schedule, explanation.schedule.step_ns // PIXELS
    labels: list[str] = []
    for device, name in enumerate(explanation.device_names):
        ops = np.flatnonzero(explanation.device == device)
        for phase, colour in enumerate(PHASE_COLOURS):
            mine = ops[explanation.graph.op_phase[ops] == phase]
            _bars(axes, len(labels), s.op_start[mine], s.op_finish[mine], gap, colour)
        labels.append(f"{name} ({len(ops):,} ops)")
    taken = s.transfer_finish - s.transfer_start
    busiest = sorted(explanation.channel_users, key=lambda channel: -taken[explanation.channel_users[channel]].sum())
    for channel in sorted(busiest[:MOST_CHANNELS]):
        users = explanation.channel_users[channel]
        _bars(axes, len(labels), s.transfer_start[users], s.transfer_finish[users], gap, "#888888", 0.5)
        labels.append(explanation.channel_name(channel))
    for link in explanation.chain:
        if link.reason in ("compute", "device"):
            row = int(explanation.device[link.item])
            axes.plot([link.begin_ns / 1e6, link.end_ns / 1e6], [row + 0.43] * 2, color="black", lw=1.2)
    axes.set_yticks(range(len(labels)), map(plain, labels), fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, s.step_ns / 1e6)
    shown = f" (the busiest {MOST_CHANNELS} of {len(busiest)} channels in use)" if len(busiest) > MOST_CHANNELS else ""
    axes.set_xlabel(f"ms{shown}")
    handles = [Patch(color=colour, label=phase) for phase, colour in zip(PHASES, PHASE_COLOURS, strict=True)]
    handles += [Patch(color="#888888", label="transfers"), Patch(color="black", label="critical chain")]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, fontsize=8, frameon=False)


def _draw_memory(axes, explanation: Explanation) -> None:
    from matplotlib import colormaps

    for device, name in enumerate(explanation.device_names):
        times, used = explanation.memory(device)
        colour = colormaps["tab10"](device % 10)
        capacity = int(explanation.topology.memory_bytes[device])
        peak = int(explanation.schedule.peak_bytes[device])
        if peak == 0:
            continue
        style = "--" if explanation.topology.devices[device].host else "-"
        label = f"{plain(name)}: peak {peak / 2**30:.2f} of {capacity / 2**30:.2f} GiB"
        axes.step(times / 1e6, used / capacity * 100, where="post", color=colour, lw=1.1, ls=style, label=label)
    axes.axhline(100, color="red", lw=1, ls=":")
    axes.set_ylabel("memory, % of capacity")
    axes.set_xlabel("ms")
    axes.set_ylim(0, None)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _draw_reasons(axes, explanation: Explanation) -> None:
    left, total = 0.0, max(1, explanation.schedule.step_ns)
    for reason, ns in explanation.attribution.items():
        share = ns / total * 100
        label = f"{REASONS[reason]}: {share:.1f} %" if ns else None
        axes.barh(0, share, left=left, color=REASON_COLOURS[reason], label=label)
        left += share
    axes.set_yticks([])
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the step")
    axes.legend(fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def modules(graph: ComputationGraph, most: int = MOST_MODULES) -> tuple[list[str], np.ndarray]:
    """Group ops by module. Returns the names, in the order of their first ops, and the number of each op's module,
    int64 ``(n,)``.

    A module is a prefix of the layer's dotted name. The module with the most ops is divided further, as long as at most
    ``most`` modules result. If even the first parts of the names are more, the last module holds the rest.
    """
    parts = [layer.split(".") if layer else ["(no module)"] for layer in graph.layers]
    ops = np.bincount(graph.op_layer, minlength=len(parts)).tolist()
    groups: dict[tuple[str, ...], list[int]] = {}  # layers by prefix
    for layer, names in enumerate(parts):
        groups.setdefault((names[0],), []).append(layer)
    while True:
        divided = {}
        for prefix, layers in groups.items():
            finer: dict[tuple[str, ...], list[int]] = {}
            for layer in layers:
                finer.setdefault(tuple(parts[layer][: len(prefix) + 1]), []).append(layer)
            if finer.keys() != {prefix} and len(groups) + len(finer) - 1 <= most:
                divided[prefix] = finer
        if not divided:
            break
        largest = max(divided, key=lambda prefix: sum(ops[layer] for layer in groups[prefix]))
        del groups[largest]
        groups |= divided[largest]
    prefix_of = {layer: ".".join(prefix) for prefix, layers in groups.items() for layer in layers}
    numbers: dict[str, int] = {}
    found: list[str] = []
    for layer in dict.fromkeys(graph.op_layer.tolist()):
        if prefix_of[layer] not in numbers:
            numbers[prefix_of[layer]] = min(len(found), most - 1)
            if len(found) < most:
                found.append(prefix_of[layer])
            else:
                found[-1] = "(all others)"
    number_of_layer = [numbers.get(prefix_of[layer], 0) for layer in range(len(parts))]
    return found, np.array(number_of_layer, np.int64)[graph.op_layer]


def _draw_modules(axes, explanation: Explanation, names: list[str], numbers: np.ndarray) -> None:
    """The compute time of each module, split by the device that it runs on."""
    from matplotlib import colormaps

    s = explanation.schedule
    taken = (s.op_finish - s.op_start) / 1e6
    total = np.bincount(numbers, taken, minlength=len(names))
    drawn = np.flatnonzero(total >= LEAST_SHARE * total.sum())
    left = np.zeros(len(drawn))
    for device, name in enumerate(explanation.device_names):
        mine = explanation.device == device
        ms = np.bincount(numbers[mine], taken[mine], minlength=len(names))[drawn]
        if ms.any():
            axes.barh(range(len(drawn)), ms, left=left, color=colormaps["tab10"](device % 10), label=plain(name))
            left += ms
    axes.set_yticks(range(len(drawn)), [plain(names[module]) for module in drawn], fontsize=8)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlabel("compute time of each module by device, ms")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
