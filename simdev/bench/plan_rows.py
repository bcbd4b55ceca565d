"""Rows of planners: one for each model, cluster, batch, planner and seed, in ``plans.csv`` of a result folder.

Exact columns are the same on every machine with the same version of PyTorch (whose parallel libraries the programs are
captured from) and are compared on verification; the others say where and when a row was made. Times are whole
nanoseconds in the row and seconds with nine digits in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from simdev.bench.rows import RESULTS, Row, Schema, check_params, entry_id
from simdev.errors import InvalidInput, quoted
from simdev.files import markdown_table, parse_json, write_text
from simdev.planners.job import RECOMPUTE, Choice, choice_from

FILE, TABLES = "plans.csv", "plans.md"
KEY = ("model", "cluster", "batch", "framework", "choices", "planner", "params", "budget", "seed")
TIMES = {"step_time_s": "step_ns", "bound_s": "bound_ns"}
STATUSES = ("ok", "skipped", "timeout", "memory", "error")
ONE_MESH, ANY_MESHES = "one mesh", "any meshes"  # what plans a bound holds for
MOST_SIZES = 64  # microbatch sizes that planners may choose from
FIGURES = ("step_ns", "bound_ns", "peak_bytes", "program")  # of a run with a score; empty in every other row


@dataclass(frozen=True)
class PlanRow:
    """One run of a planner. ``choices`` (JSON) holds the microbatch sizes and kinds of recomputation that planners
    could choose, ``plan`` (JSON) is what the planner chose, ``program`` the digest of its captured stages.
    ``bound_ns`` is a step time that no plan with one mesh for all stages beats; or that no plan at all beats, if the
    row's own plan has several. ``None`` is an empty cell."""

    model: str
    cluster: str
    batch: int
    framework: str
    choices: str
    planner: str
    version: int
    params: str
    budget: int
    seed: int
    status: str
    error: str = ""
    plan: str = ""
    step_ns: int | None = None
    bound_ns: int | None = None
    peak_bytes: int | None = None
    evaluations: int | None = None
    program: str = ""
    plan_seconds: float | None = None
    cpu_seconds: float | None = None
    torch: str = ""
    commit: str = ""
    utc: str = ""
    machine: str = ""
    versions: str = ""

    @property
    def key(self) -> tuple:
        return tuple(getattr(self, name) for name in KEY)

    @property
    def choice(self) -> Choice:
        """What the planner chose. Raises :class:`InvalidInput`."""
        return parse_choice(self.plan)

    @property
    def several_meshes(self) -> bool:
        """Whether the stages of the plan have meshes of their own."""
        return bool(self.plan) and bool(self.choice.stage_meshes)

    @property
    def within_choices(self) -> bool:
        """Whether ``choices`` holds the microbatch size and the recomputation of the plan, if there is one."""
        sizes, kinds = parse_choices(self.choices)
        if not self.plan:
            return True
        return self.choice.microbatch in sizes and {self.choice.recompute, *self.choice.stage_recompute} <= {*kinds}

    @property
    def bounded(self) -> str:
        """Which plans the row's bound holds for: plans with ..."""
        return "" if not self.bound_ns else ANY_MESHES if self.several_meshes else ONE_MESH

    @property
    def entry(self) -> str:
        """The planner's id with its parameters."""
        return entry_id(self.planner, self.params)

    @property
    def title(self) -> str:
        return f"{self.model} on {self.cluster}: {self.planner}"

    @property
    def digest(self) -> str:
        """SHA-256 (hex, 16 characters) of the exact columns as written."""
        return PLANS.digest(self.cells())

    def cells(self) -> dict[str, str]:
        """The row as text, by column, without the digest."""
        return PLANS.cells(self)

    def with_bound(self, ns: int | None, method: str) -> PlanRow:
        """The row with the lower bound of plans with one mesh, if its own plan has one."""
        return self if ns is None or self.step_ns is None or self.several_meshes else replace(self, bound_ns=ns)


def parse_choices(text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The microbatch sizes and the kinds of recomputation that planners may choose. Raises :class:`InvalidInput`."""
    found = parse_json(text, FILE, "choices")
    if not isinstance(found, dict) or set(found) != {"microbatches", "recomputes"}:
        raise InvalidInput("expected an object with microbatches and recomputes", source=FILE, field="choices")
    sizes, kinds = found["microbatches"], found["recomputes"]
    if not isinstance(sizes, list) or not 0 < len(sizes) <= MOST_SIZES or not all(type(n) is int for n in sizes):
        raise InvalidInput("expected microbatches as whole numbers", source=FILE, field="choices")
    if not all(0 < size < 1 << 31 for size in sizes):
        raise InvalidInput("expected microbatches from 1 to 2^31", source=FILE, field="choices")
    if not isinstance(kinds, list) or len(kinds) > len(RECOMPUTE) or not all(kind in RECOMPUTE for kind in kinds):
        raise InvalidInput(f"expected recomputes of {', '.join(RECOMPUTE)}", source=FILE, field="choices")
    return tuple(sizes), tuple(kinds)


def parse_choice(text: str) -> Choice:
    """A plan from the cell ``plan``. Raises :class:`InvalidInput`."""
    found = parse_json(text, FILE, "plan")
    if not isinstance(found, dict):
        raise InvalidInput("expected an object", source=FILE, field="plan")
    return choice_from(found)


def _check_cell(name: str, text: str) -> None:
    if name == "status" and text not in STATUSES:
        raise ValueError(f"unknown status {quoted(text)}")
    if name == "params":
        check_params(text)
    if name == "choices":
        parse_choices(text)
    if name == "plan" and text:
        parse_choice(text)


CIRCUMSTANTIAL = ("plan_seconds", "cpu_seconds", "torch", "commit", "utc", "machine", "versions")
_COLUMN = {field: column for column, field in TIMES.items()}
EXACT = tuple(_COLUMN.get(f.name, f.name) for f in fields(PlanRow) if f.name not in CIRCUMSTANTIAL)
ABSENT = {"machine": "", "versions": "", "cpu_seconds": ""}  # columns that older folders lack
PLANS = Schema(PlanRow, FILE, EXACT, CIRCUMSTANTIAL, TIMES, ABSENT, _check_cell, "planner")
COLUMNS = PLANS.columns


def write_plan_rows(folder: Path, rows: Iterable[PlanRow]) -> None:
    """Write ``plans.csv`` and ``plans.md``, each in one step."""
    rows = sorted(rows, key=lambda row: row.key)
    folder.mkdir(parents=True, exist_ok=True)
    PLANS.write(folder / FILE, rows)
    write_text(folder / TABLES, "\n".join([*markdown(rows), ""]))


def read_plan_rows(folder: Path, check_digest: bool = True) -> list[PlanRow]:
    """Read ``plans.csv`` (:meth:`Schema.read`)."""
    return PLANS.read(folder / FILE, check_digest=check_digest)


def read_folder(folder: Path) -> list[Row | PlanRow]:
    """The rows of a result folder: those of placers (``results.csv``), then those of planners (``plans.csv``). Raises
    :class:`InvalidInput` if there is neither table, or for a malformed cell."""
    there = [schema for schema in (RESULTS, PLANS) if (folder / schema.file).is_file()]
    if not there:
        missing = "No such file or directory" if not folder.is_dir() else f"holds neither {RESULTS.file} nor {FILE}"
        if folder.is_file():
            missing = f"is a file; give the folder that holds {RESULTS.file} or {FILE}"
        raise InvalidInput(missing, source=folder)
    return [row for schema in there for row in schema.read(folder / schema.file)]


def full_name(workload: str, rows: Iterable[Row]) -> str:
    """The job that ``workload`` means among rows of :func:`as_row`: a model is enough if it has one batch."""
    names = {row.workload for row in rows}
    mine = sorted(name for name in names if name.startswith(f"{workload}, batch "))
    return mine[0] if workload not in names and len(mine) == 1 else workload


def as_row(row: Row | PlanRow) -> Row:
    """A row of a planner in the columns of ``results.csv``, so that tables, curves and comparisons serve both.

    The job takes the place of workload and topology; the host, and what planners may choose if that is not usual, the
    place of the rules. The objective is ``plan``, ``placement`` is a digest of the plan. A row of a placer is returned
    as it is.
    """
    if isinstance(row, Row):
        return row
    usual = parse_choices(row.choices) == parse_choices(choices_of(row.model))
    return Row(
        workload=f"{row.model}, batch {row.batch}",
        topology=row.cluster,
        rules=row.framework if usual else f"{row.framework} {row.choices}",
        placer=row.planner,
        version=row.version,
        params=row.params,
        budget=f"evaluations={row.budget}",
        seed=row.seed,
        fingerprint="",
        cost_hash="",
        status=row.status,
        error=row.error,
        feasible=True if row.step_ns is not None else None,
        step_ns=row.step_ns,
        simulated_ns=row.step_ns,
        lower_bound_ns=row.bound_ns,
        bound_method=row.bounded,
        peak_memory_bytes=row.peak_bytes,
        evaluations=row.evaluations,
        placement=hashlib.sha256(row.plan.encode()).hexdigest()[:16] if row.plan else "",
        place_seconds=row.plan_seconds,
        cpu_seconds=row.cpu_seconds,
        machine=row.machine,
        versions=row.versions,
        commit=row.commit,
        utc=row.utc,
        objective="plan",
    )


def markdown(rows: list[PlanRow]) -> list[str]:
    """A table for each model, cluster and batch, the best plan first."""
    lines = ["# Parallel plans", ""]
    instances: dict[tuple[str, str, int], list[PlanRow]] = {}
    for row in rows:
        instances.setdefault((row.model, row.cluster, row.batch), []).append(row)
    for (model, cluster, batch), mine in instances.items():
        mine.sort(key=lambda row: (row.step_ns is None, row.step_ns or 0, row.planner))
        lines += [f"## {model} on {cluster}, {batch} sequences", ""]
        table = []
        for row in mine:
            if row.step_ns is None:
                table.append([row.entry, row.error or row.status, "", "", "", "", ""])
                continue
            gap = f"{row.step_ns / row.bound_ns - 1:.1%}" if row.bound_ns else ""
            peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}"
            figures = f"{row.step_ns / 1e9:.3f}", gap, row.bounded, peak, str(row.evaluations)
            table.append([row.entry, str(row.choice) if row.plan else "", *figures])
        header = ["planner", "plan", "step s", "above the bound", "of plans with", "peak GiB", "plans tried"]
        lines += [*markdown_table(header, table), ""]
    return lines


# Models and clusters of the board, with the sequences of a step and the microbatch sizes that planners may choose.
A100, A100S, H100S, B200S, MANY, MOST, L40S = (
    "dgx-a100", "dgx-a100[nodes=8]", "dgx-h100[nodes=8]", "dgx-b200[nodes=8]", "dgx-h100[nodes=64]",
    "dgx-h100[nodes=512]", "l40sx8-pcie",
)  # fmt: skip
BOARD = (
    ("llama3-70b", (H100S, A100S, B200S, MANY), 1024, (1,)),
    ("mpt-7b", (A100, A100S, H100S, L40S), 1024, (1, 4)),
    ("mpt-70b", (A100S, H100S, MANY), 1024, (1, 2)),
    ("gpt-1.3b", (A100, A100S, H100S, L40S), 512, (1, 4)),
    ("llama3-8b", (A100, A100S, H100S, L40S), 512, (1, 2)),
    ("bert-large", (A100, A100S, H100S, L40S), 4096, (8, 32)),
    ("vit-22b", (A100S, H100S, MANY), 4096, (4, 16)),
    ("mixtral-8x7b", (A100S, H100S, MANY), 1024, (1,)),
    ("deepseek-v2lite", (A100, A100S, H100S), 1024, (1,)),
    ("llama3-405b", (MANY,), 1024, (1,)),
    ("llama3-405b", (MOST,), 4096, (1,)),
    ("qwen3-32b", (H100S, B200S), 1024, (1, 2)),
    ("gpt-oss-120b", (H100S, B200S), 1024, (1,)),
    ("deepseek-v3", (MOST,), 8192, (1,)),
)
RECOMPUTES = ("none", "selective", "full")


def choices_of(model: str) -> str:
    """The JSON of what planners may choose for a model: the board's own sizes, or microbatches of 1 and 2."""
    sizes = next((sizes for name, _, _, sizes in BOARD if name == model), (1, 2))
    return json.dumps({"microbatches": sizes, "recomputes": RECOMPUTES})
