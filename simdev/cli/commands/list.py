"""``simdev list``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from simdev.cli.app import command
from simdev.cli.options import JsonOption
from simdev.cli.tables import print_json


class Listing(StrEnum):
    workloads = "workloads"
    topologies = "topologies"
    placers = "placers"
    planners = "planners"
    models = "models"


@command("list")
def list_(
    what: Annotated[Listing | None, typer.Argument(help="Which shelf (default: all).")] = None,
    as_json: JsonOption = False,
) -> None:
    """List workloads, topologies, placers, planners and parallel models."""
    listing = {shelf: _LISTS[shelf]() for shelf in ([what.value] if what else _LISTS)}
    if as_json:
        print_json(listing)
        return
    for shelf, lines in listing.items():
        print(f"{shelf}:")
        width = max((len(line["name"]) for line in lines), default=0)
        for line in lines:
            rest = "  ".join(str(value) for key, value in line.items() if key != "name" and value not in ("", {}, []))
            print(f"  {line['name']:{width}}  {rest}".rstrip())


def _list_workloads() -> list[dict]:
    from simdev.placers import registry

    return [
        {
            "name": spec.name,
            "family": spec.family,
            "params": dict(spec.defaults),
            "graph": "ships" if registry.graph_path(spec.name).is_file() else "needs capture",
        }
        for spec in registry.workloads().values()
    ]


def _list_topologies() -> list[dict]:
    from simdev.problem.topology import load_topology, topology_names

    return [{"name": name, "description": load_topology(name).description} for name in topology_names()]


def _list_planners() -> list[dict]:
    from simdev.planners import planners

    return [
        {
            "name": spec.name,
            "version": f"v{spec.version}",
            "family": spec.family,
            "params": dict(spec.defaults),
            "searches": "simulates plans" if spec.searches else "",
            "source": spec.source,
        }
        for spec in planners().values()
    ]


def _list_models() -> list[dict]:
    from simdev.parallel import parallel_models

    return [
        {"name": model.name, "sizes": list(model.sizes), "axes": ["pp", *model.axes], "source": model.source}
        for model in parallel_models().values()
    ]


def _list_placers() -> list[dict]:
    from simdev.placers import registry

    return [
        {
            "name": spec.name,
            "version": f"v{spec.version}",
            "family": spec.family,
            "params": dict(spec.defaults),
            "memory": "" if spec.memory_aware else "ignores memory",
            "repeatable": "" if spec.repeatable else "may stop by the clock",
            "source": spec.source,
        }
        for spec in registry.placers().values()
    ]


_LISTS = {
    "workloads": _list_workloads,
    "topologies": _list_topologies,
    "placers": _list_placers,
    "planners": _list_planners,
    "models": _list_models,
}
