"""Clear errors for fla's layers and models on a CPU.

Some of them call a function that has no CPU version, in flashlin or elsewhere. The errors of these calls name
a kernel, or ask for CUDA or for flash-attn. ``explaining`` replaces such an error by one sentence with the
layer, the function, and the models that run on a CPU.
"""
from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from flashlin.guards.plan_types import UnsupportedError

# Models of fla 0.6.0 that train and generate on a CPU under patch("fla"), as the records of
# ``python -m matrix stacks`` show.
RUNNING = ("Comba", "DeltaNet", "GatedDeltaNet", "GatedDeltaProduct", "GLA", "HGRN", "HGRN2", "KDA",
           "LinearAttention", "Mamba", "Mamba2", "Mom", "RetNet", "RWKV6", "RWKV7", "Samba")
ADVICE = f"Use an NVIDIA GPU, or a model of fla that runs on a CPU: {', '.join(RUNNING)}."
FLASH_ATTN = re.compile(r"flash[-_ ]attn|flash attention", re.IGNORECASE)
GPU = re.compile(r"\b(CUDA|GPUs?|CPU|Triton)\b")
FUNCTIONS = ("fla.ops.", "fla.modules.")


class NoCpuVersion(NotImplementedError):
    """A call of a layer or model of fla on a CPU needs a function that has no CPU version."""


def explaining(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in for ``method`` of an nn.Module of fla that explains errors on a CPU.

    If ``method`` fails because it needs a GPU, the stand-in raises ``NoCpuVersion`` from the original error.
    Calls with GPU tensors and traced calls go straight to ``method``.
    """
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **given: Any) -> Any:
        if torch.compiler.is_compiling() or not on_a_cpu(*args, *given.values()):
            return method(self, *args, **given)
        try:
            return method(self, *args, **given)
        except Exception as error:
            why = "" if isinstance(error, NoCpuVersion) else reason(error)  # an inner layer raised that one
            if not why:
                raise
            raise NoCpuVersion(f"{type(self).__name__} cannot run this call on a CPU: {why}. "
                               f"{ADVICE}") from error
    return call


def on_a_cpu(*values: Any) -> bool:
    """Return True if all tensors among these values are on the CPU.

    If no value is a tensor, return True if there is no GPU. A call on a GPU may have small tensors on the
    CPU, such as ``cu_seqlens_cpu``.
    """
    kinds = {value.device.type for value in values if isinstance(value, Tensor)}
    return kinds == {"cpu"} if kinds else not torch.cuda.is_available()


def reason(error: Exception) -> str:
    """Return why a call on a CPU raised this error, or "" if the CPU is not the cause of the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    said = str(error)
    if FLASH_ATTN.search(said):
        return "it needs flash-attn, which needs a GPU"
    if isinstance(error, UnsupportedError):
        missing = any(reason.code == "backend" for reason in error.plan.refused)
    else:
        # some functions of fla compare a device with "cuda" and refuse a CPU without a message
        silent = isinstance(error, NotImplementedError) and not said
        missing = bool(GPU.search(said)) or (silent and "cuda" in frames[-1].f_code.co_consts)
    if not missing:
        return ""
    if name := next(filter(None, map(_function, frames)), ""):
        return f"flashlin has no CPU version of {name}"
    return f"fla raises {type(error).__name__}, {said.rstrip('.')}" if said else "fla has code for CUDA alone"


def _function(frame: FrameType) -> str:
    """Return the full name of the function or module of fla that a frame runs.

    Return "" for a frame that runs no code of fla.
    """
    home, code = str(frame.f_globals.get("__name__")), frame.f_code
    if not home.startswith(FUNCTIONS):
        return ""
    owner = frame.f_locals.get("self")
    return f"{home}.{type(owner).__name__ if isinstance(owner, nn.Module) else code.co_name}"
