"""Static mapping by Scotch (Pellegrini and Roman 1996), through the ``pyscotch`` package."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path

import numpy as np

from simdev.baselines._units import shrunk
from simdev.errors import Unsupported
from simdev.problem.problem import Problem

THREADS = "SCOTCH_PTHREAD_NUMBER"  # Scotch reads it whenever it makes a context
WEIGHT_SCALE = 1000  # the slowest device's weight is rounded to a whole multiple of 1 / WEIGHT_SCALE
DISTANCE_SCALE = 100


def load_scotch():
    """Import ``pyscotch``, which prints on its first import. Raises :class:`Unsupported` if it is not installed."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            import pyscotch
            from pyscotch import libscotch  # noqa: F401  loads the library, which prints
    except (ImportError, OSError, RuntimeError) as error:
        raise Unsupported(f"needs the pyscotch package ({error})") from None
    return pyscotch


def map_graph(adjacency, weights: np.ndarray, speeds: np.ndarray, distances: np.ndarray, rng) -> np.ndarray:
    """Map a weighted graph onto ``k`` processors; return int64 ``(n,)`` of processor numbers.

    ``adjacency`` is CSR ``(ptr, neighbour, load)``; ``weights`` int ``(n,)``; ``speeds`` float ``(k,)``: the share of
    the work that each processor should get; ``distances`` float ``(k, k)``, positive off the diagonal: the cost of a
    byte between two processors. Scotch balances the work and minimises the sum over edges of load times distance.
    """
    ptr, neighbour, load = adjacency
    pyscotch = load_scotch()
    with _one_thread(), contextlib.redirect_stdout(io.StringIO()):
        with pyscotch.Context() as context, pyscotch.Architecture() as target, pyscotch.Graph() as graph:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "target.tgt"
                path.write_text(target_description(speeds, distances), encoding="ascii")
                target.load(path)
            context.random_seed(int(rng.integers(1 << 31)))
            context.random_reset()
            graph.build(ptr, neighbour, shrunk(weights), shrunk(load))
            return np.asarray(context.bind_graph(graph).map(target), np.int64)


@contextlib.contextmanager
def _one_thread():
    """Run Scotch in one thread. Its threads race: on two cores even its deterministic mode varies between calls."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before


def target_description(speeds: np.ndarray, distances: np.ndarray) -> str:
    """A decomposition-defined target architecture (Scotch user's guide, "deco 0").

    It lists each processor's label, weight and domain number in a tree of bipartitions, then the lower triangle of the
    distance matrix.
    """
    weights = np.maximum(1, np.rint(WEIGHT_SCALE * np.asarray(speeds) / max(speeds))).astype(int)
    apart = ~np.eye(len(speeds), dtype=bool)
    unit = distances[apart].min(initial=np.inf)
    spans = np.maximum(1, np.rint(DISTANCE_SCALE * distances / unit)).astype(int)
    domain: dict[int, int] = {}
    _bipartition(list(range(len(speeds))), 1, distances, domain)
    lines = ["deco", "0", f"{len(speeds)} {max(domain.values())}"]
    lines += [f"{number} {weights[number]} {domain[number]}" for number in range(len(speeds))]
    lines += [" ".join(str(span) for span in spans[number, :number]) for number in range(1, len(speeds))]
    return "\n".join(lines) + "\n"


def _bipartition(members: list[int], number: int, distances: np.ndarray, domain: dict[int, int]) -> None:
    """Number the domains of a tree that splits ``members`` into halves of near neighbours."""
    if len(members) == 1:
        domain[members[0]] = number
        return
    block = distances[np.ix_(members, members)]
    seed = members[int(np.argmax(block.sum(axis=1)))]  # an outlying processor; its half holds the nearest ones
    near = sorted(members, key=lambda other: (other != seed, distances[seed, other], other))[: len(members) // 2]
    _bipartition(near, 2 * number, distances, domain)
    _bipartition([other for other in members if other not in near], 2 * number + 1, distances, domain)


def byte_costs(problem: Problem, devices: np.ndarray) -> np.ndarray:
    """float ``(k, k)``: mean time per byte to send the graph's tensors between each pair of ``devices``."""
    costs, sizes = problem.costs, problem.graph.tensor_bytes
    total = costs.transfer_ns.sum(axis=1) / max(1, int(sizes.sum()))
    classes = costs.pair_class[np.ix_(devices, devices)]
    if not len(sizes):
        total = np.ones(len(total))  # nothing is ever sent
    table = np.where(classes >= 0, total[classes], 0.0)
    return (table + table.T) / 2
