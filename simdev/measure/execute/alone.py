"""Profiles of single ops: the duration of an op of which only the signature is known."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from simdev.errors import InvalidInput
from simdev.files import read_text
from simdev.graphs.capture.trace import DTYPES, signature
from simdev.measure.execute.cpu import settle
from simdev.measure.execute.link import in_processes
from simdev.measure.execute.shared import Shared
from simdev.measure.execute.worker import clock
from simdev.problem.costs import op_class
from simdev.problem.opcost.signature import Signature, Tensor, parse_signature

SIGNATURE = re.compile(r"\w[\w.:]*(\(.*\)(->.+)?)?")
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
WORK_FREE = {
    "eps": 1e-5,
    "momentum": 0.1,
    "p": 0.5,
    "scale": 2.0,
}  # signatures do not hold floats; the work of a kernel does not depend on these
SAMPLE_NS, MOST_CALLS = 1_000_000, 100  # a sample takes at least this long, or consists of this many calls
REASONS = (
    "no ATen op has this name",
    "its integers select entries of a tensor, and the signature does not say which",
    "no call of the op produces this signature again",
)


def read_signatures(path: Path) -> list[str]:
    """The op signatures of a file, without repetition.

    The file is a cost table (CSV with a column ``signature``) or a text with one signature per line. Raises
    :class:`InvalidInput` that names the line if a line holds no signature.
    """
    lines = read_text(path).splitlines()
    found: dict[str, None] = {}
    for number, text in _rows(lines, path):
        if not SIGNATURE.fullmatch(text):
            raise InvalidInput(f"{text[:60]!r} is not an op signature", source=path, field=f"line {number}")
        found[text] = None
    if not found:
        raise InvalidInput("the file holds no op signature", source=path)
    return list(found)


def _rows(lines: list[str], path: Path) -> Iterator[tuple[int, str]]:
    if not lines or "signature" not in lines[0].split(","):
        yield from ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())
        return
    try:
        reader = csv.DictReader(lines, strict=True)
        yield from ((reader.line_num, row["signature"] or "") for row in reader)
    except csv.Error as error:
        raise InvalidInput(f"not CSV ({error})", source=path) from None


def profile_signatures(
    signatures: list[str], worker: str, *, repeats: int = 10, seed: int = 0
) -> tuple[dict[str, float], dict[str, str]]:
    """Measure each op alone, in a loop on ``worker`` with contiguous random inputs.

    Returns two dictionaries by signature: the time in ns of each op that was measured, and the reason for each op that
    was left out. A time is the median of ``repeats`` samples. A sample takes at least a millisecond or consists of 100
    calls, starts and ends with an idle device, and includes PyTorch's own time to dispatch the calls. Unlike in a step,
    the inputs may be in the cache.
    """
    shared = Shared()
    shared.reserve("ns", len(signatures))
    shared.open()
    in_processes([lambda: _profile(shared, signatures, worker, repeats, seed)])
    found = dict(zip(signatures, shared.array("ns").tolist(), strict=True))
    return (
        {text: float(ns) for text, ns in found.items() if ns > 0},
        {text: REASONS[-ns - 1] for text, ns in found.items() if ns < 0},
    )


def _profile(shared: Shared, signatures: list[str], worker: str, repeats: int, seed: int) -> None:
    kind, _, number = worker.partition(":")
    if kind == "cpu":
        settle(int(number))
    device = torch.device("cpu" if kind == "cpu" else worker)
    torch.manual_seed(seed)
    for row, text in enumerate(signatures):
        with torch.no_grad():
            call = call_of(text, device)
            shared.words("ns")[row] = -1 - call if isinstance(call, int) else _median(call, device, repeats)


def _median(call: Callable[[], object], device: torch.device, repeats: int) -> int:
    _timed(call, device, 2)
    once = max(1, _timed(call, device, 1))
    count = min(MOST_CALLS, max(1, SAMPLE_NS // once))
    return max(1, round(float(np.median([_timed(call, device, count) for _ in range(repeats)])) / count))


def _timed(call: Callable[[], object], device: torch.device, count: int) -> int:
    _wait(device)
    begin = clock()
    for _ in range(count):
        call()
    _wait(device)
    return clock() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_of(text: str, device: torch.device) -> Callable[[], object] | int:
    """A function that runs the op of signature ``text`` on random inputs.

    If there is none, the result is the number of the reason in :data:`REASONS`. A call is accepted only if it produces
    exactly this signature, and if no other assignment of the inputs to the op's optional tensors does so too.
    """
    wanted = parse_signature(text)
    overloads = [each for name in (wanted.kind, f"{wanted.kind}_for_cpu") for each in _overloads(name)]
    if not overloads:
        return 0
    if any(tensor.dtype not in TORCH_DTYPES for tensor in wanted.inputs + wanted.outputs):
        return 2
    try:
        tensors = [_random(tensor, _largest(wanted, tensor), device) for tensor in wanted.inputs]
    except LookupError:
        return 1
    except (RuntimeError, OverflowError, TypeError, ValueError):  # larger than the memory, or invalid numbers
        return 2
    for function in overloads:
        calls = [_call(function, *found) for found in _arguments(function, wanted, tensors)]
        calls = [call for call, *found in calls if _gives(call, text, function, *found)]
        if calls:
            return calls[0] if len(calls) == 1 else 2
    return 2


def _overloads(name: str) -> list:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    found = [getattr(packet, each) for each in packet.overloads()]
    return [each for each in found if not any(argument.is_out for argument in each._schema.arguments)]


def _call(function, args: list, kwargs: dict):
    return (lambda: function(*args, **kwargs)), args, kwargs


def _gives(call: Callable[[], object], text: str, function, args: list, kwargs: dict) -> bool:
    try:
        return signature(function, args, kwargs, call()) == text
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
        return False


def _largest(wanted: Signature, tensor: Tensor) -> int:
    """Upper limit of the integers in ``tensor``. Raises LookupError if the signature does not determine it."""
    if tensor.dtype in ("bool", "f64", "f32", "f16", "bf16"):
        return 0
    if wanted.kind == "embedding":
        return wanted.inputs[0].shape[0]
    if wanted.kind == "embedding_dense_backward":
        return int(wanted.attributes["num_weights"])
    if wanted.kind.startswith("nll_loss"):
        scores = wanted.inputs[wanted.kind.endswith("backward")].shape
        return scores[min(1, len(scores) - 1)]  # the number of classes
    if op_class(wanted.kind) in ("elementwise", "copy", "reduction"):
        return 2
    raise LookupError(wanted.kind)


def _random(tensor: Tensor, largest: int, device: torch.device) -> torch.Tensor:
    dtype = TORCH_DTYPES[tensor.dtype]
    if dtype == torch.bool:
        return torch.rand(tensor.shape, device=device) < 0.5
    if largest:
        return torch.randint(largest, tensor.shape, dtype=dtype, device=device)
    return torch.rand(tensor.shape, dtype=dtype, device=device)  # positive, so that roots and logarithms exist


def _arguments(function, wanted: Signature, tensors: list[torch.Tensor]) -> Iterator[tuple[list, dict]]:
    """Every way to assign the tensors to the arguments of ``function``; the signature gives the other arguments."""
    schema = function._schema.arguments
    optional = [argument.name for argument in schema if str(argument.type) == "Optional[Tensor]"]
    lists = any(str(argument.type) == "List[Tensor]" for argument in schema)
    fixed = sum(str(argument.type) == "Tensor" and argument.name not in wanted.attributes for argument in schema)
    spare = len(tensors) - fixed
    for given in [()] if lists else combinations(optional, spare) if 0 <= spare <= len(optional) else ():
        left = list(tensors)
        args: list = []
        kwargs: dict = {}
        try:
            for argument in schema:
                value = _value(argument, wanted, left, argument.name in given, spare)
                if argument.kwarg_only:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
        except (LookupError, ValueError, SyntaxError):
            continue
        if not left:
            yield args, kwargs


def _value(argument, wanted: Signature, left: list[torch.Tensor], given: bool, spare: int):
    """The value of one argument, from the front of ``left`` if it is a tensor. LookupError if nothing gives it."""
    kind, name, outputs = str(argument.type), argument.name, wanted.outputs
    if name in wanted.attributes:
        return ast.literal_eval(wanted.attributes[name])
    if kind == "List[Tensor]":
        taken, left[:spare] = left[:spare], []
        return taken
    if kind == "Tensor" or given:
        return left.pop(0)
    if name == "dtype" and outputs and wanted.inputs and outputs[0].dtype != wanted.inputs[0].dtype:
        return TORCH_DTYPES[outputs[0].dtype]
    if name == "input_dtype" and outputs:
        return TORCH_DTYPES[outputs[0].dtype]
    if name in ("size", "input_sizes") and outputs:
        return list(outputs[0].shape)
    if argument.has_default_value():
        return argument.default_value
    if kind == "float" and name in WORK_FREE:
        return WORK_FREE[name]
    if kind in ("Optional[Tensor]", "Optional[int]", "Optional[bool]", "Optional[List[int]]"):
        return None  # otherwise the signature would hold it
    raise LookupError(name)
