"""Hardware as data: device kinds, devices, switches and links, and the fixed route between each two devices.

A topology is a TOML file (``simdev/problem/devices/*.toml`` or the user's own). Sizes and rates carry their unit in the
key::

    name = "two-gpus"
    switches = ["pcie0"]
    [kind.my-gpu]                       # or use a kind of simdev/problem/devices/kinds.toml
    memory_gib = 16
    reserved_gib = 0.4                  # taken by driver and framework: not for the graph
    ...
    [[device]]
    names = ["gpu0", "gpu1"]            # or name = "gpu0"
    kind = "my-gpu"
    [[link]]                            # one link for each pair of ends
    ends = [["gpu0", "pcie0"], ["gpu1", "pcie0"]]
    gb_per_s = 12.4                     # 1e9 bytes per second, each direction if duplex = "full"
    latency_us = 2.0
    duplex = "full"                     # "half": both directions share one channel
    ranges = [                          # if measured: what holds instead, for transfers of so many bytes and more
        { from_bytes = 0, latency_us = 2.0, gb_per_s = 5.0 },
        { from_bytes = 65536, latency_us = 9.0, gb_per_s = 12.4 },
    ]

With ``nodes = N`` the file describes one node, and the topology has N copies of it: ``n0.gpu0``, ``n1.gpu0`` ... Only
the switch ``network`` exists once; the links to it join the nodes.

A transfer over several links takes the sum of their latencies and the smallest of their rates, as each has them for its
size. A range's latency is where its line meets zero bytes, and may be negative. Routes are chosen, and bandwidth is
shared (contention ``fair``), by ``gb_per_s`` and ``latency_us`` alone.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from simdev.errors import InvalidInput, UnknownName, quoted
from simdev.files import read_toml

DEVICES_DIR = Path(__file__).parent / "devices"
NETWORK = "network"  # the switch that all nodes share
ROUTE_PROBE_BYTES = 1 << 20  # routes are the fastest for a transfer of 1 MiB (execution model)
# Bounds that keep every sum of the engines inside 64 bits.
MAX_DEVICES, MAX_LINKS = 1024, 1 << 20  # a link for every pair
MAX_SLOTS, MAX_DELAY_NS, MAX_SIZE, MAX_RATE = 1 << 16, 1 << 42, 1 << 60, 1 << 60


@dataclass(frozen=True)
class DeviceKind:
    """What all devices of one kind share. Rates in FLOP/s and bytes/s, times in ns.

    ``peak_flops`` maps a dtype (``f32``, ``tf32``, ``bf16``, ``f16`` ...) to FLOP/s. ``compute_efficiency`` and
    ``memory_efficiency`` map an op class (see :mod:`simdev.problem.costs`) to the reachable share of peak and of
    bandwidth; the key ``default`` serves the rest. ``unsupported`` lists op kinds that have no kernel there.
    ``dispatch_ns`` is what issuing one op costs the host thread in the ``eager`` runtime. ``multiprocessors`` counts
    those that share an op (the key was ``units`` before), and ``calibrated`` names a device file
    (see :mod:`simdev.problem.opcost.device`) whose measurements cost the ops that it knows. For ``auto`` the rule of
    :mod:`simdev.problem.opcost.stand_in` chooses the file by ``watts`` (power limit), ``capability`` (CUDA's compute
    capability; 0 if not CUDA) and ``vendor``. ``dollars_per_hour`` is the price of one device (0: not known); it
    changes no time.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    slots: int = 1
    granularity: int = 512
    launch_ns: int = 0
    dispatch_ns: int = 0
    compute_efficiency: Mapping[str, float] = field(default_factory=dict)
    memory_efficiency: Mapping[str, float] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()
    multiprocessors: int = 1
    calibrated: str = ""
    watts: float = 0.0
    capability: float = 0.0
    vendor: str = "nvidia"
    dollars_per_hour: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Device:
    name: str
    kind: DeviceKind
    host: bool = False  # issues work in the eager runtime, and passes transfers on between links (host staging)
    node: int = 0  # number of the node, in a topology of several


@dataclass(frozen=True)
class Link:
    ends: tuple[str, str]
    bytes_per_s: int
    latency_ns: int
    duplex: str = "full"
    ranges: tuple[tuple[int, int, int], ...] = ()  # (from bytes, latency ns, bytes per second), from 0, rising

    def at(self, size: int) -> tuple[int, int]:
        """``(latency_ns, bytes_per_s)`` of a transfer of ``size`` bytes."""
        answer = self.latency_ns, self.bytes_per_s
        for begin, latency, rate in self.ranges:
            if begin <= size:
                answer = latency, rate
        return answer


@dataclass(frozen=True)
class Topology:
    """Devices joined by links, with fixed routes.

    Device numbers are positions in ``devices``; ``D = len(devices)``. A full-duplex link is two channels, a
    half-duplex link one. Transfers pass through switches and hosts, never through other devices.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    switches: tuple[str, ...] = ()
    description: str = ""

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices] + list(self.switches)
        if not self.devices:
            self._fail("no devices", "device")
        if len(names) > MAX_DEVICES:
            self._fail(f"{len(names)} devices and switches; at most {MAX_DEVICES} are supported", "device")
        known = set(names)
        if len(known) < len(names):
            self._fail(f"name {min(name for name in known if names.count(name) > 1)!r} is used twice", "device, switch")
        if len(self.links) > MAX_LINKS:
            self._fail(f"{len(self.links)} links; at most {MAX_LINKS} are supported", "link")
        for number, link in enumerate(self.links):
            where = f"link {number} ({' - '.join(link.ends)})"
            for end in link.ends:
                if end not in known:
                    raise UnknownName("device or switch", end, names, source=self.name, field=where)
            if link.ends[0] == link.ends[1]:
                self._fail("joins a device to itself", where)
            if link.bytes_per_s < 1 or link.latency_ns < 0:
                self._fail("bandwidth must be positive and latency not negative", where)
            if link.bytes_per_s > MAX_RATE or link.latency_ns > MAX_DELAY_NS:
                self._fail("bandwidth or latency is too large", where)
            begins = [begin for begin, _, _ in link.ranges]
            if begins and (begins[0] != 0 or any(a >= b for a, b in zip(begins[:-1], begins[1:], strict=True))):
                self._fail("the ranges must begin at 0 bytes and rise", where)
            for begin, latency, rate in link.ranges:
                if not 1 <= rate <= MAX_RATE or abs(latency) > MAX_DELAY_NS or begin > MAX_SIZE:
                    self._fail("a range's bandwidth must be positive, and no figure too large", where)
            if link.duplex not in ("full", "half"):
                self._fail(f"duplex {link.duplex!r}, expected 'full' or 'half'", where)

    def _fail(self, message: str, field: str) -> NoReturn:
        raise InvalidInput(message, source=self.name, field=field)

    @property
    def n_devices(self) -> int:
        return len(self.devices)

    @cached_property
    def device_index(self) -> dict[str, int]:
        return {device.name: number for number, device in enumerate(self.devices)}

    @cached_property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The distinct device kinds, in order of first use."""
        return tuple({device.kind.name: device.kind for device in self.devices}.values())

    @cached_property
    def device_kind(self) -> np.ndarray:
        """int32 ``(D,)``: index into :attr:`kinds`."""
        names = [kind.name for kind in self.kinds]
        return np.array([names.index(device.kind.name) for device in self.devices], np.int32)

    @cached_property
    def host(self) -> int:
        """Number of the first host device, or -1: the device whose thread issues work in the eager runtime."""
        return next((number for number, device in enumerate(self.devices) if device.host), -1)

    @cached_property
    def accelerators(self) -> tuple[int, ...]:
        """Numbers of the devices that are not hosts (all devices, where every one is a host)."""
        numbers = tuple(number for number, device in enumerate(self.devices) if not device.host)
        return numbers or tuple(range(self.n_devices))

    @cached_property
    def memory_bytes(self) -> np.ndarray:
        return np.array([device.kind.memory_bytes for device in self.devices], np.int64)

    @cached_property
    def granularity(self) -> np.ndarray:
        return np.array([device.kind.granularity for device in self.devices], np.int64)

    @cached_property
    def slots(self) -> np.ndarray:
        return np.array([device.kind.slots for device in self.devices], np.int32)

    @cached_property
    def channels(self) -> tuple[tuple[str, str, int, int], ...]:
        """``(from, to, latency_ns, bytes_per_s)`` per channel; a half-duplex link is listed once."""
        rows = []
        for link in self.links:
            a, b = link.ends
            rows.append((a, b, link.latency_ns, link.bytes_per_s))
            if link.duplex == "full":
                rows.append((b, a, link.latency_ns, link.bytes_per_s))
        return tuple(rows)

    @cached_property
    def channel_link(self) -> tuple[Link, ...]:
        """The link of each channel."""
        return tuple(link for link in self.links for _ in range(2 if link.duplex == "full" else 1))

    @cached_property
    def routes(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Channels from device to device: least latency + 1 MiB time, then fewest hops, then names. Unreachable pairs
        are absent."""
        routes = {}
        for source in range(self.n_devices):
            for target, path in self._routes_from(source).items():
                routes[source, target] = path
        return routes

    @cached_property
    def _arcs(self) -> dict[str, list[tuple[int, str, int, int]]]:
        """``(bytes_per_s, to, channel, latency_ns)`` of the channels that leave a device or switch, fastest first."""
        arcs: dict[str, list[tuple[int, str, int, int]]] = {}
        channel = 0
        for link in self.links:
            a, b = link.ends
            back = channel + 1 if link.duplex == "full" else channel
            arcs.setdefault(a, []).append((link.bytes_per_s, b, channel, link.latency_ns))
            arcs.setdefault(b, []).append((link.bytes_per_s, a, back, link.latency_ns))
            channel = back + 1
        for leaving in arcs.values():
            leaving.sort(key=lambda arc: -arc[0])
        return arcs

    @cached_property
    def _arcs_by_rate(self) -> list[tuple[int, list[tuple[str, str, int, int]]]]:
        """Bandwidths, falling, and the arcs ``(from, to, channel, latency_ns)`` that have each."""
        found: dict[int, list[tuple[str, str, int, int]]] = {}
        for start, leaving in self._arcs.items():
            for rate, there, number, delay in leaving:
                found.setdefault(rate, []).append((start, there, number, delay))
        return sorted(found.items(), reverse=True)

    def _routes_from(self, source: int) -> dict[int, tuple[int, ...]]:
        """The routes of one device by target.

        A route is as fast as its slowest link. So the links are added in the order of falling bandwidth; after each
        bandwidth every node has its path of least latency over the links added so far, and the best of a node's
        paths is its route. An added link changes the paths of few nodes, and only those are searched again. (An
        extension keeps the order of two paths to the same node, so that the result is that of a new search.)
        """
        start = self.devices[source].name
        relays = {start, *self.switches, *(device.name for device in self.devices if device.host)}
        # by node: latency, hops, names and channels of its path; the order of these tuples is the order of paths
        paths: dict[str, tuple[int, int, tuple[str, ...], tuple[int, ...]]] = {start: (0, 0, (start,), ())}
        best: dict[int, tuple] = {}
        for floor, added in self._arcs_by_rate:
            queue = [
                _extended(paths[here], there, number, delay)
                for here, there, number, delay in added
                if here in paths and here in relays
            ]
            heapq.heapify(queue)
            while queue:
                path = heapq.heappop(queue)
                here = path[2][-1]
                if here in paths and paths[here] <= path:
                    continue
                paths[here] = path
                target = self.device_index.get(here)
                if target is not None:
                    slowest = min(self.channels[c][3] for c in path[3])
                    key = (path[0] + -(-ROUTE_PROBE_BYTES * 10**9 // slowest), *path[1:])
                    if target not in best or key < best[target]:
                        best[target] = key
                if here not in relays:
                    continue
                for rate, there, number, delay in self._arcs.get(here, ()):
                    if rate < floor:
                        break
                    longer = _extended(path, there, number, delay)
                    if there not in paths or longer < paths[there]:
                        heapq.heappush(queue, longer)
        # In the order in which one search over all links reaches them: the numbers of the classes of routes in cost
        # tables, and with them the cost hashes of stored rows, follow this order.
        reached = sorted(best, key=lambda target: paths[self.devices[target].name])
        return {target: best[target][-1] for target in reached}

    @cached_property
    def route_csr(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 ``(D * D + 1,)`` and int32: the channels of pair ``s * D + d``."""
        length, flat = np.zeros(self.n_devices**2 + 1, np.int32), list[int]()
        for (source, target), path in sorted(self.routes.items()):
            length[source * self.n_devices + target + 1] = len(path)
            flat.extend(path)
        return np.cumsum(length, dtype=np.int32), np.array(flat, np.int32)

    @cached_property
    def pair_latency_ns(self) -> np.ndarray:
        """int64 ``(D, D)``: summed latency of the route; 0 on the diagonal, -1 where there is no route."""
        return self._pairs(lambda path: sum(self.channels[c][2] for c in path), 0)

    @cached_property
    def pair_bytes_per_s(self) -> np.ndarray:
        """int64 ``(D, D)``: smallest bandwidth of the route; 0 on the diagonal, -1 where there is no route."""
        return self._pairs(lambda path: min(self.channels[c][3] for c in path), 0)

    def _pairs(self, measure: Callable[[tuple[int, ...]], int], diagonal: int) -> np.ndarray:
        table = np.full((self.n_devices, self.n_devices), -1, np.int64)
        np.fill_diagonal(table, diagonal)
        for (source, target), path in self.routes.items():
            table[source, target] = measure(path)
        return table

    def __repr__(self) -> str:
        return f"<Topology {self.name}: {self.n_devices} devices, {len(self.links)} links>"


def _extended(path: tuple, there: str, number: int, delay: int) -> tuple[int, int, tuple[str, ...], tuple[int, ...]]:
    latency, hops, names, channels = path
    return latency + delay, hops + 1, (*names, there), (*channels, number)


def topology_names() -> list[str]:
    """Names of the topologies that ship with simdev."""
    return sorted(path.stem for path in DEVICES_DIR.glob("*.toml") if path.stem != "kinds")


def load_topology(name_or_path: str | Path, *, kept: bool = False) -> Topology:
    """A shipped topology by name, or a TOML file by path (anything with a slash or ending in ``.toml``).

    ``NAME[nodes=N]`` sets the number of nodes.

    Pass ``kept`` for a file of a result folder: the device files that it names are then the ones beside it (see
    :func:`kept_device_file`), and no other file is read.
    """
    text, nodes = split_nodes(str(name_or_path))
    path = Path(text)
    if "/" not in text and path.suffix != ".toml":
        path = DEVICES_DIR / f"{text}.toml"
        if text == "kinds" or not path.is_file():
            raise UnknownName("topology", text, topology_names())
    data = read_toml(path)
    if nodes is not None:
        data["nodes"] = nodes
    return parse_topology(data, source=str(name_or_path), kept=kept)


def split_nodes(text: str) -> tuple[str, int | None]:
    """Name or path, and number of nodes, of ``NAME[nodes=N]``; None where the text names no number."""
    many = re.fullmatch(r"(.+)\[nodes=([0-9]{1,9})\]", text)
    return (many[1], int(many[2])) if many else (text, None)


def split_choices(text: str) -> tuple[str, str]:
    """Name or path of ``NAME[nodes=N,oversubscription=2]``, and the brackets, which are empty where there are none."""
    found = re.fullmatch(r"(.+?)(\[[^\[\]]*\])?", text, re.DOTALL)
    return (found[1], found[2] or "") if found else (text, "")


def load_kinds() -> dict[str, DeviceKind]:
    """The device kinds that ship with simdev, by name."""
    return dict(_shipped_kinds())


@cache
def _shipped_kinds() -> Mapping[str, DeviceKind]:
    data = read_toml(DEVICES_DIR / "kinds.toml")
    return {name: _kind(name, table, "kinds.toml") for name, table in data.get("kind", {}).items()}


def parse_topology(data: dict, *, source: str, kept: bool = False) -> Topology:
    """Check a parsed TOML document and build the topology (``kept`` as in :func:`load_topology`). Raises
    :class:`InvalidInput` naming file and field."""
    read = TomlFields(data, source, "")
    own = read("kind", dict, default={})
    kinds = load_kinds() | {name: _kind(name, table, source, kept) for name, table in own.items()}
    devices: list[Device] = []
    for number, table in enumerate(read("device", list)):
        row = TomlFields(table, source, f"device {number}")
        names = row.strings("names") if "names" in table else [row("name", str)]
        kind, host = row("kind", str), row("host", bool, default=False)
        if kind not in kinds:
            raise UnknownName("device kind", kind, kinds, source=source, field=f"device {names[0]!r}: kind")
        devices.extend(Device(name, kinds[kind], host) for name in names)
        row.finish()
    switches = read.strings("switches", default=[])
    links = []
    for number, table in enumerate(read("link", list, default=[])):
        row = TomlFields(table, source, f"link {number}")
        pairs = row("ends", list)
        pairs = [pairs] if all(isinstance(end, str) for end in pairs) else pairs
        rate, latency = round(row.number("gb_per_s") * 1e9), round(row.number("latency_us") * 1e3)
        duplex, ranges = row("duplex", str, default="full"), _ranges(row, source, number)
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(end, str) for end in pair):
                raise InvalidInput(
                    "expected two names, or a list of such pairs", source=source, field=f"link {number}: ends"
                )
            links.append(Link((pair[0], pair[1]), rate, latency, duplex, ranges))
        row.finish()
    if "nodes" in data:
        count = read("nodes", int)
        if not 1 <= count <= MAX_DEVICES:
            raise InvalidInput(f"expected a whole number from 1 to {MAX_DEVICES}", source=source, field="nodes")
        if count * len(devices) > MAX_DEVICES or count * len(links) > MAX_LINKS:
            large = f"{count * len(devices)} devices and {count * len(links)} links"
            raise InvalidInput(
                f"{large}; at most {MAX_DEVICES} and {MAX_LINKS} are supported", source=source, field="nodes"
            )
        devices, switches, links = _of_nodes(devices, switches, links, count)
    try:
        topology = Topology(
            read("name", str), tuple(devices), tuple(links), tuple(switches), read("description", str, default="")
        )
    except InvalidInput as error:
        raise InvalidInput(error.message, source=source, field=error.field) from None
    read.finish()
    for a, first in enumerate(topology.devices):
        for b, second in enumerate(topology.devices):
            if a != b and (a, b) not in topology.routes:
                raise InvalidInput(
                    f"no route from {first.name!r} to {second.name!r}: the topology is disconnected",
                    source=source,
                    field="link",
                )
    return topology


def _of_nodes(devices: list, switches: list, links: list, count: int) -> tuple[list, list, list]:
    """``count`` copies of a node, joined by the switch ``network``."""
    if count == 1:
        return devices, switches, links

    def name(node: int, text: str) -> str:
        return text if text == NETWORK else f"n{node}.{text}"

    nodes = range(count)
    shared = [NETWORK] if NETWORK in switches else []
    return (
        [replace(device, name=name(node, device.name), node=node) for node in nodes for device in devices],
        [name(node, switch) for node in nodes for switch in switches if switch != NETWORK] + shared,
        [replace(link, ends=(name(node, link.ends[0]), name(node, link.ends[1]))) for node in nodes for link in links],
    )


def _ranges(row: TomlFields, source: str, number: int) -> tuple[tuple[int, int, int], ...]:
    rows = []
    for place, table in enumerate(row("ranges", list, default=[])):
        one = TomlFields(table, source, f"link {number}: range {place}")
        begin, rate = round(one.number("from_bytes")), round(one.number("gb_per_s") * 1e9)
        rows.append((begin, round(one.number("latency_us", least=-1e9) * 1e3), rate))
        one.finish()
    return tuple(rows)


def _kind(name: str, table: object, source: str, kept: bool = False) -> DeviceKind:
    row = TomlFields(table, source, f"kind {name!r}")
    kind = DeviceKind(
        name=name,
        memory_bytes=round((row.number("memory_gib") - row.number("reserved_gib", default=0)) * 2**30),
        peak_flops={dtype: 1e12 * rate for dtype, rate in row.numbers("peak_tflops").items()},
        memory_bandwidth=1e9 * row.number("memory_gb_per_s"),
        slots=round(row.number("slots", default=1)),
        granularity=round(row.number("granularity", default=512)),
        launch_ns=round(1e3 * row.number("launch_us", default=0)),
        dispatch_ns=round(1e3 * row.number("dispatch_us", default=0)),
        compute_efficiency=row.numbers("compute_efficiency", default={}),
        memory_efficiency=row.numbers("memory_efficiency", default={}),
        watts=row.number("watts", default=0),
        capability=row.number("capability", default=0),
        dollars_per_hour=row.number("dollars_per_hour", default=0),
        vendor=row("vendor", str, default="nvidia"),
        multiprocessors=round(row.number("multiprocessors", default=row.number("units", default=1))),
        calibrated=_device_file(row("calibrated", str, default=""), source, kept),
        unsupported=tuple(str(item) for item in row("unsupported", list, default=[])),
    )
    row.finish()
    if not kind.peak_flops or min(kind.peak_flops.values()) <= 0 or kind.memory_bandwidth <= 0:
        raise InvalidInput("peak_tflops and memory_gb_per_s must be positive", source=source, field=f"kind {name!r}")
    for key in ("compute_efficiency", "memory_efficiency"):
        if any(not 0 < share <= 1.5 for share in getattr(kind, key).values()):
            raise InvalidInput("expected shares above 0", source=source, field=f"kind {name!r}: {key}")
    large = {
        "memory_gib": (kind.memory_bytes, MAX_SIZE),
        "memory_gb_per_s": (kind.memory_bandwidth, MAX_RATE),
        "slots": (kind.slots, MAX_SLOTS),
        "granularity": (kind.granularity, 1 << 40),
        "launch_us": (kind.launch_ns, MAX_DELAY_NS),
        "dispatch_us": (kind.dispatch_ns, MAX_DELAY_NS),
    }
    for key, (value, limit) in large.items():
        if value > limit:
            raise InvalidInput("too large", source=source, field=f"kind {name!r}: {key}")
    if kind.memory_bytes < 1:
        raise InvalidInput("nothing is left after reserved_gib", source=source, field=f"kind {name!r}: memory_gib")
    if kind.slots < 1 or kind.granularity < 1:
        raise InvalidInput("slots and granularity must be at least 1", source=source, field=f"kind {name!r}")
    return kind


def kept_device_file(source: str, name: str) -> str:
    """Where a result folder keeps the device file that its machine file ``source`` calls ``name``: beside it, under a
    hash of both."""
    key = f"{Path(source).stem}\n{name}"
    return str(Path(source).parent / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.toml")


def _device_file(name: str, source: str, kept: bool) -> str:
    """A device file by name, or by a path that is relative to the topology's file."""
    if name.endswith(".toml"):
        return kept_device_file(source, name) if kept else str(Path(source).parent / name)
    if not re.fullmatch(r"[\w.+-]*", name):
        raise InvalidInput(f"{name[:100]!r} is neither a name nor a .toml file", source=source, field="calibrated")
    return name


class TomlFields:
    """Reads a TOML table key by key, checking types; :meth:`finish` refuses keys nobody asked for."""

    def __init__(self, table: object, source: str, where: str):
        if not isinstance(table, dict):
            raise InvalidInput("expected a table", source=source, field=where or None)
        self._table, self._source, self._where = table, source, where
        self._read: set[str] = set()

    def _field(self, key: str) -> str:
        return f"{self._where}: {key}" if self._where else key

    def __call__(self, key: str, kind: type, default: Any = None) -> Any:
        self._read.add(key)
        if key not in self._table:
            if default is None:
                raise InvalidInput("missing", source=self._source, field=self._field(key))
            return default
        value = self._table[key]
        if not isinstance(value, kind):
            raise InvalidInput(
                f"expected {kind.__name__}, got {type(value).__name__}", source=self._source, field=self._field(key)
            )
        return value

    def strings(self, key: str, default: list | None = None) -> list[str]:
        values = self(key, list, default=default)
        if not all(isinstance(value, str) for value in values):
            raise InvalidInput("expected a list of names", source=self._source, field=self._field(key))
        return values

    def number(self, key: str, default: float | None = None, least: float = 0) -> float:
        self._read.add(key)
        value = self._table.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 1e12:
            found = "nothing" if value is None else quoted(value)
            raise InvalidInput(
                f"expected a number >= {least:g}, got {found}", source=self._source, field=self._field(key)
            )
        return float(value)

    def numbers(self, key: str, default: dict | None = None) -> dict[str, float]:
        table = self(key, dict, default=default)
        inner = TomlFields(table, self._source, self._field(key))
        return {name: inner.number(name) for name in table}

    def finish(self) -> None:
        extra = sorted(set(self._table) - self._read)
        if extra:
            raise UnknownName("key", extra[0], self._read, source=self._source, field=self._where or None)
