"""What the shell offers when a name is completed: workloads, machines, placers, planners, parallel models,
configurations."""

from __future__ import annotations


def workloads(incomplete: str) -> list[str]:
    from simdev.placers import registry

    return _that_begin(registry.workloads(), incomplete)


def machines(incomplete: str) -> list[str]:
    from simdev.problem.topology import topology_names

    return _that_begin(topology_names(), incomplete)


def frameworks(incomplete: str) -> list[str]:
    from simdev.parallel.framework import framework_names

    return _that_begin(framework_names(), incomplete)


def placers(incomplete: str) -> list[str]:
    from simdev.placers import registry

    return _that_begin(registry.placers(), incomplete)


def models(incomplete: str) -> list[str]:
    from simdev.parallel import model_names

    return _that_begin(model_names(), incomplete)


def planners(incomplete: str) -> list[str]:
    from simdev.planners import planners as known

    return _that_begin(known(), incomplete)


def configurations(incomplete: str) -> list[str]:
    from simdev.integrations.configs import targets

    return _that_begin(targets(), incomplete)


def workloads_or_machines(incomplete: str) -> list[str]:
    return [*workloads(incomplete), *machines(incomplete)]


def _that_begin(names, incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
