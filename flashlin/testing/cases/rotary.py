"""Cases of the rotary embedding: pairs and what is left beside them, offsets that are one, many or negative,
packed sequences."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

import flashlin
from flashlin.kernels.rotary.reference import rotate
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.005}


def make(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    B: int = 2,
    T: int = 35,
    H: int = 3,
    D: int = 32,
    R: int = 16,
    TR: int = 70,
    tables: str = "same",
    offsets: tuple[int, ...] = (),
    edges: tuple[int, ...] = (),
    bounds: str = "int32",
) -> Tensors:
    """tables: their dtype, ``same`` for x's. edges: cu_seqlens, of the dtype ``bounds``."""
    angles = torch.rand(TR, R, generator=generator) * 6.3
    kind = dtype if tables == "same" else getattr(torch, tables)
    made = {"x": torch.randn(B, T, H, D, generator=generator).to(dtype), "cos": angles.cos().to(kind),
            "sin": angles.sin().to(kind)}
    if offsets:
        made["seqlen_offsets"] = torch.tensor(offsets)
    if edges:
        made["cu_seqlens"] = torch.tensor(edges, dtype=getattr(torch, bounds))
    return {name: x.to(device) for name, x in made.items()}


def call(extra: dict[str, Any], x: torch.Tensor, **tensors: Any) -> Tensors:
    return {"y": flashlin.rotary_embedding(x * 1 if extra.get("inplace") else x, **tensors, **extra)}


def reference(extra: dict[str, Any], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
              seqlen_offsets: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None) -> Tensors:
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    N = x.shape[0] if bounds is None else len(bounds) - 1
    offsets = [extra.get("seqlen_offsets", 0)] * N if seqlen_offsets is None else seqlen_offsets.tolist()
    return {"y": rotate(x, cos, sin, extra.get("interleaved", False), offsets, bounds)}


def _case(name: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    return Case("rotary_embedding", name, partial(make, **facts), partial(call, extra or {}),
                partial(reference, extra or {}), TOLERANCES, ("cos", "sin"), quick)


PAIRS = {"interleaved": True}
CASES: list[Case] = [
    _case("random", quick=True), _case("interleaved", PAIRS), _case("partial", D=40, R=12),
    _case("partial-interleaved", PAIRS, D=41, R=13), _case("one-pair", D=3, R=1, H=5),
    _case("D=300", D=300, R=150, T=9), _case("D=1300", D=1300, R=600, T=5, H=2),
    _case("D=1300-interleaved", PAIRS, D=1300, R=650, T=5, H=2),
    _case("one-token", B=3, T=1, offsets=(0, 69, 7)), _case("many-heads", B=1, T=4, H=300, D=8, R=4),
    _case("one-head", B=1, T=70, H=1), _case("fp32-tables", tables="float32"),
    _case("offset", {"seqlen_offsets": 5}), _case("negative-offset", {"seqlen_offsets": -5}),
    _case("offsets", B=3, T=20, offsets=(3, -7, 50)), _case("in-place", {"inplace": True}),
    _case("in-place-partial", {"inplace": True, "interleaved": True}, D=40, R=12),
    _case("packed", B=1, T=50, edges=(0, 7, 7, 8, 50)),
    _case("packed-offsets", B=1, T=50, edges=(0, 7, 7, 8, 50), offsets=(60, 3, -1, 28)),
    _case("packed-one", B=1, T=33, edges=(0, 33), bounds="int64"), _case("no-tokens", T=0),
    _case("no-batch", B=0)]
