"""Inputs of the delta families. Besides random ones: keys that resemble each other, which break a careless
inverse, and extreme gates."""
from __future__ import annotations

from functools import partial

from flashlin.kernels.delta.reference import recurrence
from flashlin.testing.cases import sequences
from flashlin.testing.cases.inputs import FLOAT32, Input, Maker, decays, keys, rates, times, unit
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.recurrent import forward_in_parts
from flashlin.testing.cases.sequences import INSIDE, L2, V_FIRST
from flashlin.testing.compare import Case

TOLERANCES = {"*": 0.006, "d*": 0.008, "dbeta": 0.02, "dg": 0.02, "dA_log": 0.02, "ddt_bias": 0.02}
# One key with beta = 1: every token overwrites the last one's value, so what the gates' gradients gain from
# the state they lose again through the prediction, and 16-bit states leave a trace of it.
FORGETFUL = {"dg": 0.05}
# One key with beta = 2 and no decay: every token reflects the state, so nothing is forgotten and each
# rounding of u to 16 bits is added up over the sequence (matrix/results/holes-delta-* has fla beside it).
# float32, which is held to 1e-4 as everywhere, keeps the digits.
REFLECTED = {"*": 0.6, "d*": 0.6, "dbeta": 0.6}


QKV = {"q": Input("B T H K", unit), "k": Input("B T H K", keys), "v": Input("B T HV V")}
REST = {"beta": Input("B T HV", rates, FLOAT32), "A_log": Input("HV", times(0.5), FLOAT32, "raw"),
        "dt_bias": Input("HV", dtype=FLOAT32, when="raw"),
        "initial_state": Input("N HV K V", dtype=FLOAT32, when="state")}
# keys: one of KEYS. rate: of beta. gate: of g. raw: gate and beta become decays and rates inside the op.
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
    cases += [case(name, gate=sequences.SLOW, **facts)
              for name, facts in sequences.LONG.items()]
    if gated:
        cases += [case("g=0", gate="0"), case("g=-20", gate="-20"),
                  case("raw-keys-g=-6", keys="raw", gate="-6"),
                  case("one-key-g=0", allowed=FORGETFUL, keys="one-key", rate="1", gate="0"),
                  case("gates", INSIDE, raw=True),
                  case("gates-resets", INSIDE, raw=True, gate="resets", K=32, V=32, T=70, B=1),
                  case("v-first", V_FIRST, K=32, V=32),
                  forward_in_parts(case, 64),
                  case("resets", gate="resets", K=32, V=40, B=1),
                  case("resets-packed", gate="resets", K=32, edges=(0, 4, 4, 70, 100)),
                  case("g=-inf", gate="-inf", T=20),
                  case("every-other", gate="every-other", K=32, V=32, T=128, B=1),
                  *(case(f"K={K},V={V}", K=K, V=V, B=1, T=80, H=1, HV=1)
                    for K, V in ((96, 192), (256, 256), (256, 512), (512, 64), (129, 20)))]
    return cases


reference = partial(sequences.outputs, recurrence, {})
CASES = [*_family(Op("chunk_delta_rule", rule, reference, TOLERANCES)),
         *_family(Op("chunk_gated_delta_rule", gated_rule, reference, TOLERANCES))]
