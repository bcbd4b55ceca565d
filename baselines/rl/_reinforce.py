"""REINFORCE for placers that place a whole graph at once: sample placements, compare with a moving average, climb."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simdev.baselines.rl._grouped import GroupedProblem
from simdev.baselines.rl._jax import initializer, jax, jnp, optax
from simdev.baselines.rl._train import Episodes, State

LEAST_SPREAD, MOST = 1e-3, 3.0  # of rewards, in one batch; of advantages


class Reinforce:
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`.

    ``new(key)`` makes a policy. ``sample(policy, inputs, noise_key, count, greedy)`` draws actions: a pytree of arrays
    with ``count`` rows; its ``actions`` are int ``(count, G)``. ``likelihood(policy, inputs, drawn)`` returns the
    log-probability of each row, float32 ``(count,)``, and the mean entropy in nats a group.

    The baseline of each problem is a moving average of its rewards. An update keeps ``decay`` of the old average; the
    first average is the mean of the first batch. Advantages are divided by the batch's standard deviation, because the
    first rewards differ most and Adam remembers the size of the first gradients for long. After ``patience`` updates of
    a problem, samples that exceed memory count neither in the gradient nor in the baseline, unless all samples do.
    ``entropy`` is the weight of a bonus for the entropy (the sum over groups); it falls to 0 over ``entropy_updates``.
    """

    def __init__(
        self,
        new: Callable,
        sample: Callable,
        likelihood: Callable,
        optimizer: optax.GradientTransformation,
        *,
        samples: int,
        decay: float = 0.9,
        patience: int = 50,
        entropy: float = 0.0,
        entropy_updates: int = 100,
    ):
        self.new, self.optimizer, self.samples, self.decay, self.patience = new, optimizer, samples, decay, patience

        def loss(policy, inputs, drawn, advantage, weight):
            logp, undecided = likelihood(policy, inputs, drawn)
            return -jnp.mean(advantage * logp) - weight * undecided * jnp.sum(inputs.real), undecided

        @jax.jit
        def draw(policy, inputs, key, greedy):
            key, noise = jax.random.split(key)
            return key, sample(policy, inputs, noise, samples, greedy)

        @jax.jit
        def update(policy, optimizer_state, inputs, drawn, advantage, updates):
            weight = entropy * jnp.maximum(0.0, 1.0 - updates / entropy_updates)
            (_, undecided), gradient = jax.value_and_grad(loss, has_aux=True)(policy, inputs, drawn, advantage, weight)
            change, optimizer_state = optimizer.update(gradient, optimizer_state, policy)
            return optax.apply_updates(policy, change), optimizer_state, undecided

        self._draw, self._update, self._start = draw, update, initializer(new, optimizer)

    def init(self, seed: int, n_problems: int) -> State:
        policy, optimizer_state, key = self._start(seed)
        return {
            "policy": policy,
            "optimizer": optimizer_state,
            "key": key,
            "baseline": np.zeros(n_problems, np.float32),
            "updates": np.zeros(n_problems, np.int32),
        }

    def step(self, state: State, index: int, evaluate: Episodes) -> tuple[State, dict]:
        inputs = evaluate.grouped.inputs
        key, drawn = self._draw(state["policy"], inputs, state["key"], False)
        rewards = evaluate(np.asarray(drawn["actions"]))
        fits = evaluate.fits
        updates, baseline = state["updates"].copy(), state["baseline"].copy()
        counted = fits if fits.any() and updates[index] >= self.patience else np.ones(len(fits), bool)
        mean = rewards[counted].mean()
        baseline[index] = mean if updates[index] == 0 else self.decay * baseline[index] + (1 - self.decay) * mean
        spread = max(float(rewards[counted].std()), LEAST_SPREAD)
        advantage = np.where(counted, np.clip((rewards - baseline[index]) / spread, -MOST, MOST), 0.0).astype(
            np.float32
        )
        policy, optimizer_state, entropy = self._update(
            state["policy"], state["optimizer"], inputs, drawn, advantage, int(updates[index])
        )
        updates[index] += 1
        new = {**state, "policy": policy, "optimizer": optimizer_state, "key": key}
        return {**new, "baseline": baseline, "updates": updates}, {"entropy": float(entropy)}

    def greedy(self, state: State, grouped: GroupedProblem) -> np.ndarray:
        _, drawn = self._draw(state["policy"], grouped.inputs, state["key"], True)
        return np.asarray(drawn["actions"])[0]
