"""A backward pass in two halves, as zero-bubble schedules run it: gradients of the stage's input, then of its weights.

Both halves are PyTorch's own (``torch.distributed.pipelining``). Stage 0 has no input that needs a gradient: as in
PyTorch, its first half is empty and its second half is the whole backward pass. As in PyTorch's pipeline schedules,
FSDP gathers the parameters of a stage once in a step, and reduces gradients once, after the last microbatch.
"""

from __future__ import annotations


class SplitBackward:
    """The backward pass of one microbatch. Call :meth:`of_input`, then :meth:`of_weights`."""

    def __init__(self, module, output, gradient, inputs: tuple):
        self._module, self._output, self._gradient = module, output, gradient
        self._inputs = [x for x in inputs if getattr(x, "requires_grad", False)]
        self._groups: list[dict] = []

    def of_input(self) -> tuple:
        """The gradients of the stage's inputs that need one."""
        from torch.distributed.pipelining._backward import stage_backward_input

        if not self._inputs:
            return ()
        given = None if self._gradient is None else [self._gradient]
        gradients, self._groups = stage_backward_input([self._output], given, self._inputs, self._module.parameters())
        for x in self._inputs:
            x.grad = None  # it is sent away
        self._output = self._gradient = None
        return gradients

    def of_weights(self) -> None:
        """Add to the gradients of the parameters."""
        from torch.distributed.pipelining._backward import stage_backward_weight

        if self._inputs:
            stage_backward_weight(self._module.parameters(), self._groups)
        else:
            self._output.backward(self._gradient)
        self._output = self._gradient = None
        self._groups, self._inputs = [], []


def keep_gathered(module, after_backward: bool = True) -> None:
    """Let FSDP modules keep their parameters gathered after forward passes, and after backward passes unless these
    free them (``after_backward=False``)."""
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule

    for part in _fsdp_parts(module):
        if not isinstance(part, ReplicateModule):  # which always keeps its parameters
            part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(not after_backward, recurse=False)


def reduce_gradients(module) -> None:
    """Reduce the gradients of FSDP modules and free what they gathered (``perform_reduce_grad`` of PyTorch's stages);
    does nothing for other modules."""
    parts = _fsdp_parts(module)
    for part in parts:
        part.set_reshard_after_backward(True, recurse=False)
    if not parts:
        return
    root = module._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root._root_post_backward_final_callback()
    keep_gathered(module)


def idle_parts(module) -> list[str]:
    """Names of the FSDP modules whose parameters no forward pass has gathered yet, and whose gradients are reduced in
    another data type: beside them, a backward pass that leaves gradients unreduced fails in PyTorch."""
    from torch.distributed.fsdp import FSDPModule

    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule))
    return [
        name
        for name, part in parts
        for group in part._get_fsdp_state()._fsdp_param_groups
        if any(one.reduce_dtype is not None and not hasattr(one, "_unsharded_param") for one in group.fsdp_params)
    ]


def _fsdp_parts(module) -> list:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]
