"""Read traces of PyTorch's profiler (Kineto, Chrome trace format), event by event and in bounded memory.

A trace of any length is decoded in pieces of a megabyte, and only a few numbers are kept for each event. The reader
does not guess. It counts every event without a required field, every kernel without a launching call, every unknown
category and every truncated file in :attr:`Trace.problems`; :func:`report_problems` writes the counts as sentences.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from simdev.errors import InvalidInput, quoted
from simdev.files import Bounded, Readable

PIECE = 1 << 20
MAX_VALUE = 1 << 26  # one event, or one field before the events, in characters
MAX_EVENTS = 1 << 25
MAX_UNPACKED = 8 << 30  # bytes of a trace, or of an archive of traces
MAX_MEMBERS = 100_000  # of an archive
MAX_NUMBER = 1 << 62  # ns since 1970 are below 2^61
HEAD = ("deviceProperties", "distributedInfo")  # fields of the document that are read besides the events

# By category of older and newer profilers: the kind of event.
CATEGORIES = {
    "operator": "op", "cpu_op": "op", "user_annotation": "op", "runtime": "call", "cuda_runtime": "call",
    "cuda_driver": "call", "kernel": "kernel", "memcpy": "copy", "gpu_memcpy": "copy", "memset": "set",
    "gpu_memset": "set", "cpu_instant_event": "instant",
}  # fmt: skip
IGNORED = frozenset({"async", "ac2g", "fwdbwd", "trace", "cuda_sync", "gpu_user_annotation", "python_function",
                     "overhead", "async_cpu_to_gpu", "async_gpu", "cuda_profiler_range", "iteration"})  # fmt: skip
DEVICE_KINDS = ("kernel", "copy", "set")
STEP = re.compile(r"ProfilerStep#?\s*(\d{1,9})")
CUT = (
    "the compressed file ends too early or is damaged; what came before was read",
    "the file stops inside an event; what came before was read",
    "the list of events does not end",
)
OPTIMIZER = re.compile(r"Optimizer\.step#")


@dataclass(frozen=True, eq=False)
class Events:
    """Columns of events, sorted by begin. ``begin`` and ``end`` int64 ns on the trace's clock; ``name`` int32 into
    :attr:`Trace.names`; ``thread`` int32 into :attr:`Trace.threads` (for device work: into :attr:`Trace.streams`)."""

    begin: np.ndarray
    end: np.ndarray
    name: np.ndarray
    thread: np.ndarray
    correlation: np.ndarray  # int64: number that a call shares with the device work that it launches; -1 if none
    detail: np.ndarray  # int32 into Trace.details (ops: input shapes) or bytes (copies, sets)

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def duration(self) -> np.ndarray:
        return self.end - self.begin

    def __getitem__(self, rows) -> Events:
        return Events(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class Memory:
    """The events of the allocator in order of time. A positive size is an allocation, a negative size a release.
    ``device`` -1 is the host. ``allocated`` and ``reserved`` are the totals after the event, or -1 if not recorded."""

    time: np.ndarray
    device: np.ndarray
    address: np.ndarray
    size: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray


@dataclass(frozen=True, eq=False)
class Trace:
    """The profile of one process. ``work`` holds the kernels, copies and sets on the GPU; ``work_kind`` gives the
    kind."""

    name: str
    device_name: str
    rank: int
    world: int
    names: tuple[str, ...]
    threads: tuple[str, ...]
    streams: tuple[tuple[int, int], ...]  # (device, stream)
    details: tuple[str, ...]
    ops: Events
    calls: Events
    work: Events
    work_kind: np.ndarray  # int8 index into DEVICE_KINDS
    steps: tuple[tuple[int, int, int], ...]  # (number, begin ns, end ns), in order (see _steps)
    memory: Memory
    problems: dict[str, int] = field(default_factory=dict)

    @property
    def cut(self) -> bool:
        """Whether the file is truncated, so that events of the last steps may be missing."""
        return any(what in self.problems for what in CUT)

    @property
    def step_ns(self) -> np.ndarray:
        """int64: the measured duration of each whole step."""
        return np.array([end - begin for _, begin, end in self.steps], np.int64)


def read_trace(path: str | os.PathLike) -> Trace:
    """Read one trace, plain or gzipped JSON. Raises :class:`InvalidInput` if the file holds no usable event."""
    try:
        with open(path, "rb") as file:
            return _read(_unzipped(file, path), Path(path).name, path)
    except OSError as error:
        raise InvalidInput(error.strerror or str(error), source=path) from None


def read_traces(path: str | os.PathLike) -> list[Trace]:
    """The traces of a tar archive (one for each rank, sorted by rank), or the single trace of any other file."""
    if not re.search(r"\.(tar|tgz)(\.gz)?$", str(path)):
        return [read_trace(path)]
    traces = []
    try:
        with open(path, "rb") as file, _open_stream(_unzipped(file, path)) as archive:
            for number, member in enumerate(archive):
                if number == MAX_MEMBERS:
                    raise InvalidInput(f"more than {MAX_MEMBERS} members", source=path)
                if member.isfile() and re.search(r"\.json(\.gz)?$", member.name):
                    inside = archive.extractfile(member)
                    if isinstance(inside, io.BufferedReader):
                        traces.append(_read(_unzipped(inside, path), Path(member.name).name, path))
    except (OSError, tarfile.TarError, zlib.error, EOFError, ValueError, LookupError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"not a readable archive ({error})", source=path) from None
    if not traces:
        raise InvalidInput("no trace in the archive", source=path)
    return sorted(traces, key=lambda trace: (trace.rank, trace.name))


def report_problems(trace: Trace) -> list[str]:
    """The problems of a trace, one sentence each, the most frequent first."""
    return [f"{count} x {what}" for what, count in Counter(trace.problems).most_common()]


def _unzipped(file: io.BufferedReader, source: object) -> Bounded:
    """A stream over the first :data:`MAX_UNPACKED` bytes of a plain or gzipped file."""
    return Bounded(_Gunzip(file) if file.peek(2)[:2] == b"\x1f\x8b" else file, MAX_UNPACKED, source)


def _open_stream(file: Readable) -> tarfile.TarFile:
    """A tar archive that is only read, in order: tarfile calls no other method of the stream."""
    return tarfile.open(fileobj=cast(IO[bytes], file), mode="r|")


class _Gunzip:
    """Reads a damaged gzip file up to the damage. (:class:`gzip.GzipFile` loses the last piece of a truncated file.)"""

    def __init__(self, file: Readable):
        self.file, self.inflate, self.input = file, zlib.decompressobj(31), b""

    def read(self, size: int) -> bytes:
        while True:
            self.input = self.input or self.file.read(1 << 16)
            if not self.input:
                if not self.inflate.eof:
                    raise EOFError
                return b""
            if self.inflate.eof:  # another member follows
                self.inflate = zlib.decompressobj(31)
            output = self.inflate.decompress(self.input, size)
            self.input = self.inflate.unused_data if self.inflate.eof else self.inflate.unconsumed_tail
            if output:
                return output


class _Text:
    """Reads JSON values from a stream in order, with at most one value and one piece in memory."""

    def __init__(self, file: Readable, problems: Counter):
        self.file, self.problems = file, problems
        self.text, self.at, self.ended = "", 0, False
        self.decoder = json.JSONDecoder(parse_float=str)  # a double has too few digits for the times
        self.utf8 = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")

    def more(self) -> bool:
        if self.ended:
            return False
        try:
            piece = self.file.read(PIECE)
        except (EOFError, zlib.error):
            self.problems[CUT[0]] += 1
            piece = b""
        self.ended = not piece
        self.text = self.text[self.at :] + self.utf8.decode(piece, final=self.ended)
        self.at = 0
        return not self.ended

    def peek(self) -> str:
        """The next character that is neither a space nor a comma; empty at the end of the stream."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n,:":
                self.at += 1
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self):
        """The next JSON value. Raises :class:`ValueError` if the text is not JSON or ends inside the value."""
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:
                    self.at = end
                    return value
            except (ValueError, RecursionError):
                if self.ended or len(self.text) - self.at > MAX_VALUE:
                    raise ValueError("not JSON, or one value of over 64 MiB") from None
            self.more()


def _events(text: _Text, head: dict) -> Iterator[object]:
    """Yield the elements of ``traceEvents`` (or of a bare list). Other small fields are stored in ``head``."""
    opening = text.peek()
    if opening == "[":
        text.at += 1
        yield from _elements(text)
        return
    if opening != "{":
        raise ValueError("neither an object nor a list")
    text.at += 1
    while text.peek() == '"':
        key = text.value()
        if key == "traceEvents" and text.peek() == "[":
            text.at += 1
            yield from _elements(text)
        else:
            value = text.value()
            if key in HEAD:
                head[key] = value


def _elements(text: _Text) -> Iterator[object]:
    while text.peek() not in ("]", ""):
        yield text.value()
    if text.peek() == "]":
        text.at += 1
    else:
        text.problems[CUT[2]] += 1


class _Names(dict):
    def __missing__(self, key) -> int:
        self[key] = len(self)
        return self[key]


def _read(file: Readable, name: str, source: object) -> Trace:
    problems: Counter = Counter()
    head: dict = {}
    tables: dict[str, list[tuple]] = {kind: [] for kind in ("op", "call", "work", "memory", "step")}
    names, threads, streams, details = _Names(), _Names(), _Names(), _Names()
    details[""]
    text = _Text(file, problems)
    count = 0
    try:
        for event in _events(text, head):
            count += 1
            if count > MAX_EVENTS:
                raise InvalidInput(f"more than {MAX_EVENTS} events", source=source)
            _file_event(event, tables, names, threads, streams, details, problems)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        if not count:
            raise InvalidInput(f"not a trace ({error})", source=source) from None
        problems[CUT[1]] += 1
    if not (tables["op"] or tables["call"] or tables["work"]):
        raise InvalidInput("not a trace: no op, call or kernel in it", source=source)
    return _trace(name, head, tables, names, threads, streams, details, problems)


def _file_event(event, tables, names, threads, streams, details, problems) -> None:
    """Add one event to its table, or count the reason why it cannot be used."""
    if not isinstance(event, dict) or not isinstance(event.get("args", {}), dict):
        problems["event that is no object"] += 1
        return
    phase, category = event.get("ph"), str(event.get("cat", "")).lower()
    args = event.get("args", {})
    if phase == "i" and event.get("name") == "[memory]":
        _memory_event(event, args, tables, problems)
        return
    if phase != "X":
        return
    kind = CATEGORIES.get(category)
    if kind is None:
        if category not in IGNORED:
            problems[f"event of the unknown category {quoted(category, 40)}"] += 1
        return
    try:
        begin = _ns(event["ts"])
        end = begin + _ns(event["dur"])
        label = str(event["name"])
        if end < begin:
            raise ValueError
        if kind in DEVICE_KINDS:
            stream = args["stream"] if "stream" in args else _number(event["tid"])
            place = streams[_whole(args.get("device", event["pid"])), _whole(stream)]
            size = _whole(float(args.get("bytes", 0)))
            row = (begin, end, names[label], place, _whole(args.get("correlation", -1)), size)
            tables["work"].append((*row, DEVICE_KINDS.index(kind)))
            return
        thread = threads[f"{event['pid']}/{event['tid']}"]
        if kind == "call":
            tables["call"].append((begin, end, names[label], thread, _whole(args["correlation"]), 0))
            return
        step = STEP.match(label)
        if step:
            tables["step"].append((int(step[1]), begin, end))
        dims = args.get("Input Dims", args.get("Input dims"))
        shape = json.dumps([dims, args.get("Input type")], separators=(",", ":")) if dims else ""
        tables["op"].append((begin, end, names[label], thread, _external(args), details[shape]))
    except KeyError as error:
        problems[f"{kind} without {error.args[0]!r}"] += 1
    except (ValueError, TypeError, OverflowError):
        problems[f"{kind} with a field of the wrong type"] += 1


def _memory_event(event, args, tables, problems) -> None:
    try:
        device = _whole(args["Device Id"]) if _whole(args["Device Type"]) == 1 else -1
        totals = _whole(args.get("Total Allocated", -1)), _whole(args.get("Total Reserved", -1))
        place = device, _whole(args.get("Addr", 0)), _whole(args["Bytes"])
        row = _ns(event["ts"]), _whole(args.get("Ev Idx", 0)), *place
        tables["memory"].append((*row, *totals))
    except KeyError as error:
        problems[f"memory event without {error.args[0]!r}"] += 1
    except (ValueError, TypeError, OverflowError):
        problems["memory event with a field of the wrong type"] += 1


def _external(args: dict) -> int:
    value = args.get("External id", -1)
    return _whole(value) if isinstance(value, int) or str(value).isdecimal() else -1


def _whole(value: Any) -> int:
    """A JSON value as an integer that fits the columns. Raises :class:`ValueError` if it is too large."""
    if isinstance(value, str) and len(value) > 20:
        raise ValueError
    number = int(value)
    if abs(number) > MAX_NUMBER:
        raise ValueError
    return number


def _number(value: object) -> int:
    """The number in a thread's or stream's label (``7``, ``"25738"``, ``"stream 7"``)."""
    found = re.search(r"-?\d+$", str(value)[-20:])
    if not found:
        raise ValueError
    return int(found[0])


def _ns(value: Any) -> int:
    """Convert microseconds (an integer, or text with a fraction) exactly to whole ns."""
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, int):
        return _whole(value * 1000)
    whole, _, fraction = str(value).partition(".")
    if not fraction.isdecimal() or not whole:  # an exponent, or not a number
        return _whole(round(float(value) * 1000))
    sign = -1 if whole.startswith("-") else 1
    return _whole(_whole(whole) * 1000 + sign * int((fraction + "000")[:3]))


def _columns(rows: list, count: int) -> list[np.ndarray]:
    return (
        [np.array(column, np.int64) for column in zip(*rows, strict=True)] if rows else [np.zeros(0, np.int64)] * count
    )


def _trace(name, head, tables, names, threads, streams, details, problems: Counter) -> Trace:
    tables["work"].sort(key=lambda row: row[:2])
    for kind in ("op", "call"):
        tables[kind].sort(key=lambda row: (row[0], -row[1]))  # an outer op comes before the ops inside it
    work = _columns(tables["work"], 7)
    calls = _columns(tables["call"], 6)
    orphans = int((~np.isin(work[4], calls[4])).sum())
    if orphans:
        problems["kernel or copy whose launching call is not in the trace"] += orphans
    if head.get("distributedInfo") is not None and not isinstance(head["distributedInfo"], dict):
        problems["distributedInfo of the wrong type"] += 1
    group = head.get("distributedInfo") if isinstance(head.get("distributedInfo"), dict) else {}
    memory = _columns(sorted(tables["memory"]), 7)
    names = tuple(names)
    steps = _steps(tables["step"], tables["op"], names, problems)
    return Trace(
        name=name,
        device_name=_device_name(head, streams),
        rank=_count(group.get("rank"), 0),
        world=_count(group.get("world_size"), 1),
        names=names,
        threads=tuple(threads),
        streams=tuple(streams),
        details=tuple(details),
        ops=Events(*_columns(tables["op"], 6)),
        calls=Events(*calls),
        work=Events(*work[:6]),
        work_kind=work[6].astype(np.int8),
        steps=steps,
        memory=Memory(memory[0], memory[2], memory[3], memory[4], memory[5], memory[6]),
        problems=dict(problems),
    )


def _steps(marked: list, ops: list, names: tuple[str, ...], problems: Counter) -> tuple[tuple[int, int, int], ...]:
    """The steps that the profiler marked, one for each number. If it marked none and an optimizer was called at least
    three times, a step is the time from the end of one call to the end of the next."""
    if marked:
        first = {number: (begin, end) for number, begin, end in sorted(marked, key=lambda step: -step[1])}
        return tuple(sorted(((number, *edges) for number, edges in first.items()), key=lambda step: step[1]))
    calls: dict[int, list[int]] = {}
    for _, end, name, *_ in ops:
        if OPTIMIZER.match(names[name]):
            calls.setdefault(name, []).append(end)
    name, ends = max(calls.items(), key=lambda entry: len(entry[1]), default=(0, []))
    if len(ends) < 3:
        return ()
    problems[f"step without a ProfilerStep: from one end of {names[name]} to the next"] += len(ends) - 1
    ends = sorted(ends)
    return tuple((number, begin, end) for number, (begin, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)))


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default


def _device_name(head: dict, streams) -> str:
    """The name of the GPU; empty if the file does not give it."""
    rows = head.get("deviceProperties")
    used = next(iter(streams), (0, 0))[0]
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("id") == used:
            return str(row.get("name", ""))
    return ""
