"""The lowest modules: errors, the cache of kernels, and files."""

import ast
import gzip
import os
import pickle
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simdev import _cache
from simdev.errors import InvalidInput, SimdevError, UnknownName
from simdev.files import (
    guarded,
    open_text,
    open_zip,
    parse_json,
    read_bytes,
    read_json,
    read_lines,
    read_text,
    read_toml,
    read_zipped,
    replacing,
    sweep,
    unguarded,
    write_table,
    write_text,
)
from simdev.problem.placement_file import stored_placement

# errors say where and what in one sentence, suggest names, and cross process borders


def test_the_file_and_the_field_lead():
    error = InvalidInput("is negative", source="a.npz", field="op_flops")
    assert str(error) == "a.npz: op_flops: is negative"
    assert (error.message, error.source, error.field) == ("is negative", "a.npz", "op_flops")
    assert str(InvalidInput("x", field="f")) == "f: x" and str(InvalidInput("x")) == "x"
    assert isinstance(error, SimdevError) and isinstance(error, ValueError)


@pytest.mark.parametrize(
    "name, known, message",
    [
        ("scoth", ["scotch", "heft"], "unknown placer 'scoth'; did you mean 'scotch'?"),
        ("zzz", ["heft", "a"], "unknown placer 'zzz'; known: a, heft"),
        ("zzz", [], "unknown placer 'zzz'"),
        ("dp", ["dp_replicate", "dp_shard", "tp"], "unknown placer 'dp'; did you mean 'dp_replicate' or 'dp_shard'?"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, known, message):
    assert str(UnknownName("placer", name, known)) == message


@pytest.mark.parametrize(
    "name, typed",
    [
        ("my_model.py", "my_model.py:NAME"),
        ("heft,expert", "simdev bench -p heft -p expert"),
        ("HEFT", "did you mean 'heft'?"),
        ("H100", "did you mean 'dgx-h100'?"),
        ("dgx-h100[node=8]", "did you mean 'dgx-h100[nodes=8]'?"),
        ("dgx-h100[nodes=8", "did you mean 'dgx-h100[nodes=8]'?"),
        ("d", "did you mean 'dgx-h100'?"),
        ("dgx-h100[8]", "did you mean 'dgx-h100[nodes=8]'?"),
        ("4", "; known: 18.4b, dgx-h100, expert, heft"),
        ("hfet", "did you mean 'heft'?"),
        ("heft[a=1,b=2]", "did you mean 'heft'?"),
    ],
)
def test_a_usual_mistake_is_answered_with_what_to_type(name, typed):
    assert str(UnknownName("placer", name, ["heft", "expert", "dgx-h100", "18.4b"])).endswith(typed)


def test_a_file_without_a_name_is_answered_with_what_it_holds(tmp_path):
    (tmp_path / "mine.py").write_text(
        "raise SystemExit('executed')\ndef _inner(): ...\ndef step(): ...\ndef other(): ...\n"
    )
    where = tmp_path / "mine.py"
    assert str(UnknownName("workload", str(where), [])).endswith(f"too: {where}:step or {where}:other")
    where.write_text("def (")
    assert str(UnknownName("workload", str(where), [])).endswith(f"too: {where}:NAME")


@pytest.mark.parametrize("error", [InvalidInput("m", source="s", field="f"), UnknownName("op", "a", ["b"], source="s")])
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert (again.source, again.field) == (error.source, error.field)


# cache


HOME = Path("~/.cache").expanduser()


def test_nothing_is_set_where_the_package_or_the_home_can_be_written_to(monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(_cache, "writable", lambda folder: folder == HOME)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    _cache.ensure()
    assert "NUMBA_CACHE_DIR" not in os.environ


def test_a_folder_that_is_not_there_yet_counts_as_the_one_above(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path)
    assert _cache.writable(tmp_path / "a" / "b") and not _cache.writable(tmp_path.parent)


def test_a_read_only_installation_without_a_home_compiles_and_leaves_no_litter(tmp_path):
    code = (
        "import os; os.access = lambda *_: False; import simdev; folder = os.environ['NUMBA_CACHE_DIR'];"
        "assert os.path.isdir(folder); print(folder)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path)), done.stderr
    assert not any(tmp_path.iterdir())


def test_kernels_older_than_any_kernel_source_are_forgotten(tmp_path):
    (tmp_path / "__pycache__").mkdir()
    for number, name in enumerate(("__pycache__/old.nbi", "general.py", "__pycache__/new.nbi", "notes.md"), 1):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
    _cache.drop_stale(tmp_path)
    assert [path.name for path in (tmp_path / "__pycache__").iterdir()] == ["new.nbi"]


def test_kernels_that_call_a_changed_one_are_forgotten_too(tmp_path):
    files = ("user/__pycache__/old.nbi", "user/_own.py", "user/__pycache__/new.nbi", "folder/general.py")
    for number, name in enumerate(files, 1):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
    os.utime(tmp_path / "folder/general.py", (0, 0))
    _cache.drop_stale(tmp_path / "folder", tmp_path / "user")
    assert [path.name for path in (tmp_path / "user" / "__pycache__").iterdir()] == ["new.nbi"]
    os.utime(tmp_path / "folder/general.py", (9, 9))
    _cache.drop_stale(tmp_path / "folder", tmp_path / "user")
    assert not any((tmp_path / "user" / "__pycache__").iterdir())


# files


ROOT = Path(__file__).parents[1]


def test_a_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_error_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a.txt").read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_text(path, "new")
    assert os.read(reader, 10) == b"new" and stat.S_ISFIFO(path.stat().st_mode)
    os.close(reader)


@pytest.mark.parametrize("path", ["no/such/folder", "."])
def test_what_cannot_be_written_is_named(tmp_path, path):
    with pytest.raises(InvalidInput, match=str(tmp_path)):
        write_text(tmp_path / path, "new")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named():
    with pytest.raises(InvalidInput, match="/dev/full: No space left"):
        write_text("/dev/full", "new")


# Reading


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
def test_reading_ends_at_the_limit(tmp_path):
    with pytest.raises(InvalidInput, match="/dev/zero: larger than 1000 bytes: refused"):
        read_bytes("/dev/zero", 1000)
    (tmp_path / "link.json").symlink_to("/dev/zero")
    with pytest.raises(InvalidInput, match="link.json: larger than"):
        read_json(tmp_path / "link.json", 1000)
    with pytest.raises(InvalidInput, match="/dev/zero: not a regular file"):
        list(read_lines("/dev/zero", longest=1000))
    (tmp_path / "line").write_bytes(bytes(1001))
    with pytest.raises(InvalidInput, match="line: larger than 1000 bytes"):
        list(read_lines(tmp_path / "line", longest=1000))
    with pytest.raises(InvalidInput, match="/dev/zero: not a regular file"), open_zip("/dev/zero"):
        pass


def test_a_sparse_file_is_refused_by_its_size(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(4 << 30)
    for read in (read_bytes, read_text, read_json, read_toml):
        with pytest.raises(InvalidInput, match="sparse: larger than"):
            read(tmp_path / "sparse")
    with pytest.raises(InvalidInput, match="sparse: larger than"), open_zip(tmp_path / "sparse"):
        pass


def test_every_reader_of_results_has_a_limit(tmp_path):
    """The files of a result folder, each a sparse file of 4 GB or a link to /dev/zero."""
    from simdev.bench import journal, rows
    from simdev.problem.graph_file import load_graph
    from simdev.problem.topology import load_topology

    (tmp_path / "placements").mkdir()
    names = ["results.csv", "curves.csv", "journal.jsonl", "placements/00.npz", "graph.npz", "machine.toml"]
    for link in (False, True):
        for name in names:
            path = tmp_path / name
            path.unlink(missing_ok=True)
            if link and os.path.exists("/dev/zero") and name != "journal.jsonl":  # which is no file then: a new one
                path.symlink_to("/dev/zero")
            else:
                path.touch()
                os.truncate(path, 4 << 30)
        for read in (
            lambda: rows.read_rows(tmp_path / "results.csv"),
            lambda: journal.read_curves(tmp_path / "curves.csv"),
            lambda: journal.Journal(tmp_path / "journal.jsonl"),
            lambda: stored_placement(tmp_path, "00"),
            lambda: load_graph(tmp_path / "graph.npz"),
            lambda: load_topology(tmp_path / "machine.toml"),
        ):
            with pytest.raises(InvalidInput, match="larger than|not a regular file"):
                read()


@pytest.mark.parametrize(
    "text",
    ["", "[", "NaN", "[1e999]", "[" * 100_000, "9" * 5000, '"\\ud800"', '{"a": Infinity}', b"\xff\xfe{}", "\ufeff"],
)
def test_what_is_no_json_is_one_sentence(text):
    with pytest.raises(InvalidInput, match="here: not JSON") as caught:
        parse_json(text, "here")
    assert len(str(caught.value)) < 500


def test_json_keeps_what_is_json():
    assert parse_json('{"a": [1, 2.5, null, "\\ud83d\\ude00"]}', "here") == {"a": [1, 2.5, None, "\U0001f600"]}


# Cells


@pytest.mark.parametrize("cell", ["=1+1", "+x", "-x", "@SUM(A1)", "\tx", "\rx", "'=x", "''=x", "\uff1dx", "=", "--1"])
def test_no_cell_becomes_a_formula(cell):
    assert guarded(cell) == "'" + cell and unguarded(guarded(cell)) == cell


@pytest.mark.parametrize("cell", ["", "a", "-1.5", "+3", "1e-9", "-2.5%", "'x", "'", "a=b", 3, -2.5, None])
def test_other_cells_stay_as_they_are(cell):
    assert guarded(cell) == cell and (not isinstance(cell, str) or unguarded(cell) == cell)


@settings(deadline=None, derandomize=True)  # a slow computer is no failure
@given(st.text(alphabet=st.sampled_from("'=+-@\t1.ex"), max_size=8))
def test_every_cell_is_read_back(cell):
    assert unguarded(guarded(cell)) == cell


def test_tables_hold_no_formula(tmp_path):
    write_table(tmp_path / "a.csv", ["name", "ns"], [["=cmd()", -1.5], ["@x", 2]])
    assert (tmp_path / "a.csv").read_text() == "name,ns\n'=cmd(),-1.5\n'@x,2\n"


# What killed processes leave


def test_unfinished_files_are_swept(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".keep").write_text("mine")
    code = (
        "import os, sys\nfrom simdev.files import replacing\n"
        "with replacing(sys.argv[1]) as file:\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a" / "b.csv")], timeout=600)
    assert len(os.listdir(tmp_path / "a")) == 2
    assert sweep(tmp_path) == 1 and os.listdir(tmp_path / "a") == [".keep"]


def gzipped(path, size):
    """A gzip file that unpacks to ``size`` zero bytes."""
    with gzip.open(path, "wb") as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return path


def test_zipped_text_is_read_within_a_limit(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress("\ufeffä,b\r\n1,2\n".encode()))
    with open_text(path) as file:
        assert list(file) == ["ä,b\r\n", "1,2\n"]
    (tmp_path / "a.csv").write_text("plain", encoding="utf-8")
    assert read_zipped(tmp_path / "a.csv") == "plain"
    bomb = gzipped(tmp_path / "bomb.gz", 4 << 20)
    with pytest.raises(InvalidInput, match="bomb.gz: larger than 1048576 bytes: refused"):
        read_zipped(bomb, 1 << 20)
    tracemalloc.start()
    with pytest.raises(InvalidInput, match="refused"), open_text(bomb, 1 << 20) as file:
        file.read(10)
        while file.read(1 << 16):
            pass
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "data, reason",
    [(b"\x1f\x8bdamaged", "method|block|header|file"), (b"\xff\xfe", "not text"), (None, "No such file")],
)
def test_damaged_text_is_refused(tmp_path, data, reason):
    if data is not None:
        (tmp_path / "a").write_bytes(data)
    with pytest.raises(InvalidInput, match=reason):
        read_zipped(tmp_path / "a")


def test_the_end_of_a_truncated_archive_can_be_caught_inside(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"a,b\n" * 100_000)[:-20])
    with open_text(tmp_path / "a.gz") as file, pytest.raises(EOFError):
        list(file)
    with pytest.raises(InvalidInput, match="ended before"):
        read_zipped(tmp_path / "a.gz")


def functions_that_write_csv():
    """File, name and source of every function of simdev and its placers that writes CSV."""
    for path in [*(ROOT / "simdev").rglob("*.py"), *(ROOT / "baselines").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "csv.writer(" in text or "csv.DictWriter(" in text else ():
            if isinstance(node, ast.FunctionDef):
                source = ast.get_source_segment(text, node)
                if "csv.writer(" in source or "csv.DictWriter(" in source:
                    yield path.relative_to(ROOT).as_posix(), node.name, source


def test_every_function_that_writes_csv_guards_its_cells():
    found = list(functions_that_write_csv())
    assert len(found) >= 6
    own = {"simdev/studies/shipped_graphs.py"}  # writes names of shipped workloads only
    assert [f"{path}: {name}" for path, name, source in found if path not in own and "guarded" not in source] == []


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_a_lack_of_address_space_is_said_before_a_library_is_loaded():
    """What was seen: OpenBLAS waited for ever, libstdc++ aborted, OpenBLAS sent the signal of Ctrl-C."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (400 << 20, -1)); import simdev.__main__ as m; "
    code += "import sys; sys.argv = ['simdev', 'simulate', 'transformer-xl-2', 'p100x2']; m.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (2, "simdev: error: the memory does not suffice\n")
