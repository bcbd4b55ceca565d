"""The runs of a bench, or the simulations of a training, on the workers of a Dask cluster, with the same results.

Each run of a bench has a process of its own on the worker, under the same limits as on one machine; a batch of
placements in training is divided among the workers. If a worker is lost, its runs are given to another one; if the
scheduler is lost, its runs are reported as lost and get no row. Workers must run the same simdev; the user's own
placers and machine files are found by path, on a file system that the workers share. Clusters are started with Dask's
own tools (``dask scheduler``, ``dask worker``, dask-jobqueue for Slurm, dask-kubernetes).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simdev.bench.bench import Backend, Lost, Submit
from simdev.bench.guard import guarded
from simdev.bench.plan_rows import PLANS
from simdev.bench.plan_run import PLANNING
from simdev.bench.provenance import source_digest
from simdev.bench.rows import RESULTS
from simdev.bench.run import PLACING
from simdev.bench.work import RunOutcome, Work, one_line
from simdev.bench.workers import GRACE_S, Limits, death, environment
from simdev.errors import InvalidInput
from simdev.planners.evaluate import WorkersLost
from simdev.problem.placement_file import store_placement, stored_placement
from simdev.problem.problem import Problem
from simdev.sim import simulate_many
from simdev.sim.schedule import Outcomes

if TYPE_CHECKING:
    from distributed import Client, Future

PATIENCE_S = 30  # for a scheduler to answer and a first worker to join
LOSSES = 3  # workers that a run may lose before it is thought to be the cause
OUTCOMES = tuple(field.name for field in fields(Outcomes))
WORKS = {PLACING.name: (PLACING, RESULTS), PLANNING.name: (PLANNING, PLANS)}


def dask_backend(scheduler: str) -> Backend:
    """A backend for :func:`simdev.bench.bench.bench` that executes on the cluster of a Dask scheduler, by address.

    Raises :class:`InvalidInput` if the scheduler does not answer or has no worker, or if a worker runs another simdev.
    """

    @contextlib.contextmanager
    def backend(limits: Limits, work: Work) -> Iterator[Submit]:
        with _connected(scheduler) as client:
            executor = client.get_executor(pure=False)
            folder = os.getcwd()

            def submit(run: Any, instance: Any) -> concurrent.futures.Future:
                file = getattr(instance, "graph_file", None)
                graph = Path(file).read_bytes() if file else None
                task = executor.submit(execute_apart, run, instance, limits, graph, folder, work.name)
                return _Answer(task, run, instance, work)

            try:
                yield submit
            finally:
                executor.shutdown(wait=False)

    return backend


class _Answer(concurrent.futures.Future):
    """What a Dask future answers, in the terms of the bench: :func:`execute_apart` raises nothing, so an exception
    means that the cluster failed and the run is :class:`Lost`, unless the run has ended worker after worker."""

    def __init__(self, task: concurrent.futures.Future, run: Any, instance: Any, work: Work):
        super().__init__()
        self._task, self._run, self._instance, self._work = task, run, instance, work
        task.add_done_callback(self._take)

    def running(self) -> bool:
        return self._task.running() and not self.done()

    def _take(self, task: concurrent.futures.Future) -> None:
        from distributed.scheduler import KilledWorker

        try:
            self.set_result(task.result())
        except KilledWorker as error:
            message = f"ended {LOSSES} workers: {one_line(error)}"
            self.set_result(self._work.failed(self._run, self._instance, "error", message))
        except BaseException as error:  # also CancelledError
            self.set_exception(Lost(one_line(error) or type(error).__name__))


@contextlib.contextmanager
def dask_simulator(scheduler: str) -> Iterator[Callable[..., Outcomes]]:
    """:func:`simdev.sim.simulate_many` on the cluster of a Dask scheduler, for ``simdev train``: each batch is divided
    among the workers' threads, and the answer is the same. Raises as :func:`dask_backend`, and :class:`WorkersLost` if
    a task has ended worker after worker or the scheduler is lost."""
    with _connected(scheduler) as client:
        held: dict[Problem, Future] = {}

        def simulate(problem: Problem, devices: np.ndarray, *, below: int | None = None) -> Outcomes:
            if problem not in held:  # a task, not scattered data: it is done again where the worker that had it is lost
                parts = problem.graph, problem.topology, problem.costs, problem.rules
                held[problem] = client.submit(Problem, *parts, pure=False)
            parts = np.array_split(devices, max(1, min(len(devices), sum(client.nthreads().values()))))
            tasks = [client.submit(simulate_many, held[problem], part, below=below, pure=False) for part in parts]
            found = client.gather(tasks)
            return Outcomes(*(np.concatenate([getattr(part, name) for part in found]) for name in OUTCOMES))

        yield simulate


@contextlib.contextmanager
def dask_executor(scheduler: str) -> Iterator[concurrent.futures.Executor]:
    """The workers of a Dask scheduler as an executor, for ``simdev plan``. Raises as :func:`dask_simulator`."""
    with _connected(scheduler) as client:
        executor = client.get_executor(pure=False)
        try:
            yield executor
        finally:
            executor.shutdown(wait=False)


@contextlib.contextmanager
def _connected(scheduler: str) -> Iterator[Client]:
    """A client of the scheduler, whose workers are ready."""
    try:
        import dask
        from distributed import Client
        from distributed.comm.core import CommClosedError
        from distributed.scheduler import KilledWorker
    except ImportError:
        raise InvalidInput(
            "needs the package distributed: pip install 'simdev[dask]'", source="--backend dask"
        ) from None
    for name in ("distributed", "distributed.client", "distributed.core", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what is lost is reported once, without its traceback
    with dask.config.set({"distributed.scheduler.allowed-failures": LOSSES}):
        try:
            client = Client(scheduler, timeout=PATIENCE_S, set_as_default=False)
            client.wait_for_workers(1, timeout=PATIENCE_S)
        except (OSError, TimeoutError, ValueError, TypeError) as error:  # TypeError: TLS without certificates
            raise InvalidInput(f"no Dask scheduler with a worker ({error})", source=scheduler) from None
    with client:
        try:
            _check_workers(client, scheduler)
            yield client
        except (asyncio.CancelledError, concurrent.futures.CancelledError, CommClosedError, KilledWorker) as error:
            raise WorkersLost(f"Dask's workers are lost: {one_line(error) or type(error).__name__}") from None


def _check_workers(client, scheduler: str) -> None:
    """Compile once on each worker, and refuse one whose simdev differs."""
    own = source_digest()
    for worker, digest in client.run(_prepare).items():
        if digest != own:
            raise InvalidInput(f"worker {worker} runs another simdev", source=scheduler)


def _prepare() -> str:
    subprocess.run([sys.executable, "-c", "from simdev.bench.warm import warm; warm()"], check=False)
    return source_digest()


def execute_apart(
    run: Any, instance: Any, limits: Limits, graph: bytes | None, folder: str, name: str = PLACING.name
) -> RunOutcome:
    """Execute a run in a process of its own, started in ``folder`` (where relative paths of placers and planners
    begin), within ``limits``. ``graph`` is the content of a graph file that does not ship with simdev, ``name`` names
    the :class:`Work`."""
    work, schema = WORKS[name]
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch, environment():
        here = Path(scratch)
        if graph is not None:
            (here / "graph.npz").write_bytes(graph)
            instance = replace(instance, graph_file=str(here / "graph.npz"))
        task = {"work": name, "run": asdict(run), "instance": asdict(instance), "limits": asdict(limits)}
        (here / "task.json").write_text(json.dumps(task), encoding="utf-8")
        code = "import sys; from simdev.bench.dask_cluster import _child; _child(sys.argv[1])"
        cwd = folder if os.path.isdir(folder) else None
        child = subprocess.Popen(
            [sys.executable, "-c", code, scratch], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        try:
            child.wait(timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return work.failed(run, instance, "timeout", f"longer than {limits.seconds:g} s")
        finally:
            _end(child)
        if child.returncode != 0 or not (here / "outcome.json").is_file():
            status = "memory" if child.returncode == -9 else "error"
            return work.failed(run, instance, status, death(child.returncode))
        answer = json.loads((here / "outcome.json").read_text(encoding="utf-8"))
        row = schema.from_json(answer["row"], here / "outcome.json")
        placement = stored_placement(here, row.placement) if getattr(row, "placement", "") else None
        return RunOutcome(row, placement, tuple(map(tuple, answer["curve"])))


def _end(child: subprocess.Popen) -> None:
    """Close the lifeline of the child's guard, which then ends all its processes."""
    child.stdin.close()
    try:
        child.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _child(scratch: str) -> None:
    guarded(lambda: _execute_task(Path(scratch)), sys.stdin.fileno())


def _execute_task(here: Path) -> None:
    task = json.loads((here / "task.json").read_text(encoding="utf-8"))
    own = os.getpid()
    work, schema = WORKS[task["work"]]
    limits = Limits(**task["limits"])
    outcome = work.execute_limited(work.run(**task["run"]), work.instance(**task["instance"]), limits)
    if os.getpid() != own:  # a process that the solver has forked and that came back from it, too
        return
    if outcome.placement is not None:
        store_placement(here, outcome.placement)
    document = {"row": schema.to_json(outcome.row), "curve": outcome.curve}
    (here / "outcome.json").write_text(json.dumps(document), encoding="utf-8")
