"""Cases of RWKV-6 chunk by chunk: the inputs of gated linear attention under other names, and a bonus."""
from __future__ import annotations

from functools import partial

from flashlin.kernels.gla.reference import recurrence
from flashlin.testing.cases import gla, sequences
from flashlin.testing.cases.inputs import Input, Maker, renamed
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case

TOLERANCES = {"*": 0.005, "d*": 0.008, "dw": 0.02}


# a parameter, so of the model's dtype
_make = Maker({**renamed(gla.chunked.inputs, r="q", w="g"), "u": Input("H K")}, gla.FACTS)
_chunk = Op("chunk_rwkv6", _make, partial(sequences.outputs, recurrence, {"q": "r", "g": "w"}), TOLERANCES)
CASES: list[Case] = [
    _chunk("random", quick=True), _chunk("constant", kind="constant"), _chunk("one-key", kind="one-key"),
    _chunk("w=0", gate="0"), _chunk("w=-20", gate="-20"), _chunk("strong", gate="strong"),
    _chunk("resets", gate="resets"), _chunk("layer", {"scale": 1.0}, state=False, T=64),
    _chunk("packed", {"scale": -0.7}, edges=(0, 1, 1, 66, 130, 150)),
    _chunk("strong-packed", gate="strong", edges=(0, 17, 97, 97, 130)), _chunk("wide", K=128, V=128, T=100),
    _chunk("odd", K=100, V=36, T=70), _chunk("one-token", T=1), _chunk("two-tokens", T=2),
    _chunk("short", T=21), _chunk("K=256,V=512", K=256, V=512, B=1, T=80),
    _chunk("K=512,V=64", K=512, B=1, T=80),
    *(_chunk(name, gate=sequences.SLOW, **facts) for name, facts in sequences.LONG.items())]
