"""Parameters of a module that was built on ``meta``, as fake tensors."""

from __future__ import annotations


def to_fakes(module) -> None:
    """``module.to_empty(device="cpu")``, inside fake mode; what was tied stays tied."""
    tied: dict[int, list] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                tied.setdefault(id(parameter), []).append((part, name))
    module.to_empty(device="cpu")
    for (first, own), *others in tied.values():
        for part, name in others:
            part._parameters[name] = first._parameters[own]
