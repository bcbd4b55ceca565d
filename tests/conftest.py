"""Fixtures that test files share, the number of processes of ``pytest -n auto``, and what was skipped, by reason."""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

MOST_PROCESSES = 8  # each takes up to 3 GiB
SKIPPED = pytest.StashKey[dict[str, str]]()  # the reason for each test that was skipped, and for each file

if "PYTEST_XDIST_WORKER" in os.environ:  # there are as many processes as cores: more threads would only wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")


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
