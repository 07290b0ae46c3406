"""settings(invariant=True): to the bit, what a row gives depends neither on the batch nor on what follows."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels import scans
from flashlin.testing.compare import poisoned

B, T, H, D, CUT = 2, 210, 1, 16, 128
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the setting does nothing, sequences are split."""
    monkeypatch.setattr(scans, "forced_parts", 3)
    with flashlin.settings(invariant=True):
        yield


def inputs(op: str) -> Tensors:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D) for _ in "qkv")
    k = F.normalize(k, dim=-1)
    g, gk = F.logsigmoid(torch.randn(B, T, H) + 2), F.logsigmoid(torch.randn(B, T, H, D) + 2)
    beta = torch.rand(B, T, H)
    return {"chunk_simple_gla": {"q": q, "k": k, "v": v, "g": g},
            "chunk_gated_delta_rule": {"q": q, "k": k, "v": v, "g": g, "beta": beta},
            "chunk_gla": {"q": q, "k": k, "v": v, "g": gk},
            "chunk_kda": {"q": q, "k": k, "v": v, "g": gk, "beta": beta},
            "chunk_dplr_delta_rule": {"q": q, "k": k, "v": v, "a": -k, "b": k * beta[..., None], "gk": gk},
            "chunk_hgrn": {"x": v.flatten(2), "g": gk.flatten(2)}}[op]


def run(op: str, x: Tensors, h0: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    with poisoned():
        o, ht = getattr(flashlin, op)(**x, initial_state=h0, output_final_state=True)
    return o, ht


@pytest.mark.parametrize("op", ["chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla", "chunk_kda",
                                "chunk_dplr_delta_rule", "chunk_hgrn"])
def test_a_row_alone_a_prefix_and_a_prefill_in_pieces(op: str) -> None:
    x = inputs(op)
    o, ht = run(op, x)
    for b in range(B):
        alone, state = run(op, {name: t[b:b + 1] for name, t in x.items()})
        assert torch.equal(alone[0], o[b]) and torch.equal(state[0], ht[b])
    prefix, _ = run(op, {name: t[:, :77] for name, t in x.items()})
    assert torch.equal(prefix, o[:, :77])
    first, state = run(op, {name: t[:, :CUT].contiguous() for name, t in x.items()})
    second, state = run(op, {name: t[:, CUT:].contiguous() for name, t in x.items()}, state)
    assert torch.equal(torch.cat([first, second], 1), o) and torch.equal(state, ht)
