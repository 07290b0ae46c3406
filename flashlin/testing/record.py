"""Which kernels a call would start on a machine one does not own, as plain data.

Inside ``recording(target)`` every call is planned for that target and nothing is started, so the public entry
points, forward and backward, run on CPU tensors (their results hold whatever the memory held). What is kept
of a launch is what Triton's JIT compiles for: two launches that share one compiled kernel are one
``Recorded``.
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

# What Triton calls torch's dtypes.
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
         torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
         torch.int64: "i64"}


class Recorded(NamedTuple):
    """One kernel as the JIT specialises it.

    arguments: the run-time ones in order, each with its type: ``*bf16`` for a pointer, ``i32``, ``fp32``,
    None for None. ``:16`` after it says divisible by 16, ``:1`` equal to 1: the JIT compiles those apart.
    constants: the constexprs, tile included. shared: bytes, the plan's upper estimate. traits: the plan's,
    sorted. config: ``Launch.config``.
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
        """For JSON."""
        return {**self._asdict(), "arguments": dict(self.arguments), "constants": dict(self.constants)}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Recorded:
        """The launch that has these fields, also where they come out of JSON."""
        return cls(**{**fields, "arguments": tuple(fields["arguments"].items()),
                      "constants": tuple(fields["constants"].items()), "traits": tuple(fields["traits"])})


@contextmanager
def recording(target: Target) -> Iterator[list[Recorded]]:
    """Plan every call for ``target`` and collect what it would start, each kernel once, in order of the first
    launch."""
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
    """What is left of a launch once the JIT has looked at it."""
    # Under TRITON_INTERPRET a kernel is an InterpretedFunction, which keeps the decorator's options in
    # kwargs.
    decorator = getattr(kernel, "kwargs", {})
    left_alone = getattr(kernel, "do_not_specialize", None) or decorator.get("do_not_specialize") or ()
    constexprs = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
    values = zip(kernel.arg_names, door.in_order(launch, kernel, arguments), strict=True)
    kinds = tuple((name, specialised(value, name not in left_alone))
                  for name, value in values if name not in constexprs)
    given = (*arguments.items(), *launch.tile)
    constants = tuple((name, value) for name, value in given if name in constexprs)
    return Recorded(kernel.fn.__module__, kernel.fn.__name__, kinds, constants,
                    launch.num_warps, launch.num_stages, launch.shared, tuple(sorted(launch.traits)),
                    launch.config)


def specialised(value: Any, specialise: bool = True) -> str | None:
    """The type the JIT gives an argument. specialise: False for those in ``do_not_specialize``, of which only
    the type counts."""
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
    """The module of a kernel and a hash of what it does: a record holds for as long as this stays the same.
    Comments, docstrings and layout may change."""
    return f"{module}:{hashlib.sha256(source_of(module, kernel).encode()).hexdigest()[:12]}"


def is_current(source: str, kernel: str) -> bool:
    """Whether ``source_hash`` would still say so."""
    module = source.partition(":")[0]
    try:
        return bool(module) and source_hash(module, kernel) == source
    except (ImportError, AttributeError):  # the kernel is gone
        return False


@lru_cache(maxsize=256)
def source_of(module: str, kernel: str) -> str:
    """The code of a kernel, of every jitted function it calls and of the constants they use, a line each: see
    ``normalised``."""
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
