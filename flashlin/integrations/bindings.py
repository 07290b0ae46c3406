"""Functions of other packages replaced wherever a program binds them, and everything put back afterwards.

A function is bound in many places: in the module that defines it and those that imported it, in tables, in
layers that keep it as an attribute, in the closures of decorators. A place is found by the identity of what
stands there, so it does not matter who imported what, when, or under which name.
"""
from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

MISSING = object()  # stands where nothing is bound
# Stand-ins keep the function they stand for under these names: a sweep must leave them that.
KEPT = ("__wrapped__", "__flashlin_original__")


class Replaced(NamedTuple):
    """where: the module or layer. name: what is bound there. by: what stands there now."""
    where: str
    name: str
    by: str


class Undo(NamedTuple):
    """owner: gives it, or None where it is gone: a patch must not keep models alive."""
    owner: Callable[[], Any]
    name: Any
    before: Any
    after: Any


class Bindings:
    """What one patch has put where. ``replaced`` and ``left`` (with the reason) are for the user."""

    def __init__(self) -> None:
        self.replaced: list[Replaced] = []
        self.left: dict[str, str] = {}
        self._swaps: dict[int, tuple[Any, Any, str]] = {}  # id of the original -> it, its stand-in, its name
        self._undo: list[Undo] = []

    # --- what a package's patch says ---

    def swap(self, original: Any, stand_in: Any, by: str) -> None:
        """From the next sweep on ``stand_in`` is wherever ``original`` is."""
        self._swaps[id(original)] = original, stand_in, by
        self.stands_for(stand_in, original)

    def stands_for(self, stand_in: Any, original: Any) -> None:
        """What programs have copied of ``stand_in`` meanwhile becomes ``original`` in the end."""
        _ORIGINALS[stand_in] = original
        _HOME[stand_in] = weakref.ref(self)

    def knows(self, value: Any) -> bool:
        """Whether it has a stand-in here, or is one: nothing is left to be done for it."""
        return id(value) in self._swaps or (is_stand_in(value) and _HOME[value]() is self)

    def stand(self, owner: Any, name: Any, stand_in: Any, by: str, where: str = "") -> None:
        """``put`` of a ``stand_in`` for what is bound there now."""
        self.stands_for(stand_in, bound(owner, name))
        self.put(owner, name, stand_in, by, where)

    def fill(self, module: ModuleType, name: str, function: Callable[..., Any], by: str) -> None:
        """Give a module a function that it could not import, if it bound None to its name instead."""
        if bound(module, name) is None:
            self.stand(module, name, named_like(function, None, module=module.__name__, name=name), by)

    def put(self, owner: Any, name: Any, value: Any, by: str, where: str = "") -> None:
        """Bind ``name`` of a module, class, instance, dict (its entry) or closure's cell to ``value``."""
        owner = vars(owner) if isinstance(owner, ModuleType) else owner
        before = bound(owner, name)
        if before is value:
            return
        bind(owner, name, value)
        lasts = isinstance(owner, (dict, type, CellType))
        self._undo.append(Undo((lambda: owner) if lasts else weakref.ref(owner), name, before, value))
        self.replaced.append(Replaced(where or _where(owner), str(name), by))

    def sweep(self, modules: Iterable[ModuleType] | None = None) -> None:
        """Replace in these modules; None is in every module and every layer there is."""
        if self._swaps:
            for where, owner, name, value in places(modules):
                original, stand_in, by = self._swaps.get(id(value), (None, None, ""))
                if original is not None and original is value:
                    self.put(owner, name, stand_in, by, where)

    def undo(self) -> None:
        """Every place is as it was, but where another has bound something since."""
        for given, name, before, after in reversed(self._undo):
            owner = given()
            if owner is not None and bound(owner, name) is after:
                bind(owner, name, _as_now(before, self))
        self._undo.clear()
        self._swaps.clear()
        mine = {id(stand_in): original for stand_in, original in list(_ORIGINALS.items())
                if _HOME[stand_in]() is self}
        for _, owner, name, value in places(None) if mine else ():
            if id(value) in mine:  # copied meanwhile
                bind(owner, name, _as_now(mine[id(value)], self))

    def counts(self) -> Counter[str]:
        """How many places each stand-in has."""
        return Counter(one.by for one in self.replaced)


_ORIGINALS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_HOME: weakref.WeakKeyDictionary[Any, weakref.ref[Bindings]] = weakref.WeakKeyDictionary()


def _as_now(value: Any, ending: Bindings) -> Any:
    """A value as it is without patches that have ended: two that end in another order than they began have
    seen each other's stand-ins."""
    while callable(value) and is_stand_in(value):
        home = _HOME[value]()
        if home is not None and home is not ending and home._undo:
            break
        value = _ORIGINALS[value]
    return value


def is_stand_in(value: Any) -> bool:
    try:
        return value in _ORIGINALS
    except TypeError:  # it cannot be referred to weakly, or has no hash
        return False


def bound(owner: Any, name: Any) -> Any:
    if isinstance(owner, CellType):
        try:
            return owner.cell_contents
        except ValueError:  # empty
            return MISSING
    return (owner if type(owner) is dict else vars(owner)).get(name, MISSING)


def bind(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, CellType):
        owner.cell_contents = value
    elif isinstance(owner, type):
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    else:  # of an instance its dict, too: layers may do something else when an attribute is set
        names = owner if type(owner) is dict else vars(owner)
        if value is MISSING:
            names.pop(name, None)
        else:
            names[name] = value


def places(modules: Iterable[ModuleType] | None) -> Iterator[tuple[str, Any, Any, Any]]:
    """(where, owner, name, value) of what modules bind, with their tables and the closures of their
    functions; None is all modules but flashlin's, and all layers."""
    given = [module for name, module in list(sys.modules.items())
             if name.partition(".")[0] != "flashlin"] if modules is None else modules
    for module in given:
        names = getattr(module, "__dict__", None)  # a module may be anything, or None
        if type(names) is not dict:
            continue
        where = str(names.get("__name__", ""))
        for name, value in list(names.items()):
            yield where, names, name, value
            if type(value) is dict and not str(name).startswith("__"):
                table = f"{where}.{name}"
                for key, entry in list(value.items()):
                    yield table, value, key, entry
            elif type(value) is FunctionType and value.__closure__ and not is_stand_in(value):
                for variable, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
                    yield f"{where}.{name}", cell, variable, bound(cell, variable)
    if modules is None:
        for layer in layers():
            for name, value in list(vars(layer).items()):
                if name not in KEPT:
                    yield type(layer).__name__, layer, name, value


def layers() -> Iterator[Any]:
    """Every nn.Module of the process: models that were built before have functions in attributes."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return
    kind: type = torch.nn.Module
    yield from [one for one in gc.get_objects() if issubclass(type(one), kind)]


def free_variables(function: Any) -> dict[str, Any]:
    """What a function has of those around it, by name; nothing of what is no function."""
    if type(function) is not FunctionType or not function.__closure__:
        return {}
    return {name: bound(cell, name)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)}


def _where(owner: Any) -> str:
    if type(owner) is dict:
        return str(owner.get("__name__", ""))
    return str(getattr(owner, "__qualname__", type(owner).__name__))


def named_like(function: Callable[..., Any], original: Any, module: str = "", name: str = "",
               signature: Any = None) -> Any:
    """A copy of ``function`` under the name of what it stands for, so that pickle finds it by that name and
    whoever asks for its signature sees the one that callers know."""
    copy = FunctionType(function.__code__, function.__globals__, name or original.__name__,
                        function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__module__ = module or original.__module__
    copy.__qualname__ = name or original.__qualname__
    copy.__doc__ = function.__doc__ or (original.__doc__ if callable(original) else None)
    if signature is not None:
        copy.__signature__ = signature  # type: ignore[attr-defined]  # which inspect asks for
    return copy
