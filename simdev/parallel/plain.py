"""A plain PyTorch module as a parallel model: ``my_model.py:make_step`` returns the ``TrainingStep`` that ``simdev
capture`` takes, without any parallel code, and simdev spreads it.

Its repeated blocks are found (:mod:`simdev.parallel.capture.blocks`). ``dp_shard`` is FSDP2 around each block and the
whole model, ``dp_replicate`` alone is a replica on each rank (FSDP2's ``replicate``). ``recompute=full`` keeps the
input of each block and computes the block again; ``selective`` also keeps attention and every second product.
``reshard_after_forward=false`` keeps the gathered parameters of a block until its backward pass (ZeRO-2). Parameters
keep the data type that the code gives them in storage; FSDP computes in bfloat16 if they are float32.

A model of timm, torchvision or diffusers is such a module, too: ``timm:vit_large_patch16_224``.

``tp`` divides products by the plan that the step passes (``TrainingStep.tp_plan``), or by one that a rule derives
(:mod:`simdev.parallel.capture.tensor_rule`). ``pp`` cuts the list of blocks; what runs before the blocks stays on the
first stage, what runs after them on the last one (:mod:`simdev.parallel.capture.pieces`). A model whose blocks read
more than the result of the block before has no pipeline. A parameter that is used before and after the blocks (tied
embeddings) has a copy on both ends; the all-reduce between the copies is left out.
``length`` is the tokens of a sample, for the throughput that the table shows; the code decides what a sample is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simdev.errors import InvalidInput, SimdevError, UnknownName, Unsupported
from simdev.graphs.capture import is_package_model, sentence
from simdev.graphs.parallel_model import ParallelModel, Part, Stage
from simdev.graphs.selective import CONTEXTS, eager_kind
from simdev.graphs.workload import Step, TrainingStep
from simdev.parallel.capture.blocks import Blocks, chosen, kinds_of, lists_of_blocks, sharing
from simdev.parallel.capture.fakes import to_fakes
from simdev.parallel.mesh import Mesh
from simdev.user_file import import_file

if TYPE_CHECKING:
    from simdev.parallel.capture.pieces import Ends

RECOMPUTE = ("none", "selective", "full")
AXES = ("dp_replicate", "dp_shard")  # those that every model has
SAMPLES = 7  # of a package's model, whose other inputs hardly have this size
SMALL_STATES = ("torchao.optim", "bitsandbytes")  # whose updates are compiled, or kernels of their own


def find_plain(name: str, changes: Mapping[str, object]) -> tuple[ParallelModel, dict[str, Any]]:
    """The parallel model of ``FILE.py:make_step`` or of a package's model. The file is executed. Raises
    :class:`InvalidInput` naming it, :class:`Unsupported` without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(f"{name}: building the model needs PyTorch: pip install torch")
    built = PlainModel(name, _digest(name))
    built = replace(built, facts=_facts(built))  # worker processes need not read them again
    parameters: dict[str, Any] = {
        "layers": built.layers,
        "length": 1,
        "microbatch": 1,
        "recompute": "none",
        "reshard_after_forward": True,
    }
    model = ParallelModel(
        name,
        built,
        {},
        parameters,
        (*AXES, "tp") if built.tp_plan else AXES,
        built.flops,
        source=name,
        checks=built.check,
        kinds=built.kinds if len(set(built.kinds({}))) > 1 else None,
        identity=f"{name} {built.digest}",
        splits_tokens=False,
        pipeline=built.ends is not None,
        notes=built.notes,
        precision=built.precision,
        selective=True,
    )
    given = model.parameters("", changes)
    built.check(given, Mesh({}))
    return model, given


def _digest(name: str) -> str:
    """Of the file; of the package's version for a package's model."""
    if is_package_model(name):
        return version(name.partition(":")[0])
    path = Path(name.rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


@dataclass(frozen=True)
class Facts:
    """What planning needs to know of a plain model.

    ``blocks`` is the dotted name of the list of blocks, empty if there are several; ``kinds`` the kind of each block
    that a capture may leave out and repeat, of one list after another (one entry: none may). ``tp_plan`` maps names of
    modules to tensor-parallel styles (:mod:`simdev.parallel.capture.tensor_rule`); the ranks of ``tp`` have to divide
    the sizes ``heads``. ``ends`` is
    what runs before and after the blocks; None: no pipeline. ``outside`` names blocks whose parameters are read while
    they do not run, which FSDP shards with the whole model. ``notes`` say what is not offered. ``parameters`` counts
    elements; a tied parameter counts once. ``optimizers`` is how many the step has.
    """

    blocks: str
    kinds: tuple[int, ...]
    tp_plan: Mapping[str, Any]
    heads: tuple[int, ...]
    ends: Ends | None
    outside: tuple[str, ...]
    notes: tuple[str, ...]
    parameters: int
    optimizers: int


@dataclass(frozen=True)
class PlainModel:
    """Builds a rank's part of a plain step. ``digest`` is that of the file."""

    name: str
    digest: str
    facts: Facts | None = field(default=None, compare=False, repr=False)

    @property
    def _facts(self) -> Facts:
        return self.facts or _facts(self)

    @property
    def layers(self) -> int:
        return len(self._facts.kinds)

    @property
    def blocks(self) -> str:
        """The dotted name of the list of blocks, which pipeline stages cut; empty if there is none, or several."""
        return self._facts.blocks

    @property
    def tp_plan(self) -> Mapping[str, Any]:
        """Names of modules and their tensor-parallel styles; empty without tensor parallelism."""
        return self._facts.tp_plan

    @property
    def ends(self) -> Ends | None:
        """What runs before and after the blocks; None: no pipeline."""
        return self._facts.ends

    @property
    def mixes(self) -> bool:
        """Whether the code before the blocks mixes what it computes from inputs and parameters with other tensors, such
        as buffers: it does not run with its inputs and parameters on ``meta``."""
        return _mixes(self)

    @property
    def outside(self) -> tuple[str, ...]:
        """Names of the blocks whose parameters are read while they do not run."""
        return self._facts.outside

    @property
    def optimizers(self) -> int:
        """How many optimizers the step has."""
        return self._facts.optimizers

    @property
    def notes(self) -> tuple[str, ...]:
        return self._facts.notes

    @property
    def parameters(self) -> int:
        """Elements of all parameters; a tied parameter counts once."""
        return self._facts.parameters

    def kinds(self, parameters: Mapping[str, Any]) -> tuple[int, ...]:
        """The kind of each block."""
        return self._facts.kinds

    @property
    def lists(self) -> tuple[str, ...]:
        """The names of all lists of blocks, each block of which is sharded and recomputed by itself."""
        return _lists(self)

    @property
    def block_classes(self) -> list[str]:
        """The names of the classes of all blocks."""
        return _block_classes(self)

    def precision(self, mesh: Mesh) -> str:
        """The data type of the stored parameters; FSDP and its replicas compute in bfloat16 if it is float32."""
        return "mixed" if _stored(self) == "float32" and mesh.replicas > 1 else _stored(self)

    def check(self, p: Mapping[str, Any], mesh: Mesh) -> None:
        """Raise :class:`InvalidInput` for what is not offered."""
        known = RECOMPUTE if self.lists else RECOMPUTE[:1]  # there are no blocks
        if eager_kind(p["recompute"]) not in known:
            raise UnknownName("recompute", str(p["recompute"]), known, source=self.name)
        for size in self._facts.heads:
            if size % mesh["tp"]:
                message = f"{size} heads or columns do not divide by {mesh['tp']} tensor-parallel ranks"
                raise InvalidInput(message, source=self.name, field="tp")

    def flops(self, p: Mapping[str, Any]) -> float:
        """Model FLOPs of one sample, forward and backward: counted by PyTorch's ``FlopCounterMode`` on the plain model,
        without recomputation."""
        return _flops(self)

    whole_flops = flops  # all blocks are counted

    def __call__(self, mesh, part: Part, *, layers, length, microbatch, recompute, reshard_after_forward) -> Stage:
        from simdev.parallel.capture.pieces import cut_piece
        from simdev.parallel.capture.tensor_rule import apply_plan

        facts = self._facts
        run, inputs, rebuild = prepared(self, microbatch)
        lists = _names(run.model)
        if part.layers < self.layers:
            _shorten(run.model, lists_of_blocks(run.model), chosen(facts.kinds, part.kinds, part.layers))
        whole = part.first and part.last
        if not whole:
            assert facts.ends is not None, "pipelines are offered where there are blocks"
            cut_piece(run.model, part.first, part.last, facts.ends)
        names = mesh.mesh_dim_names or ()
        divided = "tp" in names and mesh["tp"].size() > 1
        if divided:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                apply_plan(run.model, mesh["tp"], facts.tp_plan)
        if recompute != "none":
            recompute_blocks(run.model, recompute, lists)
        computed = spread(run.model, mesh, reshard_after_forward, lists, facts.outside)
        made = inputs if whole else self._pass_on(run, inputs, facts.blocks, part, microbatch, computed)
        return Stage(run, made, lambda run: rebuild(run.model), _sync, context=on_gpu_divided if divided else on_gpu)

    def _pass_on(self, run, inputs: Callable[[], tuple], blocks: str, part: Part, microbatch: int, computed):
        """Let ``run`` run the stage alone; returns the function of its inputs."""
        import torch

        from simdev.parallel.capture.pieces import run_piece

        ends = self._facts.ends
        assert ends is not None, "pipelines are offered where the ends are known"
        run.forward = run_piece(run.model, blocks, part.first, part.last, run.forward, inputs)

        def x():
            shape = (ends.shape[0] * microbatch, *ends.shape[1:])  # read with one sample
            return torch.zeros(shape, dtype=computed or ends.dtype, requires_grad=True)

        def made():
            return (*(() if part.first else (x(),)), *(inputs() if part.first or part.last else ()))

        return made


def _make(model: PlainModel) -> TrainingStep:
    """The step as the code builds it, on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture.packages import package_step
    from simdev.graphs.capture.rewrites import as_on_gpu, fake_construction

    build: Callable[[], Step] | None
    if is_package_model(model.name):
        build = package_step(model.name, batch=SAMPLES)[0]
    else:
        path, _, function = model.name.rpartition(":")
        build = getattr(import_file(Path(path)), function, None)
        if not callable(build):
            raise InvalidInput("no such function", source=path, field=function)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), fake_construction(), as_on_gpu(ranks=True):
            step = build()
    except SimdevError:
        raise
    except (Exception, SystemExit) as error:  # of the user's code
        frames = traceback.walk_tb(error.__traceback__)
        _refuse_small_states([str(frame.f_globals.get("__name__")) for frame, _ in frames], model.name)
        raise InvalidInput(f"building the model failed: {sentence(error)}", source=model.name) from error
    if not isinstance(step, TrainingStep):
        message = f"expected a TrainingStep, got {type(step).__name__}: simdev can only spread a loss over one model"
        raise InvalidInput(message, source=model.name)
    _refuse_small_states([type(one).__module__ for one in _optimizers(step)], model.name)
    return step


def _refuse_small_states(modules: Sequence[str], source: str) -> None:
    """Raise :class:`InvalidInput` if one of the modules belongs to optimizers with states of 8 bits or less."""
    for module in modules:
        if module.startswith(SMALL_STATES):
            message = (
                f"the update of {module.partition('.')[0]}'s optimizers cannot be captured: plan with torch.optim.AdamW"
                " (states of 8 bits take 6 bytes less for each parameter of a rank), or with the model in bfloat16,"
                " whose states take 4 bytes less"
            )
            raise InvalidInput(message, source=source, field="optimizer")


def _optimizers(step: TrainingStep) -> list:
    return list(step.optimizer) if isinstance(step.optimizer, (list, tuple)) else [step.optimizer]


def prepared(model: PlainModel, microbatch: int):
    """The step as a module that maps its inputs to the loss, with parameters on ``meta``; the function of its inputs;
    and what builds the step's own optimizer for the parameters as they are later."""
    import torch
    from torch import nn
    from torch.utils._pytree import tree_map

    step = _make(model)
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    optimizers = _optimizers(step)
    if not optimizers or None in optimizers:
        message = "the step has none, and a plan counts its time and its state: pass TrainingStep(..., optimizer)"
        raise InvalidInput(message, source=model.name, field="optimizer")
    given = [
        (type(one), [([names[id(p)] for p in group["params"] if id(p) in names],
                      {k: v for k, v in group.items() if k != "params"}) for group in one.param_groups])
        for one in optimizers
    ]  # fmt: skip
    samples = _samples(step, model.name)
    _on_meta(step.model)

    class Run(nn.Module):
        tp_plan = step.tp_plan
        optimizers = len(given)

        def __init__(self):
            super().__init__()
            self.model = step.model

        def forward(self, *inputs):
            return step.loss(self.model, *inputs)

    def resized(value):
        if not isinstance(value, torch.Tensor):
            return value
        shape = (microbatch, *value.shape[1:]) if value.dim() and value.shape[0] == samples else value.shape
        return torch.zeros(shape, dtype=value.dtype)

    def optimizer(built):
        now = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in built.named_parameters()}
        return Optimizers([one for kind, groups in given if (one := _built(kind, groups, now)) is not None])

    return Run(), lambda: tuple(tree_map(resized, value) for value in step.inputs), optimizer


class Optimizers:
    """The optimizers of a step (Muon for matrices and AdamW for all else, for example), which step one after another;
    ``state`` is that of all."""

    def __init__(self, members: list):
        self.members = members

    @property
    def state(self) -> dict:
        return {parameter: held for one in self.members for parameter, held in one.state.items()}

    def step(self) -> None:
        for one in self.members:
            one.step()

    def zero_grad(self) -> None:
        for one in self.members:
            one.zero_grad()


def _built(kind: type, groups: list[tuple[list[str], dict]], now: Mapping[str, Any]):
    """An optimizer for those parameters of its groups that are in ``now``; None if none is."""
    found = []
    for names, rest in groups:
        alike: dict[Any, list] = {}  # one kernel cannot take DTensors of several meshes
        for name in names:
            if name in now:
                alike.setdefault(getattr(now[name], "device_mesh", None), []).append(now[name])
        found += [{"params": params, **rest} for params in alike.values()]
    return kind(found) if found else None


def _samples(step: TrainingStep, source: str) -> int:
    """Samples of the step's batch: the first size that all of its inputs have; of a package's model, at least one
    (positions in an image have no batch)."""
    import torch
    from torch.utils._pytree import tree_leaves

    sizes = [t.shape[0] for t in tree_leaves(step.inputs) if isinstance(t, torch.Tensor) and t.dim()]
    if is_package_model(source):
        if SAMPLES not in sizes:
            message = "none of its inputs has samples as its first axis: plan a step of your own (FILE.py:make_step)"
            raise InvalidInput(message, source=source, field="inputs")
        return SAMPLES
    if not sizes or len(set(sizes)) > 1:
        message = f"its inputs have different first sizes ({', '.join(map(str, sizes))}), so that none is the batch"
        raise InvalidInput(message, source=source, field="inputs")
    return sizes[0]


def _on_meta(model) -> None:
    """Replace fake parameters and buffers by ones on ``meta``; what was tied stays tied."""
    import torch

    replaced: dict[int, Any] = {}

    def meta(tensor):
        if id(tensor) not in replaced:
            plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            replaced[id(tensor)] = (
                tensor,
                torch.nn.Parameter(plain, tensor.requires_grad) if is_parameter else plain,
            )
        return replaced[id(tensor)][1]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = meta(tensor)


def _shorten(model, lists: Sequence[Blocks], numbers: Sequence[int]) -> list[Blocks]:
    """Keep the blocks of these numbers, in this order; numbers continue from list to list. Returns what is left."""
    left = []
    begin = 0
    for blocks in lists:
        here = range(begin, begin + len(blocks.modules))
        kept = tuple(blocks.modules[number - begin] for number in numbers if number in here)
        parent, _, name = blocks.name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, name, type(getattr(holder, name))(*_listed(getattr(holder, name), kept)))
        left.append(Blocks(blocks.name, kept))
        begin = here.stop
    return left


def _listed(module, members) -> tuple:
    from torch import nn

    return (list(members),) if isinstance(module, nn.ModuleList) else tuple(members)


def recompute_blocks(
    model, recompute: str, lists: Sequence[str] | None = None, preserve_rng_state: bool = False
) -> None:
    """Recompute each block of each list; ``lists`` are their names (None: those that are found). With
    ``preserve_rng_state``, dropout's masks are drawn again as they were; a capture draws nothing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    options: dict[str, Any] = {"context_fn": CONTEXTS[recompute]} if recompute in CONTEXTS else {}
    wrapped: dict[int, Any] = {}
    for path in _names(model) if lists is None else lists:
        holder = model.get_submodule(path)
        for name, block in list(holder._modules.items()):  # a list may name a block several times
            if id(block) not in wrapped:
                wrapped[id(block)] = checkpoint_wrapper(block, preserve_rng_state=preserve_rng_state, **options)
            setattr(holder, name, wrapped[id(block)])


def _names(model) -> list[str]:
    return [blocks.name for blocks in lists_of_blocks(model)]


def spread(model, mesh, reshard: bool, lists: Sequence[str] | None = None, outside: Sequence[str] = ()):
    """FSDP2 (or replication) around each block of ``lists`` (None: those that are found) and around the model; blocks
    that ``outside`` names belong to the model. Returns the data type in which it computes, if it is not that of the
    parameters."""
    import torch
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    axes = tuple(axis for axis in AXES if axis in (mesh.mesh_dim_names or ()) and mesh[axis].size() > 1)
    if not axes:
        return None
    stored = {parameter.dtype for parameter in model.parameters()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if torch.float32 in stored else None)
    if policy.param_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    lists = _names(model) if lists is None else lists
    blocks = {f"{path}.{name}": module for path in lists for name, module in model.get_submodule(path).named_children()}
    inside = [module for name, module in blocks.items() if name not in outside]
    for module in (*inside, model):
        if "dp_shard" in axes:
            grid = mesh[axes] if len(axes) > 1 else mesh[axes[0]]
            keep = reshard if module is not model else None  # FSDP2's default keeps what is outside of blocks
            fully_shard(module, mesh=grid, mp_policy=policy, reshard_after_forward=keep)
        else:
            replicate(module, mesh=mesh[axes[0]], mp_policy=policy)
    return policy.param_dtype


def _sync(run, last: bool) -> None:
    if hasattr(run.model, "set_requires_gradient_sync"):
        run.model.set_is_last_backward(last)
        run.model.set_requires_gradient_sync(last)


@contextmanager
def on_gpu() -> Iterator[None]:
    """What a stage of a plain model runs inside: kernels as a GPU chooses them, and no warnings of the libraries."""
    from simdev.graphs.capture.rewrites import as_on_gpu

    with warnings.catch_warnings(), as_on_gpu(ranks=True):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def on_gpu_divided() -> Iterator[None]:
    """:func:`on_gpu`, and tensors that the plan does not name are replicated among the tensor-parallel ranks."""
    from torch.distributed.tensor.experimental import implicit_replication

    with on_gpu(), implicit_replication():
        yield


@lru_cache(maxsize=64)
def _facts(model: PlainModel) -> Facts:
    run = prepared(model, 1)[0]
    lists = lists_of_blocks(run.model)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    notes = []
    if not lists:
        notes.append("no recomputation: no repeated blocks were found")
    outside, idle = _outside(model)
    kinds = _repeated(lists)
    whole = _why_whole(lists, idle, kinds)
    if len(kinds) > 1 and not whole:
        try:
            _count(model, kinds)
        except Exception:
            whole = "its code counts its blocks itself"
    kinds = (0,) if whole else kinds
    plan, heads, why = _tensor_plan(model, run.tp_plan, kinds)
    notes += [f"no tensor parallelism: {why}"] if why else []
    whole = whole or ("its blocks are in several lists" if len(lists) > 1 else "")
    ends, why = (None, whole) if whole else _cut_at(model, kinds)
    notes += [f"no pipeline: {why}"] if why else []
    blocks = "" if whole else lists[0].name
    return Facts(blocks, kinds, plan, heads, ends, outside, tuple(notes), parameters, run.optimizers)


def _why_whole(lists: Sequence[Blocks], idle: Sequence[str], kinds: Sequence[int]) -> str:
    """Why a capture cannot do with fewer blocks; empty if it may."""
    if not lists:
        return "no repeated blocks were found"
    if idle:  # fewer of the blocks would not be fewer of those that run
        return f"{idle[0]} does not run"
    for name, elsewhere in sharing(lists).items():  # a block that is left out would leave its parameters to another one
        return f"{name} shares parameters with other blocks" if elsewhere else f"{name} runs several times in a pass"
    return "" if len(kinds) > 1 else "its blocks are in several lists"


def _repeated(lists: Sequence[Blocks]) -> tuple[int, ...]:
    """The kinds of all blocks; ``(0,)`` if there are none, or if captures of fewer blocks of several lists have no
    fewer blocks in all."""
    from simdev.parallel.capture.stage import few_captures

    kinds = kinds_of(*(blocks.modules for blocks in lists)) or (0,)
    captured = sum(part.layers for part in few_captures(Part(len(kinds), kinds=kinds)))
    return (0,) if len(lists) > 1 and captured >= len(kinds) else kinds


def _outside(model: PlainModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The blocks whose parameters are read while they do not run, and those that never run; none if the step cannot
    run."""
    from simdev.parallel.capture.pieces import used_outside

    try:
        with _on_fakes(model, (0,)) as (run, _, loss):
            lists = lists_of_blocks(run.model)
            return used_outside(run.model, loss, lists) if lists else ((), ())
    except Exception:  # of the user's code, which the capture will name
        return (), ()


@contextmanager
def _fakes() -> Iterator[None]:
    """Tensors without values. Code that asks for one gets an answer: :class:`nn.Transformer` asks whether a mask is
    causal."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.parallel.capture.record import HostAnswers

    with FakeTensorMode(allow_non_fake_inputs=True), HostAnswers():
        yield


@contextmanager
def _on_fakes(
    model: PlainModel, kinds: tuple[int, ...], mesh=None, plan: Mapping[str, Any] | None = None
) -> Iterator[tuple]:
    """``(run, lists, loss)`` of one sample with a few blocks of each kind, on fakes; ``loss()`` runs forward. No lists
    if no block may be left out."""
    from simdev.parallel.capture.tensor_rule import apply_plan

    run, inputs, _ = prepared(model, 1)
    lists = _shorten(run.model, lists_of_blocks(run.model), _few(kinds)) if len(kinds) > 1 else []
    with _fakes(), on_gpu_divided() if plan else on_gpu():
        if plan:
            apply_plan(run.model, mesh, plan)
        to_fakes(run)
        made = inputs()
        yield run, lists, lambda: run(*made)


def _few(kinds: tuple[int, ...]) -> list[int]:
    """The numbers of the first block of each kind, and of one more."""
    first = sorted({kind: number for number, kind in reversed(list(enumerate(kinds)))}.values())
    more = [number for number in range(len(kinds)) if number not in first][:1]
    return sorted(first + more)


def _tensor_plan(model: PlainModel, given: Mapping[str, Any] | None, kinds: tuple[int, ...]):
    """``(plan, sizes to divide, why there is none)``."""
    from simdev.parallel.capture.tensor_rule import find_groups, styles

    if given is not None:
        try:
            styles(given)
        except ValueError as error:
            raise InvalidInput(str(error), source=model.name, field="tp_plan") from None
        return dict(given), (), "" if given else "its step asks for none"
    plan: dict[str, Any] = {}
    heads: set[int] = set()
    odd: set[int] = set()
    why = "no product is followed by another one with elementwise ops or attention alone between them"
    try:
        with _on_fakes(model, kinds) as (run, lists, loss):
            groups, again = find_groups(run.model, loss, lists)
        why = f"{again[0]} runs several times in a pass" if again else why
        for group in groups:
            odd |= {size for size in group.heads if size % 2}
            if not any(size % 2 for size in group.heads):
                if _divides(model, kinds, dict(group.plan)):
                    plan |= group.plan
                    heads |= set(group.heads)
                else:
                    why = f"PyTorch does not divide {group.columns[0]} with one all-reduce in each pass alone"
    except Exception as error:  # of the user's code
        return {}, (), sentence(error)
    if odd:
        why = f"{', '.join(map(str, sorted(odd)))} heads or columns do not divide by 2 tensor-parallel ranks"
    return plan, tuple(sorted(heads)), "" if plan else why


def _divides(model: PlainModel, kinds: tuple[int, ...], plan: dict[str, Any]) -> bool:
    """Whether DTensor runs the plan on two ranks with one all-reduce for each row-wise product, and with nothing but
    all-reduces in the backward pass."""
    from simdev.parallel.capture.stage import fake_process_group
    from simdev.parallel.capture.tensor_rule import collectives, count_rows

    try:
        with fake_process_group(Mesh({"tp": 2})) as mesh:
            with _on_fakes(model, kinds, mesh["tp"], plan) as (run, _, loss):
                found = collectives(loss)
                wanted = count_rows(run.model, plan)
    except Exception:  # of DTensor: an op that it cannot divide
        return False
    return found["forward", "all_reduce"] == wanted and {kind for _, kind in found} == {"all_reduce"}


def _cut_at(model: PlainModel, kinds: tuple[int, ...]) -> tuple[Ends | None, str]:
    """What runs before and after the blocks; or why there is no pipeline."""
    import torch

    from simdev.parallel.capture.pieces import NotApart, cut_piece, read_ends, run_piece

    try:
        with _on_fakes(model, kinds) as (run, (blocks,), loss):
            ends = read_ends(run.model, loss, blocks)
        run, inputs, _ = prepared(model, 1)
        _shorten(run.model, lists_of_blocks(run.model), _few(kinds)[:1])
        cut_piece(run.model, False, True, ends)  # the last stage shows whether its blocks need more than one tensor
        with _fakes(), on_gpu():
            to_fakes(run)
            x = torch.zeros(ends.shape, dtype=ends.dtype, requires_grad=True)
            run_piece(run.model, blocks.name, False, True, run.forward, inputs)(x, *inputs()).backward()
        if x.grad is None:
            raise NotApart("the loss does not depend on its blocks")
    except NotApart as error:
        return None, str(error)
    except Exception as error:  # of the user's code
        return None, sentence(error)
    return ends, ""


@lru_cache(maxsize=64)
def _mixes(model: PlainModel) -> bool:
    import torch
    from torch.utils._pytree import tree_map_only

    from simdev.parallel.capture.pieces import cut_piece

    class Begun(Exception):
        pass

    def begin(*_):
        raise Begun

    run, inputs, _ = prepared(model, 1)
    assert model.ends is not None, "pipelines are offered where the ends are known"
    cut_piece(run.model, False, True, model.ends)  # what it cuts off stays on meta
    next(run.model.get_submodule(model.blocks).children()).register_forward_pre_hook(begin)
    try:
        with _fakes(), on_gpu():
            to_fakes(run)
            run(*tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device="meta"), inputs()))
    except Begun:
        return False
    except Exception:  # PyTorch's, for operands on two devices
        return True
    return True


def _count(model: PlainModel, kinds: tuple[int, ...] = ()) -> float:
    """FLOPs of forward and backward pass of one sample; with ``kinds``, of a few blocks alone."""
    from simdev.graphs.capture.trace import flop_counter_mode

    run, inputs, _ = prepared(model, 1)
    if kinds:
        _shorten(run.model, lists_of_blocks(run.model), _few(kinds))
    with _fakes(), on_gpu():
        to_fakes(run)
        tensors = inputs()
        with flop_counter_mode() as counter:
            run(*tensors).backward()
    return float(counter.get_total_flops())


@lru_cache(maxsize=64)
def _stored(model: PlainModel) -> str:
    """The data type of the parameters: ``float32`` if some are."""
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in _make(model).model.parameters()}
    return "float32" if "float32" in kinds or not kinds else min(kinds)


@lru_cache(maxsize=64)
def _lists(model: PlainModel) -> tuple[str, ...]:
    return tuple(blocks.name for blocks in lists_of_blocks(_make(model).model))


@lru_cache(maxsize=64)
def _block_classes(model: PlainModel) -> list[str]:
    members = [member for blocks in lists_of_blocks(_make(model).model) for member in blocks.modules]
    return list(dict.fromkeys(type(member).__name__ for member in members))


@lru_cache(maxsize=64)
def _flops(model: PlainModel) -> float:
    try:
        return _count(model)
    except Exception as error:  # of the user's code
        raise InvalidInput(f"running its step failed: {sentence(error)}", source=model.name) from error
