"""A bench on a Dask cluster of several processes here: the same rows as at home, also when a worker is killed."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_bench import LIMITS, ODD, make_graph

from simdev.bench import rows
from simdev.bench.bench import Incomplete, Observer
from simdev.bench.bench import bench as execute_all
from simdev.bench.dask_cluster import dask_backend, dask_simulator, execute_apart
from simdev.bench.matrix import plan
from simdev.bench.run import find_instance
from simdev.bench.workers import Limits
from simdev.cli.problems import build_problem
from simdev.errors import InvalidInput
from simdev.placers.registry import find_placer
from simdev.problem.placement_file import placement_file

distributed = pytest.importorskip("distributed")
dask = pytest.importorskip("dask")


@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as found:
        yield found


def exact(found):
    return [{name: row.cells()[name] for name in rows.EXACT} for row in found]


def kill_one(cluster):
    victim = next(iter(cluster.workers.values()))
    pid = victim.pid if isinstance(victim.pid, int) else victim.process.pid
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.long
def test_rows_are_those_of_this_machine_also_when_a_worker_is_killed(cluster, tmp_path):
    graph = make_graph(tmp_path / "small.npz")
    placers = [
        "single-gpu",
        "round-robin",
        "local-search",
        *(f"{ODD}:{name}" for name in ("walk", "shy", "slow[seconds=1.0]")),
    ]
    runs = plan([graph, "transformer-xl-2"], ["p100x2"], placers, budget="evaluations=10", seeds=2)
    home = execute_all(runs, tmp_path / "home", jobs=2, limits=LIMITS)

    class Killer(Observer):
        killed = False

        def tick(self, done, total, running, left_s=None):
            if not Killer.killed and done:
                Killer.killed = True
                kill_one(cluster)

    away = execute_all(
        runs, tmp_path / "away", limits=LIMITS, observer=Killer(), backend=dask_backend(cluster.scheduler_address)
    )
    assert Killer.killed
    assert exact(away) == exact(home)
    for row in away:
        assert not row.placement or placement_file(tmp_path / "away", row.placement).is_file()
    assert execute_all(runs, tmp_path / "away", limits=LIMITS) == away  # nothing is left to run


@pytest.mark.long
def test_planners_run_on_a_cluster_and_their_misbehaviour_is_a_row(cluster, tmp_path):
    from test_planners_run import RAISED, odd, outcomes
    from test_planners_run import run as run_planners

    names = ("shy", "broken", "quitter", "suicidal", "vandal", "leaver")
    found = run_planners(odd(*names), tmp_path, backend=dask_backend(cluster.scheduler_address))
    assert outcomes(found) == {name: RAISED[name] for name in names}
    limits = Limits(5, 2 << 30)
    (row,) = run_planners(odd("endless"), tmp_path, backend=dask_backend(cluster.scheduler_address), limits=limits)
    assert (row.status, row.error) == ("timeout", "longer than 5 s")


@pytest.mark.slow
def test_training_on_a_cluster_writes_the_same_policy_also_when_a_worker_is_killed(cluster, tmp_path):
    pytest.importorskip("jax")
    problem = build_problem("transformer-xl-2", "p100x2")
    spec, _ = find_placer("colocrl")
    learner = spec.learner([problem], **{key: value for key, value in spec.defaults.items() if key != "policy"})

    def train(out, **how):
        learner.train([problem], seed=0, evaluations=48, out=out, **how)
        return [(out / name).read_bytes() for name in ("policy.safetensors", "policy.json", "progress.csv")]

    killed, batches = [], []
    with dask_simulator(cluster.scheduler_address) as simulate:

        def watched(problem, devices, **how):
            if len(batches) == 1:
                killed.append(kill_one(cluster))
            batches.append(len(devices))
            return simulate(problem, devices, **how)

        away = train(tmp_path / "away", simulate=watched)
    assert killed and sum(batches) >= 40
    assert away == train(tmp_path / "home")


SCHEDULER = """
import sys, time
from distributed import LocalCluster
if __name__ == "__main__":
    cluster = LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50)
    print(cluster.scheduler_address, flush=True)
    time.sleep(3600)
"""


@pytest.mark.slow
def test_runs_lost_with_the_scheduler_are_no_rows_and_are_executed_by_the_same_bench(tmp_path):
    graph = make_graph(tmp_path / "small.npz")
    (tmp_path / "scheduler.py").write_text(SCHEDULER)
    log, gate = tmp_path / "log", tmp_path / "gate"  # three runs end; the others wait until the scheduler is gone
    runs = plan([graph], ["p100x2"], [f"{ODD}:slow[gate={gate},log={log}]"], budget="evaluations=1", seeds=8)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "scheduler.py")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        address = process.stdout.readline().strip()

        class Killer(Observer):
            def row(self, done, total, row):
                if done == 2:
                    os.killpg(process.pid, signal.SIGKILL)

        with (
            dask.config.set({"distributed.comm.timeouts.connect": "2s"}),
            pytest.raises(Incomplete, match="of 8 runs were lost"),
        ):
            execute_all(runs, tmp_path / "out", limits=LIMITS, observer=Killer(), backend=dask_backend(address))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    kept = rows.read_rows(tmp_path / "out" / "results.csv")
    assert 2 <= len(kept) <= 3 and all(row.status == "ok" for row in kept)
    gate.touch()
    found = execute_all(runs, tmp_path / "out", jobs=2, limits=LIMITS)
    assert len(found) == 8 and all(row.status == "ok" for row in found)
    assert set(kept) <= set(found)


def test_no_scheduler_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("simdev.bench.dask_cluster.PATIENCE_S", 1)
    runs = plan(["transformer-xl-2"], ["p100x2"], ["single-gpu"], budget="evaluations=1")
    with pytest.raises(InvalidInput, match="no Dask scheduler"):
        execute_all(runs, tmp_path, limits=LIMITS, backend=dask_backend("tcp://127.0.0.1:1"))


def test_another_simdev_on_a_worker_is_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("simdev.bench.dask_cluster.source_digest", lambda: "of another version")
    runs = plan(["transformer-xl-2"], ["p100x2"], ["single-gpu"], budget="evaluations=1")
    with pytest.raises(InvalidInput, match="runs another simdev"):
        execute_all(runs, tmp_path, limits=LIMITS, backend=dask_backend(cluster.scheduler_address))


@pytest.mark.parametrize(
    "name, status",
    [
        pytest.param("slow[seconds=600.0]", "timeout", marks=pytest.mark.slow),
        ("glutton", "memory"),
        ("suicidal", "memory"),
    ],
)
def test_limits_hold_on_a_worker(tmp_path, name, status):
    graph = make_graph(tmp_path / "small.npz")
    (run,) = plan([graph], ["p100x2"], [f"{ODD}:{name}"], budget="evaluations=1")
    instance = find_instance(*run.instance, str(tmp_path))
    limits = Limits(5 if status == "timeout" else 300, 1 << 30)
    outcome = execute_apart(run, instance, limits, Path(instance.graph_file).read_bytes(), os.getcwd())
    assert outcome.row.status == status and outcome.row.error
