"""Cases of the ops token by token: keys that repeat, keys that are too long, gates at both ends, groups, odd
sizes, packed rows.

Short, because Triton's interpreter runs them too: what depends on the length (the states kept for backward)
has cases of more tokens.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.delta.reference import recurrence
from flashlin.kernels.recurrent.reference import recurrence as recurrence_of_others
from flashlin.testing.cases import forgetting, sequences
from flashlin.testing.cases.inputs import KEYS, Draw, bounds, extents
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.sequences import INSIDE, L2, V_FIRST
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.006, "d*": 0.008, "dbeta": 0.02, "dg": 0.02, "dgk": 0.02, "dgv": 0.02, "dA_log": 0.02,
              "ddt_bias": 0.02}
# All tensors are constant in a case without gradients, where the kernel does the norms, the gate and the
# sigmoid itself, and states may be a pool.
INFERENCE = ("q", "k", "v", "r", "w", "beta", "g", "gk", "gv", "kk", "a", "b", "p", "u", "A_log", "dt_bias",
             "initial_state")
GATES = {"g": "B T HV", "gk": "B T HV K", "gv": "B T HV V"}


def forward_in_parts(case: Op, D: int) -> Case:
    """Without gradients, so that the reference has room for so many scans that each takes a whole state."""
    return case._replace(constant=INFERENCE)(f"in-parts-forward-{D}", gate=sequences.SLOW, B=16, T=1600,
                                             H=128 // D, K=D, V=D)


def make(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    B: int = 2,
    T: int = 8,
    H: int = 1,
    HV: int = 1,
    K: int = 32,
    V: int = 32,
    keys: str = "random",
    beta: str = "random",
    gates: Mapping[str, str] = MappingProxyType({}),
    state: bool = True,
    v_first: bool = False,
    raw: bool = False,
    edges: tuple[int, ...] = (),
    pool: tuple[int, ...] = (),
) -> Tensors:
    """keys: one of KEYS. beta: ``random``, ``headwise``, a number or ``""``. gates: as for Draw.decay, by
    name. raw: gate and beta as they are before softplus and sigmoid, from far below to far above zero. pool:
    the state_indices, into six states."""
    B, T, N = extents(B, T, edges)
    draw = Draw(generator, B=B, T=T, H=H, HV=HV, K=K, V=V, N=6 if pool else N)
    k = KEYS[keys](draw("B T H K"))
    made = {"q": draw("B T H K").to(dtype), "k": k.to(dtype).contiguous(), "v": draw("B T HV V").to(dtype)}
    for name, gate in gates.items():
        made[name] = draw.decay(gate, GATES[name])
        if raw and name == "g":  # instead: the numbers drawn after it depend on both draws
            made[name] = forgetting.raw(gate, 8 * draw(GATES[name]))
    if raw:
        made |= {"A_log": draw.uniform("HV"), "dt_bias": draw("HV")}
    if beta == "headwise":
        made["beta"] = draw.rates("random", "B T HV V", raw)
    elif beta:
        made["beta"] = draw.rates(beta, "B T HV", raw)
    if state:
        made["initial_state"] = draw("N HV V K" if v_first else "N HV K V")
    if pool:
        made["state_indices"] = torch.tensor(pool)
    return made | bounds(edges)


def reference(names: Mapping[str, str], state_indices: Tensor | None = None,
              **given: Any) -> tuple[Tensor, Tensor]:
    """names: see sequences.outputs. With a pool of states a sequence of a negative index neither reads nor
    writes, and its outputs are zeros."""
    if state_indices is None:
        return sequences.outputs(recurrence, names, **given)
    pool = given.pop("initial_state")
    o, ht = sequences.outputs(recurrence, names, initial_state=pool[state_indices.clamp(min=0)], **given)
    o, after, edges = o.clone(), pool.clone(), given.get("cu_seqlens")
    for n, at in enumerate(state_indices.tolist()):
        if at >= 0:
            after[at] = ht[n]
        elif edges is None:
            o[n] = 0
        else:
            o[0, edges[n]:edges[n + 1]] = 0
    return o, after


PACKED = (0, 1, 1, 5, 9)
_delta = Op("fused_recurrent_delta_rule", make, partial(reference, {}), TOLERANCES)
_gated = _delta._replace(name="fused_recurrent_gated_delta_rule")
G, ALL_GATES = {"g": "random"}, dict.fromkeys(GATES, "random")
CASES: list[Case] = [
    _delta("random", quick=True), _delta("no-state", state=False), _delta("no-beta", beta="", keys="alike"),
    _delta("one-key,beta=1", keys="one-key", beta="1"), _delta("one-key,beta=2", keys="one-key", beta="2"),
    _delta("period-4", keys="period-4"), _delta("alike", keys="alike"),
    _delta("headwise", beta="headwise", V=40, B=1), _delta("l2norm", L2, keys="raw"),
    _delta("zero-keys", L2, keys="every-other-zero"), _delta("groups-of-3", H=1, HV=3, B=1, T=6),
    _delta("packed", edges=PACKED), _delta("v-first", V_FIRST, v_first=True, K=24, V=40, B=1, T=6),
    _delta("segments", B=1, T=66, K=16, V=16), _gated("random", quick=True, gates=G),
    _gated("g=0", gates={"g": "0"}), _gated("g=-20", gates={"g": "-20"}),
    _gated("resets", gates={"g": "resets"}, HV=2),
    _gated("all-resets", gates={"g": "random", "gk": "resets", "gv": "resets"}),
    _gated("resets-packed", gates={"g": "resets"}, edges=PACKED, HV=2),
    _gated("beta=0", gates=G, beta="0"),
    _gated("one-key,beta=2", gates={"g": "-0.05"}, keys="one-key", beta="2"),
    _gated("long-keys,g=-6", gates={"g": "-6"}, keys="raw"),
    _gated("all-gates", gates=ALL_GATES),
    _gated("odd", L2, gates=G, beta="headwise", K=23, V=37, B=1, T=8),
    _gated("groups", gates=G, H=2, HV=4, B=1, T=6),
    _gated("layer", {**INSIDE, **V_FIRST}, gates=G, raw=True, keys="raw", v_first=True),
    _gated("layer-resets", INSIDE, gates={"g": "resets"}, raw=True, HV=2),
    _gated("packed", {"scale": -0.7}, gates={"g": "random", "gk": "random"}, edges=PACKED),
    _gated("segments-packed", gates={"g": "random"}, edges=(0, 65, 67), K=16, V=16),
    _gated("one-token", gates=G, T=1), _gated("ungated", beta="headwise"),
    _gated("wide", L2, gates=G, B=1, T=3, K=128, V=128),
    _gated("widest", L2, gates=G, B=1, T=2, K=512, V=40)]
_inference = _gated._replace(constant=INFERENCE)
CASES += [
    _inference("inference", INSIDE, gates=ALL_GATES, raw=True, keys="raw", H=1, HV=2, T=6, V=40),
    _inference("pool", {**INSIDE, **V_FIRST}, gates=G, raw=True, v_first=True, B=3, T=1, H=1, HV=3, K=64,
               V=64, pool=(4, -1, 0)),
    _inference("pool-packed", gates=G, beta="headwise", edges=(0, 2, 2, 5, 9), pool=(5, 1, -7, 0)),
    _delta._replace(constant=INFERENCE)("in-place", {**L2, "inplace_state": True}, B=2, T=3)]


# Kimi Delta Attention: the decay of channels is called g, and its gate has a bias for each of them.

def make_kda(dtype: torch.dtype, generator: torch.Generator, *, raw: bool = False, scaled: bool = True,
             decay: str = "random", **facts: Any) -> Tensors:
    """raw: as for make; scaled: with an A_log, too."""
    made = make(dtype, generator, raw=raw, gates={"gk": decay}, **facts)
    g = made.pop("gk")
    if not raw:
        return made | {"g": g}
    if not scaled:
        del made["A_log"]
    return made | {"g": 8 * torch.randn(g.shape, generator=generator),
                   "dt_bias": torch.randn(g[0, 0].numel(), generator=generator)}


_kda = Op("fused_recurrent_kda", make_kda, partial(reference, {"gk": "g"}), TOLERANCES)
_kda_inference = _kda._replace(constant=INFERENCE)
BOUND = {"lower_bound": -5.0}
CASES += [
    _kda("random", quick=True, T=6), _kda("g=-20", decay="-20", T=4), _kda("resets", decay="resets"),
    _kda("odd", L2, beta="headwise", K=23, V=37, B=1, T=6),
    _kda("groups-packed", {"scale": -0.7}, H=1, HV=2, edges=PACKED), _kda("segments", B=1, T=66, K=16, V=16),
    _kda("layer", {**INSIDE, **V_FIRST}, raw=True, keys="raw", v_first=True, T=6),
    _kda("bounded", {**INSIDE, **BOUND}, raw=True, T=6, keys="raw"),
    _kda("bounded-unscaled", {**INSIDE, **BOUND}, raw=True, scaled=False, B=1, T=5),
    _kda_inference("decoding-many", B=512, T=1, H=2, HV=2, K=128, V=64),
    _kda_inference("inference", INSIDE, raw=True, keys="raw", H=1, HV=2, T=5, V=40),
    _kda_inference("pool", {**INSIDE, **BOUND, **V_FIRST}, raw=True, v_first=True, B=3, T=1, H=1, HV=3, K=64,
                   V=64, pool=(4, -1, 0))]


# The others: what reads before it stores (rwkv6), what takes back with vectors of its own (dplr, iplr,
# rwkv7); and through the plumbing that all of them share, what no public op of this file does. Names are
# those of the reference; the ops have others for some.

def make_other(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    given: Collection[str],
    names: Mapping[str, str],
    unsigned: bool = False,
    T: int = 5,
    HV: int = 2,
    K: int = 16,
    V: int = 24,
    gate: str = "random",
    edges: tuple[int, ...] = (),
) -> Tensors:
    """given: the optional tensors. names: the op's, where they are not the reference's. unsigned: a and b as
    the layer has them, a vector and its rate. gate: as for Draw.decay."""
    B, T, N = extents(1, T, edges)
    draw = Draw(generator, B=B, T=T, HV=HV, K=K, V=V, N=N)
    unit, rate = F.normalize(draw("B T HV K"), dim=-1), draw("B T HV K").sigmoid()
    made = {"q": draw("B T HV K").to(dtype), "k": draw("B T HV K").to(dtype), "v": draw("B T HV V").to(dtype),
            "h0": draw("N HV K V")}
    optional = {"g": draw.decay(gate, "B T HV", 0.0), "gamma": -draw.uniform("HV"),
                "gk": draw.decay(gate, "B T HV K", 0.0), "gv": draw.decay(gate, "B T HV V", 0.0),
                "bonus": draw("HV K"), "a": (unit if unsigned else -unit).to(dtype),
                "b": (rate if unsigned else unit * rate).to(dtype)}
    made |= {name: optional[name] for name in given}
    if edges:
        made["bounds"] = torch.tensor(edges)
    return {names.get(name, name): x for name, x in made.items()}


def call_other(**given: Any) -> tuple[Tensor, Tensor | None]:
    from flashlin.kernels.recurrent.inputs import Inputs
    from flashlin.ops._common import recurrent
    flags = tuple(name for name in ("reverse", "before") if given.pop(name, False))
    return recurrent.run_recurrent("recurrent", Inputs(**given), flags, has_ht=True)


def _unsigned(a: Tensor, b: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    return recurrence_of_others(a=-a, b=a * b, **rest)


def _public(op: str, given: Collection[str], renamed: Mapping[str, str] = MappingProxyType({}),
            unsigned: bool = False, **options: Any) -> Op:
    """options: what the reference does of itself where the op is not told."""
    names = {**sequences.NAMES, **renamed}
    formula = _unsigned if unsigned else recurrence_of_others
    return Op(op, partial(make_other, given=given, names=names, unsigned=unsigned),
              partial(sequences.outputs, formula, names, **options), {**TOLERANCES, "du": 0.02, "dw": 0.02})


REVERSE = {"reverse": True}
DPLR, RWKV = ("gk", "a", "b"), {"q": "r", "gk": "w"}
_other = Op("recurrent", partial(make_other, names={}), partial(sequences.outputs, recurrence_of_others, {}),
            TOLERANCES, always={}, call=call_other, constant=("gamma",))
_rwkv6 = _public("fused_recurrent_rwkv6", ("gk", "bonus"), {**RWKV, "bonus": "u"}, before=True)
_rwkv7 = _public("fused_recurrent_rwkv7", DPLR, RWKV)
_mul = _public("fused_mul_recurrent_rwkv7", DPLR, {**RWKV, "a": "kk", "b": "a"}, unsigned=True, scale=1.0)
_dplr = _public("fused_recurrent_dplr_delta_rule", DPLR)
_iplr = _public("fused_recurrent_iplr_delta_rule", ("a", "b"))
CASES += [
    _other("linear", given=()), _other("gla", given=("gk", "gv")),
    _other("gla-reverse-packed", REVERSE, given=("gk", "gv"), edges=(0, 0, 3, 5)),
    _other("retention-reverse", REVERSE, given=("gamma",)), _other("simple-gla", given=("g", "gamma")),
    _other("before", {"before": True}, given=("g",)), _rwkv6("random", quick=True, V=40),
    _rwkv6("packed", {"scale": 1.0}, edges=(0, 3, 5)), _rwkv6("reverse", REVERSE),
    _rwkv6("resets", gate="resets"), _dplr("resets", gate="resets"), _rwkv6("segments", HV=1, T=66, V=16),
    _rwkv6._replace(constant=INFERENCE)("decoding", {"scale": 1.0}, T=1),
    _rwkv7("random", {"scale": 1.0}, quick=True),
    _rwkv7("packed", edges=(0, 0, 3, 5)), _rwkv7._replace(constant=INFERENCE)("decoding", T=1),
    _mul("random", quick=True), _mul("reverse-packed", {**REVERSE, "scale": 0.5}, edges=(0, 3, 5, 5)),
    _mul("segments", HV=1, T=66, V=16), _mul._replace(constant=INFERENCE)("inference", T=4, V=40),
    _dplr("random", quick=True, V=40), _dplr("odd", K=23, V=37),
    _dplr("reverse-packed", REVERSE, edges=(0, 3, 5, 5)), _iplr("random", quick=True),
    _iplr("packed", {"scale": -0.7}, edges=(0, 0, 3, 5))]
