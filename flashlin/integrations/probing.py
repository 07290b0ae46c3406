"""What a module or a layer of another package would call now: for each kernel whose function it is, and why.

transformers binds its kernels in three ways, told apart by what is there and not by version: a decorated
module global (from 5.15 on), that global inside an ``nn.Module`` (where ``kernels`` is installed), and plain
globals and attributes of layers (4.57 to 5.14). fla and mamba_ssm call plain globals.
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

# Under which other names models of transformers bind them; 5.15 to 5.18 say nowhere else what they are.
CALLED = {"torch_causal_conv1d_update": "causal_conv1d_update", "torch_causal_conv1d_fn": "causal_conv1d_fn",
          **{name: kernel for name, kernel in KERNEL.items() if name != kernel}}
TORCH, OURS, HUB = "torch", "flashlin", "hub kernels"
FOLDER = os.path.join(str(Path(__file__).parents[1]), "")


class Bound(NamedTuple):
    """attribute: the name under which it is bound. kernel: the function that is meant, by its package's name.
    implementation: whose it is: ``torch`` (the model's own), ``fla``, ``mamba_ssm``, ``causal_conv1d``,
    ``hub kernels``, ``flashlin``. why: of torch, why it is no kernel, else ``""``."""
    attribute: str
    kernel: str
    implementation: str
    why: str


def bound_in(module: ModuleType) -> list[Bound]:
    """The kernels that a module's globals are bound to."""
    return [one for attribute, value in list(vars(module).items())
            for one in _read(attribute, value, module.__name__)]


def called_by(layer: Any) -> list[Bound]:
    """The kernels that a layer's methods call: globals that their code names, and the layer's own
    attributes."""
    found: dict[str, Bound] = {}
    for kind in type(layer).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, member in vars(kind).items():
            if isinstance(member, staticmethod):  # a function that the class has been given
                for one in _read(name, member.__func__, kind.__module__):
                    found.setdefault(name, one)
            for method in _code(member) if name != "__init__" else ():
                for attribute in sorted(_names(method.__code__) & set(method.__globals__)):
                    for one in _read(attribute, method.__globals__[attribute], method.__module__):
                        found.setdefault(attribute, one)
    for attribute, value in list(vars(layer).items()):
        if isinstance(value, FunctionType):
            for one in _read(attribute, value, ""):
                found[attribute] = one
    return _slow(layer, list(found.values()))


def _code(member: Any) -> Iterator[FunctionType]:
    """A method, or what its decorators wrap: 5.15 has one that does not say so. Where unsloth has written it
    anew, also the function beside the class into which it has put the method's code."""
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
    """The globals and attributes that a function names, those inside it included."""
    return {*code.co_names, *(name for part in code.co_consts if isinstance(part, CodeType)
                              for name in _names(part))}


def _read(attribute: str, value: Any, where: str) -> Iterator[Bound]:
    """What ``attribute`` of a module is, if it is a kernel."""
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
    """The name and the module of what a function wraps, which may be anything that can be called."""
    inner = inspect.unwrap(value)
    return str(getattr(inner, "__name__", "")), str(getattr(inner, "__module__", ""))


def _ours(value: Any) -> bool:
    """Whether a function is flashlin's, whatever name it has been given: adapters have those of what they
    stand for, and may keep that."""
    method = getattr(value, "__func__", value)
    return is_stand_in(value) or (callable(method) and _here(inspect.unwrap(method, stop=_here)))


def _here(function: Any) -> bool:
    """Whether its code stands in flashlin."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(FOLDER)


def _whose(value: Any) -> str:
    if value is None:
        return TORCH
    if hasattr(value, "kernel_layer_name"):
        return OURS if _ours(value) or _ours(vars(value).get("forward")) else HUB
    if _ours(value):
        return OURS
    root = _origin(value)[1].partition(".")[0]
    return TORCH if root == "transformers" else root


def _why(kernel: str, looked: bool) -> str:
    """Why a model has only its torch function for this kernel. looked: whether its file has tried to import
    the package; up to 5.14 that asks for a CUDA device and a version first."""
    home = HOMES.get(kernel, "")
    package = home.partition(".")[0]
    if not home:
        return "the model looks for no other"
    if package not in sys.modules:
        return (f"{package} is not installed" if not found(package)
                else f"{package} is installed, but its import failed" if looked
                else f"{package} is installed, but the file wants a CUDA device and an import that works")
    module = sys.modules.get(home)
    if module is None:
        return f"{home} was not imported"
    if not hasattr(module, kernel):
        return f"{home} has no {kernel}"
    return f"{home}.{kernel} is there now, but the file did not look there or was imported before"


def _slow(layer: Any, calls: list[Bound]) -> list[Bound]:
    """Mamba layers of transformers up to 5.14 have two ways, and take the fast one only where all its
    functions are there and the weights are on CUDA."""
    module = sys.modules.get(next((kind.__module__ for kind in type(layer).__mro__
                                   if "cuda_kernels_forward" in vars(kind)), ""))
    fast = getattr(module, "is_fast_path_available", None)
    if fast is None:
        return calls
    weight = next(iter(layer.parameters()), None)
    why = ("" if fast else "is_fast_path_available is False: not all of its functions were found") or (
        "" if weight is not None and weight.device.type == "cuda" else "its weights are not on CUDA")
    return [one._replace(implementation=TORCH, why=why) if why and one.implementation != TORCH else one
            for one in calls]

