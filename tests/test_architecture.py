"""ARCHITECTURE.md holds: rooms import from rooms above them, packages are listed, heavy packages are lazy."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import simdev

ROOT = Path(__file__).parents[1]
TREE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("simdev/\n")[2].partition("```")[0]
FLOOR = {name: floor for floor, name in enumerate(re.findall(r"^  (\w+)(?:/|\.py) ", TREE, re.MULTILINE))}
SHELVES = ("baselines", "workloads")
FRONT_DOOR = {"simdev", *(f"simdev.{name}" for name in simdev.__all__)}
MAY_ASK_IT = {"simdev.problem.problem": "simdev"}  # ARCHITECTURE.md says why
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


HOUSE = [entry for entry in modules("simdev", "simdev") if entry[0] != "simdev"]
SHELVED = [(shelf, *entry) for shelf in SHELVES for entry in modules(shelf, f"simdev.{shelf}")]
EVERY = HOUSE + [entry[1:] for entry in SHELVED]
FILES = {module for module, _ in EVERY}


def imports(path):
    """Every name that a file imports from this project, also inside functions and for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "simdev"}


def room(name):
    """``simdev.sim.fast.run`` -> ``sim``."""
    return name.split(".")[1]


def test_the_tree_names_every_room():
    rooms = {room(module) for module, _ in HOUSE} - {"__main__"}
    assert rooms | set(SHELVES) == set(FLOOR), "ARCHITECTURE.md: one line for each room, none for what is not there"


@pytest.mark.parametrize("module, path", HOUSE, ids=[module for module, _ in HOUSE])
def test_imports_go_up_the_tree(module, path):
    here = FLOOR.get(room(module), len(FLOOR))  # `python -m simdev` stands below all
    found = imports(path)
    asked = found & FRONT_DOOR - {"simdev.__version__"}
    assert asked <= {MAY_ASK_IT.get(module)}, f"a name of the front door has a room: {asked}"
    others = {name for name in found - FRONT_DOOR if room(name) != room(module)}
    assert not {name for name in others if room(name) in SHELVES}, "the registry finds placers and workloads"
    assert not {name for name in others if room(name) in FLOOR and FLOOR[room(name)] > here}


def test_no_room_goes_in_circles():
    """File by file; the front page of a room (its ``__init__``) stands below the room's files."""
    graph = {}
    for module, path in EVERY:
        inside = {name for name in imports(path) - FRONT_DOOR if room(name) == room(module)}
        targets = {name if name in FILES else name.rpartition(".")[0] for name in inside}
        graph[module] = {target for target in targets if target in FILES and not module.startswith(f"{target}.")}
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("shelf, module, path", SHELVED, ids=[entry[1] for entry in SHELVED])
def test_shelves_use_the_rooms_above_and_no_neighbour(shelf, module, path):
    for name in imports(path):
        if room(name) == shelf:
            helper = name.split(".")[2] if name.count(".") > 1 else ""
            inside = module.rsplit(".", 1)[0] if module.count(".") > 2 else module
            assert helper.startswith("_") or name.startswith(f"{inside}."), f"{module} imports its neighbour {name}"
        else:
            assert FLOOR.get(room(name), -1) < FLOOR[shelf], f"{module} imports {name}"


def test_every_package_is_listed():
    with open(ROOT / "pyproject.toml", "rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = set()
    for folder, package in (("simdev", "simdev"), ("workloads", "simdev.workloads"), ("baselines", "simdev.baselines")):
        for init in (ROOT / folder).rglob("__init__.py"):
            folders.add(".".join((package, *init.parent.relative_to(ROOT / folder).parts)))
    assert sorted(listed) == sorted(folders)


def test_every_data_file_is_installed():
    """A file beside the code that an installed copy lacks is missed only where simdev is not run from a checkout."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    installed = set()
    for package, globs in patterns.items():
        top, _, rest = package.removeprefix("simdev.").partition(".")
        folder = ROOT / top / rest if top in SHELVES else ROOT / package.replace(".", "/")
        installed |= {path for pattern in globs for path in folder.glob(pattern)}
    skipped = {"README.md", "__pycache__"}
    there = {
        path
        for folder in ("simdev", *SHELVES)
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".py" and not skipped & set(path.parts)
    }
    assert {str(path.relative_to(ROOT)) for path in there - installed} == set()


def test_the_shelves_load_without_heavy_packages():
    code = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None
import simdev
from simdev.placers import registry
from simdev.cli import main
from simdev.report import describe
from simdev.graphs import importers
assert len(registry.placers()) > 0 and len(registry.workloads()) > 0
from simdev.problem.topology import load_topology
assert load_topology("p100x4").n_devices == 5
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_class_name_means_one_thing():
    where = {}
    for _, path in EVERY:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_every_fault_of_the_fixed_list_can_be_put_into_the_code():
    """Code moves on: a fault whose text is gone, or stands twice, would be tried no more."""
    import mutants

    faults = list(mutants.listed())
    lost = [(file, old) for file, _, old, *_ in faults if (mutants.ROOT / file).read_text("utf-8").count(old) != 1]
    assert len(faults) >= 100 and lost == []
