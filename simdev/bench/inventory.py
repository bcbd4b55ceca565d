"""Every file of a result folder, except the rows themselves: what is derived from the rows is computed again, what
belongs to no row is named, and so is whatever cannot be checked."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from simdev.bench import journal, plan_rows, rows
from simdev.bench.check import Difference, compare
from simdev.bench.matrix import parse_budget
from simdev.bench.plan_rows import PLANS, PlanRow
from simdev.bench.release import PACKAGE, SHEET, data_sheet
from simdev.bench.rows import RESULTS, Row
from simdev.bench.score import LEADERBOARD, RANKING, leaderboard, ranking
from simdev.bench.stored import is_registered, kept_machine, registered_placer
from simdev.errors import InvalidInput, counted, shortened
from simdev.files import TEMPORARY, files_below, parse_json, read_text, read_toml
from simdev.parallel.models import parallel_models, split_size
from simdev.placers import registry
from simdev.problem.graph_file import load_graph
from simdev.problem.placement_file import FILE as PLACEMENTS
from simdev.problem.placement_file import packed_keys, stored_placement
from simdev.problem.topology import kept_device_file, split_choices, split_nodes, topology_names
from simdev.shelf import parse_id

Note = Callable[[str], None]
FOR_READERS = (".md", ".png", ".svg", ".pdf", ".txt")  # text and pictures: no command reads a result from them
BOUND_FAILURES = ("timeout", "memory", "error")
ROUNDED = 0.001  # seconds of tables have three digits
LINK = "is a link: a result folder holds its files itself"
MOST_NAMED = 20  # faults of one file that are listed


def file_differences(folder: Path, found: list[Row | PlanRow], note: Note, *, rerun: bool = False) -> list[Difference]:
    """What is wrong with the files of a folder whose rows are ``found``. ``note`` gets a sentence on everything that is
    not checked although it may be there; with ``rerun``, the answers of placers and planners are."""
    results = [row for row in found if isinstance(row, Row)]
    plans = [row for row in found if isinstance(row, PlanRow)]
    wrong, seen, others = repeated(found), set(), files_below(folder)
    if not any((folder / schema.file).is_file() for schema in (RESULTS, PLANS)):
        wrong.append(Difference(folder.name, "", "", f"holds neither {RESULTS.file} nor {PLANS.file}"))
    for name, check in {
        RESULTS.file: lambda: _not_empty(RESULTS.file, results),
        PLANS.file: lambda: _not_empty(PLANS.file, plans),
        "leaderboard.csv": lambda: _table(folder, "leaderboard.csv", LEADERBOARD, leaderboard(results)),
        "ranking.csv": lambda: _table(folder, "ranking.csv", RANKING, ranking(results)),
        plan_rows.TABLES: lambda: _text(folder, plan_rows.TABLES, "\n".join([*plan_rows.markdown(plans), ""])),
        SHEET: lambda: _text(folder, SHEET, data_sheet([*map(plan_rows.as_row, found)]) if found else ""),
        "curves.csv": lambda: _curves(folder, "curves.csv", results, note),
        "plan_curves.csv": lambda: _curves(folder, "plan_curves.csv", plans, note),
        "journal.jsonl": lambda: _journal(folder, found, note),
        PLACEMENTS: lambda: _placements(folder, packed_keys(folder), PLACEMENTS, results),
    }.items():
        needed = (results and name in ("leaderboard.csv", "ranking.csv")) or (plans and name == plan_rows.TABLES)
        if (needed and name not in others) or (folder / name).is_file():
            seen.add(name)
            wrong += _limited(name, check)
            wrong += [Difference(name, "", "", LINK)] * (folder / name).is_symlink()
    read = []
    for name in others:
        if name in seen:
            continue
        if name == PACKAGE and (folder / name).is_file() and not (folder / name).is_symlink():
            note(f"the name that {PACKAGE} gives the board")  # simdev.bench.release compares all the rest of it
            continue
        faults, known = _other(folder, name, results, plans)
        wrong += faults
        if not known and name.endswith(FOR_READERS):
            read.append(name)
        elif not known:
            wrong.append(Difference(shortened(name, 200), "", "", "is not checked: no part of a result folder"))
    if read:
        more = f" and {len(read) - MOST_NAMED} more" if len(read) > MOST_NAMED else ""
        note(f"{', '.join(shortened(name, 60) for name in read[:MOST_NAMED])}{more}: for readers")
    _note_columns(results, plans, seen, rerun, note)
    return wrong


def repeated(found: list[Row | PlanRow]) -> list[Difference]:
    """Rows of one and the same run under two spellings, such as the parameters ``{}`` and ``{ }``: in the ranking, each
    would count. The reader refuses rows whose keys are equal."""
    seen: set[tuple] = set()
    wrong = []
    for row in found:
        key = type(row), *map(_meaning, row.key)
        if key in seen:
            wrong.append(Difference(shortened(" ".join(map(str, row.key)), 200), "", "", "the same run twice"))
        seen.add(key)
    return wrong


def _meaning(cell: object) -> object:
    """A cell of a key without what can be spelled in several ways."""
    with contextlib.suppress(InvalidInput, TypeError, ValueError, RecursionError):
        if isinstance(cell, str) and cell.startswith("{"):
            found = parse_json(cell, "cell")
            if set(found) == {"microbatches", "recomputes"}:  # what planners choose from: sets, however they are listed
                found = {key: sorted(set(values)) for key, values in found.items()}
            return json.dumps(found, sort_keys=True)
        if isinstance(cell, str) and "[" in cell:
            return _named(cell)
        if isinstance(cell, str) and "=" in cell:
            return parse_budget(cell)
    return cell


def _named(entry: str) -> str:
    """The id of a workload, model or machine in one spelling: parameters in order, without those that are defaults."""
    name, _, params = parse_id(entry)
    usual: dict = {"nodes": 1}
    model, size = split_size(name, models := parallel_models())
    if model and (not size or size in models[model].sizes):  # a workload's name may begin with that of a model
        usual |= models[model].parameters(size, {})
    if name in registry.workloads():
        usual |= registry.workloads()[name].defaults
    params = {key: int(value) if str(value).isdecimal() else value for key, value in sorted(params.items())}
    given = {key: value for key, value in params.items() if usual.get(key) != value}
    return f"{name}[{json.dumps(given)}]" if given else name


def _note_columns(results: list[Row], plans: list[PlanRow], seen: set[str], rerun: bool, note: Note) -> None:
    for schema, there in ((RESULTS, results), (PLANS, plans)):
        if there:
            note(f"{', '.join(schema.circumstantial)} of {schema.file}: where, when and with what a row was made")
            if rerun:
                continue
            solver, proof = ("placer", ", proof") if schema is RESULTS else ("planner", "")
            answer = f"that this version of this {solver} gives the answers of {schema.file}"
            given = "with these rules, params, budget, choices and seed"
            note(f"{answer} {given}, the evaluations{proof} and why runs have no score: only --rerun shows it")
    own = {row.workload for row in results if not is_registered(row.workload)}
    own |= {row.topology for row in results if split_nodes(row.topology)[0] not in topology_names()}
    own |= {row.cluster for row in plans if split_choices(row.cluster)[0] not in topology_names()}
    own |= {row.placer for row in results if registered_placer(row) is None}
    if own:
        names = ", ".join(shortened(ascii(name), 60) for name in sorted(own)[:MOST_NAMED])
        more = f" and {len(own) - MOST_NAMED} more" if len(own) > MOST_NAMED else ""
        note(f"whether the names say what they stand for: {names}{more}: of the author's own, not of simdev")
    outside = sum(not row.within_choices for row in plans)
    if outside:
        note(f"plans outside of their choices: {outside}; a planner may look further, --rerun shows whether it did")
    failed = sum(row.bound_method in BOUND_FAILURES for row in results)
    if failed:
        rows = counted(failed, "row")
        note(f"the missing lower bounds of {rows}: by the column bound_method, none was found in time or memory")
    for name in sorted(seen & {"curves.csv", "plan_curves.csv"}):
        note(f"the points of {name}: they fit their rows, but nothing can show that a search took this way")


def _limited(name: str, check: Callable[[], Iterator[Difference] | list[Difference]]) -> list[Difference]:
    """The first faults that a check finds; a file that cannot be read is one fault."""
    found: list[Difference] = []
    try:
        for fault in check():
            found.append(fault)
            if len(found) == MOST_NAMED:
                return [*found, Difference(name, "", "", "further faults are not listed")]
    except InvalidInput as error:
        found.append(Difference(name, "", "", str(error)))
    return found


def _not_empty(name: str, found: list) -> list[Difference]:
    return [] if found else [Difference(name, "", "", "holds no row")]


def _table(folder: Path, name: str, columns: tuple[str, ...], table: list[dict[str, str]]) -> Iterator[Difference]:
    """Cells of a derived table that differ from the table computed from the rows."""
    stored = [cells for _, cells in rows.read_csv(folder / name, columns)]
    if len(stored) != len(table):
        yield Difference(name, "lines", str(len(stored)), str(len(table)))
        return
    for number, (left, right) in enumerate(zip(stored, table, strict=True), 2):
        yield from compare(f"{name} line {number}", left, right, columns)


def _text(folder: Path, name: str, text: str) -> Iterator[Difference]:
    stored, fresh = read_text(folder / name).splitlines(), text.splitlines()
    for number, (left, right) in enumerate(zip(stored, fresh, strict=False), 1):
        if left != right:
            yield Difference(f"{name} line {number}", "text", left, right)
    if len(stored) != len(fresh):
        yield Difference(name, "lines", str(len(stored)), str(len(fresh)))


def _curves(folder: Path, name: str, found: list, note: Note) -> Iterator[Difference]:
    """What cannot be the curve of a row: of no row, not falling, beyond the evaluations or seconds of the row, below
    its bound. A search may return another answer than its best; that is noted."""
    better = 0
    known = {row.key: plan_rows.as_row(row) for row in found}
    for key, points in journal.read_curves(folder / name).items():
        row = known.get(key)
        title = f"{name}: {shortened(' '.join(map(str, key)), 200)}"
        if row is None:
            yield Difference(title, "", "", "belongs to no row")
            continue
        used, seconds, times = zip(*points, strict=True)
        if list(used) != sorted(used) or list(seconds) != sorted(seconds):
            yield Difference(title, "", "", "goes back")
        if any(later >= earlier for earlier, later in zip(times, times[1:], strict=False)):
            yield Difference(title, "", "", "does not fall")
        if row.evaluations is not None and used[-1] > row.evaluations:
            yield Difference(title, "evaluations", str(used[-1]), f"at most {row.evaluations}")
        if row.place_seconds is not None and seconds[-1] > row.place_seconds + ROUNDED:
            yield Difference(title, "seconds", f"{seconds[-1]:.3f}", f"at most {row.place_seconds:.3f}")
        better += row.step_ns is not None and times[-1] < row.step_ns
        if row.lower_bound_ns is not None and times[-1] < row.lower_bound_ns:
            bound = f"at least {rows.seconds_text(row.lower_bound_ns)}"
            yield Difference(title, "step_time_s", rows.seconds_text(times[-1]), bound)
    if better:
        note(f"{better} curves of {name} end below their rows: these runs returned another answer than their best")


def _journal(folder: Path, found: list[Row | PlanRow], note: Note) -> Iterator[Difference]:
    """Entries of the journal that differ from the tables, and runs that only one of the two has."""
    path = folder / "journal.jsonl"
    entries, torn = journal.read_journal(path)
    if torn:
        note("journal.jsonl: its last line was cut short")
    journalled: dict[tuple, tuple[Row | PlanRow, list]] = {}
    bounds: dict[tuple, tuple] = {}
    again = 0
    for entry in entries:
        if entry["kind"] == "bound":
            of, ns, method = journal.read_bound(entry, path)
            bounds[of] = ns, method
        else:
            row, curve = journal.read_row(entry, path)
            again += row.key in journalled
            journalled[row.key] = row, curve
    if again:
        note(f"journal.jsonl: {counted(again, 'run')} executed again; the last of each run counts")
    there = {row.key: row for row in found}
    for key in sorted(journalled.keys() ^ there.keys(), key=str):
        title = shortened(" ".join(map(str, key)), 200)
        where = "only in the journal" if key in journalled else "not in the journal"
        yield Difference(f"journal.jsonl: {title}", "", "", where)
    curves = {
        key: points
        for name in journal.KEYS
        if (folder / name).is_file()
        for key, points in journal.read_curves(folder / name).items()
    }
    for key in journalled.keys() & there.keys():
        title = f"journal.jsonl: {shortened(' '.join(map(str, key)), 200)}"
        row, curve = journalled[key]
        cells = there[key].cells()
        yield from compare(title, row.cells(), cells, tuple(cells))
        shown = [(used, f"{seconds:.3f}", ns) for used, seconds, ns in journal.visible(curve)]
        table = [(used, f"{seconds:.3f}", ns) for used, seconds, ns in journal.visible(curves.get(key, []))]
        if shown != table:
            yield Difference(title, "curve", f"{len(shown)} points", f"{len(table)} other points")
    yield from _bounds(bounds, found, note)


def _bounds(bounds: dict[tuple, tuple], found: list[Row | PlanRow], note: Note) -> Iterator[Difference]:
    """Bounds of the journal that differ from those of the rows that share them."""
    users: dict[tuple, list[tuple]] = {}
    for row in found:
        if isinstance(row, Row):
            of = (row.fingerprint, row.cost_hash, row.rules)
            of = of if row.objective == "step" else (*of, row.objective)
            users.setdefault(of, []).append((row.lower_bound_ns, row.bound_method))
        elif row.step_ns is not None and not row.several_meshes:
            of = tuple(map(str, (row.model, row.cluster, row.batch, row.framework, row.choices)))
            users.setdefault(of, []).append((row.bound_ns, row.bounded))
    for of, bound in bounds.items():
        title = f"journal.jsonl: bound of {shortened(' '.join(of), 200)}"
        if of not in users:
            note(f"{title}: it belongs to no row")
        elif bound not in users[of]:
            yield Difference(title, "bound", str(bound), str(users[of][0]))


def _placements(folder: Path, keys: list[str], name: str, results: list[Row]) -> Iterator[Difference]:
    """Placements that are not what their hash says, or that no row names."""
    wanted = {row.placement for row in results}
    for key in keys:
        if key not in wanted:
            yield Difference(name, "", "", f"placement {key} belongs to no row")
        else:
            stored_placement(folder, key)


def _other(folder: Path, name: str, results: list[Row], plans: list[PlanRow]) -> tuple[list[Difference], bool]:
    """The faults of a file in a folder that rows refer to, and whether it is such a file."""
    path = folder / name
    if path.is_symlink():
        return [Difference(shortened(name, 200), "", "", LINK)], True
    if not path.is_file():
        return [Difference(shortened(name, 200), "", "", "is neither a file nor a folder")], True
    if name == ".lock":
        return ([] if path.stat().st_size == 0 else [Difference(name, "", "", "is not empty")]), True
    if name.endswith(TEMPORARY):
        return [Difference(shortened(name, 200), "", "", "was left by a bench that was killed")], True
    if match := re.fullmatch(r"placements/([0-9a-f]{1,64})\.npz", name):
        return _limited(name, lambda: _placements(folder, [match[1]], name, results)), True
    if match := re.fullmatch(r"graphs/([0-9a-f]{1,64})\.npz", name):
        return _limited(name, lambda: _graph(path, name, match[1], results)), True
    if re.fullmatch(r"machines/[0-9a-f]{1,64}\.(toml|npz)", name):
        named = {row.topology for row in results} | {row.cluster for row in plans}
        known = path in _machines({kept_machine(folder, topology) for topology in named})
        return ([] if known else [Difference(name, "", "", "belongs to no row")]), True
    return [], False


def _machines(files: set[Path]) -> set[Path]:
    """The machines that rows name, and the device files that these machines name."""
    found = set(files)
    for file in filter(Path.is_file, files):
        with contextlib.suppress(InvalidInput):  # the rows of this machine report it
            kinds = read_toml(file).get("kind", {})
            for kind in kinds.values() if isinstance(kinds, dict) else ():
                name = kind.get("calibrated", "") if isinstance(kind, dict) else ""
                if isinstance(name, str) and name.endswith(".toml"):
                    device = Path(kept_device_file(str(file), name))
                    found |= {device, device.with_suffix(".npz")}
    return found


def _graph(path: Path, name: str, fingerprint: str, results: list[Row]) -> Iterator[Difference]:
    if fingerprint not in {row.fingerprint for row in results}:
        yield Difference(name, "", "", "belongs to no row")
    elif load_graph(path).fingerprint != fingerprint:
        yield Difference(name, "", "", "holds another graph")
