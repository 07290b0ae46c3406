"""Triton's interpreter for a program that was written for GPUs, so that raw fla has numbers on a CPU.

The process needs TRITON_INTERPRET=1 and ``python -O``: fla asserts that tensors are on a GPU.
"""
from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Number(int):
    """A loop's variable and what is computed of it; kernels may ask for another type as of a tensor."""

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
    """``range`` of numbers that kernels have loaded."""
    known = (one.handle.data.item() if hasattr(one, "handle") else one for one in bounds)
    yield from map(Number, builtins.range(*map(int, known)))


class Driver:
    """The answers of an H100, as far as host code asks without starting anything."""

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
    """An autotuner's run: the first configuration, since the interpreter's results hang on none."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        chosen = tuner.prune_configs(options)[0]
    except KeyError:  # it prunes by names that only a tuned call has
        chosen = tuner.configs[0]
    tuner.best_config = chosen
    if chosen.pre_hook:
        chosen.pre_hook({**tuner.nargs, **options, **chosen.all_kwargs()})
    return tuner.fn.run(*args, **{**options, **chosen.all_kwargs()})


_argsort = torch.Tensor.argsort


def _in_order(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """As a GPU sorts from 33 keys on: a CPU leaves equal ones in any order, and the tokens of Mom's memories
    with them."""
    return _argsort(x, *args, **{**options, "stable": True})


def begin() -> None:
    """Before fla's kernels are imported, and after its facts of the machine: there is no GPU."""
    import fla.utils  # noqa: F401  for what it reads of the machine
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    driver.set_active(Driver())
    Autotuner.run = _first
    torch.Tensor.argsort = _in_order  # type: ignore[method-assign,assignment]
    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = lambda index: contextlib.nullcontext()  # type: ignore[attr-defined]  # new


def loops() -> None:
    """After fla has been imported: its kernels' loops take loaded bounds."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fla.ops", "fla.modules")) and "triton" in vars(module):
            vars(module).setdefault("range", _range)
