"""One pair of captures serves all sizes of the data-parallel axes.

What a rank executes depends on ``dp_shard`` only through the sizes of its shards: every number of the program is
constant, proportional to the number of ranks, or a constant plus a share of something that is divided among them. Two
captures, with 2 and with 4 ranks, determine which; :func:`capture_resized` writes the program for any other number.
``dp_replicate`` needs nothing: the program is the same for all sizes above 1.
"""

from __future__ import annotations

import re
from dataclasses import replace

from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.parallel.capture import StageProgram, capture_stage, captured
from simdev.parallel.mesh import Mesh
from simdev.parallel.program import Call, NotRepeating, Segment

AXIS = "dp_shard"
SMALL, LARGE = 2, 4  # ranks in the two captures
NUMBER = re.compile(r"(\d+)")


def capture_resized(model: ParallelModel, parameters: dict, mesh: Mesh, part: Part, *options: bool) -> StageProgram:
    """What :func:`capture_stage` returns, from captures that all sizes of ``dp_shard`` share; ``options`` are its
    further arguments.

    Parameters that do not divide by the number of ranks are padded by FSDP; such a size is captured as it is. Use it
    where many plans of a model are compared and the model's code does not branch on the size of the mesh.
    """
    return capture_stage(model, parameters, mesh, part, *options, capture=_resized_few)


def _resized_few(model, parameters: tuple, mesh: Mesh, part: Part, *options: bool) -> StageProgram:
    """:func:`captured`, from captures with few ranks where that can be."""
    meshes = few_shards(mesh)
    if len(meshes) == 1:
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
    ranks = mesh[AXIS]

    def segments(a: tuple[Segment, ...], b: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return tuple(_segment(x, y, mesh) for x, y in zip(a, b, strict=True))

    forward, finish = segments((small.forward, small.finish), (large.forward, large.finish))
    backward, split = segments(small.backward, large.backward), segments(small.split, large.split)
    sizes = {
        name: _size(getattr(small, name), getattr(large, name), ranks)
        for name in ("resident_bytes", "output_bytes", "parameters")
    }
    split = segments(small.split, large.split)
    return replace(small, forward=forward, backward=backward, finish=finish, split=split, **sizes)


def _segment(small: Segment, large: Segment, mesh: Mesh) -> Segment:
    if len(small.calls) != len(large.calls):
        raise NotRepeating(f"{small.name}: the number of calls depends on {AXIS}")
    calls = tuple(_call(x, y, mesh) for x, y in zip(small.calls, large.calls, strict=True))
    return Segment(small.name, calls, _size(small.live_bytes, large.live_bytes, mesh[AXIS]))


def _call(small: Call, large: Call, mesh: Mesh) -> Call:
    ranks = mesh[AXIS]
    if (small.kind, small.stream, small.waits, small.axes) != (large.kind, large.stream, large.waits, large.axes):
        raise NotRepeating(f"call {small.kind!r} depends on {AXIS}")
    if small == large and small.live_bytes == large.live_bytes and AXIS not in small.axes:
        return small
    sizes = {
        name: _size(getattr(small, name), getattr(large, name), ranks)
        for name in ("flops", "bytes_read", "bytes_written", "payload_bytes", "live_bytes")
    }
    return replace(small, signature=_signature(small.signature, large.signature, ranks), **sizes)


def _signature(small: str, large: str, ranks: int) -> str:
    if small == large:
        return small
    a, b = NUMBER.split(small), NUMBER.split(large)
    if a[::2] != b[::2]:
        raise NotRepeating(f"{small!r} and {large!r} differ in more than numbers")
    b[1::2] = [str(_size(int(x), int(y), ranks)) for x, y in zip(a[1::2], b[1::2], strict=True)]
    return "".join(b)


def _size(small: int, large: int, ranks: int) -> int:
    """The number that is ``small`` with 2 ranks and ``large`` with 4."""
    if small == large:
        return small
    if small * LARGE == large * SMALL:  # proportional to the ranks
        return small // SMALL * ranks
    share, rest = divmod((small - large) * LARGE * SMALL // (LARGE - SMALL), ranks)
    if rest:
        raise NotRepeating(f"{small} and {large} are no shares of the same number")
    return small - (small - large) * LARGE // (LARGE - SMALL) + share
