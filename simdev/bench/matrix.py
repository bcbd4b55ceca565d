"""The plan of a bench: which runs there are, in which order, with which budget and seed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from simdev.bench import rows
from simdev.bench.objective import parse_objective
from simdev.errors import InvalidInput, UnknownName, quoted
from simdev.placers import registry
from simdev.problem.problem import Rules
from simdev.problem.topology import load_topology, topology_names

DEFAULT_RULES = "fifo/fifo/dataflow"


@dataclass(frozen=True)
class NamedBudget:
    """What ``--budget NAME`` stands for: the budget of a run, its limits, and the default workloads and machines."""

    budget: str
    seconds: float
    memory_bytes: int
    workloads: tuple[str, ...]
    topologies: tuple[str, ...]


SMALL = ("amoebanet-d-small", "inception-v3", "nasnet-a-mobile", "nmt", "transformer-xl-2", "wavenet-2x18")
SIX = ("amoebanet-d", "inception-v3", "nasnet-a-large", "nmt", "transformer-xl-2", "wavenet-2x18")
TWELVE = (*SIX, "dlrm", "gnmt-4", "gnmt-8", "gpt2-medium", "rnnlm", "vit-l")
MACHINES = ("k80x4", "p100x4", "v100x8-dgx1")
BUDGETS = {
    "quick": NamedBudget("evaluations=500", 120, 4 << 30, SMALL, ("p100x4",)),
    "standard": NamedBudget("evaluations=2000", 900, 6 << 30, TWELVE, MACHINES),
    "long": NamedBudget("evaluations=100000,seconds=600", 1800, 6 << 30, TWELVE, MACHINES),
    "full": NamedBudget("evaluations=20000", 7200, 12 << 30, ("all",), ("all",)),
}


@dataclass(frozen=True, order=True)
class Run:
    """One cell of the plan. ``seed`` counts repetitions; the generator's seed comes from the whole key."""

    workload: str
    topology: str
    rules: str
    placer: str
    params: str
    budget: str
    seed: int
    objective: str = "step"

    @property
    def entropy(self) -> int:
        """Seed of the run's generator: any row can be run again alone."""
        key = json.dumps(self.key[:-1] if self.objective == "step" else self.key)
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")

    @property
    def key(self) -> tuple:
        """The key of its row."""
        return tuple(getattr(self, name) for name in rows.KEY)

    @property
    def entry(self) -> str:
        return rows.entry_id(self.placer, self.params)

    @property
    def instance(self) -> tuple[str, str, str, str]:
        return self.workload, self.topology, self.rules, self.objective

    def __str__(self) -> str:
        return f"{self.workload} on {self.topology}: {self.entry}" + (f" #{self.seed}" if self.seed else "")


def plan(
    workloads: Iterable[str] = (),
    topologies: Iterable[str] = (),
    placers: Iterable[str] = ("all",),
    *,
    budget: str = "quick",
    seeds: int = 1,
    rules: str = DEFAULT_RULES,
    objective: str = "step",
) -> list[Run]:
    """The sorted runs: every workload x topology x placer x seed. Empty lists mean the defaults of a named budget.

    Raises :class:`UnknownName` or :class:`InvalidInput` for a name, parameter, budget, rule or objective that does not
    exist.
    """
    named = BUDGETS.get(budget, BUDGETS["quick"])
    spent = BUDGETS[budget].budget if budget in BUDGETS else budget
    parse_budget(spent)
    parse_objective(objective).check(parse_rules(rules))
    if seeds < 1:
        raise InvalidInput(f"{seeds} is not a number of repetitions", source="seeds")
    workloads = _expand(workloads, named.workloads, registry.workloads)
    topologies = _expand(topologies, named.topologies, topology_names)
    placers = _expand(placers, ("all",), registry.placers)
    for name in (*workloads, *topologies, *placers):
        if not name.isprintable():  # rows of it could not be read
            raise InvalidInput(f"{quoted(name)} holds characters that cannot be printed", source="plan")
    for workload in workloads:
        if not registry.is_file(workload):
            registry.find_workload(workload)
    for topology in topologies:
        load_topology(topology)
    runs = set()
    for placer in placers:
        spec, params = registry.find_placer(placer)
        name, _, _ = registry.parse_id(placer)
        text = json.dumps(params, sort_keys=True)
        runs |= {
            Run(workload, topology, rules, name, text, spent, seed, objective)
            for workload in workloads
            for topology in topologies
            for seed in range(seeds)
        }
    return sorted(runs)


class Grant(NamedTuple):
    """What a budget grants; what it does not limit is infinite. ``processor``: its seconds are those of the processors
    that the process of the run uses, else of the clock on the wall."""

    evaluations: float
    seconds: float
    processor: bool


def parse_budget(text: str) -> Grant:
    """What ``evaluations=N``, ``seconds=S``, ``processor=S``, or evaluations and one of the others grant."""
    granted: dict[str, float] = {}
    for part in text.split(","):
        what, _, amount = part.partition("=")
        with contextlib.suppress(ValueError):
            if what == "evaluations" and int(amount) >= 0:
                granted.setdefault(what, int(amount))
            timed = what in ("seconds", "processor") and granted.keys() <= {"evaluations"}
            if timed and 0 <= float(amount) < float("inf"):
                granted.setdefault(what, float(amount))
    if not granted or len(granted) != text.count(",") + 1:
        if re.search(r"=-\d", text):
            raise InvalidInput(f"{text!r} is negative", source="budget")
        known = [*BUDGETS, "evaluations=N", "seconds=S", "processor=S", "evaluations=N,seconds=S"]
        raise UnknownName("budget", text, [f"evaluations={text}"] if text.isdecimal() else known)
    seconds = granted.get("seconds", granted.get("processor", math.inf))
    return Grant(granted.get("evaluations", math.inf), seconds, "processor" in granted)


def repeatable(budget: str) -> bool:
    """Whether a run under ``budget`` is the same on every machine: only evaluations limit it."""
    return parse_budget(budget).seconds == math.inf


def time_limit(budget: str) -> float:
    """Seconds that a run may take in all: twice its own seconds and a minute, or what the named budget says."""
    if budget in BUDGETS:
        return BUDGETS[budget].seconds
    seconds = parse_budget(budget).seconds
    return 2 * seconds + 60 if seconds < math.inf else BUDGETS["standard"].seconds


def parse_rules(text: str) -> Rules:
    """Rules from ``order/contention/runtime``."""
    parts = text.split("/")
    if len(parts) != 3:
        raise InvalidInput(f"{text!r} is not order/contention/runtime", source="rules")
    return Rules(*parts)


def _expand(given: Iterable[str], default: tuple[str, ...], known: Callable) -> list[str]:
    return [name for entry in (list(given) or default) for name in (known() if entry == "all" else [entry])]
