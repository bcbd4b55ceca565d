"""Read kernel tables of boards with matrix units: products and attention in bf16, f16, TF32 and FP8, norms,
elementwise.

There are five public sources. The :class:`Observations` name their source, so that a device file can be fitted to some
sources and judged by the others:

* aiconfigurator (the package ``aiconfigurator-core``, Apache-2.0; Parquet): products and fused attention of three
  inference stacks on each board;
* vidur (microsoft/vidur, MIT): the layers of a model in f16, on A100 and H100;
* OpenXLA's default performance table (Apache-2.0): autotuned products on H100, B200 and MI300X;
* LLMCompass (PrincetonUniversity/LLMCompass, BSD-3) and EleutherAI's cookbook (Apache-2.0): small tables on A100.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from simdev.calibrate.manifest import held_out
from simdev.calibrate.observations import Observations
from simdev.errors import InvalidInput
from simdev.files import MAX_DOCUMENT, open_text, read_bytes, read_text

# Device files are fitted to these sources and judged by the others. OpenXLA is the only source for MI300X, where a
# fifth of its shapes is held out.
FITTED_SOURCES = ("aiconfigurator sglang", "aiconfigurator vllm", "vidur Llama-2-7b-hf", "vidur phi-2")
# FP8 products with one scale a tensor, as training has them (Transformer Engine, torchao), run in cuBLAS. TensorRT-LLM
# calls cuBLAS; sglang and vLLM call CUTLASS kernels with a scale for each row.
FITTED_F8 = ("aiconfigurator trtllm",)
STACKS = ("sglang", "vllm", "trtllm")  # each one has products and attention
DTYPES = {"bfloat16": "bf16", "float16": "f16", "fp8": "f8"}
# An FP8 reading of a stack holds the cast of the input to FP8. The package lists the times of these casts: those that
# apply a scale, and what finding the scale takes in addition. Which of them a reading holds: TensorRT-LLM finds a scale
# for the tensor, vLLM is given one, sglang finds one for each row (its own table is of another kernel: vLLM's serves).
CASTS = {
    "trtllm": ("trtllm", ("scale_matrix", "computescale")),
    "vllm": ("vllm", ("scale_matrix",)),
    "sglang": ("vllm", ("scale_matrix", "computescale")),
}
MOST_CAST = 0.5  # an FP8 reading of which the cast is a larger share says nothing about the product
OPENXLA_DEVICES = {"sm_90": "NVIDIA_H100_80GB_HBM3", "sm_100_B200": "NVIDIA_B200", "gfx942": "AMD_Instinct_MI300X"}
OPENXLA_DTYPES = {
    "bf16xbf16->bf16": "bf16",
    "f16xf16->f16": "f16",
    "f32xf32->f32": "tf32",
    "f8e4m3fnxf8e4m3fn->bf16": "f8",
}
VIDUR = re.compile(r"vidur_(\w+?)_(.*)_mlp\.csv")
VIDUR_DEVICES = {"a100": "NVIDIA_A100-SXM4-80GB", "h100": "NVIDIA_H100_80GB_HBM3"}
MI300X, HELD_OUT = "AMD_Instinct_MI300X", "shapes held out"
MOST_ROWS = 1 << 22
HALF = 2  # bytes of an f16 or bf16 element
A100 = "NVIDIA_A100-SXM4-80GB"


def fitted(rows: Observations) -> bool:
    """Whether fits of device files use ``rows``."""
    sources = FITTED_F8 if rows.dtype == "f8" else FITTED_SOURCES
    return rows.source.startswith(sources) or (rows.device == MI300X and HELD_OUT not in rows.source)


def read_kernel_tables(paths: Iterable[str | Path]) -> list[Observations]:
    """Read all kernel tables under ``paths`` (files, or folders that are searched recursively), in order of name.

    Raises :class:`InvalidInput` for a path that does not exist or a damaged table.
    """
    found: list[Observations] = []
    for path in map(Path, paths):
        if not path.exists():
            raise InvalidInput("no such file or folder", source=path)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            reader = _reader(file)
            try:
                tables = reader(file) if reader else []
            except InvalidInput:
                raise
            except (OSError, LookupError, ValueError, TypeError, ArithmeticError, StopIteration) as error:
                raise InvalidInput(f"not a kernel table ({error})", source=file) from None
            for rows in tables:
                rows.file = str(file)
                found.append(rows)
    return found


def _reader(file: Path):
    """The function that reads ``file``, or ``None`` if the file is not a kernel table."""
    if file.suffix == ".parquet" and any(f"/{stack}/" in file.as_posix() for stack in STACKS):
        kinds = {"gemm": _aic_products, "context_attention": _aic_attention, "encoder_attention": _aic_attention}
        return kinds.get(file.name.removesuffix("_perf.parquet"))
    if VIDUR.match(file.name):
        return _vidur
    if file.name.startswith("openxla_matmul.csv"):
        return _openxla
    if file.parent.name == "llmcompass" and re.match(r"(matmul|softmax|layernorm|gelu)_A100\.csv", file.name):
        return _llmcompass
    if file.parent.name == "eleutherai" and file.name in ("mm.out", "bmm.out"):
        return _eleutherai
    return None


def _observations(device: str, name: str, dtype: str, dims, seconds, source: str) -> Observations:
    dims, seconds = np.array(dims, np.int64), np.array(seconds, np.float64)
    good = np.isfinite(seconds) & (seconds > 0) & (dims.min(axis=1) >= 0) if len(dims) else np.zeros(0, bool)
    return Observations(device, name, dtype, dims[good], seconds[good], source)


# aiconfigurator ------------------------------------------------------------------------------------------------------


def _columns(file: Path) -> tuple[dict[str, np.ndarray], str, str]:
    """``(columns, device, source)`` of a Parquet table."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise InvalidInput("Parquet tables need pyarrow: pip install pyarrow", source=file) from None
    data = parquet.ParquetFile(io.BytesIO(read_bytes(file)))
    groups = (data.metadata.row_group(number) for number in range(data.num_row_groups))
    if data.metadata.num_rows > MOST_ROWS or sum(group.total_byte_size for group in groups) > MAX_DOCUMENT:
        raise InvalidInput(f"larger than {MOST_ROWS} rows or {MAX_DOCUMENT} bytes: refused", source=file)
    table = data.read()
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    device = re.sub(r"\s+", "_", str(columns["device"][0]))
    stack = next(stack for stack in STACKS if f"/{stack}/" in file.as_posix())
    return columns, device, f"aiconfigurator {stack}"


def _aic_products(file: Path) -> list[Observations]:
    columns, device, source = _columns(file)
    tables = []
    for theirs, dtype in DTYPES.items():
        chosen = columns["gemm_dtype"] == theirs
        if chosen.any():
            m, n, k = (columns[name][chosen].astype(np.int64) for name in "mnk")
            dims = np.stack([np.ones_like(m), m, n, k], axis=1)
            seconds = columns["latency"][chosen] / 1e3
            if dtype == "f8":
                casts = _casts_s(file, m, k)
                seconds = np.where(casts <= MOST_CAST * seconds, seconds - casts, np.nan)
            tables.append(_observations(device, "gemm", dtype, dims, seconds, source))
    return tables


def _casts_s(file: Path, m: np.ndarray, k: np.ndarray) -> np.ndarray:
    """float64 ``(n,)``: what casting an input ``[m, k]`` to FP8 takes in the products of ``file``, from the tables of
    casts beside it; NaN where they lack a size."""
    stack, names = CASTS[next(stack for stack in STACKS if f"/{stack}/" in file.as_posix())]
    total = np.zeros(len(m))
    for name in names:
        known: dict[tuple[int, int], float] = {}
        for table in sorted(file.parents[2].with_name("quantize").glob(f"{stack}/*/{name}_perf.parquet")):
            columns, *_ = _columns(table)
            sizes = zip(columns["m"].tolist(), columns["k"].tolist(), strict=True)
            known |= dict(zip(sizes, (columns["latency"] / 1e3).tolist(), strict=True))
        total += [known.get(size, np.nan) for size in zip(m.tolist(), k.tolist(), strict=True)]
    return total


def _aic_attention(file: Path) -> list[Observations]:
    """Read full attention in bf16: causal attention of a prompt (``context``) and attention without a mask
    (``encoder``)."""
    columns, device, source = _columns(file)
    chosen = columns["attn_dtype"] == "bfloat16"
    causal = file.name.startswith("context")
    if causal:
        chosen &= (columns["kv_cache_dtype"] == "bfloat16") & (columns["step"] == 0) & (columns["head_dim"] <= 256)
        chosen &= columns["window_size"] <= 0 if "window_size" in columns else True
    batch, length, heads, width = (
        columns[name][chosen].astype(np.int64) for name in ("batch_size", "isl", "num_heads", "head_dim")
    )
    groups = columns["num_key_value_heads"][chosen].astype(np.int64) if causal else heads
    groups = np.where(groups > 0, groups, heads)
    last = np.full_like(heads, int(causal))
    dims = np.stack([batch, heads, groups, length, length, width, width, last], axis=1)
    return [_observations(device, "attention", "bf16", dims, columns["latency"][chosen] / 1e3, source)]


# vidur ---------------------------------------------------------------------------------------------------------------


def _vidur(file: Path) -> list[Observations]:
    """Read the layers of one model by tokens and tensor-parallel degree: products, norms, activation and sum."""
    match = VIDUR.match(file.name)
    if match is None:
        raise InvalidInput("not named vidur_BOARD_MODEL_mlp.csv", source=file)
    device, source = VIDUR_DEVICES[match[1]], f"vidur {match[2]}"
    found: dict[str, tuple[list, list]] = {}
    for row in _rows(file):
        for name, dims, column in _vidur_parts(row):
            text = row.get(f"time_stats.{column}.median") or ""
            if text:
                for values, value in zip(found.setdefault(name, ([], [])), (dims, float(text) / 1e3), strict=True):
                    values.append(value)
    return [_observations(device, name, "f16", *values, source) for name, values in found.items()]


def _vidur_parts(row: dict[str, str]) -> list[tuple[str, tuple[int, ...], str]]:
    """``(class, dimensions, column)`` of each measured layer of a row."""
    names = ("num_tokens", "n_embd", "n_expanded_embd", "n_head", "n_kv_head", "num_tensor_parallel_workers")
    tokens, width, wide, heads, groups, split = (int(row[name]) for name in names)
    head = width // heads
    gated = row["use_gated_mlp"] == "True"
    qkv, inner = (heads + 2 * groups) * head // split, wide // split
    up = inner * (2 if gated else 1)
    products = [
        ("attn_pre_proj", qkv, width),
        ("attn_post_proj", width, heads * head // split),
        ("mlp_up_proj", up, width),
        ("mlp_down_proj", width, inner),
    ]
    parts: list[tuple[str, tuple[int, ...], str]] = []
    parts += [("gemm", (1, tokens, n, k), column) for column, n, k in products]
    parts += [("layer_norm", (tokens, width), column) for column in ("input_layernorm", "post_attention_layernorm")]
    parts += [("vector", (HALF * tokens * up, HALF * tokens * inner), "mlp_act")]
    parts += [("vector", (2 * HALF * tokens * width, HALF * tokens * width), "add")]
    return parts


def _rows(file: Path) -> list[dict[str, str]]:
    with open_text(file) as lines:
        return list(csv.DictReader(lines))


# The small tables ----------------------------------------------------------------------------------------------------


def _openxla(file: Path) -> list[Observations]:
    found: dict[tuple[str, str, str, str], tuple[list, list]] = {}
    for row in _rows(file):
        dtype = OPENXLA_DTYPES.get(row["dtypes"])
        if dtype is None or row["device"] not in OPENXLA_DEVICES:
            continue
        batch, m, n, k = (int(row[name]) for name in ("batch", "m", "n", "k"))
        device = OPENXLA_DEVICES[row["device"]]
        judges = device == MI300X and held_out(f"{batch},{m},{n},{k}")
        source = f"OpenXLA, {HELD_OUT}" if judges else "OpenXLA"
        key = device, "bmm" if batch > 1 else "gemm", dtype, source
        dims, seconds = found.setdefault(key, ([], []))
        dims.append((batch, m, n, k))
        seconds.append(2 * batch * m * n * k / float(row["flop_per_s"]))
    return [_observations(*key[:3], *values, key[3]) for key, values in found.items()]


def _llmcompass(file: Path) -> list[Observations]:
    """Read LLMCompass: products in time; softmax, layer norm and GELU in 1e9 elements per second, including
    launches."""
    kind = file.name.split("_")[0]
    lines = [[cell.strip() for cell in line.split(",")] for line in read_text(file).splitlines() if line.strip()]
    if kind == "matmul":
        dims = [(1, int(m), int(n), int(k)) for m, k, n, *_ in lines]
        seconds = [float(line[3].removesuffix("ms")) / 1e3 for line in lines]
        return [_observations(A100, "gemm", "f16", dims, seconds, "LLMCompass")]
    sizes = [tuple(map(int, line[:-1])) for line in lines]
    elements = np.array([float(np.prod(size)) for size in sizes])
    rates = np.array([float(line[-1]) for line in lines]) * 1e9
    if kind == "gelu":
        return [
            _observations(
                A100, "vector", "f16", [(HALF * n, HALF * n) for (n,) in sizes], elements / rates, "LLMCompass"
            )
        ]
    name = {"softmax": "softmax", "layernorm": "layer_norm"}[kind]
    return [_observations(A100, name, "f16", sizes, elements / rates, "LLMCompass")]


def _eleutherai(file: Path) -> list[Observations]:
    pattern = r"Throughput .*? for (?:bmm \((\d+)x)?(\d+)x(\d+)x(\d+)\)?: ([\d.]+)"
    dims, seconds = [], []
    for batch, m, n, k, tflops in re.findall(pattern, read_text(file)):
        size = (int(batch or 1), int(m), int(n), int(k))
        dims.append(size)
        seconds.append(2 * float(np.prod(size)) / (float(tflops) * 1e12))
    return [_observations(A100, "bmm" if file.name == "bmm.out" else "gemm", "f16", dims, seconds, "EleutherAI")]
