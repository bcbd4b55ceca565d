"""Public measured training runs beside what simdev predicts for them, and beside simple controls.

The runs are files of ``training-runs`` in the folder of measured data: vTrain's GPT runs on one node and many nodes,
MosaicML's MPT benchmarks, torchtitan's Llama 3 runs, NVIDIA's FP8 runs with NeMo, and plans of papers and reports.
:data:`FITTED` says which of simdev's constants and rules were chosen on which of these rows. A model on whose rows a
constant was fitted, or a rule was chosen, is never reported as held out.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from simdev.bench.rows import write_csv
from simdev.calibrate.given_steps import GivenStep, board_with
from simdev.errors import InvalidInput, SimdevError, Unsupported
from simdev.files import open_text
from simdev.parallel import Prices
from simdev.parallel.costs.reserved import reserved_bytes
from simdev.parallel.plan import prepare, simulate_program
from simdev.parallel.typed_plan import TypedPlan
from simdev.problem.costs import calibration_of
from simdev.studies.training_controls import TrainingRun, constant_mfu, formula_left_out

TABLE = ("set", "source", "row", "gpus", "measured_s", "simulated_s", "command")
CONTROL_TABLE = ("set", "source", "rows", "error")
SETS = ("vtrain-single", "vtrain-multi", "llm-foundry", "torchtitan", "megatron-bridge", "published-plans")
FILES = {
    "vtrain-single": "vtrain_single.csv",
    "vtrain-multi": "vtrain_multi.csv",
    "llm-foundry": "llm_foundry.csv",
    "torchtitan": "torchtitan.csv",
    "megatron-bridge": "megatron_bridge.csv",
    "published-plans": "published_plans.csv",
}
GOALS = {
    "vtrain-single": 0.04,
    "vtrain-multi": 0.10,
    "llm-foundry": 0.08,
    "torchtitan": 0.08,
    "megatron-bridge": 0.08,
    "published-plans": 0.08,
}
PUBLISHED = {"vtrain-single": 0.0837, "vtrain-multi": 0.1473}  # vTrain's own simulator
MEMORY_GOAL = 0.08
HELD_OUT, OTHERS, HERE, RULES = "held out", "other models", "fitted here", "rules chosen here"
FITTED = {  # set -> on which rows its constants were fitted, which constants they are, and which rules saw the rows
    "vtrain-single": (
        OTHERS,
        "three host times 'megatron' are fitted to the rows of the other two models of this set. Rules chosen with all "
        "rows in view: what the rows have run (no recomputation, 40 GB boards, unpadded vocabulary, sends at 14 GB/s), "
        "the ratio of the host times of backward and forward kernels, the factor of products with odd sides, and a "
        "host that waits for each pass. The times of this set are composed, not measured as a whole: they are linear "
        "in the number of microbatches to 13 digits, and gradient all-reduces are entries of vTrain's own table",
    ),
    "vtrain-multi": (
        HELD_OUT,
        "no constant and no rule was chosen on it; the host times 'megatron' and the wait come from vtrain-single",
    ),
    "llm-foundry": (
        HERE,
        "the factor of Triton's attention is fitted to its 26 rows with odd numbers, and the device files' factors of "
        "whole steps to those on one node among them. Rules chosen after errors were seen: what ran was looked up in "
        "llm-foundry's git history (PyTorch's release, hence recomputation to the end of a layer; metrics of the loss; "
        "FlashAttention 2 on 128 GPUs and more)",
    ),
    "torchtitan": (
        RULES,
        "no constant was fitted to it: the host times are estimated. Rules chosen with its two given rows in view: "
        "RMSNorm by eight kernels, fused elementwise kernels under torch.compile, the cube root of the power limit, "
        "what torch.compile keeps of a layer, and the allocator's rules for reserved memory. Two were corrected when "
        "the errors were known: which kernels it fuses, by the bytes that Inductor counts, and that a power limit "
        "slows attention as well, by two boards of one chip",
    ),
    "megatron-bridge": (
        RULES,
        "no constant was fitted to it. Rules chosen after the errors of its four given rows were seen: cuBLAS in FP8, "
        "weights cast once a step, merged products, fused elementwise kernels, FlashAttention 2 up to release 24.07, "
        "data-parallel traffic that overlaps, an update divided among replicas, and Megatron's own tensor parallelism "
        "and loss. Models that are no Llama are taken as gated ones with the same FLOPs",
    ),
    "published-plans": (
        RULES,
        "no constant was fitted to it, and its first figures are in docs/pages/fidelity-record.md. Rules chosen after "
        "errors were seen: compiled FSDP jobs (fms-fsdp, KempnerForge) have none of the factors of llm-foundry; what "
        "KempnerForge executes was looked up (the vendor's attention, bfloat16 storage and loss, gradients reduced "
        "apart, one NVLink bundle for each pair of four GPUs, no FSDP on one rank); so was what AutoModel executes of "
        "models with experts (a token goes once to each rank and node, its benchmarks' gate, fused kernels). For the "
        "rows of Megatron-LM and Llama 3, AutoModel's Llama 3 70B, and those of fms-fsdp with recomputation, nothing "
        "was chosen after an error was seen, but the slowdown of kernels beside collectives (a published mean), "
        "which kernels a compiler fuses (the bytes that Inductor counts), and that AutoModel's 70B job reduces "
        "gradients after each microbatch, without which it does not fit",
    ),
}
CONTROL_ROWS = {  # set -> sets to whose rows its control is fitted, the judged model's rows left out
    "vtrain-single": ("vtrain-single",),
    "vtrain-multi": ("vtrain-single", "vtrain-multi"),
    "llm-foundry": ("llm-foundry",),
    "torchtitan": ("torchtitan",),
    "megatron-bridge": ("megatron-bridge",),
    "published-plans": ("published-plans",),
}
CONTROLS = {
    "vtrain-single": "formula of ten constants, fitted to the other models of this set",
    "vtrain-multi": "formula of ten constants, fitted to vtrain-single and the other models of this set",
    "llm-foundry": "one MFU for each GPU and recomputation, median of the other models of this set",
    "torchtitan": "one MFU for each GPU and recomputation, median of the other models of this set",
    "megatron-bridge": "one MFU for each GPU and recomputation, median of the other models of this set",
    "published-plans": "one MFU for each GPU and recomputation, median of the other models of this set",
}
# What the rows of vTrain's one-node set say themselves (see docs/pages/fidelity-record.md): no recomputation; an
# update of 28 bytes a parameter at the bandwidth of the 40 GB board; a vocabulary that is padded for tensor
# parallelism alone; sends at 14 GB/s, whatever their size (the variant vtrain-node of the framework).
VTRAIN_NODE = {"recompute": "none", "update": "fused"}
UNPADDED = 50_257
VTRAIN_MODELS = ("gpt 1024 x 24", "gpt 2048 x 12", "gpt 2048 x 20")  # those that the host times are fitted to
NEWEST = "24.09"  # the release of NeMo rows that name none


@dataclass(frozen=True)
class Prediction:
    run: TrainingRun
    step_ns: float
    peak_bytes: float

    @property
    def error(self) -> float:
        """Relative error of the step time; positive if the prediction is too long."""
        return self.step_ns / self.run.step_ns - 1


def write_table(path: Path, found: list[Prediction]) -> None:
    """Write each run that was simulated as CSV: the number of GPUs, and the step time measured and simulated."""
    lines = [
        {
            "set": one.run.source,
            "source": one.run.group,
            "row": one.run.name,
            "gpus": str(one.run.plan.mesh.ranks),
            "measured_s": f"{one.run.step_ns / 1e9:.6f}",
            "simulated_s": f"{one.step_ns / 1e9:.6f}",
            "command": shlex.join(one.run.typed.arguments),
        }
        for one in found
    ]
    write_csv(path, TABLE, lines)


def control_times(source: str, runs: list[TrainingRun], given: list[TrainingRun]) -> dict[int, float]:
    """Number of each run of a set -> step time in ns by the control of the set, where it has one. ``given`` are all
    runs that controls may be fitted to."""
    rows = [run for run in given if run.source in CONTROL_ROWS[source]]
    return (formula_left_out if source.startswith("vtrain") else constant_mfu)(runs, rows)


def write_controls(path: Path, given: list[TrainingRun]) -> None:
    """Write the mean error of the control for each model of each set as CSV, and over how many rows. Models without a
    control are left out."""
    lines = []
    for source in SETS:
        runs = [run for run in given if run.source == source]
        errors: dict[str, list[float]] = {}
        for number, step_ns in control_times(source, runs, given).items():
            errors.setdefault(runs[number].group, []).append(abs(step_ns / runs[number].step_ns - 1))
        lines += [
            {"set": source, "source": group, "rows": str(len(mine)), "error": f"{np.mean(mine):.4f}"}
            for group, mine in sorted(errors.items())
        ]
    write_csv(path, CONTROL_TABLE, lines)


def read_runs(folder: Path, source: str) -> tuple[list[TrainingRun], list[str]]:
    """The runs of one set, and for each row that cannot be simulated a sentence that says why.

    Raises :class:`InvalidInput` where the file is not there, lacks a column or holds a value that is no number.
    """
    path = folder / "training-runs" / FILES[source]
    with open_text(path) as file:
        rows = list(csv.DictReader(file))
    reader = READERS[source]
    runs, refused = [], []
    for number, row in enumerate(rows):
        name = f"row {number + 1}"
        try:
            runs.append(reader(source, name, row))
        except KeyError as error:
            raise InvalidInput(f"column {error} is missing", source=path) from None
        except SimdevError as error:
            refused.append(f"{source} {name}: {error}")
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise InvalidInput(f"a cell is missing or malformed ({error})", source=path, field=name) from None
    return runs, refused


def predict(run: TrainingRun, prices: Prices | None = None, known: dict | None = None) -> Prediction:
    """Simulate the plan of a run as ``simdev simulate-plan`` does; ``known`` as for
    :func:`~simdev.parallel.plan.prepare`."""
    report = simulate_program(prepare(run.plan, prices or run.typed.prices(), known=known))
    peak = float(report.peak_bytes.max())
    if run.peak_bytes:
        found = reserved_bytes(run.plan) or ()
        peak = float(max((one.reserved if run.reserved else one.allocated for one in found), default=peak))
    return Prediction(run, float(report.step_ns), peak)


def asked_step(run: TrainingRun, precision: str = "bf16") -> GivenStep:
    """The run simulated without the factor of whole steps of its board's device file, and with a factor of two: hence
    the factor that its measured step asks for."""
    cluster = run.plan.cluster
    plain, times = calibration_of(cluster.kind), []
    with TemporaryDirectory() as folder:
        for steps in ({}, {precision: 2.0}):
            kind = board_with(replace(plain, steps=steps), cluster.kind, Path(folder))
            kind = replace(kind, name=cluster.kind.name)  # tables of collectives go by name
            board = replace(cluster, kind=kind)
            prices = run.typed.software.prices(board, run.typed.scales, run.plan.parameters)
            times.append(predict(replace(run, peak_bytes=0.0), prices).step_ns)
    return GivenStep(run.typed.model, precision, run.step_ns, times[0], times[1] - times[0])


def too_large(runs: list[TrainingRun], tell: Callable[[str], None] = lambda _: None) -> tuple[list[str], int]:
    """A sentence for each run that ``simdev simulate-plan`` says does not fit, though it ran, and how many runs were
    judged: those without allocations on record (schedules that split backward passes) are not. ``tell`` is called with
    the progress."""
    lines: list[str] = []
    judged, known = 0, dict[tuple, object]()
    for number, run in enumerate(runs):
        tell(f"{run.source} {number + 1}/{len(runs)}")
        found = reserved_bytes(run.plan, known)
        has = run.plan.cluster.kind.memory_bytes
        needs = max((one.total for one in found or ()), default=0)
        judged += found is not None
        if needs > has:
            lines.append(f"{run.source} {run.name}: {needs / 2**30:.1f} GiB, the board has {has / 2**30:.1f}")
    return lines, judged


def predict_all(
    runs: list[TrainingRun], tell: Callable[[str], None] = lambda _: None
) -> tuple[list[Prediction], list[str]]:
    """Predictions of the runs, and for each that cannot be simulated a sentence that says why. ``tell`` is called with
    the progress."""
    shared: dict = {}
    found, refused = [], []
    for number, run in enumerate(runs):
        key = run.source, run.plan.cluster, run.typed.framework, run.typed.scales
        if key not in shared:
            shared[key] = run.typed.prices(), {}
        prices, known = shared[key]
        try:
            # runs of one model that FSDP does not shard share captures and timed segments as they are
            found.append(predict(run, prices, known if run.plan.mesh["dp_shard"] == 1 else None))
            tell(f"{run.source} {number + 1}/{len(runs)}: {found[-1].error:+.1%}")
        except SimdevError as error:
            refused.append(f"{run.source} {run.name}: {error}")
    return found, refused


def spread(runs: list[TrainingRun], most: int) -> list[TrainingRun]:
    """``most`` of the runs, evenly taken over the list sorted by model and size."""
    if len(runs) <= most:
        return runs
    keep = np.linspace(0, len(runs) - 1, most).round().astype(int)
    ordered = sorted(runs, key=lambda run: (run.group, run.step_ns))
    return [ordered[place] for place in keep]


def share(runs: list[TrainingRun], number: int, parts: int) -> list[TrainingRun]:
    """The part ``number`` of ``parts`` of the runs; runs that need the same captures are in one part."""
    keys = [(run.group, run.plan.parameters["microbatch"], run.plan.mesh["tp"]) for run in runs]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    return [run for run, key in zip(runs, keys, strict=True) if places[key] % parts == number]


# Readers ---------------------------------------------------------------------------------------------------------


def typed_model(name: str, **parameters: object) -> str:
    """``name[parameter=value,...]``"""
    return f"{name}[{','.join(f'{key}={value}' for key, value in parameters.items())}]"


def typed_mesh(**sizes: int) -> str:
    """``tp=8,pp=4``; axes of size 1 are left out, but not all of them."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "tp=1"


def _vtrain(source: str, name: str, row: dict) -> TrainingRun:
    numbers = {key.strip(): value for key, value in row.items()}
    width, layers = int(numbers["hidden size"]), int(numbers["# layers"])
    micro = int(numbers.get("MicroBatchSize") or numbers["micro batch"])
    data, tensor, pipe = (int(numbers[f"{kind} parallelism"]) for kind in ("data", "tensor", "pipeline"))
    group = f"gpt {width} x {layers}"
    parameters: dict[str, Any] = {
        "width": width,
        "layers": layers,
        "heads": int(numbers["attention heads"]),
        "length": int(numbers["sequence length"]),
        "microbatch": micro,
    }
    cluster, framework = "vtrain-a100", "megatron"
    if source == "vtrain-single":
        parameters |= VTRAIN_NODE | ({"vocabulary": UNPADDED} if tensor == 1 else {})
        left_out = f",without-{width}x{layers}" if group in VTRAIN_MODELS else ""
        cluster, framework = "dgx-a100-40gb", f"megatron[vtrain-node{left_out}]"
    typed = TypedPlan(
        typed_model("gpt-3.6b", **parameters),
        cluster,
        typed_mesh(pp=pipe, dp_replicate=data, tp=tensor),
        int(numbers["global batch"]) // (micro * data),
        framework=framework,
    )
    return TrainingRun(source, name, group, typed, 1e6 * float(numbers["iteration time (ms)"]))


FOUNDRY = {"h100_80gb": "dgx-h100", "a100_80gb": "dgx-a100", "a100_40gb": "dgx-a100-40gb"}


MANY = 128  # boards, from which on H100 was measured in January 2024
TRITON = ("13b", "30b")  # the models that kept Triton's attention then


def _foundry_framework(row: dict) -> str:
    """What llm-foundry ran, by its git history (``frameworks/llm-foundry.toml``): the tables of May 2023 say ``bf16``,
    those of October 2023 and later ``amp_bf16``."""
    if not row["Precision"].startswith("amp"):
        return "llm-foundry"
    later = row["GPU"].startswith("h100") and int(row["# GPUs"]) >= MANY
    return f"llm-foundry[2023.10{',flash' if later and row['Model'] not in TRITON else ''}]"


def _foundry(source: str, name: str, row: dict) -> TrainingRun:
    if row["Precision"] not in ("amp_bf16", "bf16"):
        raise Unsupported(f"precision {row['Precision']} is not costed")
    if row["GPU"] not in FOUNDRY:
        raise Unsupported(f"no topology for {row['GPU']}")
    length, ranks = int(row["SeqLen (T)"]), int(row["# GPUs"])
    model = typed_model(
        f"mpt-{row['Model']}",
        length=length,
        microbatch=int(row["MicroBatchSize"]),
        recompute="full" if row["Activation Checkpointing"] == "True" else "none",
        precision=row["Precision"],
    )
    typed = TypedPlan(
        model,
        FOUNDRY[row["GPU"]],
        f"dp_shard={ranks}",
        int(row["GradAccum"]),
        framework=_foundry_framework(row),
        reshard="never" if row["Sharding Strategy"] == "SHARD_GRAD_OP" else "always",
    )
    step_s = typed.plan.sequences * length / (float(row["Throughput (T/s/GPU)"]) * ranks)
    return TrainingRun(source, name, f"mpt-{row['Model']}", typed, 1e9 * step_s)


def _titan(source: str, name: str, row: dict) -> TrainingRun:
    size, ranks, compiled = row["model"].rpartition("-")[2], int(row["gpus"]), row["compile"] != "no"
    length, micro = int(row["sequence"]), int(row["local_batch"])
    microbatches = 1
    if int(row["pp"]) > 1:  # a microbatch is one sequence: the table does not say
        microbatches, micro = micro, 1
    recompute = row["recompute"] if row["recompute"] != "no" else "none"
    typed = TypedPlan(
        typed_model(f"llama3-{size}", length=length, microbatch=micro, recompute=recompute),
        "torchtitan-h100",
        typed_mesh(**{axis: int(row[axis]) for axis in ("pp", "dp_shard", "cp", "tp")}),
        microbatches,
        framework="torchtitan[2024.12,compiled]" if compiled else "torchtitan[2024.12]",
        float8="dynamic" if row["float8"] != "no" else "",
    )
    step_s = int(row["global_batch"]) * length / (float(row["tokens_per_s_per_gpu"]) * ranks)
    peak = float(row["memory_gib"]) * 2**30
    return TrainingRun(source, name, f"llama3-{size}", typed, 1e9 * step_s, peak)


def _gated(width: int, inner: int) -> int:
    """Hidden units of a gated feed-forward layer (three products) with the FLOPs of one with two, a multiple of 32."""
    return 32 * round(inner * 2 / 3 / 32)


NEMO = {  # widths, depths and vocabularies as the papers and NeMo's recipes give them
    "llama2-7b": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocabulary": 32_000},
    "llama2-13b": {"width": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "hidden": 13824, "vocabulary": 32_000},
    "llama2-70b": {"width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocabulary": 32_000},
    "llama3-8b": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128_256},
    "llama3-70b": {"width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocabulary": 128_256},
    "gpt3-5b": {"width": 4096, "layers": 24, "heads": 32, "kv_heads": 32, "hidden": _gated(4096, 16384),
                "vocabulary": 51_200},
    "gpt3-20b": {"width": 6144, "layers": 44, "heads": 48, "kv_heads": 48, "hidden": _gated(6144, 24576),
                 "vocabulary": 51_200},
    "gpt3-175b": {"width": 12288, "layers": 96, "heads": 96, "kv_heads": 96, "hidden": _gated(12288, 49152),
                  "vocabulary": 51_200},
    "nemotron-8b": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "hidden": _gated(4096, 16384),
                    "vocabulary": 256_000},
    "nemotron-22b": {"width": 6144, "layers": 40, "heads": 48, "kv_heads": 48, "hidden": _gated(6144, 24576),
                     "vocabulary": 256_000},
}  # fmt: skip


def _nemo(source: str, name: str, row: dict) -> TrainingRun:
    if row["system"] != "dgx-h100" or row["precision"] not in ("fp8", "bf16"):
        raise Unsupported(f"{row['precision']} on {row['system']} is not costed")
    if row["model"] not in NEMO:
        raise Unsupported(f"the shape of {row['model']} is not known")
    micro, ranks, length = int(row["micro_batch"]), int(row["gpus"]), int(row["sequence"])
    sizes = {axis: int(row[axis]) for axis in ("pp", "cp", "tp")}
    replicas = ranks // (sizes["pp"] * sizes["cp"] * sizes["tp"])
    chunks = int(row["vp"])
    release = (row.get("release") or "").rpartition("-")[2]  # of "nemo-24.07"
    typed = TypedPlan(
        typed_model("llama3-8b", **NEMO[row["model"]], length=length, microbatch=micro),
        "dgx-h100",
        typed_mesh(pp=sizes["pp"], dp_replicate=replicas, cp=sizes["cp"], tp=sizes["tp"]),
        int(row["global_batch"]) // (micro * replicas),
        "interleaved" if chunks > 1 else "1f1b",
        chunks,
        framework=f"nemo[{release or NEWEST}]",
        float8="delayed" if row["precision"] == "fp8" else "",
    )
    step_s = int(row["global_batch"]) * length / (float(row["tokens_per_s_per_gpu"]) * ranks)
    return TrainingRun(source, name, row["model"], typed, 1e9 * step_s)


def _published(source: str, name: str, row: dict) -> TrainingRun:
    """A row of a paper or a report, if the plan that it names can be typed. Raises :class:`Unsupported` with what the
    row does not state, or what no plan of simdev has."""
    origin, software = row["source"], row["software"]
    name = f"{name} ({origin.split(',')[0]}, {row['model']}, {row['gpus']} GPUs)"
    row = {**row, **STATED_ELSEWHERE.get((origin, row["model"]), {})}
    _expressible(row, name)
    megatron = software.startswith("Megatron-LM")
    length, micro = int(row["sequence"]), int(row["microbatch"])
    shape = {key: int(row[key]) for key in ("width", "layers", "heads", "kv_heads", "hidden", "vocabulary") if row[key]}
    sizes = {axis: int(row[axis] or 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")}
    sizes["dp_shard"] //= sizes["ep"]  # which the authors carve out of dp_shard, and a mesh here multiplies
    replicas = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["ep"]
    microbatches = int(row["global_batch"]) // (micro * replicas) if row["global_batch"] else 1
    chunks = int(row["vp"] or 1)
    cluster = next((known for gpu, known in PUBLISHED_BOARDS.items() if row["gpu"].startswith(gpu)), None)
    if cluster is None:
        raise Unsupported(f"no topology for {row['gpu']}")
    if origin == FMS:  # its README: a node has 400 Gbit/s with A100, 800 with H100
        cluster += f"[network_gb_per_s={50 if row['gpu'].startswith('A100') else 100}]"
    choices = {"length": length, "microbatch": micro, "recompute": row["recompute"] or "none"}
    if megatron and row["sequence_parallel"] == "yes":
        choices["sequence_parallel"] = "yes"
    model = SHAPES.get(row["model"], "gpt-175b" if megatron else "llama3-8b")
    typed = TypedPlan(
        typed_model(model, **shape, **choices),
        cluster,
        typed_mesh(**sizes),
        microbatches,
        "interleaved" if chunks > 1 else "1f1b",
        chunks,
        row.get("layers of stages", ""),
        framework=row.get("framework") or next(known for text, known in PUBLISHED_SOFTWARE if text in software),
        reduce=row.get("reduce", "last"),
        reshard=row.get("reshard", "always"),
    )
    plan = typed.plan
    if row["step_s"]:
        step_s = float(row["step_s"])
    elif row["tokens_per_s_per_gpu"]:
        step_s = plan.tokens / (float(row["tokens_per_s_per_gpu"]) * plan.ranks)
    elif not megatron:
        step_s = plan.flops / (1e12 * float(row["model_tflops_per_gpu"]) * plan.ranks)
    else:  # equation 3 of Narayanan et al. 2021, recomputation included
        h, v, layers = shape["width"], shape["vocabulary"], shape["layers"]
        flops = 96 * plan.sequences * length * layers * h**2 * (1 + length / (6 * h) + v / (16 * layers * h))
        step_s = flops / (1e12 * float(row["model_tflops_per_gpu"]) * plan.ranks)
    peak = 2**30 * float(row["memory_gb"] or 0)  # of KempnerForge, whose "GB" are 2**30 bytes and not what is reserved
    group = f"{origin.split(' (')[0].split(',')[0]}: {row['model']}"
    return TrainingRun(source, name, group, typed, 1e9 * step_s, peak, reserved=False)


PUBLISHED_BOARDS = {"A100-80 SXM": "dgx-a100", "H200 SXM": "h200x4", "H100 SXM": "dgx-h100"}
PUBLISHED_SOFTWARE = (  # words in the row's software, and the framework; the first that occurs
    ("Megatron-LM", "megatron"),
    ("PyTorch FSDP, torch.compile", "fms-fsdp"),
    ("DTensor, torch.compile", "kempnerforge"),
    ("DTensor, eager", "kempnerforge[eager]"),
    ("AutoModel", "automodel"),
    ("Meta's own", "compiled"),
)
SHAPES = {  # models whose rows state no shape, and simdev's names of them
    "llama3-70b": "llama3-70b",
    "llama3-405b": "llama3-405b",
    "deepseek-v3": "deepseek-v3",
    "qwen3-30b-a3b": "qwen3-moe-30b-a3b",
}
SC21 = "Narayanan et al. 2021 (SC21), table 1"
AUTOMODEL = "NVIDIA-NeMo/Automodel docs/performance-summary"
FMS = "foundation-model-stack/fms-fsdp README"
# (source, model) -> cells that the row leaves open and its authors state elsewhere:
# - table 1 of SC21: microbatch and stages of a rank by examples/sc21/run_table_1.sh in NVIDIA/Megatron-LM;
# - fms-fsdp: the share of recomputed blocks p by the second table of its README, HFU / MFU = 1 + p / 3 (34b and 70b on
#   A100: 1.35);
# - AutoModel: recomputation, resharding and its software's choices by the files of examples/llm_benchmark in its
#   repository (deepseek/deepseek_v3_te_deepep.yaml, qwen/qwen3_moe_30b_te_deepep.yaml). The 70B job reduces gradients
#   after each microbatch: whole ones would take 262 GiB of a board;
# - Llama 3 405B: a layer on each virtual stage, none on the first and the last one (section 3.3.2). The microbatch is
#   not stated: one sequence.
STATED_ELSEWHERE: dict[tuple[str, str], dict[str, str]] = {
    **{
        (SC21, f"gpt-{model}"): {"microbatch": str(microbatch), "vp": str(stages)}
        for model, microbatch, stages in (
            ("1.7b", 16, 1), ("3.6b", 16, 1), ("7.5b", 16, 1), ("18.4b", 8, 1), ("39.1b", 4, 1), ("76.1b", 2, 3),
            ("145.6b", 2, 2), ("310.1b", 1, 2), ("529.6b", 1, 3), ("1008b", 1, 1),
        )
    },
    **{(FMS, f"llama2-{size}"): {"recompute": "full"} for size in ("34b", "70b")},
    (AUTOMODEL, "llama3-70b"): {"recompute": "full", "framework": "automodel[compiled]", "reduce": "each"},
    **{
        (AUTOMODEL, model): {"recompute": "full", "reshard": "never", "framework": "automodel[experts]"}
        for model in ("deepseek-v3", "qwen3-30b-a3b")
    },
    ("Llama 3 paper (Llama Team 2024), table 4", "llama3-405b"): {
        "microbatch": "1", "vp": "8", "layers of stages": "/".join(["0", *["1"] * 126, "0"]), "reshard": "never",
    },
}  # fmt: skip


def _expressible(row: dict, name: str) -> None:
    """Raise :class:`Unsupported` for a published plan that cannot be typed."""
    reasons = {
        "its microbatch is not stated": not row["microbatch"],
        "adapters of low rank are not modelled": "LoRA" in row["model"],
        "its shape is not stated": not row["width"] and row["model"] not in SHAPES,
        "how many of its blocks it recomputes is not stated": row["software"].startswith("PyTorch FSDP, torch.compile")
        and row["recompute"] == "selective",
        "no framework for its software": not any(text in row["software"] for text, _ in PUBLISHED_SOFTWARE),
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(f"{name.partition('(')[2].rstrip(')')}: {reason}")


READERS = {
    "published-plans": _published,
    "vtrain-single": _vtrain,
    "vtrain-multi": _vtrain,
    "llm-foundry": _foundry,
    "torchtitan": _titan,
    "megatron-bridge": _nemo,
}

# The report ------------------------------------------------------------------------------------------------------

HEADER = [
    "set", "model", "rows", "constants", "mean %", "median %", "bias %", "Spearman", "control %", "goal %", "met",
    "memory %",
]  # fmt: skip


def report_lines(predictions: list[Prediction], given: list[TrainingRun]) -> list[list[str]]:
    """One line for each set and model, and one for each set: simulated errors beside those of the control.

    ``given`` are all runs that controls may be fitted to. Misses are in bold. A set with constants fitted to the judged
    models themselves can miss its goal but not meet it: the goals are for other models.
    """
    lines = []
    for source in SETS:
        mine = [p for p in predictions if p.run.source == source]
        if not mine:
            continue
        runs = [p.run for p in mine]
        control = control_times(source, runs, given)
        for group in [*sorted({run.group for run in runs}), "all"]:
            lines.append(_line(source, group, mine, control))
    return lines


def _line(source: str, group: str, mine: list[Prediction], control: dict[int, float]) -> list[str]:
    from scipy.stats import spearmanr

    numbers = [n for n, p in enumerate(mine) if group in ("all", p.run.group)]
    rows = [mine[n] for n in numbers]
    errors = np.array([p.error for p in rows])
    beside = [abs(control[n] / mine[n].run.step_ns - 1) for n in numbers if n in control]
    order = spearmanr([p.step_ns for p in rows], [p.run.step_ns for p in rows])[0] if len(rows) > 2 else np.nan
    mean, goal, constants = float(np.abs(errors).mean()), GOALS[source], FITTED[source][0]
    memory = [abs(p.peak_bytes / p.run.peak_bytes - 1) for p in rows if p.run.peak_bytes]
    few = f" ({len(beside)} rows)" if 0 < len(beside) < len(rows) else ""
    return [
        source,
        group,
        str(len(rows)),
        constants,
        _percent(mean, goal),
        _percent(float(np.median(np.abs(errors)))),
        f"{100 * errors.mean():+.1f}",
        "" if np.isnan(order) else f"{order:.3f}",
        _percent(float(np.mean(beside))) + few if beside else "none",
        f"{100 * goal:.0f}",
        "**no**" if mean > goal else "not tried" if constants in (HERE, RULES) else "yes",
        _percent(float(np.mean(memory)), MEMORY_GOAL) if memory else "",
    ]


def _percent(share: float, goal: float = np.inf) -> str:
    text = f"{100 * share:.1f}"
    return f"**{text}**" if share > goal else text


def notes(sources: Iterable[str]) -> list[str]:
    """For each set which constants were chosen on it, what its control is, and the error of its own simulator."""
    found = []
    for source in sources:
        text = f"{source}: {FITTED[source][1]}. Control: {CONTROLS[source]}."
        if source in PUBLISHED:
            text += f" Published error of vTrain's own simulator: {100 * PUBLISHED[source]:.2f} %."
        found.append(text)
    return found
