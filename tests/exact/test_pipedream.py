"""PipeDream's planner: a chain by hand, wide graphs, and the figures of the published program on its profiles."""

import os
from pathlib import Path

import numpy as np
import pytest

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.pipedream import Profile, plan
from simdev.files import text_of
from simdev.graphs.importers.pipedream import read_layers
from simdev.graphs.importers.reading import name_of, read_input

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
