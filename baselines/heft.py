"""HEFT (Topcuoglu, Hariri and Wu 2002): ops by decreasing distance to the end, each where it finishes earliest."""

from __future__ import annotations

import numpy as np

from simdev.analysis.levels import b_level
from simdev.baselines._list import fit, kernels, mean_costs, new_state, tables, unit_devices
from simdev.placers.placer import placer


@placer(
    "heft",
    version=1,
    family="list",
    source="Topcuoglu, Hariri, Wu: Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous "
    "Computing, IEEE TPDS 13(3), 2002, section 4.1",
)
def heft(problem, *, rng, budget):
    """Rank ops by upward rank with mean costs, then place each at its earliest finish time over the accelerators.

    As in the paper, an op may be inserted into an idle interval, transfers do not contend and a device runs one op at a
    time. Colocation and memory are added: a device without enough free memory is skipped. Under the order ``priority``,
    the ranks are the priorities.
    """
    table = tables(problem, forward_only=False)
    order = upward_order(problem, table)

    def build(headroom):
        state = new_state(table, headroom)
        kernels().earliest_finish_first(table, state, order, np.zeros((0, 0), np.int64))
        return unit_devices(problem, table, state)

    return fit(problem, budget, build, order)


def upward_order(problem, table) -> np.ndarray:
    """int64: the ops to place, by decreasing upward rank; ties are in topological order."""
    rank = b_level(problem.graph, *mean_costs(problem, table.allowed))
    ops = np.flatnonzero(table.scope)
    return ops[np.lexsort((ops, -rank[ops]))]
