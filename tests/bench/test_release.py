"""A release names every file with its checksum and every column with its type, and verify enforces both."""

import json
import zipfile
from pathlib import Path

import pytest
from small_board import small_board

from simdev.bench import release
from simdev.bench.rows import read_rows
from simdev.bench.submission import submit, unpacked
from simdev.bench.verify import verify
from simdev.errors import InvalidInput

STANDARD = Path(__file__).parents[2] / "leaderboard" / "standard"


@pytest.fixture
def board(tmp_path):
    small_board(tmp_path / "board")
    return tmp_path / "board"


@pytest.fixture
def archive(board, tmp_path):
    submit(board, tmp_path / "board.zip", release=True)
    return tmp_path / "board.zip"


def altered(archive, out, change):
    """A copy of the archive in which ``change`` maps the name and bytes of each member to new bytes, or None."""
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(zipfile.ZipInfo(name), content)
    return out


def sentences(archive):
    return [str(difference) for difference in verify(archive, sample=1, jobs=1)]


def test_a_release_holds_and_is_the_same_each_time(board, archive, tmp_path):
    assert verify(archive, jobs=1) == []
    submit(board, tmp_path / "again.zip", release=True)
    assert (tmp_path / "again.zip").read_bytes() == archive.read_bytes()


def test_it_describes_every_file(archive):
    with unpacked(archive) as inside:
        document = json.loads((inside / "datapackage.json").read_text(encoding="utf-8"))
        files = {path.relative_to(inside).as_posix() for path in inside.rglob("*") if path.is_file()}
        assert {entry["path"] for entry in document["resources"]} == files - {"datapackage.json", "DATASHEET.md"}
        (results,) = [entry for entry in document["resources"] if entry["path"] == "results.csv"]
        types = {field["name"]: field["type"] for field in results["schema"]["fields"]}
        assert types["step_time_s"] == "number" and types["seed"] == "integer" and types["feasible"] == "boolean"
        sheet = (inside / "DATASHEET.md").read_text(encoding="utf-8")
        assert f"{len(read_rows(inside / 'results.csv'))} rows" in sheet and "How to cite" in sheet


def test_another_byte_is_found(archive, tmp_path):
    def change(name, content):
        return content.replace(b"0.", b"1.", 1) if name == "curves.csv" else content

    found = sentences(altered(archive, tmp_path / "changed.zip", change))
    assert "curves.csv: has another SHA-256 than datapackage.json says" in found


def test_a_file_that_is_left_out_or_added_is_found(archive, tmp_path):
    def change(name, content):
        if name != "datapackage.json":
            return content
        document = json.loads(content)
        document["resources"] = [entry for entry in document["resources"] if entry["path"] != "curves.csv"]
        document["resources"].append({"path": "placements/00.npz", "hash": "sha256:0"})
        return json.dumps(document).encode()

    found = sentences(altered(archive, tmp_path / "changed.zip", change))
    assert "curves.csv: is not named in datapackage.json" in found
    assert "placements/00.npz: is named in datapackage.json, but absent" in found


@pytest.mark.parametrize("document", [b"[]", b'{"resources": 3}', b'{"resources": [3]}', b"{"])
def test_a_damaged_package_is_one_sentence(archive, tmp_path, document):
    changed = altered(archive, tmp_path / "c.zip", lambda name, old: document if name == "datapackage.json" else old)
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
