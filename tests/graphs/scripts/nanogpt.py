"""A small GPT on an accelerator that is not there: autocast, a scaler, micro-batches, torch.compile."""

import os
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

batch_size = 4
block_size = 16
gradient_accumulation_steps = 2
device = "cuda"
dtype = "bfloat16"
compile = True
max_iters = 10
grad_clip = 1.0
ddp = int(os.environ.get("RANK", -1)) != -1
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=torch.bfloat16)
data = np.random.randint(0, 64, (4096,)).astype(np.uint16)


def get_batch(split):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return (
        (x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True))
        if device_type == "cuda"
        else (x, y)
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(32)
        self.attn = nn.Linear(32, 96, bias=False)
        self.proj = nn.Linear(32, 32, bias=False)
        self.ln2 = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, 4, 8).transpose(1, 2) for t in self.attn(self.ln1(x)).split(32, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.proj(y)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(64, 32)
        self.wpe = nn.Embedding(16, 32)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, i, t):
        x = self.wte(i) + self.wpe(torch.arange(i.size(1), device=i.device))
        for b in self.h:
            x = b(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, 64), t.view(-1), ignore_index=-1)


model = GPT()
model.to(device)
scaler = torch.cuda.amp.GradScaler(enabled=False)
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ],
    lr=1e-3,
    fused=True,
)
if compile:
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        X, Y = get_batch("val")
        with ctx:
            _, loss = model(X, Y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


X, Y = get_batch("train")
it = 0
while True:
    for g in optimizer.param_groups:
        g["lr"] = 1e-3
    if it % 5 == 0:
        print(estimate_loss())
    for _micro in range(gradient_accumulation_steps):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(it, loss.item())
    it += 1
    if it > max_iters:
        break
