"""Cases of HGRN's recurrence: decays at both ends, states, packed sequences, channels of odd numbers, lengths
around a block."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.hgrn.reference import recurrence
from flashlin.testing.cases.inputs import Draw, bounds, extents
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.008, "dg": 0.02}


def make(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    B: int = 2,
    T: int = 37,
    D: int = 24,
    gate: str = "random",
    wide: bool = False,
    state: bool = True,
    edges: tuple[int, ...] = (),
) -> Tensors:
    """gate: as for Draw.decay. wide: the gate in float32."""
    B, T, N = extents(B, T, edges)
    draw = Draw(generator, B=B, T=T, D=D, N=N)
    g = draw.decay(gate, "B T D")
    made = {"x": draw("B T D").to(dtype), "g": g if wide else g.to(dtype)}
    if state:
        made["initial_state"] = draw("N D")
    return made | bounds(edges)


def reference(x: Tensor, g: Tensor, initial_state: Tensor | None = None,
              cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return recurrence(x, g, initial_state, cu_seqlens)


_chunk, _token = (Op(name, make, reference, TOLERANCES) for name in ("chunk_hgrn", "fused_recurrent_hgrn"))
CASES: list[Case] = [
    _chunk("random", quick=True), _chunk("no-state", state=False, B=1), _chunk("g=0", gate="0"),
    _chunk("strong", gate="strong"), _chunk("resets", gate="resets"), _chunk("wide-gate", wide=True, T=20),
    _chunk("odd", D=37, T=17), _chunk("strips", B=1, D=130, T=16), _chunk("segments", B=1, T=300, D=20),
    _chunk("packed", edges=(0, 0, 5, 21, 22, 40)),
    _chunk("segments-packed", edges=(0, 3, 3, 420), D=16, gate="resets"),
    _chunk("no-sequence-but-empty-ones", edges=(0, 0, 0)), _token("random", quick=True, T=20),
    _token("resets", gate="resets"), _token("packed", edges=(0, 7, 7, 30)), _token("one-token", T=1, B=3)]
