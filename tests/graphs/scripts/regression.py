"""Fits a polynomial of degree four, without an optimizer, until the loss is small."""

import torch
from torch.nn import functional

truth, offset = torch.randn(4, 1) * 5, torch.randn(1) * 5


def samples(count=32):
    x = torch.randn(count, 1)
    powers = torch.cat([x**degree for degree in range(1, 5)], 1)
    return powers, powers @ truth + offset.item()


line = torch.nn.Linear(4, 1)
while True:
    x, y = samples()
    line.zero_grad()
    loss = functional.smooth_l1_loss(line(x), y)
    loss.backward()
    for parameter in line.parameters():
        parameter.data.add_(-0.1 * parameter.grad)
    if loss.item() < 1e-3:
        break
