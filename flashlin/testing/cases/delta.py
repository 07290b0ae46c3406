"""Inputs of the delta families. Besides random ones: keys that resemble each other, which break a careless
inverse, and extreme gates."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.delta.reference import recurrence
from flashlin.testing.cases import forgetting
from flashlin.testing.compare import Case, Maker, Tensors

TOLERANCES = {"*": 0.006, "d*": 0.008, "dbeta": 0.02, "dg": 0.02, "dA_log": 0.02, "ddt_bias": 0.02}
# One key with beta = 1: every token overwrites the last one's value, so what the gates' gradients gain from
# the state they lose again through the prediction, and 16-bit states leave a trace of it.
FORGETFUL = {"dg": 0.05}
# One key with beta = 2 and no decay: every token reflects the state, so nothing is forgotten and each
# rounding of u to 16 bits is added up over the sequence (matrix/results/holes-delta-* has fla beside it).
# float32, which is held to 1e-4 as everywhere, keeps the digits.
REFLECTED = {"*": 0.6, "d*": 0.6, "dbeta": 0.6}
KEYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda x: F.normalize(x, dim=-1),
    "one-key": lambda x: F.normalize(x[:, :1].expand_as(x), dim=-1),
    "alike": lambda x: F.normalize(F.silu(x + 2), dim=-1),
    "period-4": lambda x: F.normalize(x[:, torch.arange(x.shape[1]) % 4 % max(x.shape[1], 1)], dim=-1),
    "raw": lambda x: x,
    "zero": torch.zeros_like}


def make(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    B: int = 2,
    T: int = 100,
    H: int = 2,
    HV: int = 2,
    K: int = 64,
    V: int = 64,
    keys: str = "random",
    beta: str = "random",
    gate: str = "none",
    state: bool = True,
    edges: tuple[int, ...] = (),
    raw_gates: bool = False,
) -> Tensors:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)
    if edges:
        B, T = 1, edges[-1]
    q, k, v = F.normalize(randn(B, T, H, K), dim=-1), KEYS[keys](randn(B, T, H, K)), randn(B, T, HV, V)
    made = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if gate != "none":
        g = randn(B, T, HV) if gate in forgetting.KINDS else torch.full((B, T, HV), float(gate))
        made["g"] = forgetting.raw(gate,
                                   g) if raw_gates else forgetting.KINDS[gate](
                                       F.logsigmoid(g)) if gate in forgetting.KINDS else g
    made["beta"] = randn(B, T, HV) if raw_gates else randn(B, T,
                                                           HV).sigmoid() if beta == "random" else torch.full(
                                                               (B, T, HV), float(beta))
    if raw_gates:
        made["A_log"], made["dt_bias"] = randn(HV) * 0.5, randn(HV)
    if state:
        made["initial_state"] = randn(len(edges) - 1 if edges else B, HV, K, V)
    if edges:
        made["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32)
    return {name: x.contiguous().to(device) for name, x in made.items()}


def call(function: Callable[..., Any], extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    o, ht = function(**tensors, **extra, output_final_state=True)
    return {"o": o, "ht": ht}


def reference(
    extra: dict[str, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Tensors:
    if extra.get("use_qk_l2norm_in_kernel"):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if A_log is not None:
        assert g is not None and dt_bias is not None
        g, beta = -A_log.exp() * F.softplus(g + dt_bias), 2 * beta.sigmoid()
    if initial_state is not None and extra.get("state_v_first"):
        initial_state = initial_state.mT
    o, ht = recurrence(q, k, v, beta, g, initial_state, cu_seqlens, q.shape[3] ** -0.5)
    return {"o": o, "ht": ht.mT if extra.get("state_v_first") else ht}


def _family(op: str) -> list[Case]:
    function = getattr(flashlin, op)
    gate = "random" if "gated" in op else "none"
    inside = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}

    def case(name: str, extra: dict[str, Any] | None = None, quick: bool = False,
             allowed: dict[str, float] | None = None, **facts: Any) -> Case:
        maker: Maker = partial(make, **{"gate": gate, **facts})
        return Case(op, name, maker, partial(call, function, extra or {}), partial(reference, extra or {}),
                    {**TOLERANCES, **(allowed or {})}, (), quick)
    l2 = {"use_qk_l2norm_in_kernel": True}
    cases = [case("random", quick=True), case("packed", edges=(0, 1, 1, 66, 130, 150)),
             case("no-state", state=False, T=64), case("one-token", T=1), case("odd", K=100, V=36, T=70),
             case("wide", K=128, V=128), case("narrow", K=64, V=32, T=70),
             case("grouped", H=2, HV=6, K=32, V=40, T=70),
             case("one-key", allowed=FORGETFUL, keys="one-key", beta="1"),
             case("one-key-2", allowed=None if "gated" in op else REFLECTED, keys="one-key", beta="2"),
             case("alike", keys="alike", beta="1"), case("alike-l2", l2, keys="alike"),
             case("period-4", keys="period-4", beta="1"), case("beta=0", beta="0"),
             case("zero-keys", l2, keys="zero", K=32, V=32, T=70)]
    if gate == "random":
        cases += [case("g=0", gate="0"), case("g=-20", gate="-20"),
                  case("raw-keys-g=-6", keys="raw", gate="-6"),
                  case("one-key-g=0", allowed=FORGETFUL, keys="one-key", beta="1", gate="0"),
                  case("gates", inside | l2, raw_gates=True),
                  case("gates-resets", inside | l2, raw_gates=True, gate="resets", K=32, V=32, T=70, B=1),
                  case("v-first", {"state_v_first": True}, K=32, V=32),
                  case("resets", gate="resets", K=32, V=40, B=1),
                  case("resets-packed", gate="resets", K=32, edges=(0, 4, 4, 70, 100)),
                  case("g=-inf", gate="-inf", T=20),
                  case("every-other", gate="every-other", K=32, V=32, T=128, B=1)]
    if op == "chunk_gated_delta_rule":
        cases += [case(f"K={K},V={V}", K=K, V=V, B=1, T=80, H=1, HV=1)
                  for K, V in ((96, 192), (256, 256), (256, 512), (512, 64), (129, 20))]
    return cases


CASES = [case for op in ("chunk_delta_rule", "chunk_gated_delta_rule") for case in _family(op)]
