"""m-ETF (Jeon et al. 2020, "Baechi"): earliest task first (Hwang et al. 1989) within each device's memory."""

from __future__ import annotations

import numpy as np

from simdev.analysis.levels import average_durations, b_level
from simdev.baselines._list import fit, kernels, new_state, tables, unit_devices
from simdev.errors import InvalidInput
from simdev.placers.placer import placer

SCOPES = ("forward", "step")


@placer(
    "m-etf",
    version=1,
    family="list",
    defaults={"scope": "forward"},
    source="Jeon et al., Baechi: Fast Device Placement of Machine Learning Graphs, SoCC 2020, section 3.2.2",
)
def m_etf(problem, *, rng, budget, scope):
    """Repeatedly place the pair of ready op and device with the earliest start that fits in memory.

    As in Baechi, each device has one channel for sending and receiving, and a tensor is sent once to each device; only
    forward ops are scheduled, and gradients follow their ops; an op with a single reader is co-placed with it. Ties go
    to the op with the largest b-level. ``scope=step`` schedules the whole step, without co-placement.

    Departures: co-placed ops hold at most half a device's memory, and co-placed ops are not fused into one.
    """
    if scope not in SCOPES:
        raise InvalidInput(f"{scope!r} is none of {', '.join(SCOPES)}", source="placer m-etf", field="scope")
    table = tables(problem, forward_only=scope == "forward")
    level = b_level(problem.graph, average_durations(problem))
    order = np.empty(len(level), np.int64)
    order[np.lexsort((np.arange(len(level)), -level))] = np.arange(len(level))
    nobody = np.full(len(level), -1, np.int64)

    def build(headroom):
        state = new_state(table, headroom)
        kernels().earliest_start_first(table, state, order, nobody)
        return unit_devices(problem, table, state)

    return fit(problem, budget, build)
