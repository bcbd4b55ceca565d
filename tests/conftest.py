"""Fixtures that test files share, the number of processes of ``pytest -n auto``, and what was skipped, by reason."""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main

ROOT = Path(__file__).parents[1]
MOST_PROCESSES = 8  # each takes up to 3 GiB
MANY_TESTS = int(os.environ.get("SIMDEV_MANY_TESTS", "1000"))  # from here on, all kernels are compiled beforehand
SKIPPED = pytest.StashKey[dict[str, str]]()  # the reason for each test that was skipped, and for each file

if "PYTEST_XDIST_WORKER" in os.environ:  # there are as many processes as cores: more threads would only wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs of JAX run for milliseconds here, and to optimise their machine code takes seconds for each size of a graph.
# With XLA_FLAGS= in the environment they are compiled as for users. XLA ends a process that gives it an unknown flag.
_QUICK = "--xla_backend_optimization_level=0"
with contextlib.suppress(PackageNotFoundError):
    _QUICK += " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
os.environ.setdefault("XLA_FLAGS", _QUICK)
# Typer builds the objects of all commands anew whenever the command is called, which takes a tenth of a second.
typer.main.get_command = functools.cache(typer.main.get_command)


def pytest_xdist_auto_num_workers(config) -> int:
    """One for each core that this process may use; also where two of them are one core's threads."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def pytest_addoption(parser) -> None:
    group = parser.getgroup("skipped tests")
    group.addoption("--write-skipped", metavar="FILE", help="write the skipped tests to a file, with the reasons")
    group.addoption("--only-skipped", metavar="FILE", help="run only the tests that such a file names")


def pytest_configure(config) -> None:
    config.stash[SKIPPED] = {}
    if "PYTEST_XDIST_WORKER" not in os.environ:  # with -n, the reports of all processes arrive here
        config.pluginmanager.register(_Skips(config.stash[SKIPPED]))


class _Skips:
    """Notes the reason for each skipped test, and for each file that is skipped as a whole."""

    def __init__(self, skipped: dict[str, str]):
        self.skipped = skipped

    def pytest_runtest_logreport(self, report) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[report.nodeid] = _reason(report)

    def pytest_collectreport(self, report) -> None:
        if report.skipped:
            self.skipped[report.nodeid] = _reason(report)


def _reason(report) -> str:
    """Why a test was skipped; the names of missing packages without the rest of the message."""
    text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    missing = re.search(r"could not import '(\w+)", text)
    return f"without the package {missing[1]}" if missing else text.removeprefix("Skipped: ")


def pytest_collection_modifyitems(config, items) -> None:
    both = [item.nodeid for item in items if item.get_closest_marker("slow") and item.get_closest_marker("long")]
    if both:
        raise pytest.UsageError(f"slow and long exclude each other: {both[0]}")
    if config.option.only_skipped:
        named = json.loads(Path(config.option.only_skipped).read_text(encoding="utf-8"))
        chosen = [item for item in items if item.nodeid in named or item.nodeid.partition("::")[0] in named]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tell a process of pytest-xdist whether any kernel has been compiled before."""
    compiled = Path(os.environ.get("NUMBA_CACHE_DIR", ROOT / "simdev")).rglob("*.nbi")
    node.workerinput["nothing compiled"] = not any(compiled)


def pytest_collection_finish(session) -> None:
    """Compile each kernel in one process only: the processes begin at different steps, and each waits for a kernel that
    another one is compiling. Without this, all compile the same kernels at the same time."""
    given = getattr(session.config, "workerinput", {})
    if not given.get("nothing compiled") or len(session.items) < MANY_TESTS:
        return
    from simdev.bench.warm import steps

    with _compiled_once(Path(tempfile.gettempdir()) / f"simdev-{given['testrunuid']}"):
        found = list(steps().values())
        first = len(found) * int(given["workerid"][2:]) // given["workercount"]
        for step in found[first:] + found[:first]:
            step()


@contextlib.contextmanager
def _compiled_once(locks: Path):
    """A process that is about to compile a function waits while another one does, and then finds it in the cache.

    A function ends after those that it calls, and none of them calls it, so that no two processes wait for each other.
    """
    from numba.core import compiler_lock, dispatcher

    locks.mkdir(exist_ok=True)
    compile_now, held = dispatcher.Dispatcher.compile, set()

    def compile_once(self, signature):
        name = f"{self.py_func.__module__}.{self.py_func.__qualname__}"
        if name in held:
            return compile_now(self, signature)
        with compiler_lock.global_compiler_lock, (locks / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held.add(name)
            try:
                return compile_now(self, signature)
            finally:
                held.remove(name)
                fcntl.flock(lock, fcntl.LOCK_UN)

    dispatcher.Dispatcher.compile = compile_once
    try:
        yield
    finally:
        dispatcher.Dispatcher.compile = compile_now


def pytest_sessionfinish(session) -> None:
    out = session.config.option.write_skipped
    if out and "PYTEST_XDIST_WORKER" not in os.environ:
        text = json.dumps(session.config.stash[SKIPPED], indent=1, sort_keys=True)
        Path(out).write_text(text + "\n", encoding="utf-8")


def pytest_terminal_summary(terminalreporter, config) -> None:
    for reason, count in Counter(config.stash[SKIPPED].values()).most_common():
        terminalreporter.write_line(f"{count:5} skipped: {reason}")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public measured data, which is not part of the project: ``SIMDEV_DATA`` or ``../shared/data``."""
    folder = Path(os.environ.get("SIMDEV_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("public measured data is not here: name its folder in SIMDEV_DATA")
    return folder


@pytest.fixture(autouse=True)
def same_draws_in_any_order():
    """Whatever ran before, a test draws the same numbers, also from the generators that libraries share."""
    random.seed(0)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy:
        numpy.random.seed(0)
    if torch:
        torch.manual_seed(0)


@pytest.fixture
def clock(monkeypatch):
    """Budgets of placers see a millisecond pass between two looks at the clock, whatever else the computer does."""
    looks = itertools.count()
    monkeypatch.setattr("simdev.placers.budget.time", SimpleNamespace(monotonic=lambda: next(looks) / 1000))


@pytest.fixture(scope="module")
def own_captures(tmp_path_factory):
    """Captures are kept for the tests of one file alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def simdev(monkeypatch, capsys):
    """Call the command in this process: ``(exit code, stdout, stderr)``."""

    from simdev.cli import main as cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["simdev", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as leave:
            code = leave.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def tiny_job():
    pytest.importorskip("torch")
    from simdev.planners.testing import small_job

    return small_job()


@pytest.fixture(scope="session")
def tiny_evaluator(tiny_job):
    from simdev.planners import Evaluator

    return Evaluator(tiny_job)
