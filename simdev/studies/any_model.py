"""Any model: which kinds of transformers' models plan, and whether sizes and FLOPs are those of the library.

``python -m simdev.studies.any_model kinds`` captures one step of each kind of causal language model with a
tensor-parallel plan, with its default sizes and few layers, on four ranks (``dp_shard=2,tp=2``).
``python -m simdev.studies.any_model sizes`` counts the parameters of models of published sizes, as the library builds
them.
``python -m simdev.studies.any_model published`` compares models of published sizes with the library's own: parameters
of the captured program, and FLOPs of its products and attention against ``FlopCounterMode`` on the unsharded model.

Each prints a table in Markdown and takes ``NAME ...`` to do only these. ``kinds`` and ``published`` run in as many
processes as ``--workers N`` says (1). The configurations are in
``published_models.json``; its parameters are those that the models' cards on the Hugging Face hub state (the papers' or
the checkpoints' counts), and None where we know no exact figure.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput, SimdevError
from simdev.parallel.capture.stage import StageProgram, capture_stage, few_parts
from simdev.parallel.hugging_face import TransformersModel, configuration, hugging_face_model
from simdev.parallel.mesh import Mesh, parse_mesh
from simdev.parallel.plain import find_plain

MESH = parse_mesh("dp_shard=2,tp=2")
LENGTH = 64  # tokens of a sequence
LACKING: dict[str, dict[str, Any]] = {  # sizes without which the defaults of a kind build no model
    "ministral": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
LIMIT_S = 90  # processor time for one kind
PUBLISHED = Path(__file__).with_name("published_models.json")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


def kinds_with_plans() -> list[str]:
    """The kinds (``model_type``) of causal language models whose class brings a tensor-parallel plan."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    known = transformers.CONFIG_MAPPING
    return [kind for kind in CAUSAL if kind in known and getattr(known[kind], "base_model_tp_plan", None)]


def class_of(kind: str) -> str:
    """The class that trains a kind of causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    return CAUSAL[kind] if isinstance(CAUSAL[kind], str) else CAUSAL[kind][0]


def try_kind(kind: str) -> str:
    """What happened to a step of this kind: counts of collectives, or the reason of the refusal after ``refused:``."""

    def late(*_):
        raise InvalidInput(f"not captured within {LIMIT_S} s of processor time", source=kind)

    signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        model, parameters = hugging_face_model(LACKING.get(kind, {}), {"length": LENGTH}, kind, class_of(kind))
        part = few_parts(model.part(parameters, parameters["layers"]))[0][0]
        if model.checks is not None:
            model.checks(parameters, MESH)
        program = capture_stage(model, parameters, MESH, replace(part, first=True, last=True), several=False)
    except SimdevError as error:
        return f"refused: {error}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    found = ", ".join(f"{count} {call} {axis}" for (call, axis), count in sorted(collectives(program).items()))
    return found or "none"


def collectives(program: StageProgram) -> Counter:
    """Collectives of a step with one microbatch, by kind and communicator."""
    calls = (*program.forward.calls, *program.backward[StageProgram.ONLY].calls, *program.finish.calls)
    return Counter((call.kind, call.stream) for call in calls if call.is_collective)


def whole_model(name: str) -> int:
    """Elements of all parameters of a model of published sizes, as its library builds it on ``meta``."""
    entry = published()[name]
    if "step" in entry:
        return plain_model(entry)[0].function.parameters
    model = TransformersModel(name, *configuration(entry["config"], {}, name, ""))
    return sum(parameter.numel() for parameter in model.build().parameters())


def plain_model(entry: dict):
    """The parallel model of a step in ``published_steps.py``, and its parameters."""
    return find_plain(f"{Path(__file__).with_name('published_steps.py')}:{entry['step']}", {})


def published() -> dict[str, dict]:
    """Models of published sizes by name: ``config`` (or ``step``, a function of ``published_steps.py``), ``parameters``
    and perhaps a ``note``."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def compare(name: str, entry: dict) -> list[str]:
    """A row: parameters as published, of the library and of the captured program; FLOPs counted on the unsharded model
    and those of the captured products, for one sequence."""
    if "step" in entry:
        model, parameters = plain_model(entry)
    else:
        given = {**entry["config"], **({"architectures": [entry["class"]]} if "class" in entry else {})}
        length = {"length": entry.get("length", 1024)} if entry.get("length", 1024) else {}
        model, parameters = hugging_face_model(given, length, name)
    own = model.function.parameters
    program = capture_stage(model, parameters, Mesh({}), model.part(parameters, parameters["layers"]), several=False)
    calls = (*program.forward.calls, *program.backward[StageProgram.ONLY].calls)
    counted = sum(call.flops for call in calls if call.kind in PRODUCTS or "attention" in call.kind)
    flops = model.flops(parameters)
    stated = entry.get("parameters")
    return [
        name,
        f"{stated:,}" if stated else "",
        f"{own:,}",
        f"{program.parameters:,}",
        f"{flops / 1e12:.4g}",
        f"{counted / flops - 1:+.2%}",
        "; ".join(model.notes),
    ]


def row_of(name: str) -> str:
    """The row of a model of published sizes, or the reason of its refusal."""
    try:
        return " | ".join(compare(name, published()[name]))
    except SimdevError as error:
        return f"{name} | refused: {error}"


def in_order(task: Callable[[str], str], names: Sequence[str], workers: int) -> Iterator[str]:
    """``task`` of each name, in the order of the names."""
    if workers == 1:
        yield from map(task, names)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield from pool.map(task, names)


def main(what: str, names: Sequence[str], workers: int) -> None:
    """Print one of the tables."""
    if what == "kinds":
        chosen = names or kinds_with_plans()
        passed = 0
        print(f"| kind | collectives of a step on `{MESH}` |\n|---|---|")
        for kind, found in zip(chosen, in_order(try_kind, chosen, workers), strict=True):
            passed += not found.startswith("refused")
            print(f"| {kind} | {found} |", flush=True)
        print(f"\n{passed} of {len(chosen)} kinds passed on {MESH}, transformers {version('transformers')}")
        return
    entries = published()
    if what == "sizes":
        print("| model | parameters, published | of the library | |\n|---|--:|--:|---|")
        for name in names or entries:
            stated, own = entries[name]["parameters"], whole_model(name)
            same = "" if stated is None else "equal" if stated == own else entries[name].get("note", "differs")
            print(f"| {name} | {'' if stated is None else f'{stated:,}'} | {own:,} | {same} |", flush=True)
        return
    print("| model | published | library | captured | TFLOPs | products | notes |\n|---|---|---|---|---|---|---|")
    for row in in_order(row_of, names or list(entries), workers):
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Any model: tables of kinds, of sizes and of published models")
    parser.add_argument("table", nargs="?", default="kinds", choices=["kinds", "sizes", "published"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    main(given.table, given.names, given.workers)
