"""Configurations of training frameworks that run a plan: one file each, found by its presence.

Each file has ``RELEASE``, the release that it was written for, and ``write(job, choice)``, which returns the text. A
writer says every part of the plan (:class:`~simdev.integrations.configs.settings.Settings`), also where the framework's
default is the same, and raises :class:`~simdev.errors.Unsupported` with the part that it cannot say.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable
from importlib import import_module

from simdev.errors import SimdevError, UnknownName
from simdev.planners import Choice, Job

Writer = Callable[[Job, Choice], str]


def targets() -> list[str]:
    """The names of all frameworks that ``simdev plan --write`` knows."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name != "settings"]


def find_writer(name: str) -> Writer:
    """The writer of a framework's configuration. Raises :class:`UnknownName`."""
    if name not in targets():
        raise UnknownName("configuration", name, targets())
    return import_module(f"{__name__}.{name}").write


def other_targets(name: str, job: Job, choice: Choice) -> list[str]:
    """The targets that can say a plan which ``name`` refuses: those whose writers do."""
    found = []
    for other in targets():
        with contextlib.suppress(SimdevError):
            if other != name and find_writer(other)(job, choice):
                found.append(other)
    return found
