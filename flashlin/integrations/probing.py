"""Find the kernels that a module or layer of another package would call, and the package of each.

transformers binds its kernels in three ways. They are recognised by the bindings, not by the version:

- a decorated global of a module (since 5.15),
- such a global inside an ``nn.Module`` (if the package ``kernels`` is installed),
- plain globals, and attributes of layers (4.57 to 5.14).

fla and mamba_ssm call plain globals.
"""
from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from flashlin.integrations.bindings import free_variables, is_stand_in
from flashlin.integrations.patching import found
from flashlin.integrations.transformers import DISPATCHES, HOMES, KERNEL, dispatching
from flashlin.kernels.families import PUBLIC

# Other names under which models of transformers bind kernels. In transformers 5.15 to 5.18 only the name
# identifies the kernel.
CALLED = {"torch_causal_conv1d_update": "causal_conv1d_update", "torch_causal_conv1d_fn": "causal_conv1d_fn",
          **{name: kernel for name, kernel in KERNEL.items() if name != kernel}}
TORCH, OURS, HUB = "torch", "flashlin", "hub kernels"
FOLDER = os.path.join(str(Path(__file__).parents[1]), "")


class Bound(NamedTuple):
    """A kernel that a module or layer calls.

    attribute: the name under which it is bound.
    kernel: the function's name in its package.
    implementation: the package of the bound function: ``torch`` (the model's own function), ``fla``,
        ``mamba_ssm``, ``causal_conv1d``, ``hub kernels`` or ``flashlin``.
    why: reason that it is the torch function; ``""`` for other implementations.
    """
    attribute: str
    kernel: str
    implementation: str
    why: str


def bound_in(module: ModuleType) -> list[Bound]:
    """Return the kernels that a module's globals are bound to."""
    return [one for attribute, value in list(vars(module).items())
            for one in _read(attribute, value, module.__name__)]


def called_by(layer: Any) -> list[Bound]:
    """Return the kernels that a layer's methods call: globals in their code, and attributes of the layer."""
    found: dict[str, Bound] = {}
    for kind in type(layer).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, member in vars(kind).items():
            if isinstance(member, staticmethod):  # a function that was assigned to the class
                for one in _read(name, member.__func__, kind.__module__):
                    found.setdefault(name, one)
            for method in _code(member) if name != "__init__" else ():
                for attribute in sorted(_names(method.__code__) & set(method.__globals__)):
                    for one in _read(attribute, method.__globals__[attribute], method.__module__):
                        found.setdefault(attribute, one)
    found |= {attribute: one for attribute, value in list(vars(layer).items())
              if isinstance(value, FunctionType) for one in _read(attribute, value, "")}
    return _slow(layer, list(found.values()))


def _code(member: Any) -> Iterator[FunctionType]:
    """Yield a method, and the functions that its decorators wrap.

    One decorator of transformers 5.15 does not set ``__wrapped__``, so closures are searched as well. If
    unsloth has rewritten the method, yield also the function outside the class that has its code.
    """
    method = inspect.unwrap(member) if isinstance(member, FunctionType) else None
    if isinstance(method, FunctionType):
        yield method
        for value in free_variables(method).values():
            yield from _code(value)
        if str(method.__module__).startswith("unsloth_compiled_module"):
            for name in method.__code__.co_names:
                if name.endswith("_forward"):
                    yield from _code(method.__globals__.get(name))


def _names(code: CodeType) -> set[str]:
    """Return the globals and attributes that a function names, including those of functions inside it."""
    return {*code.co_names, *(name for part in code.co_consts if isinstance(part, CodeType)
                              for name in _names(part))}


def _read(attribute: str, value: Any, where: str) -> Iterator[Bound]:
    """Yield the kernel that ``attribute`` of a module is bound to, if it is one."""
    cells, looked = free_variables(dispatching(value)), True
    if DISPATCHES <= cells.keys():
        own = getattr(dispatching(value), "__wrapped__", None)
        kernel = CALLED.get(attribute) or str(cells.get("func_name") or attribute)
        replaced = _ours(value) or (hasattr(value, "kernel_layer_name") and "forward" in vars(value))
        whose = (_whose(value) if replaced else TORCH if cells["implementation"] is own
                 else _whose(cells["implementation"]))
    elif (attribute in HOMES or (attribute in CALLED and _ours(value))) and (
            value is None or isinstance(value, FunctionType)):
        kernel, whose, looked = CALLED.get(attribute, attribute), _whose(value), False
    elif isinstance(value, FunctionType) and where.partition(".")[0] != "transformers":
        called, home = _origin(value)
        ours = called in PUBLIC and home.startswith(("flashlin.", "fla.", "mamba_ssm."))
        if ours or (home.startswith(("fla.ops.", "fla.modules.")) and ".utils" not in home):
            yield Bound(attribute, called, _whose(value), "")
        return
    else:
        return
    yield Bound(attribute, kernel, whose, _why(kernel, looked) if whose == TORCH else "")


def _origin(value: Any) -> tuple[str, str]:
    """Return (name, module) of the callable inside all wrappers of a value."""
    inner = inspect.unwrap(value)
    return str(getattr(inner, "__name__", "")), str(getattr(inner, "__module__", ""))


def _ours(value: Any) -> bool:
    """Return True if a function is flashlin's, under any name. An adapter has the name of its original."""
    method = getattr(value, "__func__", value)
    return is_stand_in(value) or (callable(method) and _here(inspect.unwrap(method, stop=_here)))


def _here(function: Any) -> bool:
    """Return True if the code of a function is in a file of flashlin."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(FOLDER)


def _whose(value: Any) -> str:
    """Return the package of a function, as in ``Bound.implementation``."""
    if value is None:
        return TORCH
    if hasattr(value, "kernel_layer_name"):
        return OURS if _ours(value) or _ours(vars(value).get("forward")) else HUB
    if _ours(value):
        return OURS
    root = _origin(value)[1].partition(".")[0]
    return TORCH if root == "transformers" else root


def _why(kernel: str, looked: bool) -> str:
    """Return the reason that a model uses its torch function for a kernel.

    looked: True if the modeling file has tried to import the package. Files of transformers up to 5.14 may
        not have tried, because they require a CUDA device and a version before the import.
    """
    home = HOMES.get(kernel, "")
    package = home.partition(".")[0]
    if not home:
        return "the model does not look for another function"
    if package not in sys.modules:
        return (f"{package} is not installed" if not found(package)
                else f"{package} is installed, but its import failed" if looked
                else f"{package} is installed, but the file requires a CUDA device and a working import")
    if (module := sys.modules.get(home)) is None:
        return f"{home} was not imported"
    if not hasattr(module, kernel):
        return f"{home} has no {kernel}"
    return f"{home}.{kernel} exists now, but the file did not look for it or was imported before it"


def _slow(layer: Any, calls: list[Bound]) -> list[Bound]:
    """Return the calls of a layer, marked as torch functions if a Mamba layer uses its slow path.

    Mamba layers of transformers up to 5.14 have two paths. They use the fast path only if all its functions
    were found and the weights are on CUDA. The slow path calls torch functions only.
    """
    module = sys.modules.get(next((kind.__module__ for kind in type(layer).__mro__
                                   if "cuda_kernels_forward" in vars(kind)), ""))
    if (fast := getattr(module, "is_fast_path_available", None)) is None:
        return calls
    weight = next(iter(layer.parameters()), None)
    why = ("" if fast else "is_fast_path_available is False: not all of its functions were found") or (
        "" if weight is not None and weight.device.type == "cuda" else "its weights are not on CUDA")
    return [one._replace(implementation=TORCH, why=why) if why and one.implementation != TORCH else one
            for one in calls]

