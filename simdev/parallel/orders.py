"""The order in which each pipeline rank executes the microbatches of its stages, as ``torch.distributed.pipelining``
has it.

An order is a list of actions for each rank. An action is ``(what, stage, microbatch)``; ``what`` is ``F`` (forward)
or ``B`` (backward). Schedules that split a backward pass into the gradients of inputs and of weights are refused: the
captured backward pass is one segment.
``gpipe`` and ``1f1b`` are written here, and a test compares them with PyTorch's; the schedules with several stages on a
rank are PyTorch's own.
"""

from __future__ import annotations

from functools import lru_cache

from simdev.errors import InvalidInput, UnknownName, Unsupported

Action = tuple[str, int, int]
PYTORCH = {
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
}
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B"}
SCHEDULES = ("gpipe", "1f1b", *PYTORCH)
SPLIT = ("zero-bubble", "zbv", "dualpipe")  # known by name, to say why they are refused


@lru_cache(maxsize=256)
def pipeline_order(
    schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each of ``ranks`` ranks. Raises :class:`InvalidInput` where the schedule cannot be had, and
    :class:`Unsupported` for the schedules in ``SPLIT``."""
    if schedule in SPLIT:
        raise Unsupported(
            f"schedule {schedule!r} splits backward passes into the gradients of inputs and of weights, "
            f"which is not simulated; known: {', '.join(SCHEDULES)}"
        )
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
    return _pytorch(schedule, ranks, microbatches, stages_per_rank)


def _single(schedule: str, rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    early = microbatches if schedule == "gpipe" else min(microbatches, ranks - rank)
    actions = [("F", rank, m) for m in range(early)]
    for m in range(microbatches):
        actions.append(("B", rank, m))
        if early + m < microbatches:
            actions.append(("F", rank, early + m))
    return tuple(actions)


def _pytorch(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> tuple[tuple[Action, ...], ...]:
    try:
        from torch.distributed.pipelining import schedules
    except ImportError:
        raise Unsupported(f"the schedule {schedule} needs PyTorch: pip install 'simdev[capture]'") from None
    if ranks < 2:
        raise InvalidInput(f"{schedule} needs at least two pipeline ranks", source="plan", field="pp")
    kind = getattr(schedules, f"Schedule{PYTORCH[schedule]}")
    made = object.__new__(kind)  # the constructor wants stages with modules; the order needs numbers alone
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, stages_per_rank, microbatches
    made._num_stages = made.num_stages = ranks * stages_per_rank
    made._stages = [None] * stages_per_rank
    made.rank, made.number_of_rounds = 0, max(1, microbatches // ranks)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    if microbatches % made.number_of_rounds:
        raise InvalidInput(
            f"{schedule} on {ranks} ranks needs a multiple of {made.number_of_rounds}, got {microbatches}",
            source="plan",
            field="microbatches",
        )
    made.enable_zero_bubble = False
    made.pipeline_order = {}
    made.stage_index_to_group_rank = {stage: stage_rank(ranks, stage) for stage in range(ranks * stages_per_rank)}
    order = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return tuple(
        tuple(
            (LETTERS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in order[rank] if a is not None
        )
        for rank in range(ranks)
    )


def stage_rank(ranks: int, stage: int) -> int:
    """The pipeline rank that holds ``stage``: stages go round the ranks."""
    return stage % ranks
