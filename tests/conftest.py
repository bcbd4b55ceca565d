"""Fixtures that several test files share, and how many processes ``pytest -n auto`` starts."""

import os
from pathlib import Path

import pytest

MOST_PROCESSES = 8  # each takes up to 3 GiB

if "PYTEST_XDIST_WORKER" in os.environ:  # there are as many processes as cores: more threads would only wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers(config) -> int:
    """One for each core that this process may use; also where two of them are one core's threads."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public measured data, which is not part of the project: ``SIMDEV_DATA`` or ``../shared/data``."""
    folder = Path(os.environ.get("SIMDEV_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("public measured data is not here: name its folder in SIMDEV_DATA")
    return folder
