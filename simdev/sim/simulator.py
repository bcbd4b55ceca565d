"""Exact step times after a few moves, for searches that change a placement step by step."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike

from simdev.analysis.levels import b_level, fastest_durations
from simdev.errors import InvalidInput
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.fast import NO_LIMIT, new_buffers, run_rows
from simdev.sim.inputs import problem_arrays
from simdev.sim.kernels.state import FIFO_LOOP, SHIFT, Inputs

AT_ONCE = 64  # full runs in one call, each with a copy of the placement


class Simulator:
    """A placement, its exact step time and memory, and the exact step time after moves.

    >>> simulator = Simulator(problem, placement)                                               # doctest: +SKIP
    >>> if simulator.move(unit, device) < best and simulator.overflow_bytes == 0:               # doctest: +SKIP
    ...     simulator.accept()
    ... else:
    ...     simulator.undo()

    A unit is a placement unit: an op with its colocation group (``problem.graph.unit_of_op``). Every result is bit for
    bit that of :func:`simdev.sim.simulate`. Under the default rules, only the part of the schedule that a move changes
    is simulated, and memory is computed on demand. Under other rules, or with more than 2^20 ops, every result takes a
    full run. Raises :class:`InvalidInput` if the placement or a move breaks the contract of :meth:`Placement.check`.
    """

    def __init__(self, problem: Problem, placement: Placement):
        placement.check(problem)
        self.problem, self._priority = problem, placement.priority
        self._devices = placement.devices.astype(np.uint32)  # includes moves that are not yet accepted
        self._accepted = self._devices.copy()
        self._moved: list[np.ndarray] = []
        self._inputs, graph = inputs_of_runs(problem), problem.graph
        self._unit_ops = np.argsort(graph.unit_of_op, kind="stable").astype(np.uint32)
        self._unit_ptr = np.searchsorted(graph.unit_of_op[self._unit_ops], np.arange(graph.n_units + 1))
        self._windows = has_windows(problem)
        self._buffers = new_buffers(problem)
        if self._windows:
            self._prepare()
        self._step: int | None
        self._peak: Any  # int64 (D,), or None until it is asked for
        self._forget()
        self._rebase()

    @property
    def placement(self) -> Placement:
        """The placement, including moves that are not yet accepted."""
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
        """Bytes above capacity under :attr:`placement`, summed over the devices; 0 if it fits."""
        return int(np.maximum(self.peak_bytes - self.problem.topology.memory_bytes, 0).sum())

    def move(self, units: ArrayLike, devices: ArrayLike, *, below: int = NO_LIMIT) -> int:
        """Move one unit, or several at once; return the step time of the placement with all moves since :meth:`accept`.

        ``units`` and ``devices`` are whole numbers, or int ``(k,)`` each. If the step time is ``below`` (ns) or more,
        the result may be any lower bound of it that is at least ``below``, which is found faster.
        """
        units, devices = self._checked(units, devices)
        ops, size = self._ops_of(units)
        old = self._devices[ops]
        self._devices[ops] = np.repeat(devices, size)
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
        """int64 ``(k,)``: the step time after each of ``k`` moves by itself, ``units`` and ``devices`` int ``(k,)``.
        The placement stays as it is, but moves that are not yet accepted are accepted first. ``below``: see
        :meth:`move`."""
        units, devices = self._checked(units, devices)
        if self._moved:
            self.accept()
        if not (self._windows and self._inputs.all_routed):
            return np.array([self._try(unit, device) for unit, device in zip(units, devices, strict=True)], np.int64)
        from simdev.sim.kernels.incremental import FULL_RUN, steps_after

        if not self._recorded:
            self._record()
        ops, size = self._ops_of(units)
        step, ptr = np.empty(len(units), np.int64), np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
        targets = np.repeat(devices, size)
        steps_after(*self._state(), ptr, ops, targets, below, step)
        left = np.flatnonzero(step == FULL_RUN)
        for rows in np.split(left, range(AT_ONCE, len(left), AT_ONCE)) if len(left) else ():
            tried = np.tile(self._accepted, (len(rows), 1))
            for placement, row in zip(tried, rows.tolist(), strict=True):
                moved = slice(ptr[row], ptr[row + 1])
                placement[ops[moved]] = targets[moved]
            step[rows] = self._runs(tried)[0]
            self._in_buffers = False
        return step

    def accept(self) -> None:
        """Keep the moves made so far; :meth:`undo` no longer reverts them."""
        if self._moved:
            self._accepted[:] = self._devices
            self._moved = []
            self._rebase()

    def undo(self) -> None:
        """Revert all moves since the last :meth:`accept`."""
        if self._moved:
            self._devices[:] = self._accepted
            self._moved = []
            self._forget()
            self._step, self._peak = self._accepted_step, self._accepted_peak

    def _prepare(self) -> None:
        self._move_inputs, self._base, self._work = new_moves(self.problem)
        self._pause = self._work.tally["pause"]  # the next moves that are full runs
        self._one_move, self._one_step = np.zeros(2, np.int64), np.empty(1, np.int64)

    def _state(self) -> tuple:
        """The first arguments of the kernels."""
        return self._move_inputs, self._base, self._work, self._accepted, self._devices

    def _forget(self) -> None:
        self._step, self._peak, self._in_buffers = None, None, False

    def _rebase(self) -> None:
        """Let the following moves start from the present placement."""
        self._recorded = False
        if self._windows and not self._pause[0]:
            self._record()
        self._accepted_step, self._accepted_peak = self.step_ns, self._peak

    def _record(self) -> None:
        """Record the run of the accepted placement for the kernel of the moves."""
        from simdev.sim.kernels.base_run import record

        if not self._in_buffers or self._moved:
            self._run(self._accepted)
        timeline, workspace = self._buffers
        record(
            self._move_inputs,
            self._accepted,
            timeline,
            workspace.state,
            workspace.base,
            workspace.line,
            self._base,
            self._work,
        )
        self._recorded = True
        if not self._moved:
            self._step, self._in_buffers = int(self._base.size["step_ns"][0]), True

    def _run(self, devices: np.ndarray) -> int:
        """The step time of one full run, which stays in the buffers."""
        step = int(self._runs(devices[None])[0][0])
        self._in_buffers = devices is self._devices
        return step

    def _runs(self, placements: np.ndarray, below: int = 0, known: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Step times of full runs, and peaks of those whose step time is less than ``below``. The last run stays in the
        buffers. ``known``: there is one run, and it is in the buffers already."""
        from simdev.sim.kernels.fifo import run_many_fifo

        k = len(placements)
        step, overflow = np.empty(k, np.int64), np.empty(k, np.int64)
        peak = np.empty((k, self.problem.topology.n_devices), np.int64)
        run_many_fifo(self._inputs, placements, 0, k, below, *self._buffers, step, peak, overflow, known)
        return step, peak

    def _step_after(self, below: int) -> int:
        """The step time of the present placement, from the recorded run of the accepted one if that may be faster."""
        if not self._moved:
            return self._run(self._devices)
        from simdev.sim.kernels.incremental import FULL_RUN, MANY, steps_after

        ops = self._moved[0] if len(self._moved) == 1 else np.unique(np.concatenate(self._moved))
        ops = ops[self._devices[ops] != self._accepted[ops]]
        if not len(ops):
            return self._accepted_step
        if len(ops) > len(self._devices) >> MANY:
            return self._run(self._devices)
        if self._pause[0]:
            self._pause[0] -= 1
            return self._run(self._devices)
        if not self._recorded:
            self._record()
        step, targets = self._one_step, self._devices[ops]
        self._one_move[1] = len(ops)
        steps_after(*self._state(), self._one_move, ops, targets, below, step)
        self._devices[ops] = targets
        return self._run(self._devices) if step[0] == FULL_RUN else int(step[0])

    def _sweep(self) -> None:
        """Compute the peaks of the present placement."""
        if not self._windows:
            self._full_run()
            return
        self._peak = self._runs(self._devices[None], NO_LIMIT, self._in_buffers)[1][0]
        self._in_buffers = True
        if not self._moved:
            self._accepted_peak = self._peak

    def _try(self, unit: int, device: int) -> int:
        step = self.move(unit, device)
        self.undo()
        return step

    def _checked(self, units: ArrayLike, devices: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """The moves as int64 and uint32 arrays. Raises :class:`InvalidInput` unless there are as many units as devices,
        all of them exist, and the devices have kernels for the units."""
        graph, topology = self.problem.graph, self.problem.topology
        units, devices = np.atleast_1d(np.asarray(units)), np.atleast_1d(np.asarray(devices))
        if units.shape != devices.shape or units.ndim != 1 or {units.dtype.kind, devices.dtype.kind} - set("iu"):
            raise InvalidInput("expected as many units as devices, whole numbers", source="moves")
        here = (units >= 0) & (units < graph.n_units) & (devices >= 0) & (devices < topology.n_devices)
        if not (here.all() and (self.problem.unit_op_ns[devices, units] >= 0).all()):
            self._refuse(units, devices)
        return units.astype(np.int64), devices.astype(np.uint32)

    def _refuse(self, units: np.ndarray, devices: np.ndarray) -> None:
        """Raise an error that names the first impossible move."""
        graph, topology = self.problem.graph, self.problem.topology
        for unit, device in zip(units.tolist(), devices.tolist(), strict=True):
            if not 0 <= unit < graph.n_units:
                raise InvalidInput(f"{graph.name} has no unit {unit}", source="move")
            if not 0 <= device < topology.n_devices:
                raise InvalidInput(f"{topology.name} has no device {device}", source="move")
            if self.problem.unit_op_ns[device, unit] < 0:
                name, device = graph.op_names[self._unit_ops[self._unit_ptr[unit]]], topology.devices[device].name
                raise InvalidInput(f"the unit of op {name!r} has no kernel on {device!r}", source="move")

    def _ops_of(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ops of ``units``, unit by unit, and the number of ops of each."""
        first = self._unit_ptr[units]
        size = self._unit_ptr[units + 1] - first
        end = np.cumsum(size)
        return self._unit_ops[np.arange(end[-1] if len(end) else 0) + np.repeat(first - end + size, size)], size

    def _full_run(self) -> int:
        step, peak, _ = run_rows(self.problem, self._devices[None], self._priority, *self._buffers)
        self._step, self._peak = int(step[0]), peak[0]
        return self._step


def has_windows(problem: Problem) -> bool:
    """Whether the kernel of moves (:mod:`simdev.sim.kernels.incremental`) serves the problem."""
    inputs = problem_arrays(problem)
    usual = inputs.loop == FIFO_LOOP and inputs.shift == SHIFT
    return usual and bool((problem.topology.slots == 1).all()) and problem.graph.n_ops > 0


def inputs_of_runs(problem: Problem) -> Inputs:
    """The inputs of the full runs that the kernel of moves reads. It reads a run in the order of its requests, so no
    send may be settled ahead of its turn."""
    inputs = problem_arrays(problem)
    return inputs._replace(alone=np.zeros_like(inputs.alone))


def new_moves(problem: Problem) -> tuple[Any, Any, Any]:
    """What the kernel of moves reads and writes: its inputs, a base that is not recorded yet, and its work."""
    from simdev.sim.kernels.move_state import new_base_run, new_move_work

    graph, topology = problem.graph, problem.topology
    sizes = graph.n_ops, graph.n_edges, topology.n_devices, len(topology.channels)
    if problem not in _MOVE_INPUTS:
        _MOVE_INPUTS[problem] = _move_inputs(problem)
    return _MOVE_INPUTS[problem], new_base_run(*sizes), new_move_work(*sizes)


_MOVE_INPUTS: WeakKeyDictionary = WeakKeyDictionary()  # shared by all simulators of a problem


def _move_inputs(problem: Problem) -> Any:
    """What the kernels of moves read of a problem, the same for every placement."""
    from simdev.sim.kernels.move_state import MoveInputs

    graph = problem.graph
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.input_ptr))
    tensor = np.repeat(np.arange(graph.n_tensors), np.diff(graph.consumer_ptr))
    edge = np.empty(graph.n_edges, np.uint32)
    edge[np.lexsort((graph.inputs, reader))] = np.lexsort((tensor, graph.consumers))
    producer = graph.tensor_producer[graph.inputs]
    is_source = np.diff(graph.input_ptr) == 0
    sources = np.flatnonzero(is_source)
    reads_other = np.zeros(graph.n_ops, bool)
    reads_other[reader[~is_source[producer]]] = True
    fastest = fastest_durations(problem)
    rest = np.append(fastest[sources], fastest[~is_source].min(initial=NO_LIMIT))
    inputs = problem_arrays(problem)
    return MoveInputs(
        **{name: getattr(inputs, name) for name in MoveInputs._fields if hasattr(inputs, name)},
        producer=producer.view(np.uint32),
        edge=edge,
        sources=sources.astype(np.uint32),
        rest_ns=np.minimum.accumulate(rest[::-1])[::-1].astype(np.int64),
        seeds=np.concatenate([np.flatnonzero(~reads_other & ~is_source), sources[::-1]]).astype(np.uint32),
        tail=b_level(graph, fastest) - fastest,
    )
