"""The folder of an experiment: its runs and trained policies on disk, its tables and its report."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from simdev.bench.bench import Observer, locked
from simdev.bench.journal import Results
from simdev.bench.matrix import DEFAULT_RULES, Run, parse_rules
from simdev.bench.provenance import circumstances
from simdev.bench.rows import Row, read_csv, write_csv
from simdev.bench.run import Instance, execute
from simdev.bench.stored import kept_graph
from simdev.bench.workers import environment
from simdev.errors import InvalidInput
from simdev.files import write_text
from simdev.placers import registry
from simdev.placers.placer import PlacerSpec
from simdev.placers.policy_file import read_header
from simdev.problem.graph import ComputationGraph
from simdev.problem.graph_file import save_graph
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology

VERSIONS = "Versions of the placers:"
CELLS = ("table", "line", "column", "value")  # of tables.csv
DRAWN = ("spread", "partition")  # families whose placements depend on the seed without a search


@dataclass(frozen=True)
class LabCase:
    """A workload on a topology under fixed rules.

    If ``graph`` is given, it is the graph of the case, and ``workload`` is only its name.
    """

    workload: str
    topology: str
    graph: ComputationGraph | None = None
    rules: str = DEFAULT_RULES

    @property
    def label(self) -> str:
        return f"{self.workload} on {self.topology}"

    def problem(self) -> Problem:
        graph = self.graph if self.graph is not None else registry.load_workload(self.workload)
        return Problem.build(graph, load_topology(self.topology), rules=parse_rules(self.rules))


@dataclass(frozen=True)
class RunResult:
    """The result of a run: its row, and the points of its curve.

    A point is ``(evaluations, seconds, step_ns)``; the last one is the placement that the placer returned.
    """

    row: Row
    points: tuple[tuple[int, float, int], ...]

    @property
    def step_ms(self) -> float:
        """Step time in ms, nan if no placement fits."""
        return float("nan") if self.row.step_ns is None else self.row.step_ns / 1e6


class Size(SimpleNamespace):
    """The numbers that make an experiment tiny, small or full, by name; each experiment has its own."""


def sizes(small: dict, tiny: dict, full: dict) -> dict[str, Size]:
    """The sizes of an experiment: all numbers of the small one, and those in which the others differ from it."""
    return {"tiny": Size(**{**small, **tiny}), "small": Size(**small), "full": Size(**{**small, **full})}


class Lab:
    """The folder of an experiment, the experiment's size, and the observer that reports progress.

    All runs execute in this process, one at a time. They share compiled policies, and their times are comparable.
    """

    def __init__(self, folder: Path, size: Size, observer: Observer, data: str | os.PathLike | None = None):
        self.folder, self.size, self.observer = folder.absolute(), size, observer
        self.data = None if data is None else Path(data)  # public inputs
        self._stack = contextlib.ExitStack()
        self._instances: dict[LabCase, Instance] = {}
        self._versions: dict[str, int] = {}  # of the placers that the report shows

    def __enter__(self) -> Lab:
        self._stack.enter_context(locked(self.folder))
        self._stack.enter_context(environment())
        self._results = Results(self.folder)
        self._stack.callback(self._results.close)
        return self

    def __exit__(self, *_) -> None:
        if self._results.rows:
            self._results.write()
        self._stack.close()

    def runs(self, cases: Iterable[LabCase], entries: Iterable[str], evaluations: int, seeds: int) -> list[RunResult]:
        """Run every case with every placer and seed, and return the results sorted by run.

        Runs that the folder holds already are not repeated. A placer that neither searches nor draws random numbers
        runs with one seed only.
        """
        plan = {}
        for case in cases:
            for entry in entries:
                spec, params = registry.find_placer(entry)
                repeats = seeds if spec.searches or spec.family in DRAWN else 1
                for seed in range(repeats):
                    run = Run(
                        case.workload,
                        case.topology,
                        case.rules,
                        spec.name,
                        json.dumps(params, sort_keys=True),
                        f"evaluations={evaluations}",
                        seed,
                    )
                    plan[run] = case
        return [self._found(run, plan[run], done, len(plan)) for done, run in enumerate(sorted(plan), 1)]

    def _found(self, run: Run, case: LabCase, done: int, total: int) -> RunResult:
        spec = self.used(run.entry)
        row, instance = self._results.row(run.key), self._instance(case)
        if not isinstance(row, Row) or (row.fingerprint, row.cost_hash, row.version) != (
            instance.fingerprint,
            instance.cost_hash,
            spec.version,
        ):
            self.observer.tick(done - 1, total, [str(run)])
            with contextlib.chdir(self.folder):  # relative names of policies: a run has the same key anywhere
                outcome = execute(run, instance)
            row = replace(outcome.row, **circumstances())
            self._results.add(row, outcome.placement, outcome.curve)
            self.observer.row(done, total, row)
        points = tuple(self._results.curve(run.key))
        if row.step_ns is not None:
            points += ((row.evaluations or 0, row.place_seconds or 0.0, row.step_ns),)
        return RunResult(row, points)

    def _instance(self, case: LabCase) -> Instance:
        if case not in self._instances:
            problem, path = case.problem(), None
            if case.graph is not None:
                path = kept_graph(self.folder, problem.graph.fingerprint)
                path.parent.mkdir(exist_ok=True)
                if not path.is_file():
                    save_graph(problem.graph, path)
            self._instances[case] = Instance(
                case.workload,
                case.topology,
                case.rules,
                problem.graph.fingerprint,
                problem.costs.hash,
                problem.graph.n_ops,
                None if path is None else str(path),
            )
        return self._instances[case]

    def policy(self, name: str, placer: str, cases: Sequence[LabCase], *, seed: int, evaluations: int) -> str:
        """Train ``placer`` on ``cases`` and return the policy's folder, relative to the folder of the lab.

        A policy that exists is not trained again, and an interrupted training is resumed. Raises :class:`InvalidInput`
        if the policy of that name was trained on other graphs.
        """
        folder, problems = Path("policies") / name, [case.problem() for case in cases]
        if not (self.folder / folder / "policy.json").is_file():
            self.observer.note(f"training {placer} as {name}: {len(cases)} graphs, {evaluations} evaluations")
            spec, params = registry.find_placer(placer)
            params = {key: value for key, value in {**spec.defaults, **params}.items() if key != "policy"}
            if spec.learner is None:
                raise InvalidInput("learns nothing that could be kept", source=f"placer {spec.name}")
            spec.learner(problems, **params).train(
                problems, seed=seed, evaluations=evaluations, out=self.folder / folder
            )
        seen = [entry["fingerprint"] for entry in read_header(self.folder / folder)["trained_on"]]
        if seen != [problem.graph.fingerprint for problem in problems]:
            raise InvalidInput("the policy was trained on other graphs; use another --out", source=self.folder / folder)
        return str(folder)

    def trained(
        self, placer: str, name: str, seen: Sequence[LabCase], unseen: Sequence[LabCase], *,
        seeds: int, evaluations: int, zero_shot: int = 1, tuning: int,
    ) -> tuple[list[RunResult], list[RunResult]]:  # fmt: skip
        """Runs on ``unseen`` of one policy for each seed, trained on ``seen`` by ``placer`` with ``evaluations``: with
        ``zero_shot`` evaluations, and after further training with ``tuning``."""
        shot, tuned, base = [], [], placer.partition("[")[0]
        for seed in range(seeds):
            name_of_seed = f"{base}-{name}-{evaluations}-{seed}"  # no scale takes the shorter training of another
            policy = self.policy(name_of_seed, placer, seen, seed=seed, evaluations=evaluations)
            shot += self.runs(unseen, [f"{base}[policy={policy}]"], zero_shot, 1)
            tuned += self.runs(unseen, [f"{base}[policy={policy}]"], tuning, 1)
        return shot, tuned

    def used(self, entry: str) -> PlacerSpec:
        """The placer of an entry, whose version the report then states."""
        spec, _ = registry.find_placer(entry)
        self._versions[spec.name] = spec.version
        return spec

    def table(self, name: str, lines: Sequence[dict]) -> str:
        """Write the table into ``tables.csv`` and return it as Markdown. All lines must have the keys of the first.

        ``tables.csv`` holds all tables of the experiment, with a line for each cell: the name of the table, the number
        of the line, the column and the value. A table of the same name is replaced.
        """
        header, path = list(lines[0]), self.folder / "tables.csv"
        written = [cell for _, cell in read_csv(path, CELLS)] if path.is_file() else []
        cells = [
            {"table": name, "line": number, "column": column, "value": line[column]}
            for number, line in enumerate(lines)
            for column in header
        ]
        write_csv(path, CELLS, [*(cell for cell in written if cell["table"] != name), *cells])
        marks = ["|".join(["", *header, ""]), "|".join(["", *["---"] * len(header), ""])]
        body = ["| " + " | ".join(str(line[column]) for column in header) + " |" for line in lines]
        return "\n".join([*marks, *body]) + "\n"

    def report(self, title: str, command: str, parts: Sequence[str]) -> Path:
        """Write ``README.md`` (title, command, sizes, versions of the placers, ``parts``) and return its path."""
        sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in vars(self.size).items())
        head = f"# {title}\n\nMade by `{command}`. Sizes: {sizes}.\n"
        if self._versions:
            head += (
                f"\n{VERSIONS} {', '.join(f'{name} {number}' for name, number in sorted(self._versions.items()))}.\n"
            )
        path = self.folder / "README.md"
        write_text(path, "\n".join([head, *parts]).rstrip() + "\n")
        return path


def chosen(found: Iterable[RunResult], **columns: str) -> list[RunResult]:
    """The runs whose row has these cells: ``chosen(results, placer="gdp")``."""
    return [run for run in found if all(getattr(run.row, name) == value for name, value in columns.items())]


def of_entry(found: Iterable[RunResult], entry: str) -> list[RunResult]:
    """The runs of a placer with parameters: ``of_entry(results, "gdp[rate=0]")``."""
    spec, params = registry.find_placer(entry)
    return chosen(found, placer=spec.name, params=json.dumps(params, sort_keys=True))


def steps_ms(found: Iterable[RunResult]) -> list[float]:
    """Step times of the runs that fit."""
    return [run.step_ms for run in found if run.row.step_ns is not None]


RESAMPLES = 10_000


def interval(values: Iterable[float], share: float = 0.95) -> tuple[float, float, float]:
    """The mean of ``values``, and the lower and upper end of its bootstrap interval.

    The ends are percentiles of the means of resamples (Efron 1979), which are the same in every call. All three are nan
    if there are no values.
    """
    values = np.asarray(list(values), float)
    if not len(values):
        return (float("nan"),) * 3
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [(1 - share) / 2, (1 + share) / 2])
    return float(values.mean()), float(low), float(high)


def geometric(values: Iterable[float]) -> tuple[float, float, float]:
    """The geometric mean and its interval: the exponentials of :func:`interval` of the logarithms."""
    mean, low, high = interval(np.log(np.asarray(list(values), float)))
    return float(np.exp(mean)), float(np.exp(low)), float(np.exp(high))


def evaluations_to(points: Sequence[tuple[int, float, int]], target_ns: float) -> int | None:
    """Number of evaluations after which a search reached ``target_ns``; None if it never did.

    ``points`` are ``(evaluations, seconds, step_ns)``, as in a curve.
    """
    return next((used for used, _, step_ns in points if step_ns <= target_ns), None)


def best_at(points: Sequence[tuple[int, float, int]], evaluations: int) -> int | None:
    """Best step time in ns within the first ``evaluations``; None if no placement fitted by then."""
    return min((step_ns for used, _, step_ns in points if used <= evaluations), default=None)


def interval_text(mean_low_high: tuple[float, float, float], digits: int = 1) -> str:
    """A mean with its interval as text: ``12.3 [11.9, 12.8]``, or ``-`` without a mean."""
    mean, low, high = (f"{value:,.{digits}f}" for value in mean_low_high)
    return "-" if mean == "nan" else f"{mean} [{low}, {high}]"


def cell(values: Sequence[float]) -> str:
    """A cell of a table: one value, or the mean of several with its interval, or OOM if there is none."""
    return interval_text(interval(values)) if len(values) > 1 else f"{values[0]:,.1f}" if values else "OOM"
