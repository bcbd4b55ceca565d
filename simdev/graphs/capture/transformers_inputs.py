"""Inputs and labels of a model of transformers, made up from its configuration.

The main input says the modality: tokens, images, sounds, videos or time series. Sizes that no configuration gives are
those that are usual: 512 tokens, images of 224 x 224, a second of sound.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput
from simdev.graphs.capture.documented_inputs import (
    TOKENS,
    documented,
    documented_axes,
    documented_kind,
    documented_shape,
    documented_shapes,
    number_of,
    sized,
)
from simdev.graphs.capture.readers import JOINED, axes_read, first_reader, gets_tokens, part_that_reads, width_read

A_LOOP_OVER_TOKENS = re.compile(r"for \w+ in range\((seq_?len\w*|sequence_length|hidden_states\.shape\[1\])\)")
CHOICES = 2  # of a question
FRAMES = 8  # of a video
IMAGE = ["batch_size", "num_channels", "height", "width"]  # the axes of images, as documentation calls them
_RUN: set[tuple] = set()  # models and shapes with which their forward pass ran on fake tensors
NO_LABELS = "labels[0]"  # among the optional arguments: the loss is the mean of the predictions
WAVE = 16_000  # samples of a sound: a second
SPOKEN = 4  # frames of a spectrogram in which a token is spoken
GIVE = "give a function that returns the inputs and labels of the model by --inputs FILE.py:FUNCTION"


def text_config(config):
    """The configuration of a model's text part, or ``config`` itself if the model has several."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def made_up_inputs(model, batch: int, length: int | None) -> dict:
    """Inputs and labels for a training step of a model of transformers, by name, from its configuration."""
    inputs = hf_inputs(model, model.config, batch, length)
    return inputs | hf_labels(model, model.config, inputs)


def hf_inputs(model, config, batch: int | None, length: int | None, optional: Collection[str] = ()) -> dict:
    """The arguments that a model's forward needs, by its main input and its configuration, and its ``optional`` ones
    for which there is a rule. ``length[N]`` among these is a text of ``N`` tokens where no ``length`` is given."""
    import torch

    own = text_config(config)
    length = length or number_of(optional, "length")
    takes = inspect.signature(model.forward).parameters
    usual = 512 if length or not _by_token(model, config) else 16
    most = getattr(own, "max_position_embeddings", None) or usual  # -1: any number
    own_most = (getattr(config, name, usual) for name in ("max_text_len", "max_text_positions"))
    tokens = length or min(most if most > 0 else usual, usual, _positions(model), *own_most)
    if not length and getattr(own, "axial_pos_embds", False):  # training takes as many tokens as have a position
        tokens = math.prod(own.axial_pos_shape)
    count = batch or (8 if model.main_input_name == "pixel_values" else 4)
    rows = _places_of_patches(model, takes) or {"spatial_shapes", "target_sizes"} & takes.keys()
    towers = rows and "pixel_values" in takes and "input_ids" not in takes and hasattr(config, "patch_size")
    if _grid_of(takes) or towers:
        return _patches(model, config, takes, count)
    if model.main_input_name == "past_values":
        return _series(config, takes, batch or 32)
    main = model.main_input_name if isinstance(model.main_input_name, str) else ""
    named = {name for name, item in takes.items() if item.default is item.empty} | {main, *optional}
    # A mask alone says that there is something; inputs of any kind are images if these have a name of their own.
    masked = {re.sub(r"(_attention)?_mask$", "_embeds", name) for name in named if name.endswith("_mask")}
    named |= takes.keys() & (masked | ({"pixel_values"} if main == "inputs" else set()))
    inputs = {}
    marked = any(hasattr(part, "image_token_id") for part in parts_of(config)) and model.main_input_name == "input_ids"
    if "pixel_values" in named or ("pixel_values" in takes and "input_ids" in takes and not marked):
        inputs["pixel_values"] = torch.randn(
            count, *_images_of_sample(model, config, takes), *_image_shape(model, config)
        )
        if "spatial_shapes" in takes:
            inputs |= _rows_of_patches(model, getattr(config, "vision_config", config), takes, count)
    several = {"input_values", "pixel_values_videos"} <= takes.keys() and not marked  # sounds, and pictures to them
    named |= {"input_values", "pixel_values_videos"} if several else set()
    if "pixel_values_videos" in named:
        seen = (getattr(part, name, None) for part in parts_of(config) for name in ("num_frames", "frames_per_clip"))
        videos = count if several else batch or 1
        inputs["pixel_values_videos"] = torch.randn(
            videos, next(filter(None, seen), FRAMES), *_image_shape(model, config)
        )
    if "flattened_patches" in named:  # a row for each patch, after its place
        inputs["flattened_patches"] = torch.ones(count, 256, _entrance(model) + 2)
    sounds = _sounds(model, config, named, count)
    inputs |= sounds[0]
    text = getattr(config, "text_config", None)
    most = getattr(text, "max_position_embeddings", tokens) or tokens
    tokens = min(tokens, most) if most > 0 else tokens
    if "input_ids" in takes and ("input_ids" in named or "pixel_values" in inputs or main == "inputs"):
        inputs["input_ids"] = _text(model, config, count, tokens)
    mark = getattr(config, "image_token_index", getattr(config, "video_token_index", None))
    if "pixel_values" in inputs and "input_ids" in inputs and mark is not None:
        inputs["input_ids"][:, : getattr(config, "num_query_tokens", 1)] = mark
    if "qformer_input_ids" in takes:
        inputs["qformer_input_ids"] = torch.randint(3, config.qformer_config.vocab_size, (count, 32))
    inputs |= _text_of_decoder(model, config, takes, count, tokens)
    if "bbox" in takes:
        inputs["bbox"] = torch.zeros(count, tokens, 4, dtype=torch.int64)
    if "bool_masked_pos" in takes:
        inputs |= _masked_patches(model, config, takes, count)
    inputs = _documented(model, config, count, inputs, named) | inputs
    if "inputs" in takes and takes["inputs"].default is inspect.Parameter.empty:  # of any kind, after what encodes them
        inputs["inputs"] = torch.randn(count, TOKENS, getattr(own, "d_model", None) or own.hidden_size)
    others = sounds[1:] + _images_in_samples(model, config, inputs) + _tokens_of_codebooks(model, config, inputs)
    others += _images_of_processor(config, inputs) + _images_of_others(config, inputs) + _halves_of_image(inputs)
    if others and not _runs_with(model, inputs):
        others += [] if batch else [{name: made[:1] for name, made in inputs.items()}]  # some take a single sample
        inputs |= next((other for other in others if _runs_with(model, inputs | other)), {})
    return inputs


def _masked_patches(model, config, takes, count: int) -> dict:
    """Which patches of an image or a video are masked, if a model predicts these: half of them if it cannot do without,
    all if its labels are of patches, as their documentation says by the same name for their number; none for a model
    that compares masked images."""
    import torch

    if takes["bool_masked_pos"].default is inspect.Parameter.empty:  # half of what it embeds, to be predicted
        known = (getattr(module, "num_patches", None) for module in model.modules())
        patches = next((number for number in known if isinstance(number, int)), 0)
        return {"bool_masked_pos": torch.arange(patches).repeat(count, 1) % 2 == 1} if patches else {}
    labelled = [axes for name in takes if name.endswith("_labels") and (axes := documented_axes(model, name))]
    predicts = documented_axes(model, "bool_masked_pos") in labelled
    if not predicts and "Masked" not in type(model).__name__:
        return {}
    image = config if hasattr(config, "patch_size") else getattr(config, "image_config", _vision_config(config))
    side = image.image_size // image.patch_size
    return {"bool_masked_pos": torch.full((count, side * side), predicts)}


def _documented(model, config, count: int, inputs: dict, named: set[str]) -> dict:
    """The ``named`` arguments that are not among the ``inputs``, by their documented shape or by what reads them."""
    import torch

    asked = named - {*inputs, "inputs"}  # which is another name for one of them
    asked -= {"inputs_embeds"} if "input_ids" in inputs else set()
    lengths = {"batch": count, "num_images": 1, "num_questions": 1}
    lengths |= {"seq": inputs["input_ids"].shape[-1]} if "input_ids" in inputs else {}
    found = documented(model, config.to_dict(), lengths, {}, asked)
    for name in found:
        width = getattr(config, f"{name.removesuffix('_hidden_states')}_hidden_size", None)
        # encoder_hidden_states have the encoder_hidden_size of another model.
        if isinstance(width, int) and name.endswith("_hidden_states"):
            found[name] = torch.randn(*found[name].shape[:-1], width)
        if name.endswith("embeds_position_mask"):  # of the tokens that stand for an image
            found[name][:, getattr(config, "latent_query_num", None) :] = 0
    found |= _like_others(model, asked, inputs)
    found |= _masks(model, asked - found.keys(), lengths)
    return found | _features(model, text_config(config), asked - found.keys(), count)


def _like_others(model, names: Collection[str], inputs: dict) -> dict:
    """What a model takes under these ``names`` in the shape of its main input: more images, which have the axes of
    images in its documentation, as prompts and masks of a segmentation do; and the mask of a wave without padding,
    whose documented shape is often that of other sounds."""
    import torch

    images, waves = inputs.get("pixel_values"), inputs.get("input_values")
    alike = [name for name in sorted(names) if documented_axes(model, name) == IMAGE]
    found = {name: torch.randn(images.shape) for name in alike if images is not None and images.dim() == len(IMAGE)}
    if "padding_mask" in names and waves is not None and waves.dim() == 2:
        found["padding_mask"] = torch.ones(waves.shape, dtype=torch.int64)
    return found


def _masks(model, names: Collection[str], lengths: dict) -> dict:
    """The masks that a model takes under these ``names``, of which nothing is masked: of the axes that a comment in its
    code gives to them (``# name: [batch_size, num_images]``), or that its code takes apart."""
    import torch

    code, found = inspect.getsource(sys.modules[type(model).__module__]), {}
    for name in (name for name in names if name.endswith("mask")):
        comment = re.search(rf"# *{name}: *\[([\w, ]+)\]", code)
        axes = [axis.strip() for axis in comment[1].split(",")] if comment else axes_read(model, name)
        sizes = [next((size for word, size in lengths.items() if word in axis), None) for axis in axes]
        sizes = [size or (1 if "num_" in axis else None) for size, axis in zip(sizes, axes, strict=True)]
        if all(sizes) and len(sizes) > 1:
            found[name] = torch.ones(sizes, dtype=torch.int64)
    return found


def _features(model, config, names: Collection[str], count: int) -> dict:
    """The features of each token that a model takes under these ``names``: as wide as the layer that reads them first,
    or, for those that stand in place of embedded tokens, as the part of the model that reads them."""
    import torch

    def embedded(name: str) -> int | None:
        part, _ = part_that_reads(model, name) or (model, 0)
        read = getattr(getattr(part, "config", config), "hidden_size", None)
        return (read or getattr(config, "hidden_size", None)) if name.endswith("_embeds") else None

    widths = {name: width_read(model, name) or embedded(name) for name in sorted(names)}
    rows = {name: (count,) if gets_tokens(model, name) else (count, TOKENS) for name in widths}
    shapes = {
        name: (count, width, WAVE if width <= 2 else TOKENS)  # a sound, or what a codec makes of it
        if isinstance(first_reader(model, name), torch.nn.Conv1d)
        else (*rows[name], width)
        for name, width in widths.items()
        if width
    }
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


def _text(model, config, count: int, tokens: int):
    """The tokens of a text, with the marks that a task wants among them."""
    own, name = text_config(config), type(model).__name__
    ids = _in_documented_shape(model, "input_ids", _words(own, count, tokens), _sizes(config, count, tokens))
    if "SequenceClassification" in name:
        _end(ids, own)
    if "QuestionAnswering" in name or "MultipleChoice" in name:
        _separate(ids, own)
    return ids[:, None].repeat(1, CHOICES, 1) if "MultipleChoice" in name else ids  # a text for each choice


def _words(config, *shape: int):
    """Random tokens that are none of the first few, which have a meaning of their own, of the words of a configuration
    or of the first inside it that has words."""
    import torch

    words = next(filter(None, (getattr(part, "vocab_size", None) for part in parts_of(config))), 1000)
    return torch.randint(3, max(4, words - 1), shape)


def _text_of_decoder(model, config, takes, count: int, tokens: int) -> dict:
    """The tokens that a decoder reads beside an encoder, if it has its own."""
    import torch

    whole = any(word in type(model).__name__ for word in ("SequenceClassification", "QuestionAnswering"))
    if _is_transducer(config, takes):  # a blank before the text
        blank, text = torch.full((count, 1), config.blank_token_id), torch.randint(1, 20, (count, 20))
        return {"decoder_input_ids": torch.cat([blank, text], dim=1)}
    if "decoder_input_ids" not in takes or not config.is_encoder_decoder or whole:  # there, both sides read one text
        return {}
    ids = _words(text_config(config), count, min(tokens, 128))
    return {"decoder_input_ids": _in_documented_shape(model, "decoder_input_ids", ids, _sizes(config, *ids.shape))}


def _tokens_of_codebooks(model, config, inputs: dict) -> list[dict]:
    """The tokens of a decoder in the other shapes that the documentation of the model's forward gives to them, or those
    of a text with one of each codebook beside them."""
    ids, codebooks = inputs.get("decoder_input_ids"), getattr(config, "num_codebooks", None)
    if ids is None:
        words = inputs.get("input_ids")
        if words is None or words.dim() != 2 or not isinstance(codebooks, int):
            return []
        return [{"input_ids": words[..., None].repeat(1, 1, codebooks + 1)}]
    sizes = _sizes(config, len(next(iter(inputs.values()))), ids.shape[-1])
    shapes = [shape for shape in documented_shapes(model, "decoder_input_ids", sizes)[1:] if shape != ids.shape]
    return [{"decoder_input_ids": _repeated(ids, shape)} for shape in shapes]


def parts_of(config) -> list:
    """A configuration and those inside it."""
    return [config, *(part for part in vars(config).values() if hasattr(part, "model_type"))]


def _entrance(model) -> int:
    """How many numbers the first layer of a model reads for each place."""
    read = (getattr(module, name, None) for module in model.modules() for name in ("in_features", "in_channels"))
    return next((size for size in read if isinstance(size, int) and size > 1), 80)


def _sounds(model, config, named: Collection[str], count: int) -> list[dict]:
    """Spectrograms and waves, as far as they are among the ``named`` arguments, in each shape that the model may take,
    the likeliest first."""
    import torch

    spectrum = next((name for name in ("input_features", "audio_mel") if name in named), None)
    sounds = _spectrograms(model, config, spectrum, named, count) if spectrum else [{}]
    if "input_values" not in named:
        return sounds
    waves = dict.fromkeys((*_whole_waves(model, config), _sound_shape(config), (1, 16_000), (16_000,)))
    return [sound | {"input_values": torch.randn(count, *shape)} for sound in sounds for shape in waves]


def _whole_waves(model, config) -> list[tuple[int, ...]]:
    """The shape of a wave that is as long as the model's code asks for: a multiple of a field of its configuration."""
    asked = re.search(r"\binput_values\.shape\[-?1\] % self\.config\.(\w+)", inspect.getsource(type(model)))
    step = getattr(config, asked[1], None) if asked else None
    return [(-(-16_000 // step) * step,)] if isinstance(step, int) else []


def _spectrograms(model, config, spectrum: str, named: Collection[str], count: int) -> list[dict]:
    """Spectrograms under the name ``spectrum``, and their mask if it is among the ``named`` arguments, in each shape:
    models differ in whether bins or frames come first, and in the part of their configuration that knows how many bins
    there are, if any; bins that are stacked are as many as the first layer reads."""
    import torch

    frames_first = ("input_feat_per_channel", "feature_projection_input_dim")
    names = (*frames_first, "num_mel_bins", "feature_size", "input_dim", "input_size")
    known = [(name, getattr(part, name)) for part in parts_of(config) for name in names if hasattr(part, name)]
    bins = dict.fromkeys((*(size for _, size in known if isinstance(size, int)), 80, 128, _entrance(model)))
    frames = min(2 * getattr(config, "max_source_positions", 500), 3000)
    hop = getattr(config, "hop_length", None)
    if "input_values" in named and isinstance(hop, int):  # of the same sound as a wave
        frames = WAVE // hop
    shapes: list[tuple[int, ...]] = [shape for size in bins for shape in ((size, frames), (frames, size))]
    if known and known[0][0] in frames_first:
        shapes[:2] = shapes[1::-1]
    shapes += [(1, *shape) for shape in shapes[1::2]]  # as an image of one channel
    masks = {"attention_mask", f"{spectrum}_mask"} & set(named)
    mask = {name: torch.ones(count, frames, dtype=torch.int64) for name in masks}
    if "audio_mel_mask" in mask:  # true where a sound is padded, which is nowhere
        mask["audio_mel_mask"] = torch.zeros(count, frames, dtype=torch.bool)
    return [{spectrum: torch.randn(count, *shape), **mask} for shape in shapes]


def _runs_with(model, inputs: dict) -> bool:
    """Whether the forward pass of a model runs on ``inputs``, as far as fake tensors lead it: where it asks for values,
    it has taken their shapes apart. What has run on fake tensors is not run for real."""
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

    shapes = tuple((name, tuple(made.shape)) for name, made in inputs.items() if isinstance(made, torch.Tensor))
    asked = type(model).__name__, str(getattr(model, "config", None)), shapes
    if asked in _RUN:
        return True
    try:
        with torch.no_grad():
            model(**inputs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        pass
    except Exception:  # the step will tell
        return False
    if all(isinstance(made, FakeTensor) for made in inputs.values() if isinstance(made, torch.Tensor)):
        _RUN.add(asked)
    return True


def _by_token(model, config) -> bool:
    """Whether a model computes token by token, as state-space models do without their kernels: each token adds ops.
    Code that has such a loop may have another way beside it, so the model runs twice."""
    names = {type(module).__module__ for module in model.modules()}
    own = [sys.modules[name] for name in names if name.startswith("transformers.")]
    if not any(A_LOOP_OVER_TOKENS.search(inspect.getsource(module)) for module in own):
        return False
    few, more = (ops_of(model, hf_inputs(model, config, 1, length)) for length in (8, 24))
    return more - few >= 24 - 8


def ops_of(model, inputs: dict) -> int:
    """How many ops the forward pass of a model has; 0 if it fails."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops += 1
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Count() as counted:
        try:
            model(**inputs)
        except Exception:  # the step will tell
            return 0
    return counted.ops


def _end(tokens, config) -> None:
    """End every text, and no text within: some classifiers read the features of the end."""
    end = getattr(config, "eos_token_id", None)
    for token in end if isinstance(end, list) else [end] * (end is not None):
        tokens[tokens == token] = 3 if token != 3 else 4
        tokens[:, -1] = token


def _separate(tokens, config) -> None:
    """Put the three marks between a question, a text and the end that RoBERTa's tokens have, and no others: some models
    look for the question's end."""
    mark = getattr(config, "sep_token_id", None)
    if mark is None or tokens.shape[-1] < 8:
        return
    tokens[tokens == mark] = 3 if mark != 3 else 4
    half = tokens.shape[-1] // 2
    tokens[:, [half, half + 1, -1]] = mark


def _positions(model) -> int:
    """How many tokens have a learned position. RoBERTa and its like count positions from the padding's index on."""
    tables = [
        (module.weight.shape[0], module.padding_idx)
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return min((rows - padding - 1 for rows, padding in tables), default=1 << 20)


def _patches(model, config, takes, count: int) -> dict:
    """Images as a vision tower takes them that runs on patches: all in one list, with the grid of each image, a row of
    patches for each image, or one row of all."""
    import torch

    grid = _grid_of(takes)
    if not grid:
        packed = "target_sizes" in takes
        return _packed_patches(config, count) if packed else _rows_of_patches(model, config, takes, count)
    side = 16
    channels: Any = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    width = channels * (getattr(config, "temporal_patch_size", None) or 1) * config.patch_size**2
    name = "pixel_values" if "pixel_values" in takes else "hidden_states"
    reader = first_reader(model, name)
    if isinstance(reader, torch.nn.Linear):
        width = reader.in_features
    grids, rows = torch.tensor([[1, side, side]] * count), count * side * side
    patches = documented_shape(model, name, config.to_dict() | {"num_image_tokens": rows})
    if isinstance(reader, torch.nn.Conv2d):  # of which it makes one number for each channel
        patches = (rows, reader.in_channels, *reader.kernel_size)
    merged = {"merge_sizes": torch.ones(count, dtype=torch.int64)} if "merge_sizes" in takes else {}  # of images
    return {name: torch.randn(*(patches if patches and len(patches) > 2 else (rows, width))), grid: grids, **merged}


def _grid_of(takes) -> str:
    """The name of the argument with the grid of each image, which a vision tower needs; nothing without one."""
    needed = [name for name, item in takes.items() if item.default is item.empty]
    return "grid_thw" if "grid_thw" in takes else "image_grid_thw" if "image_grid_thw" in needed else ""


def _places_of_patches(model, takes) -> str:
    """The name of the argument with the column and the row of each patch of an image, as its documentation shows
    (``(batch_size, max_patches, 2)``), which a vision tower needs; nothing without one."""
    needed = [name for name, item in takes.items() if item.default is item.empty and name.endswith("position_ids")]
    return next((name for name in needed if re.search("patches, 2$", ", ".join(documented_axes(model, name)))), "")


def _rows_of_patches(model, config, takes, count: int) -> dict:
    """Images of their own sizes as a vision tower takes them: the patches of each image in a row, how many the image
    has in each direction or the column and the row of each, and which of the row are patches. Patches that the tower
    pools are whole windows."""
    import torch

    window = getattr(config, "pooling_kernel_size", None) or 1
    side = math.isqrt(getattr(config, "num_patches", None) or 256) // window * window
    width = getattr(config, "num_channels", 3) * config.patch_size**2
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    others = {
        "spatial_shapes": torch.full((count, 2), side),
        "pixel_attention_mask": torch.ones(count, side * side, dtype=torch.int64),
        _places_of_patches(model, takes): places.repeat(count, 1, 1),
    }
    patches = {"pixel_values": torch.randn(count, side * side, width)}
    return patches | {name: tensor for name, tensor in others.items() if name in takes}


def _packed_patches(config, count: int) -> dict:
    """Images as a vision tower takes them that packs them (NaViT): the patches of all images side by side as one image,
    and how many each image has in each direction."""
    import torch

    side, patch = 16, config.patch_size
    pixels = torch.randn(1, getattr(config, "num_channels", 3), patch, count * side * side * patch)
    return {"pixel_values": pixels, "target_sizes": torch.full((count, 2), side, dtype=torch.int32)}


def _series(config, takes, count: int) -> dict:
    """Observed values of time series with the features of each point in time, and what is predicted."""
    import torch

    if getattr(config, "lags_sequence", None) is None:
        channels = getattr(config, "num_input_channels", None)
        series = torch.randn(count, config.context_length, *([channels] if channels else []))
        others = {"past_values_padding": torch.zeros_like(series), "freq": torch.zeros(count, 1, dtype=torch.int64)}
        return {"past_values": series} | {name: tensor for name, tensor in others.items() if name in takes}
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    inputs = {
        "past_values": torch.randn(count, past),
        "past_time_features": torch.randn(count, past, config.num_time_features),
        "past_observed_mask": torch.ones(count, past),
        "future_values": torch.randn(count, future),
        "future_time_features": torch.randn(count, future, config.num_time_features),
    }
    return {name: tensor for name, tensor in inputs.items() if name in takes}


def _images_of_sample(model, config, takes) -> tuple[int, ...]:
    """How many images a sample of ``pixel_values`` has: two where a model matches their points or its code asks for a
    pair, the frames of a video, and one where its code joins the samples with the images of each; nothing for a single
    image without an axis for its number."""
    asked = re.search(r"pixel_values\.(size\(1\)|shape\[1\]) != 2\b", inspect.getsource(type(model)))
    if asked or "KeypointMatching" in type(model).__name__:
        return (2,)
    return _frames(config, takes) or ((1,) if axes_read(model, "pixel_values") == JOINED else ())


def _images_in_samples(model, config, inputs: dict) -> list[dict]:
    """``pixel_values`` with axes for the images of a sample and for the tiles of an image, if the code that takes their
    shape apart names such axes: a sample has one image, and as many tiles as a field of the configuration allows. One
    image in place of several."""
    import torch

    images = inputs.get("pixel_values")
    if images is not None and images.dim() == 5:  # the configuration of a kind of model that takes videos, too
        return [{"pixel_values": images[:, 0]}]
    if images is None or images.dim() != 4:
        return []
    axes = [axis for axis in axes_read(model, "pixel_values")[1:] if not re.search("channel|height|width|^_", axis)]
    fields = [(axis, f"max_{axis}", f"num_{axis}") for axis in axes]
    known = [next(filter(None, (getattr(config, field, None) for field in several)), None) for several in fields]
    sizes = [size or (FRAMES if "frames" in axis else 1) for axis, size in zip(axes, known, strict=True)]
    whole = all(isinstance(size, int) for size in sizes)
    return [{"pixel_values": torch.randn(len(images), *sizes, *images.shape[1:])}] if sizes and whole else []


def _frames(config, takes) -> tuple[int, ...]:
    """How many images a sample of ``pixel_values`` has, where a sample is a video. The vision tower of a larger model
    takes them as images."""
    videos = getattr(getattr(config, "vision_config", config), "num_frames", None)
    return (videos,) if videos and "pixel_values_videos" not in takes and not config.base_config_key else ()


def _image_shape(model, config) -> tuple[int, int, int]:
    given = (getattr(module, "pretrained_cfg", None) for module in model.modules())  # of a model of timm inside
    sizes = [found["input_size"] for found in given if isinstance(found, dict) and "input_size" in found]
    if sizes:
        return sizes[0]
    vision = _vision_config(config)
    size = _size_given(config, vision) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    for part in parts_of(config):  # of which each direction has as many whole windows of patches
        windows, patch = getattr(part, "num_windows", None), getattr(part, "patch_size", None)
        if isinstance(windows, int) and isinstance(patch, int) and not hasattr(part, "num_windows_side"):
            height, width = (extent // (windows * patch) * windows * patch or extent for extent in (height, width))
    return getattr(vision, "num_channels", None) or 3, height, width


def _vision_config(config):
    """The part of a configuration that is about images, or the configuration itself."""
    return next((getattr(config, key) for key in ("vision_config", "encoder") if hasattr(config, key)), config)


def _size_given(config, vision) -> Any:
    """The size of images that a configuration gives, or its part for them; None if it does not."""
    own = getattr(vision, "image_size", None) or getattr(vision, "max_img_size", None)
    if ratios := getattr(config, "scaled_images_ratios", None):  # the smallest copy of an image is one patch
        own = round(config.patch_size / min(ratios))
    return own or next(_image_sizes(vision), None)


def _images_of_processor(config, inputs: dict) -> list[dict]:
    """``pixel_values`` of the height and width that the package's image processor for this kind of model makes, if the
    configuration gives no size: a line of text is no square."""
    import torch

    images = inputs.get("pixel_values")
    if images is None or images.dim() != 4 or _size_given(config, _vision_config(config)):
        return []
    size = _size_of_processor(config.model_type)
    if size is None or size == tuple(images.shape[2:]):
        return []
    return [{"pixel_values": torch.randn(*images.shape[:2], *size)}]


def _images_of_others(config, inputs: dict) -> list[dict]:
    """``pixel_values`` of the size that a part of the configuration gives which is not about images, such as that of a
    prompt, if the backbone takes images of any size."""
    import torch

    images, size = inputs.get("pixel_values"), next(_image_sizes(config), None)
    if images is None or images.dim() != 4 or not size or _size_given(config, _vision_config(config)):
        return []
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return [{"pixel_values": torch.randn(*images.shape[:2], height, width)}]


def _halves_of_image(inputs: dict) -> list[dict]:
    """Images of half the height each, if there are several of one shape: a model may put a prompt above the image, and
    the size that its configuration gives is that of both."""
    images = inputs.get("pixel_values")
    if images is None:
        return []
    prompts = [name for name, made in inputs.items() if "prompt" in name and made.shape == images.shape]
    half = images.shape[-2] // 2
    return [{name: inputs[name][..., :half, :].clone() for name in ("pixel_values", *prompts)}] if prompts else []


@functools.cache
def _size_of_processor(model_type: str) -> tuple[int, int] | None:
    """The height and width of images that an image processor of transformers makes by default, as the code of its class
    says, which may need packages that are not installed."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    for name in dict(IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {}).values():
        path = transformers._class_to_module.get(name, "").replace(".", "/")
        file = Path(transformers.__file__).parent / f"{path}.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.is_file() else ():
            if not isinstance(node, ast.ClassDef) or node.name != name:
                continue
            given = [
                item for item in node.body if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "size"
            ]
            try:
                size = ast.literal_eval(given[0].value)
                return size["height"], size["width"]
            except (IndexError, KeyError, TypeError, ValueError):  # another one's, or a shortest edge
                continue
    return None


def _image_sizes(config) -> Iterator[Any]:
    """The sizes of images that the configurations inside one give, the outer ones first."""
    inside = parts_of(config)[1:]
    yield from filter(None, (getattr(part, "image_size", None) for part in inside))
    for part in inside:
        yield from _image_sizes(part)


def _sound_shape(config) -> tuple[int, ...]:
    if hasattr(config, "num_mel_bins") and not hasattr(config, "conv_kernel"):  # spectrograms, which no layer makes
        return getattr(config, "max_length", 1024), config.num_mel_bins
    audio = getattr(config, "audio_config", config)
    codec = getattr(audio, "dac_config", audio)  # codecs take channels; other models add the only one themselves
    if hasattr(codec, "downsampling_ratios") or hasattr(codec, "audio_channels"):
        return getattr(codec, "audio_channels", 1), 16_000
    return (16_000,)


def hf_labels(model, config, inputs: dict, optional: Collection[str] = ()) -> dict:
    """The labels that a model of transformers takes, by its name and its inputs. ``labels[N]`` among the ``optional``
    arguments are labels for ``N`` predictions, as many for each sample."""
    import torch

    takes, name = inspect.signature(model.forward).parameters, type(model).__name__
    if NO_LABELS in optional:
        return {}
    if "labels" in takes and (spoken := _labels_of_frames(model, config, inputs)):
        return spoken
    if counted := number_of(optional, "labels"):
        inputs.pop("decoder_input_ids", None)  # as before they were counted
        rows = len(next(iter(inputs.values())))
        shape = (rows,) if counted == rows else (rows, counted // rows)
        return {"labels": torch.zeros(shape, dtype=torch.int64)}
    if not inputs:
        raise InvalidInput(f"simdev makes up none of the inputs of {name}.forward; {GIVE}", source=name)
    rows = len(next(iter(inputs.values())))
    if "start_positions" in takes:
        return {"start_positions": torch.zeros(rows, dtype=torch.int64), "end_positions": torch.ones(rows).long()}
    if "labels" not in takes:
        asked = {"return_loss": True} if "return_loss" in takes and len(inputs) > 1 else {}
        return asked | _labels_of_parts(model, config, inputs)
    if "MultipleChoice" in name or ("Classification" in name and "Token" not in name and "Frame" not in name):
        return {"labels": torch.zeros(rows, dtype=torch.int64)}
    if documented_axes(model, "labels") == ["batch_size", "num_labels"]:  # a share of each answer
        return {"labels": torch.zeros(rows, config.num_labels)}
    if _is_transducer(config, takes):
        return {"labels": inputs["decoder_input_ids"][:, 1:].clone()}
    if "NextSentence" in name or "Segmentation" in name or "Detection" in name:
        return {}
    if documented_axes(model, "labels")[-1:] == ["num_mel_bins"]:  # a spectrogram
        return {"labels": torch.randn(rows, TOKENS // 2 * 2, config.num_mel_bins)}
    return _labels_of_tokens(model, config, inputs, rows, optional)


def _labels_of_frames(model, config, inputs: dict) -> dict:
    """The features of each frame of a sound that a model of a text predicts, as the documentation of its labels says
    (``batch_size, num_frames, latent_dim``): the second half of the text stands for frames, behind the mark of their
    start."""
    import torch

    marks = [getattr(config, f"audio_{word}_token_id", None) for word in ("bos", "latent")]
    axes, ids = documented_axes(model, "labels"), inputs.get("input_ids")
    width = getattr(config, axes[-1], None) if len(axes) == 3 else None
    if ids is None or not isinstance(width, int) or axes[1] != "num_frames" or None in marks:
        return {}
    frames = ids.shape[1] // 2
    for mark in marks:  # which are no words of the text before
        ids[ids == mark] = 3 if mark != 3 else 4
    ids[:, -frames - 1], ids[:, -frames:] = marks
    return {"labels": torch.randn(len(ids), frames, width)}


def _labels_of_tokens(model, config, inputs: dict, rows: int, optional: Collection[str]) -> dict:
    """The labels of a model for each token that it reads or writes."""
    import torch

    name = type(model).__name__
    if "decoder_input_ids" in inputs:
        ids = inputs["decoder_input_ids"]
        if "Token" in name:
            return {"labels": torch.zeros_like(ids)}
        if "decoder_input_ids" not in optional:  # else the decoder does not make them of its labels
            del inputs["decoder_input_ids"]
        ids = ids[:rows]  # a decoder may read a row of each codebook
        return {"labels": _in_documented_shape(model, "labels", ids, _sizes(config, rows, ids.shape[1]))}
    if "CTC" in name:
        return {"labels": torch.randint(1, 20, (rows, 20))}
    if "input_ids" in inputs:
        ids = inputs["input_ids"]
        if "Token" in name:
            return {"labels": torch.zeros_like(ids)}
        rows_of_one = documented_shape(model, "input_ids", _sizes(config, 1, 1)) or (1,)
        if ids.dim() > 2 and ids.dim() not in {len(documented_axes(model, name)) for name in ("input_ids", "labels")}:
            ids = ids[..., 0]  # of the text, beside which the codebooks are
        sizes = _sizes(config, len(ids) // rows_of_one[0], ids.shape[1])
        return {"labels": _in_documented_shape(model, "labels", ids, sizes).clone()}
    return {}


def _labels_of_parts(model, config, inputs: dict) -> dict:
    """The labels of a model that takes several, each for a part of its loss (``mlm_labels``, ``duration_labels``), in
    their documented shapes, the axes of which its inputs have, too. A documented shape may be longer by one than the
    text, whose end is among its tokens, or have a last axis of a single number that the model does not take: the first
    of these shapes with which the forward pass runs; nothing without one. What is spoken lasts as long for each token.
    """
    import torch

    tokens = inputs["input_ids"].shape[-1] if "input_ids" in inputs else 0
    sizes = _sizes(config, len(next(iter(inputs.values()))), tokens) | {"max_spectrogram_length": SPOKEN * tokens}
    for name, made in inputs.items():
        axes = documented_axes(model, name)
        sizes |= dict(zip(axes, made.shape, strict=True)) if len(axes) == made.dim() else {}
    takes = inspect.signature(model.forward).parameters
    named = [name for name in takes if re.match("(?!input_).*_labels$", name) and name not in inputs]

    def made_up(name: str, without: str):
        axes = re.sub(without, "", ", ".join(documented_axes(model, name))).split(", ")
        shape, whole = sized(axes, sizes), "Long" in documented_kind(model, name)
        if shape is None:
            return None
        return torch.full(shape, SPOKEN * name.startswith("duration")) if whole else torch.randn(shape)

    for without in ("$", r" \+ 1\b", "(?<=^batch_size), 1$"):
        labels = {name: made for name in named if (made := made_up(name, without)) is not None}
        if labels and _runs_with(model, inputs | labels):
            return labels
    return {}


def _is_transducer(config, takes) -> bool:
    """Whether a model joins each frame of a sound with each token of its text, with a blank among the tokens."""
    return hasattr(config, "blank_token_id") and {"input_features", "decoder_input_ids", "labels"} <= takes.keys()


def _in_documented_shape(model, name: str, ids, sizes: dict):
    """``ids``, repeated to the shape that the documentation of the model's forward gives to an argument: sounds have
    tokens of several codebooks."""
    return _repeated(ids, documented_shape(model, name, sizes) or ids.shape)


def _repeated(ids, shape: tuple[int, ...]):
    """``ids``, repeated to a shape that holds a whole number of them; else as they are."""
    times, rest = divmod(math.prod(shape), ids.numel())
    return ids.reshape(-1).repeat(times).reshape(shape) if times and not rest else ids


def _sizes(config, rows: int, tokens: int) -> dict:
    """What the axes of documented shapes are called: fields of a configuration and of its parts, and lengths."""
    fields = {key: value for part in (*parts_of(config)[1:], config) for key, value in part.to_dict().items()}
    if "num_codebooks" not in fields and hasattr(getattr(config, "decoder_config", None), "num_channels"):
        fields["num_codebooks"] = config.decoder_config.num_channels
    return fields | {"batch_size": rows, "sequence_length": tokens, "target_sequence_length": tokens}
