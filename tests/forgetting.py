"""Check that a gate can express a document boundary.

A log decay of -inf at the first token of each document must give the same results as packing the documents.
"""
from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

import flashlin

EDGES = (0, 9, 10, 40, 71)  # includes a document of one token, and one across the end of a chunk of 64


def inputs(op: str, dtype: torch.dtype, gates: torch.dtype) -> dict[str, torch.Tensor]:
    """Return an op's inputs for two heads of 16 channels, with g = -inf at each document's first token."""
    generator = torch.Generator().manual_seed(0)
    T, H, K = EDGES[-1], 2, 16
    made = {name: F.normalize(torch.randn(1, T, H, K, generator=generator), dim=-1).to(dtype)
            for name in ("q", "k", "v")}
    shape = (1, T, H, K) if op.endswith(("kda", "gla")) and not op.endswith("simple_gla") else (1, T, H)
    made["g"] = F.logsigmoid(torch.randn(shape, generator=generator)).to(gates)
    made["g"][:, list(EDGES[:-1])] = -math.inf
    if "delta" in op or "kda" in op:
        made["beta"] = torch.rand(1, T, H, generator=generator).to(dtype)
    return made


def run(op: str, tensors: dict[str, torch.Tensor], **extra: Any) -> dict[str, torch.Tensor]:
    """Return o and the gradients of all tensors; every run uses the same incoming gradient of o."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    called = {"gk" if op == "fused_recurrent_gla" and name == "g" else name: x for name, x in leaves.items()}
    o = getattr(flashlin, op)(**called, **extra)[0]
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(1),
                            dtype=torch.float64).to(o.dtype)
    grads = torch.autograd.grad(o, list(leaves.values()), cotangent)
    return {"o": o.detach(), **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}


def as_gate_and_packed(op: str, dtype: torch.dtype,
                       gates: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tensors = inputs(op, dtype, gates)
    return run(op, tensors), run(op, tensors, cu_seqlens=torch.tensor(EDGES))


def assert_same(op: str, dtype: torch.dtype, gates: torch.dtype, tolerance: float) -> None:
    """Compare gated with packed documents, and require a gradient of exactly 0 for each gate of -inf."""
    ours, packed = as_gate_and_packed(op, dtype, gates)
    for name, expected in packed.items():
        torch.testing.assert_close(ours[name], expected, rtol=tolerance, atol=tolerance,
                                   msg=lambda text, name=name: f"{name}: {text}")
    assert (ours["dg"][:, list(EDGES[:-1])] == 0).all()
