"""A plan in a file, for other tools and for later: what was trained on what, and what was chosen.

:meth:`Choice.save() <simdev.planners.Choice.save>` writes the file. It is JSON, and stable: a reader of version 1 reads
every file with ``"version": 1``::

    {"format": "simdev plan", "version": 1, "model": "llama3-70b", "cluster": "dgx-h100[nodes=8]", "batch": 1024,
     "framework": "eager", "choice": {"mesh": {"dp_shard": 64}, "microbatch": 2, "recompute": "full",
     "schedule": "1f1b", "stages_per_rank": 1, "stage_layers": [], "reduce_each": true}, "figures": {}}

``model`` and ``cluster`` are ids as ``simdev plan`` takes them; ``choice`` is
:meth:`Choice.to_json() <simdev.planners.Choice.to_json>`; ``figures`` inform a reader and are never trusted.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from simdev.errors import InvalidInput, Unsupported, quoted
from simdev.files import MIB, read_json
from simdev.parallel import find_model, load_cluster
from simdev.parallel.framework import find_framework
from simdev.parallel.plain import PlainModel
from simdev.planners.job import FORMAT, VERSION, Choice, Job, choice_from

MAX_PLAN = MIB
FIELDS = {"model": str, "cluster": str, "batch": int, "framework": str, "choice": dict}
FILE = re.compile(r"[/\\]|\.(py|json|toml)")


def make_job(model: str, cluster: str, batch: int, framework: str = "eager", **options) -> Job:
    """The job that ``simdev plan MODEL CLUSTER --batch N --framework NAME`` plans; ``options`` are further fields of
    :class:`Job`. Raises :class:`InvalidInput`, :class:`UnknownName` or :class:`Unsupported`."""
    with _field("model"):
        found, parameters = find_model(model)
    with _field("framework"):
        parameters = find_framework(framework).parameters_of(found.name, parameters, model)
    with _field("cluster"):
        where = load_cluster(cluster)
    return Job(found, parameters, where, batch, framework=framework, ids=(model, cluster), **options)


@contextlib.contextmanager
def _field(name: str) -> Iterator[None]:
    """An error inside is about this field, unless it names another one."""
    try:
        yield
    except InvalidInput as error:
        error.field = error.field or name
        raise


def load_plan(path: str | os.PathLike, model: str = "", cluster: str = "", framework: str = "") -> tuple[Job, Choice]:
    """The job and the choice of a plan file: ``choice.save(path, job)`` writes it.

    No file that the plan names is opened: if its model, its cluster or its framework is a file of the user's
    (``my_model.py:name``, a configuration, a topology), pass the id as ``model``, ``cluster`` or ``framework``. Raises
    :class:`InvalidInput` naming the file and the field, also for a model, machine or framework that does not exist, and
    :class:`Unsupported` where a process group hides how a module of the user's is divided (tp): load plans before it.
    """
    document = read_json(path, MAX_PLAN)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidInput(f"expected an object whose format is {FORMAT!r}", source=path, field="format")
    if document.get("version") != VERSION:
        raise InvalidInput(f"{quoted(document.get('version'))} is unknown here", source=path, field="version")
    for name, kind in FIELDS.items():
        if not isinstance(document.get(name), kind) or isinstance(document[name], bool):
            message = f"expected {kind.__name__}, got {quoted(document.get(name))}"
            raise InvalidInput(message, source=path, field=name)
    ranks = document.get("ranks", 0)  # 0: all of the cluster, or one node
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 0:
        raise InvalidInput(f"expected a whole number from 0 on, got {quoted(ranks)}", source=path, field="ranks")
    given = {"model": model, "cluster": cluster, "framework": framework}
    ids = {field: name or document[field] for field, name in given.items()}
    for field, name in ids.items():
        if not given[field] and FILE.search(name):
            message = f"{quoted(name)} is a file; pass its id, because files named in a plan are not opened"
            raise InvalidInput(message, source=path, field=field)
    try:
        job = make_job(**ids, batch=document["batch"], ranks=ranks)
        with _field("choice"):
            choice = choice_from(document["choice"])
            _refuse_late(job, choice)
            job.plan(choice)
    except InvalidInput as error:
        raise InvalidInput(error.message, source=path, field=error.field) from None
    except OSError as error:  # an id that is too long for the name of a file
        raise InvalidInput(f"an id cannot be looked up: {error.strerror}", source=path) from None
    return job, choice


def _refuse_late(job: Job, choice: Choice) -> None:
    """Raise :class:`Unsupported` if a plain module's tensor parallelism could not be tried out, which takes a process
    group of its own."""
    if choice.mesh["tp"] > 1 and isinstance(job.model.function, PlainModel) and "tp" not in job.model.axes:
        import torch.distributed as dist

        if dist.is_initialized():
            where = "before torch.distributed.init_process_group"
            raise Unsupported(f"load the plan {where}: how tp divides {job.model.name} is tried out without one")
