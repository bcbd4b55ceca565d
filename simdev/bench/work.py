"""What a bench runs: a task and an answer. Placers answer a problem with a placement, planners a job with a plan.

:class:`Work` is what the two differ in. Everything else (processes, limits, journal, resumption, progress, Dask) is the
same code: :mod:`simdev.bench.bench`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from simdev.bench.provenance import circumstances
from simdev.bench.workers import Limits, limit_process
from simdev.errors import SimdevError, Unsupported
from simdev.problem.placement import Placement


@dataclass(frozen=True)
class RunOutcome:
    """A finished run: its row, the placement if there is one, the anytime curve (evaluations, seconds, step ns)."""

    row: Any  # a Row or a PlanRow
    placement: Placement | None = None
    curve: tuple[tuple[int, float, int], ...] = ()


class Unsuccessful(Exception):
    """Raised in a process that runs share, for a run that has no score: the next run must not find what it left."""

    @property
    def outcome(self) -> RunOutcome:
        return self.args[0]


class Work(ABC):
    """The runs of placers, or of planners. The only objects are :data:`simdev.bench.run.PLACING` and
    :data:`simdev.bench.plan_run.PLANNING`; they have no state, so that a worker process can be given their methods.

    A *run* has ``key``, ``entry`` (the id of the solver with its parameters), ``instance`` (a tuple of names) and
    ``seed``; an *instance* has ``n_ops`` (how large it is), ``problem`` (what shares a bound), ``bound_ns`` and
    ``bound_method``; a *row* has ``key``, ``status``, ``error`` and ``with_bound``.
    """

    name: str
    run: type
    instance: type

    @abstractmethod
    def find(self, entry: str) -> tuple[Any, dict]:
        """The solver (placer or planner) and the parameters that an id names."""

    @abstractmethod
    def load(self, name: tuple, out: str) -> Any:
        """The instance of a name; what does not ship with simdev is copied to the folder ``out``."""

    @abstractmethod
    def bound(self, instance: Any, limits: Limits) -> tuple[int, str]:
        """A lower bound in ns and its method. Called in a worker process."""

    def warm_up(self, entry: str, limits: Limits) -> None:
        """Run a solver on something tiny, so that what it compiles is on the disk. Called in a worker process."""
        raise NotImplementedError

    @abstractmethod
    def execute(self, run: Any, instance: Any) -> RunOutcome:
        """Let the solver answer and score the answer, in this process and without limits. An exception of the solver
        becomes the row's status."""

    @abstractmethod
    def blank(self, run: Any, instance: Any) -> Any:
        """The row of a run before the run: an error without a message."""

    @abstractmethod
    def holds(self, row: Any, instance: Any) -> bool:
        """Whether a row was made from this instance by this version of the solver."""

    def bounded(self, instance: Any) -> bool:
        """Whether a bound of the instance exists."""
        return True

    def needs_warm_up(self, entry: str) -> bool:
        """Whether what the solver compiles must be on the disk before several processes run it."""
        return False

    def kind(self, run: Any) -> str:
        """Runs of a kind that is not empty share a process in turn, as long as they succeed."""
        return ""

    def order(self, entry: str) -> tuple:
        """Solvers in the order in which they start: quick ones first, those that learn last."""
        spec, _ = self.find(entry)
        return getattr(spec, "learner", None) is not None, spec.searches, entry

    def rank(self, run: Any, instance: Any) -> tuple:
        """Of the runs that wait, those that probably take longest start first, so that no long one is left for the end.

        The runs that share a process take turns.
        """
        learns, searches, _ = self.order(run.entry)
        return 1, not learns, not searches, self.kind(run), -instance.n_ops

    def execute_limited(self, run: Any, instance: Any, limits: Limits) -> RunOutcome:
        """Execute in a worker process, where only the solver can raise a KeyboardInterrupt: it is a row, too."""
        limit_process(limits)
        try:
            outcome = self.execute(run, instance)
        except KeyboardInterrupt as error:
            outcome = RunOutcome(failure(self.blank(run, instance), error))
        return replace(outcome, row=replace(outcome.row, **self.circumstances()))

    def execute_shared(self, run: Any, instance: Any, limits: Limits) -> RunOutcome:
        """:meth:`execute_limited` in a process that executes other runs too. Raises :class:`Unsuccessful` if the row is
        not ``ok``."""
        outcome = self.execute_limited(run, instance, limits)
        if outcome.row.status != "ok":
            raise Unsuccessful(outcome)
        return outcome

    def failed(self, run: Any, instance: Any, status: str, error: str) -> RunOutcome:
        """The row of a run that gave no answer."""
        row = self.blank(run, instance)
        return RunOutcome(replace(row, status=status, error=error, **self.circumstances()))

    def circumstances(self) -> dict[str, str]:
        """The columns that say where, when and with what a row was made."""
        return circumstances()


def failure(blank: Any, error: BaseException) -> Any:
    """The row of a solver that raised ``error``."""
    if isinstance(error, Unsupported):
        return replace(blank, status="skipped", error=one_line(error))
    if isinstance(error, MemoryError):
        return replace(blank, status="memory", error=one_line(error) or "no memory was left")
    text = one_line(error) if isinstance(error, SimdevError) else f"{type(error).__name__}: {one_line(error)}"
    return replace(blank, status="error", error=text)


def one_line(error: BaseException) -> str:
    """The message of an exception on one line of at most 300 characters, all of which can be printed and stored."""
    try:
        words = str(error).split()
    except Exception:  # an exception whose text raises
        words = []
    return printable(" ".join(words))


def printable(text: str) -> str:
    """``text`` on one line of at most 300 characters, all of which can be printed and stored."""
    text = " ".join(str(text).split())[:300]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)[:300]
