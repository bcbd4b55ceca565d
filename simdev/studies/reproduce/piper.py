"""Tarnawski et al., NeurIPS 2021 (Piper): the published plans of ResNet-50 from its public inputs.

The inputs are those of msr-fiddle/piper; nothing is fetched. The planner ``piper`` follows the same program where
simdev can execute what it plans (``baselines/planners/piper.py`` names the departures); here it is the program itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.piper import equal_stages, piper, read_piper
from simdev.studies.reproduce.lab import Lab, Size

TITLE = "Tarnawski et al. 2021: Piper's plans with data, tensor and pipeline parallelism"
SIZES = {"tiny": Size(plans=1), "small": Size(plans=8), "full": Size(plans=8)}  # the paper prints eight
GIB = 2**30
BANDWIDTH, MICROBATCHES = 25 * GIB, 7680  # of the published ResNet-50 experiments; bytes per second


@dataclass(frozen=True)
class PublishedPlan:
    """Published times per sample in ms: Piper's plan and that of equal stages; None if nothing fits."""

    devices: int
    gib: float
    piper: float
    equal: float | None


RESNET50 = (
    PublishedPlan(8, 16, 58.558, 108.885),
    PublishedPlan(8, 8, 63.434, 164.159),
    PublishedPlan(8, 4, 73.493, None),
    PublishedPlan(16, 16, 29.279, 54.443),
    PublishedPlan(16, 8, 31.634, 82.080),
    PublishedPlan(16, 4, 35.333, None),
    PublishedPlan(16, 2, 76.521, None),
    PublishedPlan(32, 1.5, 50.977, None),
)


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    if lab.data is None or not (lab.data / "resnet.json").is_file():
        raise InvalidInput("holds no resnet.json (msr-fiddle/piper)", source=lab.data or "experiment piper")
    layers = read_piper(lab.data / "resnet.json")
    plans, lines = RESNET50[: lab.size.plans], []
    for done, plan in enumerate(plans):
        lab.observer.tick(done, len(plans), [f"{plan.devices} devices of {plan.gib:g} GiB"])
        machine = plan.devices, plan.gib * GIB, BANDWIDTH, MICROBATCHES
        found, equal = _seconds(piper, layers, machine), _seconds(equal_stages, layers, machine)
        lines.append(
            {
                "devices": str(plan.devices),
                "GiB each": f"{plan.gib:g}",
                "published": _number(plan.piper),
                "found": _number(found),
                "equal stages, published": _number(plan.equal),
                "equal stages, found": _number(equal),
            }
        )
    yield ["## ResNet-50\n", NOTE, lab.table("resnet50", lines)]


NOTE = """Time per sample in ms at 25 GiB/s and 7,680 microbatches of a batch; a dash: nothing fits. *Equal stages* have
equal numbers of layers and one data degree.
"""


def _seconds(program, layers, machine) -> float | None:
    """Time per sample of a plan, in the unit of the file; None if nothing fits."""
    try:
        return program(layers, *machine).seconds
    except Unsupported:
        return None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
