"""What planners are made of: estimates, dynamic programs over stages, and compiled loops against plain Python."""

import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest

from simdev.baselines.planners import _alpa, flexflow, search
from simdev.baselines.planners._kernel import with_a_stage
from simdev.baselines.planners._stages import in_progress, least_bottleneck, least_sum, pipelines
from simdev.errors import InvalidInput
from simdev.exact.pipedream import Profile
from simdev.exact.pipedream import plan as pipedream
from simdev.exact.piper import LayerChoice, Layers, piper
from simdev.parallel import find_model, load_cluster
from simdev.parallel.mesh import Mesh
from simdev.parallel.models import find_packed
from simdev.parallel.orders import pipeline_order, stage_rank
from simdev.parallel.unroll import execution_order
from simdev.planners import Choice, Evaluator, Job, PlanBudget, planners
from simdev.planners import estimate as module
from simdev.planners._kernel import longest_ns, most_bytes
from simdev.planners.bounds import job_bound_ns
from simdev.planners.estimate import estimate, estimates, least_bytes, stage_costs
from simdev.planners.figures import what_helps, why_none_fits, why_nothing_can_fit, why_slower
from simdev.planners.outcome import Outcome

# the cost model: close to the simulation, and the same whatever the number of workers


MODEL = "llama3-8b[width=512,layers=8,heads=8,kv_heads=2,hidden=1024,vocabulary=2048,length=1024]"


@pytest.fixture(scope="module")
def job():
    pytest.importorskip("torch")
    from simdev.parallel import find_model, load_cluster
    from simdev.planners import Job

    model, parameters = find_model(MODEL)
    some = {"ranks": 8, "framework": "compiled", "microbatches": (1, 2, 4), "recomputes": ("full",)}
    return Job(model, parameters, load_cluster("dgx-h100[nodes=1]"), 64, **some)


@pytest.mark.parametrize(
    "framework, mesh, advice",
    [
        ("eager", {"pp": 4, "tp": 2}, r"add dp_shard=2 or more to the mesh \(simdev simulate-plan --mesh pp=4,tp=2 "),
        ("nemo", {"tp": 2, "dp_shard": 4}, r"nemo shards the optimizer and no parameters: leave dp_shard out"),
    ],
)
def test_a_plan_with_other_data_types_is_refused_with_what_to_type(framework, mesh, advice):
    model, parameters = find_model(MODEL)
    job = Job(model, parameters, load_cluster("dgx-h100[nodes=1]"), 64, framework=framework)
    with pytest.raises(InvalidInput, match=advice):
        job.plan(Choice(Mesh(mesh)))
    assert job.plan(Choice(Mesh({"dp_shard": 8} if framework == "eager" else {"pp": 4, "tp": 2})))


@pytest.fixture(scope="module")
def evaluator(job):
    return Evaluator(job)


CHOICES = [
    Choice(Mesh({"dp_shard": 8}), 1, "full"),
    Choice(Mesh({"dp_shard": 8}), 4, "full"),
    Choice(Mesh({"dp_shard": 8}), 2, "full", reduce_each=True),
    Choice(Mesh({"dp_shard": 4, "tp": 2}), 2, "full"),
    Choice(Mesh({"dp_replicate": 2, "dp_shard": 4}), 2, "full"),
    Choice(Mesh({"pp": 2, "dp_shard": 2, "tp": 2}), 1, "full"),
    Choice(Mesh({"pp": 2, "dp_shard": 4}), 2, "full", "interleaved", 2),
    Choice(Mesh({"dp_shard": 8}), 2, "full", reshard="never"),
    Choice(Mesh({"pp": 2, "dp_shard": 4}), 2, "full", "interleaved", 4, reshard="never"),
]
TWENTY_SECONDS = {CHOICES[3]: pytest.mark.long, CHOICES[5]: pytest.mark.slow}  # each captures stages of its own


def test_a_plan_that_was_tried_is_not_advised(job, evaluator):
    """Its memory was estimated too low: more nodes are, not more evaluations."""
    one, other = (Choice(Mesh({"dp_shard": 8}), size, "full", reduce_each=True) for size in (1, 2))
    for tried, advice in ((other, f"; {one} is estimated to fit: raise"), (one, "; dgx-h100[nodes=2] is estimated")):
        outcomes = {tried: Outcome(tried, None, 1, (2**37,))}
        budget = SimpleNamespace(tried=outcomes, estimated={}, evaluator=evaluator)
        assert advice in why_none_fits(job, budget)


def advice(job, step_ns=1000, overflow_bytes=0, tried=()):
    """What helps a plan of 1,000 ns if twice the sequences take ``step_ns`` and lack ``overflow_bytes``, and plans that
    were tried and lack memory would take the ``tried`` times."""
    choice = Choice(Mesh({"dp_shard": 8}), 1)
    lacking = {
        Choice(Mesh({"dp_shard": 8}), 2 + n): Outcome(choice, time, 1, (2**36,), 1) for n, time in enumerate(tried)
    }
    there = SimpleNamespace(outcome=lambda choice, always: Outcome(choice, step_ns, overflow_bytes, (1,)))
    evaluator = SimpleNamespace(sibling=lambda _: there, outcome=lambda one, always, exact: lacking[one])
    outcomes = {one: Outcome(one, None, 1, (2**36,), 1) for one in lacking}
    budget = SimpleNamespace(tried=outcomes, estimated={}, evaluator=evaluator)
    return what_helps(job, budget, Outcome(choice, 1000, 0, (1,)))


def test_advice_is_a_plan_that_fits_and_gains_a_hundredth(job):
    (sentence,) = advice(job)
    assert sentence.startswith("twice the sequences in a step: this plan would process 100.0% more")
    assert advice(job, overflow_bytes=1) == []  # a pipeline keeps a buffer for each of its microbatches
    assert advice(job, step_ns=None) == []  # too many ops to simulate
    assert advice(job, step_ns=1990, tried=[995]) == []
    assert "takes 2.0% less time" in advice(job, step_ns=1990, tried=[980, 995])[0]


def test_what_no_plan_can_hold_is_known_before_any_simulation(job, evaluator):
    layer = 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024 + 2 * 512  # attention, gate, norms
    parameters = 8 * layer + 2 * 2048 * 512 + 512
    # float32: a parameter, its gradient and Adam's two moments; the optimizer also counts its steps for each tensor
    assert least_bytes(evaluator) == pytest.approx(16 * parameters, rel=1e-3)
    assert why_nothing_can_fit(job, evaluator) == ""

    def on(bytes_):
        kind = replace(job.cluster.kind, memory_bytes=bytes_)
        return job.with_changes(cluster=replace(job.cluster, kind=kind))

    short = on(16 * parameters // 8 - 10_000).with_changes(parameters={**job.parameters, "length": 32})
    message = why_nothing_can_fit(short, Evaluator(short))
    assert message.startswith("no plan fits: parameters, gradients and optimizer state, divided among 8 GPUs, take")
    assert "dgx-h100[nodes=" in message and "is estimated to hold the model (dp_shard=" in message
    choice = Choice(Mesh({"dp_shard": 8}), 4, "full")
    peak = max(evaluator.outcome(choice).peak_bytes)
    assert evaluator.hopeless(choice) is None and Evaluator(on(peak)).hopeless(choice) is None
    found = Evaluator(on(peak // 2)).hopeless(choice)
    assert found is not None and found.overflow_bytes and not found.fits and found.choice == choice


FROZEN = """
import torch
from torch import nn
from simdev import TrainingStep


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.down, self.up = nn.Linear(512, 512), nn.Linear(512, 4), nn.Linear(4, 512)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def make_step():
    model = nn.Sequential(nn.Linear(512, 512), nn.Sequential(*(Block() for _ in range(6))))
    trained = [p for p in model.parameters() if p.requires_grad]
    return TrainingStep(model, (torch.zeros(4, 64, 512),), lambda model, x: model(x).square().mean(), torch.optim.AdamW(
        trained))
"""


@pytest.mark.slow
def test_replicas_exchange_no_gradients_of_frozen_parameters(tmp_path, monkeypatch):
    """Neither in estimates nor in bounds: on a slow network, that decides which plan is the quickest."""
    pytest.importorskip("torch")
    (tmp_path / "frozen.py").write_text(FROZEN)
    model, parameters = find_model(f"{tmp_path}/frozen.py:make_step")
    where = load_cluster("dgx-a100[nodes=2,network_gb_per_s=0.05]")
    job = Job(model, parameters, where, 16, microbatches=(1,), recomputes=("none",))
    evaluator, choice = Evaluator(job), Choice(Mesh({"dp_replicate": 2, "dp_shard": 8}))
    exact = evaluator.outcome(choice, always=True)
    assert estimate(evaluator, choice).step_ns == pytest.approx(exact.step_ns, rel=0.1)
    monkeypatch.setattr(Job, "choices", lambda self: iter([choice]))
    assert 0 < job_bound_ns(evaluator) <= exact.step_ns


@pytest.mark.parametrize("choice", [pytest.param(it, id=str(it), marks=TWENTY_SECONDS.get(it, ())) for it in CHOICES])
def test_estimates_are_close_to_the_simulation(choice, evaluator):
    guess, exact = estimate(evaluator, choice), evaluator.outcome(choice, always=True)
    # Fused kernels leave little of so small a model beside what an interleaved pipeline adds: sends and idle time.
    within = 0.08 if choice.stages_per_rank > 1 else 0.05
    assert guess.step_ns == pytest.approx(exact.step_ns, rel=within)
    most = max(exact.peak_bytes)  # rather too much for parameters that stay gathered
    assert guess.peak_bytes == pytest.approx(most, rel=0.12 if choice.reshard == "always" else 0.25)


def test_the_space_of_published_plans(job):
    """Eight layers on two ranks divide among four and eight stages, with light ends among ten; seven among eight."""
    wide = job.with_changes(wide=True)
    narrow, found = list(job.choices()), list(wide.choices())
    assert set(narrow) < set(found) and len(found) == len(set(found))
    assert all(c.reshard == "always" and c.stages_per_rank < 3 and not c.stage_layers for c in narrow)
    assert {c.stages_per_rank for c in found if c.mesh["pp"] == 2 and c.schedule == "interleaved"} == {2, 4, 5}
    seven = wide.with_changes(parameters={**job.parameters, "layers": 7})
    deeper = list(seven.deeper(Choice(Mesh({"pp": 2, "dp_shard": 4}), 1, "full", "interleaved", 2)))
    assert [(c.stages_per_rank, c.stage_layers) for c in deeper] == [(2, (2, 2, 2, 1)), (4, ())]
    kept = {(c.reduce_each, c.reshard) for c in found if c.mesh == Mesh({"pp": 2, "dp_shard": 4})}
    assert kept == {(False, "always"), (False, "never"), (True, "never")}
    experts = find_model("mixtral-8x7b")
    across = Job(*experts, load_cluster("dgx-h100[nodes=4]"), 64, wide=True)
    assert across.spreads("ep") == [1, 2, 4, 8]  # of eight experts
    many = Job(*find_model("deepseek-v3"), load_cluster("dgx-h100[nodes=8]"), 64, wide=True)
    assert many.spreads("ep") == [1, 2, 4, 8, 16, 32, 64] and many.may_spread(1, 1, 64)
    assert not many.may_spread(2, 1, 32) and not many.with_changes(wide=False).may_spread(1, 1, 64)
    llama = Job(*find_model("llama3-70b"), load_cluster("dgx-h100[nodes=8]"), 64, wide=True)
    assert llama.spreads("cp") == [1, 2] and llama.with_changes(wide=False).spreads("cp") == [1]


@pytest.mark.parametrize("sizes", [{"dp_shard": 16}, {"dp_replicate": 2, "dp_shard": 8}], ids=str)
def test_gradients_that_each_microbatch_reduces_are_kept_as_shards(sizes):
    """MPT never keeps whole gradients, and its replicas exchange them beside the backward pass."""
    pytest.importorskip("torch")
    from simdev.parallel import find_model, load_cluster
    from simdev.planners import Job

    entry = "mpt-7b[width=512,layers=8,heads=8,vocabulary=2048,length=1024]"
    cluster, size = load_cluster("dgx-h100[nodes=2]"), {"microbatches": (4,), "recomputes": ("none",)}
    there = Evaluator(Job(*find_model(entry), cluster, 128, framework="compiled", **size))
    guess, exact = estimate(there, Choice(Mesh(sizes), 4)), there.outcome(Choice(Mesh(sizes), 4))
    assert guess.step_ns == pytest.approx(exact.step_ns, rel=0.05)
    assert guess.peak_bytes == pytest.approx(max(exact.peak_bytes), rel=0.05)


def test_reducing_each_microbatch_takes_less_memory(evaluator):
    kept = evaluator.outcome(Choice(Mesh({"dp_shard": 8}), 2, "full"))
    each = evaluator.outcome(Choice(Mesh({"dp_shard": 8}), 2, "full", reduce_each=True))
    assert each.peak_bytes[0] < kept.peak_bytes[0] and each.step_ns != kept.step_ns
    for outcome in (kept, each):
        assert outcome.step_ns >= outcome.bound_ns > 0
        assert outcome.step_ns >= job_bound_ns(evaluator) > 0


def test_larger_microbatches_are_left_out_once_nothing_fits(job):
    kind = replace(job.cluster.kind, memory_bytes=1 << 20)
    small = Evaluator(job.with_changes(cluster=replace(job.cluster, kind=kind)))
    choices = [Choice(Mesh({"dp_shard": 8}), size, "full") for size in (1, 2, 4)]
    assert [one and one.choice.microbatch for one in estimates(small, choices)] == [1, None, None]


def test_the_number_of_workers_changes_no_estimate(job, evaluator):
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        assert list(Evaluator(job, executor=pool).estimates(CHOICES)) == list(evaluator.estimates(CHOICES))


def test_search_simulates_few_of_the_plans_that_it_compares(job, evaluator):
    import numpy as np

    from simdev.planners import find_planner

    few = job.with_changes(microbatches=(1, 2))
    budget = PlanBudget(Evaluator(few), evaluations=4)
    best = find_planner("search")[0].plan(few, rng=np.random.default_rng(0), budget=budget)
    assert budget.used == 4 and len(budget.estimated) > 4 * budget.used
    assert budget.best.choice == best


def test_search_is_no_worse_than_the_rules_if_the_estimates_are_wrong(job, monkeypatch):
    import numpy as np

    from simdev.planners import find_planner

    few = job.with_changes(microbatches=(1, 2))
    evaluator = Evaluator(few)
    worst_first = sorted(evaluator.estimates(few.choices()), key=lambda one: -one.step_ns)
    wrong = [replace(one, step_ns=number) for number, one in enumerate(worst_first)]
    monkeypatch.setattr(evaluator, "estimates", lambda choices: iter(wrong))

    def chosen(name):
        budget = PlanBudget(evaluator, evaluations=4)
        return evaluator.outcome(find_planner(name)[0].plan(few, rng=np.random.default_rng(0), budget=budget))

    best = chosen("search")
    assert best.time_ns <= min(chosen("fsdp").time_ns, chosen("megatron").time_ns)
    assert best.time_ns < 0.9 * evaluator.outcome(wrong[0].choice).time_ns


# planners that give each stage degrees of its own: the dynamic program against enumeration and against the published


def enumerated(tables, layers, ranks):
    """``(times of the stages, ranks)`` of all pipelines."""
    for stages in range(1, len(tables) + 1):
        behind = tables[stages - 1 :: -1]
        for split in itertools.product(range(1, layers + 1), repeat=stages):
            for rows in itertools.product(range(len(tables[0][2])), repeat=stages):
                used = sum(tables[0][2][row] for row in rows)
                if sum(split) == layers and used <= ranks:
                    yield [t[0][row, n] for t, row, n in zip(behind, rows, split, strict=True)], used


def random_tables(rng, layers):
    tables = []
    for _ in range(3):
        best = np.cumsum(rng.integers(1, 9, (3, layers + 1)), axis=1).astype(float)
        best[rng.random(best.shape) < 0.2] = np.inf
        best[:, 0] = np.inf
        tables.append((best, np.tile(np.arange(3)[:, None], (1, layers + 1)), [1, 2, 4]))
    return tables


def test_pipelines_are_the_best_of_all():
    for seed in range(25):
        rng = np.random.default_rng(seed)
        layers, ranks = int(rng.integers(3, 5)), int(rng.integers(2, 6))
        tables = random_tables(rng, layers)
        every = list(enumerated(tables, layers, ranks))
        slowest, stages = least_bottleneck(tables, layers, ranks)
        assert slowest == min((max(times) for times, _ in every), default=np.inf)
        most = 1.5 * slowest
        total, summed = least_sum(tables, layers, ranks, most)
        assert total == min((sum(t) for t, used in every if max(t) <= most and used == ranks), default=np.inf)
        for value, found, join in ((slowest, stages, max), (total, summed, sum)):
            if np.isfinite(value):
                behind = tables[len(found) - 1 :: -1]
                assert sum(n for _, n in found) == layers
                assert value == join(t[0][option, n] for (option, n), t in zip(found, behind, strict=True))


def test_alpa_finds_the_least_step_of_all(monkeypatch):
    """Equation 2 of Zheng et al. 2022, over all pipelines; the largest stage is enumerated in steps of 1 %."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        layers, ranks, count = int(rng.integers(3, 5)), int(rng.integers(2, 6)), int(rng.integers(1, 9))
        tables = random_tables(rng, layers)
        options = tuple(SimpleNamespace(ranks=size) for size in (1, 2, 4))
        monkeypatch.setattr(_alpa, "all_loads", lambda *_, tables=tables: tables)
        job = SimpleNamespace(layers=layers, ranks=ranks)
        found, stages = _alpa.least_step(SimpleNamespace(job=job, microbatches=count, options=options), np.inf)
        all_used = [t for t, used in enumerated(tables, layers, ranks) if used == ranks and np.isfinite(max(t))]
        every = [sum(t) + (count - 1) * max(t) for t in all_used]
        assert min(every, default=np.inf) <= count * found <= 1.01 * min(every, default=np.inf)
        assert bool(stages) == np.isfinite(found)


def tables_of(layers, each):
    """Tables of stages that take ``each[degree]`` for a layer, wherever they stand."""
    rows = [[np.inf, *(n * ns for n in range(1, layers + 1))] for ns in each.values()]
    return [(np.array(rows), np.zeros((len(each), layers + 1), int), list(each))] * layers


def test_the_program_finds_what_pipers_program_finds():
    """A chain whose edges cost nothing, memory without limit, data degrees that divide the microbatches."""
    for seconds, weight, ranks in ((3.0, 0.4, 4), (1.0, 2.0, 6), (2.0, 0.0, 8)):
        one = LayerChoice("plain", seconds, weight, 0.0, 0.0, {}, {})
        chain = Layers("chain", ({1: (one,)},) * 6, tuple((v, v + 1, 0.0) for v in range(5)))
        published = piper(chain, ranks, 1e9, 1.0, 24)
        degrees = [d for d in range(1, ranks + 1) if 24 % d == 0]
        each = {d: seconds / d + 4 * (d - 1) * weight / d / 24 for d in degrees}
        tables = tables_of(6, each)
        assert least_bottleneck(tables, 6, ranks)[0] == pytest.approx(published.seconds)


def test_the_program_finds_what_pipedreams_program_finds():
    """A chain whose activations and parameters take no time: more replicas are never slower."""
    layers = tuple(map(str, range(5)))
    before = (frozenset(), *(frozenset({v}) for v in range(4)))
    for ranks in (3, 4, 7):
        profile = Profile("chain", layers, np.full(5, 2.0), np.zeros(5), np.zeros(5), before)
        published = pipedream(profile, [ranks], [1.0])
        tables = tables_of(5, {d: 2.0 / d for d in range(1, ranks + 1)})
        assert least_bottleneck(tables, 5, ranks)[0] == pytest.approx(published.seconds)


def test_stages_keep_a_microbatch_for_each_stage_behind_them():
    assert [in_progress(stages, 3) for stages in (1, 2, 3, 4)] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    "name, tensor", [("piper", (1, 2, 4)), ("alpa", (1, 2, 4)), ("pipedream", (1,)), ("dp-hybrid", (1,))]
)
def test_what_the_planners_choose(name, tensor, tiny_job, tiny_evaluator):
    choice = planners()[name].plan(tiny_job, rng=np.random.default_rng(0), budget=PlanBudget(tiny_evaluator))
    outcome = tiny_evaluator.outcome(choice)
    meshes = choice.stage_meshes or (choice.mesh,)
    assert outcome.fits and all(mesh["tp"] in tensor for mesh in meshes)
    assert name in ("piper", "alpa") or {choice.recompute, *choice.stage_recompute} == {"none"}


def test_pipelines_offer_each_degree_that_divides_a_microbatch(tiny_job, tiny_evaluator):
    found = {one.sequences: one for one in pipelines(tiny_job, PlanBudget(tiny_evaluator), tensor=False)}
    assert set(found) == {1, 2, 4, 8} and found[4].microbatches == 2
    assert {(o.mesh["dp_replicate"], o.share) for o in found[4].options} == {(4, 1), (2, 2)}
    assert {o.ranks for o in found[2].options} == {1, 2}


@pytest.mark.parametrize("mesh", [{"dp_replicate": 4}, {"dp_replicate": 2, "tp": 2}], ids=str)
def test_the_costs_of_one_stage_are_those_of_the_simulation(mesh, tiny_job, tiny_evaluator):
    mesh, last = Mesh(mesh), 1
    costs, outcome = stage_costs(tiny_evaluator, mesh, 2, "none"), tiny_evaluator.outcome(Choice(mesh, 2))
    microbatches = tiny_job.batch // (2 * mesh.replicas)
    step = microbatches * costs.pass_ns[last, -1] + costs.step_ns[last, -1]
    assert step == pytest.approx(outcome.step_ns, rel=0.15)
    assert costs.peak_bytes(1, last)[-1] == pytest.approx(outcome.peak_bytes[0], rel=0.12)


def test_estimates_of_stages_with_their_own_meshes(tiny_job, tiny_evaluator):
    stages = (Mesh({"dp_replicate": 2}), Mesh({"tp": 2}))
    choice = Choice(Mesh({"pp": 2}), 2, stage_meshes=stages, stage_layers=(3, 1), stage_recompute=("none", "full"))
    guess, exact = estimate(tiny_evaluator, choice), tiny_evaluator.outcome(choice)
    assert exact.fits and exact.bound_ns <= exact.step_ns
    assert guess.step_ns == pytest.approx(exact.step_ns, rel=0.2)
    assert list(tiny_evaluator.estimates([choice, Choice(Mesh({"dp_replicate": 2, "tp": 2}))]))[0] == guess


def test_proposals_change_a_plan_into_plans_of_the_job(tiny_job):
    rng = np.random.default_rng(0)
    here = flexflow.random_plan(tiny_job, rng)
    seen = set()
    for _ in range(400):
        there = flexflow.proposal(tiny_job, rng, here)
        sequences, stages = there
        assert sum(n for _, _, n in stages) == tiny_job.layers
        if flexflow.suits(tiny_job, there):
            assert sum(mesh.ranks for mesh, _, _ in stages) <= tiny_job.ranks
            here = there
            seen.add(flexflow.as_choice(tiny_job, here))
    assert len(seen) > 40 and len({len(c.stage_meshes) for c in seen}) > 2
    assert any(len(set(c.stage_recompute)) > 1 for c in seen)


def test_a_chain_ends_with_a_plan_no_slower_than_its_start(tiny_job, tiny_evaluator):
    met, budget = {}, PlanBudget(tiny_evaluator)
    start = flexflow.data_parallel(tiny_job)
    flexflow.chain(tiny_job, np.random.default_rng(1), budget, met, start, 5.0, 60)
    assert min(one.step_ns for one in met.values()) <= met[flexflow.as_choice(tiny_job, start)].step_ns
    assert len(met) > 5 and budget.used == 0


def test_search_simulates_alpas_plan_where_it_may_be_the_quickest(tiny_job, tiny_evaluator, monkeypatch):
    budget, choices = PlanBudget(tiny_evaluator), list(tiny_job.choices())
    monkeypatch.setattr(search, "CLOSE", 1e3)
    search.simulate_own_degrees(tiny_job, budget, search.rank(tiny_job, budget.estimates(choices).values()))
    alpa = planners()["alpa"].plan(tiny_job, rng=np.random.default_rng(0), budget=PlanBudget(tiny_evaluator))
    assert alpa in budget.tried
    monkeypatch.setattr(search, "CLOSE", 1e-3)
    far = PlanBudget(tiny_evaluator)
    search.simulate_own_degrees(tiny_job, far, search.rank(tiny_job, far.estimates(choices).values()))
    assert not far.used


def test_plans_that_are_screened_out_were_not_the_best():
    """With and without the estimate of memory that spares captures: what fits, and the best plan, are the same."""
    model, parameters = find_packed("llama3-8b", {})
    cluster = load_cluster("dgx-h100[nodes=2]")
    screened = 0
    for gib in (32, 60):
        kind = replace(cluster.kind, memory_bytes=gib << 30)
        job = Job(model, parameters, replace(cluster, kind=kind), 64, microbatches=(1, 2))
        budgets = [PlanBudget(Evaluator(job), screen=screen) for screen in (False, True)]
        for budget in budgets:
            budget.evaluate_many(job.choices())
        without, with_ = budgets
        assert without.best is not None and with_.best == without.best
        assert [c for c, o in with_.tried.items() if o.fits] == [c for c, o in without.tried.items() if o.fits]
        screened += sum(with_.evaluator.hopeless(choice) is not None for choice in with_.tried)
    assert screened >= 2


def schedule_in_words(plan, microbatches, times, sent_ns):
    """When the last pass of a schedule ends, action by action."""
    done, free = {}, [0.0] * plan.mesh["pp"]
    orders = pipeline_order(plan.schedule, plan.mesh["pp"], microbatches, plan.stages_per_rank)
    for rank, (kind, stage, number) in execution_order(orders, plan.stages):
        backward = "B last" if number == microbatches - 1 else "B further" if number else "B first"
        if kind == "W":
            free[rank] += (0.5 if stage else 1.0) * times["B further"][stage]
            continue
        share = 1.0 if kind != "I" else 0.5 if stage else 0.0
        before = ("F", stage - 1, number) if kind == "F" else ("B", stage + 1, number)
        start = max(free[rank], done[before] + sent_ns if before in done else 0.0)
        took = share * times["F" if kind == "F" else backward][stage]
        free[rank] = done["F" if kind == "F" else "B", stage, number] = start + took
    return max(free)


SENT = 2e8  # bytes


def peak_in_words(plan, microbatches, figures, resident):
    """The most memory of a rank, action by action."""
    peak = 0.0
    for rank, actions in enumerate(pipeline_order(plan.schedule, plan.mesh["pp"], microbatches, plan.stages_per_rank)):
        own = [stage for stage in range(plan.stages) if plan.rank_of(stage) == rank]
        live = sum(resident[stage] for stage in own)
        borders = sum(2 - (stage == 0) - (stage == plan.stages - 1) for stage in own)
        live += SENT * borders * microbatches * plan.receive_buffers
        for kind, stage, number in actions:
            if kind == "I":
                continue
            backward = "B last" if number == microbatches - 1 else "B further" if number else "B first"
            *_, left, most = figures["F" if kind == "F" else backward][stage]
            peak = max(peak, live + most)
            live += left
    return peak


@pytest.mark.parametrize(
    "schedule, ranks, chunks",
    [("1f1b", 1, 1), ("gpipe", 3, 1), ("1f1b", 5, 1), ("interleaved", 4, 3), ("zero-bubble", 4, 1), ("zbv", 4, 2)],
)
def test_schedules_of_estimates_are_what_they_are_in_words(schedule, ranks, chunks, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(module, "_sent_bytes", lambda plan, rank: SENT)
    monkeypatch.setattr(module, "send_ns", lambda *_: 12_345)
    rng, stages = np.random.default_rng(0), ranks * chunks
    plan = SimpleNamespace(
        schedule=schedule, mesh=Mesh({"pp": ranks}), microbatches=2 * ranks, stages_per_rank=chunks, stages=stages,
        first_ranks=tuple(range(ranks)), cluster=None, rank_of=lambda stage: stage_rank(schedule, ranks, stage),
        receive_buffers=schedule != "gpipe",
    )  # fmt: skip
    times = {name: (1e6 * rng.random(stages)).tolist() for name in module.PASSES}
    figures = {name: list(1e9 * rng.normal(size=(stages, 6))) for name in module.PASSES}
    resident = (1e9 * rng.random(stages)).tolist()
    assert module._schedule_ns(plan, 2 * ranks, times) == schedule_in_words(plan, 2 * ranks, times, 12_345)
    assert module._peak_bytes(plan, figures, resident) == peak_in_words(plan, 2 * ranks, figures, resident)


def test_a_slower_plan_says_by_how_much_in_steps_of_a_few_ms_too():
    def outcome(compute_ns, exposed_ns):
        return SimpleNamespace(overflow_bytes=0, compute_ns=(compute_ns,), exposed_ns=(exposed_ns,), idle_ns=())

    best = outcome(2_000_000, 100_000)
    assert why_slower(best, outcome(2_000_000, 340_000)) == "waits for collectives 0.24 ms more"
    assert why_slower(best, outcome(6_252_000_000, 0)) == "computes 6,250 ms more"
    assert why_slower(best, best) == "is as quick"


def longest(streams, ns, waits):
    """The longest path from an item on stream 0 to one on stream 0: an item follows the one before it on its stream,
    and what it waits for."""
    before = {n: [max((k for k in range(n) if streams[k] == streams[n]), default=None)] for n in range(len(ns))}
    for n, k in waits:
        before[n] += [k] if k >= 0 else []
    most = {}
    for n in range(len(ns)):
        paths = [most[k] for k in before[n] if k is not None and most[k]]
        most[n] = max(paths, default=0) + ns[n] if paths or streams[n] == 0 else 0
    return max((most[n] for n in range(len(ns)) if streams[n] == 0), default=0)


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_path_of_a_segment(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        count, streams = int(rng.integers(1, 20)), int(rng.integers(1, 4))
        stream, ns = rng.integers(0, streams, count), rng.integers(1, 50, count)
        waits = [(n, int(rng.integers(-1, n))) for n in rng.integers(1, count, 3 * count)] if count > 1 else []
        item, target = np.array(waits, np.int32).reshape(-1, 2).T
        found = longest_ns(stream.astype(np.int32), ns, item, target, streams)
        assert found == longest(stream.tolist(), ns.tolist(), waits)


def test_the_most_memory_of_a_rank():
    """Two microbatches of a stage: each forward pass leaves 5 bytes and needs 7; the backward passes free them."""
    rank, stage, name = np.zeros(4, np.int64), np.zeros(4, np.int64), np.array([0, 0, 1, -1])
    left, most = np.array([[5.0], [-5.0]]), np.array([[7.0], [3.0]])
    assert most_bytes(rank, stage, name, left, most, np.array([100.0])) == 100 + 5 + 5 + 3
    assert most_bytes(rank[:2], stage[:2], name[:2], left, most, np.array([100.0])) == 100 + 5 + 7


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_one_more_stage_before_all_pipelines(seed, add):
    rng = np.random.default_rng(seed)
    layers, ranks, sizes = int(rng.integers(1, 8)), int(rng.integers(1, 9)), [1, 2, 4]
    table = rng.integers(1, 9, (3, layers + 1)).astype(float)
    table[rng.random(table.shape) < 0.3] = np.inf
    behind = rng.integers(1, 9, (layers + 1, ranks + 1)).astype(float)
    behind[rng.random(behind.shape) < 0.3] = np.inf
    value, row_of = np.full(behind.shape, np.inf), np.zeros(behind.shape, np.int64)
    layers_of = row_of.copy()
    with_a_stage(table, np.array(sizes), behind, add, value, row_of, layers_of)
    for i, k in product(range(layers + 1), range(ranks + 1)):
        ways = {
            (row, n): table[row, n] + behind[i + n, k - size] if add else max(table[row, n], behind[i + n, k - size])
            for row, size in enumerate(sizes)
            for n in range(layers - i + 1)
            if size <= k
        }
        least = min(ways.values(), default=np.inf)
        assert value[i, k] == least
        if least < np.inf:
            assert (row_of[i, k], layers_of[i, k]) == min(way for way, one in ways.items() if one == least)
