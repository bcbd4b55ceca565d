"""The faults table of docs/pages/reliability.md: disturb, resume, compare with an undisturbed result. Linux only.

Trials run in pieces. ``build/reliability.jsonl`` keeps the outcome of each piece for the code that made it, so that an
interrupted command resumes with the next piece; a file that is deleted is made again.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import sha256
from pathlib import Path

from simdev.bench import rows
from simdev.bench.journal import Results
from simdev.bench.provenance import source_digest
from simdev.errors import InvalidInput
from simdev.problem.placement_file import pack_placements, packed_keys, stored_placement

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "reliability.jsonl"
ODD = "tests/bench/odd_placers.py"
CASE = ["-w", "transformer-xl-2", "-t", "p100x2"]
BENCH = [
    *CASE,
    "-p",
    "heft",
    "-p",
    f"{ODD}:walk",
    "-p",
    f"{ODD}:slow[seconds=0.3]",
    "-b",
    "evaluations=20",
    "--seeds",
    "8",
]
PATIENCE_S = 1800


@dataclass
class Line:
    """A line of the table: what was done, how often, how many finished runs were lost, how many results differ."""

    fault: str
    times: int = 0
    lost: int = 0
    different: int = 0

    def text(self) -> str:
        same = "all" if not self.different else f"{self.times - self.different} of {self.times}"
        return f"| {self.fault} | {self.times} | {self.lost} | {same} |"


def in_pieces(fault: str, times: int, attempt: Callable[[int], Line], piece: int = 10) -> Line:
    """The line of ``times`` trials: ``attempt(n)`` makes n of them and says what was lost and what differed. Pieces of
    which the outcome is kept are not tried again."""
    whole = Line(fault)
    kept = {}
    if KEPT.is_file():
        kept = {line.pop("piece"): line for line in map(json.loads, KEPT.read_text(encoding="utf-8").splitlines())}
    for begun in range(0, times, piece):
        count = min(piece, times - begun)
        name = sha256(json.dumps([code(), fault, begun, count]).encode()).hexdigest()[:16]
        if name not in kept:
            random.seed(name)
            found = attempt(count)
            kept[name] = {"times": found.times, "lost": found.lost, "different": found.different}
            KEPT.parent.mkdir(exist_ok=True)
            with KEPT.open("a", encoding="utf-8") as file:
                print(json.dumps({"piece": name, **kept[name]}), file=file)
        whole.times += kept[name]["times"]
        whole.lost += kept[name]["lost"]
        whole.different += kept[name]["different"]
        print(f"{whole.times} of {times}: {whole.text()}", file=sys.stderr, flush=True)
    return whole


@cache
def code() -> str:
    """Of simdev and of the tools that try it: another one begins anew."""
    tools = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("reliability*.py"))]
    return source_digest() + sha256(b"".join(tools)).hexdigest()


class Undisturbed:
    """The results of the bench without a disturbance, computed when they are first needed."""

    def __init__(self, folder: Path):
        self.folder, self.number = folder, 0

    def new(self) -> Path:
        """A folder that is not there yet."""
        self.number += 1
        return self.folder / f"trial{self.number}"

    @cached_property
    def out(self) -> Path:
        """Its folder."""
        code, errors = finish(start(self.folder / "whole"))
        if code:
            raise SystemExit(errors)
        return self.folder / "whole"

    @cached_property
    def bench(self) -> dict:
        return content(self.out)


def table(scale: float) -> list[str]:
    """All trials, among them 100 kills of a bench; ``scale`` multiplies how often each fault is tried."""
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        whole = Undisturbed(Path(scratch))
        found = [
            in_pieces(fault, count(most, scale), partial(kills, whole, *target), 12)
            for fault, (most, *target) in KILLS.items()
        ]
        found += [
            in_pieces("a file that cannot grow, as on a full disk", count(8, scale), partial(full_disk, whole), 4),
            in_pieces("two benches on one folder at once", count(4, scale), partial(two_at_once, whole), 4),
            in_pieces("half of the placements deleted", count(4, scale), partial(deleted_placements, whole), 4),
            in_pieces(
                "one bit of the journal flipped (refused with the line's number)",
                count(600, scale),
                partial(flipped_bits, whole),
                600,
            ),
        ]
    header = ["| what was done | times | finished runs lost | equal results |", "|---|---|---|---|"]
    return header + [line.text() for line in found]


def count(most: int, scale: float) -> int:
    return max(1, round(most * scale))


def start(out: Path, *more: str, **how) -> subprocess.Popen:
    """A bench of two runs at a time in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "simdev", "bench", *BENCH, "-o", str(out), "-j", "2", *more],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and messages. Returns when no process of the bench holds its pipe any more."""
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors


def content(out: Path) -> dict:
    """Exact columns of all rows, and the placements that they name."""
    found = rows.read_rows(out / "results.csv")
    exact = {row.key: tuple(row.cells()[name] for name in rows.EXACT) for row in found}
    files = {row.placement: stored_placement(out, row.placement).hash for row in found if row.placement}
    return {"rows": exact, "placements": files}


def finished(out: Path) -> set[tuple]:
    """Keys of the runs whose rows are whole lines of the journal, read without changing it."""
    path = out / "journal.jsonl"
    if not path.is_file():
        return set()
    with tempfile.TemporaryDirectory(prefix="simdev-") as copy:
        shutil.copy(path, copy)
        results = Results(Path(copy))
        results.close()
        return {row.key for row in results.rows}


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob(f"{pid}/task/*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:  # it has just ended
            pass
    return found


def fork_server(pid: int) -> int | None:
    for child in children(pid):
        try:
            if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        except OSError:
            pass
    return None


def worker(pid: int) -> int | None:
    """A process that executes a run: the child of a guard, which is a child of the fork server."""
    server = fork_server(pid)
    found = [work for guard in (children(server) if server else []) for work in children(guard)]
    return random.choice(found) if found else None


ANY = ("SIGKILL", "SIGTERM", "SIGINT")
# How often, what is hit and with which signals, by the line of the table.
KILLS = {
    "`SIGKILL`, `SIGTERM` or `SIGINT` to the bench": (36, lambda process: process.pid, ANY),
    "`SIGKILL`, `SIGTERM` or `SIGINT` to its process group": (36, lambda process: -process.pid, ANY),
    "`SIGKILL` or `SIGTERM` to a worker (its run is a row that says so; resumed with `--retry`)": (
        18,
        lambda process: worker(process.pid),
        ANY[:2],
    ),
    "`SIGKILL` to the fork server": (10, lambda process: fork_server(process.pid), ANY[:1]),
}


def kills(whole: Undisturbed, target, signals: tuple[str, ...], times: int) -> Line:
    """Signals at random moments, in one folder after the other, each resumed by the same command until it is done."""
    line = Line("")
    while line.times < times:
        out, hit = whole.new(), False
        while line.times < times:
            before = finished(out)
            process = start(out, "--retry")
            number = getattr(signal, signals[line.times % len(signals)])
            if not disturb(process, out, len(before), target, number):
                break  # it was done before it could be hit
            hit = True
            line.times += 1
            line.lost += len(before - finished(out))
        code, errors = finish(start(out, "--retry"))
        if code or content(out) != whole.bench:
            print(errors, file=sys.stderr)
            line.different += hit
    return line


def disturb(process: subprocess.Popen, out: Path, before: int, target, number: int) -> bool:
    """Send a signal soon after the next row; wait for the end of the bench. False if it had ended by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while len(finished(out)) <= before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(random.uniform(0, 0.5))
    pid = None
    while pid is None and process.poll() is None:
        pid = target(process)
    try:
        if pid is None or process.poll() is not None:
            return False
        os.killpg(-pid, number) if pid < 0 else os.kill(pid, number)
    except ProcessLookupError:
        return False
    finally:
        finish(process)
    return True


def full_disk(whole: Undisturbed, times: int) -> Line:
    """A limit on the size of files stands in for a full disk: the journal cannot grow beyond it."""
    line = Line("")
    size = (whole.out / "journal.jsonl").stat().st_size
    for _ in range(times):
        out, most = whole.new(), random.randrange(size // 10, size)
        code, errors = finish(
            start(out, preexec_fn=lambda most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
        )
        before = finished(out)
        code_after, _ = finish(start(out))
        line.times += 1
        line.lost += len(before - finished(out))
        line.different += (code, code_after) != (2, 0) or "Traceback" in errors or content(out) != whole.bench
    return line


def two_at_once(whole: Undisturbed, times: int) -> Line:
    """Two benches on one folder: one of them is refused."""
    line = Line("")
    for _ in range(times):
        out = whole.new()
        ends = [finish(process) for process in (start(out), start(out))]
        line.times += 1
        refused = [errors for code, errors in ends if code == 2 and "another bench is writing" in errors]
        line.different += len(refused) != 1 or content(out) != whole.bench
    return line


def deleted_placements(whole: Undisturbed, times: int) -> Line:
    """Placements that are gone are made again."""
    line, out = Line(""), whole.new()
    shutil.copytree(whole.out, out)
    for _ in range(times):
        keys = packed_keys(out)
        pack_placements(out, random.sample(keys, len(keys) // 2))
        finish(start(out))
        line.times += 1
        line.different += content(out) != whole.bench
    return line


def flipped_bits(undisturbed: Undisturbed, times: int) -> Line:
    """A flipped bit is refused, or costs the last line, whose run is executed again; it never passes unnoticed."""
    line = Line("", times)
    whole, out = (undisturbed.out / "journal.jsonl").read_bytes(), undisturbed.new()
    before = finished(undisturbed.out)
    out.mkdir()
    for _ in range(times):
        bit = random.randrange(8 * len(whole))
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (out / "journal.jsonl").write_bytes(data)
        try:
            line.different += finished(out) == before or len(finished(out)) < len(before) - 1
        except InvalidInput:
            pass
    return line
