"""The runs of a bench of planners: which planner plans which job, and the jobs of the shipped board."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from simdev.bench import plan_rows
from simdev.bench.plan_rows import BOARD, choices_of
from simdev.bench.rows import entry_id
from simdev.errors import InvalidInput, quoted
from simdev.parallel import find_model, load_cluster
from simdev.parallel.framework import find_framework
from simdev.placers.registry import parse_id
from simdev.planners import Job, find_planner, planners
from simdev.problem.topology import split_choices


@dataclass(frozen=True, order=True)
class PlanRun:
    """One run of a planner: the job, what the planner may choose (JSON), the planner with its parameters (JSON), and
    the most plans that it may simulate. ``seed`` counts repetitions."""

    model: str
    cluster: str
    batch: int
    framework: str
    choices: str
    planner: str
    params: str
    budget: int
    seed: int

    @property
    def key(self) -> tuple:
        """The key of its row."""
        return tuple(getattr(self, name) for name in plan_rows.KEY)

    @property
    def entropy(self) -> int:
        """Seed of the run's generator: any row can be made again alone."""
        return int.from_bytes(hashlib.sha256(json.dumps(self.key).encode()).digest()[:8], "big")

    @property
    def entry(self) -> str:
        """The planner's id with its parameters."""
        return entry_id(self.planner, self.params)

    @property
    def instance(self) -> tuple[str, str, int, str, str]:
        """The job: :func:`job_of` takes it."""
        return self.model, self.cluster, self.batch, self.framework, self.choices

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}: {self.entry}" + (f" #{self.seed}" if self.seed else "")


def job_of(model: str, cluster: str, batch: int, framework: str, choices: str, *, machine: Path | None = None) -> Job:
    """The job that a run or a row names. ``machine`` is the file of the cluster that a result folder keeps.

    Raises :class:`InvalidInput` for a name or number that does not exist.
    """
    spec, parameters = find_model(model)
    sizes, recomputes = plan_rows.parse_choices(choices)
    return Job(
        spec,
        find_framework(framework).parameters_of(spec.name, parameters, model),
        load_cluster(cluster) if machine is None else load_cluster(_at(machine, cluster), kept=True),
        batch,
        framework=framework,
        microbatches=sizes,
        recomputes=recomputes,
        ids=(model, cluster),
    )


def _at(machine: Path, cluster: str) -> str:
    return f"{machine}{split_choices(cluster)[1]}"


def plan_jobs(
    jobs: Iterable[tuple[str, str, int]] = (),
    entries: Iterable[str] = ("all",),
    *,
    evaluations: int = 60,
    seeds: int = 1,
    framework: str = "eager",
) -> list[PlanRun]:
    """The sorted runs: every job (model, cluster, sequences in a step) x planner x seed; all jobs of :data:`BOARD`
    if none is given.

    Raises :class:`UnknownName` or :class:`InvalidInput` for a name or number that does not exist. A model from a file
    of the user is loaded by the bench's workers, not here.
    """
    if seeds < 1:
        raise InvalidInput(f"{seeds} is not a number of repetitions", source="seeds")
    jobs = list(jobs) or [(model, cluster, batch) for model, on, batch, _ in BOARD for cluster in on]
    for name in {name for model, cluster, _ in jobs for name in (model, cluster)}:
        if not name.isprintable():  # rows of it could not be read
            raise InvalidInput(f"{quoted(name)} holds characters that cannot be printed", source="plan")
    names = [(model, cluster, batch, framework, choices_of(model)) for model, cluster, batch in jobs]
    for name in names:
        if ".py:" not in name[0]:
            job_of(*name)
    runs = set()
    for entry in [one for name in entries for one in (planners() if name == "all" else [name])]:
        _, params = find_planner(entry)
        planner, _, _ = parse_id(entry)
        text = json.dumps(params, sort_keys=True)
        runs |= {PlanRun(*name, planner, text, evaluations, seed) for name in names for seed in range(seeds)}
    return sorted(runs)
