"""The planner protocol: a function from a job to a choice, and the decorator that registers it.

A planner is one function in one file of ``baselines/planners/``, or in a file of yours::

    from simdev import Choice, Mesh, planner

    @planner("all-sharded", version=1, family="mine")
    def all_sharded(job, *, rng, budget):
        return Choice(Mesh({"dp_shard": job.ranks}))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from simdev.errors import BudgetExhausted, InvalidInput
from simdev.planners.budget import PlanBudget
from simdev.planners.job import Choice, Job
from simdev.shelf import Shelf, check_parameters


class PlannerFunction(Protocol):
    """What a planner receives and returns. ``rng`` is its only source of randomness, ``budget`` its only simulator."""

    def __call__(self, job: Job, /, *, rng: np.random.Generator, budget: PlanBudget, **params: Any) -> Choice: ...


Function = TypeVar("Function", bound=Callable[..., Choice])

SHELF: Shelf[PlannerSpec] = Shelf("planner", "baselines", "simdev.planners", "planner")


@dataclass(frozen=True)
class PlannerSpec:
    """A registered planner.

    ``version`` is raised when its plans change. ``source`` cites the paper (section), ``departures`` says what the
    planner does differently. ``searches`` is True if it spends evaluations of the budget; a planner that does not may
    return a plan that does not fit. ``defaults`` are its parameters, which an id sets: ``name[param=value]``.
    """

    name: str
    version: int
    family: str
    function: PlannerFunction
    searches: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)
    source: str = ""
    departures: tuple[str, ...] = ()

    def plan(self, job: Job, *, rng: np.random.Generator, budget: PlanBudget, **params: Any) -> Choice:
        """Run the planner and check its choice.

        A planner that runs into the end of the budget returns the best plan that the budget saw. Raises
        :class:`Unsupported` if the planner cannot handle the job, :class:`BudgetExhausted` if the budget ended before
        any plan fitted, and :class:`InvalidInput` for an unknown parameter or a wrong result.
        """
        check_parameters(f"planner {self.name}", self.defaults, params)
        try:
            choice = self.function(job, rng=rng, budget=budget, **{**self.defaults, **params})
        except BudgetExhausted:
            if budget.best is None:
                raise
            choice = budget.best.choice
        if not isinstance(choice, Choice):
            raise InvalidInput(f"returned {type(choice).__name__}, expected Choice", source=f"planner {self.name}")
        job.plan(choice)
        return choice


def planner(
    name: str,
    *,
    version: int,
    family: str,
    searches: bool = False,
    defaults: Mapping[str, object] | None = None,
    source: str = "",
    departures: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Register the decorated function as the planner ``name``; the arguments are the fields of :class:`PlannerSpec`.

    Raises :class:`InvalidInput` if another module has registered the name.
    """

    def register(function: Function) -> Function:
        SHELF.add(PlannerSpec(name, version, family, function, searches, dict(defaults or {}), source, departures))
        return function

    return register


def planners() -> dict[str, PlannerSpec]:
    """Every registered planner, by name."""
    return SHELF.load()


def find_planner(entry: str) -> tuple[PlannerSpec, dict[str, Any]]:
    """The planner and the parameters that an id names, also in a file of the user (``my_planners.py:name``), which is
    executed. Raises :class:`UnknownName` or :class:`InvalidInput`."""
    return SHELF.find(entry)
