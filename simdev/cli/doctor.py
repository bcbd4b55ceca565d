"""The state of an installation: what is installed, what cannot run, and why."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simdev.bench.provenance import commit, machine, versions
from simdev.bench.workers import cores, kept_limits, start_method
from simdev.errors import needs_package
from simdev.placers import registry

# The versions under which all tests passed last; tests/smoke_newest.py tries the newest ones before a release.
TESTED = {
    "diffusers": "0.42.1",
    "jax": "0.10.2",
    "onnx": "1.23.2",
    "timm": "1.0.31",
    "torch": "2.13.0",
    "torchvision": "0.28.0",
    "transformers": "5.23.0",
}


def diagnose() -> dict:
    """The state of this installation, ready for JSON: ``system``, ``packages``, ``placers`` that cannot run here with
    the reason, ``solvers``, ``kernels`` (the cache of compiled code), ``limits`` (those of a bench's run that this
    system keeps), ``tested`` (the versions of packages that were tested) and ``problems``, a sentence each."""
    found: dict[str, Any] = {
        "system": {"machine": machine(), "cores": cores(), "python": platform.python_version(), "commit": commit()},
        "packages": _packages(),
        "placers": {"available": 0, "unavailable": {}},
        "solvers": _solvers(),
        "kernels": _kernels(),
        "limits": {**kept_limits(), "workers start by": start_method()},
        "tested": dict(TESTED),
        "problems": [],
    }
    for name, spec in registry.placers().items():
        if spec.missing:
            found["placers"]["unavailable"][name] = needs_package(spec.missing[0])
        else:
            found["placers"]["available"] += 1
    found["problems"] = _problems(found)
    return found


def _packages() -> dict[str, dict[str, str]]:
    """Version of each package that simdev names, by extra; empty where it is not installed."""
    groups: dict[str, dict[str, str]] = {}
    for line in _requirements():
        requirement, _, condition = line.partition(";")
        extra = condition.partition("extra ==")[2].strip(" \"'") or "main"
        name = requirement.strip()
        for separator in "<>=!~[ (":
            name = name.split(separator)[0]
        try:
            groups.setdefault(extra, {})[name] = version(name)
        except PackageNotFoundError:
            groups.setdefault(extra, {})[name] = ""
    return groups


def _requirements() -> list[str]:
    try:
        return requires("simdev") or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        import tomllib

        path = Path(__file__).parents[2] / "pyproject.toml"
        if not path.is_file():
            return []
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {})
        return project["dependencies"] + [
            f'{line}; extra == "{extra}"' for extra, lines in extras.items() for line in lines
        ]


def _solvers() -> dict[str, str]:
    """Which solvers OR-Tools offers here, by name: ``available``, or why not."""
    if find_spec("ortools") is None:
        return {"CP-SAT": needs_package("ortools")}
    from ortools.math_opt.python import mathopt

    found = {"CP-SAT": "available"}
    for name in ("HIGHS", "GSCIP", "GLOP", "GUROBI"):
        model = mathopt.Model()
        model.maximize(model.add_variable(lb=0.0, ub=1.0))
        try:
            mathopt.solve(model, getattr(mathopt.SolverType, name))
            found[name] = "available"
        except (AttributeError, RuntimeError, ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            found[name] = "not available: needs its library and a licence" if name == "GUROBI" else reason[:100]
    return found


def _kernels() -> dict:
    folder = Path(__file__).parents[1]
    set_by_hand = os.environ.get("NUMBA_CACHE_DIR", "")
    places = [Path(set_by_hand)] if set_by_hand else [folder, Path("~/.cache/numba").expanduser()]
    files = [path for place in places if place.is_dir() for path in place.rglob("*.nbc")]
    return {
        "places": [str(place) for place in places],
        "compiled": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "writable": os.access(set_by_hand or folder, os.W_OK),
    }


def _problems(found: dict) -> list[str]:
    problems = []
    if any(not number for number in found["packages"].get("main", {}).values()):
        lost = [name for name, number in found["packages"]["main"].items() if not number]
        problems.append(f"required packages are missing: {', '.join(lost)} (pip install .)")
    if found["solvers"].get("HIGHS", "available") != "available":  # without OR-Tools there is none to try
        problems.append("HiGHS, the default solver of integer programs, is not available")
    if not found["kernels"]["compiled"]:
        problems.append("no compiled kernel is cached yet: the first simulation takes about ten seconds more")
    if shutil.disk_usage(Path.cwd()).free < 1 << 30:
        problems.append("less than 1 GiB of disk space is free in the current folder")
    return problems


def _tested(found: dict) -> list[str]:
    """The tested versions, with the installed one where it is another."""
    installed = {name: number for packages in found["packages"].values() for name, number in packages.items()}
    lines = []
    for name, number in found["tested"].items():
        here = installed.get(name, "")
        lines.append(f"{name} {number}" + (f" (here {here})" if here and here.partition("+")[0] != number else ""))
    return lines


def report(found: dict) -> str:
    """The result of :func:`diagnose` as text."""
    system, kernels = found["system"], found["kernels"]
    lines = [f"{system['machine']}, Python {system['python']}, commit {system['commit'] or 'unknown'}", versions(), ""]
    for extra, packages in found["packages"].items():
        names = ", ".join(f"{name} {number or 'MISSING'}" for name, number in sorted(packages.items()))
        lines.append(f"{extra:>12}  {names}")
    lines.append(f"{'tested with':>12}  {', '.join(_tested(found))}")
    lines += ["", f"{'placers':>12}  {found['placers']['available']} available"]
    lines += [f"{name:>12}  {why}" for name, why in found["placers"]["unavailable"].items()]
    lines += [f"{name:>12}  {state}" for name, state in found["solvers"].items()]
    lines.append(f"{'kernels':>12}  {kernels['compiled']} compiled, {kernels['bytes'] / 2**20:.1f} MiB")
    lines += ["", *(f"{name}: {state}" for name, state in found["limits"].items())]
    lines += ["", *(found["problems"] or ["no problem found"])]
    return "\n".join(lines)
