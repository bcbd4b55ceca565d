"""Ranks that are slower than the others, simulated with as few further ranks as show what they do.

All ranks of a stage run the same program. Exchanging two coordinates of a mesh axis that no slow rank has changes
nothing: ranks that differ only in such coordinates do the same at the same time. So each axis keeps the coordinates of
the slow ranks and one more that stands for all others; collectives keep the price of their real groups. A step of
16,384 ranks with one slow rank has at most two ranks for each axis and stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simdev.errors import InvalidInput
from simdev.parallel.mesh import Mesh
from simdev.parallel.unroll import Unroller

Slow = Mapping[int, float]  # global rank -> by which factor its kernels take longer


def make_unroller(meshes: Sequence[Mesh], unfolded: bool, slow: Slow) -> Unroller:
    """Collects the items of all ranks that have to be simulated: one for each pipeline rank, all of them if
    ``unfolded``, and as many as ``slow`` ranks need. ``meshes`` are those of the pipeline ranks; where they differ, a
    slow rank needs all."""
    widths = [mesh.stage_ranks for mesh in meshes]
    check_slow(sum(widths), slow)
    if not slow:
        return Unroller(meshes, not unfolded)
    small, place = list(meshes), _identity
    if not unfolded and len(set(meshes)) == 1:
        one, place = _smallest(meshes[0], slow)
        small = [one] * len(meshes)
    factors = [np.ones(mesh.stage_ranks) for mesh in small]
    ends = np.cumsum(widths)
    for rank, factor in slow.items():
        stage = int(np.searchsorted(ends, rank, side="right"))
        factors[stage][place(rank - int(ends[stage]) + widths[stage])] = factor
    return Unroller(small, False, factors)


def check_slow(ranks: int, slow: Slow) -> None:
    """Raise :class:`InvalidInput` for a rank that is none of ``ranks``, or a factor below 1 or above 100."""
    for rank, factor in slow.items():
        if not 0 <= rank < ranks:
            raise InvalidInput(f"no rank {rank} in a mesh of {ranks} ranks", source="plan", field="slow")
        if not 1 <= factor <= 100:
            raise InvalidInput(f"expected a factor from 1 to 100, got {factor}", source="plan", field="slow")


def parse_slow(texts: list[str]) -> dict[int, float]:
    """``["3=1.2"]`` as ``{3: 1.2}``. Raises :class:`InvalidInput`."""
    found: dict[int, float] = {}
    for text in texts:
        rank, equals, factor = text.partition("=")
        try:
            number, value = int(rank), float(factor)
        except ValueError:
            raise InvalidInput(f"expected RANK=FACTOR, such as 3=1.2, got {text!r}", source="slow") from None
        if number in found:
            raise InvalidInput(f"rank {number} is given twice", source="slow")
        found[number] = value
    return found


def _identity(member: int) -> int:
    return member


def _smallest(mesh: Mesh, slow: Slow):
    """The mesh of the ranks to simulate, and a function from a member of a stage to its place there."""
    shape = [size for _, size in mesh.inner]
    members = np.array(sorted({rank % mesh.stage_ranks for rank in slow}))
    where = np.array(np.unravel_index(members, shape)) if shape else np.zeros((0, len(members)), np.int64)
    kept = [sorted(set(row.tolist())) for row in where]
    others = [len(row) < size for row, size in zip(kept, shape, strict=True)]  # they are first: figures are theirs
    sizes = {axis: len(row) + more for (axis, _), row, more in zip(mesh.inner, kept, others, strict=True)}
    small = Mesh({"pp": mesh["pp"], **sizes})

    def place(member: int) -> int:
        if not shape:
            return 0
        old = np.unravel_index(member, shape)
        new = [row.index(int(c)) + more for c, row, more in zip(old, kept, others, strict=True)]
        return int(np.ravel_multi_index(new, list(sizes.values())))

    return small, place
