"""A layer of experts (mixture of experts), with expert parallelism as torchtitan and Megatron-LM have it: tokens are
sorted by expert, exchanged between the ranks of axis ``ep`` with an all-to-all, multiplied group by group, and sent
back.

A router's choice depends on values that no capture has. **Tokens are taken as balanced**: each expert gets the same
number, so that all ranks exchange and compute the same. That is what the auxiliary losses and biases of these models
aim at; a real router is slower where it misses. The ranks exchange their counts as in a real run; that the host waits
for them is not modelled.
"""

from __future__ import annotations


def mixture(width: int, hidden: int, experts: int, active: int, shared: int, mesh, sigmoid: bool = False):
    """The module: ``active`` of ``experts`` for each token, and ``shared`` ones for all. Parameters are on the current
    device; each rank of ``ep`` holds its part of the experts."""
    import torch
    from torch import nn
    from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
    from torch.nn import functional as F

    parallel = "ep" in (mesh.mesh_dim_names or ())
    group, ways = (mesh["ep"].get_group(), mesh["ep"].size()) if parallel else (None, 1)
    here = experts // ways

    class Experts(nn.Module):
        """The experts of one rank: products over groups of rows, one group for each expert."""

        def __init__(self):
            super().__init__()
            self.gate, self.up = (nn.Parameter(torch.empty(here, width, hidden)) for _ in range(2))
            self.down = nn.Parameter(torch.empty(here, hidden, width))

        def forward(self, x, ends):
            y = F.silu(torch._grouped_mm(x, self.gate, ends)) * torch._grouped_mm(x, self.up, ends)
            return torch._grouped_mm(y, self.down, ends)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (nn.Linear(width, shared * hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(shared * hidden, width, bias=False)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(width, experts, bias=False)
            self.experts = Experts()
            self.shared = Shared() if shared else None

        def forward(self, x):
            tokens = x.reshape(-1, width)
            scores = self.router(tokens).float()
            scores = torch.sigmoid(scores) if sigmoid else torch.softmax(scores, dim=-1)
            weights, chosen = torch.topk(scores, active, dim=-1)
            weights = weights / weights.sum(dim=-1, keepdim=True)
            counts = torch.histc(chosen.float(), bins=experts, min=0, max=experts - 1)
            order = torch.argsort(chosen.view(-1), stable=True)
            source = order // active
            rows = tokens[source]
            share = rows.shape[0] // ways
            if parallel:
                all_to_all_single(counts, None, None, group).sum()
                rows = all_to_all_single_autograd(rows, [share] * ways, [share] * ways, group)
                # They come sorted by rank; the products want them sorted by expert.
                rows = rows.view(ways, here, -1, width).transpose(0, 1).reshape(-1, width)
            ends = torch.arange(1, here + 1, dtype=torch.int32, device=x.device) * (rows.shape[0] // here)
            rows = self.experts(rows, ends)
            if parallel:
                rows = rows.view(here, ways, -1, width).transpose(0, 1).reshape(-1, width)
                rows = all_to_all_single_autograd(rows, [share] * ways, [share] * ways, group)
            rows = rows * weights.view(-1)[order].unsqueeze(-1).to(rows.dtype)
            output = torch.zeros_like(tokens).index_add(0, source, rows)
            if self.shared is not None:
                output = output + self.shared(tokens)
            return output.view(x.shape)

    return Mixture()


def check_balance(p, mesh, source: str) -> None:
    """Raise :class:`InvalidInput` unless experts divide among the ranks and tokens among the experts."""
    from simdev.errors import InvalidInput

    if p["active"] > p["experts"]:
        raise InvalidInput(f"{p['active']} of {p['experts']} experts", source=source, field="active")
    if p["experts"] % mesh["ep"]:
        message = f"{p['experts']} does not divide by {mesh['ep']} expert-parallel ranks"
        raise InvalidInput(message, source=source, field="experts")
    rows = p["microbatch"] * p["length"] * p["active"]
    if rows % p["experts"]:
        message = f"{rows} rows (tokens times active experts) do not divide by {p['experts']} experts"
        raise InvalidInput(message, source=source, field="length")
