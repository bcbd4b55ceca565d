"""Data parallel training as tutorials write it: a process for each rank."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    model = DistributedDataParallel(nn.Linear(16, 4).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 16, device=rank)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "--by-hand" in sys.argv:
        workers = [mp.Process(target=train, args=(rank, 2)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    else:
        mp.spawn(train, args=(2,), nprocs=2, join=True)
