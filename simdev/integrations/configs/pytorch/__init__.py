"""PyTorch: a complete script that trains the model by the plan, for ``torchrun``.

A plain module of the user's own (:mod:`.plain`) is spread by PyTorch's libraries; a model of transformers
(:mod:`.hugging_face`) by the plans that its class brings. The script needs nothing of simdev.
"""

from __future__ import annotations

from simdev.errors import Unsupported
from simdev.integrations.configs.pytorch import hugging_face, plain
from simdev.integrations.configs.settings import refuse, refuse_parts, settings_of
from simdev.parallel.hugging_face import TransformersModel
from simdev.parallel.plain import PlainModel
from simdev.planners import Choice, Job

RELEASE = plain.RELEASE


def write(job: Job, choice: Choice) -> str:
    """The script. Raises :class:`Unsupported` for a model whose code simdev does not have (shipped models), and naming
    the part of the plan that the script cannot say."""
    settings = settings_of(job, choice, any_precision=True)  # the script keeps those that the model's code gives
    refuse(settings, "the script", "cp")
    known = ["reshard_after_forward"]
    if not isinstance(job.model.function, TransformersModel):
        known += ["reshard=never", "torch.compile"]  # transformers recomputes layers outside of compiled code
    elif settings.gathered and settings.mesh["pp"] > 1:
        # Its classes shard the embedding by itself. A last backward pass gathers ahead along the record of an earlier
        # forward pass; all stages are simulated as the last one, and only the last one has such a record left.
        message = "in the last backward pass, all stages but the last gather a layer less than the plan's simulation"
        raise Unsupported(f"the script cannot say reshard=never of a pipeline of transformers' models: {message}")
    else:
        known += ["reshard=never"]
    refuse_parts(settings, "the script", *known)
    if settings.mesh["dp_shard"] > 1 and settings.reduce_each != (choice.reduce_each and settings.microbatches > 1):
        raise Unsupported(f"the plan {choice} leaves open when gradients are reduced")
    if isinstance(job.model.function, TransformersModel):
        return hugging_face.write(job, choice, settings)
    if isinstance(job.model.function, PlainModel):
        return plain.write(job, choice, settings)
    raise Unsupported(
        "a script needs the model's own code (my_model.py:make_step, transformers:CLASS or a config.json), and this is "
        f"{job.model.name}"
    )
