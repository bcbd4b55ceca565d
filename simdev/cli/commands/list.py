"""``simdev list``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from simdev.cli.app import command
from simdev.cli.options import JsonOption
from simdev.cli.tables import print_json
from simdev.errors import InvalidInput, UnknownName
from simdev.shelf import Shelf


@command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="workloads, topologies, placers, planners, models, or a file of your own, such as my_placers.py "
            "(default: every shelf).",
            autocompletion=lambda incomplete: [shelf for shelf in _LISTS if shelf.startswith(incomplete)],
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List workloads, topologies, placers, planners and parallel models, or what a Python file registers."""
    if what and what.endswith(".py"):
        listing = _of_file(what)
    elif what and what not in _LISTS:
        raise UnknownName("shelf", what, _LISTS)
    else:
        listing = {shelf: _LISTS[shelf]() for shelf in ([what] if what else _LISTS)}
    if as_json:
        print_json(listing)
        return
    for shelf, lines in listing.items():
        print(f"{shelf}:")
        width = max((len(line["name"]) for line in lines), default=0)
        for line in lines:
            rest = "  ".join(str(value) for key, value in line.items() if key != "name" and value not in ("", {}, []))
            print(f"  {line['name']:{width}}  {rest}".rstrip())


def _of_file(path: str) -> dict[str, list[dict]]:
    """What a file registers, shelf by shelf. The file is executed."""
    from simdev.graphs.parallel_model import SHELF as MODELS
    from simdev.graphs.workload import SHELF as WORKLOADS
    from simdev.placers.placer import SHELF as PLACERS
    from simdev.planners.planner import SHELF as PLANNERS

    shelves: dict[str, tuple[Shelf[Any], Callable[[dict], list[dict]]]] = {
        "workloads": (WORKLOADS, _list_workloads),
        "placers": (PLACERS, _list_placers),
        "planners": (PLANNERS, _list_planners),
        "models": (MODELS, _list_models),
    }
    found = {name: lines(entries) for name, (shelf, lines) in shelves.items() if (entries := shelf.in_file(path))}
    if not found:
        decorators = ", ".join(f"@{shelf.decorator}" for shelf, _ in shelves.values())
        raise InvalidInput(f"registers nothing; put one of {decorators} over a function", source=path)
    return found


def _list_workloads(entries: dict | None = None) -> list[dict]:
    from simdev.placers import registry

    return [
        {
            "name": spec.name,
            "family": spec.family,
            "params": dict(spec.defaults),
            "graph": "ships" if registry.graph_path(spec.name).is_file() else "needs capture",
        }
        for spec in (entries or registry.workloads()).values()
    ]


def _list_topologies() -> list[dict]:
    from simdev.problem.topology import load_topology, topology_names

    return [{"name": name, "description": load_topology(name).description} for name in topology_names()]


def _list_planners(entries: dict | None = None) -> list[dict]:
    from simdev.planners import planners

    return [
        {**_head(spec), "searches": "simulates plans" if spec.searches else "", "source": spec.source}
        for spec in (entries or planners()).values()
    ]


def _head(spec) -> dict:
    """What the lists of placers and planners begin with."""
    return {
        "name": spec.name,
        "version": f"v{spec.version}",
        "family": spec.family,
        "params": dict(spec.defaults),
    }


def _list_models(entries: dict | None = None) -> list[dict]:
    from simdev.parallel import parallel_models

    return [
        {"name": model.name, "sizes": list(model.sizes), "axes": ["pp", *model.axes], "source": model.source}
        for model in (entries or parallel_models()).values()
    ]


def _list_placers(entries: dict | None = None) -> list[dict]:
    from simdev.placers import registry

    return [
        {
            **_head(spec),
            "memory": "" if spec.memory_aware else "ignores memory",
            "repeatable": "" if spec.repeatable else "may stop by the clock",
            "source": spec.source,
        }
        for spec in (entries or registry.placers()).values()
    ]


_LISTS = {
    "workloads": _list_workloads,
    "topologies": _list_topologies,
    "placers": _list_placers,
    "planners": _list_planners,
    "models": _list_models,
}
