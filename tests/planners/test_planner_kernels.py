"""The compiled loops of planners against plain Python."""

from itertools import product

import numpy as np
import pytest

from simdev.baselines.planners._kernel import with_a_stage
from simdev.planners._kernel import longest_ns, most_bytes


def longest(streams, ns, waits):
    """The longest path from an item on stream 0 to one on stream 0: an item follows the one before it on its stream,
    and what it waits for."""
    before = {n: [max((k for k in range(n) if streams[k] == streams[n]), default=None)] for n in range(len(ns))}
    for n, k in waits:
        before[n] += [k] if k >= 0 else []
    most = {}
    for n in range(len(ns)):
        paths = [most[k] for k in before[n] if k is not None and most[k]]
        most[n] = max(paths, default=0) + ns[n] if paths or streams[n] == 0 else 0
    return max((most[n] for n in range(len(ns)) if streams[n] == 0), default=0)


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_path_of_a_segment(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        count, streams = int(rng.integers(1, 20)), int(rng.integers(1, 4))
        stream, ns = rng.integers(0, streams, count), rng.integers(1, 50, count)
        waits = [(n, int(rng.integers(-1, n))) for n in rng.integers(1, count, 3 * count)] if count > 1 else []
        item, target = np.array(waits, np.int32).reshape(-1, 2).T
        found = longest_ns(stream.astype(np.int32), ns, item, target, streams)
        assert found == longest(stream.tolist(), ns.tolist(), waits)


def test_the_most_memory_of_a_rank():
    """Two microbatches of a stage: each forward pass leaves 5 bytes and needs 7; the backward passes free them."""
    rank, stage, name = np.zeros(4, np.int64), np.zeros(4, np.int64), np.array([0, 0, 1, -1])
    left, most = np.array([[5.0], [-5.0]]), np.array([[7.0], [3.0]])
    assert most_bytes(rank, stage, name, left, most, np.array([100.0])) == 100 + 5 + 5 + 3
    assert most_bytes(rank[:2], stage[:2], name[:2], left, most, np.array([100.0])) == 100 + 5 + 7


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_one_more_stage_before_all_pipelines(seed, add):
    rng = np.random.default_rng(seed)
    layers, ranks, sizes = int(rng.integers(1, 8)), int(rng.integers(1, 9)), [1, 2, 4]
    table = rng.integers(1, 9, (3, layers + 1)).astype(float)
    table[rng.random(table.shape) < 0.3] = np.inf
    behind = rng.integers(1, 9, (layers + 1, ranks + 1)).astype(float)
    behind[rng.random(behind.shape) < 0.3] = np.inf
    value, row_of = np.full(behind.shape, np.inf), np.zeros(behind.shape, np.int64)
    layers_of = row_of.copy()
    with_a_stage(table, np.array(sizes), behind, add, value, row_of, layers_of)
    for i, k in product(range(layers + 1), range(ranks + 1)):
        ways = {
            (row, n): table[row, n] + behind[i + n, k - size] if add else max(table[row, n], behind[i + n, k - size])
            for row, size in enumerate(sizes)
            for n in range(layers - i + 1)
            if size <= k
        }
        least = min(ways.values(), default=np.inf)
        assert value[i, k] == least
        if least < np.inf:
            assert (row_of[i, k], layers_of[i, k]) == min(way for way, one in ways.items() if one == least)
