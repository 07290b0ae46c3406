"""Bitwise checks of ``settings(invariant=True)``, for the interpreter and for a GPU.

The result of a row may depend neither on the rest of the batch nor on later tokens.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

import flashlin
from flashlin.testing.compare import poisoned

B = 2
OPS = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla", "chunk_rwkv6", "chunk_kda",
       "chunk_dplr_delta_rule", "chunk_hgrn")
Tensors = dict[str, torch.Tensor]


def inputs(op: str, T: int, H: int, D: int, device: torch.device, dtype: torch.dtype) -> Tensors:
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(B, T, *shape, device=device, generator=generator)
    q, k, v = (drawn(H, D).to(dtype) for _ in "qkv")
    k = F.normalize(k.float(), dim=-1).to(dtype)
    g, gk, beta = F.logsigmoid(drawn(H) + 2), F.logsigmoid(drawn(H, D) + 2), drawn(H).sigmoid().to(dtype)
    return {"chunk_simple_gla": {"q": q, "k": k, "v": v, "g": g},
            "chunk_gated_delta_rule": {"q": q, "k": k, "v": v, "g": g, "beta": beta},
            "chunk_gla": {"q": q, "k": k, "v": v, "g": gk},
            "chunk_rwkv6": {"r": q, "k": k, "v": v, "w": gk, "u": q[0, 0]},
            "chunk_kda": {"q": q, "k": k, "v": v, "g": gk, "beta": beta},
            "chunk_dplr_delta_rule": {"q": q, "k": k, "v": v, "a": -k, "b": k * beta[..., None], "gk": gk},
            # Slow decays: with fast ones, nothing of one segment's state would reach the next segment.
            "chunk_hgrn": {"x": v.flatten(2), "g": (gk / 50).to(dtype).flatten(2)}}[op]


def run(op: str, x: Tensors, h0: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    with poisoned():
        o, ht = getattr(flashlin, op)(**x, initial_state=h0, output_final_state=True)
    return o, ht


def compare(op: str, x: Tensors, prefix: int, cut: int) -> None:
    """Fail unless partial calls give bitwise the results of the whole call.

    The partial calls are each row alone, the first ``prefix`` tokens, and two consecutive pieces.
    cut: token at which the second piece starts; must be a chunk boundary.
    """
    def of(rows: slice, tokens: slice) -> Tensors:
        return {name: t if name == "u" else t[rows, tokens].contiguous() for name, t in x.items()}
    every = slice(None)
    o, ht = run(op, x)
    assert bool(o.isfinite().all() and ht.isfinite().all())
    for b in range(B):
        alone, state = run(op, of(slice(b, b + 1), every))
        assert torch.equal(alone[0], o[b]) and torch.equal(state[0], ht[b]), f"row {b} alone"
    before, _ = run(op, of(every, slice(prefix)))
    assert torch.equal(before, o[:, :prefix]), f"a prefix of {prefix} tokens"
    first, state = run(op, of(every, slice(cut)))
    second, state = run(op, of(every, slice(cut, None)), state)
    assert torch.equal(torch.cat([first, second], 1), o) and torch.equal(state, ht), f"in pieces at {cut}"
