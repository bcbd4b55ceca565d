"""Dynamic programs over the layers of pipeline stages, shared by planners that minimise the slowest stage.

The published programs give each stage degrees of its own. A choice has one mesh for all stages, so here the degrees are
enumerated and the program divides the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from simdev.errors import Unsupported
from simdev.parallel.collectives import send_ns
from simdev.parallel.plan import peak_bytes
from simdev.planners import Choice, Job, PlanBudget
from simdev.planners.bounds import span_ns


@dataclass(frozen=True)
class Profile:
    """What stages with ``n`` layers take: ``fixed + n * each``. The entries of ``fixed`` are per stage.

    ``pass_ns``: forward and backward pass of a microbatch; ``kept_bytes``: what a microbatch in progress keeps;
    ``held_bytes``: parameters, gradients and optimizer state; ``parameter_bytes``: what replicas exchange.
    ``sent_ns``: time to send the output of a stage to the next one, per stage; 0 for the last.
    """

    layers: int
    replicas: int
    microbatches: int
    samples: int
    pass_ns: tuple[np.ndarray, float]
    kept_bytes: tuple[np.ndarray, float]
    held_bytes: tuple[np.ndarray, float]
    parameter_bytes: tuple[np.ndarray, float]
    sent_ns: np.ndarray
    exchange_bytes_per_s: float

    @property
    def stages(self) -> int:
        return len(self.sent_ns)

    def of(self, name: str) -> np.ndarray:
        """float ``(stages, layers + 1)``: the quantity ``name`` of each stage with each number of layers."""
        fixed, each = getattr(self, name)
        return fixed[:, None] + each * np.arange(self.layers + 1)

    @property
    def border_ns(self) -> np.ndarray:
        """float ``(stages, 1)``: time that a stage sends and receives for a microbatch, forward and backward."""
        return 2 * (self.sent_ns + np.concatenate([[0.0], self.sent_ns[:-1]]))[:, None]

    @property
    def exchange_ns(self) -> np.ndarray:
        """float ``(stages, layers + 1)``: exchange of gradients, per microbatch: 4 (d - 1) / d of the parameters."""
        share = 4 * (self.replicas - 1) / self.replicas / self.microbatches
        return share * self.of("parameter_bytes") / self.exchange_bytes_per_s * 1e9


def profile(job: Job, budget: PlanBudget, choice: Choice) -> Profile:
    """The profile of a choice, from its captured stages with even layers."""
    program = budget.evaluator.program(choice)
    plan, parts = program.plan, program.plan.parts
    count = np.array([part.layers for part in parts], float)

    def line(values: Iterable[float]) -> tuple[np.ndarray, float]:
        """``fixed`` and ``each`` of a quantity: middle stages hold layers alone."""
        values = np.array(list(values), float)
        each = values[1] / count[1] if len(parts) > 2 else float((values / count).min())
        return np.maximum(values - each * count, 0.0), float(each)

    passes = (
        span_ns(forward) + min(map(span_ns, backward))
        for forward, backward in zip(program.forward, program.backward, strict=True)
    )
    width = plan.mesh.stage_ranks
    sent = [
        send_ns(stage.output_bytes, s * width, (s + 1) * width, plan.cluster) if s + 1 < len(parts) else 0
        for s, stage in enumerate(program.stages)
    ]
    probe = 1 << 26  # bytes: the exchange is as fast as a send between the first and the last rank of a stage
    rate = probe / max(1, send_ns(probe, 0, width - 1, plan.cluster)) * 1e9 if width > 1 else np.inf
    return Profile(
        job.layers,
        plan.mesh.replicas,
        plan.microbatches,
        plan.mesh.replicas * choice.microbatch,
        line(passes),
        line(template.live_bytes for template in program.forward),
        line(stage.resident_bytes for stage in program.stages),
        line(2.0 * stage.parameters for stage in program.stages),
        np.array(sent, float),
        rate,
    )


def best_by_stages(
    name: str,
    job: Job,
    budget: PlanBudget,
    choices: Iterable[Choice],
    stage_ns: Callable[[Profile], np.ndarray],
    in_progress: Callable[[Profile], np.ndarray],
) -> Choice:
    """The choice, with layers divided among its stages, of least predicted time per sample that fits in memory.

    ``stage_ns`` gives the time of each stage with each number of layers per microbatch, float ``(stages, layers + 1)``,
    and ``in_progress`` the microbatches that each stage keeps. The model's memory guides the division; the peak of the
    captured program decides what fits. Raises :class:`Unsupported` if nothing does.
    """
    limit, found = job.cluster.kind.memory_bytes, []
    for choice in choices:
        if choice.schedule != "1f1b":
            continue
        known = profile(job, budget, choice)
        held = known.of("held_bytes") + in_progress(known)[:, None] * known.of("kept_bytes")
        seconds = np.where(held <= limit, stage_ns(known), np.inf)
        slowest, layers = divide(seconds)
        if np.isfinite(slowest):
            found.append((slowest / known.samples, _divided(choice, layers)))
    for _, choice in sorted(found, key=lambda row: (row[0], row[1].order)):
        if (peak_bytes(budget.evaluator.program(choice)) <= limit).all():
            return choice
    raise Unsupported(f"{name}: none of {len(found)} plans fits")


def _divided(choice: Choice, layers: tuple[int, ...]) -> Choice:
    """The choice with these layers on its stages; even stages are not named."""
    total, stages = sum(layers), len(layers)
    even = tuple(total // stages + (s < total % stages) for s in range(stages))
    return replace(choice, stage_layers=() if layers == even else layers)


def divide(cost: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """The least possible slowest stage, and the layers of each stage, one or more.

    ``cost`` float ``(stages, layers + 1)``: the time of each stage with each number of layers. Of equal divisions, the
    one that gives later stages fewer layers.
    """
    stages, most = cost.shape[0], cost.shape[1] - 1
    least = np.full(most + 1, np.inf)
    least[0], came = 0.0, []
    number = np.arange(most + 1)
    for stage in range(stages):
        before = number[:, None] - number[None, :]  # layers of earlier stages, where the stage has the column's number
        value = np.where(before >= 0, np.maximum(least[np.maximum(before, 0)], cost[stage][None, :]), np.inf)
        value[:, 0] = np.inf
        came.append(np.argmin(value, axis=1))
        least = value.min(axis=1)
    layers, left = [], most
    for chosen in reversed(came):
        layers.append(int(chosen[left]))
        left -= layers[-1]
    return float(least[most]), tuple(layers[::-1])
