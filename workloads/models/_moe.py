"""A layer of experts (mixture of experts), with expert parallelism as torchtitan and Megatron-LM have it: tokens are
sorted by expert, exchanged between the ranks of axis ``ep`` with an all-to-all, multiplied group by group, and sent
back. The ranks of axis ``tp`` divide each expert's hidden units: they gather the tokens of their sequence before the
router and reduce and scatter the sum at the end (torchtitan's expert tensor parallelism, as wide as ``tp``).

A router's choice depends on values that no capture has. How unevenly tokens spread is therefore a parameter:
``imbalance`` is the number of rows that the busiest rank of ``ep`` gets over the mean of all its ranks, 1 if tokens are
balanced. From counted tokens per expert it is the largest sum over a rank's experts, divided by the mean sum. What is
captured is the busiest rank: as all ranks wait for it in each exchange, the step takes as long as if in each layer
another rank were the busiest. On a rank, each expert gets the same number of rows. The ranks exchange their counts as
in a real run; that the host waits for them is not modelled.
"""

from __future__ import annotations

import math

from simdev.errors import InvalidInput
from simdev.workloads.models._data import axis_size
from simdev.workloads.models._decoder import gated, on_rank


def mixture(
    width: int, hidden: int, experts: int, active: int, shared: int, mesh, imbalance: float, sigmoid: bool = False
):
    """The module: ``active`` of ``experts`` for each token, and ``shared`` ones for all. Parameters are on the current
    device; each rank of ``ep`` holds its part of the experts, and each rank of ``tp`` its part of their hidden units.
    """
    import torch
    from torch import nn
    from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
    from torch.nn import functional as F

    group, ways = (mesh["ep"].get_group() if "ep" in (mesh.mesh_dim_names or ()) else None), axis_size(mesh, "ep")
    tensors = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else None
    here, part = experts // ways, hidden // axis_size(mesh, "tp")

    class Experts(nn.Module):
        """The experts of one rank: products over groups of rows, one group for each expert."""

        def __init__(self):
            super().__init__()
            self.gate, self.up = (nn.Parameter(torch.empty(here, width, part)) for _ in range(2))
            self.down = nn.Parameter(torch.empty(here, part, width))

        def forward(self, x, ends):
            y = F.silu(torch._grouped_mm(x, self.gate, ends)) * torch._grouped_mm(x, self.up, ends)
            return torch._grouped_mm(y, self.down, ends)

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(width, experts, bias=False)
            self.experts = Experts()
            self.shared = gated(width, shared * part) if shared else None

        def forward(self, x):
            if tensors is not None:  # the norm before it returns a part of the tokens
                x = x.redistribute(placements=[Replicate()])
            whole = x.reshape(-1, width)
            scores, tokens = on_rank(self.router(whole)).float(), on_rank(whole)
            scores = torch.sigmoid(scores) if sigmoid else torch.softmax(scores, dim=-1)
            weights, chosen = torch.topk(scores, active, dim=-1)
            weights = weights / weights.sum(dim=-1, keepdim=True)
            counts = torch.histc(chosen.float(), bins=experts, min=0, max=experts - 1)
            order = torch.argsort(chosen.view(-1), stable=True)
            source = order // active
            rows = tokens[source]
            share = rows.shape[0] // ways  # that each rank sends to each
            busy = here * math.ceil(share * imbalance / here)  # that the busiest rank gets from each
            if group is not None:
                all_to_all_single(counts, None, None, group).sum()
                rows = all_to_all_single_autograd(rows, [busy] * ways, [share] * ways, group)
                # They come sorted by rank; the products want them sorted by expert.
                rows = rows.view(ways, here, -1, width).transpose(0, 1).reshape(-1, width)
            ends = torch.arange(1, here + 1, dtype=torch.int32, device=x.device) * (rows.shape[0] // here)
            rows = self.experts(rows, ends)
            if group is not None:
                rows = rows.view(here, ways, -1, width).transpose(0, 1).reshape(-1, width)
                rows = all_to_all_single_autograd(rows, [share] * ways, [busy] * ways, group)
            rows = rows * weights.view(-1)[order].unsqueeze(-1).to(rows.dtype)
            output = torch.zeros_like(tokens).index_add(0, source, rows)
            if self.shared is not None:
                output = output + self.shared(tokens)
            output = output.view(x.shape)
            if tensors is None:
                return output
            output = DTensor.from_local(output, tensors, [Partial()], run_check=False)
            return output.redistribute(placements=[Shard(1)]).to_local()

    module = Mixture()
    if tensors is not None:
        distribute_module(module.router, tensors)
    return module


def check_balance(p, mesh, source: str) -> None:
    """Raise :class:`InvalidInput` unless experts divide among the ranks and tokens among the experts, and ``imbalance``
    is possible."""
    if p["active"] > p["experts"]:
        raise InvalidInput(f"{p['active']} of {p['experts']} experts", source=source, field="active")
    if p["experts"] % mesh["ep"]:
        message = f"{p['experts']} does not divide by {mesh['ep']} expert-parallel ranks"
        raise InvalidInput(message, source=source, field="experts")
    rows = p["microbatch"] * p["length"] * p["active"]
    if rows % p["experts"]:
        message = f"{rows} rows (tokens times active experts) do not divide by {p['experts']} experts"
        raise InvalidInput(message, source=source, field="length")
    if not 1 <= p["imbalance"] <= mesh["ep"]:
        message = (
            f"expected 1 (balanced) to {mesh['ep']} (all tokens on one expert-parallel rank), got {p['imbalance']}"
        )
        raise InvalidInput(message, source=source, field="imbalance")
