"""Submissions, releases and published boards: what is packed verifies elsewhere; hostile archives unpack nothing."""

import json
import re
import shutil
import stat
import zipfile
from pathlib import Path

import boards
import pytest
from small_board import small_board
from test_bench import LIMITS, ODD, make_graph

from simdev.bench import release, rows
from simdev.bench.bench import bench as execute_all
from simdev.bench.matrix import plan
from simdev.bench.rows import read_rows
from simdev.bench.run import load_problem
from simdev.bench.submission import submit, unpacked
from simdev.bench.verify import verify
from simdev.cli import main as cli
from simdev.errors import InvalidInput
from simdev.problem.placement_file import placement_file, stored_placement

MACHINE = """
name = "mine"
[kind.k]
memory_gib = 8
peak_tflops = { f32 = 1.0 }
memory_gb_per_s = 100
[[device]]
name = "a"
kind = "k"
[[device]]
name = "b"
kind = "k"
[[link]]
ends = ["a", "b"]
gb_per_s = 10
latency_us = 1
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A submission with a graph, a machine and a placer of somebody's own, whose files are gone."""
    home = tmp_path_factory.mktemp("home")
    graph = make_graph(home / "mine.npz")
    (home / "mine.toml").write_text(MACHINE, encoding="utf-8")
    shutil.copy(ODD, home / "placers.py")
    shutil.copy(Path(ODD).with_name("misbehave.py"), home)
    placers = ["expert", "heft", f"{home / 'placers.py'}:walk", f"{home / 'placers.py'}:shy"]
    runs = plan([graph, "transformer-xl-2"], [str(home / "mine.toml"), "p100x2"], placers, budget="evaluations=10")
    found = execute_all(runs, home / "results", jobs=2, limits=LIMITS)
    out = tmp_path_factory.mktemp("out") / "mine.zip"
    assert submit(home / "results", out) == len(found) == 16
    shutil.rmtree(home)
    return out


def test_a_submission_verifies_where_its_files_and_code_are_not(own):
    assert verify(own, jobs=2) == []


def test_a_forged_cell_is_found(own, tmp_path):
    with unpacked(own) as inside:
        found = rows.read_rows(inside / "results.csv")
        from dataclasses import replace

        best = next(row for row in found if row.step_ns)
        forged = [
            replace(row, step_ns=row.step_ns // 2, simulated_ns=row.simulated_ns // 2) if row is best else row
            for row in found
        ]
        rows.write_rows(inside / "results.csv", forged)
        out = tmp_path / "forged.zip"
        submit(inside, out)
    wrong = verify(out, jobs=2)
    assert any(difference.column == "step_time_s" for difference in wrong)


def test_a_row_cannot_make_the_judge_read_its_own_files(own, tmp_path):
    with unpacked(own) as inside:
        shutil.rmtree(inside / "machines")
        shutil.rmtree(inside / "graphs")
        submit(inside, tmp_path / "less.zip")
    texts = [str(difference) for difference in verify(tmp_path / "less.zip", jobs=2)]
    assert any("the graph is not kept" in text for text in texts)
    assert any("the machine is not kept" in text for text in texts)


def test_placement_files(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "found"
    folder.mkdir()
    for topology in ("p100x2", "p100x4"):
        asked = ["place", "transformer-xl-2", topology, "-p", "expert", "-o", str(folder / f"{topology}.json")]
        assert run(monkeypatch, *asked) == 0
    out = tmp_path / "mine.zip"
    assert run(monkeypatch, "submit", str(folder), "--name", "my-placer", "-o", str(out)) == 0
    assert run(monkeypatch, "verify", str(out)) == 0
    with unpacked(out) as inside:
        assert {row.placer for row in rows.read_rows(inside / "results.csv")} == {"my-placer"}
    capsys.readouterr()
    assert run(monkeypatch, "submit", str(folder), "-o", str(out)) == 2
    assert "--name" in capsys.readouterr().err
    assert run(monkeypatch, "submit", str(tmp_path), "--name", "x", "-o", str(out)) == 2


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["simdev", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


def archive(path, *members, results=True):
    with zipfile.ZipFile(path, "w") as file:
        if results:
            file.writestr("results.csv", "")
        for member, data in members:
            file.writestr(member, data)
    return path


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    "member, reason",
    [
        ("../evil.csv", "no part"),
        ("/etc/evil.csv", "no part"),
        ("placements/../../evil.npz", "no part"),
        ("placements/zz.npz", "no part"),
        ("evil.py", "no part"),
        (link("placements/ab.npz"), "no part"),
        ("results.csv", "twice"),
    ],
    ids=str,
)
def test_hostile_members_are_refused(tmp_path, member, reason):
    with pytest.warns(UserWarning, match="Duplicate") if member == "results.csv" else nothing():
        path = archive(tmp_path / "evil.zip", (member, "x"))
    with pytest.raises(InvalidInput, match=reason), unpacked(path):
        raise AssertionError("was unpacked")
    assert not (tmp_path.parent / "evil.csv").exists()


def nothing():
    import contextlib

    return contextlib.nullcontext()


def test_bombs_and_damage_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("simdev.bench.submission.MAX_UNPACKED", 1000)
    path = archive(tmp_path / "bomb.zip", ("placements/ab.npz", "x" * 2000))
    with pytest.raises(InvalidInput, match="refused"), unpacked(path):
        pass
    (tmp_path / "cut.zip").write_bytes(path.read_bytes()[:-30])
    for broken in ("cut.zip", "bomb.txt"):
        (tmp_path / "bomb.txt").write_text("no archive", encoding="utf-8")
        with pytest.raises(InvalidInput, match=broken), unpacked(tmp_path / broken):
            pass
    with (
        pytest.raises(InvalidInput, match="holds neither results"),
        unpacked(archive(tmp_path / "no.zip", results=False)),
    ):
        pass


def bomb(path, member, size):
    """A submission whose ``member`` unpacks to ``size`` zero bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        with file.open(member, "w") as out:
            for _ in range(size >> 20):
                out.write(bytes(1 << 20))
        if member != "results.csv":
            file.writestr("results.csv", "")
    return path


def test_a_bomb_is_refused_before_it_fills_disk_or_memory(tmp_path):
    import tracemalloc

    path = bomb(tmp_path / "bomb.zip", "results.csv", 200 << 20)
    tracemalloc.start()
    with pytest.raises(InvalidInput, match="results.csv: larger than 134217728 bytes: refused"), unpacked(path):
        raise AssertionError("was unpacked")
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_an_archive_that_lies_about_sizes_is_refused(tmp_path):
    path = bomb(tmp_path / "bomb.zip", "results.csv", 1 << 20)
    data = bytearray(path.read_bytes())
    for mark, place in ((b"PK\3\4", 22), (b"PK\1\2", 24)):  # "10 bytes", says the archive
        at = data.index(mark) + place
        data[at : at + 4] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match="bomb.zip"), unpacked(path):
        raise AssertionError("was unpacked")


def test_a_table_of_contents_that_fills_the_memory_is_not_read(tmp_path):
    path = archive(tmp_path / "big.zip")
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\5\6") + 12
    data[at : at + 4] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match="table of contents is larger"), unpacked(path):
        pass


HUGE = "".join(
    f'[[device]]\nname = "d{n}"\nkind = "k"\n[[link]]\nends = ["d{n}", "s"]\ngb_per_s = {n + 1}\nlatency_us = {n % 7}\n'
    for n in range(1000)
)


@pytest.mark.slow
def test_a_machine_that_takes_for_ever_is_given_up(tmp_path):
    from small_board import MACHINE as SMALL
    from small_board import small_board

    from simdev.bench import stored
    from simdev.bench.workers import Limits

    small_board(tmp_path / "board")
    kind = SMALL[SMALL.index("[kind") : SMALL.index("[[device]]")]
    machine = f'name = "huge"\nswitches = ["s"]\n{kind}{HUGE}'
    stored.kept_machine(tmp_path / "board", "mine.toml").write_text(machine, encoding="utf-8")
    submit(tmp_path / "board", tmp_path / "huge.zip")
    found = verify(tmp_path / "huge.zip", jobs=1, limits=Limits(2, 4 << 30))
    assert [difference.found for difference in found] == ["no answer within 2 s"] * 2


def test_a_row_that_needs_too_much_memory_is_given_up(tmp_path):
    from small_board import small_board

    from simdev.bench.workers import Limits

    small_board(tmp_path / "board")
    wrong = verify(tmp_path / "board", jobs=1, limits=Limits(100, 1 << 20))
    assert wrong and all(difference.column == "" for difference in wrong)


def test_another_processor_is_said_and_is_no_difference(tmp_path):
    from small_board import small_board

    small_board(tmp_path / "board", placers=("gdp",), machine="Abacus 1, 4 cores, Linux")
    skipped = []
    assert verify(tmp_path / "board", rerun=True, jobs=1, on_skip=lambda *why: skipped.append(why)) == []
    ((title, reason),) = skipped
    assert "gdp" in title and reason.startswith("different processor (Abacus 1, here ")


STANDARD = Path(__file__).parents[2] / "leaderboard" / "standard"


@pytest.fixture
def board(tmp_path):
    small_board(tmp_path / "board")
    return tmp_path / "board"


@pytest.fixture
def release_archive(board, tmp_path):
    submit(board, tmp_path / "board.zip", release=True)
    return tmp_path / "board.zip"


def altered(release_archive, out, change):
    """A copy of the archive in which ``change`` maps the name and bytes of each member to new bytes, or None."""
    with zipfile.ZipFile(release_archive) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(zipfile.ZipInfo(name), content)
    return out


def sentences(release_archive):
    return [str(difference) for difference in verify(release_archive, sample=1, jobs=1)]


def test_a_release_holds_and_is_the_same_each_time(board, release_archive, tmp_path):
    assert verify(release_archive, jobs=1) == []
    submit(board, tmp_path / "again.zip", release=True)
    assert (tmp_path / "again.zip").read_bytes() == release_archive.read_bytes()


def test_it_describes_every_file(release_archive):
    with unpacked(release_archive) as inside:
        document = json.loads((inside / "datapackage.json").read_text(encoding="utf-8"))
        files = {path.relative_to(inside).as_posix() for path in inside.rglob("*") if path.is_file()}
        assert {entry["path"] for entry in document["resources"]} == files - {"datapackage.json", "DATASHEET.md"}
        (results,) = [entry for entry in document["resources"] if entry["path"] == "results.csv"]
        types = {field["name"]: field["type"] for field in results["schema"]["fields"]}
        assert types["step_time_s"] == "number" and types["seed"] == "integer" and types["feasible"] == "boolean"
        sheet = (inside / "DATASHEET.md").read_text(encoding="utf-8")
        assert f"{len(read_rows(inside / 'results.csv'))} rows" in sheet and "How to cite" in sheet


def test_another_byte_is_found(release_archive, tmp_path):
    def change(name, content):
        return content.replace(b"0.", b"1.", 1) if name == "curves.csv" else content

    found = sentences(altered(release_archive, tmp_path / "changed.zip", change))
    assert "curves.csv: has another SHA-256 than datapackage.json says" in found


def test_a_file_that_is_left_out_or_added_is_found(release_archive, tmp_path):
    def change(name, content):
        if name != "datapackage.json":
            return content
        document = json.loads(content)
        document["resources"] = [entry for entry in document["resources"] if entry["path"] != "curves.csv"]
        document["resources"].append({"path": "placements/00.npz", "hash": "sha256:0"})
        return json.dumps(document).encode()

    found = sentences(altered(release_archive, tmp_path / "changed.zip", change))
    assert "curves.csv: is not named in datapackage.json" in found
    assert "placements/00.npz: is named in datapackage.json, but absent" in found


def written(document):
    """A ``datapackage.json`` as simdev writes it."""
    return (json.dumps(document, indent=1) + "\n").encode()


@pytest.mark.parametrize(
    "entry", [{"title": "The official board"}, {"licenses": []}, {"sponsor": "nobody"}, {"resources": 0}]
)
def test_a_package_that_says_something_else_is_found(release_archive, tmp_path, entry):
    """What was possible: a title, a licence or the type of a column that nobody looked at."""

    def change(name, content):
        if name != "datapackage.json":
            return content
        document = json.loads(content)
        if "resources" in entry:
            document["resources"][0]["schema"]["fields"][0]["type"] = "number"
            return written(document)
        return written(document | entry)

    found = sentences(altered(release_archive, tmp_path / "changed.zip", change))
    assert len(found) == 1 and "datapackage.json" in found[0]


def test_every_member_of_a_package_is_compared(release_archive):
    """Each description of a file, and the type of each column of each table: another value is a fault."""
    with unpacked(release_archive) as inside:
        path = inside / release.PACKAGE
        whole = path.read_text(encoding="utf-8")
        forgeries = 0
        for number, resource in enumerate(json.loads(whole)["resources"]):
            members = [(resource, key) for key in resource]
            members += [(field, key) for field in resource.get("schema", {}).get("fields", []) for key in field]
            for place in range(len(members)):
                document = json.loads(whole)
                forged = document["resources"][number]
                fields = [(field, key) for field in forged.get("schema", {}).get("fields", []) for key in field]
                owner, key = [*((forged, key) for key in forged), *fields][place]
                owner[key] = "x"
                path.write_bytes(written(document))
                assert release._checksum_faults(inside), (resource["path"], key)
                forgeries += 1
        path.write_text(whole, encoding="utf-8")
        assert forgeries > 100 and release._checksum_faults(inside) == []


@pytest.mark.parametrize(
    "forge",
    [
        lambda text: text.replace('"title": ', '"title": "World records", "title": '),
        lambda text: text.replace('"name": ', '"name": {"best": "of all"}, "name": ', 1),
        lambda text: re.sub(r'("name"): "[^"]*",(?=\s+"title")', r'\1: {"best": "of all"},', text),
        lambda text: text.replace('"bytes": ', '"bytes": 1, "bytes": ', 1),
        lambda text: re.sub(r'"bytes": (\d+)', r'"bytes": \1.0', text, count=1),
    ],
    ids=["title", "name", "no text", "bytes", "fraction"],
)
def test_a_package_that_others_read_otherwise_is_found(release_archive, forge):
    """What was possible: a member that is given twice, of which Python reads the last one; any value as the name."""
    with unpacked(release_archive) as inside:
        path = inside / release.PACKAGE
        whole = path.read_text(encoding="utf-8")
        path.write_text(forge(whole), encoding="utf-8")
        assert path.read_text(encoding="utf-8") != whole
        assert release._checksum_faults(inside) == [(release.PACKAGE, "is not written as simdev writes it")]


@pytest.mark.parametrize(
    "document", [b"[]", b'{"resources": 3}', b'{"resources": [3]}', b'{"resources": [{"path": [[]]}]}', b"{"]
)
def test_a_damaged_package_is_one_sentence(release_archive, tmp_path, document):
    changed = altered(
        release_archive, tmp_path / "c.zip", lambda name, old: document if name == "datapackage.json" else old
    )
    with pytest.raises(InvalidInput, match=r"datapackage\.json"):
        verify(changed, sample=1, jobs=1)


@pytest.mark.parametrize(
    ("table", "column"), [("curves.csv", "evaluations"), ("ranking.csv", "mean_rank"), ("leaderboard.csv", "gap")]
)
def test_a_cell_of_another_type_is_found(board, table, column):
    lines = (board / table).read_text(encoding="utf-8").splitlines()
    cells = lines[1].split(",")
    cells[lines[0].split(",").index(column)] = "soon"
    (board / table).write_text("\n".join([lines[0], ",".join(cells), *lines[2:], ""]), encoding="utf-8")
    kind = release.kind(column)
    assert (table, f"line 2, {column}: 'soon' is no {kind}") in release.faults(board)


def test_the_shipped_board_keeps_the_schema():
    assert release.faults(STANDARD) == []


def test_the_schema_names_every_column(board):
    for table, columns in release.TABLES.items():
        if "plan" not in table:
            header = (board / table).read_text(encoding="utf-8").splitlines()[0].split(",")
            assert header == [name for name in columns if name != "microbatch_time_s" or table != "results.csv"], table


def test_the_board_of_planners_keeps_the_schema():
    assert (STANDARD.parent / "parallel" / "plans.csv").is_file()
    assert release.faults(STANDARD.parent / "parallel") == []


FOLDER = Path(__file__).parents[2] / "leaderboard" / "standard"
ORDER, RECORDS = FOLDER.parent / "order", FOLDER.parent / "best-known"
RULES = "fifo/fifo/dataflow", "priority/fifo/dataflow"


def test_it_covers_eight_workloads_on_three_machines_with_every_classical_placer():
    found = rows.read_rows(FOLDER / "results.csv")
    assert len({row.workload for row in found}) >= 8 and len({row.topology for row in found}) >= 3
    placers = {row.placer for row in found}
    runs = {(row.workload, row.topology, row.placer) for row in found}
    assert len(runs) == len(placers) * len({(row.workload, row.topology) for row in found})
    assert {
        "single-cpu", "single-gpu", "random", "round-robin", "m-topo", "expert", "scotch", "min-cut", "heft", "peft",
        "m-etf", "m-sct", "critical-path", "local-search", "annealing", "genetic", "portfolio",
    } <= placers  # fmt: skip


def test_no_placement_beats_its_bound_and_every_placement_is_there():
    for row in rows.read_rows(FOLDER / "results.csv"):
        if row.status == "ok":
            assert placement_file(FOLDER, row.placement).is_file()
            assert row.lower_bound_ns <= row.simulated_ns or not row.feasible


def test_the_costs_of_each_machine_are_those_of_its_rows():
    for row in {row.topology: row for row in rows.read_rows(FOLDER / "results.csv") if row.workload == "dlrm"}.values():
        assert load_problem(row.workload, row.topology, row.rules).costs.hash == row.cost_hash, row.topology


def test_records_are_feasible_placements_under_their_rules():
    found = rows.read_rows(RECORDS / "results.csv")
    assert {row.rules for row in found} == set(RULES)
    cases = {(row.workload, row.topology) for row in rows.read_rows(FOLDER / "results.csv")}
    for rules in RULES:  # each case once
        assert sorted((row.workload, row.topology) for row in found if row.rules == rules) == sorted(cases)
    for row in found:
        assert row.status == "ok" and row.feasible and row.lower_bound_ns <= row.step_ns, row
        order = stored_placement(RECORDS, row.placement).priority
        assert (order is not None) == row.rules.startswith("priority")


def test_the_order_track_compares_searches_with_equal_budgets():
    found = rows.read_rows(ORDER / "results.csv")
    assert {row.rules for row in found} == {"priority/fifo/dataflow"}
    assert {row.budget for row in found} == {"evaluations=2000", "processor=10"}
    assert {row.seed for row in found} == {0, 1, 2}


def test_no_row_and_no_replay_beats_a_record():
    assert boards.slower_than(RECORDS, [FOLDER, ORDER]) == []
    small = [(workload, "p100x4", rules) for workload in ("transformer-xl-2", "vit-l") for rules in RULES]
    assert boards.beaten_by_replay(RECORDS, small) == []


@pytest.mark.slow
def test_no_replay_of_any_case_beats_a_record():
    assert boards.beaten_by_replay(RECORDS) == []


def test_records_are_kept_from_boards(tmp_path):
    """The shortest row of each case is kept, and a record that is beaten leaves."""
    records = tmp_path / "records"
    small_board(tmp_path / "first")
    found = rows.read_rows(tmp_path / "first" / "results.csv")
    assert len({row.step_ns for row in found}) == 2
    slow, fast = sorted(found, key=lambda row: row.step_ns)[::-1]
    case = fast.workload, fast.topology, fast.rules
    rows.write_rows(tmp_path / "first" / "results.csv", [slow])
    assert boards.keep_records([tmp_path / "first"], records) == [(case, slow.step_ns)]
    assert boards.slower_than(records, [tmp_path / "first"]) == []
    small_board(tmp_path / "second")
    assert boards.slower_than(records, [tmp_path / "second"]) == [(case, slow.step_ns, fast.step_ns)]
    assert boards.keep_records([tmp_path / "second"], records) == [(case, fast.step_ns)]
    (kept,) = rows.read_rows(records / "results.csv")
    assert (kept.key, kept.step_ns, kept.placement) == (fast.key, fast.step_ns, fast.placement)
    assert stored_placement(records, fast.placement).hash == fast.placement
    assert boards.keep_records([tmp_path / "first", tmp_path / "second"], records) == []
