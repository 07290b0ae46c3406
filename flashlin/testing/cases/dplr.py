"""Cases of the delta rules with a decay for each key channel: decays at both ends and side by side, keys that
resemble each other, vectors as the layers have them, states, packed sequences, odd sizes."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.dplr.reference import recurrence
from flashlin.kernels.pointwise.reference import gate as decay_of_channels
from flashlin.ops._common.preprocess import beta_of_logits, l2normalized
from flashlin.testing.cases import forgetting
from flashlin.testing.cases.delta import KEYS
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.006, "d*": 0.008, "dg": 0.02, "dgk": 0.02, "dw": 0.02, "dbeta": 0.02, "dA_log": 0.02,
              "ddt_bias": 0.02}
# One key that every token overwrites or, with a rate of 2 and no decay, reflects: what gradients gain they
# lose again, and rounding to 16 bits is never forgotten. float32, which is held to 1e-4 as everywhere, keeps
# the digits.
FORGETFUL = {"dbeta": 0.06, "dg": 0.05, "dgk": 0.05, "da": 0.02, "db": 0.02}
REFLECTED = dict.fromkeys(("*", "d*", "dg", "dgk", "dbeta"), 0.1)
# What the ops call the recurrence's tensors.
NAMES = {"chunk_kda": {}, "chunk_rwkv7": {"q": "r", "g": "w"}, "chunk_dplr_delta_rule": {"g": "gk"},
         "chunk_iplr_delta_rule": {}}


def make(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    op: str,
    B: int = 1,
    T: int = 100,
    H: int = 2,
    HV: int = 0,
    K: int = 64,
    V: int = 64,
    keys: str = "random",
    rate: str = "random",
    gate: str = "random",
    free: bool = False,
    state: bool = True,
    v_first: bool = False,
    edges: tuple[int, ...] = (),
    raw: bool = False,
) -> Tensors:
    """rate: beta, or how much of what a reads b writes back: a = -k', b = rate k', k' like the keys. free: a
    and b have nothing to do with each other. gate: one of forgetting.KINDS; ``layer`` (uniform in -0.607 ..
    0); ``strong`` (uniform in -20 .. 0, the first channel all -20, the second all 0); or a number. raw: gates
    that become decays inside the op."""
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)
    if edges:
        B, T = 1, edges[-1]
    HV = HV or H
    q, k, v = F.normalize(randn(B, T, H, K), dim=-1), KEYS[keys](randn(B, T, H, K)), randn(B, T, HV, V)
    made = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if raw:
        made["g"] = forgetting.raw(gate, 4 * randn(B, T, HV, K))
    elif gate == "strong":
        made["g"] = -20 * torch.rand(B, T, HV, K, generator=generator)
        made["g"][..., 0], made["g"][..., 1] = -20, 0
    elif gate == "layer":
        made["g"] = -0.6065306597 * torch.rand(B, T, HV, K, generator=generator)
    elif gate in forgetting.KINDS:
        made["g"] = forgetting.KINDS[gate](F.logsigmoid(randn(B, T, HV, K) + 2))
    else:
        made["g"] = torch.full((B, T, HV, K), float(gate))
    if op == "chunk_kda":
        beta = randn(B, T, HV)
        made["beta"] = beta if raw else beta.sigmoid() if rate == "random" else torch.full_like(beta,
                                                                                                float(rate))
    else:
        read = KEYS[keys](randn(B, T, HV, K))
        share = randn(B, T, HV, K).sigmoid() if rate == "random" else float(rate)
        made["a"], made["b"] = (-read).to(dtype), (F.normalize(randn(B, T, HV, K), dim=-1) / 2 if free
                                                   else read * share).to(dtype)
    if op == "chunk_iplr_delta_rule":
        del made["g"]
    if raw:
        made["A_log"], made["dt_bias"] = randn(HV) * 0.5, randn(HV * K)
    if state:
        N = len(edges) - 1 if edges else B
        made["initial_state"] = randn(N, HV, V, K) if v_first else randn(N, HV, K, V)
    if edges:
        made["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32)
    return {NAMES[op].get(name, name): x.contiguous().to(device) for name, x in made.items()}


def call(op: str, extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    o, ht = getattr(flashlin, op)(**tensors, **extra, output_final_state=True)
    return {"o": o, "ht": ht}


def reference(op: str, extra: dict[str, Any], initial_state: torch.Tensor | None = None,
              cu_seqlens: torch.Tensor | None = None, A_log: torch.Tensor | None = None,
              dt_bias: torch.Tensor | None = None, **tensors: torch.Tensor) -> Tensors:
    back = {ours: name for name, ours in NAMES[op].items()}
    given = {back.get(name, name): x for name, x in tensors.items()}
    q, k = given.pop("q"), given.pop("k")
    if extra.get("use_qk_l2norm_in_kernel"):
        q, k = l2normalized(q), l2normalized(k)
    g = given.pop("g", torch.zeros_like(q))
    if extra.get("use_gate_in_kernel"):
        g = decay_of_channels(g, A_log, dt_bias, extra.get("lower_bound"))
        given["beta"] = beta_of_logits(given["beta"], True)
    h0 = initial_state.mT if initial_state is not None and extra.get("state_v_first") else initial_state
    scale = extra.get("scale", 1.0 if op == "chunk_rwkv7" else q.shape[3] ** -0.5)
    o, ht = recurrence(q, k, given.pop("v"), g, **given, h0=h0, bounds=cu_seqlens, scale=scale)
    return {"o": o, "ht": ht.mT if extra.get("state_v_first") else ht}


def _case(op: str, id: str, extra: dict[str, Any] | None = None, quick: bool = False,
          allowed: dict[str, float] | None = None, **facts: Any) -> Case:
    extra = extra or {}
    return Case(op, id, partial(make, op=op, **facts), partial(call, op, extra),
                partial(reference, op, extra), {**TOLERANCES, **(allowed or {})}, (), quick)


def _shared(op: str) -> list[Case]:
    case = partial(_case, op)
    return [case("random", quick=True, T=70), case("batch", B=3), case("no-state", state=False, T=64),
            case("one-token", T=1), case("short", T=21, H=1),
            case("packed", {"scale": -0.7}, edges=(0, 1, 1, 66, 130, 150)), case("odd", K=100, V=36, T=70),
            case("wide", K=128, V=128), case("narrow", K=64, V=32, T=70), case("g=0", gate="0"),
            case("g=-20", gate="-20", T=70), case("strong", gate="strong"),
            case("strong-packed", gate="strong", edges=(0, 17, 97, 97, 130)), case("resets", gate="resets"),
            case("resets-packed", gate="resets", K=32, edges=(0, 4, 4, 70, 100)),
            case("every-other", gate="every-other", K=32, V=32, T=128, H=1),
            case("g=-inf", gate="-inf", T=20, H=1),
            case("one-key", allowed=FORGETFUL, keys="one-key", rate="1"),
            case("one-key-2", allowed=REFLECTED, keys="one-key", rate="2", gate="0"),
            case("one-key-g=0", allowed=FORGETFUL, keys="one-key", rate="1", gate="0"),
            case("alike", allowed=FORGETFUL, keys="alike", rate="1"), case("rate=0", rate="0", T=70),
            *(case(f"K={K},V={V}", K=K, V=V, H=1, T=80)
              for K, V in ((256, 256), (64, 512), (512, 64), (129, 20)))]


L2 = {"use_qk_l2norm_in_kernel": True}
GATES = {**L2, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
_kda, _dplr, _rwkv7, _iplr = (partial(_case, op)
                              for op in ("chunk_kda", "chunk_dplr_delta_rule", "chunk_rwkv7",
                                         "chunk_iplr_delta_rule"))
CASES = [
    *_shared("chunk_kda"), _kda("grouped", H=2, HV=6, K=32, V=40, T=40),
    _kda("v-first", {"state_v_first": True}, v_first=True, K=24, V=40, T=70),
    _kda("gates", GATES, raw=True, keys="raw", allowed={"dg": 0.03}),
    _kda("gates-resets", GATES, raw=True, gate="resets", K=32, V=32, T=70),
    _kda("bounded", {**GATES, "lower_bound": -5.0}, raw=True, keys="raw", T=70),
    _kda("zero-keys", L2, keys="zero", K=32, V=32, T=70),
    *_shared("chunk_dplr_delta_rule"), _dplr("free", free=True, T=70),
    _rwkv7("random", quick=True, gate="layer", T=70),
    _rwkv7("packed", gate="layer", edges=(0, 20, 20, 90), K=32, V=32),
    _rwkv7("alike", gate="layer", keys="alike", allowed=FORGETFUL), _iplr("random", quick=True, T=40),
    _iplr("free", free=True, T=70), _iplr("packed", {"scale": 0.5}, edges=(0, 20, 20, 90), K=32, V=32)]
