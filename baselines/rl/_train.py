"""The loop of all learned placers: search one problem within a budget, or train a policy on several."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simdev.baselines._order import ordered, path_keys, priority_of
from simdev.baselines.rl._grouped import GroupedProblem
from simdev.errors import BudgetExhausted, InvalidInput
from simdev.files import guarded, open_text, replacing, unguarded, write_text
from simdev.placers.budget import Budget
from simdev.placers.placer import Function, placer
from simdev.placers.policy_file import load_policy, notes_of, pack, read_blob, read_header, save_policy, unpack
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.schedule import Outcomes

State = dict[str, Any]
CHECKPOINT, LOG = "checkpoint.safetensors", "progress.csv"
COLUMNS = ("samples", "case", "best_step_ns", "mean_reward", "entropy")
SECONDS_BETWEEN_CHECKPOINTS = 20.0
IDLE = 50  # a search ends after this many updates in a row without a simulation
MOST_SETTING = 1 << 16  # a policy file with a larger setting would need absurd amounts of memory


@dataclass(frozen=True)
class Learner:
    """A learned placer as functions. All that changes is in its state, a dict of pytrees of arrays.

    * ``grouped(problem)``: the groups and inputs of a problem.
    * ``init(seed, n_problems)``: a new state for that many problems; its ``policy`` is what a policy file stores.
    * ``step(state, index, evaluate)``: sample placements of problem ``index`` and learn from their rewards. Returns the
      new state and a dict with ``entropy`` (nats a group). ``evaluate`` is an :class:`Episodes`. The result may depend
      on nothing but the state and the rewards, so that training is repeatable and resumes bit for bit.
    * ``greedy(state, grouped)``: actions int ``(G,)``, the most probable placement.
    * ``settings``: the parameters that shape the policy, as JSON; a policy is used with the settings of its training.
    """

    name: str
    version: int
    settings: Mapping[str, object]
    grouped: Callable[[Problem], GroupedProblem]
    init: Callable[[int, int], State]
    step: Callable[[State, int, Episodes], tuple[State, dict]]
    greedy: Callable[[State, GroupedProblem], np.ndarray]

    def train(self, problems: Sequence[Problem], **how) -> None:
        """Train a policy on ``problems``: see :func:`train`."""
        train(self, problems, **how)


class Episodes:
    """Simulates placements of one problem on a budget, and keeps the best by (overflow, step time).

    ``grouped`` is the problem with its groups; ``best`` the best placement so far, or None; ``rewards`` float32 and
    ``fits`` bool ``(k,)`` describe the last batch. Where a placement brings its order of ops, ops are ordered by their
    longest paths under the placement (:func:`path_keys`), so that whoever learns where ops run learns with this order.
    """

    def __init__(self, grouped: GroupedProblem, budget: Budget):
        self.grouped, self.budget = grouped, budget
        self.rewards, self.fits = np.zeros(0, np.float32), np.zeros(0, bool)
        self.score: Score | None = None
        self.best: Placement | None = None
        self.ordered = ordered(grouped.problem)

    def __call__(self, actions: np.ndarray) -> np.ndarray:
        """Rewards float32 ``(k,)`` of actions int ``(k, G)``.

        Raises :class:`BudgetExhausted` if the budget ends within the batch; the placements simulated before still count
        for ``best``.
        """
        return self.grouped.rewards(*self.simulate(actions))

    def edit(self, actions: np.ndarray, than: Score | None) -> Score:
        """The score of actions int ``(G,)``. Its overflow is None if ``than`` fits and takes less time."""
        return self._scores(actions[None], than.step_ns + 1 if than is not None and than.fits else None)[0]

    def _scores(self, actions: np.ndarray, below: int | None) -> list[Score]:
        devices = self.grouped.placements(actions)
        problem, priority = self.grouped.problem, None
        if self.ordered:
            priority = np.stack([priority_of(path_keys(problem, row)) for row in devices])
        scores = self.budget.evaluate_many(devices, priority=priority, below=below)
        first = min(range(len(scores)), key=scores.__getitem__)
        if self.score is None or scores[first] < self.score:
            order = None if priority is None else priority[first].copy()
            self.score, self.best = scores[first], Placement(devices[first].copy(), order)
        return scores

    def simulate(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 ``(k,)`` each: step time in ns and overflow in bytes of actions int ``(k, G)``. Raises like a call."""
        scores = self._scores(actions, None)
        step_ns = np.array([score.step_ns for score in scores], np.int64)
        overflow = np.array([score.overflow_bytes for score in scores], np.int64)
        self.rewards, self.fits = self.grouped.rewards(step_ns, overflow), overflow == 0
        if len(step_ns) < len(actions):
            raise BudgetExhausted(f"the budget is used up after {self.budget.used} evaluations")
        return step_ns, overflow


def learned(
    name: str, *, version: int, defaults: Mapping[str, object], learner: Callable[..., Learner], source: str
) -> Callable[[Function], Function]:
    """Register the decorated function as a learned placer, which needs JAX and spends evaluations."""
    return placer(
        name,
        version=version,
        family="learned",
        same_processor=True,
        searches=True,
        defaults=defaults,
        needs=("jax",),
        learner=learner,
        source=source,
    )


def learn(
    learner: Callable[..., Learner],
    problem: Problem,
    rng: np.random.Generator,
    budget: Budget,
    policy: str,
    params: Mapping[str, object],
) -> Placement:
    """:func:`search` with the learner that ``params`` describe, in the settings of ``policy`` where one is given."""
    made = learner([problem], **with_policy_settings(params, policy))
    return search(made, problem, rng=rng, budget=budget, policy=policy)


def search(
    learner: Learner, problem: Problem, *, rng: np.random.Generator, budget: Budget, policy: str = ""
) -> Placement:
    """Learn on one problem until the budget ends, and return the best placement seen.

    If ``policy`` (a folder) is given, learning starts from it, and its most probable placement is evaluated first. With
    a budget of no evaluations, the most probable placement is returned.
    """
    grouped = learner.grouped(problem)
    state = learner.init(int(rng.integers(1 << 31)), 1)
    if policy:
        state["policy"] = load_policy(policy, state["policy"], placer=learner.name, version=learner.version)
    evaluate = Episodes(grouped, budget)
    if policy or not budget.open:
        actions = learner.greedy(state, grouped)[None]
        if not budget.open:
            return Placement(grouped.placements(actions)[0])
        evaluate.simulate(actions)
    idle = 0  # updates in a row without a simulation: no group may move, or the policy is sure of every group
    try:
        while budget.open and idle < IDLE:
            used = budget.used
            state, _ = learner.step(state, 0, evaluate)
            idle = idle + 1 if budget.used == used else 0
    except BudgetExhausted:
        pass
    return evaluate.best or Placement(grouped.placements(learner.greedy(state, grouped)[None])[0])


def with_policy_settings(given: Mapping[str, object], policy: str) -> dict:
    """The parameters of a placer; if there is a policy, the settings of its training replace the given ones.

    Raises :class:`InvalidInput` for a setting that this placer does not have, or that has another type or is too large.
    """
    if not policy:
        return dict(given)
    header = read_header(policy)
    for name, value in header["settings"].items():
        known = given.get(name, 1 if name == "devices" else None)
        if type(value) is not type(known) or (isinstance(value, (int, float)) and not 0 <= value <= MOST_SETTING):
            raise InvalidInput(
                f"{value!r} does not suit this placer; it is a policy of {header['placer']}",
                source=policy,
                field=f"settings: {name}",
            )
    return {**given, **header["settings"]}


def train(
    learner: Learner,
    problems: Sequence[Problem],
    *,
    seed: int,
    evaluations: int,
    out: str | os.PathLike,
    progress: Callable[[dict], None] = lambda row: None,
    simulate: Callable[..., Outcomes] | None = None,
    objective: str = "step",
) -> None:
    """Train a policy on ``problems`` in turn until ``evaluations`` simulations are spent, and write it to folder
    ``out``.

    ``progress`` is called with a row of ``COLUMNS`` after every update; ``progress.csv`` in the folder holds all rows.
    A checkpoint is written regularly, on Ctrl-C and at the end. The same call then resumes, bit for bit as if it had
    not stopped; with more ``evaluations`` it continues. Raises :class:`InvalidInput` if the folder holds the checkpoint
    of another training. ``simulate`` replaces ``simulate_many``, as with :class:`Budget`; ``objective`` names what it
    computes.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    grouped = [learner.grouped(problem) for problem in problems]
    what = {
        "placer": learner.name,
        "version": learner.version,
        "settings": dict(learner.settings),
        "seed": seed,
        "trained_on": [_identity(problem) for problem in problems],
    }
    if objective != "step":
        what["objective"] = objective
    state = learner.init(seed, len(grouped))
    run: dict[str, Any] = {"updates": 0, "samples": 0, "best": [None] * len(grouped)}
    rows: list[Sequence] = []
    if (out / CHECKPOINT).exists():
        state, run, rows = _resumed(out, what, state)
    saved = time.monotonic()
    try:
        while run["samples"] < evaluations:
            index = run["updates"] % len(grouped)
            budget = Budget(problems[index], evaluations=evaluations - run["samples"], simulate=simulate)
            evaluate = Episodes(grouped[index], budget)
            try:
                new, info = learner.step(state, index, evaluate)
            except BudgetExhausted:
                break
            if evaluate.score is not None and evaluate.score.fits:
                known = run["best"][index]
                run["best"][index] = evaluate.score.step_ns if known is None else min(known, evaluate.score.step_ns)
            spent = max(1, budget.used)  # an episode that simulates nothing counts as one, so that training ends
            state, run["updates"], run["samples"] = new, run["updates"] + 1, run["samples"] + spent
            reward = float(evaluate.rewards.mean()) if budget.used else float("nan")
            row = (run["samples"], index, run["best"][index], reward, float(info["entropy"]))
            rows.append(row)
            names = {"workload": problems[index].graph.name, "topology": problems[index].topology.name}
            progress({**dict(zip(COLUMNS, row, strict=True)), **names})
            if time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                _save(out, what, state, run, rows)
                saved = time.monotonic()
    finally:
        _save(out, what, state, run, rows)
    save_policy(out, {**what, "samples": run["samples"]}, state["policy"])


def _identity(problem: Problem) -> dict:
    return {
        "workload": problem.graph.name,
        "fingerprint": problem.graph.fingerprint,
        "topology": problem.topology.name,
        "cost_hash": problem.costs.hash,
    }


def _save(out: Path, what: dict, state: State, run: dict, rows: list) -> None:
    """Write the state and the counters to one file, which is replaced atomically."""
    with replacing(out / CHECKPOINT) as file:
        file.write(pack(state, {"what": json.dumps(what, sort_keys=True), "run": json.dumps(run)}))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *([guarded(cell) for cell in row] for row in rows)])
    write_text(out / LOG, text.getvalue())


def _resumed(out: Path, what: dict, like: State) -> tuple[State, dict, list]:
    path = out / CHECKPOINT
    blob = read_blob(path)
    notes = notes_of(blob, path)
    if notes.get("what") != json.dumps(what, sort_keys=True):
        raise InvalidInput("of another training (placer, settings, seed or problems): use another folder", source=path)
    run = _counters(notes.get("run"), len(what["trained_on"]), path)
    try:
        with open_text(out / LOG) as file:
            lines = [[unguarded(cell) for cell in row] for row in csv.reader(file)]
        rows = [row for row in lines if row and re.fullmatch(r"[0-9]{1,18}", row[0]) and int(row[0]) <= run["samples"]]
    except InvalidInput:  # the log is for people: without it the training continues all the same
        rows = []
    return unpack(blob, like, path), run, rows


def _counters(text: object, n_problems: int, path: Path) -> dict:
    try:
        run = json.loads(str(text))
        whole = [run["updates"], run["samples"], *(0 if best is None else best for best in run["best"])]
        if all(type(number) is int and number >= 0 for number in whole) and len(run["best"]) == n_problems:
            return run
    except (ValueError, RecursionError, KeyError, TypeError):
        pass
    raise InvalidInput("missing or malformed", source=path, field="run")
