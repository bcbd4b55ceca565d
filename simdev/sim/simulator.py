"""Step times of placements that differ from the present one by a few moves, for searches."""

from __future__ import annotations

import numpy as np

from simdev.analysis import b_level, fastest_durations
from simdev.errors import InvalidInput
from simdev.placement import Placement
from simdev.problem import Problem
from simdev.sim.arrays import problem_arrays
from simdev.sim.fast import room, run_rows

NO_LIMIT = int(np.iinfo(np.int64).max)


class Simulator:
    """A placement, its exact step time and memory, and the exact step time after moves.

    >>> simulator = Simulator(problem, placement)                                               # doctest: +SKIP
    >>> if simulator.move(unit, device) < best and simulator.overflow_bytes == 0:               # doctest: +SKIP
    ...     simulator.accept()
    ... else:
    ...     simulator.undo()

    A unit is a placement unit: an op with its colocation group (``problem.graph.unit_of_op``). Every answer is bit for
    bit that of :func:`simdev.sim.simulate`. Under the default rules only the part of the schedule that a move changes
    is simulated; memory is worked out when it is asked for. Under other rules every answer is a full run.
    Raises :class:`InvalidInput` where the placement or a move breaks the contract of :meth:`Placement.check`.
    """

    def __init__(self, problem: Problem, placement: Placement):
        placement.check(problem)
        self.problem, self._priority = problem, placement.priority
        self._devices = placement.devices.astype(np.uint32)  # with the moves not yet accepted
        self._accepted = self._devices.copy()
        self._moved: list[np.ndarray] = []
        self._inputs = problem_arrays(problem)
        graph = problem.graph
        self._unit_ops = np.argsort(graph.unit_of_op, kind="stable").astype(np.uint32)
        self._unit_ptr = np.zeros(graph.n_units + 1, np.int64)
        np.cumsum(np.bincount(graph.unit_of_op, minlength=graph.n_units), out=self._unit_ptr[1:])
        self._windows = self._inputs.plain and bool((problem.topology.slots == 1).all()) and graph.n_ops > 0
        self._room = room(problem)
        if self._windows:
            self._prepare()
        self._forget()
        self._rebase()

    @property
    def placement(self) -> Placement:
        """The placement, with the moves not yet accepted."""
        return Placement(self._devices.astype(np.int32), self._priority)

    @property
    def step_ns(self) -> int:
        """Step time of :attr:`placement`."""
        if self._step is None:
            self._step = self._step_after(NO_LIMIT) if self._windows else self._full_run()
        return self._step

    @property
    def peak_bytes(self) -> np.ndarray:
        """int64 ``(D,)``: peak memory of :attr:`placement` per device."""
        if self._peak is None:
            self._sweep()
        return self._peak.copy()

    @property
    def overflow_bytes(self) -> int:
        """Bytes above capacity under :attr:`placement`, summed over devices: 0 is feasible."""
        return int(np.maximum(self.peak_bytes - self.problem.topology.memory_bytes, 0).sum())

    def move(self, unit: int, device: int, *, below: int = NO_LIMIT) -> int:
        """Move a unit; the step time of all moves since the last :meth:`accept`.

        Where the step time is ``below`` or more, the answer may be any lower bound of it that is at least ``below``,
        which takes less time to find.
        """
        self._check_move(unit, device)
        ops = self._unit_ops[self._unit_ptr[unit] : self._unit_ptr[unit + 1]]
        old = self._devices[ops[0]]
        self._devices[ops] = device
        if not self._inputs.all_routed:
            try:
                self.placement.check(self.problem, source="move")
            except InvalidInput:
                self._devices[ops] = old
                raise
        self._moved.append(ops)
        self._forget()
        if not self._windows:
            return self.step_ns
        step = self._step_after(below)
        if step < below:
            self._step = step
        return step

    def try_moves(self, units: np.ndarray, devices: np.ndarray, *, below: int = NO_LIMIT) -> np.ndarray:
        """int64 ``(k,)``: the step time after each of ``k`` moves alone, ``units`` and ``devices`` int ``(k,)``; none
        stays made. ``below`` as in :meth:`move`. Moves not yet accepted are accepted first."""
        units, devices = np.atleast_1d(np.asarray(units)), np.atleast_1d(np.asarray(devices))
        if units.shape != devices.shape or units.ndim != 1 or {units.dtype.kind, devices.dtype.kind} - set("iu"):
            raise InvalidInput("expected as many units as devices, whole numbers", source="moves")
        if self._moved:
            self.accept()
        graph = self.problem.graph
        bad = (units < 0) | (units >= graph.n_units) | (devices < 0) | (devices >= self.problem.topology.n_devices)
        bad[~bad] = self.problem.unit_op_ns[devices[~bad], units[~bad]] < 0
        for row in np.flatnonzero(bad)[:1]:
            self._check_move(int(units[row]), int(devices[row]))
        if not (self._windows and self._inputs.all_routed):
            return np.array([self._try(unit, device) for unit, device in zip(units, devices, strict=True)], np.int64)
        from simdev.sim._moves import steps_after

        step = np.empty(len(units), np.int64)
        size = np.diff(self._unit_ptr)[units]
        ptr = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
        ops = self._unit_ops[np.arange(ptr[-1]) + np.repeat(self._unit_ptr[units] - ptr[:-1], size)]
        steps_after(*self._state(), ptr, ops, np.repeat(devices.astype(np.uint32), size), below, step)
        self._in_room = False
        return step

    def accept(self) -> None:
        """Keep the moves: :meth:`undo` no longer takes them back."""
        if self._moved:
            self._accepted[:] = self._devices
            self._moved = []
            self._rebase()

    def undo(self) -> None:
        """Take back all moves since the last :meth:`accept`."""
        if self._moved:
            self._devices[:] = self._accepted
            self._moved = []
            self._forget()
            self._step, self._peak = self._accepted_step, self._accepted_peak

    def _prepare(self) -> None:
        from simdev.sim._moves import Graph, new_base, new_window

        graph, topology = self.problem.graph, self.problem.topology
        sizes = topology.n_devices, len(topology.channels)
        self._base = new_base(graph.n_ops, graph.n_edges, *sizes)
        self._window = new_window(graph.n_ops, graph.n_edges, *sizes)
        reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.input_ptr))
        tensor = np.repeat(np.arange(graph.n_tensors), np.diff(graph.consumer_ptr))
        edge = np.empty(graph.n_edges, np.uint32)
        edge[np.lexsort((graph.inputs, reader))] = np.lexsort((tensor, graph.consumers))
        producer = graph.tensor_producer[graph.inputs]
        is_source = np.diff(graph.input_ptr) == 0
        sources = np.flatnonzero(is_source)
        reads_other = np.zeros(graph.n_ops, bool)
        reads_other[reader[~is_source[producer]]] = True
        fastest = fastest_durations(self.problem)
        rest = np.append(fastest[sources], fastest[~is_source].min(initial=NO_LIMIT))
        self._graph = Graph(
            producer.view(np.uint32), edge, sources.astype(np.uint32),
            np.minimum.accumulate(rest[::-1])[::-1].astype(np.int64),
            np.flatnonzero(~reads_other).astype(np.uint32), b_level(graph, fastest) - fastest,
        )  # fmt: skip

    def _state(self) -> tuple:
        """What the kernels are called with."""
        return (
            self._inputs, self._graph, self._base, self._window, *self._room, self._accepted, self._devices,
        )  # fmt: skip

    def _forget(self) -> None:
        self._step, self._peak, self._in_room = None, None, False

    def _rebase(self) -> None:
        """Record the run of the present placement, which the following moves start from."""
        if self._windows:
            from simdev.sim._fifo import run_fifo
            from simdev.sim._moves import record

            if not self._in_room:
                run_fifo(self._inputs, self._devices, *self._room)
                self._in_room = True
            record(self._inputs, self._graph, self._devices, *self._room, self._base)
            self._step = int(self._base.step[0])
        self._accepted_step, self._accepted_peak = self.step_ns, self._peak

    def _step_after(self, below: int) -> int:
        """Step time of the present placement from the recorded run."""
        from simdev.sim._moves import steps_after

        ops = np.unique(np.concatenate([np.zeros(0, np.uint32), *self._moved]))
        ops = ops[self._devices[ops] != self._accepted[ops]]
        if not len(ops):
            return self._accepted_step
        step, targets = np.empty(1, np.int64), self._devices[ops]
        self._in_room = steps_after(*self._state(), np.array([0, len(ops)]), ops, targets, below, step)
        self._devices[ops] = targets
        return int(step[0])

    def _sweep(self) -> None:
        """Work out the peaks of the present placement."""
        if not self._windows:
            self._full_run()
            return
        from simdev.sim._fifo import run_fifo, sweep_fifo

        if not self._in_room:
            run_fifo(self._inputs, self._devices, *self._room)
            self._in_room = True
        self._peak = np.empty(self.problem.topology.n_devices, np.int64)
        sweep_fifo(self._inputs, self._devices, *self._room, self._peak)
        if not self._moved:
            self._accepted_peak = self._peak

    def _try(self, unit: int, device: int) -> int:
        step = self.move(int(unit), int(device))
        self.undo()
        return step

    def _check_move(self, unit: int, device: int) -> None:
        """Raise :class:`InvalidInput` unless the unit and the device exist and the device runs it."""
        graph, topology = self.problem.graph, self.problem.topology
        if not 0 <= unit < graph.n_units:
            raise InvalidInput(f"{graph.name} has no unit {unit}", source="move")
        if not 0 <= device < topology.n_devices:
            raise InvalidInput(f"{topology.name} has no device {device}", source="move")
        if self.problem.unit_op_ns[device, unit] < 0:
            name = graph.op_names[self._unit_ops[self._unit_ptr[unit]]]
            raise InvalidInput(
                f"the unit of op {name!r} has no kernel on {topology.devices[device].name!r}", source="move"
            )

    def _full_run(self) -> int:
        step, peak, _ = run_rows(self.problem, self._devices[None], self._priority, *self._room)
        self._step, self._peak = int(step[0]), peak[0]
        return self._step
