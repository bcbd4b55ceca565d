"""The programs of PipeDream and Piper."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.contract import last_first
from simdev.exact.pipedream import Profile, plan
from simdev.exact.piper import LayerChoice, Layers, equal_stages, piper, plan_seconds, read_piper
from simdev.files import text_of
from simdev.graphs.importers.pipedream import read_layers
from simdev.graphs.importers.reading import name_of, read_input
from simdev.studies.reproduce import reproduce
from simdev.studies.reproduce.piper import RESNET50

# pipeDream's planner: a chain by hand, wide graphs, and the figures of the published program on its profiles


DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "pipedream"
published = pytest.mark.skipif(not DATA.is_dir(), reason="SIMDEV_DATA names no folder with pipedream")


def profile(seconds, *, activation=None, parameter=None, predecessors=None):
    n = len(seconds)
    chain = [frozenset({c - 1}) if c else frozenset() for c in range(n)]
    zero = [0.0] * n
    return Profile(
        "hand",
        tuple(map(str, range(n))),
        np.array(seconds, float),
        np.array(activation or zero, float),
        np.array(parameter or zero, float),
        tuple(predecessors or chain),
    )


def read_profile(path):
    """A published ``graph.txt`` profile without input layers and without ``__getitem__`` layers that nobody reads."""
    layers, inputs = read_layers(text_of(read_input(path), path), path)
    read = {before for befores in inputs.values() for before in befores}
    names = [name for name in layers if name in read or not layers[name].text.startswith("__getitem__")]
    index = {name: number for number, name in enumerate(names)}
    return Profile(
        name=name_of(path),
        layers=tuple(names),
        seconds=np.array([layers[name].forward_ns + layers[name].backward_ns for name in names]) / 1e9,
        activation=np.array([sum(layers[name].activations) for name in names], float),
        parameter=np.array([layers[name].parameters for name in names], float),
        predecessors=tuple(frozenset(index[before] for before in inputs[name]) for name in names),
    )


def test_replicas_cost_the_exchange_of_parameters():
    # On two workers: (4 + 4 * 1 * 10 / (10 * 2)) / 2 = 3, against stages of 1 and 3.
    found = plan(profile([1, 3], parameter=[4, 6]), [2], [10.0])
    assert found.seconds == 3 and found.single_seconds == 4 and found.data_parallel_seconds == 3
    # Without parameters two replicas of everything are best; without replicas the cut is.
    assert plan(profile([1, 3]), [2], [10.0]).seconds == 2
    straight = plan(profile([1, 3]), [2], [10.0], replicate=False)
    assert straight.seconds == 3 and [stage.layers for stage in straight.stages] == [(0,), (1,)]


def test_a_stage_is_no_faster_than_its_transfers():
    slow = profile([5, 5, 5], activation=[100, 1, 0], parameter=[1000, 1000, 1000])
    found = plan(slow, [2], [10.0])
    assert found.seconds == 10 and [stage.layers for stage in found.stages] == [(0, 1), (2,)]
    assert plan(slow, [3], [10.0], replicate=False).seconds == 2 * 100 / 10
    assert plan(slow, [3], [10.0], replicate=False, transfers=False).seconds == 5


def test_memory_counts_the_minibatches_under_way():
    heavy = profile([4, 4, 4], parameter=[8, 8, 8], activation=[1, 1, 1])
    assert plan(heavy, [3], [1e3], replicate=False, memory=18).seconds == 4  # the first stage stashes 2 * (8 + 1)
    with pytest.raises(Unsupported, match="no plan keeps each worker within 8 bytes"):
        plan(heavy, [3], [1e3], replicate=False, memory=8)


def test_a_wide_graph_ends_in_prefixes_of_one_order():
    n = 30
    middle = [frozenset({0})] * n
    wide = profile([1.0] * (n + 2), predecessors=[frozenset(), *middle, frozenset(range(1, n + 1))])
    found = plan(wide, [4], [1.0])
    assert found.linear and found.states == n + 2
    assert found.seconds == 8 and sorted(c for s in found.stages for c in s.layers) == list(range(n + 2))


def blocks(*, dense):
    """The layers of DenseNet-121 (each reads all before it in its block), or of ResNet-101 (each block is added to its
    input), as predecessors."""
    before = [frozenset()]

    def chain(count):
        before.extend(frozenset({len(before) - 1}) for _ in range(count))

    for layers in (6, 12, 24, 16) if dense else (33,):
        made = {len(before) - 1}
        for _ in range(layers):
            before.append(frozenset(made))
            chain(5 if dense else 8)
            before.append(frozenset({len(before) - 1, max(made)}))
            made = made | {len(before) - 1} if dense else {len(before) - 1}
    return before


@pytest.mark.parametrize("dense", [False, True])
def test_graphs_like_resnet101_and_densenet121_end(dense):
    before = blocks(dense=dense)
    n = len(before)
    found = plan(profile([0.01] * n, predecessors=before), [4], [1e9])
    assert n > 300 and not found.linear and found.states >= n
    assert found.seconds == pytest.approx(n * 0.01 / 4, rel=0.02)


def test_levels_that_make_no_sense_are_refused():
    for workers, bandwidths in (([], []), ([2], [1.0, 2.0]), ([0], [1.0]), ([2], [0.0])):
        with pytest.raises(InvalidInput, match="a positive bandwidth for each level"):
            plan(profile([1.0]), workers, bandwidths)


@published
@pytest.mark.parametrize(
    "name, workers, bandwidths, states, seconds, speedup, data_parallel, replicas",
    [
        ("vgg16", [4], [1e9], 40, 0.205520896, 3.2723, 1.1532, [3, 1]),
        ("vgg16", [16], [1e9], 40, 0.056529767, 11.8970, 3.9159, [13, 2, 1]),
        ("vgg16", [8, 2], [22.5e9, 3.125e9], 40, 0.065766687, 10.2261, 9.6696, None),
        ("resnet50", [4], [1e9], 240, 0.162880924, 2.7224, 2.3646, [2, 2]),
        ("resnet50", [16], [1e9], 240, 0.047801345, 9.2763, 8.5812, [7, 6, 3]),
        ("gnmt", [4], [1e9], 99, 0.025868, 3.4566, 0.1481, [1, 1, 1, 1]),
        ("gnmt", [16], [1e9], 99, 0.019285, 4.6366, 0.4775, None),
    ],
)
def test_published_plans(name, workers, bandwidths, states, seconds, speedup, data_parallel, replicas):
    found = plan(read_profile(DATA / f"{name}.graph.txt"), workers, bandwidths)
    assert found.states == states and not found.linear
    assert found.seconds == pytest.approx(seconds, rel=1e-6)
    assert found.single_seconds / found.seconds == pytest.approx(speedup, rel=1e-4)
    assert found.single_seconds / found.data_parallel_seconds == pytest.approx(data_parallel, rel=1e-3)
    if replicas:
        assert [stage.replicas for stage in found.stages] == replicas


@published
def test_branching_profiles_that_the_published_program_does_not_finish():
    found = plan(read_profile(DATA / "inception_v3.graph.txt"), [4], [1e9])
    assert found.linear and found.single_seconds == pytest.approx(0.689038)
    assert found.single_seconds / 4 < found.seconds < found.single_seconds / 3


# piper's planner: small cases by hand, all plans of small chains, and published figures on the published inputs


PIPER_DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "piper"
piper_published = pytest.mark.skipif(not PIPER_DATA.is_dir(), reason="SIMDEV_DATA names no folder with piper")
GIB = 2**30


def chain(seconds, *, edge=0.0, parameter=0.0, a=0.0, b=0.0, recompute=None):
    """Layers in a row, with tensor degree 1 and perhaps a slower choice without memory."""
    plain = [LayerChoice("vanilla", s, parameter, a, b, {}, {}) for s in seconds]
    rows = [
        {
            1: (one,)
            if recompute is None
            else (one, LayerChoice("recompute", one.seconds + recompute, parameter, 0, 0, {}, {}))
        }
        for one in plain
    ]
    return Layers("hand", tuple(rows), tuple((v, v + 1, edge) for v in range(len(seconds) - 1)))


def test_stages_by_hand():
    # Layers of 4 and 6 on two devices: apart 6 + 2 * 1 / 1; together with d = 2: 5 + 4 * 20 / 2 / 4 for the exchange.
    layers = chain([4, 6], edge=1.0, parameter=10.0)
    found = piper(layers, 2, np.inf, 1.0, 4)
    assert found.seconds == 8 and [stage.layers for stage in found.stages] == [(0,), (1,)]
    assert piper(layers, 2, np.inf, 100.0, 4).seconds == pytest.approx(5 + 4 * 20 / 2 / 4 / 100)
    assert piper(layers, 2, np.inf, 1.0, 3).seconds == 8  # two replicas cannot share three microbatches


def test_memory_counts_the_microbatches_in_progress_and_recomputation_saves_it():
    layers = chain([4, 6], a=10.0, recompute=1.0)
    assert piper(layers, 2, 20.0, 1.0, 4).seconds == 5  # d = 2 needs 20 bytes
    # d = 2 with one layer recomputed: 5.5; two stages: the first one has 2 microbatches in progress, 20 bytes
    assert piper(layers, 2, 10.0, 1.0, 4).seconds == 5.5
    found = piper(layers, 1, 0.0, 1.0, 4)
    assert found.seconds == 12 and found.stages[0].chosen == ("recompute", "recompute")
    with pytest.raises(Unsupported, match="no plan keeps each of 2 devices"):
        piper(chain([4, 6], b=10.0), 2, 5.0, 1.0, 4)


def test_equals_the_best_of_all_plans_of_small_chains():
    for seed in range(25):
        rng = np.random.default_rng(seed)
        n, devices, microbatches = 4, 4, int(rng.integers(1, 7))
        layers = chain(
            rng.integers(1, 20, n).astype(float), edge=2.0, parameter=5.0, a=float(rng.integers(0, 4)), b=3.0
        )
        memory = float(rng.integers(10, 60))
        best = np.inf
        for cuts in itertools.product([False, True], repeat=n - 1):
            groups = np.split(np.arange(n), np.flatnonzero(cuts) + 1)
            for degrees in itertools.product(range(1, devices + 1), repeat=len(groups)):
                if sum(degrees) > min(devices, microbatches) or any(microbatches % d for d in degrees):
                    continue
                best = min(best, max(by_hand(layers, groups, degrees, memory, 2.0, microbatches)))
        if np.isinf(best):
            with pytest.raises(Unsupported):
                piper(layers, devices, memory, 2.0, microbatches)
        else:
            assert piper(layers, devices, memory, 2.0, microbatches).seconds == pytest.approx(best)


def by_hand(layers, groups, degrees, memory, bandwidth, microbatches):
    for number, (group, d) in enumerate(zip(groups, degrees, strict=True)):
        mine = [layers.choices[v][1][0] for v in group]
        progress = -(-sum(degrees[number:]) // d)
        if sum(one.memory_a * progress + one.memory_b for one in mine) > memory:
            yield np.inf
        borders = int(group[0] > 0) + int(group[-1] < len(layers.choices) - 1)
        exchange = 4 * (d - 1) * sum(one.parameter for one in mine) / d / microbatches
        yield sum(one.seconds for one in mine) / d + (2 * 2.0 * borders / d + exchange) / bandwidth


def test_too_many_ideals_leave_the_plan_of_one_order():
    wide = Layers("wide", chain([1.0] * 12).choices, tuple((0, v, 1.0) for v in range(1, 12)))
    assert piper(wide, 3, np.inf, 1e9, 1, limit=50).ideals == 13
    assert piper(wide, 3, np.inf, 1e9, 1).ideals == 2**11 + 1


def test_inputs_that_make_no_sense():
    with pytest.raises(InvalidInput, match="a positive bandwidth"):
        piper(chain([1.0]), 2, 1.0, 0.0, 4)
    three = Layers("three", ({1: chain([1.0]).choices[0][1] * 3},), ())
    with pytest.raises(InvalidInput, match="more than two choices"):
        piper(three, 1, np.inf, 1.0, 1)


@pytest.mark.slow
@piper_published
def test_published_plans_of_resnet50_are_found_by_the_command(tmp_path):
    """Whole: each time per sample that the paper's program prints, and what does not fit."""
    report = reproduce("piper", tmp_path / "out", data=PIPER_DATA).read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if "|" in line][2:]
    assert len(rows) == len(RESNET50) and all(row[2] == row[3] and row[4] == row[5] for row in rows)
    assert [row[2] for row in rows] == [f"{plan.piper:.3f}" for plan in RESNET50]


@piper_published
def test_a_published_plan_of_resnet50_uses_each_layer_once():
    layers = read_piper(PIPER_DATA / "resnet.json")
    found = piper(layers, 8, 8 * GIB, 25 * GIB, 7680)
    assert sum(stage.data * stage.tensor for stage in found.stages) <= 8
    assert sorted(v for stage in found.stages for v in stage.layers) == list(range(177))


@piper_published
@pytest.mark.parametrize(
    "microbatches, times",
    [
        (128, [0.0211166, 0.021238, 0.0219414, 0.0235157, 0.0267679, 0.0254526, 0.0317259, 0.0478308]),
        (512, [0.0207219, 0.0210344, 0.0218345, 0.0234598, 0.0267426, 0.0250685, 0.0315386, 0.047742]),
    ],
)
def test_published_times_of_equal_stages_of_bert32(microbatches, times):
    """Fixed plans on 64 devices: data degree 32 to 2 with 2 to 32 stages, then one stage of tensor degree 2, 4, 8."""
    layers = read_piper(PIPER_DATA / "bert32a100.json")
    order = last_first(len(layers.choices), [edge[:2] for edge in layers.edges])
    inner = [v for v in order if _is_transformer(layers, v)]
    first, last = order.index(inner[0]), order.index(inner[-1])
    assert len(inner) == 32
    plans = [(d, 1, 64 // d) for d in (32, 16, 8, 4, 2)] + [(32, 2, 1), (16, 4, 1), (8, 8, 1)]
    for (d, t, stages), seconds in zip(plans, times, strict=True):
        groups = [list(group) for group in np.array_split(inner, stages)]
        groups[0] += [v for v in order[:first] if v not in inner]
        groups[-1] += [v for v in order[last:] if v not in inner]
        found = plan_seconds(layers, groups, d, t, 1, np.inf, 162.5 * GIB, microbatches)
        assert found == pytest.approx(seconds, rel=1e-5)


def _is_transformer(layers, v):
    return layers.choices[v][1][0].seconds > 0.03


@piper_published
def test_bert32_beats_equal_stages():
    layers = read_piper(PIPER_DATA / "bert32a100.json")
    found = piper(layers, 64, 8 * GIB, 25 * GIB, 1920)
    assert found.seconds == pytest.approx(0.0202006, rel=1e-5)
    assert found.seconds < equal_stages(layers, 64, 8 * GIB, 25 * GIB, 1920).seconds
