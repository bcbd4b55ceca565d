"""The table of damaged and hostile inputs: see ``reliability.py``."""

from __future__ import annotations

import os
import re
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


def table(scale: float) -> list[str]:
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
