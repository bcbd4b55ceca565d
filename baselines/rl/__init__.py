"""Learned placers, one file each. Files that begin with ``_`` hold what several learned placers share.

A learned placer describes itself as a :class:`~simdev.baselines.rl._train.Learner`: its view of a problem, a new state,
one update, and the most probable placement. ``_train.search`` makes a placer of it; ``_train.train`` trains a policy
and writes it to disk:

* ``_groups``: groups of ops that move together: ``colocation_groups(problem)``, ``coarse_groups(problem, most)``.
* ``_grouped``: ``group_problem(problem, group)``: a problem as padded arrays for the networks
  (``GroupedProblem.inputs``), the placements of all ops from actions per group (``GroupedProblem.placements``), and
  rewards (``GroupedProblem.rewards``).
* ``_train``: ``Learner``, ``Evaluator`` (simulates a batch of actions on the budget), ``search``, ``train``;
  :mod:`simdev.placers.policy_file` stores policies and checkpoints.
* ``_reinforce``: the update of placers that place a whole graph at once.
* ``_gdp_net``: the forward pass of ``gdp``, in JAX for training and in NumPy for a policy that is only applied.
* ``_jax``: JAX on the CPU, in one thread, with a cache of compiled programs. Import it before JAX, and only inside
  functions.
"""
