"""Plant each fault of mutants.toml in a copy of the checkout and see a test fail.

``python tests/tools/mutants.py [NAME ...]``. A mutant that no test notices shows what the tests do not check: write the
test, not a weaker mutant. The exit code is 1 if a mutant survives or no longer applies.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="*", help="names of mutants (default: all)")
    options = parser.parse_args()
    mutants = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    chosen = [mutant for mutant in mutants if not options.name or mutant["name"] in options.name]
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        copy = Path(scratch) / "simdev"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, tracked.stdout.split("\0")):
            if (ROOT / name).is_file() and not name.startswith("leaderboard/"):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        alive = [mutant["name"] for mutant in chosen if not noticed(mutant, copy)]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants were noticed")
    return 1 if alive else 0


def noticed(mutant: dict[str, str], copy: Path) -> bool:
    """Whether the tests of a mutant fail with it; they must pass without it."""
    path = copy / mutant["file"]
    before = path.read_text(encoding="utf-8")
    if before.count(mutant["old"]) != 1:
        print(f"{mutant['name']}: {mutant['file']} does not hold its text exactly once")
        return False
    if (clean := run(mutant, copy)) != 0:
        print(f"{mutant['name']}: its tests end with exit code {clean} without it")
        return False
    path.write_text(before.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    try:
        code = run(mutant, copy)
    finally:
        path.write_text(before, encoding="utf-8")
    answer = "noticed" if code == 1 else f"NOT NOTICED by {mutant['tests']} (exit code {code})"
    print(f"{mutant['name']}: {answer}", flush=True)
    return code == 1


def run(mutant: dict[str, str], copy: Path) -> int:
    """Exit code of the tests of a mutant, in the copy: its packages come before the installed ones."""
    # An editable installation finds simdev by a hook that comes after the path, and the shelves by links.
    for shelf in ("baselines", "workloads"):
        link = copy / "simdev" / shelf
        if not link.exists():
            link.symlink_to(copy / shelf)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant["tests"].split()]
    done = subprocess.run(command, cwd=copy, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
