"""bf16 retention as fla starts it, for tests/integrations/test_seeds.py.

fla looks for a GPU when it is imported. So this file first replaces functions of torch.cuda,
which then report a GPU, and imports fla afterwards.
"""
from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch


def on_a_t4() -> None:
    """Run fla's function on a pretended T4, each kernel in its first configuration.

    It runs in a child process under another Triton release.
    """
    t4 = {"device": lambda index: nullcontext(), "device_count": lambda: 1, "current_device": lambda: 0,
          "get_device_name": lambda index=0: "Tesla T4", "get_device_capability": lambda index=0: (7, 5),
          "get_device_properties": lambda index=0: SimpleNamespace(multi_processor_count=40)}
    with mock.patch.multiple(torch.cuda, **t4):
        from fla.ops.common import chunk_h, chunk_o
        from fla.ops.retention import chunk_retention
        for kernel in (chunk_h.chunk_fwd_kernel_h, chunk_o.chunk_fwd_kernel_o):
            tuner = kernel if hasattr(kernel, "configs") else kernel.fn  # heuristics may wrap it
            del tuner.configs[1:]
        q, k, v = torch.randn(3, 1, 64, 2, 64, dtype=torch.bfloat16).unbind()
        chunk_retention(q, k, v)
