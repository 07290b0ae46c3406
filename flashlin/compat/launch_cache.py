"""Direct starts: call the launcher of a compiled kernel without Triton's ``JITFunction.run``.

``JITFunction.run`` binds, specialises and formats all arguments of every call to find the compiled kernel.
That takes several times as long as the start itself. Here the first start uses ``kernel[grid](...)``, and the
compiled kernel that it returns is cached. Later starts with the same cache key call its launcher directly.

The cache key contains everything that selects the compiled kernel:

- the types and dtypes of the arguments;
- which pointers and integers are multiples of 16, and which integers are 1 or need 64 bits;
- the constexprs, warps and stages;
- the device, and Triton's settings for debug and instrumentation.

These starts use ``JITFunction.run`` every time:

- launches that hooks watch;
- arguments of types other than ``PLAIN``, such as subclasses of tensors;
- kernels that read global values, unless these are constants of flashlin.kernels, which never change;
- all kernels in Triton's interpreter;
- all kernels on Triton releases without ``Release.direct``, on which direct starts are not tested.

This module does not change how kernels are compiled.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
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
KNOWN = 5  # arguments of a launcher that describe the compiled kernel; they follow the grid and the stream

Values = tuple[Any, ...]
_dtype_of, _address_of = attrgetter("dtype"), torch.Tensor.data_ptr


class Compiled(NamedTuple):
    """A kernel that is compiled and loaded on one device.

    run: Triton's launcher of the compiled kernel.
    known: the launcher's arguments before the kernel's own: its handle, its metadata, and None for the hooks.
    of: the jitted function.
    caches: Triton's caches of the function, as they were when the kernel was compiled. Triton replaces them
        when the source of the function changes.
    debug: the function's ``debug`` flag at that time.
    switches: Triton's settings at that time, see ``_switches``.
    """
    run: Callable[..., None]
    known: tuple[Any, ...]
    of: Any
    caches: Any
    debug: Any
    switches: tuple[Any, ...]


class Kind(NamedTuple):
    """The compiled kernels of one jitted function for one combination of argument types.

    tensors: function that picks the tensors from the arguments.
    constants: function that picks the constexprs.
    integers: function that picks the integers for whose values Triton specialises the kernel.
    unspecialised: function that picks the other integers, of which only the width (32 or 64 bits) matters.
    compiled: the compiled kernels by the rest of the cache key.

    Floats, bools and None need no such function, because their types alone select the compiled kernel.
    """
    tensors: Callable[[Values], Values]
    constants: Callable[[Values], Values]
    integers: Callable[[Values], Values]
    unspecialised: Callable[[Values], Values]
    compiled: dict[Values, Compiled]


# A thread holds this lock while Triton may load a launcher. All launchers are extension modules with the same
# name. When Python loads the same launcher a second time, it makes no new module object, but fills the object
# that had this name last. If another thread loads a launcher at the same time, that may be the object of
# another kernel. A kernel may then get the launcher of another kernel, which expects other arguments.
LOADING = ThreadLock()


@cache
def _build_without_lock() -> None:
    """Let Triton run its C compiler without the lock LOADING, so that threads build launchers in parallel.

    Triton up to 3.7 builds a launcher for each kernel signature. Later releases build none.
    """
    for name in ("triton.runtime.build", "triton.backends.nvidia.driver"):
        module: Any = sys.modules.get(name)
        if hasattr(module, "_build"):
            module._build = partial(_without_lock, module._build)


def _without_lock(build: Callable[..., str], *arguments: Any, **named: Any) -> str:
    """Call ``build`` while this thread does not hold LOADING."""
    held = LOADING.free()
    try:
        return build(*arguments, **named)
    finally:
        if held:
            LOADING.__enter__()


class Kernel:
    """A jitted function with its compiled kernels."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.kinds = kernel, dict[tuple[type, ...], "Kind | None"]()
        self.described = kernel if type(kernel) is Described else None
        self.plain = possible() and (self.described is not None or type(kernel) is triton_module().JITFunction)

    def start(self, programs: int, values: Values, num_warps: int, num_stages: int) -> Compiled | None:
        """Start the kernel, directly if possible.

        The start has the effect of
        ``kernel[(programs,)](*values, num_warps=num_warps, num_stages=num_stages)``.

        values: the arguments of all parameters, in their order.

        Returns the compiled kernel that the next start with the same cache key will use directly. Returns
        None if that start will use ``JITFunction.run``.
        """
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
        # A compilation hook of Triton may have cancelled the launch: made is then None. Triton compares
        # global values that may change at each launch, so kernels that read such values are not cached. These
        # are all global values, except those of modules of flashlin.kernels, which never change.
        if (type(made) is not triton_module().compiler.CompiledKernel
                or made.metadata.target.backend != "cuda"
                or any(not home.get("__name__", "").startswith("flashlin.kernels.")
                       for _, home in kernel.used_global_vals.values())):
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
        """Return Triton's launcher of a compiled kernel.

        For a kernel with descriptors, the returned launcher accepts tensors or addresses in their place.
        """
        run: Callable[..., None] = made.run
        described, before = self.described, 4 + KNOWN
        if described is None:
            return run
        return lambda *given: run(*given[:before], *described.lent(given[before:]))

    def lacks(self, values: Values, num_warps: int, num_stages: int, device: int) -> Any:
        """Return a key of the compiled kernel that ``start`` would need, if it is not compiled yet.

        Returns None if it is compiled, or if that start would use ``JITFunction.run``. Two starts that need
        the same compiled kernel have equal keys.
        """
        kind = self._kind(values) if self.plain else None
        if kind is None:
            return None
        key = _key(kind, values, device, num_warps, num_stages)
        types = [torch.Tensor if type(x) in TENSORS else type(x) for x in values]
        return None if key in kind.compiled else (id(self.kernel), *types, key)

    def compile(self, values: Values, num_warps: int, num_stages: int, load: bool) -> None:
        """Compile the kernel that ``start`` would compile, without starting it.

        load: True to also load the kernel onto the GPU, and its launcher into the process. Pass False if the
            program does not wait for this call. Another thread may then load launchers of other kernels
            without the lock LOADING, and two launchers must not be loaded at the same time.
        """
        made = self.kernel.warmup(*values, grid=(1,), num_warps=num_warps, num_stages=num_stages,
                                  **_unchecked())
        if load and made is not None:  # None if a compilation hook cancelled it
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
        """Return the Kind for these types of arguments; None if starts with them use ``JITFunction.run``."""
        of_all = list(zip(range(len(types)), self.kernel.params, types, strict=True))
        if not all(kind in (CONSTANTS if parameter.is_constexpr else PLAIN) for _, parameter, kind in of_all):
            return None
        varying = [(at, parameter, kind) for at, parameter, kind in of_all if not parameter.is_constexpr]
        return Kind(
            _taking(at for at, _, kind in varying if kind in TENSORS),
            _taking(at for at, parameter, _ in of_all if parameter.is_constexpr),
            _taking(at for at, parameter, kind in varying if kind is int and not parameter.do_not_specialize),
            _taking(at for at, parameter, kind in varying if kind is int and parameter.do_not_specialize), {})


def _unchecked() -> dict[str, bool]:
    """Return the launch options that turn off Triton's overflow checks under TRITON_DEBUG=1.

    The kernels of kernels/rotation let sums of angles wrap around on purpose. Under TRITON_DEBUG=1 Triton
    treats integer overflow as an error. The option exists since Triton 3.2. Older releases do not have it,
    so the result is empty there.
    """
    triton = triton_module()
    debug = triton.knobs.runtime.debug if hasattr(triton, "knobs") else os.environ.get("TRITON_DEBUG") == "1"
    checked = debug and not interpreting() and hasattr(triton.language, "add")
    return {"sanitize_overflow": False} if checked else {}


def current(compiled: Iterable[Compiled], device: int) -> bool:
    """Return True if ``JITFunction.run`` would still use these kernels on the device and call no hook."""
    switches = _switches()
    for one in compiled:
        kernel = one.of
        if (one.caches is not kernel.device_caches.get(device) or one.switches != switches
                or one.debug != kernel.debug or kernel.pre_run_hooks):
            return False
    return True


def _switches() -> tuple[Any, ...]:
    """Return Triton's settings that select the compiled kernel at each launch: debug and instrumentation."""
    knobs = triton_module().knobs
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode


def watched() -> bool:
    """Return True if a hook of Triton watches every launch or changes the compiled code."""
    runtime = triton_module().knobs.runtime
    # launch_enter_hook is a chain of hooks, usually empty; in older releases it is one function or None
    return bool(runtime.add_stages_inspection_hook is not None
                or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
                or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook))


def _wide(n: int) -> str:
    """Return the Triton type of an integer that does not fit in 32 bits: ``i64`` or ``u64``."""
    return "i64" if n < I64 else "u64"


def _key(kind: Kind, values: Values, device: int, num_warps: int, num_stages: int) -> Values:
    """Return the cache key of a start, except for the types of the arguments, which select the Kind."""
    tensors = kind.tensors(values)
    # ``apart`` is 0 if all addresses are multiples of 16, the usual case
    apart = reduce(or_, map(_address_of, tensors), 0) % 16
    return (device, num_warps, num_stages, *map(_dtype_of, tensors), kind.constants(values),
            *[(n == 1, n % 16 == 0, -I32 <= n < I32 or _wide(n)) for n in kind.integers(values)],
            *[-I32 <= n < I32 or _wide(n) for n in kind.unspecialised(values)],
            apart and tuple([_address_of(x) % 16 == 0 for x in tensors]))


def _taking(places: Iterable[int]) -> Callable[[Values], Values]:
    """Return a function that picks the items at these positions from a tuple, as a tuple."""
    at = tuple(places)
    if len(at) > 1:
        return itemgetter(*at)
    return lambda values: tuple([values[place] for place in at])
