"""Cases of gated linear attention and of RWKV-6.

Some cases have strong decays next to weak ones. Other cases have states, packed sequences and odd sizes.
"""
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashlin.kernels.gla.reference import recurrence
from flashlin.testing.cases import sequences
from flashlin.testing.cases.inputs import FLOAT32, Draw, Input, Maker, decays, renamed
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.sequences import V_FIRST
from flashlin.testing.compare import Case

TOLERANCES = {"*": 0.005, "d*": 0.008, "dg": 0.02, "dgk": 0.02, "dgv": 0.02, "dw": 0.02}


def _values(draw: Draw, shape: str) -> Tensor:
    x = draw(shape)
    return torch.full_like(x, 0.5) if draw["kind"] == "constant" else x


def _keys(draw: Draw, shape: str) -> Tensor:
    x = _values(draw, shape)
    return x[:, :1].expand_as(x) if draw["kind"] == "one-key" else x


QKV = {"q": Input("B T H K", _values), "k": Input("B T H K", _keys), "v": Input("B T H V", _values)}
DECAY, DECAY_OF_VALUES = Input("B T H K", decays(), FLOAT32), Input("B T H V", decays(), FLOAT32, "values")
STATE = Input("N H K V", dtype=FLOAT32, when="state")
# B, T, H: batch, tokens, heads. K, V: columns of keys and values. gate: kind of the decays. kind: of q, k and
# v: ``random``, ``constant`` or ``one-key``. state: the case has an initial state.
FACTS = {"B": 2, "T": 150, "H": 2, "K": 64, "V": 64, "gate": "random", "kind": "random", "state": True}
chunked = Maker({**QKV, "g": DECAY, "initial_state": STATE}, FACTS)
# keys, values: True if the op has decays of keys (gk) or of values (gv).
_by_token = Maker({**QKV, "gk": DECAY._replace(when="keys"), "gv": DECAY_OF_VALUES, "initial_state": STATE},
                  {**FACTS, "keys": True, "values": False})


def _shared(case: Op, decay: str) -> list[Case]:
    return [case("random", quick=True), case("constant", kind="constant"), case("one-key", kind="one-key"),
            case(f"{decay}=0", gate="0"), case(f"{decay}=-20", gate="-20"), case("strong", gate="strong"),
            case("resets", gate="resets"), case("packed", {"scale": -0.7}, edges=(0, 1, 1, 66, 130, 150)),
            case("strong-packed", gate="strong", edges=(0, 17, 97, 97, 130)),
            case("wide", K=128, V=128, T=100), case("odd", K=100, V=36, T=70), case("one-token", T=1),
            case("short", T=21), case("K=512,V=64", K=512, B=1, T=80),
            *(case(name, gate=sequences.SLOW, **facts) for name, facts in sequences.LONG.items())]


REVERSE = {"reverse": True}
_chunk = Op("chunk_gla", chunked, partial(sequences.outputs, recurrence, {}), TOLERANCES)
_token = Op("fused_recurrent_gla", _by_token, partial(sequences.outputs, recurrence, {"g": "gk"}), TOLERANCES)
CASES: list[Case] = [
    *_shared(_chunk, "g"), _chunk("g=-1", gate="-1"),
    _chunk("strong-no-state", gate="strong", state=False, T=64),
    _chunk("resets-packed", gate="resets", K=32, edges=(0, 4, 4, 70, 100)),
    _chunk("every-other", gate="every-other", K=32, V=32, T=128, B=1), _chunk("g=-inf", gate="-inf", T=20),
    _chunk("narrow", K=64, V=32, T=70), _chunk("v-first", V_FIRST, K=24, V=40, T=70),
    _chunk("K=256,V=256", K=256, V=256, B=1, T=80), _chunk("K=64,V=512", V=512, B=1, T=80),
    _chunk("K=129,V=20", K=129, V=20, B=1, T=80),
    _token("random", quick=True, T=8, H=1, K=32, V=32),
    _token("strong", gate="strong", T=12, K=32, V=40, B=1),
    _token("resets", gate="resets", values=True, T=9, K=16, V=24),
    _token("ungated", keys=False, T=6, K=16, V=24), _token("both-gates", values=True, T=6, K=16, V=24),
    _token("values-only", keys=False, values=True, T=5, K=16),
    _token("packed", {"scale": -0.7}, edges=(0, 1, 1, 5, 9), K=16, V=24),
    _token("v-first", V_FIRST, K=24, V=40, T=6), _token("reverse", REVERSE, T=6, K=16, V=24),
    _token("reverse-packed", REVERSE, edges=(0, 0, 3, 5), K=16, V=24, values=True),
    _token("segments", B=1, H=1, T=66, K=16, V=16),
    _token("ungated-segments", keys=False, B=1, H=1, T=66, K=16, V=16), _token("one-token", T=1),
    _token("heads-of-256", B=1, H=1, T=3, K=256, V=256)]

# RWKV-6 in chunks: the same inputs under other names, and a bonus u. As a parameter, u has the dtype of the
# model.
_of_rwkv6 = Maker({**renamed(chunked.inputs, r="q", w="g"), "u": Input("H K")}, FACTS)
_rwkv6 = Op("chunk_rwkv6", _of_rwkv6, partial(sequences.outputs, recurrence, {"q": "r", "g": "w"}),
            TOLERANCES)
CASES += [
    *_shared(_rwkv6, "w"), _rwkv6("layer", {"scale": 1.0}, state=False, T=64), _rwkv6("two-tokens", T=2),
    _rwkv6("K=256,V=512", K=256, V=512, B=1, T=80)]
