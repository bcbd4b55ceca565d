"""One training step of a script that knows nothing of simdev: ``simdev capture train.py --step 3 -- --epochs 1``.

The script runs unchanged, for real, on the CPU. PyTorch's global hooks mark its steps: a step ends where the optimizer
that was seen last ends its ``step()``, so that it holds the steps of all optimizers (a discriminator's and a
generator's, five critics' and one generator's). The count begins when every parameter that an optimizer was made for
has been updated, or after 20 steps without. In a script without an optimizer, steps end with ``backward()``.
Recorded is what happens between two marks; then the script is stopped. What a ``DataLoader`` does is not recorded; its
batches are inputs. A tensor that the step before has read as well, and neither made, lives across steps: it is a
constant. Any other tensor from outside is an input. A process that the script starts to run a function of its own
(``torch.multiprocessing.spawn``: the first of them) runs in this process, at once.
"""

from __future__ import annotations

import re
import runpy
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import torch
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.data import dataloader

from simdev.errors import InvalidInput, SimdevError, Unsupported
from simdev.graphs.capture.optimizers import one_by_one, trained_by
from simdev.graphs.capture.rewrites import as_on_gpu, no_cpu_ops, replaced
from simdev.graphs.capture.run import (
    ON_VALUES,
    Loop,
    assembled,
    facts_of_state,
    hold,
    named_parameters,
    optimizer_hooks,
    remedy_of,
    seeded,
    values_sentence,
    with_closure,
)
from simdev.graphs.capture.selfcheck import TOLERANCE, Counted, Versions, check_not_empty
from simdev.graphs.capture.shadows import Shadows
from simdev.graphs.capture.trace import NeedsValues, Tape, is_sparse
from simdev.graphs.capture.unknown import Fakes
from simdev.graphs.capture.vision_ops import define_missing_operators
from simdev.problem.graph import ComputationGraph
from simdev.user_file import line_of, sentence

NO_MARKS = (
    ". A step ends with optimizer.step(), or with backward() if the script makes no optimizer; for any other step, "
    "give FILE.py:FUNCTION, a function that returns a CustomStep of a torch.nn.Module"
)
MOST_STEPS_TO_WAIT = 20  # for an optimizer that was made and has not stepped yet


class _Stop(BaseException):
    """Ends the script once its step is recorded."""


def run_script(
    path: Path,
    arguments: list[str],
    step: int,
    name: str,
    meta: dict,
    *,
    fake: bool = False,
    allow_empty: bool = False,
) -> ComputationGraph:
    """Run a script up to the end of its ``step``-th training step, and return the graph of that step. With ``fake``,
    parameters hold no values (see :mod:`simdev.graphs.capture.unknown`).

    Raises :class:`InvalidInput` if the script fails before, makes fewer steps, or reads a value that it does not have.
    """
    define_missing_operators()
    if not fake:
        watch = Watch(path, step)
        with seeded(), as_on_gpu(cpu_kernels=True):
            run_watched(path, arguments, watch)
        return watch.graph(name, {**meta, "values": "real"}, allow_empty)
    fakes = Fakes(path)
    watch = Watch(path, step, fakes=fakes)
    with refused_values(fakes, path), seeded(), as_on_gpu(), fakes:
        run_watched(path, arguments, watch)
    unknown = {"unknown_numbers": dict(fakes.read)} if fakes.read else {}
    unknown |= {"taken_as_finite": dict(fakes.assumed)} if fakes.assumed else {}
    return watch.graph(name, {**meta, "values": "fake", **unknown}, allow_empty)


@contextmanager
def refused_values(fakes: Fakes, path: Path):
    """Raise :class:`InvalidInput` if the script read a value that it does not have, also if it caught the error."""
    try:
        yield
    except SimdevError as error:
        if fakes.refusal is not None and fakes.refusal is not error:  # what the script made of it
            raise InvalidInput(str(fakes.refusal), source=path) from error
        if isinstance(error.__cause__, ON_VALUES):
            raise InvalidInput(f"{values_sentence(error.__cause__)}; or run without --fake", source=path) from error
        if isinstance(error, Unsupported):
            without = "; run the script without --fake" if isinstance(error, NeedsValues) else ""
            raise InvalidInput(f"{error}{without}", source=path) from error
        cause = error.__cause__
        no_values = isinstance(cause, UnsupportedFakeTensorException) or "data is not allocated" in str(cause)
        if isinstance(error, InvalidInput) and no_values:
            message = (
                f"{error.message}; it asks for values that fake tensors do not have: run the script without --fake"
            )
            raise InvalidInput(message, source=path, field=error.field) from error
        if fakes.read and isinstance(error, InvalidInput) and error.__cause__ is not None:
            places = ", ".join(fakes.read)
            message = f"{error.message}; numbers that a run on fake tensors does not have were read in {places}: if "
            message += "they are the cause, run the script without --fake"
            raise InvalidInput(message, source=path, field=error.field) from error
        raise
    if fakes.refusal is not None:  # the script caught the error and took another course
        raise InvalidInput(str(fakes.refusal), source=path)


def run_watched(path: Path, arguments: list[str], watch: Watch) -> None:
    """Run a script as ``python path arguments`` does, until ``watch`` has recorded its step.

    Raises :class:`InvalidInput` if the script fails before; :meth:`Watch.finished` says whether it made the step.
    """
    step = watch.step
    _forget_processes()
    argv, modules = sys.argv, set(sys.modules)
    folder = str(path.resolve().parent)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, folder)
    try:
        with watch:
            runpy.run_path(str(path), run_name="__main__")
    except _Stop:
        pass
    except SystemExit as error:
        if error.code not in (None, 0) and not watch.done:
            raise InvalidInput(f"the script ended with exit code {error.code}", source=path) from error
    except SimdevError:
        raise
    except Exception as error:
        if not watch.done:
            message = f"the script failed before its step {step} had ended: {remedy_of(error) or sentence(error)}"
            raise InvalidInput(message, source=path, field=line_of(error, str(path), None)) from error
    finally:
        sys.argv = argv
        if folder in sys.path:
            sys.path.remove(folder)
        for module in set(sys.modules) - modules:  # another script may have neighbours of the same names
            file = getattr(sys.modules[module], "__file__", None) or ""
            if file.startswith(folder + "/") and "site-packages" not in file:
                del sys.modules[module]


def _forget_processes() -> None:
    """Accelerate remembers the rank of its process, also for a script that runs in the same process later."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def batch_arguments(path: Path, batch: int) -> list[str]:
    """The arguments that give a script the batch size ``batch``: an option of its own whose name has ``batch`` in it.

    Raises :class:`InvalidInput` if the script has no such option, or several.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    options = [
        next((name for name in names if name.startswith("--")), names[0])
        for call in re.findall(r"add_argument\(([^)]*)\)", text)
        for names in [re.findall(r"""["'](-{1,2}[\w-]+)["']""", call)]
        if any("batch" in name for name in names)
    ]
    if "HfArgumentParser" in text or "TrainingArguments" in text:
        options.append("--per_device_train_batch_size")
    if re.search(r"^batch_size\s*=", text, re.MULTILINE) and "configurator" in text:
        options.append("--batch_size")
    plain = [
        name for name in options if re.fullmatch(r"-+(train[-_]|per[-_]device[-_]train[-_])?batch[-_]?(size)?", name)
    ]
    found = plain or [name for name in options if not re.search("eval|test|val|accum|log", name)]
    if len(found) != 1:
        seen = f"several: {', '.join(found)}" if found else "none"
        raise InvalidInput(f"expected one batch option in the script, found {seen}; give it after --", source=path)
    return [f"{found[0]}={batch}" if found[0].startswith("--") else f"{found[0]}{batch}"]


class Watch:
    """Follows a script: counts its steps, learns its modules and optimizers, records one step. ``recording`` makes what
    records (see :class:`Recording`), ``prepare`` is called with each optimizer before its first step, and ``rank`` is
    that of a process which the script starts. ``fakes`` hears of the steps of optimizers."""

    def __init__(
        self,
        path: Path,
        step: int,
        recording: Callable[..., Recording] | None = None,
        *,
        prepare: Callable[[torch.optim.Optimizer], None] = one_by_one,
        rank: int = 0,
        fakes: Fakes | None = None,
    ):
        self._path, self.step, self._fakes = path, step, fakes
        recording = recording or partial(Recording, shadows=fakes.shadows if fakes is not None else None)
        self._recording_of, self._prepare, self._rank = recording, prepare, rank
        self._roots: list[torch.nn.Module] = []
        self._inside: set[int] = set()  # modules of the roots
        self._optimizers: list[torch.optim.Optimizer] = []
        self._stepping: list[torch.optim.Optimizer] = []  # those at work: one may step another one inside it
        self._made: list[weakref.ref] = []  # optimizers that were made, and may not have stepped yet
        self._waited = 0
        self._inside_backward = False  # whether a step has ended inside of a backward pass that has not
        self._mark: object = None  # whose steps count: an optimizer, or "backward"
        self._marks = 0
        self._labels: dict[int, str] = {}
        self._recording: Recording | None = None
        self._before: Recording | None = None
        self._depth = 0
        self._stack = ExitStack()
        self.done = False

    def __enter__(self):
        enter = self._stack.enter_context
        enter(optimizer_hooks(self._before_step, self._after_step))
        for handle in (
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
        ):
            self._stack.callback(handle.remove)
        batches, optimizer = dataloader._BaseDataLoaderIter, torch.optim.Optimizer
        enter(
            replaced(
                (optimizer, "__init__", self._noting_optimizer(optimizer.__init__)),
                (torch.autograd, "backward", self._marking(torch.autograd.backward)),
                (batches, "__next__", self._paused(batches.__next__)),
                (torch.multiprocessing, "spawn", self._first_process),
                (BaseProcess, "start", _in_this_process(BaseProcess.start)),
                (BaseProcess, "join", _joined(BaseProcess.join)),
            )
        )
        if self.step == 2:
            self._record()
        return self

    def __exit__(self, *error):
        if self._recording is not None:
            self._recording.stop()
        return self._stack.__exit__(*error)

    def _first_process(self, function, args=(), nprocs=1, *_, **__) -> None:
        """In place of ``torch.multiprocessing.spawn``: the first process, or that of the rank, in this one."""
        function(self._rank, *args)

    # Marks ------------------------------------------------------------------------------------------------------

    def _noting_optimizer(self, original):
        def init(optimizer, *args, **kwargs):
            self._made.append(weakref.ref(optimizer))
            original(optimizer, *args, **kwargs)

        return init

    def _marking(self, original):
        def backward(*args, **kwargs):
            original(*args, **kwargs)
            if self.done:
                return
            if self._inside_backward:  # only now can a recording begin or end
                self._inside_backward = False
                self._count()
            elif not self._made:
                self._mark = "backward"
                self._count()

        return backward

    def _paused(self, original):
        def following(loader):
            if self._recording is None:
                return original(loader)
            with self._recording.paused():
                batch = original(loader)
            self._recording.loaded(batch)
            return batch

        return following

    def _before_step(self, optimizer, args, kwargs):
        if self._fakes is not None:
            self._fakes.begin_update(optimizer, with_closure(args, kwargs, lambda closure: closure()) is not None)
        if self.done:
            return None
        self._stepping.append(optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            self._prepare(optimizer)
            self._mark, self._marks = self._stepping[0], 0  # the step that ends here is the first that has all of them
            if torch._C._current_graph_task_id() != -1 or len(self._stepping) > 1:
                return self._recording.begin_update(optimizer, args, kwargs) if self._recording is not None else None
            if self._recording is not None and self.step > 2:
                self._recording.stop()
                self._recording = None
        return self._recording.begin_update(optimizer, args, kwargs) if self._recording is not None else None

    def _after_step(self, optimizer, *_):
        if self._fakes is not None:
            self._fakes.end_update(optimizer)
        if self.done:
            return
        if self._recording is not None:
            self._recording.end_update(optimizer)
        while self._stepping and self._stepping.pop() is not optimizer:
            pass  # its step was left by an exception
        if optimizer is self._mark:
            if torch._C._current_graph_task_id() != -1:
                self._inside_backward = True
            else:
                self._count()

    def _expected(self) -> bool:
        """Whether a parameter waits for its first update, by an optimizer that has not stepped yet (a generator's,
        after some steps of its critics). It may never step: the wait ends."""
        seen = {id(one) for optimizer in self._optimizers for one in trained_by(optimizer)}
        made = [optimizer for reference in self._made if (optimizer := reference()) is not None]
        waiting = [one for optimizer in made if optimizer not in self._optimizers for one in trained_by(optimizer)]
        missing = any(id(one) not in seen for one in waiting)
        self._waited += missing
        return missing and self._waited <= MOST_STEPS_TO_WAIT

    def _count(self) -> None:
        if self._expected():
            if self._recording is not None:
                self._recording.stop()
                self._recording = None
                self._record()
            return
        self._marks += 1
        if self._marks == self.step - 1 and self._recording is not None:
            self._recording.stop()
            self._before, self._recording = self._recording, None
            self._record()
        elif self._marks == self.step - 2:
            self._record()
        elif self._marks >= self.step and self._recording is not None:
            self._recording.stop()
            self.done = True
            raise _Stop

    def _record(self) -> None:
        roots = self._named_roots()
        self._labels = {
            id(module): ".".join(filter(None, (prefix, label)))
            for prefix, root in roots.items()
            for label, module in root.named_modules()
        }
        lasting = self._before.lasting() if self._before is not None else set()
        self._recording = self._recording_of(roots, self._optimizers, lasting)

    # Modules ----------------------------------------------------------------------------------------------------

    def _before_module(self, module, _):
        if id(module) not in self._inside and self._depth == 0 and any(True for _ in module.parameters()):
            self._roots.append(module)
            self._inside |= {id(inner) for inner in module.modules()}
        self._depth += 1
        if self._recording is not None and id(module) in self._labels:
            self._recording.enter(self._labels[id(module)])

    def _after_module(self, module, *_):
        self._depth -= 1
        if self._recording is not None and id(module) in self._labels:
            self._recording.leave()

    def _named_roots(self) -> dict[str, torch.nn.Module]:
        """The outermost modules, each under the name of a variable of the script, or of its class; a single one needs
        no name."""
        variables = self._variables()
        outer: dict[int, tuple[str, torch.nn.Module]] = {}
        for root in self._roots:
            around = [
                (label, module)
                for label, module in variables.items()
                if any(inner is root for inner in module.modules())
            ]
            own = [(label, module) for label, module in around if module is root]
            label, module = (own or around or [(type(root).__name__.lower(), root)])[0]
            outer.setdefault(id(module), (label, module))
        kept = [
            (label, module)
            for label, module in outer.values()
            if not any(module is not other and module in set(other.modules()) for _, other in outer.values())
        ]
        if len(kept) == 1:
            return {"": kept[0][1]}
        named: dict[str, torch.nn.Module] = {}
        for label, module in kept:
            count = sum(key.rstrip("0123456789") == label for key in named)
            named[f"{label}{count}" if count else label] = module
        return named

    def _variables(self) -> dict[str, torch.nn.Module]:
        """The modules that the script's own frames have names for, inner frames first."""
        found: dict[str, torch.nn.Module] = {}
        frame: FrameType | None = sys._getframe()
        own = self._path.resolve()
        while frame is not None:
            if Path(frame.f_code.co_filename).resolve() == own:
                for scope in (frame.f_locals, frame.f_globals):
                    for label, value in list(scope.items()):
                        if isinstance(value, torch.nn.Module) and not any(value is known for known in found.values()):
                            found.setdefault(label, value)
            frame = frame.f_back
        return found

    # The graph --------------------------------------------------------------------------------------------------

    def finished(self) -> Recording:
        """The recorded step. Raises :class:`InvalidInput` if the script ended before it."""
        last = self._recording
        if not self.done or last is None:
            made = f"made {self._marks} training steps" if self._marks else "made no training step in this process"
            wish = NO_MARKS if self._marks == 0 else f"; give a smaller --step than {self.step}"
            message = f"the script {made} before it ended; the step to capture is number {self.step}{wish}"
            raise InvalidInput(message, source=self._path)
        return last

    def graph(self, name: str, meta: dict, allow_empty: bool) -> ComputationGraph:
        last, before = self.finished(), self._before
        by = self._mark if isinstance(self._mark, str) else type(self._mark).__name__
        meta = {**meta, "marked_by": by}
        first = before.counted.total if before is not None else last.counted.total
        if self.step > 2 and abs(first - last.counted.total) > TOLERANCE * max(first, last.counted.total):
            meta["step_before_flops"] = first
        assembly = last.assembly(name, meta)
        if not allow_empty:
            check_not_empty(name, assembly.products, sum(assembly.updates.values()), True)
        return assembly.graph


class Recording:
    """The tape, the counter and the loop of one step."""

    def __init__(self, roots: dict, optimizers: list, lasting: set[int], shadows: Shadows | None = None):
        self.tape, self.counted, self._roots = _ScriptTape(lasting), Counted(), roots
        model = _Roots(roots)
        named = named_parameters(model, optimizers)
        self.held = hold(self.tape, named, dict(model.named_buffers()), list(optimizers), {})
        self._unseen = facts_of_state(model, {**self.held.named, **self.held.buffers})
        self._versions = Versions(named)
        self._optimizers = bool(optimizers)
        self.loop = Loop(self.tape, self.held.homes, self._versions, shadows)
        self._stack = ExitStack()
        if any(isinstance(module, torch.nn.RNNBase) for root in roots.values() for module in root.modules()):
            self._stack.enter_context(no_cpu_ops())
        self.tape.phase = "loop"
        self._stack.enter_context(self.counted)
        self._stack.enter_context(self.tape)

    def begin_update(self, optimizer, args, kwargs):
        """An optimizer begins its step."""
        return self.loop.before(optimizer, args, kwargs)

    def end_update(self, optimizer) -> None:
        """It has ended."""
        self.loop.after(optimizer)

    def enter(self, label: str) -> None:
        """The module ``label`` begins its forward pass."""
        self.tape.enter(label)

    def leave(self) -> None:
        """The module that began last has ended its forward pass."""
        if self.tape.inside:
            self.tape.leave()

    def lasting(self) -> set[int]:
        """The storages from outside the step that outlive it."""
        return self.tape.lasting()

    def loaded(self, batch) -> None:
        """A ``DataLoader`` has made a batch."""

    def stop(self) -> None:
        """Stop recording; a second call does nothing."""
        self._stack.close()
        if not self._optimizers:
            self._versions.stop()

    @contextmanager
    def paused(self):
        """While active, nothing is recorded."""
        self.tape.asleep += 1
        try:
            yield
        finally:
            self.tape.asleep -= 1

    def assembly(self, name: str, meta: dict):
        ran, tape = self.loop.ran(None), self.tape
        return assembled(
            tape, self.held, ran, name, {**self._unseen, **meta}, self.counted.total, self._versions.updates
        )


class _Roots(torch.nn.Module):
    """The modules of a script as one; a name may have dots, or be empty."""

    def __init__(self, roots: dict[str, torch.nn.Module]):
        super().__init__()
        self._modules.update(roots)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return self._named("named_parameters", remove_duplicate)

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        return self._named("named_buffers", remove_duplicate)

    def _named(self, method: str, remove_duplicate: bool):
        seen: set[int] = set()
        for prefix, root in self._modules.items():
            for label, tensor in getattr(root, method)(remove_duplicate=remove_duplicate):
                if not remove_duplicate or id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield ".".join(filter(None, (prefix, label))), tensor


class _ScriptTape(Tape):
    """A tape on which tensors from outside the step are inputs, unless their storages are among those that last."""

    def __init__(self, lasting: set[int]):
        super().__init__()
        self.asleep = 0
        self._lasting = lasting
        self._outside: dict[int, StorageWeakRef] = {}

    @property
    def inside(self) -> bool:
        return bool(self._layers)

    def lasting(self) -> set[int]:
        """The storages from outside that are still there. Their addresses are in use as long as this tape is kept."""
        return {key for key, reference in self._outside.items() if not reference.expired()}

    def _call(self, func, types, args, kwargs):
        if self.asleep:
            return func(*args, **kwargs)
        return super()._call(func, types, args, kwargs)

    def _constant(self, tensor) -> None:
        key = self._key(tensor)
        if tensor.numel() > 1:
            self._outside[key] = self._hold((tensor._values() if is_sparse(tensor) else tensor).untyped_storage())
        if tensor.numel() <= 1 or key in self._lasting:
            super()._constant(tensor)
        else:
            self.input(tensor, f"input.{sum(op.kind == 'input' for op in self.ops)}")


def _in_this_process(original):
    """In place of ``Process.start``: what a process would do, if it is a function of the script, is done at once."""

    def start(process):
        target = getattr(process, "_target", None)
        module = sys.modules.get(getattr(target, "__module__", None) or "")
        library = "site-packages" in (getattr(module, "__file__", None) or "")
        if target is None or library or module is None:
            return original(process)
        process.run()
        process._simdev_done = True
        return None

    return start


def _joined(original):
    def join(process, timeout=None):
        return None if getattr(process, "_simdev_done", False) else original(process, timeout)

    return join
