"""A board release: a submission that also holds its checksums, the schema of its tables, and a data sheet.

``datapackage.json`` follows the Data Package standard (datapackage.org, version 2): a resource for each file, with its
size, its SHA-256 and, for a table, the name and type of each column. ``DATASHEET.md`` answers the questions of Gebru et
al.: Datasheets for Datasets, Communications of the ACM 64(12), 2021.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from simdev.bench.journal import CURVES, PLAN_CURVES
from simdev.bench.plan_rows import KEY as PLAN_KEY
from simdev.bench.plan_rows import PLANS
from simdev.bench.rows import ABSENT, COLUMNS, KEY, PACE, Row, read_csv
from simdev.bench.score import LEADERBOARD, RANKING
from simdev.errors import InvalidInput, shortened
from simdev.files import MAX_DOCUMENT, files_below, read_bytes, read_json

PACKAGE, SHEET = "datapackage.json", "DATASHEET.md"
TABLES = {
    "results.csv": COLUMNS, "leaderboard.csv": LEADERBOARD, "ranking.csv": RANKING, "curves.csv": CURVES,
    "plans.csv": PLANS.columns, "plan_curves.csv": PLAN_CURVES,
}  # fmt: skip
KEYS = {"results.csv": KEY, "plans.csv": PLAN_KEY}
INTEGERS = {
    "version", "seed", "peak_memory_bytes", "comm_bytes", "evaluations", "runs", "solved", "rank", "place", "instances",
    "cases", "wins", "common_with_first", "batch", "peak_bytes",
}  # fmt: skip
NUMBERS = {
    "step_time_s", PACE, "simulated_s", "lower_bound_s", "place_seconds", "cpu_seconds", "best_time_s", "gap",
    "best_known_s", "ratio_to_best", "speedup_vs_single_gpu", "speedup_vs_expert", "mean_rank", "geomean_ratio_to_best",
    "ratio_to_first", "seconds", "bound_s", "plan_seconds",
}  # fmt: skip
FORMS = {
    "integer": re.compile(r"\d{1,20}"),
    "number": re.compile(r"-?\d{1,20}(\.\d{1,20})?([eE][-+]?\d{1,3})?"),
    "boolean": re.compile(r"true|false"),
    "string": re.compile(r".*", re.DOTALL),
}
MOST_NAMED = 10  # faults of a kind that are listed


def kind(column: str) -> str:
    """The type of a column, in the words of the Table Schema standard."""
    if column == "feasible":
        return "boolean"
    return "integer" if column in INTEGERS else "number" if column in NUMBERS else "string"


def package(name: str, files: Mapping[str, bytes]) -> dict:
    """The content of ``datapackage.json`` for ``files`` of a result folder: their content by path."""
    resources = []
    for path, content in files.items():
        resource = {
            "name": re.sub(r"[^a-z0-9]+", "-", path.lower()),
            "path": path,
            "bytes": len(content),
            "hash": f"sha256:{hashlib.sha256(content).hexdigest()}",
        }
        if path in TABLES:
            header = content.partition(b"\n")[0].decode().split(",")  # a table may lack optional columns
            fields = [{"name": column, "type": kind(column)} for column in header]
            keys = {"primaryKey": list(KEYS[path])} if path in KEYS else {}
            resource |= {"type": "table", "format": "csv", "schema": {"fields": fields, **keys}}
        resources.append(resource)
    return {
        "$schema": "https://datapackage.org/profiles/2.0/datapackage.json",
        "name": re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-") or "board",
        "title": "A leaderboard of simdev",
        "licenses": [{"name": "MIT"}],
        "resources": resources,
    }


def data_sheet(found: list[Row]) -> str:
    """The data sheet of a board with the rows ``found``, as Markdown."""
    cases = {row.case for row in found}
    placers, commits = sorted({row.entry for row in found}), sorted({row.commit for row in found if row.commit})
    dirty = sum(row.commit.endswith("-dirty") for row in found)
    times = sorted(row.utc for row in found if row.utc)
    seeds, budgets = [row.seed for row in found], sorted({row.budget for row in found})
    first, last = (times[0], times[-1]) if times else ("unknown", "unknown")
    states = f"{len(commits)} state{'s' if len(commits) != 1 else ''} of the code ({', '.join(commits) or 'unknown'})"
    planned = sum(row.objective == "plan" for row in found)
    tables = ["`results.csv`"] * (planned < len(found)) + ["`plans.csv`"] * (planned > 0)
    answers = ["`placements.jsonl` the device of every operation"] * (planned < len(found))
    answers += ["`plans.csv` each plan itself"] * (planned > 0)
    repeated = f"seeds {min(seeds)} to {max(seeds)}" if min(seeds) < max(seeds) else f"seed {min(seeds)}"
    return f"""# Data sheet

## Motivation

The board compares algorithms that place the operations of neural networks on devices, or that plan how a model is
trained on many devices. Every row can be recomputed.

## Composition

{len(found)} rows in {" and ".join(tables)}, one for each run: {len(placers)} placers or planners on
{len(cases)} cases, {repeated}, budgets {", ".join(budgets)}.
Placers and planners: {", ".join(placers)}.

Tables that are derived from the rows, and the best step time after each number of evaluations, lie beside them. Of the
answers, {" and ".join(answers)}. `{PACKAGE}` names the type of every column and the SHA-256
of every file; simdev's `leaderboard/README.md` explains the columns. The rows hold no personal data.

## Collection

The rows were written by `simdev bench` between {first} and {last}, at {states}. {dirty} rows come from a tree with
uncommitted changes. Times are simulated, not measured; durations of operations come from simdev's device files, which
are fitted to public measurements.

## Use

`simdev verify ARCHIVE` recomputes every row from its stored placement with a second engine, and checks the lower
bounds, the checksums and the schema. It executes nothing that the archive names. A ranking holds for these workloads,
machines, budgets and rules only.

## Licences

Rows and placements: MIT, as simdev. Graphs are captured from simdev's own descriptions of published models. The notices
of the measured data that device files were fitted to stand in those files.

## How to cite

As simdev's `CITATION.cff` says, with the SHA-256 of this archive.
"""


def faults(folder: Path) -> list[tuple[str, str]]:
    """What breaks the schema of the tables or, in a release, its checksums: pairs of a file and a sentence."""
    found = [fault for name in TABLES for fault in _schema_faults(folder / name)]
    if (folder / PACKAGE).is_file():
        found += _checksum_faults(folder)
    return found


def _schema_faults(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        return []
    found = []
    for line, cells in read_csv(path, TABLES[path.name], {**ABSENT, **PLANS.absent}):
        for column, cell in cells.items():
            if cell and not FORMS[kind(column)].fullmatch(cell):
                found.append((path.name, f"line {line}, {column}: {shortened(repr(cell), 80)} is no {kind(column)}"))
        if len(found) >= MOST_NAMED:
            break
    return found


def _checksum_faults(folder: Path) -> list[tuple[str, str]]:
    document = read_json(folder / PACKAGE)
    resources = document.get("resources") if isinstance(document, dict) else None
    if not isinstance(resources, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in resources
    ):
        raise InvalidInput("expected a list of objects, each with a path", source=folder / PACKAGE, field="resources")
    named = {entry["path"]: entry for entry in resources}
    there = {name for name in files_below(folder) if (folder / name).is_file()} - {PACKAGE, SHEET}
    found = [(shortened(name, 200), f"is not named in {PACKAGE}") for name in sorted(there - named.keys())]
    found += [(shortened(name, 200), f"is named in {PACKAGE}, but absent") for name in sorted(named.keys() - there)]
    files = {name: read_bytes(folder / name, MAX_DOCUMENT) for name in [*named, *sorted(there)] if name in there}
    fresh = package(str(document.get("name")), files)
    whole = json.dumps(fresh, indent=1) + "\n"
    for entry in fresh.pop("resources"):
        name = entry["path"]
        if name in named and named[name].get("hash") != entry["hash"]:
            found.append((shortened(name, 200), f"has another SHA-256 than {PACKAGE} says"))
        elif name in named and named[name] != entry:
            found.append((shortened(name, 200), f"is described otherwise than it is in {PACKAGE}"))
    for key in sorted(map(str, (document.keys() | fresh.keys()) - {"resources", "name"})):
        if document.get(key) != fresh.get(key):
            found.append((PACKAGE, f"{shortened(key, 100)}: not what simdev writes"))
    if len(resources) != len(named):
        found.append((PACKAGE, "names a file twice"))
    if not found and whole.encode() != read_bytes(folder / PACKAGE):  # a member twice, of which readers see one
        found.append((PACKAGE, "is not written as simdev writes it"))
    return found[:MOST_NAMED]
