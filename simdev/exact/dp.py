"""The contiguous optimum of the max-load model: dynamic programming over ideals (Tarnawski et al. 2020, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.errors import Unsupported
from simdev.exact.contract import Classes, contract
from simdev.exact.ideals import Ideals, all_ideals, prefixes
from simdev.exact.load import LoadProblem

SLACK = 1 + 1e-9  # sums taken in another order differ in their last digits
ANY = 1 << 62  # pairs of ideals that no program visits


@dataclass(frozen=True)
class Split:
    """A split found by dynamic programming.

    ``processor`` int ``(n,)`` per node (accelerators first), its ``largest`` load, the number of ``ideals``, and the
    number of ``pairs`` of nested ideals whose stage was examined.
    """

    processor: np.ndarray
    largest: float
    ideals: int
    pairs: int


def best_contiguous(problem: LoadProblem, *, limit: int = 200_000, merge_trivial: bool = True) -> Split:
    """The split with the least largest load among all whose processors each hold a difference of two nested ideals.

    Raises :class:`Unsupported` if there are more than ``limit`` ideals or no contiguous split fits in memory; the
    message gives the reason.
    """
    return contiguous_split(problem, contract(problem, merge_trivial=merge_trivial), limit)


def best_linear(problem: LoadProblem, *, merge_trivial: bool = True) -> Split:
    """The best split of one depth-first topological order of the classes into consecutive stages (the paper's DPL).

    Works for any size. The order is fixed, so the result is only an upper bound of :func:`best_contiguous`.
    """
    return linear_split(problem, contract(problem, merge_trivial=merge_trivial))


class TooManyPairs(Unsupported):
    """More ``pairs`` of nested ideals than were allowed had been visited before the optimum was known."""

    def __init__(self, pairs: int, most: int):
        super().__init__(
            f"more than {most} pairs of nested ideals: the graph is too wide for the exact dynamic program"
        )
        self.pairs = pairs


def contiguous_split(problem: LoadProblem, classes: Classes, limit: int, most: int = ANY) -> Split:
    """The contiguous optimum over given classes.

    The optimum of one linear order is an upper bound; stages beyond that bound are not examined. Raises
    :class:`Unsupported` if there are more than ``limit`` ideals, or no split fits; and :class:`TooManyPairs` after more
    than ``most`` pairs of nested ideals, each of which takes about 0.1 us.
    """
    ideals = all_ideals(classes.predecessors, limit)
    try:
        bound = linear_split(problem, classes).largest
    except Unsupported:
        bound = np.inf
    found = _solve(classes, ideals, problem, bound, most)
    if found is None:
        raise Unsupported(why_infeasible(problem, classes))
    return found


def linear_split(problem: LoadProblem, classes: Classes) -> Split:
    """The best split of ``classes``, in their order, into consecutive stages."""
    chain = prefixes(classes.n_classes)
    work = classes.accelerator_time[np.isfinite(classes.accelerator_time)].sum()
    bound = 1.25 * work / max(1, problem.accelerators)
    while True:  # a bound keeps the examined stages short; it grows if nothing is found within it
        found = _solve(classes, chain, problem, bound)
        if found is not None:
            return found
        if bound == np.inf:
            raise Unsupported(why_infeasible(problem, classes))
        bound = 2 * bound if 0 < bound < 20 * work else np.inf


def why_infeasible(problem: LoadProblem, classes: Classes) -> str:
    """One sentence that says why no split (or no contiguous split) fits."""
    if problem.cpus == 0 and classes.n_classes:
        largest = int(np.argmax(classes.size))
        if classes.size[largest] > problem.memory:
            node = problem.node_ids[int(np.argmax(classes.class_of == largest))]
            return (
                f"{problem.name}: the nodes that must stay with {node!r} need {classes.size[largest]:.6g} bytes, "
                f"an accelerator has {problem.memory:.6g}"
            )
        if classes.size.sum() > problem.memory * problem.accelerators:
            return (
                f"{problem.name}: {classes.size.sum():.6g} bytes do not fit in {problem.accelerators} accelerators of "
                f"{problem.memory:.6g}"
            )
    return (
        f"{problem.name}: no contiguous split fits in {problem.accelerators} accelerators of {problem.memory:.6g} bytes"
    )


def _solve(classes: Classes, ideals: Ideals, problem: LoadProblem, bound: float, most: int = ANY) -> Split | None:
    from simdev.exact._kernel import fill

    k, cores = problem.accelerators, problem.cpus
    states = (cores + 1) * (k + 1)
    arguments = (
        ideals.ptr,
        ideals.removed,
        ideals.below,
        classes.accelerator_time,
        classes.cpu_time,
        classes.size,
        *classes.borders(),
        np.diff(classes.member_ptr),
        classes.border_cost,
        float(problem.memory),
        k,
        cores,
        bound * SLACK,
    )
    table = np.full((ideals.count, states), np.inf)
    table[0] = 0.0
    pairs, choice = fill(*arguments, table, 1, ideals.count, most)
    if pairs > most:
        raise TooManyPairs(int(pairs), most)
    if not np.isfinite(table[-1, -1]):
        return None
    processor = np.zeros(classes.n_classes, np.int64)
    ideal, state, free = ideals.count - 1, states - 1, [k - 1, k + cores - 1]
    largest = float(table[-1, -1])
    while ideal > 0:
        lower, accelerated = (int(value) for value in choice[state])
        if lower != ideal:
            processor[_difference(ideals, ideal, lower)] = free[0] if accelerated else free[1]
            free[0 if accelerated else 1] -= 1
        state -= 1 if accelerated else k + 1
        if lower > 0:
            _, choice = fill(*arguments, table, lower, lower + 1, ANY)
        ideal = lower
    return Split(processor[classes.class_of], largest, ideals.count, int(pairs))


def _difference(ideals: Ideals, upper: int, lower: int) -> list[int]:
    """The nodes of ideal ``upper`` that are not in ideal ``lower``."""
    held, nodes = _nodes(ideals, lower), _nodes(ideals, upper)
    return sorted(nodes - held)


def _nodes(ideals: Ideals, ideal: int) -> set[int]:
    nodes = set()
    while ideal > 0:
        edge = ideals.ptr[ideal]
        nodes.add(int(ideals.removed[edge]))
        ideal = int(ideals.below[edge])
    return nodes
