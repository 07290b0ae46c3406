"""Replace functions of other packages wherever a program binds them, and restore everything afterwards.

A function is bound at many places: in the module that defines it, in modules that imported it, in tables, in
attributes of layers, and in closures of decorators. A binding is found by the identity of its value. So it
does not matter who imported the function, when, or under which name.
"""
from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

MISSING = object()  # the value of a name that is not bound
# Attributes under which a stand-in keeps its original. A sweep must not replace these.
KEPT = ("__wrapped__", "__flashlin_original__")


class Replaced(NamedTuple):
    """One binding that was replaced.

    where: the module or layer.
    name: the name that is bound there.
    by: a description of the new value.
    """
    where: str
    name: str
    by: str


class Bindings:
    """The bindings that one patch has changed.

    ``replaced`` lists them, and ``left`` lists functions that were not replaced, with the reason; both are
    for the user.
    """

    def __init__(self) -> None:
        self.replaced: list[Replaced] = []
        self.left: dict[str, str] = {}
        self._swaps: dict[int, tuple[Any, Any, str]] = {}  # id of an original -> (original, stand-in, ``by``)
        # For each binding: a function that returns its owner, its name, the value before the patch, and the
        # value that the patch has bound. For an instance, the function is a weak reference, so that a patch
        # does not keep models alive; it returns None if the owner no longer exists.
        self._undo: list[tuple[Callable[[], Any], Any, Any, Any]] = []

    # --- methods for the patch of a package ---

    def swap(self, original: Any, stand_in: Any, by: str) -> None:
        """Replace ``original`` by ``stand_in`` in every later search for references.

        by: the description of the stand-in that the printed result of the patch shows.
        """
        self._swaps[id(original)] = original, stand_in, by
        self.stands_for(stand_in, original)

    def stands_for(self, stand_in: Any, original: Any) -> None:
        """Record that ``undo`` must replace ``stand_in`` by ``original``.

        ``undo`` also replaces it where a program has bound it while the patch was in force.
        """
        _STAND_INS[stand_in] = original, weakref.ref(self)

    def knows(self, value: Any) -> bool:
        """Return True if a value is a stand-in of this patch, or already has one.

        The caller then has nothing to do for this value.
        """
        return id(value) in self._swaps or (is_stand_in(value) and _STAND_INS[value][1]() is self)

    def stand(self, owner: Any, name: Any, stand_in: Any, by: str, where: str = "") -> None:
        """Bind a name of ``owner`` to ``stand_in``, with the present value as its original.

        by, where: as in ``put``.
        """
        self.stands_for(stand_in, bound(owner, name))
        self.put(owner, name, stand_in, by, where)

    def fill(self, module: ModuleType, name: str, function: Callable[..., Any], by: str) -> None:
        """Give a module a function that it could not import, if it bound None to the name instead."""
        if bound(module, name) is None:
            self.stand(module, name, named_like(function, None, module=module.__name__, name=name), by)

    def put(self, owner: Any, name: Any, value: Any, by: str, where: str = "") -> None:
        """Bind a name of ``owner`` to a value, and record the binding for ``undo``.

        owner: a module, class, instance, dict (``name`` is a key) or closure cell.
        by: a description of the value for ``replaced``.
        where: the name of the owner for ``replaced``; by default its own name.
        """
        owner = vars(owner) if isinstance(owner, ModuleType) else owner
        if (before := bound(owner, name)) is value:
            return
        bind(owner, name, value)
        lasts = isinstance(owner, (dict, type, CellType))
        self._undo.append(((lambda: owner) if lasts else weakref.ref(owner), name, before, value))
        self.replaced.append(Replaced(where or _where(owner), str(name), by))

    def sweep(self, modules: Iterable[ModuleType] | None = None) -> None:
        """Replace the originals wherever these modules refer to them.

        None means in all loaded modules and in all layer objects.
        """
        if self._swaps:
            for where, owner, name, value in places(modules):
                if swap := self._swaps.get(id(value)):
                    self.put(owner, name, *swap[1:], where)

    def undo(self) -> None:
        """Restore every binding, unless other code has bound a new value since."""
        for given, name, before, after in reversed(self._undo):
            if (owner := given()) is not None and bound(owner, name) is after:
                bind(owner, name, _as_now(before, self))
        self._undo.clear()
        self._swaps.clear()
        mine = {id(stand_in): original for stand_in, (original, home) in list(_STAND_INS.items())
                if home() is self}
        for _, owner, name, value in places(None) if mine else ():
            if id(value) in mine:  # a copy that the program made of a binding
                bind(owner, name, _as_now(mine[id(value)], self))


# Stand-in -> (its original, the ``Bindings`` of its patch).
_STAND_INS: weakref.WeakKeyDictionary[Any, tuple[Any, weakref.ref[Bindings]]] = weakref.WeakKeyDictionary()


def _as_now(value: Any, ending: Bindings) -> Any:
    """Return a value without the stand-ins of patches that have ended.

    Patches need not end in reverse order. So the value that a patch has recorded as the original may be a
    stand-in of another patch.

    ending: the patch that is being undone, which counts as ended.
    """
    while callable(value) and is_stand_in(value):
        original, home = _STAND_INS[value]
        if (patch := home()) is not None and patch is not ending and patch._undo:
            break
        value = original
    return value


def is_stand_in(value: Any) -> bool:
    """Return True if a value is a stand-in of any patch."""
    try:
        return value in _STAND_INS
    except TypeError:  # the value allows no weak reference, or has no hash
        return False


def bound(owner: Any, name: Any) -> Any:
    """Return the value that a module, class, instance, dict or closure cell binds to a name, or MISSING."""
    if isinstance(owner, CellType):
        try:
            return owner.cell_contents
        except ValueError:  # the cell is empty
            return MISSING
    return (owner if type(owner) is dict else vars(owner)).get(name, MISSING)


def bind(owner: Any, name: Any, value: Any) -> None:
    """Bind a name of a module, class, instance, dict or closure cell to a value; MISSING removes it."""
    if isinstance(owner, CellType):
        owner.cell_contents = value
    elif isinstance(owner, type):
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    else:  # for instances too, change the dict: setting an attribute of a layer may have side effects
        names = owner if type(owner) is dict else vars(owner)
        if value is MISSING:
            names.pop(name, None)
        else:
            names[name] = value


def places(modules: Iterable[ModuleType] | None) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (where, owner, name, value) of all bindings of modules, their tables and their closures.

    None means all modules except flashlin's, and all layers.
    """
    given = [module for name, module in list(sys.modules.items())
             if name.partition(".")[0] != "flashlin"] if modules is None else modules
    for module in given:
        names = getattr(module, "__dict__", None)  # an entry of sys.modules may be any object, or None
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
    """Yield every nn.Module of the process.

    A patch needs them because models that are already built keep functions in attributes.
    """
    kind = getattr(sys.modules.get("torch.nn"), "Module", None)
    if kind is not None:
        yield from [one for one in gc.get_objects() if issubclass(type(one), kind)]


def free_variables(function: Any) -> dict[str, Any]:
    """Return the closure variables of a function by name; an empty dict for any other object."""
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
    """Return a copy of ``function`` under the name of ``original``.

    pickle finds the copy by that name.

    module, name: the module and the name of the copy; by default those of ``original``.
    signature: the signature that inspect shows; by default that of ``function``.
    """
    copy = FunctionType(function.__code__, function.__globals__, name or original.__name__,
                        function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__module__ = module or original.__module__
    copy.__qualname__ = name or original.__qualname__
    copy.__doc__ = function.__doc__ or (original.__doc__ if callable(original) else None)
    if signature is not None:
        copy.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect
    return copy
