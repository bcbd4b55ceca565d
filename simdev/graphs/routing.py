"""On how many ranks or nodes the experts of a token lie: of models with experts (mixture of experts), whose routers
choose by values that no capture has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

GATES = ("uniform", "consecutive")


@dataclass(frozen=True)
class Routing:
    """Each token takes ``active`` of ``experts``. ``gate`` is ``"uniform"``, any of them with equal probability, or
    ``"consecutive"``: the first token takes the first experts, the next token the next ones and so on, as gates for
    benchmarks do (``FakeBalancedGate`` of NVIDIA-NeMo/Automodel)."""

    experts: int
    active: int
    gate: str = "uniform"

    def parts_of_a_token(self, ways: int) -> float:
        """In how many of ``ways`` equal parts of the experts (on ranks or on nodes) those of a token lie, on
        average."""
        here = self.experts // ways
        if self.gate == "uniform":
            return ways * (1 - math.comb(self.experts - here, self.active) / math.comb(self.experts, self.active))
        starts = range(0, math.lcm(self.experts, self.active), self.active)
        met = (len({(start + n) % self.experts // here for n in range(self.active)}) for start in starts)
        return sum(met) / len(starts)

    def node_share(self, ranks: int, nodes: int) -> float:
        """How many copies of a token go to other nodes if each node gets one, over those if each rank gets one. Experts
        lie on ``ranks`` ranks of ``nodes`` nodes."""
        return self.parts_of_a_token(nodes) / self.parts_of_a_token(ranks)


def routing_by_node(parameters: Mapping[str, object]) -> Routing | None:
    """The routing of a model whose parameters say ``dispatch=tokens``, which sends a token once to each node; None for
    other models."""
    if parameters.get("dispatch") != "tokens":
        return None
    experts, active = (int(str(parameters[name])) for name in ("experts", "active"))
    return Routing(experts, active, str(parameters["gate"]))
