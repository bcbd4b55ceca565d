"""An optimizer that holds another one, as many implementations do."""

import torch


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
