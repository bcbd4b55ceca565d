import os
import subprocess
import sys
from pathlib import Path

from simdev import _cache

HOME = Path("~/.cache").expanduser()


def test_nothing_is_set_where_the_package_or_the_home_can_be_written_to(monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(_cache, "writable", lambda folder: folder == HOME)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    _cache.ensure()
    assert "NUMBA_CACHE_DIR" not in os.environ


def test_a_folder_that_is_not_there_yet_counts_as_the_one_above(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path)
    assert _cache.writable(tmp_path / "a" / "b") and not _cache.writable(tmp_path.parent)


def test_a_read_only_installation_without_a_home_compiles_and_leaves_no_litter(tmp_path):
    code = (
        "import os; os.access = lambda *_: False; import simdev; folder = os.environ['NUMBA_CACHE_DIR'];"
        "assert os.path.isdir(folder); print(folder)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path)), done.stderr
    assert not any(tmp_path.iterdir())


def test_kernels_older_than_any_kernel_source_are_forgotten(tmp_path):
    (tmp_path / "__pycache__").mkdir()
    for number, name in enumerate(("__pycache__/old.nbi", "general.py", "__pycache__/new.nbi", "notes.md"), 1):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
    _cache.drop_stale(tmp_path)
    assert [path.name for path in (tmp_path / "__pycache__").iterdir()] == ["new.nbi"]


def test_kernels_that_call_a_changed_one_are_forgotten_too(tmp_path):
    files = ("user/__pycache__/old.nbi", "user/_own.py", "user/__pycache__/new.nbi", "folder/general.py")
    for number, name in enumerate(files, 1):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
    os.utime(tmp_path / "folder/general.py", (0, 0))
    _cache.drop_stale(tmp_path / "folder", tmp_path / "user")
    assert [path.name for path in (tmp_path / "user" / "__pycache__").iterdir()] == ["new.nbi"]
    os.utime(tmp_path / "folder/general.py", (9, 9))
    _cache.drop_stale(tmp_path / "folder", tmp_path / "user")
    assert not any((tmp_path / "user" / "__pycache__").iterdir())
