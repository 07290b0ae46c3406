"""Cases of Comba: those of the gated delta rule with a vector p that the state is read with."""
from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.delta.reference import fed_back
from flashlin.kernels.norm.reference import normalise
from flashlin.testing.cases import delta, sequences
from flashlin.testing.cases.inputs import FLOAT32, Draw, Input
from flashlin.testing.cases.op import Op
from flashlin.testing.cases.recurrent import INFERENCE, forward_in_parts
from flashlin.testing.cases.sequences import L2
from flashlin.testing.compare import Tensors


def _reading(made: Tensors, draw: Draw) -> Tensors:
    """With p out of the numbers that were drawn for it."""
    if "p" in made:
        k, p = made["k"], made["p"]
        p = F.normalize(p, dim=-1) if draw["reads"] == "own" else k * p[..., :1].sigmoid()
        made["p"] = p.to(k.dtype)
    return made


# reads: p is a ``share`` of k, as the layer has it, or a vector of length 1 of its ``own``; "" without p.
_make = delta.gated_rule.but(
    inputs={**delta.gated_rule.inputs, "p": Input("B T H K", dtype=FLOAT32, when="reads")}, finish=_reading,
    facts={**delta.FACTS, "reads": "share"})


def _reference(*, use_qk_l2norm_in_kernel: bool = False, **given: Any) -> tuple[Tensor, Tensor]:
    if use_qk_l2norm_in_kernel and given.get("p") is not None:
        given["p"] = normalise("l2", given["p"], eps=1e-6)[0]
    return sequences.outputs(fed_back, {}, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **given)


_chunk = Op("chunk_comba", _make, _reference, {**delta.TOLERANCES, "dp": 0.01})
_recurrent = _chunk._replace(name="fused_recurrent_comba")
_inference = _recurrent._replace(constant=INFERENCE)
BARE: dict[str, Any] = {"rate": "1", "without": ("beta",)}
_small: dict[str, Any] = {"B": 1, "K": 16, "V": 24, "T": 5}
CASES = [
    _chunk("random", quick=True, B=1, T=70), _chunk("own", reads="own", K=32, V=32),
    _chunk("p=None", {"p": None}, reads="", K=32, V=32, T=70),
    _chunk("beta=None", {"scale": -0.7}, **BARE, reads="own", K=32, V=32, T=70),
    _chunk("no-state", state=False, T=64, K=32, V=32), _chunk("packed", edges=(0, 1, 1, 66, 130, 150)),
    _chunk("odd", K=100, V=36, T=70), _chunk("grouped", H=2, HV=6, K=32, V=40, T=70),
    _chunk("alike-l2", L2, keys="alike", K=32, V=32),
    _chunk("one-key", allowed=delta.FORGETFUL, keys="one-key", rate="1", reads="", options={"p": None}),
    _chunk("resets", gate="resets", K=32, V=40, B=1), _chunk("g=-inf", gate="-inf", T=20),
    _chunk("g=-20", gate="-20", reads="own", T=70, K=32, V=40), _chunk("strong", gate="strong", reads="own"),
    *(_chunk(name, gate=sequences.SLOW, **sequences.LONG[name])
      for name in ("in-parts", "in-parts-64", "in-parts-wide", "in-parts-256")),
    forward_in_parts(_chunk, 64), forward_in_parts(_chunk, 128),
    _recurrent("random", quick=True, **_small), _recurrent("packed", edges=(0, 0, 3, 5), **_small),
    _recurrent("grouped-l2", L2, H=1, HV=2, **_small),
    _recurrent("beta=None", **BARE, reads="own", H=1, HV=2, **_small),
    _recurrent("p=None", {"p": None}, reads="", H=1, HV=2, **_small),
    _inference("g=-inf", gate="-inf", **_small),
    _inference("inference", L2, keys="raw", H=1, HV=2, B=1, K=23, V=40, T=5),
    _inference("inference-bare", {**L2, "p": None}, reads="", **BARE, keys="raw", H=1, HV=2,
               edges=(0, 0, 3, 5), K=16, V=24)]
