"""Piper's planner: small cases by hand, all plans of small chains, and published figures on the published inputs."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.contract import last_first
from simdev.exact.piper import LayerChoice, Layers, equal_stages, piper, plan_seconds, read_piper
from simdev.studies.reproduce import reproduce
from simdev.studies.reproduce.piper import RESNET50

DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "piper"
published = pytest.mark.skipif(not DATA.is_dir(), reason="SIMDEV_DATA names no folder with piper")
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


@published
def test_published_plans_of_resnet50_are_found_by_the_command(tmp_path):
    """Whole: each time per sample that the paper's program prints, and what does not fit."""
    report = reproduce("piper", tmp_path / "out", data=DATA).read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if "|" in line][2:]
    assert len(rows) == len(RESNET50) and all(row[2] == row[3] and row[4] == row[5] for row in rows)
    assert [row[2] for row in rows] == [f"{plan.piper:.3f}" for plan in RESNET50]


@published
def test_a_published_plan_of_resnet50_uses_each_layer_once():
    layers = read_piper(DATA / "resnet.json")
    found = piper(layers, 8, 8 * GIB, 25 * GIB, 7680)
    assert sum(stage.data * stage.tensor for stage in found.stages) <= 8
    assert sorted(v for stage in found.stages for v in stage.layers) == list(range(177))


@published
@pytest.mark.parametrize(
    "microbatches, times",
    [
        (128, [0.0211166, 0.021238, 0.0219414, 0.0235157, 0.0267679, 0.0254526, 0.0317259, 0.0478308]),
        (512, [0.0207219, 0.0210344, 0.0218345, 0.0234598, 0.0267426, 0.0250685, 0.0315386, 0.047742]),
    ],
)
def test_published_times_of_equal_stages_of_bert32(microbatches, times):
    """Fixed plans on 64 devices: data degree 32 to 2 with 2 to 32 stages, then one stage of tensor degree 2, 4, 8."""
    layers = read_piper(DATA / "bert32a100.json")
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


@published
def test_bert32_beats_equal_stages():
    layers = read_piper(DATA / "bert32a100.json")
    found = piper(layers, 64, 8 * GIB, 25 * GIB, 1920)
    assert found.seconds == pytest.approx(0.0202006, rel=1e-5)
    assert found.seconds < equal_stages(layers, 64, 8 * GIB, 25 * GIB, 1920).seconds
