"""The picture in ARCHITECTURE.md holds: imports go down its floors, packages are listed, heavy packages are lazy."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (\d) \| (.+) \|$", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE)
FLOOR = {name: int(floor) for floor, names in ROWS for name in re.findall(r"`(\w+)`", names)}
TOP = 7
HEAVY = (
    "torch",
    "jax",
    "equinox",
    "optax",
    "safetensors",
    "ortools",
    "onnx",
    "matplotlib",
    "numba",
    "pymetis",
    "pyscotch",
    "networkx",
    "pandas",
)


def modules(folder, package):
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def imports(path, module):
    """Every name that a file imports from this project, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "simdev"}


def room(name):
    """``simdev.sim.fast.run`` -> ``sim``; the front door is no room."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else None


HOUSE = [(module, path) for module, path in modules("simdev", "simdev") if room(module)]


def test_every_module_has_a_floor():
    rooms = {room(module) for module, _ in HOUSE if not room(module).startswith("_")}
    assert rooms - set(FLOOR) == set(), "give it a floor in ARCHITECTURE.md"


@pytest.mark.parametrize("module, path", HOUSE, ids=[module for module, _ in HOUSE])
def test_imports_go_down(module, path):
    here = TOP if module.endswith("__main__") else FLOOR.get(room(module), TOP)
    above = {name for name in imports(path, module) if room(name) in FLOOR and FLOOR[room(name)] > here}
    assert not above
    assert not {name for name in imports(path, module) if room(name) in ("workloads", "baselines")}


def test_no_floor_goes_in_circles():
    graph = {}
    for module, path in (entry for entry in HOUSE if not entry[0].endswith("__main__")):
        there = {room(name) for name in imports(path, module)} & set(FLOOR)
        graph.setdefault(room(module), set()).update(there - {room(module)})
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("shelf, top", [("baselines", 4), ("workloads", 2)])
def test_shelves_use_the_floors_below_and_no_neighbour(shelf, top):
    for module, path in modules(shelf, f"simdev.{shelf}"):
        for name in imports(path, module):
            first = room(name)
            if first == shelf:
                helper = name.split(".")[2] if name.count(".") > 1 else ""
                inside = module.rsplit(".", 1)[0] if module.count(".") > 2 else module
                assert helper.startswith("_") or name.startswith(f"{inside}."), f"{module} imports its neighbour {name}"
            else:
                assert FLOOR.get(first, 99) <= top, f"{module} imports {name}"


def test_every_package_is_listed():
    with open(ROOT / "pyproject.toml", "rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = set()
    for folder, package in (("simdev", "simdev"), ("workloads", "simdev.workloads"), ("baselines", "simdev.baselines")):
        for init in (ROOT / folder).rglob("__init__.py"):
            folders.add(".".join((package, *init.parent.relative_to(ROOT / folder).parts)))
    assert sorted(listed) == sorted(folders)


def test_the_shelves_load_without_heavy_packages():
    code = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None
import simdev
from simdev.cli import main as cli
from simdev.report import describe as show
from simdev.placers import registry
from simdev.graphs import importers
assert len(registry.placers()) > 0 and len(registry.workloads()) > 0
from simdev.problem.topology import load_topology
assert load_topology("p100x4").n_devices == 5
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
