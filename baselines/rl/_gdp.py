"""The network of ``gdp`` and its updates."""

from __future__ import annotations

from functools import cache, partial
from weakref import WeakKeyDictionary

import numpy as np

from simdev.baselines.rl._edits import Edits, first_placements
from simdev.baselines.rl._gdp_net import block, logits, sage
from simdev.baselines.rl._grouped import DEVICE_FEATURES, GroupedProblem
from simdev.baselines.rl._jax import eqx, initializer, jax, jnp, optax
from simdev.baselines.rl._layers import Dense, Jax
from simdev.baselines.rl._sight import NODE_FEATURES, SUMMARY_FEATURES, Sight
from simdev.baselines.rl._train import Episodes, State
from simdev.placers.score import Score

FIRST_WEIGHT, WEIGHT_GAIN = 0.05, 0.05  # of the entropy bonus; the weight follows the entropy that is wanted
MOST_RATIO = 70.0  # logarithm; an infinite ratio makes all weights nan, even times the 0 of a group that did not move


class Sage(eqx.Module):
    """A layer of GraphSAGE: its weights."""

    pool: Dense
    join: Dense

    def __init__(self, hidden: int, *, key):
        one, two = jax.random.split(key)
        self.pool = Dense(hidden + 2, hidden, key=one)
        self.join = Dense(2 * hidden, hidden, key=two)

    def __call__(self, h, sight: Sight):
        return sage(Jax, self, h, sight)


class Block(eqx.Module):
    """A layer of the placer: its weights."""

    gate: Dense
    query: Dense
    key_value: Dense
    out: Dense
    up: Dense
    down: Dense

    def __init__(self, hidden: int, *, key):
        keys = jax.random.split(key, 6)
        self.gate = Dense(hidden + SUMMARY_FEATURES, hidden, key=keys[0], scale=0.1)
        self.query = Dense(hidden, hidden, key=keys[1])
        self.key_value = Dense(hidden, 2 * hidden, key=keys[2])
        self.out = Dense(hidden, hidden, key=keys[3], scale=0.3)
        self.up = Dense(hidden, 2 * hidden, key=keys[4])
        self.down = Dense(2 * hidden, hidden, key=keys[5], scale=0.3)

    def __call__(self, h, real, graph):
        return block(Jax, self, h, real, graph)


class GdpPolicy(eqx.Module):
    """Logits of every device for every group at once, float32 ``(G, D)``: the weights. ``_gdp_net`` computes them."""

    enter: Dense
    sages: list[Sage]
    blocks: list[Block]
    name: Dense
    query: Dense
    device: Dense
    share: Dense
    attention: bool = eqx.field(static=True)
    superposition: bool = eqx.field(static=True)

    def __init__(
        self, hidden: int, devices: int, sages: int, blocks: int, *, key, attention: bool = True,
        superposition: bool = True,
    ):  # fmt: skip
        self.attention, self.superposition = attention, superposition
        keys = jax.random.split(key, 5 + sages + blocks)
        self.enter = Dense(NODE_FEATURES + SUMMARY_FEATURES, hidden, key=keys[0])
        self.name = Dense(hidden, devices, key=keys[1], scale=0.1)
        self.query = Dense(hidden, 16, key=keys[2], scale=0.3)
        self.device = Dense(DEVICE_FEATURES, 16, key=keys[3], scale=0.3)
        share = Dense(hidden, 1, key=keys[4], scale=0.1)
        self.share = eqx.tree_at(lambda layer: layer.bias, share, share.bias + 0.25)
        self.sages = [Sage(hidden, key=one) for one in keys[5 : 5 + sages]]
        self.blocks = [Block(hidden, key=one) for one in keys[5 + sages :]]

    def __call__(self, sight: Sight):
        return logits(Jax, self, sight, attention=self.attention, superposition=self.superposition)


class ProximalPolicy:
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`.

    An update spends ``samples`` evaluations: on samples of whole placements, and, a share ``edits`` of them, on a climb
    of edits from the best placement so far (:class:`Edits`; their devices are drawn by the policy). All of them teach
    by PPO (Schulman et al. 2017) with a clipped ratio for each group. The advantage of a sample is its reward less the
    batch's mean; it counts for all groups. The advantage of an edit is its reward less that of the placement that it
    was made from; it counts for the edited groups alone. ``imitation`` is the weight of the likelihood of the best
    placement.

    The best placement of each problem is part of the state: ``best`` int32 ``(problems, rows)``, ``step_ns`` and
    ``overflow`` int64 ``(problems,)``, -1 before the first.
    """

    def __init__(
        self, new, *, rows, samples, edits, wide, starts, imitation, epochs, rate, clip, entropy, entropy_end,
        entropy_updates,
    ):  # fmt: skip
        self.entropy, self.entropy_end, self.entropy_updates = entropy, entropy_end, entropy_updates
        self.rows, self.samples, self.wide, self.starts, self.learns = rows, samples, wide, starts, rate > 0
        self.whole = samples - round(edits * samples)  # samples of whole placements in an update
        self._edits: WeakKeyDictionary[GroupedProblem, Edits] = WeakKeyDictionary()
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

        def objective(policy, sight, tried, before, best, weight):
            actions, moved, advantage = tried
            logp = jax.nn.log_softmax(policy(sight))
            taken = jnp.take_along_axis(logp, actions.T, axis=1).T
            ratio, advantage = jnp.exp(jnp.minimum(taken - before, MOST_RATIO)), advantage[:, None]
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
            gain = jnp.sum(gain * moved, axis=1) / jnp.maximum(1, jnp.sum(moved, axis=1))
            choices = jnp.maximum(2, jnp.sum(sight.allowed, axis=1))
            entropy = -jnp.sum(jnp.where(sight.allowed, jnp.exp(logp) * logp, 0.0), axis=1) / jnp.log(choices)
            mean = partial(jnp.average, weights=sight.real.astype(jnp.float32))
            like = mean(jnp.take_along_axis(logp, best[:, None], axis=1)[:, 0])
            return -gain.mean() - imitation * like - weight * mean(entropy), mean(entropy)

        @jax.jit
        def draw(policy, sight, key):
            """The most probable placement, followed by samples; log-probabilities of all devices."""
            key, noise_key = jax.random.split(key)
            scores = policy(sight)
            noise = jax.random.gumbel(noise_key, (samples, *scores.shape)).at[0].set(0.0)
            return key, jnp.argmax(scores[None] + noise, axis=2), jax.nn.log_softmax(scores)

        @jax.jit
        def update(policy, optimizer_state, sight, tried, best, weight):
            logp = jax.nn.log_softmax(policy(sight))
            before = jnp.take_along_axis(logp, tried[0].T, axis=1).T

            def epoch(carry, _):
                policy, optimizer_state = carry
                (_, left), gradient = jax.value_and_grad(objective, has_aux=True)(
                    policy, sight, tried, before, best, weight
                )
                change, optimizer_state = optimizer.update(gradient, optimizer_state, policy)
                return (optax.apply_updates(policy, change), optimizer_state), left

            (policy, optimizer_state), left = jax.lax.scan(epoch, (policy, optimizer_state), None, length=epochs)
            return policy, optimizer_state, left[0]

        self._draw, self._update, self._start = draw, update, initializer(new, optimizer)

    def init(self, seed: int, n_problems: int) -> State:
        policy, optimizer_state, key = self._start(seed)
        return {
            "policy": policy,
            "optimizer": optimizer_state,
            "key": key,
            "weight": np.full((), FIRST_WEIGHT, np.float32),
            "updates": np.zeros(n_problems, np.int32),
            "best": np.zeros((n_problems, self.rows), np.int32),
            "step_ns": np.full(n_problems, -1, np.int64),
            "overflow": np.full(n_problems, -1, np.int64),
        }

    def step(self, state: State, index: int, evaluate: Episodes) -> tuple[State, dict]:
        sight = evaluate.grouped.inputs
        key, drawn, logp = self._draw(state["policy"], sight, state["key"])
        batch = Batch(evaluate, self.samples, state["best"][index], state["step_ns"][index], state["overflow"][index])
        self._samples(batch, np.asarray(drawn))
        self._climb(batch, np.asarray(logp), np.random.default_rng(np.asarray(key)))
        evaluate.rewards = batch.rewards[: batch.used]
        updates = state["updates"].copy()
        policy, optimizer_state, left = state["policy"], state["optimizer"], float("nan")
        if self.learns:
            policy, optimizer_state, left = self._update(
                policy, optimizer_state, sight, batch.tried(), batch.best, state["weight"]
            )
        passed = min(1.0, updates[index] / self.entropy_updates)
        wanted = self.entropy + (self.entropy_end - self.entropy) * passed
        weight = np.clip(state["weight"] + WEIGHT_GAIN * (wanted - float(left)), 0.0, 1.0).astype(np.float32)
        updates[index] += 1
        new = {"policy": policy, "optimizer": optimizer_state, "key": key, "weight": weight, "updates": updates}
        step_ns, overflow = (-1, -1) if batch.score is None else (batch.score.step_ns, batch.score.overflow_bytes)
        kept = {"best": batch.best, "step_ns": step_ns, "overflow": overflow}
        for name, value in kept.items():
            new[name] = state[name].copy()
            new[name][index] = value
        return new, {"entropy": float(left)}

    def _samples(self, batch: Batch, drawn: np.ndarray) -> None:
        """Evaluate whole placements: the first ones of a problem, then the most probable one and samples."""
        if batch.score is None and self.starts:
            batch.sample(first_placements(batch.grouped)[: self.whole])
        count = batch.grouped.n_groups
        drawn = drawn[: self.whole - batch.used]
        if batch.score is not None:  # the best placement is known already
            drawn = drawn[(drawn[:, :count] != batch.best[:count]).any(axis=1)]
        batch.sample(drawn)

    def _climb(self, batch: Batch, logp: np.ndarray, rng: np.random.Generator) -> None:
        """Spend the rest of the batch on edits of the best placement."""
        if self.whole == self.samples:
            return
        edits = self._edits.get(batch.grouped)
        if edits is None:
            edits = self._edits[batch.grouped] = Edits(batch.grouped, self.wide)
        while batch.used < self.samples:
            edit = edits.draw(rng, batch.best, logp)
            if edit is None:
                return
            batch.edit(*edit)

    def greedy(self, state: State, grouped: GroupedProblem) -> np.ndarray:
        return np.asarray(self._draw(state["policy"], grouped.inputs, state["key"])[1][0])


class Batch:
    """The placements that an update evaluates and learns from, at most ``size``, and the best placement so far."""

    def __init__(self, evaluate: Episodes, size: int, best: np.ndarray, step_ns: int, overflow: int):
        self.evaluate, self.grouped = evaluate, evaluate.grouped
        self.best = best
        self.score = Score(int(step_ns), int(overflow)) if step_ns >= 0 else None
        self.used = 0
        self.actions, self.moved = np.zeros((size, len(best)), np.int32), np.zeros((size, len(best)), bool)
        self.advantages, self.rewards = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self.edits = np.zeros(size, bool)

    def sample(self, actions: np.ndarray) -> None:
        """Evaluate whole placements int ``(k, rows)``."""
        if not len(actions):
            return
        step_ns, overflow = self.evaluate.simulate(actions)
        for row, one, lacks in zip(actions, step_ns.tolist(), overflow.tolist(), strict=True):
            self._add(row, self.grouped.inputs.real, Score(one, lacks), 0.0, False)

    def edit(self, groups: np.ndarray, device: int) -> None:
        """Evaluate the best placement with ``groups`` on ``device``; it becomes the best unless it is worse."""
        if self.score is None:
            raise ValueError("there is no placement to edit yet")
        actions = self.best.copy()
        actions[groups] = device
        moved = np.zeros(len(actions), bool)
        moved[groups] = True
        before = self._reward(self.score)
        self._add(actions, moved, self.evaluate.edit(actions, self.score), before, True)

    def _add(self, actions: np.ndarray, moved: np.ndarray, score: Score, before: float, edit: bool) -> None:
        at, self.used = self.used, self.used + 1
        self.actions[at], self.moved[at], self.edits[at] = actions, moved, edit
        self.rewards[at] = self._reward(score)
        self.advantages[at] = self.rewards[at] - before
        if self.score is None or score <= self.score:
            self.best, self.score = np.asarray(actions, np.int32), score

    def _reward(self, score: Score) -> float:
        return float(self.grouped.rewards(np.array([score.step_ns]), np.array([score.overflow_bytes or 0]))[0])

    def tried(self):
        """Actions, groups that they changed, and advantages, within 3 deviations of their kind."""
        advantage = np.zeros_like(self.advantages)
        whole = np.arange(len(advantage)) < self.used
        for kind in (whole & ~self.edits, self.edits):
            values = self.advantages[kind]
            if len(values):
                middle = 0.0 if self.edits[kind][0] else values.mean()
                advantage[kind] = np.clip((values - middle) / (values.std() + 1e-6), -3.0, 3.0)
        return self.actions, self.moved, advantage


@cache  # compiled functions are kept with it
def learner_functions(*, hidden, devices, sages, blocks, attention, superposition, **how) -> ProximalPolicy:
    """The learner functions of ``gdp``, for problems of ``devices`` columns."""

    def new(key):
        return GdpPolicy(hidden, devices, sages, blocks, attention=attention, superposition=superposition, key=key)

    return ProximalPolicy(new, **how)
