"""The sequence and recommendation workloads: sizes against the papers, and that they learn on real tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from simdev.errors import InvalidInput  # noqa: E402
from simdev.graphs.capture import capture_workload  # noqa: E402
from simdev.placers.registry import find_workload  # noqa: E402

TINY = {
    "nmt": "nmt[batch=4,length=3,units=8,vocabulary=11]",
    "gnmt-4": "gnmt-4[batch=4,length=3,units=8,vocabulary=11]",
    "gnmt-8": "gnmt-8[batch=4,length=3,units=8,vocabulary=11]",
    "rnnlm": "rnnlm[batch=4,length=3,units=8,vocabulary=11]",
    "transformer-xl-2": "transformer-xl-2[batch=2,length=6,memory=5,units=8,heads=2,inner=16,vocabulary=11]",
    "gpt2-medium": "gpt2-medium[batch=2,length=6,layers=2,units=8,heads=2,vocabulary=11,precision=f32]",
    "llama-moe": "llama-moe[batch=2,length=6,layers=2,units=8,heads=4,key_heads=2,experts=4,inner=16,vocabulary=11,"
    "precision=f32]",
    "dlrm": "dlrm[batch=16,max_rows=50,units=8,rate=1.0]",
}


def make(entry):
    spec, params = find_workload(entry)
    torch.manual_seed(0)
    return spec.function(**{**spec.defaults, **params})


def fake(entry):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return make(entry)


def parameters(entry):
    return sum(parameter.numel() for parameter in fake(entry).model.parameters())


def forward_flops(entry):
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        step = make(entry)
        step.loss(step.model, *step.inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("entry", TINY.values(), ids=TINY)
def test_learns_on_real_tensors(entry):
    step = make(entry)
    for group in step.optimizer.param_groups:
        group["lr"] = max(group["lr"], 0.01)
    losses = []
    for _ in range(20):  # on one batch
        step.optimizer.zero_grad()
        loss = step.loss(step.model, *step.inputs)
        loss.backward()
        step.optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.99 * losses[0]


def lstm(inputs, units):
    return (inputs + units + 1) * 4 * units


def test_nmt_parameters_by_hand():
    h, v = 1024, 32_000
    attention = 2 * h * h + h
    expected = 2 * v * h + lstm(h, h) * 3 + lstm(2 * h, h) + attention + (h + 1) * v
    assert parameters("nmt") == expected


def test_gnmt_8_agrees_with_shazeer_2017():
    spec, params = find_workload("gnmt-8")
    assert parameters("gnmt-8") == pytest.approx(spec.published["parameters"], rel=0.02)
    batch, length = spec.defaults["batch"], spec.defaults["length"]
    macs = forward_flops("gnmt-8") / 2 / batch / length
    assert macs == pytest.approx(spec.published["forward_macs_per_timestep"], rel=0.02)


def test_rnnlm_parameters_by_hand():
    h, v = 2048, 40_000
    assert parameters("rnnlm") == v * h + 2 * lstm(h, h) + (h + 1) * v


def test_transformer_xl_at_the_depth_of_the_paper():
    spec, _ = find_workload("transformer-xl-8")
    # 12 layers of 3,412,480; the table and bias of 204 symbols; two biases of 512 that all layers share.
    count = parameters("transformer-xl-8[layers=12]")
    assert count == 12 * 3_412_480 + 204 * 513 + 2 * 512
    assert count == pytest.approx(spec.published["parameters_at_12_layers"], rel=0.01)
    wikitext = parameters("transformer-xl-8[layers=16,units=410,heads=10,inner=2100]") - 204 * 411 - 2 * 410
    assert wikitext == spec.published["layer_parameters_of_wikitext_model"]


def test_transformer_xl_reads_relative_positions():
    from simdev.workloads.transformer_xl import _shift

    # Two queries, four keys (two of memory). Column j of the input holds distance 3 - j.
    scores = torch.tensor([[[[3.0, 2.0, 1.0, 0.0]] * 2]])
    shifted = _shift(scores)[0, 0]
    assert shifted[0, :3].tolist() == [2.0, 1.0, 0.0]  # query 0 sits at key 2
    assert shifted[1].tolist() == [3.0, 2.0, 1.0, 0.0]


def test_transformer_xl_memory_is_the_last_segment():
    step = make(TINY["transformer-xl-2"])
    first = step.loss(step.model, *step.inputs)
    embedded = step.model.embedding(step.inputs[0][:-1]) * 8**0.5
    assert torch.equal(step.model.layer0.memory, embedded[-5:])
    assert not torch.equal(first, step.loss(step.model, *step.inputs))  # the second segment sees the first


def test_gpt2_medium_parameters():
    spec, _ = find_workload("gpt2-medium")
    assert parameters("gpt2-medium") == spec.published["parameters"] == 354_823_168


def test_gpt2_is_causal():
    step = make(TINY["gpt2-medium"])
    logits = []
    model, (tokens,) = step.model, step.inputs
    model.softmax.register_forward_hook(lambda module, inputs, output: logits.append(inputs[0].detach()))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    model(tokens), model(changed)
    assert torch.equal(logits[0][:, :4], logits[1][:, :4]) and not torch.equal(logits[0][:, 4], logits[1][:, 4])


def moe_parameters(layers, units, heads, key_heads, experts, inner, vocabulary):
    width = units // heads
    attention = 2 * units * units + 2 * units * key_heads * width
    layer = attention + units * experts + experts * 3 * units * inner + 2 * units
    return layers * layer + 2 * vocabulary * units + units


def test_llama_moe_parameters_by_hand_and_at_mixtrals_size():
    assert parameters("llama-moe") == moe_parameters(24, 2048, 16, 4, 8, 7168, 32_000)
    mixtral = parameters("llama-moe[layers=32,units=4096,heads=32,key_heads=8,inner=14336]")
    assert mixtral == pytest.approx(47e9, rel=0.01)


def test_llama_moe_without_a_full_expert_equals_the_dense_mixture():
    step = make(TINY["llama-moe"].replace("capacity=1.25,", "").replace("vocabulary=11", "vocabulary=11,capacity=4"))
    experts = step.model.layer0.experts
    x = torch.randn(2, 6, 8)
    mixed, _ = experts(x)
    weights, _ = experts.router(x.reshape(-1, 8))
    assert ((weights > 0).sum(dim=1) == 2).all() and torch.allclose(weights.sum(dim=1), torch.ones(12))
    every = [getattr(experts, f"expert{e}")(x.reshape(-1, 8), weights[:, e]) for e in range(4)]
    assert torch.allclose(mixed.reshape(-1, 8), sum(every), atol=1e-6)


def test_dlrm_parameters_by_hand_and_at_mlperfs_size():
    mlps = 14 * 512 + 513 * 256 + 257 * 128 + 480 * 1024 + 1025 * 1024 + 1025 * 512 + 513 * 256 + 257
    spec, _ = find_workload("dlrm")
    assert parameters("dlrm[max_rows=40000000]") == 204_184_588 * 128 + mlps
    assert parameters("dlrm[max_rows=40000000]") > spec.published["parameters_at_40m_rows_over"]


def test_dlrm_update_of_a_table_is_gradient_descent():
    step = make(TINY["dlrm"])
    table = step.model.table1.weight
    before = table.detach().clone()
    dense = before.clone().requires_grad_()

    def loss(weight):
        module = torch.nn.functional.embedding
        looked_up = [
            module(ids, weight if number == 1 else getattr(step.model, f"table{number}").weight.detach())
            for number, ids in enumerate(step.inputs[2:])
        ]
        model = step.model
        return model.loss(model.top(model.interaction(model.bottom(step.inputs[0]), looked_up)), step.inputs[1])

    (gradient,) = torch.autograd.grad(loss(dense), dense)
    step.loss(step.model, *step.inputs).backward()
    assert table.grad is None
    assert torch.allclose(table.detach(), before - 1.0 * gradient, atol=1e-7)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch": "abc"}, "workload nmt: batch: expected a whole number, got 'abc'"),
        ({"batch": 0}, "workload nmt: batch: expected a number from 1 on, got 0"),
        ({"length": 2.5}, "workload nmt: length: expected a whole number, got 2.5"),
        ({"batch": -3}, "workload nmt: batch: expected a number from 1 on, got -3"),
        ({"length": True}, "workload nmt: length: expected a whole number, got True"),
    ],
)
def test_values_that_no_workload_can_have(changes, message):
    spec, _ = find_workload("nmt")
    with pytest.raises(InvalidInput) as caught:
        spec.parameters(changes)
    assert str(caught.value) == message


def test_values_that_do_not_go_together():
    with pytest.raises(InvalidInput, match=r"gpt2-medium\[heads=3,layers=1\]: cannot be built: RuntimeError: shape"):
        capture_workload(*find_workload("gpt2-medium[layers=1,heads=3]"))


def test_lstm_cell_equals_pytorchs():
    from simdev.workloads._lstm import cell_class

    cell, theirs = cell_class()(5, 3), torch.nn.LSTMCell(5, 3)
    with torch.no_grad():  # both order the gates input, forget, cell, output
        theirs.weight_ih.copy_(cell.weight[:5].t())
        theirs.weight_hh.copy_(cell.weight[5:].t())
        theirs.bias_ih.copy_(cell.bias)
        theirs.bias_hh.zero_()
    x, h, c = torch.randn(2, 5), torch.randn(2, 3), torch.randn(2, 3)
    output, (new_h, new_c) = cell((x[:, :2], x[:, 2:]), (h, c), x[:, :3])
    expected_h, expected_c = theirs(x, (h, c))
    assert torch.allclose(new_h, expected_h, atol=1e-6) and torch.allclose(new_c, expected_c, atol=1e-6)
    assert torch.allclose(output, expected_h + x[:, :3], atol=1e-6)


def test_transformer_xl_attention_equals_the_papers_sum():
    """Section 3.3, term by term: E W_q W_kE E + E W_q W_kR R + u W_kE E + v W_kR R."""
    model = make(TINY["transformer-xl-2"]).model  # 8 units, 2 heads, memory 5
    attention, length, memory, width = model.layer0.attention, 6, 5, 4
    joined = torch.randn(memory + length, 2, 8)
    relative = model.position(length, joined)
    positions, u, v, _ = relative
    got = attention(joined, length, *relative)
    query, key, value = attention.query_key_value(joined).view(-1, 2, 3, 2, width).unbind(2)
    far = attention.distance(positions).view(-1, 2, width)
    far = far.flip(0)  # row d is now the sinusoid of distance d
    mixed = torch.zeros(length, 2, 2, width)
    for i in range(length):
        place = memory + i
        for b in range(2):
            for h in range(2):
                q = query[place, b, h]
                scores = [
                    (q + u[h]) @ key[j, b, h] + (q + v[h]) @ far[place - j, h] for j in range(place + 1)
                ]  # nothing ahead
                weights = torch.softmax(torch.stack(scores) / width**0.5, dim=0)
                mixed[i, b, h] = weights @ value[: place + 1, b, h]
    assert torch.allclose(got, attention.output(mixed.reshape(length, 2, 8)), atol=1e-5)


def test_rotary_scores_depend_on_the_distance_alone():
    from simdev.workloads._transformer import rotate

    cosines, sines = make(TINY["llama-moe"]).model.position(7, torch.zeros(1))  # heads of 2
    query, key = (torch.randn(2).expand(1, 1, 7, 2) for _ in range(2))
    scores = (rotate(query, cosines, sines) @ rotate(key, cosines, sines).transpose(2, 3))[0, 0]
    for distance in range(7):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert not torch.allclose(scores[0, 0], scores[1, 0])


def test_the_first_encoder_layer_of_gnmt_reads_both_ways():
    step = make(TINY["gnmt-4"])
    source, seen = step.inputs[0], []
    step.model.encoder.layer1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    changed = source.clone()
    changed[-1] = (changed[-1] + 1) % 11
    step.model.encoder(source), step.model.encoder(changed)
    (forth, back), (forth_changed, back_changed) = seen[0], seen[len(seen) // 2]
    assert torch.equal(forth, forth_changed) and not torch.equal(back, back_changed)
