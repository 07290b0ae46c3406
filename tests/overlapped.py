"""Calls whose forward scan may overlap: of every kind of decay, state, head and dtype that it knows."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin


def sequences(op: str, device: torch.device, *, D: int = 128, T: int = 256, gated: bool = False,
              state: bool = False, v_first: bool = False, dtype: torch.dtype = torch.bfloat16,
              shift: int = 0) -> list[torch.Tensor]:
    """shift: elements that q begins behind an address that a descriptor can have."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2 * T * 4 * D + shift, device=device, dtype=dtype)[shift:].view(2, T, 4, D)
               for _ in "qkv")
    x: dict[str, Any] = {"q": q, "k": k, "v": v}
    if gated:
        x["g"] = F.logsigmoid(torch.randn(2, T, 4, device=device))
    if state:
        x |= {"initial_state": torch.randn(2, 4, D, D, device=device), "state_v_first": v_first}
    if op == "chunk_linear_attn":
        x["normalize"] = False
    return [y for y in getattr(flashlin, op)(**x, output_final_state=state) if y is not None]


def mamba2(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    b, T, H, G, P, N = 2, 192, 4, 2, 64, 128
    x, B, C = (torch.randn(b, T, heads, size, device=device, dtype=torch.bfloat16)
               for heads, size in ((H, P), (G, N), (G, N)))
    dt, A = torch.rand(b, T, H, device=device), -torch.rand(H, device=device)
    return list(flashlin.mamba_chunk_scan_combined(x, dt, A, B, C, 64, return_final_states=True))


CALLS: dict[str, Callable[[torch.device], list[torch.Tensor]]] = {
    "no decay": partial(sequences, "chunk_linear_attn"),
    "a decay a head": partial(sequences, "chunk_retention"),
    "a decay a token": partial(sequences, "chunk_simple_gla", gated=True),
    "states": partial(sequences, "chunk_simple_gla", gated=True, state=True),
    "states with v first": partial(sequences, "chunk_simple_gla", gated=True, state=True, v_first=True),
    "heads of 64": partial(sequences, "chunk_simple_gla", gated=True, state=True, D=64),
    "float16": partial(sequences, "chunk_simple_gla", gated=True, dtype=torch.float16),
    "groups, in float32": mamba2}
