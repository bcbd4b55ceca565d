"""Rows are data: what they name is resolved to registered names and kept files, and nothing that they name runs."""

import json

import pytest
from small_board import MACHINE, small_board

from simdev.bench import rows, stored
from simdev.bench.submission import submit
from simdev.bench.verify import verify
from simdev.cli import main as cli
from simdev.errors import InvalidInput, UnknownName
from simdev.problem.placement_file import placement_file
from simdev.problem.topology import load_topology
from simdev.report import page


def simdev(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["simdev", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


@pytest.fixture
def evil(tmp_path):
    """A Python file that leaves a mark when it is executed, and the mark."""
    mark = tmp_path / "executed"
    file = tmp_path / "evil.py"
    file.write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    return file, mark


def test_a_folder_is_read_back(tmp_path):
    (row, _) = small_board(tmp_path)
    assert stored.stored_problem(tmp_path, row).graph.fingerprint == row.fingerprint
    assert verify(tmp_path, jobs=1) == []


def commands(folder, out):
    """Every command that reads results, on ``folder``."""
    board = ("leaderboard", folder, "--html", out / "page.html")
    return [
        board, board[:2], ("explain", folder), ("view", folder, "-o", out / "a.json"), ("verify", folder, "-j", 1),
        ("verify", folder, "--rerun", "-j", 1), ("curve", folder, "-o", out / "c.png"), ("compare", folder, folder),
        ("submit", folder, "-o", out / "a.zip"), ("verify", out / "a.zip", "--rerun", "-j", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("cell", ["placer", "workload"])
def test_no_command_executes_what_a_row_names(tmp_path, monkeypatch, evil, cell):
    file, mark = evil
    folder, out = tmp_path / "board", tmp_path / "out"
    out.mkdir()
    small_board(folder, placers=("single-gpu",), **{cell: f"{file}:x"})
    for arguments in commands(folder, out):
        simdev(monkeypatch, *arguments)
        assert not mark.exists(), arguments
    text = (out / "page.html").read_text(encoding="utf-8")
    assert "evil.py:x" in text  # shown as text


def test_a_row_whose_graph_is_gone_is_shown_without_a_picture(tmp_path):
    small_board(tmp_path, workload="/dev/zero.npz", fingerprint="0" * 16)
    (case,) = page.page_data([tmp_path])["cases"].values()
    assert case["gantts"] == [] and case["ops"] is None and "not kept" in case["note"]


def test_a_placement_file_cannot_name_code(tmp_path, monkeypatch, evil, capsys):
    file, mark = evil
    for number, (graph, topology) in enumerate([(f"{file}:x", "p100x2"), ("nmt", str(file)), ("/dev/zero", "p100x2")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        placement = folder / "found.json"
        document = {"graph": graph, "topology": topology, "devices": [0]}
        placement.write_text(json.dumps(document), encoding="utf-8")
        assert simdev(monkeypatch, "explain", placement) == 2
        assert simdev(monkeypatch, "submit", folder, "--name", "me", "-o", tmp_path / "me.zip") == 2
    assert not mark.exists()
    assert "unknown workload" in capsys.readouterr().err


def test_rerun_executes_the_file_that_the_user_names(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from pathlib import Path\nfrom simdev.placers.placer import placer\nfrom simdev.problem.placement import Placement\n"  # noqa: E501
        "@placer('x', version=1, family='test')\ndef x(problem, *, rng, budget):\n"
        "    Path(__file__).with_suffix('.ran').touch()\n    return Placement([0] * problem.graph.n_ops)\n",
        encoding="utf-8",
    )
    small_board(tmp_path / "board", placers=(f"{file}:x",))
    skipped = []
    assert verify(tmp_path / "board", rerun=True, jobs=1, on_skip=lambda *why: skipped.append(why)) == []
    assert "not registered" in skipped[0][1] and not file.with_suffix(".ran").exists()
    assert verify(tmp_path / "board", rerun=True, jobs=1, placers=[f"{file}:x"]) == []
    assert file.with_suffix(".ran").exists()


@pytest.mark.parametrize("key", ["../../x", "/etc/passwd", "", "0" * 65, "A"])
def test_names_that_are_no_names(tmp_path, key):
    if key:
        with pytest.raises(InvalidInput):
            stored.kept_graph(tmp_path, key)
        with pytest.raises(InvalidInput):
            placement_file(tmp_path, key)
    with pytest.raises(UnknownName):
        stored.registered_machine(key)


def test_a_kept_machine_reads_no_device_file_outside_its_folder(tmp_path):
    secret = tmp_path / "secret.toml"
    secret.write_text("not TOML at all", encoding="utf-8")
    (row, _) = small_board(tmp_path / "board")
    machine = stored.kept_machine(tmp_path / "board", row.topology)
    for name in (str(secret), "../../secret.toml"):
        machine.write_text(MACHINE.replace("memory_gib", f'calibrated = "{name}"\nmemory_gib'), encoding="utf-8")
        with pytest.raises(InvalidInput, match="No such file"):  # its own copy, not the secret
            stored.stored_problem(tmp_path / "board", row)
    machine.write_text(MACHINE.replace("memory_gib", 'calibrated = "/etc/passwd"\nmemory_gib'), encoding="utf-8")
    with pytest.raises(InvalidInput, match="neither a name"):
        stored.stored_problem(tmp_path / "board", row)
    submit(tmp_path / "board", tmp_path / "a.zip")
    assert "neither a name" in str(verify(tmp_path / "a.zip", jobs=1)[0])


def test_a_machine_is_kept_with_its_device_files(tmp_path):
    from simdev.problem.topology import DEVICES_DIR

    home = tmp_path / "home"
    home.mkdir()
    for ending in (".toml", ".npz"):
        (home / f"mine{ending}").write_bytes((DEVICES_DIR / "calibrated" / f"v100{ending}").read_bytes())
    text = MACHINE.replace("memory_gib", 'calibrated = "mine.toml"\nmemory_gib')
    (home / "machine.toml").write_text(text, encoding="utf-8")
    stored.keep_machine(str(home / "machine.toml"), tmp_path)
    kept = load_topology(stored.kept_machine(tmp_path, str(home / "machine.toml")), kept=True)
    from simdev.problem.opcost.device import load_calibration

    assert load_calibration(kept.kinds[0].calibrated).table == load_calibration("v100").table


NODES = MACHINE.replace('[[link]]\nends = ["a", "b"]', '[[link]]\nends = [["a", "network"], ["b", "network"]]').replace(
    "[kind.k]", 'switches = ["network"]\n[kind.k]'
)


@pytest.mark.parametrize("topology", ["dgx-h100[nodes=2]", "mine.toml[nodes=3]"])
def test_rows_of_machines_of_several_nodes_are_verified(tmp_path, topology):
    from test_bench import LIMITS, make_graph

    from simdev.bench.bench import bench
    from simdev.bench.matrix import plan

    (tmp_path / "mine.toml").write_text(NODES, encoding="utf-8")
    name = topology if topology.startswith("dgx") else str(tmp_path / topology)
    runs = plan([make_graph(tmp_path / "g.npz")], [name], ["single-gpu"], budget="evaluations=1")
    (row,) = bench(runs, tmp_path / "out", jobs=1, limits=LIMITS)
    assert row.status == "ok" and row.topology == name
    (tmp_path / "mine.toml").unlink()
    assert verify(tmp_path / "out", jobs=1) == []
    submit(tmp_path / "out", tmp_path / "a.zip")
    assert verify(tmp_path / "a.zip", jobs=1) == []


@pytest.mark.parametrize("cell", ["workload", "placer", "error", "machine", "overflow", "bound_method"])
def test_cells_that_a_terminal_would_obey_are_refused(tmp_path, cell):
    from dataclasses import replace

    (row,) = small_board(tmp_path, placers=("single-gpu",))
    rows.write_rows(tmp_path / "results.csv", [replace(row, **{cell: "a\x1b]0;b\x07"})])
    with pytest.raises(InvalidInput, match=f"line 2: {cell}: .* cannot be printed"):
        rows.read_rows(tmp_path / "results.csv", check_digest=False)


def test_a_difference_is_one_short_printable_line():
    from simdev.bench.check import Difference

    text = str(Difference("a row", "overflow", "x" * 10_000, "\x1b[2J"))
    assert len(text) < 500 and text.isprintable() and "recomputed \\x1b[2J" in text


def test_placers_times_workloads_beyond_reason_are_not_ranked(tmp_path, monkeypatch):
    from dataclasses import replace

    from simdev.bench import score

    (row,) = small_board(tmp_path, placers=("single-gpu",))
    many = [replace(row, workload=f"w{n}.npz", placer=f"p{n}") for n in range(11)]
    assert len(score.ranking(many)) == 11
    monkeypatch.setattr(score, "MAX_CELLS", 100)
    with pytest.raises(InvalidInput, match="11 placers on 11 instances: at most 100"):
        score.ranking(many)


def test_a_row_cannot_ask_for_more_time_than_its_budget_of_evaluations_gets():
    from types import SimpleNamespace

    from simdev.bench.check import LIMITS, Check
    from simdev.bench.matrix import BUDGETS

    check = Check("fast", True, frozenset(), True, LIMITS)
    for budget, more in (("seconds=1e300", 0), ("evaluations=999999999999", BUDGETS["standard"].seconds)):
        assert check.of(SimpleNamespace(placer="p", budget=budget)).seconds == LIMITS.seconds + more
