"""One law for every table: each column is forged, with a digest and derived tables that fit, and verification must find
it or say that it does not check it."""

import base64
import contextlib
import csv
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from small_board import small_board

from simdev.bench import inventory, journal, rows, score, verify, workers
from simdev.bench.journal import journal_line, read_journal
from simdev.bench.objective import parse_objective
from simdev.bench.plan_rows import PLANS, read_plan_rows, write_plan_rows
from simdev.bench.rows import RESULTS
from simdev.errors import InvalidInput
from simdev.parallel.capture import kept

LEADERBOARD = Path(__file__).parents[2] / "leaderboard"
pytestmark = pytest.mark.usefixtures("at_once")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("law")
    small_board(folder)
    return folder


def found_or_named(folder, file, column):
    """Whether verification finds a difference, refuses the folder, or names the column as not checked."""
    notes = []
    try:
        wrong = verify.verify(folder, engine="fast", on_note=notes.append)
    except InvalidInput:
        return True
    words = [note for note in notes if file in note and re.search(rf"\b{column}\b", note.replace(file, ""))]
    return bool(wrong) or bool(words) or any(f"points of {file}" in note for note in notes)


OTHER = {
    "rules": "program/fifo/dataflow", "objective": "throughput/1f1b/4", "params": '{"a": 1}', "topology": "p100x4",
    "workload": "rnnlm", "model": "llama3-8b", "cluster": "dgx-h100", "framework": "compiled", "planner": "fsdp",
    "placer": "heft", "choices": '{"microbatches": [1, 2], "recomputes": ["none"]}',
}  # fmt: skip
HASHES = ("fingerprint", "cost_hash", "placement", "program")
NUMBERS = ("evaluations", "batch", "seed", "version")


def forged(column, cell):
    """Another text of the same kind."""
    if column in OTHER:
        return OTHER[column]
    if column == "feasible":
        return "false" if cell == "true" else "true"
    if column == "status":
        return "timeout" if cell != "timeout" else "error"
    if column == "budget":
        return "evaluations=11" if "=" in cell else "13"
    if column == "plan":
        return json.dumps(json.loads(cell) | {"recompute": "full"}, sort_keys=True) if cell else ""
    if column in HASHES:
        return "0123456789abcdef"
    if cell.replace(".", "", 1).isdigit():
        return cell[:-1] + ("1" if cell[-1] != "1" else "2")
    return "7" if column in NUMBERS or column.endswith(("_ns", "_s", "bytes", "seconds")) else "x"


def copy(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_board_itself_holds(folder, tmp_path):
    assert verify.verify(folder) == [] == verify.verify(folder, engine="fast")


@pytest.mark.parametrize("column", rows.COLUMNS)
def test_results(folder, tmp_path, column):
    out = copy(folder, tmp_path)
    (out / "journal.jsonl").unlink()
    (out / "curves.csv").unlink()
    path = out / "results.csv"
    table = [cells for _, cells in rows.read_csv(path, rows.COLUMNS)]
    table[0][column] = "0" * 16 if column == "digest" else forged(column, table[0][column])
    if column in rows.EXACT:
        table[0]["digest"] = RESULTS.digest(table[0])
    rows.write_csv(path, rows.COLUMNS, table)
    with contextlib.suppress(InvalidInput):
        score.write(out, rows.read_rows(path, check_digest=False))
    assert found_or_named(out, "results.csv", column)


def test_a_table_of_before_processor_seconds_were_noted_is_the_same_board(folder, tmp_path):
    out = copy(folder, tmp_path)
    given = rows.read_rows(out / "results.csv")
    assert given[0].cpu_seconds is None  # no placer ran
    RESULTS.write(out / "results.csv", [replace(given[0], cpu_seconds=1.5), *given[1:]])
    (first, *_) = rows.read_rows(out / "results.csv")
    assert first.cpu_seconds == 1.5 and first.digest == given[0].digest
    older = [name for name in rows.COLUMNS if name != "cpu_seconds"]
    rows.write_csv(out / "results.csv", older, [cells for _, cells in rows.read_csv(out / "results.csv", rows.COLUMNS)])
    assert rows.read_rows(out / "results.csv") == given
    entry = RESULTS.to_json(given[0])
    del entry["cpu_seconds"]
    assert RESULTS.from_json(entry, out / "journal.jsonl") == given[0]
    assert verify.verify(out, engine="fast") == []


def rewritten(folder, tmp_path, change):
    """A copy of the board whose rows, changed by ``change``, have digests and derived tables that fit."""
    out = copy(folder, tmp_path)
    (out / "journal.jsonl").unlink()
    (out / "curves.csv").unlink()
    path = out / "results.csv"
    table = [cells for _, cells in rows.read_csv(path, rows.COLUMNS)]
    change(table)
    for cells in table:
        cells["digest"] = RESULTS.digest(cells)
    rows.write_csv(path, rows.COLUMNS, table)
    score.write(out, rows.read_rows(path))
    return out


@pytest.mark.parametrize(
    "cells",
    [{"params": "{ }"}, {"budget": "evaluations=010"}, {"workload": "mine.npz[]"}, {"topology": "mine.toml[nodes=1]"}],
)
def test_a_run_spelled_in_two_ways_is_the_same_run_twice(folder, tmp_path, cells):
    """What was possible: a row counted twice in the ranking under another spelling of its parameters, or its case under
    another spelling of its workload or machine."""
    out = rewritten(folder, tmp_path, lambda table: table.append({**table[0], **cells}))
    assert "the same run twice" in [wrong.found for wrong in verify.verify(out, engine="fast")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("dgx-a100[nodes=8]", "dgx-a100[nodes=08]"),
        ("gpt-1.3b", "gpt-1.3b[layers=24]"),
        ("gpt[layers=2,width=8]", "gpt[width=8, layers=2]"),
        ("transformer-xl-2", "transformer-xl-2[]"),
    ],
)
def test_spellings_of_one_name(one, other):
    assert inventory._meaning(one) == inventory._meaning(other) != inventory._meaning("gpt[layers=3]")


def test_a_name_that_is_nested_without_end_is_text():
    """What was possible: RecursionError in verify, from a workload or model of this name."""
    name = '{"a":' * 50_000 + "1" + "}" * 50_000
    assert inventory._meaning(name) == name


def test_choices_are_sets():
    one, other = (json.dumps({"microbatches": sizes, "recomputes": ["full"]}) for sizes in ((2, 1, 2), (1, 2)))
    assert inventory._meaning(one) == inventory._meaning(other) != inventory._meaning(other.replace("1", "4"))


def test_a_number_of_microbatches_is_spelled_in_one_way():
    with pytest.raises(InvalidInput, match="throughput/1f1b/08"):
        parse_objective("throughput/1f1b/08")


def test_names_of_the_authors_own_are_named(folder):
    """A graph of one op may be called ``bert-large[layers=2]``, a machine ``dgx-hl00``."""
    notes = []
    verify.verify(folder, engine="fast", on_note=notes.append)
    assert (
        "whether the names say what they stand for: 'mine.npz', 'mine.toml': of the author's own, not of simdev"
        in notes
    )


@pytest.mark.parametrize("rerun", [False, True])
def test_answers_of_placers_are_unchecked_without_a_rerun_only(folder, rerun):
    notes = []
    verify.verify(folder, engine="fast", rerun=rerun, on_note=notes.append)
    assert any("only --rerun shows it" in note for note in notes) != rerun


def test_a_hidden_lower_bound_is_named(folder, tmp_path):
    """What was possible: a row that says that its bound failed shows no gap, and no line says why."""
    out = rewritten(folder, tmp_path, lambda table: table[0].update({"lower_bound_s": "", "bound_method": "timeout"}))
    notes = []
    assert verify.verify(out, engine="fast", on_note=notes.append) == []
    assert any(note.startswith("the missing lower bounds of 1 row:") for note in notes)


def checked(folder, **how):
    """The titles of the rows that a verification recomputes."""
    titles = []
    assert verify.verify(folder, engine="fast", on_row=lambda *row: titles.append(row[2]), **how) == []
    return titles


def test_an_interrupted_verification_checks_the_other_rows(folder, tmp_path):
    def interrupted(done, total, title, wrong):
        raise KeyboardInterrupt

    kept = tmp_path / "kept.jsonl"
    first, second = checked(folder)
    with pytest.raises(KeyboardInterrupt):
        verify.verify(folder, engine="fast", sample=1, resume=kept, on_row=interrupted)
    notes = []
    assert checked(folder, resume=kept, on_note=notes.append) == [second] != [first]
    assert f"1 of 2 rows again: they hold, as {kept} says" in notes
    assert checked(folder, resume=kept) == []


def test_a_row_that_differs_is_checked_each_time(folder, tmp_path):
    out = rewritten(folder, tmp_path, lambda table: table[0].update(comm_bytes="1"))
    for _ in range(2):
        (wrong,) = verify.verify(out, engine="fast", resume=tmp_path / "kept.jsonl")
        assert wrong.column == "comm_bytes"


def test_a_changed_file_setting_or_code_begins_anew(folder, tmp_path, monkeypatch):
    out, kept = copy(folder, tmp_path), tmp_path / "kept.jsonl"
    assert len(checked(out, resume=kept)) == 2 and checked(out, resume=kept) == []
    (machine,) = (out / "machines").iterdir()
    machine.write_text(machine.read_text() + "\n# the same machine\n")
    assert len(checked(out, resume=kept)) == 2
    titles = []
    verify.verify(out, resume=kept, on_row=lambda *row: titles.append(row[2]))  # the reference engine
    assert len(titles) == 2
    checked(out, resume=kept)
    monkeypatch.setattr("simdev.bench.provenance.source_digest", lambda: "of other code")
    assert len(checked(out, resume=kept)) == 2 and checked(out, resume=kept) == []


def test_files_that_resume_nothing_are_refused_and_stay(folder, tmp_path):
    out = copy(folder, tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("mine")  # without the end of a line, as a line that a crash cut short
    journal = tmp_path / "journal.jsonl"
    shutil.copy(out / "journal.jsonl", journal)
    for path in (out / "kept.jsonl", text, journal, tmp_path / "no" / "folder.jsonl"):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(InvalidInput, match=path.name):
            verify.verify(out, resume=path)
        assert (path.read_bytes() if path.is_file() else None) == before
    with pytest.raises(InvalidInput, match="code of your own"):
        verify.verify(out, resume=tmp_path / "kept.jsonl", placers=["mine.py:mine"])


TABLES = [
    ("leaderboard.csv", score.LEADERBOARD),
    ("ranking.csv", score.RANKING),
    ("curves.csv", journal.CURVES),
]


@pytest.mark.parametrize("file, column", [(file, column) for file, columns in TABLES for column in columns])
def test_derived_tables(folder, tmp_path, file, column):
    out = copy(folder, tmp_path)
    (out / "journal.jsonl").unlink()
    columns = dict(TABLES)[file]
    table = [cells for _, cells in rows.read_csv(out / file, columns)]
    table[0][column] = forged(column, table[0][column])
    rows.write_csv(out / file, columns, table)
    assert found_or_named(out, file, column)


@pytest.mark.parametrize("column", [*RESULTS.kind.__dataclass_fields__, "curve", "a bound", "no line", "a line more"])
def test_journal(folder, tmp_path, column):
    out = copy(folder, tmp_path)
    path = out / "journal.jsonl"
    entries, _ = read_journal(path)
    entry = next(entry for entry in entries if entry["kind"] == "row")
    if column == "a bound":
        row = entry["row"]
        of = [row["fingerprint"], row["cost_hash"], row["rules"]]
        entries.append({"kind": "bound", "of": of, "ns": row["lower_bound_ns"] - 1, "method": row["bound_method"]})
    elif column == "no line":
        entries.remove(entry)
    elif column == "a line more":
        entries.append({**entry, "row": {**entry["row"], "seed": 7}})
    elif column == "curve":
        entry["curve"] = [[0, 0.5, 1]]
    else:
        value = entry["row"][column]
        text = forged(column, "" if value is None else str(value).lower() if isinstance(value, bool) else str(value))
        kind = type(value) if value is not None else str
        entry["row"][column] = not value if kind is bool else kind(text) if kind is not str else text
    path.write_text("".join(map(journal_line, entries)), encoding="utf-8")
    with contextlib.suppress(InvalidInput):
        assert verify.verify(out, engine="fast")


FIDELITY = [
    (file, column)
    for file in ("cases.csv", "controls.csv", "groups.csv", "published-plans.csv")
    for column in (LEADERBOARD / "fidelity" / file).read_text(encoding="utf-8").splitlines()[0].split(",")
]


@pytest.mark.parametrize("file, column", FIDELITY)
def test_tables_of_fidelity(tmp_path, file, column):
    """No command of a result folder recomputes them: each is named, and the exit code is 1."""
    with (LEADERBOARD / "fidelity" / file).open(encoding="utf-8", newline="") as shipped:
        table = list(csv.DictReader(shipped))
    table[0][column] = forged(column, table[0][column])
    rows.write_csv(tmp_path / file, tuple(table[0]), table)
    wrong = [str(one) for one in verify.verify(tmp_path)]
    assert f"{file}: is not checked: no part of a result folder" in wrong
    assert any("holds neither results.csv nor plans.csv" in text for text in wrong)


def test_every_other_file_is_named(folder, tmp_path):
    out, notes = copy(folder, tmp_path), []
    (out / "README.md").write_text("# Mine")
    (out / "scatter.png").write_bytes(b"\x89PNG")
    (out / "mine.csv").write_text("a,b\n")
    (out / "placements").mkdir(exist_ok=True)
    (out / "placements" / "mine.csv").write_text("")
    (out / "placements" / f"{'0' * 16}.npz").write_bytes(b"")
    (out / "graphs" / f"{'0' * 16}.npz").write_bytes(b"")
    (out / "machines" / f"{'0' * 16}.toml").write_text("")
    (out / "link").symlink_to("/etc/passwd")
    (out / ".lock").write_text("x")
    wrong = {one.row: one.found for one in verify.verify(out, engine="fast", on_note=notes.append)}
    unknown = "is not checked: no part of a result folder"
    assert wrong.pop("mine.csv") == wrong.pop("placements/mine.csv") == unknown
    assert wrong.pop("link") == inventory.LINK and wrong.pop(".lock") == "is not empty"
    assert wrong.pop(f"placements/{'0' * 16}.npz") == f"placement {'0' * 16} belongs to no row"
    assert wrong.pop(f"graphs/{'0' * 16}.npz") == wrong.pop(f"machines/{'0' * 16}.toml") == "belongs to no row"
    assert wrong == {} and notes[0] == "README.md, scatter.png: for readers"


@pytest.mark.parametrize("name", ["results.csv", "leaderboard.csv", "placements.jsonl"])
def test_a_table_that_is_a_link_is_found(folder, tmp_path, name):
    """What was possible: tables and placements that lie elsewhere, where they change after the verification."""
    out = copy(folder, tmp_path)
    shutil.move(out / name, tmp_path / name)
    (out / name).symlink_to(tmp_path / name)
    assert [(one.row, one.found) for one in verify.verify(out, engine="fast")] == [(name, inventory.LINK)]


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("/nowhere"), lambda path: os.mkfifo(path)], ids=["a link", "a pipe"]
)
def test_a_package_that_is_no_file_is_found(folder, tmp_path, make):
    """What was possible: a datapackage.json that was neither compared nor named."""
    out = copy(folder, tmp_path)
    make(out / "datapackage.json")
    assert [one.row for one in verify.verify(out, engine="fast")] == ["datapackage.json"]


@pytest.mark.parametrize("name", ["leaderboard.csv", "placements.jsonl", "curves.csv", ".lock", "graphs", "machines"])
def test_a_pipe_is_found_and_not_opened(folder, tmp_path, name):
    """What was possible: a pipe in the place of a table, a placement or a graph, for which verify waited for ever."""
    out = copy(folder, tmp_path)
    path = out / name
    path = next(path.iterdir()) if path.is_dir() else path
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    found = {one.row: one.found for one in verify.verify(out, engine="fast")}
    assert found[path.relative_to(out).as_posix()] == "is neither a file nor a folder"


def test_names_that_are_no_text(folder, tmp_path):
    """What was possible: UnicodeEncodeError with --resume, and a terminal that obeys the name of a file."""
    out = copy(folder, tmp_path)
    (out / os.fsdecode(b"\xff.csv")).write_text("")
    (out / "\x1b]0;owned.csv").write_text("")
    found = [one.row for one in verify.verify(out, engine="fast", resume=tmp_path / "kept.jsonl")]
    assert found == [r"\x1b]0;owned.csv", r"\udcff.csv"]


def test_a_tree_of_folders_that_is_deeper_than_the_stack(folder, tmp_path):
    """What was possible: RecursionError from a folder in a folder in a folder."""
    out = copy(folder, tmp_path)
    depth = 1100
    with contextlib.chdir(out):
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Path("x.csv").write_text("")
    (wrong,) = verify.verify(out, engine="fast")
    assert wrong.row.startswith("d/d/") and wrong.row.endswith("x.csv")
    deepest = out / "/".join("d" * depth)
    (deepest / "x.csv").unlink()
    for _ in range(depth):  # pytest's own cleaning stops at the depth of the stack
        deepest.rmdir()
        deepest = deepest.parent


@pytest.mark.parametrize(
    "forge",
    [
        lambda line: line.replace(b'"devices": ', b'"devices": ["<u1", 3, "forged"], "devices": '),
        lambda line: line.replace(b'"hash": ', b'"hash":  '),
        lambda line: re.sub(rb'(", 3, ")([^"]*)', _with_hidden_bytes, line),
    ],
    ids=["given twice", "blanks", "hidden bytes"],
)
def test_a_placement_that_others_read_otherwise_is_found(folder, tmp_path, forge):
    """What was possible: a placement's line with devices of which Python reads the last ones, or with more bytes than
    those of its devices."""
    out = copy(folder, tmp_path)
    path = out / "placements.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    assert forge(first) != first
    path.write_bytes(b"".join([forge(first), *others]))
    assert "placements.jsonl" in [one.row for one in verify.verify(out, engine="fast")]


def _with_hidden_bytes(found):
    return found[1] + base64.b64encode(base64.b64decode(found[2]) + b"hidden")


def test_a_rerun_opens_no_path_of_a_row(folder, tmp_path):
    """What was possible: in an unpacked folder, a rerun read the policy that a row names."""
    params = json.dumps({"policy": str(tmp_path / "policy")})
    out = rewritten(folder, tmp_path, lambda table: table[0].update(placer="gdp-zero-shot", params=params, version="1"))
    reasons = []
    verify.verify(out, engine="fast", rerun=True, on_skip=lambda title, reason: reasons.append(reason))
    assert "its policy or its starts are not part of simdev" in reasons


def test_workers_capture_apart_although_their_server_is_older(folder, monkeypatch, at_once):
    """What was possible: after a bench in the same process, verification read the user's cache of captures."""
    monkeypatch.setenv(kept.APART, "/of/the/server")
    seen = []

    class Older(at_once):
        def schedule(self, function, args=(), **how):
            monkeypatch.setitem(os.environ, kept.APART, "/of/the/server")
            return super().schedule(function, args, **how)

    def look(folder, row, check):
        seen.append(os.environ[kept.APART])
        return [], ""

    monkeypatch.setattr(workers, "worker_pool", lambda *_, **__: Older())
    monkeypatch.setattr(verify, "check_row", look)
    verify.verify(folder, engine="fast")
    assert len(seen) == 2 and "/of/the/server" not in seen


def test_texts_that_are_not_listed_are_counted(folder, tmp_path):
    """What was possible: a file for readers that no line named, behind twenty others."""
    out, notes = copy(folder, tmp_path), []
    for number in range(inventory.MOST_NAMED + 3):
        (out / f"{number:02}.md").write_text("")
    assert verify.verify(out, engine="fast", on_note=notes.append) == []
    assert notes[0].endswith(" and 3 more: for readers")


def test_an_entry_of_a_run_that_another_entry_replaced_is_named(folder, tmp_path):
    out, notes = copy(folder, tmp_path), []
    entries, _ = read_journal(out / "journal.jsonl")
    entry = next(entry for entry in entries if entry["kind"] == "row")
    lie = {**entry, "row": {**entry["row"], "step_ns": 1}}
    (out / "journal.jsonl").write_text("".join(map(journal_line, [lie, *entries])))
    assert verify.verify(out, engine="fast", on_note=notes.append) == []
    assert "journal.jsonl: 1 run executed again; the last of each run counts" in notes


CURVES = {
    "of no row": (lambda key, points: (("x", *key[1:]), points), "belongs to no row"),
    "rising": (lambda key, points: (key, [*points, (1, 0.6, points[0][2] + 1)]), "does not fall"),
    "back in time": (lambda key, points: (key, [(0, 9.0, points[0][2] + 1), *points]), "goes back"),
    "beyond the evaluations": (lambda key, points: (key, [*points, (99, 0.6, points[0][2] - 1)]), "evaluations"),
    "after the run": (lambda key, points: (key, [(points[0][0], 1e6, points[0][2])]), "seconds: 1000000.000"),
    "below the bound": (lambda key, points: (key, [(*points[0][:2], 1)]), "step_time_s"),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_that_no_search_has(folder, tmp_path, name):
    out = copy(folder, tmp_path)
    (out / "journal.jsonl").unlink()
    key, points = next(iter(journal.read_curves(out / "curves.csv").items()))
    change, text = CURVES[name]
    key, points = change(key, points)
    lines = [(*key, used, f"{seconds:.3f}", rows.seconds_text(ns)) for used, seconds, ns in points]
    rows.write_csv(out / "curves.csv", journal.CURVES, [dict(zip(journal.CURVES, line, strict=True)) for line in lines])
    assert any(text in str(one) for one in verify.verify(out, engine="fast"))


# Planners


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    pytest.importorskip("torch")
    from test_planners_run import bench_plans

    folder = tmp_path_factory.mktemp("plans")
    bench_plans(["ddp"], folder)
    return folder


def test_the_board_of_planners_itself_holds(plans):
    assert verify.verify(plans, engine="fast") == []


@pytest.mark.parametrize("column", PLANS.columns)
def test_plans(plans, tmp_path, column):
    out = tmp_path
    table = [cells for _, cells in rows.read_csv(plans / "plans.csv", PLANS.columns)]
    table[0][column] = "0" * 16 if column == "digest" else forged(column, table[0][column])
    if column in PLANS.exact:
        table[0]["digest"] = PLANS.digest(table[0])
    rows.write_csv(out / "plans.csv", PLANS.columns, table)
    with contextlib.suppress(InvalidInput):
        write = read_plan_rows(out, check_digest=False)
        (out / "plans.md").write_text("\n".join([*journal.plan_rows.markdown(write), ""]))
    assert found_or_named(out, "plans.csv", column)


@pytest.mark.parametrize("forge", [lambda plan: plan[:-1] + ', "note": "proved optimal"}', lambda plan: plan + " "])
def test_a_plan_with_members_that_mean_nothing(plans, tmp_path, forge):
    """What was possible: any text beside the members that a plan has."""
    (row,) = read_plan_rows(plans)
    write_plan_rows(tmp_path, [replace(row, plan=forge(row.plan))])
    (wrong,) = verify.verify(tmp_path, engine="fast")
    assert wrong.column == "plan"


@pytest.mark.parametrize("kind", ["a file", "a folder"])
def test_the_configuration_that_a_row_names_is_not_opened(plans, tmp_path, kind):
    """What was possible: a row whose model is the path of a configuration, which verify read."""
    (row,) = read_plan_rows(plans)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("[]")
    model = model if kind == "a folder" else model / "config.json"
    write_plan_rows(tmp_path / "board", [replace(row, model=str(model))])
    (wrong,) = verify.verify(tmp_path / "board", engine="fast")
    assert wrong.found == "a configuration by its path is not opened unless --placer names it"
    (wrong,) = verify.verify(tmp_path / "board", engine="fast", placers=[str(model)])
    assert "config.json: expected an object" in wrong.found


def test_a_plan_outside_of_its_choices_is_named(plans, tmp_path):
    (row,) = read_plan_rows(plans)
    other = json.dumps({**json.loads(row.choices), "microbatches": [row.choice.microbatch + 1]}, sort_keys=True)
    write_plan_rows(tmp_path, [replace(row, choices=other)])
    notes = []
    verify.verify(tmp_path, engine="fast", on_note=notes.append)
    assert any(note.startswith("plans outside of their choices: 1;") for note in notes)


@pytest.mark.parametrize("column", journal.PLAN_CURVES)
def test_curves_of_planners(plans, tmp_path, column):
    out = copy(plans, tmp_path)
    (out / "journal.jsonl").unlink()
    (row,) = read_plan_rows(out)
    point = ("1", "0.500", rows.seconds_text(row.step_ns))
    line = dict(zip(journal.PLAN_CURVES, (*map(str, row.key), *point), strict=True))
    line[column] = forged(column, line[column])
    rows.write_csv(out / "plan_curves.csv", journal.PLAN_CURVES, [line])
    assert found_or_named(out, "plan_curves.csv", column)


@pytest.mark.parametrize("column", list(PLANS.kind.__dataclass_fields__))
def test_journal_of_planners(plans, tmp_path, column):
    (row,) = read_plan_rows(plans)
    value = getattr(row, column)
    kind = type(value)
    text = forged(column, str(value))
    lie = replace(row, **{column: kind(text)})
    write_plan_rows(tmp_path, [row])
    entry = {"kind": "plan", "row": PLANS.to_json(lie), "curve": []}
    (tmp_path / "journal.jsonl").write_text(journal_line(entry))
    with contextlib.suppress(InvalidInput):
        assert verify.verify(tmp_path, engine="fast")


def test_a_forged_table_beside_a_header_of_plans_is_found(folder, tmp_path):
    """What was possible: an empty plans.csv kept verify from opening results.csv."""
    out = copy(folder, tmp_path)
    PLANS.write(out / "plans.csv", [])
    text = (out / "results.csv").read_text(encoding="utf-8")
    (out / "results.csv").write_text(text.replace(",ok,,true,0.", ",ok,,true,9.", 1), encoding="utf-8")
    found = [str(one) for one in verify.verify(out, engine="fast")]
    assert any("digest" in one for one in found) and "plans.csv: holds no row" in found
