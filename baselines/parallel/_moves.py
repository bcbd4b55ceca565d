"""Small changes of a plan, shared by planners that search."""

from __future__ import annotations

from dataclasses import replace

from simdev.parallel.mesh import Mesh
from simdev.planners import Choice, Job
from simdev.planners.job import RECOMPUTE, stages_of

AXES = ("pp", "tp", "cp", "ep", "dp_shard", "dp_replicate")


def neighbours(job: Job, choice: Choice) -> list[Choice]:
    """Every plan with stages of equal depth that differs in one respect: a prime factor moved from one mesh axis to
    another, the next microbatch size, the next kind of recomputation, when gradients are reduced, or the schedule."""
    plain = replace(choice, stage_layers=())
    found = [_with_mesh(plain, mesh) for mesh in _meshes(job, plain.mesh)]
    found += [replace(plain, microbatch=size) for size in _next(sorted(job.microbatches), plain.microbatch)]
    kinds = [kind for kind in RECOMPUTE if kind in job.known_recomputes]
    found += [replace(plain, recompute=kind) for kind in _next(kinds, plain.recompute)]
    if job.may_reduce_each(plain):
        found.append(replace(plain, reduce_each=not plain.reduce_each))
    if plain.mesh["pp"] > 1:
        found += [replace(plain, schedule=name, stages_per_rank=stages_of(name)) for name in job.schedules]
    allowed = _allowed(job)
    return [c for c in dict.fromkeys(found) if c != choice and allowed(c.mesh) and job.valid(c)]


def _with_mesh(choice: Choice, mesh: Mesh) -> Choice:
    if mesh["pp"] > 1:
        return replace(choice, mesh=mesh, reduce_each=False)
    return replace(choice, mesh=mesh, schedule="1f1b", stages_per_rank=1)


def _next(values: list, value) -> list:
    place = values.index(value) if value in values else 0
    return [values[n] for n in (place - 1, place + 1) if 0 <= n < len(values)]


def _meshes(job: Job, mesh: Mesh) -> list[Mesh]:
    found = []
    for source in AXES:
        for prime in _primes(mesh[source]):
            for target in AXES:
                if target == source or (target != "pp" and target not in job.model.axes):
                    continue
                sizes = {axis: mesh[axis] for axis in AXES}
                sizes[source] //= prime
                sizes[target] *= prime
                found.append(Mesh({axis: size for axis, size in sizes.items() if size > 1}))
    return found


def _allowed(job: Job):
    known = {frozenset(mesh.sizes.items()) for mesh in job.meshes()}
    return lambda mesh: frozenset(mesh.sizes.items()) in known


def _primes(n: int) -> list[int]:
    return [p for p in range(2, n + 1) if n % p == 0 and all(p % q for q in range(2, p))]
