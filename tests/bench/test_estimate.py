from dataclasses import replace

from simdev.bench.estimate import OVERHEAD_S, Estimate
from simdev.bench.plan import plan
from simdev.bench.rows import Row
from simdev.bench.workers import Limits
from simdev.cli.progress import left


def runs_of(*placers, seeds=1):
    return plan(["transformer-xl-2"], ["p100x2"], placers, budget="evaluations=1", seeds=seeds)


def row(run, seconds, status="ok"):
    blank = Row(*run.key[:4], 1, *run.key[4:], "f", "c", status)
    return replace(blank, place_seconds=seconds)


def test_the_time_left_follows_the_finished_runs_of_the_same_placer_or_kind():
    runs = runs_of("heft", "peft", "genetic", seeds=2)
    heft, peft, genetic = ([run for run in runs if run.placer == name] for name in ("heft", "peft", "genetic"))
    estimate = Estimate(Limits(100, 0))
    for run in runs:
        estimate.expect(run, 10 if run.seed == 0 else 20)
    assert estimate.seconds_left(1, set()) is None  # nothing is known
    estimate.learn(heft[0], row(heft[0], 4.0))
    assert estimate.seconds_left(1, set()) is None  # nothing is known about searches
    estimate.learn(genetic[0], row(genetic[0], 30.0))
    known = 8 + (4 + 8) + 60 + 4 * OVERHEAD_S  # heft twice as large, peft like heft, genetic twice as large
    assert estimate.seconds_left(1, set()) == known
    assert estimate.seconds_left(2, set()) == known / 2
    assert estimate.seconds_left(1, {str(genetic[1])}) == known - (60 + OVERHEAD_S) / 2
    estimate.learn(heft[1], row(heft[1], None, "timeout"))  # as long as the limit: 100 s of 20 ops
    estimate.forget(genetic[1])
    assert estimate.seconds_left(1, set()) > known - 60


def test_the_time_left_in_words():
    assert [left(seconds) for seconds in (None, 0.2, 89, 90, 3600)] == [
        "",
        "about 1 s left",
        "about 89 s left",
        "about 2 min left",
        "about 60 min left",
    ]
