"""The pool of worker processes. Its tasks are functions of the standard library, which every worker can import."""

import multiprocessing
import operator
import os
import signal
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from simdev.bench.workers import SAME_KIND, Pool, WorkerDied, _do_tasks, death, interrupts_held, running


@pytest.fixture
def pool():
    found = Pool(1)
    with running(found):
        yield found


def test_every_task_has_a_process_of_its_own_unless_tasks_are_shared(pool):
    pids = [pool.schedule(os.getpid).result() for _ in range(3)]
    assert len({*pids, os.getpid()}) == 4
    shared = Pool(1, tasks=3)
    with running(shared):
        pids = [future.result() for future in [shared.schedule(os.getpid) for _ in range(4)]]
    assert len(set(pids)) == 2


def test_tasks_of_a_kind_share_a_process_until_one_fails(pool):
    kinds = ["a", "a", "b", "b", "", "a"]
    tasks = [pool.schedule(os.getpid, kind=kind) for kind in kinds]
    one, same, two, also, alone, again = [task.result() for task in tasks]
    assert one == same and two == also and len({one, two, alone, again, os.getpid()}) == 5
    assert pool.schedule(os.getpid, kind="a").result() == again
    with pytest.raises(ZeroDivisionError):
        pool.schedule(operator.truediv, (1, 0), kind="a").result()
    tasks = [pool.schedule(os.getpid, kind="a") for _ in range(SAME_KIND + 1)]
    pids = [task.result() for task in tasks]
    assert again not in pids and len(set(pids[:-1])) == 1 and pids[-1] != pids[0]


def test_two_workers_do_not_load_and_compile_the_same_kind_at_once():
    pool, ended = Pool(2), []
    with running(pool):
        pool.schedule(time.sleep, (1.0,))
        long = pool.schedule(time.sleep, (4.0,), kind="a")
        for rank, kind in enumerate("ab"):  # both workers are busy, and "a" has the better rank
            task = pool.schedule(os.getpid, rank=(rank,), kind=kind)
            task.add_done_callback(lambda _, kind=kind: ended.append(kind))
        long.result()
    assert ended == ["b", "a"]


def test_what_a_task_raises_and_how_it_dies(pool):
    with pytest.raises(ZeroDivisionError):
        pool.schedule(operator.truediv, (1, 0)).result()
    for function, args, code in ((os._exit, (0,), 0), (os._exit, (3,), 3), (os.abort, (), -6)):
        with pytest.raises(WorkerDied) as caught:
            pool.schedule(function, args).result()
        assert caught.value.exitcode == code and str(caught.value) == death(code)
    with pytest.raises(Exception, match="pickle"):
        pool.schedule(lambda: None).result()
    assert pool.schedule(operator.add, (1, 2)).result() == 3


def test_a_task_that_takes_too_long_is_ended_and_the_next_one_runs(pool):
    slow = pool.schedule(time.sleep, (600,), timeout=0.5)
    after = pool.schedule(operator.add, (1, 2))
    with pytest.raises(TimeoutError):
        slow.result()
    assert after.result() == 3


def test_tasks_wait_in_the_order_of_their_rank(pool, tmp_path):
    order, gate = [], tmp_path / "gate"
    os.mkfifo(gate)
    first = pool.schedule(gate.read_bytes)  # until there is a writer
    for rank in ((2, -5), (1,), (2, -9), (0, True), (0, False)):
        pool.schedule(os.getpid, rank=rank).add_done_callback(lambda _, rank=rank: order.append(rank))
    gate.write_bytes(b"open")
    assert first.result() == b"open"
    last = pool.schedule(os.getpid, rank=(9,))
    last.result()
    assert order == [(0, False), (0, True), (1,), (2, -9), (2, -5)]


def test_a_pool_that_is_stopped_ends_what_runs_and_cancels_what_waits():
    pool = Pool(1)
    with pytest.raises(KeyboardInterrupt), running(pool):
        runs, waits = pool.schedule(time.sleep, (600,)), pool.schedule(time.sleep, (600,))
        while not runs.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert isinstance(runs.exception(), WorkerDied)
    with pytest.raises(CancelledError):
        waits.result()


def test_a_worker_whose_answer_nobody_has_read_ends_quietly():
    own, other = multiprocessing.Pipe()
    with ThreadPoolExecutor() as threads:
        worker = threads.submit(_do_tasks, other)
        own.send((operator.add, (1, 2)))
        assert own.poll(1800)
        own.close()
        assert worker.result(1800) is None


def test_an_interruption_comes_when_it_may():
    before, steps = signal.signal(signal.SIGINT, signal.default_int_handler), []
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_held() as deliver:
            signal.raise_signal(signal.SIGINT)
            steps.append("held")
            deliver()
            steps.append("never")
        with pytest.raises(KeyboardInterrupt), interrupts_held():
            signal.raise_signal(signal.SIGINT)
            steps.append("held to the end")
        with pytest.raises(KeyboardInterrupt), interrupts_held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            steps.append("never: the second one is not held")
        with interrupts_held() as deliver:
            deliver()
        assert steps == ["held", "held to the end"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
