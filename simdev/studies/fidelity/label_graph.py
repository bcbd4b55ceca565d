"""Turn the list of kernels of a measured model into a graph and predict its time as the bench does: costs, then
simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simdev.calibrate.build import Sheet
from simdev.problem.costs import SOURCES, CostModel
from simdev.problem.graph import ComputationGraph, GraphBuilder
from simdev.problem.opcost.parts import KernelPart
from simdev.problem.opcost.physics import item_bytes, moved_bytes, work_flops
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Topology
from simdev.sim import simulate

ROOM_BYTES = 1 << 50  # the model fitted on the measured board, so memory is not limited here


@dataclass(frozen=True)
class Timing:
    """The time of a graph on a device: the simulated seconds, the shares by source, and the seconds of the roofline."""

    seconds: float
    shares: dict[str, float]
    roofline_s: float


def graph_of(name: str, parts: Sequence[tuple[KernelPart, int]]) -> ComputationGraph:
    """A chain of ops, one for each of ``parts`` ``(part, repetitions)``, with the signatures of captured graphs."""
    builder = GraphBuilder(name, meta={"source": "label"})
    last, number = None, 0
    for part, count in parts:
        kind, signature = _signature(part)
        dims = np.array([part.dims], np.int64)
        moved = int(moved_bytes(part.name, dims, item_bytes(part.dtype))[0])
        read, written = part.dims if part.name == "vector" else (moved, 0)
        flops = int(work_flops(part.name, dims)[0])
        for _ in range(count):
            op = builder.op(
                f"{number} {kind}", kind, signature=signature, flops=flops, bytes_read=read, bytes_written=written
            )
            if last is not None:
                builder.control(last, op)
            last, number = op, number + 1
    return builder.build()


def _signature(part: KernelPart) -> tuple[str, str]:
    """``(kind, signature)`` of the ATen op whose only part is ``part``."""
    t = part.dtype
    if part.name == "vector":
        return "add", "add"
    if part.name in ("linear", "gemm", "bmm"):
        batch, m, n, k = part.dims
        if part.name == "bmm":
            return "bmm", f"bmm({t}[{batch},{m},{k}],{t}[{batch},{k},{n}])->{t}[{batch},{m},{n}]"
        product = f"{t}[{m},{k}],{t}[{k},{n}])->{t}[{m},{n}]"
        return ("addmm", f"addmm({t}[{n}],{product}") if part.name == "linear" else ("mm", f"mm({product}")
    rows, width = part.dims
    x = f"{t}[{rows},{width}]"
    kinds = {
        "softmax": ("_softmax", f"{x},dim=1"),
        "softmax_backward": ("_softmax_backward_data", f"{x},{x},dim=1"),
        "layer_norm": ("native_layer_norm", f"{x},normalized_shape=[{width}]"),
        "layer_norm_backward": ("native_layer_norm_backward", f"{x},{x},normalized_shape=[{width}]"),
    }
    kind, arguments = kinds[part.name]
    return kind, f"{kind}({arguments})->{x}"


def time_graph(graph: ComputationGraph, known: Sheet, device_file: str) -> Timing:
    """Simulate ``graph`` alone on a board with the datasheet ``known``, costed by ``device_file`` (name or path)."""
    rates = {"f32": known.sheet.flops, **dict(known.sheet.rates)}
    kind = DeviceKind(
        "board",
        ROOM_BYTES,
        rates,
        known.sheet.bandwidth,
        launch_ns=round(1e9 * known.launch_s),
        multiprocessors=known.sheet.multiprocessors,
        calibrated=device_file,
    )
    topology = Topology("one-board", (Device("board0", kind),))
    problem = Problem.build(graph, topology, CostModel())
    seconds = simulate(problem, Placement(np.zeros(graph.n_ops, np.int64))).step_ns / 1e9
    ns, source = CostModel().op_costs(graph, kind)
    shares = {name: float(ns[source == number].sum()) / 1e9 / seconds for number, name in enumerate(SOURCES)}
    roofline = CostModel(calibrated=False).op_durations(graph, kind)
    return Timing(seconds, shares, float(roofline.sum()) / 1e9)
