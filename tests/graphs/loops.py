"""Training loops as people write them, each small: functions that return a step, collected in ``LOOPS`` by name."""

import copy
import math
import random

import numpy as np
import torch
from scripts.lookahead import Lookahead
from torch import nn
from torch.nn import functional

from simdev.graphs.workload import CustomStep, TrainingStep

LOOPS = {}


def loop(make):
    LOOPS[make.__name__] = make
    return make


def net(*sizes):
    sizes = sizes or (16, 32, 4)
    layers = [item for a, b in zip(sizes, sizes[1:], strict=False) for item in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def x(rows=8, width=16):
    return torch.randn(rows, width)


def y(rows=8, classes=4):
    return torch.randint(0, classes, (rows,))


def simple(body, model=None, optimizer=torch.optim.SGD, data=None, **options):
    """A step that clears the gradients, takes the loss that ``body`` returns, goes back and updates."""
    model = model or net()
    stepped = optimizer(model.parameters(), **{"lr": 0.01, **options})

    def run(model, *data):
        stepped.zero_grad()
        body(model, *data).backward()
        stepped.step()

    return CustomStep(model, data or (x(), y()), run)


def classify(model, data, labels):
    return functional.cross_entropy(model(data), labels)


def every_optimizer():
    names = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop".split()
    for name in names:
        LOOPS[f"optimizer_{name}"] = lambda name=name: simple(classify, optimizer=getattr(torch.optim, name))


every_optimizer()


@loop
def muon_and_adam():
    model = net(16, 24, 24, 4)
    wide = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return TrainingStep(model, (x(), y()), classify, [torch.optim.Muon(wide, lr=0.01), torch.optim.Adam(rest)])


@loop
def lbfgs():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)

    def run(model, data, labels):
        def closure():
            optimizer.zero_grad()
            loss = classify(model, data, labels)
            loss.backward()
            return loss

        optimizer.step(closure)

    return CustomStep(model, (x(), y()), run)


@loop
def accumulation_with_clipping():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def run(model, data, labels):
        for part, truth in zip(data.split(3), labels.split(3), strict=True):
            (classify(model, part, truth) * len(part) / len(data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return CustomStep(model, (x(), y()), run)


@loop
def skips_a_step_with_a_large_gradient():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(model, data, labels):
        optimizer.zero_grad()
        classify(model, data, labels).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        if torch.isfinite(norm) and norm.item() < 50:
            optimizer.step()

    return CustomStep(model, (x(), y()), run)


@loop
def logs_its_loss_and_accuracy():
    log = []

    def body(model, data, labels):
        logits = model(data)
        loss = functional.cross_entropy(logits, labels)
        log.append((loss.item(), (logits.argmax(1) == labels).float().mean().item()))
        return loss

    return simple(body)


@loop
def frozen_layers():
    model = net(16, 32, 32, 4)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return simple(classify, model)


@loop
def groups_and_a_schedule():
    model = net()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters()}])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 1e-2], total_steps=100)

    def run(model, data, labels):
        optimizer.zero_grad()
        classify(model, data, labels).backward()
        optimizer.step()
        schedule.step()

    return CustomStep(model, (x(), y()), run)


@loop
def plateau_by_the_loss():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def run(model, data, labels):
        optimizer.zero_grad()
        loss = classify(model, data, labels)
        loss.backward()
        optimizer.step()
        schedule.step(loss.item())

    return CustomStep(model, (x(), y()), run)


@loop
def averaged_by_hand():
    model = net()
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())

    def run(model, data, labels):
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(data).softmax(1)
        (classify(model, data, labels) + functional.mse_loss(model(data).softmax(1), target)).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)

    return CustomStep(model, (x(), y()), run)


@loop
def distillation():
    teacher = net(16, 64, 4).eval()

    def body(model, data, labels):
        with torch.inference_mode():
            soft = teacher(data).softmax(1)
        soft = soft.clone()
        return functional.kl_div(model(data).log_softmax(1), soft, reduction="batchmean")

    return simple(body)


def critic_step(critics, penalty):
    first, second = net(4, 16, 8), net(8, 16, 1)
    makes, judges = (torch.optim.Adam(model.parameters()) for model in (first, second))

    def run(model, real):
        for _ in range(critics):
            judges.zero_grad()
            fake = first(torch.randn(len(real), 4)).detach()
            loss = second(fake).mean() - second(real).mean()
            if penalty:
                mixed = (0.5 * real + 0.5 * fake).requires_grad_()
                (slope,) = torch.autograd.grad(second(mixed).sum(), mixed, create_graph=True)
                loss = loss + (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            judges.step()
        makes.zero_grad()
        (-second(first(torch.randn(len(real), 4))).mean()).backward()
        makes.step()

    return CustomStep(nn.ModuleDict({"first": first, "second": second}), (x(8, 8),), run)


@loop
def gan():
    return critic_step(1, False)


@loop
def wasserstein_critics():
    return critic_step(3, False)


@loop
def gradient_penalty():
    return critic_step(2, True)


@loop
def variational():
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = net(16, 32, 8), net(4, 32, 16)

        def forward(self, data):
            mean, log_variance = self.encode(data).chunk(2, 1)
            code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
            return functional.mse_loss(self.decode(code), data) + divergence

    return simple(lambda model, data: model(data), Coder(), torch.optim.Adam, (x(),))


@loop
def momentum_contrast():
    query, queue = net(16, 32, 8), functional.normalize(torch.randn(64, 8))
    key = copy.deepcopy(query).requires_grad_(False)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9)

    def run(model, data, others):
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            keys = functional.normalize(key(others))
        found = functional.normalize(query(data))
        logits = torch.cat([(found * keys).sum(1, keepdim=True), found @ queue.T], 1) / 0.07
        optimizer.zero_grad()
        functional.cross_entropy(logits, torch.zeros(len(data), dtype=torch.int64)).backward()
        optimizer.step()
        queue[: len(keys)] = keys

    return CustomStep(nn.ModuleDict({"query": query, "key": key}), (x(), x()), run)


@loop
def siamese_without_gradient():
    predictor = net(8, 8)

    def body(model, first, second):
        one, two = model["encoder"](first), model["encoder"](second)
        return -functional.cosine_similarity(model["predictor"](one), two.detach()).mean()

    return simple(body, nn.ModuleDict({"encoder": net(16, 8), "predictor": predictor}), data=(x(), x()))


@loop
def triplets():
    return simple(lambda m, a, b, c: functional.triplet_margin_loss(m(a), m(b), m(c)), data=(x(), x(), x()))


@loop
def q_learning():
    model = net(16, 32, 4)
    target = copy.deepcopy(model)
    optimizer = torch.optim.RMSprop(model.parameters())
    calls = []

    def run(model, states, actions, rewards, following):
        with torch.no_grad():
            values = rewards + 0.99 * target(following).max(1).values
        chosen = model(states).gather(1, actions[:, None])[:, 0]
        optimizer.zero_grad()
        functional.smooth_l1_loss(chosen, values).backward()
        optimizer.step()
        calls.append(1)
        if len(calls) % 2 == 0:
            target.load_state_dict(model.state_dict())

    return CustomStep(model, (x(), y(), torch.randn(8), x()), run)


@loop
def policy_gradient_with_samples():
    def body(model, states):
        policy = torch.distributions.Categorical(logits=model(states))
        actions = policy.sample()
        return -(policy.log_prob(actions) * actions.float()).mean() - 0.01 * policy.entropy().mean()

    return simple(body, data=(x(),))


@loop
def proximal_policy_minibatches():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())

    def run(model, states, actions, advantages):
        with torch.no_grad():
            before = model(states).log_softmax(1).gather(1, actions[:, None])
        for _ in range(3):
            order = torch.randperm(len(states))
            for rows in order.split(4):
                after = model(states[rows]).log_softmax(1).gather(1, actions[rows, None])
                ratio = (after - before[rows]).exp()
                with torch.no_grad():
                    distance = ((ratio - 1) - ratio.log()).mean().item()
                if distance > 1.0:
                    break
                loss = -torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows]).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()

    return CustomStep(model, (x(), y(), torch.randn(8, 1)), run)


@loop
def actor_and_critic():
    actor, critic = net(16, 32, 2), net(18, 32, 1)
    acts, judges = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())

    def run(model, states, rewards):
        for _ in range(2):
            value = critic(torch.cat([states, actor(states).detach()], 1))
            judges.zero_grad()
            functional.mse_loss(value, rewards).backward()
            judges.step()
        acts.zero_grad()
        (-critic(torch.cat([states, actor(states)], 1)).mean()).backward()
        acts.step()

    return CustomStep(nn.ModuleDict({"actor": actor, "critic": critic}), (x(), torch.randn(8, 1)), run)


@loop
def learning_to_learn():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())

    def run(model, data, labels):
        named = dict(model.named_parameters())
        loss = functional.cross_entropy(torch.func.functional_call(model, named, data[:4]), labels[:4])
        slopes = torch.autograd.grad(loss, tuple(named.values()), create_graph=True)
        fast = {key: one - 0.1 * slope for (key, one), slope in zip(named.items(), slopes, strict=True)}
        optimizer.zero_grad()
        functional.cross_entropy(torch.func.functional_call(model, fast, data[4:]), labels[4:]).backward()
        optimizer.step()

    return CustomStep(model, (x(), y()), run)


@loop
def truncated_backpropagation():
    model = nn.ModuleDict({"cell": nn.GRUCell(8, 16), "head": nn.Linear(16, 4)})
    optimizer = torch.optim.Adam(model.parameters())

    def run(model, data, labels):
        state = torch.zeros(4, 16)
        for part in data.split(3):
            state = state.detach()
            optimizer.zero_grad()
            for moment in part:
                state = model["cell"](moment, state)
            functional.cross_entropy(model["head"](state), labels).backward()
            optimizer.step()

    return CustomStep(model, (torch.randn(6, 4, 8), y(4)), run)


@loop
def convolutions_with_norms():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    return simple(classify, model, data=(torch.randn(8, 3, 8, 8), y()), momentum=0.9, nesterov=True)


@loop
def segmentation():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 4, 1))

    def body(model, images, masks):
        logits = functional.interpolate(model(images), scale_factor=2, mode="bilinear")
        return functional.cross_entropy(logits, masks, ignore_index=3)

    return simple(body, model, data=(torch.randn(2, 3, 8, 8), torch.randint(0, 4, (2, 16, 16))))


@loop
def waves():
    model = nn.Sequential(nn.Conv1d(1, 8, 2, dilation=2), nn.Tanh(), nn.Conv1d(8, 16, 1), nn.GLU(1), nn.Conv1d(8, 1, 1))
    return simple(lambda m, d: functional.l1_loss(m(d[..., :-1]), d[..., 3:]), model, data=(torch.randn(2, 1, 20),))


class Attention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads, self.mix, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, data):
        rows, tokens, width = data.shape
        parts = self.mix(data).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))


@loop
def causal_attention():
    model = nn.Sequential(nn.Embedding(20, 16), Attention(), nn.LayerNorm(16), nn.Linear(16, 20))

    def body(model, ids):
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return simple(body, model, torch.optim.AdamW, (torch.randint(0, 20, (2, 9)),))


@loop
def encoder_with_a_mask():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), 2)
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    return simple(lambda m, d: m(d, src_key_padding_mask=mask).sum(), model, data=(torch.randn(2, 6, 16),))


@loop
def masked_tokens():
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.GELU())
    head = nn.Linear(16, 20)

    def body(model, ids):
        chosen = torch.zeros_like(ids, dtype=torch.bool)
        chosen[:, ::3] = True
        hidden = model["body"](ids.masked_fill(chosen, 0))[chosen]
        return functional.cross_entropy(model["head"](hidden), ids[chosen])

    return simple(body, nn.ModuleDict({"body": model, "head": head}), data=(torch.randint(1, 20, (2, 9)),))


@loop
def trimmed_to_its_longest_text():
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16))

    def body(model, ids, mask):
        longest = int(mask.sum(1).max())
        return model(ids[:, :longest]).square().mean()

    mask = torch.zeros(2, 12, dtype=torch.int64)
    mask[:, :5] = 1
    return simple(body, model, data=(torch.randint(0, 20, (2, 12)), mask))


@loop
def bags_of_words():
    model = nn.Sequential(nn.EmbeddingBag(50, 16, mode="mean"), nn.Linear(16, 4))
    return simple(classify, model, torch.optim.Adagrad, (torch.randint(0, 50, (8, 5)), y()))


@loop
def sparse_table():
    model = nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 4))
    rows, rest = torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters())

    def run(model, ids, labels):
        functional.cross_entropy(model(ids), labels).backward()
        for optimizer in (rows, rest):
            optimizer.step()
            optimizer.zero_grad()

    return CustomStep(model, (torch.randint(0, 50, (8,)), y()), run)


@loop
def reentrant_checkpoints():
    from torch.utils.checkpoint import checkpoint

    def body(model, data, labels):
        hidden = checkpoint(model[:2], data.requires_grad_(), use_reentrant=True)
        return functional.cross_entropy(checkpoint(model[2:], hidden, use_reentrant=True), labels)

    return simple(body, net(16, 32, 32, 4))


@loop
def checkpoints():
    from torch.utils.checkpoint import checkpoint_sequential

    return simple(
        lambda m, d, labels: functional.cross_entropy(checkpoint_sequential(m, 2, d, use_reentrant=False), labels),
        net(16, 32, 32, 4),
    )


@loop
def sharpness_aware():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(model, data, labels):
        classify(model, data, labels).backward()
        with torch.no_grad():
            norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
            moves = [parameter.grad * (0.05 / norm) for parameter in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        classify(model, data, labels).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()

    return CustomStep(model, (x(), y()), run)


@loop
def updated_by_hand():
    model = net()

    def run(model, data, labels):
        slopes = torch.autograd.grad(classify(model, data, labels), list(model.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter -= 0.1 * slope

    return CustomStep(model, (x(), y()), run)


@loop
def gradients_of_each_sample():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(model, data, labels):
        named = {key: one.detach() for key, one in model.named_parameters()}

        def loss(named, sample, label):
            return functional.cross_entropy(torch.func.functional_call(model, named, sample[None]), label[None])

        slopes = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(named, data, labels)
        for key, parameter in model.named_parameters():
            parameter.grad = slopes[key].mean(0)
        optimizer.step()

    return CustomStep(model, (x(), y()), run)


@loop
def steps_inside_the_backward_pass():
    model = net()
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return CustomStep(model, (x(), y()), lambda model, *data: classify(model, *data).backward())


@loop
def hooks_on_gradients():
    def body(model, data, labels):
        hidden = model[1](model[0](data))
        hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return functional.cross_entropy(model[2](hidden), labels)

    return simple(body)


@loop
def normalised_weights():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4))
    return simple(classify, model)


@loop
def spectral_norms():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4))
    return simple(classify, model)


@loop
def two_losses_with_two_backward_passes():
    model = nn.ModuleDict({"body": net(16, 32), "first": nn.Linear(32, 4), "second": nn.Linear(32, 1)})
    optimizer = torch.optim.Adam(model.parameters())

    def run(model, data, labels):
        hidden = model["body"](data).relu()
        optimizer.zero_grad()
        functional.cross_entropy(model["first"](hidden), labels).backward(retain_graph=True)
        model["second"](hidden).square().mean().backward()
        optimizer.step()

    return CustomStep(model, (x(), y()), run)


@loop
def layers_left_out_at_random():
    def body(model, data, labels):
        rng = random.Random(3)
        for layer in model[:-1]:
            data = layer(data) if rng.random() < 0.7 else data
        return functional.cross_entropy(model[-1](data), labels)

    return simple(body, nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)), nn.Linear(16, 4)))


@loop
def own_function():
    class Signed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, data, weight):
            ctx.save_for_backward(data, weight)
            return data @ weight.sign().T

        @staticmethod
        def backward(ctx, gradient):
            data, weight = ctx.saved_tensors
            return gradient @ weight.sign(), gradient.T @ data

    return simple(lambda m, d, labels: functional.cross_entropy(Signed.apply(d, m.weight), labels), nn.Linear(16, 4))


@loop
def metrics_in_numpy():
    def body(model, data, labels):
        logits = model(data)
        weights = torch.from_numpy(1 + (logits.detach().cpu().numpy().argmax(1) == labels.numpy()).astype("float32"))
        return (functional.cross_entropy(logits, labels, reduction="none") * weights).mean()

    return simple(body)


@loop
def fourier_layers():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, dtype=torch.complex64))
            self.head = nn.Linear(16, 4)

        def forward(self, data):
            return self.head(torch.fft.irfft(torch.fft.rfft(data) * self.weight, n=16))

    return simple(classify, Spectral())


@loop
def products_by_einsum():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(16, 8)), nn.Bilinear(8, 8, 4)

        def forward(self, data):
            hidden = torch.einsum("bi,ih->bh", data, self.first)
            return self.second(hidden, hidden)

    return simple(classify, Mixed())


@loop
def physics():
    model = net(2, 16, 1)

    def body(model, points):
        points.requires_grad_()
        value = torch.tanh(model(points))
        (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        (curve,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        return (slope[:, 1] - curve[:, 0]).square().mean()

    return simple(body, model, torch.optim.Adam, (torch.randn(8, 2),))


@loop
def diffusion():
    model = nn.ModuleDict({"time": nn.Embedding(10, 8), "body": net(24, 32, 16)})
    kept = torch.linspace(0.99, 0.01, 10)

    def body(model, clean):
        times, noise = torch.randint(0, 10, (len(clean),)), torch.randn_like(clean)
        part = kept[times][:, None]
        noisy = part.sqrt() * clean + (1 - part).sqrt() * noise
        return functional.mse_loss(model["body"](torch.cat([noisy, model["time"](times)], 1)), noise)

    return simple(body, model, torch.optim.AdamW, (x(),))


@loop
def messages_on_a_graph():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    sources, targets = torch.randint(0, 8, (20,)), torch.randint(0, 8, (20,))

    def body(model, nodes, labels):
        hidden = torch.zeros(8, 16).index_add(0, targets, model[0](nodes)[sources])
        return functional.cross_entropy(model[1](hidden.relu()), labels)

    return simple(body, model)


@loop
def low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(16, 4).requires_grad_(False)
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, data):
            return self.base(data) + self.up(self.down(data))

    model = Adapted()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])

    def run(model, data, labels):
        classify(model, data, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return CustomStep(model, (x(), y()), run)


@loop
def experts_that_are_chosen():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.route, self.experts = nn.Linear(16, 3), nn.ModuleList(net(16, 32, 16) for _ in range(3))
            self.head = nn.Linear(16, 4)

        def forward(self, data):
            weight, chosen = self.route(data).softmax(1).max(1)
            out = torch.zeros_like(data)
            for number, expert in enumerate(self.experts):
                rows = torch.where(chosen == number)[0]
                if len(rows):
                    out = out.index_copy(0, rows, expert(data[rows]) * weight[rows, None])
            return self.head(out)

    return simple(classify, Experts())


@loop
def best_of_several_boxes():
    model = net(16, 32, 5)

    def body(model, data):
        found = model(data)
        best = found[:, 4].topk(3).indices
        kept = found[best]
        kept = kept[kept[:, 4] > kept[:, 4].mean()]
        return kept[:, :4].square().sum() + found[:, 4].square().mean()

    return simple(body, model, data=(x(),))


@loop
def second_order_of_the_loss():
    def body(model, data, labels):
        loss = classify(model, data, labels)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.1 * sum(slope.square().sum() for slope in slopes)

    return simple(body)


@loop
def packed_sequences():
    model = nn.ModuleDict({"cells": nn.LSTM(8, 16, batch_first=True), "head": nn.Linear(16, 4)})

    def body(model, data, labels):
        packed = nn.utils.rnn.pack_padded_sequence(data, [5, 3], batch_first=True)
        _, (last, _) = model["cells"](packed)
        return functional.cross_entropy(model["head"](last[0]), labels)

    return simple(body, model, data=(torch.randn(2, 5, 8), y(2)))


@loop
def inner_optimizer():
    """Reptile: the inner loop trains a copy of the model with an optimizer of its own."""
    model = net()
    outer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(model, data, labels):
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.02, momentum=0.9)
        for _ in range(2):
            inner.zero_grad()
            classify(fast, data, labels).backward()
            inner.step()
        for slow, quick in zip(model.parameters(), fast.parameters(), strict=True):
            slow.grad = slow.data - quick.data
        outer.step()

    return CustomStep(model, (x(), y()), run)


@loop
def exchanged_contents():
    """BYOL: the target's parameters get new tensors as their data, and its batch norms were copied."""
    online = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    target = copy.deepcopy(online)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1, momentum=0.9)

    def run(model, data, others):
        with torch.no_grad():
            aim = target(others)
        optimizer.zero_grad()
        functional.mse_loss(online(data), aim).backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.data = slow.data * 0.99 + fast.data * 0.01

    return CustomStep(nn.ModuleDict({"online": online, "target": target}), (x(), x()), run)


@loop
def ascends_and_returns():
    """Sharpness-aware minimization as its public code has it: the old contents come back as new data."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run(model, data, labels):
        classify(model, data, labels).backward()
        old = [parameter.data.clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05)
        optimizer.zero_grad()
        classify(model, data, labels).backward()
        for parameter, before in zip(model.parameters(), old, strict=True):
            parameter.data = before
        optimizer.step()
        optimizer.zero_grad()

    return CustomStep(model, (x(), y()), run)


@loop
def weights_made_by_a_network():
    made = net(16, 8, 4)
    sizes = {name: parameter.shape for name, parameter in made.named_parameters()}
    model = net(5, 12, sum(size.numel() for size in sizes.values()))

    def body(model, code, data, labels):
        parts = model(code).split([size.numel() for size in sizes.values()])
        weights = {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}
        return functional.cross_entropy(torch.func.functional_call(made, weights, (data,)), labels)

    return simple(body, model, data=(torch.randn(5), x(), y()))


@loop
def forward_mode_gradients():
    model = net()

    def run(model, data, labels):
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        along = {name: torch.randn_like(weight) for name, weight in weights.items()}

        def loss(weights):
            return functional.cross_entropy(torch.func.functional_call(model, weights, (data,)), labels)

        _, slope = torch.func.jvp(loss, (weights,), (along,))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(0.1 * slope * along[name])

    return CustomStep(model, (x(), y()), run)


@loop
def codebook_with_running_means():
    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(8, 16)
            self.register_buffer("codes", torch.randn(12, 8))
            self.register_buffer("counts", torch.ones(12))

        def forward(self, data):
            hidden = self.encoder(data)
            nearest = torch.cdist(hidden, self.codes).argmin(1)
            chosen = self.codes[nearest]
            with torch.no_grad():
                hits = functional.one_hot(nearest, 12).type_as(hidden)
                self.counts.lerp_(hits.sum(0), 0.01)
                self.codes.lerp_(hits.t() @ hidden / self.counts.clamp(min=1e-5).unsqueeze(1), 0.01)
                dead = (self.counts < 0.01).nonzero().squeeze(1)
                if dead.numel():
                    self.codes[dead] = hidden[: len(dead)]
            return self.decoder(hidden + (chosen - hidden).detach())

    return simple(lambda model, data: functional.mse_loss(model(data), data), Quantizer(), data=(x(),))


@loop
def scaled_gradients_of_several_parts():
    model = net()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")

    def run(model, data, labels):
        for part, truth in zip(data.chunk(4), labels.chunk(4), strict=True):
            with torch.autocast("cuda", torch.float16):
                loss = classify(model, part, truth) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return CustomStep(model, (x(), y()), run)


@loop
def words_until_the_end_mark():
    model = nn.ModuleDict({"table": nn.Embedding(30, 16), "cell": nn.GRUCell(16, 16), "head": nn.Linear(16, 30)})

    def body(model, hidden, words):
        token, loss = torch.zeros(len(hidden), dtype=torch.int64), torch.zeros(())
        for place in range(words.shape[1]):
            hidden = model["cell"](model["table"](token), hidden)
            logits = model["head"](hidden)
            loss = loss + functional.cross_entropy(logits, words[:, place])
            token = words[:, place] if random.random() < 0.5 else logits.argmax(1)
            if (words[:, place] == 1).all().item():
                break
        return loss

    words = torch.randint(2, 30, (4, 6))
    words[:, 3] = 1
    return simple(body, model, data=(x(4), words))


@loop
def fixed_point_until_it_holds():
    """A deep equilibrium: iterations without gradient until they settle, and a solver in the backward pass."""

    class Equilibrium(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.given, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
            nn.init.normal_(self.inner.weight, std=0.01)

        def step(self, state, data):
            return torch.tanh(self.inner(state) + self.given(data))

        def forward(self, data):
            with torch.no_grad():
                state = torch.zeros_like(data)
                for _ in range(50):
                    before, state = state, self.step(state, data)
                    if (state - before).norm() < 1e-4 * state.norm():
                        break
            state = self.step(state, data)
            point = state.clone().detach().requires_grad_()
            around = self.step(point, data)

            def solve(gradient):
                found = gradient
                for _ in range(5):
                    found = torch.autograd.grad(around, point, found, retain_graph=True)[0] + gradient
                return found

            state.register_hook(solve)
            return self.head(state)

    return simple(classify, Equilibrium())


class Adjoint(torch.autograd.Function):
    """Euler steps of an equation; the backward pass follows them again, backwards."""

    @staticmethod
    def forward(ctx, state, field, *parameters):
        ctx.field = field
        for _ in range(6):
            state = state + 0.1 * field(state)
        ctx.save_for_backward(state, *parameters)
        return state

    @staticmethod
    def backward(ctx, gradient):
        state, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(6):
            with torch.enable_grad():
                point = state.detach().requires_grad_()
                out = ctx.field(point)
                own, *others = torch.autograd.grad(out, (point, *parameters), gradient)
            state, gradient = state - 0.1 * out.detach(), gradient + 0.1 * own
            sums = [a + 0.1 * b for a, b in zip(sums, others, strict=True)]
        return gradient, None, *sums


@loop
def adjoint_of_an_equation():
    class Equation(nn.Module):
        def __init__(self):
            super().__init__()
            self.field = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
            self.head = nn.Linear(16, 4)

        def forward(self, data):
            return self.head(Adjoint.apply(data, self.field, *self.field.parameters()))

    return simple(classify, Equation())


@loop
def curvature_from_hooks():
    """K-FAC: hooks collect products of inputs and of gradients, whose inverses change the gradients."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, outputs = {}, {}

    def collect_inputs(layer, given):
        inputs[layer] = given[0].detach().T @ given[0].detach()

    def collect_outputs(layer, _, sent):
        outputs[layer] = sent[0].T @ sent[0]

    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.register_forward_pre_hook(collect_inputs)
        layer.register_full_backward_hook(collect_outputs)

    def inverse(matrix):
        return torch.linalg.inv(matrix + 0.1 * torch.eye(len(matrix)))

    def run(model, data, labels):
        optimizer.zero_grad()
        classify(model, data, labels).backward()
        for layer in layers:
            layer.weight.grad = inverse(outputs[layer]) @ layer.weight.grad @ inverse(inputs[layer])
        optimizer.step()

    return CustomStep(model, (x(), y()), run)


@loop
def samples_of_an_energy():
    """Contrastive divergence: the model is frozen while gradients of its inputs draw samples."""
    model = net(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def run(model, data):
        samples = torch.rand_like(data).requires_grad_()
        model.requires_grad_(False)
        for _ in range(5):
            (slope,) = torch.autograd.grad(model(samples).sum(), samples)
            samples.data.add_(slope, alpha=-0.1).add_(torch.randn_like(samples), alpha=0.005)
        model.requires_grad_(True)
        optimizer.zero_grad()
        (model(data).mean() - model(samples.detach()).mean()).backward()
        optimizer.step()

    return CustomStep(model, (x(),), run)


@loop
def line_search_along_the_natural_gradient():
    """Trust region policies: products with the Fisher matrix, conjugate gradients, steps tried until one is better."""
    model = net(5, 16, 3)
    parameters = list(model.parameters())

    def flat(tensors):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def run(model, data, chosen, advantage):
        with torch.no_grad():
            before = model(data).log_softmax(1)

        def gain():
            ratio = (model(data).log_softmax(1) - before).gather(1, chosen[:, None]).squeeze(1).exp()
            return (ratio * advantage).mean()

        def fisher(vector):
            divergence = functional.kl_div(model(data).log_softmax(1), before, log_target=True, reduction="batchmean")
            slope = flat(torch.autograd.grad(divergence, parameters, create_graph=True))
            return flat(torch.autograd.grad(slope @ vector, parameters)) + 0.1 * vector

        start = gain()
        residual = flat(torch.autograd.grad(start, parameters))
        course, direction, size = torch.zeros_like(residual), residual.clone(), residual @ residual
        for _ in range(3):
            product = fisher(direction)
            length = size / (direction @ product)
            course, residual = course + length * direction, residual - length * product
            size, old = residual @ residual, size
            direction = residual + size / old * direction
        contents = [parameter.detach().clone() for parameter in parameters]
        steps = course.split([parameter.numel() for parameter in parameters])
        for trial in range(5):
            for parameter, content, step in zip(parameters, contents, steps, strict=True):
                parameter.data = content + 0.5**trial * step.view_as(content)
            with torch.no_grad():
                if gain() > start:
                    break

    return CustomStep(model, (x(20, 5), y(20, 3), torch.randn(20)), run)


@loop
def answers_sampled_with_a_cache():
    """Group relative policies: answers sampled token by token from cached keys, against a frozen reference."""
    model = nn.ModuleDict({"words": nn.Embedding(50, 32), "mix": nn.Linear(32, 96), "logits": nn.Linear(32, 50)})
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())

    def read(model, words, cache=None):
        query, *new = (part[:, None] for part in model["mix"](model["words"](words)).chunk(3, -1))
        keys, values = new if cache is None else (torch.cat(pair, 2) for pair in zip(cache, new, strict=True))
        mixed = functional.scaled_dot_product_attention(query, keys, values, is_causal=cache is None)
        return model["logits"](mixed[:, 0]), (keys, values)

    def surprise(model, words):
        return read(model, words[:, :-1])[0].log_softmax(-1).gather(2, words[:, 1:, None]).squeeze(2)

    def run(model, prompts):
        words = prompts.repeat_interleave(4, 0)
        with torch.no_grad():
            logits, cache = read(model, words)
            for _ in range(5):
                word = torch.multinomial(logits[:, -1].softmax(-1), 1)
                words = torch.cat([words, word], 1)
                logits, cache = read(model, word, cache)
            reward = (words[:, 8:] % 2).float().mean(1).view(-1, 4)
            advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
            before, known = surprise(model, words), surprise(reference, words)
        for _ in range(2):
            now = surprise(model, words)
            ratio = (now - before).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            distance = (known - now).exp() - (known - now) - 1
            optimizer.zero_grad()
            (0.04 * distance - gain)[:, 7:].mean().backward()
            optimizer.step()

    return CustomStep(model, (torch.randint(0, 50, (3, 8)),), run)


class LossInChunks(torch.autograd.Function):
    """The loss over a large vocabulary: each chunk's logits and gradients are taken and left in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, words):
        of_hidden, of_weight, total = torch.empty_like(hidden), torch.zeros_like(weight), 0.0
        for start in range(0, len(hidden), 8):
            with torch.enable_grad():
                part = hidden[start : start + 8].detach().requires_grad_()
                own = weight.detach().requires_grad_()
                loss = functional.cross_entropy(part @ own.t(), words[start : start + 8], reduction="sum")
                of_hidden[start : start + 8], chunk = torch.autograd.grad(loss, (part, own))
            of_weight += chunk
            total = total + loss.detach()
        ctx.save_for_backward(of_hidden / len(hidden), of_weight / len(hidden))
        return total / len(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return *(gradient * saved for saved in ctx.saved_tensors), None


@loop
def logits_in_chunks():
    model = nn.ModuleDict({"words": nn.Embedding(100, 16), "mix": net(16, 32, 16), "out": nn.Linear(16, 100, False)})

    def body(model, words):
        return LossInChunks.apply(model["mix"](model["words"](words[:-1])), model["out"].weight, words[1:])

    return simple(body, model, torch.optim.Adam, (torch.randint(0, 100, (25,)),))


@loop
def recurrence_by_an_associative_scan():
    from torch._higher_order_ops import associative_scan

    model = nn.ModuleDict({"keep": nn.Linear(16, 16), "add": nn.Linear(16, 16), "out": nn.Linear(16, 4)})

    def body(model, data, labels):
        pairs = model["keep"](data).sigmoid(), model["add"](data)
        join = lambda first, second: (first[0] * second[0], second[0] * first[1] + second[1])  # noqa: E731
        return functional.cross_entropy(
            model["out"](associative_scan(join, pairs, 1, combine_mode="generic")[1][:, -1]), labels
        )

    return simple(body, model, data=(torch.randn(8, 6, 16), y()))


@loop
def queries_matched_by_scipy():
    """Set prediction: the cheapest match of queries and boxes is found outside of PyTorch."""
    from scipy.optimize import linear_sum_assignment

    model = net(16, 32, 5 * 4)

    def body(model, data, boxes):
        total = 0.0
        for found, truth in zip(model(data).view(len(data), 5, 4), boxes, strict=True):
            rows, columns = linear_sum_assignment(torch.cdist(found, truth, p=1).detach().cpu().numpy())
            total = total + functional.l1_loss(found[torch.as_tensor(rows)], truth[torch.as_tensor(columns)])
        return total / len(data)

    return simple(body, model, torch.optim.AdamW, (x(), torch.rand(8, 3, 4)))


@loop
def damped_least_squares_by_jacrev():
    """Levenberg and Marquardt: a Jacobian of all samples, a linear solve, a step that is taken back if it is bad."""
    model, damping = net(2, 8, 1), 0.01

    def run(model, data, truth):
        nonlocal damping
        contents = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

        def errors(contents):
            return torch.func.functional_call(model, contents, (data,)).squeeze(1) - truth

        slopes = torch.cat([slope.flatten(1) for slope in torch.func.jacrev(errors)(contents).values()], 1)
        before = errors(contents)
        step = torch.linalg.solve(slopes.T @ slopes + damping * torch.eye(slopes.shape[1]), slopes.T @ before)
        sizes = [parameter.numel() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, part in zip(model.parameters(), step.split(sizes), strict=True):
                parameter.sub_(part.view_as(parameter))
            better = errors(dict(model.named_parameters())).square().sum() < before.square().sum()
        damping *= 0.3 if better else 3.0
        if not better:
            model.load_state_dict(contents)

    return CustomStep(model, (x(20, 2), torch.randn(20)), run)


@loop
def gradients_over_two_calls():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    calls = []

    def run(model, data, labels):
        (classify(model, data, labels) / 2).backward()
        calls.append(1)
        if len(calls) % 2:
            return
        optimizer.step()
        optimizer.zero_grad()

    return CustomStep(model, (x(), y()), run)


@loop
def heads_of_several_optimizers_by_turns():
    model = nn.ModuleDict({"body": nn.Linear(16, 24), "head": nn.Linear(24, 4)})
    often = torch.optim.NAdam(model["body"].parameters())
    seldom = torch.optim.RAdam(model["head"].parameters())
    calls = []

    def run(model, data, labels):
        often.zero_grad()
        seldom.zero_grad()
        features = model["body"](data)
        body, head = list(model["body"].parameters()), list(model["head"].parameters())
        functional.mse_loss(features[:, :16], data).backward(retain_graph=True, inputs=body)
        functional.cross_entropy(model["head"](features), labels).backward(inputs=head)
        often.step()
        calls.append(1)
        if len(calls) % 2 == 0:
            seldom.step()

    return CustomStep(model, (x(), y()), run)


@loop
def one_optimizer_for_each_round():
    model = net()

    def run(model, data, labels):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            classify(model, data, labels).backward()
            optimizer.step()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old.lerp(parameter, 0.5))

    return CustomStep(model, (x(), y()), run)


@loop
def stops_by_a_divergence():
    """Proximal policy optimization that ends early for most of its epochs: how many, the updates decide."""
    policy = net(8, 32, 3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def run(model, seen, actions, advantages):
        with torch.no_grad():
            before = torch.distributions.Categorical(logits=model(seen)).log_prob(actions)
        for _ in range(10):
            for rows in torch.randperm(len(seen)).chunk(4):
                change = (
                    torch.distributions.Categorical(logits=model(seen[rows])).log_prob(actions[rows]) - before[rows]
                )
                if ((change.exp() - 1) - change).mean().item() > 0.005:
                    return
                ratio, gain = change.exp(), advantages[rows]
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()

    return CustomStep(policy, (x(32, 8), y(32, 3), torch.randn(32)), run)


@loop
def steps_as_long_as_their_error_allows():
    """A neural differential equation by Heun's method; the width of each step follows from its error."""
    model = nn.ModuleDict({"slope": net(4, 16, 4), "head": nn.Linear(4, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def run(model, state, labels):
        time, width = 0.0, 0.5
        while time < 1:
            width = min(width, 1 - time)
            first = model["slope"](state)
            coarse = state + width * first
            fine = state + width * (first + model["slope"](coarse)) / 2
            error = (fine - coarse).abs().max().item()
            if error < 0.02 or width < 0.05:
                state, time = fine, time + width
            width *= min(2.0, max(0.3, 0.9 * (0.02 / max(error, 1e-8)) ** 0.5))
        optimizer.zero_grad()
        functional.cross_entropy(model["head"](state), labels).backward()
        optimizer.step()

    return CustomStep(model, (x(8, 4), y(8, 2)), run)


@loop
def input_with_a_gradient():
    model = net()
    return TrainingStep(model, (x().requires_grad_(), y()), classify, [torch.optim.SGD(model.parameters(), lr=0.01)])


@loop
def leaf_of_the_forward_pass():
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, data):
            return self.body(data + torch.zeros_like(data, requires_grad=True))

    model = Prompted()
    return TrainingStep(model, (x(), y()), classify, [torch.optim.SGD(model.parameters(), lr=0.01)])


@loop
def optimizers_in_hooks_of_a_training_step():
    model = net()
    for parameter in model.parameters():
        optimizer = torch.optim.Adam([parameter])

        def update(_, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    return TrainingStep(model, (x(), y()), classify, [])


@loop
def an_optimizer_inside_another():
    model = net(16, 16, 16, 4)
    return TrainingStep(model, (x(), y()), classify, [Lookahead(torch.optim.Adam(model.parameters()))])


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, one, other, first, second, *parameters):
        ctx.parts, ctx.parameters = (first, second), len(parameters)
        with torch.no_grad():
            upper = one + first(other)
            lower = other + second(upper)
        ctx.save_for_backward(upper, lower)
        return upper, lower

    @staticmethod
    def backward(ctx, of_upper, of_lower):
        (first, second), (upper, lower) = ctx.parts, ctx.saved_tensors
        with torch.enable_grad():
            upper = upper.detach().requires_grad_()
            added = second(upper)
            added.backward(of_lower)
            other = (lower - added).detach().requires_grad_()
            of_upper = of_upper + upper.grad
            first(other).backward(of_upper)
        return of_upper, of_lower + other.grad, None, None, *[None] * ctx.parameters


@loop
def reversible_blocks():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = nn.Linear(16, 32), nn.Linear(32, 4)
            self.parts = nn.ModuleList([net(16, 32, 16) for _ in range(4)])

        def forward(self, data):
            one, other = self.enter(data).chunk(2, -1)
            for first, second in zip(self.parts[::2], self.parts[1::2], strict=True):
                weights = *first.parameters(), *second.parameters()
                one, other = Reversible.apply(one, other, first, second, *weights)
            return self.leave(torch.cat([one, other], -1))

    model = Net()
    return TrainingStep(model, (x(), y()), classify, [torch.optim.SGD(model.parameters(), lr=0.01)])


class SharpnessAware(torch.optim.Optimizer):
    """As its usual implementation: it shares the groups of the optimizer inside it, and keeps the old weights in its
    state, which the parameters take back."""

    def __init__(self, parameters, inner, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.inner = inner(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for parameter in parameters:
            parameter.data = self.state[parameter]["old"]
        self.inner.step()


@loop
def old_weights_in_the_state():
    model = net()
    optimizer = SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def run(model, data, labels):
        def closure():
            loss = classify(model, data, labels)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()

    return CustomStep(model, (x(), y()), run)


class Rooted(torch.optim.Optimizer):
    """Gradients times the inverse root of their second moment, which is iterated until it is near enough: once for each
    matrix, as often as its values ask for."""

    def __init__(self, parameters, lr=0.01, near=1e-4):
        super().__init__(parameters, {"lr": lr, "near": near})

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for parameter in group["params"]:
            if parameter.dim() < 2:
                parameter.sub_(parameter.grad, alpha=group["lr"])
                continue
            moment = self.state[parameter].setdefault("moment", torch.zeros(len(parameter), len(parameter)))
            moment.add_(parameter.grad @ parameter.grad.T)
            one = torch.eye(len(parameter))
            rest, root = moment / moment.norm() + 0.01 * one, one
            for _ in range(60):
                if self.distance(rest - one) < group["near"]:
                    break
                half = (3 * one - rest) / 2
                rest, root = half @ half @ rest, root @ half
            parameter.sub_(root @ parameter.grad, alpha=group["lr"])

    def distance(self, rest):
        return rest.abs().max().item()


class RootedBySquares(Rooted):
    """The same, but that Python's own root makes the number."""

    def distance(self, rest):
        return math.sqrt(rest.square().max().item())


square_root = math.sqrt  # as "from math import sqrt" has it


class RootedByCode(Rooted):
    """The same, but that functions written in C make plain numbers, which are compared with each other, too."""

    def distance(self, rest):
        first, second = square_root(rest.square().max().item()), float(np.abs(rest.abs().max().item()))
        return max(first, second)


@loop
def roots_until_plain_numbers_are_near():
    return simple(classify, net(100, 80, 60), RootedByCode, (x(8, 100), y(8, 60)))


@loop
def roots_until_they_are_near():
    return simple(classify, net(100, 80, 60), Rooted, (x(8, 100), y(8, 60)))


@loop
def roots_until_their_squares_are_near():
    return simple(classify, net(100, 80, 60), RootedBySquares, (x(8, 100), y(8, 60)))
