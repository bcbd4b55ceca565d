"""Python files of the user, which are executed when an entry names them: ``my_placers.py:name``."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from simdev.errors import InvalidInput

SPLIT = ".py:"
_PREFIX = "_user_file_"  # of the module's name


def is_file_entry(entry: str) -> bool:
    """Whether an entry names something in a file of the user."""
    return SPLIT in entry


def is_user_module(name: str) -> bool:
    """Whether a module is a file that :func:`import_file` executed; another process cannot import it by its name."""
    return name.startswith(_PREFIX)


def import_file(path: Path) -> ModuleType:
    """Execute a file as a module with a name of its own; modules beside the file can be imported, as in a script.

    Raises :class:`InvalidInput` with the file and the line that failed.
    """
    if not path.is_file():
        raise InvalidInput("no such file", source=path)
    spec = importlib.util.spec_from_file_location(f"{_PREFIX}{uuid.uuid4().hex}", path.resolve())
    if spec is None or spec.loader is None:
        raise InvalidInput("not a Python file", source=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        with neighbours(path):
            spec.loader.exec_module(module)
    except SyntaxError as error:
        if error.filename != str(path.resolve()):  # of a module that the file imports
            raise InvalidInput(f"cannot be imported: {sentence(error)}", source=path) from error
        raise InvalidInput(f"not Python: {error.msg}", source=path, field=f"line {error.lineno}") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        message = f"cannot be imported: {sentence(error)}"
        raise InvalidInput(message, source=path, field=line_of(error, str(path), None)) from error
    return module


@contextmanager
def neighbours(path: Path) -> Iterator[None]:
    """While active, the modules beside ``path`` can be imported, as in a script; functions may import them late. No
    bytecode is kept: it would count as that of a file of the same size that is written within the same second."""
    folder, before = str(path.parent.resolve()), sys.dont_write_bytecode
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
        if folder in sys.path:  # the file may have changed the list itself
            sys.path.remove(folder)


def line_of(error: BaseException | None, path: str, function: str | None) -> str | None:
    """``line 12, in forward`` of the user's file, or else of the file in which the error arose.

    ``function`` is what the entry named in the file; it is returned if no line is known. If it is None, a line of
    another file than the user's may be returned.
    """
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in frames if Path(frame.filename) == Path(path).resolve()]
        if mine:
            return f"line {mine[-1].lineno}, in {mine[-1].name}"
        theirs = [
            frame for frame in frames if not re.search(r"[/\\](torch|simdev|contextlib|_?pytree)[/\\.]", frame.filename)
        ]
        if theirs and function is None:
            file = "/".join(Path(theirs[-1].filename).parts[-3:])
            return f"{file} line {theirs[-1].lineno}, in {theirs[-1].name}"
        error = error.__cause__
    return function


def sentence(error: BaseException | None) -> str:
    """The type and the first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}".strip(": ")
