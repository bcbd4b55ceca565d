"""Try simdev under the newest releases of PyTorch, JAX and transformers, in a fresh environment.

    python tests/smoke_newest.py [--index URL] [PACKAGE==VERSION ...]

The commands of :data:`TRIED` run in the fresh environment and in the one that runs this script. All must succeed, and
their figures should be the same; a table shows both. Name versions to try others than the newest. ``--index`` is an
additional index of packages, for example that of PyTorch's CPU builds, which need no CUDA. The exit code is 1 if a
command failed or a figure differs. Run this before each release, and write what was tried into ``TESTED`` of
simdev/cli/doctor.py.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "jax", "transformers")
STEP = """
import torch
from simdev import TrainingStep


def make_step():
    model = torch.nn.Sequential(torch.nn.Linear(784, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))
    images, labels = torch.randn(256, 784), torch.randint(0, 10, (256,))
    loss = lambda model, images, labels: torch.nn.functional.cross_entropy(model(images), labels)
    return TrainingStep(model, (images, labels), loss, torch.optim.Adam(model.parameters()))
"""
GPT = "transformers:GPT2LMHeadModel[n_layer=2,n_embd=32,n_head=2,vocab_size=50,n_positions=64]"
# Commands in the order in which they run, and the part of each answer that is compared.
TRIED = {
    ("simulate", "inception-v3", "p100x4", "--placer", "heft"): r"[\d,.]+ ms",
    ("simulate", "transformer-xl-2", "p100x2", "--placer", "gdp-batch"): r"[\d,.]+ ms",
    ("place", "transformer-xl-2", "p100x2", "-p", "giph", "--evaluations", "20", "-o", "giph.json"): r"[\d,.]+ ms",
    ("capture", "step.py:make_step", "-o", "step.npz"): r"\d+ ops.*",
    ("simulate", "step.npz", "p100x4", "--placer", "m-etf"): r"[\d,.]+ ms",
    ("capture", GPT, "-o", "gpt.npz"): r"\d+ ops.*",
    ("simulate", "gpt.npz", "p100x4", "--placer", "m-etf"): r"[\d,.]+ ms",
    ("simulate-plan", "llama3-8b", "dgx-h100", "--mesh", "dp_shard=8"): r"[\d,.]+ ms.*",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pins", nargs="*", metavar="PACKAGE==VERSION", help="versions other than the newest")
    parser.add_argument("--index", help="an additional index of packages")
    options = parser.parse_args()
    named = {re.split(r"[=<>~!]", pin)[0] for pin in options.pins}
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        folder = Path(scratch)
        subprocess.run([sys.executable, "-m", "venv", folder / "newest"], check=True)
        fresh = folder / "newest" / "bin" / "python"
        wanted = [*options.pins, *(name for name in PACKAGES if name not in named)]
        index = ["--extra-index-url", options.index] if options.index else []
        pip = [fresh, "-m", "pip", "install", "--progress-bar", "off"]
        install = [*pip, "-U", *index, f"{ROOT}[all,capture]", *wanted]
        began = time.monotonic()
        done = subprocess.run(list(map(str, install)), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            print(f"{', '.join(wanted)} could not be installed: {reason(done.stdout + done.stderr)}", file=sys.stderr)
            return 1
        print(f"installed in {time.monotonic() - began:.0f} s: {versions(fresh)}; here: {versions(sys.executable)}\n")
        answers = [attempt(python, folder / name) for python, name in ((fresh, "there"), (sys.executable, "here"))]
    wrong = 0
    print("| command | newest | here | |\n|---|---|---|---|")
    for words, newest, here in zip(TRIED, *answers, strict=True):
        verdict = "failed" if newest.startswith("FAILED") else "same" if newest == here else "differs"
        wrong += verdict != "same"
        print(f"| `simdev {' '.join(words)}` | {newest} | {here} | {verdict} |", flush=True)
    return 1 if wrong else 0


def reason(said: str) -> str:
    """Why pip failed: the requirements that conflict and its errors, or the last lines that it printed. It may have
    ended without an error of its own, for example because the system stopped it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    conflict = re.search(r"The conflict is caused by:.*?(?=\n\s*\n|\Z)", said, re.DOTALL)
    errors = [line for line in lines if line.startswith("ERROR")]
    found = [*(conflict[0].split("\n") if conflict else ()), *errors] or lines[-5:]
    return " ".join(line.strip() for line in found) or "pip gave no reason"


def versions(python: str | Path) -> str:
    """The versions of :data:`PACKAGES` that an interpreter finds."""
    code = (
        "from importlib.metadata import version\n"
        f"for name in {PACKAGES}:\n"
        "    try: print(name, version(name))\n"
        "    except ImportError: print(name, 'absent')"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(done.stdout.splitlines())


def attempt(python: str | Path, folder: Path) -> list[str]:
    """The compared part of each command's answer, or ``FAILED`` with the last line that it printed."""
    folder.mkdir()
    (folder / "step.py").write_text(STEP, encoding="utf-8")
    found = []
    for words, part in TRIED.items():
        command = [str(python), "-m", "simdev", *words]
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        match = re.search(part, done.stdout)
        lines = (done.stderr or done.stdout or "no answer").strip().splitlines()
        found.append(match[0] if match and done.returncode == 0 else f"FAILED: {lines[-1][:200]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
