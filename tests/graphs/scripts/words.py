"""A word language model: an LSTM whose state outlives the step, clipped and updated by hand."""

import argparse
import math

import torch
import torch.nn as nn

p = argparse.ArgumentParser()
p.add_argument("--batch_size", type=int, default=4)
p.add_argument("--bptt", type=int, default=6)
p.add_argument("--epochs", type=int, default=1)
p.add_argument("--log-interval", type=int, default=2)
a = p.parse_args()


class RNNModel(nn.Module):
    def __init__(self, n=50, d=16):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(n, d)
        self.rnn = nn.LSTM(d, d, 2, dropout=0.2)
        self.decoder = nn.Linear(d, n)
        self.decoder.weight = self.encoder.weight

    def forward(self, x, h):
        o, h = self.rnn(self.drop(self.encoder(x)), h)
        return torch.log_softmax(self.decoder(self.drop(o)).view(-1, 50), 1), h

    def init_hidden(self, b):
        w = next(self.parameters())
        return w.new_zeros(2, b, 16), w.new_zeros(2, b, 16)


def repackage(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage(v) for v in h)


data = torch.randint(0, 50, (200 * a.batch_size,)).view(a.batch_size, -1).t().contiguous()
model = RNNModel()
criterion = nn.NLLLoss()
lr = 20.0
model.train()
total = 0.0
hidden = model.init_hidden(a.batch_size)
for batch, i in enumerate(range(0, data.size(0) - 1, a.bptt)):
    n = min(a.bptt, len(data) - 1 - i)
    x, y = data[i : i + n], data[i + 1 : i + 1 + n].view(-1)
    model.zero_grad()
    hidden = repackage(hidden)
    out, hidden = model(x, hidden)
    loss = criterion(out, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for q in model.parameters():
        q.data.add_(q.grad, alpha=-lr)
    total += loss.item()
    if batch % a.log_interval == 0 and batch > 0:
        print(batch, total, math.exp(total / batch))
        total = 0
