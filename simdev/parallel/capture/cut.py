"""Cuts what was recorded into segments: calls with mesh axes, streams by name and relative waits."""

from __future__ import annotations

from math import prod

from simdev.errors import InvalidInput
from simdev.parallel.mesh import Mesh
from simdev.parallel.program import COMPUTE, Call, Segment


def cut(name: str, entries: list, first: int, mesh: Mesh, base: int, live: int, lowest: int = 0) -> Segment:
    """The recorded entries from ``first`` on as a segment.

    ``base`` and ``live`` are the bytes in use before and after it; ``lowest`` is the lowest global rank of the pipeline
    stage. Raises :class:`InvalidInput` for a collective that is not along whole axes of the mesh.
    """
    issued: dict[str, int] = {}  # calls of each stream so far
    place: dict[int, tuple[str, int]] = {}  # entry -> its stream and its position there
    waited: dict[tuple[str, str], int] = {}  # (stream, other) -> the latest position waited for
    calls = []
    for number in range(first, len(entries)):
        entry = entries[number]
        stream, axes = _stream_of(entry, mesh, lowest)
        waits = {}
        for other in entry.waits:
            there, position = place[other] if other >= first else (_stream_of(entries[other], mesh, lowest)[0], -1)
            if there == stream or waited.get((stream, there), -2) >= position:
                continue
            waited[stream, there] = position
            count = issued.get(there, 0)
            waits[there] = max(0, count - 1 - position) if position >= 0 else count
        place[number] = stream, issued.get(stream, 0)
        issued[stream] = issued.get(stream, 0) + 1
        calls.append(
            Call(
                stream,
                entry.kind,
                entry.signature,
                entry.flops,
                entry.read,
                entry.written,
                tuple(sorted(waits.items())),
                axes,
                entry.bytes,
                entry.live_bytes - base,
                entry.recorded_grad,
                entry.in_backward,
            )
        )
    return Segment(name, tuple(calls), live - base)


def _stream_of(entry, mesh: Mesh, lowest: int) -> tuple[str, tuple[str, ...]]:
    """The name of an entry's stream, and the axes of its communicator."""
    if not entry.ranks:
        return (COMPUTE if entry.stream == 0 else f"stream {entry.stream}"), ()
    ranks = [rank - lowest for rank in entry.ranks]
    if not all(0 <= rank < mesh.stage_ranks for rank in ranks):
        raise InvalidInput(
            f"{entry.kind} of {entry.bytes} bytes between pipeline stages is not simulated", source="mesh"
        )
    axes = mesh.axes_of(ranks)
    if len(ranks) != prod(mesh[axis] for axis in axes):
        shown = ", ".join(map(str, entry.ranks[:6])) + (", ..." if len(ranks) > 6 else "")
        raise InvalidInput(
            f"{entry.kind} among {len(ranks)} ranks ({shown}) is not along whole axes of {mesh}; give it an axis",
            source="mesh",
        )
    return "+".join(axes), axes
