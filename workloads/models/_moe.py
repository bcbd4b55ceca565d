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

``dispatch`` says what is exchanged. ``"pairs"``: a row for each pair of a token and one of its experts (torchtitan,
Megatron-LM's ``alltoall``). ``"tokens"``: a token goes once to each rank that has any of its experts, is copied there
for each of these, and their sum comes back (DeepEP). How many ranks those are depends on the ``gate``
(:class:`~simdev.graphs.routing.Routing`). Between nodes a token goes once to each node, and from there to its ranks
(:func:`~simdev.parallel.costs.collectives.collective_ns`).
"""

from __future__ import annotations

import math
from functools import partial

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs.parallel_model import Part, Stage
from simdev.graphs.routing import GATES, Routing
from simdev.workloads.models._data import adam, axis_size, last_gradient, over_data, recomputed
from simdev.workloads.models._decoder import (
    check_heads,
    check_tensors,
    decoder,
    decoder_inputs,
    decoder_layer,
    gated,
    grouped_attention,
    grouped_attention_plan,
    loss_over_tensors,
    on_rank,
    over_tensors,
)

DISPATCHES = ("pairs", "tokens")


def experts_of_a_rank(count: int, width: int, hidden: int):
    """The experts of one rank: products over groups of rows, one group for each expert."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (nn.Parameter(torch.empty(count, width, hidden)) for _ in range(2))
            self.down = nn.Parameter(torch.empty(count, hidden, width))

        def forward(self, x, ends):
            y = F.silu(torch._grouped_mm(x, self.gate, ends)) * torch._grouped_mm(x, self.up, ends)
            return torch._grouped_mm(y, self.down, ends)

    return Experts()


def mixture(
    width: int,
    hidden: int,
    experts: int,
    active: int,
    shared: int,
    mesh,
    imbalance: float,
    dispatch: str,
    gate: str,
    sigmoid: bool = False,
):
    """The module: ``active`` of ``experts`` for each token, and ``shared`` ones for all. Parameters are on the current
    device; each rank of ``ep`` holds its part of the experts, and each rank of ``tp`` its part of their hidden units.
    """
    import torch
    from torch import nn
    from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module

    group, ways = (mesh["ep"].get_group() if "ep" in (mesh.mesh_dim_names or ()) else None), axis_size(mesh, "ep")
    tensors = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else None
    here, part = experts // ways, hidden // axis_size(mesh, "tp")
    once = dispatch == "tokens" and ways > 1
    met = Routing(experts, active, gate).parts_of_a_token(ways)

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(width, experts, bias=False)
            self.experts = experts_of_a_rank(here, width, part)
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
            share = source.shape[0] // ways  # pairs of a rank with each
            busy = here * math.ceil(share * imbalance / here)  # of the busiest rank with each
            sent, got = share, busy  # rows that each rank sends to each, and the busiest gets from each
            if once:
                sent = math.ceil(tokens.shape[0] * met / ways)
                got = math.ceil(sent * imbalance)
                source = source[: sent * ways]
            rows = tokens[source]
            if group is not None:
                all_to_all_single(counts, None, None, group).sum()
                rows = all_to_all_single_autograd(rows, [got] * ways, [sent] * ways, group)
            if once:
                place = order.new_empty(busy * ways)  # which row each expert takes: it comes with the rows
                rows = rows[place]
            elif group is not None:  # rows come sorted by rank; the products want them sorted by expert
                rows = rows.view(ways, here, -1, width).transpose(0, 1).reshape(-1, width)
            ends = torch.arange(1, here + 1, dtype=torch.int32, device=x.device) * (rows.shape[0] // here)
            rows = self.experts(rows, ends)
            if once:  # a rank weighs and adds what its experts make of a token
                rows = rows * weights.view(-1)[place].unsqueeze(-1).to(rows.dtype)
                sums = torch.zeros(got * ways, width, dtype=rows.dtype, device=x.device)
                rows = sums.index_add(0, place, rows)
            elif group is not None:
                rows = rows.view(here, ways, -1, width).transpose(0, 1).reshape(-1, width)
            if group is not None:
                rows = all_to_all_single_autograd(rows, [sent] * ways, [got] * ways, group)
            if not once:
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
    """Raise :class:`InvalidInput` unless experts divide among the ranks and tokens among the experts, and the values of
    ``imbalance``, ``dispatch`` and ``gate`` are possible. Where a rank has fewer experts than ``dp_shard`` ranks share,
    FSDP divides the rows of each expert, and does not pad them."""
    for name, known in (("dispatch", DISPATCHES), ("gate", GATES)):
        if p[name] not in known:
            raise UnknownName(name, str(p[name]), known, source=source)
    if p["active"] > p["experts"]:
        raise InvalidInput(f"{p['active']} of {p['experts']} experts", source=source, field="active")
    if p["experts"] % mesh["ep"]:
        message = f"{p['experts']} does not divide by {mesh['ep']} expert-parallel ranks"
        raise InvalidInput(message, source=source, field="experts")
    shards = mesh["dp_shard"]
    if p["experts"] // mesh["ep"] < shards:
        for name, size in (("width", p["width"]), ("hidden", p["hidden"] // mesh["tp"])):
            if size % shards:
                message = f"the {size} rows of an expert do not divide by {shards} shards"
                raise InvalidInput(message, source=source, field=name)
    rows = p["microbatch"] * p["length"] * p["active"]
    if rows % p["experts"]:
        message = f"{rows} rows (tokens times active experts) do not divide by {p['experts']} experts"
        raise InvalidInput(message, source=source, field="length")
    if not 1 <= p["imbalance"] <= mesh["ep"]:
        message = (
            f"expected 1 (balanced) to {mesh['ep']} (all tokens on one expert-parallel rank), got {p['imbalance']}"
        )
        raise InvalidInput(message, source=source, field="imbalance")


def mixture_decoder(
    mesh, part: Part, *, width, layers, heads, kv_heads, hidden, vocabulary, experts, active, length, microbatch,
    recompute, imbalance, dispatch, gate, head=0, normed=False,
):  # fmt: skip
    """A decoder with :func:`~simdev.workloads.models._decoder.grouped_attention` (``head``, ``normed``) and a
    :func:`mixture` in each of its ``layers``."""
    import torch
    from torch import nn

    ways = axis_size(mesh, "tp")

    def layer():
        mixed = mixture(width, hidden, experts, active, 0, mesh, imbalance, dispatch, gate)
        attention = grouped_attention(width, heads, kv_heads, ways, head=head, normed=normed)
        return decoder_layer(width, attention, mixed, nn.RMSNorm)

    with torch.device("meta"):
        model = decoder(part, [layer() for _ in range(part.layers)], width, vocabulary, nn.RMSNorm)
    mixed = [layer.feed_forward for layer in model.layers]
    over_tensors(model, mesh, part, lambda _: grouped_attention_plan(normed=normed))
    recomputed(model, recompute)
    over_data(model, model.layers, mesh, experts=[one.experts for one in mixed])
    inputs = decoder_inputs(part, microbatch, length, width, head or width // heads, ways)
    return Stage(model, inputs, adam, last_gradient, context=partial(loss_over_tensors, mesh, part))


def mixture_flops(p) -> float:
    """Model FLOPs of one sequence of a :func:`mixture_decoder`, forward and backward: 6 per parameter that a token
    meets, and causal attention in full."""
    head = p.get("head") or p["width"] // p["heads"]
    queries, key_value = head * p["heads"], head * p["kv_heads"]
    layer = 2 * p["width"] * queries + 2 * p["width"] * key_value + 3 * p["active"] * p["width"] * p["hidden"]
    parameters = p["layers"] * (layer + p["width"] * p["experts"]) + p["width"] * p["vocabulary"]
    return p["length"] * (6.0 * parameters + 12.0 * p["layers"] * queries * p["length"])


def mixture_checks(name: str, p, mesh) -> None:
    """Raise :class:`InvalidInput` where heads, experts or tokens of a :func:`mixture_decoder` called ``name`` do not
    divide."""
    check_heads(p, name)
    if p["recompute"] not in ("none", "full"):
        raise UnknownName("recompute", str(p["recompute"]), ("none", "full"), source=name)
    check_tensors(p, mesh, name, ("heads", "kv_heads", "hidden", "length", "vocabulary"))
    check_balance(p, mesh, name)
