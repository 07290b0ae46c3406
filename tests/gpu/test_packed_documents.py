"""Documents packed into one row of a patched transformers model stay apart on a GPU.

This holds for eager models and for models that inductor compiles. The code that finds the documents does not
wait for the GPU.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashlin
from flashlin.integrations.documents import watched
from matrix.stacks.models import build, named
from tests.integrations.test_packed_documents import FIRST, MARKS, T, leak

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

WAYS = ("[B, T]", "[4, B, T]", "ones", "numbers", "block mask")


def on_gpu(way: str) -> dict[str, Any]:
    return {name: x.cuda() for name, x in MARKS[way].items()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model, way", [*(("qwen3_5", way) for way in WAYS), ("mamba2", "numbers"),
                                        ("kimi_linear", "ones"), ("lfm3", "block mask")])
def test_the_first_document_does_not_change_the_second(model: str, way: str, compiled: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with flashlin.patched("transformers"):
        made = build(named(model)).cuda()
        called = torch.compile(made, fullgraph=True) if compiled else made
        assert leak(made, on_gpu(way), called) < 1e-3
        torch._dynamo.reset()


@pytest.mark.parametrize("way", WAYS)
def test_finding_documents_does_not_wait_for_the_device(way: str) -> None:
    def forward(self: Any, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None,
                **given: Any) -> Any:
        return given["seq_idx"]
    call, marks = watched(forward, by_seq_idx=True, said=set()), on_gpu(way)
    tokens = torch.zeros(1, T, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        seq_idx = call(object(), tokens, **marks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seq_idx.tolist() == [[0] * FIRST + [1] * (T - FIRST)]
