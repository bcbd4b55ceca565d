"""Where, when and with what a row was made: its circumstantial columns."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def circumstances() -> dict[str, str]:
    """The columns that say where, when and with what."""
    utc = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"machine": machine(), "versions": versions(), "commit": commit(), "utc": utc}


# Libraries that decide what a placer finds or what a step costs; another version may give another row.
DECISIVE = (
    "simdev", "numpy", "numba", "llvmlite", "scipy", "networkx", "jax", "jaxlib", "optax", "equinox", "ortools",
    "pymetis", "pyscotch", "kahip",
)  # fmt: skip


@cache
def machine() -> str:
    """Processor and system, for the circumstantial column."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return f"{model}, {os.cpu_count()} cores, {platform.system()}"


@cache
def versions() -> str:
    """Versions of Python and of every library that decides a row (:data:`DECISIVE`), as far as they are installed."""
    found = [f"python={platform.python_version()}"]
    for package in DECISIVE:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package}={version(package)}")
    return " ".join(found)


@cache
def commit() -> str:
    """The commit of the checkout that simdev runs from; empty where it is no checkout."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    return ""


def dirty() -> str:
    """A warning if simdev runs from a checkout with uncommitted changes; empty otherwise."""
    if not commit().endswith("-dirty"):
        return ""
    return (
        f"warning: simdev has uncommitted changes ({commit()}): nobody else can make these rows again; "
        "commit before a bench whose results others should trust"
    )


def origins(commits: Sequence[str]) -> str:
    """One sentence on the ``commit`` cells of a board's rows: how many states of the code, how many uncommitted."""
    states, unclean = len(set(commits)), sum(commit.endswith("-dirty") for commit in commits)
    text = f"{len(commits)} rows from {states} {'state' if states == 1 else 'states'} of the code"
    return f"{text}; {unclean} of them made with uncommitted changes" if unclean else text


@cache
def source_digest() -> str:
    """SHA-256 (hex) of the code and machines of this installation: two that agree make the same rows."""
    digest = hashlib.sha256()
    for package in ("simdev", "simdev.baselines", "simdev.workloads"):
        folder = Path(import_module(package).__file__).parent
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"))):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
