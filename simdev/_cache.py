"""Where compiled kernels are kept: a folder of their own where nothing else can be written to (Numba refuses to import
them otherwise), and none older than its source.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from pathlib import Path


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or in the nearest one above it that is there."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    return os.access(there, os.W_OK)


def user_folder() -> Path:
    """Where simdev keeps what it can compute again: ``simdev`` in ``XDG_CACHE_HOME`` if that is set, else where the
    operating system wants it (``~/.cache/simdev`` on Linux, ``~/Library/Caches/simdev`` on macOS)."""
    import platformdirs

    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "simdev" if home else platformdirs.user_cache_path("simdev", appauthor=False)


def ensure() -> None:
    """Set ``NUMBA_CACHE_DIR`` to a folder of this process alone if neither this package nor the user's cache can be
    written to (an installation that is read-only, without a home)."""
    if "NUMBA_CACHE_DIR" in os.environ or writable(Path(__file__).parent) or writable(user_folder().parent):
        return
    os.environ["NUMBA_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="simdev-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def drop_stale(kernels: Path, *users: Path) -> None:
    """Delete compiled kernels that may contain code that has changed since.

    Numba compares a compiled function with the file of that function only. A kernel that calls a function of another
    file would therefore keep the old version of it. So the compiled kernels of the folder ``kernels`` are deleted if
    any source in that folder is newer. The folders ``users`` hold kernels that call those: there, a newer helper
    source (``_*.py``) in the same folder counts, too. A kernel that calls nothing outside its own file needs neither.
    """
    newest = _newest_source(kernels, "*.py")
    for place in (kernels, *users):
        limit = max(newest, _newest_source(place, "_[!_]*.py"))
        for index in place.glob("__pycache__/*.nbi"):
            with contextlib.suppress(OSError):  # another process was faster, or the installation is read-only
                if index.stat().st_mtime_ns < limit:
                    index.unlink()


def _newest_source(folder: Path, pattern: str) -> int:
    return max((path.stat().st_mtime_ns for path in folder.glob(pattern)), default=0)
