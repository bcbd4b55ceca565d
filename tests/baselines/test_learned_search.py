"""The learned search: features and slack by hand, the network, its weights as a file, and its training."""

import numpy as np
import pytest
from drawn import chain, machine, problem

from simdev.baselines import _lessons, _proposals, learned_search
from simdev.baselines._proposals import FEATURES, HIDDEN, Network, Proposed
from simdev.baselines._units import choices
from simdev.errors import InvalidInput
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer
from simdev.problem.problem import Rules


def proposals(given, *, choice="uniform", network=None, width=400, evaluations=1000):
    budget = Budget(given, evaluations=evaluations)
    rng = np.random.default_rng(0)
    return Proposed(given, choices(given), budget, rng, network=network, choice=choice, width=width)


def drawn_moves(search, devices):
    """Move -> features: a move as the tuple of devices after it."""
    state = search.state(np.array(devices, np.int32))
    count = search.draw(state)
    assert count > 0
    return {
        tuple(search.moved(state.devices, row).tolist()): dict(zip(FEATURES, search.features[row], strict=True))
        for row in range(count)
    }


def test_the_features_of_a_move_by_hand():
    # o0 (100 ns) -> o1 (200 ns) -> o2 (300 ns), tensors of 30 and 50 bytes: transfers of 40 and 60 ns.
    given = problem(chain(30, 50, 1), machine(2), [100, 200, 300])
    moves = drawn_moves(proposals(given), [0, 1, 0])  # o1 alone is away: the step is 100 + 40 + 200 + 60 + 300 = 700
    back = moves[0, 0, 0]
    assert back["transfers saved"] == pytest.approx(np.sqrt(100 / 700)) and back["transfers added"] == 0
    assert back["number saved"] == pytest.approx(2 / 3)  # its input and its output are touched
    assert back["load here"] == pytest.approx(200 / 700) and back["load there"] == pytest.approx(400 / 700)
    assert back["time on critical paths"] == pytest.approx(np.sqrt(200 / 700))
    away = moves[1, 1, 0]  # o0 follows o1: its tensor stays at home
    assert away["transfers saved"] == pytest.approx(np.sqrt(40 / 700)) and away["transfers added"] == 0
    spread = moves[0, 1, 1]
    assert spread["transfers saved"] == pytest.approx(np.sqrt(60 / 700)) and spread["transfers added"] == 0
    assert spread["idle time there"] > 0.4


def test_the_slack_of_an_op_by_hand():
    from simdev.problem.graph import GraphBuilder

    b = GraphBuilder("diamond")  # o0 -> o1 (500 ns) and o2 (100 ns) -> o3; o2 on a device of its own
    start = b.outputs(b.op("o0", "op", outputs=[10]))
    long = b.outputs(b.op("o1", "op", inputs=start, outputs=[10]))
    short = b.outputs(b.op("o2", "op", inputs=start, outputs=[10]))
    b.op("o3", "op", inputs=[*long, *short])
    given = problem(b, machine(2), [50, 500, 100, 50])
    search = proposals(given)
    sight = search.see(search.state(np.array([0, 0, 1, 0], np.int32)))
    assert sight.step == 600 and sight.slack.tolist() == [0, 0, 360, 0]  # 500 - 100 less two transfers of 20
    assert sight.wait.tolist() == [0, 0, 0, 0] and sight.load.tolist() == [600, 100]


def test_no_placement_is_simulated_twice():
    given = _lessons.drawn_problem(7, 3)
    search = proposals(given, width=1, evaluations=200)
    search._cheap = False  # so that each is a call of evaluate()
    seen, evaluate = [], search.budget.evaluate

    def noted(devices, **options):
        seen.append(devices.tobytes())
        return evaluate(devices, **options)

    search.budget.evaluate = noted
    start = search.state(np.zeros(given.graph.n_units, np.int32) + choices(given).argmax(axis=0)[0].astype(np.int32))
    search.improve(start, search.budget.share(1))
    assert len(seen) > 150 and len(set(seen)) == len(seen)


def test_the_compiled_network_is_the_trained_one():
    rng = np.random.default_rng(0)
    network = _proposals.random_network(rng)
    given = _lessons.drawn_problem(7, 0)
    search = proposals(given, choice="learned", network=network, width=20)
    count = search.draw(search.state(np.full(given.graph.n_units, choices(given).argmax(axis=0)[0], np.int32)))
    x = np.clip((search.features[:count] - network.mean) * network.scale, -5, 5)
    assert np.allclose(search.rate(count), _lessons._scores(network[2:], x)[0])


def test_what_ships_chooses_better_moves_than_chance_on_problems_it_never_saw():
    network = _proposals.read_network(learned_search.WEIGHTS)
    features, gains = _lessons.collect(99, range(4), 20, None)
    valid = ~np.isnan(features[..., 0])
    x = np.clip((np.nan_to_num(features) - network.mean) * network.scale, -5, 5)
    scores = np.where(valid, _lessons._scores(network[2:], x)[0], -np.inf)
    chosen = np.take_along_axis(gains, scores.argmax(axis=1)[:, None], 1).mean()
    assert chosen > 2 * (gains.sum(axis=1) / valid.sum(axis=1)).mean()


def test_the_training_is_reproducible_and_its_gradient_right():
    first, again = (_lessons.collect(5, range(2), 6, None, note=lambda line: None) for _ in range(2))
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, again, strict=True))
    fits = [_lessons.fit(*first, seed=seed, epochs=2, batch=4)[0] for seed in (0, 0, 1)]
    assert all(np.array_equal(a, b) for a, b in zip(fits[0], fits[1], strict=True))
    assert not np.array_equal(fits[0].first, fits[2].first)
    weights = [array.copy() for array in _proposals.random_network(np.random.default_rng(0))[2:]]
    features, gains = first
    valid, wanted = ~np.isnan(features[..., 0]), gains / gains.sum(axis=1, keepdims=True)
    x = np.nan_to_num(features).astype(np.float64)
    gradient = _lessons._gradient(weights, x, valid, wanted)[1]
    for number, where in ((0, (2, 3)), (1, 4), (2, (5, 6)), (4, 7)):
        losses = []
        for shift in (1e-5, -1e-5):
            shifted = [array.copy() for array in weights]
            shifted[number][where] += shift
            losses.append(_lessons._gradient(shifted, x, valid, wanted)[0])
        assert gradient[number][where] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-3, abs=1e-7)


def test_drawn_problems_differ_and_are_no_workload():
    problems = [_lessons.drawn_problem(0, number) for number in range(4)]
    assert len({given.graph.fingerprint for given in problems}) == 4
    assert _lessons.drawn_problem(0, 1).graph.fingerprint == problems[1].graph.fingerprint
    assert {given.topology.name for given in problems} == {"drawn"}


def weights(path, **changed):
    arrays = {**_proposals.random_network(np.random.default_rng(0))._asdict(), **changed}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"first": None}, "first: missing"),
        ({"mean": np.zeros(3)}, "mean: expected finite float64"),
        ({"last": np.full(HIDDEN, np.nan)}, "last: expected finite"),
        ({"last": np.array([print], dtype=object)}, "last: .*holds a pickle, which is never loaded"),
    ],
)
def test_wrong_weights_are_refused(tmp_path, changed, message):
    path = weights(tmp_path / "weights.npz", **changed)
    with pytest.raises(InvalidInput, match=message):
        _proposals.read_network(path)


def test_weights_of_ones_own_and_wrong_parameters(tmp_path):
    given = _lessons.drawn_problem(7, 1)
    assert isinstance(_proposals.read_network(weights(tmp_path / "mine.npz")), Network)
    spec, params = find_placer(f"learned-search[weights={tmp_path / 'mine.npz'}]")
    budget = Budget(given, evaluations=40)
    spec.place(given, rng=np.random.default_rng(0), budget=budget, **params)
    assert budget.used == 40
    for wrong in ({"choice": "best"}, {"width": 0}, {"width": "wide"}):
        with pytest.raises(InvalidInput, match="placer learned-search"):
            spec.place(given, rng=np.random.default_rng(0), budget=Budget(given, evaluations=9), **wrong)


@pytest.mark.parametrize("choice", _proposals.CHOICES)
def test_every_choice_searches(choice):
    given = _lessons.drawn_problem(7, 2)
    spec, _ = find_placer("learned-search")
    budget = Budget(given, evaluations=120)
    spec.place(given, rng=np.random.default_rng(0), budget=budget, choice=choice)
    assert budget.used == 120 and len(budget.curve) > 1


def test_other_rules_are_served_too():
    given = _lessons.drawn_problem(7, 2)
    spec, _ = find_placer("learned-search")
    for rules in (Rules("priority"), Rules("program"), Rules(contention="fair")):
        changed = type(given)(given.graph, given.topology, given.costs, rules)
        budget = Budget(changed, evaluations=30)
        spec.place(changed, rng=np.random.default_rng(0), budget=budget)
        assert budget.used == 30
