"""The latency model of Tarnawski et al. (NeurIPS 2020, section 4.2), and its optimum.

Each accelerator is called once, or up to q times in sequence, each time for one subgraph. A call begins when all inputs
of its nodes are there. It takes its transfers in, its work and its transfers out, in sequence; all its results are
there at the end. A CPU core runs one node, and there are as many cores as needed. With q calls, the nodes of a class
share an accelerator but not always a call, and a tensor between two calls of an accelerator leaves it and returns.

The published integer program relates calls by big-M constraints, whose relaxation is weak. Here the model is a
constraint program with conditional constraints (CP-SAT); the critical path on the faster of the two kinds supports its
bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.contract import Classes, contract, last_first, topological, without_cycles
from simdev.exact.load import LoadProblem, processor_loads
from simdev.exact.throughput import colour_classes

TICKS = 2_000_000  # that the first value is divided into; times are rounded down to ticks, so the bound stays valid


@dataclass(frozen=True)
class Latency:
    """A split and its proven bound.

    ``processor`` int ``(n,)`` (``accelerators`` stands for the CPU; with q calls, number ``i * q + j`` is call ``j`` of
    accelerator ``i`` and ``accelerators * q`` is the CPU), its ``latency``, and the ``bound``. ``status`` is
    ``optimal`` if the two differ by at most a thousandth, which rounding times to ticks may cost.
    """

    processor: np.ndarray
    latency: float
    bound: float
    status: str

    @property
    def gap(self) -> float:
        return max(0.0, self.latency - self.bound) / max(self.latency, 1e-12)


def split_latency(problem: LoadProblem, processor: np.ndarray, calls: int = 1) -> float:
    """The latency of a split, where every processor number from ``accelerators`` on is the CPU.

    With ``calls`` on each accelerator, the numbers are those of :class:`Latency`. The latency is inf if calls wait for
    one another, which happens if a path leaves a call and returns to it.
    """
    if calls > 1:
        problem = _with_calls(problem, calls)
    k = problem.accelerators
    processor = np.minimum(np.asarray(processor), k)
    load = processor_loads(problem, processor).load if problem.cpus else _loads(problem, processor)
    source, target, _ = problem.edges
    # A call is one step of the order, and so is a node on the CPU; a step begins when all its inputs are there.
    step = np.where(processor < k, processor, k + np.arange(problem.n_nodes))
    between = {(int(a), int(b)) for a, b in zip(step[source], step[target], strict=True) if a != b}
    used = np.unique(step[step < k]).tolist()
    between |= {(a, b) for a, b in zip(used, used[1:], strict=False) if a // calls == b // calls}
    arcs = sorted(between)
    after: dict[int, list[int]] = {}
    waiting = dict.fromkeys(set(step.tolist()), 0)
    for a, b in arcs:
        after.setdefault(a, []).append(b)
        waiting[b] += 1
    done = dict.fromkeys(waiting, 0.0)
    ready = sorted(s for s, count in waiting.items() if not count)
    met, latest = 0, 0.0
    while ready:
        s = ready.pop()
        met += 1
        done[s] += float(load[s]) if s < k else float(problem.cpu_time[s - k])
        latest = max(latest, done[s])
        for b in after.get(s, ()):
            done[b] = max(done[b], done[s])
            waiting[b] -= 1
            if not waiting[b]:
                ready.append(b)
    return latest if met == len(waiting) else np.inf


def _with_calls(problem: LoadProblem, calls: int) -> LoadProblem:
    """The problem in which each call is an accelerator and nodes of a class are free to be in different calls."""
    return replace(problem, accelerators=problem.accelerators * calls, group=np.arange(problem.n_nodes))


def _loads(problem: LoadProblem, processor: np.ndarray) -> np.ndarray:
    if (processor >= problem.accelerators).any():
        raise InvalidInput("a node is on a CPU and there is none", source=problem.name)
    return processor_loads(problem, processor).load


def critical_path(problem: LoadProblem) -> float:
    """Longest path with every node on the faster kind and free transfers: a lower bound of every split's latency."""
    fast = problem.cpu_time.copy() if problem.cpus else np.full(problem.n_nodes, np.inf)
    if problem.accelerators:
        fast = np.minimum(fast, problem.accelerator_time)
    return float(_finish(problem, fast).max())


def path_bound(problem: LoadProblem) -> float:
    """A lower bound of the latency, from the memory of an accelerator; at least :func:`critical_path`.

    An accelerator is called once, so a path stays on it for one stretch of nodes, whose sizes fit in its memory. The
    call takes their time, the tensor by which the path enters and the tensor by which it leaves; a node on the CPU
    takes its time there. The cheapest way to cut a path into such stretches (dynamic programming) bounds the latency of
    the whole. The paths that are tried are the longest in time, in bytes held, in transfers, and in sums of these.
    """
    best = critical_path(problem)
    if not problem.accelerators:
        return best
    cost = np.zeros(problem.n_nodes)
    np.maximum.at(cost, problem.tensor_producer, problem.tensor_cost)
    time = np.where(np.isfinite(problem.accelerator_time), problem.accelerator_time, problem.cpu_time)
    parts = [part / max(part.sum(), 1e-300) for part in (time, problem.size, cost)]
    for shares in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 1, 1)):
        path = _longest_path(problem, sum(share * part for share, part in zip(shares, parts, strict=True)))
        best = max(best, _cut_path(problem, path, cost))
    return best


def _longest_path(problem: LoadProblem, weight: np.ndarray) -> list[int]:
    source, target, _ = problem.edges
    before: list[list[int]] = [[] for _ in range(problem.n_nodes)]
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        before[b].append(a)
    finish = _finish(problem, weight)
    path = [int(np.argmax(finish))]
    while before[path[-1]]:
        path.append(max(before[path[-1]], key=lambda v: (finish[v], v)))
    return path[::-1]


def _cut_path(problem: LoadProblem, path: list[int], cost: np.ndarray) -> float:
    """Least time of a path that is cut into stretches on accelerators and nodes on the CPU."""
    least = np.full(len(path) + 1, np.inf)
    least[0] = 0.0
    for first, v in enumerate(path):
        if problem.cpus:
            least[first + 1] = min(least[first + 1], least[first] + problem.cpu_time[v])
        held, call = 0.0, least[first] + (cost[path[first - 1]] if first else 0.0)
        for last in range(first, len(path)):
            held, call = held + problem.size[path[last]], call + problem.accelerator_time[path[last]]
            if held > problem.memory or not np.isfinite(call):
                break
            out = cost[path[last]] if last + 1 < len(path) else 0.0
            least[last + 1] = min(least[last + 1], call + out)
    return float(least[-1]) if np.isfinite(least[-1]) else 0.0


def _finish(problem: LoadProblem, time: np.ndarray) -> np.ndarray:
    order = np.array(_order(problem))
    source, target, _ = problem.edges
    before: list[list[int]] = [[] for _ in range(problem.n_nodes)]
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        before[b].append(a)
    finish = np.zeros(problem.n_nodes)
    for v in order.tolist():
        finish[v] = max((finish[u] for u in before[v]), default=0.0) + time[v]
    return finish


def _order(problem: LoadProblem) -> list[int]:
    source, target, _ = problem.edges
    return topological(problem.n_nodes, source, target)


def greedy_split(problem: LoadProblem) -> np.ndarray:
    """Fill the accelerators' memories in order with classes; the rest goes to the CPU. This is the greedy baseline that
    is published with the data set.

    Classes on a common cycle are one block. A block that is too large for an accelerator goes to the CPU, and the next
    block opens another accelerator, as one that no longer fits does.
    """
    blocks = without_cycles(problem.class_of, *problem.class_of[problem.given_edges].T)
    _, first, block = np.unique(blocks, return_index=True, return_inverse=True)
    block = np.argsort(np.argsort(first))[block]  # numbered by their first node
    apart = block[problem.given_edges]
    order = last_first(len(first), [(a, b) for a, b in apart.tolist() if a != b])
    size = np.bincount(block, problem.size, len(first))
    able = np.bincount(block, ~np.isfinite(problem.accelerator_time), len(first)) == 0
    home, used, held = np.full(len(first), problem.accelerators), 0, np.inf
    for b in order:
        if held + size[b] > problem.memory or not able[b]:
            if size[b] > problem.memory or used == problem.accelerators or not able[b]:
                held = np.inf
                continue
            used, held = used + 1, 0.0
        home[b] = used - 1
        held += size[b]
    return home[block]


def linear_split(problem: LoadProblem) -> np.ndarray | None:
    """The best cut of one depth-first order into calls and stretches on the CPU, run in sequence.

    Returns None if nothing fits.
    """
    classes = contract(problem, merge_trivial=False)
    n, k = classes.n_classes, problem.accelerators
    touching: list[list[int]] = [[] for _ in range(n)]
    width = np.diff(classes.member_ptr).tolist()
    for b, start in enumerate(classes.member_ptr[:-1].tolist()):
        for c in classes.members[start : start + width[b]].tolist():
            touching[c].append(b)
    # least[j, a]: the first j classes with a calls; came[j, a]: where the last call began (-1: class j - 1 on the CPU)
    least, came = np.full((n + 1, k + 1), np.inf), np.full((n + 1, k + 1), -1)
    least[0] = 0.0
    for first in range(n):
        cpu = classes.cpu_time[first] if problem.cpus else np.inf
        better = least[first] + cpu < least[first + 1]
        least[first + 1, better], came[first + 1, better] = least[first, better] + cpu, -1
        work = held = traffic = 0.0
        inside: dict[int, int] = {}
        for c in range(first, n):
            work, held = work + classes.accelerator_time[c], held + classes.size[c]
            if held > problem.memory or not np.isfinite(work):
                break
            for b in touching[c]:
                inside[b] = inside.get(b, 0) + 1
                traffic += (inside[b] == 1) * classes.border_cost[b] - (inside[b] == width[b]) * classes.border_cost[b]
            value = least[first, :-1] + work + traffic
            better = value < least[c + 1, 1:]
            least[c + 1, 1:][better], came[c + 1, 1:][better] = value[better], first
    a = int(np.argmin(least[n]))
    if not np.isfinite(least[n, a]):
        return None
    home, j = np.full(n, k), n
    while j > 0:
        first = int(came[j, a])
        if first < 0:
            j -= 1
            continue
        a -= 1
        home[first:j] = a
        j = first
    return home[classes.class_of]


def best_latency(
    problem: LoadProblem,
    *,
    calls: int = 1,
    start: np.ndarray | None = None,
    seconds: float = 60.0,
    effort: float = np.inf,
    workers: int = 1,
    seed: int = 0,
) -> Latency:
    """The split of least latency that ``seconds`` (and ``effort``, CP-SAT's deterministic time) find, and its bound.

    Each accelerator has up to ``calls`` calls; ``start`` is a split of one call each.

    After Ctrl-C, the best split found by then is returned. ``start`` defaults to the best of :func:`linear_split`,
    :func:`greedy_split` and all on the CPU. Raises :class:`Unsupported` if nothing fits.
    """
    from ortools.sat.python import cp_model

    began, k = time.monotonic(), problem.accelerators
    classes = contract(problem, merge_trivial=False)
    starts: list[np.ndarray | None] = [start]
    if start is None:
        starts = [linear_split(problem), greedy_split(problem), np.full(problem.n_nodes, k)]
    splits = [np.minimum(processor, k) for processor in starts if processor is not None and processor.min() >= 0]
    known = [(split_latency(problem, s), s) for s in splits if problem.cpus or (s < k).all()]
    known = [pair for pair in known if np.isfinite(pair[0])]
    best = min(known, key=lambda pair: pair[0], default=(np.inf, None))
    if calls > 1:
        best = best if best[1] is None else (best[0], np.minimum(best[1] * calls, k * calls))
        classes, k = colour_classes(_with_calls(problem, calls)), k * calls
    serial = sum(float(time[np.isfinite(time)].sum()) for time in (problem.cpu_time, problem.accelerator_time))
    horizon = best[0] if best[1] is not None else serial + 2 * k * float(problem.tensor_cost.sum())
    scale = TICKS / max(horizon, 1e-9)
    model, x, latest = _model(cp_model, problem, classes, scale, best[1], calls)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.1, seconds - (time.monotonic() - began))
    solver.parameters.num_workers = workers
    solver.parameters.random_seed, solver.parameters.relative_gap_limit = seed, 1e-4
    if np.isfinite(effort):
        solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        home = np.full(classes.n_classes, k)
        for (c, i), variable in x.items():
            if solver.boolean_value(variable):
                home[c] = i
        value = split_latency(problem, home[classes.class_of], calls)
        if value < best[0]:
            best = value, home[classes.class_of]
    if best[1] is None:
        raise Unsupported(
            f"{problem.name}: no split fits in {problem.accelerators} accelerators of {problem.memory:.6g} bytes"
        )
    # Rounding a time down loses up to one tick, so a bound proven in ticks also holds in the unit of the file.
    bound = max(path_bound(problem), solver.best_objective_bound / scale if status != cp_model.UNKNOWN else 0.0)
    bound = min(bound, best[0])
    done = best[0] - bound <= 1e-3 * best[0]
    return Latency(best[1], float(best[0]), float(bound), "optimal" if done else "feasible")


def _model(cp_model, problem: LoadProblem, classes: Classes, scale: float, start: np.ndarray | None, calls: int):
    """``x[class, call]``; a class without a call is on the CPU."""
    model = cp_model.CpModel()
    k, count, top = problem.accelerators * calls, classes.n_classes, TICKS + 2

    def ticks(value: float) -> int:
        return int(value * scale)

    x = {
        (c, i): model.new_bool_var("")
        for c in range(count)
        if np.isfinite(classes.accelerator_time[c]) and classes.size[c] <= problem.memory
        for i in range(k)
    }
    on_cpu = []
    for c in range(count):
        cpu = model.new_bool_var("")
        on_cpu.append(cpu)
        model.add_exactly_one([cpu, *(x[c, i] for i in range(k) if (c, i) in x)])
        if not problem.cpus or not np.isfinite(classes.cpu_time[c]):
            model.add(cpu == 0)
    never = model.new_constant(0)

    def inside(c: int, i: int):
        return x.get((c, i), never)

    unit = max(problem.memory / 1e6, 1e-12)
    for i in range(0, k if np.isfinite(problem.memory) else 0, calls):
        held = [int(classes.size[c] / unit) * inside(c, i + j) for c in range(count) for j in range(calls)]
        model.add(sum(held) <= int(problem.memory / unit))
    if calls > 1:
        for c, first in _same_accelerator(problem, classes):
            for i in range(0, k, calls):
                model.add(
                    sum(inside(c, i + j) for j in range(calls)) == sum(inside(first, i + j) for j in range(calls))
                )
    heavy = np.argsort(-np.where(np.isfinite(classes.accelerator_time), classes.accelerator_time, 0), kind="stable")
    for rank, c in enumerate(heavy[: k // calls].tolist()):  # accelerators are alike
        for i in range((rank + 1) * calls, k):
            model.add(inside(c, i) == 0)
    begin = [model.new_int_var(0, top, "") for _ in range(k)]
    end = [model.new_int_var(0, top, "") for _ in range(k)]
    ptr = classes.member_ptr
    for i in range(k):
        terms = [ticks(classes.accelerator_time[c]) * v for c in range(count) if (v := x.get((c, i))) is not None]
        for b, cost in enumerate(classes.border_cost.tolist()):
            cut = model.new_bool_var("")
            members = classes.members[ptr[b] : ptr[b + 1]].tolist()
            for c in members[1:]:
                model.add_bool_or(inside(members[0], i).negated(), inside(c, i), cut)
                model.add_bool_or(inside(members[0], i), inside(c, i).negated(), cut)
            terms.append(ticks(cost) * cut)
        model.add(end[i] >= begin[i] + sum(terms))
        if i % calls:
            model.add(begin[i] >= end[i - 1])
    fast = np.minimum(problem.accelerator_time if k else np.inf, problem.cpu_time if problem.cpus else np.inf)
    head = _finish(problem, fast)
    there = [model.new_int_var(min(top, ticks(head[v])), top, "") for v in range(problem.n_nodes)]
    latest = model.new_int_var(min(top, ticks(path_bound(problem))), top, "")
    class_of = classes.class_of.tolist()
    for v in range(problem.n_nodes):
        model.add(latest >= there[v])
        for i in range(k):
            if (class_of[v], i) in x:
                model.add(there[v] >= end[i]).only_enforce_if(x[class_of[v], i])
    source, target, _ = problem.edges
    reads = [False] * problem.n_nodes
    for u, v in zip(source.tolist(), target.tolist(), strict=True):
        reads[v] = True
        cpu = on_cpu[class_of[v]]
        time = ticks(problem.cpu_time[v]) if np.isfinite(problem.cpu_time[v]) else 0
        model.add(there[v] >= there[u] + time).only_enforce_if(cpu)
        model.add(there[v] >= there[u])
        if class_of[u] != class_of[v]:
            for i in range(k):
                if (class_of[v], i) in x:
                    model.add(begin[i] >= there[u]).only_enforce_if(
                        [x[class_of[v], i], inside(class_of[u], i).negated()]
                    )
    for v in range(problem.n_nodes):
        if not reads[v] and np.isfinite(problem.cpu_time[v]):
            model.add(there[v] >= ticks(problem.cpu_time[v])).only_enforce_if(on_cpu[class_of[v]])
    if start is not None:
        home = np.zeros(count, np.int64)
        home[classes.class_of] = start
        times = np.where(np.isfinite(classes.accelerator_time), classes.accelerator_time, 0)
        order = list(dict.fromkeys(int(home[c]) // calls for c in np.argsort(-times, kind="stable") if home[c] < k))
        number = {old: new for new, old in enumerate(order)}
        for (c, i), variable in x.items():
            model.add_hint(variable, int(home[c] < k and number[int(home[c]) // calls] * calls + home[c] % calls == i))
    model.minimize(latest)
    return model, x, latest


def _same_accelerator(problem: LoadProblem, classes: Classes) -> list[tuple[int, int]]:
    """Pairs of single nodes that share an accelerator: each node of a class, and the first node of that class."""
    _, first, back = np.unique(problem.class_of, return_index=True, return_inverse=True)
    pairs = zip(range(problem.n_nodes), first[back].tolist(), strict=True)
    return [(int(classes.class_of[v]), int(classes.class_of[u])) for v, u in pairs if u != v]
