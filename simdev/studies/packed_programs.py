"""Packs the programs of published models, from which ``simdev plan`` answers where PyTorch is absent, and the captures
of a few jobs, so that the first plan of such a job takes no longer than a later one.

A program is captured for each tensor degree, kind of recomputation and microbatch of :data:`MODELS`, on two and on four
shards (:mod:`simdev.parallel.capture.resize` serves all other numbers), with few layers; and so are its allocations.
Where FSDP pads parameters, no two numbers of shards serve all others, and those that are named are packed.
Captures are kept on disk, so that an interrupted run resumes. Models that are not named keep what the archive holds.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import gcd
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput, UnknownName
from simdev.files import open_zip, replacing
from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.graphs.selective import READ, SELECTIVE
from simdev.parallel.capture import kept
from simdev.parallel.capture.resize import LARGE, SMALL
from simdev.parallel.capture.stage import (
    accumulates,
    captured,
    few_captures,
    few_parts,
    figures_of,
    known_by,
    segments_of,
)
from simdev.parallel.costs import reserved
from simdev.parallel.hugging_face import TransformersModel, hugging_face_model
from simdev.parallel.mesh import Mesh
from simdev.parallel.models import find_model, parallel_models, published_step, split_size
from simdev.parallel.passes import STEP
from simdev.parallel.plain import PlainModel
from simdev.parallel.program import NotRepeating
from simdev.planners.job import CHOSEN
from simdev.studies.any_model import published

Found = Iterator[tuple[str, str, int]]  # the place of a program, its text, by how many ranks FSDP divides it
EVERY = ("none", "selective", "full")
PARTS = {"first": (True, False), "inner": (False, False), "last": (False, True)}  # of a pipeline


@dataclass(frozen=True)
class Packing:
    """What is packed of a model: an id of ``simdev plan``, a ``published`` model of ``study any-model``, or a kind of
    transformers (``model_type``) whose defaults are the published sizes; the tensor degrees, kinds of recomputation and
    microbatches; ``pipelines``: tensor degrees with which stages are packed as well, with the last two kinds of
    recomputation and one sequence in a microbatch; ``experts``: the size of ``ep``; ``shards``: the sizes of
    ``dp_shard``, each packed by itself, of a model whose parameters FSDP pads."""

    published: str = ""
    tensor: tuple[int, ...] = (1, 8)
    experts: int = 1
    shards: tuple[int, ...] = ()
    recompute: tuple[str, ...] = EVERY
    microbatch: tuple[int, ...] = (1, 2)
    pipelines: tuple[int, ...] = ()


MODELS = {
    "llama3-8b": Packing(tensor=(1,)),
    "llama3-70b": Packing(tensor=(1,), recompute=("selective", "full")),
    "llama3-405b": Packing(tensor=(1,), recompute=("full",), microbatch=(1,)),
    "smollm3-3b": Packing("SmolLM3 3B", tensor=(1,), recompute=("full",), microbatch=(1,)),
    "ministral3-8b": Packing("ministral3", tensor=(1,), recompute=("full",), microbatch=(1,)),
    "qwen3-8b": Packing("Qwen3 8B", tensor=(1,), recompute=("selective", "full"), microbatch=(1,)),
    "qwen3-32b": Packing("Qwen3 32B", tensor=(1,), recompute=("selective", "full")),
    "iquest-coder-40b": Packing("iquestcoder", tensor=(1,), recompute=("full",), microbatch=(1,)),
    "qwen3-30b-a3b": Packing("Qwen3 30B-A3B", tensor=(1,), recompute=("full",), microbatch=(1,)),
    "qwen3-235b-a22b": Packing("Qwen3 235B-A22B", tensor=(1,), recompute=("full",), microbatch=(1,)),
    "gemma3-27b": Packing("Gemma 3 27B", tensor=(1,), recompute=("full",), microbatch=(1,)),
    "mixtral-8x7b": Packing(tensor=(1,), recompute=("selective", "full"), microbatch=(1,)),
    "gpt-oss-120b": Packing("GPT-OSS 120B", tensor=(1,), recompute=("full",), microbatch=(1,)),
    "deepseek-v3": Packing(  # 671 billion parameters: with fewer GPUs, or whole experts, it fits nowhere
        tensor=(1,), experts=8, shards=(16, 32, 64, 128, 256), recompute=("full",), microbatch=(1,)
    ),
    "flux": Packing("Flux.1-dev", tensor=(1,), recompute=("full",), microbatch=(1,)),
    "vit-l": Packing(tensor=(1,), shards=(8, 16, 32, 64), recompute=("none",), microbatch=(8, 32)),
}

JOBS = {  # whose captures ship: arguments of simdev plan
    "llama3-8b on dgx-h100": ["llama3-8b", "dgx-h100"],
    "llama3-70b on dgx-h100[nodes=8]": ["llama3-70b", "dgx-h100[nodes=8]", "--batch", "1024"],
}


def pack(names: Sequence[str], tell: Callable[[int, int, str], None]) -> list[dict[str, Any]]:
    """Capture the models and jobs ``names`` (all if empty) and write the archives; a row for each model and job in
    them. Raises :class:`UnknownName`."""
    for name in names:
        if name not in (*MODELS, *JOBS):
            raise UnknownName("packed model or job", name, (*MODELS, *JOBS))
    wanted = list(names or (*MODELS, *JOBS))
    models, jobs = _members(kept.PACK), _members(kept.SHIPPED)
    index = json.loads(jobs.pop(kept.INDEX, b"{}"))
    for number, name in enumerate(wanted):
        members = jobs if name in JOBS else models
        if name in JOBS:
            index[name], members[name] = captures_of_job(name)
            _write(kept.SHIPPED, {**members, kept.INDEX: json.dumps(index, sort_keys=True).encode()})
        else:
            members[name] = packed_member(name, MODELS[name])
            _write(kept.PACK, members)
        tell(number + 1, len(wanted), f"{name}: {len(members[name]):,} bytes")
    return [{"model": name, "bytes": len(data)} for name, data in sorted({**models, **jobs}.items())]


def captures_of_job(name: str) -> tuple[list[str], bytes]:
    """The names of all captures for which ``simdev plan`` asks on a job, made now, and the member that holds them."""
    command = [sys.executable, "-m", "simdev", "plan", *JOBS[name]]
    with kept.apart():
        for _ in range(2):  # a search that finds captures runs in one process, and may look at others than several do
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        names = sorted(file.name.removesuffix(".json.gz") for file in kept.folder().iterdir())
        texts = {key: text for key in names if (text := kept.content(key)) is not None}
    return names, kept.packed_model(name, {}, texts)


def _members(path: Path) -> dict[str, bytes]:
    """The members of an archive by name, as they are; none if it is not there."""
    if not path.is_file():
        return {}
    with open_zip(path) as archive:
        return {name.removesuffix(".xz"): archive.read(name) for name in archive.namelist()}


def _write(path: Path, members: Mapping[str, bytes]) -> None:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:  # its members are compressed already
        for name, data in sorted(members.items()):
            member = name if name == kept.INDEX else f"{name}.xz"
            archive.writestr(zipfile.ZipInfo(member), data)  # without a date: equal programs are equal bytes
    with replacing(path) as file:
        file.write(written.getvalue())


def packed_member(name: str, packing: Packing) -> bytes:
    """The member of the archive that holds a model."""
    model, parameters = _model(name, packing)
    programs: dict[str, str] = {}
    unit = 0
    for stage in stages(model, parameters, packing):
        for key, text, shards in stage():
            programs[key] = text
            unit = gcd(unit, shards)
    function = model.function
    header: dict[str, Any] = {
        "size": "",
        "parameters": {key: value for key, value in parameters.items() if key not in CHOSEN},
        "accumulates": accumulates(model, tuple(sorted(parameters.items()))),
        "axes": [axis for axis in ("dp_shard", *(["ep"] if packing.experts > 1 else []), "tp") if axis in model.axes],
        "pipeline": bool(packing.pipelines),
        "shard_unit": unit,
        "torch": version("torch"),
        "notes": [_note(packing)],
    }
    if isinstance(function, TransformersModel):
        header |= {
            "config": function.config,
            "class": function.name,
            "facts": function.facts,
            "transformers": version("transformers"),
            "flops": model.flops(parameters),
        }
    elif isinstance(function, PlainModel):
        header |= {
            "step": published()[packing.published]["step"],
            "kinds": function.kinds(parameters),
            "precision": {"alone": model.precision(Mesh({})), "replicas": model.precision(Mesh({"dp_shard": SMALL}))},
            "elements": function.parameters,
            "flops": model.flops(parameters),
        }
    else:
        header["model"], header["size"] = split_size(name, parallel_models())
    return kept.packed_model(name, header, programs)


def _model(name: str, packing: Packing) -> tuple[ParallelModel, dict[str, Any]]:
    if not packing.published:
        return find_model(name)
    sizes = published()
    entry = sizes.get(packing.published, {"config": {"model_type": packing.published}})
    if "step" in entry:
        return published_step(entry["step"], {}, name)
    config = entry["config"]
    return hugging_face_model(config.get("text_config", config), {}, name)  # the part that reads tokens


def first_stage(name: str, packing: Packing) -> Found:
    """The first program of a model and its first allocations, captured now: what :func:`packed_member` packs."""
    model, parameters = _model(name, packing)
    given = {**parameters, "microbatch": packing.microbatch[0], "recompute": packing.recompute[-1]}
    inner, sizes = _inner(packing, packing.tensor[0]), packing.shards[:1] or (SMALL,)
    found = _programs(model, given, inner, model.part(given, parameters["layers"]), sizes, True, True)
    kinds: dict[int, tuple[str, str, int]] = {}
    for place, text, shards in found:
        kinds.setdefault(int(bool(shards)), (place, text, shards))
        if len(kinds) == 2:
            break
    yield from kinds.values()


def _note(packing: Packing) -> str:
    offered = f"tensor degrees {_listed(packing.tensor)}, recomputation {_listed(packing.recompute)}"
    offered += f", microbatches {_listed(packing.microbatch)}"
    offered += f", dp_shard {_listed(packing.shards)}" if packing.shards else ""
    offered += f", ep {packing.experts}" if packing.experts > 1 else ""
    what = "replicas of sharded groups" + ("" if packing.pipelines else ", pipelines")
    return f"{what}, and other than {offered}: these programs were packed; for all plans {kept.REMEDY}"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def stages(model: ParallelModel, parameters: dict, packing: Packing) -> Iterator[Callable[[], Found]]:
    """What captures one stage of a model: its programs by place, as text, and by how many ranks FSDP divides it."""
    as_compiled = (READ,) if model.selective and SELECTIVE in packing.recompute else ()
    for tensor in packing.tensor:
        for recompute in (*packing.recompute, *as_compiled):
            for microbatch in packing.microbatch:
                given = {**parameters, "microbatch": microbatch, "recompute": recompute}
                mesh = _inner(packing, tensor)
                if not _possible(model, given, mesh):
                    continue
                whole = model.part(given, parameters["layers"])
                yield partial(_programs, model, given, mesh, whole, (SMALL,), False, False)
                alone: list[tuple[int, ...]] = [(size,) for size in packing.shards]
                for sizes in alone or [(SMALL, LARGE)]:
                    yield partial(_programs, model, given, mesh, whole, sizes, True, True)
                if tensor in packing.pipelines and recompute in packing.recompute[-2:] and microbatch == 1:
                    for first, last in PARTS.values():
                        part = Part(parameters["layers"], first, last, whole.kinds)
                        yield partial(_programs, model, given, mesh, part, (SMALL, LARGE), False, True)


def _inner(packing: Packing, tensor: int) -> dict[str, int]:
    """The axes of a mesh beside ``dp_shard``."""
    return {axis: size for axis, size in (("ep", packing.experts), ("tp", tensor)) if size > 1}


def _possible(model: ParallelModel, parameters: dict, mesh: dict[str, int]) -> bool:
    if any(axis not in model.axes for axis in mesh):
        return False
    with suppress(InvalidInput):
        if model.checks is not None:
            model.checks(parameters, Mesh({"dp_shard": SMALL, **mesh}))
        return True
    return False


def _programs(model, given: dict, inner: dict, part: Part, shards: Sequence[int], each: bool, memory: bool) -> Found:
    several = (STEP, False, each, False)
    key = tuple(sorted((name, value) for name, value in given.items() if name != "layers"))
    parts = few_captures(part)
    if memory:  # first: a recording keeps the program that it runs, which is then not captured again
        yield from _allocations(model, given, inner, part, shards, each)
    else:  # an estimate asks for the stages of few layers themselves, and layers of these may repeat, too
        parts = tuple(dict.fromkeys(fewer for few in few_parts(part)[0] for fewer in few_captures(few)))
    for size in shards:
        mesh = Mesh({"dp_shard": size, **inner})
        for few in parts:
            program = captured.__wrapped__(model, key, mesh, few, *several)
            place = kept.place(known_by(key, several), mesh, few)
            yield place, kept.stage_text(list(segments_of(program)), figures_of(program)), program.shard_unit


def _allocations(model, given: dict, inner: dict, part: Part, shards: Sequence[int], each: bool) -> Found:
    options = (True, each, False)
    recorded: dict[int, list[reserved.Allocations]] = {size: [] for size in shards}

    def record(stage: Part) -> Found:
        for size in shards:
            mesh = Mesh({"dp_shard": size, **inner})
            recorded[size].append(reserved.record_stage(model, tuple(sorted(given.items())), mesh, options, stage))
            name = reserved.named(given, stage, options)
            yield kept.place(name, mesh, stage), reserved.text_of(recorded[size][-1]), 0
        if len(shards) > 1:
            found = [recorded[size][-1] for size in shards]
            reserved.of_shards(found, Mesh({"dp_shard": 2 * shards[-1], **inner}))

    try:
        parts = reserved.recorded_parts(part, given)
        for few in parts:
            yield from record(few)
        if len(parts) > 1 and not all(map(_repeats, recorded.values())):
            yield from record(part)
    except NotRepeating as error:
        raise InvalidInput(f"its allocations cannot be packed: {error}", source=model.name) from None


def _repeats(few_layers: list[reserved.Allocations]) -> bool:
    with suppress(NotRepeating):
        reserved.extended(few_layers, 1)
        return True
    return False
