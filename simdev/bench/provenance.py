"""Where, when and with what a row was made: its circumstantial columns."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from simdev.errors import counted


class Circumstances(TypedDict):
    """The columns that say where, when and with what."""

    machine: str
    versions: str
    commit: str
    utc: str


def circumstances() -> Circumstances:
    """Where, when and with what this process runs."""
    utc = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"machine": machine(), "versions": versions(), "commit": commit(), "utc": utc}


class Stopwatch:
    """What a run takes from here on: of the clock on the wall, and of the processors."""

    def __init__(self) -> None:
        self._began = self._now()

    def read(self) -> tuple[float, float]:
        """Seconds on the wall, and processor seconds (user and system) of this process and of those of its children
        that have ended and were waited for. Both are rounded to milliseconds."""
        wall, processor = (round(now - began, 3) for now, began in zip(self._now(), self._began, strict=True))
        return wall, processor

    @staticmethod
    def _now() -> tuple[float, float]:
        import resource

        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), sum(usage.ru_utime + usage.ru_stime for usage in usages)


# Libraries that decide what a placer finds or what a step costs; another version may give another row.
DECISIVE = (
    "simdev", "numpy", "numba", "llvmlite", "scipy", "networkx", "jax", "jaxlib", "optax", "equinox", "ortools",
    "pymetis", "pyscotch", "kahip",
)  # fmt: skip


DECIDING = (".py", ".toml", ".npz", ".csv", ".json", ".safetensors")  # files of an installation that decide rows


# Vector sets by the flags that Linux reports, widest first. They decide how a floating-point sum is rounded: a learned
# placer may find another placement with another set.
VECTOR_SETS = (
    ({"avx512f", "fma"}, "AVX-512"), ({"avx2", "fma"}, "AVX2 with FMA"), ({"avx2"}, "AVX2"), ({"avx"}, "AVX"),
    ({"sse4_2"}, "SSE4.2"), ({"sve"}, "SVE"), ({"asimd"}, "NEON"),
)  # fmt: skip


@cache
def machine() -> str:
    """Processor, its widest vector set in brackets, number of cores, and system, for the circumstantial column."""
    model, vectors = platform.processor() or platform.machine(), ""
    with contextlib.suppress(OSError):
        facts = dict[str, str]()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
        model = facts.get("model name") or model
        vectors = vector_set(facts.get("flags") or facts.get("Features") or "")
    return f"{model}{f' [{vectors}]' if vectors else ''}, {os.cpu_count()} cores, {platform.system()}"


def vector_set(flags: str) -> str:
    """The widest vector set (:data:`VECTOR_SETS`) among a processor's flags; empty if none is known."""
    given = set(flags.split())
    return next((name for needed, name in VECTOR_SETS if needed <= given), "")


def differing_processor(machine: str, other: str) -> str:
    """What differs between the processors of two ``machine`` cells, in words; empty if nothing is known to differ.

    Cells of version 0.1.0 name no vector set.
    """
    (model, vectors), (own, own_vectors) = map(_processor, (machine, other))
    if model != own:
        return (
            f"{model}{f' with {vectors}' if vectors else ''}, here {own}{f' with {own_vectors}' if own_vectors else ''}"
        )
    return f"{vectors}, here {own_vectors}" if vectors and own_vectors and vectors != own_vectors else ""


def _processor(machine: str) -> tuple[str, str]:
    model, _, vectors = machine.rsplit(",", 2)[0].removesuffix("]").partition(" [")
    return model, vectors


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
    text = f"{counted(len(commits), 'row')} from {counted(states, 'state')} of the code"
    return f"{text}; {unclean} of them made with uncommitted changes" if unclean else text


@cache
def source_digest() -> str:
    """SHA-256 (hex) of the code, machines, measured times and policies of this installation: two that agree make the
    same rows."""
    digest = hashlib.sha256()
    for package in ("simdev", "simdev.baselines", "simdev.workloads"):
        folder = Path(import_module(package).__path__[0])
        for path in sorted(path for path in folder.rglob("*") if path.suffix in DECIDING):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
