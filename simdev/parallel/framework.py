"""What a training framework does with a plan: how its host issues kernels, which kernels are fused, which attention
runs, who updates the parameters, how quick its sends are.

Each framework is a TOML file of ``simdev/parallel/frameworks/`` with its sources beside the figures; a file of the user
serves by its path. An id is ``NAME`` or ``NAME[part,part]``. A part is a release (``nemo[24.09]``), which selects the
newest table ``[release."..."]`` of the file that is not newer, or the name of a table ``[variant."..."]``. What such a
table holds replaces what the file says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput, UnknownName
from simdev.files import read_toml
from simdev.graphs.routing import routing_by_node
from simdev.parallel.cluster import Cluster
from simdev.parallel.costs.float8 import Float8
from simdev.parallel.costs.timing import Host, Prices
from simdev.problem.costs import OP_CLASSES
from simdev.problem.topology import TomlFields

FOLDER = Path(__file__).with_name("frameworks")
ID = re.compile(r"(?P<name>[^\[\]]+)(\[(?P<parts>[^\[\]]*)\])?")
RELEASE = re.compile(r"\d+(\.\d+)*")
CLASSES = (*OP_CLASSES, "elementwise")


@dataclass(frozen=True)
class Framework:
    """What a file says. ``name`` is the id.

    ``fused``: elementwise kernels that follow each other are one kernel; ``real_rotation``: those of rotary positions,
    too, whose numbers are real there, where captured models multiply complex ones. ``factors``: by how much kernels
    take longer than the cost model says, by class of op; ``rest`` stands for all other classes.
    ``distributed_optimizer``: data-parallel replicas hold whole parameters and gradients and divide the optimizer's
    state and its update, and their traffic overlaps; ``main_gradient_bytes``: they keep a gradient in as many (4 or 2).
    ``send_bytes_per_s``: the most that a send between two ranks reaches (0: what the link allows). ``slowdown``: how
    many times longer kernels take beside a collective of their rank. ``parameters``: what the framework changes in the
    defaults of models, by model. ``receive_buffers``: its pipelines keep a buffer for each microbatch
    (:attr:`simdev.parallel.plan.Plan.receive_buffers`). ``compiled``: layers run under ``torch.compile``
    (:attr:`simdev.parallel.plan.Plan.compiled`).
    """

    name: str
    description: str = ""
    host: Host = field(default_factory=Host)
    fused: bool = False
    real_rotation: bool = False
    factors: Mapping[str, float] = field(default_factory=dict)
    distributed_optimizer: bool = False
    main_gradient_bytes: int = 4
    send_bytes_per_s: int = 0
    slowdown: float = 1.0
    parameters: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    receive_buffers: bool = True
    compiled: bool = False

    @property
    def scale(self) -> dict[str, float]:
        """The factor of each class of op; empty without factors."""
        rest = self.factors.get("rest", 1.0)
        return {name: self.factors.get(name, rest) for name in CLASSES} if self.factors else {}

    def prices(
        self, cluster: Cluster, float8: Float8 | None = None, parameters: Mapping[str, object] | None = None
    ) -> Prices:
        """What kernels and collectives of this framework take on ``cluster``, for a model with ``parameters``."""
        routing = routing_by_node(parameters or {})
        return Prices(
            cluster,
            scale=self.scale,
            compiled=self.fused,
            float8=float8,
            routing=routing,
            real_rotation=self.real_rotation,
        )

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster as this framework uses its links."""
        return replace(cluster, send_bytes_per_s=self.send_bytes_per_s) if self.send_bytes_per_s else cluster

    def parameters_of(self, model: str, parameters: Mapping[str, Any], entry: str) -> dict[str, Any]:
        """The parameters of a model under this framework; those that ``entry`` (``llama3-8b[norm=fused]``) names
        stay."""
        named = re.search(r"\[([^\[\]]*)\]$", entry)
        typed = {part.partition("=")[0].strip() for part in named[1].split(",")} if named else set()
        own = self.parameters.get(model, {})
        return {**parameters, **{key: value for key, value in own.items() if key in parameters and key not in typed}}


def framework_names() -> list[str]:
    """Names of the frameworks that ship with simdev."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def find_framework(entry: str) -> Framework:
    """The framework that an id names. Raises :class:`UnknownName` or :class:`InvalidInput` naming file and field."""
    found = ID.fullmatch(entry.strip())
    if not found:
        raise InvalidInput(f"expected NAME or NAME[RELEASE], got {entry!r}", source="framework")
    name = found["name"]
    path = Path(name)
    if "/" not in name and path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
        if not path.is_file():
            raise UnknownName("framework", name, framework_names())
    data = read_toml(path)
    releases, variants = (_tables(data.pop(key, {}), path, key) for key in ("release", "variant"))
    for part in filter(None, (part.strip() for part in (found["parts"] or "").split(","))):
        if part in variants:
            data = _merged(data, variants[part])
        elif RELEASE.fullmatch(part):
            past = [release for release in releases if _number(release) <= _number(part)]
            for release in sorted(past, key=_number):
                data = _merged(data, releases[release])
        else:
            raise UnknownName("release or variant", part, [*releases, *variants], source=f"framework {name}")
    return _read(data, entry.strip(), str(path))


def _tables(found: object, path: Path, key: str) -> dict[str, dict]:
    if not isinstance(found, dict) or not all(isinstance(table, dict) for table in found.values()):
        raise InvalidInput("expected tables", source=path, field=key)
    for name in found if key == "release" else ():
        if not RELEASE.fullmatch(name):
            raise InvalidInput(f"expected numbers with points between them, got {name!r}", source=path, field=key)
    return found


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _merged(data: dict, changes: dict) -> dict:
    """``data`` with the values of ``changes``, table by table."""
    found = dict(data)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if nested else value
    return found


def _read(data: dict, name: str, source: str) -> Framework:
    read = TomlFields(data, source, "")
    host = TomlFields(read("host", dict, default={}), source, "host")
    given = {one.name: round(1e3 * host.number(one.name.removesuffix("_ns") + "_us", 0)) for one in fields(Host)}
    host.finish()
    factors = read.numbers("factors", default={})
    for kind in factors:
        if kind not in (*CLASSES, "rest"):
            raise UnknownName("class of op", kind, (*CLASSES, "rest"), source=source, field="factors")
        if not 0.1 <= factors[kind] <= 10:
            raise InvalidInput(f"expected a factor from 0.1 to 10, got {factors[kind]}", source=source, field="factors")
    parameters = _tables(read("parameters", dict, default={}), Path(source), "parameters")
    main_gradient_bytes = read("main_gradient_bytes", int, default=4)
    if main_gradient_bytes not in (2, 4):
        message = f"expected 2 or 4, got {main_gradient_bytes}"
        raise InvalidInput(message, source=source, field="main_gradient_bytes")
    framework = Framework(
        name,
        read("description", str),
        Host(**given),
        read("fused", bool, default=False),
        read("real_rotation", bool, default=False),
        factors,
        read("distributed_optimizer", bool, default=False),
        main_gradient_bytes,
        round(1e9 * read.number("send_gb_per_s", 0)),
        read.number("slowdown", 1, least=1),
        parameters,
        read("receive_buffers", bool, default=True),
        read("compiled", bool, default=False),
    )
    read.finish()
    return framework
