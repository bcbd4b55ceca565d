"""Inputs of a model of diffusers that share axes with its sample, as the documentation of its forward names them.

A video of ``T + 1`` frames comes with a pose of ``T``, and a packed sequence of ``seq_len`` tokens with the places of
its ``num_text_tokens`` texts: the sample's own size says what the names stand for.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from simdev.graphs.capture.documented_inputs import TOKENS, documented_axes, number_of

_ENTRY = re.compile(r"^( *)(\w+)(?: \([^\n]*\))?:(.*(?:\n\1 +.*|\n *$)*)", re.MULTILINE)
_SHAPE = re.compile(r"(?:^\s*|\bshape )`{1,2}\(([^`]*?),?\)`{1,2}")
_LINEAR = re.compile(r"(?:(\d+)(?: ?\* ?)?)?([A-Za-z]\w*)(?: ?([+-]) ?(\d+))?")
LENGTHS = "seq|len|tok|step|ctx"  # in the names of axes


def described_axes(model, name: str) -> list[str]:
    """What the documentation of the model's forward calls the axes of an argument, wherever it gives them: beside its
    name, as ``name: (B, 1, T)``, or in the sentence below it."""
    if axes := documented_axes(model, name):
        return axes
    shape = _SHAPE.search(_said_of(model).get(name, ""))
    return re.split(r",\s*", shape[1].replace("config.", "")) if shape else []


def _said_of(model) -> dict[str, str]:
    """What the documentation of the model's forward says of each argument."""
    documentation = (model.forward.__doc__ or "").partition("Args:")[2].partition("Returns:")[0]
    return {name: text for _, name, text in _ENTRY.findall(documentation)}


def solved(axes: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """The sizes that names stand for in axes such as ``2C + 4``, of a tensor with these ``sizes``."""
    found: dict[str, int] = {}
    for axis, size in zip(axes, sizes, strict=len(axes) == len(sizes)) if len(axes) == len(sizes) else ():
        if term := _LINEAR.fullmatch(axis):
            times, rest = int(term[1] or 1), size - int(f"{term[3] or '+'}{term[4] or 0}")
            if rest > 0 and rest % times == 0:
                found.setdefault(term[2], rest // times)
    return found


def alias(model, name: str) -> str:
    """The argument of which the documentation of the model's forward says that this one is another name."""
    other = re.match(r"\s*Alias (?:for|of) `+(\w+)`", _said_of(model).get(name, ""))
    return other[1] if other else name


def pixels(model, name: str, latent: Sequence[int]):
    """An image, or a video, of the side that the part of the model which reads pixels says it has; None for another
    argument, and where no part does."""
    import torch

    axes = described_axes(model, name)
    sides = [
        vars(part).get("size") or vars(part).get("image_size") for part in model.modules()
        if any(vars(child).get("in_channels") == 3 for child in part.children())
    ]  # fmt: skip
    side = next((side for side in sides if isinstance(side, int)), None)
    if not name.endswith("pixel_values") or side is None or len(axes) not in (4, 5):
        return None
    return torch.randn(latent[0], 3, *([1] if len(axes) == 5 else []), side, side)


def joint_inputs(model, inputs: Mapping[str, Any], name: str, latent: Sequence[int]) -> dict:
    """Arguments of the model's forward whose shapes follow from that of its sample, which is called ``name`` and made
    of a ``latent``: in place of those in ``inputs`` that have other sizes than are documented, and what is missing."""
    takes, sample = inspect.signature(model.forward).parameters, inputs[name]
    axes = {key: described_axes(model, key) for key in takes}
    known = solved(axes[name], sample.shape)
    found = _of_linear_axes(axes, known, name, inputs) | _with_more_axes(axes, known, inputs)
    found |= _returned(model, takes, {**inputs, **found}, name, latent)
    return found | _of_a_packed_sequence(takes, axes, {**inputs, **found}, name, latent)


def _of_linear_axes(axes: dict[str, list[str]], known: dict[str, int], name: str, inputs: Mapping[str, Any]) -> dict:
    """Tensors that the documentation sets off from the sample: by a frame less, or another count of channels. Where it
    has plain names alone, these are often copied from one argument to the next."""
    import torch

    if all(axis.isidentifier() or axis.isdigit() for axis in axes[name]):
        return {}
    found = {}
    for key, made in inputs.items():
        sizes = [known.get(axis, 0) for axis in axes.get(key, [])]
        if key != name and isinstance(made, torch.Tensor) and made.is_floating_point() and sizes and all(sizes):
            found[key] = torch.randn(sizes)
    return found


def _with_more_axes(axes: dict[str, list[str]], known: dict[str, int], inputs: Mapping[str, Any]) -> dict:
    """Tensors to which the documentation gives an axis of one number that they lack, and time steps that it gives the
    axes of the sample: one for each token or frame, unless those of another sample may be the same ones."""
    found, alone = {}, sum("timestep" in key for key in axes) == 1
    for key, made in inputs.items():
        wanted = axes.get(key, [])
        sizes = [1 if axis == "1" else known.get(axis, 0) for axis in wanted]
        if not hasattr(made, "dim") or made.dim() >= len(wanted):
            continue
        if "timestep" in key and alone and made.dim() == 1 and all(sizes):
            found[key] = made.reshape(-1, *[1] * (len(sizes) - 1)).expand(sizes).clone()
        elif wanted.count("1") == 1 and made.dim() == len(wanted) - 1:
            found[key] = made.unsqueeze(wanted.index("1"))
    return found


def _returned(model, takes: Mapping, inputs: Mapping[str, Any], name: str, latent: Sequence[int]) -> dict:
    """Arguments that the documentation says a method of the model returns: of the frames, rows and columns that the
    sample has."""
    import torch

    found, sample, (height, width) = {}, inputs[name], latent[-2:]
    frames = sample.shape[1] // (height * width) if sample.dim() == 3 else sample.shape[-3]
    values = {
        "batch_size": len(sample), "num_frames": frames, "height": height, "width": width, "fps": 24.0,
        "frame_positions": list(range(frames)), "device": sample.device,
    }  # fmt: skip
    for key, text in _said_of(model).items():
        source = re.search(r"returned by\s+\[`~?\w+\.(\w+)`\]", text)
        method = getattr(model, source[1], None) if source else None
        if method is None or key in inputs or key not in takes or takes[key].default is not inspect.Parameter.empty:
            continue
        asked = [word for word, item in inspect.signature(method).parameters.items() if item.default is item.empty]
        if values.keys() >= set(asked):
            with torch.no_grad():
                found[key] = method(**{word: values[word] for word in asked})
    return found


def _of_a_packed_sequence(
    takes: Mapping, axes: dict[str, list[str]], inputs: Mapping[str, Any], name: str, latent: Sequence[int]
) -> dict:
    """What says where the tokens of a packed sequence are and of which kind, one number for each token.

    Either each kind has an argument with its places in the sequence, which is as long as all of them, or the sample and
    the text are as long as the sequence themselves, with zeros where the other one is.
    """
    import torch

    needed = [key for key, item in takes.items() if item.default is item.empty and axes[key]]
    features = [key for key in needed if isinstance(inputs.get(key), torch.Tensor) and inputs[key].is_floating_point()]
    known = {axis: size for key in features for axis, size in solved(axes[key], inputs[key].shape).items()}
    found, start = {}, 0
    for key in needed:
        if len(axes[key]) == 1 and axes[key][0] in known and re.search(r"_(indices|indexes)$", key):
            size = known[axes[key][0]]
            found[key], start = torch.arange(start, start + size), start + size
    joint = next((axis for axis in axes.get("position_ids", ()) if re.search("seq", axis)), None)
    if joint is None or "position_ids" not in needed:
        return {}
    texts = [key for key in features if key.endswith("hidden_states") and joint in axes[key]]
    if not found and name in texts and len(texts) > 1:
        start = TOKENS + math.prod(latent[2:])
        for key in texts:
            sizes = list(inputs[key].shape)
            sizes[axes[key].index(joint)] = start
            found[key] = torch.randn(sizes)
    if not found:
        return {}
    lengths = {"batch_size": len(inputs[name]), "batch": len(inputs[name]), joint: start}
    for key in needed:
        shape = [lengths.get(axis) or (int(axis) if axis.isdigit() else 0) for axis in axes[key]]
        if key not in found and joint in axes[key] and all(shape):
            found[key] = torch.zeros(shape, dtype=torch.int64)
    return found


def of_a_joint_sequence(model, takes: Mapping, inputs: Mapping[str, Any], optional: Collection[str]) -> dict:
    """What a forward needs beside the numbers of a text's words: the positions of a sequence that has other tokens,
    too, a mask of it, and no images among the words. The sequence is as long as the text, unless an error has said how
    long it is: the ``optional`` arguments then hold ``position_ids[334]``."""
    import torch

    needed = [name for name, item in takes.items() if item.default is item.empty and not described_axes(model, name)]
    if not {"input_ids", "position_ids"} <= set(needed) or "input_ids" not in inputs:
        return {}
    rows, length = inputs["input_ids"].shape
    length = number_of(optional, "position_ids") or length
    found: dict[str, Any] = {"position_ids": torch.arange(length).repeat(rows, 1)}
    code = inspect.getsource(inspect.unwrap(type(model).forward))
    if "attention_mask" in needed and re.search(r"\battention_mask\.(dim\(\)|ndim) == 3", code):  # for each pair
        found["attention_mask"] = torch.ones(rows, length, length, dtype=torch.int64)
    places = [name for name in needed if typing.get_origin(takes[name].annotation) is dict]
    lists = [name for name in needed if typing.get_origin(takes[name].annotation) is list]
    return found | {name: {} for name in places} | {name: [] for name in lists if places}


def packed_parts(takes: Mapping, config: Mapping[str, Any], latent: Sequence[int]) -> dict:
    """The arguments of a forward that packs the tokens of a text and of other parts into one sequence: for each part,
    such as ``vision``, a list with its latent, the grid of its patches, their places in the sequence, those that are
    predicted, their time steps and its frames with noise. Nothing for another forward."""
    import torch

    needed = {name for name, item in takes.items() if item.default is inspect.Parameter.empty}
    parts = [name.removesuffix("_sequence_indexes") for name in takes if name.endswith("_sequence_indexes")]
    parts = [part for part in parts if {f"{part}_tokens", f"{part}_token_shapes"} <= needed]
    if not parts or "sequence_length" not in needed or "vocab_size" not in config:
        return {}
    step = next((size for key, size in config.items() if key.endswith("patch_size") and isinstance(size, int)), 1)
    grid = latent[2], latent[3] // step, latent[4] // step
    found, length = {"text_indexes": torch.arange(TOKENS), "und_len": TOKENS}, TOKENS
    found["input_ids"] = torch.randint(0, config["vocab_size"], (TOKENS,))
    for part in parts:
        places = torch.arange(length, length + math.prod(grid))
        length += math.prod(grid)
        found |= {
            f"{part}_tokens": [torch.randn(1, *latent[1:])], f"{part}_token_shapes": [grid],
            f"{part}_sequence_indexes": places, f"{part}_mse_loss_indexes": places,
            f"{part}_timesteps": torch.ones(math.prod(grid)), f"{part}_noisy_frame_indexes": [torch.arange(grid[0])],
        }  # fmt: skip
    found |= {"sequence_length": length, "position_ids": torch.zeros(3, length, dtype=torch.int64)}
    return {name: made for name, made in found.items() if name in needed}


def of_documented_shapes(model, takes: Mapping, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict:
    """Arguments without a default for which no other rule has made a tensor, with the shapes that the documentation
    gives: a batch, lengths of sequences and a width that is a field of the configuration, or nothing but a batch."""
    import torch

    found, batch = {}, next((len(made) for made in inputs.values() if isinstance(made, torch.Tensor)), 1)
    for name, item in takes.items():
        first, *rest = described_axes(model, name) or [""]
        if name in inputs or item.default is not item.empty or not first.startswith(("batch", "B")):
            continue
        lengths = [TOKENS if re.search(LENGTHS, axis) else 0 for axis in rest]
        sizes = [
            config[axis] if isinstance(config.get(axis), int) else of for axis, of in zip(rest, lengths, strict=True)
        ]
        if not rest or (all(sizes) and len(rest) > 1 and isinstance(config.get(rest[-1]), int)):
            found[name] = torch.randn(batch, *sizes) if rest else torch.ones(batch)
    return found
