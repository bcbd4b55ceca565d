"""A user's script gets real types, and mypy finds nothing in the code, of which it checks at least 80 %."""

import re

import pytest
import typecheck

SCRIPT = """
import numpy as np
from simdev import Budget, Placement, Problem, Rules, find_placer, load_topology, load_workload, placer, simulate
from simdev import Simulator, TrainingStep, lower_bound, simulate_many, validate, workload
from simdev import Choice, Job, Mesh, Plan, find_planner, planner, simulate_plan
from simdev.parallel import find_model, load_cluster
from simdev.placers.placer import PlacerSpec
from simdev.planners import Evaluator, PlanBudget

problem = Problem.build(load_workload("nmt"), load_topology("p100x4"), rules=Rules(order="priority"))
spec, parameters = find_placer("heft")
budget = Budget(problem, evaluations=10)
placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget)
schedule = simulate(problem, placement)
validate(problem, placement, schedule)


@placer("mine", version=1, family="mine")
def mine(problem: Problem, *, rng: np.random.Generator, budget: Budget) -> Placement:
    return Placement(np.zeros(problem.graph.n_ops, int))


@workload("mine", family="mine")
def step(batch: int = 3) -> TrainingStep:
    raise NotImplementedError


@planner("mine", version=1, family="mine")
def whole(job: Job, *, rng: np.random.Generator, budget: PlanBudget) -> Choice:
    return Choice(Mesh({"dp_shard": job.ranks}))


model, sizes = find_model("llama3-8b")
job = Job(model, sizes, load_cluster("dgx-h100"), 1024)
choice = find_planner("fsdp")[0].plan(job, rng=np.random.default_rng(0), budget=PlanBudget(Evaluator(job)))
plan: Plan = job.plan(choice)


reveal_type(whole)  # def (job: Job, *, rng: Generator, budget: PlanBudget) -> Choice
reveal_type(choice)  # Choice
reveal_type(choice.mesh)  # Mesh
reveal_type(job.plan(choice))  # Plan
reveal_type(simulate_plan(plan))  # PlanReport[Plan]
reveal_type(simulate_plan(plan).step_ns)  # int
find_planner("fsdp")[0].plan(job)  # error: call-arg
reveal_type(problem)  # Problem
reveal_type(problem.graph.n_ops)  # int
reveal_type(problem.topology.accelerators)  # tuple[int, ...]
reveal_type(spec)  # PlacerSpec
reveal_type(placement)  # Placement
reveal_type(budget.evaluate(placement.devices))  # Score
reveal_type(budget.evaluate(placement.devices).overflow_bytes)  # int | None
reveal_type(schedule.step_ns)  # int
reveal_type(schedule.feasible)  # bool
reveal_type(simulate_many(problem, placement.devices[None]))  # Outcomes
reveal_type(Simulator(problem, placement).move(0, 1))  # int
reveal_type(lower_bound(problem).ns)  # int
reveal_type(mine)  # def (problem: Problem, *, rng: Generator, budget: Budget) -> Placement
reveal_type(step)  # def (batch: int =) -> TrainingStep
problem.grph  # error: attr-defined
spec.place(problem)  # error: call-arg
from simdev import plaser  # error: attr-defined
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    pytest.importorskip("mypy", reason="mypy is not installed")
    return typecheck.make_tree(tmp_path_factory.mktemp("types") / "tree")


def test_most_of_the_code_is_checked():
    assert len(typecheck.ignored()) <= 8
    assert typecheck.share_checked() >= 0.8


def test_every_ignored_entry_is_a_module():
    modules = typecheck.lines_by_module()
    assert [entry for entry in typecheck.ignored() if entry.removesuffix(".*") not in modules] == []


@pytest.mark.slow
def test_mypy_finds_nothing(tree):
    code, lines = typecheck.run_mypy("-p", "simdev", tree=tree)
    assert code == 0, "\n".join(lines[-40:])


def test_a_users_script_gets_real_types(tree):
    (tree / "script.py").write_text(SCRIPT, encoding="utf-8")
    _, lines = typecheck.run_mypy("script.py", tree=tree)
    found = {}
    for line in lines:
        match = re.match(r"script\.py:(\d+): (note: Revealed type is \"(.*)\"|error: .*\[([a-z-]+)\])$", line)
        if match:
            found[int(match[1])] = re.sub(r"\b(?:\w+\.)+", "", match[3] or "") or f"error: {match[4]}"
    wanted = {number: line.split("  # ")[1] for number, line in enumerate(SCRIPT.splitlines(), 1) if "  # " in line}
    assert found == wanted, "\n".join(lines)
