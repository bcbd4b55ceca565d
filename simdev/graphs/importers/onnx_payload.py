"""Reads an ONNX file without its weights: shapes and types are all that an import needs of them.

The file is mapped into memory and copied field by field, except the payload of tensors above 4 KiB. So a model of 2 GB,
the most that protobuf allows, takes as much memory as its nodes.
"""

from __future__ import annotations

import mmap
import os

from simdev.errors import InvalidInput
from simdev.graphs.importers.reading import read_input, varint

SMALL = 4096  # bytes: a message of this size is copied whole, with the sizes and indices that it may hold
MOST = (1 << 31) - 1  # bytes of a protobuf file

# Numbers of the fields on the way to the payload of tensors (onnx.proto); None stands for a payload.
_TENSOR = {4: None, 5: None, 6: None, 7: None, 9: None, 10: None, 11: None}  # float_data ... raw_data ... uint64_data
_NODE = {5: {5: _TENSOR}}  # NodeProto.attribute, AttributeProto.t
_MODEL = {7: {1: _NODE, 5: _TENSOR}, 25: {7: _NODE}}  # ModelProto.graph: node, initializer; functions: node


def read_model(path: str | os.PathLike) -> bytes:
    """The content of an ONNX file of at most 2 GiB, without the payload of large tensors.

    Raises :class:`InvalidInput` for a file that is larger, cannot be read, or is no protobuf.
    """
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > MOST:
                raise InvalidInput(f"larger than {MOST} bytes, the most that an ONNX file has: refused", source=path)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # a pipe, an empty file, or none at all
        return without_payload(read_input(path), path)
    with data:
        return without_payload(data, path)


def without_payload(data, path: str | os.PathLike) -> bytes:
    """A copy of a serialised model without the payload of large tensors; ``data`` are bytes or a memory map."""
    try:
        return bytes(_copy(data, 0, len(data), _MODEL))
    except (ValueError, IndexError) as error:
        raise InvalidInput(f"not an ONNX model ({error})", source=path) from None


def _copy(data, at: int, end: int, inside: dict) -> bytearray:
    """The message in ``data[at:end]``; ``inside`` says by field number which messages are looked into."""
    kept = bytearray()
    while at < end:
        start = at
        key, at = varint(data, at)
        wire, length = key & 7, 0
        if wire == 0:
            _, at = varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        elif wire == 2:
            length, at = varint(data, at)
        else:
            raise ValueError(f"wire type {wire}")
        body, at = at, at + length
        if at > end:
            raise ValueError("a field ends early")
        number = key >> 3
        if wire != 2 or length <= SMALL or number not in inside:
            kept += data[start:at]
        elif inside[number] is not None:
            message = _copy(data, body, at, inside[number])
            kept += _number(key) + _number(len(message)) + message
    return kept


def _number(value: int) -> bytes:
    """A protobuf varint."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
