"""What to do about a model of a package that cannot be built or run as it is, read from its error."""

from __future__ import annotations

import ast
import importlib.util
import linecache
import re
import sys
import traceback
from typing import Any

from simdev.graphs.capture.packages import _TARGET, _fields, part_of


def missing_package(error: BaseException) -> str | None:
    """The package that an ``error`` says is not installed, or whose name is not there because the code that failed
    imports it only if it is installed, and how to install it."""
    text = str(error)
    if absent := re.search(r"requires the (\w+) library|No module named '(\w+)'", text):
        name = absent[1] or absent[2]
        page = re.search(r"https://github\.com/\S+?(?=[\s'`]|$)", text)
        return f"{name}: see {page[0]}" if page and "pip install" not in text else f"{name}: pip install {name}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, NameError) or not frames:
        return None
    for node in ast.walk(ast.parse("".join(linecache.getlines(frames[-1].f_code.co_filename)))):
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "level", 0):
            continue
        for item in node.names:
            package = (getattr(node, "module", None) or item.name).partition(".")[0]
            if (item.asname or item.name) == error.name and importlib.util.find_spec(package) is None:
                return f"{package}: pip install {package}"
    return None


def fields_asked(target: str, error: BaseException) -> list[tuple[str, str]]:
    """Fields of the model's configuration, and values that an ``error`` asks for (``is_decoder=True``) and that they do
    not have."""
    config, given = _config(target)
    asked = re.findall(r"`(?:self\.)?(?:config\.)?(\w+) ?=+ ?(True|False|\d+)`", str(error))
    unlike = {name: value for name, value in asked if str(getattr(config, name, value)) != value and name not in given}
    return [(name, value.lower()) for name, value in unlike.items()]


def widths_of_heads(target: str, unset: list[str]) -> list[tuple[str, str]]:
    """The value of each field that a configuration leaves open, if all of these are the width of an attention head,
    which is the share of a head in the hidden size unless a configuration says otherwise."""
    config, _ = _config(target)
    found = []
    for field in unset:
        path, _, name = field.rpartition(".")
        part = part_of(config, path, target)
        size, heads = (getattr(part, key, None) for key in ("hidden_size", "num_attention_heads"))
        if name != "head_dim" or not size or not heads or size % heads:
            return []
        found.append((field, str(size // heads)))
    return found


def _config(target: str) -> tuple[Any, dict]:
    """The configuration of a model of transformers with the fields that its id gives, and these; None for another
    model."""
    match = _TARGET.fullmatch(target)
    if match is None or match["package"] != "transformers":
        return None, {}
    config = getattr(sys.modules["transformers"], match["model"]).config_class()
    given = _fields(match["fields"], target)
    for path, value in given.items():
        outer, _, key = path.rpartition(".")
        setattr(part_of(config, outer, target), key, value)
    return config, given
