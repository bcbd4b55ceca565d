"""Steps of models that installed packages build: ``timm:resnet50``, ``transformers:GPT2LMHeadModel``.

Weights are random (nothing is downloaded); a Hugging Face model has the default configuration of its class, changed by
fields in brackets: ``transformers:LlamaForCausalLM[num_hidden_layers=8,hidden_size=1024]``. Inputs are those of a
user's function, or made up from the configuration.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput, UnknownName, Unsupported
from simdev.graphs.capture.diffusion_inputs import diffusion_inputs, only_tiled
from simdev.graphs.capture.documented_inputs import with_shape
from simdev.graphs.capture.transformers_inputs import (
    GIVE,
    NO_LABELS,
    hf_inputs,
    hf_labels,
    ops_of,
    parts_of,
    text_config,
)
from simdev.graphs.capture.vision_ops import define_missing_operators
from simdev.graphs.workload import InferenceStep, Step, TrainingStep
from simdev.user_file import import_file, neighbours

PACKAGES = ("timm", "torchvision", "transformers", "diffusers")
FINAL = "model"  # the field of a refusal that no other fields or inputs would help
MODES = ("train", "inference", "prefill", "decode")
DEPTHS = ("num_hidden_layers", "num_layers", "depth")  # fields for the number of layers
TARGET = re.compile(r"(?P<package>\w+):(?P<model>[\w./-]+)(\[(?P<fields>.*)\])?")


class NeedsArguments(InvalidInput):
    """A model uses arguments, ``names``, that it may be called without."""

    def __init__(self, message: str, names: Sequence[str]):
        super().__init__(message)
        self.names = tuple(names)


def package_step(
    target: str,
    *,
    mode: str = "train",
    batch: int | None = None,
    length: int | None = None,
    inputs: str | None = None,
    optional: Collection[str] = (),
) -> tuple[Callable[[], Step], str, dict]:
    """What builds the step of a package's model, the graph's name and its meta.

    ``mode`` is ``train`` (forward, loss, backward, AdamW), ``inference`` (forward), or, for causal language models,
    ``prefill`` (forward that fills the key-value cache) and ``decode`` (one token after ``length`` cached ones).
    ``batch`` and ``length`` (tokens) default to what the modality usually has. ``inputs`` is ``FILE.py:FUNCTION``, a
    function that takes the model and returns what it is called with: named tensors in a dictionary, or a tuple.
    ``optional`` are arguments with a default that a model of transformers or diffusers gets all the same, if there is a
    rule for them.
    Raises :class:`InvalidInput` for an id, a field or a mode that does not exist, :class:`Unsupported` if the package
    is not installed.
    """
    match = TARGET.fullmatch(target)
    if not match or match["package"] not in PACKAGES:
        raise InvalidInput(f"expected PACKAGE:MODEL with a package of {', '.join(PACKAGES)}", source=target)
    package, model = match["package"], match["model"]
    if mode not in MODES:
        raise UnknownName("mode", mode, MODES, source=target)
    if mode in ("prefill", "decode") and package != "transformers":
        raise InvalidInput("only language models of transformers have a key-value cache", source=target, field="mode")
    for needed in {"timm": ("timm", "torchvision")}.get(package, (package,)):
        if importlib.util.find_spec(needed) is None:
            raise Unsupported(f"{target} needs the package {needed}: pip install {needed}")
    define_missing_operators()
    make = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers, "diffusers": _diffusers}[package]
    if package in ("transformers", "diffusers"):
        make = functools.partial(make, optional=optional)
    given = _given(inputs, target, mode, batch, length) if inputs else None
    build = make(target, model, given_fields(match["fields"], target), mode, batch, length, given)
    changed = "".join(f"-{value}" for value in (mode if mode != "train" else None, match["fields"]) if value)
    source = f"those of {inputs}" if inputs else "made up, by the configuration where it gives sizes"
    source += ", without labels, which the package's loss does not take" if NO_LABELS in optional else ""
    meta = {"source": target, "mode": mode, "batch": batch, "inputs_from": source}
    return build, f"{model}{changed}", meta | ({"optional_inputs": list(optional)} if optional else {})


def _given(inputs: str, target: str, mode: str, batch: int | None, length: int | None) -> Callable:
    """The function that makes the step of a model from a user's function, which returns the inputs."""
    if mode in ("prefill", "decode") or batch or length:
        raise InvalidInput("--inputs decides over the batch and its length, of train or inference", source=target)
    path, _, function = inputs.rpartition(":")
    if not path or not function.isidentifier():
        raise InvalidInput("expected FILE.py:FUNCTION", source=inputs)
    make = getattr(import_file(Path(path)), function, None)
    if not callable(make):
        raise InvalidInput("no such function", source=path, field=function)
    try:
        inspect.signature(make).bind(None)
    except TypeError as error:
        wanted = "it must take one argument, the model whose inputs it returns"
        raise InvalidInput(f"{function}() cannot be called with a model ({error}); {wanted}", source=path) from error

    def step(model):
        with neighbours(Path(path)):
            found = make(model)
        if not isinstance(found, (dict, tuple)):
            wanted = "expected a dictionary of named tensors, or a tuple"
            raise InvalidInput(f"{function}() returned {type(found).__name__}, {wanted}", source=path)
        named = isinstance(found, dict)

        def call(model, inputs):
            return model(**inputs) if named else model(*inputs)

        if mode == "inference":
            return InferenceStep(model.eval(), (found,), call)
        return _training(model, (found,), lambda model, inputs: loss_of(call(model, inputs)))

    return step


def given_fields(text: str | None, target: str) -> dict:
    fields, parts = {}, [""]
    for piece in (text or "").split(","):
        if any(parts[-1].count(start) > parts[-1].count(end) for start, end in ("[]", "{}")):  # inside a list
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    for part in filter(None, parts):
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"{part!r} is not field=value", source=target)
        try:
            fields[key.strip()] = json.loads(value)
        except ValueError:
            fields[key.strip()] = value.strip()
    return fields


def unset_fields(target: str, error: BaseException) -> list[str]:
    """All fields that a model needs and that its configuration leaves open or lacks, as far as they show: those that
    ``error`` names, and those that are missing next once these are small."""
    import torch

    found: list[str] = []
    while new := [name for name in open_fields(target, error) if name not in found]:
        found += new
        for name in new:
            target = with_field(target, name, _small_value(target, name))
        try:
            with torch.device("meta"), torch.no_grad():
                step = package_step(target)[0]()
                step.loss(step.model, *step.inputs)
        except Exception as other:
            error = cause_of(other)
            if not isinstance(error, AttributeError) and "NoneType" not in str(error):  # the fault may be their size
                break
        else:
            break
    return found


def _small_value(target: str, field: str) -> str:
    """A small value for a field of a model's configuration: off for a switch, and so many experts that a model may
    choose some of them."""
    match = TARGET.fullmatch(target)
    module = sys.modules["transformers"] if match and match["package"] == "transformers" else None
    outer, _, name = field.rpartition(".")
    if module and match and is_switch(part_of(getattr(module, match["model"]).config_class(), outer, target), name):
        return "false"
    return "8" if name.endswith("_experts") else "1"


def is_switch(config, name: str) -> bool:
    """Whether the class of a configuration declares a field as one that is on or off."""
    return re.match(r"(Optional\[)?bool\b(?!.*\b(int|str)\b)", declared_type(config, name)) is not None


def is_list(config, name: str) -> bool:
    """Whether the class of a configuration declares a field as a list."""
    return re.match(r"(Optional\[)?(list|List|tuple|Tuple)\b", declared_type(config, name)) is not None


def declared_type(config, name: str) -> str:
    """The type that the class of a configuration declares for a field, such as ``int | None``; nothing without one."""
    kinds = (vars(cls).get("__annotations__", {}).get(name) for cls in type(config).__mro__)
    kind = next(filter(None, kinds), "")
    return kind.__name__ if isinstance(kind, type) else str(kind)


def smaller_model(target: str, most_bytes: int) -> str | None:
    """The id of a model of transformers with parameters of at most ``most_bytes``: with the first layers, of which
    there is one of each kind, then with fewer words, fewer experts, narrower layers and shallower other parts. None
    without such fields."""
    import torch
    import transformers

    match = TARGET.fullmatch(target)
    assert match is not None
    given = given_fields(match["fields"], target)
    whole = getattr(transformers, match["model"]).config_class()
    config = text_config(whole)
    others = {key: part for key, part in vars(whole).items() if hasattr(part, "model_type") and part is not config}
    depths = {f"{key}.{name}": 2 for key, part in others.items() for name in DEPTHS if name in vars(part)}
    sizes = {key: value for key, value in vars(config).items() if isinstance(value, int) and key not in given}
    kinds = [value for key, value in vars(config).items() if key.endswith("layer_types") and isinstance(value, list)]
    sparse = [size for key, size in sizes.items() if key.endswith("sparse_step")]  # each of so many layers has experts
    layers = max([2, *sparse, *(1 + max(map(of.index, of)) for of in kinds if of)])
    widths = re.compile(r"(\w*ffn_)?hidden_size|d_model|(moe_)?intermediate_size|\w+_ffn_dim")
    narrower = [key for key in sizes if widths.fullmatch(key)]
    steps = [
        dict.fromkeys([key for key in DEPTHS if key in sizes] or DEPTHS[:1], layers)
        | {key: layers for key in sizes if key == "decoder_layers"},
        {"vocab_size": 8000}
        | {key: 8000 for key in sizes if key.endswith("_vocab")}  # of hashed words
        | ({"pad_token_id": 0} if (sizes.get("pad_token_id") or 0) >= 8000 else {}),
        {key: 32 for key in sizes if re.fullmatch(r"(\w+_)?(experts|expert_num)", key)},
        {key: sizes[key] // 4 for key in narrower},
        depths,
    ]
    for step in steps:
        for key, value in step.items():
            if key not in given and value < sizes.get(key, value + 1):
                target = with_field(target, key, str(value))
        try:
            with torch.device("meta"):
                model = package_step(target)[0]().model
        except Exception:  # the next fields may make it whole
            continue
        if sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) <= most_bytes:
            return target
    return None


def cause_of(error: BaseException) -> BaseException:
    """The error that an error goes back to."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def open_fields(target: str, error: BaseException) -> list[str]:
    """Fields that the default configuration of a model leaves open or lacks, and that ``error`` names as code (`field`)
    or that the function which failed reads. A field of a configuration inside another has the names of both, with a dot
    between them."""
    match = TARGET.fullmatch(target)
    assert match is not None
    given, named = given_fields(match["fields"], target), re.findall(r"`(\w+)`", str(error))
    if match["package"] == "diffusers":
        import diffusers

        takes = inspect.signature(getattr(diffusers, match["model"])).parameters
        unset = [name for name in named if name in takes and takes[name].default is None and name not in given]
        return list(dict.fromkeys(unset))
    if match["package"] != "transformers":
        return []
    import transformers

    config = getattr(transformers, match["model"]).config_class()
    if isinstance(error, AttributeError) and isinstance(error.obj, transformers.PreTrainedConfig):
        inside = [key for key, part in vars(config).items() if type(part) is type(error.obj)]
        return [".".join([*inside[:1], error.name])]
    if re.search(r"NoneType|^empty\(\) takes|are none!$", str(error)):  # which is how PyTorch says that a size is None
        inside = str(Path(transformers.__file__).parent)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for frame in [one for one in frames if one.f_code.co_filename.startswith(inside)][-1:]:
            code, absent = frame.f_code, [name for name, value in frame.f_locals.items() if value is None]
            named += [name for name in (*code.co_names, *code.co_consts, *absent) if isinstance(name, str)]
        for owner, name in attributes_without_value(error):  # what the module calls a field
            found = re.findall(rf"self\.{name} = (?:\w+\.)*(\w*config)\.(\w+)", inspect.getsource(type(owner)))
            named += [part for parts in found for part in parts]
    inner = {f"{key}.": part for key, part in vars(config).items() if hasattr(part, "model_type") and key in named}
    # These may stay open in any configuration.
    usual = {*given, *vars(transformers.PreTrainedConfig()), "torch_dtype", "_attn_implementation"}
    unset = []
    for name in named:
        if name not in usual and any(getattr(part, name, 0) is None for part in (config, text_config(config))):
            unset.append(name)
        elif name not in usual:
            found = [before + name for before, part in inner.items() if getattr(part, name, 0) is None]
            unset += [field for field in found if field not in given]
    return list(dict.fromkeys(unset))


def fields_read(target: str, error: BaseException) -> str:
    """Which fields the module that failed reads: `` (LlamaAttention reads head_dim)``, or nothing. Those of a
    configuration inside another have the names of both, with a dot between them."""
    import torch

    package = sys.modules[target.partition(":")[0]]
    folder = str(Path(package.__file__ or "").parent)
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        owner = frame.f_locals.get("self")
        if not isinstance(owner, torch.nn.Module) or not frame.f_code.co_filename.startswith(folder):
            continue
        found = re.findall(
            r"\b(?:self\.)?(?:config\.)?(\w+_config\.[a-z]\w*|(?<=config\.)[a-z]\w*)", inspect.getsource(type(owner))
        )
        config = frame.f_locals.get("config", vars(owner).get("config"))
        match = TARGET.fullmatch(target)
        whole = getattr(getattr(package, match["model"] if match else "", None), "config_class", None)
        inside = [] if whole is None else [key for key, part in vars(whole()).items() if type(part) is type(config)]
        before = f"{inside[0]}." if inside and hasattr(config, "model_type") and type(config) is not whole else ""
        names = dict.fromkeys(before + name for name in found)
        return f" ({type(owner).__name__} reads {', '.join(names)})" if names else ""
    return ""


def keys_read(error: BaseException) -> str:
    """Which keys of a dictionary the code that did not find one of them reads, in its file; else nothing."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    code = linecache.getlines(frame.f_code.co_filename)
    key = re.escape(str(error.args[0])) if isinstance(error, KeyError) and error.args else ""
    asked = re.search(rf"(\w+)\[[\"']{key}[\"']\]", code[line - 1]) if key and line <= len(code) else None
    if asked is None:
        return ""
    keys = re.findall(rf"\b{asked[1]}\[[\"'](\w+)[\"']\](?! *=[^=])", "".join(code))
    return f"; the keys that its code reads are {', '.join(dict.fromkeys(keys))}"


def needed_arguments(error: BaseException | None) -> tuple[str, ...]:
    """The arguments that a model used without being given them, as an ``error`` or one of its causes says."""
    while error is not None and not isinstance(error, NeedsArguments):
        error = error.__cause__
    return error.names if error is not None else ()


def whole_layers(target: str) -> dict[str, float]:
    """The shares of layers that training a transformers model leaves out at random by default, by the name of the
    field; its step has all layers, unless ``target`` gives the field."""
    if not target.startswith("transformers:"):
        return {}
    import transformers

    match = TARGET.fullmatch(target)
    assert match is not None
    given = given_fields(match["fields"], target)
    drops = layer_drops(getattr(transformers, match["model"]).config_class())
    return {name: share for _, key, name, share in drops if key not in given}


def with_field(target: str, name: str, value: str = "...") -> str:
    """The id of a model with one more field of its configuration: ``transformers:Model[name=...]``."""
    return f"{target[:-1]},{name}={value}]" if target.endswith("]") else f"{target}[{name}={value}]"


def _training(model, inputs: tuple, loss) -> TrainingStep:
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return TrainingStep(model.train(), inputs, loss, torch.optim.AdamW(trained, lr=1e-4))


def _mean_of(outcome):
    """A loss where the package defines none: over all predictions of a list, over the first tensor of each part of a
    model that returns the outputs of several, else over the first tensor."""
    from simdev.graphs.capture.build import named_tensors

    if isinstance(outcome, dict):
        parts = [part for part in outcome.values() if part is not None]
        if len(parts) > 1 and all(isinstance(part, dict) for part in parts):
            return sum(map(_mean_of, parts))
    found = [tensor for _, tensor in named_tensors(outcome, "output") if tensor.is_floating_point()]
    return sum(tensor.float().mean() for tensor in (found if isinstance(outcome, (list, tuple)) else found[:1]))


def _check_complete(model, inputs: dict, target: str) -> None:
    """Raise :class:`InvalidInput` if the model's forward needs arguments that are not among ``inputs``."""
    takes = inspect.signature(model.forward).parameters.values()
    missing = [item.name for item in takes if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD]
    missing = [with_shape(model, name) for name in missing if name not in inputs]
    if missing:
        raise InvalidInput(
            f"its forward needs {', '.join(missing)}, which simdev does not make up; {GIVE}", source=target
        )


def _call(model, inputs: dict):
    """The model on named inputs. Raises :class:`InvalidInput` if it uses an argument that it may be called without, or
    finds fault with its labels."""
    try:
        return model(**inputs)
    except (AttributeError, TypeError) as error:
        _check_parts(model, error)
        _check_package(model, error)
        if "labels" in inputs and re.match(r"\w*Loss\(\) (missing|got)", str(error)):
            raise NeedsArguments(
                f"running its step failed ({error}), in a loss that does not fit it: capture it with --mode inference, "
                f"or {GIVE}",
                [NO_LABELS],
            ) from error
        left_out = _left_out(model, inputs)
        asked = re.search("must be (given|passed|provided|specified)", str(error))
        if fault := _asked_of(model, inputs, error) if asked else None:
            raise fault from error
        absent = re.search("NoneType|'bool' object has no attribute", str(error))  # or compared: mask == 1
        if not absent or not left_out or attributes_without_value(error):
            raise
        # Where nothing but a mask is left out, what is computed of it has no value either.
        used = _used(error, left_out) or [name for name in left_out if left_out == [name] and name.endswith("mask")]
        needed = ", ".join(with_shape(model, name) for name in used) or f"one of {', '.join(left_out)}"
        # PyTorch's sentence about a call lists all that the call may take
        what = re.sub(r", but expected one of:.*", "", str(error), flags=re.DOTALL)
        raise NeedsArguments(
            f"running its step failed ({what}): it may need {needed}, which simdev does not make up; {GIVE}", used
        ) from error
    except IndexError as error:
        if "input_ids" not in inputs or "out of range" not in str(error):
            raise
        half = inputs["input_ids"].shape[-1] // 2
        raise NeedsArguments(
            f"running its step failed ({error}): its tokens may be more than it has positions; give another --length, "
            f"such as {half}, or {GIVE}",
            [f"length[{half}]"],
        ) from error
    except NotImplementedError as error:
        if "labels" not in inputs:
            raise
        raise InvalidInput(
            f"running its step failed ({error}): without a loss of its own, capture it with --mode inference, or {GIVE}"
        ) from error
    except RuntimeError as error:
        if (name := _of_another_length(inputs, error)) is None:
            raise
        message = f"running its step failed ({error}): it may need {name}, which simdev does not make up; {GIVE}"
        raise NeedsArguments(message, [name]) from error
    except ValueError as error:
        if (fault := _fault_of(model, inputs, error)) is None:
            raise
        raise fault from error


def _left_out(model, inputs: dict) -> list[str]:
    """The arguments that a model may be called without and that are not among the ``inputs``."""
    takes = inspect.signature(model.forward).parameters.items()
    return [name for name, item in takes if item.default is None and name not in inputs]


def _asked_of(model, inputs: dict, error: Exception) -> InvalidInput | None:
    """The argument that a model's sentence asks for, the first of alternatives; None if it does not name one."""
    left_out = _left_out(model, inputs)
    named = [word for word in re.findall(r"\w+", str(error)) if word in left_out][:1]
    if not named:
        return None
    asked = f"it may need {with_shape(model, named[0])}, which simdev does not make up; {GIVE}"
    return NeedsArguments(f"running its step failed ({error}): {asked}", named)


def _fault_of(model, inputs: dict, error: ValueError) -> InvalidInput | None:
    """What a model's sentence about its inputs asks for; None if it does not speak of them."""
    if fault := _asked_of(model, inputs, error):
        return fault
    if "labels" not in inputs:
        return None
    message = f"running its step failed ({error}): what simdev makes up may not fit; give another --length, or {GIVE}"
    rows = len(inputs["labels"])
    if wanted := re.search(r"labels.* found .*?\d+.* expected (\d+)\b", str(error), re.IGNORECASE):
        return NeedsArguments(message, [f"labels[{rows * int(wanted[1])}]"])
    counts = re.search(r"input batch_size \((\d+)\) to match target .*\((\d+)\)", str(error))
    if counts and int(counts[1]) % rows == 0 and (int(counts[1]) > int(counts[2]) or int(counts[1]) == rows):
        return NeedsArguments(message, [f"labels[{counts[1]}]"])
    if counts and "decoder_input_ids" in _left_out(model, inputs):  # which it does not make of its labels
        return NeedsArguments(message, ["decoder_input_ids"])
    return InvalidInput(message)


def _of_another_length(inputs: dict, error: Exception) -> str | None:
    """Which of the numbers among the ``inputs`` the expression that failed views as a row of another length, with this
    length: ``position_ids[334]``; or the length of a text whose tokens it adds to what is heard: ``length[125]``. None
    for another error."""
    import torch

    wanted = re.match(r"shape '\[-1, (\d+)\]' is invalid for input of size \d+$", str(error))
    sounds = re.search(r"had torch\.Size\(\[(\d+), (\d+), (\d+)\]\).* broadcastable to \[\1, (\d+), \3\]", str(error))
    if sounds and "input_features" in inputs and "input_ids" in inputs:  # of which each is added to a token
        return f"length[{sounds[2]}]" if inputs["input_ids"].shape[-1] == int(sounds[4]) else None
    words = {word for frame, line in traceback.walk_tb(error.__traceback__) for word in _words_at(frame, line)}
    numbers = [name for name, made in inputs.items() if isinstance(made, torch.Tensor) and not made.is_floating_point()]
    return next((f"{name}[{wanted[1]}]" for name in numbers if name in words), None) if wanted else None


def _words_at(frame, line: int) -> list[str]:
    return re.findall(r"\w+", linecache.getline(frame.f_code.co_filename, line))


def _used(error: Exception, names: list[str]) -> list[str]:
    """Those of ``names`` that are variables without a value in the expression that failed, in the innermost function
    that has such variables."""
    found, step = [], error.__traceback__
    while step is not None:
        code, known = step.tb_frame.f_code, step.tb_frame.f_locals
        first, last, *_ = list(code.co_positions())[step.tb_lasti // 2]
        lines = linecache.getlines(code.co_filename)[(first or 1) - 1 : last or first or 0]
        words = re.findall(r"\w+", "".join(lines))
        here = [name for name in names if name in words and known.get(name, error) is None]
        found, step = here or found, step.tb_next
    return found


def attributes_without_value(error: BaseException) -> list[tuple[Any, str]]:
    """The attributes without a value that the expression which failed reads of its own module, also if it failed in an
    op: fields of a configuration that are open, not arguments."""
    import torch

    frames = list(traceback.walk_tb(error.__traceback__))
    frames = [(frame, line) for frame, line in frames if isinstance(frame.f_locals.get("self"), torch.nn.Module)]
    if not frames:
        return []
    frame, line = frames[-1]
    owner = frame.f_locals["self"]
    if type(owner).__module__.startswith("torch."):  # a layer without a bias
        return []
    read = re.findall(r"\bself\.(\w+)", linecache.getline(frame.f_code.co_filename, line))
    return [(owner, name) for name in dict.fromkeys(read) if getattr(owner, name, error) is None]


def _check_parts(model, error: Exception) -> None:
    """Raise :class:`InvalidInput` if a model of diffusers called a part of itself that its fields leave out."""
    absent = [name for name, part in vars(model).items() if part is None and not name.startswith("_")]
    if "'NoneType' object is not callable" not in str(error) or not absent or not isinstance(model.config, dict):
        return
    off = [name for name, value in model.config.items() if value is False]
    if off:
        fields = ",".join(f"{name}=true" for name in off)
        raise InvalidInput(
            f"its step calls a part that its fields leave out, of {', '.join(absent)}; give the fields that it needs "
            f"in brackets, of {type(model).__name__}[{fields}]"
        ) from error


def _check_package(model, error: Exception) -> None:
    """Raise :class:`InvalidInput` if the code of transformers asks an output of its own models for a field that this
    does not have, whatever the inputs are."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(error, AttributeError):
        return
    if not isinstance(error.obj, transformers.utils.ModelOutput):
        return
    parts = [type(part).__name__ for part in model.children() if _has_forward(type(part).__name__)]
    others = f", or capture a part of the model: {', '.join(parts)}" if parts else ""
    raise InvalidInput(
        f"transformers {transformers.__version__} fails in its own code ({error}); install another version{others}",
        field=FINAL,
    ) from error


# Images --------------------------------------------------------------------------------------------------------


def _timm(target, name, fields, mode, batch, length, given):
    import timm

    if not timm.is_model(name):
        raise UnknownName("model", name, timm.list_models(), source=target)

    def build():
        import torch

        model = timm.create_model(name, pretrained=False, **fields)
        if given:
            return given(model)
        images = torch.randn(batch or 8, *model.pretrained_cfg["input_size"])
        return _classifier(model, images, mode)

    return build


def _classifier(model, images, mode):
    import torch

    if mode == "inference":
        return InferenceStep(model.eval(), (images,))
    labels = torch.randint(0, 10, (len(images),))

    def loss(model, images, labels):
        logits = model(images)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
            return _mean_of(logits)
        return torch.nn.functional.cross_entropy(logits, labels)

    return _training(model, (images, labels), loss)


def _torchvision(target, name, fields, mode, batch, length, given):
    import torchvision

    if name not in torchvision.models.list_models():
        raise UnknownName("model", name, torchvision.models.list_models(), source=target)

    def build():
        import torch

        extra = (
            {"weights_backbone": None} if name in torchvision.models.list_models(torchvision.models.detection) else {}
        )
        if name in torchvision.models.list_models(torchvision.models.segmentation):
            extra = {"weights_backbone": None}
        model = torchvision.models.get_model(name, weights=None, **extra, **fields)
        if given:
            return given(model)
        module = type(model).__module__
        if ".detection" in module:
            return _detector(model, mode, batch or (2 if "ssd" in name else 1))  # SSD normalises single pixels
        if ".optical_flow" in module:
            images = torch.randn(batch or 2, 3, 128, 128)
            return _unary(model, (images, images.clone()), mode)
        size = _resolution(torchvision, name)
        images = (batch or 2, 3, 16, size, size) if ".video" in module else (batch or 8, 3, size, size)
        return _classifier(model, torch.randn(images), mode)

    return build


def _side(size) -> int:
    """The side of a square, which is given as one number for images, and as two for videos."""
    return size[0] if isinstance(size, (list, tuple)) else int(size)


def _resolution(torchvision, name: str) -> int:
    weights = torchvision.models.get_model_weights(name)
    crops = [
        _side(member.transforms.keywords.get("crop_size", 224))
        for member in weights
        if hasattr(member.transforms, "keywords")
    ]
    return crops[-1] if crops else 224


def _detector(model, mode, batch):
    import torch

    images = [torch.rand(3, 320, 320) for _ in range(batch)]
    if mode == "inference":
        return InferenceStep(model.eval(), (images,))
    box, label = torch.tensor([[20.0, 30.0, 200.0, 220.0]]), torch.ones(1, dtype=torch.int64)
    targets = [{"boxes": box.clone(), "labels": label.clone(), "masks": torch.ones(1, 320, 320, dtype=torch.uint8),
                "keypoints": torch.ones(1, 17, 3)} for _ in range(batch)]  # fmt: skip

    def loss(model, images, targets):
        return sum(model(images, targets).values())

    return _training(model, (images, targets), loss)


def _unary(model, inputs, mode):
    if mode == "inference":
        return InferenceStep(model.eval(), inputs)
    return _training(model, inputs, lambda model, *inputs: _mean_of(model(*inputs)))


# transformers --------------------------------------------------------------------------------------------------


def _has_forward(name: str) -> bool:
    """Whether transformers has a model of this name that can be called."""
    import torch
    import transformers

    found = getattr(transformers, name, None) if not name.startswith("_") else None
    return hasattr(found, "config_class") and found.forward is not torch.nn.Module.forward


def _transformers(target, name, fields, mode, batch, length, given, optional=()):
    import transformers

    cls = getattr(transformers, name, None)
    if not inspect.isclass(cls) or not hasattr(cls, "config_class"):
        raise UnknownName("model", name, [key for key in dir(transformers) if key[:1].isupper()], source=target)
    if not _has_forward(name):
        parts = [part for part in vars(sys.modules[cls.__module__]) if _has_forward(part)]
        others = f"; capture one of {', '.join(parts)}" if parts else ""
        raise InvalidInput(f"has no forward pass of its own{others}", source=target)
    if mode == "train" and inspect.getsource(cls.forward).lstrip().startswith("@torch.inference_mode()"):
        raise InvalidInput(
            "its forward pass runs in inference mode, without gradients: capture it with --mode inference, and with "
            "inputs of a function by --inputs FILE.py:FUNCTION",
            source=target,
        )
    config_class = cls.config_class

    def read(field: str) -> bool:
        code = inspect.getsource(sys.modules[cls.__module__])
        return re.search(rf"config(\.|, \"){field}\b", code) is not None

    def build():
        config = _configured(config_class, fields, target, read)
        if name.endswith("EncoderModel"):
            config.is_encoder_decoder = False
        model = cls(config)
        if mode in ("train", "inference") and _has_small_cache(model, config):
            config.use_cache = False
        if given:
            return given(model)
        from simdev.graphs.capture.shadows import known_draws

        with known_draws():
            inputs = hf_inputs(model, config, batch, length, optional)
        _check_complete(model, inputs, target)
        if mode in ("prefill", "decode"):
            return _generation(model.eval(), inputs["input_ids"], mode, target)
        if mode == "inference":
            return InferenceStep(model.eval(), (inputs,), _call)
        with known_draws():
            inputs |= hf_labels(model, config, inputs, optional)
        return _training(model, (inputs,), lambda model, inputs: loss_of(_call(model, inputs)))

    return build


def _configured(config_class, fields: dict, target: str, read: Callable[[str], bool]):
    """The default configuration of a class with the given ``fields``, of which a model may also ``read`` those that the
    configuration does not name, and with what it leaves open and another field decides."""
    try:
        config, given = config_class(), dict(fields)
    except Exception as error:  # of the class's own checks
        raise InvalidInput(
            f"{config_class.__name__}() fails with its own defaults ({cause_of(error)}); write a function that returns "
            "the training step of a model with valid ones, and capture FILE.py:FUNCTION",
            source=target,
            field=FINAL,
        ) from error
    if getattr(config, "prediction_length", 1) is None:  # of a time series; the context is as long
        given = {"prediction_length": 24, **given}
        config = config_class(prediction_length=24)
    config = with_derived(config, given, lambda own: config_class(**own))
    own = text_config(config)
    for mark in ("image_token_index", "video_token_index"):  # of an image or a video among the tokens
        if getattr(config, mark, 1) is None:
            setattr(config, mark, own.vocab_size - 1)
    for path, value in fields.items():
        owner, key = owner_of(config, path, target)
        if not hasattr(owner, key) and not hasattr(own, key) and not read(key):
            raise UnknownName("field", path, vars(owner), source=target)
        set_field(owner, key, value)
    keep_layers(config, fields)
    fill_tokens(config)
    make_lists(config)
    spoken = getattr(config, "languages", None) or ()
    if len(spoken) == 1 and getattr(config, "default_language", spoken) is None:  # there is no other
        config.default_language = spoken[0]
    return config


def set_field(config, key: str, value) -> None:
    """Set a field of a configuration: as a tuple, if it is one. A dictionary for a configuration inside stays what the
    class has made of it."""
    old = getattr(config, key, None)
    if not (isinstance(value, dict) and hasattr(old, "model_type")):
        setattr(config, key, tuple(value) if isinstance(value, list) and isinstance(old, tuple) else value)


def with_derived(config, fields: Mapping[str, Any], make: Callable[[dict], Any]):
    """The configuration that ``make`` makes of those ``fields`` that are fields of ``config`` itself: what the class
    derives from them, such as the width of a head from that of the model, fits them. ``config`` where the class refuses
    these fields, or without any."""
    own = {key: value for key, value in fields.items() if key in vars(config)}
    try:
        return make(own) if own else config
    except Exception:  # of the class's own checks, which speak of fields that are still to be set
        return config


def _has_small_cache(model, config) -> bool:
    """Whether the cache that a decoder makes by default does not hold what its forward pass asks it for: without the
    encoder, it takes its number of layers from the encoder's field and has too few; and it knows no length if its
    layers are all without attention."""
    takes = inspect.signature(model.forward).parameters
    layers, held = getattr(config, "decoder_layers", None) or 0, getattr(config, "num_hidden_layers", None)
    small = isinstance(held, int) and "decoder_input_ids" not in takes and layers > held
    kinds = getattr(text_config(config), "layer_types", None) or ()
    return small or (
        bool(kinds) and not any("attention" in str(kind).replace("linear_attention", "") for kind in kinds)
    )


def make_lists(config) -> None:
    """Turn the tuples of a configuration of transformers, and of those inside it, into lists, as in a checkpoint's:
    models add them to lists. A tuple that the configuration makes of a list stays one: models add it to tuples."""
    for part in parts_of(config):
        for key, value in vars(part).items():
            if isinstance(value, tuple) and not key.startswith("_") and not _makes_tuple(type(part), key, value):
                vars(part)[key] = list(value)


def _makes_tuple(config_class, key: str, value: tuple) -> bool:
    """Whether a class of configurations turns a list that it gets under this name into a tuple."""
    try:
        return isinstance(getattr(config_class(**{key: list(value)}), key), tuple)
    except Exception:  # it wants other fields beside it
        return False


def fill_tokens(config) -> None:
    """Give a configuration of transformers the tokens for padding and for a decoder's start that it leaves open; those
    of an encoder and a decoder with configurations of their own lack them."""
    own = text_config(config)
    if getattr(own, "pad_token_id", None) is None:
        own.pad_token_id = config.pad_token_id = 0
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = own.pad_token_id
    for part in (config, getattr(config, "decoder", None)) if config.is_encoder_decoder else ():
        if hasattr(part, "model_type") and getattr(part, "decoder_start_token_id", None) is None:
            part.decoder_start_token_id = own.pad_token_id


def owner_of(config, path: str, target: str) -> tuple[Any, str]:
    """The configuration that a field belongs to, and the field's name in it: ``config``, its text part for a field that
    only this has, or the part that the ``path`` names."""
    outer, _, key = path.rpartition(".")
    part, own = part_of(config, outer, target), text_config(config)
    return (own if part is config and hasattr(own, key) and not hasattr(config, key) else part), key


def part_of(config, path: str, target: str):
    """The configuration inside ``config`` that has a name such as ``text_config``; ``config`` itself without one."""
    for name in filter(None, path.split(".")):
        if not hasattr(getattr(config, name, None), "model_type"):
            parts = [key for key, part in vars(config).items() if hasattr(part, "model_type")]
            raise UnknownName("configuration", name, parts, source=target)
        config = getattr(config, name)
    return config


def layer_drops(config, inside: str = "") -> Iterator[tuple[Any, str, str, float]]:
    """The shares of layers that a configuration of transformers, or one inside it, leaves out at random:
    ``(configuration, field, the field's name from outside, share)``."""
    for key, value in list(vars(config).items()):
        if re.fullmatch(r"\w*layer_?drop", key) and value:
            yield config, key, inside + key, value
        elif hasattr(value, "model_type"):
            yield from layer_drops(value, f"{inside}{key}.")


def keep_layers(config, given: Collection[str] = ()) -> None:
    """Let a model of transformers train with all its layers, but for the fields that are ``given``: a step that leaves
    out what one draw leaves out has fewer FLOPs than the next."""
    for part, key, _, _ in layer_drops(config):
        if key not in given:
            setattr(part, key, 0.0)


def loss_of(outcome):
    """The loss that a model of transformers returned, or the mean of its first output."""
    found = getattr(outcome, "loss", None)
    if found is None:
        return _mean_of(outcome)
    return found if found.numel() == 1 else found.mean()  # some codecs give a loss of each sample


def _generation(model, tokens, mode: str, target: str) -> InferenceStep:
    """Prefill of a prompt, or one decode step after it. The cache is part of the inputs and of what leaves the step."""
    import torch

    if "past_key_values" not in inspect.signature(model.forward).parameters and not model.can_generate():
        raise InvalidInput("the model has no key-value cache", source=target, field="mode")
    if mode == "prefill":
        return InferenceStep(model, (tokens,), lambda model, tokens: model(input_ids=tokens, use_cache=True))
    with torch.no_grad():
        cache = model(input_ids=tokens, use_cache=True).past_key_values
    if cache is None:
        raise InvalidInput("the model returned no key-value cache", source=target, field="mode")

    def forward(model, token, cache):
        return model(input_ids=token, past_key_values=cache, use_cache=True)

    return InferenceStep(model, (tokens[:, -1:].clone(), cache), forward)


# diffusers -----------------------------------------------------------------------------------------------------


def _diffusers(target, name, fields, mode, batch, length, given, optional=()):
    import diffusers

    cls = getattr(diffusers, name, None)
    if not inspect.isclass(cls) or not hasattr(cls, "forward"):
        raise UnknownName(
            "model", name, [key for key in dir(diffusers) if "Model" in key or "Auto" in key], source=target
        )

    def build():
        _check_fields(cls, fields, target)
        try:
            model = cls(**fields)
        except TypeError as error:
            takes = inspect.signature(cls).parameters.items()
            unset = [key for key, item in takes if item.default is None and key not in fields]
            if "NoneType" not in str(error) or not unset:
                raise
            raise InvalidInput(
                f"its defaults make no model ({error}); in brackets, as in {name}[{unset[0]}=...], give those of "
                f"{', '.join(unset)} that it needs",
                source=target,
            ) from error
        if only_tiled(model):
            model.enable_tiling()
        if given:
            return given(model)
        from simdev.graphs.capture.shadows import known_draws

        with known_draws():
            inputs = diffusion_inputs(model, batch or 1, optional)
        inputs |= _of_channels_decoded(model, inputs)
        _check_complete(model, inputs, target)
        return _unary_named(model, inputs, mode)

    return build


def _of_channels_decoded(model, inputs: dict) -> dict:
    """The sample of a model that encodes it, with as many channels as are decoded, if the model takes only these: its
    field ``in_channels`` may count features that it computes of an image."""
    import torch

    sample, decoded = inputs.get("sample"), model.config.get("out_channels")
    if sample is None or not hasattr(model, "encode") or not isinstance(decoded, int) or decoded == sample.shape[1]:
        return {}
    other = {"sample": torch.randn(len(sample), decoded, *sample.shape[2:])}
    return other if not ops_of(model, inputs) and ops_of(model, other) else {}


def _check_fields(cls, fields: dict, target: str) -> None:
    """Raise :class:`InvalidInput` if the class needs fields that have no default, or does not have a given one."""
    takes = inspect.signature(cls).parameters
    missing = [key for key, item in takes.items() if item.default is item.empty and key not in fields]
    if missing:
        given = ",".join(f"{key}=..." for key in missing)
        raise InvalidInput(f"has no default for {', '.join(missing)}: capture {target}[{given}]", source=target)
    unknown = [key for key in fields if key not in takes]
    if unknown:
        raise UnknownName("field", unknown[0], takes, source=target)


def _unary_named(model, inputs: dict, mode):
    if mode == "inference":
        return InferenceStep(model.eval(), (inputs,), _call)
    return _training(model, (inputs,), lambda model, inputs: _mean_of(_call(model, inputs)))
