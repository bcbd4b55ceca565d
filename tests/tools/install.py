"""Build simdev's distributions and try them as a user would: in fresh environments, from another folder.

    python tests/tools/install.py [PYTHON ...]          for example: python3.11 python3.12 python3.13

For each interpreter (default: the one that runs this script) the wheel is installed twice, without and with the extra
``all``. The core must simulate, and must say in one sentence what it needs for a learned placer; the whole must run a
small bench whose rows hold. A table with sizes and times is printed. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELVES = {"simdev": "simdev", "workloads": "simdev/workloads", "baselines": "simdev/baselines"}  # where each installs
CORE = ("simulate", "inception-v3", "p100x4", "--placer", "heft")
LEARNED = ("simulate", "transformer-xl-2", "p100x2", "--placer", "gdp")
BENCH = ("bench", "-w", "transformer-xl-2", "-t", "p100x2", "-p", "all", "-b", "evaluations=20", "-o", "board")


def run(*words: object, folder: Path, code: int = 0) -> str:
    """Run a command and return what it printed. Raises SystemExit unless it exits with ``code``."""
    done = subprocess.run([*map(str, words)], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != code:
        raise SystemExit(f"{' '.join(map(str, words))}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def environment(python: str, folder: Path) -> Path:
    run(python, "-m", "venv", folder, folder=folder.parent)
    return folder / "bin"


def build(scratch: Path) -> Path:
    """Build both distributions, check that they are well formed and hold every file; return the wheel."""
    tools = environment(sys.executable, scratch / "tools")
    run(tools / "pip", "install", "-q", "build", "twine", folder=scratch)
    run("git", "clone", "-q", ROOT, scratch / "source", folder=scratch)
    run(tools / "python", "-m", "build", "-o", scratch / "dist", scratch / "source", folder=scratch)
    wheel, source = next((scratch / "dist").glob("*.whl")), next((scratch / "dist").glob("*.tar.gz"))
    run(tools / "twine", "check", "--strict", wheel, source, folder=scratch)
    tracked = run("git", "ls-files", *SHELVES, folder=scratch / "source").split()
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    places = {name: SHELVES[name.partition("/")[0]] + "/" + name.partition("/")[2] for name in tracked}
    missing = [name for name, place in places.items() if place not in held]
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing += [name for name in tracked if name not in inside]
    if missing:
        raise SystemExit(f"not in the distributions: {', '.join(sorted(set(missing)))}")
    return wheel


def megabytes(bin_folder: Path) -> float:
    files = (bin_folder.parent / "lib").rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink()) / 1e6


def attempt(python: str, wheel: Path, scratch: Path) -> list[str]:
    """Install and use the wheel with one interpreter; return a row of the table."""
    place = environment(python, scratch / Path(python).name)
    away = scratch / f"away-{Path(python).name}"
    away.mkdir()
    version = run(place / "python", "-V", folder=away).split()[-1]
    empty, begin = megabytes(place), time.perf_counter()
    run(place / "pip", "install", "-q", wheel, folder=away)
    core, installed = megabytes(place) - empty, time.perf_counter()
    printed = run(place / "simdev", *CORE, folder=away)
    if "252.443 ms" not in printed:
        raise SystemExit(f"python {version}: not the step time of the README:\n{printed}")
    first = time.perf_counter()
    refusal = run(place / "simdev", *LEARNED, folder=away, code=2)
    if "simdev[all]" not in refusal or len(refusal.splitlines()) != 1:
        raise SystemExit(f"python {version}: not one sentence on what a learned placer needs:\n{refusal}")
    run(place / "pip", "install", "-q", f"{wheel}[all]", folder=away)
    whole = megabytes(place) - empty
    run(place / "simdev", *BENCH, folder=away)
    held = [line for line in run(place / "simdev", "verify", "board", folder=away).splitlines() if "holds (" in line]
    seconds = f"{installed - begin:.0f} s", f"{first - installed:.0f} s"
    return [version, f"{core:.0f} MB", f"{whole:.0f} MB", *seconds, held[0]]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        wheel = build(scratch)
        print(f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB): well formed, and every file is inside")
        print("| Python | core | all | install | first result | bench |\n|---|--:|--:|--:|--:|---|")
        for python in sys.argv[1:] or [sys.executable]:
            print(f"| {' | '.join(attempt(python, wheel, scratch))} |", flush=True)


if __name__ == "__main__":
    main()
