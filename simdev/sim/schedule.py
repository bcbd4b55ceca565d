"""Results of simulations: when each op and transfer ran, and how much memory each device needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simdev.problem.placement import Placement
from simdev.problem.problem import Problem


@dataclass(frozen=True, eq=False)
class Schedule:
    """One simulated step. ``n`` ops, ``x`` transfers, ``D`` devices; times in ns from the start of the step.

    * ``step_ns``: time of the last completion, transfers included (R6).
    * ``op_start``, ``op_finish`` int64 ``(n,)``.
    * ``transfer_tensor``, ``transfer_source``, ``transfer_target`` int32 ``(x,)`` and ``transfer_start``,
      ``transfer_finish`` int64 ``(x,)``: one row per tensor and destination device, sorted by (tensor, target).
    * ``peak_bytes`` int64 ``(D,)``: the most memory in use at one time (R7). ``overflow_bytes`` int64 ``(D,)``: the
      peak minus the device's capacity, or 0 if it fits (R8).
    * ``overflow_op`` int32 ``(D,)``: the op whose allocation first exceeded the capacity (for the copy of a tensor, the
      producer); -1 if there is none, or if the persistent bytes alone exceed the capacity.
    * ``comm_bytes``: the bytes sent between devices.
    """

    step_ns: int
    op_start: np.ndarray
    op_finish: np.ndarray
    transfer_tensor: np.ndarray
    transfer_source: np.ndarray
    transfer_target: np.ndarray
    transfer_start: np.ndarray
    transfer_finish: np.ndarray
    peak_bytes: np.ndarray
    overflow_bytes: np.ndarray
    overflow_op: np.ndarray
    comm_bytes: int

    ARRAYS = (
        "op_start",
        "op_finish",
        "transfer_tensor",
        "transfer_source",
        "transfer_target",
        "transfer_start",
        "transfer_finish",
        "peak_bytes",
        "overflow_bytes",
        "overflow_op",
    )

    def __post_init__(self) -> None:
        for name in self.ARRAYS:
            getattr(self, name).setflags(write=False)

    @property
    def feasible(self) -> bool:
        """True if the peak of every device fits in its memory."""
        return not self.overflow_bytes.any()

    @property
    def step_time_s(self) -> float:
        """Step time in seconds."""
        return self.step_ns / 1e9

    def busy_ns(self, devices: np.ndarray, n_devices: int) -> np.ndarray:
        """int64 ``(D,)``: the sum of op durations per device. ``devices`` ``(n,)`` is the placement simulated."""
        busy = np.zeros(n_devices, np.int64)
        np.add.at(busy, devices, self.op_finish - self.op_start)
        return busy

    def plot(self, problem: Problem, placement: Placement, axes: Any = None) -> Any:
        """Draw when each device computes. Needs matplotlib.

        ``problem`` and ``placement`` are those that were simulated. Draws on ``axes``, or on new ones, and returns the
        matplotlib axes: a row for each device that computes, a hue for each device, a shade for each phase.
        """
        from matplotlib import pyplot

        from simdev.sim.plot import device_rows, phase_handles

        shown = sorted(set(placement.devices.tolist()))
        axes = pyplot.subplots(figsize=(10, 0.5 * len(shown) + 1), layout="constrained")[1] if axes is None else axes
        device_rows(axes, self, placement.devices, shown, problem.graph.op_phase)
        axes.set_xlabel("ms after the start of the step")
        if problem.graph.op_phase is not None:
            handles = phase_handles(shown[0])
            axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
        axes.set_yticks(range(len(shown)), [problem.topology.devices[device].name for device in shown])
        axes.set_title(f"{problem.graph.name} on {problem.topology.name}: {self.step_ns / 1e6:,.1f} ms", loc="left")
        return axes


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Step times and memory of ``k`` placements.

    * ``step_ns`` int64 ``(k,)``: always computed.
    * ``peak_bytes`` int64 ``(k, D)`` and ``overflow_bytes`` int64 ``(k,)``, the sum over the devices. If memory was
      skipped for a row (``below`` of :func:`simdev.sim.simulate_many`), its entries are -1, which is no amount of
      bytes: do not compare them. :attr:`known` tells the rows apart, and :attr:`fits` is False for unknown rows.
    """

    step_ns: np.ndarray
    peak_bytes: np.ndarray
    overflow_bytes: np.ndarray

    @property
    def known(self) -> np.ndarray:
        """bool ``(k,)``: True for rows whose peaks and overflow were computed."""
        return self.overflow_bytes >= 0

    @property
    def fits(self) -> np.ndarray:
        """bool ``(k,)``: True for placements that are known to fit in memory."""
        return self.overflow_bytes == 0
