"""A script whose optimizer holds another one."""

import torch
from lookahead import Lookahead
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = Lookahead(torch.optim.AdamW(model.parameters()))
for _ in range(6):
    nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,))).backward()
    optimizer.step()
    optimizer.zero_grad()
