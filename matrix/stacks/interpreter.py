"""Run the Triton kernels of raw fla on a CPU, in the interpreter of Triton.

The process needs TRITON_INTERPRET=1. It also needs ``python -O``, because fla asserts that tensors are on a
GPU.
"""
from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Number(int):
    """A loop variable, or a number computed from it, on which a kernel may call ``.to`` as on a tensor."""

    def to(self, dtype: Any, **options: Any) -> Number:
        return self


def _number(name: str) -> Callable[[Number, Any], Any]:
    def computed(one: Number, other: Any) -> Any:
        result = getattr(int, name)(one, other)
        return Number(result) if isinstance(result, int) else result
    return computed


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod"):
    setattr(Number, f"__{_name}__", _number(f"__{_name}__"))


def _range(*bounds: Any) -> Iterator[Number]:
    """Iterate over a range with bounds that may be numbers loaded by a kernel."""
    known = (one.handle.data.item() if hasattr(one, "handle") else one for one in bounds)
    yield from map(Number, builtins.range(*map(int, known)))


class Driver:
    """A Triton driver that reports the properties of an H100 to host code and launches nothing."""

    class utils:
        @staticmethod
        def get_device_properties(index: int = 0) -> dict[str, int]:
            return {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32,
                    "max_num_regs": 65536}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu


def _first(tuner: Any, *args: Any, **options: Any) -> Any:
    """Run an autotuned kernel with its first configuration, because all give the same results when interpreted."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        chosen = tuner.prune_configs(options)[0]
    except KeyError:  # pruning needs names that only a tuned call has
        chosen = tuner.configs[0]
    tuner.best_config = chosen
    if chosen.pre_hook:
        chosen.pre_hook({**tuner.nargs, **options, **chosen.all_kwargs()})
    return tuner.fn.run(*args, **{**options, **chosen.all_kwargs()})


_argsort = torch.Tensor.argsort


def _in_order(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Sort in a stable order, as a GPU does for 33 or more keys.

    A CPU may return equal keys in any order, which changes the order of the tokens in the memories of Mom.
    """
    return _argsort(x, *args, **{**options, "stable": True})


def begin() -> None:
    """Replace the Triton driver and the autotuner. Call this before the kernels of fla are imported.

    The function first imports fla.utils, which reads the properties of the real machine (without a GPU).
    """
    import fla.utils  # noqa: F401  it reads the properties of the machine
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    driver.set_active(Driver())
    Autotuner.run = _first
    torch.Tensor.argsort = _in_order  # type: ignore[method-assign,assignment]
    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = lambda index: contextlib.nullcontext()  # type: ignore[attr-defined]  # new


def loops() -> None:
    """Let the loops of the kernels of fla use loaded bounds. Call this after fla is imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fla.ops", "fla.modules")) and "triton" in vars(module):
            vars(module).setdefault("range", _range)
