import contextlib
from concurrent.futures import Future

import pytest

from simdev.bench import workers


class Inline:
    """A pool that does each task at once, in this process."""

    def schedule(self, function, args=(), **_):
        future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def at_once(monkeypatch):
    """Rows are recomputed in this process: a process of their own would take most of the time. Returns the pool."""
    monkeypatch.setattr(workers, "worker_pool", lambda *_, **__: Inline())
    monkeypatch.setattr(workers, "running", lambda pool: contextlib.nullcontext())
    monkeypatch.setattr(workers, "limit_process", lambda limits: None)
    return Inline
