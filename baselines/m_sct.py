"""m-SCT (Jeon et al. 2020, "Baechi"): small communication times scheduling (Hanen and Munier 1995) within memory."""

from __future__ import annotations

import numpy as np

from simdev.analysis.levels import average_durations, b_level
from simdev.baselines._list import fit, kernels, mean_costs, new_state, tables, unit_devices
from simdev.baselines._units import used_devices
from simdev.errors import Unsupported
from simdev.placers.placer import placer

THRESHOLD = 0.5  # an edge with a lower value makes a favourite child; the program gives each op at most one
BLOCK_EDGES = 10_000


@placer(
    "m-sct",
    version=1,
    family="list",
    source="Jeon et al., Baechi: Fast Device Placement of Machine Learning Graphs, SoCC 2020, section 3.2.3; Hanen, "
    "Munier: An approximation algorithm for scheduling dependent tasks on m processors with small communication "
    "delays, ETFA 1995",
)
def m_sct(problem, *, rng, budget):
    """m-ETF with favourite children: a linear program chooses at most one child to run right after each op.

    Once that child is ready and could start nowhere earlier, its parent's device waits for it, unless an urgent op
    arrives. The program is that of Hanen and Munier over the forward ops, solved by HiGHS; gradients follow their ops.
    Chains are contracted first, which loses nothing (their inner edges are free in some optimum). A departure: graphs
    with more than 10,000 remaining edges are cut along the topological order into blocks of about that many, each with
    a program of its own; edges between blocks then make no favourites.
    """
    table = tables(problem, forward_only=True)
    graph, k = problem.graph, len(used_devices(table.allowed))
    duration, transfer = (values // k for values in mean_costs(problem, table.allowed))
    favourite = favourites(graph, table.scope, duration, transfer)
    level = b_level(graph, average_durations(problem))
    order = np.empty(len(level), np.int64)
    order[np.lexsort((np.arange(len(level)), -level))] = np.arange(len(level))

    def build(headroom):
        state = new_state(table, headroom)
        kernels().earliest_start_first(table, state, order, favourite)
        return unit_devices(problem, table, state)

    return fit(problem, budget, build)


def favourites(graph, scope, duration, transfer) -> np.ndarray:
    """Favourite child of each op, int64 ``(n,)``, or -1.

    ``scope`` bool ``(n,)`` selects the ops; ``duration`` int64 ``(n,)``, ``transfer`` int64 ``(m,)`` ns.
    """
    n = graph.n_ops
    inside = scope[graph.edge_source] & scope[graph.consumers]
    key = graph.edge_source[inside].astype(np.int64) * n + graph.consumers[inside]
    pairs, inverse = np.unique(key, return_inverse=True)
    delay = np.zeros(len(pairs), np.int64)
    np.add.at(delay, inverse, transfer[graph.edge_tensor[inside]])
    source, target = pairs // n, pairs % n
    alone = (np.bincount(source, minlength=n)[source] == 1) & (np.bincount(target, minlength=n)[target] == 1)
    favourite = np.full(n, -1, np.int64)
    favourite[source[alone]] = target[alone]

    taken = np.zeros(n, bool)  # children that a block has chosen; other blocks do not know them
    head = _heads(n, source[alone], target[alone])
    length = np.zeros(n, np.int64)
    np.add.at(length, head, duration)
    rest = np.flatnonzero(~alone)
    blocks = np.arange(len(rest)) * max(1, -(-len(rest) // BLOCK_EDGES)) // max(1, len(rest))
    for block in range(blocks.max(initial=-1) + 1):
        edges = rest[blocks == block]
        cut = solve(length, head[source[edges]], head[target[edges]], delay[edges])
        chosen = edges[(cut < THRESHOLD) & ~taken[target[edges]]]
        taken[target[chosen]] = True
        favourite[source[chosen]] = target[chosen]
    return favourite


def _heads(n, source, target):
    """The first op of each op's chain."""
    head = np.arange(n)
    for before, after in sorted(zip(source.tolist(), target.tolist(), strict=True), key=lambda edge: edge[1]):
        head[after] = head[before]
    return head


def solve(length, source, target, delay) -> np.ndarray:
    """Solve the linear program; return float ``(e,)``: 1 for an edge that pays its delay, 0 for one that need not.

    Minimise ``w`` with ``s[i] + length[i] <= w`` and ``s[i] + length[i] + delay x <= s[j]`` for each edge. All but one
    of an op's outgoing edges pay, and all but one of its incoming edges.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    ops, index = np.unique(np.concatenate([source, target]), return_inverse=True)
    e, v = len(source), len(ops)
    tail, tip = index[:e], index[e:]
    unit = max(1, int(delay.max(initial=1)))  # columns x (e), s (v), w; times in units of the largest delay
    rows, columns, values, bounds = [], [], [], []

    def add(row, column, value):
        rows.append(np.broadcast_to(row, np.shape(column)))
        columns.append(column)
        values.append(np.broadcast_to(value, np.shape(column)))

    every = np.arange(e)
    add(every, every, delay / unit)
    add(every, e + tail, 1.0)
    add(every, e + tip, -1.0)
    bounds.append(-length[source] / unit)
    add(e + np.arange(v), e + np.arange(v), 1.0)
    add(e + np.arange(v), np.full(v, e + v), -1.0)
    bounds.append(-length[ops] / unit)
    for number, side in enumerate((tail, tip)):
        add(e + v + number * v + side, every, -1.0)
        bounds.append(1.0 - np.bincount(side, minlength=v))
    matrix = coo_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(e + 3 * v, e + v + 1)
    )
    cost = np.zeros(e + v + 1)
    cost[-1] = 1.0
    limits = [(0.0, 1.0)] * e + [(0.0, None)] * (v + 1)
    found = linprog(cost, A_ub=matrix.tocsr(), b_ub=np.concatenate(bounds), bounds=limits, method="highs-ds")
    if found.x is None:
        raise Unsupported(f"the linear program has no solution: {found.message}")
    return found.x[:e]
