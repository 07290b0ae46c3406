"""Cases of the ops token by token: keys that repeat, keys that are too long, gates at both ends, groups, odd
sizes, packed rows.

Short, because Triton's interpreter runs them too: what depends on the length (the states kept for backward)
has cases of more tokens.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.delta.reference import recurrence
from flashlin.kernels.pointwise.reference import gate as decay_of_channels
from flashlin.kernels.recurrent.reference import recurrence as recurrence_of_others
from flashlin.ops._common.preprocess import beta_of_logits, decay_of_gate, l2normalized
from flashlin.testing.cases import forgetting
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.006, "d*": 0.008, "dbeta": 0.02, "dg": 0.02, "dgk": 0.02, "dgv": 0.02, "dA_log": 0.02,
              "ddt_bias": 0.02}


def make(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    B: int = 2,
    T: int = 8,
    H: int = 1,
    HV: int = 1,
    K: int = 32,
    V: int = 32,
    keys: str = "unit",
    beta: str = "random",
    gates: dict[str, str] | None = None,
    state: bool = True,
    v_first: bool = False,
    raw: bool = False,
    edges: tuple[int, ...] = (),
    pool: tuple[int, ...] = (),
) -> Tensors:
    """keys: ``unit`` (random, of length 1), ``one`` (a single one), ``period`` (four of them), ``alike`` (of
    silu(randn + 2)), ``long`` (of length sqrt(K)), ``zero`` (every other one). beta: ``random``,
    ``headwise``, a number or ``""``. gates: of forgetting.KINDS or numbers, by name. raw: gate and beta as
    they are before softplus and sigmoid, from far below to far above zero. pool: the state_indices, into six
    states."""
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)
    if edges:
        B, T = 1, edges[-1]
    k = randn(B, T, H, K)
    if keys == "one":
        k = k[:, :1].expand_as(k)
    elif keys == "period":
        k = k[:, torch.arange(T) % 4]
    elif keys == "alike":
        k = F.silu(k + 2)
    if keys != "long":
        k = F.normalize(k, dim=-1)
    if keys == "zero":
        k[:, ::2] = 0
    made = {"q": randn(B, T, H, K).to(dtype), "k": k.to(dtype).contiguous(),
            "v": randn(B, T, HV, V).to(dtype)}
    sizes = {"g": (B, T, HV), "gk": (B, T, HV, K), "gv": (B, T, HV, V)}
    for name, gate in (gates or {}).items():
        shape = sizes[name]
        given = forgetting.KINDS[gate](F.logsigmoid(randn(*shape)
                                                    + 2)) if gate in forgetting.KINDS else torch.full(shape,
                                                                                                      float(
                                                                                                          gate))
        made[name] = forgetting.raw(gate, 8 * randn(*shape)) if raw and name == "g" else given
    if raw:
        made.update(A_log=torch.rand(HV, generator=generator), dt_bias=randn(HV))
    shape = (B, T, HV, V) if beta == "headwise" else (B, T, HV)
    if beta in ("random", "headwise"):
        made["beta"] = randn(*shape) if raw else randn(*shape).sigmoid()
    elif beta:
        made["beta"] = torch.full(shape, float(beta))
    if state:
        N = 6 if pool else len(edges) - 1 if edges else B
        made["initial_state"] = randn(N, HV, V, K) if v_first else randn(N, HV, K, V)
    if edges:
        made["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32)
    if pool:
        made["state_indices"] = torch.tensor(pool)
    return {name: x.to(device) for name, x in made.items()}


def call(op: str, extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    function: Callable[..., Any] = getattr(flashlin, op)
    o, ht = function(**tensors, **extra, output_final_state=True)
    return {"o": o, "ht": ht}


def reference(
    extra: dict[str, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
) -> Tensors:
    if state_indices is not None:
        return _pooled(extra, state_indices, initial_state, q=q, k=k, v=v, beta=beta, g=g, gk=gk, gv=gv,
                       A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens)
    if extra.get("use_qk_l2norm_in_kernel"):
        q, k = l2normalized(q), l2normalized(k)
    if g is not None and A_log is not None:
        g = decay_of_gate(g, A_log, dt_bias)
    if beta is not None and extra.get("use_beta_sigmoid_in_kernel"):
        beta = beta_of_logits(beta, extra.get("allow_neg_eigval", False))
    h0 = initial_state.mT if extra.get("state_v_first") and initial_state is not None else initial_state
    o, ht = recurrence(
        q, k, v, beta=beta, g=g, h0=h0, cu_seqlens=cu_seqlens, scale=extra.get("scale", q.shape[3] ** -0.5),
        gk=gk, gv=gv)
    return {"o": o, "ht": ht.mT if extra.get("state_v_first") else ht}


def _pooled(extra: dict[str, Any], indices: torch.Tensor, pool: torch.Tensor | None,
            **tensors: Any) -> Tensors:
    """What becomes of a pool of states: a sequence of a negative index neither reads nor writes, and its
    outputs are zeros."""
    assert pool is not None
    found = reference(extra, initial_state=pool[indices.clamp(min=0)], **tensors)
    o, after, edges = found["o"].clone(), pool.clone(), tensors["cu_seqlens"]
    for n, at in enumerate(indices.tolist()):
        if at >= 0:
            after[at] = found["ht"][n]
        elif edges is None:
            o[n] = 0
        else:
            o[0, edges[n]:edges[n + 1]] = 0
    return {"o": o, "ht": after}


NORM, V_FIRST = {"use_qk_l2norm_in_kernel": True}, {"state_v_first": True}
LAYER = {**NORM, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
PACKED = (0, 1, 1, 5, 9)


def _case(op: str, name: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    extra = extra or {}
    return Case(op, name, partial(make, **facts), partial(call, op, extra), partial(reference, extra),
                TOLERANCES, (), quick)


def _inference(op: str, name: str, extra: dict[str, Any], **facts: Any) -> Case:
    """Without gradients, where the kernel does the norms, the gate and the sigmoid itself, and states may be
    a pool."""
    tensors = ("q", "k", "v", "beta", "g", "gk", "gv", "A_log", "dt_bias", "initial_state")
    return _case(op, name, extra, **facts)._replace(constant=tensors)


_delta = partial(_case, "fused_recurrent_delta_rule")
_gated = partial(_case, "fused_recurrent_gated_delta_rule")
G = {"g": "random"}
CASES: list[Case] = [
    _delta("random", quick=True), _delta("no-state", state=False), _delta("no-beta", beta="", keys="alike"),
    _delta("one-key,beta=1", keys="one", beta="1"), _delta("one-key,beta=2", keys="one", beta="2"),
    _delta("period-4", keys="period"), _delta("alike", keys="alike"),
    _delta("headwise", beta="headwise", V=40, B=1), _delta("l2norm", NORM, keys="long"),
    _delta("zero-keys", NORM, keys="zero"), _delta("groups-of-3", H=1, HV=3, B=1, T=6),
    _delta("packed", edges=PACKED), _delta("v-first", V_FIRST, v_first=True, K=24, V=40, B=1, T=6),
    _delta("segments", B=1, T=66, K=16, V=16), _gated("random", quick=True, gates=G),
    _gated("g=0", gates={"g": "0"}), _gated("g=-20", gates={"g": "-20"}),
    _gated("resets", gates={"g": "resets"}, HV=2),
    _gated("all-resets", gates={"g": "random", "gk": "resets", "gv": "resets"}),
    _gated("resets-packed", gates={"g": "resets"}, edges=PACKED, HV=2),
    _gated("beta=0", gates=G, beta="0"), _gated("one-key,beta=2", gates={"g": "-0.05"}, keys="one", beta="2"),
    _gated("long-keys,g=-6", gates={"g": "-6"}, keys="long"),
    _gated("all-gates", gates={"g": "random", "gk": "random", "gv": "random"}),
    _gated("odd", NORM, gates=G, beta="headwise", K=23, V=37, B=1, T=8),
    _gated("groups", gates=G, H=2, HV=4, B=1, T=6),
    _gated("layer", {**LAYER, **V_FIRST}, gates=G, raw=True, keys="long", v_first=True),
    _gated("layer-resets", LAYER, gates={"g": "resets"}, raw=True, HV=2),
    _gated("packed", {"scale": -0.7}, gates={"g": "random", "gk": "random"}, edges=PACKED),
    _gated("segments-packed", gates={"g": "random"}, edges=(0, 65, 67), K=16, V=16),
    _gated("one-token", gates=G, T=1), _gated("ungated", beta="headwise"),
    _gated("wide", NORM, gates=G, B=1, T=3, K=128, V=128),
    _gated("widest", NORM, gates=G, B=1, T=2, K=512, V=40)]
_GATED = "fused_recurrent_gated_delta_rule"
CASES += [
    _inference(_GATED, "inference", LAYER, gates={"g": "random", "gk": "random", "gv": "random"}, raw=True,
               keys="long", H=1, HV=2, T=6, V=40),
    _inference(_GATED, "pool", {**LAYER, **V_FIRST}, gates=G, raw=True, v_first=True, B=3, T=1, H=1, HV=3,
               K=64, V=64, pool=(4, -1, 0)),
    _inference(_GATED, "pool-packed", {}, gates=G, beta="headwise", edges=(0, 2, 2, 5, 9),
               pool=(5, 1, -7, 0)),
    _inference("fused_recurrent_delta_rule", "in-place", {**NORM, "inplace_state": True}, B=2, T=3)]


# Kimi Delta Attention: the decay of channels is called g, and its gate has a bias for each of them.

def make_kda(device: torch.device, dtype: torch.dtype, generator: torch.Generator, *, raw: bool = False,
             scaled: bool = True, decay: str = "random", **facts: Any) -> Tensors:
    """raw: as for make; scaled: with an A_log, too."""
    made = make(device, dtype, generator, raw=raw, gates={"gk": decay}, **facts)
    made["g"] = made.pop("gk")
    if raw:
        shape = made["g"].shape
        made["g"] = 8 * torch.randn(shape, generator=generator).to(device)
        made["dt_bias"] = torch.randn(shape[2] * shape[3], generator=generator).to(device)
        if not scaled:
            del made["A_log"]
    return made


def reference_kda(extra: dict[str, Any], g: torch.Tensor, A_log: torch.Tensor | None = None,
                  dt_bias: torch.Tensor | None = None, **tensors: torch.Tensor) -> Tensors:
    if extra.get("use_gate_in_kernel"):
        g = decay_of_channels(g, A_log, dt_bias, extra.get("lower_bound"))
    return reference(extra, gk=g, **tensors)


def _kda(name: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    return _case("fused_recurrent_kda", name, extra, quick)._replace(make=partial(make_kda, **facts),
                                                                     reference=partial(reference_kda,
                                                                                       extra or {}))


BOUND = {"lower_bound": -5.0}
POOL = ("q", "k", "v", "beta", "g", "A_log", "dt_bias", "initial_state")
CASES += [
    _kda("random", quick=True, T=6), _kda("g=-20", decay="-20", T=4), _kda("resets", decay="resets"),
    _kda("odd", NORM, beta="headwise", K=23, V=37, B=1, T=6),
    _kda("groups-packed", {"scale": -0.7}, H=1, HV=2, edges=PACKED), _kda("segments", B=1, T=66, K=16, V=16),
    _kda("layer", {**LAYER, **V_FIRST}, raw=True, keys="long", v_first=True, T=6),
    _kda("bounded", {**LAYER, **BOUND}, raw=True, T=6, keys="long"),
    _kda("bounded-unscaled", {**LAYER, **BOUND}, raw=True, scaled=False, B=1, T=5),
    _kda("inference", LAYER, raw=True, keys="long", H=1, HV=2, T=5, V=40)._replace(constant=POOL),
    _kda("pool", {**LAYER, **BOUND, **V_FIRST}, raw=True, v_first=True, B=3, T=1, H=1, HV=3, K=64, V=64,
         pool=(4, -1, 0))._replace(constant=POOL)]


# The others: what reads before it stores (rwkv6), what takes back with vectors of its own (dplr, iplr,
# rwkv7); and through the plumbing that all of them share, what no public op of this file does. Names are
# those of the reference; the ops have others for some.
RENAMED = {"fused_recurrent_rwkv6": {"q": "r", "gk": "w", "bonus": "u"},
           "fused_recurrent_rwkv7": {"q": "r", "gk": "w"},
           "fused_mul_recurrent_rwkv7": {"q": "r", "gk": "w", "a": "kk", "b": "a"}}


def make_other(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    op: str = "recurrent",
    given: str,
    T: int = 5,
    HV: int = 2,
    K: int = 16,
    V: int = 24,
    gate: str = "random",
    edges: tuple[int, ...] = (),
) -> Tensors:
    """given: the optional tensors, by name. gate: one of forgetting.KINDS."""
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)
    B = 1
    T = edges[-1] if edges else T
    unit, rate = F.normalize(randn(B, T, HV, K), dim=-1), randn(B, T, HV, K).sigmoid()
    made = {"q": randn(B, T, HV, K).to(dtype), "k": randn(B, T, HV, K).to(dtype),
            "v": randn(B, T, HV, V).to(dtype), "h0": randn(len(edges) - 1 if edges else B, HV, K, V)}
    special = forgetting.KINDS[gate]
    every = {"g": special(F.logsigmoid(randn(B, T, HV))), "gamma": -torch.rand(HV, generator=generator),
             "gk": special(F.logsigmoid(randn(B, T, HV, K))), "gv": special(F.logsigmoid(randn(B, T, HV, V))),
             "bonus": randn(HV, K), "a": -unit.to(dtype), "b": (unit * rate).to(dtype)}
    if op == "fused_mul_recurrent_rwkv7":
        every.update(a=unit.to(dtype), b=rate.to(dtype))
    made.update({name: every[name] for name in given.split()})
    if edges:
        made["bounds"] = torch.tensor(edges)
    return {_names(op).get(name, name): x.to(device) for name, x in made.items()}


def _names(op: str) -> dict[str, str]:
    return {} if op == "recurrent" else {"h0": "initial_state", "bounds": "cu_seqlens", **RENAMED.get(op, {})}


def call_other(flags: tuple[str, ...], **tensors: torch.Tensor) -> Tensors:
    from flashlin.kernels.recurrent.inputs import Inputs
    from flashlin.ops._common import recurrent
    o, ht = recurrent.run("recurrent", Inputs(**tensors), flags, has_ht=True)
    assert ht is not None
    return {"o": o, "ht": ht}


def reference_other(op: str, extra: dict[str, Any], before: bool, **tensors: torch.Tensor) -> Tensors:
    back = {ours: name for name, ours in _names(op).items()}
    given = {back.get(name, name): x for name, x in tensors.items()}
    if op == "fused_mul_recurrent_rwkv7":
        given.update(a=-given["a"], b=given["a"] * given["b"])
    scale = extra.get("scale", 1.0 if op == "fused_mul_recurrent_rwkv7" else given["q"].shape[3] ** -0.5)
    o, ht = recurrence_of_others(**given, scale=scale, before=before, reverse=extra.get("reverse", False))
    return {"o": o, "ht": ht}


def _other(name: str, given: str, flags: tuple[str, ...] = (), **facts: Any) -> Case:
    return Case("recurrent", name, partial(make_other, given=given, **facts), partial(call_other, flags),
                partial(reference_other, "recurrent", dict.fromkeys(flags, True), "before" in flags),
                TOLERANCES, ("gamma",))


def _public(op: str, given: str, name: str, extra: dict[str, Any] | None = None, quick: bool = False,
            **facts: Any) -> Case:
    extra = extra or {}
    return Case(op, name, partial(make_other, op=op, given=given, **facts), partial(call, op, extra),
                partial(reference_other, op, extra, "bonus" in given), {**TOLERANCES, "du": 0.02, "dw": 0.02},
                (), quick)


def _inference_of(case: Case) -> Case:
    return case._replace(constant=("q", "r", "w", "k", "v", "kk", "a", "b", "gk", "u", "initial_state"))


REVERSE = {"reverse": True}
_rwkv6, _rwkv7 = partial(_public, "fused_recurrent_rwkv6", "gk bonus"), partial(_public,
                                                                                "fused_recurrent_rwkv7",
                                                                                "gk a b")
_mul, _dplr = partial(_public, "fused_mul_recurrent_rwkv7", "gk a b"), partial(_public,
                                                                               "fused_recurrent_dplr_delta_rule", "gk a b")
_iplr = partial(_public, "fused_recurrent_iplr_delta_rule", "a b")
CASES += [
    _other("linear", ""), _other("gla", "gk gv"),
    _other("gla-reverse-packed", "gk gv", ("reverse",), edges=(0, 0, 3, 5)),
    _other("retention-reverse", "gamma", ("reverse",)), _other("simple-gla", "g gamma"),
    _other("before", "g", ("before",)), _rwkv6("random", quick=True, V=40),
    _rwkv6("packed", {"scale": 1.0}, edges=(0, 3, 5)), _rwkv6("reverse", REVERSE),
    _rwkv6("resets", gate="resets"), _dplr("resets", gate="resets"), _rwkv6("segments", HV=1, T=66, V=16),
    _inference_of(_rwkv6("decoding", {"scale": 1.0}, T=1)), _rwkv7("random", {"scale": 1.0}, quick=True),
    _rwkv7("packed", edges=(0, 0, 3, 5)), _inference_of(_rwkv7("decoding", T=1)),
    _mul("random", quick=True), _mul("reverse-packed", {**REVERSE, "scale": 0.5}, edges=(0, 3, 5, 5)),
    _mul("segments", HV=1, T=66, V=16), _inference_of(_mul("inference", T=4, V=40)),
    _dplr("random", quick=True, V=40), _dplr("odd", K=23, V=37),
    _dplr("reverse-packed", REVERSE, edges=(0, 3, 5, 5)), _iplr("random", quick=True),
    _iplr("packed", {"scale": -0.7}, edges=(0, 0, 3, 5))]
