"""Do the ranks of a stage call the same collectives? If they do not, a real job would wait for ever, or compute wrong.

One rank stands for all ranks of its stage. The program of the stage's last rank is captured as well where the code is
the user's own, and compared with that of the first rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from simdev.errors import InvalidInput
from simdev.parallel.program import Call, Segment

UNEVEN = frozenset({"all_to_all"})  # collectives whose sizes may differ from rank to rank


def check_matching(
    first: Iterable[Segment], other: Iterable[Segment], ranks: tuple[int, int], source: str | None
) -> None:
    """Raise :class:`InvalidInput` unless both programs call the same collectives in each communicator, in the same
    order and with the same sizes, and take the communicators in the same order. ``ranks`` are the two global ranks."""
    sequences = [_collectives(segments) for segments in (first, other)]
    calls = [_by_communicator(sequence) for sequence in sequences]
    for stream in sorted(calls[0].keys() | calls[1].keys()):
        mine, theirs = (found.get(stream, []) for found in calls)
        for number in range(max(len(mine), len(theirs))):
            one, two = (_shown(found, number) for found in (mine, theirs))
            if one != two:
                raise InvalidInput(
                    f"ranks {ranks[0]} and {ranks[1]} call different collectives along {stream}: call {number + 1} is "
                    f"{one} on rank {ranks[0]}, and {two} on rank {ranks[1]}",
                    source=source,
                )

    for number, (one, two) in enumerate(zip(*sequences, strict=True)):
        if one.stream != two.stream:
            raise InvalidInput(
                f"ranks {ranks[0]} and {ranks[1]} take communicators in different orders, and may wait for each other: "
                f"call {number + 1} is {one.kind} along {one.stream} on rank {ranks[0]}, and {two.kind} along "
                f"{two.stream} on rank {ranks[1]}",
                source=source,
            )


def _collectives(segments: Iterable[Segment]) -> list[Call]:
    return [call for segment in segments for call in segment.calls if call.is_collective]


def _by_communicator(calls: list[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(call.stream, []).append(call)
    return found


def _shown(calls: list[Call], number: int) -> str:
    if number >= len(calls):
        return "missing"
    call = calls[number]
    return call.kind if call.kind in UNEVEN else f"{call.kind} of {call.payload_bytes:,} bytes"
