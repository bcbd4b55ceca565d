"""A search by moves on the critical path: of ops to other devices and, if the placement brings its order, of ops to
other places in the order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from simdev.baselines._climb import Neighbourhood
from simdev.baselines._critical import Critical, critical
from simdev.baselines._late import LateWalk
from simdev.baselines._order import ordered, path_keys, priority_of, start_keys
from simdev.baselines._payoff import Payoff
from simdev.baselines._search import (
    Candidate,
    SearchState,
    draw_device,
    layer_of_unit,
    longest_op,
    starts,
    weight_of_unit,
    with_spacious_hosts,
)
from simdev.baselines._units import capacities, choices, fitting_placements, unit_adjacency, used_devices
from simdev.baselines._walk import Walk, cheap
from simdev.placers.budget import Budget, Share
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

TRIES = 20  # draws in which moves to placements that cannot fit are left out
NOTHING_NEW = 100  # draws without a new placement after which a search ends
MOST_KNOWN = 1 << 20  # placements after which the list of known ones begins anew
PATIENCE = 600  # evaluations without a new best after which the search leaves the best by a few blind moves,
PATIENCE_PER_UNIT = 10  # or so many for each unit if that is less
KICKS = 3  # blind moves at most
TIGHT = 0.9  # share of all memory from which on persistent bytes make the problem one of packing
EXCHANGES = 0.5  # share of exchanges among the moves of such a problem
NEAR = 1.2  # in such a problem, step times up to so many times the best are accepted
DRAWN = 24  # units of a device among which an exchange is sought
COOLED = 0.02  # share of the mean slack that is left at the end of an annealing
ROUGH = 1.02  # what the search improves of a coarse search, as a multiple of the best given placement
MOST_NEIGHBOURS = 16  # of a unit, at which a cluster may grow
LONG = 1000  # evaluations from which on a search has time for large moves
SWEEPS, FEW_SWEEPS = 1, 0.25  # evaluations for each unit from which on single units have a search of their own
RACE = 3  # a race among searches gets one part in so many of the budget
PARTS = 8  # parts of the rest, after each of which another search may continue
HEAT = 0.002  # mean slack at the start of an annealing, as a share of the best step time
LEAST_GAIN = 0.001  # of the step time, in a part: with less, the search gives way
REFRESH = 40  # evaluations after which the critical path of a changed placement is traced again


class MoveShares(NamedTuple):
    """How often each kind of move is drawn before any has gained something; what gains more is drawn more often
    (:class:`~simdev.baselines._payoff.Payoff`).

    ``path``: a group around an op or a transfer of the critical path; ``cut``: around a tensor that is cut; ``swap``:
    two groups, or two layers, change places; ``group``: a module, a run of ops, or one unit, by time; ``unit``: any one
    unit; ``layer``: a layer with its forward, backward and update ops, wherever they are; ``phase``: what a layer does
    in one phase; ``cluster``: units of a device that are connected; ``host``: any of them to a host. ``order``: the
    share of moves of order among all, if the placement brings its order.
    """

    path: float = 0.15
    cut: float = 0.12
    swap: float = 0.06
    group: float = 0.15
    unit: float = 0.35
    layer: float = 0.06
    phase: float = 0.05
    cluster: float = 0.04
    host: float = 0.02
    order: float = 0.35


KINDS = MoveShares._fields[:-1]
SINGLE = MoveShares(path=0, cut=0, swap=0, group=0, unit=1, layer=0, phase=0, cluster=0, host=0)
GROUPS = MoveShares(path=0.4, cut=0.25, swap=0.1, group=0.23, unit=0, layer=0, phase=0, cluster=0)


class Visited:
    """The placements that the searches of one budget have simulated, so that none of them is simulated again.

    The number of a placement is the exclusive or of one random number for each unit on its device (Zobrist hashing)
    and, if the placement brings its order, of a number for the biases of the keys.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator):
        shape = problem.topology.n_devices, problem.graph.n_units
        self.codes = rng.integers(1 << 63, size=shape, dtype=np.uint64)
        self.known: set[int] = set()
        self._units = np.arange(shape[1])
        self._of: tuple[np.ndarray, np.ndarray, int] = np.empty(0), np.empty(0), 0  # the last state and its number

    def add(self, code: int) -> None:
        """Note that the placement of number ``code`` was simulated."""
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        self.known.add(code)

    def code(self, devices: np.ndarray, bias: np.ndarray) -> int:
        """The number of a state: unit ``devices`` int ``(units,)`` and the ``bias`` of its keys int64 ``(n,)``."""
        if self._of[0] is not devices or self._of[1] is not bias:
            code = int(np.bitwise_xor.reduce(self.codes[devices, self._units], initial=0))
            digest = hashlib.blake2b(bias.tobytes(), digest_size=8).digest() if bias.any() else b""
            self._of = devices, bias, code ^ int.from_bytes(digest, "little")
        return self._of[2]

    def change(self, units: np.ndarray, before: np.ndarray, after: np.ndarray) -> int:
        """What the code of a state changes by (exclusive or) if ``units`` move; int ``(k,)`` each."""
        return int(np.bitwise_xor.reduce(self.codes[before, units] ^ self.codes[after, units], initial=0))


class Guided:
    """Searches from a state by moves of units, alone or in groups. Where moves are cheaper than full runs
    (:mod:`simdev.baselines._walk`), only what a move changes is simulated."""

    near: np.ndarray  # bool (D, units): devices that a move without a given target draws from
    heat = 0.0  # of the annealing after the race, see improve()
    ends_late = False  # whether late acceptance follows the race instead

    def __init__(
        self, problem: Problem, allowed: np.ndarray, budget: Budget, rng, moves: MoveShares | None = None,
        visited: Visited | None = None,
    ):  # fmt: skip
        self.visited = visited or Visited(problem, rng)
        self.problem, self.graph, self.budget, self.rng = problem, problem.graph, budget, rng
        self.allowed, self.unit_of_op, self.moves = allowed, problem.graph.unit_of_op, moves or MoveShares()
        self.ordered, self.around = ordered(problem), Neighbourhood(problem, allowed)
        graph = problem.graph
        self.source, self.target = graph.edge_source.astype(np.int64), graph.consumers.astype(np.int64)
        self.path: Critical | None = None
        self.atom_label, self.atom_units = np.unique(self.around.atoms, return_index=True)
        self.atom_bytes = np.zeros(len(self.atom_label), np.int64)
        np.add.at(self.atom_bytes, np.searchsorted(self.atom_label, self.around.atoms), problem.unit_persistent_bytes)
        self.capacity = capacities(problem)
        self.host = np.ones(len(allowed), bool)
        self.host[list(problem.topology.accelerators)] = False
        self.near = allowed & ~(self.host[:, None] & (allowed & ~self.host[:, None]).any(axis=0))
        self.spacious = with_spacious_hosts(problem, self.near)
        usable = self.capacity[used_devices(self.spacious)].sum()
        self.tight = bool(self.atom_bytes.sum() > TIGHT * usable)
        if (self.spacious == self.near).all():
            self.spacious = allowed
        layer, phase = layer_of_unit(problem), graph.op_phase[longest_op(problem)]
        self.layer, self.in_phase = layer, layer * (int(phase.max(initial=0)) + 1) + phase
        self.members = {KINDS.index("layer"): _lists(self.layer), KINDS.index("phase"): _lists(self.in_phase)}
        self.weight = weight_of_unit(problem)
        self.cumulative = np.cumsum(self.weight)
        self.neighbours = unit_adjacency(problem)[:2]
        shares = self.moves._asdict()
        if not (self.host & allowed.any(axis=1)).any():
            shares["host"] = 0.0
        self.payoff, self.kind = Payoff(np.array([shares[kind] for kind in KINDS])), -1
        self.spill = False  # whether the present placement does not fit: then any move may go to a host
        self.most_over: float = np.inf  # bytes that a drawn placement may hold over memory
        self.held = problem.unit_persistent_bytes
        self.scarce = bool(self.held.sum() > self.capacity[used_devices(self.allowed)].min(initial=0))
        self._taken: tuple[np.ndarray, np.ndarray] = np.empty(0), np.empty(0)  # unit devices, and bytes held on each
        self.deck: list[int] = []  # units that single moves have not drawn since all were drawn
        self._cheap = cheap(problem) and budget.simulate is None and not self.ordered
        self._walk: Walk | None = None

    def others(self) -> list[Guided]:
        """The searches that take turns with this one; the first moves single units."""
        return [Guided(self.problem, self.allowed, self.budget, self.rng, SINGLE, self.visited)]

    # States

    def state(self, devices: np.ndarray, bias: np.ndarray | None = None) -> SearchState:
        """An evaluated state."""
        bias = np.zeros(self.graph.n_ops, np.int64) if bias is None else bias
        devices = np.asarray(devices, np.int32)
        self.visited.add(self.visited.code(devices, bias))
        return SearchState(devices, bias, self._evaluate(devices, bias, None))

    def begin(self, devices: np.ndarray, priority: np.ndarray | None = None) -> list[SearchState]:
        """States to start from: unit ``devices`` with the order by paths, with that of ``fifo``, and with
        ``priority``."""
        if not self.ordered:
            return [self.state(devices)] if self.budget.open else []
        ops = np.asarray(devices, np.int32)[self.unit_of_op]
        paths = path_keys(self.problem, ops)
        return [
            self.state(devices, keys - paths) for keys in start_keys(self.problem, ops, priority) if self.budget.open
        ]

    def placement(self, state: SearchState) -> Placement:
        """The placement of a state, with its priorities if the rules use them."""
        priority = self._priority(state.devices, state.bias) if self.ordered else None
        return Placement(state.devices[self.unit_of_op], priority)

    # The search

    def improve(self, start: SearchState, share: Share, heat: float = 0.0) -> SearchState:
        """Spend ``share`` of the budget on moves from ``start`` and return the best state.

        A move that does not make the placement worse is taken; in problems of packing, where few placements fit, also
        one that is little slower than the best. After :data:`PATIENCE` evaluations without a new best,
        the search returns to the best and leaves it by up to :data:`KICKS` moves that it takes blindly, also if the
        placement then does not fit: the following moves first make it fit again.

        With ``heat``, the search is annealing instead: a move that makes the step slower is taken, too, if a drawn
        slack covers it. The mean slack falls from ``heat`` times the best step time to :data:`COOLED` of that.
        """
        budget, rng, current, best, stale, seen = self.budget, self.rng, start, start, 0, -REFRESH
        used, elapsed, slack = budget.used, budget.elapsed, 0
        last, end = used + share.evaluations, elapsed + share.seconds
        patience, blind = min(PATIENCE, PATIENCE_PER_UNIT * self.graph.n_units), 0
        self.path = None
        while budget.open and budget.used < last and budget.elapsed < end:
            if stale >= patience and not heat:
                current, stale, blind, self.path = best, 0, int(rng.integers(1, KICKS + 1)), None
            if self.path is None and budget.used >= seen + REFRESH:
                self._trace(current)
                seen = budget.used
            self.spill = not current.score.fits
            over = current.score.overflow_bytes
            self.most_over = np.inf if blind or over is None else over
            candidate = self._propose(current)
            if candidate is None:
                return best
            if heat and current.score.fits:
                spent = max((budget.used - used) / share.evaluations, (budget.elapsed - elapsed) / share.seconds)
                slack = int(best.score.step_ns * heat * COOLED**spent * rng.exponential())
            below = None if blind or self.tight or not current.score.fits else current.score.step_ns + slack + 1
            found = self._score(current, candidate, below)
            stale += 1
            near = self.tight and found.fits and best.score.fits and found.step_ns <= best.score.step_ns * NEAR
            near |= current.score.fits and found.fits and found.step_ns <= current.score.step_ns + slack
            if self.kind >= 0:
                self.payoff.note(self.kind, _gain(current.score, found))
            if blind or near or found <= current.score:
                if self._walk is not None:
                    self._walk.accept()
                current, self.path = SearchState(candidate.devices, candidate.bias, found), None
                if found <= best.score:  # equal ones too: later moves start from where the others led
                    best, stale = current, 0 if found < best.score else stale
            elif self._walk is not None:
                self._walk.undo()
            blind = max(0, blind - 1)
        return best

    def _score(self, current: SearchState, candidate: Candidate, below: int | None) -> Score:
        """The score of a candidate that was drawn from ``current``; :class:`Walk` awaits what becomes of it."""
        if not self._cheap:
            return self._evaluate(candidate.devices, candidate.bias, below)
        if self._walk is None or not np.array_equal(self._walk.devices, current.devices):
            self._walk = Walk(self.problem, self.budget, current.devices, current.score)
        units = np.flatnonzero(candidate.devices != current.devices)
        return self._walk.move(units, candidate.devices[units], below=below)

    def _trace(self, state: SearchState) -> None:
        ops = state.devices[self.unit_of_op]
        priority = self._priority(state.devices, state.bias) if self.ordered else None
        self.path = critical(self.problem, ops, self._schedule(ops, priority))

    def _evaluate(self, devices, bias, below) -> Score:
        priority = self._priority(devices, bias) if self.ordered else None
        return self.budget.evaluate(devices[self.unit_of_op], priority=priority, below=below)

    def _priority(self, devices, bias) -> np.ndarray:
        return priority_of(path_keys(self.problem, devices[self.unit_of_op]) + bias)

    def _schedule(self, ops, priority):
        from simdev.sim import simulate

        return simulate(self.problem, Placement(ops, priority))

    # Moves

    def _propose(self, state: SearchState) -> Candidate | None:
        """A neighbour of ``state`` that no search has simulated; None if :data:`NOTHING_NEW` draws found none.

        If a draw gives a placement that is known, the next draw starts from that placement. A search of few units thus
        tries all its single moves, and then pairs of moves. The first :data:`TRIES` draws leave out placements whose
        persistent bytes alone exceed the memory by more than the present placement does.
        """
        self.kind = -1
        if self.ordered and self.rng.random() < self.moves.order:
            return self._reorder(state)
        start, code = state.devices, self.visited.code(state.devices, state.bias)
        for number in range(NOTHING_NEW):
            devices = self._move(start)
            if devices is None:
                continue
            units = np.flatnonzero(devices != state.devices)
            new = code ^ self.visited.change(units, state.devices[units], devices[units])
            if new in self.visited.known:
                start = devices
            elif number >= TRIES or not self._too_large(state.devices, devices, units):
                self.visited.add(new)
                return Candidate(devices, state.bias)
        return self._reorder(state) if self.ordered else None

    def _too_large(self, before: np.ndarray, after: np.ndarray, units: np.ndarray) -> bool:
        """Whether the persistent bytes of unit devices ``after`` exceed the memory by more than :attr:`most_over`.
        ``units`` int ``(k,)`` are those whose device differs from ``before``."""
        if not self.scarce or self.most_over == np.inf:
            return False
        if self._taken[0] is not before:
            self._taken = before, np.bincount(before, self.held, len(self.capacity))
        taken = self._taken[1].copy()
        np.subtract.at(taken, before[units], self.held[units])
        np.add.at(taken, after[units], self.held[units])
        return bool(np.maximum(taken - self.capacity, 0).sum() > self.most_over)

    def _next_unit(self) -> int:
        """A unit. Each is drawn once before any is drawn again, long ones rather early (weighted sampling without
        replacement: Efraimidis, Spirakis, Information Processing Letters 97(5), 2006)."""
        if not self.deck:
            self.deck = np.argsort(-self.rng.exponential(size=len(self.weight)) / self.weight).tolist()
        return self.deck.pop()

    def _move(self, devices: np.ndarray) -> np.ndarray | None:
        """A neighbour of unit ``devices``; None if the draw does not move anything."""
        if self.tight and self.rng.random() < EXCHANGES:
            self.kind = -1
            return self._exchange(devices)
        self.kind = self.payoff.draw(self.rng)
        name = KINDS[self.kind]
        if name == "path" and self.path is not None:
            return self._move_on_path(devices, self.path)
        if name == "cut" and len(self.source):
            ops = devices[self.unit_of_op]
            for edge in self.rng.integers(len(self.source), size=TRIES).tolist():
                if ops[self.source[edge]] != ops[self.target[edge]]:
                    break
            return self._across(devices, int(self.source[edge]), int(self.target[edge]))
        if name == "swap":
            return self._swap(devices)
        if name == "unit":
            return self._moved(devices, np.array([self._next_unit()]))
        pivot = int(np.searchsorted(self.cumulative, self.rng.random() * self.cumulative[-1], side="right"))
        units, target = self._group(name, min(pivot, len(devices) - 1), devices), -1
        if name == "host":
            target = int(self.rng.choice(np.flatnonzero(self.host & self.allowed.any(axis=1))))
        return self._moved(devices, units, target)

    def _group(self, name: str, pivot: int, devices: np.ndarray) -> np.ndarray:
        """The units that a move of this kind takes along with ``pivot``."""
        if name == "host":
            name = ("unit", "layer", "group")[int(self.rng.integers(3))]
        if name in ("layer", "phase"):
            ptr, units, label = self.members[KINDS.index(name)]
            return units[ptr[label[pivot]] : ptr[label[pivot] + 1]]
        if name == "cluster":
            return self._cluster(pivot, devices)
        if name == "unit":
            return np.array([pivot])
        return self.around.members(self.rng, pivot, devices)

    def _cluster(self, pivot: int, devices: np.ndarray) -> np.ndarray:
        """Up to 64 connected units of the device of ``pivot``, grown from it over random edges."""
        ptr, neighbour = self.neighbours
        size, home, found = 2 ** int(self.rng.integers(1, 7)), devices[pivot], [pivot]
        seen, draws = {pivot}, self.rng.random(2 * size).tolist()
        for draw in draws:
            unit = found[int(draw * len(found))]
            for other in neighbour[ptr[unit] : ptr[unit + 1]][:MOST_NEIGHBOURS].tolist():
                if other not in seen and devices[other] == home and len(found) < size:
                    seen.add(other)
                    found.append(other)
        return np.array(found)

    def _move_on_path(self, devices: np.ndarray, path: Critical) -> np.ndarray | None:
        if len(path.sends) and self.rng.random() < 0.6:
            tensor, there = path.sends[int(self.rng.integers(len(path.sends)))].tolist()
            readers = self.graph.consumers[self.graph.consumer_ptr[tensor] : self.graph.consumer_ptr[tensor + 1]]
            readers = readers[devices[self.unit_of_op[readers]] == there]
            if len(readers):
                reader = int(readers[int(self.rng.integers(len(readers)))])
                return self._across(devices, int(self.graph.tensor_producer[tensor]), reader)
        unit = int(self.unit_of_op[path.ops[int(self.rng.integers(len(path.ops)))]])
        return self._moved(devices, self.around.members(self.rng, unit, devices))

    def _across(self, devices: np.ndarray, maker: int, reader: int) -> np.ndarray | None:
        """Bring the maker of a tensor to its reader, or the reader to the maker, with some units around it."""
        one, other = self.unit_of_op[maker], self.unit_of_op[reader]
        if self.rng.random() < 0.5:
            one, other = other, one
        if devices[one] == devices[other]:
            return None
        units = self.around.members(self.rng, int(one), devices)
        return self._moved(devices, units, int(devices[other]))

    def _swap(self, devices: np.ndarray) -> np.ndarray | None:
        """Exchange a group of units of one device and a group of another."""
        pivots = self.around.pivot(self.rng), self.around.pivot(self.rng)
        if devices[pivots[0]] == devices[pivots[1]]:
            return None
        if self.rng.random() < 0.5:
            groups = [self._group("layer", pivot, devices) for pivot in pivots]
        else:
            groups = [self.around.members(self.rng, pivot, devices) for pivot in pivots]
        first = self._moved(devices, groups[0], int(devices[pivots[1]]))
        return None if first is None else self._moved(first, groups[1], int(devices[pivots[0]]))

    def _exchange(self, devices: np.ndarray) -> np.ndarray | None:
        """Exchange one or two units of a device for up to two of another that fit in their place: the only way if the
        devices are full. Parameters move with their readers, and sizes are persistent bytes.

        Of the possible exchanges of a drawn set, a random one of those with the least bytes over memory is made.
        """
        rng, atoms = self.rng, self.around.atoms
        home = devices[self.atom_units]
        taken = np.bincount(home, self.atom_bytes, len(self.capacity))
        full = np.flatnonzero(taken > self.capacity)
        here = int(rng.choice(full)) if len(full) else int(home[int(rng.integers(len(home)))])
        there = int(rng.choice(used_devices(self.spacious)))
        ours, theirs = (rng.permutation(np.flatnonzero(home == device))[:DRAWN] for device in (here, there))
        if here == there or not len(ours):
            return None
        give = ours[: int(rng.integers(1, 3))]
        first, second = np.triu_indices(len(theirs) + 1)  # the last index stands for nothing
        sizes = np.append(self.atom_bytes[theirs], 0)
        back = np.where(first == second, sizes[first], sizes[first] + sizes[second])
        more = back - self.atom_bytes[give].sum()
        over = np.maximum(taken[here] + more - self.capacity[here], 0)
        over += np.maximum(taken[there] - more - self.capacity[there], 0)
        chosen = int(rng.choice(np.flatnonzero(over == over.min())))
        take = np.array([index for index in {first[chosen], second[chosen]} if index < len(theirs)], np.int64)
        moved = devices.copy()
        for numbers, device in ((give, there), (theirs[take], here)):
            units = np.flatnonzero(np.isin(atoms, self.atom_label[numbers]))
            if not self.allowed[device, units].all():
                return None
            moved[units] = device
        return moved

    def _moved(self, devices: np.ndarray, units: np.ndarray, target: int = -1) -> np.ndarray | None:
        """``devices`` with ``units`` on ``target``, or on a drawn accelerator; None if nothing moves."""
        if target < 0:
            allowed = self.spacious if self.spill else self.near
            target = draw_device(self.rng, allowed, units, int(devices[units[0]]))
        if target < 0 or not self.allowed[target, units].all() or (devices[units] == target).all():
            return None
        moved = devices.copy()
        moved[units] = target
        return moved

    def _reorder(self, state: SearchState) -> Candidate:
        """Shift the keys of some ops: of one that waited for its device, over the op that ran before it, or of any op,
        by a random time. The op shifts alone or with the units around it."""
        path, rng = self.path, self.rng
        if path is not None and len(path.queued) and rng.random() < 0.5:
            op, before = path.queued[int(rng.integers(len(path.queued)))].tolist()
            keys = path_keys(self.problem, state.devices[self.unit_of_op]) + state.bias
            shift = int(keys[before] - keys[op]) + 1
            op, shift = (op, shift) if rng.random() < 0.5 else (before, -shift)
        else:
            op = int(rng.integers(self.graph.n_ops))
            shift = int(rng.normal() * state.score.step_ns / 10 * 10 ** (-2 * rng.random()))
        shifted = np.zeros(self.graph.n_ops, bool)
        shifted[op] = True
        if rng.random() < 0.7:
            group = np.zeros(self.graph.n_units, bool)
            group[self.around.members(rng, int(self.unit_of_op[op]), state.devices)] = True
            shifted |= group[self.unit_of_op]
        return Candidate(state.devices, state.bias + shift * shifted)


class Grouped(Guided):
    """Moves of groups alone, and annealing: for placements that bring their order. Each move is then a full run, and a
    single unit that moves also changes the place of others in the order."""

    heat = HEAT

    def __init__(self, problem: Problem, allowed: np.ndarray, budget: Budget, rng):
        super().__init__(problem, allowed, budget, rng, GROUPS)

    def others(self) -> list[Guided]:
        """None."""
        return []


def _lists(label: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The units with each label as CSR, ``(ptr, units, number)``; ``number`` is the row of each unit."""
    number = np.unique(label, return_inverse=True)[1]
    units = np.argsort(number, kind="stable")
    return np.searchsorted(number[units], np.arange(int(number.max(initial=-1)) + 2)), units, number


def _gain(before: Score, after: Score) -> float:
    """The part of the step time that a move saved; less bytes over memory count as a hundredth."""
    if after.fits and before.fits:
        return max(0, before.step_ns - after.step_ns) / max(1, before.step_ns)
    return 0.01 if after < before else 0.0


def search_from(
    problem: Problem, budget: Budget, rng: np.random.Generator, given: Iterable[Placement], climbs: int,
    kind: type[Guided] = Guided, coarse: type[Guided] | None = None, fresh: bool = True, **options: Any,
) -> Placement:  # fmt: skip
    """Evaluate the ``given`` placements, improve the ``climbs`` best of them with a third of what is left of the budget
    (:func:`_race`), and then the best of all with the rest (:func:`_alternate`). ``kind`` is the search, ``options``
    are its own.

    Large moves gain most at first, and lead to placements that single moves cannot improve. So if the budget has an
    evaluation for each unit (:data:`SWEEPS`), a search that moves single units runs in the race, too: from the best
    given placement and, if ``fresh``, from a single device, which an eighth of the budget improves before the race. If
    less than :data:`LONG` evaluations are left, a quarter of an evaluation for each unit is enough
    (:data:`FEW_SWEEPS`).

    Budgets of at least :data:`LONG` evaluations have two more parts. If there is a ``coarse`` search, it begins with
    half of the budget at the best given placement. If its answer fits and is at most :data:`ROUGH` times as long, or
    the given placement does not fit, this is improved as well. If the search has a ``heat``, half of what the race
    leaves is annealing. If it ``ends_late``, all that the race leaves is late acceptance (:mod:`._late`), except where
    memory is so short that moves are exchanges.

    If a problem is so small that all its placements can be listed, the search may end before all of this, with the
    shortest step (:func:`_least_bounds_first`).

    Without an evaluation, or without a given placement, the answer is a single device.
    """
    unit_first = np.unique(problem.graph.unit_of_op, return_index=True)[1]
    search = kind(problem, choices(problem, hosts=True), budget, rng, **options)
    found: dict[Score, SearchState] = {}  # for equal scores, the first state
    for placement in given if budget.open else ():
        for state in search.begin(placement.devices[unit_first], placement.priority):
            found.setdefault(state.score, state)
        if not budget.open:
            break
    one = starts(problem, choices(problem))[0]
    if not found:
        return Placement.of_units(problem, one)
    leaders = sorted(found.values(), key=lambda state: state.score)[:climbs]
    if not (search.ordered or budget.microbatches):
        leader, shortest = _least_bounds_first(search, leaders[0], budget)
        if shortest:
            return search.placement(leader)
        leaders[0] = leader
    long = budget.left >= LONG
    if coarse is not None and long:
        rough = coarse(problem, search.allowed, budget, rng).improve(leaders[0], budget.share(2))
        near = not leaders[0].score.fits or rough.score.step_ns <= ROUGH * leaders[0].score.step_ns
        if rough.score.fits and near:
            leaders.insert(0, rough)
    others = search.others()  # with fewer evaluations than units, the first would try only some units, once
    swept = bool(others) and budget.left >= (SWEEPS if long else FEW_SWEEPS) * problem.graph.n_units
    single = others[0] if swept else search
    others = others if swept else others[1:]
    alone = [min(leaders, key=lambda state: state.score)] if swept else []
    if fresh and swept and budget.open:
        known = [state for state in found.values() if np.array_equal(state.devices, one)] or single.begin(one)
        begin = min(known, key=lambda state: state.score)
        alone = [state for state in alone if state is not begin]
        alone.append(single.improve(begin, budget.share(8)) if budget.open else begin)
    arms = [(search, state) for state in leaders] + [(single, state) for state in alone]
    first, best = _race(arms, budget)
    if search.ends_late and long and budget.open and not search.tight:
        return LateWalk(problem, budget, rng, best.score, search.placement(best)).run()
    if search.heat and long and budget.open:
        best = first.improve(best, budget.share(2), search.heat)
    best = _alternate([first, *(one for one in (search, *others) if one is not first)], best, budget)
    return search.placement(best)


def _least_bounds_first(search: Guided, best: SearchState, budget: Budget) -> tuple[SearchState, bool]:
    """The best of ``best`` and of all placements of a small problem, and whether no other placement is shorter.

    No step is shorter than its longest path or the work of a device. The placements are simulated in the order of this
    bound, until the next one is as long as the best step, or an eighth of the budget is spent. Larger problems return
    ``best`` at once. So do problems in which ``best`` does not fit, except those of packing: only there do persistent
    bytes say what fits.
    """
    problem, bias = search.problem, np.zeros(search.graph.n_ops, np.int64)
    every = fitting_placements(problem, search.allowed) if best.score.fits or search.tight else None
    if every is None:
        return best, False
    share, used, elapsed = budget.share(8), budget.used, budget.elapsed
    bound = np.array([path_keys(problem, units[search.unit_of_op]).max(initial=0) for units in every])
    for device, (slots, unit_ns) in enumerate(zip(problem.topology.slots, problem.unit_op_ns, strict=True)):
        bound = np.maximum(bound, np.where(every == device, unit_ns, 0).sum(axis=1) // slots)
    for number in np.argsort(bound, kind="stable").tolist():
        if best.score.fits and bound[number] >= best.score.step_ns:
            return best, True
        if search.visited.code(every[number], bias) in search.visited.known:
            continue
        if not budget.open or budget.used >= used + share.evaluations or budget.elapsed >= elapsed + share.seconds:
            return best, False
        best = min(best, search.state(every[number]), key=lambda state: state.score)
    return best, best.score.fits


def _race(arms: list[tuple[Guided, SearchState]], budget: Budget) -> tuple[Guided, SearchState]:
    """The search and the state that win a third of the budget: all begin with equal shares, and the better half of
    them stays in each round (successive halving: Jamieson, Talwalkar, AISTATS 2016)."""
    rounds = max(1, (len(arms) - 1).bit_length())
    total = budget.share(RACE * rounds)
    for _ in range(rounds):
        evaluations = total.evaluations if total.evaluations == np.inf else max(1, total.evaluations // len(arms))
        share = Share(evaluations, total.seconds / len(arms))
        arms = [(search, search.improve(state, share) if budget.open else state) for search, state in arms]
        arms = sorted(arms, key=lambda arm: arm[1].score)[: (len(arms) + 1) // 2]
    return arms[0]


def _alternate(searches: list[Guided], best: SearchState, budget: Budget) -> SearchState:
    """Spend the rest of the budget in :data:`PARTS` parts. The search that has gained continues; one that gained
    nothing in its part gives way to the next."""
    number = 0
    for part in range(PARTS, 0, -1):
        if budget.open:
            before, best = best.score, searches[number].improve(best, budget.share(part))
            number = number if _gain(before, best.score) >= LEAST_GAIN else (number + 1) % len(searches)
    return best
