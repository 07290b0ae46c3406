"""Calls whose forward scan may overlap: of every kind of decay, state, head and dtype that it knows."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.delta.reference import recurrence


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


def delta(device: torch.device, *, T: int = 256, D: int = 128, V: int = 0, HV: int = 4, gated: bool = True,
          state: bool = False, v_first: bool = False, dtype: torch.dtype = torch.bfloat16,
          shift: int = 0, oracle: bool = False) -> list[torch.Tensor]:
    """o and, if there is a state, the final one, of a delta rule. shift: as in sequences. oracle: as float64
    has them, on the CPU."""
    draw, V = torch.Generator().manual_seed(0), V or D

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(2, T, *sizes, generator=draw)
    x: dict[str, Any] = {"q": drawn(4, D), "k": F.normalize(drawn(4, D), dim=-1), "v": drawn(HV, V),
                         "beta": drawn(HV).sigmoid()}
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    if gated:
        x["g"] = F.logsigmoid(drawn(HV) + 2)
    h0 = torch.randn(2, HV, D, V, generator=draw) if state else None
    if oracle:
        o, ht = recurrence(*(x.get(name) for name in ("q", "k", "v", "beta", "g")), h0, scale=D ** -0.5)
        return [o, ht.mT if v_first else ht] if state else [o]
    x = {name: torch.cat([tensor.new_zeros(shift), tensor.flatten()]).to(device)[shift:].view(tensor.shape)
         for name, tensor in x.items()}
    if h0 is not None:
        x["initial_state"] = (h0.mT.contiguous() if v_first else h0).to(device)
    if v_first:
        x["state_v_first"] = True
    op = flashlin.chunk_gated_delta_rule if gated else flashlin.chunk_delta_rule
    return [y for y in op(**x, output_final_state=state) if y is not None]


Call = Callable[[torch.device], list[torch.Tensor]]
CALLS: dict[str, Call] = {
    "no decay": partial(sequences, "chunk_linear_attn"),
    "a decay a head": partial(sequences, "chunk_retention"),
    "a decay a token": partial(sequences, "chunk_simple_gla", gated=True),
    "states": partial(sequences, "chunk_simple_gla", gated=True, state=True),
    "states with v first": partial(sequences, "chunk_simple_gla", gated=True, state=True, v_first=True),
    "heads of 64": partial(sequences, "chunk_simple_gla", gated=True, state=True, D=64),
    "float16": partial(sequences, "chunk_simple_gla", gated=True, dtype=torch.float16),
    "groups, in float32": mamba2}
DELTA: dict[str, Callable[..., list[torch.Tensor]]] = {
    "delta": partial(delta, gated=False),
    "delta with states": partial(delta, gated=False, state=True),
    "gated delta": delta,
    "gated delta with states": partial(delta, state=True),
    "gated delta with states, v first": partial(delta, state=True, v_first=True),
    "gated delta, heads of 64": partial(delta, state=True, D=64),
    "delta, heads of 64": partial(delta, gated=False, state=True, D=64),
    "gated delta, float16": partial(delta, state=True, dtype=torch.float16),
    "gated delta, groups": partial(delta, state=True, HV=8),
    "gated delta, 64 beside 128": partial(delta, state=True, V=64),
    "gated delta, 256 beside 64": partial(delta, state=True, D=64, V=256)}
KERNELS = {**dict.fromkeys(CALLS, "simple_gla_overlapped"), **dict.fromkeys(DELTA, "delta_overlapped")}
ALL: dict[str, Call] = {**CALLS, **DELTA}
