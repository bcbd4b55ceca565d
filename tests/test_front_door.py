"""The front door: every name opens, and type checkers see the same names as the interpreter."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import simdev
from simdev.cli.main import IN_ALL
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
