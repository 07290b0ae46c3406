"""Cases of the delta rules, the delta product and Comba.

In addition to random inputs they have extreme gates, and similar keys, for which an inaccurate inverse fails.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.delta.reference import fed_back, product, recurrence
from flashlin.kernels.norm.reference import normalise
from flashlin.testing.cases import inputs, sequences
from flashlin.testing.cases.inputs import FLOAT32, Draw, Input, Maker, Values, decays, keys, rates, unit
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.recurrent import INFERENCE, forward_in_parts
from flashlin.testing.cases.sequences import INSIDE, L2, V_FIRST
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.006, "d*": 0.008, "dbeta": 0.02, "dg": 0.02, "dA_log": 0.02, "ddt_bias": 0.02}
# Tolerance of cases in which all tokens have the same key and beta = 1. Every token overwrites the previous
# value. The prediction then cancels the state's contribution to dg, and the rounding errors of 16-bit states
# remain.
FORGETFUL = {"dg": 0.05}
# Tolerances of cases in which all tokens have the same key, beta = 2 and no decay: every token reflects the
# state. Nothing is forgotten, so the errors of rounding u to 16 bits add up over the sequence. Here, u is beta
# times (v minus its prediction). The record matrix/results/holes-delta-* has the errors of fla and flashlin in
# this case. float32 must still meet 1e-4, as in all cases.
REFLECTED = {"*": 0.6, "d*": 0.6, "dbeta": 0.6}


QKV = {"q": Input("B T H K", unit), "k": Input("B T H K", keys), "v": Input("B T HV V")}
REST = {"beta": Input("B T HV", rates, FLOAT32), "A_log": Input("HV", inputs.times(0.5), FLOAT32, "raw"),
        "dt_bias": Input("HV", dtype=FLOAT32, when="raw"),
        "initial_state": Input("N HV K V", dtype=FLOAT32, when="state")}
# B, T: batch and tokens. H, HV: heads of q and k, heads of v. K, V: columns of keys and values. keys: one of
# KEYS. rate: kind of beta. gate: kind of g. raw: gate and beta become decays and rates inside the op. state:
# the case has an initial state.
FACTS = {"B": 2, "T": 100, "H": 2, "HV": 2, "K": 64, "V": 64, "keys": "random", "rate": "random",
         "gate": "random", "raw": False, "state": True}
rule = Maker({**QKV, **REST}, FACTS)
gated_rule = Maker({**QKV, "g": Input("B T HV", decays(0.0), FLOAT32), **REST}, FACTS)


def _family(case: Op) -> list[Case]:
    gated = case.name == "chunk_gated_delta_rule"
    cases = [case("random", quick=True), case("packed", edges=(0, 1, 1, 66, 130, 150)),
             case("no-state", state=False, T=64), case("one-token", T=1), case("odd", K=100, V=36, T=70),
             case("wide", K=128, V=128), case("narrow", K=64, V=32, T=70),
             case("grouped", H=2, HV=6, K=32, V=40, T=70),
             case("one-key", allowed=FORGETFUL, keys="one-key", rate="1"),
             case("one-key-2", allowed=None if gated else REFLECTED, keys="one-key", rate="2"),
             case("alike", keys="alike", rate="1"), case("alike-l2", L2, keys="alike"),
             case("period-4", keys="period-4", rate="1"), case("beta=0", rate="0"),
             case("zero-keys", L2, keys="zero", K=32, V=32, T=70)]
    cases += [case("two-groups", K=128, V=128, T=128), case("two-groups-64", V=128, T=128),
              case("grouped-64", H=2, HV=6, T=128), case("inverse-64", V=32, T=128),
              case("packed-64", edges=(0, 1, 1, 130, 600, 640)),
              case("packed-128", edges=(0, 300, 301, 512), K=128, V=128, HV=6),
              case("packed-parts", gate=sequences.SLOW, edges=(0, 1, 1, 1480, 1600), H=1, HV=1),
              case("alike-128", K=128, T=192, keys="alike", rate="1"),
              *(case(name, gate=sequences.SLOW, **facts) for name, facts in sequences.LONG.items())]
    if gated:
        cases += [*(case(name, gate="-0.12", K=K, HV=6, **{**sequences.SIX, "V": V})
                    for name, K, V in (("windows-64", 64, 64), ("windows-128", 128, 64),
                                       ("windows-64-128", 64, 128), ("windows-128-128", 128, 128))),
                  case("no-windows", gate=sequences.SLOW, K=128, HV=6, **sequences.SIX),
                  case("g=0", gate="0"), case("g=-20", gate="-20"),
                  case("raw-keys-g=-6", keys="raw", gate="-6"),
                  case("one-key-g=0", allowed=FORGETFUL, keys="one-key", rate="1", gate="0"),
                  case("gates", INSIDE, raw=True),
                  case("gates-resets", INSIDE, raw=True, gate="resets", K=32, V=32, T=70, B=1),
                  case("v-first", V_FIRST, K=32, V=32),
                  forward_in_parts(case, 64),
                  case("resets", gate="resets", K=32, V=40, B=1),
                  case("resets-64", gate="resets", T=128),
                  case("resets-packed", gate="resets", K=32, edges=(0, 4, 4, 70, 100)),
                  case("g=-inf", gate="-inf", T=20),
                  case("every-other", gate="every-other", K=32, V=32, T=128, B=1),
                  *(case(f"K={K},V={V}", K=K, V=V, B=1, T=80, H=1, HV=1)
                    for K, V in ((96, 192), (256, 256), (256, 512), (512, 64), (129, 20)))]
    return cases


reference = partial(sequences.outputs, recurrence, {})
CASES: list[Case] = [*_family(Op("chunk_delta_rule", rule, reference, TOLERANCES)),
                     *_family(Op("chunk_gated_delta_rule", gated_rule, reference, TOLERANCES))]


# The delta product, with one to three steps per token, similar keys, packed sequences and no gate.

def _of_rows(of: Values, first: Callable[[int], int]) -> Values:
    """Return a function that draws values with one row per token, for q or g of the delta product.

    k, v and beta have n rows per token. The function also draws n rows per token with ``of``, but keeps only
    row number first(n) of each token.
    """
    return lambda draw, shape: of(draw, shape.replace("T", "T*n"))[:, first(draw.size("n"))::draw.size("n")]


_inputs_of_rows = {**gated_rule.inputs, "q": Input("B T H K", _of_rows(unit, lambda n: n - 1)),
                   "k": Input("B T*n H K", keys), "v": Input("B T*n HV V"),
                   "beta": Input("B T*n HV", rates, FLOAT32),
                   "g": Input("B T HV", _of_rows(decays(0.0), lambda n: 0), FLOAT32, "gate")}
_of_steps = Maker(_inputs_of_rows, {**FACTS, "T": 50, "n": "num_householder", "num_householder": 2})
_product = Op("chunk_gated_delta_product", _of_steps,
              partial(sequences.outputs, product, {}, num_householder=2), TOLERANCES,
              always={"output_final_state": True, "num_householder": 2})
_token_product = _product._replace(name="fused_recurrent_gated_delta_product")
_few: dict[str, Any] = {"B": 1, "K": 16, "V": 24}
ONE_STEP, THREE_STEPS = {"num_householder": 1}, {"num_householder": 3}
CASES += [
    _product("random", quick=True), _product("three", {**THREE_STEPS, "scale": -0.7}, T=33, K=32, V=40),
    _product("one", ONE_STEP, T=40, K=32, V=32), _product("packed", edges=(0, 1, 1, 33, 65, 75)),
    _product("no-gate", {"g": None}, gate="", K=32, V=32),
    _product("no-state", state=False, T=32, K=32, V=32),
    _product("grouped", H=2, HV=6, K=32, V=40, T=35), _product("odd", K=100, V=36, T=35),
    _product("alike-l2", L2, keys="alike"),
    _product("one-key", allowed=FORGETFUL, keys="one-key", rate="1", K=32, V=32),
    _product("resets", gate="resets", K=32, V=40, B=1), _product("g=-inf", gate="-inf", T=10, K=32, V=32),
    _token_product("random", quick=True, T=4, **_few),
    _token_product("three-l2", {**L2, **THREE_STEPS}, T=3, **_few),
    _token_product("packed", T=5, edges=(0, 2, 2, 5), **_few),
    _token_product("no-gate", {"g": None}, gate="", T=3, **_few),
    _token_product("segments", T=33, HV=1, H=1, **_few)]


# Comba: the gated delta rule that reads the state with a separate vector p.

def _reading(made: Tensors, draw: Draw) -> Tensors:
    """Replace the random numbers in p by the vectors that the case's setting `reads` selects.

    They are multiples of k, or independent vectors of length 1.
    """
    if "p" in made:
        k, p = made["k"], made["p"]
        p = F.normalize(p, dim=-1) if draw["reads"] == "own" else k * p[..., :1].sigmoid()
        made["p"] = p.to(k.dtype)
    return made


# reads: "share" for p as a multiple of k, as in the layer; "own" for an independent vector of length 1; ""
# for no p.
_make_comba = gated_rule.but(
    inputs={**gated_rule.inputs, "p": Input("B T H K", dtype=FLOAT32, when="reads")}, finish=_reading,
    facts={**FACTS, "reads": "share"})


def _comba_reference(*, use_qk_l2norm_in_kernel: bool = False, **given: Any) -> tuple[Tensor, Tensor]:
    if use_qk_l2norm_in_kernel and given.get("p") is not None:
        given["p"] = normalise("l2", given["p"], eps=1e-6)[0]
    return sequences.outputs(fed_back, {}, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **given)


_comba = Op("chunk_comba", _make_comba, _comba_reference, {**TOLERANCES, "dp": 0.01})
_token_comba = _comba._replace(name="fused_recurrent_comba")
_inference_comba = _token_comba._replace(constant=INFERENCE)
BARE: dict[str, Any] = {"rate": "1", "without": ("beta",)}
_short: dict[str, Any] = {"B": 1, "K": 16, "V": 24, "T": 5}
CASES += [
    _comba("random", quick=True, B=1, T=70), _comba("own", reads="own", K=32, V=32),
    _comba("p=None", {"p": None}, reads="", K=32, V=32, T=70),
    _comba("beta=None", {"scale": -0.7}, **BARE, reads="own", K=32, V=32, T=70),
    _comba("no-state", state=False, T=64, K=32, V=32), _comba("packed", edges=(0, 1, 1, 66, 130, 150)),
    _comba("odd", K=100, V=36, T=70), _comba("grouped", H=2, HV=6, K=32, V=40, T=70),
    _comba("alike-l2", L2, keys="alike", K=32, V=32),
    _comba("one-key", allowed=FORGETFUL, keys="one-key", rate="1", reads="", options={"p": None}),
    _comba("resets", gate="resets", K=32, V=40, B=1), _comba("g=-inf", gate="-inf", T=20),
    _comba("g=-20", gate="-20", reads="own", T=70, K=32, V=40), _comba("strong", gate="strong", reads="own"),
    *(_comba(name, gate=sequences.SLOW, **sequences.LONG[name])
      for name in ("in-parts", "in-parts-64", "in-parts-wide", "in-parts-256")),
    forward_in_parts(_comba, 64), forward_in_parts(_comba, 128),
    _token_comba("random", quick=True, **_short), _token_comba("packed", edges=(0, 0, 3, 5), **_short),
    _token_comba("grouped-l2", L2, H=1, HV=2, **_short),
    _token_comba("beta=None", **BARE, reads="own", H=1, HV=2, **_short),
    _token_comba("p=None", {"p": None}, reads="", H=1, HV=2, **_short),
    _inference_comba("g=-inf", gate="-inf", **_short),
    _inference_comba("inference", L2, keys="raw", H=1, HV=2, B=1, K=23, V=40, T=5),
    _inference_comba("inference-bare", {**L2, "p": None}, reads="", **BARE, keys="raw", H=1, HV=2,
                     edges=(0, 0, 3, 5), K=16, V=24)]
