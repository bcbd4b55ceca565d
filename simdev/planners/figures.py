"""The figures of a plan that people ask for, why other plans lose to it, and what would help."""

from __future__ import annotations

from collections.abc import Container
from contextlib import suppress
from dataclasses import replace

import numpy as np

from simdev.errors import InvalidInput
from simdev.parallel.cluster import Cluster, load_cluster
from simdev.parallel.mesh import Mesh
from simdev.planners.budget import PlanBudget
from simdev.planners.estimate import estimated_bytes, least_bytes
from simdev.planners.evaluate import Evaluator
from simdev.planners.job import Choice, Job
from simdev.planners.outcome import Outcome
from simdev.problem.costs import peak_flops
from simdev.problem.topology import DeviceKind, load_kinds, topology_names


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


DAY = 86_400  # seconds


def demand(job: Job, step_s: float, tokens: float | None, price: float | None) -> dict:
    """Tokens in a day of steps that take ``step_s`` seconds; for a training run of ``tokens`` tokens its days, and with
    ``price`` (dollars for an hour of one accelerator) its dollars."""
    each = job.batch * int(job.parameters["length"])
    found: dict = {"ranks": job.ranks, "tokens_per_day": each / step_s * DAY}
    if tokens is not None:
        found["days"] = tokens / found["tokens_per_day"]
        if price is not None:
            found["dollars"] = price * 24 * job.ranks * found["days"]
    return found


def other_sizes(job: Job, evaluator: Evaluator, best: Outcome, tokens: float | None, price: float | None) -> list[dict]:
    """:meth:`demand` of the best plan on the cluster half and twice as large, with the same sequences in a step: it has
    half or twice the replicas there, of those axes that divide, the outermost first. Each is simulated; ``fits`` says
    whether it fits. A size on which the plan cannot run is left out."""
    found = []
    for twice in (False, True):
        there = _resized(job, best.choice, twice)
        if there is None:
            continue
        other, choice = there
        outcome = evaluator.sibling(other).outcome(choice, always=True)
        if outcome.step_ns is not None:
            figures_there = demand(other, outcome.time_ns / 1e9, tokens, price)
            found.append({**figures_there, "name": str(choice), "fits": outcome.fits})
    return found


def _resized(job: Job, choice: Choice, twice: bool) -> tuple[Job, Choice] | None:
    """The job on half or twice the GPUs, and the choice with half or twice the replicas, if both can be."""
    ranks, rest = (2 * job.ranks, 0) if twice else divmod(job.ranks, 2)
    if rest or choice.stage_meshes or (ranks > job.cluster.gpus and not job.cluster.network_bytes_per_s):
        return None
    other = job.with_changes(cluster=replace(job.cluster, nodes=0), ranks=ranks)
    sizes = choice.mesh.sizes
    for axis in ("dp_replicate", "dp_shard"):
        size = choice.mesh[axis]
        if size > 1 and (twice or size % 2 == 0):
            mesh = Mesh({**sizes, axis: 2 * size if twice else size // 2})
            if other.valid(replace(choice, mesh=mesh)):
                return other, replace(choice, mesh=mesh)
    return None


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
    ms = more[what] / 1e6
    return f"{what} {f'{ms:,.0f}' if ms >= 10 else f'{ms:.2g}'} ms more" if ms > 0 else "is as quick"


LEAST = 0.01  # a change of the step time or the tokens per second, below which it is not advised


def what_helps(job: Job, budget: PlanBudget, best: Outcome) -> list[str]:
    """Sentences that say what more memory, faster links and a larger batch would change, if they would; each is
    simulated. Of the plans that do not fit, those are simulated that a shipped GPU would hold and that seem the
    quickest: one by its estimate, and two by the bounds of plans that were captured."""
    found, evaluator = [], budget.evaluator
    lacking = [(o.bound_ns, o.choice.order, o.choice, o) for o in budget.tried.values() if o.overflow_bytes]
    lacking = [row for row in lacking if 0 < row[0] < best.time_ns and _held(row[3], job)]
    wanting = [choice for *_, choice, _ in sorted(lacking)[:2]]
    over = (one for one in budget.estimated.values() if one.peak_bytes > job.cluster.kind.memory_bytes)
    most = max((kind.memory_bytes for kind in _kinds(job)), default=0)
    over = (one for one in over if one.step_ns < best.time_ns and one.peak_bytes <= most)
    first = min(over, key=lambda one: (one.step_ns, one.choice.order), default=None)
    wanting += [first.choice] if first and first.choice not in wanting else []
    better = [o for o in (evaluator.outcome(one, always=True, exact=False) for one in wanting) if _quicker(o, best)]
    if better:
        least = min(better, key=lambda o: o.time_ns)
        gain = 1 - least.time_ns / best.time_ns
        gpu = _gpu_with(max(least.reserved_bytes or least.peak_bytes), job)
        if gpu and gain >= LEAST:
            found.append(f"{gpu}: {least.choice} fits there, and takes {gain:.1%} less time even if it is no faster")
    network = replace(job.cluster, network_bytes_per_s=2 * job.cluster.network_bytes_per_s)
    changes = [("twice the sequences in a step", job.with_changes(batch=2 * job.batch))]
    if job.ranks > job.cluster.gpus:
        changes.insert(0, ("a network twice as fast", job.with_changes(cluster=network)))
    for name, other in changes:
        there = evaluator.sibling(other).outcome(best.choice, always=True)
        if not there.fits:  # twice the microbatches, each of which a pipeline keeps a buffer for
            continue
        rate = (other.batch / there.time_ns) / (job.batch / best.time_ns)
        if rate - 1 >= LEAST:
            found.append(f"{name}: this plan would process {rate - 1:.1%} more sequences per second")
    return found


def _gpu_with(needed: int, job: Job) -> str:
    """The shipped kind of GPU with the least memory that suffices, of no lower speed than the job's; empty if there is
    none."""
    kinds = [kind for kind in _kinds(job) if kind.memory_bytes >= needed]
    if not kinds:
        return ""
    least = min(kinds, key=lambda kind: (kind.memory_bytes, kind.name))
    return f"a GPU with more memory ({least.name}, {least.memory_bytes / 2**30:.0f} GiB)"


def _kinds(job: Job) -> list[DeviceKind]:
    """The shipped kinds of the same vendor that are no slower than the job's."""
    own = job.cluster.kind
    same = [kind for kind in load_kinds().values() if kind.vendor == own.vendor]
    return [kind for kind in same if peak_flops(kind, "bf16") >= peak_flops(own, "bf16")]


def _held(outcome: Outcome, job: Job) -> bool:
    """Whether a shipped GPU has as much memory as the plan needs."""
    return bool(_gpu_with(max(outcome.reserved_bytes or outcome.peak_bytes), job))


def why_none_fits(job: Job, budget: PlanBudget) -> str:
    """What the plan lacks that needs least memory, and how many nodes would hold the model, for a message; empty if
    nothing is known."""
    peaks = [(max(o.reserved_bytes or o.peak_bytes), o.choice) for o in budget.tried.values()]
    peaks += [(one.peak_bytes, one.choice) for one in budget.estimated.values()]
    if not peaks:
        return ""
    peak, choice = min(peaks, key=lambda pair: pair[0])
    capacity = job.cluster.kind.memory_bytes
    text = f"; {choice} needs least memory: {peak / 2**30:.0f} GiB on a GPU of {capacity / 2**30:.0f} GiB"
    return text + _nodes_that_hold(job, budget.evaluator, budget.tried)


def why_nothing_can_fit(job: Job, evaluator: Evaluator) -> str:
    """Why no plan of the job can fit, and what would hold the model: a message if parameters, optimizer state and
    gradients exceed the memory even if all ranks divide them evenly. Empty if a plan may fit. Nothing is simulated."""
    least, capacity = least_bytes(evaluator) / job.ranks, job.cluster.kind.memory_bytes
    if least <= capacity:
        return ""
    text = f"no plan fits: parameters, gradients and optimizer state, divided among {job.ranks} GPUs, take"
    text += f" {least / 2**30:,.0f} GiB on each, which has {capacity / 2**30:,.0f} GiB"
    return text + _nodes_that_hold(job, evaluator)


MOST_TIMES = 64  # as many nodes as a cluster has, at most, when more are tried
# What a plan that advice names takes of the memory, over what its tensors are estimated to take. In the plans of
# llama3-8b on dgx-h100, an allocator reserves 1.08 to 1.13 times as much as they take.
TAKEN = {"allocated": 1.0, "reserved": 1.15}


def _nodes_that_hold(job: Job, evaluator: Evaluator, tried: Container[Choice] = ()) -> str:
    """A plan that is estimated to fit but was not ``tried``, or the fewest nodes, doubled step by step, on which a plan
    with parameters sharded over all ranks, or over nodes with tensors or experts divided inside, is estimated to fit:
    nodes of the job's cluster, or of a shipped machine with as much memory and speed if that has no network."""
    if "dp_shard" not in job.model.axes:
        return _more_memory(job)
    least = least_bytes(evaluator)
    for cluster in _machines(job):
        own = cluster.name == job.cluster.name
        nodes = max(1, job.cluster.nodes if own else -(-job.ranks // cluster.gpus))
        for times in 2 ** np.arange(MOST_TIMES.bit_length()):
            count = int(nodes * times)
            there = replace(cluster, nodes=count)
            ranks = count * cluster.gpus
            if least > ranks * cluster.kind.memory_bytes or (count > 1 and not cluster.network_bytes_per_s):
                continue
            found = _sharded_plan(job.with_changes(cluster=there, ranks=ranks), evaluator)
            if found is None:
                continue
            other, choice = found
            if own and times == 1 and other.batch == job.batch:
                if choice in tried:  # it does not fit: its memory was estimated too low
                    continue
                return f"; {choice} is estimated to fit: raise --evaluations or --seconds"
            batch = f" --batch {other.batch}" if other.batch != job.batch else ""
            return f"; {cluster.name}[nodes={count}]{batch} is estimated to hold the model ({choice})"
    return _more_memory(job)


def _sharded_plan(job: Job, evaluator: Evaluator) -> tuple[Job, Choice] | None:
    """A plan with the least microbatch that is estimated to fit, and its job: the given one, or with a larger batch if
    no such plan divides the batch."""
    size, found = min(job.microbatches), []
    gpus = job.cluster.gpus
    for axis in ("", *(axis for axis in ("tp", "ep") if axis in job.model.axes and gpus > 1)):
        sizes = {"dp_shard": job.ranks // gpus, axis: gpus} if axis else {"dp_shard": job.ranks}
        choice = Choice(Mesh({axis: n for axis, n in sizes.items() if n > 1}), size, job.known_recomputes[-1])
        at_once = choice.mesh.replicas * size
        other = job.with_changes(batch=at_once * -(-job.batch // at_once))
        found.append((other, replace(choice, reduce_each=other.may_reduce_each(choice))))
    most = job.cluster.kind.memory_bytes / TAKEN[job.memory]
    for other, choice in sorted(found, key=lambda pair: pair[0].batch):
        if other.valid(choice) and estimated_bytes(evaluator.sibling(other), choice) <= most:
            return other, choice
    return None


def _machines(job: Job) -> list[Cluster]:
    """The job's cluster, if it has a network; else shipped ones that have, with as much memory and speed of each
    accelerator, those of the same kind first."""
    own = job.cluster
    if own.network_bytes_per_s:
        return [own]
    found = []
    for name in topology_names():
        with suppress(InvalidInput):  # accelerators of several kinds
            found.append(load_cluster(name))
    speed = peak_flops(own.kind, "bf16")
    found = [one for one in found if one.network_bytes_per_s and one.kind.vendor == own.kind.vendor]
    found = [one for one in found if one.kind.memory_bytes >= own.kind.memory_bytes]
    found = [one for one in found if peak_flops(one.kind, "bf16") >= speed]
    return [own, *sorted(found, key=lambda one: (one.kind != own.kind, one.kind.memory_bytes, one.name))]


def _more_memory(job: Job) -> str:
    """A shipped kind of GPU with more memory, if there is one."""
    gpu = _gpu_with(job.cluster.kind.memory_bytes + 1, job)
    return f"; use {gpu}" if gpu else "; use more GPUs"


def _quicker(one: Outcome, other: Outcome) -> bool:
    return one.step_ns is not None and one.step_ns < other.time_ns


def _mean(values: tuple[int, ...]) -> float:
    return sum(values) / len(values) if values else 0.0
