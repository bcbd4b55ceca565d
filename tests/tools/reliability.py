"""Makes the tables of docs/pages/reliability.md: ``python tests/tools/reliability.py [TABLE ...] [--scale 1.0]``.

Each table is a function in :data:`TABLES` that returns Markdown lines; without arguments all are made. Only the tables
that are made are replaced in the page; ``--print`` prints them instead. ``--scale`` multiplies how often everything is
tried; each table states its scale and the counts that were really tried. The exit code is 1 if a line reports a
failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fuzz
from small_board import MACHINE, small_board

from simdev.bench import rows, stored
from simdev.bench.submission import submit
from simdev.bench.verify import verify
from simdev.bench.workers import Limits
from simdev.errors import SimdevError
from simdev.files import markdown_table

FILES = 300  # for each reader
SEED = 11
HUGE = "".join(
    f'[[device]]\nname = "d{n}"\nkind = "k"\n[[link]]\nends = ["d{n}", "s"]\ngb_per_s = {n + 1}\nlatency_us = 1\n'
    for n in range(1000)
)


def inputs(scale: float) -> list[str]:
    """Mutated files of every reader, and hostile ones made by hand."""
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        counts = fuzz.run(fuzz.readers(Path(scratch)), float("inf"), SEED, rounds=round(FILES * scale))
    lines = [[name, *(str(found[what]) for what in ("read", "refused", "failed"))] for name, found in counts.items()]
    sums = [str(sum(found[what] for found in counts.values())) for what in ("read", "refused", "failed")]
    lines.append(["all", *sums])
    total = sum(found.total() for found in counts.values())
    print(f"{total} mutated files", file=sys.stderr)
    return [
        f"Mutated files ({total} in all, seed {SEED}): values, rows, members and bytes of a small valid file were replaced,",  # noqa: E501
        "removed, repeated or nested. A file was read, or refused with one sentence; the last column counts everything else",  # noqa: E501
        f"(a traceback, a message of over 500 characters, no answer within {fuzz.SECONDS} s of processor time).",
        "",
        *markdown_table(["reader", "read", "refused", "failed"], lines),
        "",
        "Hostile inputs made by hand, and the answer:",
        "",
        *markdown_table(["input", "answer"], [[what, _answer(make)] for what, make in HOSTILE.items()]),
    ]


def _answer(make: Callable[[Path], list]) -> str:
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        mark = Path(scratch) / "executed"
        (Path(scratch) / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n", encoding="utf-8")
        try:
            found = make(Path(scratch))
            text = str(found[0]) if found else "nothing is executed; the cell is text, and the row holds"
        except SimdevError as error:
            text = str(error)
        if mark.exists():
            text = f"EXECUTED, then: {text}"
        return re.sub(r"\S*/simdev-\w+/", "", text).replace("|", "\\|")  # without the folder of this run


def _submitted(folder: Path, **settings) -> list:
    submit(folder, folder / "a.zip")
    return verify(folder / "a.zip", jobs=1, **settings)


def _forged(cell: str) -> Callable[[Path], list]:
    def make(scratch: Path) -> list:
        small_board(scratch / "board", placers=("single-gpu",), **{cell: f"{scratch}/evil.py:x"})
        return _submitted(scratch / "board", rerun=True)

    return make


def _bomb(scratch: Path) -> list:
    with zipfile.ZipFile(scratch / "a.zip", "w", zipfile.ZIP_DEFLATED) as file, file.open("results.csv", "w") as out:
        for _ in range(1900):
            out.write(bytes(1 << 20))
    return verify(scratch / "a.zip")


def _sparse(scratch: Path) -> list:
    (scratch / "results.csv").touch()
    os.truncate(scratch / "results.csv", 4 << 30)
    return rows.read_rows(scratch / "results.csv")


def _endless(scratch: Path) -> list:
    (scratch / "results.csv").symlink_to("/dev/zero")
    return rows.read_rows(scratch / "results.csv")


def _rows(scratch: Path, change: Callable[[rows.Row, int], rows.Row], count: int = 1) -> list:
    (row,) = small_board(scratch, placers=("single-gpu",))
    rows.write_rows(scratch / "results.csv", [change(row, number) for number in range(count)])
    return verify(scratch)


def _machine(change: Callable[[str], str], **settings) -> Callable[[Path], list]:
    def make(scratch: Path) -> list:
        small_board(scratch / "board", placers=("single-gpu",))
        stored.kept_machine(scratch / "board", "mine.toml").write_text(change(MACHINE), encoding="utf-8")
        return _submitted(scratch / "board", **settings)

    return make


def _huge(text: str) -> str:
    kind = text[text.index("[kind") : text.index("[[device]]")]
    return f'name = "huge"\nswitches = ["s"]\n{kind}{HUGE}'


def _calibrated(path: str) -> Callable[[str], str]:
    return lambda text: text.replace("memory_gib", f'calibrated = "{path}"\nmemory_gib')


HOSTILE = {
    "a row whose placer is `evil.py:x`, verified with `--rerun`": _forged("placer"),
    "a row whose workload is `evil.py:x`": _forged("workload"),
    "an archive whose `results.csv` unpacks to 1.9 GB": _bomb,
    "a sparse `results.csv` of 4 GB": _sparse,
    "a `results.csv` that is a link to `/dev/zero`": _endless,
    'an archive whose machine has `calibrated = "/etc/passwd"`': _machine(_calibrated("/etc/passwd")),
    'an archive whose machine has `calibrated = "../../secret.toml"`': _machine(_calibrated("../../secret.toml")),
    "an archive whose machine has 1,000 devices and 1,000 bandwidths (its rows were made on another)": _machine(_huge),
    "the same archive with a time limit of 1 s a row": _machine(_huge, limits=Limits(1, 6 << 30)),
    "an archive whose machine has 1,024 nodes of two devices": _machine(
        lambda text: text.replace('name = "mine"', 'name = "mine"\nnodes = 1024')
    ),
    "a cell that would set the title of the terminal": lambda scratch: _rows(
        scratch, lambda row, n: replace(row, error="\x1b]0;owned\x07")
    ),
    "3,000 rows, each of another placer on another workload": lambda scratch: _rows(
        scratch, lambda row, n: replace(row, workload=f"w{n}.npz", placer=f"p{n}"), 3000
    ),
}


ROOT = Path(__file__).parents[2]
# None that may stop by the clock (``simdev list placers`` says which do): on a busy processor their rows differ.
PLACERS = ("heft", "local-search", "gdp", "genetic", "min-cut", "scotch", "peft", "colocrl")
BENCH = ["bench", "-w", "transformer-xl-2", "-t", "p100x4", "-b", "evaluations=50"]
PATIENCE_S = 3600


def determinism(scale: float) -> list[str]:
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


PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reliability.md"


def faults(scale: float) -> list[str]:
    """Interrupted benches and trainings, full disks, damaged folders: what was tried, how often, what was lost."""
    import reliability_faults

    return reliability_faults.table(scale)


def commands(scale: float) -> list[str]:
    """Single commands, killed, interrupted and without disk, memory or rights: what was damaged or differs?"""
    import reliability_commands

    return reliability_commands.table(scale)


def mutants(scale: float) -> list[str]:
    """The faults of ``mutants.py`` that the tests nearest to them notice; all are tried at every scale."""
    import mutants

    return mutants.table()


TABLES: dict[str, Callable[[float], list[str]]] = {
    "inputs": inputs,
    "faults": faults,
    "commands": commands,
    "mutants": mutants,
    "determinism": determinism,
}


# What a line of each table looks like that reports a failure, a loss or a difference.
WRONG = {
    "inputs": re.compile(r"\| \d+ \| \d+ \| [1-9]\d* \|$|EXECUTED"),
    "faults": re.compile(r"\| \d+ \| [1-9]\d* \| |\| \d+ of \d+ \|$"),
    "commands": re.compile(r"\| \d+ \| [1-9]\d* \| |\| \d+ of \d+ \|$"),
    "mutants": re.compile(r"^\| \d+ \|.*\| \|$"),
    "determinism": re.compile(r"\| no: "),
}


def made_with(name: str, scale: float) -> list[str]:
    """The command that made a table."""
    return [f"Made with `python tests/tools/reliability.py {name}{'' if scale == 1 else f' --scale {scale:g}'}`.", ""]


def replace_table(page: str, name: str, lines: list[str]) -> str:
    """The page with the table between the comments ``<!-- NAME -->`` and ``<!-- end NAME -->`` replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{PAGE.name} has no place for the table {name}: {begin} ... {end}")
    return before + "\n".join([begin, "", *lines, "", end]) + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"which of {', '.join(TABLES)} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies how often everything is tried")
    parser.add_argument("--print", action="store_true", help="print the tables and leave the page as it is")
    chosen, wrong = parser.parse_args(), []
    for name in chosen.tables or TABLES:
        if name not in TABLES:
            parser.error(f"no table {name!r}: choose from {', '.join(TABLES)}")
        print(f"making the table {name}", file=sys.stderr)
        lines = made_with(name, chosen.scale) + TABLES[name](chosen.scale)
        wrong += [line for line in lines if WRONG[name].search(line)]
        if chosen.print:
            print("\n".join(lines))
        else:
            PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8"), name, lines), encoding="utf-8")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
