"""What a capture changes in PyTorch's parallel libraries, so that they run on fake tensors and say what they do.

* Meshes compute with real numbers, also inside a fake mode.
* DDP: the reducer reduces each bucket through a hook, because the fake process group's own answer is none that it
  accepts. After its first step it makes new buckets in the order in which gradients arrived, which it cannot do on fake
  tensors; here it has such buckets from the start, for gradients in the reverse order of the parameters. When a bucket
  is reduced is the reducer's own decision.
* Pipelining: a stage learns the shapes of its neighbours' tensors from the stages that were captured before it, and
  each chunk that a schedule runs is noted.
* Counting of integers (tokens for each expert): the CPU has no kernel for it, an accelerator has.
* Context parallelism: see :mod:`simdev.parallel.capture.ring`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import stage as pipelining
from torch.distributed.tensor import DTensor
from torch.nn.parallel import distributed as ddp

from simdev.errors import Unsupported
from simdev.parallel.capture.ring import ring_attention
from simdev.parallel.orders import Action


@dataclass
class Chunks:
    """The chunks that pipeline schedules run. ``begin`` and ``end`` are called with each action; ``shapes`` holds what
    stages said about their outputs, for the pipeline ranks that are captured later; ``stages`` is how many stages there
    are, as they say."""

    shapes: dict[int, object] = field(default_factory=dict)
    begin: Callable[[Action], None] = lambda action: None
    end: Callable[[Action], None] = lambda action: None
    sent_bytes: dict[Action, int] = field(default_factory=dict)
    stages: int = 0


@contextmanager
def recordable(chunks: Chunks):
    """While active, the libraries run on fake tensors and the fake process group."""
    with ExitStack() as stack:

        def patch(owner, name: str, value):
            old = vars(owner).get(name)  # as it stands in the class: a static method stays one
            stack.callback(*((delattr, owner, name) if old is None else (setattr, owner, name, old)))
            setattr(owner, name, value)

        _meshes(patch)
        _data_parallel(patch)
        _pipelines(patch, chunks)
        _counts(patch)
        stack.enter_context(ring_attention())
        yield


def _meshes(patch) -> None:
    for name, method in vars(DeviceMesh).items():
        if isinstance(method, property) or name in ("__hash__", "__eq__", "__repr__", "__getstate__", "__setstate__"):
            continue
        if callable(method) and not isinstance(method, (staticmethod, classmethod, type)):
            patch(DeviceMesh, name, _really(method))
        elif isinstance(method, staticmethod):
            patch(DeviceMesh, name, staticmethod(_really(method.__func__)))

    build = DeviceMesh.__init__

    def init(mesh, device_type, *args, **kwargs):
        """A mesh of the user's own, of whatever device: ``init_device_mesh`` numbers the ranks in order."""
        ranks = kwargs.get("_rank_map")
        if isinstance(ranks, FakeTensor):
            with unset_fake_temporarily():
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=ranks.dtype)
        build(mesh, "cpu", *args, **kwargs)

    patch(DeviceMesh, "__init__", init)


def _really(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def _data_parallel(patch) -> None:
    patch(ddp, "_verify_param_shape_across_processes", lambda *_, **__: True)
    patch(ddp, "_sync_module_states", lambda *_, **__: None)
    build = ddp.DistributedDataParallel.__init__
    register = ddp.DistributedDataParallel.register_comm_hook

    def init(module, model, device_ids=None, output_device=None, *args, **kwargs):
        build(module, model, None, None, *args, **kwargs)  # GPUs by number, where all tensors are the CPU's
        if not module._comm_hooks:
            register(module, module.process_group, _reduce_bucket)

    def replace(module, state, hook):
        raise RuntimeError("a communication hook of the user's own on DistributedDataParallel cannot be captured")

    reducer, by_size = dist.Reducer, dist._compute_bucket_assignment_by_size

    def with_buckets(parameters, buckets, limits, group, sparse, most_bytes, find_unused, *rest):
        if not find_unused and len(buckets) == 1:
            order = list(reversed(range(len(parameters))))
            first = min(dist._DEFAULT_FIRST_BUCKET_BYTES, most_bytes)
            arrived = [parameters[number] for number in order]
            found, limits = by_size(arrived, [first, most_bytes], [sparse[number] for number in order])
            buckets = [[order[number] for number in bucket] for bucket in found]
        return reducer(parameters, buckets, limits, group, sparse, most_bytes, find_unused, *rest)

    patch(dist, "Reducer", with_buckets)
    patch(reducer, "_rebuild_buckets", lambda _: False)
    patch(ddp.DistributedDataParallel, "__init__", init)
    patch(ddp.DistributedDataParallel, "register_comm_hook", replace)


def _reduce_bucket(group, bucket):
    """The reducer's own all-reduce: started once the bucket is full, awaited at the end of the backward pass. The
    division by the number of ranks is part of the copy into the bucket, which is recorded."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group, async_op=True)
    done = torch.futures.Future()
    done.set_result(buffer)
    return done


def _pipelines(patch, chunks: Chunks) -> None:
    stage = pipelining._PipelineStageBase
    forward, backward, weights = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

    def noted(letter_of, run):
        @functools.wraps(run)
        def chunk(self, number, *args, **kwargs):
            action = letter_of(kwargs, args), self.stage_index, number
            chunks.begin(action)
            chunks.stages = max(chunks.stages, self.num_stages)
            try:
                return run(self, number, *args, **kwargs)
            finally:
                if action[0] in "FBI":
                    chunks.sent_bytes[action] = _sent(self, action)
                chunks.end(action)

        return chunk

    def letter(kwargs, args):
        full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
        return "B" if full else "I"

    patch(stage, "forward_one_chunk", noted(lambda *_: "F", forward))
    patch(stage, "backward_one_chunk", noted(letter, backward))
    patch(stage, "backward_weight_one_chunk", noted(lambda *_: "W", weights))
    kind = pipelining.PipelineStage
    vote = getattr(kind, "_warmup_forward_vote", None)
    if vote is None:  # an older PyTorch (2.9), whose stages send their shapes as objects
        patch(kind, "__init__", _no_pipelines)
        return

    def voted(self, has_backward, received_acc=None):
        dynamic = pipelining.InferenceMode.needs_dynamic(self._user_meta, has_backward)
        return _Vote(0 if dynamic else 1)

    patch(kind, "_warmup_forward_vote", functools.wraps(vote)(voted))
    patch(kind, "_warmup_backward_result", lambda self, received_result=None: received_result or voted(self, True))

    def send(self, meta, target):
        if target > self.stage_index:
            chunks.shapes[target] = meta

    def receive(self, source):
        if source > self.stage_index:  # a gradient has the shape of the output
            return pipelining._StageBackwardMeta(backward_metas=pipelining._derive_grad_metas(self._stage_meta.outputs))
        # A stage that comes back to an earlier rank: its neighbour's output is not known yet, but a sibling's is.
        return chunks.shapes.get(self.stage_index) or chunks.shapes[max(chunks.shapes)]

    patch(kind, "_send_meta", send)
    patch(kind, "_recv_meta", receive)


def _no_pipelines(*_, **__):
    raise Unsupported(
        f"a stage of torch.distributed.pipelining is captured under PyTorch 2.13; {torch.__version__} is installed. "
        "Other meshes work"
    )


def _counts(patch) -> None:
    count = torch.histc

    @functools.wraps(count)
    def histc(values, *args, **kwargs):
        if values.is_floating_point():
            return count(values, *args, **kwargs)
        return count(values.float(), *args, **kwargs).to(values.dtype)

    patch(torch, "histc", histc)


@dataclass
class _Vote:
    """The answer to the stages' vote whether shapes are static: nobody can look at a fake tensor's value."""

    value: int

    def item(self) -> int:
        return self.value


def _sent(stage, action: Action) -> int:
    """Bytes that a stage sends after an action."""
    letter, _, number = action
    if letter == "F":
        tensors = () if stage.is_last or number not in stage.fwd_cache else stage.fwd_cache[number][0]
    else:
        tensors = () if stage.is_first else stage.bwd_cache.get(number, ())
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in local)
