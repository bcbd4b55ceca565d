"""m-ETF (Jeon et al. 2020, "Baechi"): earliest task first (Hwang et al. 1989) within each device's memory."""

from __future__ import annotations

import numpy as np

from simdev.analysis import average_durations, b_level
from simdev.baselines._list import fit, follow_forward, kernels, new_state, tables
from simdev.errors import InvalidInput
from simdev.placer import placer

SCOPES = ("forward", "step")


@placer(
    "m-etf", version=1, family="list", defaults={"scope": "forward"},
    source="Jeon et al., Baechi: Fast Device Placement of Machine Learning Graphs, SoCC 2020, section 3.2.2",
)  # fmt: skip
def m_etf(problem, *, rng, budget, scope):
    """Again and again the ready op and device with the earliest start that fits in memory.

    Communication as in Baechi: one channel a device for sending and receiving, a tensor sent once to each device. Ties
    go to the op with the largest b-level. With ``scope=forward`` only forward ops are scheduled and gradients follow
    their ops, as in Baechi; ``scope=step`` schedules the whole step.
    """
    if scope not in SCOPES:
        raise InvalidInput(f"{scope!r} is none of {', '.join(SCOPES)}", source="placer m-etf", field="scope")
    table = tables(problem, forward_only=scope == "forward")
    level = b_level(problem.graph, average_durations(problem))
    order = np.empty(len(level), np.int64)
    order[np.lexsort((np.arange(len(level)), -level))] = np.arange(len(level))
    nobody, no_time = np.full(len(level), -1, np.int64), np.zeros(len(level), np.int64)

    def build(room):
        state = new_state(table, room)
        kernels().earliest_start_first(table, state, order, nobody, no_time)
        return follow_forward(problem, state.unit_device, table.allowed)

    return fit(problem, budget, build)
