"""The command line: its answers and refusals; and the doctor, which names what is there and what is missing."""

import errno
import inspect
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import typer

from simdev import sim
from simdev.cli import doctor, pace, progress
from simdev.cli import main as cli
from simdev.cli.app import EXAMPLE_OF
from simdev.errors import Unsupported
from simdev.placers import placer, registry
from simdev.problem.graph import GraphBuilder
from simdev.problem.graph_file import load_graph, read_npz, save_graph
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim import simulate_many

ROOT = Path(__file__).parents[2]


@pytest.fixture
def graph(tmp_path):
    builder = GraphBuilder("pair")
    x = builder.op("x", "mm", flops=10**9, outputs=[1 << 20], persistent_bytes=1 << 20)
    builder.op("y", "relu", inputs=builder.outputs(x), flops=1 << 18, outputs=[1 << 20])
    save_graph(builder.build(), tmp_path / "pair.npz")
    return tmp_path / "pair.npz"


def assert_refused(answer, *words):
    code, _, errors = answer
    assert code == 2, errors
    *before, last = errors.strip().splitlines()
    assert last.startswith("simdev: error: ") and not any("rror" in line for line in before)  # progress lines at most
    for word in words:
        assert str(word) in last


# what works


def test_help_shows_every_command_under_a_topic(simdev):
    from simdev.cli.main import app

    code, out, _ = simdev("--help")
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    for entry in app.registered_commands:
        assert not entry.hidden and out.count(f"\n  {entry.name} ") == 1
    assert len(app.registered_commands) + 1 <= 26 and out.count("\n  study ") == 1
    assert out.index("Place and simulate:") < out.index("Benchmark:") < out.index("About simdev:")


def test_studies_stand_under_study_and_an_old_name_says_so(simdev):
    from simdev.cli.app import app, study

    code, out, _ = simdev("study", "--help")
    names = {entry.name for entry in study.registered_commands}
    assert code == 0 and len(names) >= 11 and not names & {entry.name for entry in app.registered_commands}
    for name in names:
        assert f" {name} " in out
        assert_refused(simdev(name, "--help"), f"simdev {name} is now simdev study {name}")


def test_every_command_prints_json():
    from simdev.cli.app import app, study

    for entry in [*app.registered_commands, *study.registered_commands]:
        option = inspect.signature(entry.callback).parameters.get("as_json")
        assert option is not None and option.default is False, f"{entry.name} has no --json"


def test_json_of_a_bench_its_archive_and_its_pictures(simdev, graph, tmp_path):
    out, archive, picture, page = (tmp_path / name for name in ("out", "out.zip", "run.svg", "page.html"))
    code, text, _ = simdev("bench", "-w", graph, "-t", "p100x2", "-p", "single-gpu", "-o", out, "--json")
    board = json.loads(text)
    assert code == 0 and board["ranking"][0]["placer"] == "single-gpu" and len(board["leaderboard"]) == 1
    assert json.loads(simdev("leaderboard", out, "--json")[1]) == board
    packed = json.loads(simdev("submit", out, "-o", archive, "--json")[1])
    assert packed == {"written": [str(archive)], "rows": 1}
    seconds = float(board["leaderboard"][0]["step_time_s"])
    drawn = json.loads(simdev("view", out, "-o", picture, "--json")[1])
    assert drawn == {"written": [str(picture)], "step_time_s": pytest.approx(seconds)}
    assert json.loads(simdev("leaderboard", out, "--html", page, "--json")[1]) == {"written": [str(page)]}


def test_json_has_no_infinity(capsys):
    from simdev.cli.tables import print_answer

    print_answer({"a": float("inf"), "b": [float("nan"), 1.5]}, ["text"], True)
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5]}
    print_answer({"a": 1}, ["one", "two"], False)
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_table_is_json_with_numbers(capsys):
    from simdev.cli.tables import print_figures

    print_figures(["a", "b", "c"], [["x 1", "1,234.5", "-7"], ["**no**", "", "1e-3"]], True, [Path("f")], why=["y"])
    rows = [{"a": "x 1", "b": 1234.5, "c": -7}, {"a": "no", "b": None, "c": 0.001}]
    assert json.loads(capsys.readouterr().out) == {"rows": rows, "why": ["y"], "written": ["f"]}


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("simdev bench -p loc", "local-search"),
        ("simdev simulate incep", "inception-v3"),
        ("simdev simulate inception-v3 p100x4", "p100x4"),
        ("simdev train -w gpt2", "gpt2-medium"),
        ("simdev plan llam", "llama3-8b"),
        ("simdev plan gpt dgx-a", "dgx-a100"),
        ("simdev plan --planner meg", "megatron"),
        ("simdev plan --framework kem", "kempnerforge"),
        ("simdev plan --write torcht", "torchtitan"),
        ("simdev bench --planner alp", "alpa"),
        ("simdev list mod", "models"),
    ],
)
def test_the_shell_completes_names(typed, offered, monkeypatch, capsys):
    from simdev.cli.main import app

    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_SIMDEV_COMPLETE": "complete_bash"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        app(prog_name="simdev")
    assert offered in capsys.readouterr().out.split()


def test_version(simdev):
    import simdev as package

    assert simdev("--version") == (0, f"simdev {package.__version__}\n", "")


def test_python_m_simdev():
    done = subprocess.run([sys.executable, "-m", "simdev", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "verify" in done.stdout


def test_help_loads_nothing_heavy():
    code = (
        "import sys, simdev.cli.main; print({'numpy', 'numba', 'torch', 'pandas', 'matplotlib'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_list(simdev):
    code, out, _ = simdev("list", "--json")
    listing = json.loads(out)
    assert code == 0 and {"workloads", "topologies", "placers", "planners", "models"} == set(listing)
    assert "single-gpu" in [line["name"] for line in listing["placers"]]
    assert "single-gpu" in simdev("list", "placers")[1]


def test_list_shows_what_a_file_registers(simdev, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from simdev import placer, planner\n"
        "@planner('first', version=3, family='mine', defaults={'starts': 2}, source='none')\n"
        "def first(job, *, rng, budget, starts):\n    'The first.'\n"
        "@placer('second', version=1, family='mine')\ndef second(problem, *, rng, budget):\n    'The second.'\n"
    )
    listing = json.loads(simdev("list", tmp_path / "mine.py", "--json")[1])
    assert {shelf: [line["name"] for line in lines] for shelf, lines in listing.items()} == {
        "placers": ["second"],
        "planners": ["first"],
    }
    assert listing["planners"][0]["version"] == "v3" and listing["planners"][0]["params"] == {"starts": 2}
    (tmp_path / "empty.py").write_text("")
    assert_refused(simdev("list", tmp_path / "empty.py"), "empty.py: registers nothing")


def test_the_order_of_ready_ops_is_no_policy(simdev, graph, tmp_path, monkeypatch):
    for order in ("fifo", "priority", "program"):
        assert simdev("place", graph, "p100x2", "-p", "single-gpu", "--order", order)[0] == 0
    monkeypatch.chdir(tmp_path)  # a trained policy may have any name
    assert_refused(simdev("place", graph, "p100x2", "--policy", "fifo"), Path("fifo") / "policy.json")
    assert_refused(simdev("place", graph, "p100x2", "--policy", "fifo", "-p", "single-gpu"), "--placer or --policy")


ENDLESS = """
from simdev import Placement, placer
@placer('endless', version=1, family='mine', searches=True, defaults={'stops': -1})
def endless(problem, *, rng, budget, stops):
    "On the host, then on the first GPU, until the budget ends or the user stops it."
    best = None
    while budget.open:
        if budget.used == stops:
            raise KeyboardInterrupt
        best = [1 if budget.used else 0] * problem.graph.n_ops
        budget.evaluate(best)
    return Placement(best)
"""


def test_seconds_end_a_search_and_an_interrupt_answers_with_its_best(simdev, graph, tmp_path):
    mine, out = tmp_path / "mine.py", tmp_path / "found.json"
    mine.write_text(ENDLESS)
    one = simdev("place", graph, "p100x2", "-p", "single-gpu", "--json")
    code, found, errors = simdev("place", graph, "p100x2", "-p", f"{mine}:endless", "--seconds", "0.2", "--json")
    assert (code, errors) == (0, "") and json.loads(found)["step_ns"] == json.loads(one[1])["step_ns"]
    stopped = ("place", graph, "p100x2", "--json", "-p")
    code, found, errors = simdev(*stopped, f"{mine}:endless[stops=2]", "-o", out)
    assert (code, errors) == (0, "simdev: interrupted after 2 evaluations; the best placement so far\n")
    assert json.loads(found)["step_ns"] == json.loads(one[1])["step_ns"] and out.is_file()
    assert simdev(*stopped, f"{mine}:endless[stops=0]")[0] == 130
    assert_refused(simdev(*stopped, "single-gpu", "--seconds", "0"), "--seconds", "not positive")


def test_place_then_simulate_with_both_engines(simdev, graph, tmp_path):
    placed = tmp_path / "placed.json"
    code, out, _ = simdev("place", graph, "p100x2", "-p", "single-gpu", "-o", placed)
    assert code == 0 and "ms" in out
    answers = []
    for engine in ("fast", "reference"):
        code, out, _ = simdev("simulate", graph, "p100x2", "--placement", placed, "--engine", engine, "--json")
        assert code == 0
        answers.append(json.loads(out))
    assert answers[0] == answers[1] and answers[0]["step_ns"] > 0
    assert answers[0]["devices"]["gpu0"]["ops"] == 2
    direct = json.loads(simdev("simulate", graph, "p100x2", "-p", "single-gpu", "--json")[1])
    assert direct == answers[0]


def test_bound_is_not_above_the_step_time(simdev, graph):
    bound = json.loads(simdev("bound", graph, "p100x2", "--json")[1])["lower_bound_s"]
    step = json.loads(simdev("simulate", graph, "p100x2", "-p", "single-gpu", "--json")[1])["step_time_s"]
    assert 0 < bound <= step


def test_bound_of_a_solver(simdev, tmp_path):
    builder = GraphBuilder("fan")
    root = builder.op("root", "mm", flops=10**9, outputs=[10**6])
    leaves = [
        builder.op(f"leaf{i}", "mm", inputs=builder.outputs(root), flops=10**10 * (i + 1), outputs=[10**6])
        for i in range(5)
    ]
    builder.op("join", "mm", inputs=[t for leaf in leaves for t in builder.outputs(leaf)], flops=10**9)
    path = tmp_path / "fan.npz"
    save_graph(builder.build(), path)
    answer = json.loads(simdev("bound", path, "p100x2", "--seconds", 20, "--json")[1])
    value = {bound["method"]: bound["lower_bound_s"] for bound in answer["bounds"]}
    assert answer["lower_bound_s"] == value.pop("cp-sat, optimal") > max(value.values()) * 1.05
    problem = Problem.build(load_graph(path), load_topology("p100x2"))
    every = np.array(list(itertools.product(problem.topology.accelerators, repeat=7)), np.int32)
    assert answer["lower_bound_s"] * 1e9 <= simulate_many(problem, every).step_ns.min()
    assert_refused(simdev("bound", "nmt", "p100x2", "--seconds", 5), "nmt: seconds:", "a solver takes up to 3,000")


def test_bench_verify_compare(simdev, graph, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    options = ("bench", "-w", graph, "-t", "p100x2", "-p", "single-gpu")
    code, out, errors = simdev(*options, "-o", before)
    assert code == 0 and "[1/1]" in errors and "single-gpu" in out and "1 run (1 ok)" in out
    assert simdev("verify", before)[:2] == (0, f"{before}: every row holds (reference engine)\n")
    simdev(*options, "-p", "single-cpu", "-o", after)
    assert simdev("compare", before, before)[1] == "no difference\n"
    lines = json.loads(simdev("compare", before, after, "--json")[1])
    assert [(line["placer"], line["verdict"]) for line in lines] == [("single-cpu", "only after")]
    table = (before / "results.csv").read_text()
    (before / "results.csv").write_text(table.replace(",ok,", ",error,"))
    code, out, errors = simdev("verify", before)
    assert code == 1 and "digest" in out and "differences" in errors


def test_compare_placements(simdev, graph, tmp_path):
    slow, fast = tmp_path / "slow.json", tmp_path / "fast.json"
    simdev("place", graph, "p100x2", "-p", "single-cpu", "-o", slow)
    simdev("place", graph, "p100x2", "-p", "single-gpu", "-o", fast)
    found = simdev("compare", slow, fast, "--graph", graph, "--topology", "p100x2", "--json")[1]
    step = next(line for line in json.loads(found) if line["what"] == "step_time_s")
    assert step["verdict"] == "better" and float(step["change"]) < 0
    assert_refused(simdev("compare", slow, fast), "--graph")


# bad input: graphs


def altered(graph, path, **columns):
    """A copy of a graph file with columns (or the header) replaced, whatever they then are."""
    arrays = {**read_npz(graph), **columns}
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            data = io.BytesIO()
            np.lib.format.write_array(data, array, allow_pickle=True)
            archive.writestr(f"{name}.npy", data.getvalue())
    return path


def header(graph, **fields):
    found = json.loads(read_npz(graph)["header"].tobytes())
    return np.frombuffer(json.dumps({**found, **fields}).encode(), np.uint8)


@pytest.mark.parametrize(
    "columns, word",
    [
        ({"consumers": np.array([0])}, "cyclic"),
        ({"consumers": np.array([7])}, "dangling"),
        ({"op_flops": np.array([-1, 5])}, "op_flops"),
        ({"op_flops": np.array([float("nan"), 5])}, "op_flops"),
        ({"op_flops": np.array([{}, 5], object)}, "pickle"),
        ({"op_flops": np.array([1])}, "length 1"),
        ({"op_bytes_read": np.array([1, 2])}, "fingerprint"),
        ({"header": np.array([1, 2], np.uint8)}, "header"),
    ],
)
def test_altered_graphs(simdev, graph, tmp_path, columns, word):
    bad = altered(graph, tmp_path / "bad.npz", **columns)
    assert_refused(simdev("bound", bad, "p100x2"), bad, word)


@pytest.mark.parametrize("field", [{"kinds": 7}, {"meta": []}, {"format": "1"}, {"op_names": ["x", 3]}])
def test_wrong_json_types_in_a_graph(simdev, graph, tmp_path, field):
    bad = altered(graph, tmp_path / "bad.npz", header=header(graph, **field))
    assert_refused(simdev("bound", bad, "p100x2"), bad, "header", *field)


def test_truncated_and_random_files(simdev, graph, tmp_path):
    bad = tmp_path / "bad.npz"
    for data in (graph.read_bytes()[:-40], b"", b"PK\x03\x04 no archive", os.urandom(1000)):
        bad.write_bytes(data)
        assert_refused(simdev("bound", bad, "p100x2"), bad)


def test_zip_bomb(simdev, tmp_path, monkeypatch):
    monkeypatch.setattr("simdev.problem.graph_file.MAX_UNPACKED", 1 << 20)
    bad = tmp_path / "bomb.npz"
    with zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", bytes(2 << 20))
    assert_refused(simdev("bound", bad, "p100x2"), bad, "refused")


def test_missing_graph_and_folder_for_a_graph(simdev, tmp_path):
    assert_refused(simdev("bound", tmp_path / "no.npz", "p100x2"), "no.npz", "No such file")
    (tmp_path / "dir.npz").mkdir()
    assert_refused(simdev("bound", tmp_path / "dir.npz", "p100x2"), "dir.npz")
    assert_refused(simdev("bench", "-w", tmp_path / "no.npz", "-o", tmp_path / "out"), "no.npz", "No such file")


# bad input: names


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["bound", "gnmt8", "p100x2"], ["workload 'gnmt8'", "did you mean 'gnmt-8'"]),
        (["bound", "GRAPH", "p100x22"], ["topology 'p100x22'", "did you mean 'p100x2'"]),
        (["simulate", "GRAPH", "p100x2", "-p", "single-gpuu"], ["placer", "did you mean 'single-gpu'"]),
        (["simulate", "GRAPH", "p100x2", "-p", "single-gpu[x=1]"], ["parameter 'x'"]),
        (["simulate", "GRAPH", "p100x2"], ["--placement or --placer"]),
        (["simulate", "GRAPH", "p100x2", "--placement", "no.json"], ["no.json", "No such file"]),
        (["bench", "-b", "quik", "-w", "GRAPH"], ["budget 'quik'", "did you mean 'quick'"]),
        (["bench", "--time-limit", "-1"], ["--time-limit"]),
        (["bench", "--seeds", "0", "-w", "GRAPH"], ["seeds"]),
        (["verify", "no-such-folder"], ["no-such-folder", "No such file"]),
        (["compare", "no-such-folder", "nor-this", "--graph", "GRAPH", "--topology", "p100x2"], ["no-such-folder"]),
    ],
)
def test_unknown_names(simdev, graph, arguments, words):
    assert_refused(simdev(*[str(graph) if part == "GRAPH" else part for part in arguments]), *words)


PLAN = "plan llama3-8b dgx-h100 --batch 64"
SIMULATE_PLAN = "simulate-plan llama3-8b dgx-h100 --mesh tp=8"
WRONG = {  # what newcomers type, and what they read
    "simulate inception p100x4 -p heft": "did you mean 'inception-v3' or 'inception-v3-inference'?",
    "simulate nmt p100 -p heft": "did you mean 'p100x2', 'p100x2-v100x2', 'p100x4' or 'p100x8'?",
    "simulate nmt p100x4 -p gdp[rat=1]": "did you mean 'rate'?",
    "simulate nmt p100x4 -p gdp[rate=abc]": "rate: expected a number, got 'abc'",
    "simulate nmt p100x4 -p gdp[rate": "expected NAME or NAME[parameter=value,...]",
    "simulate nmt no.toml -p heft": "no.toml: No such file or directory",
    "simulate nmt p100x4 -p no.py:name": "no.py: no such file",
    "simulate nmt p100x4 -p my_placer.py": "name what the file holds, too: my_placer.py:NAME",
    "simulate nmt p100x4 -p heft --evaluations -5": "--evaluations: -5 is negative",
    "place nmt p100x4 -p heft --seed -1": "--seed: -1 is negative",
    "bench -p heft,expert": "simdev bench -p heft -p expert",
    "bench -p heft -b evaluations=-3": "budget: 'evaluations=-3' is negative",
    "bench -p heft -b seconds=-1": "budget: 'seconds=-1' is negative",
    "bench -p heft -w my_model.py": "my_model.py:NAME",
    "bench --planner serch": "did you mean 'search'?",
    "list placer": "did you mean 'placers'?",
    "costs nmt p100": "did you mean 'p100-pcie'",
    "study fidelty": "did you mean 'fidelity'?",
    "study reproduce nobody": "known: ablations, extensions, gdp",
    "fidelity": "simdev fidelity is now simdev study fidelity",
    "import no.onnx -o x.npz": "no.onnx: No such file or directory",
    "capture llama3-8b -o x.npz": "needs no capture: simdev simulate-plan llama3-8b dgx-h100",
    "capture inception-v3 -o x.npz": "needs no capture: simdev show inception-v3",
    "capture torchvison:resnet50 -o x.npz": "did you mean 'torchvision'?",
    "plan llama3-8 dgx-h100": "did you mean '8b'?",
    "plan llama dgx-h100": "did you mean 'llama3'",
    "plan resnet50 dgx-h100": "'simdev list models' names all",
    "plan my_model.py dgx-h100": "my_model.py:NAME",
    "plan llama3-8b h100": "did you mean 'dgx-h100'",
    "plan llama3-8b dgx-h100[node=8]": "did you mean 'nodes'?",
    "plan llama3-8b dgx-h100[nodes=-8]": "expected a whole number from 1",
    "plan llama3-8b l40sx8-pcie[nodes=2]": "use 8 ranks, or a topology that has one, such as dgx-h100",
    "plan llama3-8b[len=4096] dgx-h100": "did you mean 'length'?",
    "plan llama3-8b[length=-4] dgx-h100": "length: expected a number from 1 on, got -4",
    "plan llama3-8b dgx-h100 --batch -64": "expected a whole number from 1 on, got -64",
    f"{PLAN} --planner serch": "did you mean 'search'?",
    f"{PLAN} --framework deepspeed": "unknown framework 'deepspeed'; known: automodel",
    f"{PLAN} --write megatronlm": "did you mean 'megatron'?",
    "simulate-plan llama3-8b dgx-h100": "a model needs --mesh, such as dp_shard=8,tp=8",
    "simulate-plan llama3-8b dgx-h100 --mesh dp=8": "did you mean 'dp_replicate' or 'dp_shard'?",
    "simulate-plan llama3-8b dgx-h100 --mesh tp=0": "expected a whole number from 1 on, got 0",
    f"{SIMULATE_PLAN} --schedule 2f1b": "did you mean '1f1b'?",
    f"{SIMULATE_PLAN} --microbatches 0": "expected a whole number from 1",
    f"{SIMULATE_PLAN} --slow 3": "expected RANK=FACTOR, such as 3=1.2, got '3'",
    "execute small no.toml --mesh pp=2": "no.toml: No such file or directory",
    "calibrate missing": "missing: no such file or folder",
}


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["help"], "did you mean '--help'?"),
        (["train", "-p", "heft", "-w", "nmt", "-t", "p100x4", "-o", "policy"], "these are: "),
        (["simulate-plan", "llama3-8b", "dgx-h100", "--mesh", "8"], "such as dp_shard=8, got '8'"),
        (["leaderboard", __file__], "is a file; give the folder that holds results.csv or plans.csv"),
        *((command.split(), says) for command, says in WRONG.items()),
    ],
)
def test_a_wrong_guess_says_what_to_give_instead(simdev, arguments, says):
    assert_refused(simdev(*arguments), says)


def test_wrong_arguments_are_answered_with_a_command_that_works(simdev):
    """Each command has an example, and the options and arguments of the example exist."""
    group = typer.main.get_command(cli.app)
    commands = {name: group.commands[name] for name in group.commands if name != "study"}
    assert commands.keys() == EXAMPLE_OF.keys()
    for name, entry in commands.items():
        _, first, *arguments = shlex.split(EXAMPLE_OF[name])
        assert first == name and entry.make_context(name, arguments).params
        code, _, errors = simdev(name, "--no-such-option")
        assert code == 2 and errors.rstrip().endswith(f". For example: {EXAMPLE_OF[name]}"), errors
    assert_refused(simdev("benhc"), "unknown command 'benhc'", "did you mean 'bench'")


@pytest.mark.parametrize(
    "arguments", [["benhc"], ["bench", "--no-such-option"], ["list", "planets"], ["bound"], ["bench", "-j", "0"]]
)
def test_usage_errors_exit_with_2(simdev, arguments):
    code, _, errors = simdev(*arguments)
    assert code == 2 and "Traceback" not in errors and errors


# bad input: placements and machines


@pytest.mark.parametrize(
    "document, word",
    [
        ("{", "not JSON"),
        ("[]", "'devices'"),
        ('{"devices": 3}', "list or an object"),
        ('{"devices": [0]}', "length 1"),
        ('{"devices": [0, 9]}', "9"),
        ('{"devices": ["gpu0", "gpu7"]}', "gpu7"),
        ('{"devices": [0, 1.5]}', "1.5"),
        ('{"devices": {"x": "gpu0"}}', "'y' has no device"),
        ('{"devices": [0, 0], "priority": ["a", 1]}', "priority"),
        ('{"devices": [0, 0], "fingerprint": "f00"}', "f00"),
    ],
)
def test_bad_placements(simdev, graph, tmp_path, document, word):
    path = tmp_path / "placement.json"
    path.write_text(document)
    assert_refused(simdev("simulate", graph, "p100x2", "--placement", path), path, word)


MACHINE = """
name = "mine"
[kind.small]
memory_gib = 1
peak_tflops = {f32 = 1}
memory_gb_per_s = 100
%s
[[device]]
name = "a"
kind = "small"
[[device]]
name = "b"
kind = "small"
[[link]]
ends = ["a", "%s"]
gb_per_s = %s
latency_us = 1
"""


def machine(tmp_path, extra="", end="b", rate="1"):
    path = tmp_path / "mine.toml"
    path.write_text(MACHINE % (extra, end, rate))
    return path


def test_a_machine_of_the_users_own(simdev, graph, tmp_path):
    code, out, errors = simdev("simulate", graph, machine(tmp_path), "-p", "single-gpu")
    assert code == 0 and "pair on mine" in out, errors


def test_bad_machines(simdev, graph, tmp_path):
    assert_refused(simdev("bound", graph, machine(tmp_path, end="c")), "mine.toml", "'c'")
    assert_refused(simdev("bound", graph, machine(tmp_path, rate="-1")), "mine.toml", "gb_per_s")
    assert_refused(simdev("bound", graph, machine(tmp_path, rate="nan")), "mine.toml", "gb_per_s")
    assert_refused(simdev("bound", graph, machine(tmp_path, rate='"fast"')), "mine.toml", "gb_per_s")
    assert_refused(simdev("bound", graph, machine(tmp_path, rate="[")), "mine.toml")
    assert_refused(simdev("bound", graph, machine(tmp_path, extra='unsupported = ["mm"]')), "'x'", "no device")


def test_a_graph_that_fits_nowhere(simdev, tmp_path):
    builder = GraphBuilder("large")
    builder.op("x", "mm", flops=10**9, outputs=[8], persistent_bytes=1 << 40)
    save_graph(builder.build(), tmp_path / "large.npz")
    for name in ("dp", "local-search", "single-gpu"):
        answer = simdev("place", tmp_path / "large.npz", "p100x2", "-p", name, "-o", tmp_path / "found.json")
        assert_refused(answer, "op 'x' needs 1,024 GiB of persistent bytes", "cpu0, gpu0, gpu1")


def test_disconnected_machine(simdev, graph, tmp_path):
    path = tmp_path / "islands.toml"
    path.write_text(machine(tmp_path).read_text().partition("[[link]]")[0])
    (tmp_path / "apart.json").write_text('{"devices": ["a", "b"]}')
    assert_refused(simdev("simulate", graph, path, "--placement", tmp_path / "apart.json"), "no route")


def test_bench_takes_the_graph_files_that_simulate_takes(simdev, tmp_path):
    source = tmp_path / "tiny.json"
    ops = [{"name": "a", "kind": "mm", "flops": 10**9, "outputs": [8]}, {"name": "b", "kind": "mm", "inputs": ["a"]}]
    source.write_text(json.dumps({"ops": ops}))
    assert simdev("bench", "-w", source, "-t", "p100x2", "-p", "single-gpu", "-o", tmp_path / "out")[0] == 0
    source.unlink()  # the folder keeps its graph
    assert simdev("verify", tmp_path / "out")[0] == 0


# bad input: folders and disks


def test_unwritable_places(simdev, graph, tmp_path):
    (tmp_path / "file").write_text("")
    options = ("bench", "-w", graph, "-t", "p100x2", "-p", "single-gpu", "-o")
    assert_refused(simdev(*options, tmp_path / "file"), tmp_path / "file", "cannot be written")
    assert_refused(simdev(*options, tmp_path / "file" / "below"), "cannot be written")
    assert_refused(simdev(*options, "/proc/simdev"), "/proc/simdev", "cannot be written")
    place = ("place", graph, "p100x2", "-p", "single-gpu", "-o")
    assert_refused(simdev(*place, tmp_path / "no" / "such.json"), "such.json", "No such file")
    assert_refused(simdev(*place, tmp_path), "is a folder; name a file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_loses_nothing(simdev, graph, tmp_path):
    out = tmp_path / "out"
    options = ("bench", "-w", graph, "-t", "p100x2", "-o", out)
    simdev(*options, "-p", "single-gpu")
    table = (out / "results.csv").read_bytes()
    kept = (out / "journal.jsonl").rename(tmp_path / "kept.jsonl")
    (out / "journal.jsonl").symlink_to("/dev/full")
    assert_refused(simdev(*options, "-p", "single-cpu"), "journal.jsonl: No space left")
    assert (out / "results.csv").read_bytes() == table
    (out / "journal.jsonl").unlink()
    kept.rename(out / "journal.jsonl")
    assert simdev(*options, "-p", "single-cpu")[0] == 0
    assert simdev("verify", out, "--engine", "fast")[0] == 0
    assert_refused(simdev("place", graph, "p100x2", "-p", "single-gpu", "-o", "/dev/full"), "/dev/full: No space left")


def test_an_unwritable_place_is_told_before_the_work(simdev, graph, tmp_path):
    out = tmp_path / "no" / "such.npz"
    assert_refused(simdev("capture", tmp_path / "none.py:make_step", "-o", out), out, "No such file")
    assert_refused(simdev("import", tmp_path / "none.json", "-o", out), out, "No such file")
    assert_refused(simdev("compare", tmp_path / "old", tmp_path / "new"), tmp_path / "old", "No such file")


def test_a_locked_folder(simdev, graph, tmp_path):
    from simdev.bench.bench import locked

    with locked(tmp_path):
        assert_refused(simdev("bench", "-w", graph, "-t", "p100x2", "-o", tmp_path), "another bench is writing")


@pytest.mark.parametrize("damage", ["x" * 10, "a,b\n1,2\n", None])
def test_damaged_results(simdev, graph, tmp_path, damage):
    simdev("bench", "-w", graph, "-t", "p100x2", "-p", "single-gpu", "-o", tmp_path)
    path = tmp_path / "results.csv"
    path.write_text(path.read_text().replace(",ok,", ",maybe,") if damage is None else damage)
    assert_refused(simdev("verify", tmp_path), "results.csv", "status" if damage is None else "header")


def test_import_a_graph_with_its_times(simdev, tmp_path):
    source, out, costs = (tmp_path / name for name in ("tiny.json", "tiny.npz", "costs.json"))
    ops = [{"name": "a", "kind": "mm", "outputs": [8], "ns": {"p100-pcie": 5_000_000}}, {"name": "b", "kind": "relu"}]
    source.write_text(json.dumps({"ops": [ops[0], {**ops[1], "inputs": ["a"]}]}))
    code, said, errors = simdev("import", source, "-o", out, "--costs", costs, "--json")
    assert code == 0 and load_graph(out).n_ops == 2, errors
    sizes = {"ops": 2, "tensors": 1, "edges": 1}
    assert json.loads(said) == {"written": [str(out), str(costs)], **sizes, "measured_on": ["p100-pcie"]}
    plain, measured = (
        json.loads(simdev("simulate", out, "p100x2", "-p", "single-gpu", "--json", *more)[1])
        for more in ((), ("--costs", costs))
    )
    assert plain["step_ns"] < 5_000_000 < measured["step_ns"]
    assert_refused(simdev("import", source, "-o", out, "-f", "onxx"), "format 'onxx'", "did you mean 'onnx'")
    source.write_text(json.dumps({"ops": [ops[1]]}))
    assert_refused(simdev("import", source, "-o", out, "--costs", costs), "no measured times")


def test_show(simdev, graph, tmp_path):
    assert json.loads(simdev("show", graph, "--json")[1])["ops"] == 2
    assert "gpu0" in simdev("show", "p100x2")[1]
    assert simdev("show", "p100x2", "-o", tmp_path / "p.svg")[0] == 0
    assert (tmp_path / "p.svg").stat().st_size > 1000
    assert_refused(simdev("show", graph, "-o", tmp_path / "p.svg"), "only topologies are drawn")
    assert_refused(simdev("show", "p100x3"), "p100x3")


def test_capture_names_the_users_mistakes(simdev, tmp_path):
    pytest.importorskip("torch")
    assert_refused(simdev("capture", tmp_path / "no.py", "-o", tmp_path / "x.npz"))
    assert_refused(simdev("capture", f"{tmp_path}/no.py:make", "-o", tmp_path / "x.npz"))


def test_what_needs_pytorch_says_so_where_it_is_absent(simdev, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "step.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 2)\n")
    answer = simdev("capture", f"{tmp_path}/step.py:make", "-o", tmp_path / "x.npz")
    assert_refused(answer, "pip install 'simdev[capture]'")
    assert_refused(simdev("simulate-plan", "llama3-8b", "dgx-h100", "--mesh", "dp_shard=8"), "needs PyTorch")


LITTLE = "simdev: error: the memory does not suffice\n"


def hides(error, cause):
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    "error, code, message",
    [
        (KeyboardInterrupt(), 130, "simdev: interrupted\n"),
        (MemoryError(), 2, LITTLE),
        (RuntimeError("can't start new thread"), 2, LITTLE),
        (ImportError("lib.so: failed to map segment from shared object"), 2, LITTLE),
        (hides(OSError("the library is not found"), OSError(errno.ENOMEM, "Cannot allocate memory")), 2, LITTLE),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "simdev: error: No space left on device\n"),
    ],
)
def test_what_ends_a_command_from_outside_is_one_sentence(monkeypatch, capsys, error, code, message):
    """Also outside of the commands: while they are imported, say."""
    from simdev import __main__

    def end():
        raise error

    monkeypatch.setattr(cli, "app", end)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert (ended.value.code, capsys.readouterr().err) == (code, message)


ENDS = """
import atexit, sys
from simdev import __main__

class Freed:
    def __del__(self):
        print("freed")

kept = Freed()
{loaded}

def main():
    atexit.register(print, "handler")
    print("said")
    {end}

__main__.main = main
__main__.command()
"""


@pytest.mark.parametrize(
    "end, code",
    [("pass", 0), ("sys.exit()", 0), ("sys.exit(2)", 2), ("sys.exit('why')", 1), ("sys.exit(130)", 130), ("1 / 0", 1)],
)
def test_a_search_of_plans_ends_without_freeing_its_objects(end, code):
    """With its exit code, after what other code wants to be called, and with all that it printed."""

    def run(loaded):
        command = [sys.executable, "-c", ENDS.format(end=end, loaded=loaded)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stderr
        assert ("ZeroDivisionError" in done.stderr) == (end == "1 / 0") and ("why" in done.stderr) == ("why" in end)
        return done.stdout

    planners = "sys.modules['simdev.planners'] = sys"
    assert run(planners) == "said\nhandler\n"
    users = "from simdev import user_file; sys.modules[user_file._PREFIX + 'one'] = sys"
    for loaded in ("", f"{planners}; {users}"):
        assert run(loaded) == "said\nhandler\nfreed\n", "of other commands and where a user's code ran"


def test_an_interrupted_verification_prints_what_it_found(monkeypatch, capsys):
    from simdev.bench.check import Difference

    def recompute(folder, *, on_row, **_):
        on_row(1, 2, "first", [Difference("first", "step_time_s", "1", "2")])
        raise KeyboardInterrupt

    monkeypatch.setattr("simdev.bench.verify.verify", recompute)
    code, out = run(monkeypatch, capsys, "verify", "folder", "--resume", "kept.jsonl")
    assert (code, out) == (130, "first: step_time_s: 1, recomputed 2\n")


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["simdev", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0, capsys.readouterr().out


def test_json_and_text_tell_the_same(monkeypatch, capsys):
    code, out = run(monkeypatch, capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0 and found["packages"]["main"]["numpy"] and found["solvers"]["HIGHS"] == "available"
    _, text = run(monkeypatch, capsys, "doctor")
    assert found["packages"]["main"]["numpy"] in text and "CP-SAT" in text


def test_limits_that_the_system_does_not_keep_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "_solvers", lambda: {"HIGHS": "available"})
    monkeypatch.setattr("simdev.bench.workers.PROBE", "")  # as on a kernel that ignores the limit
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setenv("SIMDEV_START_METHOD", "spawn")
    found = doctor.diagnose()["limits"]
    assert found["time limit"] == "kept" and found["workers start by"] == "spawn"
    assert found["memory limit"] == "not kept: a run may take more than --memory-limit"
    assert found["processes that a run leaves"].endswith("not kept for those that leave it")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_linux_keeps_every_limit():
    from simdev.bench.workers import kept_limits

    assert all(state.startswith("kept") and "not kept" not in state for state in kept_limits().values())


def test_a_placer_that_needs_what_is_not_here(monkeypatch):
    monkeypatch.setattr(doctor, "_solvers", lambda: {"HIGHS": "available"})
    registry.placers()
    spec = placer.PlacerSpec("needy", 1, "test", lambda problem: None, needs=("no_such_package",))
    monkeypatch.setitem(placer.SHELF, "needy", spec)
    found = doctor.diagnose()
    assert found["placers"]["unavailable"] == {
        "needy": "needs the package no_such_package: pip install no_such_package"
    }
    assert "needs the package no_such_package" in doctor.report(found)


def test_a_plain_installation_has_no_solvers_and_no_problem(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda package: None)
    found = doctor.diagnose()
    assert found["solvers"] == {"CP-SAT": "needs the package ortools: pip install 'simdev[all]'"}
    assert "CP-SAT  needs the package ortools" in doctor.report(found)
    assert not any("HiGHS" in problem for problem in found["problems"])


def test_a_missing_requirement_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_solvers", lambda: {"HIGHS": "available"})
    monkeypatch.setattr(doctor, "_requirements", lambda: ["no_such_package>=1", 'other>=2; extra == "more"'])
    found = doctor.diagnose()
    assert found["packages"] == {"main": {"no_such_package": ""}, "more": {"other": ""}}
    assert any("no_such_package" in problem for problem in found["problems"])


def test_tested_versions_are_named_beside_those_installed(monkeypatch):
    monkeypatch.setattr(doctor, "TESTED", {"numpy": "0.1", "torch": "2.13.0"})
    monkeypatch.setattr(doctor, "_packages", lambda: {"main": {"numpy": "9.9"}, "capture": {"torch": "2.13.0+cpu"}})
    text = doctor.report(doctor.diagnose())
    assert "tested with  numpy 0.1 (here 9.9), torch 2.13.0\n" in text


def test_tested_packages_are_those_of_extras():
    named = {name for packages in doctor._packages().values() for name in packages}
    assert set(doctor.TESTED) <= named


def test_help_has_examples_and_exit_codes(monkeypatch, capsys):
    _, out = run(monkeypatch, capsys, "--help")
    assert "simdev bench --placer all" in out and "130 interrupted" in out
    shown = set(re.findall(r"^ +([a-z-]+) ", out, re.MULTILINE))
    assert {entry.name for entry in cli.app.registered_commands if not entry.hidden} <= shown


@pytest.mark.long
def test_warm_compiles_every_kernel(monkeypatch, capsys):
    code, _ = run(monkeypatch, capsys, "doctor", "--warm")
    assert code == 0
    kernels = Path(sim.__file__).parent / "kernels" / "__pycache__"
    compiled = {path.name.split(".")[0] for path in kernels.glob("*.nbi")}
    assert {"fifo", "priority", "in_order", "fair", "incremental"} <= compiled


def test_a_placer_whose_package_is_missing_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(placer, "find_spec", lambda package: None)
    with pytest.raises(Unsupported, match=r"needs the package jax: pip install 'simdev\[all\]'"):
        registry.find_placer("gdp")[0].place(None, rng=None, budget=None)


def test_steps_tell_the_time_left(capsys, monkeypatch):
    now = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(pace.time, "monotonic", lambda: next(now))
    with progress.steps("checking") as tell:
        tell(1, 25, "first")
        tell(2, 12, "second")
        tell(12, 12, "last")
    assert capsys.readouterr().err.splitlines() == [
        "[1/25] first, about 4 min left",
        "[2/12] second, about 2 min left",
        "[12/12] last",
    ]
