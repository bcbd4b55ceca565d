"""The shipped graphs, and the convolutional workloads and ViT against what their papers publish."""

import csv

import numpy as np
import pytest

from simdev.placers.registry import find_workload, graph_path, load_workload, workloads
from simdev.problem.graph_file import load_graph
from simdev.studies.shipped_graphs import forward_macs, shelf, table

CONVOLUTIONS = (
    "inception-v3",
    "nasnet-a-large",
    "nasnet-a-mobile",
    "amoebanet-d",
    "vit-l",
    "wavenet-2x18",
    "wavenet-4x36",
    "inception-v3-inference",
    "vit-l-inference",
    "bert-large-inference",
    "gpt2-medium-prefill",
    "gpt2-medium-decode",
    "llama3-8b-decode",
)
INFERENCE = ("-inference", "-prefill", "-decode")
TINY = {
    "inception-v3": "inception-v3[batch=2,size=299,classes=3]",
    "nasnet-a-large": "nasnet-a-large[batch=2,size=223,classes=3,cells=3,channels=8,stem=4]",
    "nasnet-a-mobile": "nasnet-a-mobile[batch=2,size=223,classes=3,cells=3,channels=8,stem=4,aux=false]",
    "amoebanet-d": "amoebanet-d[batch=2,size=64,classes=3,cells=3,filters=32]",
    "vit-l": "vit-l[batch=4,size=32,classes=3,layers=2,units=16,heads=2,inner=32]",
    "wavenet-2x18": "wavenet-2x18[stacks=2,layers=6,batch=2,length=32,channels=8,skips=4,levels=16]",
}


@pytest.mark.parametrize("name", workloads())
def test_a_graph_ships_with_its_fingerprint(name):
    graph = load_graph(graph_path(name))
    with (graph_path(name).parents[1] / "fingerprints.csv").open(newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["workload"] == name]
    assert (row["fingerprint"], int(row["ops"]), int(row["edges"])) == (graph.fingerprint, graph.n_ops, graph.n_edges)
    assert graph.name == name and graph.meta["params"] == dict(workloads()[name].defaults)
    assert len(set(graph.op_names)) == graph.n_ops


def test_shipped_graphs_are_small_and_complete():
    files = sorted(graph_path("x").parent.glob("*.npz"))
    assert sorted(path.stem for path in files) == sorted(workloads()), "one graph a workload"
    assert sum(path.stat().st_size for path in files) < 40e6


@pytest.mark.parametrize("name", workloads())
def test_bytes_of_parameters_gradients_and_state(name):
    graph = load_workload(name)
    meta, persistent = graph.meta, graph.op_persistent_bytes
    parameter = np.array([kind == "parameter" for kind in graph.kinds])[graph.op_kind]
    held = persistent[parameter].sum()
    assert held == meta["parameter_bytes"] + meta["optimizer_state_bytes"] + meta["buffer_bytes"]
    written = np.zeros(graph.n_ops, bool)  # in place: a new word into a cache, by an op that later ones read from
    if name.endswith("-decode"):
        written = np.array([kind == "copy_" for kind in graph.kinds])[graph.op_kind]
        assert np.isin(graph.op_group[written], graph.op_group[parameter]).all()
    assert np.all(graph.tensor_persistent == ((persistent > 0) | written)[graph.tensor_producer])
    if name.endswith(INFERENCE):
        assert meta["gradient_bytes"] == meta["optimizer_state_bytes"] == 0 and not graph.op_phase.any()
    elif name != "dlrm":
        assert meta["gradient_bytes"] == meta["parameter_bytes"]
    assert meta["flops"] == graph.op_flops.sum()
    assert graph.tensor_result.sum() >= 1


def ancestors(graph, op, without=None):
    """Bool ``(n,)``: the ops from which a path leads to ``op``; ``without`` is one (tensor, consumer) left out."""
    seen, stack = np.zeros(graph.n_ops, bool), [op]
    while stack:
        reader = stack.pop()
        for tensor in graph.inputs[graph.input_ptr[reader] : graph.input_ptr[reader + 1]]:
            producer = graph.tensor_producer[tensor]
            if not seen[producer] and (tensor, reader) != without:
                seen[producer] = True
                stack.append(producer)
    return seen


@pytest.mark.parametrize("name", ["transformer-xl-2", "inception-v3", "vit-l", "rnnlm"])
def test_a_parameter_is_overwritten_after_all_that_read_it(name):
    graph = load_workload(name)
    updates = 0
    for tensor in np.flatnonzero(graph.tensor_persistent):
        readers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
        for update in readers[graph.op_phase[readers] == 2]:
            before = ancestors(graph, update)
            assert all(before[reader] for reader in readers if reader != update)
            home = graph.tensor_producer[tensor]
            assert graph.op_group[home] == graph.op_group[update] >= 0
            updates += 1
    assert updates == (graph.op_phase == 2).sum() > 0


@pytest.mark.parametrize("name", ["transformer-xl-2", "vit-l"])
def test_no_control_edge_is_superfluous(name):
    graph = load_workload(name)
    control = np.flatnonzero(graph.tensor_bytes[graph.edge_tensor] == 0)
    assert len(control)
    for edge in control:
        tensor, reader = graph.edge_tensor[edge], graph.consumers[edge]
        assert not ancestors(graph, reader, without=(tensor, reader))[graph.edge_source[edge]]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_published_figures(name):
    """Whole numbers are met exactly, the rounded ones of papers to one percent."""
    graph, published = load_workload(name), workloads()[name].published
    if "parameters" in published:
        assert graph.meta["parameters"] == published["parameters"]
    if "forward_macs" in published:
        assert forward_macs(graph) / graph.meta["batch"] == pytest.approx(published["forward_macs"], rel=0.01)


def test_a_key_value_cache_is_held_for_good():
    """Of gpt2-medium-decode by hand: keys and values of 24 layers, 4 batches of 16 contexts, 1,024 words of 1,024 units
    in 2 bytes. Each layer's attention reads the caches of one batch, after the new word has been written into them."""
    graph = load_workload("gpt2-medium-decode")
    assert graph.meta["buffer_bytes"] == 2 * 24 * 4 * 16 * 1024 * 1024 * 2
    kinds = np.array(graph.kinds)[graph.op_kind]
    attention = np.flatnonzero([kind.startswith("_scaled_dot") for kind in kinds])
    assert len(attention) == 24
    for op in attention:
        read = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
        assert [kinds[producer] for producer in graph.tensor_producer[read]].count("copy_") == 2
        assert graph.op_bytes_read[op] == pytest.approx(2 * 16 * 1024 * 1024 * 2, rel=0.01)


def test_the_table_of_the_workloads_is_up_to_date():
    assert shelf("README.md").read_text(encoding="utf-8") == table(), "run python -m simdev.studies.shipped_graphs"


def parameters(entry):
    torch = pytest.importorskip("torch")
    spec, params = find_workload(entry)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in spec.function(**{**spec.defaults, **params}).model.parameters())


@pytest.mark.parametrize("name", ["inception-v3", "nasnet-a-large", "nasnet-a-mobile"])
def test_parameters_without_the_auxiliary_head(name):
    assert parameters(f"{name}[aux=false]") == workloads()[name].published["parameters_without_aux"]


@pytest.mark.parametrize("filters", [208, 416, 544])
def test_amoebanet_has_gpipes_parameters(filters):
    published = workloads()["amoebanet-d"].published[f"parameters_18_{filters}"]
    assert parameters(f"amoebanet-d[filters={filters}]") == pytest.approx(published, rel=0.001)


def test_wavenet_parameters_by_hand():
    c, s, q = 512, 256, 256
    layer = 2 * (2 * c * c + c) + (c * c + c) + (c * s + s)
    assert parameters("wavenet-4x36") == (2 * q * c + c) + 36 * layer - (c * c + c) + (s * s + s) + (s * q + q)


def make(entry):
    torch = pytest.importorskip("torch")
    spec, params = find_workload(entry)
    torch.manual_seed(0)
    return spec.function(**{**spec.defaults, **params})


@pytest.mark.parametrize("entry", TINY.values(), ids=TINY)
def test_learns_on_real_tensors(entry):
    step, losses = make(entry), []
    for group in step.optimizer.param_groups:
        group["lr"], group["eps"] = 0.003, 1e-3
    for _ in range(6):  # on one batch
        step.optimizer.zero_grad()
        loss = step.loss(step.model, *step.inputs)
        loss.backward()
        step.optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses[3:]) < losses[0]


def test_wavenet_is_causal():
    torch = pytest.importorskip("torch")
    step = make(TINY["wavenet-2x18"])
    samples = step.inputs[0]
    changed = samples.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 16
    with torch.no_grad():
        difference = (step.model(samples) - step.model(changed)).abs().sum((0, 1))
    assert torch.all(difference[:20] == 0) and difference[20] > 0


def recapture(name):
    torch = pytest.importorskip("torch")
    from simdev.graphs.capture import capture_workload

    shipped = load_graph(graph_path(name))
    version = torch.__version__.split("+")[0]
    if version != shipped.meta["torch"]:
        pytest.skip(f"captured with torch {shipped.meta['torch']}, this is {version}")
    graph = capture_workload(workloads()[name])
    assert graph.fingerprint == shipped.fingerprint
    assert {key: graph.meta.get(key) for key in shipped.meta} == shipped.meta  # newer captures note more


QUICK = ("inception-v3", "nasnet-a-mobile", "vit-l", "wavenet-2x18", "transformer-xl-2", "rnnlm")


@pytest.mark.parametrize("name", QUICK)
def test_recapture(name):
    recapture(name)


# They repeat what smaller ones of their family show.
LONG = {"gnmt-8", "gnmt-4", "nmt", "nasnet-a-large", "amoebanet-d", "llama-moe"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.long if n in LONG else pytest.mark.slow)
        for n in sorted(set(workloads()) - set(QUICK))
    ],
)
def test_recapture_the_rest(name):
    recapture(name)
