"""The journal of a result folder: what is on the disk is what was found, or it is refused."""

import json

import numpy as np
import pytest

from simdev.bench.journal import Journal, Results, journal_line, read_journal_line
from simdev.bench.rows import Row
from simdev.errors import InvalidInput

ROW = Row("w", "t", "fifo/fifo/dataflow", "p", 1, "{}", "evaluations=1", 0, "f" * 16, "c" * 16, "error", "\u00e4")


def folder(path, rows=3):
    path.mkdir(exist_ok=True)
    results = Results(path)
    results.add_bound(("f" * 16, "c" * 16, "fifo/fifo/dataflow"), 12, "chain \u2028")
    for seed in range(rows):
        results.add(Row(**{**vars(ROW), "seed": seed}), None, [(1, 0.5, 100 + seed)])
    results.close()
    return path / "journal.jsonl"


def content(path):
    results = Results(path.parent)
    results.close()
    return results.rows, [results.curve(row.key) for row in results.rows], results.bounds


def test_a_line_is_its_entry():
    entry = {"kind": "bound", "of": ["\u00e4", "}", '"sum": "'], "ns": None, "method": ""}
    line = journal_line(entry)
    assert line.endswith("}\n") and json.loads(line)["of"] == entry["of"]
    assert read_journal_line(line[:-1].encode()) == entry


def test_no_flipped_bit_passes_unnoticed(tmp_path):
    journal = folder(tmp_path / "whole")
    before, whole = content(journal), journal.read_bytes()
    damaged = tmp_path / "damaged" / "journal.jsonl"
    damaged.parent.mkdir()
    rng = np.random.default_rng(0)
    refused = shorter = 0
    for bit in rng.choice(8 * len(whole), 600, replace=False).tolist():
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(data)
        try:
            after = content(damaged)
        except InvalidInput as error:
            refused += "journal.jsonl: line" in str(error)
            continue
        # the end of the last line is gone: its run is executed again
        assert bit // 8 == len(whole) - 1 and after[0] == before[0][:-1] and after[2] == before[2]
        shorter += 1
    assert refused + shorter == 600 and refused > 590


def test_a_journal_of_an_older_version_is_read_and_continued(tmp_path):
    journal = folder(tmp_path / "new")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    old = tmp_path / "old" / "journal.jsonl"
    old.parent.mkdir()
    old.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "sum"}) + "\n" for line in lines))
    assert content(old) == content(journal)
    results = Results(old.parent)
    results.add(Row(**{**vars(ROW), "seed": 7}), None, [])
    results.close()
    assert [row.seed for row in content(old)[0]] == [0, 1, 2, 7]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_short_is_dropped_for_good(tmp_path, cut):
    journal = folder(tmp_path / "torn")
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert [row.seed for row in content(journal)[0]] == [0, 1]
    assert journal.read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"kind": ["row"]}', b'{"kind": "row"}', b'{"kind": "else", "ns": 1}', b"\xff", b"3"]
)
def test_what_is_no_entry_is_named(tmp_path, line):
    (tmp_path / "journal.jsonl").write_bytes(line + b"\n")
    with pytest.raises(InvalidInput, match="journal.jsonl: line 1: not a journal entry") as caught:
        Journal(tmp_path / "journal.jsonl")
    assert len(str(caught.value)) < 500


def test_infinite_numbers_are_named(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"kind": "bound", "of": ["f", "c", "r"], "ns": 1e999, "method": "x"}\n')
    with pytest.raises(InvalidInput, match="line 1: not a journal entry .*1e999 is beyond a double"):
        Results(tmp_path)
