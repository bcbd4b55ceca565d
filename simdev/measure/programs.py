"""Steps that can be executed, the workers that execute them, and the placement problem of such a step."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simdev.errors import InvalidInput, Unsupported
from simdev.placers import registry
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Topology

if TYPE_CHECKING:
    from simdev.measure.execute.cases import Costs
    from simdev.measure.execute.program import Program


# Sizes at which a step takes 0.1 to 2 s on one core of a recent CPU.
SMALL: dict[str, dict[str, Any]] = {
    "inception-v3": {"batch": 2, "size": 139, "aux": False},
    "nmt": {"batch": 16, "length": 8, "units": 384, "vocabulary": 4000},
    "gnmt-4": {"batch": 32, "length": 8, "units": 384, "vocabulary": 4000},
    "transformer-xl-2": {"batch": 4, "length": 128, "memory": 128},
    "transformer-xl-4": {"batch": 2, "length": 64, "memory": 64},
    "wavenet-2x18": {"batch": 1, "length": 1024, "channels": 128, "skips": 128},
    "nasnet-a-mobile": {"batch": 4, "size": 96, "cells": 3, "aux": False},
    "amoebanet-d": {"batch": 2, "size": 128, "cells": 3, "filters": 96},
    "rnnlm": {"batch": 32, "length": 8, "units": 512, "vocabulary": 4000},
    "gpt2-medium": {"batch": 1, "length": 128, "layers": 4, "units": 512, "heads": 8, "vocabulary": 4000,
                    "precision": "f32"},
}  # fmt: skip


def need_torch() -> None:
    """Raise :class:`Unsupported` if PyTorch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise Unsupported("running a step requires PyTorch: pip install 'simdev[capture]'") from error


def load_program(entry: str, *, small: bool = False, seed: int = 0) -> Program:
    """Record the step of a workload id or of ``my_model.py:make_step``.

    ``small`` takes the parameters that the id does not give from :data:`SMALL`. Raises :class:`Unsupported` without
    PyTorch, and :class:`InvalidInput` if the entry is a graph file or has no small size.
    """
    need_torch()
    from simdev.graphs.capture import file_step, workload_step
    from simdev.measure.execute.record import record

    if registry.is_step_file(entry):
        return record(*file_step(entry), seed=seed)
    if registry.is_graph_file(entry):
        raise InvalidInput(
            "a graph file holds no kernels to run; name a workload or FILE.py:FUNCTION instead", source=entry
        )
    spec, params = registry.find_workload(entry)
    if small and spec.name not in SMALL:
        raise InvalidInput(f"there is no small size of this workload, only of {', '.join(SMALL)}", source=spec.name)
    return record(*workload_step(spec, {**(SMALL[spec.name] if small else {}), **params}), seed=seed)


def workers_of(topology: Topology) -> tuple[str, ...]:
    """The worker of each device of ``topology``, by the device's name: ``cpu0`` is core 0, ``cuda1`` is GPU 1.

    Raises :class:`InvalidInput` for any other name.
    """
    workers = []
    for device in topology.devices:
        kind = device.name.rstrip("0123456789")
        number = device.name[len(kind) :]
        if kind not in ("cpu", "cuda") or not number:
            raise InvalidInput(
                f"{device.name!r} is not a device of this computer, whose devices are called cpu0, cuda0 and so on; "
                "simdev profile writes such a topology",
                source=topology.name,
                field="device",
            )
        workers.append(f"{kind}:{number}")
    return tuple(workers)


def workers_named(names: list[str]) -> tuple[str, ...]:
    """Workers by the names on the command line: ``cpu`` is the first core of this process, ``cuda`` is GPU 0."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    first = {"cpu": f"cpu:{min(cores)}", "cuda": "cuda:0"}
    return tuple(first.get(name, name) for name in names)


def measured_problem(program: Program, topology: Topology, costs: Costs | None = None, policy: str = "fifo") -> Problem:
    """The placement problem of a program on ``topology``, with measured op costs if ``costs`` are given.

    The workspace of an op includes the memory that its calls hold for one another.
    """
    from simdev.measure.execute.cases import with_costs

    graph = replace(program.graph, op_workspace_bytes=program.workspace_bytes())
    problem = Problem.build(graph, topology, None, Rules(policy))
    return problem if costs is None else with_costs(problem, costs.alone)
