"""Models of Hugging Face's transformers as parallel models: transformers builds and parallelises them.

A model is named by a configuration (a file ``config.json``, a folder that holds one, or an id ``org/name`` whose
configuration lies in Hugging Face's own cache) or by a class, ``transformers:Qwen3ForCausalLM``; fields of the
configuration may follow in brackets. Nothing is downloaded, and no code of a repository is executed.

Tensor, expert and sharded data parallelism are those of ``transformers.distributed``, by the plans that the model's
class brings (``maybe_distribute_model`` with a ``DistributedConfig``). An axis without a plan is not offered. Experts
are divided among the ranks of ``ep`` and ``tp`` together, as transformers carves them out of ``fsdp x tp``.

A pipeline stage keeps its layers of the model's list of layers; ``inputs_embeds`` brings the activations to all stages
but the first one. Embeddings stay on the first stage, the final norm and the head on the last one. Tied embeddings are
one parameter without a pipeline. On several stages, the first and the last one hold a copy each; the all-reduce that
keeps the copies equal is left out.

Parameters are float32 in storage and bfloat16 in computation (FSDP's mixed precision); on a mesh without data-parallel
axes they are bfloat16 alone. Routers are even.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput, SimdevError, UnknownName, Unsupported, quoted
from simdev.files import MIB, parse_json, read_text
from simdev.graphs.parallel_model import ParallelModel, Part, Stage
from simdev.graphs.selective import CONTEXTS, eager_kind
from simdev.parallel.capture.blocks import Blocks, chosen, kind_of, kinds_of, lists_of_blocks
from simdev.parallel.capture.fakes import to_fakes
from simdev.parallel.capture.stage import few_parts
from simdev.parallel.mesh import Mesh

RECOMPUTE = ("none", "selective", "full")
MAX_CONFIG = MIB
ID = re.compile(r"[\w.-]+/[\w.-]+")
LONGEST = 8192  # tokens of a sequence, unless parameters say otherwise
MOST_ENTRIES = 1 << 16  # of a list: one entry for each layer
MOST_NUMBER = 1 << 31
MOST = {"layer": 4096, "depth": 4096, "block": 1 << 16, "expert": 1 << 16}  # modules, by a word in the field's name
COUNTS = "num_hidden_layers", "n_layer", "num_layers", "n_layers"  # fields that count layers
OWN = ("length", "microbatch", "recompute")  # parameters that are no fields of a configuration


def find_hugging_face(path: str, changes: Mapping[str, object]) -> tuple[ParallelModel, dict[str, Any]] | None:
    """The model that ``path`` names, as the module says, with ``changes``; None for a name that is no model of Hugging
    Face. Raises :class:`InvalidInput` or :class:`Unsupported`."""
    if path.startswith("transformers:"):
        return hugging_face_model({}, changes, path, path.removeprefix("transformers:"))
    file = _config_path(path)
    if file is None:
        return None
    config = parse_json(read_text(file, MAX_CONFIG), file)
    if not isinstance(config, dict):
        raise InvalidInput("expected an object", source=file)
    return hugging_face_model(config, changes, str(file))


def _config_path(path: str) -> Path | None:
    """Where the configuration lies; None if ``path`` names none."""
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


def hugging_face_model(config: Mapping[str, Any], changes: Mapping[str, object], source: str, cls: str = ""):
    """The parallel model of a configuration and its parameters.

    ``config`` is what ``config.json`` holds; ``changes`` are fields of it, or parameters of :data:`OWN`; ``cls`` is the
    class of transformers (otherwise the configuration's ``architectures``). Raises
    :class:`InvalidInput` naming ``source`` and the field, :class:`Unsupported` without transformers.
    """
    fields = {key: value for key, value in changes.items() if key not in OWN}
    name, text = configuration(config, fields, source, cls)
    built = TransformersModel(source, name, text)
    built = replace(built, facts=_facts(built))
    model = parallel_model_of(built, version("transformers"))
    given = model.parameters("", {key: value for key, value in changes.items() if key in OWN})
    built.check(given, Mesh({}))
    return model, given


def parallel_model_of(built: TransformersModel, release: str) -> ParallelModel:
    """A model of this release of transformers as a parallel model. Nothing is built."""
    parameters: dict[str, Any] = {
        "layers": built.layers,
        "length": built.length,
        "microbatch": 1,
        "recompute": "none",
        "width": built.width,
    }
    return ParallelModel(
        built.source,
        built,
        {},
        parameters,
        built.axes,
        built.flops,
        source=f"transformers {release}, {built.name}",
        checks=built.check,
        kinds=built.kinds if built.mixed else None,
        identity=f"{built.name} {built.config} transformers {release}",
        splits_tokens=False,
        pipeline=built.pipeline,
        notes=built.notes,
        precision=precision,
        selective=True,
    )


def precision(mesh: Mesh) -> str:
    """FSDP's mixed precision on a mesh with data-parallel ranks (replicas are FSDP's, too), bfloat16 elsewhere."""
    return "mixed" if mesh.replicas > 1 else "bfloat16"


def configuration(config: Mapping, fields: Mapping, source: str, cls: str) -> tuple[str, str]:
    """The name of the class and the whole configuration as JSON."""
    check_numbers(config, source)
    check_numbers(fields, source)
    transformers = _transformers(source)
    from simdev.graphs.capture.packages import part_of, with_derived

    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise InvalidInput(f"expected a text, got {quoted(kind)}", source=source, field="model_type")
    if cls:
        known = getattr(transformers, cls, None)
        if not inspect.isclass(known) or not hasattr(known, "config_class"):
            raise UnknownName("model", cls, [key for key in dir(transformers) if key[:1].isupper()], source=source)
        kind = known.config_class.model_type
    try:
        config_class = transformers.CONFIG_MAPPING[kind]
    except KeyError:
        raise UnknownName("model_type", str(kind), transformers.CONFIG_MAPPING.keys(), source=source) from None
    try:
        read = {key: value for key, value in config.items() if key != "auto_map"}
        named = {"num_hidden_layers" if key == "layers" else key: value for key, value in fields.items()}
        built = with_derived(config_class.from_dict(read), named, lambda new: config_class.from_dict(read | new))
        own = built.get_text_config()
        for path, value in fields.items():
            outer, _, key = path.rpartition(".")
            key = "num_hidden_layers" if path == "layers" else key
            holder = part_of(built, outer, source)
            if holder is built and not hasattr(built, key):
                holder = own
            if not hasattr(holder, key):
                raise UnknownName("field", path, [*OWN, *vars(holder)], source=source)
            setattr(holder, key, value)
            if key == "num_hidden_layers":
                _cut_lists(own if holder is built else holder)
        text = json.dumps(built.to_dict(), sort_keys=True, default=str)
    except (UnknownName, InvalidInput):
        raise
    except Exception as error:  # of the configuration's own checks
        raise InvalidInput(f"transformers refuses the configuration: {_first(error)}", source=source) from error
    return cls or _class_name(transformers, config, str(kind), source), text


def check_numbers(config: Mapping[str, object], source: str) -> None:
    """Refuse numbers and lists that no model has and that would be built for hours: raises :class:`InvalidInput` naming
    the field. ``config`` holds values of JSON, which may be nested."""
    stack: list[tuple[str, object]] = list(config.items())
    while stack:
        field, value = stack.pop()
        if isinstance(value, Mapping):
            stack += [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            if len(value) > MOST_ENTRIES:
                raise InvalidInput(f"{len(value)} entries; at most {MOST_ENTRIES}", source=source, field=field)
            stack += [(field, inner) for inner in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            counted = "size" not in field and "per_layer" not in field
            most = next((most for word, most in MOST.items() if counted and word in field), MOST_NUMBER)
            if not -MOST_NUMBER <= value <= most:
                raise InvalidInput(f"{quoted(value)} is too large; at most {most}", source=source, field=field)


def _cut_lists(config) -> None:
    """Fields with an entry for each layer keep those of the layers that are left."""
    layers = config.num_hidden_layers
    for key, value in list(vars(config).items()):
        if key in ("layer_types", "mlp_layer_types") and isinstance(value, list) and len(value) > layers:
            setattr(config, key, value[:layers])


def _class_name(transformers, config: Mapping, kind: str, source: str) -> str:
    named = config.get("architectures")
    for name in named if isinstance(named, list) else ():
        if inspect.isclass(getattr(transformers, str(name), None)):
            return str(name)
    from transformers.models.auto import modeling_auto as auto

    for mapping in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", ""):
        names = getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES", {})
        if kind in names:
            return names[kind] if isinstance(names[kind], str) else names[kind][0]
    raise InvalidInput("no class of transformers trains it", source=source, field="model_type")


def _transformers(source: str):
    import importlib.util

    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise Unsupported(f"{source}: building the model needs {package}: pip install {package}")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _first(error: BaseException) -> str:
    """The first line of the error that lies deepest."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__


@dataclass(frozen=True)
class TransformersModel:
    """Builds stages of a model of transformers. ``config`` is its whole configuration as JSON."""

    source: str
    name: str
    config: str
    facts: tuple[tuple[str, Any], ...] = field(default=(), compare=False, repr=False)

    # What the model is ---------------------------------------------------------------------------------------------

    def build(self, dtype=None, numbers: Sequence[int] = ()):
        """The model on ``meta``: with the layers of these numbers alone, or the whole model."""
        whole = self._build(self.config, dtype)
        blocks = _blocks(whole)
        if blocks is None or not numbers or len(numbers) == len(blocks.modules) or (self.facts and self.layers == 1):
            return whole
        # Modules outside of the list may depend on the number of layers: transformers builds the short model itself
        # where this gives the layers that are wanted.
        wanted = [kind_of(blocks.modules[number]) for number in numbers]
        with suppress(InvalidInput):
            short = self._build(_cut(self.config, len(blocks.modules), numbers), dtype)
            found = _blocks(short)
            if found is not None and [kind_of(module) for module in found.modules] == wanted:
                return short
        _keep_layers(whole, blocks, numbers)
        return whole

    def _build(self, text: str, dtype):
        import torch
        from transformers.initialization import no_init_weights

        from simdev.graphs.capture.packages import keep_layers

        transformers = _transformers(self.source)
        try:
            cls = getattr(transformers, self.name)
            config = cls.config_class.from_dict(json.loads(text))
            keep_layers(config)
            with torch.device("meta"), no_init_weights():
                model = cls._from_config(config, dtype=dtype or torch.float32)
            model.tie_weights()  # which belongs to the initialisation that was left out
            if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
                model.config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # T5's default is None
            return model
        except Exception as error:
            message = f"transformers cannot build {self.name}: {_first(error)}"
            raise InvalidInput(message, source=self.source) from error

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return dict(self.facts or _facts(self))

    @property
    def layers(self) -> int:
        return self._facts["layers"]

    @property
    def mixed(self) -> bool:
        return len(set(self._facts["kinds"])) > 1

    @property
    def length(self) -> int:
        return self._facts["length"]

    @property
    def width(self) -> int:
        return self._facts["width"]

    @property
    def active(self) -> int:
        """Experts that each token goes to; 1 without experts."""
        return self._facts["active"]

    @property
    def language(self) -> bool:
        """Whether it is a causal language model, whose stages take tokens."""
        return "CausalLM" in self.name or "LMHead" in self.name

    @property
    def axes(self) -> tuple[str, ...]:
        return self._facts["axes"]

    @property
    def pipeline(self) -> bool:
        return self._facts["pipeline"]

    @property
    def notes(self) -> tuple[str, ...]:
        return self._facts["notes"]

    @property
    def parameters(self) -> int:
        """Elements of all parameters of the library's own model; a tied parameter counts once."""
        return self._facts["parameters"]

    def kinds(self, parameters: Mapping[str, Any]) -> tuple[int, ...]:
        """The kind of each layer."""
        return self._facts["kinds"]

    def check(self, p: Mapping[str, Any], mesh: Mesh) -> None:
        """Raise :class:`InvalidInput` for what the model cannot do."""
        if eager_kind(p["recompute"]) not in self._facts["recompute"]:
            raise UnknownName("recompute", str(p["recompute"]), self._facts["recompute"], source=self.source)
        spread = {"num_attention_heads": mesh["tp"], "num_key_value_heads": mesh["tp"]}
        if mesh["ep"] > 1:
            spread["experts"] = mesh["ep"] * mesh["tp"]
        for name, ranks in spread.items():
            for count in self._facts["counts"][name]:
                if count % ranks:
                    axes = "expert- and tensor-parallel" if name == "experts" else "tensor-parallel"
                    message = f"{count} does not divide by {ranks} {axes} ranks"
                    raise InvalidInput(message, source=self.source, field=name)
        if mesh["ep"] > 1:
            rows = int(p["microbatch"]) * int(p["length"]) * self._facts["active"]
            if rows % (mesh["ep"] * mesh["tp"] ** 2):
                message = f"{rows} rows (tokens times active experts) do not divide among the ranks of ep and tp"
                raise InvalidInput(message, source=self.source, field="length")
        longest = self._facts["longest"]
        if longest and int(p["length"]) > longest:
            message = f"the model has {longest} positions, not {p['length']}"
            raise InvalidInput(message, source=self.source, field="length")

    def flops(self, p: Mapping[str, Any]) -> float:
        """Model FLOPs of one sequence, forward and backward: counted by PyTorch's ``FlopCounterMode`` on the unsharded
        model, without recomputation."""
        return _flops(self, int(p["length"]))

    def whole_flops(self, p: Mapping[str, Any]) -> float:
        """What ``FlopCounterMode`` counts on the unsharded model with all its layers; :meth:`flops` counts few layers
        and repeats them."""
        return _count_flops(self, Part(self.layers, kinds=self.kinds({}) if self.mixed else ()), int(p["length"]))

    # A stage -------------------------------------------------------------------------------------------------------

    def __call__(self, mesh, part: Part, *, layers, length, microbatch, recompute, width) -> Stage:
        from simdev.parallel.capture.packages import distribute, grouped_adam

        whole = self.build(numbers=chosen(self._facts["kinds"], part.kinds, part.layers))
        module = whole
        if not part.last:
            module = whole.base_model
            for name in self._facts["after"]:
                _identity(module, name)
        if not part.first:
            for name in self._facts["before"]:
                _identity(module, name, tied_to=whole if part.last else None)
        if recompute != "none":
            recompute_layers(module, recompute)
        module.train()
        distribute(module, mesh, self.source)
        inputs = _inputs(self, module, part, microbatch, length, width)
        ways = {axis: mesh[axis].size() if axis in (mesh.mesh_dim_names or ()) else 1 for axis in ("ep", "tp")}
        rows = microbatch * length * self._facts["active"] // (ways["ep"] * ways["tp"] ** 2) if ways["ep"] > 1 else 1
        return Stage(module, inputs, grouped_adam, _sync, context=on_gpu_unpacked, rows=rows)


@lru_cache(maxsize=64)
def _facts(model: TransformersModel) -> tuple[tuple[str, Any], ...]:
    """What planning needs to know of a model: read once from the model itself."""
    whole = model.build()
    try:
        facts = dict(_read(whole))
        if facts["layers"] > 1 and not _may_be_cut(replace(model, facts=tuple(facts.items()))):
            facts |= {"layers": 1, "kinds": (0,), "pipeline": False, "before": (), "after": ()}
            facts["notes"] = (*facts["notes"], "no pipeline: its layers depend on each other")
        return tuple(facts.items())
    except SimdevError:
        raise
    except Exception as error:  # of a configuration with rules of its own
        raise InvalidInput(f"cannot be planned: {_first(error)}", source=model.source) from error


def _read(whole) -> tuple[tuple[str, Any], ...]:
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    own = whole.config.get_text_config()
    blocks = _blocks(whole)
    before, after, why = _ends(whole, blocks)
    notes, axes = [], ["dp_replicate", "dp_shard"]
    experts = _experts(whole)
    if experts and whole.ep_plan:
        axes.append("ep")
    elif experts:
        notes.append("no expert parallelism: the class brings no plan for it")
    if whole.tp_plan:
        axes.append("tp")
    else:
        notes.append("no tensor parallelism: the class brings no plan for it")
    if why:
        notes.append(f"no pipeline: {why}")
    longest = _longest(whole)
    texts = "input_ids" in inspect.signature(whole.forward).parameters and not whole.config.is_encoder_decoder
    split = get_kv_heads_per_rank(whole.tp_plan or {}, 1, 2) is None  # keys have heads, and their plan divides them
    counts = {
        "num_attention_heads": _numbers(own, "num_attention_heads"),
        "num_key_value_heads": _numbers(own, "num_key_value_heads") if split else (),
        "experts": (experts,) if experts else (),
    }
    recompute = RECOMPUTE if whole.supports_gradient_checkpointing else ("none",)
    if len(recompute) == 1:
        notes.append("no recomputation: the class does not support it")
    return tuple(
        {
            "layers": len(blocks.modules) if blocks else 1,
            "kinds": kinds_of(blocks.modules) if blocks else (0,),
            "length": min(LONGEST, longest or LONGEST) if texts else 1,
            "longest": longest if texts else 0,
            "width": int(getattr(own, "hidden_size", 0) or 0),
            "axes": tuple(axes),
            "before": before,
            "after": after,
            "pipeline": not why,
            "notes": tuple(notes),
            "counts": counts,
            "active": int(getattr(own, "num_experts_per_tok", 0) or getattr(own, "moe_topk", 0) or 1),
            "recompute": recompute,
            "parameters": sum(p.numel() for p in whole.parameters()),
        }.items()
    )


def _numbers(config, field: str) -> tuple[int, ...]:
    """The values of a field that may vary across layers."""
    layers = getattr(config, "per_layer_config", None)
    values: list = []
    for one in layers if isinstance(layers, (list, tuple)) and layers else [config]:
        value = getattr(one, field, None)
        values += value if isinstance(value, (list, tuple)) else [value]
    return tuple(sorted({n for n in values if isinstance(n, int) and n > 0}))


def _experts(model) -> int:
    """How many experts a layer has; 0 for a model without experts."""
    found = [getattr(m, "num_experts", 0) for m in model.modules() if type(m).__name__.endswith("Experts")]
    return max([n for n in found if isinstance(n, int)], default=0)


def _longest(model) -> int:
    """Positions that the model has; 0 if it says none."""
    own = model.config.get_text_config()
    values = [getattr(own, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return next((n for n in values if isinstance(n, int) and n > 0), 0)


def _blocks(model) -> Blocks | None:
    """The one list of blocks of a model; None where it has several, or none."""
    found = lists_of_blocks(model)
    return found[0] if len(found) == 1 else None


def _ends(model, blocks: Blocks | None) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Names (in the base model) of the modules before the list of layers and of those after it, by the class's
    pipeline plan; and why there is no pipeline."""
    if blocks is None:
        return (), (), "its blocks are in several lists, or in none"
    base, prefix = model.base_model, f"{model.base_model_prefix}."
    plan = {name.removeprefix(prefix): None for name in (model.pp_plan or {}) if name.startswith(prefix)}
    if not plan or base is model:
        return (), (), "the class brings no plan for it"
    names, layers = list(plan), blocks.name.removeprefix(prefix)
    if layers not in names:
        return (), (), "its pipeline plan does not name the list of layers"
    owned = {name.partition(".")[0] for name, _ in base.named_parameters()}
    if owned - set(names):
        return (), (), f"its pipeline plan does not say where {', '.join(sorted(owned - set(names)))} belongs"
    return tuple(names[: names.index(layers)]), tuple(names[names.index(layers) + 1 :]), ""


def _cut(text: str, total: int, numbers: Sequence[int]) -> str:
    """The configuration of a model with the layers of these numbers of its ``total`` layers."""

    def cut(config: dict) -> dict:
        found = dict(config)
        for key, value in config.items():
            if isinstance(value, list) and len(value) == total:
                found[key] = [value[number] for number in numbers]
            elif key in COUNTS and value == total:
                found[key] = len(numbers)
            elif isinstance(value, dict):
                found[key] = cut(value)
        return found

    return json.dumps(cut(json.loads(text)))


def _keep_layers(model, blocks: Blocks, numbers: Sequence[int]) -> None:
    """Keep the layers of these numbers, in this order; fields of configurations with an entry a layer keep theirs."""
    from torch import nn

    total = len(blocks.modules)
    parent, _, name = blocks.name.rpartition(".")
    layers = [blocks.modules[number] for number in numbers]
    setattr(model.get_submodule(parent), name, nn.ModuleList(layers))
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = number
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        for key, value in list(vars(config).items()):
            if isinstance(value, (list, tuple)) and len(value) == total:
                vars(config)[key] = [value[number] for number in numbers]
        for key in COUNTS:
            if vars(config).get(key) == total:
                vars(config)[key] = len(numbers)


def _identity(model, name: str, tied_to=None) -> None:
    """Replace the module ``name``, which another stage holds."""
    from torch import nn

    holder, attribute = model, name
    if tied_to is not None:
        holder = tied_to.base_model
        if getattr(tied_to.config.get_text_config(), "tie_word_embeddings", False) and hasattr(tied_to, "lm_head"):
            head = tied_to.lm_head  # a copy of the embedding of the first stage
            head.weight = nn.Parameter(head.weight.detach(), head.weight.requires_grad)
            tied_to.config.get_text_config().tie_word_embeddings = False
            tied_to.all_tied_weights_keys = {}
    setattr(holder, attribute, nn.Identity())


def recompute_layers(model, recompute: str, preserve_rng_state: bool = False) -> None:
    """As :func:`simdev.parallel.plain.recompute_blocks`, by transformers."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if recompute in CONTEXTS:
        options["context_fn"] = CONTEXTS[recompute]
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)


def _inputs(model: TransformersModel, module, part: Part, microbatch: int, length: int, width: int):
    """Lets the module take the tensors of a microbatch by position, and returns the function that builds them."""
    import torch

    forward, language = module.forward, model.language
    if part.first and part.last and not language:
        return _own_inputs(module, microbatch, length if length > 1 else None)

    def tokens():
        return torch.zeros(microbatch, length, dtype=torch.int64)

    def x():
        return torch.zeros(microbatch, length, width, dtype=torch.bfloat16, requires_grad=True)

    key = "input_ids" if part.first else "inputs_embeds"
    if part.last:
        module.forward = lambda x, labels: forward(**{key: x}, labels=labels, use_cache=False).loss
        return lambda: (tokens() if part.first else x(), tokens())
    module.forward = lambda x: forward(**{key: x}, use_cache=False).last_hidden_state
    return lambda: (tokens() if part.first else x(),)


def _own_inputs(module, microbatch: int, length: int | None):
    """Inputs that the configuration implies, with labels (:mod:`simdev.graphs.capture.packages`)."""
    from simdev.graphs.capture.packages import loss_of
    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    forward = module.forward
    names: list[str] = []

    @wraps(forward)  # whose arguments say which inputs the model takes
    def run(*tensors):
        return loss_of(forward(**dict(zip(names, tensors, strict=True))))

    def inputs():
        found = made_up_inputs(module, microbatch, length)
        dtype = next(module.parameters()).dtype  # of a model that is bfloat16 as a whole, its inputs are, too
        names[:] = list(found)
        return tuple(value.to(dtype) if value.is_floating_point() else value for value in found.values())

    module.forward = run
    return inputs


def _sync(module, last: bool) -> None:
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last)


@contextmanager
def on_gpu_unpacked() -> Iterator[None]:
    """What the stage runs inside: kernels as a GPU chooses them, and no warnings of the libraries."""
    from simdev.graphs.capture.rewrites import as_on_gpu
    from simdev.parallel.capture.packages import unpacked

    with warnings.catch_warnings(), as_on_gpu(ranks=True), unpacked():
        warnings.simplefilter("ignore")
        yield


def _may_be_cut(model: TransformersModel) -> bool:
    """Whether the model runs with few of its layers: some layers read what others have stored."""
    part = few_parts(Part(model.layers, kinds=model.kinds({}) if model.mixed else ()))[0][0]
    if part.layers == model.layers:
        return True
    try:
        _count_flops(model, part, model.length)
    except Exception:
        return False
    return True


@lru_cache(maxsize=64)
def _flops(model: TransformersModel, length: int) -> float:
    whole = Part(model.layers, kinds=model.kinds({}) if model.mixed else ())
    few, more = few_parts(whole)
    counted = [_count_flops(model, part, length) for part in few]
    return counted[0] + (counted[1] - counted[0]) * more if more else counted[0]


@lru_cache(maxsize=256)
def _count_flops(model: TransformersModel, part: Part, length: int) -> float:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture.trace import flop_counter_mode

    module = model.build(torch.bfloat16, chosen(model.kinds({}), part.kinds, part.layers))
    module.train()
    inputs = _inputs(model, module, Part(1), 1, length, model.width)
    with FakeTensorMode(allow_non_fake_inputs=True), on_gpu_unpacked():
        to_fakes(module)
        tensors = inputs()
        with flop_counter_mode() as counter:
            module(*tensors).backward()
    return float(counter.get_total_flops())
