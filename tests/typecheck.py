"""Types: ``python tests/typecheck.py`` checks all of simdev with mypy, with the settings of pyproject.toml.

mypy cannot follow the mapping of folders that installs the shelves as simdev.baselines and simdev.workloads. So it runs
on a tree of links in which they lie there. The tree and mypy's cache stay in ``.mypy_cache``: a second run takes
seconds. The last line says how much of the code is checked. The exit code is mypy's: 0 if it finds nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"simdev": "simdev", "simdev.baselines": "baselines", "simdev.workloads": "workloads"}
TREE = ROOT / ".mypy_cache" / "tree"


def make_tree(tree: Path = TREE) -> Path:
    """``tree`` with simdev in it and the shelves where they are installed, as links."""
    shelves = {ROOT / folder for package, folder in PACKAGES.items() if "." in package}
    sources = {path.name: path for path in {*(ROOT / "simdev").iterdir(), *shelves} if path.name != "__pycache__"}
    (tree / "simdev").mkdir(parents=True, exist_ok=True)
    for link in (tree / "simdev").iterdir():
        link.unlink()
    for name, path in sources.items():
        (tree / "simdev" / name).symlink_to(path)
    return tree


def run_mypy(*arguments: str, tree: Path) -> tuple[int, list[str]]:
    """Exit code and lines of mypy in ``tree``. A file of a shelf is named as it stands in the repository."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(tree.parent / f"{tree.name}-cache"), *arguments]
    environment = {**os.environ, "MYPYPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    for package, folder in PACKAGES.items():
        path = package.replace(".", "/") + "/"
        lines = [folder + "/" + line.removeprefix(path) if line.startswith(path) else line for line in lines]
    return done.returncode, lines


def ignored() -> list[str]:
    """The entries of pyproject.toml whose errors mypy ignores: a module each, or a package with all below it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    overrides = settings["tool"]["mypy"]["overrides"]
    return [module for override in overrides if override.get("ignore_errors") for module in override["module"]]


def lines_by_module() -> dict[str, int]:
    """The number of lines of every module of simdev, with its shelves."""
    lines = {}
    for package, folder in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            name = ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
            lines[name.removesuffix(".__init__")] = len(path.read_bytes().splitlines())
    return lines


def share_checked() -> float:
    """The share of the lines that stand in modules whose errors count."""
    lines, checked = lines_by_module(), 0
    for module, number in lines.items():
        entries = {module, *(f"{module}.".rsplit(".", depth)[0] + ".*" for depth in range(1, module.count(".") + 2))}
        checked += 0 if entries & set(ignored()) else number
    return checked / sum(lines.values())


if __name__ == "__main__":
    code, lines = run_mypy("-p", "simdev", tree=make_tree())
    print(*lines, f"{share_checked():.1%} of the lines are checked; {len(ignored())} entries are ignored", sep="\n")
    sys.exit(code)
