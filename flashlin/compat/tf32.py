"""Read the torch setting that allows TF32 in float32 matrix products on a GPU.

torch has two interfaces for it. ``torch.set_float32_matmul_precision`` and ``allow_tf32`` are the old one.
torch 2.9 added ``fp32_precision``, for all backends, one backend or one operation. Once a program has used
the new interface, torch may raise a RuntimeError when the setting is read through the old one. The new
interface reports both and never raises.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def _reader(of: Any) -> Callable[[], str]:
    """Return a function that reads the TF32 setting of the torch module ``of``.

    The returned function returns "tf32" if TF32 is allowed.
    """
    # torch.backends.cuda.matmul.fp32_precision calls this getter. A direct call takes a sixth of its time.
    getter = getattr(of._C, "_get_fp32_precision_getter", None)
    if getter is not None:
        return partial(getter, "cuda", "matmul")
    if hasattr(of.backends.cuda.matmul, "fp32_precision"):
        return lambda: str(of.backends.cuda.matmul.fp32_precision)
    return lambda: "ieee" if of.get_float32_matmul_precision() == "highest" else "tf32"


# Returns "tf32" if torch may use TF32 in float32 matrix products on a GPU.
setting = _reader(torch)
