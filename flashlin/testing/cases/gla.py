"""Cases of gated linear attention: decays at both ends and side by side, states, packed sequences, odd
sizes."""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from flashlin.kernels.gla.reference import recurrence
from flashlin.testing.cases import sequences
from flashlin.testing.cases.inputs import Draw, bounds, extents
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.sequences import V_FIRST
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.008, "dg": 0.02, "dgk": 0.02, "dgv": 0.02}


def make(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    B: int = 2,
    T: int = 150,
    H: int = 2,
    K: int = 64,
    V: int = 64,
    gates: Mapping[str, str],
    gate: str = "random",
    shift: float = 2.0,
    kind: str = "random",
    state: bool = True,
    v_first: bool = False,
    edges: tuple[int, ...] = (),
) -> Tensors:
    """gates: the decays' names and dimensions; gate, shift: as for Draw.decay. kind: of q, k and v,
    ``random``, ``constant`` or ``one-key``."""
    B, T, N = extents(B, T, edges)
    draw = Draw(generator, B=B, T=T, H=H, K=K, V=V, N=N)
    q, k, v = (draw(dimensions).to(dtype) for dimensions in ("B T H K", "B T H K", "B T H V"))
    if kind == "constant":
        q, k, v = (torch.full_like(x, 0.5) for x in (q, k, v))
    elif kind == "one-key":
        k = k[:, :1].expand_as(k).contiguous()
    made = {"q": q, "k": k, "v": v}
    made |= {name: draw.decay(gate, dimensions, shift) for name, dimensions in gates.items()}
    if state:
        made["initial_state"] = draw("N H V K" if v_first else "N H K V")
    return made | bounds(edges)


REVERSE = {"reverse": True}
KEYS, VALUES = {"gk": "B T H K"}, {"gv": "B T H V"}
_chunk = Op("chunk_gla", partial(make, gates={"g": "B T H K"}),
            partial(sequences.outputs, recurrence, {}), TOLERANCES)
_token = Op("fused_recurrent_gla", partial(make, gates=KEYS),
            partial(sequences.outputs, recurrence, {"g": "gk"}), TOLERANCES)
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
    *(_chunk(name, gate=sequences.SLOW, **facts) for name, facts in sequences.LONG.items()),
    _token("random", quick=True, T=8, H=1, K=32, V=32),
    _token("strong", gate="strong", T=12, K=32, V=40, B=1),
    _token("resets", gate="resets", gates=KEYS | VALUES, T=9, K=16, V=24),
    _token("ungated", gates={}, T=6, K=16, V=24), _token("both-gates", gates=KEYS | VALUES, T=6, K=16, V=24),
    _token("values-only", gates=VALUES, T=5, K=16),
    _token("packed", {"scale": -0.7}, edges=(0, 1, 1, 5, 9), K=16, V=24),
    _token("v-first", V_FIRST, v_first=True, K=24, V=40, T=6), _token("reverse", REVERSE, T=6, K=16, V=24),
    _token("reverse-packed", REVERSE, edges=(0, 0, 3, 5), K=16, V=24, gates=KEYS | VALUES),
    _token("segments", B=1, H=1, T=66, K=16, V=16),
    _token("ungated-segments", gates={}, B=1, H=1, T=66, K=16, V=16), _token("one-token", T=1)]
