"""The command of the long checks runs what is missing, notes what failed, and resumes."""

import sys

import nightly
import pytest


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run the command on two steps; the second fails until a file is there."""
    steps = {
        "first": ["-c", f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"],
        "second": ["-c", f"print('a reason'); open({str(tmp_path / 'there')!r})"],
    }
    monkeypatch.setattr(
        nightly, "parts", lambda: {"one": {"first": steps["first"]}, "two": {"second": steps["second"]}}
    )
    monkeypatch.setattr(nightly, "checked_out", lambda: "abc")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["nightly.py", "--out", str(tmp_path / "out"), *arguments])
        return nightly.main()

    return run


def test_what_passed_is_not_run_again_and_what_failed_is(call, tmp_path):
    assert call() == 1
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| one | first |" in report and "FAILED (exit code 1)" in report and "a reason" in report
    assert "FileNotFoundError" in report and "simdev abc" in report
    (tmp_path / "there").touch()
    assert call() == 0
    assert (tmp_path / "ran").read_text() == "x"
    assert call("--again", "--only", "one") == 0
    assert (tmp_path / "ran").read_text() == "xx"


def test_other_files_are_checked_anew(call, tmp_path, monkeypatch):
    call("--only", "one")
    monkeypatch.setattr(nightly, "checked_out", lambda: "def")
    call("--only", "one")
    assert (tmp_path / "ran").read_text() == "xx"


def test_a_step_without_end_fails(tmp_path):
    found = nightly.run("endless", ["-c", "import time; time.sleep(600)"], tmp_path, 1.0)
    assert found["outcome"].startswith("FAILED (no end within") and found["seconds"] < 60


def test_every_step_names_a_file_of_the_repository():
    for steps in nightly.parts().values():
        for words in steps.values():
            assert words[0] == "-m" or (nightly.ROOT / words[0]).is_file(), words
