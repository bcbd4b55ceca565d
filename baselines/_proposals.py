"""A search that simulates only the best of several drawn moves, by a score that was learned from other problems."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from simdev.baselines._critical import critical
from simdev.baselines._guided import EXCHANGES, Guided
from simdev.baselines._search import Candidate, SearchState, weight_of_unit, with_spacious_hosts
from simdev.baselines._units import choices, used_devices
from simdev.errors import InvalidInput
from simdev.placers.budget import Budget
from simdev.problem.graph_file import read_npz
from simdev.problem.problem import Problem

MOST_DEVICES = 64  # sets of devices are the bits of a word
DRAWS = 10  # random numbers that a drawn move takes
SHARES = (0.15, 0.25, 0.25, 0.1)  # of moves of an op of the critical path, along its transfers, across a cut, swaps
SETS = 2  # sets of drawn moves without a new placement after which the moves of Guided take over
EXPLORE = 0.1  # share of the evaluations that go to a random one of the drawn moves
HIDDEN = 32  # units of each layer of the network
CHOICES = ("learned", "untrained", "uniform", "estimate")  # how one of the drawn moves is chosen
# What the network knows of a move. Times and loads are shares of the step time; *here* is the device of the first unit
# that moves, *there* its target; an op is urgent if little slack is left for it, and counts the less the more is left.
FEATURES = (
    "ops moved", "units moved", "time here", "change of time", "urgent time", "time on critical paths",
    "urgent waiting for the device", "transfers saved", "transfers added", "urgent transfers saved",
    "urgent transfers added", "number saved", "number added", "inputs late", "earlier start", "outputs late",
    "time while there is busy", "time while here is busy", "idle time there", "span of the moved ops", "load here",
    "load there", "load there after less load here", "largest load", "mean load", "change of the largest load",
    "memory there after", "memory here", "overflows now", "memory moved", "neighbours here", "neighbours there",
    "transfers saved less added", "urgent transfers saved less added", "longest urgent wait", "op of the path",
    "along a transfer of the path", "across a cut", "swap", "any group", "a module", "a run", "depth of the module",
    "begin", "transfers of the step", "devices used",
)  # fmt: skip
ESTIMATE = FEATURES.index("urgent waiting for the device")


class Network(NamedTuple):
    """The weights of a score: the mean and the inverse deviation of the features, two layers of rectified units, and
    the last layer. All float64."""

    mean: np.ndarray
    scale: np.ndarray
    first: np.ndarray
    first_bias: np.ndarray
    second: np.ndarray
    second_bias: np.ndarray
    last: np.ndarray


class ProblemArrays(NamedTuple):
    """What the kernels read of a problem, the same for all placements."""

    n_devices: int
    n_usable: int
    device_op_ns: np.ndarray
    transfer_ns: np.ndarray
    pair_class: np.ndarray
    input_ptr: np.ndarray
    inputs: np.ndarray
    output_ptr: np.ndarray
    consumer_ptr: np.ndarray
    consumers: np.ndarray
    producer: np.ndarray
    tensor_bytes: np.ndarray
    unit_of_op: np.ndarray
    unit_ptr: np.ndarray
    unit_ops: np.ndarray
    unit_bytes: np.ndarray
    capacity: np.ndarray
    allowed: np.ndarray
    edge_source: np.ndarray
    edge_target: np.ndarray
    cumulative: np.ndarray
    order: np.ndarray
    rank: np.ndarray
    group_of: np.ndarray
    group_ptr: np.ndarray
    group_units: np.ndarray
    atom_of: np.ndarray
    atom_ptr: np.ndarray
    atom_units: np.ndarray


class ScheduleView(NamedTuple):
    """What the kernels read of a placement and its schedule."""

    step: int
    devices: np.ndarray
    op_devices: np.ndarray
    start: np.ndarray
    finish: np.ndarray
    slack: np.ndarray
    wait: np.ndarray
    busy: np.ndarray
    load: np.ndarray
    peak: np.ndarray
    overflows: bool
    comm: float
    path_units: np.ndarray
    sends: np.ndarray


class MoveMarks(NamedTuple):
    """Marks that tell what the present move has seen, and the target of each op that it moves, or -1."""

    mark: np.ndarray
    unit_stamps: np.ndarray
    tensor_stamps: np.ndarray
    moved_to: np.ndarray


def _rows(label: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(number, ptr, members)``: consecutive numbers for the labels, and the members of each as CSR."""
    number = np.unique(label, return_inverse=True)[1].astype(np.int64)
    members = np.argsort(number, kind="stable").astype(np.int64)
    ptr = np.searchsorted(number[members], np.arange(number.max(initial=-1) + 2)).astype(np.int64)
    return number, ptr, members


def kernel_graph(problem: Problem, search: Guided) -> ProblemArrays:
    """The :class:`ProblemArrays` of a problem, from the neighbourhood of ``search``."""
    graph, costs, around = problem.graph, problem.costs, search.around
    depths = [_rows(groups) for groups in around.modules]
    longest = max(len(ptr) for _, ptr, _ in depths)
    padded = [np.concatenate([ptr, np.full(longest - len(ptr), ptr[-1])]) for _, ptr, _ in depths]
    _, unit_ptr, unit_ops = _rows(graph.unit_of_op)
    atom_of, atom_ptr, atom_units = _rows(around.atoms)
    bits = np.uint64(1) << np.arange(len(search.allowed), dtype=np.uint64)
    source, target = graph.unit_of_op[search.source].astype(np.int64), graph.unit_of_op[search.target].astype(np.int64)
    apart = source != target
    return ProblemArrays(
        len(search.allowed),
        len(used_devices(search.allowed)),
        np.ascontiguousarray(costs.device_op_ns),
        costs.transfer_ns,
        costs.pair_class,
        graph.input_ptr,
        graph.inputs,
        graph.output_ptr,
        graph.consumer_ptr,
        graph.consumers,
        graph.tensor_producer,
        graph.tensor_bytes,
        graph.unit_of_op.astype(np.int64),
        unit_ptr,
        unit_ops,
        problem.unit_persistent_bytes,
        np.maximum(search.capacity, 1),
        (search.allowed * bits[:, None]).sum(axis=0, dtype=np.uint64),
        source[apart],
        target[apart],
        np.cumsum(weight_of_unit(problem)),
        around.order.astype(np.int64),
        around.rank.astype(np.int64),
        np.stack([number for number, _, _ in depths]),
        np.stack(padded),
        np.stack([members for _, _, members in depths]),
        atom_of,
        atom_ptr,
        atom_units,
    )


class Proposed(Guided):
    """The search of :class:`~simdev.baselines._guided.Guided`, with moves that a score chooses.

    For each evaluation, ``width`` moves are drawn, and the one with the best score is simulated. Placements that the
    search has simulated are not simulated again. ``choice`` says what the score is: that of ``network`` (``learned``,
    ``untrained``), one feature (``estimate``), or nothing (``uniform``: the first drawn move is simulated).
    """

    def __init__(
        self, problem: Problem, allowed: np.ndarray, budget: Budget, rng, *, network: Network | None = None,
        choice: str = "uniform", width: int = 1,
    ):  # fmt: skip
        from simdev.baselines import _proposal_kernels as kernels

        # The network was trained with these hosts only.
        super().__init__(problem, allowed & with_spacious_hosts(problem, choices(problem)), budget, rng)
        self.kernels, self.network, self.choice = kernels, network, choice
        self.width = width
        self.known, graph = kernel_graph(problem, self), problem.graph
        self.work = MoveMarks(
            np.zeros(1, np.int64),
            np.zeros(graph.n_units, np.int64),
            np.zeros(graph.n_tensors, np.int64),
            np.full(graph.n_ops, -1, np.int64),
        )
        self.shares = np.cumsum(SHARES)
        self.ptr = np.zeros(width + 1, np.int64)
        self.units, self.targets = np.empty((2, 2 * width * graph.n_units), np.int64)
        self.features = np.zeros((width, len(FEATURES)))
        self.changes, self.scores = np.zeros(width, np.uint64), np.zeros(width)
        self.sight: ScheduleView | None = None

    def others(self) -> list[Guided]:
        """Single units, and all moves of ``local-search`` to all devices."""
        allowed = choices(self.problem, hosts=True)
        return [*super().others(), Guided(self.problem, allowed, self.budget, self.rng, visited=self.visited)]

    def see(self, state: SearchState) -> ScheduleView:
        """The schedule of ``state`` and what follows from it. The placement has been evaluated before."""
        ops = np.ascontiguousarray(state.devices[self.unit_of_op])
        schedule = self._schedule(ops, None)
        path, n, n_devices = critical(self.problem, ops, schedule), len(ops), len(self.allowed)
        slack, wait = np.zeros(n, np.int64), np.zeros(n, np.int64)
        busy, load = np.zeros((n_devices, self.kernels.BINS)), np.zeros(n_devices, np.int64)
        self.kernels.look(
            self.known, ops, schedule.op_start, schedule.op_finish, schedule.step_ns, schedule.transfer_tensor,
            schedule.transfer_target, schedule.transfer_finish, slack, wait, busy, load,
        )  # fmt: skip
        return ScheduleView(
            int(schedule.step_ns),
            state.devices.astype(np.int64),
            ops.astype(np.int64),
            schedule.op_start,
            schedule.op_finish,
            slack,
            wait,
            busy,
            load,
            np.asarray(schedule.peak_bytes),
            bool(schedule.overflow_bytes.any()),
            float((schedule.transfer_finish - schedule.transfer_start).sum()) / n_devices,
            self.unit_of_op[path.ops].astype(np.int64),
            path.sends,
        )

    def draw(self, state: SearchState) -> int:
        """Draw moves from ``state`` and describe them; return their number."""
        if self.sight is None or not np.array_equal(self.sight.devices, state.devices):
            self.sight = self.see(state)
        return self.kernels.moves_and_features(
            self.known, self.sight, self.rng.random((self.width, DRAWS)), self.shares, self.work, self.ptr, self.units,
            self.targets, self.features, self.visited.codes, self.changes,
        )  # fmt: skip

    def rate(self, count: int) -> np.ndarray:
        """The scores of the first ``count`` drawn moves, float64 ``(count,)``."""
        if self.network is None:
            self.scores[:count] = self.features[:count, ESTIMATE]
        else:
            self.kernels.scores(self.features, count, *self.network, self.scores)
        return self.scores[:count]

    def moved(self, devices: np.ndarray, row: int) -> np.ndarray:
        """``devices`` after the drawn move ``row``."""
        answer, part = devices.copy(), slice(self.ptr[row], self.ptr[row + 1])
        answer[self.units[part]] = self.targets[part]
        return answer

    def _trace(self, state: SearchState) -> None:
        """Nothing: :meth:`see` traces the path of each state."""

    def _propose(self, state: SearchState) -> Candidate | None:
        self.kind = -1
        packing = self.tight and self.rng.random() < EXCHANGES
        code, known = self.visited.code(state.devices, state.bias), self.visited.known
        for _ in range(0 if packing else SETS):
            count = self.draw(state)
            new = [row for row in range(count) if code ^ int(self.changes[row]) not in known]
            while new:
                row = self._chosen(count, new)
                devices = self.moved(state.devices, row)
                if not self._too_large(state.devices, devices, self.units[self.ptr[row] : self.ptr[row + 1]]):
                    self.visited.add(code ^ int(self.changes[row]))
                    return Candidate(devices, state.bias)
                new.remove(row)
        return super()._propose(state)

    def _chosen(self, count: int, new: list[int]) -> int:
        """One of the rows ``new``: a random one now and then, else the one with the best score."""
        if self.rng.random() < EXPLORE or self.choice == "uniform":
            return new[0]
        return max(new, key=self.rate(count).__getitem__)


def read_network(path: Path) -> Network:
    """The network of a file of weights. Raises :class:`InvalidInput` unless every array is there, finite, and of the
    right shape. Nothing in the file is executed."""
    arrays = read_npz(path, "f", 2)
    shapes = ((len(FEATURES),),) * 2 + ((len(FEATURES), HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN,))
    for name, shape in zip(Network._fields, shapes, strict=True):
        if name not in arrays:
            raise InvalidInput("missing", source=path, field=name)
        array = arrays[name]
        if array.dtype != np.float64 or array.shape != shape or not np.isfinite(array).all():
            raise InvalidInput(f"expected finite float64 {shape}", source=path, field=name)
    return Network(*(arrays[name] for name in Network._fields))


def random_network(rng: np.random.Generator) -> Network:
    """A network as it is before training, for features with the mean 0.2 and the deviation 0.25."""
    first, second, last = (
        rng.normal(size=(rows, *columns)) * np.sqrt(gain / rows)
        for rows, columns, gain in ((len(FEATURES), (HIDDEN,), 2), (HIDDEN, (HIDDEN,), 2), (HIDDEN, (), 1))
    )
    mean, scale = np.full(len(FEATURES), 0.2), np.full(len(FEATURES), 4.0)
    return Network(mean, scale, first, np.zeros(HIDDEN), second, np.zeros(HIDDEN), last)
