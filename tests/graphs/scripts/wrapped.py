"""A script whose optimizer holds another one (Lookahead), as many implementations do."""

import torch
from torch import nn


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, every=2, share=0.5):
        self.inner, self.every, self.share, self.count = inner, every, share, 0
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})
        self.slow = [parameter.detach().clone() for group in inner.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.add_(parameter - slow, alpha=self.share)
                parameter.copy_(slow)


model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = Lookahead(torch.optim.AdamW(model.parameters()))
for _ in range(6):
    nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,))).backward()
    optimizer.step()
    optimizer.zero_grad()
