"""Whether tensors that are made now may outlive the call."""
from __future__ import annotations

import torch


def transient() -> bool:
    """Whether a tensor made now may be a fake one or a part of a graph: under torch.compile, FakeTensorMode
    and make_fx (under any dispatch mode). It must not be kept then; nor may one that was kept be used, since
    fake tensors do not mix with others."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
