"""The speed of the learned placers: samples per second, and the simulator's share of the time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np

from simdev.files import write_text
from simdev.placers import registry
from simdev.placers.budget import Budget
from simdev.studies.reproduce.lab import Lab, LabCase, sizes

TITLE = "Speed of the learned placers"


SIZES = sizes(
    small=dict(evaluations=500, workloads=("inception-v3", "nmt"), topology="p100x4"),
    tiny=dict(evaluations=40, workloads=("transformer-xl-2",)),
    # Small leaves open how the speed falls with the size of the graph.
    full=dict(workloads=("inception-v3", "nmt", "nasnet-a-large", "gnmt-8")),
)


class TimedBudget(Budget):
    """A budget that also sums up the processor seconds spent in the simulator."""

    simulating_s = 0.0

    def evaluate_many(self, devices, **options):
        return self._counted(super().evaluate_many, devices, **options)

    def try_moves(self, *arguments, **options):
        return self._counted(super().try_moves, *arguments, **options)

    def move(self, *arguments, **options):
        return self._counted(super().move, *arguments, **options)

    def _counted(self, simulate, *arguments, **options):
        started = time.process_time()
        try:
            return simulate(*arguments, **options)
        finally:
            self.simulating_s += time.process_time() - started


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    learned = [name for name, spec in registry.placers().items() if spec.family == "learned"]
    lines = [_timed(lab, name, workload) for workload in lab.size.workloads for name in learned]
    yield [
        f"The table shows processor seconds on one core for {lab.size.evaluations} evaluations on "
        f"`{lab.size.topology}`. *First* includes the time to compile (or to load what an earlier process compiled). "
        "*Again* is a second run in the same process; samples per second and the simulator's share are those of this "
        "second run.\n",
        lab.table("speed", lines),
    ]


def _timed(lab: Lab, name: str, workload: str) -> dict:
    """One line of the table. It is measured once and stored in the folder ``speed/``."""
    spec, (_, params) = lab.used(name), registry.find_placer(name)
    path = lab.folder / "speed" / f"{name}-{spec.version}-{workload}.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    lab.observer.note(f"timing {name} on {workload}")
    problem = LabCase(workload, lab.size.topology).problem()
    seconds = []
    for seed in (0, 1):
        budget = TimedBudget(problem, evaluations=lab.size.evaluations)
        started = time.process_time()
        spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **params)
        seconds.append(time.process_time() - started)
    line = {
        "placer": name,
        "workload": workload,
        "ops": problem.graph.n_ops,
        "evaluations": budget.used,
        "first, s": f"{seconds[0]:.2f}",
        "again, s": f"{seconds[1]:.2f}",
        "samples/s": f"{budget.used / seconds[1]:,.0f}",
        "in the simulator, %": f"{100 * budget.simulating_s / seconds[1]:.0f}",
    }
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(line) + "\n")
    return line
