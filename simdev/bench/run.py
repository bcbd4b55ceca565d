"""One run: load the problem, let the placer place, simulate, and write down what happened as a row."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simdev.analysis.feasible import check_feasible
from simdev.bench.matrix import Run, parse_budget, parse_rules
from simdev.bench.objective import Steady, parse_objective
from simdev.bench.provenance import Stopwatch
from simdev.bench.rows import Row
from simdev.bench.stored import keep_machine, kept_graph, ships
from simdev.bench.work import RunOutcome, Work, failure, one_line, printable
from simdev.bench.workers import Limits, limit_process
from simdev.errors import Infeasible, InvalidInput, needs_package
from simdev.placers import registry
from simdev.placers.budget import Budget
from simdev.placers.placer import PlacerSpec
from simdev.problem.graph_file import load_graph, save_graph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim.schedule import Schedule


@dataclass(frozen=True)
class Instance:
    """A workload on a topology, with their present fingerprints. ``graph_file`` is set if the graph does not ship with
    simdev."""

    workload: str
    topology: str
    rules: str
    fingerprint: str
    cost_hash: str
    n_ops: int
    graph_file: str | None = None
    bound_ns: int | None = None
    bound_method: str = ""
    objective: str = "step"

    @property
    def problem(self) -> tuple[str, ...]:
        """The identity of the problem: a lower bound holds for all instances that share it."""
        same = (self.fingerprint, self.cost_hash, self.rules)
        return same if self.objective == "step" else (*same, self.objective)


def load_problem(workload: str, topology: str, rules: str, graph_file: str | None = None) -> Problem:
    """The problem that a row names."""
    graph = load_graph(graph_file) if graph_file else registry.load_workload(workload)
    return Problem.build(graph, load_topology(topology), rules=parse_rules(rules))


def execute(run: Run, instance: Instance, problem: Problem | None = None) -> RunOutcome:
    """Place and simulate in this process, without limits. An exception of the placer becomes the row's status.

    ``problem`` is the problem of the run, if it is loaded already.
    """
    spec, params = registry.find_placer(run.entry)
    blank = blank_row(run, instance, spec.version)
    if spec.missing:
        return RunOutcome(replace(blank, status="skipped", error=needs_package(spec.missing[0])))
    try:
        problem = problem or load_problem(run.workload, run.topology, run.rules, instance.graph_file)
        check_feasible(problem)
    except Infeasible as error:
        return RunOutcome(replace(blank, status="infeasible", error=one_line(error)))
    try:
        return _place(spec, params, problem, run, blank)
    except (Exception, SystemExit, GeneratorExit) as error:
        return RunOutcome(failure(blank, error))


def _place(spec, params: dict, problem: Problem, run: Run, blank: Row) -> RunOutcome:
    given, objective = _identity(problem), parse_objective(run.objective)
    granted = parse_budget(run.budget)
    watch = Stopwatch()  # before the clock of the budget, whose times are in the curve of the row
    budget = Budget(
        problem,
        evaluations=granted.evaluations,
        seconds=granted.seconds,
        clock=time.process_time if granted.processor else time.monotonic,
        simulate=objective.simulate_many,
        microbatches=objective.microbatches,
    )
    placement = spec.place(problem, rng=np.random.default_rng(run.entropy), budget=budget, **params)
    seconds, processor = watch.read()
    if _identity(problem) != given:
        raise InvalidInput("the placer altered the problem that it was given")
    row = score(blank, problem, placement, objective.simulate(problem, placement))
    row = replace(row, evaluations=budget.used, proof=printable(budget.proof))
    row = replace(row, place_seconds=seconds, cpu_seconds=processor)
    return RunOutcome(row, placement, tuple(budget.curve))


def _identity(problem: Problem) -> tuple:
    """What the graph, the costs, the topology and the rules are now, not what they were when first asked for."""
    graph, costs = problem.graph, problem.costs
    return type(graph).fingerprint.func(graph), type(costs).hash.func(costs), repr(problem.topology), problem.rules


def blank_row(run: Run, instance: Instance, placer_version: int) -> Row:
    """The row of a run before the run: an error without a message."""
    return Row(
        workload=run.workload,
        topology=run.topology,
        rules=run.rules,
        placer=run.placer,
        version=placer_version,
        params=run.params,
        budget=run.budget,
        seed=run.seed,
        fingerprint=instance.fingerprint,
        cost_hash=instance.cost_hash,
        status="error",
        lower_bound_ns=instance.bound_ns,
        bound_method=instance.bound_method,
        objective=instance.objective,
    )


def score(blank: Row, problem: Problem, placement: Placement, schedule: Schedule | Steady) -> Row:
    """``blank`` with what the schedule of ``placement`` says. An infeasible run has no step time, but a simulated
    one."""
    return replace(
        blank,
        status="ok",
        feasible=bool(schedule.feasible),
        step_ns=int(schedule.step_ns) if schedule.feasible else None,
        simulated_ns=int(schedule.step_ns),
        overflow=overflow_text(problem, schedule),
        peak_memory_bytes=int(schedule.peak_bytes.max()),
        comm_bytes=int(schedule.comm_bytes),
        placement=placement.hash,
    )


def overflow_text(problem: Problem, schedule) -> str:
    """``gpu0:123456 gpu1:42``: by how many bytes each device ran over."""
    names = [device.name for device in problem.topology.devices]
    return " ".join(f"{names[d]}:{int(schedule.overflow_bytes[d])}" for d in np.flatnonzero(schedule.overflow_bytes))


def find_instance(workload: str, topology: str, rules: str, objective: str, out: str) -> Instance:
    graph = registry.load_workload(workload)
    parse_objective(objective).check_graph(graph)
    try:
        cost_hash = Problem.build(graph, load_topology(topology), rules=parse_rules(rules)).costs.hash
    except Infeasible:  # an op without a kernel anywhere has no cost
        cost_hash = ""
    keep_machine(topology, Path(out))
    graph_file = None
    if not ships(workload):
        path = kept_graph(Path(out), graph.fingerprint)
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            save_graph(graph, path)
        graph_file = str(path)
    return Instance(
        workload, topology, rules, graph.fingerprint, cost_hash, graph.n_ops, graph_file, objective=objective
    )


def find_bound(instance: Instance, limits: Limits) -> tuple[int, str]:
    limit_process(limits)
    problem = load_problem(instance.workload, instance.topology, instance.rules, instance.graph_file)
    bound = parse_objective(instance.objective).lower_bound(problem)
    return int(bound.ns), str(bound.method)


class Placing(Work):
    """Placers answer a problem with a placement."""

    name, run, instance = "placers", Run, Instance

    def find(self, entry: str) -> tuple[PlacerSpec, dict]:
        return registry.find_placer(entry)

    def load(self, name: tuple, out: str) -> Instance:
        return find_instance(*name, out)

    def bound(self, instance: Instance, limits: Limits) -> tuple[int, str]:
        return find_bound(instance, limits)

    def warm_up(self, entry: str, limits: Limits) -> None:
        from simdev.bench.warm import tiny_problem

        limit_process(limits)
        spec, params = registry.find_placer(entry)
        problem = tiny_problem()
        spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem, evaluations=20), **params)

    def execute(self, run: Run, instance: Instance) -> RunOutcome:
        return execute(run, instance)

    def blank(self, run: Run, instance: Instance) -> Row:
        return blank_row(run, instance, registry.find_placer(run.entry)[0].version)

    def holds(self, row: Row, instance: Instance) -> bool:
        """Whether the row was made from the same graph and costs by the same version of the placer."""
        spec, _ = registry.find_placer(row.entry)
        return (row.fingerprint, row.cost_hash, row.version) == (instance.fingerprint, instance.cost_hash, spec.version)

    def bounded(self, instance: Instance) -> bool:
        return bool(instance.cost_hash)

    def needs_warm_up(self, entry: str) -> bool:
        """Learned placers need none: what JAX compiles depends on the graph, and its cache is safe to share."""
        return registry.find_placer(entry)[0].learner is None

    def kind(self, run: Run) -> str:
        """Runs of a placer that needs JAX share a process in turn, because tracing the networks and loading their
        programs takes seconds. A run gives the same result alone."""
        return run.entry if "jax" in registry.find_placer(run.entry)[0].needs else ""


PLACING = Placing()
