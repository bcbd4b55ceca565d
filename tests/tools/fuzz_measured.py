"""Readers of measured data for the fuzzer, with small files of every kind."""

import contextlib
import csv
import gzip
import io
import json
import random
import zipfile
import zlib
from pathlib import Path

import numpy as np
from fuzz import Reader, mutate_bytes, mutate_csv, mutate_json, mutate_text

SIZES = [1 << number for number in range(4, 16)]
VIDUR_LINKS = "time_stats.send_recv.median,size,num_workers,devices_per_node,collective\n" + "".join(
    f"{1e-3 + size * 1e-8},{size},2,2,send_recv\n" for size in SIZES
)
NCCL_CSV = "size(B),count,type,time,busbw\n" + "".join(f"{size},{size // 4},float,{900 + size},1.0\n" for size in SIZES)
NCCL_TESTS = (
    "# nThread 1\n#  Rank  0 Pid 7 on host device 0\n#  Rank  1 Pid 7 on host device 1\n#       size   count  type\n"
    + "".join(  # noqa: E501
        f"{size} {size // 4} float sum -1 {10 + size / 100:.2f} 0.1 0.1 0\n" for size in SIZES
    )
)
OP_TABLE = "OPName,B,M,N,K,Latency,Device\n" + "".join(f"linear,{n},64,64,32,{n / 10},Tesla T4\n" for n in (1, 2, 4))
LABEL = {"num_layer": 2, "fw_latency": 12.5, "bwall_latency": 25.0}
LABEL_CSV_COLUMNS = (
    "op", "target", "meta", "input_shapes", "input_contiguous", "output_shape", "Name", "fw_latency", "bw_latency"
)  # fmt: skip
LINEAR = "OrderedDict([('h', ('h.0', <class 'torch.nn.modules.linear.Linear'>)])"
OPENXLA = "device,dtypes,batch,m,n,k,flop_per_s\n" + "".join(
    f"sm_90,bf16xbf16->bf16,{b},64,64,32,1e12\n" for b in (1, 1, 2)
)
VIDUR_COLUMNS = ("num_tokens", "n_embd", "n_expanded_embd", "n_head", "n_kv_head", "num_tensor_parallel_workers")
VIDUR = (
    ",".join([*VIDUR_COLUMNS, "use_gated_mlp", "time_stats.mlp_up_proj.median", "time_stats.add.median"])
    + "\n"
    + "".join(f"{tokens},64,256,4,2,1,True,{tokens / 100},0.01\n" for tokens in (1, 8, 64))
)
COMPASS = "64, 128, 128, 0.19ms, 1.7Tflops\n128, 128, 128, 0.2ms, 3.0Tflops\n"
ELEUTHER = "Throughput (in TFLOP/s) for 64x128x64: 12.5\nThroughput (in TFLOP/s) for bmm (8x64x128x64): 20.5\n"
FOUNDRY = (
    "Model,SeqLen (T),# GPUs,GPU,MicroBatchSize,GradAccum,Throughput (S/s),Throughput (T/s/GPU),Precision,MP Mode,"
    "Sharding Strategy,Activation Checkpointing,GlobalBatchSize\n"
    "1b,2048,8,a100_80gb,4,2,30.5,9000,amp_bf16,DEFAULT,FULL_SHARD,False,64\n"
)
TITAN = (
    "model,gpus,gpu,dp_shard,tp,pp,cp,local_batch,global_batch,sequence,recompute,compile,float8,"
    "tokens_per_s_per_gpu,memory_gib,table\n"
    "llama3.1-8b,8,h100-96gb-hbm2e-500w,8,1,1,1,2,16,8192,selective,no,no,5762,82.4,1\n"
)
VTRAIN = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)\n2,16,8,1024,16,24,1024,1,1,2,372.1\n"
)
CASE = {
    "placement": "0" * 16, "name": "a", "round": 0, "unit_devices": "01", "measured_ns": 100, "samples_ns": [99, 101],
    "ops_ns": 90, "channel_ns": 91, "copies_ns": 95, "gaps_ns": 97, "peak_bytes": [10, 20], "simulated_ns": 98,
    "machine_ns": 99, "simulated_peak_bytes": [11, 19], "disturbed": 0.0,
}  # fmt: skip
KEPT = {"segments": [["s", 4, [[0, "mm", "mm(f32[2,2])", 8, 16, 4, [["a", 1]], ["tp"], 4, 4, 1, 0]]]], "peak": 7}


def measured_readers() -> list[Reader]:
    """Every reader of measured data."""
    return [
        Reader("links vidur", "a.csv", VIDUR_LINKS.encode(), mutate_csv, _links),
        Reader("links nccl csv", "a_2gpu.csv", NCCL_CSV.encode(), mutate_csv, _links),
        Reader("links nccl-tests", "a.txt", NCCL_TESTS.encode(), mutate_text, _links),
        Reader("links gzip", "a.csv.gz", gzip.compress(VIDUR_LINKS.encode(), mtime=0), mutate_bytes, _links),
        Reader("op table", "linear.csv", OP_TABLE.encode(), mutate_csv, _op_table),
        Reader("op table gzip", "linear.csv.gz", gzip.compress(OP_TABLE.encode(), mtime=0), mutate_bytes, _op_table),
        Reader("label", "gpt-train-128-2.csv", _label_csv(), mutate_csv, _label),
        Reader("label figures", "gpt-train-128-2.json", json.dumps(LABEL).encode(), mutate_json, _label_figures),
        Reader("workbook", "DeepBench_P100.xlsx", _workbook(), _mutate_workbook, _read_workbook, "openpyxl"),
        Reader("kernel tables openxla", "openxla_matmul.csv", OPENXLA.encode(), mutate_csv, _kernel_tables),
        Reader("kernel tables vidur", "vidur_a100_phi-2_mlp.csv", VIDUR.encode(), mutate_csv, _kernel_tables),
        Reader("kernel tables llmcompass", "matmul_A100.csv", COMPASS.encode(), mutate_text, _compass),
        Reader("kernel tables eleutherai", "mm.out", ELEUTHER.encode(), mutate_text, _eleuther),
        Reader("training runs llm-foundry", "llm_foundry.csv", FOUNDRY.encode(), mutate_csv, _runs("llm-foundry")),
        Reader("training runs torchtitan", "torchtitan.csv", TITAN.encode(), mutate_csv, _runs("torchtitan")),
        Reader("training runs vtrain", "vtrain_single.csv", VTRAIN.encode(), mutate_csv, _runs("vtrain-single")),
        Reader("comparison", "cases.jsonl", _two_cases(), mutate_json, _cases),
        Reader("measured profile", "costs.npz", _costs(), mutate_bytes, _profile, "torch"),
        Reader("op signatures", "ops.txt", b"mm(f32[8,16],f32[16,4])->f32[8,4]\nneg(f32[2])->f32[2]\n", mutate_text, _signatures, "torch"),  # noqa: E501
        Reader("recorder steps", "steps.json", b'{"nmt cpu:0": {"eager": [1, 2.5]}}', mutate_json, _steps),
        Reader("kept capture", "a.json.gz", gzip.compress(json.dumps(KEPT).encode(), mtime=0), _mutate_gzip, _kept),
    ]  # fmt: skip


def _two_cases() -> bytes:
    other = {**CASE, "placement": "1" * 16, "measured_ns": 120, "samples_ns": [119, 121], "simulated_ns": 125}
    return f"{json.dumps(CASE)}\n{json.dumps(other)}\n".encode()


def _label_csv() -> bytes:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(LABEL_CSV_COLUMNS)
    for name in ("h_0_fc", "lm_head"):
        table.writerow(["call_module", "h.0", LINEAR, "[(2, 128, 64)]", "[True]", "(2, 128, 256)", name, 0.5, 1.0])
    table.writerow(["call_function", "<built-in function add>", "", "[(2, 4)]", "[]", "(2, 4)", "add", 0.1, 0.2])
    return out.getvalue().encode()


def _workbook() -> bytes:
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    rel = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    texts = ["Dense Matrix Multiplication", "m", "n", "k", "Time (msec)"]
    rows = [
        '<c r="A1" t="s"><v>0</v></c>' + "".join(f'<c r="{c}1" t="s"><v>{n}</v></c>' for n, c in enumerate("CDEF", 1)),
        "".join(f'<c r="{c}2"><v>{value}</v></c>' for c, value in zip("CDEF", (64, 32, 16, 0.5), strict=True)),
    ]
    package = "http://schemas.openxmlformats.org/package/2006"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    types = {"workbook": "sheet.main", "sharedStrings": "sharedStrings", "worksheets/sheet1": "worksheet"}
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        + "".join(f'<Override PartName="/xl/{at}.xml" ContentType="{kind}.{name}+xml"/>' for at, name in types.items())
        + "</Types>",
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships">'
        f'<Relationship Id="r1" Type="{rel}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{rel}"><sheets><sheet name="fp32" sheetId="1" r:id="r1"/></sheets></workbook>',  # noqa: E501
        "xl/sharedStrings.xml": f'<sst xmlns="{main}">'
        + "".join(f"<si><t>{text}</t></si>" for text in texts)
        + "</sst>",
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><sheetData>'
        + "".join(f'<row r="{number}">{cells}</row>' for number, cells in enumerate(rows, 1))
        + "</sheetData></worksheet>",
    }  # fmt: skip
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return out.getvalue()


def _costs() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **{f"{'0' * 16}.alone": np.ones((2, 3), np.int64), f"{'0' * 16}.loaded": np.ones((2, 3))})
    return out.getvalue()


def _mutate_workbook(data: bytes, draw: random.Random) -> bytes:
    if draw.randrange(4) == 0:
        return mutate_bytes(data, draw)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(sorted(parts))
    parts[name] = mutate_text(parts[name], draw)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return out.getvalue()


def _mutate_gzip(data: bytes, draw: random.Random) -> bytes:
    if draw.randrange(3) == 0:
        return mutate_bytes(data, draw)
    return gzip.compress(mutate_json(gzip.decompress(data), draw), mtime=0)


def _links(path: Path) -> None:
    from simdev.calibrate.links import fit_table, ranges_toml, read_links

    for table in read_links(path):
        ranges_toml(fit_table(table))


def _op_table(path: Path) -> None:
    from simdev.calibrate.neusight import is_op_table, read_op_table
    from simdev.calibrate.observations import Found

    is_op_table(path)
    read_op_table(path, Found())


def _label(path: Path) -> None:
    from simdev.studies.fidelity.labels import read_label

    path.with_suffix(".json").write_text(json.dumps(LABEL))
    read_label(path)


def _label_figures(path: Path) -> None:
    from simdev.studies.fidelity.labels import read_label

    path.with_suffix(".csv").write_bytes(_label_csv())
    read_label(path.with_suffix(".csv"))


def _read_workbook(path: Path) -> None:
    from simdev.calibrate.deepbench import read_workbook
    from simdev.calibrate.observations import Found

    read_workbook(path, Found())


def _kernel_tables(path: Path) -> None:
    from simdev.calibrate.kernel_tables import read_kernel_tables

    read_kernel_tables([path])


def _compass(path: Path) -> None:
    _in_folder(path, "llmcompass")


def _eleuther(path: Path) -> None:
    _in_folder(path, "eleutherai")


def _in_folder(path: Path, name: str) -> None:
    folder = path.parent / name
    folder.mkdir(exist_ok=True)
    _kernel_tables(path.rename(folder / path.name))


def _runs(source: str):
    def read(path: Path) -> None:
        from simdev.studies.training_runs import read_runs

        folder = path.parent / "training-runs"
        folder.mkdir(exist_ok=True)
        path = path.rename(folder / path.name)
        read_runs(folder.parent, source)

    return read


def _cases(path: Path) -> None:
    from simdev.measure.execute.figures import error_parts, figures, over_rounds
    from simdev.measure.report import read_rows

    rows = over_rounds([row for row in read_rows(path) if "simulated_ns" in row])
    if rows:
        figures(rows), error_parts(rows)


def _profile(path: Path) -> None:
    from types import SimpleNamespace

    from simdev.measure.profiles import load_costs

    load_costs(path, SimpleNamespace(fingerprint="0" * 16, n_ops=3))


def _signatures(path: Path) -> None:
    from simdev.measure.execute.alone import read_signatures

    read_signatures(path)


def _steps(path: Path) -> None:
    from simdev.measure.recorder import _read_steps

    _read_steps(path)


def _kept(path: Path) -> None:
    from unittest import mock

    from simdev.parallel.capture import kept

    with contextlib.suppress(OSError, EOFError, zlib.error, UnicodeDecodeError):  # else the digest finds every mutation
        path.write_bytes(kept.packed("a", gzip.decompress(path.read_bytes()).decode()))
    with mock.patch.object(kept, "folder", lambda: path.parent):
        kept.load("a")
