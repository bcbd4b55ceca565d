"""Kernels do what the same functions do in Python; what they cannot have is refused by name."""

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from simdev.sim._compile import folder, held, kernel

LIMIT = 7


class Inner(NamedTuple):
    flags: np.ndarray
    small: np.ndarray


@held
class Outer(NamedTuple):
    wide: bool
    table: np.ndarray
    inner: Inner
    short: np.ndarray


def divide(a, b):
    return a // b, a % b


def least(numbers, first, stop):
    found = LIMIT
    for number in numbers[first:stop]:
        found = min(found, number, 3 * LIMIT)
    return found


def clear(row):
    row[:] = -1


def arithmetic(a, b, out):
    out[0] = a + b - a * 3
    out[1] = -a if a > b else (a << 2) | 1
    out[2], out[3] = divide(a, b)
    out[4] = (a & 255) >> 1
    out[5] = max(a, b, np.int64(LIMIT))
    out[6] = np.uint32(a)
    out[7] = -7
    out[7] += a
    out[8] = out[9] = 1 - (a > b)


def loops(numbers, out):
    found = turns = 0
    for i in range(len(numbers)):
        if numbers[i] < 0:
            continue
        elif numbers[i] > 90:
            break
        found += numbers[i]
    for i in range(5, len(numbers), 2):
        turns += i
    for i in range(len(numbers) - 1, 1, -1):
        turns = turns * 3 + numbers[i]
    while True:
        turns -= 1
        if turns % 4 == 0:
            out[0], out[1] = found, turns
            return found > 10


def short_circuits(numbers, out):
    n = len(numbers)
    for i in range(n + 2):
        inside = i < n and numbers[i] > 0
        out[i] = 2 if not inside or 10 < numbers[i] <= 50 else 1


def rows_and_slices(table, out):
    for i in range(len(table)):
        row = table[i]
        row[0], row[-1 + len(row)] = row[len(row) - 1], row[0]
        out[i] = least(row, 1, 4) + table[i, 2]
    clear(table[1])
    last = table[2]
    last[1:3] = 5


def records(x, out):
    short = x.short
    for i in range(len(x.inner.flags)):
        x.inner.flags[i] = x.inner.small[i] < x.table[0, i]
        short[i] = x.inner.small[i] - 1
        out[i] = x.inner.flags[i] + x.inner.small[i] + short[i] + x.wide
    inner = x.inner
    clear(inner.small)


def arrays(seed):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-30, 100, 12)
    numbers[8] = 91
    inner = Inner(np.zeros(4, bool), rng.integers(-9, 9, 4).astype(np.int32))
    return (
        numbers,
        rng.integers(-9, 30, (4, 5)),
        Outer(bool(seed % 2), rng.integers(-9, 9, (2, 4)), inner, np.zeros(4, np.uint32)),
    )


CASES = {
    arithmetic: lambda numbers, table, outer: (numbers[0], numbers[1] or numbers[8]),
    loops: lambda numbers, table, outer: (numbers,),
    short_circuits: lambda numbers, table, outer: (numbers,),
    rows_and_slices: lambda numbers, table, outer: (table,),
    records: lambda numbers, table, outer: (outer,),
}


def numbers_in(value):
    if isinstance(value, tuple):
        return [one for item in value for one in numbers_in(item)]
    return np.asarray(value).ravel().tolist()


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_kernels_do_what_python_does(function):
    compiled, differ = kernel(function), set()
    for seed in range(30):
        mine, its = ((*CASES[function](*arrays(seed)), np.zeros(14, np.int64)) for _ in range(2))
        assert (function(*mine) or 0) == (compiled(*its) or 0)
        assert numbers_in(mine) == numbers_in(its)
        differ.add(tuple(numbers_in(mine)))
    assert len(differ) == 30


def plus_one(a):
    return a + 1


def total(x):
    found = 0
    for i in range(4):
        found += x.table[0, i]
    return found


def test_a_row_of_addresses_is_kept_and_is_of_one_object_only():
    *_, outer = arrays(0)
    compiled = kernel(total)
    assert compiled(outer) == compiled(outer) == outer.table[0].sum() and "_row" in vars(outer)
    outer.table[0, 0] += 100
    assert compiled(outer) == outer.table[0].sum()
    for other in (copy.copy(outer), copy.deepcopy(outer), outer._replace(table=outer.table + 50)):
        assert "_row" not in vars(other)
        assert compiled(other) == other.table[0].sum()


def floats(a):
    return a * 0.5


def rebinds(x, a):
    row = x.table[0]
    if a > 0:
        row = x.table[1]
    return row[0]


def unknown(a):
    return nowhere(a)  # noqa: F821


def from_the_end(x):
    return x.short[-1]


def keywords(a):
    return plus_one(a=a)


def another_loop(a):
    for i in zip(a, a):  # noqa: B905
        return i


@pytest.mark.parametrize("function", [floats, rebinds, unknown, from_the_end, keywords, another_loop])
def test_what_a_kernel_cannot_have_is_refused_with_its_line(function):
    *_, outer = arrays(0)
    arguments = {"x": outer, "a": 1}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    with pytest.raises(NotImplementedError, match=r"test_sim_compile\.py:\d+: a kernel cannot have '.+'"):
        kernel(function)(*(arguments[name] for name in names))


@pytest.mark.parametrize("array", [np.zeros(4), np.zeros((4, 4), np.int64)[:, 1]])
def test_arrays_that_kernels_do_not_take(array):
    with pytest.raises(TypeError, match="C-contiguous arrays of whole numbers"):
        kernel(clear)(array)


def test_threads_that_need_a_kernel_at_once_all_get_it():
    compiled, found = kernel(arithmetic), []

    def work(a):
        out = np.zeros(14, np.int64)
        for _ in range(200):
            compiled(a, 3, out)
        found.append((a, int(out[0])))

    threads = [threading.Thread(target=work, args=(a,)) for a in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(a, a + 3 - 3 * a) for a in range(8)]


USE = (
    "import sys, numpy as np; sys.path.insert(0, 'tests'); import test_sim_compile as t\n"
    "if len(sys.argv) > 1: t.LIMIT = int(sys.argv[1])\n"
    "out = np.zeros(14, np.int64); t.kernel(t.arithmetic)(1, 2, out); print(out[5])"
)


def use(place, *arguments):
    root = Path(__file__).parents[1]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(place), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", USE, *arguments], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_machine_code_is_kept_and_never_stale(tmp_path):
    assert use(tmp_path) == "7"
    (file,) = tmp_path.iterdir()
    os.utime(file, (1, 1))
    assert use(tmp_path) == "7" and file.stat().st_mtime == 1
    assert use(tmp_path, "9") == "9" and len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_to_does_no_harm(tmp_path):
    (tmp_path / "file").touch()
    assert use(tmp_path / "file" / "below") == "7"


def test_where_machine_code_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert folder() == tmp_path
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert folder().name == "__pycache__"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "simdev"
