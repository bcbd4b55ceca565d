"""A fuzzer for everything that simdev reads: whatever a file holds, the answer is data or one short sentence.

``tests/test_fuzz.py`` tries a few files. Longer by hand, with another seed::

    python tests/tools/fuzz.py --seconds 3600 --seed 7 [READER ...]
    python tests/tools/fuzz.py --files 7000 configuration plans 'kept capture'

A failing file is kept in ``fuzz-failures/`` (``--keep FOLDER``), so that it can be read again.
"""

from __future__ import annotations

import argparse
import copy
import csv
import importlib.util
import io
import json
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # drawn.py and small_board.py lie beside the tests

import fuzz_seeds as seeds  # noqa: E402

from simdev.errors import LONGEST, SimdevError

SECONDS = 20  # of processor time: a reader that takes longer on a file of a few kilobytes has no answer

# What a field may hold in a file from a stranger.
TEXTS = [
    "", " ", "0", "-1", "-0", "1.5", "1e400", "-1e400", "1e-400", "1e30", "9" * 25, "9" * 3000, "9" * 5000, "nan", "inf",  # noqa: E501
    "-inf", "NaN", "Infinity", "1_000", "\u0663", "\u00b2", "true", "null", "[]", "{}", '"', "'", "=1+1", "+1", "@x",
    "'=1", "\x00", "\x1b[2J", "\ud83d\ude00", "\u202e", "a" * 200_000, "../../x", "/etc/passwd", "/dev/zero", "evil.py:f",  # noqa: E501
    "x[", "]", "name[a=1", "[" * 20_000, '{"a":' * 20_000, '{"a": 1e999}', "0x" + "f" * 5000, "$\\frac{$", ",", ";;", "\n",  # noqa: E501
]  # fmt: skip
VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 0.5, -0.5, 1e-320, 1e308, [], {},  # noqa: E501
    [[]], [0] * 50, [[[]]] * 3, {"": ""}, {"a": {"b": []}}, *TEXTS,
]  # fmt: skip
RAW = ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "[" * 20_000 + "]" * 20_000, '"\\ud800"', '{"a":' * 5000, "01"]
TOML_VALUES = [
    "0", "-1", "1.5", "1e400", "inf", "nan", "-inf", "9" * 25, "0x" + "f" * 5000, "1e999", '""', '"x"', "true", "[]", "{}",  # noqa: E501
    "[[]]", "[1, 2]", '["a"]', '[["a", "b"]]', "{ a = 1 }", "1979-05-27", "[" * 3000 + "]" * 3000, '"' + "a" * 100_000 + '"',  # noqa: E501
]  # fmt: skip


# Mutations ------------------------------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip, cut, insert, repeat."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
            case 1:
                del data[at : at + draw.choice([1, 2, 10, len(data)])]
            case 2:
                data[at:at] = draw.choice(
                    [b"\x00", b"\xff" * 8, b"9" * 30, b"\xed\xa0\x80", b"[", b'"', b"\n", b"{" * 5000]
                )
            case 3:
                data[at:at] = data[at : at + draw.choice([1, 8, 100])]
            case 4 if data:
                data[min(at, len(data) - 1)] = draw.choice(b"\x00\x01\x7f\x80\xff09-{}[],:\n")
    return bytes(data)


def mutate_json(data: bytes, draw: random.Random) -> bytes:
    """Replace, remove, rename, repeat or nest parts of a JSON document (or of one of its lines)."""
    lines = data.decode().split("\n") if data.count(b"\n{") else [data.decode()]
    number = draw.randrange(len(lines))
    try:
        document = json.loads(lines[number])
    except ValueError:
        return mutate_bytes(data, draw)
    raw: list[str] = []
    for _ in range(draw.randint(1, 3)):
        document = _change(document, draw, raw)
    text = json.dumps(document)
    for place, value in enumerate(raw):
        text = text.replace(f'"@raw{place}@"', value)
    lines[number] = text
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _change(document, draw: random.Random, raw: list[str]):
    document = copy.deepcopy(document)
    spots = [(None, None)]  # containers and keys
    waiting = [document]
    while waiting:
        here = waiting.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else []
        for key in keys:
            spots.append((here, key))
            waiting.append(here[key])
    where, key = draw.choice(spots)
    if where is None:
        return draw.choice([document, document, [document], {"nodes": document}, _value(draw, raw)])
    match draw.randrange(6):
        case 0:
            del where[key]
        case 1 if isinstance(where, dict):
            where[draw.choice(["", "id", "name", "a" * 1000, "outputs", str(key).upper()])] = where.pop(key)
        case 2 if isinstance(where, list):
            where.insert(key, copy.deepcopy(where[key]))
        case 3:
            where[key] = [where[key]]
        case _:
            where[key] = _value(draw, raw)
    return document


def _value(draw: random.Random, raw: list[str]):
    if draw.randrange(4) == 0:
        raw.append(draw.choice(RAW))
        return f"@raw{len(raw) - 1}@"
    return draw.choice(VALUES)


def mutate_csv(data: bytes, draw: random.Random) -> bytes:
    """Replace, remove or repeat cells, rows and columns."""
    table = list(csv.reader(io.StringIO(data.decode(), newline="")))
    for _ in range(draw.randint(1, 3)):
        row = draw.choice(table) if table else []
        match draw.randrange(8):
            case 0 if table:
                table.remove(row)
            case 1 if row:
                row.pop(draw.randrange(len(row)))
            case 2:
                table.insert(0, list(row))
            case 3 if table:
                table.append(list(table[-1]))
            case _ if row:
                row[draw.randrange(len(row))] = draw.choice(TEXTS)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table)
    return out.getvalue().encode("utf-8", "surrogatepass")


def mutate_toml(data: bytes, draw: random.Random) -> bytes:
    """Replace the value of a key; remove, repeat or swap lines."""
    lines = data.decode().split("\n")
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines))
        key, equals, _ = lines[at].partition(" = ")
        match draw.randrange(6):
            case 0:
                lines.pop(at)
            case 1:
                lines.insert(at, lines[draw.randrange(len(lines))])
            case 2:
                lines.insert(
                    at, f"{draw.choice(['calibrated', 'slots', 'units', 'x', 'duplex'])} = {draw.choice(TOML_VALUES)}"
                )
            case _ if equals:
                lines[at] = f"{key} = {draw.choice(TOML_VALUES)}"
        lines = lines or [""]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_text(data: bytes, draw: random.Random) -> bytes:
    """Replace, remove or repeat words and marks."""
    parts = re.findall(r"\w+|\s+|[^\w\s]", data.decode())
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(parts))
        match draw.randrange(4):
            case 0:
                parts[at] = ""
            case 1:
                parts[at] *= draw.choice([2, 3, 5000])
            case _:
                parts[at] = draw.choice([*TEXTS, "{", "}", "[", "-- ", "node", "#\n", "# " * 500, "\n" * 5000])
    return "".join(parts).encode("utf-8", "surrogatepass")


def mutate_npz(data: bytes, draw: random.Random) -> bytes:
    """Change numbers, shapes, types, headers and members of an archive of arrays."""
    files = seeds.members(data)
    for _ in range(draw.randint(1, 2)):
        name = draw.choice(sorted(files))
        try:
            array = np.lib.format.read_array(io.BytesIO(files[name]))
        except Exception:  # damaged by the mutation before
            continue
        match draw.randrange(8):
            case 0:
                del files[name]
                files = files or {"x.npy": b""}
                continue
            case 1:
                files[name] = mutate_bytes(files[name], draw)
                continue
            case 2:
                files[draw.choice(["evil.npy", "../x.npy", name.upper()])] = files[name]
                continue
            case 3 if name == "header.npy":
                array = np.frombuffer(mutate_json(array.tobytes(), draw), np.uint8)
            case 4:
                array = array.reshape(1, -1) if draw.random() < 0.5 else array[: draw.randrange(len(array) + 1)]
            case 5:
                array = array.astype(draw.choice([np.float64, np.bool_, np.int8, np.uint64, np.int64, "U4"]))
            case _ if array.size and array.dtype.kind in "iub":
                array = array.astype(np.int64)
                array.flat[draw.randrange(array.size)] = draw.choice([0, -1, 1, 2**31, 2**62, -(2**63), 99])
        out = io.BytesIO()
        np.lib.format.write_array(out, array)
        files[name] = out.getvalue()
    return _zipped(_refingerprinted(files), draw)


def _refingerprinted(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a graph with the fingerprint that they now have, if they are still a graph."""
    from simdev.problem.graph import ComputationGraph

    try:
        arrays = {name[:-4]: np.lib.format.read_array(io.BytesIO(data)) for name, data in files.items()}
        header = json.loads(arrays.pop("header").tobytes())
        strings = {name: header[name] for name in ComputationGraph.STRINGS}
        graph = ComputationGraph(name=header["name"], meta=header["meta"], **arrays, **strings)
        out, header["fingerprint"] = io.BytesIO(), graph.fingerprint
        np.lib.format.write_array(out, np.frombuffer(json.dumps(header).encode(), np.uint8))
        return {**files, "header.npy": out.getvalue()}
    except Exception:  # no graph, or none any more
        return files


def mutate_submission(data: bytes, draw: random.Random) -> bytes:
    """Mutate one member by its kind, or the names and the archive itself."""
    files = seeds.members(data)
    name = draw.choice(sorted(files))
    kind = {"csv": mutate_csv, "npz": mutate_npz, "toml": mutate_toml, "jsonl": mutate_json}[name.rpartition(".")[2]]
    match draw.randrange(8):
        case 0:
            return mutate_bytes(data, draw)
        case 1:
            files[draw.choice(["../x.csv", "/etc/x.csv", "evil.py", "placements/zz.npz", "graphs/" + "0" * 70])] = b"x"
        case 2:
            del files[name]
        case _:
            files[name] = kind(files[name], draw)
    return _zipped(files, draw)


def _zipped(files: dict[str, bytes], draw: random.Random) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            kind = draw.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_BZIP2])
            archive.writestr(name, content, kind)
    return out.getvalue()


# Readers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """Something that simdev reads: a file name, what it holds, how it is mutated, and what reads it."""

    name: str
    file: str
    seed: bytes
    mutate: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], object]
    package: str = ""  # without this package nothing is read

    @property
    def missing(self) -> str:
        """The package that is needed and not installed, if any."""
        return self.package if self.package and importlib.util.find_spec(self.package) is None else ""


def readers(folder: Path) -> list[Reader]:
    """Every reader; ``folder`` is for files that are needed to make the seeds."""
    board = seeds.board_files(folder / "board")
    kineto = seeds.json_bytes(seeds.KINETO)
    found = [
        Reader("results", "results.csv", board["results.csv"], mutate_csv, _beside(folder / "board", _read_results)),
        Reader("curves", "curves.csv", board["curves.csv"], mutate_csv, _read_curves),
        Reader("plans", "plans.csv", seeds.plans_csv(folder / "plans"), mutate_csv, _read_plans),
        Reader("configuration", "config.json", seeds.json_bytes(seeds.CONFIGURATION), mutate_json,
               _read_configuration, "transformers"),
        Reader("journal", "journal.jsonl", board["journal.jsonl"], mutate_json, _read_journal),
        Reader("submission", "board.zip", board["board.zip"], mutate_submission, _read_submission),
        Reader("release", "datapackage.json", board["datapackage.json"], mutate_json,
               _read_release(board["board.zip"])),
        Reader("plan file", "a.json", seeds.plan_file(folder / "plan.json"), mutate_json, _read_plan_file, "torch"),
        Reader("placement", "a.json", seeds.json_bytes({"graph": "chain", "topology": "p100x2", "devices": [0, 0, 1]}),
               mutate_json, _read_placement),
        Reader("placements", "placements.jsonl", board["placements.jsonl"], mutate_json, _read_placements),
        Reader("topology", "a.toml", seeds.TOPOLOGY.encode(), mutate_toml, _read_topology),
        Reader("device file", "v100.toml", seeds.DEVICE.encode(), mutate_toml, _read_device),
        Reader("device trees", "v100.npz", seeds.trees_npz(), mutate_npz, _read_trees),
        Reader("measured costs", "a.csv", seeds.MEASURED_CSV.encode(), mutate_csv, _read_measured),
        Reader("measured costs json", "a.json", b'{"p100-pcie": {"mm": 2500, "add": 10.5}}', mutate_json, _read_measured),  # noqa: E501
        Reader("kineto", "a.json", kineto, mutate_json, _read_trace),
        Reader("kineto tar", "a.tgz", seeds.tar_of("rank0.json", kineto), mutate_bytes, _read_trace),
        Reader("manifest", "manifest.csv", b"file,sha256,role,source\na,0,validate,x\nb,1,split,y\n", mutate_csv, _read_manifest),  # noqa: E501
        Reader("policy header", "policy.json", seeds.json_bytes(seeds.POLICY), mutate_json, _read_policy),
        Reader("load problem", "a.json", seeds.json_bytes(seeds.PARTITIONING), mutate_json, _read_load_problem),
        _graph("npz", "a.npz", seeds.graph_npz(folder), mutate_npz),
        _graph("json", "a.json", seeds.json_bytes(seeds.GRAPH), mutate_json),
        _graph("csv", "a.csv", seeds.GRAPH_CSV.encode(), mutate_csv),
        _graph("networkx", "a.json", seeds.json_bytes(seeds.NETWORKX), mutate_json),
        _graph("pipedream", "a.txt", seeds.PIPEDREAM.encode(), mutate_text),
        _graph("dnn-partitioning", "a.json", seeds.json_bytes(seeds.PARTITIONING), mutate_json),
        _graph("piper", "a.json", seeds.json_bytes(seeds.PIPER), mutate_json),
        _graph("baechi", "a.json", seeds.json_bytes(seeds.BAECHI), mutate_json),
        _graph("cost-graph", "a.pbtxt", seeds.COST_GRAPH.encode(), mutate_text),
        _graph("execution-trace", "a.json", seeds.json_bytes(seeds.EXECUTION_TRACE), mutate_json),
        _graph("chakra", "a.json", b"\n".join(map(seeds.json_bytes, seeds.CHAKRA)), mutate_json),
        _graph("chakra", "a.et", seeds.chakra_protobuf(), mutate_bytes),
    ]  # fmt: skip
    from fuzz_measured import measured_readers  # which imports this module

    found += measured_readers()
    return [*found, replace(_graph("onnx", "a.onnx", seeds.onnx_model(), mutate_bytes), package="onnx")]


def _beside(board: Path, read: Callable[[Path], object]) -> Callable[[Path], object]:
    """``read`` in a folder that also holds the graphs, machines and placements of ``board``."""

    def read_there(path: Path) -> None:
        for name in ("graphs", "machines"):
            shutil.copytree(board / name, path.parent / name)
        shutil.copy(board / "placements.jsonl", path.parent)
        read(path)

    return read_there


def _graph(format: str, file: str, seed: bytes, mutate) -> Reader:
    ending = " protobuf" if file.endswith(".et") else ""
    return Reader(f"import {format}{ending}", file, seed, mutate, lambda path: _read_graph(path, format))


def _read_graph(path: Path, format: str) -> None:
    from simdev.graphs.importers import import_graph
    from simdev.problem.costs import CostModel
    from simdev.problem.problem import Problem
    from simdev.problem.topology import load_topology
    from simdev.report.describe import graph_text, summarise_graph

    found = import_graph(path, format)
    graph_text(summarise_graph(found.graph)).encode()
    if found.graph.n_ops < 100:
        Problem.build(found.graph, load_topology("p100x2"), CostModel(measured=found.measured or {}))
    import_graph(path)  # the format that the content shows


def _read_results(path: Path) -> None:
    from simdev.bench import rows, score
    from simdev.cli.chosen_run import chosen_run
    from simdev.report.curve import table
    from simdev.report.explain import explain
    from simdev.report.page import page_data
    from simdev.report.summary import board, failures, headline

    found = rows.read_rows(path, check_digest=False)
    score.leaderboard(found), score.ranking(found), score.gaps(found)
    board(found), failures(found), headline(found, path), table([])
    if found:
        rows.write_rows(path, found)  # with digests that fit
        json.dumps(page_data([path.parent]), allow_nan=False)
    explain(chosen_run(path.parent, None, None, None))
    rows.write_rows(path.with_name("again.csv"), found)
    assert rows.read_rows(path.with_name("again.csv")) == sorted(found, key=lambda row: row.key), "not read back"


def _read_plans(path: Path) -> None:
    from simdev.bench import plan_rows, score
    from simdev.bench.inventory import file_differences
    from simdev.bench.plan_verify import impossible, title
    from simdev.report.page import page_data
    from simdev.report.summary import board, failures, headline

    found = plan_rows.read_plan_rows(path.parent, check_digest=False)
    plan_rows.markdown(found), [(title(row), impossible(row), row.bounded) for row in found]
    rows = list(map(plan_rows.as_row, found))
    score.leaderboard(rows), score.ranking(rows), score.gaps(rows)
    board(rows), failures(rows), headline(rows, path)
    file_differences(path.parent, found, lambda note: None)
    if found:
        plan_rows.write_plan_rows(path.parent, found)  # with digests that fit
        json.dumps(page_data([path.parent]), allow_nan=False)


def _read_configuration(path: Path) -> None:
    from simdev.files import read_json
    from simdev.parallel.hugging_face import configuration

    config = read_json(path)
    if isinstance(config, dict):
        configuration(config, {}, str(path), "")


def _read_curves(path: Path) -> None:
    from simdev.bench.journal import read_curves

    read_curves(path)


def _read_journal(path: Path) -> None:
    from simdev.bench.journal import Results

    results = Results(path.parent)
    try:
        results.write()
    finally:
        results.close()


def _read_submission(path: Path) -> None:
    from simdev.bench import rows
    from simdev.bench.check import LIMITS, Check
    from simdev.bench.submission import unpacked
    from simdev.bench.verify import check_row, digest_differences, title

    with unpacked(path) as inside:
        digest_differences(inside)
        for row in rows.read_rows(inside / "results.csv", check_digest=False)[:3]:
            title(row)
            check_row(inside, row, Check("fast", False, frozenset(), True, LIMITS))


def _read_release(archive: bytes) -> Callable[[Path], object]:
    """A reader of the description of a release whose other files are those of ``archive``."""

    def read(path: Path) -> None:
        from simdev.bench.release import faults

        with zipfile.ZipFile(io.BytesIO(archive)) as whole:
            whole.extractall(path.parent)
        for name, sentence in faults(path.parent):
            assert len(f"{name}: {sentence}") <= LONGEST and f"{name}{sentence}".isprintable(), "a message"

    return read


def _read_plan_file(path: Path) -> None:
    from simdev.planners.plan_file import load_plan

    load_plan(path)


def _toy():
    from drawn import chain

    from simdev.problem.problem import Problem
    from simdev.problem.topology import load_topology

    return Problem.build(chain(1000, 2000, 0).build(), load_topology("p100x2"))


def _read_placement(path: Path) -> None:
    from simdev.bench.stored import named_in
    from simdev.problem.placement import Placement

    named_in(path)
    Placement.load(path, _toy())


def _read_placements(path: Path) -> None:
    from simdev.problem.placement_file import packed_keys, stored_placement

    for key in packed_keys(path.parent):
        stored_placement(path.parent, key)


def _read_topology(path: Path) -> None:
    from simdev.problem.problem import Problem
    from simdev.problem.topology import load_topology
    from simdev.report.describe import describe_topology, topology_text

    topology = load_topology(path, kept=True)
    topology_text(describe_topology(topology))
    Problem.build(_toy().graph, topology)


def _read_device(path: Path) -> None:
    from simdev.problem.opcost.device import read_calibration

    read_calibration(path)


def _read_trees(path: Path) -> None:
    from simdev.problem.opcost.device import read_calibration
    from simdev.problem.topology import DEVICES_DIR

    whole = DEVICES_DIR / "calibrated" / "v100.toml"
    path.with_suffix(".toml").write_bytes(whole.read_bytes())
    read_calibration(path.with_suffix(".toml"))


def _read_measured(path: Path) -> None:
    from simdev.problem.costs import CostModel, load_measured
    from simdev.problem.problem import Problem

    toy = _toy()
    Problem.build(toy.graph, toy.topology, CostModel(measured=load_measured(path)))


def _read_trace(path: Path) -> None:
    from simdev.calibrate.imported import trace_graph
    from simdev.calibrate.replay import replay
    from simdev.calibrate.traces import read_traces, report_problems

    for trace in read_traces(path):
        report_problems(trace)
        trace_graph(trace)
        replay(trace)


def _read_manifest(path: Path) -> None:
    from simdev.calibrate.manifest import load_manifest

    load_manifest(path)


def _read_policy(path: Path) -> None:
    from simdev.cli.commands.place import of_policy

    of_policy(path.parent, None)


def _read_load_problem(path: Path) -> None:
    from simdev.exact.load import read_load_problem

    read_load_problem(path)


# Running --------------------------------------------------------------------------------------------------------------


class NoAnswer(Exception):
    """A reader took longer than :data:`SECONDS`."""


def try_file(reader: Reader, data: bytes) -> str:
    """What the reader says about a file: ``read`` or ``refused``. Raises :class:`AssertionError` for a
    message that is too long, and lets any other exception through."""

    def stop(*_):
        raise NoAnswer(f"no answer within {SECONDS} s")

    with tempfile.TemporaryDirectory(prefix="simdev-fuzz-") as scratch:
        path = Path(scratch) / reader.file
        path.write_bytes(data)
        before = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            reader.read(path)
        except SimdevError as error:
            text = str(error)
            assert 0 < len(text) <= LONGEST and text.isprintable(), f"a message of {len(text)} characters: {text!r}"
            return "refused"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
    return "read"


def try_seed(reader: Reader) -> None:
    """Read the file that a reader's mutations start from; it may take longer, for what compiles at first use."""
    with tempfile.TemporaryDirectory(prefix="simdev-fuzz-") as scratch:
        path = Path(scratch) / reader.file
        path.write_bytes(reader.seed)
        reader.read(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("reader", nargs="*", help="names of readers (default: all)")
    parser.add_argument("--seconds", type=float, help="how long in all (default: 60, or until --files are read)")
    parser.add_argument("--files", type=float, default=math.inf, help="how many files for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where failing files are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simdev-fuzz-") as scratch:
        table = run(
            [one for one in readers(Path(scratch)) if not options.reader or one.name in options.reader],
            options.seconds or (60 if options.files == math.inf else math.inf),
            options.seed,
            options.keep,
            options.files,
        )
    for name, counts in table.items():
        found = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        print(f"{name}: {counts.total()} files, {found}")
    return 1 if any(counts["failed"] for counts in table.values()) else 0


def run(
    chosen: list[Reader], seconds: float, seed: int, keep: Path | None = None, rounds: float = math.inf
) -> dict[str, Counter]:
    """Mutate and read for about ``seconds``, or ``rounds`` files for each reader; how often each read, refused and
    failed. Readers whose package is not installed are named and left out."""
    for one in chosen:
        if one.missing:
            print(f"{one.name}: not tried without the package {one.missing}", file=sys.stderr)
    chosen = [one for one in chosen if not one.missing]
    draw, table = random.Random(seed), {one.name: Counter() for one in chosen}
    for one in chosen:
        try_seed(one)
    ends, done = time.monotonic() + seconds, 0
    while time.monotonic() < ends and done < rounds:
        done += 1
        for one in chosen:
            data = one.mutate(one.seed, draw)
            try:
                table[one.name][try_file(one, data)] += 1
            except Exception as error:
                table[one.name]["failed"] += 1
                print(f"{one.name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                if keep is not None:
                    keep.mkdir(exist_ok=True)
                    (keep / f"{one.name.replace(' ', '-')}-{table[one.name]['failed']}-{one.file}").write_bytes(data)
    return table


if __name__ == "__main__":
    sys.exit(main())
