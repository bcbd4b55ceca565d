"""DLRM (Naumov et al. 2019) as MLPerf trained it on Criteo's click logs: 26 embedding tables, two MLPs, dot products.

Module paths (``op_layer``): ``table0`` ... ``table25``, ``bottom`` (the dense features' MLP), ``interaction``, ``top``
and ``loss``.

The tables have the row counts of MLPerf's reference, cut to ``max_rows`` each; with ``max_rows=40000000`` nothing is
cut and they take 104.5 GB. A feature has one id, as in Criteo's logs. A table's gradient touches at most ``batch``
rows. Where a table has more rows than that, the backward pass adds it straight into the table (stochastic gradient
descent fused into the backward pass, as in FBGEMM's table-batched embeddings), and no dense gradient exists. The
optimiser updates the MLPs and the smaller tables, whose gradients are dense, as those of TorchRec's tables that are
data-parallel: so these tables may be copied to many devices.
"""

from __future__ import annotations

from simdev.graphs.workload import InferenceStep, TrainingStep, workload

# Distinct ids of the 26 categorical features of Criteo's terabyte click logs, at most 40 million kept of each.
CRITEO_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip


@workload(
    "dlrm",
    family="dlrm",
    defaults={"batch": 65_536, "max_rows": 10_000_000, "units": 128, "rate": 0.1},
    # "25+ billion parameters" at 40 million rows: Desai and Shrivastava 2022, abstract.
    published={"parameters_at_40m_rows_over": 25e9},
    source="Naumov et al., Deep Learning Recommendation Model, 2019, section 2; MLPerf Training, recommendation",
)
def dlrm(batch, max_rows, units, rate):
    """A step on ``batch`` clicks at learning rate ``rate``.

    Batch, rows of 128 floats and the MLPs 13-512-256-128 and 1024-1024-512-256-1 are those of MLPerf's reference.
    """
    import torch

    model, dense, ids = _model_and_clicks(batch, max_rows, units, rate)
    clicked = torch.randint(2, (batch,)).float()
    fused = {id(module.weight) for module in model.modules() if getattr(module, "fused", False)}
    optimizer = torch.optim.SGD([one for one in model.parameters() if id(one) not in fused], lr=rate)
    return TrainingStep(model, (dense, clicked, *ids), lambda model, *inputs: model(*inputs), optimizer)


@workload(
    "dlrm-inference",
    family="dlrm",
    defaults={"batch": 2048, "max_rows": 10_000_000, "units": 128},
    published={"parameters_at_40m_rows_over": 25e9},
    source="Naumov et al., Deep Learning Recommendation Model, 2019, section 2; MLPerf Inference, recommendation",
)
def dlrm_inference(batch, max_rows, units):
    """The probabilities of ``batch`` clicks, with the tables and MLPs of the training step."""
    import torch

    model, dense, ids = _model_and_clicks(batch, max_rows, units, 0.0)
    return InferenceStep(model.eval(), (dense, *ids), lambda model, *inputs: torch.sigmoid(model.scores(*inputs)))


def _model_and_clicks(batch, max_rows, units, rate):
    """The model, the dense features ``(batch, 13)``, and the ids ``(batch,)`` of each categorical feature."""
    import torch

    rows = [min(count, max_rows) for count in CRITEO_ROWS]
    model = _model(rows, units, rate, batch)
    return model, torch.rand(batch, 13), [torch.randint(count, (batch,)) for count in rows]


def _model(rows, units, rate, batch):
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Lookup(torch.autograd.Function):
        """Rows of a table; the backward pass subtracts ``rate`` times their gradient from the table in place."""

        @staticmethod
        def forward(ctx, table, ids):
            ctx.save_for_backward(ids)
            ctx.table = table
            return F.embedding(ids, table)

        @staticmethod
        def backward(ctx, gradient):
            (ids,) = ctx.saved_tensors
            ctx.table.detach().index_add_(0, ids, gradient, alpha=-rate)
            return None, None

    class Table(nn.Module):
        def __init__(self, count):
            super().__init__()
            bound = count**-0.5
            self.weight = nn.Parameter(torch.empty(count, units).uniform_(-bound, bound))
            self.fused = count > batch

        def forward(self, ids):
            return Lookup.apply(self.weight, ids) if self.fused else F.embedding(ids, self.weight)

    class Exchange(torch.autograd.Function):
        """The vectors side by side. The gradient is cut into copies, as the exchange of a hybrid sends them (Naumov et
        al. 2019, section 4): a table on another device is sent its own part, not a view into all of it."""

        @staticmethod
        def forward(ctx, *vectors):
            return torch.stack(vectors, dim=1)

        @staticmethod
        def backward(ctx, gradient):
            return tuple(part.contiguous() for part in gradient.unbind(1))

    class Interaction(nn.Module):
        """Dot products of all pairs of the 27 vectors, after the dense vector itself (section 2.1.3)."""

        def forward(self, dense, looked_up):
            vectors = Exchange.apply(dense, *looked_up)
            products = torch.bmm(vectors, vectors.transpose(1, 2))
            count = vectors.shape[1]
            row, column = torch.tril_indices(count, count, -1, device=dense.device)
            pairs = products.flatten(1).index_select(1, row * count + column)
            return torch.cat([dense, pairs], dim=1)

    class Loss(nn.Module):
        def forward(self, logits, clicked):
            return F.binary_cross_entropy_with_logits(logits.squeeze(1), clicked)

    def mlp(*sizes, last):
        layers = []
        for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*(layers if last else layers[:-1]))

    class DLRM(nn.Module):
        def __init__(self):
            super().__init__()
            for number, count in enumerate(rows):
                setattr(self, f"table{number}", Table(count))
            pairs = (len(rows) + 1) * len(rows) // 2
            self.bottom = mlp(13, 512, 256, units, last=True)
            self.interaction = Interaction()
            self.top = mlp(units + pairs, 1024, 1024, 512, 256, 1, last=False)
            self.loss = Loss()

        def scores(self, dense, *ids):
            looked_up = [getattr(self, f"table{number}")(column) for number, column in enumerate(ids)]
            return self.top(self.interaction(self.bottom(dense), looked_up))

        def forward(self, dense, clicked, *ids):
            return self.loss(self.scores(dense, *ids), clicked)

    return DLRM()
