"""Tables of measured data that would fill the memory are refused by one sentence."""

import gzip
import io
import json
import tracemalloc
import zipfile

import fuzz_measured
import numpy as np
import pytest

from simdev import files
from simdev.errors import InvalidInput

LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """The limit of documents is lowered, so that small files exceed it."""
    for function in (files.open_text, files.read_bytes, files.read_text, files.read_json, files.read_zipped):
        inner = getattr(function, "__wrapped__", function)
        monkeypatch.setattr(inner, "__defaults__", (LIMIT,))
    monkeypatch.setattr("simdev.calibrate.deepbench.MAX_UNPACKED", LIMIT)
    monkeypatch.setattr("simdev.parallel.capture.kept.MAX_CAPTURE", LIMIT)
    monkeypatch.setattr("simdev.problem.graph_file.MAX_UNPACKED", LIMIT)


def padded(reader):
    """The seed of a reader, padded to twice the limit with what the format ignores."""
    seed = gzip.decompress(reader.seed) if reader.seed[:2] == b"\x1f\x8b" else reader.seed
    if reader.name == "workbook":
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(seed)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name) + b" " * (2 * LIMIT if "sheet1" in name else 0))
        return out.getvalue()
    if reader.name == "measured profile":
        out = io.BytesIO()
        np.savez_compressed(out, alone=np.zeros((2, LIMIT)), loaded=np.ones((2, 3)), fingerprint=np.array("0" * 16))
        return out.getvalue()
    data = seed + b"\n" + b" " * (2 * LIMIT)
    return gzip.compress(data) if reader.file.endswith(".gz") else data


READERS = {reader.name: reader for reader in fuzz_measured.measured_readers()}


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("kept capture", "label figures")])
def test_a_table_beyond_the_limit_is_refused(tmp_path, name):
    if READERS[name].missing:
        pytest.importorskip(READERS[name].missing)
    (tmp_path / READERS[name].file).write_bytes(padded(READERS[name]))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="refused"):
            READERS[name].read(tmp_path / READERS[name].file)
        assert tracemalloc.get_traced_memory()[1] < 64 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", READERS)
def test_the_seeds_are_read(tmp_path, name):
    """A control: without the padding they are read."""
    if READERS[name].missing:
        pytest.importorskip(READERS[name].missing)
    (tmp_path / READERS[name].file).write_bytes(READERS[name].seed)
    READERS[name].read(tmp_path / READERS[name].file)


def test_the_figures_of_a_label_are_bounded(tmp_path):
    from simdev.studies.fidelity.labels import read_label

    (tmp_path / "gpt-train-128-2.csv").write_bytes(READERS["label"].seed)
    (tmp_path / "gpt-train-128-2.json").write_text(json.dumps(fuzz_measured.LABEL) + " " * 2 * LIMIT)
    with pytest.raises(InvalidInput, match="refused"):
        read_label(tmp_path / "gpt-train-128-2.csv")


def test_a_kept_capture_that_is_too_large_counts_as_absent(tmp_path, monkeypatch):
    from simdev.parallel.capture import kept

    monkeypatch.setattr(kept, "folder", lambda: tmp_path)
    good = json.dumps(fuzz_measured.KEPT)
    (tmp_path / "a.json.gz").write_bytes(kept.packed("a", good))
    assert kept.load("a")["peak"] == 7
    (tmp_path / "a.json.gz").write_bytes(kept.packed("a", good + " " * 2 * LIMIT))
    assert kept.load("a") is None


def workbook(sheet):
    with zipfile.ZipFile(io.BytesIO(READERS["workbook"].seed)) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in parts.items():
            new.writestr(name, sheet(content) if "sheet1" in name else content)
    return out.getvalue()


@pytest.mark.parametrize(
    "sheet, reason",
    [
        (lambda data: data.replace(b'<row r="2">', b'<row r="999999999">'), "more than 4194304 cells: refused"),
        (lambda data: data.replace(b"<v>0.5</v>", b"<v>1e999</v>"), "not a number"),
        (lambda data: data.replace(b"<v>4</v>", b"<v>99</v>"), "corrupted"),
        (lambda data: b"<!DOCTYPE x [<!ENTITY a 'aaaaaaaaaa'>" + b"".join(
            b"<!ENTITY %c '%s'>" % (98 + n, b"&%c;" % (97 + n) * 10) for n in range(9)) + b"]>"
            + data.replace(b"<v>0.5</v>", b"<v>&j;</v>"), "corrupted|large"),
    ],
    ids=["rows", "infinite", "index", "entities"],
)  # fmt: skip
def test_a_workbook_that_would_grow_in_memory_is_refused(tmp_path, sheet, reason):
    pytest.importorskip("openpyxl")
    (tmp_path / "DeepBench_P100.xlsx").write_bytes(workbook(sheet))
    with pytest.raises(InvalidInput, match=reason):
        READERS["workbook"].read(tmp_path / "DeepBench_P100.xlsx")
