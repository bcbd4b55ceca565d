"""What can go wrong, as types. The command line turns each into one sentence on stderr and exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SimdevError(Exception):
    """Base of every error that simdev raises on purpose."""


class InvalidInput(SimdevError, ValueError):
    """A graph, topology, placement or file that breaks its contract.

    ``source`` is the file (or object) at fault and ``field`` the part of it; both lead the message.
    """

    def __init__(self, message: str, *, source: object = None, field: str | None = None):
        where = ": ".join(str(part) for part in (source, field) if part is not None)
        super().__init__(f"{where}: {message}" if where else message)
        self.message, self.source, self.field = message, source, field

    def __reduce__(self):
        return _rebuild, (type(self), self.args, self.__dict__)


class UnknownName(InvalidInput):
    """A workload, topology, placer or device that does not exist; the message suggests the nearest."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, source: object = None, field: str | None = None):
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else (f"; known: {', '.join(known)}" if known else "")
        super().__init__(f"unknown {what} {name!r}{hint}", source=source, field=field)


class Infeasible(InvalidInput):
    """No placement can exist: the message names the ops, and the devices or memories that they are too much for."""


class Unsupported(SimdevError):
    """This placer cannot handle this problem, or lacks an optional package: the run is skipped with the reason."""


class BudgetExhausted(SimdevError):
    """Raised by :meth:`simdev.placers.placer.Budget.evaluate` when the evaluations or seconds granted are used up."""


def _rebuild(kind, args, state):
    # Exceptions cross process borders; their constructors take other arguments than Exception.args.
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
