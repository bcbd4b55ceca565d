"""The load relaxation: the least possible largest load of a device, with each unit divided over devices at will."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simdev.problem.problem import Problem


@dataclass(frozen=True, eq=False)
class LoadModel:
    """The relaxation as a linear program, with equal units as classes and equal devices as groups.

    ``work`` int64 ``(C, G)`` in ns (-1: no kernel), ``size`` int64 ``(C, G)`` in persistent bytes, ``count`` int64
    ``(C,)`` units; for each group the device numbers, the sum of their slots and the sum of their memory. Equal devices
    may form a group because averaging a division over them does not raise the largest load.
    """

    groups: list[list[int]]
    slots: list[int]
    memory: list[int]
    work: np.ndarray
    size: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, problem: Problem, unit_ns: np.ndarray | None = None) -> LoadModel:
        """The relaxation of a problem; ``unit_ns`` int64 ``(D, units)`` counts instead of ``problem.unit_op_ns``."""
        unit_ns = problem.unit_op_ns if unit_ns is None else unit_ns
        graph, topology = problem.graph, problem.topology
        slots = np.ones_like(topology.slots) if problem.rules.runtime == "eager" else topology.slots
        alike: dict[tuple, list[int]] = {}
        for device in range(topology.n_devices):
            key = (
                problem.costs.device_row[device],
                topology.memory_bytes[device],
                slots[device],
                topology.granularity[device],
            )
            alike.setdefault(key, []).append(device)
        groups = list(alike.values())
        first = [devices[0] for devices in groups]
        size = np.zeros((graph.n_units, len(groups)), np.int64)
        for column, grain in enumerate(topology.granularity[first]):
            np.add.at(size[:, column], graph.unit_of_op, -(-graph.op_persistent_bytes // grain) * grain)
        rows = np.concatenate([unit_ns[first].T, size], axis=1)
        rows, count = np.unique(rows, axis=0, return_counts=True)
        return cls(
            groups,
            [int(slots[devices].sum()) for devices in groups],
            [int(topology.memory_bytes[devices].sum()) for devices in groups],
            rows[:, : len(groups)],
            rows[:, len(groups) :],
            count,
        )

    def priced(self, op_ns: np.ndarray, price: list[int]) -> tuple[np.ndarray, int, int]:
        """The least price of each op over the groups, int64 ``(n,)``, the price of a ns of all slots, and the highest
        price of a ns of one. ``op_ns`` int64 ``(D, n)``: durations of the ops, -1 without a kernel. All zero if the sum
        of all prices would not fit.

        By weak duality, ops whose prices sum to ``P`` take at least ``P`` over the price of all slots, in ns.
        """
        durations = op_ns[[devices[0] for devices in self.groups]]
        # The prices get so few bits that no sum of priced work reaches 2**62.
        most_price = (1 << 62) // max(1, int(np.maximum(durations, 0).max(axis=0).astype(object).sum()))
        most = max(price)
        if not most or not most_price:
            return np.zeros(op_ns.shape[1], np.int64), 1, 0
        whole = np.array([unit * min(most_price, 1 << 40) // most for unit in price], np.int64)
        never = np.iinfo(np.int64).max
        cost = np.where(durations >= 0, np.maximum(durations, 0) * whole[:, None], never).min(axis=0)
        return cost, sum(int(unit) * slots for unit, slots in zip(whole, self.slots, strict=True)), int(whole.max())

    def without_memory(self) -> LoadModel:
        return replace(self, size=np.zeros_like(self.size))

    def prices(self) -> tuple[list[int], list[int]] | None:
        """Prices of load and of memory per group, as whole numbers; None if the memory does not suffice."""
        from scipy.optimize import linprog
        from scipy.sparse import coo_array, csr_array, vstack

        work, size, count = self.work, self.size, self.count
        n_classes, n_groups = work.shape
        row, column = np.nonzero(work >= 0)
        variable = np.arange(len(row))
        # Loads and memories are scaled to about 1, because the solver's tolerances are absolute.
        unit_ns = max(1.0, float((np.where(work < 0, 0, work).max(axis=1) * count).sum()))
        unit_bytes = np.array([max(1.0, float(limit)) for limit in self.memory])
        shape = (n_groups, len(row) + 1)
        load = coo_array((work[row, column] * count[row] / unit_ns, (column, variable)), shape)
        share = coo_array((-np.array(self.slots, float), (np.arange(n_groups), np.full(n_groups, len(row)))), shape)
        need = coo_array((size[row, column] * count[row] / unit_bytes[column], (column, variable)), shape)
        whole = coo_array((np.ones(len(row)), (row, variable)), (n_classes, len(row) + 1))
        cost = np.zeros(len(row) + 1)
        cost[-1] = 1
        limits = np.concatenate([np.zeros(n_groups), np.array(self.memory, float) / unit_bytes])
        result = linprog(
            cost,
            A_ub=csr_array(vstack([load + share, need])),
            b_ub=limits,
            A_eq=csr_array(whole),
            b_eq=np.ones(n_classes),
        )
        if result.status == 2:
            return None
        prices = np.maximum(0, -result.ineqlin.marginals)
        load_price = [round(price * 2**60) for price in prices[:n_groups]]
        memory_price = [
            round(price * unit_ns / scale * 2**60) for price, scale in zip(prices[n_groups:], unit_bytes, strict=True)
        ]
        return load_price, memory_price

    def dual_value(self, load_price: list[int], memory_price: list[int], *, whole: bool = True) -> int:
        """The bound by weak duality: each unit costs at least its cheapest price; the price of the memory is
        subtracted. Rounded up, because step times are ``whole``; else, for averages, down."""
        groups = range(len(self.slots))
        scale = sum(price * slot for price, slot in zip(load_price, self.slots, strict=True))
        if scale <= 0:
            return 0
        total = -sum(price * limit for price, limit in zip(memory_price, self.memory, strict=True))
        rows = zip(self.work.tolist(), self.size.tolist(), self.count.tolist(), strict=True)
        for times, sizes, units in rows:
            total += units * min(load_price[g] * times[g] + memory_price[g] * sizes[g] for g in groups if times[g] >= 0)
        return max(0, -(-total // scale) if whole else total // scale)
