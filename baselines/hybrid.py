"""Data parallelism of all layers but the heaviest, each of which is on one device: embedding tables, say."""

from __future__ import annotations

import numpy as np

from simdev.analysis.steady import each_microbatch_ns
from simdev.baselines._units import capacities
from simdev.errors import Unsupported
from simdev.exact.training import accelerators_by_kind, reaching
from simdev.placers.placer import placer
from simdev.problem.graph import PHASES, ComputationGraph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

UPDATE = PHASES.index("update")
TRIES = 100  # moves for each layer at most
FIXED_SHARE = 0.8  # of moves: those of layers without copies
SWAPS = 0.3  # of moves: two layers without copies change places


@placer(
    "hybrid",
    version=3,
    family="expert",
    searches=True,
    source="Naumov et al., arXiv:1906.00091, 2019, section 3",
)
def hybrid(problem, *, rng, budget):
    """Copies of all layers on all accelerators of a kind, except of the ``k`` layers with most persistent bytes: each
    of these is on one accelerator or on the first host, and runs there for all microbatches.

    Naumov et al. divide the embedding tables among the accelerators and copy the other layers; that ``k`` is sought,
    and the host, are departures, and so is the climb. An input of the step belongs to the layer that reads it first, so
    that a layer without copies need not wait for a device that has not begun the microbatch (the barriers of R10).
    Layers that change in the backward phase have no copies for any ``k`` (R10). Layers for which an accelerator lacks a
    kernel are on the host, too. Each kind and ``k`` with either of the two is a candidate, if its persistent bytes fit
    (or all, if those of none fit). Candidates are simulated in the order of a simple model: the work of a microbatch on
    the busiest device, its share of all tensors sent to and from layers without copies, and its share of the exchange
    of gradients. Of memory, the model knows persistent bytes alone, so the first candidates may not fit. Candidates
    take half of the budget at most. The rest is a climb from the best: a random layer goes to another accelerator, to
    the host, or to all as copies, or two layers without copies change places. For the time of one step there are no
    copies: the other layers are on the first accelerator. Raises :class:`Unsupported` if neither the accelerators nor
    the host have all kernels of a layer.
    """
    teams = [reaching(problem, alike) for alike in accelerators_by_kind(problem)]
    models = [_Model(problem, team, budget.microbatches) for team in teams]
    found = [(says, model, home) for model in models for says, home in model.candidates()]
    found.sort(key=lambda candidate: candidate[0])
    _, model, home = found[0]
    if not budget.open:
        return model.placement(home)
    most = budget.left / 2
    best = budget.evaluate_placement(model.placement(home))
    for _, other, there in found[1:]:
        if not budget.open or budget.left < most:
            break
        score = budget.evaluate_placement(other.placement(there))
        if score < best:
            best, model, home = score, other, there
    layers = np.flatnonzero((model.held > 0) | (home >= 0))
    for _ in range(TRIES * len(layers)):
        if not budget.open:
            break
        moved = model.changed(home, layers, rng)
        if moved is not None:
            score = budget.evaluate_placement(model.placement(moved))
            if score <= best:
                best, home = score, moved
    return model.placement(home)


def _first_readers(graph: ComputationGraph) -> np.ndarray:
    """int ``(n,)``: of each input outside colocation groups, the op of the lowest number that reads it; else -1."""
    reader = np.full(graph.n_ops, graph.n_ops)
    np.minimum.at(reader, graph.edge_source, graph.consumers)
    inputs = (np.array(graph.kinds)[graph.op_kind] == "input") & (np.bincount(graph.unit_of_op)[graph.unit_of_op] == 1)
    return np.where(inputs & (reader < graph.n_ops), reader, -1)


class _Model:
    """What a hybrid takes. ``layer`` int ``(n,)``: of each op; the ops of a colocation group are in one layer."""

    def __init__(self, problem: Problem, team: list[int], microbatches: int):
        graph = problem.graph
        self.problem, self.team, self.count = problem, team, microbatches
        self.width = len(team) if microbatches else 1  # how many devices share the layers with copies
        weight = graph.op_persistent_bytes.astype(float)
        heaviest = np.lexsort((-weight, graph.unit_of_op))  # of each unit first
        first = np.searchsorted(graph.unit_of_op[heaviest], np.arange(graph.n_units))
        self.layer = graph.op_layer[heaviest[first]][graph.unit_of_op]
        read = _first_readers(graph)
        self.layer = np.where(read < 0, self.layer, self.layer[read])
        n = len(graph.layers)
        self.held = np.bincount(self.layer, weight, n)
        durations = each_microbatch_ns(problem)
        self.work = np.array([np.bincount(self.layer, np.maximum(row, 0), n) for row in durations])
        self.supported = np.array([np.bincount(self.layer, row < 0, n) == 0 for row in durations])
        self.fixed = np.bincount(self.layer, graph.updated_in_backward & (microbatches > 0), n) > 0
        before = graph.op_phase[graph.edge_source] < UPDATE
        into = before & (graph.op_phase[graph.consumers] == UPDATE)
        gradient = np.unique(graph.edge_tensor[into & ~graph.tensor_persistent[graph.edge_tensor]])
        self.gradient = np.bincount(self.layer[graph.tensor_producer[gradient]], graph.tensor_bytes[gradient], n)
        self.send_ns = problem.costs.transfer_ns.max(axis=0, initial=0)
        ends = graph.edge_tensor, self.layer[graph.edge_source], self.layer[graph.consumers]
        self.sent = np.unique(np.stack(ends)[:, before], axis=1)

    def candidates(self) -> list[tuple[tuple[float, float, int], np.ndarray]]:
        """For each choice of heaviest layers, the device of each of them and -1 for the others, after what the model
        says: the bytes that the fullest device lacks, ns per microbatch, and how many layers have no copies."""
        host, ours = self.host(), np.all(self.supported[self.team], axis=0)
        if host is None and not ours.all():
            first = self.problem.graph.layers[int(np.argmin(ours))]
            raise Unsupported(f"no device that the accelerators reach has all kernels of layer {first!r}")
        order = np.lexsort((-self.held, ~self.fixed))
        order = order[((self.held[order] > 0) | self.fixed[order]) & ours[order]]
        least = int(self.fixed[order].sum())
        found: list[tuple[tuple[float, float, int], np.ndarray]] = []
        for holders in [self.team, *([] if host is None else [[host]])]:
            home, held = np.where(ours, -1, -1 if host is None else host), np.zeros(len(holders))
            for k in range(len(order) + 1):
                if k:
                    to = int(np.argmin(held))
                    home[order[k - 1]] = holders[to]
                    held[to] += self.held[order[k - 1]]
                if k >= least and (k or not found):
                    found.append(((*self.modelled(home), k), home.copy()))
        return [one for one in found if one[0][0] == 0] or found

    def changed(self, home: np.ndarray, layers: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
        """``home`` after a random move of one of the ``layers``, or None if it has nowhere to go."""
        changed, placed = home.copy(), np.flatnonzero(home >= 0)
        if len(placed) > 1 and rng.random() < SWAPS:
            one, other = rng.choice(placed, 2, replace=False)
            changed[one], changed[other] = home[other], home[one]
        else:
            some = placed if len(placed) and rng.random() < FIXED_SHARE else layers
            layer, host = rng.choice(some), self.host()
            homes = [*self.team, *([] if self.fixed[layer] else [-1]), *([] if host is None else [host])]
            homes = [to for to in homes if to != home[layer] and self.runs(layer, to)]
            if homes:
                changed[layer] = rng.choice(homes)
        return None if (changed == home).all() else changed

    def runs(self, layer: int, home: int) -> bool:
        """Whether the devices have all kernels of a layer."""
        return bool(self.supported[self.team if home < 0 else [home], layer].all())

    def host(self) -> int | None:
        """The first host, if it has all kernels and the accelerators reach it."""
        host, reach = self.problem.topology.host, self.problem.costs.pair_class
        if host < 0 or not self.supported[host].all():
            return None
        return host if (reach[self.team, host] >= 0).all() and (reach[host, self.team] >= 0).all() else None

    def modelled(self, home: np.ndarray) -> tuple[float, float]:
        """Persistent bytes that the fullest device lacks, and ns per microbatch."""
        copied, holders = home < 0, self.team[: self.width]
        held, work = np.zeros((2, len(self.work)))
        for device in np.unique(home[~copied]).tolist():
            held[device], work[device] = self.held[home == device].sum(), self.work[device, home == device].sum()
        held[holders] += self.held[copied].sum()
        work[holders] += self.work[holders][:, copied].sum(axis=1) / self.width
        tensor, source, target = self.sent
        apart = home[source] != home[target]
        sends = np.unique(np.stack([tensor, home[source], home[target]])[:, apart], axis=1)
        links = self.send_ns[sends[0]].sum() / self.width
        lacks = np.maximum(held - capacities(self.problem), 0).max()
        return float(lacks), float(work.max() + links + self._exchange_ns(copied))

    def _exchange_ns(self, copied: np.ndarray) -> float:
        """A microbatch's share of the exchange of gradients, which sends ``2 (r - 1) / r`` of their bytes."""
        if self.width == 1:
            return 0.0
        pairs = [(a, b) for a in self.team for b in self.team if a != b]
        slowest = min(int(self.problem.topology.pair_bytes_per_s[pair]) for pair in pairs)
        return 2 * (self.width - 1) / self.width * self.gradient[copied].sum() / slowest * 1e9 / self.count

    def placement(self, home: np.ndarray) -> Placement:
        """The placement with the layers of ``home`` on their devices, and copies of the others on the whole team."""
        at = home[self.layer]
        devices = np.where(at < 0, self.team[0], at)
        if self.width == 1:
            return Placement(devices)
        replica_of = np.arange(self.problem.topology.n_devices)
        replica_of[self.team] = self.team[0]
        return Placement(devices, replica_of=replica_of, replicated=None if (at < 0).all() else at < 0)
