"""Draw a schedule: devices and links over time, memory and capacity, what the critical chain consists of, and which
device computes which module."""

from __future__ import annotations

import os

import numpy as np

from simdev.files import write_picture
from simdev.problem.graph import ComputationGraph
from simdev.report.describe import plain
from simdev.report.explain import REASONS, Explanation
from simdev.sim.plot import PIXELS, bars, device_rows, hue, new_figure, phase_handles

GREYS = dict(zip(REASONS, ("#222222", "#666666", "#8c8c8c", "#b0b0b0", "#d0d0d0"), strict=True))
SPENT = {
    "compute": "computing",
    "device": "waiting for busy devices",
    "transfer": "transferring tensors",
    "link": "waiting for busy links",
    "launch": "waiting for the host",
}
LINK = "#9a9a9a"
MOST_CHANNELS = 4  # only the busiest channels are drawn
MOST_MODULES = 20
LEAST_SHARE = 0.005  # of the compute time: smaller modules are not drawn


def draw(explanation: Explanation, path: str | os.PathLike) -> None:
    """Draw a schedule to ``path``; its ending (png, svg or pdf) gives the format. Raises :class:`InvalidInput` for
    another ending.

    A device has one hue in all panels, a phase one shade of it; links and reasons are grey."""
    shown = _computing(explanation)
    rows = len(shown) + min(MOST_CHANNELS, len(explanation.channel_users))
    names, numbers = modules(explanation.graph)
    heights = [0.34 * rows + 0.6, 0.35 * len(shown) + 1.2, 0.5, 0.2 * len(names) + 0.4]
    figure = new_figure(12, sum(heights) + 2.4, path)
    gantt, memory, why, where = figure.subplots(4, 1, height_ratios=heights)
    figure.suptitle(plain(message(explanation)), fontweight="bold")
    memory.sharex(gantt)
    _draw_gantt(gantt, explanation, shown)
    _draw_memory(memory, explanation)
    _draw_reasons(why, explanation)
    _draw_modules(where, explanation, names, numbers)
    write_picture(figure, path, dpi=110, text=message(explanation))


def draw_before(before: Explanation, after: Explanation, names: tuple[str, str], path: str | os.PathLike) -> None:
    """Draw two placements of one step as strips over the same time, 1,200 times 500 pixels: a row for each device that
    computes. ``names`` are those of their placers. The picture holds :func:`sentence`. Raises :class:`InvalidInput` for
    an ending other than png, svg or pdf."""
    both = [(before, _computing(before)), (after, _computing(after))]
    figure = new_figure(12, 5, path)
    panels = figure.subplots(2, 1, height_ratios=[len(shown) + 0.6 for _, shown in both], sharex=True)
    figure.suptitle(plain(_headline(before, after)), fontsize=15, fontweight="bold")
    for axes, (one, shown), name in zip(panels, both, names, strict=True):
        device_rows(axes, one.schedule, one.device, shown, one.graph.op_phase)
        axes.set_yticks(range(len(shown)), [plain(one.device_names[device]) for device in shown], fontsize=12)
        fits = "" if one.schedule.feasible else ", does not fit in memory"
        axes.set_title(plain(f"{name}: {one.schedule.step_ns / 1e6:,.1f} ms{fits}"), loc="left", fontsize=12)
    longest = max(one.schedule.step_ns for one, _ in both) / 1e6
    panels[0].set_xlabel("")
    panels[1].set_xlim(0, longest * 1.005)
    panels[1].set_xlabel(f"ms after the start of the {after.whole}", fontsize=11)
    figure.legend(
        handles=phase_handles(_computing(after)[0]), loc="outside lower center", ncols=3, frameon=False, fontsize=11
    )
    write_picture(figure, path, dpi=100, text=sentence(before, after, names))


def message(explanation: Explanation) -> str:
    """The title of a picture: the time, and what most of it is spent on."""
    step_ns = explanation.schedule.step_ns
    reason, ns = max(explanation.attribution.items(), key=lambda entry: entry[1])
    spent = f", {ns / max(1, step_ns):.0%} of it {SPENT[reason]}" if ns else ""
    fits = "" if explanation.schedule.feasible else "  OUT OF MEMORY"
    return f"{explanation.heading()}{spent}{fits}"


def sentence(before: Explanation, after: Explanation, names: tuple[str, str]) -> str:
    """What a picture of :func:`draw_before` shows, with its figures: whoever compares it with the board sees whether
    the picture is stale."""
    times = (f"{name} {one.schedule.step_ns} ns" for name, one in zip(names, (before, after), strict=True))
    return f"{after.graph.name} on {after.topology.name}: {', '.join(times)}"


def _headline(before: Explanation, after: Explanation) -> str:
    old, new = before.schedule.step_ns, after.schedule.step_ns
    change = f"{1 - new / old:.0%} shorter" if new <= old else f"{new / old - 1:.0%} longer"
    devices = len(_computing(after))
    where = f"on {devices} devices" if devices > 1 else "on one device"
    what = f"{after.graph.name} {after.pipeline}: the run" if after.pipeline else f"{after.graph.name}: a training step"
    return f"{what} {where} of {after.topology.name} is {change}"


def _computing(explanation: Explanation) -> list[int]:
    """The devices that compute, in the order of the machine."""
    return sorted(set(explanation.device.tolist()))


def _draw_gantt(axes, explanation: Explanation, shown: list[int]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    s, gap = explanation.schedule, explanation.schedule.step_ns // PIXELS
    device_rows(axes, s, explanation.device, shown, explanation.graph.op_phase)
    counts = np.bincount(explanation.device, minlength=len(explanation.device_names))
    labels = [f"{explanation.device_names[device]} ({counts[device]:,} ops)" for device in shown]
    taken = s.transfer_finish - s.transfer_start
    busiest = sorted(explanation.channel_users, key=lambda channel: -taken[explanation.channel_users[channel]].sum())
    for channel in sorted(busiest[:MOST_CHANNELS]):
        users = explanation.channel_users[channel]
        bars(axes, len(labels), s.transfer_start[users], s.transfer_finish[users], gap, LINK, 0.4)
        labels.append(explanation.channel_name(channel))
    for link in explanation.chain:
        if link.reason in ("compute", "device"):
            row = shown.index(int(explanation.device[link.item]))
            axes.plot([link.begin_ns / 1e6, link.end_ns / 1e6], [row + 0.43] * 2, color="black", lw=1.2)
    axes.set_yticks(range(len(labels)), map(plain, labels), fontsize=9)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    left_out = len(busiest) - MOST_CHANNELS
    axes.set_xlabel(f"ms (the {MOST_CHANNELS} busiest of {len(busiest)} links)" if left_out > 0 else "ms")
    handles = phase_handles(shown[0])
    handles += [Patch(color=LINK, label="transfers"), Line2D([], [], color="black", lw=1.2, label="critical chain")]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, fontsize=9, frameon=False)


def _draw_memory(axes, explanation: Explanation) -> None:
    for device, name in enumerate(explanation.device_names):
        times, used = explanation.memory(device)
        capacity = int(explanation.topology.memory_bytes[device])
        peak = int(explanation.schedule.peak_bytes[device])
        if peak == 0:
            continue
        style = "--" if explanation.topology.devices[device].host else "-"
        label = f"{plain(name)}: peak {peak / 2**30:.2f} of {capacity / 2**30:.2f} GiB"
        axes.step(times / 1e6, used / capacity * 100, where="post", color=hue(device), lw=1.3, ls=style, label=label)
    axes.axhline(100, color="black", lw=1, ls=":")
    axes.set_ylabel("memory, % of capacity")
    axes.set_xlabel("ms")
    axes.set_ylim(0, None)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _draw_reasons(axes, explanation: Explanation) -> None:
    left, total = 0.0, max(1, explanation.schedule.step_ns)
    for reason, ns in explanation.attribution.items():
        share = ns / total * 100
        label = f"{REASONS[reason]}: {share:.1f} %" if ns else None
        axes.barh(0, share, left=left, color=GREYS[reason], label=label)
        left += share
    axes.set_yticks([])
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"% of the {explanation.whole}")
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
    s = explanation.schedule
    taken = (s.op_finish - s.op_start) / 1e6
    total = np.bincount(numbers, taken, minlength=len(names))
    drawn = np.flatnonzero(total >= LEAST_SHARE * total.sum())
    left = np.zeros(len(drawn))
    for device, name in enumerate(explanation.device_names):
        mine = explanation.device == device
        ms = np.bincount(numbers[mine], taken[mine], minlength=len(names))[drawn]
        if ms.any():
            axes.barh(range(len(drawn)), ms, left=left, color=hue(device), label=plain(name))
            left += ms
    axes.set_yticks(range(len(drawn)), [plain(names[module]) for module in drawn], fontsize=8)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlabel("compute time of each module by device, ms")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
