"""Which kind of move a search draws next: the more often, the more the kind has gained lately."""

from __future__ import annotations

import numpy as np

FIXED = 0.4  # part of the draws that follow the given shares, whatever a kind has gained
MEMORY = 0.995  # an evaluation counts so much less at each later one
FEW = 8.0  # evaluations for which a kind counts as average
RENEW = 16  # evaluations after which the probabilities are computed again


class Payoff:
    """Chooses among kinds of moves by what an evaluation of each has gained: adaptive operator selection by probability
    matching (Thierens, An Adaptive Pursuit Strategy for Allocating Operator Probabilities, GECCO 2005).

    ``shares`` float ``(k,)``: how often each kind is drawn at first; a share of 0 means never. The result depends on
    evaluations only, not on seconds.
    """

    def __init__(self, shares: np.ndarray):
        self.shares = np.asarray(shares, float) / np.sum(shares)
        self.gained, self.tried = np.zeros(len(self.shares)), np.zeros(len(self.shares))
        self.cumulative, self.count = np.cumsum(self.shares), 0

    def draw(self, rng: np.random.Generator) -> int:
        """The number of a kind."""
        kind = int(np.searchsorted(self.cumulative, rng.random() * self.cumulative[-1], side="right"))
        return min(kind, len(self.shares) - 1)

    def note(self, kind: int, gain: float) -> None:
        """An evaluation of ``kind`` gained ``gain`` of the score, 0 or more."""
        self.gained *= MEMORY
        self.tried *= MEMORY
        self.gained[kind] += gain
        self.tried[kind] += 1
        self.count += 1
        if self.count % RENEW == 0 and self.gained.sum() > 0:
            mean = self.gained.sum() / self.tried.sum()
            rate = np.where(self.shares > 0, (self.gained + FEW * mean) / (self.tried + FEW), 0)
            self.cumulative = np.cumsum(FIXED * self.shares + (1 - FIXED) * rate / rate.sum())
