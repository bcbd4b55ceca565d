"""Inputs of a model of diffusers, made up from its configuration by the rules of its family.

Families differ in what a sample is: a latent image, a latent video (channels or frames first), a waveform, or a
sequence of patches with their positions. Sizes that no configuration gives are small: latents of 32 x 32, images of
128 x 128 for an autoencoder, two latent frames, 77 tokens of text.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection

from simdev.graphs.capture.documented_inputs import TOKENS, documented, documented_axes
from simdev.graphs.capture.joint_inputs import (
    alias,
    described_axes,
    joint_inputs,
    of_a_joint_sequence,
    of_documented_shapes,
    packed_parts,
    pixels,
)
from simdev.graphs.capture.readers import first_reader, joined_widths, part_that_reads, parts_called_with, width_read

SIDE, IMAGE_SIDE, FRAMES = 32, 128, 2
TEXT_WIDTHS = (  # fields for the width of a text's features: before their projection, then after it
    "caption_channels encoder_hid_dim text_embed_dim text_dim text_emb_dim text_in_dim in_text_dim text_hidden_dim "
    "cap_feat_dim context_in_dim context_dim llm_features_dim cross_attention_input_dim cross_attention_dim "
    "joint_attention_dim"
).split()

WHOLE_TEXT_WIDTHS = ("pooled_projection_dim", "in_text_dim2", "text_emb_dim")


def diffusion_inputs(model, batch: int, optional: Collection[str] = ()) -> dict:
    """Latents, time steps and conditions, by name, as far as the model's forward takes them, with those of its
    ``optional`` arguments for which there is a rule."""
    import torch

    config, takes = model.config, inspect.signature(model.forward).parameters
    if sounds := "sample" in takes and (config.get("audio_channels") or _channels_of_sounds(model)):
        of_one = len(described_axes(model, "sample")) == 2  # a wave without an axis of channels
        return {"sample": torch.randn(batch, *([] if of_one else [sounds]), 1 << 15)}
    if "1D" in type(model).__name__ and "sample" in takes:
        size = config.get("sample_size") or 1 << 14
        length = min(size, 1 << 14) if isinstance(size, int) else 1 << 14
        sound = torch.randn(batch, config.get("in_channels"), length)
        return {"sample": sound, "timestep": torch.ones(batch, dtype=torch.int64)}
    if "1D" in type(model).__name__ and config.get("condition_dim"):  # a condition for each sample of the latent
        return {
            "hidden_states": torch.randn(batch, config["in_channels"], 1 << 10),
            "timestep": torch.ones(batch),
            "encoder_hidden_states": torch.randn(batch, 1 << 10, config["condition_dim"]),
        }
    if {"x", "t", "cap_feats"} <= takes.keys():  # lists of images and texts of their own sizes
        images = [torch.randn(config["in_channels"], 1, SIDE, SIDE) for _ in range(batch)]
        texts = [torch.randn(TOKENS, config["cap_feat_dim"]) for _ in range(batch)]
        return {"x": images, "t": torch.ones(batch), "cap_feats": texts}
    if "proj_embedding" in takes:  # a prior of image embeddings
        width = config["embedding_dim"]
        return {
            "hidden_states": torch.randn(batch, width),
            "timestep": torch.ones(batch, dtype=torch.int64),
            "proj_embedding": torch.randn(batch, config.get("embedding_proj_dim") or width),
            "encoder_hidden_states": torch.randn(batch, config["num_embeddings"], width),
        }
    shape = _latent(model, config, takes, batch)
    if parts := packed_parts(takes, config, shape if len(shape) == 5 else (*shape[:2], FRAMES, *shape[2:])):
        return parts
    sample = next((name for name in ("sample", "x", "hidden_states") if name in takes), None)
    inputs = {sample: torch.randn(_as_patches(model, sample, config, takes, shape))} if sample else {}
    if "1D" in type(model).__name__ and sample:  # the features of each place of a wave, beside those of a condition
        widths = joined_widths(model, sample)
        inputs |= {name: torch.randn(batch, 1 << 10, width) for name, width in widths.items()}
    inputs |= _conditions(model, config, takes, shape)
    inputs |= like_the_sample(model, inputs[sample], config, "controlnet_cond") if sample else {}
    if any("Motion" in str(word) for word in config.get("down_block_types") or ()):  # each frame has its text
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].repeat_interleave(shape[2], 0)
    inputs |= _named_or_read(model, config, takes, shape, inputs.keys(), optional)
    for name in takes:  # of a sound beside a video
        word = name.removesuffix("_num_frames")
        if word != name and f"{word}_hidden_states" in inputs:
            inputs[name] = inputs[f"{word}_hidden_states"].shape[1]
    inputs |= of_a_joint_sequence(model, takes, inputs, optional)
    lengths = {"batch": batch, "frames": FRAMES, "height": shape[-2], "width": shape[-1], "image": SIDE * SIDE}
    inputs |= documented(model, dict(config), lengths, inputs)
    inputs |= joint_inputs(model, inputs, sample, shape) if sample else {}
    return inputs | of_documented_shapes(model, takes, config, inputs)


def _named_or_read(
    model, config, takes, shape: tuple[int, ...], there: Collection[str], optional: Collection[str]
) -> dict:
    """Arguments that are needed and not ``there`` yet, with those of the ``optional`` ones for which there is a rule:
    by their names, or by the layer that reads them."""
    usual, inputs = {"image_embeddings", "timesteps", *optional}, {}
    if "indices_latents" in takes and takes["indices_latents"].default is inspect.Parameter.empty:
        # a video that is made piece by piece: the pieces before, and their places
        before = {name.removeprefix("indices_") for name in takes if name.startswith("indices_")} & takes.keys()
        usual |= {f"{prefix}{name}" for name in before for prefix in ("", "indices_")}
    for name, item in takes.items():
        if name not in there and (item.default is item.empty or name in usual):
            made = by_name(alias(model, re.sub(r"_\d$", "", name)), config, shape)  # of a second text
            made = by_reader(model, name, shape) if made is None else made
            made = pixels(model, name, shape) if made is None else made
            if made is not None:
                inputs[name] = made
    return inputs


def _channels_of_sounds(model) -> int | None:
    """How many channels a sound has that a model encodes, by its first layer, unless its encoder says it: features of
    the sound may reach this layer. None for a model that does not, or whose first layer is not of one dimension."""
    import torch

    convolutions = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    first = next((module for module in model.modules() if isinstance(module, convolutions)), None)
    if not hasattr(model, "encode") or not isinstance(first, torch.nn.Conv1d):
        return None
    said = vars(model.encoder).get("input_channels") if hasattr(model, "encoder") else None
    return said if isinstance(said, int) else first.in_channels


def _latent(model, config, takes, batch: int) -> tuple[int, ...]:
    """The shape of a latent image or video."""
    import torch

    encodes = hasattr(model, "encode")
    size = config.get("sample_size") or (IMAGE_SIDE if encodes else SIDE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    height, width = config.get("sample_height") or height, config.get("sample_width") or width
    entrance = next((part for name, part in model.named_children() if name.endswith("conv_in")), None)
    channels = config.get("in_channels") or config.get("latent_channel") or getattr(entrance, "in_channels", 3)
    if config.get("in_visual_dim"):  # channels last, with those of a condition if the first layer takes them
        entrance, _ = part_that_reads(model, "hidden_states") or (model, 0)
        first = next((module.in_features for module in entrance.modules() if isinstance(module, torch.nn.Linear)), 0)
        wide = first // math.prod(config.get("patch_size") or (1,))
        return batch, FRAMES, height, width, max(wide, config["in_visual_dim"])
    blocks = [word for word in config.get("down_block_types") or () if isinstance(word, str)]
    solid = any(isinstance(module, torch.nn.Conv3d) for module in model.modules())
    if not solid and any("Conv3d" in type(module).__name__ for module in model.modules()):  # of single frames
        return batch, channels, 1, height, width
    video = solid or any(re.search("3D|Temporal|Motion", word) for word in (type(model).__name__, *blocks))
    if "num_frames" in takes and "height" not in takes:  # frames are rows of the batch
        return batch, channels, height, width
    if config.get("sample_frames") and config.get("temporal_compression_ratio") and not solid:
        frames = (config["sample_frames"] - 1) // config["temporal_compression_ratio"] + 1
        return batch, frames, channels, height, width
    if "added_time_ids" in takes:
        return batch, FRAMES, channels, height, width
    if not video:
        return batch, channels, height, width
    # autoencoders of videos compress all frames but the first by 4 or 8; those that work on clips join two of them
    whole = 2 * config["clip_length"] if config.get("clip_length") else 9
    pieces = sum(config.get("chunk_partition") or ())
    clip = config.get("sample_frames") or config.get("video_length") or pieces or FRAMES
    if encodes and only_tiled(model):  # one tile, of frames, rows and columns
        return batch, channels, *model.kernel
    frames = whole if solid and encodes else clip
    if _frames_first(model):
        return batch, frames, channels, height, width
    return batch, channels, frames, height, width


def only_tiled(model) -> bool:
    """Whether a model encodes tiles alone, of a size that it says: its code says that the rest is not written."""
    encode = getattr(type(model), "_encode", None)
    code = inspect.getsource(encode) if inspect.isfunction(encode) else ""
    unwritten = re.search(r"raise NotImplementedError\([^)]*without tiling", code)
    return bool(unwritten) and hasattr(model, "enable_tiling") and isinstance(getattr(model, "kernel", None), tuple)


def _frames_first(model) -> bool:
    """Whether the documentation of the model's forward gives the shape of a video with frames before channels."""
    for shape in re.findall(r"shape `{1,2}\(([^)]*)\)`", model.forward.__doc__ or ""):
        axes = [{"F": "frames", "C": "channels"}.get(axis, axis).removeprefix("num_") for axis in shape.split(", ")]
        if "frames" in axes and "channels" in axes:
            return axes.index("frames") < axes.index("channels")
    return False


def _grid(config) -> list[int]:
    """How many patches a latent image has in each direction: frames, rows and columns."""
    return [extent // step for extent, step in zip((1, SIDE, SIDE), config["patch_size"], strict=True)]


def _as_patches(model, name: str, config, takes, latent: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the sample: patches in a row where the model takes them so, else the latent's."""
    import torch

    if "shape_list" in takes:
        return latent[0], math.prod(_grid(config)), latent[1], *config["patch_size"]
    first = next(
        (getattr(model, name) for name in ("x_embedder", "img_in", "proj_in") if hasattr(model, name)),
        None,
    )
    reader = first_reader(model, name)
    if len(documented_axes(model, name)) == 3 and len(latent) > 3 and isinstance(reader, torch.nn.Linear):
        return latent[0], SIDE * SIDE, reader.in_features
    if isinstance(reader, torch.nn.Conv1d):
        return latent[0], reader.in_channels, 1 << 10
    placed = {"img_ids", "img_shapes"} & takes.keys() or {"height", "width"} <= takes.keys()
    if placed and isinstance(first, torch.nn.Linear):
        frames = FRAMES if "num_frames" in takes else 1
        return latent[0], frames * SIDE * SIDE, first.in_features
    if not placed and len(described_axes(model, name)) == 3 and isinstance(reader, torch.nn.Linear):
        return latent[0], SIDE * SIDE, reader.in_features
    if "in_channels" not in config and "timestep" not in takes and isinstance(reader, torch.nn.Linear):  # no latent
        return latent[0], TOKENS, reader.in_features
    return latent


def _conditions(model, config, takes, latent: tuple[int, ...]) -> dict:
    """What says when, where and under which text the latents are."""
    import torch

    batch, inputs = latent[0], {}
    if "timestep" in takes:
        inputs["timestep"] = torch.ones(batch, dtype=torch.int64)
    if "r_timestep" in takes and _frames_first(model):  # flow maps: each frame has a noise level of its own
        inputs |= {name: torch.ones(latent[:2], dtype=torch.int64) for name in ("timestep", "r_timestep")}
    inputs |= _texts(model, config, takes, batch)
    if "added_cond_kwargs" in takes and getattr(model, "use_additional_conditions", False):
        sides, ratio = torch.full((batch, 2), float(8 * latent[-2])), torch.ones(batch, 1)
        inputs["added_cond_kwargs"] = {"resolution": sides, "aspect_ratio": ratio}
    if "padding_mask" in takes and config.get("concat_padding_mask"):  # a channel more for all samples
        inputs["padding_mask"] = torch.zeros(1, 1, *latent[-2:])
    if "class_labels" in takes and (config.get("num_embeds_ada_norm") or config.get("num_class_embeds")):
        inputs["class_labels"] = torch.zeros(batch, dtype=torch.int64)
    if "guidance" in takes and config.get("guidance_embeds"):
        inputs["guidance"] = torch.ones(batch)
    axes = len(config.get("axes_dims_rope") or config.get("axes_dim") or (0, 0, 0))
    for name, count in (("img_ids", SIDE * SIDE), ("txt_ids", TOKENS)):
        if name in takes:
            inputs[name] = torch.zeros(count, axes)
    if "img_shapes" in takes:
        inputs["img_shapes"] = [[(1, SIDE, SIDE)]] * batch
    if "shape_list" in takes:  # of the patches of an image
        inputs["shape_list"] = [[tuple(_grid(config))]] * batch
    # one of the values that a field of the configuration lists, or a field that a call may change
    plural = {name: config.get(f"{name}s") for name, item in takes.items() if item.default is item.empty}
    inputs |= {name: of[0] for name, of in plural.items() if isinstance(of, (list, tuple)) and isinstance(of[0], int)}
    inputs |= {name: config[name] for name, item in takes.items() if item.default is item.empty and name in config}
    if {"num_frames", "height", "width"} <= takes.keys():
        inputs |= {"num_frames": FRAMES, "height": SIDE, "width": SIDE}
    return inputs


def _text_width(config) -> int | None:
    """How wide the features of a text are."""
    width = next((config.get(key) for key in TEXT_WIDTHS if config.get(key)), None)
    return width[0] if isinstance(width, (list, tuple)) else width


def _texts(model, config, takes, batch: int) -> dict:
    """The features of a text: of each token, of each token before each block, and of all tokens together."""
    import torch

    inputs = {}
    if "encoder_hidden_states" in takes:
        width = _text_width(config) or width_read(model, "encoder_hidden_states")
        if width:
            tokens = config.get("max_text_seq_length") or TOKENS
            inputs["encoder_hidden_states"] = torch.randn(batch, tokens, width)
    if "text_encoder_layers" in takes and config.get("text_encoder_dim"):  # a text for each block
        blocks = sum(len(part) for name, part in model.named_children() if name.endswith("transformer_blocks"))
        texts = [torch.randn(batch, TOKENS, config["text_encoder_dim"]) for _ in range(blocks)]
        inputs["text_encoder_layers"] = texts
    width = next((config.get(key) for key in WHOLE_TEXT_WIDTHS if config.get(key)), None)
    for name in ("pooled_projections", "pooled_embeds"):
        if name in takes and width:
            inputs[name] = torch.randn(batch, width)
    several = [name for name in takes if name.startswith("encoder_hidden_states_")]
    widths = config.get("caption_channels")
    if several and isinstance(widths, (list, tuple)) and len(several) == len(widths):  # of a text encoder each
        code = inspect.getsource(inspect.unwrap(type(model).forward))
        for name, width in zip(several, widths, strict=True):
            layers = re.search(rf"\b{name}\[(\w+)\] for \1 in self\.config\.(\w+)", code)
            texts = [torch.randn(batch, TOKENS, width) for _ in range(1 + max(config[layers[2]]) if layers else 1)]
            inputs[name] = texts if layers else texts[0]
    return inputs


def like_the_sample(model, sample, config, name: str) -> dict:
    """The condition ``name`` that is added to the sample after an embedding of its own: tokens or a latent as wide as
    this reads them. Nothing for one that is an image, or is read by no such layer."""
    import torch

    parts = parts_called_with(model, name) if name in inspect.signature(model.forward).parameters else []
    layers = [layer for part in parts[:1] for layer in part.modules()]
    first = next((layer for layer in layers if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d))), None)
    if isinstance(first, torch.nn.Linear) and sample.dim() == 3:
        return {name: torch.randn(*sample.shape[:2], first.in_features)}
    image = next((value for key, value in config.items() if key.endswith("conditioning_channels") and value), 3)
    if not isinstance(first, torch.nn.Conv2d) or sample.dim() != 4 or first.in_channels == image:
        return {}
    return {name: torch.randn(len(sample), first.in_channels, *sample.shape[2:])}


def by_reader(model, name: str, latent: tuple[int, ...]):
    """The tensor that the first layer which reads an argument takes: a latent for a convolution, else features of each
    token, or of all of them. None where the model's code does not show this layer."""
    import torch

    layer = first_reader(model, name)
    if isinstance(layer, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
        fits = len(layer.kernel_size) == len(latent) - 2
        return torch.randn(latent[0], layer.in_channels, *latent[2:]) if fits else None
    width = width_read(model, name)
    if width is None:
        return None
    whole = any(word in name for word in ("pooled", "global"))
    return torch.randn(latent[0], *([] if whole else [TOKENS]), width)


def by_name(name: str, config, latent: tuple[int, ...], tokens: int = TOKENS):
    """The tensor that an argument's name asks for, with the sizes of the configuration field that begins with the same
    word: ``source_hidden_states`` are as wide as ``source_dim``. None for a name that says too little."""
    import torch

    batch, word = latent[0], name.partition("_")[0]

    def size(*ends: str) -> int | None:
        keys = [key for key in config if key.startswith(f"{word}_") and key.endswith(ends)]
        return next((config[key] for key in keys if isinstance(config[key], int)), None)

    if name in ("fps", "r_timestep", "timestep_r", "timesteps"):
        return torch.ones(batch, dtype=torch.int64)
    if name == "timestep_ratio":
        return torch.ones(batch)
    if name == "added_time_ids":
        return torch.ones(batch, 3)
    if name in ("original_size", "target_size", "crop_coords"):
        return torch.zeros(batch, 2) if name == "crop_coords" else torch.full((batch, 2), 8.0 * latent[-1])
    if name == "clip_text_pooled" and config.get("clip_text_pooled_in_channels"):
        return torch.randn(batch, 1, config["clip_text_pooled_in_channels"])
    if "latents" in name.split("_") and not name.startswith("indices_"):
        return torch.randn(latent)
    if name.endswith("attention_mask"):
        return torch.ones(batch, tokens, dtype=torch.int64)
    if name.endswith("_ids") and (words := size("vocab_size") or (name == "input_ids" and config.get("vocab_size"))):
        return torch.randint(0, words, (batch, tokens))
    if name.endswith(("_token_id", "_token_drop")) and size("codebook_size"):  # for each patch of the latent
        patches = batch, math.prod(latent[2:]) // config["patch_size"] ** 2
        ids = torch.randint(0, size("codebook_size"), patches)
        return ids if name.endswith("id") else torch.zeros(patches, dtype=torch.bool)
    if name.endswith("_encoder_hidden_states") and size("in_channels") and _text_width(config):  # a text to a sound
        return torch.randn(batch, tokens, _text_width(config))
    if name.endswith(("hidden_states", "embeds")) and (width := size("in_channels") or size("dim", "hidden_size")):
        return torch.randn(batch, tokens, width)
    if name == "image_embeddings" and config.get("cross_attention_dim"):
        return torch.randn(batch, config["cross_attention_dim"])
    if name == "controlnet_cond":  # an image, of which a latent has an eighth of the side
        side = [8 * extent for extent in latent[2:]]
        channels = (value for key, value in config.items() if key.endswith("conditioning_channels") and value)
        return torch.randn(batch, next(channels, 3), *side)
    return _place(name, config, latent, tokens)


def _place(name: str, config, latent: tuple[int, ...], tokens: int):
    """Where the patches of a latent, its frames or the tokens of a text are, and how many; None for another name."""
    import torch

    if name == "visual_rope_pos":
        steps = config.get("patch_size") or (1, 2, 2)
        return [torch.arange(extent // step) for extent, step in zip(latent[1:4], steps, strict=True)]
    if name == "text_rope_pos":
        return torch.arange(tokens)
    if name.startswith("indices_"):  # of the frames
        return torch.arange(latent[-3])
    if re.search(r"(text|token|prompt)\w*_len(gth)?s$", name):  # of each text, all of whose tokens count
        return torch.full((latent[0],), tokens)
    if name == "img_mask":  # the places of the image after the text, of which each holds 2 x 2 latents
        return torch.arange(tokens + SIDE * SIDE // 4).repeat(latent[0], 1) >= tokens
    return None
