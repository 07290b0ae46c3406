"""bf16 retention as fla starts it, for tests/integrations/test_seeds.py. fla looks at the card when it is
imported, so nothing here imports it before there is one."""
from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch


def on_a_t4() -> None:
    """fla's function on what looks like a T4, each kernel in the first of its configurations. It runs in a
    child under another Triton."""
    t4 = {"device": lambda index: nullcontext(), "device_count": lambda: 1, "current_device": lambda: 0,
          "get_device_name": lambda index=0: "Tesla T4", "get_device_capability": lambda index=0: (7, 5),
          "get_device_properties": lambda index=0: SimpleNamespace(multi_processor_count=40)}
    with mock.patch.multiple(torch.cuda, **t4):
        from fla.ops.common import chunk_h, chunk_o
        from fla.ops.retention import chunk_retention
        for kernel in (chunk_h.chunk_fwd_kernel_h, chunk_o.chunk_fwd_kernel_o):
            tuner = kernel if hasattr(kernel, "configs") else kernel.fn  # heuristics may be around it
            del tuner.configs[1:]
        q, k, v = torch.randn(3, 1, 64, 2, 64, dtype=torch.bfloat16).unbind()
        chunk_retention(q, k, v)
