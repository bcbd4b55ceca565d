"""The doctor names what is there, what is missing, and why a placer cannot run."""

import json
import re
from pathlib import Path

import pytest

from simdev import sim
from simdev.cli import doctor, progress
from simdev.cli import main as cli
from simdev.errors import Unsupported
from simdev.placers import placer, registry


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["simdev", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0, capsys.readouterr().out


def test_json_and_text_tell_the_same(monkeypatch, capsys):
    code, out = run(monkeypatch, capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0 and found["packages"]["main"]["numpy"] and found["solvers"]["HIGHS"] == "available"
    _, text = run(monkeypatch, capsys, "doctor")
    assert found["packages"]["main"]["numpy"] in text and "CP-SAT" in text


def test_limits_that_the_system_does_not_keep_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "_solvers", lambda: {"HIGHS": "available"})
    monkeypatch.setattr("simdev.bench.workers.PROBE", "")  # as on a kernel that ignores the limit
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setenv("SIMDEV_START_METHOD", "spawn")
    found = doctor.diagnose()["limits"]
    assert found["time limit"] == "kept" and found["workers start by"] == "spawn"
    assert found["memory limit"] == "not kept: a run may take more than --memory-limit"
    assert found["processes that a run leaves"].endswith("not kept for those that leave it")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_linux_keeps_every_limit():
    from simdev.bench.workers import kept_limits

    assert all(state.startswith("kept") and "not kept" not in state for state in kept_limits().values())


def test_a_placer_that_needs_what_is_not_here(monkeypatch):
    monkeypatch.setattr(doctor, "_solvers", lambda: {"HIGHS": "available"})
    registry.placers()
    spec = placer.PlacerSpec("needy", 1, "test", lambda problem: None, needs=("no_such_package",))
    monkeypatch.setitem(placer.SHELF, "needy", spec)
    found = doctor.diagnose()
    assert found["placers"]["unavailable"] == {"needy": "needs the package no_such_package"}
    assert "needs the package no_such_package" in doctor.report(found)


def test_a_missing_requirement_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_solvers", lambda: {"HIGHS": "available"})
    monkeypatch.setattr(doctor, "_requirements", lambda: ["no_such_package>=1", 'other>=2; extra == "more"'])
    found = doctor.diagnose()
    assert found["packages"] == {"main": {"no_such_package": ""}, "more": {"other": ""}}
    assert any("no_such_package" in problem for problem in found["problems"])


def test_tested_versions_are_named_beside_those_installed(monkeypatch):
    monkeypatch.setattr(doctor, "TESTED", {"numpy": "0.1", "torch": "2.13.0"})
    monkeypatch.setattr(doctor, "_packages", lambda: {"main": {"numpy": "9.9"}, "capture": {"torch": "2.13.0+cpu"}})
    text = doctor.report(doctor.diagnose())
    assert "tested with  numpy 0.1 (here 9.9), torch 2.13.0\n" in text


def test_tested_packages_are_those_of_extras():
    named = {name for packages in doctor._packages().values() for name in packages}
    assert set(doctor.TESTED) <= named


def test_help_has_examples_and_exit_codes(monkeypatch, capsys):
    _, out = run(monkeypatch, capsys, "--help")
    assert "simdev bench --placer all" in out and "130 interrupted" in out
    shown = set(re.findall(r"^ +([a-z-]+) ", out, re.MULTILINE))
    assert {entry.name for entry in cli.app.registered_commands if not entry.hidden} <= shown


@pytest.mark.slow
def test_warm_compiles_every_kernel(monkeypatch, capsys):
    code, _ = run(monkeypatch, capsys, "doctor", "--warm")
    assert code == 0
    kernels = Path(sim.__file__).parent / "kernels" / "__pycache__"
    compiled = {path.name.split(".")[0] for path in kernels.glob("*.nbi")}
    assert {"fifo", "priority", "in_order", "fair", "incremental"} <= compiled


def test_a_placer_whose_package_is_missing_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(placer, "find_spec", lambda package: None)
    with pytest.raises(Unsupported, match=r"needs the package jax: pip install 'simdev\[all\]'"):
        registry.find_placer("gdp")[0].place(None, rng=None, budget=None)


def test_steps_tell_the_time_left(capsys, monkeypatch):
    now = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.steps("checking") as tell:
        tell(1, 25, "first")
        tell(2, 12, "second")
        tell(12, 12, "last")
    assert capsys.readouterr().err.splitlines() == [
        "[1/25] first, about 4 min left",
        "[2/12] second, about 2 min left",
        "[12/12] last",
    ]
