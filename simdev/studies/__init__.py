"""Reports about simdev itself, each made by one command and shipped in ``leaderboard/``.

``fidelity`` compares predictions with measurements; ``physics`` and ``cost_report`` show how the rules and the costs of
a simulator change the ranking of placers; ``reproduce`` repeats the experiments of the papers on learned placement;
``perf`` measures the speed of the simulator. ``shipped_graphs`` writes the graphs that ship with simdev.
"""

from simdev.studies.reproduce import reproduce

__all__ = ["reproduce"]
