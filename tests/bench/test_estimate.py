from simdev.bench.estimate import OVERHEAD_S, TimeLeft
from simdev.bench.matrix import plan
from simdev.bench.rows import KEY, Row
from simdev.bench.run import PLACING
from simdev.bench.workers import Limits
from simdev.cli.progress import left


def runs_of(*placers, seeds=1):
    return plan(["transformer-xl-2"], ["p100x2"], placers, budget="evaluations=1", seeds=seeds)


def row(run, seconds, status="ok"):
    key = dict(zip(KEY, run.key, strict=True))
    return Row(**key, version=1, fingerprint="f", cost_hash="c", status=status, place_seconds=seconds)


def test_the_time_left_follows_the_finished_runs_of_the_same_placer_or_the_slowest_of_its_kind():
    runs = runs_of("heft", "peft", "m-etf", "genetic", seeds=2)
    heft, peft, metf, genetic = ([r for r in runs if r.placer == name] for name in ("heft", "peft", "m-etf", "genetic"))
    estimate = TimeLeft(Limits(100, 0))
    for run in runs:
        estimate.expect(run, 10 if run.seed == 0 else 20, PLACING.order(run.entry)[:2])
    assert estimate.seconds_left(1, {}) is None  # nothing is known
    estimate.learn(heft[0], row(heft[0], 4.0))
    estimate.learn(metf[0], row(metf[0], 1.0))
    assert estimate.seconds_left(1, {}) is None  # nothing is known about searches
    estimate.learn(genetic[0], row(genetic[0], 30.0))
    # half of what a run of 10 ops took counts in any case, half of it for each op: 1.5 times as much for 20 ops
    known = 6.0 + 1.5 + (4 + 6) + 45 + 5 * OVERHEAD_S  # heft, m-etf, peft (as heft, not as m-etf), genetic
    assert estimate.seconds_left(1, {}) == known
    assert estimate.seconds_left(2, {}) == 45 + OVERHEAD_S  # the longest run alone takes more than half of all
    assert estimate.seconds_left(1, {str(genetic[1]): 40.0}) == known - 40
    estimate.learn(heft[1], row(heft[1], None, "timeout"))  # as long as the limit: 100 s of 20 ops
    estimate.forget(genetic[1])
    assert estimate.seconds_left(1, {}) > known - 45


def test_a_run_that_takes_longer_than_expected_is_taken_to_be_halfway():
    runs = runs_of("heft", "peft", seeds=2)
    heft, peft = ([run for run in runs if run.placer == name] for name in ("heft", "peft"))
    estimate = TimeLeft(Limits(100, 0))
    for run in runs:
        estimate.expect(run, 10, PLACING.order(run.entry)[:2])
    estimate.learn(heft[0], row(heft[0], 1.0))
    assert estimate.seconds_left(1, {}) == 3 + 3 * OVERHEAD_S
    late = {str(peft[0]): 20.0}
    assert estimate.seconds_left(1, late) == 1 + 20 + 40 + 3 * OVERHEAD_S  # heft, the rest of peft, and peft again
    assert estimate.seconds_left(1, {"loading transformer-xl-2": 9.0}) == 3 + 3 * OVERHEAD_S


def test_the_time_left_in_words():
    assert [left(seconds) for seconds in (None, 0.2, 89, 90, 3600)] == [
        "",
        "about 1 s left",
        "about 89 s left",
        "about 2 min left",
        "about 60 min left",
    ]
