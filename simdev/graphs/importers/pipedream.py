"""Import PipeDream profiles (``graph.txt``): forward and backward time, activation and parameter bytes of each layer.

Source: msr-fiddle/pipedream ``profiler/``; Narayanan et al., SOSP 2019. The file has lines of two kinds::

    node4 -- Conv2d(3, 64, ...) -- forward_compute_time=1.2, backward_compute_time=2.1, activation_size=100.0, ...
    <tab>node3 -- node4

Times are in milliseconds for a whole minibatch, sizes are in bytes; ``activation_size`` may be a list ``[a; b]``. A
layer ``nodeK`` becomes two colocated ops:

* ``nodeK`` (forward) makes the activations and holds the parameters. ``nodeK.backward`` makes one gradient for each
  layer that ``nodeK`` reads, and the gradient of the parameters, which stays in memory until the end of the step.
* ``nodeK.backward`` reads the inputs of ``nodeK`` (the saved activations) and the gradients from the layers that read
  ``nodeK``. A layer without readers starts the backward pass from its own activations.
* Input nodes are dropped: in the profiles of image models their time is data loading.
* The profile has no optimizer step, so the graph has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from simdev.errors import InvalidInput
from simdev.files import text_of
from simdev.graphs.importers import Imported, importer
from simdev.graphs.importers.reading import Fields, name_of
from simdev.problem.graph import GraphBuilder

_FIELD = re.compile(r"(?<!\w)(\w+)=(\[[^\]]*\]|[^,\s]+)")
_GETITEM = re.compile(r"__getitem__\((\d{1,9})\)")


@dataclass(frozen=True)
class ProfiledLayer:
    text: str
    kind: str
    forward_ns: float
    backward_ns: float
    activations: list[int]
    parameters: int


def _detects(data: bytes, path: str) -> bool:
    first = data[:65536].lstrip().split(b"\n", 1)[0]
    return first.startswith(b"node") and b" -- " in first


@importer("pipedream", detects=_detects)
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    layers, inputs = read_layers(text_of(data, path), path)
    builder = GraphBuilder(name_of(path), meta={"source": "PipeDream profile"})
    forward, backward, times = {}, {}, {}
    for name, layer in layers.items():
        there, back = f"{name}: {layer.text}", f"{name}.backward: {layer.text}"
        times[there], times[back] = layer.forward_ns, layer.backward_ns
        forward[name] = builder.op(
            name,
            layer.kind,
            signature=there,
            layer=name,
            group=name,
            outputs=layer.activations,
            persistent_bytes=layer.parameters,
        )
        backward[name] = builder.op(
            f"{name}.backward", f"{layer.kind}_backward", signature=back, layer=name, group=name, phase="backward"
        )
    for name, layer in layers.items():
        for before in inputs[name]:
            read = _outputs_read(layer, layers[before])
            for output in read:
                activation = builder.outputs(forward[before])[output]
                builder.connect(activation, forward[name])
                builder.connect(activation, backward[name])
            gradient = builder.tensor(backward[name], sum(layers[before].activations[output] for output in read))
            builder.connect(gradient, backward[before])
        if layer.parameters:
            builder.tensor(backward[name], layer.parameters, result=True)
    for name in layers.keys() - {before for befores in inputs.values() for before in befores}:
        for activation in builder.outputs(forward[name]):
            builder.connect(activation, backward[name])
    return Imported(builder.build(), {device_kind: times})


def _outputs_read(reader: ProfiledLayer, source: ProfiledLayer) -> list[int]:
    """The activations of ``source`` that a layer reads: all of them, or the one that ``__getitem__(i)`` selects."""
    picked = _GETITEM.match(reader.text)
    every = list(range(len(source.activations)))
    which = int(picked[1]) if picked else len(every)
    return every[which : which + 1] or every


def read_layers(text: str, path) -> tuple[dict[str, ProfiledLayer], dict[str, list[str]]]:
    """The layers by name, and for each layer the layers that it reads. Input nodes are left out."""
    layers: dict[str, ProfiledLayer] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = [part.strip() for part in line.strip().split(" -- ")]
        if len(parts) == 2:
            edges.append((number, parts[0], parts[1]))
        elif len(parts) > 2:
            if parts[0] in layers:
                raise InvalidInput(f"{parts[0]!r} is given twice", source=path, field=f"line {number}")
            layers[parts[0]] = _layer(parts, path, f"line {number}")
        elif line.strip():
            raise InvalidInput(
                "neither 'node -- layer -- times' nor 'node -- node'", source=path, field=f"line {number}"
            )
    inputs: dict[str, list[str]] = {name: [] for name, layer in layers.items() if layer.kind != "Input"}
    if not inputs:
        raise InvalidInput("no layers", source=path, field="node")
    for number, before, after in edges:
        for end in (before, after):
            if end not in layers:
                raise InvalidInput(
                    f"{end!r} is not a node of the file (dangling edge)", source=path, field=f"line {number}"
                )
        if before in inputs and after in inputs and before not in inputs[after]:
            inputs[after].append(before)
    return {name: layers[name] for name in inputs}, inputs


def _layer(parts: list[str], path, where: str) -> ProfiledLayer:
    values = dict(_FIELD.findall(next((part for part in parts[2:] if "forward_compute_time=" in part), "")))
    read = Fields(values, path, where)
    numbers = {}
    for key in ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size"):
        items = read.text(key).strip("[]").split(";")
        try:
            numbers[key] = [float(item) for item in items]
        except ValueError:
            raise read.fail(f"{values[key]!r} is not a number", key) from None
        for value in numbers[key]:
            read.check_number(value, key)
    kind = re.match(r"\w*[a-zA-Z_]", parts[1])
    return ProfiledLayer(
        text=parts[1],
        kind=kind[0] if kind else "layer",
        forward_ns=numbers["forward_compute_time"][0] * 1e6,
        backward_ns=numbers["backward_compute_time"][0] * 1e6,
        activations=[read.check_bytes(value, "activation_size") for value in numbers["activation_size"]],
        parameters=read.check_bytes(numbers["parameter_size"][0], "parameter_size"),
    )
