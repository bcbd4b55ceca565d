"""Topologies: routes by hand, the shipped files, and files with mistakes in them."""

import numpy as np
import pytest

from simdev.errors import InvalidInput, UnknownName
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_kinds, load_topology, topology_names

GPU = DeviceKind("gpu", 2**30, {"f32": 1e12}, 1e11)
CPU = DeviceKind("cpu", 2**34, {"f32": 1e11}, 1e10)

GOOD = """
name = "mine"
switches = ["s"]
[kind.g]
memory_gib = 2
reserved_gib = 0.5
memory_gb_per_s = 100
peak_tflops = { f32 = 1.5 }
launch_us = 2.5
[[device]]
names = ["a", "b"]
kind = "g"
[[device]]
name = "c"
kind = "g"
host = true
[[link]]
ends = [["a", "s"], ["b", "s"], ["c", "s"]]
gb_per_s = 10
latency_us = 1.5
"""


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_gives_devices_links_and_units(tmp_path):
    topology = load_topology(write(tmp_path, GOOD))
    assert [device.name for device in topology.devices] == ["a", "b", "c"]
    assert topology.host == 2 and topology.accelerators == (0, 1)
    assert topology.memory_bytes.tolist() == [3 * 2**29] * 3
    assert topology.kinds[0].peak_flops == {"f32": 1.5e12} and topology.kinds[0].launch_ns == 2500
    assert topology.links[1] == Link(("b", "s"), 10**10, 1500, "full")
    # link n is channels 2n (away from its first end) and 2n + 1
    assert topology.routes[0, 1] == (0, 3) and topology.routes[1, 0] == (2, 1)
    assert topology.pair_latency_ns.tolist() == [[0, 3000, 3000], [3000, 0, 3000], [3000, 3000, 0]]


def test_a_kind_may_have_a_price_that_changes_no_time(tmp_path):
    priced = GOOD.replace("launch_us", "dollars_per_hour = 2.5\nlaunch_us")
    with_price, without = (load_topology(write(tmp_path, text)) for text in (priced, GOOD))
    assert with_price.kinds[0].dollars_per_hour == 2.5 and without.kinds[0].dollars_per_hour == 0
    assert with_price.kinds[0] == without.kinds[0]
    with pytest.raises(InvalidInput, match="dollars_per_hour"):
        load_topology(write(tmp_path, priced.replace("2.5", "-1", 1)))


def test_a_half_duplex_link_is_one_channel():
    topology = Topology("t", (Device("a", GPU), Device("b", GPU)), (Link(("a", "b"), 10, 0, "half"),))
    assert topology.routes == {(0, 1): (0,), (1, 0): (0,)}
    assert topology.channels == (("a", "b", 0, 10),)


def test_the_route_is_the_fastest_for_one_mebibyte():
    # Straight: 1 us + 1 MiB at 1 GB/s = 1049.6 us. Over the switch: 2 x 100 us + 1 MiB at 10 GB/s = 304.9 us.
    devices = (Device("a", GPU), Device("b", GPU))
    links = (Link(("a", "b"), 10**9, 1000), Link(("a", "s"), 10**10, 100_000), Link(("s", "b"), 10**10, 100_000))
    topology = Topology("t", devices, links, ("s",))
    assert topology.routes[0, 1] == (2, 4)
    assert topology.pair_bytes_per_s[0, 1] == 10**10


def test_equal_routes_are_chosen_by_name():
    devices = (Device("a", GPU), Device("b", GPU))
    links = tuple(Link(ends, 10**9, 10) for ends in (("a", "z"), ("z", "b"), ("a", "y"), ("y", "b")))
    topology = Topology("t", devices, links, ("z", "y"))
    assert topology.routes[0, 1] == (4, 6)


def test_transfers_pass_hosts_but_not_accelerators():
    devices = tuple(Device(name, GPU) for name in "abc")
    links = (Link(("a", "b"), 10, 0), Link(("b", "c"), 10, 0))
    assert (0, 2) not in Topology("t", devices, links).routes
    devices = (devices[0], Device("b", CPU, host=True), devices[2])
    assert Topology("t", devices, links).routes[0, 2] == (0, 2)


@pytest.mark.parametrize("name", topology_names())
def test_every_shipped_topology_is_whole(name):
    topology = load_topology(name)
    assert topology.name == name and topology.description
    assert topology.host >= 0, "a host device is declared"
    assert np.all(topology.pair_latency_ns >= 0)
    # a file that is read twice gives the same routes, and routes lead where they say
    assert load_topology(name).routes == topology.routes
    for (source, target), path in topology.routes.items():
        here = topology.devices[source].name
        for number in path:
            a, b, _, _ = topology.channels[number]
            assert here in (a, b)
            here = b if here == a else a
        assert here == topology.devices[target].name


def test_peers_on_a_board_avoid_the_host():
    topology = load_topology("k80x4")
    names = [{end for c in topology.routes[pair] for end in topology.channels[c][:2]} for pair in ((1, 2), (1, 3))]
    assert names[0] == {"gpu0", "gpu1", "plx0"}
    assert names[1] == {"gpu0", "gpu2", "plx0", "plx1", "cpu0"}


def test_every_kind_has_memory_and_a_rate():
    for kind in load_kinds().values():
        assert kind.memory_bytes > 2**30 and kind.peak_flops["f32"] > 0


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('kind = "g"\nhost', 'kind = "h"\nhost', "mine.toml: device 'c': kind: unknown device kind 'h'"),
        ('["b", "s"]', '["b", "t"]', "link 1 (b - t): unknown device or switch 't'"),
        ('["b", "s"]', '["b", "b"]', "joins a device to itself"),
        ('["b", "s"]', '["b"]', "link 0: ends: expected two names"),
        (', ["c", "s"]', "", "no route from 'a' to 'c': the topology is disconnected"),
        ("gb_per_s = 10\n", 'gb_per_s = "10"\n', "link 0: gb_per_s: expected a number >= 0, got '10'"),
        ("gb_per_s = 10\n", "gb_per_s = nan\n", "link 0: gb_per_s: expected a number >= 0, got nan"),
        ("gb_per_s = 10\n", "gb_per_s = inf\n", "link 0: gb_per_s"),
        ("gb_per_s = 10\n", "gb_per_s = 0\n", "bandwidth must be positive"),
        ("latency_us = 1.5", "latency_us = -1", "link 0: latency_us: expected a number >= 0, got -1"),
        ("latency_us = 1.5", 'duplex = "both"\nlatency_us = 1', "duplex 'both', expected 'full' or 'half'"),
        ("latency_us = 1.5", "latency = 1.5", "link 0: latency_us: expected a number >= 0, got nothing"),
        ("host = true", "host = 1", "device 1: host: expected bool, got int"),
        ("host = true", "hots = true", "device 1: unknown key 'hots'; did you mean 'host'?"),
        ('names = ["a", "b"]', "names = [1]", "device 0: names: expected a list of names"),
        ('names = ["a", "b"]', 'names = ["a", "c"]', "name 'c' is used twice"),
        ("memory_gib = 2", "memory_gib = 0.25", "kind 'g': memory_gib: nothing is left after reserved_gib"),
        ("f32 = 1.5", "f32 = 0", "kind 'g': peak_tflops and memory_gb_per_s must be positive"),
        ("launch_us = 2.5", "compute_efficiency = {conv = 0}", "kind 'g': compute_efficiency"),
        ('name = "mine"', "", "mine.toml: name: missing"),
        ('name = "mine"', 'name = "mine', "not TOML"),
        ('name = "mine"', "name = " + "[" * 20_000, "not TOML"),
        ('name = "mine"', 'name = "mine"\nx = 1' + "0" * 5000, "not TOML"),
        ("memory_gib = 2", "memory_gib = 1e11", "kind 'g': memory_gib: too large"),
        ("launch_us = 2.5", "slots = 1e9", "kind 'g': slots: too large"),
        ("launch_us = 2.5", "launch_us = 1e11", "kind 'g': launch_us: too large"),
        ("gb_per_s = 10\n", "gb_per_s = 1e11\n", "link 0 (a - s): bandwidth or latency is too large"),
        ("latency_us = 1.5", "latency_us = 1e11", "link 0 (a - s): bandwidth or latency is too large"),
        ('["a", "b"]\n', str([f"d{i}" for i in range(2000)]) + "\n", "2002 devices and switches; at most 1024"),
    ],
)
def test_mistakes_name_the_file_and_the_field(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(InvalidInput) as caught:
        load_topology(write(tmp_path, GOOD.replace(old, new)))
    assert message in str(caught.value) and "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_suggest_the_nearest(tmp_path):
    with pytest.raises(UnknownName, match="did you mean 'k80x4'"):
        load_topology("k80x44")
    with pytest.raises(InvalidInput, match="No such file"):
        load_topology(tmp_path / "none.toml")
    with pytest.raises(InvalidInput, match="directory"):
        load_topology(tmp_path / "x" / "..")


def test_the_dgx1_mesh_uses_six_bricks_a_gpu_and_no_gpu_as_a_relay():
    topology = load_topology("v100x8-dgx1")
    bricks = dict.fromkeys(topology.device_index, 0)
    for link in topology.links:
        if all(end.startswith("gpu") for end in link.ends):
            for end in link.ends:
                bricks[end] += round(link.bytes_per_s / 24.2e9)
    assert bricks == {"cpu0": 0, **{f"gpu{i}": 6 for i in range(8)}}
    index = topology.device_index
    assert topology.pair_bytes_per_s[index["gpu0"], index["gpu4"]] == 48_400_000_000
    assert topology.pair_bytes_per_s[index["gpu0"], index["gpu1"]] == 24_200_000_000
    assert topology.pair_bytes_per_s[index["gpu0"], index["gpu5"]] == 8_200_000_000  # no brick: over both sockets


def test_nodes_talk_over_infiniband_and_neighbours_over_nvlink():
    topology = load_topology("h100x16")
    index = topology.device_index
    ends = {end for c in topology.routes[index["gpu0"], index["gpu15"]] for end in topology.channels[c][:2]}
    assert ends == {"gpu0", "ndr", "gpu15"}
    assert topology.pair_bytes_per_s[index["gpu0"], index["gpu7"]] == 353_000_000_000


def test_copies_between_cards_without_peer_access_pass_the_host():
    topology = load_topology("rtx2080x4")
    there, back = topology.routes[1, 2], topology.routes[2, 1]
    assert [topology.channels[c][:2] for c in there] == [("cpu0", "gpu0"), ("cpu0", "gpu1")]
    assert set(there) == set(back), "half duplex: both ways share the channels"
    assert int(topology.memory_bytes[1]) == 6 * 2**30


def test_random_damage_to_a_file_is_noticed_or_harmless(tmp_path):
    """Change characters anywhere: a topology, or :class:`InvalidInput`, and nothing else."""
    rng = np.random.default_rng(11)
    good, alphabet = GOOD.encode(), b'abgs019-.e=[]{}"\n #nif\xff\x00'
    path, refused = tmp_path / "t.toml", 0
    for _ in range(1000):
        data = bytearray(good)
        for at in rng.integers(len(data), size=rng.integers(1, 4)):
            data[at] = alphabet[rng.integers(len(alphabet))]
        path.write_bytes(bytes(data))
        try:
            load_topology(path)
        except InvalidInput as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 300


def naive_routes(topology, source):
    """The routes of one device by the definition: of all simple paths through relays, the one of the least key."""
    relays = {*topology.switches, *(device.name for device in topology.devices if device.host)}
    arcs, channel = [], 0
    for link in topology.links:
        back = channel + 1 if link.duplex == "full" else channel
        arcs += [(*link.ends, channel), (*link.ends[::-1], back)]
        channel = back + 1
    best = {}

    def follow(names, path):
        for here, there, number in arcs:
            if here == names[-1] and there not in names and (not path or here in relays):
                longer, channels = (*names, there), (*path, number)
                key = (
                    sum(topology.channels[c][2] for c in channels)
                    + -(-(2**20) * 10**9 // min(topology.channels[c][3] for c in channels)),
                    len(channels),
                    longer,
                    channels,
                )
                best[there] = min(best.get(there, key), key)
                follow(longer, channels)

    follow((topology.devices[source].name,), ())
    return {topology.device_index[name]: key[-1] for name, key in best.items() if name in topology.device_index}


@pytest.mark.parametrize("seed", range(40))
def test_routes_are_the_best_of_all_paths(seed):
    rng = np.random.default_rng(seed)
    devices = tuple(Device(f"d{i}", GPU, bool(rng.random() < 0.3)) for i in rng.permutation(rng.integers(2, 5)))
    switches = tuple(f"s{i}" for i in range(rng.integers(0, 3)))
    names = [device.name for device in devices] + list(switches)
    links = tuple(
        Link(
            tuple(str(name) for name in rng.choice(names, 2, replace=False)),
            int(rng.choice([10**7, 10**9, 10**10])),
            int(rng.choice([0, 10, 10**5, 10**7])),
            str(rng.choice(["full", "half"])),
        )
        for _ in range(rng.integers(1, 8))
    )
    topology = Topology("drawn", devices, links, switches)
    for source in range(len(devices)):
        found = {target: path for (start, target), path in topology.routes.items() if start == source}
        assert found == naive_routes(topology, source)


def test_routes_of_a_star_whose_links_all_differ_take_few_steps(monkeypatch):
    from simdev.problem import topology

    extended, steps = topology._extended, []
    monkeypatch.setattr(topology, "_extended", lambda *path: steps.append(1) or extended(*path))
    n = 50
    star = Topology(
        "star",
        tuple(Device(f"d{i}", GPU) for i in range(n)),
        tuple(Link((f"d{i}", "s"), (i + 1) * 10**9, i % 7) for i in range(n)),
        ("s",),
    )
    assert len(star.routes) == n * (n - 1)
    assert len(steps) < 4 * n * n  # a new search for each bandwidth would take n ** 3 / 2


@pytest.mark.parametrize(
    "line, refused",
    [("nodes = 1024", "2048 devices"), ('nodes = 3\nswitches = ["network"]', "disconnected"), ("nodes = 0", "nodes")],
)
def test_numbers_of_nodes_that_are_refused_before_the_copies_are_made(tmp_path, line, refused):
    path = tmp_path / "many.toml"
    devices = '[[device]]\nnames = ["a", "b"]\nkind = "p100-pcie"\n[[link]]\nends = ["a", "b"]\ngb_per_s = 1\n'
    path.write_text(f'name = "many"\n{line}\n{devices}latency_us = 1\n', encoding="utf-8")
    with pytest.raises(InvalidInput, match=refused):
        load_topology(path)
    with pytest.raises(InvalidInput):
        load_topology(f"{path}[nodes={'9' * 5000}]")


def test_tensorflow_pays_for_each_tensor_and_copies_through_the_host():
    topology = load_topology("k80x4-tensorflow")
    gpus = topology.accelerators
    assert len(topology.routes[gpus[0], gpus[1]]) == 2  # to the host and back
    assert topology.pair_latency_ns[gpus[0], gpus[1]] == 134_000
    assert topology.pair_bytes_per_s[gpus[0], gpus[1]] == 7_600_000_000


def test_a_mixed_machine_has_two_kinds_of_gpus_on_equal_links():
    mixed, plain = load_topology("p100x2-v100x2"), load_topology("p100x4")
    kinds = [mixed.devices[device].kind.name for device in mixed.accelerators]
    assert kinds == ["p100-pcie"] * 2 + ["v100-pcie-16gb"] * 2
    assert (mixed.pair_bytes_per_s == plain.pair_bytes_per_s).all()
