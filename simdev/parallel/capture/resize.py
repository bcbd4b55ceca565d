"""One pair of captures serves all sizes of the data-parallel axes.

What a rank executes depends on ``dp_shard`` only through the sizes of its shards: every number of the program is
constant, proportional to the number of ranks, or a constant plus a share of something that is divided among them. Two
captures, with 2 and with 4 ranks, determine which; :func:`capture_resized` writes the program for any other number.
``dp_replicate`` needs nothing: the program is the same for all sizes above 1. Two microbatch sizes determine all others
in the same way (:func:`of_microbatch`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.parallel.capture.stage import Options, StageProgram, alike_others, captured, is_kept, stage_of_few
from simdev.parallel.mesh import Mesh
from simdev.parallel.passes import STEP
from simdev.parallel.program import Call, NotRepeating, Segment

AXIS = "dp_shard"
SMALL, LARGE = 2, 4  # ranks in the two captures
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
    """What :func:`capture_stage` returns, from captures that all sizes of ``dp_shard`` share.

    Parameters that do not divide by the number of ranks are padded by FSDP; such a size is captured as it is. Use it
    where many plans of a model are compared and the model's code does not branch on the size of the mesh.
    """
    return stage_of_few(_resized_few, model, parameters, mesh, part, Options(order, split, each, gathered))


def _resized_few(model, parameters: tuple, mesh: Mesh, part: Part, *options) -> StageProgram:
    """:func:`captured`, from captures with few ranks where that can be and the stage is not kept."""
    meshes = few_shards(mesh)
    if len(meshes) == 1 or is_kept(model, parameters, mesh, part, *options):
        return captured(model, parameters, mesh, part, *options)
    small, large = (captured(model, parameters, few, part, *options) for few in meshes)
    try:
        if small.shard_unit and small.shard_unit % mesh[AXIS] == 0:
            return resized(small, large, mesh)
    except NotRepeating:
        pass
    return captured(model, parameters, mesh, part, *options)


def few_shards(mesh: Mesh) -> list[Mesh]:
    """The meshes with which a stage on ``mesh`` is captured."""
    if mesh[AXIS] <= LARGE:
        return [mesh]
    return [Mesh({**mesh.sizes, AXIS: size}) for size in (SMALL, LARGE)]


def resized(small: StageProgram, large: StageProgram, mesh: Mesh) -> StageProgram:
    """The program on ``mesh`` of a stage that was captured with ``dp_shard`` 2 and 4, the other axes alike. Raises
    :class:`NotRepeating` where the captures differ in more than sizes."""
    return _continued(small, large, partial(of_shares, ranks=mesh[AXIS]))


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

    def segment(a: Segment, b: Segment) -> Segment:
        return _segment(a, b, size, signature)

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


def of_shares(small: int, large: int, ranks: int) -> int:
    """The number that is ``small`` with 2 ranks and ``large`` with 4."""
    if small == large:
        return small
    if small * LARGE == large * SMALL:  # proportional to the ranks
        return small // SMALL * ranks
    share, rest = divmod((small - large) * LARGE * SMALL // (LARGE - SMALL), ranks)
    if rest:
        raise NotRepeating(f"{small} and {large} are no shares of the same number")
    return small - (small - large) * LARGE // (LARGE - SMALL) + share
