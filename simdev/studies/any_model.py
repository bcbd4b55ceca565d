"""Any model: which kinds of transformers' models plan, and whether programs of published models are the library's.

``kinds`` captures one step of each kind of causal language model with a tensor-parallel plan, with its default sizes
and few layers, on four ranks (``dp_shard=2,tp=2``).

``published`` compares models of published sizes with the library's own: parameters; FLOPs of the captured products and
attention against PyTorch's ``FlopCounterMode`` on the whole unsharded model; collectives of a captured step against
those that a step of the model executes that the library alone has distributed (:func:`collectives_of_the_library`).
The configurations are in ``published_models.json``; its parameters are those that the models' cards on the Hugging Face
hub state (the papers' or the checkpoints' counts), and None where we know no exact figure.

Rows are appended to ``rows.jsonl`` when they are computed. A row of the same code and the same libraries is not
computed again, so that an interrupted study resumes (:func:`study`). What no code has computed comes first; a row of
other code stays, marked, until it is computed again. ``README.md`` has both tables.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput, SimdevError, UnknownName
from simdev.files import parse_json, read_lines, write_text
from simdev.graphs.parallel_model import Part
from simdev.parallel.capture.blocks import chosen
from simdev.parallel.capture.fakes import to_fakes
from simdev.parallel.capture.packages import plan_of_blocks
from simdev.parallel.capture.stage import StageProgram, capture_stage, fake_process_group, few_parts
from simdev.parallel.hugging_face import TransformersModel, hugging_face_model, on_gpu_unpacked
from simdev.parallel.mesh import Mesh, parse_mesh
from simdev.parallel.models import STEPS, published_step
from simdev.parallel.plain import on_gpu, prepared
from simdev.user_file import sentence

PAGE = """\
`simdev study any-model` computes both tables on this page. It needs PyTorch, transformers and diffusers, and no GPU. If
it is interrupted, or ended by `--seconds`, the same command resumes it.

*Parameters* are compared with the published count, where we know the exact one, and with the captured program.
*TFLOPs* are what PyTorch's `FlopCounterMode` counts in forward and backward pass of one sequence on the whole unsharded
model; *captured* says how much more or less the captured products and attention have. *Collectives* of a captured step
are compared, by kind, with those that a step executes of a model that transformers alone has distributed (plain
modules: FSDP2 around their blocks), with embeddings untied on both sides; a difference is shown. *s* are processor
seconds of the row.
"""
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
LONGER_S = 400  # for a model of published size
PUBLISHED = Path(__file__).with_name("published_models.json")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward")
GROUPS = {  # collectives of c10d, by the begin of the op's name
    "all_reduce": ("c10d.allreduce", "_c10d_functional.all_reduce"),
    "all_gather": ("c10d._allgather_base", "c10d.allgather", "_c10d_functional.all_gather"),
    "reduce_scatter": ("c10d._reduce_scatter_base", "c10d.reduce_scatter", "_c10d_functional.reduce_scatter"),
    "all_to_all": ("c10d.alltoall", "_c10d_functional.all_to_all"),
    "broadcast": ("c10d.broadcast", "_c10d_functional.broadcast"),
}


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


@contextmanager
def limited(seconds: float, name: str) -> Iterator[None]:
    """Raise :class:`InvalidInput` inside the block once it has taken ``seconds`` of processor time."""

    def late(*_):
        raise InvalidInput(f"not captured within {seconds} s of processor time", source=name)

    signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def try_kind(kind: str) -> str:
    """What happened to a step of this kind: counts of collectives, or the reason of the refusal after ``refused:``."""
    try:
        with limited(LIMIT_S, kind):
            model, parameters = hugging_face_model(LACKING.get(kind, {}), {"length": LENGTH}, kind, class_of(kind))
            part = few_parts(model.part(parameters, parameters["layers"]))[0][0]
            if model.checks is not None:
                model.checks(parameters, MESH)
            program = capture_stage(model, parameters, MESH, replace(part, first=True, last=True), order="FB")
    except SimdevError as error:
        return f"refused: {error}"
    found = ", ".join(f"{count} {call} {axis}" for (call, axis), count in sorted(collectives(program).items()))
    return found or "none"


def collectives(program: StageProgram) -> Counter:
    """Collectives of a step with one microbatch, by kind and communicator."""
    calls = (*program.forward.calls, *program.backward[StageProgram.ONLY].calls, *program.finish.calls)
    return Counter((call.kind, call.stream) for call in calls if call.is_collective)


def published() -> dict[str, dict]:
    """Models of published sizes by name: ``config`` (or ``step``, a function of ``published_steps.py``),
    ``parameters``, how many of these are ``buffers`` of the library, and perhaps a ``note``."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


@contextmanager
def counting(rows: int) -> Iterator[Counter]:
    """Counts the collectives that are executed inside, by kind; ``rows`` answers the host where it asks how many rows
    a rank receives. It shares nothing with the recorder of a capture, so that one checks the other."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    found: Counter = Counter()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # DTensor runs first, so that what it executes for the operator is seen
            name = str(func)
            found.update(kind for kind, begins in GROUPS.items() if name.startswith(begins))
            if rows and name.startswith("aten._local_scalar_dense"):
                return rows
            return func(*args, **(kwargs or {}))

    with Mode():
        yield found


def collectives_of_the_library(model, parameters: dict, mesh: Mesh) -> Counter:
    """Collectives of a step with one microbatch, by kind, which a model executes that transformers has distributed (for
    a plain module: FSDP2 around its blocks and the model). Models with a few layers, and with one more period of
    layers, are run; the others repeat the additional one."""
    few, more = few_parts(model.part(parameters, parameters["layers"]))
    counted = [_counted(model, parameters, mesh, part) for part in few]
    if not more:
        return counted[0]
    short, long = counted
    return Counter({kind: short[kind] + (long[kind] - short[kind]) * more for kind in short | long})


def _counted(model, parameters: dict, mesh: Mesh, part: Part) -> Counter:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    function, length = model.function, int(parameters["length"])
    with fake_process_group(mesh) as torch_mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = 0
        if isinstance(function, TransformersModel):
            module, step = _of_transformers(function, torch_mesh, part, length, mesh["ep"])
            rows = length * function.active // mesh["ep"] if mesh["ep"] > 1 else 0
            context = on_gpu_unpacked
        else:
            module, step = _of_module(function, torch_mesh)
            context = on_gpu
        with FakeTensorMode(allow_non_fake_inputs=True), context():
            to_fakes(module)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=False)
            with counting(rows) as found:
                step().backward()
                optimizer.step()
    return found


def _of_transformers(function, mesh, part: Part, length: int, ep: int):
    """The model as transformers distributes it, and what computes its loss."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    from simdev.graphs.capture.packages import loss_of
    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    module = function.build(numbers=chosen(function.kinds({}), part.kinds, part.layers)).train()
    sizes = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names}
    shards, tp = sizes.get("dp_shard", 1) * ep, sizes.get("tp", 1)
    config = DistributedConfig(
        tp_size=tp, fsdp_size=shards, dp_replicate_size=1, pp_size=1, ep_size=ep, ep_implementation="all_to_all",
        fsdp_mixed_precision=True, fsdp_plan=plan_of_blocks(module) or None,
    )  # fmt: skip
    dense = init_device_mesh("cpu", (1, 1, shards, tp), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    expert = (1, 1, shards * tp // ep, ep)
    type(module).maybe_distribute_model(
        module, config, TransformersDeviceMesh(dense, init_device_mesh(
            "cpu", expert, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")))
    )  # fmt: skip

    def step():
        if function.language:
            tokens = torch.zeros(1, length, dtype=torch.int64)
            return module(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss_of(module(**made_up_inputs(module, 1, length if length > 1 else None)))

    return module, step


def _of_module(function, mesh):
    """A plain step with FSDP2 around each block and the model, and what computes its loss."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    run, inputs, _ = prepared(function, 1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    inside = [(f"{n}.{i}", b) for n in function.lists for i, b in run.model.get_submodule(n).named_children()]
    for module in (*(block for name, block in inside if name not in function.outside), run.model):
        fully_shard(module, mesh=mesh["dp_shard"], mp_policy=policy)
    return run, lambda: run(*inputs())


def compare(name: str, entry: dict) -> dict[str, Any]:
    """The row of a model of published sizes: its parameters as published, of the library and of the captured program;
    FLOPs of one sequence; collectives on :data:`MESH` or on the axes that the model has."""
    model, parameters = _published_model(name, entry, tied=True)
    own = model.function.parameters
    program = capture_stage(model, parameters, Mesh({}), model.part(parameters, parameters["layers"]), order="FB")
    calls = (*program.forward.calls, *program.backward[StageProgram.ONLY].calls)
    counted = sum(call.flops for call in calls if call.kind in PRODUCTS or "attention" in call.kind)
    flops = model.function.whole_flops(parameters)
    found = {
        "stated": entry.get("parameters"),
        "buffers": entry.get("buffers", 0),
        "library": own,
        "captured": program.parameters,
        "flops": flops,
        "captured_flops": counted,
        "note": entry.get("note", ""),
        "not_offered": list(model.notes),
        "collectives": {},
    }
    model, parameters = _published_model(name, entry, tied=False)
    meshes = [MESH if "tp" in model.axes and isinstance(model.function, TransformersModel) else Mesh({"dp_shard": 4})]
    meshes += [Mesh({"dp_shard": 2, "ep": 2})] if "ep" in model.axes else []
    for mesh in meshes:
        try:
            pair = _both(model, parameters, mesh)
        except SimdevError as error:
            if mesh["tp"] == 1:
                raise
            found["note"] = "; ".join(filter(None, [found["note"], f"not with tp: {error}"]))
            mesh = Mesh({"dp_shard": 4})
            pair = _both(model, parameters, mesh)
        found["collectives"][str(mesh)] = pair
    return found


def _both(model, parameters: dict, mesh: Mesh) -> list[dict | None]:
    """Collectives of the captured step and of the library's own, by kind; None where the library cannot distribute the
    model."""
    ours: Counter = Counter()
    part = model.part(parameters, parameters["layers"])
    for (kind, _), count in collectives(capture_stage(model, parameters, mesh, part, order="FB")).items():
        ours[kind] += count
    try:
        library = dict(sorted(collectives_of_the_library(model, parameters, mesh).items()))
    except ValueError:  # FSDP on embeddings that an encoder and a decoder share
        return [dict(sorted(ours.items())), None]
    return [dict(sorted(ours.items())), library]


def _published_model(name: str, entry: dict, tied: bool):
    """The parallel model of an entry and its parameters; without ``tied``, tied embeddings are untied: transformers
    alone cannot distribute tied ones."""
    if "step" in entry:
        return published_step(entry["step"], {}, name)
    given = {**entry["config"], **({"architectures": [entry["class"]]} if "class" in entry else {})}
    if not tied:
        given["tie_word_embeddings"] = False
    length = {"length": entry.get("length", 1024)} if entry.get("length", 1024) else {}
    model, parameters = hugging_face_model(given, length, name)
    return model, {**parameters, "length": min(parameters["length"], model.function.length)}


def row_of(table: str, name: str) -> dict[str, Any]:
    """The row of a kind or of a model of published sizes; ``refused`` gives the reason of a refusal."""
    begin = time.process_time()
    try:
        if table == "kinds":
            text = try_kind(name)
            row: dict[str, Any] = {"refused": text.removeprefix("refused: ")} if "refused" in text else {"found": text}
        else:
            with limited(LONGER_S, name):
                row = compare(name, published()[name])
    except SimdevError as error:
        row = {"refused": str(error)}
    except Exception as error:  # of a library, outside of a capture
        row = {"refused": f"{type(error).__name__}: {sentence(error)}"}
    return {"table": table, "name": name, **row, "seconds": round(time.process_time() - begin, 1)}


def code() -> str:
    """What rows depend on: versions of the libraries, and a digest of the code that captures and compares."""
    root = Path(__file__).parents[1]
    files = [*sorted((root / "parallel").rglob("*.py")), *sorted((root / "graphs" / "capture").glob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*files, Path(__file__), PUBLISHED, STEPS)))
    named = [f"{name} {version(name)}" for name in ("torch", "transformers", "diffusers")]
    return ", ".join([*named, digest.hexdigest()[:12]])


def study(
    out: Path,
    tables: Sequence[str],
    names: Sequence[str],
    tell: Callable[[int, int, str], None],
    workers: int = 1,
    seconds: float = inf,
) -> tuple[list[dict[str, Any]], int]:
    """Compute the rows that ``out/rows.jsonl`` lacks and write ``out/README.md``; returns the rows that were asked for
    and the number of those that are left. ``names`` chooses rows (all if empty); no row is begun after ``seconds``.
    Raises :class:`UnknownName`."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = [(table, name) for table in tables for name in (kinds_with_plans() if table == "kinds" else published())]
    for name in names:
        if name not in [known for _, known in wanted]:
            raise UnknownName("model or kind", name, [known for _, known in wanted])
    wanted = [one for one in wanted if not names or one[1] in names]
    path, now = out / "rows.jsonl", code()
    rows = _read(path)
    left = [one for one in wanted if one not in rows]
    left += [one for one in wanted if one in rows and rows[one]["code"] != now]
    begin, done = time.monotonic(), 0
    # Files are written in between; a process that computed many models holds much memory.
    with ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=8) as pool:
        todo = iter(left)
        running: dict = {}
        while True:
            while len(running) < workers and time.monotonic() - begin < seconds and (one := next(todo, None)):
                running[pool.submit(row_of, *one)] = one
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                rows[running.pop(future)] = row = {**future.result(), "code": now}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                done += 1
                tell(done, len(left), f"{row['name']}: {row.get('refused') or row.get('found') or 'compared'}")
    every = [rows[one] for name in published() if (one := ("published", name)) in rows]
    every += [rows[one] for one in sorted(rows) if one[0] == "kinds"]
    write_text(out / "README.md", page(every, now))
    return [rows[one] for one in wanted if one in rows], len(left) - done


def _read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last row of each model and kind, by table and name."""
    lines = read_lines(path) if path.exists() else ()
    return {(row["table"], row["name"]): row for row in (parse_json(line, path) for line in lines)}


def verdicts(row: dict[str, Any]) -> dict[str, bool]:
    """Whether parameters, FLOPs (within 1 %) and collectives of a row of ``published`` are right."""
    if "refused" in row:
        return {}
    stated = None if row["stated"] is None else row["stated"] - row.get("buffers", 0)
    return {
        "parameters": row["library"] == row["captured"] and stated in (None, row["library"]),
        "FLOPs": abs(row["captured_flops"] / row["flops"] - 1) <= 0.01,
        "collectives": all(ours == library for ours, library in row["collectives"].values()),
    }


def page(rows: Sequence[dict[str, Any]], now: str) -> str:
    """Both tables, in Markdown. The names of rows that other code computed end with a number, which is explained."""
    earlier = sorted({row["code"] for row in rows} - {now})
    marks = {one: f"<sup>{number}</sup>" for number, one in enumerate(earlier, 1)}
    rows = [{**row, "name": row["name"] + marks.get(row["code"], "")} for row in rows]
    lines = ["# Any model: what was compared", "", PAGE]
    if any(row["code"] == now for row in rows):
        lines += [f"Libraries and digest of the code: {now}.", ""]
    lines += [f"{mark} computed with {one}.\n" for one, mark in marks.items()]
    sizes = [row for row in rows if row["table"] == "published"]
    kinds = [row for row in rows if row["table"] == "kinds"]
    if sizes:
        right = [row for row in sizes if verdicts(row) and all(verdicts(row).values())]
        lines += [
            "## Models of published sizes", "",
            f"{len(sizes)} of the {len(published())} models in the list were compared so far: "
            f"{len(sizes) - sum('refused' in row for row in sizes)} were captured, and {len(right)} agree in "
            "parameters, FLOPs and collectives.", "",
            "| model | parameters, published | of the library | TFLOPs | captured | collectives (captured) | | s |",
            "|---|--:|--:|--:|--:|---|---|--:|", *map(_size_line, sizes), "",
        ]  # fmt: skip
    if kinds:
        passed = sum("found" in row for row in kinds)
        lines += [
            f"## Kinds with a tensor-parallel plan, on `{MESH}`", "",
            f"{len(kinds)} of {len(kinds_with_plans())} kinds were tried so far; {passed} ran a step.", "",
            "| kind | collectives of a step | s |", "|---|---|--:|",
            *(f"| {row['name']} | {row.get('found') or '**refused**: ' + _cell(row['refused'])} | {row['seconds']} |"
              for row in kinds), "",
        ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _size_line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"| {row['name']} | | | | | | **refused**: {_cell(row['refused'])} | {row['seconds']} |"
    counted, wrong = [], [name for name, right in verdicts(row).items() if not right]
    for mesh, (ours, library) in row["collectives"].items():
        words = ", ".join(f"{count} {kind}" for kind, count in ours.items())
        text = "cannot" if library is None else ", ".join(f"{n} {kind}" for kind, n in library.items())
        other = "" if ours == library else f" (library: {text})"
        counted.append(f"`{mesh}`: {words}{other}")
    stated = f"{row['stated']:,}" if row["stated"] else ""
    share = row["captured_flops"] / row["flops"] - 1
    said = "; ".join(filter(None, [", ".join(wrong) and f"**{', '.join(wrong)} differ**", row["note"]]))
    figures = f"{stated} | {row['library']:,} | {row['flops'] / 1e12:.4g} | {share:+.2%}"
    return f"| {row['name']} | {figures} | {'; '.join(counted)} | {said} | {row['seconds']} |"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
