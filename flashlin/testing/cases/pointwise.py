"""Cases of the elementwise ops: few and many rows and columns, odd ones, parameters of other dtypes, gates
far from zero on either side."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import flashlin
from flashlin.kernels.pointwise import reference
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.008,
              **dict.fromkeys(("dA_log", "ddt_bias", "dxr", "dxw", "dxk", "dxv", "dxa", "dxg", "dka", "dr_k"),
                              0.02)}
MIXES = ("xr", "xw", "xk", "xv", "xa", "xg")


def make(shapes: Callable[..., dict[str, tuple[int, ...]]], device: torch.device, dtype: torch.dtype,
         generator: torch.Generator, *, parameters: str = "same", far: float = 1.0,
         without: tuple[str, ...] = (), **facts: Any) -> Tensors:
    """shapes: of each tensor, parameters last, from facts. parameters: their dtype, ``same`` for the others'.
    far: what raw gates are multiplied by. without: tensors to leave out."""
    made = {}
    for name, shape in shapes(**facts).items():
        kept = parameters if name in (*MIXES, "A_log", "dt_bias", "ka",
                                      "r_k") and parameters != "same" else str(dtype).removeprefix("torch.")
        x = torch.randn(*shape, generator=generator) * (far if name == "g" else 0.5 if name == "A_log" else 1)
        if name not in without:
            made[name] = x.to(getattr(torch, kept)).to(device)
    return made


def gdn_shapes(rows: tuple[int, ...] = (2, 35), H: int = 6) -> dict[str, tuple[int, ...]]:
    return {"g": (*rows, H), "A_log": (H,), "dt_bias": (H,)}


def kda_shapes(rows: tuple[int, ...] = (2, 35), H: int = 3, K: int = 20) -> dict[str, tuple[int, ...]]:
    return {"g": (*rows, H, K), "A_log": (H,), "dt_bias": (H * K,)}


def mix_shapes(B: int = 2, T: int = 35, D: int = 48,
               xs: tuple[int, ...] = (1, 1)) -> dict[str, tuple[int, ...]]:
    return {"hidden_states": (B, T, D), "delta": (B, T, D), **dict.fromkeys(MIXES, (*xs, D))}


def key_shapes(B: int = 2, T: int = 35, D: int = 48) -> dict[str, tuple[int, ...]]:
    return {"k": (B, T, D), "a": (B, T, D), "ka": (D,)}


def correction_shapes(B: int = 2, T: int = 35, H: int = 3, D: int = 20) -> dict[str, tuple[int, ...]]:
    heads = (B, T, H, D)
    return {"o": (B, T, H * D), "r": heads, "k": heads, "v": heads, "g": (B, T, H * D), "r_k": (H, D)}


def call(op: str, extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    found = getattr(flashlin, op)(**tensors, **extra)
    return {"y": found} if isinstance(found, torch.Tensor) else {f"y{n}": y
                                                                 for n, y in enumerate(found)
                                                                 if y is not None}


def gdn_reference(extra: dict[str, Any], g: torch.Tensor, **parameters: torch.Tensor) -> Tensors:
    return {"y": reference.gate(g[..., None], parameters.get("A_log"), parameters.get("dt_bias"))[..., 0]}


def kda_reference(extra: dict[str, Any], g: torch.Tensor, **parameters: torch.Tensor) -> Tensors:
    return {"y": reference.gate(g, parameters.get("A_log"), parameters.get("dt_bias"),
                                extra.get("lower_bound"))}


def mix_reference(extra: dict[str, Any], hidden_states: torch.Tensor, delta: torch.Tensor,
                  **xs: torch.Tensor) -> Tensors:
    return {f"y{n}": y for n, y in enumerate(reference.mix(hidden_states, delta, *xs.values()))}


def key_reference(extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    return {"y": reference.key(**tensors)}


def correction_reference(extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    return {"y": reference.correction(**tensors)}


OPS: dict[str, tuple[Callable[..., Any], Callable[..., Tensors]]] = {
    "fused_gdn_gate": (gdn_shapes, gdn_reference), "fused_kda_gate": (kda_shapes, kda_reference),
    "fused_addcmul_rwkv7": (mix_shapes, mix_reference), "fused_k_rwkv7": (key_shapes, key_reference),
    "gate_output_correction": (correction_shapes, correction_reference)}


def _case(op: str, name: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    shapes, expected = OPS[op]
    return Case(op, name, partial(make, shapes, **facts), partial(call, op, extra or {}),
                partial(expected, extra or {}), TOLERANCES, (), quick)


BOUND = {"lower_bound": -5.0}
CASES: list[Case] = [_case(_op, "random", quick=True) for _op in OPS]
CASES += [_case(_op, "fp32-parameters", parameters="float32") for _op in OPS]
CASES += [_case("fused_gdn_gate", "no-bias", without=("dt_bias",)), _case("fused_gdn_gate", "far", far=10.0),
          _case("fused_gdn_gate", "flat", rows=()), _case("fused_gdn_gate", "one-head", H=1, rows=(300,)),
          _case("fused_gdn_gate", "many-heads", H=2100, rows=(5,)),
          _case("fused_gdn_gate", "many-rows", H=32, rows=(2, 1500))]
CASES += [_case("fused_kda_gate", "bounded", BOUND),
          _case("fused_kda_gate", "bounded-far", {"lower_bound": -0.5}, far=10.0),
          _case("fused_kda_gate", "bare", without=("A_log", "dt_bias")),
          _case("fused_kda_gate", "no-A", without=("A_log",)),
          _case("fused_kda_gate", "bounded-no-A", BOUND, without=("A_log",)),
          _case("fused_kda_gate", "no-bias", without=("dt_bias",)), _case("fused_kda_gate", "far", far=10.0),
          _case("fused_kda_gate", "wide", H=8, K=128, rows=(1, 40)),
          _case("fused_kda_gate", "strips", H=3, K=700, rows=(7,))]
CASES += [_case("fused_addcmul_rwkv7", "five", without=("xg",)),
          _case("fused_addcmul_rwkv7", "flat-parameters", xs=()), _case("fused_addcmul_rwkv7", "D=1", D=1),
          _case("fused_addcmul_rwkv7", "D=2500", D=2500, T=3),
          _case("fused_addcmul_rwkv7", "one-token", B=3, T=1)]
CASES += [_case("fused_k_rwkv7", "D=1", D=1), _case("fused_k_rwkv7", "D=2500", D=2500, T=3),
          _case("fused_k_rwkv7", "one-token", B=3, T=1),
          _case("fused_k_rwkv7", "many-rows", B=1, T=1500, D=32)]
CASES += [_case("gate_output_correction", f"D={D}", D=D, T=9) for D in (1, 64, 100, 300, 2100)]
CASES += [_case("gate_output_correction", "one-head", H=1),
          _case("gate_output_correction", "many-heads", H=40, D=8, T=5),
          _case("gate_output_correction", "one-token", B=3, T=1),
          _case("gate_output_correction", "many-rows", B=1, T=1200, H=2, D=8)]
