"""One public measured training run, as the sets of :mod:`simdev.studies.training_runs` give it."""

from __future__ import annotations

from dataclasses import dataclass

from simdev.parallel import Plan
from simdev.parallel.typed_plan import TypedPlan


@dataclass(frozen=True)
class TrainingRun:
    """One measured run: ``group`` is the model that it belongs to, ``typed`` what ``simdev simulate-plan`` is asked,
    ``step_ns`` its measured step time, ``peak_bytes`` the measured memory of the fullest rank (0: not measured)."""

    source: str
    name: str
    group: str
    typed: TypedPlan
    step_ns: float
    peak_bytes: float = 0.0

    @property
    def plan(self) -> Plan:
        return self.typed.plan
