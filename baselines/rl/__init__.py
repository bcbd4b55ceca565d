"""Learned placers: one file each. What they share is in the files that begin with ``_``.

A learned placer describes itself as a :class:`~simdev.baselines.rl._train.Learner` (how to see a problem, a new state,
one update, the most probable placement); ``_train.search`` makes a placer of it, ``_train.train`` a policy on disk:

* ``_groups``: groups of ops that move together: ``colocation_groups(problem)``, ``coarse_groups(problem, most)``.
* ``_case``: ``make_case(problem, group)``, a problem as padded arrays (``Case.inputs``, for the networks), placements
  of all ops from actions per group (``Case.placements``), rewards (``Case.rewards``).
* ``_train``: ``Learner``, ``Evaluator`` (simulates a batch of actions on the budget), ``search``, ``train``;
  :mod:`simdev.placers.policy_file` keeps policies and checkpoints on disk.
* ``_reinforce``: the update of placers that place a whole graph at once.
* ``_jax``: JAX on the processor, one thread, compiled programs kept. Import it first, and only inside functions.
"""
