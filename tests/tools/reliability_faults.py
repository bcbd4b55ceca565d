"""The faults table of docs/pages/reliability.md: disturb, resume, compare with an undisturbed result. Linux only."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from simdev.bench import rows
from simdev.bench.journal import Results
from simdev.errors import InvalidInput
from simdev.problem.placement_file import pack_placements, packed_keys, stored_placement

ROOT = Path(__file__).parents[2]
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
TRAIN = ["-p", "colocrl", *CASE, "--evaluations", "64"]
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


def table(scale: float) -> list[str]:
    """All trials; ``scale`` multiplies how often each fault is tried."""
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        folder = Path(scratch)
        finish(start(folder / "whole"))
        whole = content(folder / "whole")
        found = [
            *kills(folder, whole, count(40, scale)),
            training(folder, count(8, scale)),
            full_disk(folder, whole, count(8, scale)),
            two_at_once(folder, whole, count(4, scale)),
            deleted_placements(folder, whole, count(4, scale)),
            flipped_bits(folder, count(600, scale)),
        ]
    header = ["| what was done | times | finished runs lost | equal results |", "|---|---|---|---|"]
    return header + [line.text() for line in found]


def count(most: int, scale: float) -> int:
    return max(1, round(most * scale))


def start(out: Path, *more: str, command: str = "bench", what: list[str] = BENCH, **how) -> subprocess.Popen:
    """A bench of two runs at a time (or a training) in a process group of its own."""
    if command == "bench":
        more = ("-j", "2", *more)
    return subprocess.Popen(
        [sys.executable, "-m", "simdev", command, *what, "-o", str(out), *more],
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


TARGETS = {
    "the bench": lambda process: process.pid,
    "its process group": lambda process: -process.pid,
    "a worker": lambda process: worker(process.pid),
    "the fork server": lambda process: fork_server(process.pid),
}
KILLS = [
    *[(target, number) for target in ("the bench", "its process group") for number in ("SIGKILL", "SIGTERM", "SIGINT")],
    ("a worker", "SIGKILL"),
    ("a worker", "SIGTERM"),
    ("the fork server", "SIGKILL"),
]


def kills(folder: Path, whole: dict, times: int) -> list[Line]:
    """Signals at random moments, in one folder after the other, each resumed by the same command until it is done."""
    lines = {target: Line(f"`SIGKILL`, `SIGTERM` or `SIGINT` to {target}") for target in TARGETS}
    lines["the fork server"].fault = "`SIGKILL` to the fork server"
    lines[
        "a worker"
    ].fault = "`SIGKILL` or `SIGTERM` to a worker (its run is a row that says so; resumed with `--retry`)"
    number, trial = 0, 0
    while number < times:
        trial += 1
        out, hit = folder / f"kills{trial}", set()
        while number < times:
            before = finished(out)
            process = start(out, "--retry")
            target, name = KILLS[number % len(KILLS)]
            if not disturb(process, out, len(before), TARGETS[target], getattr(signal, name)):
                break  # it was done before it could be hit
            number += 1
            hit.add(target)
            lines[target].times += 1
            lines[target].lost += len(before - finished(out))
        code, errors = finish(start(out, "--retry"))
        if code or content(out) != whole:
            print(errors, file=sys.stderr)
            for target in hit:
                lines[target].different += 1
    return [line for line in lines.values() if line.times]


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


def training(folder: Path, times: int) -> Line:
    """Trainings that are killed at random moments; the policy must be the same, byte for byte."""
    line = Line("`SIGKILL` to `simdev train`")
    begun = time.monotonic()
    code, errors = finish(start(folder / "policy", command="train", what=TRAIN))
    if code:
        raise SystemExit(errors)
    taken, whole = time.monotonic() - begun, files_of(folder / "policy")
    out = folder / "killed-policy"
    for _ in range(times):
        process = start(out, command="train", what=TRAIN)
        try:
            process.wait(timeout=random.uniform(0.3, 1.0) * taken)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            line.times += 1
        finish(process)
        if process.returncode == 0:
            line.different += files_of(out) != whole
            shutil.rmtree(out)
    finish(start(out, command="train", what=TRAIN))
    line.different += files_of(out) != whole
    return line


def files_of(out: Path) -> list[bytes]:
    return [(out / name).read_bytes() for name in ("policy.safetensors", "policy.json")]


def full_disk(folder: Path, whole: dict, times: int) -> Line:
    """A limit on the size of files stands in for a full disk: the journal cannot grow beyond it."""
    line = Line("a file that cannot grow, as on a full disk")
    size = (folder / "whole" / "journal.jsonl").stat().st_size
    for number in range(times):
        out, most = folder / f"full{number}", random.randrange(size // 10, size)
        code, errors = finish(
            start(out, preexec_fn=lambda most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
        )
        before = finished(out)
        code_after, _ = finish(start(out))
        line.times += 1
        line.lost += len(before - finished(out))
        line.different += (code, code_after) != (2, 0) or "Traceback" in errors or content(out) != whole
    return line


def two_at_once(folder: Path, whole: dict, times: int) -> Line:
    """Two benches on one folder: one of them is refused."""
    line = Line("two benches on one folder at once")
    for number in range(times):
        out = folder / f"two{number}"
        ends = [finish(process) for process in (start(out), start(out))]
        line.times += 1
        refused = [errors for code, errors in ends if code == 2 and "another bench is writing" in errors]
        line.different += len(refused) != 1 or content(out) != whole
    return line


def deleted_placements(folder: Path, whole: dict, times: int) -> Line:
    """Placements that are gone are made again."""
    line = Line("half of the placements deleted")
    out = folder / "deleted"
    shutil.copytree(folder / "whole", out)
    for _ in range(times):
        keys = packed_keys(out)
        pack_placements(out, random.sample(keys, len(keys) // 2))
        finish(start(out))
        line.times += 1
        line.different += content(out) != whole
    return line


def flipped_bits(folder: Path, times: int) -> Line:
    """A flipped bit is refused, or costs the last line, whose run is executed again; it never passes unnoticed."""
    line = Line("one bit of the journal flipped (refused with the line's number)", times)
    whole, out = (folder / "whole" / "journal.jsonl").read_bytes(), folder / "flipped"
    before = finished(folder / "whole")
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
