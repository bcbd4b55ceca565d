"""The errors that simdev raises. The command line prints each as one sentence on stderr and exits with code 2."""

from __future__ import annotations

import ast
import contextlib
import difflib
import mmap
import re
from collections.abc import Iterable
from typing import Any

LONGEST = 500  # characters of a message
MOST_KNOWN = 10_000  # names that are searched for one like the unknown one
MOST_SOURCE = 1 << 20  # bytes of a Python file that are read for a message
# What the core does without, and the extra that installs it.
IN_ALL = ("equinox", "jax", "matplotlib", "optax", "ortools", "pymetis", "pyscotch")
EXTRA_OF = {**dict.fromkeys(IN_ALL, "all"), "torch": "capture", "onnx": "onnx"}


def needs_package(package: str) -> str:
    """What to say of a package that is not installed: "needs the package jax: pip install 'simdev[all]'". A package
    that no extra brings is named itself."""
    what = f"'simdev[{EXTRA_OF[package]}]'" if package in EXTRA_OF else package
    return f"needs the package {package}: pip install {what}"


def shortened(text: str, most: int) -> str:
    """``text`` on one printable line of at most ``most`` characters: the middle of a longer text is left out, and
    what a terminal would obey is escaped."""
    text = text if len(text) <= 4 * most else f"{text[: 2 * most]}{text[-2 * most :]}"
    text = " ".join(text.split()) if "\n" in text or "\r" in text else text
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return text if len(text) <= most else f"{text[: most - most // 3 - 3]}...{text[-(most // 3) :]}"


def counted(count: int, what: str) -> str:
    """How many of something there are: ``1 row``, ``1,024 rows``; ``what`` is its singular."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def quoted(value: object, most: int = 100) -> str:
    """``repr(value)``, shortened; also of whole numbers that Python refuses to print."""
    try:
        return shortened(repr(value), most)
    except (ValueError, RecursionError):
        return "a very large number" if isinstance(value, int) else f"a large {type(value).__name__}"


class SimdevError(Exception):
    """Base of every error that simdev raises on purpose."""


class InvalidInput(SimdevError, ValueError):
    """A graph, topology, placement or file that breaks its contract.

    ``source`` is the file (or object) at fault and ``field`` the part of it; both lead the message. The whole is one
    line of fewer than :data:`LONGEST` characters, whatever a file holds: longer parts are cut.
    """

    def __init__(self, message: str, *, source: object = None, field: str | None = None):
        parts = [shortened(str(part), 160) for part in (source, field) if part is not None]
        where = ": ".join(parts)
        message = shortened(message, LONGEST - len(where) - 3)
        super().__init__(f"{where}: {message}" if where else message)
        self.message, self.source, self.field = message, source, field

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class UnknownName(InvalidInput):
    """A workload, topology, placer or device that does not exist; the message suggests what to type."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, source: object = None, field: str | None = None):
        name, known = shortened(name, 100), sorted(known)[:MOST_KNOWN]
        hint = _what_to_type(what, name, known)
        super().__init__(f"unknown {what} {name!r}{hint}", source=source, field=field)


OPTION_OF = {"placer": "-p ", "planner": "--planner ", "workload": "-w ", "topology": "-t "}
LISTED = {  # where many names are listed
    "placer": "'simdev list placers' names all",
    "parallel model": "'simdev list models' names all, and a training step of yours works, too: my_model.py:NAME",
    "workload": "'simdev list workloads' names all, and 'simdev capture' makes a graph of a model of yours",
    "topology": "'simdev list topologies' names all, and a TOML file describes a machine of yours",
}
MOST_LISTED = 12  # names in a message
MOST_LIKE = 4  # names that a message suggests


def _what_to_type(what: str, name: str, known: list[str]) -> str:
    """The end of a message about an unknown name: how the usual mistakes are written, or else the nearest name."""
    if name.endswith(".py"):
        held = _defined_in(name)
        return f"; name what the file holds, too: {_one_of(f'{name}:{one}' for one in held or ['NAME'])}"
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and "[" not in name and all(difflib.get_close_matches(part, known, cutoff=0.8) for part in parts):
        option = OPTION_OF.get(what, "")
        each = " ".join(f"{option}{part}" for part in parts)
        return f"; give each in an option of its own, to a command that takes several: simdev bench {each}"
    base, _, nodes = name.partition("[")
    if base in known and (number := re.fullmatch(r"(?:nodes?=)?(\d+)\]", nodes)):
        return f"; did you mean '{base}[nodes={number[1]}]'?"
    if base in known and nodes and not nodes.endswith("]"):
        return f"; did you mean '{name}]'?"
    plain = {one.casefold(): one for one in reversed(known)}
    if name.casefold() in plain:
        return f"; did you mean {plain[name.casefold()]!r}?"
    near = [plain[one] for one in difflib.get_close_matches(base.casefold() or name, plain, n=1, cutoff=0.55)]
    within = str.startswith if len(name) == 1 else str.__contains__  # a size 4 is not meant by 18.4b
    longer = [one for one in known if within(one.casefold(), name.casefold())][:MOST_LIKE]
    if name and longer:  # h100: dgx-h100 or h100x16
        return f"; did you mean {_one_of(map(repr, longer))}?"
    if near or not known:
        return f"; did you mean {near[0]!r}?" if near else ""
    if what in LISTED and len(known) > MOST_LISTED:
        return f"; {LISTED[what]}"
    return f"; known: {', '.join(known)}"


def _one_of(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _defined_in(path: str) -> list[str]:
    """The first public functions of a Python file, which is read and not executed."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        with open(path, "rb") as file:
            tree = ast.parse(file.read(MOST_SOURCE))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        return [name for name in names if not name.startswith("_")][:MOST_LIKE]
    return []


class Infeasible(InvalidInput):
    """No placement can exist. The message names the ops, and the devices or memories that cannot hold them."""


class Unsupported(SimdevError):
    """The placer cannot handle the problem, or lacks an optional package: the run is skipped, and its row says why."""


class BudgetExhausted(SimdevError):
    """Raised by :meth:`simdev.placers.budget.Budget.evaluate` when the budget is used up."""


def need_memory(mib: int) -> None:
    """Raise :class:`MemoryError` under a limit on the address space (``ulimit -v``) that leaves less than ``mib`` MiB.

    To be called before libraries are loaded that in less memory end the process, or try again for ever.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        try:
            mmap.mmap(-1, mib << 20).close()
        except OSError:
            raise MemoryError(f"less than {mib} MiB are left") from None


def _rebuild(kind: type[InvalidInput], args: tuple[Any, ...], state: dict[str, Any]) -> InvalidInput:
    # Exceptions cross process borders; their constructors take other arguments than Exception.args.
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
