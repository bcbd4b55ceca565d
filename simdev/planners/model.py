"""The model of a training job by name, or by its Hugging Face configuration.

A configuration is a file ``config.json``, a folder that holds one, or the id of a model (``org/name``) whose
configuration lies in Hugging Face's own cache. Nothing is downloaded and no code of the configuration is executed: the
sizes are read, and the shipped model of the same architecture takes them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from simdev.errors import InvalidInput, Unsupported, quoted
from simdev.files import MIB, parse_json, read_text
from simdev.graphs.parallel_model import ParallelModel
from simdev.parallel import find_model

MOST_TOKENS = 8192  # of a sequence, unless parameters say otherwise
MAX_CONFIG = MIB
ID = re.compile(r"[\w.-]+/[\w.-]+")
PARAMETERS = re.compile(r"(?P<path>[^\[\]]*)(?P<parameters>\[[^\[\]]*\])?")

# architecture -> shipped model, and its parameters by the names in the configuration
LLAMA = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "vocabulary": "vocab_size",
    "length": "max_position_embeddings",
}
MPT = {
    "width": "d_model",
    "layers": "n_layers",
    "heads": "n_heads",
    "vocabulary": "vocab_size",
    "length": "max_seq_len",
}
BERT = {name: key for name, key in LLAMA.items() if name != "kv_heads"}
MIXTRAL = {**LLAMA, "experts": "num_local_experts", "active": "num_experts_per_tok"}
ARCHITECTURES: dict[str, tuple[str, Mapping[str, str]]] = {
    "llama": ("llama3", LLAMA),
    "mistral": ("llama3", LLAMA),
    "mixtral": ("mixtral", MIXTRAL),
    "mpt": ("mpt", MPT),
    "bert": ("bert", BERT),
}


def find_trained(entry: str) -> tuple[ParallelModel, dict[str, object]]:
    """The model and its parameters: what :func:`simdev.parallel.find_model` knows, or a Hugging Face configuration,
    with ``[parameter=value,...]`` behind it if wanted. Raises :class:`InvalidInput` or :class:`Unsupported`."""
    found = PARAMETERS.fullmatch(entry)
    path, parameters = (found["path"], found["parameters"] or "") if found else (entry, "")
    if path.endswith(".npz"):
        message = "a captured step has the mesh that it was captured with; name a model that is built on any mesh"
        raise Unsupported(f"{path}: {message} (my_model.py:name)")
    config = _config_path(path)
    if config is None:
        return find_model(entry)
    name, sizes = read_config(config)
    given = ",".join(f"{key}={value}" for key, value in sizes.items())
    return find_model(f"{name}[{','.join(filter(None, (given, parameters[1:-1])))}]")


def _config_path(path: str) -> Path | None:
    """Where the configuration lies; None if ``path`` is the name of a model of simdev."""
    if path.endswith(".json"):
        return Path(path)
    if Path(path).is_dir():
        return Path(path) / "config.json"
    if ID.fullmatch(path) and ".py:" not in path:
        home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
        folder = (
            Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{path.replace('/', '--')}" / "snapshots"
        )
        known = sorted(folder.glob("*/config.json"))
        if not known:
            message = "no configuration in Hugging Face's cache, and nothing is downloaded; pass its config.json"
            raise InvalidInput(message, source=path)
        return known[-1]
    return None


def read_config(path: Path) -> tuple[str, dict[str, int]]:
    """The shipped model and the sizes that a ``config.json`` describes. Raises :class:`InvalidInput` naming the field,
    :class:`Unsupported` for an architecture that no shipped model has."""
    config = parse_json(read_text(path, MAX_CONFIG), path)
    if not isinstance(config, dict):
        raise InvalidInput("expected an object", source=path)
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise Unsupported(f"{path}: model_type {quoted(kind)}; known: {', '.join(ARCHITECTURES)}")
    name, keys = ARCHITECTURES[kind]
    found = {}
    for parameter, key in keys.items():
        value = config.get(key)
        if value is None and parameter == "kv_heads":
            value = config.get(keys["heads"])  # as transformers does
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"expected a whole number from 1 on, got {quoted(value)}", source=path, field=key)
        found[parameter] = value
    found["length"] = min(found["length"], MOST_TOKENS)
    _check(config, found, path)
    return name, found


def _check(config: Mapping, found: Mapping[str, int], path: Path) -> None:
    """Refuse what the shipped model does not compute."""
    head = config.get("head_dim")
    if head not in (None, found["width"] // found["heads"]):
        raise Unsupported(f"{path}: head_dim {quoted(head)} is not the width over the heads")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise Unsupported(f"{path}: projections with a bias")
    window = config.get("sliding_window")
    if isinstance(window, int) and window < found["length"]:
        raise Unsupported(
            f"{path}: a sliding window of {window} tokens; pass [length={window}] with a shorter sequence"
        )
