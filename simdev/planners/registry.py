"""Finds planners by name: the shipped ones, those of other packages, and those in files of the user."""

from __future__ import annotations

from typing import Any

from simdev.planners.planner import SHELF, PlannerSpec


def planners() -> dict[str, PlannerSpec]:
    """Every registered planner, by name."""
    return SHELF.load()


def find_planner(entry: str) -> tuple[PlannerSpec, dict[str, Any]]:
    """The planner and the parameters that an id names, also in a file of the user (``my_planners.py:name``), which is
    executed. Raises :class:`UnknownName` or :class:`InvalidInput`."""
    return SHELF.find(entry)
