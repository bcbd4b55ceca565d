"""Placements, and the file that holds those of a board."""

import base64
import json
import zlib

import numpy as np
import pytest
from drawn import chain, machine
from drawn import problem as drawn_problem

from simdev.errors import InvalidInput, UnknownName
from simdev.problem.graph import GraphBuilder
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
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology

# placements: checked against a problem, saved and read back, and mistakes in files


GPU = DeviceKind("gpu", 2**30, {"f32": 1e12}, 1e11, unsupported=("string_split",))
CPU = DeviceKind("cpu", 2**30, {"f32": 1e11}, 1e10)


@pytest.fixture
def problem():
    """x -> y -> z, x and z colocated; cpu and gpu0 are joined, gpu1 stands alone; y is a string op."""
    builder = GraphBuilder("g")
    x = builder.op("x", "input", outputs=[4], group="a")
    y = builder.op("y", "string_split", inputs=builder.outputs(x), outputs=[4])
    builder.op("z", "mm", inputs=builder.outputs(y), group="a")
    devices = (Device("cpu", CPU, host=True), Device("gpu0", GPU), Device("gpu1", GPU))
    return Problem.build(builder.build(), Topology("t", devices, (Link(("cpu", "gpu0"), 10**9, 10),)))


def test_a_placement_is_frozen_and_hashed():
    placement = Placement([0, 1, 0])
    assert placement.devices.dtype == np.int32 and placement.hash == Placement(np.array([0, 1, 0])).hash
    assert placement.hash != Placement([0, 1, 1]).hash != Placement([0, 1, 1], priority=[1, 2, 3]).hash
    with pytest.raises(ValueError, match="read-only"):
        placement.devices[0] = 1
    for devices in ([0.5], [[0]], ["cpu"]):
        with pytest.raises(InvalidInput, match="placement: devices: expected one whole number per op"):
            Placement(devices)
    with pytest.raises(InvalidInput, match="placement: devices: a number does not fit int32"):
        Placement([2**32])  # which would be device 0, were it cut to size


def test_units_become_ops(problem):
    assert Placement.of_units(problem, [1, 0]).devices.tolist() == [1, 0, 1]


@pytest.mark.parametrize("devices", [[0, 0, 0], [1, 0, 1]])
def test_good_placements(problem, devices):
    Placement(devices).check(problem)


@pytest.mark.parametrize(
    "devices, message",
    [
        ([0, 0], "length 2, expected 3"),
        ([0, 3, 0], "op 'y' is on device 3, which t does not have"),
        ([0, -1, 0], "op 'y' is on device -1, which t does not have"),
        ([1, 1, 1], "op 'y' has no kernel on 'gpu0'"),
        ([0, 0, 1], "op 'z' is not on the device of its colocation group"),
        ([2, 0, 2], "a tensor of op 'x' must travel from 'gpu1' to 'cpu', which have no route"),
    ],
)
def test_bad_placements(problem, devices, message):
    with pytest.raises(InvalidInput) as caught:
        Placement(devices).check(problem, source="placer p")
    assert str(caught.value) == f"placer p: devices: {message}"


@pytest.mark.parametrize("priority", [None, [5, -1, 3]])
def test_a_file_gives_it_back(problem, tmp_path, priority):
    placement = Placement([1, 0, 1], priority)
    placement.save(tmp_path / "p.json", problem)
    assert Placement.load(tmp_path / "p.json", problem).hash == placement.hash


@pytest.mark.parametrize("devices", [["gpu0", "cpu", 1], {"z": 1, "x": "gpu0", "y": 0}])
def test_files_may_name_devices_and_ops(problem, tmp_path, devices):
    (tmp_path / "p.json").write_text(json.dumps({"devices": devices}))
    assert Placement.load(tmp_path / "p.json", problem).devices.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"devices": [0, "gpu2", 0]}', "devices: unknown device 'gpu2'; did you mean 'gpu"),
        ('{"devices": [0, true, 0]}', "devices: True is not a device of t"),
        ('{"devices": [0, 0.0, 0]}', "devices: 0.0 is not a device of t"),
        ('{"devices": [0, 9, 0]}', "devices: 9 is not a device of t"),
        ('{"devices": [0, null, 0]}', "devices: None is not a device of t"),
        ('{"devices": {"x": 0, "z": 0}}', "devices: op 'y' has no device"),
        ('{"devices": 3}', "devices: expected a list or an object"),
        ('{"devices": [0, 0]}', "devices: length 2, expected 3"),
        ('{"devices": [0, 0, 0], "priority": [1, 2]}', "priority: length 2, expected 3"),
        ('{"devices": [0, 0, 0], "priority": [1, 2, NaN]}', "not JSON (NaN is not JSON)"),
        ('{"devices": [0, 0, 0], "fingerprint": "feed"}', "fingerprint: made for graph 'feed', not"),
        ("[0, 0, 0]", "expected an object with 'devices'"),
        ('{"devices"', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_mistakes_in_files(problem, tmp_path, text, message):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        Placement.load(tmp_path / "p.json", problem)
    assert str(caught.value).startswith(f"{tmp_path / 'p.json'}: {message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_files_that_cannot_be_read(problem, tmp_path, content):
    if content is not None:
        (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(InvalidInput):
        Placement.load(tmp_path / "p.json", problem)


def test_a_priority_too_large_for_64_bits_is_refused(problem, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"devices": [0, 0, 0], "priority": [1, 2, 2**70]}))
    with pytest.raises(InvalidInput, match="priority"):
        Placement.load(tmp_path / "p.json", problem)


def test_an_unknown_device_is_an_unknown_name(problem, tmp_path):
    (tmp_path / "p.json").write_text('{"devices": ["cpu", "gpu", "cpu"]}')
    with pytest.raises(UnknownName):
        Placement.load(tmp_path / "p.json", problem)


def test_replicas_are_stored_and_hashed(tmp_path):
    p = drawn_problem(chain(4), machine(3), [1])
    plain, copied = Placement(np.array([0])), Placement(np.array([0]), replica_of=np.array([0, 0, 2]))
    assert copied.hash != plain.hash
    partly = Placement(copied.devices, replica_of=copied.replica_of, replicated=np.array([False]))
    assert len({plain.hash, copied.hash, partly.hash}) == 3
    for placement in (copied, partly):
        placement.save(tmp_path / "mine.json", p)
        assert Placement.load(tmp_path / "mine.json", p).hash == placement.hash


def test_an_op_without_copies_may_be_on_a_replica():
    b = GraphBuilder("pair")
    x = b.op("x", "op", outputs=[4], group="both")
    b.op("y", "op", inputs=b.outputs(x), group="both")
    b.op("z", "op", inputs=b.outputs(x))
    p = drawn_problem(b, machine(3), [1, 1, 1])
    of = np.array([0, 0, 2])

    def placed(*devices, replicated):
        return Placement(np.array(devices), replica_of=of, replicated=np.array(replicated))

    placed(0, 0, 1, replicated=[1, 1, 0]).check(p)
    placed(1, 1, 0, replicated=[False, False, True]).check(p)
    with pytest.raises(InvalidInput, match="replica_of: 'd1' is a replica, but ops with copies are placed on it"):
        placed(1, 1, 0, replicated=[0, 1, 1]).check(p)
    with pytest.raises(InvalidInput, match="replicated: op 'y' differs from its colocation group"):
        placed(0, 0, 0, replicated=[1, 0, 1]).check(p)
    with pytest.raises(InvalidInput, match="replicated: length 2, expected 3"):
        placed(0, 0, 0, replicated=[1, 0]).check(p)
    with pytest.raises(InvalidInput, match="replicated: a number is neither 0 nor 1"):
        placed(0, 0, 0, replicated=[1, 0, 2])
    with pytest.raises(InvalidInput, match="replicated: says which ops have copies, but there are no replicas"):
        Placement(np.zeros(3, int), replicated=np.ones(3, bool)).check(p)


@pytest.mark.parametrize(
    "of, message",
    [
        ([0, 0], "length 2, expected 3"),
        ([0, 1, 5], "names a device that"),
        ([0, 0, 1], "which is a replica itself"),
        ([1, 1, 2], "ops with copies are placed on it"),
    ],
)
def test_impossible_replicas_are_refused(of, message):
    p = drawn_problem(chain(4), machine(3), [1])
    with pytest.raises(InvalidInput, match=f"placement: replica_of: .*{message}"):
        Placement(np.array([0]), replica_of=np.array(of)).check(p)


# placements of a result folder: in files of their own, in one file of lines, and damaged


PLACEMENTS = [
    Placement(np.array([0, 1, 1, 300])),
    Placement(np.array([0, 0, 1]), np.array([5, -(1 << 40), 0])),
    Placement(np.array([0, 2]), None, np.array([0, 0, 2])),
    Placement(np.array([0, 1]), None, np.array([0, 0, 2]), np.array([True, False])),
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
