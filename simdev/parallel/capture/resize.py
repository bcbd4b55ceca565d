"""Captures on meshes of two sizes serve all sizes of the data-parallel axes.

What a rank executes depends on ``dp_shard`` only through the sizes of its shards: every number of the program is
constant, proportional to the number of ranks, or a constant plus a share of something that is divided among them. Two
captures with different numbers of ranks determine which; :func:`capture_resized` writes the program for any other
number. ``dp_replicate`` needs nothing: the program is the same for all sizes above 1. Two microbatch sizes determine
all others in the same way (:func:`of_microbatch`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any

from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.parallel.capture.stage import (
    Options,
    StageProgram,
    alike_others,
    captured,
    is_kept,
    stage_of_few,
)
from simdev.parallel.mesh import Mesh
from simdev.parallel.passes import STEP
from simdev.parallel.program import Call, NotRepeating, Segment, once_for_each

AXIS = "dp_shard"
SMALL, LARGE = 2, 4  # ranks in the captures that are packed for other sizes
SIZES = tuple(2**n for n in range(1, 13))  # of captures from which others are written, the smallest first
NUMBER = re.compile(r"(\d+)")


def capture_resized(
    model: ParallelModel,
    parameters: dict,
    mesh: Mesh,
    part: Part,
    order: str = STEP,
    split: bool = False,
    each: bool = False,
    gathered: bool = False,
) -> StageProgram:
    """What :func:`capture_stage` returns, computed from captures with two other sizes of ``dp_shard`` where these are
    kept. Most stages are asked for with one size or two; so that none is captured in vain, each is captured as it is.

    Parameters that do not divide by the number of ranks are padded by FSDP; such a size is captured as it is, too. Use
    this function where many plans of a model are compared and the model's code does not branch on the size of the mesh.
    """
    return stage_of_few(_resized_few, model, parameters, mesh, part, Options(order, split, each, gathered))


def _resized_few(model, parameters: tuple, mesh: Mesh, part: Part, *options) -> StageProgram:
    """:func:`captured`, or computed from what :func:`captured_meshes` finds."""
    meshes = captured_meshes(model, parameters, mesh, part, *options)
    if len(meshes) > 1:
        small, large = (captured(model, parameters, one, part, *options) for one in meshes)
        with suppress(NotRepeating):
            return resized(small, large, meshes, mesh)
    return captured(model, parameters, mesh, part, *options)


def captured_meshes(model: ParallelModel, parameters: tuple, mesh: Mesh, part: Part, *options: Any) -> list[Mesh]:
    """The meshes of the captures from which the program of a stage on ``mesh`` is made: two that are kept, without
    padding; otherwise ``mesh`` itself."""
    if mesh[AXIS] < SMALL or is_kept(model, parameters, mesh, part, *options):
        return [mesh]
    others = (Mesh({**mesh.sizes, AXIS: size}) for size in SIZES if size != mesh[AXIS])
    meshes = list(islice((one for one in others if is_kept(model, parameters, one, part, *options)), 2))
    if len(meshes) == 2:
        unit = captured(model, parameters, meshes[0], part, *options).shard_unit
        if unit and not any(unit % one[AXIS] for one in (mesh, *meshes)):
            return meshes
    return [mesh]


def few_shards(mesh: Mesh) -> list[Mesh]:
    """The meshes with which a stage on ``mesh`` is packed."""
    if mesh[AXIS] <= LARGE:
        return [mesh]
    return [Mesh({**mesh.sizes, AXIS: size}) for size in (SMALL, LARGE)]


def resized(small: StageProgram, large: StageProgram, meshes: Sequence[Mesh], mesh: Mesh) -> StageProgram:
    """The program on ``mesh`` of a stage that was captured on two other ``meshes``, which differ in ``dp_shard``.
    Raises :class:`NotRepeating` where the captures differ in more than sizes."""
    sizes = meshes[0][AXIS], meshes[1][AXIS]
    return _continued(small, large, partial(of_shares, ranks=mesh[AXIS], sizes=sizes))


def of_microbatch(small: StageProgram, large: StageProgram, sizes: tuple[int, int], microbatch: int) -> StageProgram:
    """The program of a stage with ``microbatch`` sequences, from captures with ``sizes``: every number of the program
    is a constant plus a multiple of the sequences. Raises :class:`NotRepeating` where the captures differ in more than
    numbers."""
    first, second = sizes

    def size(a: int, b: int) -> int:
        more, rest = divmod((b - a) * (microbatch - first), second - first)
        if rest:
            raise NotRepeating(f"{a} and {b} are not linear in the microbatch")
        return a + more

    return _continued(small, large, size)


def _continued(small: StageProgram, large: StageProgram, size: Callable[[int, int], int]) -> StageProgram:
    """The program in which each number is ``size`` of the numbers of two captures."""

    @cache  # layers repeat signatures
    def signature(a: str, b: str) -> str:
        return _signature(a, b, size)

    segment = once_for_each(partial(_segment, size=size, signature=signature))

    def segments(a: tuple[Segment, ...], b: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return tuple(segment(x, y) for x, y in zip(a, b, strict=True))

    forward, finish = segments((small.forward, small.finish), (large.forward, large.finish))
    sizes: dict[str, Any] = {
        name: size(getattr(small, name), getattr(large, name))
        for name in ("resident_bytes", "output_bytes", "parameters")
    }
    first, further, last, only = segments(small.backward, large.backward)
    backward, split = (first, further, last, only), segments(small.split, large.split)
    others = alike_others(small, large, segment)
    return replace(small, forward=forward, backward=backward, finish=finish, split=split, others=others, **sizes)


def _segment(
    small: Segment, large: Segment, size: Callable[[int, int], int], signature: Callable[[str, str], str]
) -> Segment:
    if len(small.calls) != len(large.calls):
        raise NotRepeating(f"{small.name}: two captures have different numbers of calls")
    calls = tuple(_call(x, y, size, signature) for x, y in zip(small.calls, large.calls, strict=True))
    return Segment(small.name, calls, size(small.live_bytes, large.live_bytes))


def _call(small: Call, large: Call, size: Callable[[int, int], int], signature: Callable[[str, str], str]) -> Call:
    if (small.kind, small.stream, small.waits, small.axes) != (large.kind, large.stream, large.waits, large.axes):
        raise NotRepeating(f"call {small.kind!r} differs in two captures")
    if small == large and small.live_bytes == large.live_bytes:
        return small
    return Call(  # replace() takes twice as long, and there are 50,000 calls in the plans of a job
        small.stream,
        small.kind,
        signature(small.signature, large.signature),
        size(small.flops, large.flops),
        size(small.bytes_read, large.bytes_read),
        size(small.bytes_written, large.bytes_written),
        small.waits,
        small.axes,
        size(small.payload_bytes, large.payload_bytes),
        size(small.live_bytes, large.live_bytes),
        small.is_forward,
        small.in_backward,
    )


def _signature(small: str, large: str, size: Callable[[int, int], int]) -> str:
    if small == large:
        return small
    (a, few), (b, many) = _pieces(small), _pieces(large)
    if a != b:
        raise NotRepeating(f"{small!r} and {large!r} differ in more than numbers")
    return a % tuple(map(size, few, many))


@lru_cache(1 << 14)
def _pieces(signature: str) -> tuple[str, tuple[int, ...]]:
    """A signature with a place for each number, and the numbers."""
    texts = NUMBER.split(signature)
    return "%d".join(text.replace("%", "%%") for text in texts[::2]), tuple(map(int, texts[1::2]))


def of_shares(small: int, large: int, ranks: int, sizes: tuple[int, int] = (SMALL, LARGE)) -> int:
    """The number that is ``small`` with the first of two numbers of ranks and ``large`` with the second."""
    few, many = sizes
    if small == large:
        return small
    if small * many == large * few:  # proportional to the ranks
        number, rest = divmod(small * ranks, few)
        more = 0
    else:
        share, rest = divmod((small - large) * few * many, many - few)
        number, more = small - share // few + share // ranks, share % few or share % ranks
    if rest or more:
        raise NotRepeating(f"{small} and {large} are no shares of the same number")
    return number
