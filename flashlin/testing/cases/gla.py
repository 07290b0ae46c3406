"""Cases of gated linear attention: decays at both ends and side by side, states, packed sequences, odd
sizes."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.gla.reference import recurrence
from flashlin.kernels.recurrent.reference import recurrence as recurrence_of_others
from flashlin.testing.cases import forgetting
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.008, "dg": 0.02, "dgk": 0.02, "dgv": 0.02}


def make(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    B: int = 2,
    T: int = 150,
    H: int = 2,
    K: int = 64,
    V: int = 64,
    gate: str = "random",
    kind: str = "random",
    state: bool = True,
    v_first: bool = False,
    edges: tuple[int, ...] = (),
    name: str = "g",
    values: bool = False,
) -> Tensors:
    """gate: one of forgetting.KINDS; ``strong`` (uniform in -20 .. 0, the first channel all -20, the second
    all 0); or a number. name: what the op calls its gate, "" for none. values: gv, too."""
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)
    if edges:
        B, T = 1, edges[-1]
    q, k, v = (randn(B, T, H, D).to(dtype) for D in (K, K, V))
    if kind == "constant":
        q, k, v = (torch.full_like(x, 0.5) for x in (q, k, v))
    elif kind == "one-key":
        k = k[:, :1].expand_as(k).contiguous()
    made = {"q": q, "k": k, "v": v}
    if name:
        if gate == "strong":
            g = -20 * torch.rand(B, T, H, K, generator=generator)
            g[..., 0], g[..., 1] = -20, 0
        elif gate in forgetting.KINDS:
            g = forgetting.KINDS[gate](F.logsigmoid(randn(B, T, H, K) + 2))
        else:
            g = torch.full((B, T, H, K), float(gate))
        made[name] = g
    if values:
        made["gv"] = forgetting.KINDS[gate](F.logsigmoid(randn(B, T, H, V)))
    if state:
        N = len(edges) - 1 if edges else B
        made["initial_state"] = randn(N, H, V, K) if v_first else randn(N, H, K, V)
    if edges:
        made["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32)
    return {name: x.to(device) for name, x in made.items()}


def call(op: str, extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    o, ht = getattr(flashlin, op)(**tensors, **extra, output_final_state=True)
    return {"o": o, "ht": ht}


def reference(
    extra: dict[str, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Tensors:
    h0 = initial_state.mT if extra.get("state_v_first") and initial_state is not None else initial_state
    scale = extra.get("scale", q.shape[3] ** -0.5)
    if gv is None and not extra.get("reverse"):
        gate = g if g is not None else gk if gk is not None else torch.zeros_like(q)
        o, ht = recurrence(q, k, v, gate, h0, cu_seqlens, scale)
    else:
        o, ht = recurrence_of_others(q, k, v, gk=gk, gv=gv, h0=h0, bounds=cu_seqlens, scale=scale,
                                     reverse=extra.get("reverse", False))
    return {"o": o, "ht": ht.mT if extra.get("state_v_first") else ht}


def _case(op: str, id: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    extra = extra or {}
    return Case(op, id, partial(make, **facts), partial(call, op, extra), partial(reference, extra),
                TOLERANCES, (), quick)


V_FIRST, REVERSE = {"state_v_first": True}, {"reverse": True}
_chunk = partial(_case, "chunk_gla")
_token = partial(_case, "fused_recurrent_gla", name="gk")
CASES: list[Case] = [
    _chunk("random", quick=True), _chunk("constant", kind="constant"), _chunk("one-key", kind="one-key"),
    _chunk("g=0", gate="0"), _chunk("g=-20", gate="-20"), _chunk("g=-1", gate="-1"),
    _chunk("strong", gate="strong"), _chunk("strong-no-state", gate="strong", state=False, T=64),
    _chunk("resets", gate="resets"), _chunk("resets-packed", gate="resets", K=32, edges=(0, 4, 4, 70, 100)),
    _chunk("every-other", gate="every-other", K=32, V=32, T=128, B=1), _chunk("g=-inf", gate="-inf", T=20),
    _chunk("packed", {"scale": -0.7}, edges=(0, 1, 1, 66, 130, 150)),
    _chunk("strong-packed", gate="strong", edges=(0, 17, 97, 97, 130)), _chunk("wide", K=128, V=128, T=100),
    _chunk("narrow", K=64, V=32, T=70),
    _chunk("odd", K=100, V=36, T=70), _chunk("v-first", V_FIRST, v_first=True, K=24, V=40, T=70),
    _chunk("one-token", T=1), _chunk("short", T=21), _chunk("K=256,V=256", K=256, V=256, B=1, T=80),
    _chunk("K=512,V=64", K=512, B=1, T=80), _chunk("K=64,V=512", V=512, B=1, T=80),
    _chunk("K=129,V=20", K=129, V=20, B=1, T=80),
    _token("random", quick=True, T=8, H=1, K=32, V=32),
    _token("strong", gate="strong", T=12, K=32, V=40, B=1),
    _token("resets", gate="resets", values=True, T=9, K=16, V=24),
    _token("ungated", name="", T=6, K=16, V=24), _token("both-gates", values=True, T=6, K=16, V=24),
    _token("values-only", name="", values=True, T=5, K=16),
    _token("packed", {"scale": -0.7}, edges=(0, 1, 1, 5, 9), K=16, V=24),
    _token("v-first", V_FIRST, v_first=True, K=24, V=40, T=6), _token("reverse", REVERSE, T=6, K=16, V=24),
    _token("reverse-packed", REVERSE, edges=(0, 0, 3, 5), K=16, V=24, values=True),
    _token("segments", B=1, H=1, T=66, K=16, V=16),
    _token("ungated-segments", name="", B=1, H=1, T=66, K=16, V=16), _token("one-token", T=1)]
