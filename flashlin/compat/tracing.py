"""Query the context of a call: whether torch traces or transforms it."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

_in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def transient() -> bool:
    """Return True if a new tensor may be a fake tensor or part of a graph.

    That is so under torch.compile, FakeTensorMode and make_fx (under any dispatch mode). A call must then not
    cache the tensors that it creates. It must not use cached tensors either, because torch cannot mix fake
    tensors with others.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def transformed() -> bool:
    """Return True inside a transform of torch.func (vmap, grad, jvp ...) and in forward-mode AD.

    Kernels compute neither batches of vmap nor tangents, and torch cannot transform ordinary autograd
    functions. Inside a transform, an op therefore runs in plain torch without such functions.
    """
    return _in_functorch() or forward_ad._current_level >= 0


def numbers(x: torch.Tensor) -> list[int]:
    """Return the values of an integer tensor [N] as a list.

    Inside torch.func, ``x.tolist()`` raises an error in torch 2.9 and older. Reading single values works
    there.
    """
    return [int(one) for one in x.unbind()] if _in_functorch() else x.tolist()
