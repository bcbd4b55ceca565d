"""What a bench records, and how rows are read: they are data, and nothing that they name runs."""

import json
from dataclasses import replace
from importlib.metadata import distribution

import numpy as np
import pytest
from small_board import MACHINE, small_board

from simdev.bench import provenance, rows, stored
from simdev.bench.estimate import OVERHEAD_S, TimeLeft
from simdev.bench.gaps import Parts, gap_parts
from simdev.bench.journal import Journal, Results, journal_line, read_journal_line, visible
from simdev.bench.matrix import Run, plan
from simdev.bench.rows import KEY, Row
from simdev.bench.run import PLACING, Instance, blank_row, score
from simdev.bench.stored import stored_problem
from simdev.bench.submission import submit
from simdev.bench.verify import verify
from simdev.bench.workers import Limits
from simdev.cli import main as cli
from simdev.cli.pace import left
from simdev.errors import InvalidInput, UnknownName
from simdev.problem.placement import Placement
from simdev.problem.placement_file import placement_file, store_placement
from simdev.problem.problem import Rules
from simdev.problem.topology import load_topology
from simdev.report import page
from simdev.sim import simulate


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


# the journal of a result folder: what is on the disk is what was found, or it is refused


ROW = Row("w", "t", "fifo/fifo/dataflow", "p", 1, "{}", "evaluations=1", 0, "f" * 16, "c" * 16, "error", "\u00e4")


def folder(path, rows=3):
    path.mkdir(exist_ok=True)
    results = Results(path)
    results.add_bound(("f" * 16, "c" * 16, "fifo/fifo/dataflow"), 12, "chain \u2028")
    for seed in range(rows):
        results.add(Row(**{**vars(ROW), "seed": seed}), None, [(1, 0.5, 100 + seed)])
    results.close()
    return path / "journal.jsonl"


def content(path):
    results = Results(path.parent)
    results.close()
    return results.rows, [results.curve(row.key) for row in results.rows], results.bounds


def test_a_line_is_its_entry():
    entry = {"kind": "bound", "of": ["\u00e4", "}", '"sum": "'], "ns": None, "method": ""}
    line = journal_line(entry)
    assert line.endswith("}\n") and json.loads(line)["of"] == entry["of"]
    assert read_journal_line(line[:-1].encode()) == entry


def test_no_flipped_bit_passes_unnoticed(tmp_path):
    journal = folder(tmp_path / "whole")
    before, whole = content(journal), journal.read_bytes()
    damaged = tmp_path / "damaged" / "journal.jsonl"
    damaged.parent.mkdir()
    rng = np.random.default_rng(0)
    refused = shorter = 0
    for bit in rng.choice(8 * len(whole), 600, replace=False).tolist():
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(data)
        try:
            after = content(damaged)
        except InvalidInput as error:
            refused += "journal.jsonl: line" in str(error)
            continue
        # the end of the last line is gone: its run is executed again
        assert bit // 8 == len(whole) - 1 and after[0] == before[0][:-1] and after[2] == before[2]
        shorter += 1
    assert refused + shorter == 600 and refused > 590


def test_a_journal_of_an_older_version_is_read_and_continued(tmp_path):
    journal = folder(tmp_path / "new")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    old = tmp_path / "old" / "journal.jsonl"
    old.parent.mkdir()
    old.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "sum"}) + "\n" for line in lines))
    assert content(old) == content(journal)
    results = Results(old.parent)
    results.add(Row(**{**vars(ROW), "seed": 7}), None, [])
    results.close()
    assert [row.seed for row in content(old)[0]] == [0, 1, 2, 7]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_short_is_dropped_for_good(tmp_path, cut):
    journal = folder(tmp_path / "torn")
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert [row.seed for row in content(journal)[0]] == [0, 1]
    assert journal.read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"kind": ["row"]}', b'{"kind": "row"}', b'{"kind": "else", "ns": 1}', b"\xff", b"3"]
)
def test_what_is_no_entry_is_named(tmp_path, line):
    (tmp_path / "journal.jsonl").write_bytes(line + b"\n")
    with pytest.raises(InvalidInput, match="journal.jsonl: line 1: not a journal entry") as caught:
        Journal(tmp_path / "journal.jsonl")
    assert len(str(caught.value)) < 500


def test_infinite_numbers_are_named(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"kind": "bound", "of": ["f", "c", "r"], "ns": 1e999, "method": "x"}\n')
    with pytest.raises(InvalidInput, match="line 1: not a journal entry .*1e999 is beyond a double"):
        Results(tmp_path)


# provenance


def test_versions_name_every_library_that_is_installed_and_decides_a_row():
    found = dict(part.split("=") for part in provenance.versions().split())
    for package in (
        "python",
        "simdev",
        "numpy",
        "numba",
        "jax",
        "jaxlib",
        "optax",
        "equinox",
        "ortools",
        "pymetis",
        "pyscotch",
    ):
        assert package == "python" or found[package] == distribution(package).version
    assert all(found.values())


def test_uncommitted_changes_are_a_warning(monkeypatch):
    for commit, warned in (("abc", False), ("", False), ("abc-dirty", True)):
        monkeypatch.setattr(provenance, "commit", lambda commit=commit: commit)
        assert bool(provenance.dirty()) == warned


def test_origins_count_states_of_the_code_and_uncommitted_ones():
    assert provenance.origins(["a1", "a1"]) == "2 rows from 1 state of the code"
    found = provenance.origins(["a1", "b2-dirty", "b2-dirty"])
    assert found == "3 rows from 2 states of the code; 2 of them made with uncommitted changes"


def test_a_machine_names_the_widest_vector_set(monkeypatch):
    assert provenance.vector_set("fpu sse4_2 avx avx2 fma avx512f") == "AVX-512"
    assert provenance.vector_set("fpu sse4_2 avx avx2") == "AVX2"
    assert provenance.vector_set("fp asimd") == "NEON" and provenance.vector_set("") == ""
    text = "processor\t: 0\nmodel name\t: Abacus 2\nflags\t\t: sse4_2 avx2 fma\n\nprocessor\t: 1\nmodel name\t: Other\n"
    monkeypatch.setattr(provenance.Path, "read_text", lambda *_, **__: text)
    provenance.machine.cache_clear()
    assert provenance.machine().startswith("Abacus 2 [AVX2 with FMA], ")
    provenance.machine.cache_clear()


def test_what_differs_between_two_processors():
    new, narrow = "Abacus 2 [AVX-512], 4 cores, Linux", "Abacus 2 [AVX2], 2 cores, Linux"
    assert provenance.differing_processor(new, new.replace("4", "8")) == ""
    assert provenance.differing_processor("Abacus 2, 4 cores, Linux", new) == ""  # a cell of version 0.1.0
    assert provenance.differing_processor(narrow, new) == "AVX2, here AVX-512"
    assert provenance.differing_processor("Abacus 1, 1 cores, Linux", new) == "Abacus 1, here Abacus 2 with AVX-512"


# estimate


def runs_of(*placers, seeds=1):
    return plan(["transformer-xl-2"], ["p100x2"], placers, budget="evaluations=1", seeds=seeds)


def row(run, seconds, status="ok"):
    key = dict(zip(KEY, run.key, strict=True))
    return Row(**key, version=1, fingerprint="f", cost_hash="c", status=status, place_seconds=seconds)


def test_the_time_left_follows_the_finished_runs_of_the_same_placer_or_the_slowest_of_its_kind():
    runs = runs_of("heft", "peft", "m-etf", "genetic", seeds=2)
    heft, peft, metf, genetic = ([r for r in runs if r.placer == name] for name in ("heft", "peft", "m-etf", "genetic"))
    estimate = TimeLeft(Limits(100, 0))
    for run in runs:
        estimate.expect(run, 10 if run.seed == 0 else 20, PLACING.order(run.entry)[:2])
    assert estimate.seconds_left(1, {}) is None  # nothing is known
    estimate.learn(heft[0], row(heft[0], 4.0))
    estimate.learn(metf[0], row(metf[0], 1.0))
    assert estimate.seconds_left(1, {}) is None  # nothing is known about searches
    estimate.learn(genetic[0], row(genetic[0], 30.0))
    # half of what a run of 10 ops took counts in any case, half of it for each op: 1.5 times as much for 20 ops
    known = 6.0 + 1.5 + (4 + 6) + 45 + 5 * OVERHEAD_S  # heft, m-etf, peft (as heft, not as m-etf), genetic
    assert estimate.seconds_left(1, {}) == known
    assert estimate.seconds_left(2, {}) == 45 + OVERHEAD_S  # the longest run alone takes more than half of all
    assert estimate.seconds_left(1, {str(genetic[1]): 40.0}) == known - 40
    estimate.learn(heft[1], row(heft[1], None, "timeout"))  # as long as the limit: 100 s of 20 ops
    estimate.forget(genetic[1])
    assert estimate.seconds_left(1, {}) > known - 45


def test_a_run_that_takes_longer_than_expected_is_taken_to_be_halfway():
    runs = runs_of("heft", "peft", seeds=2)
    heft, peft = ([run for run in runs if run.placer == name] for name in ("heft", "peft"))
    estimate = TimeLeft(Limits(100, 0))
    for run in runs:
        estimate.expect(run, 10, PLACING.order(run.entry)[:2])
    estimate.learn(heft[0], row(heft[0], 1.0))
    assert estimate.seconds_left(1, {}) == 3 + 3 * OVERHEAD_S
    late = {str(peft[0]): 20.0}
    assert estimate.seconds_left(1, late) == 1 + 20 + 40 + 3 * OVERHEAD_S  # heft, the rest of peft, and peft again
    assert estimate.seconds_left(1, {"loading transformer-xl-2": 9.0}) == 3 + 3 * OVERHEAD_S


def test_runs_that_differ_only_in_the_objective_count_one_by_one():
    (run,) = runs_of("heft")
    runs = [run, replace(run, objective="latency")]
    estimate = TimeLeft(Limits(100, 0))
    for run in runs:
        estimate.expect(run, 10, (False, False))
    estimate.learn(runs[0], row(runs[0], 4.0))
    assert estimate.seconds_left(1, {}) == 4 + OVERHEAD_S
    estimate.learn(runs[1], row(runs[1], 4.0))
    assert estimate.seconds_left(1, {}) == 0


def test_the_time_left_in_words():
    assert [left(seconds) for seconds in (None, 0.2, 89, 90, 3600)] == [
        "",
        "about 1 s left",
        "about 89 s left",
        "about 2 min left",
        "about 60 min left",
    ]


# what a gap consists of: a better placement that is known, what lighter rules save, and the rest


def test_the_parts_of_a_gap_multiply_to_the_gap(tmp_path):
    small_board(tmp_path)
    (line,) = gap_parts(tmp_path)
    assert (
        float(line["best ms"]) == float(line["best known ms"]) >= float(line["relaxed ms"]) >= float(line["bound ms"])
    )
    shares = [1 + float(line[name].rstrip("%")) / 100 for name in ("placement weak", "bound weak", "open")]
    assert abs(np.prod(shares) - 1 - float(line["gap"].rstrip("%")) / 100) < 0.002
    assert line["verdict"] in ("closed", "open", "bound weak")


def test_a_better_result_elsewhere_shows_that_the_placement_is_weak(tmp_path):
    small_board(tmp_path / "slow", placers=("single-gpu",), step_ns=10**9, simulated_ns=10**9)
    small_board(tmp_path / "fast", placers=("single-gpu",))
    (alone,), (line,) = gap_parts(tmp_path / "slow"), gap_parts(tmp_path / "slow", [tmp_path / "fast"])
    assert alone["placement weak"] == "0.0%"
    assert float(line["best known ms"]) < 1000 and line["verdict"] == "placement weak"


def test_a_result_of_fifo_counts_for_the_order_track_and_not_the_reverse(tmp_path):
    (row,) = small_board(tmp_path / "fifo", placers=("single-gpu",))
    other = tmp_path / "order"
    (other / "placements").mkdir(parents=True)
    for name in ("graphs", "machines"):
        (tmp_path / "fifo" / name).rename(other / name)
        (tmp_path / "fifo" / name).symlink_to(other / name)
    problem = replace(stored_problem(other, row), rules=Rules("priority"))
    placement = Placement(np.array([0, 1, 0]), np.array([0, 1, 2]))
    instance = Instance(row.workload, row.topology, "priority/fifo/dataflow", row.fingerprint, row.cost_hash, 3)
    run = Run(row.workload, row.topology, instance.rules, "single-gpu", "{}", row.budget, 0)
    slow = score(blank_row(run, instance, row.version), problem, placement, simulate(problem, placement))
    slow = replace(slow, evaluations=0, lower_bound_ns=row.lower_bound_ns)
    assert slow.step_ns > row.step_ns
    rows.write_rows(other / "results.csv", [slow])
    store_placement(other, placement)
    (line,) = gap_parts(other, [tmp_path / "fifo"])
    assert line["verdict"] == "placement weak" and float(line["best known ms"]) == round(row.step_ns / 1e6, 3)
    (line,) = gap_parts(tmp_path / "fifo", [other])
    assert line["placement weak"] == "0.0%"


def test_verdicts():
    assert Parts(0.0, 0.002, 0.003).verdict == "closed"
    assert Parts(0.3, 0.1, 0.1).verdict == "placement weak"
    assert Parts(0.0, 0.3, 0.1).verdict == "bound weak"
    assert Parts(0.1, 0.1, 0.3).verdict == "open"


def test_a_table_of_curves_leaves_out_what_no_picture_shows():
    points = [(1, 0.1, 10_000), (2, 0.2, 9_985), (3, 0.3, 9_980), (5, 0.4, 9_979), (8, 0.5, 9_978)]
    kept = [(1, 0.1, 10_000), (3, 0.3, 9_980), (8, 0.5, 9_978)]
    assert visible(points) == kept == visible(kept)
    assert visible([]) == [] and visible(points[:1]) == points[:1]
