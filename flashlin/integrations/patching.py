"""``patch``, ``unpatch`` and ``patched``: flashlin in packages whose files cannot be edited.

A patch is explicit and valid for the whole process. Its replacements are counted, and all of them are undone
at the end. The patch of one package is a ``Patch``. It binds stand-ins where the package binds its functions
(``bindings.py``): in loaded modules and, by ``compat/import_hooks.py``, in modules that are imported later.
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
from typing import Any, cast

from flashlin.compat.import_hooks import watch
from flashlin.compat.locks import ThreadLock
from flashlin.compat.suggestions import need_one_of
from flashlin.integrations.bindings import Bindings, Replaced

CARRIERS = {"fla": "unsloth_zoo"}  # packages with a copy of another package, which they load under its name


class Patch:
    """The patch of one package.

    Subclasses define the replacements, and ``bindings`` records them.
    """
    package = ""
    distribution = ""  # pip's name of the package, if it must be installed
    watched: Sequence[str] = ()  # packages whose modules may define further names to replace when imported

    def __init__(self) -> None:
        self.bindings = Bindings()
        self.said: set[str] = set()  # models that have been warned about

    def begin(self) -> None:
        """Patch the modules that are loaded.

        Raises ImportError if the package must be installed and is not.
        """
        if self.distribution and not comes(self.package):
            raise ImportError(f"{self.package} is not installed: pip install {self.distribution}",
                              name=self.package)
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and self.reads(name):
                self.read(module)
        self.bindings.sweep()

    def arrived(self, module: ModuleType) -> None:
        """Patch a module of ``watched`` that has just been imported, or executed again."""
        if self.reads(module.__name__):
            self.read(module)
            self.bindings.sweep([module])

    def reads(self, name: str) -> bool:
        """Return True if ``read`` must be called with the module of this name."""
        return name.partition(".")[0] == self.package

    def read(self, module: ModuleType) -> None:
        """Register a stand-in for each function of this module that needs one."""

    def model(self, model: Any) -> None:
        """Patch the layers of a model that is already built."""

    def left(self) -> dict[str, str]:
        """Return the functions that keep their own code, with the reason."""
        return self.bindings.left

    def end(self) -> None:
        """Undo all replacements."""
        self.bindings.undo()


class Patched:
    """The present state of some patches; it grows while the program imports more.

    ``replaced`` has (where, name, by) of every binding with a stand-in, and ``left`` the functions that were
    not replaced, with the reason. ``str`` is short, and ``lines()`` has one line for each binding.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = tuple(patches)

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the names of the patched packages."""
        return tuple(one.package for one in self._patches)

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """Return all replaced bindings."""
        return tuple(place for one in self._patches for place in one.bindings.replaced)

    @property
    def left(self) -> dict[str, str]:
        """Return the functions that were not replaced, with the reason."""
        return {name: why for one in self._patches for name, why in one.left().items()}

    def lines(self) -> list[str]:
        """Return one line for each replaced binding."""
        return [f"{where}.{name}: {by}" for where, name, by in self.replaced]

    def __str__(self) -> str:
        return "\n".join(line for one in self._patches for line in _summary(one))

    __repr__ = __str__


def _summary(patch: Patch) -> Iterator[str]:
    """Yield the lines of the summary of one patch."""
    counts = Counter(one.by for one in patch.bindings.replaced)
    ours, guarded = ([name for name in counts if (name.partition(" ")[0] == "shield") is guard]
                     for guard in (False, True))
    yield (f"{patch.package}: {len(ours)} functions replaced in {sum(counts[name] for name in ours)} places"
           + (f" ({some(ours)})" if ours else ", more when its modules are imported"))
    if guarded:
        yield f"  {len(guarded)} of its own kernels are launched through flashlin.shield"
    whys: dict[str, list[str]] = {}
    for name, why in patch.left().items():
        whys.setdefault(why, []).append(name)
    for why, names in whys.items():
        yield f"  not replaced: {some(names)}: {why}"


def some(names: Sequence[str], shown: int = 8) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def patch(package: str, *more: str, model: Any = None) -> Patched:
    """Put flashlin into packages, for this process and until ``unpatch``.

    ``patch`` works in the same way before and after modules are imported and models are built. Return the
    replaced bindings, and the functions that were not replaced with the reasons; ``print`` shows a short
    form.

    Args:
        package: a name of ``PATCHES``. With ``triton``, ``flashlin.autotune`` replaces ``triton.autotune``,
            also for kernels that are already decorated. With ``fla``, every function that flashlin has runs
            through flashlin, and all other kernels are launched through ``flashlin.shield``. With
            ``mamba_ssm`` and ``causal_conv1d``, flashlin's functions replace theirs, also if the package or
            its extension is not installed. With ``transformers``, flashlin's functions are used wherever its
            models look for functions of the other three.
        more: further names of ``PATCHES``.
        model: a model that is already built; functions in attributes of its layers are replaced as well.

    Raises ValueError for a package without a patch. Raises ImportError if the package is not installed,
    except for ``mamba_ssm`` and ``causal_conv1d``.
    """
    packages = known((package, *more))
    with _changing:
        patches = _put_in(packages, model)
        _for_good.update(packages)
    return Patched(patches)


def unpatch(package: str, *more: str) -> None:
    """Undo ``patch``. Everything is restored once no ``patched`` block is left.

    A value that other code has bound in place of a stand-in stays. A package that is not patched stays as it
    is. Raises ValueError as ``patch`` does.
    """
    packages = known((package, *more))
    with _changing:
        _for_good.difference_update(packages)
        _take_out(packages)


@contextmanager
def patched(package: str, *more: str, model: Any = None) -> Iterator[Patched]:
    """Apply ``patch`` within a block, in all threads of the process, and yield its result.

    The last of these blocks to end restores everything, unless ``patch`` is also in force. Raises as
    ``patch`` does.
    """
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
    """Return the packages, each once. Raises ValueError for a package without a patch.

    given_by: the name of the argument or variable, for the error.
    """
    names = tuple(dict.fromkeys(packages))
    for name in names:
        if name not in PATCHES:
            raise ValueError(f"{given_by}: got {name!r}, {need_one_of(name, PATCHES)}")
    return names


def _put_in(packages: Sequence[str], model: Any) -> list[Patch]:
    """Apply the patches of all packages. If one raises, none of them stays."""
    try:
        for name in packages:
            if name not in _in_force:
                _in_force[name] = PATCHES[name]()
                _watch()  # before loaded modules are read, so that no import is missed
                _in_force[name].begin()
        if model is not None:
            for name in packages:
                _in_force[name].model(model)
    except BaseException:
        _take_out(packages)
        raise
    return [_in_force[name] for name in packages]


def _take_out(packages: Sequence[str]) -> None:
    """End the patches of these packages that no ``patch`` call or block needs any more."""
    unwanted = [name for name in PATCHES  # ended in reverse, see the comment at PATCHES
                if name in packages and name in _in_force and name not in _for_good and not _blocks[name]]
    if unwanted:
        with ExitStack() as last_first:  # every patch ends, even if another one raises
            last_first.callback(_go_on)
            for name in unwanted:
                last_first.callback(_in_force.pop(name).end)


def _go_on() -> None:
    """Sweep again for the patches that stay, since they may have stand-ins for the restored functions."""
    _watch()
    for one in _in_force.values():
        one.bindings.sweep()


def _watch() -> None:
    """Watch imports of the packages that the patches in force watch."""
    before = _unwatch.copy()
    watched = sorted({name for one in _in_force.values() for name in one.watched})
    _unwatch[:] = [watch(watched, arrived)] if watched else []  # before the old watch ends, to miss no import
    for end in before:
        end()


def arrived(module: ModuleType) -> None:
    """Pass a module that has been executed to the patches in force."""
    with _changing:
        for one in list(_in_force.values()):
            one.arrived(module)


def found(package: str) -> bool:
    """Return True if a package is imported or could be imported. Imports nothing."""
    return sys.modules.get(package) is not None or _spec(package) is not None


def comes(package: str) -> bool:
    """Return True if a package is ``found``, or another package has a copy of it to load under its name."""
    return found(package) or carried(package)


def carried(package: str) -> bool:
    """Return True if another installed package has a copy of this package."""
    carrier = _spec(CARRIERS.get(package, ""))
    folders = carrier.submodule_search_locations if carrier is not None else None
    return any(Path(folder, "_vendored", package, "__init__.py").is_file() for folder in folders or ())


def _spec(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _make(module: str, name: str) -> Patch:
    """Import a patch, and torch with it, and return an instance."""
    return cast(Patch, getattr(import_module(f"flashlin.integrations.{module}"), name)())


# transformers comes before the packages whose functions its models use. Patches end in reverse order. So these
# packages are restored first, and models then get their original functions.
PATCHES: dict[str, Callable[[], Patch]] = {"triton": partial(_make, "triton", "TritonPatch"),
                                           "fla": partial(_make, "fla", "FlaPatch"),
                                           "transformers": partial(_make, "transformers", "TransformersPatch"),
                                           "mamba_ssm": partial(_make, "mamba_ssm", "mamba_ssm_patch"),
                                           "causal_conv1d": partial(_make, "mamba_ssm", "causal_conv1d_patch")}
