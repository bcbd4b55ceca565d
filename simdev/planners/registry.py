"""Finds planners by name on their shelf ``baselines/planners/``, and in files of the user (``my_planners.py:name``)."""

from __future__ import annotations

from pathlib import Path

from simdev.errors import InvalidInput, UnknownName
from simdev.placers.registry import load_shelf, parse_id
from simdev.planners.planner import SHELF, PlannerSpec


def planners() -> dict[str, PlannerSpec]:
    """Every registered planner, by name."""
    load_shelf("baselines")
    return dict(sorted(SHELF.items()))


def find_planner(entry: str) -> tuple[PlannerSpec, dict]:
    """The planner and the parameters that an id names. Raises :class:`UnknownName` or :class:`InvalidInput`."""
    name, version, params = parse_id(entry)
    path, colon, inside = name.rpartition(".py:")
    known = _from_file(f"{path}.py") if colon else planners()
    spec = known.get(inside if colon else name)
    if spec is None:
        raise UnknownName("planner", inside if colon else name, known)
    if version is not None and version != spec.version:
        raise InvalidInput(f"version {version} is not here; this is version {spec.version}", source=f"planner {name}")
    for key in params:
        if key not in spec.defaults:
            raise UnknownName("parameter", key, spec.defaults, source=f"planner {name}")
    return spec, params


def _from_file(path: str) -> dict[str, PlannerSpec]:
    """The planners that the user's own file registers. The file is executed."""
    from simdev.graphs.capture import import_file

    if not Path(path).is_file():
        raise InvalidInput("no such file", source=path)
    before = planners()
    SHELF.clear()
    try:
        import_file(Path(path))
        found = dict(SHELF)
    finally:
        SHELF.clear()
        SHELF.update(before)
    if not found:
        raise InvalidInput("registers no planner; put @planner over the function that plans", source=path)
    return found
