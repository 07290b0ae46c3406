"""Cases of the token-by-token ops.

They vary repeated keys, long keys, extreme gates, groups, odd sizes and packed rows. Most cases are short,
because Triton's interpreter also runs them. Code that depends on the length (the states that are stored for
backward) has longer cases.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flashlin.kernels.delta.reference import recurrence
from flashlin.kernels.dplr.reference import recurrence as recurrence_of_vectors
from flashlin.kernels.gla.reference import recurrence as recurrence_of_decays
from flashlin.testing.cases import inputs, sequences
from flashlin.testing.cases.inputs import FLOAT32, Draw, Input, Maker, decays, keys, rates, renamed, unit
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.sequences import INSIDE, L2, V_FIRST
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.006, "d*": 0.008, "dbeta": 0.02, "dg": 0.02, "dgk": 0.02, "dgv": 0.02, "dA_log": 0.02,
              "ddt_bias": 0.02}
# Tensors to hold constant in a case without gradients. In such a case the kernel computes the norms, the gate
# and the sigmoid itself, and the states may be a pool.
INFERENCE = ("q", "k", "v", "r", "w", "beta", "g", "gk", "gv", "kk", "a", "b", "p", "u", "A_log", "dt_bias",
             "initial_state")


def forward_in_parts(case: Op, D: int) -> Case:
    """Return a case without gradients in which each program computes all columns of a state of D x D.

    Programs compute all columns only if there are many sequences and heads. The case has no gradients, so
    that its float64 reference fits in memory.
    """
    return case._replace(constant=INFERENCE)(f"in-parts-forward-{D}", gate=sequences.SLOW, B=16, T=1600,
                                             H=128 // D, K=D, V=D)


def _gate(draw: Draw, shape: str) -> Tensor:
    decay = draw.decay(draw["g"], shape)
    # With `raw`, draw both the decay and the gate, because tensors that are drawn later depend on the number
    # of draws.
    return inputs.raw_gates(draw["g"], 8 * draw(shape)) if draw["raw"] else decay


def _of(name: str) -> inputs.Values:
    """Return a function that makes log decays of the kind in the case's setting ``name``."""
    return lambda draw, shape: draw.decay(draw[name], shape)


INPUTS = {"k": Input("B T H K", keys), "q": Input("B T H K"), "v": Input("B T HV V"),
          "g": Input("B T HV", _gate, FLOAT32, "g"), "gk": Input("B T HV K", _of("gk"), FLOAT32, "gk"),
          "gv": Input("B T HV V", _of("gv"), FLOAT32, "gv"),
          "A_log": Input("HV", Draw.uniform, FLOAT32, "raw"),
          "dt_bias": Input("HV", dtype=FLOAT32, when="raw"),
          "beta": Input("B T HV of_beta", rates, FLOAT32, "rate"),
          "initial_state": Input("N HV K V", dtype=FLOAT32, when="state"),
          "state_indices": Input("pool", lambda draw, _: torch.tensor(draw["pool"]), when="pool")}
# keys: one of KEYS. rate: kind of beta, or ``""`` for no beta. of_beta: "V" if beta has one number per
# channel. g, gk, gv: kinds of decays of heads, keys and values, or ``""`` for none. raw: gate and beta are
# passed before their softplus and sigmoid, from far below to far above zero. pool: the state_indices, which
# point into a pool of six states.
FACTS = {"B": 2, "T": 8, "H": 1, "HV": 1, "K": 32, "V": 32, "keys": "random", "rate": "random",
         "of_beta": None, "g": "", "gk": "", "gv": "", "raw": False, "state": True, "pool": ()}
_make = Maker(INPUTS, FACTS, lambda facts: {"N": 6 if facts["pool"] else facts["N"]})


def reference(names: Mapping[str, str], state_indices: Tensor | None = None,
              **given: Any) -> tuple[Tensor, Tensor]:
    """Compute an op in float64, with or without a pool of states.

    names: see sequences.outputs.
    state_indices: entry of the pool for each sequence. A sequence with a negative index reads and writes no
        state, and its outputs are zeros.
    """
    if state_indices is None:
        return sequences.outputs(recurrence, names, **given)
    pool = given.pop("initial_state")
    o, ht = sequences.outputs(recurrence, names, initial_state=pool[state_indices.clamp(min=0)], **given)
    o, after, edges = o.clone(), pool.clone(), given.get("cu_seqlens")
    for n, at in enumerate(state_indices.tolist()):
        if at >= 0:
            after[at] = ht[n]
        else:
            o[n if edges is None else (0, slice(edges[n], edges[n + 1]))] = 0
    return o, after


PACKED = (0, 1, 1, 5, 9)
_delta = Op("fused_recurrent_delta_rule", _make, partial(reference, {}), TOLERANCES)
_gated = _delta._replace(name="fused_recurrent_gated_delta_rule")
G: dict[str, Any] = {"g": "random"}
ALL_GATES: dict[str, Any] = dict.fromkeys(("g", "gk", "gv"), "random")
CASES: list[Case] = [
    _delta("random", quick=True), _delta("no-state", state=False), _delta("no-beta", rate="", keys="alike"),
    _delta("one-key,beta=1", keys="one-key", rate="1"), _delta("one-key,beta=2", keys="one-key", rate="2"),
    _delta("period-4", keys="period-4"), _delta("alike", keys="alike"),
    _delta("headwise", of_beta="V", V=40, B=1), _delta("l2norm", L2, keys="raw"),
    _delta("zero-keys", L2, keys="every-other-zero"), _delta("groups-of-3", H=1, HV=3, B=1, T=6),
    _delta("packed", edges=PACKED), _delta("v-first", V_FIRST, K=24, V=40, B=1, T=6),
    _delta("segments", B=1, T=66, K=16, V=16), _delta("heads-of-256", B=1, T=3, K=256, V=256),
    _gated("random", quick=True, **G),
    _gated("g=0", g="0"), _gated("g=-20", g="-20"),
    _gated("resets", g="resets", HV=2),
    _gated("all-resets", g="random", gk="resets", gv="resets"),
    _gated("resets-packed", g="resets", edges=PACKED, HV=2),
    _gated("beta=0", **G, rate="0"),
    _gated("one-key,beta=2", g="-0.05", keys="one-key", rate="2"),
    _gated("long-keys,g=-6", g="-6", keys="raw"),
    _gated("all-gates", **ALL_GATES),
    _gated("odd", L2, **G, of_beta="V", K=23, V=37, B=1, T=8),
    _gated("groups", **G, H=2, HV=4, B=1, T=6),
    _gated("layer", {**INSIDE, **V_FIRST}, **G, raw=True, keys="raw"),
    _gated("layer-resets", INSIDE, g="resets", raw=True, HV=2),
    _gated("packed", {"scale": -0.7}, g="random", gk="random", edges=PACKED),
    _gated("segments-packed", g="random", edges=(0, 65, 67), K=16, V=16),
    _gated("one-token", **G, T=1), _gated("ungated", of_beta="V"),
    _gated("wide", L2, **G, B=1, T=3, K=128, V=128), _gated("widest", L2, **G, B=1, T=2, K=512, V=40)]
_inference = _gated._replace(constant=INFERENCE)
CASES += [
    _inference("inference", INSIDE, **ALL_GATES, raw=True, keys="raw", H=1, HV=2, T=6, V=40),
    _inference("pool", {**INSIDE, **V_FIRST}, **G, raw=True, B=3, T=1, H=1, HV=3, K=64,
               V=64, pool=(4, -1, 0)),
    _inference("pool-packed", **G, of_beta="V", edges=(0, 2, 2, 5, 9), pool=(5, 1, -7, 0)),
    _delta._replace(constant=INFERENCE)("in-place", {**L2, "inplace_state": True}, B=2, T=3)]


# Kimi Delta Attention: the decay of channels is called g, and its gate has a bias per channel.

def _raw(made: Tensors, draw: Draw) -> Tensors:
    """Replace g by gates that become decays inside the op, and add their bias, with the setting `raw`."""
    if draw["raw"]:
        made |= {"g": 8 * draw("B T HV K"), "dt_bias": draw("HV*K")}
    return made


_of_channels = _make.but(inputs=renamed(INPUTS, g="gk", g_of_heads="g"), facts={**FACTS, "gk": "random"},
                              finish=_raw)
_kda = Op("fused_recurrent_kda", _of_channels, partial(reference, {"gk": "g"}), TOLERANCES)
_kda_inference = _kda._replace(constant=INFERENCE)
BOUND = {"lower_bound": -5.0}
CASES += [
    _kda("random", quick=True, T=6), _kda("g=-20", gk="-20", T=4), _kda("resets", gk="resets"),
    _kda("odd", L2, of_beta="V", K=23, V=37, B=1, T=6),
    _kda("groups-packed", {"scale": -0.7}, H=1, HV=2, edges=PACKED), _kda("segments", B=1, T=66, K=16, V=16),
    _kda("layer", {**INSIDE, **V_FIRST}, raw=True, keys="raw", T=6),
    _kda("bounded", {**INSIDE, **BOUND}, raw=True, T=6, keys="raw"),
    _kda("bounded-unscaled", {**INSIDE, **BOUND}, raw=True, without=("A_log",), B=1, T=5),
    _kda_inference("decoding-many", B=512, T=1, H=2, HV=2, K=128, V=64),
    _kda_inference("inference", INSIDE, raw=True, keys="raw", H=1, HV=2, T=5, V=40),
    _kda_inference("pool", {**INSIDE, **BOUND, **V_FIRST}, raw=True, B=3, T=1, H=1, HV=3, K=64,
                   V=64, pool=(4, -1, 0))]


# The other ops. rwkv6 reads the state before it stores a token. dplr, iplr and rwkv7 erase with separate
# vectors. The op called "recurrent" runs combinations of the shared kernel that no public op of this file
# uses. Tensors have the names of the reference; some ops use other names.

def _minus_unit(draw: Draw, shape: str) -> Tensor:
    draw.kept["unit"] = unit(draw, shape)
    return draw.kept["unit"] if draw["unsigned"] else -draw.kept["unit"]


def _rate(draw: Draw, shape: str) -> Tensor:
    rate = draw(shape).sigmoid()
    return rate if draw["unsigned"] else draw.kept["unit"] * rate


WEAK = decays(0.0)
OTHERS = {"a": Input("B T HV K", _minus_unit, when="given"), "b": Input("B T HV K", _rate, when="given"),
          "q": Input("B T HV K"), "k": Input("B T HV K"), "v": Input("B T HV V"),
          "h0": Input("N HV K V", dtype=FLOAT32), "g": Input("B T HV", WEAK, FLOAT32, "given"),
          "gamma": Input("HV", lambda draw, shape: -draw.uniform(shape), FLOAT32, "given"),
          "gk": Input("B T HV K", WEAK, FLOAT32, "given"), "gv": Input("B T HV V", WEAK, FLOAT32, "given"),
          "u": Input("HV K", dtype=FLOAT32, when="given")}
# unsigned: a is a vector and b its rate per channel, as in the layer of RWKV-7. Otherwise a is the negative
# vector, and b is the vector times the rate.
_other_make = Maker(OTHERS, {"B": 1, "T": 5, "HV": 2, "K": 16, "V": 24, "gate": "random", "unsigned": False,
                              "bounds": torch.int64})


def call_other(**given: Any) -> tuple[Tensor, Tensor | None]:
    """Run the shared token-by-token kernel directly, with flags ``reverse`` and ``before``."""
    from flashlin.kernels.recurrent.inputs import Inputs
    from flashlin.ops._common import recurrent
    flags = tuple(name for name in ("reverse", "before") if given.pop(name, False))
    inputs = Inputs(bounds=given.pop("cu_seqlens", None), **given)
    return recurrent.run_recurrent("recurrent", inputs, flags, has_ht=True)


def _before(k: Tensor, before: bool = False, **rest: Any) -> tuple[Tensor, Tensor]:
    """Compute linear attention; with ``before``, a token reads the state before its own update (bonus 0)."""
    return recurrence_of_decays(k=k, **rest, **({"u": k.new_zeros(k.shape[2:])} if before else {}))


def _unsigned(a: Tensor, b: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    return recurrence_of_vectors(a=-a, b=a * b, **rest)


def _public(op: str, given: Collection[str], names: Mapping[str, str] = MappingProxyType({}),
            formula: Callable[..., tuple[Tensor, Tensor]] = recurrence_of_vectors, **options: Any) -> Op:
    """Return the Op of a public token-by-token op.

    given: optional tensors that its cases have, by the names of the reference.
    names: the op's names of tensors, keyed by the names of the reference.
    formula: the recurrence in float64.
    options: options of the reference that are defaults of the op.
    """
    inputs = renamed(OTHERS, initial_state="h0", **{ours: theirs for theirs, ours in names.items()})
    make = _other_make.but(inputs=inputs)
    return Op(op, make.having(given=[names.get(name, name) for name in given], unsigned=formula is _unsigned),
              partial(sequences.outputs, formula, names, **options), {**TOLERANCES, "du": 0.02, "dw": 0.02})


REVERSE = {"reverse": True}
DPLR, RWKV = ("gk", "a", "b"), {"q": "r", "gk": "w"}
_other = Op("recurrent", _other_make, partial(sequences.outputs, _before, {"h0": "h0"}),
            TOLERANCES, always={}, call=call_other, constant=("gamma",))
_rwkv6 = _public("fused_recurrent_rwkv6", ("gk", "u"), RWKV, recurrence_of_decays)
_rwkv7 = _public("fused_recurrent_rwkv7", DPLR, RWKV)
_mul = _public("fused_mul_recurrent_rwkv7", DPLR, {**RWKV, "a": "kk", "b": "a"}, _unsigned, scale=1.0)
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
