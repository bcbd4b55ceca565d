"""Planners: the protocol, the registry, what each finds, a Dask cluster, and the files of plans."""

import json
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest

from simdev.errors import BudgetExhausted, InvalidInput, UnknownName, Unsupported
from simdev.parallel import Mesh, find_model, load_cluster
from simdev.parallel.capture import kept
from simdev.parallel.orders import pipeline_order
from simdev.planners import Choice, Evaluator, Outcome, PlanBudget, PlannerSpec, evaluate, find_planner, planners, prove
from simdev.planners.bounds import ONE_STAGE, PRECISION, job_bound_ns, small_mesh
from simdev.planners.estimate import estimated_bytes
from simdev.planners.evaluate import WorkersLost, extrapolated
from simdev.planners.figures import demand, other_sizes
from simdev.planners.job import Job, choice_from
from simdev.planners.plan_file import load_plan, make_job
from simdev.planners.stage_bounds import any_plan_bound_ns, stage_options
from simdev.planners.testing import check_planner

# planner


@pytest.mark.parametrize("name", sorted(planners()))
def test_every_planner_keeps_the_contract(name, tiny_job, tiny_evaluator):
    check_planner(planners()[name], tiny_job, tiny_evaluator)


def _spec(function, **changes):
    fields = {"version": 1, "family": "test", "source": "the tests", **changes}
    return PlannerSpec(**{"name": "mine", "function": function, **fields})


def test_the_conformance_check_says_all_that_is_missing(tiny_job, tiny_evaluator):
    whole = Choice(Mesh({"dp_replicate": 4}))

    def check(function, **changes):
        with pytest.raises(AssertionError) as caught:
            check_planner(_spec(function, **changes), tiny_job, tiny_evaluator)
        return str(caught.value).partition("planner ")[2]

    def bare(job, *, rng, width):
        return whole

    bare.__module__ = "nowhere"
    said = check(bare, name="a[b", version=0, family="", source="", defaults={"size": None}, departures="none")
    for part in (
        "the name 'a[b' is not one",
        "version is 0",
        "family is missing",
        "source is missing",
        "docstring is missing",
        "no parameter 'budget'",
        "no parameter 'size'",
        "the default of 'size' is None",
        "defaults lack the parameter 'width'",
        "departures is not a tuple",
    ):
        assert part in said, said

    def changing(job, *, rng, budget):
        """Changes the job."""
        job.parameters["layers"] += 1
        return whole

    layers = tiny_job.parameters["layers"]
    assert "changed the job" in check(changing)
    tiny_job.parameters["layers"] = layers

    def undecided(job, *, rng, budget):
        """Draws from the generator of the module."""
        return Choice(whole.mesh, int(np.random.default_rng().choice([1, 2]))) if np.random.rand() < 2 else None

    assert "drew random numbers from another source" in check(undecided)

    known = iter((1, 2))

    def another(job, *, rng, budget):
        """A new choice each time."""
        return Choice(whole.mesh, next(known))

    assert "two choices for one seed" in check(another)

    def simulating(job, *, rng, budget):
        """Simulates without saying so."""
        return budget.evaluate(whole).choice

    assert "searches=True is missing" in check(simulating)
    assert check_planner(_spec(simulating, searches=True), tiny_job, tiny_evaluator) == whole
    assert "mesh: " in check(lambda job, *, rng, budget: Choice(Mesh({"dp_replicate": 3})))
    assert "returned NoneType, expected Choice" in check(lambda job, *, rng, budget: None)


def test_grid_is_no_worse_than_any_other_planner(tiny_job, tiny_evaluator):
    def best(name):
        try:
            budget = PlanBudget(tiny_evaluator)
            choice = planners()[name].plan(tiny_job, rng=np.random.default_rng(0), budget=budget)
        except Unsupported:
            return None
        return tiny_evaluator.outcome(choice).step_ns if not (choice.stage_layers or choice.stage_meshes) else None

    found = {name: best(name) for name in planners()}
    assert found["grid"] == min(step for step in found.values() if step is not None)


def test_no_plan_beats_its_bound(tiny_job, tiny_evaluator):
    choices = list(tiny_job.choices())
    assert len(choices) > 20
    for choice in choices:
        outcome = tiny_evaluator.outcome(choice, always=True)
        assert 0 < outcome.bound_ns <= outcome.step_ns, choice


def test_no_plan_beats_the_bound_of_the_job(tiny_job, tiny_evaluator):
    bound = job_bound_ns(tiny_evaluator)
    steps = [tiny_evaluator.outcome(choice, always=True).step_ns for choice in tiny_job.choices()]
    uneven = Choice(Mesh({"pp": 2, "dp_replicate": 2}), 2, stage_layers=(3, 1))
    assert 0.2 * min(steps) < bound <= min(steps)
    assert bound <= tiny_evaluator.outcome(uneven).step_ns


@pytest.mark.parametrize("gain", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("room", [None, 6.0e7])
def test_what_is_proven_holds_of_every_plan(gain, room, tiny_job):
    """The best plan is found from the worst one that fits, and those that bounds exclude are no better."""
    job = tiny_job
    if room is not None:
        kind = replace(job.cluster.kind, memory_bytes=int(room))
        job = job.with_changes(cluster=replace(job.cluster, kind=kind))
    evaluator = Evaluator(job)
    found = [one for one in map(evaluator.outcome, job.choices()) if one.fits]
    assert 4 < len(found) < sum(1 for _ in job.choices()) if room else len(found) > 20
    worst, budget = max(found), PlanBudget(evaluator)
    proof = prove(budget, worst, gain)
    best = budget.best
    assert min(found).step_ns >= (1 - gain) * best.step_ns
    assert gain or best.step_ns == min(found).step_ns
    assert proof.left == 0 and proof.plans == proof.excluded + proof.simulated == sum(1 for _ in job.choices())
    assert budget.used < proof.plans
    short = PlanBudget(evaluator, evaluations=1)
    assert prove(short, worst, 0.0).left > 0 and short.used == 1
    assert prove(PlanBudget(evaluator, seconds=1e-9), worst, gain).left == proof.plans


def test_larger_microbatches_of_other_meshes_are_bounded(tiny_job, monkeypatch):
    """Two sequences on each of four ranks do not divide twelve, three do: that nothing fits with two says nothing."""
    from simdev.planners import bounds

    job = tiny_job.with_changes(microbatches=(2, 3), batch=12, recomputes=("none",))
    only = {choice for choice in job.choices() if choice.microbatch == 3 and choice.mesh["dp_replicate"] == 4}
    assert only and not any(c.microbatch == 2 and c.mesh["dp_replicate"] == 4 for c in job.choices())
    asked: list = []

    def bounded(shared, choices, below):
        asked.extend(choices)
        return [(choice, 1.0) for choice in choices if choice in only]

    monkeypatch.setattr(bounds, "_choice_bounds", bounded)
    found = dict(bounds.choice_bounds_ns(Evaluator(job), 2.0))
    assert found.keys() == set(job.choices()) and {one for one in found if found[one] == 1.0} == only
    both = {replace(one, microbatch=2) for one in found if one.microbatch == 3} & found.keys()
    assert both and not {replace(one, microbatch=3) for one in both} & set(asked)


def test_a_plan_that_was_only_estimated_to_be_too_large_proves_nothing(tiny_job, tiny_evaluator, monkeypatch):
    best = min(tiny_evaluator.outcome(choice) for choice in tiny_job.choices())
    absent = Outcome(best.choice, None, 1, (1,))
    monkeypatch.setattr(tiny_evaluator, "hopeless", lambda choice: absent if choice == best.choice else None)
    budget = PlanBudget(tiny_evaluator, screen=True)
    assert not budget.evaluate(best.choice).fits
    worst = max(tiny_evaluator.outcome(choice) for choice in tiny_job.choices())
    assert prove(budget, worst, 0.0).left == 0 and budget.best.step_ns == best.step_ns


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_rank_holds_as_many_microbatches_as_the_bound_counts(schedule, ranks):
    if schedule == "looped-bfs":  # PyTorch's own order
        pytest.importorskip("torch")
    sizes = [(n, m) for n in ((1,) if schedule in ONE_STAGE else (2, 3)) for m in (1, 2, ranks, 2 * ranks, 4 * ranks)]
    met = 0
    for stages, microbatches in sizes:
        try:
            order = pipeline_order(schedule, ranks, microbatches, stages)
        except InvalidInput:
            continue
        for rank, actions in enumerate(order):
            held = Counter({stage: 0 for stage in range(rank, ranks * stages, ranks)})
            begun, most, with_gradients = set(), 0, 0
            for what, stage, _ in actions:
                held[stage] += 1 if what == "F" else -1
                begun |= {stage} if what == "B" else set()
                most = max(most, min(held.values()))
                with_gradients = max(with_gradients, min(held.values()) if len(begun) == stages else 0)
            assert most >= min(microbatches, ranks - rank)
            if microbatches >= 2 * ranks and schedule != "looped-bfs":
                assert with_gradients >= ranks - rank
            met += 1
    assert met >= 2 * ranks


def test_no_plan_beats_the_bound_of_all_plans(tiny_job):
    job = tiny_job.with_changes(ranks=2, recomputes=("none",), framework="compiled")
    evaluator, one, tensor = Evaluator(job), Mesh({}), Mesh({"tp": 2})
    bound = any_plan_bound_ns(evaluator)
    plans = [Choice(Mesh({}), 2, stage_meshes=(mesh,)) for mesh in (one, Mesh({"dp_replicate": 2}), tensor)]
    plans += [Choice(Mesh({"pp": 2}), n, stage_layers=(2, 2), stage_meshes=(one, one)) for n in (1, 2)]
    found = [evaluator.outcome(choice, always=True) for choice in plans]
    assert bound <= min(outcome.step_ns for outcome in found)
    busy = [np.dot(o.compute_ns, [mesh.ranks for mesh in o.choice.stage_meshes]) / job.ranks for o in found]
    assert bound <= min(busy) < 1.2 * bound  # kernels of all ranks, with those of the update
    assert bound <= job_bound_ns(evaluator) * (1 + PRECISION)  # found by bisection
    alone = Evaluator(job.with_changes(ranks=1))  # nothing is lost but the update, and gradients that are added up
    assert 0.8 < any_plan_bound_ns(alone) / alone.outcome(Choice(Mesh({}), 2)).step_ns <= 1


def test_stages_are_bounded_by_every_degree_and_share_that_a_plan_may_use(tiny_job):
    job = tiny_job.with_changes(microbatches=(1, 4), batch=24)
    found = set(stage_options(job))
    assert {share for _, share, _ in found} == {1, 2, 3, 4}
    assert {kind for *_, kind in found} == {"none", "selective", "full"}
    for stage in (Mesh({"dp_replicate": 4}), Mesh({"tp": 2}), Mesh({"dp_replicate": 2, "tp": 2}), Mesh({})):
        assert (small_mesh(stage), 3, "full") in found
    assert max(mesh.ranks for mesh, *_ in found) == job.ranks


def test_an_unknown_planner_is_named():
    with pytest.raises(UnknownName, match="planner"):
        find_planner("megaton")


def test_a_budget_counts_each_plan_once(tiny_job, tiny_evaluator):
    a, b, c = list(tiny_job.choices())[:3]
    budget = PlanBudget(tiny_evaluator, evaluations=2)
    assert len(budget.evaluate_many([a, a, b, c])) == 3  # a, a, b; nothing is left for c
    assert budget.used == 2 and not budget.open
    budget.evaluate(a)
    with pytest.raises(BudgetExhausted):
        budget.evaluate(c)


def test_a_budget_whose_seconds_are_over_estimates_and_simulates_no_more(tiny_job, tiny_evaluator):
    choices = list(tiny_job.choices())
    budget = PlanBudget(tiny_evaluator, seconds=1e-9)
    assert len(budget.estimates(choices)) == 1 < len(choices)
    for name in ("search", "flexflow"):
        with pytest.raises(BudgetExhausted, match="1e-09 seconds were over after 0 plans"):
            find_planner(name)[0].plan(tiny_job, rng=np.random.default_rng(0), budget=budget, **find_planner(name)[1])


def test_choices_survive_json():
    choice = Choice(Mesh({"pp": 2, "tp": 2}), 4, "full", "1f1b", 1, (2, 4))
    assert choice_from(choice.to_json()) == choice
    with pytest.raises(InvalidInput, match="microbatch"):
        choice_from({**choice.to_json(), "microbatch": "4"})
    assert not {"stage_meshes", "stage_recompute"} & choice.to_json().keys()  # as rows were before stages had meshes
    meshes = Mesh({"tp": 2}), Mesh({"dp_replicate": 2})
    own = Choice(Mesh({"pp": 2}), 4, stage_meshes=meshes, stage_recompute=("full", "none"))
    assert choice_from(own.to_json()) == own and own.order != choice.order
    assert str(own) == "tp=2 / dp_replicate=2 microbatch=4 recompute=full/none 1f1b"
    with pytest.raises(InvalidInput, match="stage_meshes"):
        choice_from({**own.to_json(), "stage_meshes": ["tp=2"]})


def test_days_and_dollars_by_hand(tiny_job, tiny_evaluator):
    """8 sequences of 256 tokens in 2 s are 1,024 tokens/s; four GPUs at 3 dollars an hour are 288 dollars a day. On
    half and twice the GPUs the replicas are half and twice as many."""
    found = demand(tiny_job, 2.0, 1024 * 86_400 * 10, 3.0)
    assert found == {"ranks": 4, "tokens_per_day": 1024 * 86_400, "days": 10, "dollars": 2880}
    cluster = load_cluster("dgx-a100[nodes=2]")
    job = tiny_job.with_changes(cluster=cluster, ranks=16, batch=32)
    choice = Choice(Mesh({"dp_replicate": 8, "tp": 2}), 1)
    evaluator = Evaluator(job)
    sizes = other_sizes(job, evaluator, evaluator.outcome(choice, always=True), None, None)
    assert [(row["ranks"], row["name"], row["fits"]) for row in sizes] == [
        (8, "dp_replicate=4,tp=2 microbatch=1", True),
        (32, "dp_replicate=16,tp=2 microbatch=1", True),
    ]
    alone = job.with_changes(cluster=replace(cluster, nodes=1, network_bytes_per_s=0), ranks=8)
    choice = Choice(Mesh({"dp_replicate": 4, "tp": 2}), 1)
    sizes = other_sizes(alone, evaluator, evaluator.sibling(alone).outcome(choice, always=True), None, None)
    assert [(row["ranks"], row["name"]) for row in sizes] == [(4, "dp_replicate=2,tp=2 microbatch=1")]
    unbounded = job.with_changes(cluster=replace(cluster, nodes=0), ranks=8)
    sizes = other_sizes(unbounded, evaluator, evaluator.sibling(unbounded).outcome(choice, always=True), None, None)
    assert [row["ranks"] for row in sizes] == [4, 16]


def test_uneven_stages_are_simulated(tiny_job, tiny_evaluator):
    even = tiny_evaluator.outcome(Choice(Mesh({"pp": 2, "dp_replicate": 2})))
    skewed = tiny_evaluator.outcome(Choice(Mesh({"pp": 2, "dp_replicate": 2}), stage_layers=(3, 1)))
    assert skewed.compute_ns[0] > even.compute_ns[0] and skewed.compute_ns[1] < even.compute_ns[1]
    with pytest.raises(InvalidInput, match="stage_layers"):
        tiny_evaluator.outcome(Choice(Mesh({"pp": 2, "dp_replicate": 2}), stage_layers=(3, 2)))


@pytest.mark.parametrize("framework", ["compiled", "megatron"])
@pytest.mark.parametrize("sizes", [{"tp": 2, "dp_replicate": 2}, {"pp": 2, "dp_replicate": 2}, {"pp": 4}], ids=str)
def test_many_microbatches_are_extrapolated_to_the_nanosecond(sizes, framework, tiny_job):
    job = tiny_job.with_changes(batch=64, framework=framework)
    evaluator = Evaluator(job)
    choice = Choice(Mesh(sizes))
    assert extrapolated(evaluator.program(choice)) is not None
    guess, exact = evaluator.outcome(choice, exact=False), evaluator.outcome(choice)
    assert (guess.step_ns, guess.compute_ns, guess.peak_bytes) == (exact.step_ns, exact.compute_ns, exact.peak_bytes)
    assert guess.exposed_ns == pytest.approx(exact.exposed_ns, abs=0.01 * exact.step_ns)


def test_an_estimate_counts_what_a_compiled_layer_keeps():
    pytest.importorskip("torch")
    model, parameters = find_model("llama3-8b[layers=4]")
    choice, saved = Choice(Mesh({"dp_shard": 8}), 1, "selective"), []
    for framework in ("eager", "compiled"):
        job = Job(model, parameters, load_cluster("dgx-h100"), 8, ranks=8, framework=framework, microbatches=(1,))
        evaluator = Evaluator(job)
        saved.append([estimated_bytes(evaluator, choice), *evaluator.outcome(choice, always=True).peak_bytes])
    assert len({*np.subtract(*saved).tolist()}) == 1 and saved[1][0] < saved[0][0]


def test_a_step_that_was_simulated_whole_is_not_simulated_again(tiny_job, monkeypatch):
    job = tiny_job.with_changes(batch=8 * tiny_job.ranks)
    evaluator, choice, times = Evaluator(job), Choice(Mesh({"dp_replicate": job.ranks}), 4), []
    simulate = evaluate.simulate_program
    monkeypatch.setattr(evaluate, "simulate_program", lambda *a, **k: times.append(1) or simulate(*a, **k))
    searched = evaluator.outcome(choice, exact=False)  # two microbatches: nothing is extrapolated
    assert evaluator.outcome(choice) is searched and len(times) == 1
    assert evaluator.outcome(choice, engine="reference") == searched and len(times) == 2


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("slower, kinds", [(1.0, {"none", "selective"}), (1.05, {"none"}), (1.2, set())])
def test_search_estimates_the_splits_of_a_layer_that_may_pay(slower, kinds, fits, tiny_job, monkeypatch):
    """Without data parallelism, a split takes ``slower`` times the step without a split, and more with recomputation.
    If nothing without a split fits, all are estimated."""
    from simdev.baselines.planners import search
    from simdev.planners.estimate import Estimate

    factor = {"none": 1.0, "selective": 1.08, "full": 1.3}
    job, most = tiny_job, 2 * tiny_job.cluster.kind.memory_bytes

    def costs(evaluator, mesh, microbatch, recompute):
        step = 1e6 * factor[recompute] * (slower if mesh["tp"] > 1 else 1)
        passes = step * microbatch * mesh.replicas * job.ranks / (job.batch * mesh.ranks)
        return SimpleNamespace(pass_ns=np.full((2, job.layers + 1), passes))

    class Budget:
        evaluator, elapsed, seconds = None, 0.0, 1.0

        def estimates(self, choices):
            peak = 1 if fits else most
            return {one: Estimate(one, int(1e6 * factor[one.recompute] / one.microbatch), peak) for one in choices}

    monkeypatch.setattr(search, "stage_costs", costs)
    monkeypatch.setattr(search, "WORTH", 2.2)  # twice the microbatch is taken to halve the step
    found, splits = search.estimate(job, Budget())
    every = set(job.choices(base=True))
    split = {one for one in every if one.mesh["tp"] > 1}
    wanted = {one for one in split if one.recompute in kinds} if fits else split
    assert split and found.keys() == (every - split) | wanted
    assert splits == {search.group_of(one) for one in found}


def test_search_begins_with_the_least_split(tiny_job, monkeypatch):
    """Meshes come in the order of their stages; with fewer sequences than ranks, the first ones split a layer. Without
    a plan of the least microbatch, there is no guess, and all is estimated."""
    from simdev.baselines.planners import search

    asked = []

    class Budget:
        evaluator, elapsed, seconds = None, 0.0, 1.0

        def estimates(self, choices):
            asked.append(list(choices))
            return {}

    passes = np.ones((2, tiny_job.layers + 1))
    monkeypatch.setattr(search, "stage_costs", lambda *_: SimpleNamespace(pass_ns=passes))
    for changes in ({"batch": 2}, {"batch": 12, "microbatches": (2, 3)}):
        job = tiny_job.with_changes(**changes)
        choices = list(job.choices(base=True))
        asked.clear()
        search.estimate(job, Budget())
        least = min(search.group_of(one)[:-1] for one in choices)
        assert {search.group_of(one)[:-1] for one in asked[0]} == {least}
        assert {*asked[0], *asked[1]} == set(choices)


def test_the_command_does_what_no_worker_has_begun(tiny_job):
    """In order, also if it does the last ones first; what is left is taken back when nobody asks any more."""
    here: list[int] = []

    class Pool:
        def submit(self, function, task):
            future = Future()
            if task < 2:  # a worker has these
                future.set_running_or_notify_cancel()
                threading.Timer(0.2 * (task + 1), lambda: future.set_result(function(task))).start()
            futures.append(future)
            return future

        def shutdown(self, **_):
            pass

    futures: list[Future] = []
    evaluator = Evaluator(tiny_job, workers=2)
    evaluator._executor = Pool()
    found = evaluator._answers(lambda task: ("there", task), range(5), lambda task: here.append(task) or ("here", task))
    assert list(found) == [("there", 0), ("there", 1), ("here", 2), ("here", 3), ("here", 4)]
    assert sorted(here) == [2, 3, 4] and here[0] == 4
    futures.clear()
    answers = evaluator._answers(lambda task: task, range(5), lambda task: task)
    next(answers)
    answers.close()
    assert all(future.cancelled() or future.running() or future.done() for future in futures)

    def fails(task):
        raise ValueError(task)

    with pytest.raises(ValueError):
        list(evaluator._answers(lambda task: task, range(5), fails))


def test_search_tries_interleaved_stages(tiny_job):
    job = tiny_job.with_changes(schedules=("1f1b", "interleaved"), recomputes=("none",), microbatches=(1,))
    deep = Choice(Mesh({"pp": 2, "dp_replicate": 2}))
    looped = Choice(deep.mesh, schedule="interleaved", stages_per_rank=2)
    assert looped in set(job.choices())
    evaluator = Evaluator(job)
    assert job_bound_ns(evaluator) <= evaluator.outcome(looped).step_ns != evaluator.outcome(deep).step_ns


def test_the_number_of_workers_changes_nothing(tiny_job, tiny_evaluator):
    choices = list(tiny_job.choices())[:5]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        assert list(Evaluator(tiny_job, executor=pool).outcomes(choices)) == list(tiny_evaluator.outcomes(choices))


def test_workers_start_only_for_long_captures(tiny_job, tiny_evaluator, tmp_path, monkeypatch):
    class Started(Exception):
        pass

    def pool(_):
        raise Started

    choices = list(tiny_job.choices())[:3]
    wanted = list(tiny_evaluator.outcomes(choices)), list(tiny_evaluator.estimates(choices))  # all captures are kept
    monkeypatch.setattr(Evaluator, "_pool", pool)
    warm = Evaluator(tiny_job, workers=2)
    assert (list(warm.outcomes(choices)), list(warm.estimates(choices))) == wanted
    monkeypatch.setenv(kept.APART, str(tmp_path / "for one process"))
    monkeypatch.setattr(evaluate, "PAYS_S", 1e9)
    cold = Evaluator(tiny_job, workers=2)
    assert (list(cold.outcomes(choices)), list(cold.estimates(choices))) == wanted
    monkeypatch.setattr(evaluate, "PAYS_S", 0)  # what is left after the first task is then enough
    monkeypatch.setenv(kept.APART, str(tmp_path / "for two"))
    for batch in ("outcomes", "estimates"):
        with pytest.raises(Started):
            list(getattr(Evaluator(tiny_job, workers=2), batch)(choices))


def test_workers_start_by_the_mean_of_the_tasks_so_far(tiny_job, monkeypatch):
    """Also behind a task whose captures are kept, which takes no time."""
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))  # a task that loads it would not be counted

    class Started(Exception):
        pass

    def pool(_):
        raise Started

    monkeypatch.setattr(Evaluator, "_pool", pool)
    clock = [0.0]
    monkeypatch.setattr(evaluate.time, "monotonic", lambda: clock[0])

    def before_workers(seconds):
        here: list[int] = []

        def work(task):
            here.append(task)
            clock[0] += seconds[task]
            return task

        with pytest.raises(Started):
            list(Evaluator(tiny_job, workers=2)._answers(work, range(len(seconds)), work))
        return here

    assert before_workers([3.0] * 10) == [0], "nine tasks of three seconds are left"
    assert before_workers([0.0] + [3.0] * 10) == [0, 1], "the mean is 1.5"


@pytest.mark.parametrize(
    "name", ["bert-large", "deepseek-v3", "gpt-1.3b", "llama3-8b", "mixtral-8x7b", "mpt-7b", "vit-22b"]
)
def test_shipped_models_are_sent_to_workers(name):
    from simdev.parallel import find_model

    model, parameters = find_model(name)
    there = pickle.loads(pickle.dumps(model))
    assert there.name == model.name and there.function is model.function
    there.checks(parameters, Mesh({}))


def test_workers_that_end_are_one_sentence(tiny_job):
    class Gone(Executor):
        def map(self, *_):
            raise BrokenExecutor("a process ended")

    choices = list(tiny_job.choices())[:2]
    with pytest.raises(WorkersLost, match="a process that simulated plans has ended"):
        list(Evaluator(tiny_job, executor=Gone()).outcomes(choices))


# plans evaluated on a Dask cluster


def test_a_cluster_gives_the_same_outcomes_and_estimates(tiny_job, tiny_evaluator):
    pytest.importorskip("distributed")
    from distributed import LocalCluster

    from simdev.bench.dask_cluster import dask_executor

    choices = list(tiny_job.choices())[:6]
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": True, "dashboard_address": None}
    with LocalCluster(**options) as cluster, dask_executor(cluster.scheduler_address) as executor:
        with Evaluator(tiny_job, executor=executor) as away:
            assert list(away.outcomes(choices)) == list(tiny_evaluator.outcomes(choices))
            assert list(away.estimates(choices)) == list(tiny_evaluator.estimates(choices))


MODEL, CLUSTER = "llama3-8b[length=4096]", "dgx-h100[nodes=2]"
CHOICES = [
    Choice(Mesh({"dp_shard": 16}), 2, "full", reduce_each=True),
    Choice(Mesh({"pp": 2, "dp_shard": 4, "tp": 2}), 1, "selective", "interleaved", 2),
    Choice(Mesh({"pp": 2, "dp_shard": 8}), 1, stage_layers=(17, 15)),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_plan_is_read_back(tmp_path, choice):
    if choice.schedule == "interleaved":
        pytest.importorskip("torch")  # whose order of microbatches it is
    job, path = make_job(MODEL, CLUSTER, 64), tmp_path / "plan.json"
    choice.save(path, job, {"step_time_s": 1.5})
    found, again = load_plan(path)
    assert again == choice and found == job


DRAWN = {
    ("llama3-8b[length=32768]", "dgx-h100[nodes=2]", "eager"): {"schedules": ("1f1b", "interleaved", "zero-bubble")},
    ("mixtral-8x7b", "dgx-h100[nodes=2]", "eager"): {"wide": True},
    ("gpt-1.3b", "dgx-a100", "megatron"): {},
    ("deepseek-v2lite", "l40sx8-pcie", "compiled"): {"schedules": ("gpipe", "1f1b")},
}


def test_drawn_plans_are_read_back(tmp_path):
    """200 plans of four jobs: meshes, stages of other depths, schedules, recomputation, gathered parameters."""
    pytest.importorskip("torch")  # whose orders of microbatches some schedules have
    rng, path, kinds = np.random.default_rng(0), tmp_path / "plan.json", set()
    for (model, cluster, framework), options in DRAWN.items():
        job = make_job(model, cluster, 256, framework, **options)
        some = list(islice(job.choices(), 1000))
        for choice in (some[n] for n in rng.integers(len(some), size=50)):
            choice.save(path, job)
            again, found = load_plan(path)
            assert found == choice and again.plan(found) == job.plan(choice)
            kinds |= {*choice.mesh.sizes} | {choice.schedule, choice.recompute, choice.reshard}
    assert kinds >= {
        "pp",
        "dp_replicate",
        "dp_shard",
        "tp",
        "cp",
        "ep",
        "1f1b",
        "interleaved",
        "full",
        "selective",
        "never",
    }


@pytest.mark.parametrize(
    "change, field",
    [
        ({"format": "x"}, "format"),
        ({"version": 2}, "version"),
        ({"batch": "64"}, "batch"),
        ({"batch": True}, "batch"),
        ({"batch": 7}, "microbatch"),
        ({"choice": []}, "choice"),
        ({"choice": {**CHOICES[0].to_json(), "microbatch": 0}}, "microbatch"),
        ({"cluster": "x" * 5000}, "an id cannot be looked up"),
        ({"model": "evil.py:model"}, "model"),
        ({"model": "/etc/config.json"}, "model"),
        ({"cluster": "mine.toml[nodes=2]"}, "cluster"),
        ({"framework": "/etc/mine.toml"}, "framework"),
        ({"ranks": "16"}, "ranks"),
        ({"ranks": -1}, "ranks"),
        ({"ranks": 8}, "mesh"),
        ({"model": "llama3-8b[lenght=4096]"}, "model"),
    ],
)
def test_a_damaged_plan_is_one_sentence(tmp_path, change, field):
    path = tmp_path / "plan.json"
    CHOICES[0].save(path, make_job(MODEL, CLUSTER, 64))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidInput, match=rf"plan\.json: {field}"):
        load_plan(path)


def test_names_that_do_not_exist(tmp_path):
    path = tmp_path / "plan.json"
    CHOICES[0].save(path, make_job(MODEL, CLUSTER, 64))
    for name in ("model", "cluster", "framework"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: "nothing"}))
        with pytest.raises(InvalidInput, match=rf"plan\.json: {name}: unknown .* 'nothing'"):
            load_plan(path)
        CHOICES[0].save(path, make_job(MODEL, CLUSTER, 64))


@pytest.mark.parametrize("ranks", [4, 16])
def test_a_plan_for_other_ranks_than_those_of_a_node_is_read_back(tmp_path, ranks):
    path = tmp_path / "plan.json"
    job, choice = make_job(MODEL, "dgx-h100", 64, ranks=ranks), Choice(Mesh({"dp_shard": ranks}), 2)
    choice.save(path, job)
    assert load_plan(path) == (job, choice)
    CHOICES[0].save(path, make_job(MODEL, CLUSTER, 64))
    assert "ranks" not in json.loads(path.read_text())


def test_a_model_of_the_users_own_is_passed_by_name(tmp_path):
    path = tmp_path / "plan.json"
    CHOICES[0].save(path, make_job(MODEL, CLUSTER, 64).with_changes(ids=("my.py:llama", CLUSTER)))
    assert load_plan(path, model=MODEL)[1] == CHOICES[0]
    with pytest.raises(InvalidInput, match="make the job with simdev.make_job"):
        CHOICES[0].save(path, make_job(MODEL, CLUSTER, 64).with_changes(ids=("", "")))


def test_a_plan_is_loaded_before_the_process_group(tmp_path):
    """How tp divides a module of the user's is tried out in a process group of its own."""
    pytest.importorskip("torch")
    from simdev.parallel.capture.stage import fake_process_group

    (tmp_path / "my_model.py").write_text(TWO_PRODUCTS, encoding="utf-8")
    name, path = f"{tmp_path}/my_model.py:make_step", tmp_path / "plan.json"
    Choice(Mesh({"tp": 2}), 2).save(path, make_job(name, "dgx-a100", 8, ranks=2))
    (tmp_path / "my_model.py").write_text(TWO_PRODUCTS + "\n", encoding="utf-8")  # nothing is known of it yet
    with fake_process_group(Mesh({"tp": 2})):
        with pytest.raises(Unsupported, match="before torch.distributed.init_process_group"):
            load_plan(path, model=name)
    (tmp_path / "my_model.py").write_text(TWO_PRODUCTS, encoding="utf-8")
    assert load_plan(path, model=name)[1].mesh["tp"] == 2


TWO_PRODUCTS = """
import torch
from simdev import TrainingStep

def make_step():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).double()
    loss = lambda model, x: model(x).square().mean()
    return TrainingStep(model, (torch.ones(8, 32, dtype=torch.float64),), loss, torch.optim.SGD(model.parameters()))
"""
SEARCHED = """
import sys
import numpy as np
from simdev.planners.budget import PlanBudget
from simdev.planners.evaluate import Evaluator
from simdev.planners.planner import find_planner
from simdev.planners.testing import small_job

job = small_job(ranks=2, microbatches=(1,), recomputes=("none",), schedules=("interleaved", "zero-bubble"))
budget = PlanBudget(Evaluator(job), evaluations=4)
print(find_planner("search")[0].plan(job, rng=np.random.default_rng(0), budget=budget), "torch" in sys.modules)
"""


@pytest.mark.slow
def test_a_search_whose_captures_are_kept_does_without_pytorch(tmp_path):
    pytest.importorskip("torch")
    environment = {**os.environ, kept.APART: str(tmp_path)}
    first, again = (
        subprocess.run([sys.executable, "-c", SEARCHED], env=environment, check=True, capture_output=True, text=True)
        for _ in range(2)
    )
    assert first.stdout.endswith(" True\n"), "the control: nothing was kept"
    assert again.stdout == first.stdout.replace(" True\n", " False\n")
