"""Everything that takes too long for .ci/run, in one command that resumes where it was stopped.

    python tests/nightly.py [--only PART ...] [--out FOLDER] [--again] [--list]

A part is a list of steps, and a step a command. ``FOLDER/state.json`` holds the outcome of each step for the files
that are checked out, so that the same command runs only what is missing or failed; ``--again`` runs everything. The
report, ``FOLDER/report.md``, is written after each step. It says when each step ran and what its last lines were; a
complete log of each lies beside it. A step that takes longer than its limit fails. The exit code is 1 if a step failed.
Run all parts before a release.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, date, datetime
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = "tests/tools"
SPEED = ROOT / "nightly" / "speed"  # of this computer; not in the repository
HOURS = 3600
KEPT_LINES = 12  # of a step's output in the report


def parts() -> dict[str, dict[str, list[str]]]:
    """Commands by part and step, each a list of words after the name of this Python."""
    today = date.today().toordinal()  # other files and models every day
    boards = [path for path in sorted((ROOT / "leaderboard").iterdir()) if path.is_dir() and published(path)]
    return {
        "tests": {
            "test line": ["-m", "pytest", "-n", "auto"],
            "slow": ["-m", "pytest", "-n", "auto", "-m", "slow"],
            "long": ["-m", "pytest", "-n", "auto", "-m", "long"],
        },
        "mutants": {"mutants": [f"{TOOLS}/mutants.py"]},
        "fuzz": {
            f"fuzz {number}": [f"{TOOLS}/fuzz.py", "--seconds", "1800", "--seed", str(today + number)]
            for number in (1, 2, 3, 4)
        },
        "faults": {
            table: [f"{TOOLS}/reliability.py", table, "--print"]
            for table in ("faults", "commands", "inputs", "determinism")
        },
        "zoo": {"zoo draw": [f"{TOOLS}/zoo.py", "{out}/zoo.jsonl", "--draw", str(today)]},
        "boards": {
            "facts of pages": ["docs/facts.py"],
            **{f"board {path.name}": [f"{TOOLS}/boards.py", path.name] for path in boards},
        },
        "speed": {"speed": ["-m", "pytest", "tests/perf", "--benchmark-only", *against_saved(SPEED)]},
        "newest": {
            "newest libraries": ["tests/smoke_newest.py"],
            "PyTorch 2.9": ["tests/smoke_newest.py", "torch==2.9.1"],
        },
        "install": {"distributions": [f"{TOOLS}/install.py"]},
    }


def against_saved(folder: Path) -> list[str]:
    """Options of pytest-benchmark: keep the times of this computer in ``folder``, and fail where the least time of a
    benchmark is over half longer than in the last run that ``folder`` holds, if there is one."""
    options = [f"--benchmark-storage={folder}", "--benchmark-autosave", "--benchmark-columns=min,median,rounds"]
    if any(folder.rglob("*.json")):
        options += ["--benchmark-compare", "--benchmark-compare-fail=min:50%"]
    return options


def published(board: Path) -> bool:
    """Whether a folder of ``leaderboard/`` has rows that ``simdev verify`` recomputes."""
    return any((board / name).is_file() for name in ("results.csv", "plans.csv"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", metavar="PART", help=f"some of: {', '.join(parts())}")
    parser.add_argument("--out", type=Path, default=ROOT / "nightly", help="folder of the report (default: nightly)")
    parser.add_argument("--again", action="store_true", help="also run what was done for this commit")
    parser.add_argument("--hours", type=float, default=6, help="limit of each step (default: 6)")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    options = parser.parse_args()
    for name in options.only or ():
        if name not in parts():
            parser.error(f"no part {name!r}: choose from {', '.join(parts())}")
    chosen = {name: steps for name, steps in parts().items() if not options.only or name in options.only}
    if options.list:
        for name, steps in chosen.items():
            for step, words in steps.items():
                print(f"{name:8} {step:18} python {' '.join(words)}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / ".gitignore").write_text("*\n", encoding="utf-8")
    state = State(options.out, checked_out())
    for name, steps in chosen.items():
        for step, words in steps.items():
            if options.again or state.outcome(step) != "ok":
                state.note(name, step, run(step, words, options.out, options.hours * HOURS))
    failed = [step for steps in chosen.values() for step in steps if state.outcome(step) != "ok"]
    print(f"{options.out / 'report.md'}: " + (f"failed: {', '.join(failed)}" if failed else "every step passed"))
    return 1 if failed else 0


def checked_out() -> str:
    """The commit that is tested, and a digest of what differs from it."""
    commit, edits = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for words in (("rev-parse", "--short", "HEAD"), ("diff", "HEAD"))
    )
    return commit.strip() + (f" with edits {sha256(edits.encode()).hexdigest()[:8]}" if edits else "")


class State:
    """What is known about each step for one commit; kept in ``state.json``, shown in ``report.md``."""

    def __init__(self, out: Path, commit: str):
        self.out, self.commit = out, commit
        path = out / "state.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.steps: dict[str, dict] = kept["steps"] if kept.get("commit") == commit else {}

    def outcome(self, step: str) -> str:
        return self.steps.get(step, {}).get("outcome", "")

    def note(self, part: str, step: str, found: dict) -> None:
        """Keep the outcome of a step and write the report. A step that an interruption ended is not kept."""
        self.steps[step] = {"part": part, **found}
        self._replace("state.json", json.dumps({"commit": self.commit, "steps": self.steps}, indent=1) + "\n")
        self._replace("report.md", self.report())

    def _replace(self, name: str, text: str) -> None:
        temporary = self.out / f"{name}.new"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.out / name)

    def report(self) -> str:
        """The report as Markdown: a table of the steps, then the last lines of each."""
        lines = [
            f"# Long checks of simdev {self.commit}",
            "",
            f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.system()}.",
            "",
            "| part | step | begun | minutes | outcome |",
            "|---|---|---|--:|---|",
        ]
        for step, found in self.steps.items():
            minutes = f"{found['seconds'] / 60:.1f}"
            lines.append(f"| {found['part']} | {step} | {found['begun']} | {minutes} | {found['outcome']} |")
        for step, found in self.steps.items():
            lines += [
                "",
                f"## {step}",
                "",
                f"`python {' '.join(found['command'])}`",
                "",
                "```text",
                *found["tail"],
                "```",
            ]
        return "\n".join(lines) + "\n"


def run(step: str, words: list[str], out: Path, limit_s: float) -> dict:
    """Run a step in a process group of its own; its output goes to a log and to the terminal."""
    command = [word.replace("{out}", str(out.resolve())) for word in words]
    log = out / f"{re.sub(r'[^a-z0-9]+', '-', step)}.log"
    print(f"=== {step}: python {' '.join(command)}", flush=True)
    begun, began = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={"XLA_FLAGS": "", **os.environ},  # the tests, too, compile programs of JAX as for users
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            outcome = "ok" if code == 0 else f"FAILED (exit code {code})"
        except subprocess.TimeoutExpired:
            outcome = f"FAILED (no end within {limit_s / HOURS:g} h)"
            end(process)
        except BaseException:  # Ctrl-C: this step runs again
            end(process)
            raise
    seconds = time.monotonic() - began
    text = log.read_text(encoding="utf-8", errors="replace")
    tail = [line[:200] for line in text.splitlines() if line.strip()][-KEPT_LINES:]
    print("\n".join(tail), f"=== {step}: {outcome}, {seconds / 60:.1f} min", sep="\n", flush=True)
    return {"outcome": outcome, "begun": begun, "seconds": round(seconds), "command": words, "tail": tail}


def end(process: subprocess.Popen) -> None:
    """End a step and all that it started."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: the same command resumes", file=sys.stderr)
        sys.exit(130)
