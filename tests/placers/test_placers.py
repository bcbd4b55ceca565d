"""What placers share: the rules for all of them, the registry, first placements and the budget."""

import math
from dataclasses import replace

import numpy as np
import pytest
from drawn import machine
from drawn import problem as drawn_problem
from small_board import small_board

from simdev.baselines import _climb, _search
from simdev.baselines._units import choices
from simdev.bench.stored import stored_problem
from simdev.errors import BudgetExhausted, InvalidInput
from simdev.placers import registry
from simdev.placers.budget import Budget
from simdev.placers.placer import PlacerSpec
from simdev.placers.registry import find_placer, graph_path, load_workload, placers
from simdev.placers.score import Score
from simdev.placers.starts import stored_starts
from simdev.placers.testing import check_placer, random_placement, random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim import simulate

# what placers share: the registry, first placements and the budget


# ids and entries: what names a file, a workload, or a placer with parameters


@pytest.mark.parametrize(
    "entry, step, graph",
    [
        ("m.py:f", True, False),
        ("folder/m.py:f", True, False),
        ("m.npz", False, True),
        ("m.json", False, True),
        ("graph.txt", False, True),
        ("nmt", False, False),
        ("nmt[batch=3]", False, False),
        ("m.py", False, False),
    ],
)
def test_a_step_file_is_no_graph_file(entry, step, graph):
    assert (registry.is_step_file(entry), registry.is_graph_file(entry)) == (step, graph)
    assert registry.is_file(entry) == (step or graph)


# starts from a result folder: the best placements of the same graph and costs, under any rules; nothing else


def test_the_fastest_come_first_and_serve_other_rules(tmp_path):
    rows = small_board(tmp_path)
    problem = replace(stored_problem(tmp_path, rows[0]), rules=Rules("priority"))
    found = stored_starts(tmp_path, problem)
    steps = [simulate(problem, placement).step_ns for placement in found]
    assert len(found) == len({row.placement for row in rows}) and steps == sorted(steps)
    spec, params = find_placer(f"long-search[starts={tmp_path}]")
    budget = Budget(problem, evaluations=30)
    placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget, **params)
    assert simulate(problem, placement).step_ns <= steps[0]


def test_starts_come_from_several_folders(tmp_path):
    rows = small_board(tmp_path / "one")
    small_board(tmp_path / "two")
    problem = stored_problem(tmp_path / "one", rows[0])
    once, twice = Budget(problem, evaluations=40), Budget(problem, evaluations=40)
    for folders, budget in ((f"{tmp_path}/one", once), (f"{tmp_path}/one+{tmp_path}/two", twice)):
        spec, params = find_placer(f"long-search[starts={folders}]")
        spec.place(problem, rng=np.random.default_rng(0), budget=budget, **params)
    fastest = min(row.step_ns for row in rows if row.step_ns)
    assert once.best_step_ns <= fastest and twice.best_step_ns <= fastest
    with pytest.raises(InvalidInput, match="three"):
        spec, params = find_placer(f"long-search[starts={tmp_path}/one+{tmp_path}/three]")
        spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem, evaluations=9), **params)


def test_a_folder_without_the_problem_or_with_a_damaged_file_is_refused(tmp_path):
    rows = small_board(tmp_path)
    problem = stored_problem(tmp_path, rows[0])
    table = tmp_path / "results.csv"
    text = table.read_text()
    table.write_text(text.replace(rows[0].cost_hash, "0" * 16))
    with pytest.raises(InvalidInput, match=r"results\.csv: no placement of"):
        stored_starts(tmp_path, problem)
    table.write_text(text.replace("placement,", "place,"))
    with pytest.raises(InvalidInput, match="column 'placement' is missing"):
        stored_starts(tmp_path, problem)
    table.write_text(text)
    path = tmp_path / "placements.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"|u1"', b'"|u2"'))
    with pytest.raises(InvalidInput, match="placements.jsonl"):
        stored_starts(tmp_path, problem)


def test_rows_of_throughput_are_no_starts(tmp_path):
    rows = small_board(tmp_path)
    path = tmp_path / "results.csv"
    path.write_text(path.read_text(encoding="utf-8").replace(",step,", ",throughput/1f1b/8,"), encoding="utf-8")
    with pytest.raises(InvalidInput, match="no placement of"):
        stored_starts(tmp_path, stored_problem(tmp_path, rows[0]))


# scores have an honest order, and the natural loop is right under a budget of evaluations and under one of seconds


@pytest.fixture
def problem():
    """Six equal ops without edges on three devices."""
    return apart(6)


def apart(ops):
    builder = GraphBuilder("apart")
    for number in range(ops):
        builder.op(f"op{number}", "op")
    return drawn_problem(builder, machine(3), [100] * ops)


def together_and_apart(problem):
    return np.zeros(problem.graph.n_ops, int), np.arange(problem.graph.n_ops) % 3


def test_scores_order_by_overflow_then_step_time_and_unknown_is_last():
    ordered = [Score(9, 0), Score(10, 0), Score(1, 5), Score(7, 5), Score(1, 6), Score(2, None), Score(3, None)]
    assert sorted(ordered[::-1]) == ordered and min(ordered[::-1]) == ordered[0]
    for smaller, larger in zip(ordered, ordered[1:], strict=False):
        assert smaller < larger and smaller <= larger and larger > smaller and smaller != larger
    assert Score(9, 0).fits and not Score(9, 1).fits and not Score(9, None).fits
    assert {Score(9, 0): "first"}[Score(9, 0)] == "first"
    with pytest.raises(AttributeError):
        ordered[0].step_ns = 1


def test_a_slower_placement_never_compares_as_better(problem):
    slow, fast = together_and_apart(problem)
    budget = Budget(problem, evaluations=10)
    best = budget.evaluate(fast)
    assert (best.step_ns, best.overflow_bytes) == (200, 0)
    found = budget.evaluate(slow, below=best.step_ns)
    assert found == Score(600, None)  # its memory was not computed
    assert found > best and min([found, best]) is best


def test_a_batch_is_cut_to_what_is_left(problem):
    slow, fast = together_and_apart(problem)
    budget = Budget(problem, evaluations=3)
    assert budget.evaluate_many(np.stack([slow, fast])) == [Score(600, 0), Score(200, 0)]
    assert budget.left == 1 and len(budget.evaluate_many(np.stack([slow, fast]))) == 1
    assert not budget.open and budget.used == 3 and [point[0] for point in budget.curve] == [1, 2]
    with pytest.raises(BudgetExhausted, match="used up after 3 evaluations"):
        budget.evaluate(fast)


@pytest.mark.parametrize("limits", [{"evaluations": 20}, {"evaluations": math.inf, "seconds": 0.05}])
def test_the_natural_loop_is_right_under_both_kinds_of_budget(problem, limits, clock):
    def natural(problem, *, rng, budget):
        best, found = None, np.zeros(problem.graph.n_ops, int)
        while budget.open:
            devices = rng.integers(0, 3, problem.graph.n_ops)
            score = budget.evaluate(devices)
            if best is None or score < best:
                best, found = score, devices
        return Placement(found)

    spec = PlacerSpec("natural", 1, "test", natural, searches=True)
    budget = Budget(problem, **limits)
    placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget)
    assert budget.used and not budget.open and budget.left == 0
    assert np.array_equal(placement.devices, budget.best)


def test_what_open_promises_is_kept_when_the_time_runs_out(problem):
    _, fast = together_and_apart(problem)
    budget = Budget(problem, evaluations=math.inf, seconds=1e9)
    assert budget.open and budget.left == math.inf
    budget.seconds = 0.0
    assert budget.evaluate(fast).step_ns == 200  # though the time has run out since
    with pytest.raises(BudgetExhausted):
        budget.evaluate(fast)


def test_shares_divide_either_kind(problem):
    assert Budget(problem, evaluations=13).share(6).evaluations == 2
    share = Budget(problem, evaluations=math.inf, seconds=60).share(6)
    assert share.evaluations == math.inf and 9 < share.seconds <= 10


def test_a_climb_keeps_to_its_share_of_the_seconds(problem, clock):
    allowed = choices(problem)
    budget = Budget(problem, evaluations=math.inf, seconds=3600)
    best = _search.Incumbent(problem, budget, np.zeros(6, np.int32))
    best.evaluate(best.devices[None])
    moves, rng = _climb.Neighbourhood(problem, allowed), np.random.default_rng(0)
    _climb.climb(best, moves, rng, best.devices, best.score, budget.share(36_000))  # a tenth of a second
    assert budget.used > 1 and budget.open


@pytest.mark.parametrize("name", ["local-search", "annealing", "genetic", "portfolio"])
def test_searching_placers_end_with_their_seconds(name, clock):
    """Of forty ops; of six, some searches end earlier, when they have simulated all 729 placements."""
    problem, (spec, params) = apart(40), find_placer(name)
    budget = Budget(problem, evaluations=math.inf, seconds=0.3)
    placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget, **params)
    found = simulate(problem, placement)  # of equal placements, a search may return another than the budget keeps
    assert budget.used and not budget.open and found.feasible and found.step_ns == budget.best_step_ns


# every registered placer keeps the rules, on awkward random problems and on a real graph


SPECS = placers()
# Measured: all problems take over four seconds, mostly to compile for every size of a graph. One of them is tried at
# once, all at night. Some placers take that long to compile for one.
LONG_ON_ONE = {"colocrl", "doppler", "gdp", "gdp-batch", "hdp", "placeto", "placeto-joint"}
LONG_ON_RANDOM = LONG_ON_ONE | {"cp-sat", "giph", "hsdag", "ip-throughput", "learned-search"}
LONG_ON_INCEPTION = LONG_ON_ONE | {"dp", "giph", "hsdag", "ip-throughput", "learned-search"}
NIGHTLY_ON_INCEPTION = {"cp-sat"}  # 25 processor seconds


def marked(names, some, mark=pytest.mark.slow, nightly=()):
    marks = {**dict.fromkeys(some, mark), **dict.fromkeys(nightly, pytest.mark.long)}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


@pytest.mark.parametrize("name", marked(sorted(LONG_ON_RANDOM), LONG_ON_ONE))
def test_conformance_on_a_random_problem(name):
    problem = random_problem(np.random.default_rng(4), rules=Rules())  # that of the searching placers below
    assert check_placer(SPECS[name], problem, evaluations=10) is not None


@pytest.mark.parametrize("name", marked(SPECS, LONG_ON_RANDOM, pytest.mark.long))
def test_conformance_on_random_problems(name):
    placed = 0
    few = SPECS[name].family == "learned" or name in LONG_ON_RANDOM  # learned placers compile for every size
    for seed in range(5 if few else 25):
        problem = random_problem(np.random.default_rng(seed), rules=Rules())
        placed += check_placer(SPECS[name], problem, evaluations=(0, 1, 30)[seed % 3], seed=seed) is not None
    assert placed or name == "expert"  # which knows none of these families


@pytest.mark.parametrize("name", marked(SPECS, LONG_ON_INCEPTION, nightly=NIGHTLY_ON_INCEPTION))
def test_conformance_on_inception(name):
    if not graph_path("inception-v3").is_file():
        pytest.skip("the graph of inception-v3 is not shipped")
    problem = Problem.build(load_workload("inception-v3"), load_topology("p100x2"))
    assert check_placer(SPECS[name], problem, evaluations=40) is not None


@pytest.mark.parametrize("name", marked([name for name, spec in SPECS.items() if spec.searches], LONG_ON_ONE))
def test_searching_placers_report_what_they_return(name):
    problem = random_problem(np.random.default_rng(4), rules=Rules())
    budget = Budget(problem, evaluations=60)
    placement = SPECS[name].place(problem, rng=np.random.default_rng(0), budget=budget)
    assert 0 < budget.used <= 60
    if budget.best is not None:
        found = simulate(problem, placement)  # of equal placements, a search may return another than the budget keeps
        assert found.feasible and found.step_ns == budget.best_step_ns


def test_what_a_placer_returns_is_checked_and_the_end_of_the_budget_is_no_loss():
    problem = random_problem(np.random.default_rng(5))

    def wrong(problem, *, rng, budget):
        return [0] * problem.graph.n_ops

    def endless(problem, *, rng, budget):
        while True:
            budget.evaluate(random_placement(rng, problem).devices)

    def place(function, evaluations):
        budget = Budget(problem, evaluations=evaluations)
        return PlacerSpec("mine", 1, "test", function).place(
            problem, rng=np.random.default_rng(0), budget=budget
        ), budget

    with pytest.raises(InvalidInput, match="placer mine: returned list, expected Placement"):
        place(wrong, 5)
    found, budget = place(endless, 5)
    assert budget.used == 5 and (found.devices == budget.best).all()
    with pytest.raises(BudgetExhausted, match="used up after 0 evaluations"):
        place(endless, 0)
