"""What the scripts share: how a template becomes a script, and the parts that do not depend on the model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from simdev.errors import Unsupported
from simdev.integrations.configs.settings import Settings

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
             "looped-bfs": "ScheduleLoopedBFS"}  # fmt: skip
LOOPED = ("interleaved", "looped-bfs")
POLICY = """def kept_results():  # of attention and of the first of every two products; the rest is recomputed
    first, mm = {again: itertools.cycle([True, False]) for again in (False, True)}, torch.ops.aten.mm.default
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(
        lambda context, op, *_, **__: next(first[context.is_recompute]) if op == mm else "_scaled_dot_" in str(op)
    )


"""
MAIN = """if __name__ == "__main__":
    parts = build()
    for number in range(3):
        began = time.perf_counter()
        loss = train_step(*parts) / @RANKS@
        dist.all_reduce(loss)
        if dist.get_rank() == 0:  # it waits for the loss, and then reads the clock
            print(f"step {number}: loss {loss:.12g}, {(time.perf_counter() - began) * 1e3:.1f} ms", flush=True)
    dist.barrier()  # a rank that left now would break off what the others still send
    dist.destroy_process_group()
"""
STAGES_STEP = """\
def train_step(schedule, stages, optimizer, data):  # returns this rank's mean loss, 0 before the last stage
    losses = [torch.zeros((), device=data.device)]
    last = {"labels": data, "target": data} if stages[-1].last else {}
    schedule.step(*([data] if stages[0].first else []), **last, losses=losses, return_outputs=False)
    optimizer.step()
    optimizer.zero_grad()
    return sum(loss.detach().double() for loss in losses)


"""


def refuse_schedule(settings: Settings) -> None:
    """Raise :class:`Unsupported` for a pipeline that no schedule of PyTorch's runs as it was planned."""
    if settings.schedule and settings.schedule not in SCHEDULES:
        raise Unsupported(f"the script does not split backward passes, and this plan does ({settings.schedule})")
    if settings.schedule == "1f1b" and settings.microbatches < settings.mesh["pp"]:
        few = f"{settings.microbatches} microbatches on {settings.mesh['pp']} stages"
        raise Unsupported(f"PyTorch's Schedule1F1B needs as many microbatches as stages, and this plan has {few}")


def render(template: str, flags: Mapping[str, bool], values: Mapping[str, object]) -> str:
    """The template with its values in place of ``@NAME@``. A line that ends in ``#? flag`` is kept if the flag is set,
    one that ends in ``#? !flag`` if it is not."""
    lines = []
    for line in template.splitlines():
        text, mark, condition = line.partition("  #? ")
        if not mark or all(flags[name.lstrip("!")] != name.startswith("!") for name in condition.split()):
            lines.append(text)
    found = "\n".join(lines) + "\n"
    for name, value in values.items():
        found = found.replace(f"@{name}@", str(value))
    left = re.search(r"@[A-Z]+@", found)
    assert left is None, left
    return found
