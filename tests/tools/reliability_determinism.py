"""The determinism table of docs/pages/reliability.md: one bench in many environments. Linux only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from simdev.bench import rows

ROOT = Path(__file__).parents[2]
# None that may stop by the clock (``simdev list placers`` says which do): on a busy processor their rows differ.
PLACERS = ("heft", "local-search", "gdp", "genetic", "min-cut", "scotch", "peft", "colocrl")
BENCH = ["bench", "-w", "transformer-xl-2", "-t", "p100x4", "-b", "evaluations=50"]
PATIENCE_S = 3600


def table(scale: float) -> list[str]:
    """A line for each environment; ``scale`` below 1 leaves out placers from the end of :data:`PLACERS`."""
    names = PLACERS[: max(1, round(len(PLACERS) * min(scale, 1.0)))]
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        folder = Path(scratch)
        first = execute(folder / "first", names, {}, ROOT, 2, sys.executable)
        lines = ["| environment | rows | equal in all exact columns |", "|---|---|---|"]
        for number, (title, change) in enumerate(environments(folder).items()):
            if change.get("python", sys.executable) is None:
                lines.append(f"| {title} | 0 | not tried: simdev is not installed for it |")
                continue
            how = {"env": {}, "cwd": ROOT, "jobs": 2, "python": sys.executable, **change}
            found = execute(folder / f"out{number}", names, how["env"], how["cwd"], how["jobs"], how["python"])
            wrong = sorted({key[3] for key in first if found.get(key) != first[key]})
            lines.append(f"| {title} | {len(found)} | {'yes' if not wrong else 'no: ' + ', '.join(wrong)} |")
            print(lines[-1], file=sys.stderr)
    return [f"Placers: {', '.join(names)}; transformer-xl-2 on p100x4, 50 evaluations.", "", *lines]


def environments(folder: Path) -> dict[str, dict]:
    """What is different, by title."""
    read_only = "/proc/self"  # nobody can make a file there, not even root
    elsewhere = folder / "another directory"
    elsewhere.mkdir()
    found = {
        "one run at a time (`-j 1`)": {"jobs": 1},
        "four runs at a time (`-j 4`)": {"jobs": 4},
        "`PYTHONHASHSEED=1`": {"env": {"PYTHONHASHSEED": "1"}},
        "`OMP_NUM_THREADS=4`, `OPENBLAS_NUM_THREADS=4`": {"env": {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}},
        "another working directory": {"cwd": elsewhere},
        "a read-only `HOME`": {"env": {"HOME": read_only, "XDG_CACHE_HOME": read_only}},
        "no `HOME`": {"env": {"HOME": None, "XDG_CACHE_HOME": None}},
        "a cold Numba cache": {"env": {"NUMBA_CACHE_DIR": str(folder / "cold")}},
        "a cold JAX cache": {"env": {"XDG_CACHE_HOME": str(folder / "cold-jax")}},
        "`LC_ALL=C`, `TZ=Asia/Kathmandu`": {"env": {"LC_ALL": "C", "LANG": "C", "TZ": "Asia/Kathmandu"}},
    }
    for version in ("3.12", "3.13"):
        found[f"Python {version}"] = {"python": _python(version)}
    return found


def _python(version: str) -> str | None:
    """The interpreter of a Python version on the PATH for which simdev is installed."""
    python = shutil.which(f"python{version}")
    if python and subprocess.run([python, "-c", "import simdev.bench.bench, jax"], capture_output=True).returncode == 0:
        return python
    return None


def execute(out: Path, names, env: dict, cwd: Path, jobs: int, python: str) -> dict[tuple, tuple]:
    """The exact columns of a bench in a changed environment, by the key of the run."""
    changed = {key: value for key, value in {**os.environ, **env}.items() if value is not None}
    entries = [argument for name in names for argument in ("-p", name)]
    command = [python, "-m", "simdev", *BENCH, *entries, "-j", str(jobs), "-o", str(out)]
    done = subprocess.run(command, cwd=cwd, env=changed, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        raise SystemExit(f"{out.name}: {done.stderr}")
    return {row.key: tuple(row.cells()[name] for name in rows.EXACT) for row in rows.read_rows(out / "results.csv")}
