"""Placements of a result folder: in files of their own, in one file of lines, and damaged."""

import base64
import json
import zlib

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.problem.placement import Placement
from simdev.problem.placement_file import (
    holds_placement,
    pack_placements,
    packed_keys,
    packed_text,
    placement_file,
    store_placement,
    stored_placement,
)

PLACEMENTS = [
    Placement(np.array([0, 1, 1, 300])),
    Placement(np.array([0, 0, 1]), np.array([5, -(1 << 40), 0])),
    Placement(np.array([0, 2]), None, np.array([0, 0, 2])),
    Placement(np.zeros(0, int)),
]
KEYS = [placement.hash for placement in PLACEMENTS]


def fill(folder, placements=PLACEMENTS):
    for placement in placements:
        store_placement(folder, placement)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_a_stored_placement_is_read_back(tmp_path, packed):
    fill(tmp_path)
    if packed:
        pack_placements(tmp_path, KEYS)
    assert (tmp_path / "placements").exists() != packed
    for placement in PLACEMENTS:
        found = stored_placement(tmp_path, placement.hash)
        assert found.devices.tolist() == placement.devices.tolist() and found.hash == placement.hash
        assert holds_placement(tmp_path, placement.hash)
    assert not holds_placement(tmp_path, "0" * 16)


def test_packing_again_adds_lines_and_drops_what_no_row_names(tmp_path):
    fill(tmp_path, PLACEMENTS[:2])
    pack_placements(tmp_path, KEYS[:2])
    first = (tmp_path / "placements.jsonl").read_bytes().splitlines()
    fill(tmp_path, PLACEMENTS[2:])
    pack_placements(tmp_path, [*KEYS, KEYS[0]])
    lines = (tmp_path / "placements.jsonl").read_bytes().splitlines()
    assert set(first) < set(lines) and [json.loads(line)["hash"] for line in lines] == sorted(KEYS)
    pack_placements(tmp_path, KEYS[1:])
    assert packed_keys(tmp_path) == sorted(KEYS[1:])
    with pytest.raises(InvalidInput, match="No such file"):
        stored_placement(tmp_path, KEYS[0])


def test_a_missing_placement_stops_the_packing_and_nothing_is_lost(tmp_path):
    fill(tmp_path, PLACEMENTS[:2])
    with pytest.raises(InvalidInput, match="No such file"):
        pack_placements(tmp_path, KEYS)
    assert all(holds_placement(tmp_path, key) for key in KEYS[:2])


def test_packed_text_does_not_depend_on_where_the_placements_lie(tmp_path):
    apart, together = tmp_path / "apart", tmp_path / "together"
    apart.mkdir()
    together.mkdir()
    fill(apart)
    pack_placements(fill(together), KEYS)
    assert packed_text(apart, KEYS) == packed_text(together, KEYS) == (together / "placements.jsonl").read_bytes()


THREE = base64.b64encode(zlib.compress(bytes([0, 0, 1]))).decode()
LINE = {"hash": "0123456789abcdef", "devices": ["|u1", 3, THREE]}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "line 1: not a placement"),
        (json.dumps(LINE)[:-1], "line 1: not a placement"),
        (json.dumps(LINE) + "\n" + json.dumps(LINE), "given twice"),
        (json.dumps(LINE | {"devices": 3}), "devices: not a packed array"),
        (json.dumps(LINE | {"devices": ["|O8", 3, "eA=="]}), "devices: not a packed array"),
        (json.dumps(LINE | {"devices": ["|u1", 1 << 60, "eA=="]}), "devices: not a packed array"),
        (json.dumps(LINE | {"devices": ["|u1", 2, THREE]}), "the length is another"),
        (json.dumps(LINE | {"devices": ["|u1", 3, "&&"]}), "devices: not a packed array"),
        (json.dumps(LINE | {"more": ["|u1", 3, THREE]}), "expected 'devices'"),
        (json.dumps({"hash": LINE["hash"], "x": 1}), "x: not a packed array"),
        (json.dumps(LINE), "the file was altered"),
    ],
)
def test_a_damaged_line_is_one_sentence(tmp_path, text, message):
    (tmp_path / "placements.jsonl").write_text(text + "\n")
    with pytest.raises(InvalidInput, match=r"placements\.jsonl.*" + message):
        stored_placement(tmp_path, LINE["hash"])


def test_a_key_that_is_no_hash_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="is not the hash of a placement"):
        placement_file(tmp_path, "../x")
