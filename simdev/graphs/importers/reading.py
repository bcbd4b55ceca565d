"""Shared by the importers: read an untrusted file and check the fields of its JSON objects one by one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from simdev.errors import InvalidInput, quoted
from simdev.files import MAX_DOCUMENT, parse_json, read_bytes, text_of
from simdev.problem.graph import MAX_BYTES, MAX_OPS

REQUIRED: Any = object()
Default = TypeVar("Default")


def read_input(path: str | os.PathLike) -> bytes:
    """The content of a file to import, at most 128 MiB. Raises :class:`InvalidInput` if the file is empty."""
    data = read_bytes(path, MAX_DOCUMENT)
    if not data.strip():
        raise InvalidInput("the file is empty", source=path)
    return data


def json_object(data: bytes, path) -> Fields:
    """Parse a JSON document whose top level is an object. Raises :class:`InvalidInput` for NaN and infinities."""
    return Fields(parse_json(text_of(data, path), path), path, "")


def whole_number(text: str) -> int:
    """An integer of up to 19 characters. Raises :class:`ValueError` for a longer one, as Python does for thousands of
    digits."""
    if len(text) > 19:
        raise ValueError(f"{quoted(text)} is too long for a number")
    return int(text)


def varint(data, at: int) -> tuple[int, int]:
    """The protobuf number at ``data[at]``, and where it ends. Raises :class:`ValueError` above 64 bits."""
    value = shift = 0
    while True:
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of over 64 bits")


def name_of(path) -> str:
    """The name of a graph whose file does not name it: the file name without its extensions."""
    return Path(path).name.split(".")[0] or "graph"


class Fields:
    """A JSON object that is read key by key. Every error names the file and the field.

    A key that is missing, or null, has the value ``default``; without a default it is an error.
    """

    def __init__(self, table: object, source: object, where: str):
        self.source, self.where = source, where
        if not isinstance(table, dict):
            raise InvalidInput(f"expected an object, got {_kind(table)}", source=source, field=where or None)
        self.table = table

    def fail(self, message: str, key: str | None = None) -> InvalidInput:
        return InvalidInput(message, source=self.source, field=": ".join(filter(None, (self.where, key))) or None)

    def _get(self, key: str, default: Any) -> Any:
        if key not in self.table or (self.table[key] is None and default is not REQUIRED):
            if default is REQUIRED:
                raise self.fail("missing", key)
            return default
        return self.table[key]

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, default: Default) -> str | Default: ...
    def text(self, key, default=REQUIRED):
        value = self._get(key, default)
        if value is not default and not isinstance(value, str):
            raise self.fail(f"expected text, got {_kind(value)}", key)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if value not in (0, 1) or isinstance(value, float):
            raise self.fail(f"expected true or false, got {quoted(value)}", key)
        return bool(value)

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, default: Default) -> float | Default: ...
    def number(self, key, default=REQUIRED):
        """A number that is finite and not negative."""
        value = self._get(key, default)
        return value if value is default else self.check_number(value, key)

    def check_number(self, value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(f"expected a number, got {_kind(value)}", key)
        if not value >= 0 or value > 2**63 or not math.isfinite(value):
            raise self.fail(f"expected a number from 0 to 2^63, got {quoted(value)}", key)
        return value

    @overload
    def bytes(self, key: str) -> int: ...
    @overload
    def bytes(self, key: str, default: Default) -> int | Default: ...
    def bytes(self, key, default=REQUIRED):
        """A size in bytes; a fraction is rounded up."""
        value = self._get(key, default)
        return value if value is default else self.check_bytes(value, key)

    def check_bytes(self, value: object, key: str) -> int:
        size = math.ceil(self.check_number(value, key))
        if size > MAX_BYTES:
            raise self.fail(f"{size} bytes is more than {MAX_BYTES}", key)
        return size

    def items(self, key: str, default: list = REQUIRED) -> list:
        value = self._get(key, default)
        if value is not default and not isinstance(value, list):
            raise self.fail(f"expected a list, got {_kind(value)}", key)
        if value is not default and len(value) > 16 * MAX_OPS:
            raise self.fail(f"{len(value)} entries are too many", key)
        return value

    def rows(self, key: str, default: list = REQUIRED) -> list[Fields]:
        """A list of objects; the errors of each one name its position."""
        one = key.removesuffix("s")
        where = f"{self.where}: " if self.where else ""
        return [
            Fields(row, self.source, f"{where}{one} {number}") for number, row in enumerate(self.items(key, default))
        ]

    def end(self, key: str, nodes: Mapping[float, int]) -> int:
        """The node at one end of an edge: the number that ``nodes`` has for the id under ``key``."""
        node = nodes.get(self.number(key))
        if node is None:
            raise self.fail(f"{self.table[key]!r} is not the id of a node (dangling edge)", key)
        return node

    def object(self, key: str, default: dict = REQUIRED) -> Fields:
        return Fields(self._get(key, default), self.source, ": ".join(filter(None, (self.where, key))))


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
