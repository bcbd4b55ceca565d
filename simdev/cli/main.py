"""The ``simdev`` command: its subcommands are in :mod:`simdev.cli.commands`."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

from simdev.cli import commands
from simdev.cli.app import EXAMPLES, app
from simdev.errors import EXTRA_OF, SimdevError, needs_package

for _found in pkgutil.iter_modules(commands.__path__):
    importlib.import_module(f"simdev.cli.commands.{_found.name}")

app.info.epilog = EXAMPLES

SPARE = 4 << 20  # bytes that are given back to say that the memory does not suffice; untouched, they take none
NO_MEMORY = (
    "can't allocate memory",
    "std::bad_alloc",
    "can't start new thread",
    "failed to map segment from shared object",  # a library that is loaded
    "cannot allocate memory",
)


def main() -> None:
    """Run a command. A mistake in the input or a lack of memory is one line on stderr, with exit code 2; an
    interruption exits with 130."""
    spare = bytearray(SPARE)
    try:
        app()
    except SimdevError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        _fail(f"this {needs_package(package)}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (MemoryError, RuntimeError, ImportError, OSError) as error:  # whatever a library raises
        if _no_memory(error):
            del spare
            _fail("the memory does not suffice")
        if not isinstance(error, OSError):
            raise
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))


def _no_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it hides, says that memory is lacking."""
    if error is None:
        return False
    said = isinstance(error, MemoryError) or any(text in str(error).lower() for text in NO_MEMORY)
    return said or _no_memory(error.__cause__ or error.__context__)


def _fail(message: str) -> None:
    print(f"simdev: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
