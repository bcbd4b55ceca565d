"""The placer protocol: a function from a problem to a placement, and the decorator that registers it.

A placer is one function in one file of ``baselines/``, or in a file of yours::

    from simdev import Placement, placer

    @placer("all-on-first", version=1, family="mine")
    def all_on_first(problem, *, rng, budget):
        return Placement(np.zeros(problem.graph.n_ops, int))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import numpy as np

from simdev.errors import BudgetExhausted, InvalidInput, Unsupported, needs_package
from simdev.placers.budget import Budget
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.shelf import Shelf, check_parameters


class PlacerFunction(Protocol):
    """What a placer receives and returns. ``rng`` is its only source of randomness, ``budget`` its only simulator."""

    def __call__(
        self, problem: Problem, /, *, rng: np.random.Generator, budget: Budget, **params: Any
    ) -> Placement: ...


Function = TypeVar("Function", bound=Callable[..., Placement])

SHELF: Shelf[PlacerSpec] = Shelf("placer", "baselines", "simdev.placers", "placer")


@dataclass(frozen=True)
class PlacerSpec:
    """A registered placer: its function and what the bench must know about it.

    ``version`` is raised when the placements of the placer change, and ``source`` cites the paper (section) or library
    that it follows. ``defaults`` are its parameters, which an id sets: ``name[param=value]``. ``needs`` names optional
    packages; if one is missing, the run is skipped and its row says why.

    ``memory_aware`` is False if the placer ignores memory by design; its placements may then not fit.
    ``searches`` is True if the placer spends evaluations of the simulator. ``repeatable`` is False if its solver may
    stop by the clock, so that another machine may find another placement. ``same_processor`` is True if the placer
    computes in floating point with compiled vector code (JAX, BLAS): another model of processor may round differently,
    and the search then takes another path. ``learner(problems, **params)`` builds what ``simdev train`` trains, for
    placers that learn a policy.
    """

    name: str
    version: int
    family: str
    function: PlacerFunction
    memory_aware: bool = True
    repeatable: bool = True
    same_processor: bool = False
    searches: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    source: str = ""
    learner: Callable[..., Any] | None = None

    @property
    def missing(self) -> list[str]:
        """The packages of ``needs`` that are not installed."""
        return [package for package in self.needs if find_spec(package) is None]

    def place(self, problem: Problem, *, rng: np.random.Generator, budget: Budget, **params: Any) -> Placement:
        """Run the placer and check the placement that it returns.

        A placer that runs into the end of the budget returns the best placement that the budget saw. Raises
        :class:`Unsupported` if the placer cannot handle the problem, :class:`BudgetExhausted` if the budget ended
        before any placement fitted, and :class:`InvalidInput` for an unknown parameter or a wrong result.
        """
        check_parameters(f"placer {self.name}", self.defaults, params)
        if self.missing:
            raise Unsupported(f"placer {self.name} {needs_package(self.missing[0])}")
        try:
            placement = self.function(problem, rng=rng, budget=budget, **{**self.defaults, **params})
        except BudgetExhausted:
            if budget.best is None:
                raise
            placement = Placement(budget.best, budget.best_priority)
        if not isinstance(placement, Placement):
            raise InvalidInput(f"returned {type(placement).__name__}, expected Placement", source=f"placer {self.name}")
        placement.check(problem, source=f"placer {self.name}")
        return placement


def placer(
    name: str,
    *,
    version: int,
    family: str,
    memory_aware: bool = True,
    repeatable: bool = True,
    same_processor: bool = False,
    searches: bool = False,
    defaults: Mapping[str, Any] | None = None,
    needs: tuple[str, ...] = (),
    source: str = "",
    learner: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:
    """Register the decorated function as the placer ``name``; the arguments are the fields of :class:`PlacerSpec`.

    Raises :class:`InvalidInput` if another module has registered the name.
    """

    def register(function: Function) -> Function:
        spec = PlacerSpec(
            name=name,
            version=version,
            family=family,
            function=function,
            memory_aware=memory_aware,
            repeatable=repeatable,
            same_processor=same_processor,
            searches=searches,
            defaults=dict(defaults or {}),
            needs=tuple(needs),
            source=source,
            learner=learner,
        )
        SHELF.add(spec)
        return function

    return register
