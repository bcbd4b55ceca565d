"""Placements: checked against a problem, saved and read back, and mistakes in files."""

import json

import numpy as np
import pytest
from drawn import chain, machine
from drawn import problem as drawn_problem

from simdev.errors import InvalidInput, UnknownName
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology

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
    copied.save(tmp_path / "mine.json", p)
    assert Placement.load(tmp_path / "mine.json", p).hash == copied.hash


@pytest.mark.parametrize(
    "of, message",
    [
        ([0, 0], "length 2, expected 3"),
        ([0, 1, 5], "names a device that"),
        ([0, 0, 1], "which is a replica itself"),
        ([1, 1, 2], "ops are placed on it"),
    ],
)
def test_impossible_replicas_are_refused(of, message):
    p = drawn_problem(chain(4), machine(3), [1])
    with pytest.raises(InvalidInput, match=f"placement: replica_of: .*{message}"):
        Placement(np.array([0]), replica_of=np.array(of)).check(p)
