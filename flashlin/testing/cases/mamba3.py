"""Cases of Mamba-3: groups, channels that are not turned, states, packed sequences, angles that add up."""
from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashlin
from flashlin.kernels.mamba.reference import trapezoid
from flashlin.testing.cases.inputs import Draw, bounds, extents, typed
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case, Tensors

STATES = ("angle_state", "ssm_state", "k_state", "v_state")
# What goes through two roundings to 16 bits, of k and of v before the scan; sums of many such.
TOLERANCES = {"*": 0.008, "d*": 0.012, "dADT": 0.02, "dDT": 0.03, "dTrap": 0.02, "dAngles": 0.03, "dD": 0.02,
              "dQ_bias": 0.02, "dK_bias": 0.02, "dangle_state": 0.03}
WIDE = ("ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", *STATES[:2])


def make(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    b: int = 2,
    T: int = 70,
    G: int = 1,
    H: int = 2,
    K: int = 32,
    V: int = 24,
    R: int = 8,
    step: float = -2.0,
    given: Collection[str] = ("D", "Z", *STATES),
    edges: tuple[int, ...] = (),
) -> Tensors:
    """K: N of the op, V: its P. given: of D, Z and states. step: what is added to a step before its
    softplus."""
    b, T, n = extents(b, T, edges)
    draw = Draw(generator, b=b, T=T, G=G, H=H, N=K, P=V, R=R, n=n)
    DT = F.softplus(draw("b H T") + step)
    made = {"Q": draw("b T G N"), "K": draw("b T G N"), "V": draw("b T H P"), "DT": DT,
            "ADT": -F.softplus(draw("b H T")) * DT, "Trap": draw("b H T"), "Q_bias": draw("H N") / 4 + 1,
            "K_bias": draw("H N") / 4 + 1, "Angles": draw("b T H R"), "D": draw("H"), "Z": draw("b T H P"),
            "angle_state": 6 * draw.uniform("n H R"), "ssm_state": draw("n H P N"), "k_state": draw("n H N"),
            "v_state": draw("n H P")}
    chosen = {name: x for name, x in made.items() if name in given or name not in ("D", "Z", *STATES)}
    return typed(chosen, dtype, dict.fromkeys(WIDE, torch.float32)) | bounds(edges)


def call(**given: Any) -> Any:
    """With the four states as the op takes them."""
    states = tuple(given.pop(name) for name in STATES if name in given)
    return flashlin.mamba3_siso_combined(**given, Input_States=states or None)


def reference(cu_seqlens: Tensor | None = None, **given: Any) -> Any:
    states = tuple(given.pop(name) for name in STATES if name in given)
    return trapezoid(**given, states=states or None, bounds=cu_seqlens)


_scan = Op("mamba3_siso_combined", make, reference, TOLERANCES,
           ("y", "angle", "ssm", "k", "v"), {"return_final_states": True}, call)
CASES: list[Case] = [
    _scan("random", quick=True), _scan("bare", given=(), T=40), _scan("no-gate", given=("D", *STATES), T=40),
    _scan("groups", G=2, H=4, T=40), _scan("turned", R=16, T=40), _scan("never-turned", R=0, T=40),
    _scan("odd", K=18, V=20, R=5, T=40), _scan("one-token", T=1), _scan("large-steps", step=2.0, T=40),
    _scan("packed", edges=(0, 1, 1, 40, 66, 80)), _scan("packed-bare", edges=(0, 0, 30, 40), given=("Z",)),
    _scan("real", b=1, T=70, H=2, K=128, V=64, R=32)]
