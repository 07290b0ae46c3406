"""Cases of Mamba-3: groups, channels without rotation, states, packed sequences, accumulated angles."""
from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

import flashlin
from flashlin.kernels.mamba.reference import trapezoid
from flashlin.testing.cases.inputs import FLOAT32, Draw, Input, Maker, times
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case

STATES = ("angle_state", "ssm_state", "k_state", "v_state")
# The rotated q and k are rounded to 16 bits before the scan, and the scan rounds its operands again.
# Gradients are sums of many such values.
TOLERANCES = {"*": 0.008, "d*": 0.012, "dADT": 0.02, "dDT": 0.03, "dTrap": 0.02, "dAngles": 0.03, "dD": 0.02,
              "dQ_bias": 0.02, "dK_bias": 0.02, "dangle_state": 0.03}


def _step(draw: Draw, shape: str) -> Tensor:
    draw.kept["DT"] = F.softplus(draw(shape) + draw["step"])
    return draw.kept["DT"]


def _decay(draw: Draw, shape: str) -> Tensor:
    return -F.softplus(draw(shape)) * draw.kept["DT"]


# K: columns of a state (N of the op). V: width of a head (P of the op). R: rotated pairs of channels. step:
# added to DT before its softplus.
_make = Maker(
    {"DT": Input("B H T", _step, FLOAT32), "Q": Input("B T G K"), "K": Input("B T G K"),
     "V": Input("B T H V"), "ADT": Input("B H T", _decay, FLOAT32), "Trap": Input("B H T", dtype=FLOAT32),
     "Q_bias": Input("H K", times(0.25, 1), FLOAT32), "K_bias": Input("H K", times(0.25, 1), FLOAT32),
     "Angles": Input("B T H R", dtype=FLOAT32), "D": Input("H", dtype=FLOAT32, when="given"),
     "Z": Input("B T H V", when="given"),
     "angle_state": Input("N H R", lambda draw, shape: 6 * draw.uniform(shape), FLOAT32, "given"),
     "ssm_state": Input("N H V K", dtype=FLOAT32, when="given"), "k_state": Input("N H K", when="given"),
     "v_state": Input("N H V", when="given")},
    {"B": 2, "T": 70, "G": 1, "H": 2, "K": 32, "V": 24, "R": 8, "step": -2.0})


def call(**given: Any) -> Any:
    """Call the op with the four states as one tuple."""
    states = tuple(given.pop(name) for name in STATES if name in given)
    return flashlin.mamba3_siso_combined(**given, Input_States=states or None)


def reference(cu_seqlens: Tensor | None = None, **given: Any) -> Any:
    """Compute the op in float64 from separate states and ``cu_seqlens``."""
    states = tuple(given.pop(name) for name in STATES if name in given)
    return trapezoid(**given, states=states or None, bounds=cu_seqlens)


_scan = Op("mamba3_siso_combined", _make, reference, TOLERANCES,
           ("y", "angle", "ssm", "k", "v"), {"return_final_states": True}, call)
CASES: list[Case] = [
    _scan("random", quick=True), _scan("bare", given=(), T=40), _scan("no-gate", given=("D", *STATES), T=40),
    _scan("groups", G=2, H=4, T=40), _scan("turned", R=16, T=40), _scan("never-turned", R=0, T=40),
    _scan("odd", K=18, V=20, R=5, T=40), _scan("one-token", T=1), _scan("large-steps", step=2.0, T=40),
    _scan("packed", edges=(0, 1, 1, 40, 66, 80)), _scan("packed-bare", edges=(0, 0, 30, 40), given=("Z",)),
    _scan("real", B=1, T=70, H=2, K=128, V=64, R=32)]
