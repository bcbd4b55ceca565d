"""The how-to pages hold: their placer and machine run. simdev takes every command line in them and in the claims."""

import itertools
import math
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest

from simdev.placers import registry
from simdev.placers.budget import Budget
from simdev.placers.testing import check_placer, random_problem
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.studies.reproduce import EXPERIMENTS

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages" / "howto"
CLAIMS = PAGES.parent / "claims.md"


def blocks(page):
    """Kind, title and text of the fenced blocks of a page."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


def command_lines():
    """Page and arguments of every ``simdev`` command in the pages."""
    for path in sorted(PAGES.glob("*.md")):
        for kind, _, text in blocks(path.name):
            if kind in ("sh", "torch", "text"):
                for line in text.replace("\\\n", " ").splitlines():
                    if line.startswith("simdev "):
                        yield path.name, line
    for line in dict.fromkeys(re.findall(r"`(?:time )?(simdev [^`]+)`", CLAIMS.read_text(encoding="utf-8"))):
        yield CLAIMS.name, line


def write(page, folder):
    """Write the titled blocks of a page to files."""
    for _, title, text in blocks(page):
        if title:
            (folder / title).write_text(text, encoding="utf-8")


@pytest.fixture
def howto_placer(tmp_path):
    write("placer.md", tmp_path)
    return registry.find_placer(f"{tmp_path / 'my_placer.py'}:better-half")[0]


def suitable(problem):
    """Whether the page's placer is for this problem: devices that run every op and reach one another."""
    routes = (problem.costs.pair_class >= 0) | np.eye(problem.topology.n_devices, dtype=bool)
    everywhere = (problem.unit_op_ns >= 0).all() and routes.all()
    return everywhere and len(problem.topology.accelerators) > 1 and problem.graph.n_units > 1


def test_the_placer_keeps_the_rules(howto_placer):
    drawn = (random_problem(np.random.default_rng(seed), rules=Rules()) for seed in itertools.count())
    for number, problem in enumerate(itertools.islice(filter(suitable, drawn), 6)):
        assert check_placer(howto_placer, problem, evaluations=(0, 1, 20)[number % 3]) is not None


@pytest.mark.parametrize("limits", [{"evaluations": 30}, {"evaluations": math.inf, "seconds": 0.3}])
def test_the_placer_works_under_both_kinds_of_budget(howto_placer, limits, clock):
    if not registry.graph_path("transformer-xl-2").is_file():
        pytest.skip("the graph of transformer-xl-2 is not shipped")
    problem = Problem.build(registry.load_workload("transformer-xl-2"), load_topology("p100x4"))
    budget = Budget(problem, **limits)
    placement = howto_placer.place(problem, rng=np.random.default_rng(0), budget=budget)
    assert budget.used and not budget.open
    assert np.array_equal(placement.devices, budget.best)


def test_the_planner_keeps_the_rules(tmp_path):
    pytest.importorskip("torch")
    from simdev.planners import Evaluator, find_planner
    from simdev.planners.testing import check_planner, small_job

    write("planner.md", tmp_path)
    spec, parameters = find_planner(f"{tmp_path / 'my_planner.py'}:neighbours[starts=1]")
    job = small_job()
    evaluator = Evaluator(job)
    choice = check_planner(spec, job, evaluator, evaluations=8, **parameters)
    assert choice is not None and evaluator.outcome(choice).fits
    assert check_planner(spec, job, evaluator, evaluations=0) is None


def test_the_machine_loads(tmp_path):
    write("machine.md", tmp_path)
    machine = load_topology(str(tmp_path / "my_machine.toml"))
    assert machine.name == "my-machine" and len(machine.accelerators) == 2


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda path: path.name)
def test_python_and_toml_are_well_formed(path):
    for kind, title, text in blocks(path.name):
        if kind == "python":
            compile(text, title or path.name, "exec")
        elif kind == "toml":
            tomllib.loads(text)


@pytest.mark.parametrize("page, line", list(command_lines()))
def test_every_command_line_is_understood(page, line):
    import typer.main

    from simdev.cli import main

    program = typer.main.get_command(main.app)
    name, *arguments = shlex.split(line, comments=True)[1:]
    command = program.commands[name]
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    context = command.context_class(command, info_name=name)
    command.make_parser(context).parse_args([argument for argument in arguments if argument != ">"])


VERDICTS = ("holds", "holds, but not by learning", "in part", "does not hold", "not testable", "not tested")


def test_every_claim_of_a_paper_has_a_verdict_and_a_command():
    text = CLAIMS.read_text(encoding="utf-8").partition("## Claims of the papers")[2]
    rows = [re.split(r" \| ?", line.strip("| \n")) for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for paper, claim, verdict, found, *command in rows:
        assert verdict in VERDICTS and found, f"{paper}: {claim}"
        assert command or verdict.startswith("not "), f"{paper}: {claim}"


def test_what_the_commands_of_claims_name_exists():
    """The words of commands that :func:`test_every_command_line_is_understood` does not look up."""
    found = [shlex.split(line) for line in re.findall(r"`((?:simdev|pytest|python) [^`]+)`", CLAIMS.read_text("utf-8"))]
    assert len(found) > 25
    for _, *words in found:
        for flag, value in itertools.pairwise(words):
            if flag == "-p":
                registry.find_placer(value)
            elif flag == "-w":
                assert value in registry.workloads(), value
            elif flag == "-t":
                load_topology(value)
            elif flag == "-k":
                files = (ROOT / words[0]).rglob("test_*.py") if (ROOT / words[0]).is_dir() else [ROOT / words[0]]
                assert any(value in name for path in files for name in named_tests(path)), value
        if words[:2] == ["study", "reproduce"]:
            assert set(words[2:3]) <= set(EXPERIMENTS), words
        for word in words:
            if word.startswith(("tests/", "leaderboard/", "docs/")):
                assert (ROOT / word).exists(), word


def named_tests(path):
    return re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
