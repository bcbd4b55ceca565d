"""Folders of placers that nobody has read, such as those that a language model wrote: which files can be loaded.

The bench imports the files that it runs into its own process, so each file is first imported in a process of its own,
within the limits of a run: a file that never ends, exits or eats the memory is left out. This is protection against
mistakes, not against malice: the files are executed with the rights of the user.
"""

from __future__ import annotations

from pathlib import Path

from simdev.bench.workers import Limits, WorkerDied, cores, environment, limit_process, running, worker_pool
from simdev.errors import InvalidInput
from simdev.placers import placer


def candidates(folder: Path, limits: Limits) -> tuple[list[str], dict[str, str]]:
    """The entries ``FILE.py:NAME`` of all placers in the files of ``folder``, and for each file that is left out the
    reason. Files whose names begin with ``_`` are helpers.

    Raises :class:`InvalidInput` if no file holds a placer.
    """
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    found: list[str] = []
    refused: dict[str, str] = {}
    with environment():
        pool = worker_pool(cores())
        with running(pool):
            waiting = [pool.schedule(_names, (str(path), limits), timeout=limits.seconds) for path in files]
            for path, future in zip(files, waiting, strict=True):
                try:
                    found += [f"{path}:{name}" for name in future.result()]
                except TimeoutError:
                    refused[str(path)] = f"importing it took more than {limits.seconds:g} s"
                except (WorkerDied, MemoryError) as error:
                    refused[str(path)] = str(error) or "importing it took too much memory"
                except InvalidInput as error:
                    refused[str(path)] = error.message
    if not found:
        reasons = "".join(f"; {Path(path).name}: {reason}" for path, reason in refused.items())
        raise InvalidInput(f"no file of it holds a placer{reasons}", source=folder)
    return found, refused


def _names(path: str, limits: Limits) -> list[str]:
    """The names that a file registers; it is executed."""
    limit_process(limits)
    return placer.SHELF.names(path)
