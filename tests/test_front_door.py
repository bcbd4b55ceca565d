"""The front door and what stands around it: names, types, lists of exceptions, the nightly command, release files."""

import ast
import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nightly
import pytest
import release
import typecheck

import simdev
from simdev.errors import IN_ALL
from simdev.placers import registry

ROOT = Path(__file__).parents[1]


def static_names():
    """Name and room of what ``simdev/__init__.py`` imports for type checkers only."""
    tree = ast.parse((ROOT / "simdev" / "__init__.py").read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        (alias.asname, f"{node.module}.{alias.name}")
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_and_the_interpreter_see_the_same_names():
    assert static_names() == {(name, f"simdev.{room}.{name}") for name, room in simdev._HOME.items()}


@pytest.mark.parametrize("name", simdev.__all__)
def test_every_name_opens(name):
    assert getattr(simdev, name) is not None and name in dir(simdev)


def test_the_decorators_register():
    from simdev import placer, workload
    from simdev.graphs import workload as workload_module
    from simdev.placers import placer as placer_module

    @placer("front-door", version=1, family="test")
    def mine(problem, *, rng, budget):
        """Unused."""

    @workload("front-door", family="test")
    def step():
        """Unused."""

    try:
        assert placer_module.SHELF["front-door"].function is mine
        assert workload_module.SHELF["front-door"].function is step
    finally:
        del placer_module.SHELF["front-door"], workload_module.SHELF["front-door"]


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plaser'"):
        simdev.plaser  # noqa: B018


def test_importing_simdev_loads_nothing():
    code = "import sys, simdev; print({'numpy', 'simdev.problem', 'simdev.sim'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("room", ["problem", "placers", "exact"])
def test_a_room_exports_its_names_without_heavy_packages(room):
    heavy = {"jax", "networkx", "numba", "ortools", "pandas", "scipy", "torch"}
    opened = f"import sys, simdev.{room} as room; [getattr(room, name) for name in room.__all__]"
    code = f"{opened}; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "simdev.__version__"}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == simdev.__version__


def test_the_extra_all_holds_what_the_core_does_without():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {extra: names(lines) for extra, lines in project["optional-dependencies"].items()}
    assert extras["all"] == set(IN_ALL) and not extras["all"] & names(project["dependencies"])
    assert "simdev[all]" in project["optional-dependencies"]["test"]
    needed = {package for spec in registry.placers().values() for package in spec.needs}
    assert needed <= extras["all"]


def names(requirements):
    return {re.split(r"[<>=!~\[]", line)[0] for line in requirements}


RUFF = shutil.which("ruff", path=Path(sys.executable).parent) or shutil.which("ruff")


def test_each_exception_is_still_needed():
    if RUFF is None:
        pytest.skip("without the package ruff")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    command = [RUFF, "check", "--no-cache", "--output-format", "json", "--config", "lint.per-file-ignores={}", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    broken = {(Path(one["filename"]).relative_to(ROOT).as_posix(), one["code"]) for one in json.loads(done.stdout)}
    stale = [
        f"{pattern}: {code}"
        for pattern, codes in settings["per-file-ignores"].items()
        for code in codes
        if not any(fnmatch.fnmatch(file, pattern) and rule == code for file, rule in broken)
    ]
    assert stale == []


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run the command on two steps; the second fails until a file is there."""
    steps = {
        "first": ["-c", f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"],
        "second": ["-c", f"print('a reason'); open({str(tmp_path / 'there')!r})"],
    }
    monkeypatch.setattr(
        nightly, "parts", lambda: {"one": {"first": steps["first"]}, "two": {"second": steps["second"]}}
    )
    monkeypatch.setattr(nightly, "checked_out", lambda: "abc")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["nightly.py", "--out", str(tmp_path / "out"), *arguments])
        return nightly.main()

    return run


def test_what_passed_is_not_run_again_and_what_failed_is(call, tmp_path):
    assert call() == 1
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| one | first |" in report and "FAILED (exit code 1)" in report and "a reason" in report
    assert "FileNotFoundError" in report and "simdev abc" in report
    (tmp_path / "there").touch()
    assert call() == 0
    assert (tmp_path / "ran").read_text() == "x"
    assert call("--again", "--only", "one") == 0
    assert (tmp_path / "ran").read_text() == "xx"


def test_other_files_are_checked_anew(call, tmp_path, monkeypatch):
    call("--only", "one")
    monkeypatch.setattr(nightly, "checked_out", lambda: "def")
    call("--only", "one")
    assert (tmp_path / "ran").read_text() == "xx"


def test_a_step_without_end_fails(tmp_path):
    found = nightly.run("endless", ["-c", "import time; time.sleep(600)"], tmp_path, 1.0)
    assert found["outcome"].startswith("FAILED (no end within") and found["seconds"] < 300


def test_every_step_names_a_file_of_the_repository():
    for steps in nightly.parts().values():
        for words in steps.values():
            assert words[0] == "-m" or (nightly.ROOT / words[0]).is_file(), words


VALUES = {
    "version": "9.8.7",
    "date": "2030-01-02",
    "repository": "https://code.example/simdev",
    "documentation": "https://docs.example",
    "doi": "10.1000/1",
    "authors": ["Doe, Jane"],
}


def test_the_files_hold_what_publication_says():
    texts, wanted = release.publication()
    assert texts == wanted, "python tests/tools/release.py --fill"


def test_values_are_written_and_taken_back():
    texts, _ = release.publication()
    there = release.filled(texts, VALUES)
    urls = tomllib.loads(there["pyproject.toml"])["project"]["urls"]
    assert urls == {"Repository": VALUES["repository"], "Documentation": VALUES["documentation"]}
    citation = there["CITATION.cff"]
    for line in (
        "version: 9.8.7",
        "date-released: 2030-01-02",
        "doi: 10.1000/1",
        "repository-code: https://code.example/simdev",
        "  - family-names: Doe",
    ):
        assert line in citation.splitlines()
    assert "site_url: https://docs.example" in there["docs/mkdocs.yml"].splitlines()
    assert '__version__ = "9.8.7"' in there["simdev/__init__.py"].splitlines()
    assert "https://code.example/simdev/actions/workflows/checks.yml/badge.svg" in there["README.md"]
    assert ">9.8.7</text>" in there["docs/pages/badges.svg"]
    nothing = {"version": "1", "date": "2", "repository": "", "documentation": "", "doi": "", "authors": []}
    assert release.filled(there, nothing) == release.filled(texts, nothing)


def test_the_versions_of_the_lock_file_meet_the_project():
    text = release.LOCK.read_text(encoding="utf-8")
    kept = dict(re.findall(r"^([a-z0-9.-]+)==([0-9][\w.!]*)$", text, re.MULTILINE))
    assert len(kept) == len([line for line in text.splitlines() if not line.startswith("#")])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["all"]]
    assert {re.match(r"[\w.-]+", need)[0].lower() for need in needs} <= kept.keys()


def test_the_workflow_runs_what_is_there():
    text = (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    for path in re.findall(r"(?:bash|python) ([\w./]+)", text):
        assert (ROOT / path).is_file(), path


SCRIPT = """
import numpy as np
from simdev import Budget, Placement, Problem, Rules, find_placer, load_topology, load_workload, placer, simulate
from simdev import Simulator, TrainingStep, lower_bound, simulate_many, validate, workload
from simdev import Choice, Job, Mesh, Plan, find_planner, planner, simulate_plan
from simdev.parallel import find_model, load_cluster
from simdev.placers.placer import PlacerSpec
from simdev.planners import Evaluator, PlanBudget

problem = Problem.build(load_workload("nmt"), load_topology("p100x4"), rules=Rules(order="priority"))
spec, parameters = find_placer("heft")
budget = Budget(problem, evaluations=10)
placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget)
schedule = simulate(problem, placement)
validate(problem, placement, schedule)


@placer("mine", version=1, family="mine")
def mine(problem: Problem, *, rng: np.random.Generator, budget: Budget) -> Placement:
    return Placement(np.zeros(problem.graph.n_ops, int))


@workload("mine", family="mine")
def step(batch: int = 3) -> TrainingStep:
    raise NotImplementedError


@planner("mine", version=1, family="mine")
def whole(job: Job, *, rng: np.random.Generator, budget: PlanBudget) -> Choice:
    return Choice(Mesh({"dp_shard": job.ranks}))


model, sizes = find_model("llama3-8b")
job = Job(model, sizes, load_cluster("dgx-h100"), 1024)
choice = find_planner("fsdp")[0].plan(job, rng=np.random.default_rng(0), budget=PlanBudget(Evaluator(job)))
plan: Plan = job.plan(choice)


reveal_type(whole)  # def (job: Job, *, rng: Generator, budget: PlanBudget) -> Choice
reveal_type(choice)  # Choice
reveal_type(choice.mesh)  # Mesh
reveal_type(job.plan(choice))  # Plan
reveal_type(simulate_plan(plan))  # PlanReport[Plan]
reveal_type(simulate_plan(plan).step_ns)  # int
find_planner("fsdp")[0].plan(job)  # error: call-arg
reveal_type(problem)  # Problem
reveal_type(problem.graph.n_ops)  # int
reveal_type(problem.topology.accelerators)  # tuple[int, ...]
reveal_type(spec)  # PlacerSpec
reveal_type(placement)  # Placement
reveal_type(budget.evaluate(placement.devices))  # Score
reveal_type(budget.evaluate(placement.devices).overflow_bytes)  # int | None
reveal_type(schedule.step_ns)  # int
reveal_type(schedule.feasible)  # bool
reveal_type(simulate_many(problem, placement.devices[None]))  # Outcomes
reveal_type(Simulator(problem, placement).move(0, 1))  # int
reveal_type(lower_bound(problem).ns)  # int
reveal_type(mine)  # def (problem: Problem, *, rng: Generator, budget: Budget) -> Placement
reveal_type(step)  # def (batch: int =) -> TrainingStep
problem.grph  # error: attr-defined
spec.place(problem)  # error: call-arg
from simdev import plaser  # error: attr-defined
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    pytest.importorskip("mypy", reason="mypy is not installed")
    return typecheck.make_tree(tmp_path_factory.mktemp("types") / "tree")


def test_most_of_the_code_is_checked():
    assert len(typecheck.ignored()) <= 8
    assert typecheck.share_checked() >= 0.8


def test_every_ignored_entry_is_a_module():
    modules = typecheck.lines_by_module()
    assert [entry for entry in typecheck.ignored() if entry.removesuffix(".*") not in modules] == []


@pytest.mark.slow
def test_a_users_script_gets_real_types(tree):
    (tree / "script.py").write_text(SCRIPT, encoding="utf-8")
    _, lines = typecheck.run_mypy("script.py", tree=tree)
    found = {}
    for line in lines:
        match = re.match(r"script\.py:(\d+): (note: Revealed type is \"(.*)\"|error: .*\[([a-z-]+)\])$", line)
        if match:
            found[int(match[1])] = re.sub(r"\b(?:\w+\.)+", "", match[3] or "") or f"error: {match[4]}"
    wanted = {number: line.split("  # ")[1] for number, line in enumerate(SCRIPT.splitlines(), 1) if "  # " in line}
    assert found == wanted, "\n".join(lines)


def test_benchmarks_are_compared_once_there_is_a_baseline(tmp_path):
    assert not any(option.startswith("--benchmark-compare") for option in nightly.against_saved(tmp_path))
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "0001.json").write_text("{}")
    assert nightly.against_saved(tmp_path)[-1] == "--benchmark-compare-fail=min:50%"
