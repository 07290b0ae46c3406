"""Record the kernels that a call would launch on another GPU, as plain data.

Inside ``recording(target)`` every call is planned for that target, and nothing is launched. So public
functions run on CPU tensors, forward and backward; their results are uninitialised memory.

A launch is recorded as the facts that decide which code Triton's JIT compiles. Two launches that share one
compiled kernel are one ``Recorded``.
"""
from __future__ import annotations

import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashlin.compat import launch as door
from flashlin.compat import target as machine
from flashlin.compat.target import Target
from flashlin.guards.plan_types import Launch
from flashlin.testing.source_text import normalised

Constant = bool | int | float | str | None

# Triton's names of torch's dtypes.
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
         torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
         torch.int64: "i64"}


class Recorded(NamedTuple):
    """One kernel as the JIT specialises it.

    module, kernel: names that locate the kernel.
    arguments: the run-time arguments in order, each with its type: ``*bf16`` for a pointer, ``i32``,
        ``fp32``, or None for None. ``:16`` after it means divisible by 16, ``:1`` means equal to 1; the JIT
        compiles separate kernels for these.
    constants: the constexpr arguments, including the tile.
    shared: bytes of shared memory, the plan's upper estimate.
    traits: the plan's traits, sorted.
    config: ``Launch.config``.
    """
    module: str
    kernel: str
    arguments: tuple[tuple[str, str | None], ...]
    constants: tuple[tuple[str, Constant], ...]
    num_warps: int
    num_stages: int
    shared: int
    traits: tuple[str, ...]
    config: str = ""

    def __str__(self) -> str:
        constants = " ".join(f"{name}={value}" for name, value in self.constants)
        return (f"{self.kernel}({', '.join(str(kind) for _, kind in self.arguments)}) {constants} "
                f"warps={self.num_warps} stages={self.num_stages}")

    def fields(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        return {**self._asdict(), "arguments": dict(self.arguments), "constants": dict(self.constants)}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Recorded:
        """Return the launch with these fields, which may have been read from JSON."""
        return cls(**{**fields, "arguments": tuple(fields["arguments"].items()),
                      "constants": tuple(fields["constants"].items()), "traits": tuple(fields["traits"])})


@contextmanager
def recording(target: Target) -> Iterator[list[Recorded]]:
    """Plan every call in the block for ``target`` and record its launches instead of making them.

    Yields the list of recorded kernels. Each kernel is in it once, in the order of the first launches.
    """
    launches: list[Recorded] = []

    def keep(launch: Launch, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        seen = recorded(launch, kernel, arguments)
        if seen not in launches:
            launches.append(seen)
    machine.pretend(target)
    door.replace_starter(keep)
    try:
        yield launches
    finally:
        door.replace_starter(None)
        machine.pretend(None)


def recorded(launch: Launch, kernel: Any, arguments: dict[str, Any]) -> Recorded:
    """Return the facts of a launch that decide its compiled code: argument types, constants, warps, stages.

    arguments: values by name, as passed to the kernel.
    """
    # Under TRITON_INTERPRET a kernel is an InterpretedFunction, which keeps the options of the decorator in
    # kwargs.
    decorator = getattr(kernel, "kwargs", {})
    left_alone = getattr(kernel, "do_not_specialize", None) or decorator.get("do_not_specialize") or ()
    constexprs = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
    values = zip(kernel.arg_names, door.in_order(launch, kernel, arguments), strict=True)
    kinds = tuple((name, specialised(value, name not in left_alone))
                  for name, value in values if name not in constexprs)
    given = (*arguments.items(), *launch.tile)
    constants = tuple((name, value) for name, value in given if name in constexprs)
    return Recorded(kernel.fn.__module__, kernel.fn.__name__, kinds, constants, launch.num_warps,
                    launch.num_stages, launch.shared, tuple(sorted(launch.traits)), launch.config)


def specialised(value: Any, specialise: bool = True) -> str | None:
    """Return the type that the JIT gives to an argument, such as ``*bf16:16`` or ``i32``.

    specialise: False for arguments in ``do_not_specialize``, whose value does not matter.
    """
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}" + (":16" if specialise and value.data_ptr() % 16 == 0 else "")
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        kind = "i32" if -2**31 <= value < 2**31 else "i64" if value < 2**63 else "u64"
        return kind + ((":1" if value == 1 else ":16" if value % 16 == 0 else "") if specialise else "")
    raise TypeError(f"argument: got {type(value).__name__}, need a tensor, a number, a bool or None")


def source_hash(module: str, kernel: str) -> str:
    """Return the module of a kernel and a hash of its source, as ``module:hash``.

    A record is current while this stays the same. Comments, docstrings and layout do not change it.
    """
    return f"{module}:{hashlib.sha256(source_of(module, kernel).encode()).hexdigest()[:12]}"


def is_current(source: str, kernel: str) -> bool:
    """Return True if ``source`` is still the ``source_hash`` of the kernel."""
    module = source.partition(":")[0]
    try:
        return bool(module) and source_hash(module, kernel) == source
    except (ImportError, AttributeError):  # the kernel no longer exists
        return False


@lru_cache(maxsize=256)
def source_of(module: str, kernel: str) -> str:
    """Return the normalised code of a kernel, of the jitted functions it calls and of their constants.

    Each function or constant is one line, see ``normalised``.
    """
    waiting, known = [getattr(importlib.import_module(module), kernel)], dict[str, str]()
    while waiting:
        function = waiting.pop().fn
        home = function.__module__
        if f"{home}.{function.__qualname__}" not in known:
            used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
            jitted = {name: one for name, one in used.items() if inspect.isfunction(getattr(one, "fn", None))}
            waiting += jitted.values()
            parameters = {name: tuple(inspect.signature(one.fn).parameters) for name, one in jitted.items()}
            source = textwrap.dedent(inspect.getsource(function))
            known[f"{home}.{function.__qualname__}"] = normalised(source, parameters)
            known |= {f"{home}.{name}": f"{name} = {one.value!r}"
                      for name, one in used.items() if type(one).__name__ == "constexpr"}
    return "\n".join(sorted(known.values()))
