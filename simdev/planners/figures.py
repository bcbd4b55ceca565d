"""The figures of a plan that people ask for, why other plans lose to it, and what would help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from simdev.planners.evaluate import Evaluator
from simdev.planners.job import Job
from simdev.planners.outcome import Outcome
from simdev.problem.costs import peak_flops


def figures(job: Job, outcome: Outcome, price: float | None = None) -> dict:
    """The figures of a simulated plan, ready for JSON. ``price`` is in dollars for an hour of one accelerator.

    ``bubble_share`` is the share of the step in which a pipeline rank is idle and none of its collectives runs
    (pipeline bubbles and waiting for the host), ``exposed_share`` the share in which it only waits for its collectives;
    both are means over the pipeline ranks. ``reserved_memory_bytes`` holds NCCL's buffers, too; it is empty where
    allocated memory decides (:meth:`~simdev.planners.evaluate.Evaluator.reserved`).
    """
    choice, seconds = outcome.choice, outcome.time_ns / 1e9
    parameters = {**job.parameters, "microbatch": choice.microbatch}
    tokens = job.batch * int(job.parameters["length"])
    found = {
        "plan": choice.to_json(),
        "name": str(choice),
        "fits": outcome.fits,
        "step_time_s": seconds,
        "bound_s": outcome.bound_ns / 1e9,
        "tokens_per_s_per_gpu": tokens / seconds / job.ranks,
        "mfu": job.model.flops(parameters) * job.batch / (seconds * job.ranks * peak_flops(job.cluster.kind, "bf16")),
        "peak_memory_bytes": list(outcome.peak_bytes),
        "reserved_memory_bytes": list(outcome.reserved_bytes),
        "compute_share": _mean(outcome.compute_ns) / outcome.time_ns,
        "exposed_share": _mean(outcome.exposed_ns) / outcome.time_ns,
        "bubble_share": _mean(outcome.idle_ns) / outcome.time_ns,
    }
    if price is not None:
        found["dollars_per_million_tokens"] = price * job.ranks * seconds / 3600 / tokens * 1e6
    return found


def why_slower(best: Outcome, other: Outcome) -> str:
    """What the other plan loses most time with, compared with the best plan; or the memory that it lacks."""
    if other.overflow_bytes:
        return f"does not fit: {other.overflow_bytes / 2**30:.1f} GiB too much"
    more = {
        "computes": _mean(other.compute_ns) - _mean(best.compute_ns),
        "waits for collectives": _mean(other.exposed_ns) - _mean(best.exposed_ns),
        "is idle (bubble, host)": _mean(other.idle_ns) - _mean(best.idle_ns),
    }
    what = max(more, key=more.__getitem__)
    return f"{what} {more[what] / 1e6:,.0f} ms more" if more[what] > 0 else "is as quick"


def what_helps(job: Job, evaluator: Evaluator, best: Outcome, tried: Iterable[Outcome]) -> list[str]:
    """Sentences that say what more memory, faster links and a larger batch would change; each is simulated."""
    found = []
    wanting = sorted((o for o in tried if o.overflow_bytes and o.bound_ns < best.time_ns), key=lambda o: o.bound_ns)[:8]
    better = [o for o in (evaluator.outcome(o.choice, always=True, exact=False) for o in wanting) if _quicker(o, best)]
    if better:
        least = min(better, key=lambda o: o.time_ns)
        need = (max(least.reserved_bytes or least.peak_bytes) - job.cluster.kind.memory_bytes) / 2**30
        gain = 1 - least.time_ns / best.time_ns
        found.append(f"{need:.1f} GiB more on each GPU: {least.choice} would take {gain:.1%} less time")
    else:
        found.append("more memory: no plan that was tried and did not fit would be quicker")
    network = replace(job.cluster, network_bytes_per_s=2 * job.cluster.network_bytes_per_s)
    changes = [("twice the sequences in a step", job.with_changes(batch=2 * job.batch))]
    if job.ranks > job.cluster.gpus:
        changes.insert(0, ("a network twice as fast", job.with_changes(cluster=network)))
    for name, other in changes:
        there = evaluator.sibling(other).outcome(best.choice, always=True)
        rate = (other.batch / there.time_ns) / (job.batch / best.time_ns)
        word = "more" if rate >= 1 else "fewer"
        found.append(f"{name}: this plan would process {abs(rate - 1):.1%} {word} tokens per second")
    return found


def _quicker(one: Outcome, other: Outcome) -> bool:
    return one.step_ns is not None and one.step_ns < other.time_ns


def _mean(values: tuple[int, ...]) -> float:
    return sum(values) / len(values) if values else 0.0
