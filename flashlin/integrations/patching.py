"""patch, unpatch, patched: flashlin put into packages that one cannot edit. Explicit, for the process,
counted, and everything is put back.

A package's patch is a ``Patch``: it puts stand-ins where the package binds its functions (``bindings.py``),
in loaded modules and, by ``compat/import_hooks.py``, in modules that are imported later.
"""
from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from flashlin.compat.import_hooks import watch
from flashlin.compat.locks import ThreadLock
from flashlin.compat.suggestions import need_one_of
from flashlin.integrations.bindings import Bindings, Replaced

CARRIERS = {"fla": "unsloth_zoo"}  # who may bring a copy of a package and load it under the package's name


class Patch:
    """What is done to one package. Subclasses say how; ``bindings`` knows what was done."""
    package = ""
    distribution = ""  # what pip calls the package, if it must be installed
    watched: Sequence[str] = ()  # packages whose modules may bring more when they are imported

    def __init__(self) -> None:
        self.bindings = Bindings()
        self.said: set[str] = set()  # models that have been warned about

    def begin(self) -> None:
        """Patch what is loaded. ImportError where there is nothing to patch, and never will be."""
        if self.distribution and not comes(self.package):
            raise ImportError(f"{self.package} is not installed: pip install {self.distribution}",
                              name=self.package)
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and self.reads(name):
                self.read(module)
        self.bindings.sweep()

    def arrived(self, module: ModuleType) -> None:
        """A module of ``watched`` has just been imported, or executed again."""
        if self.reads(module.__name__):
            self.read(module)
            self.bindings.sweep([module])

    def reads(self, name: str) -> bool:
        """Return True if ``read`` wants the module of this name."""
        return name.partition(".")[0] == self.package

    def read(self, module: ModuleType) -> None:
        """Note what takes the place of what this module defines."""

    def model(self, model: Any) -> None:
        """What can only be done for a model that is at hand."""

    def left(self) -> dict[str, str]:
        """What keeps its own code, and why."""
        return self.bindings.left

    def end(self) -> None:
        self.bindings.undo()


class Patched:
    """What has been patched, as it is now: it grows while the program imports more.

    ``replaced``: (where, name, by) of every place that was given a stand-in. ``left``: what was not replaced,
    and why. ``str`` is short; ``lines()`` is a line for each place.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = tuple(patches)

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(one.package for one in self._patches)

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        return tuple(place for one in self._patches for place in one.bindings.replaced)

    @property
    def left(self) -> dict[str, str]:
        return {name: why for one in self._patches for name, why in one.left().items()}

    def lines(self) -> list[str]:
        return [f"{where}.{name}: {by}" for where, name, by in self.replaced]

    def __str__(self) -> str:
        return "\n".join(line for one in self._patches for line in _summary(one))

    __repr__ = __str__


def _summary(patch: Patch) -> Iterator[str]:
    counts = patch.bindings.counts()
    ours, guarded = ([name for name in counts if (name.partition(" ")[0] == "shield") is guard]
                     for guard in (False, True))
    places = sum(counts[name] for name in ours)
    yield (f"{patch.package}: {len(ours)} functions replaced in {places} places"
           + (f" ({some(ours)})" if ours else ", more as it is imported"))
    if guarded:
        yield f"  {len(guarded)} kernels of its own are launched through flashlin.shield"
    whys: dict[str, list[str]] = {}
    for name, why in patch.left().items():
        whys.setdefault(why, []).append(name)
    for why, names in whys.items():
        yield f"  left: {some(names)}: {why}"


def some(names: Sequence[str], shown: int = 8) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def patch(package: str, *more: str, model: Any = None) -> Patched:
    """Put flashlin into packages, for this process and until ``unpatch``.

    Args:
        package, more: names of ``PATCHES``. ``triton``: ``triton.autotune`` becomes ``flashlin.autotune``,
            also of kernels decorated before. ``fla``: every function that flashlin has runs through it, the
            kernels of all others under ``flashlin.shield``. ``mamba_ssm``, ``causal_conv1d``: the same
            functions under their names, also where the package, or its extension, is not installed.
            ``transformers``: flashlin's functions wherever its models look for those of the other three.
        model: a model that has been built already; what its layers keep in attributes is replaced, too.

    It does not matter whether modules are imported and models built before or later. Returns what was
    replaced and what was left, and why; ``print`` shows it shortly.
    Raises ValueError for a package nobody has a patch for, ImportError where it is not installed (but for the
    last two).
    """
    packages = known((package, *more))
    with _changing:
        patches = _put_in(packages, model)
        _for_good.update(packages)
    return Patched(patches)


def unpatch(package: str, *more: str) -> None:
    """Take ``patch`` back: everything is as it was, once no ``patched`` block is left. What others have put
    in the place of a stand-in since then stays. Nothing happens where it is not patched. Raises ValueError as
    ``patch``."""
    packages = known((package, *more))
    with _changing:
        _for_good.difference_update(packages)
        _take_out(packages)


@contextmanager
def patched(package: str, *more: str, model: Any = None) -> Iterator[Patched]:
    """``patch`` for a while, in all threads of the process. The last of these blocks to end puts everything
    back, unless there is a ``patch`` beside them. Gives what ``patch`` returns. Raises as ``patch``."""
    packages = known((package, *more))
    with _changing:
        patches = _put_in(packages, model)
        _blocks.update(packages)
    try:
        yield Patched(patches)
    finally:
        with _changing:
            _blocks.subtract(packages)
            _take_out(packages)


_in_force: dict[str, Patch] = {}
_for_good: set[str] = set()
_blocks: Counter[str] = Counter()
_changing = ThreadLock(wait=5.0)  # a child forked during a change would inherit half a patch
_unwatch: list[Callable[[], None]] = []


def known(packages: Iterable[str], given_by: str = "package") -> tuple[str, ...]:
    """Return the packages, each once. Raises ValueError for one without a patch. given_by: its first word."""
    names = tuple(dict.fromkeys(packages))
    for name in names:
        if name not in PATCHES:
            raise ValueError(f"{given_by}: got {name!r}, {need_one_of(name, PATCHES)}")
    return names


def _put_in(packages: Sequence[str], model: Any) -> list[Patch]:
    """All of them or, with an error, none."""
    try:
        for name in packages:
            if name not in _in_force:
                _in_force[name] = PATCHES[name]()
                _watch()  # before what is loaded is looked at: nothing that is imported meanwhile is missed
                _in_force[name].begin()
        if model is not None:
            for name in packages:
                _in_force[name].model(model)
    except BaseException:
        _take_out(packages)
        raise
    return [_in_force[name] for name in packages]


def _take_out(packages: Sequence[str]) -> None:
    """Those that nobody wants any more."""
    unwanted = [name for name in PATCHES  # in their order, the last one first: see there
                if name in packages and name in _in_force and name not in _for_good and not _blocks[name]]
    if unwanted:
        with ExitStack() as last_first:  # all of it, whatever one of them raises
            last_first.callback(_go_on)
            for name in unwanted:
                last_first.callback(_in_force.pop(name).end)


def _go_on() -> None:
    """The patches that are left: what came back may be what another one stands in for."""
    _watch()
    for one in _in_force.values():
        one.bindings.sweep()


def _watch() -> None:
    before = _unwatch.copy()
    watched = sorted({name for one in _in_force.values() for name in one.watched})
    _unwatch[:] = [watch(watched, arrived)] if watched else []  # before the last one ends: nothing is missed
    for end in before:
        end()


def arrived(module: ModuleType) -> None:
    """Tell the patches in force of a module that has been executed."""
    with _changing:
        for one in list(_in_force.values()):
            one.arrived(module)


def found(package: str) -> bool:
    """Whether a package is imported or could be, from somewhere; imports nothing."""
    return sys.modules.get(package) is not None or _spec(package) is not None


def comes(package: str) -> bool:
    """Whether a package is ``found``, or another that is found has a copy of it to load under its name."""
    return found(package) or carried(package)


def carried(package: str) -> bool:
    """Whether another package has a copy of it."""
    carrier = _spec(CARRIERS.get(package, ""))
    folders = carrier.submodule_search_locations if carrier is not None else None
    return any(Path(folder, "_vendored", package, "__init__.py").is_file() for folder in folders or ())


def _spec(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _make(module: str, name: str) -> Patch:
    """Import a patch, with torch, and make it."""
    made: Patch = getattr(import_module(f"flashlin.integrations.{module}"), name)()
    return made


# transformers before the packages of which its models take functions: those end first, and what models hold
# afterwards is asked of what is there then.
PATCHES: dict[str, Callable[[], Patch]] = {"triton": partial(_make, "triton", "TritonPatch"),
                                           "fla": partial(_make, "fla", "FlaPatch"),
                                           "transformers": partial(_make, "transformers", "TransformersPatch"),
                                           "mamba_ssm": partial(_make, "mamba_ssm", "mamba_ssm_patch"),
                                           "causal_conv1d": partial(_make, "mamba_ssm", "causal_conv1d_patch")}
