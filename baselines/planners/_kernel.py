"""The inner loop of the dynamic programs over pipeline stages."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def with_a_stage(table, sizes, behind, add, value, row_of, layers_of):
    """Puts one more stage before each pipeline of ``behind``, float ``(layers + 1, ranks + 1)``: the values of the
    layers from ``i`` on with ``k`` ranks.

    ``table`` float ``(rows, layers + 1)`` is what the stage takes by its number of layers, on ``sizes[row]`` ranks;
    its value is added, or without ``add`` the larger of both counts. ``value`` receives the least values, ``row_of``
    and ``layers_of`` the row and the layers of the stage, all shaped as ``behind``. Of equal values the first row
    counts, and of one row the fewest layers.
    """
    layers, ranks = behind.shape[0] - 1, behind.shape[1] - 1
    reached = np.isfinite(behind).sum(axis=1)  # numbers of ranks with which pipelines take the layers from i on
    for row in range(len(sizes)):
        size = sizes[row]
        for i in range(layers + 1):
            for n in range(layers - i + 1):
                if not (np.isfinite(table[row, n]) and reached[i + n]):
                    continue
                for k in range(ranks + 1 - size):
                    new = table[row, n] + behind[i + n, k] if add else max(table[row, n], behind[i + n, k])
                    if new < value[i, k + size]:
                        value[i, k + size], row_of[i, k + size], layers_of[i, k + size] = new, row, n
