"""Cases of HGRN's recurrence: decays at both ends, states, packed sequences, channels of odd numbers, lengths
around a block."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.hgrn.reference import recurrence
from flashlin.testing.cases import forgetting
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.008, "dg": 0.02}


def make(
    device: torch.device,
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
    """gate: one of forgetting.KINDS; ``strong`` (uniform in -20 .. 0, the first channel all -20, the second
    all 0); or a number. wide: the gate in float32."""
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)
    if edges:
        B, T = 1, edges[-1]
    if gate == "strong":
        g = -20 * torch.rand(B, T, D, generator=generator)
        g[..., 0], g[..., 1] = -20, 0
    else:
        g = forgetting.KINDS[gate](F.logsigmoid(randn(B, T,
                                                      D) + 2)) if gate in forgetting.KINDS else torch.full((B,
                                                                                                            T,
                                                                                                            D), float(gate))
    made = {"x": randn(B, T, D).to(dtype), "g": g if wide else g.to(dtype)}
    if state:
        made["initial_state"] = randn(len(edges) - 1 if edges else B, D)
    if edges:
        made["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32)
    return {name: x.to(device) for name, x in made.items()}


def call(op: str, **tensors: torch.Tensor) -> Tensors:
    o, ht = getattr(flashlin, op)(**tensors, output_final_state=True)
    return {"o": o, "ht": ht}


def reference(x: torch.Tensor, g: torch.Tensor, initial_state: torch.Tensor | None = None,
              cu_seqlens: torch.Tensor | None = None) -> Tensors:
    o, ht = recurrence(x, g, initial_state, cu_seqlens)
    return {"o": o, "ht": ht}


def _case(op: str, name: str, quick: bool = False, **facts: Any) -> Case:
    return Case(op, name, partial(make, **facts), partial(call, op), reference, TOLERANCES, (), quick)


_chunk, _token = partial(_case, "chunk_hgrn"), partial(_case, "fused_recurrent_hgrn")
CASES: list[Case] = [
    _chunk("random", quick=True), _chunk("no-state", state=False, B=1), _chunk("g=0", gate="0"),
    _chunk("strong", gate="strong"), _chunk("resets", gate="resets"), _chunk("wide-gate", wide=True, T=20),
    _chunk("odd", D=37, T=17), _chunk("strips", B=1, D=130, T=16), _chunk("segments", B=1, T=300, D=20),
    _chunk("packed", edges=(0, 0, 5, 21, 22, 40)),
    _chunk("segments-packed", edges=(0, 3, 3, 420), D=16, gate="resets"),
    _chunk("no-sequence-but-empty-ones", edges=(0, 0, 0)), _token("random", quick=True, T=20),
    _token("resets", gate="resets"), _token("packed", edges=(0, 7, 7, 30)), _token("one-token", T=1, B=3)]
