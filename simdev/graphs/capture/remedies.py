"""What to do about a model of a package that cannot be built or run as it is, read from its error."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import linecache
import math
import re
import sys
import textwrap
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput
from simdev.graphs.capture.packages import (
    DEPTHS,
    TARGET,
    attributes_without_value,
    cause_of,
    declared_type,
    given_fields,
    is_list,
    is_switch,
    needed_arguments,
    open_fields,
    owner_of,
    package_step,
    part_of,
    set_field,
    unset_fields,
    with_derived,
    with_field,
)
from simdev.graphs.capture.transformers_inputs import text_config
from simdev.graphs.workload import TrainingStep

SMALL_TIMM = ("vit_tiny_patch16_224", 192)  # a vision transformer of timm and its width
HEADS = ("num_attention_heads", "attention_head_dim")  # of diffusers


def missing_package(error: BaseException) -> str | None:
    """The package that an ``error`` says is not installed, or whose name is not there because the code that failed
    imports it only if it is installed, and how to install it."""
    text = str(error)
    if absent := re.search(r"requires the (\w+) library|No module named '(\w+)'", text):
        name = _missing_inside(absent[1] or absent[2])
        page = re.search(r"https://github\.com/\S+?(?=[\s'`]|$)", text)
        return f"{name}: see {page[0]}" if page and "pip install" not in text else f"{name}: pip install {name}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, NameError) or not frames:
        return None
    for node in ast.walk(ast.parse("".join(linecache.getlines(frames[-1].f_code.co_filename)))):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        source = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
        for item in node.names if source or isinstance(node, ast.Import) else ():
            package = (source or item.name).partition(".")[0]
            if (item.asname or item.name) == error.name and importlib.util.find_spec(package) is None:
                return f"{package}: pip install {package}"
    return None


def _missing_inside(package: str) -> str:
    """The package without which another cannot be imported that is installed, as ``timm`` cannot without
    ``torchvision``; ``package`` itself if it is not there."""
    if importlib.util.find_spec(package) is None:
        return package
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        return (error.name or package).partition(".")[0]
    return package


def fields_that_follow(target: str, error: InvalidInput) -> list[tuple[str, str]]:
    """Fields without which the default configuration of a model fails, and their values, if these follow from the
    ``error`` or from other fields."""
    if target.startswith("transformers:"):
        cause = cause_of(error)
        follows = fields_asked(target, cause) or rotation_that_follows(target, cause)
        follows = follows or switch_of_part(target, cause) or empty_dictionary(target, cause)
        follows = follows or elements_of_lists(target) or layers_in_depth(target) or heads_that_divide(target, cause)
        follows = follows or values_that_follow(target, unset_fields(target, cause)) or no_cache(target, cause)
        follows = follows or misspelt_fields(target) or field_of_example(target, cause)
        return follows or widths_that_fit(target, cause) or width_of_product(target, cause)
    if found := extra_channels(target, error) or factors_of_one(target, error):
        return found
    asked = re.search(r"in brackets, of \w+\[(.*)\]$", error.message)
    switches = [(name, "true") for name in re.findall(r"(\w+)=true", asked[1])] if asked else []
    return next(
        (chosen for chosen in ([[one] for one in switches] + [switches]) if chosen and _runs(target, chosen)), []
    )


def extra_channels(target: str, error: InvalidInput) -> list[tuple[str, str]]:
    """The channels that a first layer of a model of diffusers gets beside its sample, such as the features of a time
    step, where its class has a field for them that its default leaves too small."""
    match = TARGET.fullmatch(target)
    if match is None or match["package"] != "diffusers":
        return []
    takes = inspect.signature(getattr(sys.modules["diffusers"], match["model"])).parameters
    seen = re.search(r"to have (\d+) channels, but got (\d+) channels", error.message)
    fields = [name for name in takes if re.fullmatch(r"extra_\w*channels", name)]
    chosen = [(fields[0], str(int(seen[2]) - int(seen[1])))] if seen and len(fields) == 1 else []
    return chosen if chosen and fields[0] not in given_fields(match["fields"], target) and _runs(target, chosen) else []


def factors_of_one(target: str, error: InvalidInput) -> list[tuple[str, str]]:
    """The dictionaries of factors that the constructor of a model of diffusers reads and its defaults leave out, with
    each factor 1: these scale numbers, such as the angles of rotary positions, and change no shape."""
    match = TARGET.fullmatch(target)
    if match is None or match["package"] != "diffusers" or "its defaults make no model" not in error.message:
        return []
    cls, given = getattr(sys.modules["diffusers"], match["model"]), given_fields(match["fields"], target)
    found: list[tuple[str, str]] = []
    for name, item in inspect.signature(cls).parameters.items():
        made = _small(cls, name, item.annotation, 0) if item.annotation is dict and name not in given else None
        if item.default is None and isinstance(made, dict) and all(key.endswith("factor") for key in made):
            found.append((name, json.dumps(made, separators=(",", ":"))))
    return found if found and _runs(target, found) else []


def _runs(target: str, fields: list[tuple[str, str]]) -> bool:
    """Whether the step of a model with some more fields runs: see :func:`_fault`."""
    return _fault(target, fields) is None


def _fault(target: str, fields: list[tuple[str, str]]) -> Exception | None:
    """The error of the step of a model with some more fields on tensors without memory, as far as these lead it; None
    if there is none. A step that asks for values has none if its parameters are small, so that its capture runs it for
    real, or if it has experts, to which its capture sends tokens."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture.rewrites import as_on_gpu, fake_construction, unlogged_failures
    from simdev.graphs.capture.run import MOST_REAL_BYTES, ON_VALUES, numbers_of_experts
    from simdev.graphs.capture.shadows import Shadows
    from simdev.graphs.capture.trace import storage_bytes

    optional: tuple[str, ...] = ()
    held, experts = 0, False
    while True:
        try:
            fake = FakeTensorMode(allow_non_fake_inputs=True), Shadows()
            with unlogged_failures(), fake[0], fake[1], fake_construction(), as_on_gpu():
                step = package_step(_with(target, fields), optional=optional)[0]()
                assert isinstance(step, TrainingStep)
                held = sum(map(storage_bytes, step.model.parameters()))
                experts = bool(numbers_of_experts(step.model))
                step.loss(step.model, *step.inputs)
        except ON_VALUES as error:
            return None if held <= MOST_REAL_BYTES or experts else error
        except Exception as error:  # other fields may make it run
            needed = [name for name in needed_arguments(error) if name not in optional]
            if not needed:
                return error
            optional = (*optional, *needed)
        else:
            return None


def _with(target: str, fields: list[tuple[str, str]]) -> str:
    return functools.reduce(lambda at, field: with_field(at, *field), fields, target)


def fields_asked(target: str, error: BaseException) -> list[tuple[str, str]]:
    """Fields of the model's configuration, and values that an ``error`` asks for (``is_decoder=True``) or gives as an
    example (``requires config.out_indices to be a list; one can use [3, 5]``), and that they do not have."""
    config, given = _config(target)
    asked = re.findall(r"`(?:self\.)?(?:config\.)?(\w+) ?=+ ?(True|False|\d+)`", str(error))
    lists = re.findall(r"requires config\.(\w+) .*\buse (\[[\d, ]+\])", str(error))
    asked += [(name, value.replace(" ", "")) for name, value in lists]
    unlike = {name: value for name, value in asked if str(getattr(config, name, value)) != value and name not in given}
    return [(name, value.lower()) for name, value in unlike.items()]


def switch_of_part(target: str, error: BaseException) -> list[tuple[str, str]]:
    """The field that turns on a part of a module which is off by default and which the module's code uses all the same:
    its constructor makes the part under ``if config.FIELD:``."""
    import torch

    if not isinstance(error, AttributeError) or not isinstance(error.obj, torch.nn.Module):
        return []
    config, given = _config(target)
    code = ast.parse(textwrap.dedent(inspect.getsource(type(error.obj).__init__)))
    for node in ast.walk(code):
        if not isinstance(node, ast.If) or not re.fullmatch(r"(self\.)?config\.\w+", ast.unparse(node.test)):
            continue
        if not any(re.search(rf"^self\.{error.name} = ", ast.unparse(line)) for line in node.body):
            continue
        field = ast.unparse(node.test).rpartition(".")[2]
        parts = _parts_by_prefix(config)
        found = [before + field for before, part in parts.items() if getattr(part, field, None) is False]
        chosen = [(path, "true") for path in found[:1] if path not in given]
        return chosen if chosen and _runs(target, chosen) else []
    return []


def empty_dictionary(target: str, error: BaseException) -> list[tuple[str, str]]:
    """A dictionary that a configuration leaves open and that the code looks into all the same, without entries, if the
    model's step runs with it."""
    if not re.search(r"'NoneType' object has no attribute '(get|items|keys|values)'", str(error)):
        return []
    config, given = _config(target)
    kinds = {name: declared_type(config, name) for name, value in vars(config).items() if value is None}
    names = [name for name, kind in kinds.items() if re.match(r"dict\b(?!.*Config)", kind) and name not in given]
    chosen = [[(name, "{}")] for name in names]
    return next((fields for fields in chosen if _runs(target, fields)), [])


def no_cache(target: str, error: BaseException) -> list[tuple[str, str]]:
    """The field that turns off the cache of keys and values, which a training step does not read, if an ``error`` shows
    that the package cannot make one of the model's configuration."""
    config, given = _config(target)
    files = {Path(frame.f_code.co_filename).name for frame, _ in traceback.walk_tb(error.__traceback__)}
    on = "use_cache" not in given and getattr(config, "use_cache", False)
    lacks = isinstance(error, AttributeError) and "cache_utils.py" in files
    return [("use_cache", "false")] if on and lacks else []


def field_of_example(target: str, error: BaseException) -> list[tuple[str, str]]:
    """The field that an ``error`` says is not set, with the value that the documentation of the model's configuration
    gives to it in its example (``TimmBackboneConfig("resnet50")``), if the model's step runs so."""
    config, given = _config(target)
    unset = re.search(r"\b(\w+) is not set in the config", str(error))
    name = type(config).__name__
    shown = re.search(rf"\b{name}\(([\"'][\w./-]+[\"'])\)", type(config).__doc__ or "")
    if not unset or not shown or unset[1] in given or getattr(config, unset[1], name) is not None:
        return []
    chosen = [(unset[1], json.dumps(ast.literal_eval(shown[1])))]
    return chosen if _runs(target, chosen) else []


def widths_that_fit(target: str, error: BaseException) -> list[tuple[str, str]]:
    """The width of a model's backbone, or the list of its channels, with other numbers, if an ``error`` says that these
    are not as many as a convolution reads and the model's step runs with what it got: the default backbone of a
    configuration may be another one than its own fields are written for. Or all stages of the backbone, if the
    convolution reads as many channels as these have together."""
    config, given = _config(target)
    parts = {path: part for path, part in _parts_by_prefix(config).items() if hasattr(part, "backbone_config")}
    if not parts or not _channels_read(error):
        return []
    fields = {
        path + name: value for path, part in parts.items() for name, value in vars(part).items()
        if (name == "hidden_size" or re.search("channels?(_list)?$", name)) and path + name not in given
    }  # fmt: skip
    declared = _declared_backbone(config, given) if "" in parts else None
    other = [("backbone_config", json.dumps(declared, separators=(",", ":")))] if declared else []
    for more, (name, value) in itertools.product([[], other] if other else [[]], fields.items()):
        fault: Any = _fault(target, more) if more else error
        if fault is None:
            return more
        several = isinstance(value, (list, tuple))
        numbers = [*value] if several else [value]
        for _ in numbers if all(isinstance(number, int) for number in numbers) else ():
            off = _channels_read(cause_of(fault)) if fault is not None else None
            fits = [number for number in numbers if off and number == off[0]] if several else numbers
            if not off or not fits:
                break
            numbers = [number + off[1] - off[0] if number == fits[0] else number for number in numbers]
            chosen = [*more, (name, json.dumps(numbers if several else numbers[0], separators=(",", ":")))]
            fault = _fault(target, chosen)
            if fault is None:
                return chosen
    wide, got = _channels_read(error) or (0, 1)
    for path, part in parts.items():
        all_of = [*range(1, len(getattr(part.backbone_config, "stage_names", ())))]
        chosen = [(f"{path}backbone_config.out_indices", json.dumps(all_of, separators=(",", ":")))]
        if all_of and wide == len(all_of) * got and chosen[0][0] not in given and _runs(target, chosen):
            return chosen
    return []


def width_of_product(target: str, error: BaseException) -> list[tuple[str, str]]:
    """A width of a configuration in proportion, if an ``error`` says that a product reads another number of features
    than it gets, of which the width is a divisor, and the model's step runs so: what is made of several neighbours may
    have to be as wide as a field that is written for another default."""
    off = re.search(r"got \[\d+, (\d+)\] X \[(\d+), \d+\]", str(error))
    if not off:
        return []
    (config, given), (got, read) = _config(target), map(int, off.groups())
    for name, value in vars(config).items():
        width = type(value) is int and value > 1 and name not in given and got % value == 0
        if width and read * value % got == 0 and _runs(target, chosen := [(name, str(read * value // got))]):
            return chosen
    return []


def _declared_backbone(config, given: Collection[str]) -> dict | None:
    """The backbone that the class of a configuration declares, if the default one is of another kind."""
    spec = getattr(type(config), "sub_configs_defaults", {}).get("backbone_config")
    kind = getattr(spec, "model_type", None)
    if not kind or kind == config.backbone_config.model_type or any(name.startswith("backbone_") for name in given):
        return None
    return {"model_type": kind, **(getattr(spec, "init_kwargs", None) or {})}


def misspelt_fields(target: str) -> list[tuple[str, str]]:
    """The fields that the class of a configuration means to set in one inside it under a name that is misspelt
    (``archirecture``), by their right names, if the model's step runs with them."""
    config, given = _config(target)
    found = []

    def search(part, path: str) -> None:
        for key, inside in vars(part).items():
            if not hasattr(inside, "model_type"):
                continue
            spec = getattr(type(part), "sub_configs_defaults", {}).get(key)
            fields = {name for cls in type(inside).__mro__ for name in vars(cls).get("__annotations__", {})}
            fields = {name for name in fields if not name.startswith("_")}
            for name, value in (getattr(spec, "init_kwargs", None) or {}).items():
                unknown = name not in fields and not hasattr(type(inside), name)
                meant = difflib.get_close_matches(name, fields, 1, 0.9) if unknown else []
                if meant and f"{path}{key}.{meant[0]}" not in given:
                    found.append((f"{path}{key}.{meant[0]}", json.dumps(value, separators=(",", ":"))))
            search(inside, f"{path}{key}.")

    search(config, "")
    return found if found and _runs(target, found) else []


def _channels_read(error: BaseException) -> tuple[int, int] | None:
    """How many channels a convolution reads and how many it got, if an ``error`` says that these differ."""
    off = re.search(r"to have (\d+) channels, but got (\d+) channels", str(error))
    return (int(off[1]), int(off[2])) if off else None


def elements_of_lists(target: str) -> list[tuple[str, str]]:
    """A list that a configuration leaves empty, with one of the numbers that its documentation supports as elements
    (the closest to one first) and with the fields that its class computes of it, if the model's step runs so."""
    config, given = _config(target)
    for name, value in vars(config).items():
        supported = re.search(r"[Ss]upported values are ([\d., and]+)", _entry(config, name))
        if value not in ([], ()) or name in given or not supported:
            continue
        for number in sorted(map(float, re.findall(r"\d+(?:\.\d+)?", supported[1])), key=lambda found: abs(found - 1)):
            computed = vars(type(config)(**{name: [number]}))
            others = {key: other for key, other in computed.items() if key != name and key not in given}
            others = {key: other for key, other in others.items() if isinstance(other, (int, float, list))}
            changed = {key: other for key, other in others.items() if getattr(config, key, other) != other}
            fields = {name: [number], **changed}
            chosen = [(key, json.dumps(item, separators=(",", ":"))) for key, item in fields.items()]
            if _runs(target, chosen):
                return chosen
    return []


def layers_in_depth(target: str) -> list[tuple[str, str]]:
    """The numbers of layers that a configuration picks out by default, at the same shares of the depth that ``target``
    gives, which is too small for them, if the model's step runs so."""
    config, given = _config(target)
    found = []
    for path, depth in given.items():
        outer, _, key = path.rpartition(".")
        if key not in DEPTHS or not isinstance(depth, int):
            continue
        usual = getattr(part_of(type(config)(), outer, target), key, None) or depth
        for name, layers in part_of(config, outer, target).to_dict().items():
            field = f"{outer}.{name}".lstrip(".")
            numbers = [layer for layer in layers if isinstance(layer, int)] if isinstance(layers, (list, tuple)) else []
            if name.endswith("indices") and field not in given and max(numbers, default=0) >= depth:
                found.append((field, json.dumps([layer * depth // usual for layer in numbers], separators=(",", ":"))))
    return found if found and _runs(target, found) else []


def heads_that_divide(target: str, error: BaseException) -> list[tuple[str, str]]:
    """The greatest number of attention heads that divides the width of a layer, in place of one that does not, as an
    ``error`` says, and with which the model's step runs."""
    said = re.search(r"(\d+)\D+divisible by \D*heads\D*(\d+)|divisible by \D*heads\D*(\d+)\D+(\d+)", str(error))
    if said is None:
        return []
    width, heads = (int(number) for number in said.groups() if number)
    config, given = _config(target)
    parts = _parts_by_prefix(config)
    fields = [
        before + name for before, part in parts.items() for name, value in vars(part).items()
        if name.endswith("heads") and value == heads and before + name not in given
    ]  # fmt: skip
    fewer = [str(count) for count in range(heads - 1, 0, -1) if width % count == 0]
    chosen = ([(field, count)] for count in fewer for field in fields)
    return next((fields for fields in chosen if _runs(target, fields)), [])


def _parts_by_prefix(config) -> dict[str, Any]:
    """A configuration and those inside it, by what the path of their fields begins with."""
    return {"": config, **{f"{key}.": part for key, part in vars(config).items() if hasattr(part, "model_type")}}


def rotation_that_follows(target: str, error: BaseException) -> list[tuple[str, str]]:
    """The parameters of rotary positions, if an ``error`` shows that a configuration gives them once and its layers are
    of several kinds, that they rotate more of a head than their sections hold or less, or that they lack these
    sections; or an even width of heads, if it shows that these have no whole number of pairs to rotate."""
    config, given = _config(target)
    parts = _parts_by_prefix(config)
    sections = re.search(r"sum exactly to (\d+) .*split_sizes=\[([\d, ]+)\]", str(error))
    lacks = [owner for owner, name in attributes_without_value(error) if name == "mrope_section"]
    for before, part in parts.items():
        once, field = getattr(part, "rope_parameters", None), f"{before}rope_parameters"
        if width := _even_head(part, str(error)):
            return [(f"{before}head_dim", str(width))] if f"{before}head_dim" not in given else []
        kinds = dict.fromkeys(getattr(part, "layer_types", None) or ())
        if not isinstance(once, dict) or field in given or "mrope_section" in once:
            continue
        if isinstance(error, KeyError) and error.args[0] in kinds and not kinds.keys() & once.keys():
            plain = once or {"rope_type": "default", "rope_theta": getattr(part, "default_theta", 10_000.0)}
            return [(field, json.dumps(dict.fromkeys(kinds, plain), separators=(",", ":")))]
        head = getattr(part, "head_dim", None) if any(type(owner.config) is type(part) for owner in lacks) else None
        if head:
            return [(field, json.dumps({**once, "mrope_section": _shares(head // 2)}, separators=(",", ":")))]
        share = sum(map(int, sections[2].split(","))) / int(sections[1]) if sections else 1
        if share < 1 and "partial_rotary_factor" not in once:
            return [(field, json.dumps({**once, "partial_rotary_factor": share}, separators=(",", ":")))]
        if sections and share > 1 and not hasattr(part, "head_dim"):
            pairs = sum(map(int, sections[2].split(",")))
            return [(f"{before}head_dim", str(round(2 * pairs / once.get("partial_rotary_factor", 1))))]
    return []


def _even_head(config, error: str) -> int | None:
    """A width of heads that attention's kernels take, which read eight numbers at a time, if that of a configuration is
    odd, which an ``error`` says does not broadcast."""
    size, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    width = size // heads if isinstance(size, int) and isinstance(heads, int) and heads else 0
    odd = width % 2 == 1 and getattr(config, "head_dim", None) in (None, width)
    said = re.search(rf"broadcast.*\b{width + 1}\b.*\b{width}\b", error, re.DOTALL)
    return width + -width % 8 if odd and said and getattr(config, "rope_parameters", None) else None


def _shares(pairs: int) -> list[int]:
    """The pairs of numbers of a head that turn with each axis of the positions of tokens and pixels: with the place in
    the text, the width, the height and the image, or with the last three where they do not divide by four."""
    axes = 4 if pairs % 4 == 0 else 3
    return [pairs // axes + (axis < pairs % axes) for axis in range(axes)]


def values_that_follow(target: str, unset: list[str]) -> list[tuple[str, str]]:
    """The value of each field that a configuration leaves open, if each of these is about attention heads (their width
    is a share of the hidden size and each has keys of its own, unless a configuration says otherwise), or if another
    configuration of the model hands it on."""
    config, given = _config(target)
    found = []
    for field in unset:
        if field in given:  # its value did not help
            return []
        path, _, name = field.rpartition(".")
        part = part_of(config, path, target)
        part = part if hasattr(part, "hidden_size") else text_config(part)
        size, heads = (getattr(part, key, None) for key in ("hidden_size", "num_attention_heads"))
        if name == "num_key_value_heads" and heads:
            found.append((field, str(heads)))
        elif name == "head_dim" and size and heads and size % heads == 0:
            found.append((field, str(size // heads)))
        elif (value := _around(config, part, name)) is not None:
            found.append((field, json.dumps(value)))
        else:
            return []
    return found


def _around(whole, config, name: str) -> int | float | None:
    """The value of a field that a configuration lacks and the ``whole`` one has among its rotary parameters, or the
    others in its file have, which hand it on: their default, if it is the same for all."""
    if hasattr(config, name):
        return None
    rotary = getattr(whole, "rope_parameters", None) or {}
    if isinstance(rotary.get(name), (int, float)):
        return rotary[name]
    others = [
        vars(item).get(name) for item in vars(sys.modules[type(config).__module__]).values() if isinstance(item, type)
    ]
    values = {value for value in others if isinstance(value, (int, float))}
    return values.pop() if len(values) == 1 else None


def example_of(target: str, unset: list[str] | None = None) -> str | None:
    """The id of a model whose step runs, with small values of the fields that its class leaves open (``unset``, of
    transformers); None if none was found."""
    return fields_that_run(target) if target.startswith("diffusers:") else values_that_run(target, unset or [])


def fields_that_run(target: str) -> str | None:
    """The id of a model of diffusers with small values for some of the fields that its class leaves open, with which
    its step runs; None if it does not with any that are tried, the fewest first."""
    import diffusers

    match = TARGET.fullmatch(target)
    assert match is not None
    cls, given = getattr(diffusers, match["model"]), given_fields(match["fields"], target)
    takes = inspect.signature(cls).parameters.items()
    channels = 3 if hasattr(cls, "encode") else 32  # of an image; of a latent, for norms of 32 groups
    sizes = {name: _small(cls, name, item.annotation, channels) for name, item in takes if name not in given}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    widths = [item.default for name, item in takes if name in HEADS and isinstance(item.default, int)]
    if "cross_attention_dim" in sizes and len(widths) == len(HEADS):  # of a text after its projection
        sizes["cross_attention_dim"] = math.prod(widths)
    needed = {name for name, item in takes if item.default is item.empty}
    tried: list[list[tuple[str, str]]] = []
    for pattern in ("$", "in_channels$", "(in|out)_channels$", "((in|out)_channels|patch_size)$", "."):
        chosen = {
            name: sizes[name] for name, item in takes
            if name in sizes and (name in needed or (item.default is None and re.match(pattern, name)))
        }  # fmt: skip
        for whole in (chosen, chosen | _that_go_with(cls, chosen, given)):
            fields = [(name, json.dumps(value, separators=(",", ":"))) for name, value in whole.items()]
            if fields and fields not in tried and _runs(target, fields):
                return _with(target, fields)
            tried.append(fields)
    return None


def _that_go_with(cls, chosen: dict, given: Collection[str]) -> dict:
    """Fields with a default that do not go with the ``chosen`` ones: a layer of each kind for a list that names two
    layers, of few heads, so that it can run for real, and axes of rotary positions that make up the width of a head."""
    defaults = {name: item.default for name, item in inspect.signature(cls).parameters.items() if name not in given}
    lists = any(name.endswith("_layers") and isinstance(value, list) for name, value in chosen.items())
    depths = [name for name in ("num_layers", "num_single_layers") if isinstance(defaults.get(name), int)]
    found: dict[str, Any] = dict.fromkeys(depths, 1) if lists and len(depths) == 2 else {}
    if found and isinstance(defaults.get("num_attention_heads"), int):
        found["num_attention_heads"] = 4
    axes, width = defaults.get("axes_dims_rope"), defaults.get("attention_head_dim")
    if isinstance(axes, (list, tuple)) and isinstance(width, int) and sum(axes) < width:
        found["axes_dims_rope"] = [width - sum(axes), *axes]
    return found


def values_that_run(target: str, unset: list[str]) -> str | None:
    """The id of a model of transformers with small values for the fields that its configuration leaves open, with which
    its step runs, or does but for the size of the model; None if it does not."""
    from simdev.graphs.capture.run import ON_VALUES

    config, _ = _config(target)
    if not unset or config is None:
        return None
    lists = [field.rpartition(".")[0] for field in unset if field.endswith("layer_types")]
    # A model of two layers has a list that can be typed.
    unset = [*(f"{before}.num_hidden_layers".lstrip(".") for before in dict.fromkeys(lists)), *unset]
    said = [field for field in unset if _documented_value(*owner_of(config, field, target)) is not None]
    for by_documentation, size in itertools.product((True, False) if said else (True,), (64, 1)):
        values: dict[str, Any] = {
            "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, r"\w*layer_types": [],
            r"\w*(rate|dropout)": 0.0,
            r"\w*(local|routed|num)_experts": 8, r"\w*channels": [size], r"\w*kernel_sizes": [3],
            r"\w*(size|dim)": size, r"\w*scale_factor_list": [1, 2, 4, 8], r"\w*window": 512,
            r"class_\w+": [0] * config.num_labels, "architecture": SMALL_TIMM[0],
        }  # fmt: skip
        chosen: dict[str, Any] = {}
        more = unset
        while more:
            for field in more:
                owner, name = owner_of(config, field, target)
                kinds = [kind for kind in values if re.fullmatch(kind, name)]
                if declared_type(owner, name):
                    kinds = [kind for kind in kinds if isinstance(values[kind], list) == is_list(owner, name)]
                usual = values[kinds[0]] if kinds else [] if is_list(owner, name) else 1
                chosen[field] = False if is_switch(owner, name) else usual
                if "float" in declared_type(owner, name) and isinstance(chosen[field], list):
                    chosen[field] = [float(number) for number in chosen[field]]
                if chosen[field] == []:
                    chosen[field] = 2 * _kinds_compared(target, name)[:1]
                found = _documented_value(owner, name) if by_documentation else None
                found = found or _entries_read(target, owner, name)
                found = _declared_backbone(config, ()) if field == "backbone_config" else found
                chosen[field] = found or chosen[field]
            fields = [(field, json.dumps(value, separators=(",", ":"))) for field, value in chosen.items()]
            fault = _fault(target, fields)
            if fault is None or isinstance(fault, ON_VALUES):  # of which a smaller model is captured
                return _with(target, fields)
            cause, whole = cause_of(fault), _with(target, fields)
            if fits := widths_that_fit(whole, cause):
                return _with(whole, fits)
            more = [field for field in open_fields(whole, cause) if field not in chosen]
            if not more and _channels_read(cause) and "backbone_config" not in chosen:
                more = ["backbone_config"] if _declared_backbone(config, chosen) else []
            names = [field.replace("model_args", "architecture") for field in chosen if field.endswith("model_args")]
            if not more and "unexpected keyword argument" in str(cause):  # which vision transformers take
                more = [name for name in names if name not in chosen]
    return None


def _documented_value(config, name: str) -> Any:
    """The default that the documentation of a configuration gives to a field that has another value, or the example of
    a text (``e.g. `"1/4"```); None without one."""
    part = _entry(config, name)
    shown = re.search(r"defaults to `([^`]+)`\)", part) or re.search(r"e\.g\. `([\"'][^`]+)`", part)
    try:
        value = ast.literal_eval(shown[1]) if shown else None
    except (SyntaxError, ValueError):  # words
        return None
    return value if value != getattr(config, name, None) else None


def _entry(config, name: str) -> str:
    """What the documentation of a configuration says of a field."""
    said = re.search(rf"^ *{name} \(`.*?(?=^ *\w+ \(`|\Z)", type(config).__doc__ or "", re.MULTILINE | re.DOTALL)
    return said[0] if said else ""


def _entries_read(target: str, config, name: str) -> dict | None:
    """A dictionary with the entries that a model's code unpacks as the kernel, the stride and the padding of
    convolutions (``nn.Conv2d(8, 8, *name["key"])``), which keep the size of an image, or reads as the width of a model
    of timm; None for another field."""
    match = TARGET.fullmatch(target)
    assert match is not None
    code = inspect.getsource(sys.modules[getattr(sys.modules["transformers"], match["model"]).__module__])
    keys = re.findall(rf"\b{name}\[[\"'](\w+)[\"']\]", code)
    if not declared_type(config, name).startswith("dict"):
        return None
    if f"*{name}[" in code:
        return {key: [1, 1, 0] for key in keys}
    return dict.fromkeys(keys, SMALL_TIMM[1]) if name == "model_args" and {*keys} == {"embed_dim"} else None


def _kinds_compared(target: str, name: str) -> list[str]:
    """The kinds of layers with which a model's code compares the elements of a list of its configuration."""
    match = TARGET.fullmatch(target)
    assert match is not None
    code = inspect.getsource(sys.modules[getattr(sys.modules["transformers"], match["model"]).__module__])
    return re.findall(rf"\b{name}\[\w+\] == [\"'](\w+)[\"']", code)


def _small(cls, name: str, kind, channels: int) -> int | list | dict | None:
    """A small value of a field of a class of diffusers; None for a name and a type (``kind``) that say too little."""
    if kind is dict:  # with the keys that the code reads of it: of factors, one for all
        code = inspect.getsource(sys.modules[cls.__module__])
        keys = re.findall(rf"\b{name}\[[\"'](\w+)[\"']\]", code)
        return {key: [1.0] for key in dict.fromkeys(keys)} or None
    values: dict[str, int | list[int]] = {
        "(in|out)_channels": channels, "block_out_channels": [64, 128], "layers_per_block": 1, "patch_size": 2,
        r"\w*compression_ratio": 2, "sample_size": 32, r"\w*(_dim|_channels|_dim_t5)": 64,
    }  # fmt: skip
    if kind == list[int] and name != "block_out_channels":  # of two texts, or the numbers of two layers
        values = {r"\w+_layers": [0, 1], r"\w*_channels": [64, 64]}
    return next((value for pattern, value in values.items() if re.fullmatch(pattern, name)), None)


def _config(target: str) -> tuple[Any, dict]:
    """The configuration of a model of transformers with the fields that its id gives, and these; None for another
    model."""
    match = TARGET.fullmatch(target)
    if match is None or match["package"] != "transformers":
        return None, {}
    make, given = (
        getattr(sys.modules["transformers"], match["model"]).config_class,
        given_fields(match["fields"], target),
    )
    config = with_derived(make(), given, lambda own: make(**own))
    for path, value in given.items():
        owner, key = owner_of(config, path, target)
        set_field(owner, key, value)
    return config, given
