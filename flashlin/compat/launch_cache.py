"""Compiled kernels, started without a look at every argument in Python.

Triton's own launch binds, specialises and prints all arguments of every call to find the compiled kernel,
which takes several times as long as starting it. Here the first start of its kind goes Triton's way,
``kernel[grid](...)``, and what that returns is kept under all that decided which compiled kernel it was: the
types and dtypes of the arguments, which pointers and integers are multiples of 16, which integers are 1 or
need 64 bits, constexprs, warps and stages, debug and instrumentation, the device. Later starts of this kind
call the compiled kernel's launcher at once. How kernels are compiled is none of this file's business.

What is not plain goes Triton's way each time: launches that hooks watch, arguments of other types than
``PLAIN`` (subclasses of tensors), kernels that read global values, unless these are constants of
flashlin.kernels, which never change, the interpreter's, and releases of which ``Release.direct`` does not say
that both ways have been compared.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import cache, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch

from flashlin.compat.descriptors import Described
from flashlin.compat.installed_triton import interpreting, possible, triton_module
from flashlin.compat.locks import ThreadLock

TENSORS = (torch.Tensor, torch.nn.Parameter)
PLAIN = (*TENSORS, int, float, bool, type(None))
CONSTANTS = (int, float, bool, str, type(None))
I32, I64 = 2**31, 2**63
KNOWN = 5  # what a launcher takes of a compiled kernel, behind the grid and the stream

Values = tuple[Any, ...]
_dtype_of, _address_of = attrgetter("dtype"), torch.Tensor.data_ptr


class Compiled(NamedTuple):
    """A compiled kernel on a device. run: Triton's launcher of it. known: what that takes before the kernel's
    own arguments: its handle, its metadata, and no hooks. of: the jitted function. caches: Triton's of that,
    where it was found; who changes a source empties them. debug, switches: the function's and Triton's
    settings at that time."""
    run: Callable[..., None]
    known: tuple[Any, ...]
    of: Any
    caches: Any
    debug: Any
    switches: tuple[Any, ...]


class Kind(NamedTuple):
    """Starts with arguments of the same types. The first four take out of the arguments the tensors, the
    constexprs, the integers that are specialised, and those of which only the width counts; floats, bools and
    None are told by their types. compiled: by everything else that tells compiled kernels apart."""
    tensors: Callable[[Values], Values]
    constants: Callable[[Values], Values]
    integers: Callable[[Values], Values]
    unspecialised: Callable[[Values], Values]
    compiled: dict[Values, Compiled]


# A thread holds this lock while Triton may load a launcher. All launchers are extension modules with the same
# name. When Python loads a launcher for the second time, it fills the module object that had this name last. So
# if two threads load at the same time, a kernel may get the launcher of another kernel, with other arguments.
LOADING = ThreadLock()


@cache
def _build_without_lock() -> None:
    """Let Triton run its C compiler without LOADING, so that threads build launchers at the same time.

    Triton up to 3.7 builds a launcher for each kernel signature. Later releases build none.
    """
    for name in ("triton.runtime.build", "triton.backends.nvidia.driver"):
        module: Any = sys.modules.get(name)
        if hasattr(module, "_build"):
            module._build = _without_lock(module._build)


def _without_lock(build: Callable[..., str]) -> Callable[..., str]:
    """Return ``build``, which frees LOADING while it runs, if its thread holds it."""
    def building(*arguments: Any, **named: Any) -> str:
        held = LOADING.free()
        try:
            return build(*arguments, **named)
        finally:
            if held:
                LOADING.__enter__()
    return building


class Kernel:
    """A jitted function, and what has been compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.kinds = kernel, dict[tuple[type, ...], "Kind | None"]()
        self.described = kernel if type(kernel) is Described else None
        self.plain = possible() and (self.described is not None or type(kernel) is triton_module().JITFunction)

    def start(self, programs: int, values: Values, num_warps: int, num_stages: int) -> Compiled | None:
        """``kernel[(programs,)](*values, num_warps=num_warps, num_stages=num_stages)``; values: of all
        parameters, in their order. Returns what the next start of this kind will use, None if it will go
        Triton's way."""
        kind = self._kind(values) if self.plain else None
        if kind is None or watched():
            self._start_by_triton(programs, values, num_warps, num_stages)
            return None
        driver = triton_module().runtime.driver.active
        device = driver.get_current_device()
        key = _key(kind, values, device, num_warps, num_stages)
        found = kind.compiled.get(key)
        if found is not None and current([found], device):
            found.run(programs, 1, 1, driver.get_current_stream(device), *found.known, *values)
            return found
        kernel, made = self.kernel, self._start_by_triton(programs, values, num_warps, num_stages)
        # made is None where a hook of the compiler's declined; values that may change are compared each time
        if (type(made) is not triton_module().compiler.CompiledKernel or _reads_changing_values(kernel)
                or made.metadata.target.backend != "cuda"):
            return None
        known = made.function, made.packed_metadata, None, None, None
        found = kind.compiled[key] = Compiled(self._launcher(made), known, kernel,
                                              kernel.device_caches[device], kernel.debug, _switches())
        return found

    def _start_by_triton(self, programs: int, values: Values, num_warps: int, num_stages: int) -> Any:
        with LOADING:
            return self.kernel[(programs,)](*values, num_warps=num_warps, num_stages=num_stages,
                                            **_unchecked())

    def _launcher(self, made: Any) -> Callable[..., None]:
        """Triton's launcher of what has been compiled, with tensors or addresses where that has
        descriptors."""
        run: Callable[..., None] = made.run
        described, before = self.described, 4 + KNOWN
        if described is None:
            return run

        def lending(*given: Any) -> None:
            run(*given[:before], *described.lent(given[before:]))
        return lending

    def lacks(self, values: Values, num_warps: int, num_stages: int, device: int) -> Any:
        """What tells the compiled kernel from others that ``start`` would use, if there is none yet; None if
        there is, or if that start goes Triton's way."""
        kind = self._kind(values) if self.plain else None
        if kind is None:
            return None
        key = _key(kind, values, device, num_warps, num_stages)
        types = [torch.Tensor if type(x) in TENSORS else type(x) for x in values]
        return None if key in kind.compiled else (id(self.kernel), *types, key)

    def compile(self, values: Values, num_warps: int, num_stages: int, load: bool) -> None:
        """Compile as ``start`` would.

        load: also load the kernel to the card, and its launcher. It is False if the program may go on before
        this ends: then another thread may load launchers of other kernels without the lock."""
        made = self.kernel.warmup(*values, grid=(1,), num_warps=num_warps, num_stages=num_stages,
                                  **_unchecked())
        if load and made is not None:  # None where a hook of the compiler's declined
            _build_without_lock()
            with LOADING:
                _ = made.run

    def _kind(self, values: Values) -> Kind | None:
        types = tuple(map(type, values))
        try:
            return self.kinds[types]
        except KeyError:
            kind = self.kinds[types] = self._new_kind(types)
            return kind

    def _new_kind(self, types: tuple[type, ...]) -> Kind | None:
        """None for types that go Triton's way."""
        there = list(zip(self.kernel.params, types, strict=True))
        if not all(kind in (CONSTANTS if parameter.is_constexpr else PLAIN) for parameter, kind in there):
            return None
        of_all = [(at, parameter, kind) for at, (parameter, kind) in enumerate(there)]
        varying = [(at, parameter, kind) for at, parameter, kind in of_all if not parameter.is_constexpr]
        return Kind(_taking(at for at, _, kind in varying if kind in TENSORS),
                    _taking(at for at, parameter, _ in of_all if parameter.is_constexpr),
                    _taking(at for at, parameter, kind in varying
                            if kind is int and not parameter.do_not_specialize),
                    _taking(at for at, parameter, kind in varying
                            if kind is int and parameter.do_not_specialize), {})


def _unchecked() -> dict[str, bool]:
    """More options of a start with TRITON_DEBUG=1: integers may run over, as sums of turns do on purpose
    (kernels/rotation), which Triton would call an error then. The option came with tl.add, in 3.2."""
    triton = triton_module()
    debug = triton.knobs.runtime.debug if hasattr(triton, "knobs") else os.environ.get("TRITON_DEBUG") == "1"
    checked = debug and not interpreting() and hasattr(triton.language, "add")
    return {"sanitize_overflow": False} if checked else {}


def current(compiled: Iterable[Compiled], device: int) -> bool:
    """Whether Triton's launch would still find these on the device, and nothing more would happen."""
    switches = _switches()
    for one in compiled:
        kernel = one.of
        if (one.caches is not kernel.device_caches.get(device) or one.switches != switches
                or one.debug != kernel.debug or kernel.pre_run_hooks):
            return False
    return True


def _switches() -> tuple[Any, ...]:
    """Settings of Triton's that decide on each launch how it would be compiled."""
    knobs = triton_module().knobs
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode


def _reads_changing_values(kernel: Any) -> bool:
    """Return True if a kernel reads global values, other than those of flashlin.kernels, which never change."""
    return any(not home.get("__name__", "").startswith("flashlin.kernels.")
               for _, home in kernel.used_global_vals.values())


def watched() -> bool:
    """Whether somebody wants to see every launch, or changes what they compile to."""
    runtime = triton_module().knobs.runtime
    # a chain of hooks is always there, and mostly empty
    return bool(runtime.add_stages_inspection_hook is not None
                or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
                or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook))


def _wide(n: int) -> str:
    """The type of an integer that 32 bits do not hold."""
    return "i64" if n < I64 else "u64"


def _key(kind: Kind, values: Values, device: int, num_warps: int, num_stages: int) -> Values:
    """What tells apart what is compiled of a kind."""
    tensors = kind.tensors(values)
    apart = reduce(or_, map(_address_of, tensors), 0) % 16  # 0 where all are aligned, as nearly always
    return (device, num_warps, num_stages, *map(_dtype_of, tensors), kind.constants(values),
            *[(n == 1, n % 16 == 0, -I32 <= n < I32 or _wide(n)) for n in kind.integers(values)],
            *[-I32 <= n < I32 or _wide(n) for n in kind.unspecialised(values)],
            apart and tuple([_address_of(x) % 16 == 0 for x in tensors]))


def _taking(places: Iterable[int]) -> Callable[[Values], Values]:
    """Takes these places out of a tuple."""
    at = tuple(places)
    if len(at) > 1:
        return itemgetter(*at)
    return lambda values: tuple([values[place] for place in at])
