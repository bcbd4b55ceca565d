"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public measured data, which is not part of the project: ``SIMDEV_DATA`` or ``../shared/data``."""
    folder = Path(os.environ.get("SIMDEV_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("public measured data is not here: name its folder in SIMDEV_DATA")
    return folder
