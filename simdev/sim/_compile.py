"""Makes machine code of kernels: of plain functions over NumPy arrays, by way of LLVM.

Numba compiles the same functions to code of the same speed, but takes some milliseconds for each line. Here next to
nothing has to be found out: every number is an int64 (smaller integers are widened when they are read and cut when they
are stored, a condition is 0 or 1), arrays are C-contiguous, indices are neither negative nor checked, and a named tuple
is a row of addresses in memory. What is not in this file a kernel cannot have; it is told by file and line when the
kernel is compiled. A kernel is still a Python function and gives the same results when Python runs it.

Each process translates a kernel anew, which takes milliseconds, and looks its machine code up by the translation; so no
code can be older than its source.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import hashlib
import inspect
import os
import platform
import textwrap
import threading
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

NUMBER = "number"
COMPARE = {ast.Lt: "slt", ast.LtE: "sle", ast.Gt: "sgt", ast.GtE: "sge", ast.Eq: "eq", ast.NotEq: "ne"}
BINARY = {
    ast.Add: "add nsw", ast.Sub: "sub nsw", ast.Mult: "mul nsw", ast.LShift: "shl", ast.RShift: "ashr",
    ast.BitAnd: "and", ast.BitOr: "or",
}  # fmt: skip
BUILTINS = {"range": range, "len": len, "min": min, "max": max}
HEAD = "declare i64 @llvm.smin.i64(i64, i64)\ndeclare i64 @llvm.smax.i64(i64, i64)\n"
# Memory of elements of one size is not that of another size: what the optimiser may conclude about aliases.
TAIL = '!0 = !{}\n!1 = !{!"memory"}\n' + "".join(
    f'!{bits} = !{{!{100 + bits}, !{100 + bits}, i64 0}}\n!{100 + bits} = !{{!"i{bits}", !1, i64 0}}\n'
    for bits in (8, 16, 32, 64)
)


class _Kind(NamedTuple):
    """The type of an array."""

    bits: int
    signed: bool
    ndim: int


class _Layout:
    """The type of a named tuple: its fields, and where each begins in its row of addresses and sizes. There is one of
    each, so that they are compared by identity."""

    def __init__(self, fields: tuple[str, ...], kinds: tuple, at: tuple[int, ...]):
        self.fields, self.kinds, self.at = fields, kinds, at


class _Array(NamedTuple):
    """An array in a translation: names of its address and sizes."""

    kind: _Kind
    pointer: str
    shape: tuple[str, ...]


class _Record(NamedTuple):
    """A named tuple in a translation."""

    layout: _Layout
    pointer: str


def held(cls):
    """A named tuple class whose objects keep their rows of addresses, for the next call. (A copy makes its own.)"""
    same = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(cls.__name__, (cls,), same | {"__reduce__": lambda self: (type(self), tuple(self))})


class kernel:  # noqa: N801 (a decorator)
    """A function that Python calls with arrays, whole numbers and named tuples of these. It is compiled on its first
    call, with all functions that it calls, and does not hold the interpreter's lock."""

    def __init__(self, function):
        self.function, self.__doc__ = function, function.__doc__
        self._ready, self._lock = {}, threading.Lock()

    def __call__(self, *arguments):
        words, rows = [], []
        kinds = tuple([_flatten(argument, words, rows) for argument in arguments])
        if kinds not in self._ready:
            with self._lock:
                self._ready[kinds] = self._ready.get(kinds) or _build(self.function, kinds)
        return self._ready[kinds](*words)


def _flatten(value, words: list[int], rows: list):
    """Append a value as an argument to ``words``; its kind. ``rows``: what has to live as long as ``words``."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iub" or not value.flags.c_contiguous:
            raise TypeError("kernels take C-contiguous arrays of whole numbers")
        words += (value.__array_interface__["data"][0], *value.shape)
        return _Kind(8 * value.itemsize, value.dtype.kind == "i", value.ndim)
    if not isinstance(value, tuple):
        words.append(int(value))
        return NUMBER
    found = getattr(value, "_row", None)
    if found is None:
        found = _row(value)
        rows.append(found)
        if hasattr(value, "__dict__"):
            value._row = found
    words.append(found[1])
    return found[0]


_LAYOUTS: dict = {}


def _row(value) -> tuple:
    """Layout, address and memory of a named tuple's row."""
    row: list[int] = []
    layout = _lay_out(value, row)
    memory = np.array(row, np.int64)
    return layout, memory.ctypes.data, memory


def _lay_out(value, row: list[int]) -> _Layout:
    kinds, at = [], []
    for item in value:
        at.append(len(row))
        kinds.append(_lay_out(item, row) if isinstance(item, tuple) else _flatten(item, row, []))
    key = value._fields, tuple(kinds), tuple(at)
    return _LAYOUTS.setdefault(key, _Layout(*key))


class _Module:
    """A kernel and the functions that it calls, in LLVM's language."""

    def __init__(self):
        self.texts: list[str] = []
        self.done: dict = {}

    def add(self, function, kinds: tuple) -> tuple[str, int]:
        """Name and number of results of a function for arguments of these kinds."""
        if (function, kinds) not in self.done:
            name = f"{function.__name__}.{len(self.done)}"
            self.done[function, kinds] = name, None
            translation = _Translation(self, function, kinds)
            self.texts.append(translation.text(name))
            self.done[function, kinds] = name, translation.n_results
        return self.done[function, kinds]


class _Translation:
    """One function. Names of Python are memory on the stack, which LLVM's optimiser turns into registers; those of
    arrays and tuples stand for what was last assigned to them above."""

    def __init__(self, module: _Module, function, kinds: tuple):
        lines, self.first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        self.module, self.function = module, function
        self.header, self.entry, self.lines = [], [], []
        self.names: dict = {}
        self.fields: dict = {}
        self.loops: list[tuple[str, str]] = []
        self.n_names, self.n_results, self.open = 0, None, True
        for argument, kind in zip(tree.args.args, kinds, strict=True):
            self.names[argument.arg] = self._parameter(argument.arg, kind)
        self._block(tree.body)
        if self.open and self.n_results:
            self._do("unreachable")  # behind a loop without end
        elif self.open:
            self._leave(tree, ())

    def text(self, name: str) -> str:
        """The function, after all that it calls; only a module's first is seen from outside."""
        head = f"{_result(self.n_results)} @{name}({', '.join(self.header)}) nounwind"
        body = "\n".join([*self.entry, "br label %.start", ".start:", *self.lines])
        return f"define {'' if name.endswith('.0') else 'internal '}{head} {{\n{body}\n}}\n"

    def _parameter(self, name: str, kind):
        if kind == NUMBER:
            self.header.append(f"i64 %{name}")
            slot = self._slot()
            self.entry.append(f"store i64 %{name}, ptr {slot}")
            return [slot]
        self.header.append(f"ptr %{name}")
        if isinstance(kind, _Layout):
            return _Record(kind, f"%{name}")
        shape = tuple(f"%{name}.{axis}" for axis in range(kind.ndim))
        self.header += [f"i64 {size}" for size in shape]
        return _Array(kind, f"%{name}", shape)

    def _refuse(self, node):
        place = f"{self.function.__code__.co_filename}:{self.first_line + node.lineno - 1}"
        raise NotImplementedError(f"{place}: a kernel cannot have {ast.unparse(node)!r}")

    # Instructions. A block that has been left takes no more of them until the next label.

    def _name(self) -> str:
        self.n_names += 1
        return f".{self.n_names}"

    def _labels(self, count: int) -> list[str]:
        return [self._name() for _ in range(count)]

    def _do(self, text: str) -> None:
        self.lines.append(text)

    def _get(self, text: str) -> str:
        name = "%" + self._name()
        self._do(f"{name} = {text}")
        return name

    def _slot(self) -> str:
        """Memory of a number."""
        name = "%" + self._name()
        self.entry.append(f"{name} = alloca i64")
        return name

    def _begin(self, label: str) -> None:
        self._jump(label)
        self._do(f"{label}:")
        self.open = True

    def _jump(self, label: str) -> None:
        if self.open:
            self._do(f"br label %{label}")
        self.open = False

    def _branch(self, truth: str, yes: str, no: str) -> None:
        self._do(f"br i1 {truth}, label %{yes}, label %{no}")
        self.open = False

    # Statements.

    def _block(self, statements: list) -> None:
        for statement in statements:
            if self.open:
                getattr(self, f"_{type(statement).__name__}", self._refuse)(statement)

    def _Pass(self, node) -> None:
        pass

    def _Expr(self, node) -> None:
        if not isinstance(node.value, ast.Constant):
            self.value(node.value)

    def _Return(self, node) -> None:
        self._leave(node, self._several(node.value) if node.value else ())

    def _leave(self, node, values: tuple) -> None:
        if self.n_results not in (None, len(values)) or not all(isinstance(value, str) for value in values):
            self._refuse(node)
        self.n_results = len(values)
        kind, whole = _result(len(values)), "undef"
        for index, value in enumerate(values):
            whole = self._get(f"insertvalue {kind} {whole}, i64 {value}, {index}")
        self._do(f"ret {kind} {whole}" if values else "ret void")
        self.open = False

    def _several(self, node) -> tuple:
        if isinstance(node, ast.Tuple):
            return tuple(self.value(item) for item in node.elts)
        value = self.value(node)
        return value if type(value) is tuple else (value,)

    def _Assign(self, node) -> None:
        if isinstance(node.targets[0], ast.Tuple):
            (targets,), values = node.targets, self._several(node.value)
            for target, value in zip(targets.elts, values, strict=True):
                self._assign(target, value)
        else:
            value = self.value(node.value)
            for target in node.targets:
                self._assign(target, value)

    def _AugAssign(self, node) -> None:
        operand = self.number(node.value)
        if isinstance(node.target, ast.Name):
            slot = self.names[node.target.id][0]
            value = self._operate(node, node.op, self._get(f"load i64, ptr {slot}"), operand)
            self._do(f"store i64 {value}, ptr {slot}")
            return
        array, pointer = self._place(node.target)
        self._write(array, pointer, self._operate(node, node.op, self._read(array, pointer), operand))

    def _assign(self, target, value) -> None:
        known = self.names.get(getattr(target, "id", None))
        if isinstance(target, ast.Subscript) and isinstance(value, str):
            array, pointer = self._place(target)
            if array.kind.ndim == 0:
                self._write(array, pointer, value)
            else:
                self._fill(array, value)
        elif isinstance(target, ast.Name) and isinstance(value, str) and isinstance(known, list | None):
            slot = self.names.setdefault(target.id, known or [self._slot()])
            self._do(f"store i64 {value}, ptr {slot[0]}")
        elif isinstance(target, ast.Name) and isinstance(value, _Array | _Record) and known is None:
            self.names[target.id] = value
        else:
            self._refuse(target)

    def _fill(self, array: _Array, value: str) -> None:
        def fill(at):
            self._write(array, self._address(array, [at]), value)

        self._count("0", array.shape[0], "1", self._labels(4), fill)

    def _count(self, first: str, stop: str, step: str, labels: list[str], body) -> None:
        """A loop over numbers; ``labels``: its head, body, next turn and end."""
        slot, (head, inside, again, end) = self._slot(), labels
        self._do(f"store i64 {first}, ptr {slot}")
        self._begin(head)
        at = self._get(f"load i64, ptr {slot}")
        self._branch(self._get(f"icmp {'sgt' if step[0] == '-' else 'slt'} i64 {at}, {stop}"), inside, end)
        self._begin(inside)
        body(at)
        self._begin(again)
        self._do(f"store i64 {self._get(f'add nsw i64 {at}, {step}')}, ptr {slot}")
        self._jump(head)
        self._begin(end)

    def _If(self, node) -> None:
        yes, no, end = self._labels(3)
        self._decide(node.test, yes, no)
        self._begin(yes)
        self._block(node.body)
        self._jump(end)
        self._begin(no)
        self._block(node.orelse)
        self._begin(end)

    def _While(self, node) -> None:
        head, inside, end = self._labels(3)
        self._begin(head)
        self._decide(node.test, inside, end)
        self._begin(inside)
        self._body(node, head, end)
        self._jump(head)
        self._begin(end)

    def _For(self, node) -> None:
        labels, array, first, step = self._labels(4), None, "0", "1"
        if isinstance(node.iter, ast.Call) and self._outside(node.iter.func) is range:
            stop, *others = map(self.number, node.iter.args)
            if others:
                first, stop, step = stop, others[0], [*others, "1"][1]
            if not step.lstrip("-").isdigit():
                self._refuse(node.iter)
        else:
            array = self.array(node.iter)
            stop = array.shape[0]

        def body(at):
            self._assign(node.target, at if array is None else self._read(array, self._address(array, [at])))
            self._body(node, labels[2], labels[3])

        self._count(first, stop, step, labels, body)

    def _body(self, node, again: str, end: str) -> None:
        if node.orelse:
            self._refuse(node)
        self.loops.append((again, end))
        self._block(node.body)
        self.loops.pop()

    def _Continue(self, node) -> None:
        self._jump(self.loops[-1][0])

    def _Break(self, node) -> None:
        self._jump(self.loops[-1][1])

    # Arrays.

    def _place(self, node) -> tuple[_Array, str]:
        """What a subscript stands for, an element being an array of no dimensions, and its address."""
        array = self.array(node.value)
        if isinstance(node.slice, ast.Slice):
            if array.kind.ndim > 1 or node.slice.step:
                self._refuse(node)
            first = self.number(node.slice.lower) if node.slice.lower else "0"
            stop = self.number(node.slice.upper) if node.slice.upper else array.shape[0]
            pointer = self._address(array, [first])
            return _Array(array.kind, pointer, (self._get(f"sub nsw i64 {stop}, {first}"),)), pointer
        indices = [self.number(item) for item in getattr(node.slice, "elts", [node.slice])]
        left = array.kind.ndim - len(indices)
        if left < 0 or any(index[0] == "-" for index in indices):
            self._refuse(node)
        pointer = self._address(array, indices)
        return _Array(array.kind._replace(ndim=left), pointer, array.shape[len(indices) :]), pointer

    def _address(self, array: _Array, indices: list[str]) -> str:
        at = indices[0]
        for axis in range(1, array.kind.ndim):
            at = self._get(f"mul nsw i64 {at}, {array.shape[axis]}")
            if axis < len(indices):
                at = self._get(f"add nsw i64 {at}, {indices[axis]}")
        return self._get(f"getelementptr inbounds i{array.kind.bits}, ptr {array.pointer}, i64 {at}")

    def _read(self, array: _Array, pointer: str) -> str:
        bits, signed, _ = array.kind
        value = self._get(f"load i{bits}, ptr {pointer}, !tbaa !{bits}")
        return value if bits == 64 else self._get(f"{'sext' if signed else 'zext'} i{bits} {value} to i64")

    def _write(self, array: _Array, pointer: str, value: str) -> None:
        bits = array.kind.bits
        if bits < 64:
            value = self._get(f"trunc i64 {value} to i{bits}")
        self._do(f"store i{bits} {value}, ptr {pointer}, !tbaa !{bits}")

    # Expressions.

    def number(self, node) -> str:
        value = self.value(node)
        return value if isinstance(value, str) else self._refuse(node)

    def array(self, node) -> _Array:
        value = self.value(node)
        return value if isinstance(value, _Array) else self._refuse(node)

    def value(self, node):
        """A number (a name or a figure), an :class:`_Array`, a :class:`_Record`, or a tuple of numbers."""
        outside = self._outside(node)
        if isinstance(outside, int | np.integer):
            return str(int(outside))
        return getattr(self, f"_value_{type(node).__name__}", self._refuse)(node)

    def _outside(self, node):
        """What is known without a run: a figure, or what a name outside of the function stands for."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id not in self.names:
            return self.function.__globals__.get(node.id, BUILTINS.get(node.id))
        if isinstance(node, ast.Attribute):
            return getattr(self._outside(node.value), node.attr, None)
        return None

    def _value_Name(self, node):
        found = self.names.get(node.id)
        if isinstance(found, list):
            return self._get(f"load i64, ptr {found[0]}")
        return self._refuse(node) if found is None else found

    def _value_Attribute(self, node):
        record = self.value(node.value)
        if not isinstance(record, _Record) or node.attr not in record.layout.fields:
            self._refuse(node)
        index = record.layout.fields.index(node.attr)
        kind, at = record.layout.kinds[index], record.layout.at[index]
        if isinstance(kind, _Layout):
            return _Record(kind, record.pointer)
        if kind == NUMBER:
            return self._field(record, at, "i64")
        shape = tuple(self._field(record, at + 1 + axis, "i64") for axis in range(kind.ndim))
        return _Array(kind, self._field(record, at, "ptr"), shape)

    def _field(self, record: _Record, at: int, kind: str) -> str:
        """Fields are read once, on entry."""
        key = record.pointer, at
        if key not in self.fields:
            place, self.fields[key] = "%" + self._name(), "%" + self._name()
            self.entry.append(f"{place} = getelementptr inbounds i64, ptr {record.pointer}, i64 {at}")
            self.entry.append(f"{self.fields[key]} = load {kind}, ptr {place}, !invariant.load !0")
        return self.fields[key]

    def _value_Subscript(self, node):
        array, pointer = self._place(node)
        return array if array.kind.ndim else self._read(array, pointer)

    def _value_BinOp(self, node) -> str:
        return self._operate(node, node.op, self.number(node.left), self.number(node.right))

    def _operate(self, node, op, left: str, right: str) -> str:
        if type(op) in BINARY:
            return self._get(f"{BINARY[type(op)]} i64 {left}, {right}")
        if not isinstance(op, ast.FloorDiv | ast.Mod):
            self._refuse(node)
        rest = self._get(f"srem i64 {left}, {right}")  # has the sign of `left`, in Python that of `right`
        apart = self._get(f"icmp slt i64 {self._get(f'xor i64 {rest}, {right}')}, 0")
        wrong = self._get(f"and i1 {apart}, {self._get(f'icmp ne i64 {rest}, 0')}")
        if isinstance(op, ast.Mod):
            return self._get(f"add i64 {rest}, {self._get(f'select i1 {wrong}, i64 {right}, i64 0')}")
        return self._get(f"sub i64 {self._get(f'sdiv i64 {left}, {right}')}, {self._get(f'zext i1 {wrong} to i64')}")

    def _value_UnaryOp(self, node) -> str:
        if isinstance(node.op, ast.Not):
            return self._truth(node)
        if not isinstance(node.op, ast.USub):
            self._refuse(node)
        value = self.number(node.operand)
        return f"-{value}" if value.isdigit() else self._get(f"sub nsw i64 0, {value}")

    def _value_IfExp(self, node) -> str:
        return self._choice(node.test, lambda: self.number(node.body), lambda: self.number(node.orelse))

    def _truth(self, node) -> str:
        return self._choice(node, lambda: "1", lambda: "0")

    _value_Compare = _value_BoolOp = _truth

    def _choice(self, test, first, second) -> str:
        slot, (yes, no, end) = self._slot(), self._labels(3)
        self._decide(test, yes, no)
        for label, value in ((yes, first), (no, second)):
            self._begin(label)
            self._do(f"store i64 {value()}, ptr {slot}")
            self._jump(end)
        self._begin(end)
        return self._get(f"load i64, ptr {slot}")

    def _decide(self, node, yes: str, no: str) -> None:
        """Jump to one of two labels. What Python would not look at is not looked at."""
        if isinstance(node, ast.BoolOp):
            for item in node.values[:-1]:
                (following,) = self._labels(1)
                self._decide(item, *((following, no) if isinstance(node.op, ast.And) else (yes, following)))
                self._begin(following)
            self._decide(node.values[-1], yes, no)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._decide(node.operand, no, yes)
        elif isinstance(node, ast.Compare):
            left = self.number(node.left)
            for op, right_node in zip(node.ops, node.comparators, strict=True):
                if type(op) not in COMPARE:
                    self._refuse(node)
                right = self.number(right_node)
                (following,) = self._labels(1)
                self._branch(self._get(f"icmp {COMPARE[type(op)]} i64 {left}, {right}"), following, no)
                self._begin(following)
                left = right
            self._jump(yes)
        else:
            self._branch(self._get(f"icmp ne i64 {self.number(node)}, 0"), yes, no)

    def _value_Call(self, node):
        called = self._outside(node.func)
        if node.keywords:
            self._refuse(node)
        if called is len:
            return self.array(node.args[0]).shape[0]
        if called in (min, max):
            name, (found, *others) = "smin" if called is min else "smax", map(self.number, node.args)
            for other in others:
                found = self._get(f"call i64 @llvm.{name}.i64(i64 {found}, i64 {other})")
            return found
        if called is np.uint32:
            return self._get(f"and i64 {self.number(node.args[0])}, {0xFFFFFFFF}")
        if called in (np.int64, np.uint64):
            return self.number(node.args[0])
        called = getattr(called, "py_func", called)  # of functions that Numba compiles as well
        if not inspect.isfunction(called):
            self._refuse(node)
        kinds, passed = [], []
        for value in map(self.value, node.args):
            if isinstance(value, str):
                kinds.append(NUMBER)
                passed.append(f"i64 {value}")
            else:
                kinds.append(value[0])
                passed += [f"ptr {value.pointer}", *(f"i64 {size}" for size in getattr(value, "shape", ()))]
        name, count = self.module.add(called, tuple(kinds))
        call = f"call {_result(count)} @{name}({', '.join(passed)})"
        if count == 0:
            self._do(call)
            return ()
        whole = self._get(call)
        found = tuple(self._get(f"extractvalue {_result(count)} {whole}, {index}") for index in range(count))
        return found if count > 1 else found[0]


def _result(count: int) -> str:
    """The type of several numbers together."""
    return f"{{{', '.join(['i64'] * count)}}}" if count else "void"


_ENGINES: list = []  # own the machine code


def _build(function, kinds: tuple):
    """A kernel for arguments of these kinds, as a C function of words."""
    module, machine = _Module(), _machine()
    name, count = module.add(function, kinds)
    text = HEAD + "".join(module.texts) + TAIL
    key = f"{text}{metadata.version('llvmlite')}{_llvm()[1]}"
    path = folder() / f"{function.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.o"
    try:
        code = path.read_bytes()
    except OSError:
        code = _compiled(text, machine)
        _keep(path, code)
    llvm = _llvm()[0]
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    words = [ctypes.c_int64] * sum(1 + getattr(kind, "ndim", 0) for kind in kinds)
    return ctypes.CFUNCTYPE(ctypes.c_int64 if count else None, *words)(engine.get_function_address(name))


def _compiled(text: str, machine) -> bytes:
    """Machine code."""
    llvm, _ = _llvm()
    module = llvm.parse_assembly(text)
    module.verify()
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    # Loops here take few turns: to unroll them gains nothing and takes a third of the time.
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = options.loop_interleaving = options.loop_vectorization = options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


@cache
def _llvm() -> tuple:
    """LLVM, and its options for this processor."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm, {
        "cpu": llvm.get_host_cpu_name(),
        "features": llvm.get_host_cpu_features().flatten(),
        "opt": 3,
        "reloc": "static" if platform.machine().lower() in ("x86_64", "amd64") else "default",
        "codemodel": "jitdefault",
        "jit": True,
    }


def _machine():
    """This processor; whoever makes code for it owns it."""
    llvm, options = _llvm()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(**options)


def folder() -> Path:
    """Where machine code is kept: where Numba keeps its own."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return Path(os.environ["NUMBA_CACHE_DIR"])
    beside = Path(__file__).parent
    if os.access(beside, os.W_OK):
        return beside / "__pycache__"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "simdev"


def _keep(path: Path, code: bytes) -> None:
    """Write a file in one step. Where that cannot be done the next process compiles again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        draft.write_bytes(code)
        draft.replace(path)
