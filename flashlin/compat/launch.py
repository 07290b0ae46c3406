"""The one door through which every kernel of ours is started."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flashlin.guards.problem import Launch

Starter = Callable[["Launch", Any, int, tuple[Any, ...], dict[str, Any]], None]


def start(launch: Launch, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Start ``programs`` programs of a ``@triton.jit`` kernel with the tile, warps and stages of ``launch``, on the device of the first
    tensor and its current stream. constants: the kernel's constexprs besides the tile."""
    _starter(launch, kernel, programs, arguments, constants)


def _start(launch: Launch, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, **constants, **dict(launch.tile), num_warps=launch.num_warps, num_stages=launch.num_stages)
    else:
        kernel[(programs,)](*arguments, **constants, **dict(launch.tile), num_warps=launch.num_warps, num_stages=launch.num_stages)


_starter: Starter = _start


def replace_starter(starter: Starter | None) -> None:
    """Let ``starter`` see every start instead of the GPU (how launches are recorded on machines without one); None puts it back."""
    global _starter
    _starter = starter or _start
