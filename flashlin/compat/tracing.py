"""Queries about the context of a call: is it traced or transformed, and may its tensors outlive it?"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

_in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def transient() -> bool:
    """Whether a tensor made now may be a fake one or a part of a graph: under torch.compile, FakeTensorMode
    and make_fx (under any dispatch mode). It must not be kept then; nor may one that was kept be used, since
    fake tensors do not mix with others."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def transformed() -> bool:
    """Return True inside a transform of torch.func (vmap, grad, jvp ...) and in forward-mode AD.

    Kernels compute neither batches of vmap nor tangents, and torch cannot transform ordinary autograd
    functions. So inside a transform an op runs in plain torch without such functions."""
    return _in_functorch() or forward_ad._current_level >= 0


def numbers(x: torch.Tensor) -> list[int]:
    """Return the values of a tensor of integers [N]. Inside torch.func, torch 2.9 and older raise an error in
    ``x.tolist()``, but not for single values."""
    return [int(one) for one in x.unbind()] if _in_functorch() else x.tolist()
