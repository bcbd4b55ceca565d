"""Min-cut: a balanced partition of the graph over the accelerators with the fewest bytes between the parts."""

from __future__ import annotations

import numpy as np

from simdev.baselines._scotch import byte_costs, map_graph
from simdev.baselines._units import choices, fastest_ns, move_to_allowed, shrunk, unit_adjacency, used_devices
from simdev.errors import InvalidInput, Unsupported
from simdev.placers.placer import placer
from simdev.problem.placement import Placement

TOOLS = ("scotch", "metis", "kahip")
IMBALANCE = 0.03


@placer(
    "min-cut",
    version=1,
    family="partition",
    memory_aware=False,
    defaults={"tool": "scotch"},
    needs=("pyscotch",),
    source="Mirhoseini et al. 2017, section 4.2 (Scotch over the GPUs only); Karypis and Kumar 1998 (METIS); "
    "Sanders and Schulz 2013 (KaHIP)",
)
def min_cut(problem, *, rng, budget, tool):
    """The ``scotch`` baseline over accelerators only, all with the same weight.

    ``tool`` is ``scotch`` (static mapping, which knows the distances of accelerators), ``metis`` or ``kahip`` (plain
    partitions into equal parts). Memory is ignored.
    """
    if tool not in TOOLS:
        raise InvalidInput(f"{tool!r} is none of {', '.join(TOOLS)}", source="placer min-cut", field="tool")
    allowed = choices(problem)
    devices = used_devices(allowed)
    devices = devices[np.isin(devices, problem.topology.accelerators)]
    if not len(devices):
        raise Unsupported("no accelerator supports any op")
    weights = fastest_ns(problem)
    part = np.zeros(len(weights), np.int64)
    if 1 < len(devices):
        adjacency = unit_adjacency(problem)
        if tool == "scotch":
            part = map_graph(adjacency, weights, np.ones(len(devices)), byte_costs(problem, devices), rng)
        else:
            part = (_metis if tool == "metis" else _kahip)(*adjacency, weights, len(devices), rng)
    return Placement.of_units(problem, move_to_allowed(problem, devices[part], allowed))


def _metis(ptr, neighbour, load, weights, k, rng):
    try:
        import pymetis
    except ImportError:
        raise Unsupported("needs the pymetis package") from None
    options = pymetis.Options(seed=int(rng.integers(1 << 30)), ufactor=round(1000 * IMBALANCE), contig=0)
    _, part = pymetis.part_graph(
        k,
        pymetis.CSRAdjacency(ptr, neighbour),
        vweights=shrunk(weights),
        eweights=shrunk(load),
        options=options,
        recursive=False,
    )
    return np.asarray(part)


def _kahip(ptr, neighbour, load, weights, k, rng):
    try:
        import kahip
    except ImportError:
        raise Unsupported("needs the kahip package") from None
    arguments = shrunk(weights).tolist(), ptr.tolist(), shrunk(load).tolist(), neighbour.tolist()
    _, part = kahip.kaffpa(*arguments, k, IMBALANCE, True, int(rng.integers(1 << 30)), 1)  # 1: mode "eco"
    return np.asarray(part)
