"""The device mesh: a grid of ranks with named axes, and the communicators that its lines are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from simdev.errors import InvalidInput, UnknownName, quoted

AXES = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "ep",
    "tp",
)  # outermost first: neighbours along the last are one rank apart
MAX_RANKS = 1 << 20
DIGITS = 12  # of a size that is read


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes; axes that are not given have size 1."""

    sizes: Mapping[str, int]

    def __post_init__(self):
        for axis, size in self.sizes.items():
            if axis not in AXES:
                raise UnknownName("mesh axis", axis, AXES, source="mesh")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InvalidInput(f"expected a whole number from 1 on, got {quoted(size)}", source="mesh", field=axis)
        if self.ranks > MAX_RANKS:
            raise InvalidInput(f"{self.ranks} ranks; at most {MAX_RANKS} are supported", source="mesh")

    def __getitem__(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def __hash__(self) -> int:
        return hash(tuple(self[axis] for axis in AXES))

    @property
    def ordered(self) -> dict[str, int]:
        """The axes that were given, also those of size 1, outermost first."""
        return {axis: self.sizes[axis] for axis in AXES if axis in self.sizes}

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of all sizes."""
        return prod(self.sizes.values())

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.ranks // self["pp"]

    @property
    def replicas(self) -> int:
        """How many different microbatches are processed at once: the product of the data-parallel axes.

        Expert parallelism divides the data as well: its ranks hold different tokens.
        """
        return self["dp_replicate"] * self["dp_shard"] * self["ep"]

    @cached_property
    def inner(self) -> tuple[tuple[str, int], ...]:
        """``(axis, size)`` of the axes inside a stage that have more than one rank, outermost first."""
        return tuple((axis, self[axis]) for axis in AXES[1:] if self[axis] > 1)

    def axes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The axes along which the stage-local ``ranks`` of a communicator differ."""
        shape = [size for _, size in self.inner]
        where = np.array(np.unravel_index(np.array(sorted(ranks)), shape)) if shape else np.zeros((0, 1))
        return tuple(axis for (axis, _), row in zip(self.inner, where, strict=True) if len(set(row.tolist())) > 1)

    def lines(self, axes: Iterable[str]) -> np.ndarray:
        """int64 ``(groups, members)``: the stage-local ranks of every communicator along ``axes``."""
        names = [axis for axis, _ in self.inner]
        grid = np.arange(self.stage_ranks).reshape([size for _, size in self.inner] or [1])
        along = [names.index(axis) for axis in axes]
        members = prod(grid.shape[axis] for axis in along)
        return np.moveaxis(grid, along, range(-len(along), 0)).reshape(-1, members)

    def __str__(self) -> str:
        return ",".join(f"{axis}={self[axis]}" for axis in AXES if self[axis] > 1) or "1 rank"


def parse_meshes(text: str) -> tuple[Mesh, tuple[Mesh, ...]]:
    """A mesh, and the meshes of its stages if there are several, with ``/`` between them: ``tp=4/dp_replicate=2,tp=2``.
    ``1`` is a stage with one rank. Raises :class:`InvalidInput` naming the part that is wrong."""
    if "/" not in text:
        return parse_mesh(text), ()
    stages = tuple(Mesh({}) if part.strip() == "1" else parse_mesh(part) for part in text.split("/"))
    return Mesh({"pp": len(stages)}), stages


def parse_mesh(text: str) -> Mesh:
    """``dp_shard=8,tp=8,pp=4`` as a :class:`Mesh`. Raises :class:`InvalidInput` naming the part that is wrong."""
    sizes: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        axis, equals, value = part.partition("=")
        if not equals or not value.strip().isdecimal() or len(value) > DIGITS:
            raise InvalidInput(f"expected AXIS=SIZE, such as dp_shard=8, got {quoted(part)}", source="mesh")
        if axis.strip() in sizes:
            raise InvalidInput(f"axis {axis.strip()!r} is given twice", source="mesh")
        sizes[axis.strip()] = int(value)
    if not sizes:
        raise InvalidInput("expected AXIS=SIZE, such as dp_shard=8,tp=8", source="mesh")
    return Mesh(sizes)
