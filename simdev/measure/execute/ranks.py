"""Runs training steps of a parallel model for real: one process for each rank on a core of its own, joined by gloo.

A rank executes what :mod:`simdev.parallel.plan` simulates: forward and backward passes of its stages in the order of
the pipeline schedule, sends and receives between stages, gradient reductions, the optimizer. Before that, all ranks
measure at the same time what a simulation needs: kernels (:mod:`simdev.measure.execute.clock`) and gloo's collectives.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from simdev.errors import SimdevError
from simdev.graphs.capture import sentence
from simdev.measure.execute.clock import Kernels, fill, time_kernels
from simdev.measure.execute.cpu import settle
from simdev.parallel.orders import SPLIT, pipeline_order
from simdev.parallel.plan import Plan
from simdev.parallel.split import SplitBackward, keep_gathered, reduce_gradients

SIZES = tuple(1 << power for power in range(10, 27, 2))  # bytes of the collectives that are measured
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")


@dataclass(frozen=True, eq=False)
class RankRuns:
    """What the ranks measured. ``step_ns`` int64 ``(repeats,)``: from the begin of the first rank to the end of the
    last. ``kernels`` per pipeline stage; ``collective_ns``: kind -> ns for each of :data:`SIZES`, the median."""

    step_ns: np.ndarray
    kernels: dict[int, Kernels]
    collective_ns: dict[str, np.ndarray]


def run_ranks(plan: Plan, cores: list[int], repeats: int, time_limit_s: float = 300.0) -> RankRuns:
    """Profile and run ``plan`` with rank ``r`` on core ``cores[r]``. Raises :class:`SimdevError` if a rank fails."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in cores]
        children = [
            context.Process(target=_rank, args=(plan, rank, core, repeats, f"{folder}/store", ends[rank][1]))
            for rank, core in enumerate(cores)
        ]
        try:
            for child in children:
                child.start()
            answers = _answers(children, [receiver for receiver, _ in ends], time.monotonic() + time_limit_s)
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                child.join()
    begin, end = (np.array([answer["times"] for answer in answers])[:, :, side] for side in (0, 1))
    kernels: dict[int, Kernels] = {}
    for answer in answers:
        for stage, found in answer["kernels"].items():
            kernels.setdefault(stage, found)
    # A rank that comes first waits for the others: the shortest time of a collective is that of the last to come.
    samples = {kind: np.array([answer["collectives"][kind] for answer in answers]) for kind in KINDS}
    collectives = {kind: np.median(found.min(axis=0), axis=-1) for kind, found in samples.items()}
    collectives["send"] = np.median(samples["send"][0], axis=-1) / 2
    return RankRuns(end.max(axis=0) - begin.min(axis=0), kernels, collectives)


def _answers(children, receivers, deadline: float) -> list[dict]:
    answers: list[dict | None] = [None] * len(children)
    while any(answer is None for answer in answers):
        for rank, receiver in enumerate(receivers):
            if answers[rank] is None and receiver.poll(0.05):
                try:
                    answers[rank] = receiver.recv()
                except EOFError:
                    raise SimdevError(f"rank {rank}: the process ended without a message (out of memory?)") from None
                if "error" in answers[rank]:
                    raise SimdevError(f"rank {rank}: {answers[rank]['error']}")
            elif answers[rank] is None and not children[rank].is_alive() and not receiver.poll():
                raise SimdevError(f"rank {rank}: the process ended without a message (out of memory?)")
        if time.monotonic() > deadline:
            raise SimdevError("the ranks took longer than their time limit: do they wait for each other?")
    return answers


def _rank(plan: Plan, rank: int, core: int, repeats: int, store: str, sender) -> None:
    """Be one rank; does not return."""
    try:
        settle(core)
        warnings.simplefilter("ignore")  # PyTorch's, about names of collectives that it will change
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        pipeline_rank = rank // plan.mesh.stage_ranks
        stages = [stage for stage in range(plan.stages) if plan.rank_of(stage) == pipeline_rank]
        split = plan.schedule in SPLIT
        gloo = dist.FileStore(store, plan.mesh.ranks)
        gloo.add("ready", 1)
        while gloo.add("ready", 0) < plan.mesh.ranks:  # all ranks are measured at once: they share the memory
            time.sleep(0.01)
        kernels = {
            stage: time_kernels(plan.model, dict(plan.parameters), plan.mesh, plan.parts[stage], split)
            for stage in stages
        }
        dist.init_process_group("gloo", store=gloo, rank=rank, world_size=plan.mesh.ranks)
        collectives = _collectives()
        steps = _Steps(plan, rank, stages)
        times = []
        for _ in range(3 + repeats):
            dist.barrier()
            begin = time.perf_counter_ns()
            steps.run()
            times.append((begin, time.perf_counter_ns()))
        dist.barrier()
        sender.send({"kernels": kernels, "collectives": collectives, "times": times[3:]})
        dist.destroy_process_group()
    except BaseException as error:
        sender.send({"error": sentence(error)})
    finally:
        sender.close()
        os._exit(0)


def _collectives(repeats: int = 15) -> dict[str, list[list[int]]]:
    """ns of gloo's collectives over all ranks, by kind, :data:`SIZES` of the largest buffer on a rank, and repeat."""
    ranks = dist.get_world_size()
    found: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    for size in SIZES:
        whole = torch.zeros(size // 4)
        part = torch.zeros(size // 4 // ranks)
        calls = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
            "send": lambda whole=whole: _there_and_back(whole),
        }
        for kind, call in calls.items():
            samples = []
            for _ in range(repeats + 1):
                dist.barrier()
                begin = time.perf_counter_ns()
                call()
                samples.append(time.perf_counter_ns() - begin)
            found[kind].append(samples[1:])
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
        for what, stage, microbatch in self.actions:
            if what == "F":
                self._forward(stage, microbatch)
            elif what == "W":
                self._kept.pop((stage, microbatch))[2].of_weights()
            else:
                self._backward(what, stage, microbatch)
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
        if stage.sync is not None:
            stage.sync(stage.module, not self.split and self.last.get(number) == (what, number, microbatch))
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
