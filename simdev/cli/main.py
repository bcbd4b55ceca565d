"""The ``simdev`` command: its subcommands are in :mod:`simdev.cli.commands`."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

from simdev.cli import commands
from simdev.cli.app import EXAMPLES, app
from simdev.errors import SimdevError

for _found in pkgutil.iter_modules(commands.__path__):
    importlib.import_module(f"simdev.cli.commands.{_found.name}")

app.info.epilog = EXAMPLES

# What the core does without, and the extra that installs it.
IN_ALL = ("equinox", "jax", "matplotlib", "optax", "ortools", "pymetis", "pyscotch")
EXTRA_OF = {**dict.fromkeys(IN_ALL, "all"), "torch": "capture", "onnx": "onnx"}
NO_MEMORY = ("can't allocate memory", "std::bad_alloc", "can't start new thread")


def main() -> None:
    """Run a command. A mistake in the input or a lack of memory is one line on stderr, with exit code 2; an
    interruption exits with 130."""
    try:
        app()
    except SimdevError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        _fail(f"this needs the package {package}: pip install 'simdev[{EXTRA_OF[package]}]'")
    except (MemoryError, RuntimeError) as error:  # PyTorch and threads raise RuntimeError
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in NO_MEMORY):
            raise
        _fail("the memory does not suffice")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))


def _fail(message: str) -> None:
    print(f"simdev: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
