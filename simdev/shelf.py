"""Shelves: what is registered under a name, and how an entry such as ``gdp[groups=8]`` finds it.

Placers, planners, workloads and parallel models each have one :class:`Shelf`. An entry names

* ``name``, ``name@version`` or ``name[parameter=value,...]`` of what ships with simdev, or of a package that has an
  entry point in the shelf's group;
* the same in a file of the user, which is executed: ``my_placers.py:name[parameter=value]``.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from simdev.errors import InvalidInput, UnknownName, quoted
from simdev.user_file import SPLIT, import_file, sentence

_ID = re.compile(r"(?P<name>(?:.+\.py:)?[^@\[\]]*)(@(?P<version>\d{1,9}))?(\[(?P<params>[^\[\]]*)\])?")
LONGEST = 255  # bytes of a file's name


class Registered(Protocol):
    """What every entry of a shelf has. ``function.__module__`` says where the entry comes from."""

    @property
    def name(self) -> str: ...

    @property
    def function(self) -> Callable[..., Any]: ...


Entry = TypeVar("Entry", bound=Registered)


class Shelf(dict[str, Entry], Generic[Entry]):
    """The entries of one kind by name: those that are registered so far. :meth:`load` registers all that there are.

    ``what`` is the word for an entry in messages, ``package`` the folder of simdev that holds the shipped ones, and
    ``decorator`` what registers one. The entry points of other packages are in the group ``group``.
    """

    def __init__(self, what: str, package: str, group: str, decorator: str):
        super().__init__()
        self.what, self.package, self.group, self.decorator = what, package, group, decorator
        self._loaded = False

    def add(self, entry: Entry) -> None:
        """Register an entry. Raises :class:`InvalidInput` if another module has registered the name.

        What a file of the user registers while the file is executed does not get on the shelf.
        """
        module = entry.function.__module__
        target = _shelf_of_file(self, module)
        known = target.get(entry.name)
        if known is not None and known.function.__module__ != module:
            raise InvalidInput(f"{self.what} {entry.name!r} is registered twice", source=module)
        target[entry.name] = entry

    def load(self) -> dict[str, Entry]:
        """Every entry, by name, in alphabetical order. An entry point that fails is left out with a warning."""
        _import_package(f"simdev.{self.package}")
        if not self._loaded:
            self._loaded = True
            for point in entry_points(group=self.group):
                try:
                    point.load()
                except Exception as error:  # one package of others must not stop simdev
                    warnings.warn(f"entry point {self.group}: {point.name}: {sentence(error)}", stacklevel=2)
        return dict(sorted(self.items()))

    def around(self, name: str) -> tuple[str, Mapping[str, Entry], str | None]:
        """The entries among which a name is looked up: the name, the entries and the file, None for the shelf itself.

        Raises :class:`InvalidInput` if the file cannot be executed or registers nothing of this kind.
        """
        path, colon, inside = name.rpartition(SPLIT)
        if not colon:
            return name, self.load(), None
        path = f"{path}.py"
        return inside, self._of_file(path), path

    def names(self, path: str) -> list[str]:
        """The names that a file registers, sorted. The file is executed; errors as of :meth:`around`."""
        return sorted(self._of_file(path))

    def _of_file(self, path: str) -> dict[str, Entry]:
        entries = _entries_of_file(path).get(id(self), {})
        if not entries:
            raise InvalidInput(f"registers no {self.what}; put @{self.decorator} over its function", source=path)
        return entries

    def registers(self, name: str) -> bool:
        """Whether the file of ``FILE.py:NAME`` registers anything of this kind. The file is executed."""
        return bool(self.in_file(f"{name.rpartition(SPLIT)[0]}.py"))

    def in_file(self, path: str) -> dict[str, Entry]:
        """What a file of the user registers of this kind, by name. The file is executed."""
        return dict(_entries_of_file(path).get(id(self), {}))

    def find(self, entry: str) -> tuple[Entry, dict[str, Any]]:
        """What an id names, and the parameters in it. Raises :class:`UnknownName` or :class:`InvalidInput`.

        Parameters are checked against the entry's ``defaults``, a version against its ``version``.
        """
        name, version, params = parse_id(entry)
        name, entries, path = self.around(name)
        if name not in entries:
            raise UnknownName(self.what, name, entries, source=path)
        found = entries[name]
        refuse_version(self.what, name, version, getattr(found, "version", None))
        check_parameters(f"{self.what} {name}", getattr(found, "defaults", {}), params)
        return found, params


def parse_id(entry: str) -> tuple[str, int | None, dict[str, Any]]:
    """Split ``name@version[param=value,...]``; values are read as JSON where they are JSON, else as text. The name may
    begin with a file: ``my_placers.py:name``."""
    match = _ID.fullmatch(entry.strip())
    name = match["name"].strip() if match else ""
    if not match or not name or name.endswith(SPLIT):
        form = "NAME or NAME[parameter=value,...], or a file before it: my_file.py:NAME"
        raise InvalidInput(f"{entry!r} is not an id: expected {form}")
    if any(len(part.encode()) > LONGEST for part in name.split("/")):  # it may be looked for on the disk
        raise InvalidInput(f"{quoted(name)} is longer than a name may be: {LONGEST} bytes")
    params: dict[str, Any] = {}
    for part in filter(None, (match["params"] or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"{part!r} is not param=value", source=entry)
        try:
            params[key.strip()] = json.loads(value)
        except ValueError:
            params[key.strip()] = value.strip()
    return name, int(match["version"]) if match["version"] else None, params


def refuse_version(what: str, name: str, version: int | None, own: int | None) -> None:
    """Raise :class:`InvalidInput` if an id wants another version than the one that is here."""
    if version is not None and version != own:
        here = f"this is version {own}" if own is not None else f"a {what} has no version"
        raise InvalidInput(f"version {version} is not here; {here}", source=f"{what} {name}")


def check_parameters(source: str, defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Raise :class:`UnknownName` for a parameter that ``defaults`` lack, :class:`InvalidInput` for a value that is not
    of its default's type. A whole number may stand for a number; a default of None takes any value."""
    for key, value in changes.items():
        if key not in defaults:
            raise UnknownName("parameter", key, defaults, source=source)
        default = defaults[key]
        right = isinstance(value, (int, float) if isinstance(default, float) else type(default))
        if default is not None and (not right or isinstance(value, bool) != isinstance(default, bool)):
            wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(type(default), "a name")
            raise InvalidInput(f"expected {wanted}, got {value!r}", source=source, field=key)


def with_sizes(source: str, defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults`` with ``changes``, as the sizes of a model: as :func:`check_parameters`, and no number is negative,
    no count zero unless its default is, and none has more than 40 bits."""
    check_parameters(source, defaults, changes)
    chosen = dict(defaults)
    for key, value in changes.items():
        default = defaults[key]
        least = 1 if isinstance(default, int) and default else 0
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not least <= value < 1 << 40:
            wanted = f"from {least} on" if not value >= least else f"below {1 << 40:,}"
            raise InvalidInput(f"expected a number {wanted}, got {value}", source=source, field=key)
        chosen[key] = float(value) if isinstance(default, float) else value
    return chosen


@cache
def _import_package(package: str) -> None:
    """Import every file of a package and of its folders; entries register themselves."""
    folder = importlib.import_module(package)
    for module in pkgutil.walk_packages(folder.__path__, f"{package}."):
        if not module.name.rpartition(".")[2].startswith("_"):  # helpers are for those who import them
            importlib.import_module(module.name)


# While a file of the user is executed: its folder, and the entries that it registers, by shelf.
_executed: ContextVar[tuple[Path, dict[int, dict[str, Any]]] | None] = ContextVar("_executed", default=None)
_files: dict[Path, tuple[dict[str, tuple[Path, bytes | None]], dict[int, dict[str, Any]]]] = {}


def _shelf_of_file(shelf: Shelf[Any], module: str) -> dict[str, Any]:
    """Where an entry goes: to the entries of the user's file if its module is that file or lies beside it, else on the
    shelf."""
    executed = _executed.get()
    if executed is None or not _is_beside(module, executed[0]):
        return shelf
    return executed[1].setdefault(id(shelf), {})


def _entries_of_file(path: str) -> dict[int, dict[str, Any]]:
    """What a file registers, by shelf. It is executed again if it, or a file beside it that it imports, has changed."""
    file = Path(path).resolve()
    modules, entries = _files.get(file, ({}, {}))
    if modules and all(_content(source) == text for source, text in modules.values()):
        return entries
    for name in modules:
        sys.modules.pop(name, None)
    before, entries = set(sys.modules), {}
    token = _executed.set((file.parent, entries))
    try:
        import_file(Path(path))
    finally:
        _executed.reset(token)
    own = [name for name in sys.modules.keys() - before if _is_beside(name, file.parent)]
    sources = {name: Path(str(sys.modules[name].__file__)) for name in own}
    _files[file] = {name: (source, _content(source)) for name, source in sources.items()}, entries
    return entries


def _is_beside(module: str, folder: Path) -> bool:
    """Whether a loaded module is the user's own: its file is in ``folder``, but not in simdev or in an installed
    package."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or module.startswith("simdev."):
        return False
    return Path(path).is_relative_to(folder) and "site-packages" not in Path(path).relative_to(folder).parts


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
