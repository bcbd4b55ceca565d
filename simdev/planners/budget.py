"""What a planner may spend: simulated plans, or seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

from simdev.errors import BudgetExhausted, Unsupported
from simdev.planners.bounds import choice_bounds_ns
from simdev.planners.estimate import Estimate
from simdev.planners.evaluate import Evaluator
from simdev.planners.job import Choice
from simdev.planners.outcome import Outcome


class PlanBudget:
    """Simulates plans for a planner, until its evaluations or its seconds are used up.

    A plan that was evaluated before costs nothing. ``best`` is the fastest plan that fits of all that were evaluated;
    ``tried`` holds the outcome of each. A budget of ``evaluations`` gives the same result on every machine; one of
    ``seconds`` does not. ``tell(used, best)`` is called after each evaluation
    and each estimate. ``screen``: a plan that is estimated to need far more memory than there is
    (:meth:`Evaluator.hopeless`) counts as evaluated without being captured.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        evaluations: float = math.inf,
        seconds: float = math.inf,
        tell: Callable[[int, Outcome | None], None] = lambda used, best: None,
        screen: bool = False,
    ):
        self.evaluator, self.evaluations, self.seconds, self.tell = evaluator, evaluations, seconds, tell
        self.job, self.screen = evaluator.job, screen
        self.tried: dict[Choice, Outcome] = {}
        self.estimated: dict[Choice, Estimate] = {}
        self.curve: list[tuple[int, float, int]] = []
        self.best: Outcome | None = None
        self.phase, self.done, self.total = "", 0, 0  # what is under way, plans done and plans to do
        self.phase_began = self._started = time.monotonic()

    @property
    def used(self) -> int:
        """Number of different plans that were evaluated."""
        return len(self.tried)

    @property
    def elapsed(self) -> float:
        """Seconds since the budget was granted."""
        return time.monotonic() - self._started

    @property
    def open(self) -> bool:
        """True while there is an evaluation left."""
        return self.used < self.evaluations and self.elapsed < self.seconds

    def answer(self, planner: str) -> Choice:
        """The best plan, for the planner of that name to return. Without one, raises :class:`BudgetExhausted` if the
        seconds are over, else :class:`Unsupported`."""
        if self.best is not None:
            return self.best.choice
        if self.elapsed >= self.seconds:
            raise BudgetExhausted(f"{self.seconds:g} seconds were over after {self.used} plans")
        raise Unsupported(f"{planner}: none of {self.used} plans fits")

    def estimates(self, choices: Iterable[Choice]) -> dict[Choice, Estimate]:
        """Quick estimates of choices (:mod:`simdev.planners.estimate`), which cost no evaluation; of the first choices
        only if the seconds are used up before the last one."""
        found = {}
        choices = list(choices)
        self._begin("estimating", len(choices))
        for one in self.evaluator.estimates(choices):
            found[one.choice] = self.estimated[one.choice] = one
            self.done += 1
            self.tell(self.used, self.best)
            if self.elapsed >= self.seconds:
                break
        return found

    def bounds(self, below_ns: float) -> dict[Choice, float]:
        """Step times that the choices of the job cannot beat (:func:`simdev.planners.bounds.choice_bounds_ns`), which
        cost no evaluation. Raises :class:`BudgetExhausted` if the seconds are used up before the last one."""
        found = {}
        self._begin("bounding", sum(1 for _ in self.job.choices()))
        for choice, bound in choice_bounds_ns(self.evaluator, below_ns):
            found[choice] = bound
            self.done += 1
            self.tell(self.used, self.best)
            if self.elapsed >= self.seconds:
                raise BudgetExhausted(f"{self.seconds:g} seconds were over after {self.used} plans")
        return found

    def _begin(self, phase: str, total: int) -> None:
        self.phase, self.done, self.total, self.phase_began = phase, 0, total, time.monotonic()

    def evaluate(self, choice: Choice) -> Outcome:
        """Simulate a plan. Raises :class:`BudgetExhausted` if nothing is left, :class:`InvalidInput` for a choice that
        does not suit the job."""
        return self.evaluate_many([choice])[0]

    def evaluate_many(self, choices: Iterable[Choice]) -> list[Outcome]:
        """Simulate a batch, in order. If fewer evaluations than plans are left,
        only the first plans are simulated. Raises :class:`BudgetExhausted` if none is left."""
        choices = list(choices)
        new = list(dict.fromkeys(choice for choice in choices if choice not in self.tried))
        if new and not self.open:
            raise BudgetExhausted(f"the budget is used up after {self.used} plans")
        room = self.evaluations - self.used
        self._begin("simulating", int(min(room, len(new))))
        for outcome in self._outcomes(new if len(new) <= room else new[: int(room)]):
            self.tried[outcome.choice] = outcome
            self.done += 1
            if outcome.fits and (self.best is None or outcome < self.best):
                self.best = outcome
                self.curve.append((self.used, self.elapsed, outcome.time_ns))
            self.tell(self.used, self.best)
            if self.elapsed >= self.seconds:
                break
        return [self.tried[choice] for choice in choices if choice in self.tried]

    def screen_no_more(self) -> None:
        """Forget the plans that were not captured because of an estimate, and capture all from now on."""
        self.screen = False
        self.tried = {choice: one for choice, one in self.tried.items() if one.bound_ns}

    def _outcomes(self, choices: list[Choice]) -> Iterator[Outcome]:
        """The outcomes of choices, in order."""
        hopeless = {choice: self.evaluator.hopeless(choice) for choice in choices} if self.screen else {}
        rest = self.evaluator.outcomes(choice for choice in choices if hopeless.get(choice) is None)
        for choice in choices:
            yield hopeless.get(choice) or next(rest)
