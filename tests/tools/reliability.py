"""Makes the tables of docs/pages/reliability.md: ``python tests/tools/reliability.py [TABLE ...] [--scale 1.0]``.

Each table is a function in :data:`TABLES` that returns Markdown lines; without arguments all are made. Only the tables
that are made are replaced in the page; ``--print`` prints them instead. ``--scale`` multiplies how often everything is
tried; each table states its scale and the counts that were really tried. The exit code is 1 if a line reports a
failure.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reliability.md"


def inputs(scale: float) -> list[str]:
    """Damaged and hostile input files: what was tried, how often, and what happened."""
    import reliability_inputs

    return reliability_inputs.table(scale)


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


def determinism(scale: float) -> list[str]:
    """One bench in several environments: are the exact columns equal?"""
    import reliability_determinism

    return reliability_determinism.table(scale)


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
