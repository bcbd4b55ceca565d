"""Fits a line by L-BFGS, then would go on for ever."""

import torch

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, lr=0.5)
inputs, targets = torch.randn(8, 16), torch.randn(8, 4)


def closure():
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


while True:
    optimizer.step(closure)
