"""Runs training steps of a parallel model for real: one process for each rank on a core of its own, joined by gloo.

A rank executes what :mod:`simdev.parallel.plan` simulates: forward and backward passes of its stages in the order of
the pipeline schedule, sends and receives between stages, gradient reductions, the optimizer. All ranks measure at the
same time what a simulation needs: kernels (:mod:`simdev.measure.execute.clock`) and gloo's collectives. Measurements
and steps take turns in several rounds, because a core is not equally fast all the time.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import trim_mean

from simdev.errors import SimdevError
from simdev.graphs.capture import sentence
from simdev.measure.execute.clock import Kernels, Samples, fill, kernels_of, time_kernels
from simdev.measure.execute.cpu import settle
from simdev.parallel.capture.split import SplitBackward, keep_gathered, reduce_gradients
from simdev.parallel.capture.stage import forget_meshes
from simdev.parallel.orders import SPLIT, pipeline_order
from simdev.parallel.plan import Plan
from simdev.user_file import import_file, neighbours

ROUNDS = 5
CHAIN = 4  # collectives in a row, with work before each
MOST_WORK_NS = 20_000_000  # before a collective; the time it adds hardly depends on more
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")
Wanted = tuple[tuple[str, int], ...]  # collectives to measure: kind, bytes of the largest buffer on a rank


@dataclass(frozen=True, eq=False)
class RankRuns:
    """What the ranks measured. ``step_ns`` int64 ``(steps,)``: from the begin of the first rank to the end of the last.
    ``compute_ns`` float: processor time of a step on the rank that computes longest, without gloo's own threads.
    ``kernels`` per pipeline rank; ``collective_ns``: kind and bytes -> what it takes by itself; ``added_ns``: the
    same -> what it adds to the work around it."""

    step_ns: np.ndarray
    compute_ns: float
    kernels: dict[int, Kernels]
    collective_ns: dict[tuple[str, int], float]
    added_ns: dict[tuple[str, int], float]


def run_ranks(plan: Plan, wanted: Wanted, cores: list[int], repeats: int, time_limit_s: float = 1200.0) -> RankRuns:
    """Profile and run ``plan`` with rank ``r`` on core ``cores[r]``. Raises :class:`SimdevError` if a rank fails."""
    answers = _launch(_rank, (plan, wanted), cores, repeats, time_limit_s)
    begin, end, cpu = (np.array([answer["times"] for answer in answers])[:, :, side] for side in range(3))
    samples: dict[int, Samples] = {}
    for rank, answer in enumerate(answers):
        samples.setdefault(rank // plan.mesh.stage_ranks, Samples()).add(answer["samples"])
    # All ranks take part in a send there and back, which is two sends.
    ways = {key: 2 if key[0] == "send" else 1 for key in wanted}
    pairs = {key: np.array([answer["collectives"][key] for answer in answers]) for key in wanted}
    added = {key: max(1.0, float(trim_mean(ns[..., 0].mean(axis=0), 0.1)) / ways[key]) for key, ns in pairs.items()}
    # A rank that comes first waits for the others: the shortest time of a collective is that of the last to come.
    alone = {key: float(np.median(ns[..., 1].min(axis=0)) / ways[key]) for key, ns in pairs.items()}
    kernels = {rank: kernels_of(found) for rank, found in samples.items()}
    return RankRuns(end.max(axis=0) - begin.min(axis=0), float(np.median(cpu, axis=1).max()), kernels, alone, added)


def run_script(script: Path, model: Path, cores: list[int], repeats: int, time_limit_s: float = 1200.0) -> np.ndarray:
    """Run a script of ``simdev plan --write pytorch`` with rank ``r`` on core ``cores[r]``; int64 ``(repeats,)``: ns of
    its steps, as in :class:`RankRuns`. The script may import ``model``, the file of the model. Raises
    :class:`SimdevError` if a rank fails."""
    answers = _launch(_script_rank, (script, model, len(cores)), cores, repeats, time_limit_s)
    begin, end, _ = (np.array([answer["times"] for answer in answers])[:, :, side] for side in range(3))
    return end.max(axis=0) - begin.min(axis=0)


def _launch(rank_of: Callable, what: tuple, cores: list[int], repeats: int, time_limit_s: float) -> list[dict]:
    """What ``rank_of(*what, rank, core, repeats, store, sender)`` sends on each rank, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in cores]
        children = [
            context.Process(target=rank_of, args=(*what, rank, core, repeats, f"{folder}/store", ends[rank][1]))
            for rank, core in enumerate(cores)
        ]
        try:
            for child in children:
                child.start()
            return _answers(children, [receiver for receiver, _ in ends], time.monotonic() + time_limit_s)
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                child.join()


def _answers(children, receivers, deadline: float) -> list[dict]:
    answers: dict[int, dict] = {}
    while len(answers) < len(children):
        for rank, receiver in enumerate(receivers):
            if rank not in answers and receiver.poll(0.05):
                try:
                    answer = receiver.recv()
                except EOFError:
                    raise SimdevError(f"rank {rank}: the process ended without a message (out of memory?)") from None
                if "error" in answer:
                    raise SimdevError(f"rank {rank}: {answer['error']}")
                answers[rank] = answer
            elif rank not in answers and not children[rank].is_alive() and not receiver.poll():
                raise SimdevError(f"rank {rank}: the process ended without a message (out of memory?)")
        if time.monotonic() > deadline:
            raise SimdevError("the ranks took longer than their time limit: do they wait for each other?")
    return [answers[rank] for rank in range(len(children))]


def _rank(plan: Plan, wanted: Wanted, rank: int, core: int, repeats: int, store: str, sender) -> None:
    """Be one rank; does not return."""
    try:
        settle(core)
        warnings.simplefilter("ignore")  # PyTorch's, about names of collectives that it will change
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        pipeline_rank = rank // plan.mesh.stage_ranks
        stages = [stage for stage in range(plan.stages) if plan.rank_of(stage) == pipeline_rank]
        meeting = dist.FileStore(f"{store}-meeting", plan.mesh.ranks)
        samples, times = Samples(), []
        collectives: dict[tuple[str, int], list[tuple[float, int]]] = {key: [] for key in wanted}
        shares = [len(part) for part in np.array_split(np.arange(repeats), ROUNDS)]
        for number, share in enumerate(shares):
            if not share:
                continue
            _meet(meeting, f"begin {number}", plan.mesh.ranks)  # they share memory and caches
            found = Samples()
            for stage in stages:
                how = plan.model, dict(plan.parameters), plan.mesh, plan.parts[stage], plan.schedule in SPLIT, stage
                found.add(time_kernels(*how, warm_up=not number))
            samples.add(found)
            _meet(meeting, f"measured {number}", plan.mesh.ranks)
            forget_meshes()
            gloo = dist.FileStore(f"{store}-{number}", plan.mesh.ranks)
            dist.init_process_group("gloo", store=gloo, rank=rank, world_size=plan.mesh.ranks)
            for key, ns in _collectives(wanted, _between_ns(found)).items():
                collectives[key] += ns
            times += _timed_steps(_Steps(plan, rank, stages).run, share)
            dist.barrier()
            dist.destroy_process_group()
        sender.send({"samples": samples, "collectives": collectives, "times": times})
    except BaseException as error:
        sender.send({"error": sentence(error)})
    finally:
        sender.close()
        os._exit(0)


def _script_rank(script: Path, model: Path, ranks: int, rank: int, core: int, repeats: int, store: str, sender) -> None:
    """Be one rank of a script, with the variables that ``torchrun`` sets; does not return."""
    try:
        settle(core)
        warnings.simplefilter("ignore")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        forget_meshes()
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        with neighbours(model):
            module = import_file(script)
            parts = module.build()
        times = _timed_steps(partial(module.train_step, *parts), repeats)
        dist.barrier()
        sender.send({"times": times})
    except BaseException as error:
        sender.send({"error": sentence(error)})
    finally:
        sender.close()
        os._exit(0)


def _meet(store, place: str, ranks: int) -> None:
    """Wait for all ranks, with the core busy: the others are still measuring beside it."""
    store.add(place, 1)
    work = torch.ones(256, 256)
    while store.add(place, 0) < ranks:
        for _ in range(20):
            work @ work


def _timed_steps(run: Callable[[], object], repeats: int) -> list[tuple[int, int, int]]:
    """``(begin, end, processor time)`` in ns of each step."""
    times = []
    for _ in range(2 + repeats):  # two warm up
        dist.barrier()
        cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
        run()
        times.append((begin, time.perf_counter_ns(), time.thread_time_ns() - cpu))
    return times[2:]


def _between_ns(samples: Samples) -> float:
    """How long a rank computes from one collective of a microbatch to the next, on average."""
    keys = [key for key in samples.wall_ns if not key[1].startswith("finish")]
    computed = sum(float(np.mean(samples.wall_ns[key])) for key in keys)
    return computed / (1 + sum(samples.calls[key][""] for key in keys))


class _Work:
    """Kernels of a transformer's block on weights of 8 MiB, repeated until they take ``ns``; as many on each rank."""

    def __init__(self, ns: float):
        self.x = torch.randn(256, 256)
        self.weights = [(torch.randn(256, 512) / 16, torch.randn(512, 256) / 16) for _ in range(8)]
        self.count = 64
        self()
        begin = time.thread_time_ns()
        self()
        one = (time.thread_time_ns() - begin) / self.count
        count = torch.tensor([round(min(ns, MOST_WORK_NS) / one)])
        dist.all_reduce(count, dist.ReduceOp.MAX)
        self.count = int(count)

    def __call__(self) -> None:
        y = self.x
        for number in range(self.count):
            up, down = self.weights[number % len(self.weights)]
            y = torch.nn.functional.layer_norm(y + torch.nn.functional.gelu(y @ up) @ down, (256,))


def _collectives(wanted: Wanted, between_ns: float, repeats: int = 5) -> dict[tuple[str, int], list[tuple[float, int]]]:
    """ns that gloo's collectives over all ranks add to ``between_ns`` of work before each, and that they take by
    themselves; a pair for each repeat.

    The first is how much longer :data:`CHAIN` pieces of work take with a collective after each than without. It
    contains what a collective takes by itself, the time until gloo's threads and the waiting rank have woken up, the
    wait for the rank that works longer, and how much slower the work is after the wait.
    """
    ranks, work = dist.get_world_size(), _Work(between_ns)
    found = {}
    for kind, size in wanted:
        whole = torch.zeros(max(ranks, size // 4))
        part = torch.zeros(len(whole) // ranks)
        even = whole[: ranks * len(part)]
        call = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, even, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, even),
            "send": partial(_there_and_back, whole),
        }[kind]
        added = []
        for _ in range(1 + repeats):
            ns = []
            for after in (lambda: None, call):
                dist.barrier()
                begin = time.perf_counter_ns()
                for _ in range(CHAIN):
                    work()
                    after()
                ns.append(time.perf_counter_ns() - begin)
            dist.barrier()
            begin = time.perf_counter_ns()
            call()
            added.append(((ns[1] - ns[0]) / CHAIN, time.perf_counter_ns() - begin))
        found[kind, size] = added[1:]
    return found


def _there_and_back(tensor) -> None:
    rank = dist.get_rank()
    if rank > 1:
        return
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


class _Steps:
    """The stages of one rank, and a step of them."""

    def __init__(self, plan: Plan, rank: int, stages: list[int]):
        from torch.distributed.device_mesh import init_device_mesh

        self.plan, self.rank = plan, rank
        names, shape = zip(*(plan.mesh.inner or (("dp_shard", 1),)), strict=True)
        mesh = init_device_mesh("cpu", (plan.mesh["pp"], *shape), mesh_dim_names=("pp", *names))[names]
        orders = pipeline_order(plan.schedule, plan.mesh["pp"], plan.microbatches, plan.stages_per_rank)
        self.actions = orders[rank // plan.mesh.stage_ranks]
        self.split = plan.schedule in SPLIT
        self.stages, self.optimizers = {}, {}
        for number in stages:
            part = plan.parts[number]
            stage = plan.model.function(mesh, part, **{**plan.parameters, "layers": part.layers})
            fill(stage.module)
            stage = replace(stage, sync=None) if plan.reduce_each else stage
            self.stages[number], self.optimizers[number] = stage, stage.optimizer(stage.module)
            if self.split:
                keep_gathered(stage.module)
        self.last = {}  # the last backward pass of each stage, which also reduces gradients
        for action in self.actions:
            if action[0] == "B":
                self.last[action[1]] = action

    def run(self) -> None:
        """One training step."""
        self._kept: dict[tuple[int, int], tuple] = {}
        self._local: dict[tuple, torch.Tensor] = {}
        self._sends: list = []
        if self.plan.gathered:
            for stage in self.stages.values():
                keep_gathered(stage.module)
        for what, place, microbatch in self.actions:
            if what == "F":
                self._forward(place, microbatch)
            elif what == "W":
                self._kept.pop((place, microbatch))[2].of_weights()
            else:
                self._backward(what, place, microbatch)
        for request, _ in self._sends:
            request.wait()
        for number, stage in self.stages.items():
            if self.split:
                if stage.sync is not None:
                    stage.sync(stage.module, True)
                reduce_gradients(stage.module)
            if stage.finish is not None:
                stage.finish(stage.module)
            self.optimizers[number].step()
            self.optimizers[number].zero_grad()

    def _forward(self, number: int, microbatch: int) -> None:
        stage = self.stages[number]
        inputs = stage.inputs()
        if number:
            with torch.no_grad():
                self._receive(inputs[0], number - 1, ("F", number, microbatch))
        output = stage.module(*inputs)
        self._kept[number, microbatch] = inputs, output, None
        if number + 1 < self.plan.stages:
            self._send(output.detach(), number + 1, ("F", number + 1, microbatch))

    def _backward(self, what: str, number: int, microbatch: int) -> None:
        stage = self.stages[number]
        inputs, output, _ = self._kept.pop((number, microbatch))
        gradient = None
        if number + 1 < self.plan.stages:
            gradient = torch.empty_like(output, requires_grad=False)
            self._receive(gradient, number + 1, ("B", number, microbatch))
        last = not self.split and self.last.get(number) == (what, number, microbatch)
        if stage.sync is not None:
            stage.sync(stage.module, last)
        if self.plan.gathered and last:
            keep_gathered(stage.module, after_backward=False)
        if what == "B":
            output.backward(gradient)
            found = inputs[0].grad
        else:
            halves = SplitBackward(stage.module, output, gradient, inputs)
            found = next(iter(halves.of_input()), None)
            self._kept[number, microbatch] = inputs, None, halves
        if number:
            self._send(found, number - 1, ("B", number - 1, microbatch))

    def _peer(self, stage: int) -> int:
        width = self.plan.mesh.stage_ranks
        return self.plan.rank_of(stage) * width + self.rank % width

    def _send(self, tensor: torch.Tensor, stage: int, action: tuple) -> None:
        peer = self._peer(stage)
        if peer == self.rank:
            self._local[action] = tensor
        else:
            self._sends.append((dist.isend(tensor, peer, tag=self._tag(action)), tensor))

    def _receive(self, tensor: torch.Tensor, stage: int, action: tuple) -> None:
        peer = self._peer(stage)
        if peer == self.rank:
            tensor.copy_(self._local.pop(action))
        else:
            dist.recv(tensor, peer, tag=self._tag(action))

    def _tag(self, action: tuple) -> int:
        what, stage, microbatch = action
        return 2 * (microbatch * self.plan.stages + stage) + (what == "B")
