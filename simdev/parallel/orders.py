"""The order in which each pipeline rank executes the microbatches of its stages, as ``torch.distributed.pipelining``
has it.

An order is a list of actions for each rank. An action is ``(what, stage, microbatch)``; ``what`` is ``F`` (forward),
``B`` (backward), or the halves of a backward pass: ``I`` (gradient of the stage's input) and ``W`` (gradients of its
weights). ``gpipe``, ``1f1b`` and ``interleaved`` are written here, and tests compare them with PyTorch's; the others
are PyTorch's own. ``zero-bubble`` is ZB-H1 (Qi et al. 2024) if each rank has one stage, and its interleaved form
otherwise; ``zbv`` and ``dualpipe-v`` place two stages on each rank in the form of a V.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from simdev.errors import InvalidInput, UnknownName, Unsupported
from simdev.parallel.capture.kept import remembered

Action = tuple[str, int, int]
PYTORCH = {
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
SCHEDULES = ("gpipe", "1f1b", *PYTORCH)
SPLIT = ("zero-bubble", "zbv", "dualpipe-v")  # schedules that split backward passes
V_SHAPED = ("zbv", "dualpipe-v")


@lru_cache(maxsize=256)
def pipeline_order(
    schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each of ``ranks`` ranks. Raises :class:`InvalidInput` if the schedule does not exist for these
    numbers, and :class:`Unsupported` if it needs PyTorch and PyTorch is not installed."""
    if schedule not in SCHEDULES:
        raise UnknownName("schedule", schedule, SCHEDULES, source="plan")
    if microbatches < 1:
        raise InvalidInput(
            f"expected a whole number from 1 on, got {microbatches}", source="plan", field="microbatches"
        )
    if schedule in ("gpipe", "1f1b"):
        if stages_per_rank != 1:
            raise InvalidInput(f"{schedule} has one stage on a rank", source="plan", field="stages per rank")
        return tuple(_single(schedule, rank, ranks, microbatches) for rank in range(ranks))
    if schedule in V_SHAPED and stages_per_rank != 2:
        raise InvalidInput(f"{schedule} has two stages on a rank", source="plan", field="stages per rank")
    if schedule == "dualpipe-v" and microbatches < 2 * ranks:
        message = f"dualpipe-v on {ranks} ranks needs at least {2 * ranks}, got {microbatches}"
        raise InvalidInput(message, source="plan", field="microbatches")
    if ranks < 2:
        raise InvalidInput(f"{schedule} needs at least two pipeline ranks", source="plan", field="pp")
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise InvalidInput(
            f"{schedule} on {ranks} ranks needs a multiple of {rounds}, got {microbatches}",
            source="plan",
            field="microbatches",
        )
    if schedule == "interleaved":
        return tuple(_interleaved(rank, ranks, microbatches, rounds, stages_per_rank) for rank in range(ranks))
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(f"the schedule {schedule} needs PyTorch: pip install 'simdev[capture]'")
    numbers = schedule, ranks, microbatches, stages_per_rank
    found = remembered(_name_of(numbers), lambda: {"order": _pytorch(*numbers)})
    return tuple(tuple((what, stage, m) for what, stage, m in actions) for actions in found["order"])


def _name_of(numbers: tuple[str, int, int, int]) -> str:
    """The name under which an order of PyTorch is kept: importing PyTorch takes longer than a warm search for a plan
    may."""
    text = f"{numbers} {version('torch')}".encode()
    return hashlib.sha256(text + Path(__file__).read_bytes()).hexdigest()[:32]


def _single(schedule: str, rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    early = microbatches if schedule == "gpipe" else min(microbatches, ranks - rank)
    actions = [("F", rank, m) for m in range(early)]
    for m in range(microbatches):
        actions.append(("B", rank, m))
        if early + m < microbatches:
            actions.append(("F", rank, early + m))
    return tuple(actions)


def _interleaved(rank: int, ranks: int, microbatches: int, rounds: int, chunks: int) -> tuple[Action, ...]:
    """Interleaved 1F1B (Narayanan et al. 2021): each of the ``chunks`` stages of a rank in turn takes the microbatches
    of a round; backward passes go through the stages the other way round."""
    each = microbatches // rounds
    passes = [
        (chunk, number * each + one) for number in range(rounds) for chunk in range(chunks) for one in range(each)
    ]
    forward = [("F", chunk * ranks + rank, m) for chunk, m in passes]
    backward = [("B", (chunks - 1 - chunk) * ranks + rank, m) for chunk, m in passes]
    early = min(len(passes), (chunks - 1) * each + 2 * (ranks - 1 - rank))
    pairs = zip(forward[early:], backward, strict=False)
    return (*forward[:early], *(one for pair in pairs for one in pair), *backward[len(passes) - early :])


def _pytorch(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> tuple[tuple[Action, ...], ...]:
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, f"Schedule{PYTORCH[schedule]}")
    made = object.__new__(kind)  # the constructor wants stages with modules; the order needs numbers alone
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, stages_per_rank, microbatches
    made._num_stages = made.num_stages = ranks * stages_per_rank
    made._stages = [None] * stages_per_rank
    made.rank, made.number_of_rounds = 0, max(1, microbatches // ranks)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    made.enable_zero_bubble = False
    made.pipeline_order = {}
    made.stage_index_to_group_rank = {
        stage: stage_rank(schedule, ranks, stage) for stage in range(ranks * stages_per_rank)
    }
    order = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return tuple(
        tuple(
            (LETTERS[a.computation_type.name], a.stage_index, a.microbatch_index)
            for action in order[rank]
            if action is not None
            for a in (action.sub_actions or (action,))
        )
        for rank in range(ranks)
    )


def round_of(schedule: str, ranks: int) -> int:
    """Microbatches in a round: of those of a pipeline that grows by rounds, each adds the same actions."""
    return ranks if schedule in PYTORCH else 1


def stage_rank(schedule: str, ranks: int, stage: int) -> int:
    """The pipeline rank that holds ``stage``: stages go round the ranks, or forth and back in a V."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if schedule in V_SHAPED and turn % 2 else place
