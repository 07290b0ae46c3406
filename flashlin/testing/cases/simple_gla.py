"""Cases of the scalar-decay family: random and adversarial inputs, states, packed sequences, odd sizes."""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashlin
from flashlin.kernels.gla.reference import recurrence
from flashlin.testing.cases import gla, sequences
from flashlin.testing.cases.inputs import FLOAT32, Draw, Input, Maker, decays
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case

TOLERANCES = {"*": 0.005, "d*": 0.008, "dg": 0.02}
LAYER: dict[str, Any] = {"layer_idx": 3, "num_layers": 12}
# Decays that are built into an op, for head h of H. ALWAYS: options of every call of an op.
SLOPES: dict[str, Callable[[int, int], float]] = {
    "retention": lambda h, H: math.log1p(-2.0 ** (-5 - h)),
    "lightning_attn": lambda h, H: -(8 / H) * (1 - LAYER["layer_idx"] / LAYER["num_layers"]) * h}
ALWAYS: dict[str, dict[str, Any]] = {"linear_attn": {"normalize": False}, "lightning_attn": LAYER}


def _gamma(kind: str, q: Tensor) -> Tensor | None:
    H = q.shape[2]
    return q.new_tensor([SLOPES[kind](h, H) for h in range(H)]) if kind in SLOPES else None


def parallel(kind: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None,
             cu_seqlens: Tensor | None = None, output_attentions: bool = True) -> tuple[Tensor | None, ...]:
    """Compute o with the recurrence, and each attention score from its own sum of decays."""
    B, T, H, K = q.shape
    gamma = _gamma(kind, q)
    o, _ = recurrence(q, k, v, g, gamma, bounds=cu_seqlens, scale=K ** -0.5)
    if not output_attentions:
        return o, None
    decay = (q.new_zeros(B, T, H) if g is None else g) + (0 if gamma is None else gamma.double())
    rows = [torch.stack([K ** -0.5 * (q[:, i] * k[:, j]).sum(-1) * decay[:, j + 1:i + 1].sum(1).exp()
                         if j <= i else q.new_zeros(B, H)
                         for j in range(T)], -1) for i in range(T)]
    return o, torch.stack(rows, 2)


def normalized(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute linear attention token by token, normalised by the running sum of keys."""
    scale = q.shape[3] ** -0.5
    o, ht = recurrence(q, k, v, h0=kv, scale=scale)
    sums = k.cumsum(1) + z
    return o / (scale * (q * sums).sum(-1, keepdim=True) + 1e-10), ht, sums[:, -1:]


def call_normalized(op: str, kv: Tensor, z: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Call the op with ``normalize=True``, and return o and the two final states, kv and z."""
    o, (ht, z_out) = getattr(flashlin, op)(**tensors, initial_state=(kv, z), output_final_state=True,
                                           normalize=True)
    return o, ht, z_out


def _features(draw: Draw, shape: str) -> Tensor:
    """Return positive numbers, as linear attention uses them.

    With a normaliser near zero, rounding errors would grow without bound.
    """
    return F.elu(draw(shape)).add(1.1)


_plain = Maker({**gla.QKV, "initial_state": gla.STATE}, gla.FACTS)
_gated = Maker({**gla.QKV, "g": Input("B T H", decays(0.0), FLOAT32), "initial_state": gla.STATE}, gla.FACTS)
_of_features = Maker(
    {"q": Input("B T H K", _features), "k": Input("B T H K", _features), "v": Input("B T H V"),
     "kv": Input("B H K V", dtype=FLOAT32), "z": Input("B one H K", Draw.uniform)},
    {"B": 2, "T": 100, "H": 2, "K": 32, "V": 40, "one": 1})


def _op(mode: str, kind: str) -> Op:
    maker = _gated if kind == "simple_gla" else _plain
    if mode == "parallel_":
        return Op(mode + kind, maker.having(state=False, T=40), partial(parallel, kind), TOLERANCES,
                  ("o", "attn"), {"output_attentions": True})
    formula = partial(sequences.outputs, lambda q, **rest: recurrence(q=q, gamma=_gamma(kind, q), **rest), {})
    return Op(mode + kind, maker, formula, TOLERANCES,
              always={"output_final_state": True, **ALWAYS.get(kind, {})})


def _normalized(mode: str) -> Case:
    name = mode + "linear_attn"
    return Op(name, _of_features, normalized, {**TOLERANCES, "dq": 0.02, "dk": 0.02}, ("o", "ht", "z"), {},
              partial(call_normalized, name))("normalized")


def _family(case: Op) -> list[Case]:
    cases = [case("random", quick=True), case("constant", kind="constant"), case("one-key", kind="one-key"),
             case("no-state", state=False, T=64), case("packed", edges=(0, 1, 1, 66, 130, 150)),
             case("wide", K=128, V=128, T=100), case("odd", K=100, V=36, T=70), case("one-token", T=1)]
    gated = case.name.endswith("simple_gla")
    if gated:
        cases += [case("g=0", gate="0"), case("g=-20", gate="-20"),
                  case("resets", gate="resets", K=32, V=40, T=100, B=1), case("g=-inf", gate="-inf", T=20)]
    if case.name == "chunk_simple_gla":
        cases += [case("narrow", K=64, V=32, T=70),
                  case("resets-packed", gate="resets", K=32, edges=(0, 4, 4, 70, 100)),
                  case("every-other", gate="every-other", K=32, V=32, T=128, B=1)]
    if case.name.startswith("chunk_"):
        cases.append(case("whole-chunks", K=128, V=128, T=192))
        cases += [case(name, gate=sequences.SLOW if gated else "random", **facts)
                  for name, facts in sequences.LONG.items()]
    else:
        cases.append(case("reverse", {"reverse": True}, gate="resets" if gated else "random", T=70))
    return cases


CASES: list[Case] = []
for _mode in ("chunk_", "fused_recurrent_"):
    for _kind in ("simple_gla", "retention", "linear_attn", "lightning_attn"):
        CASES += _family(_op(_mode, _kind))
    CASES.append(_normalized(_mode))
# The other ops use the same kernels. So their cases test only that arguments reach the kernels, and the
# attention scores.
for _kind in ("simple_gla", "retention", "linear_attn"):
    _fused = _op("fused_chunk_", _kind)
    CASES += [_fused("random", quick=True, T=70), _fused("packed", edges=(0, 1, 1, 66, 70))]
for _kind in ("simple_gla", "retention"):
    _parallel = _op("parallel_", _kind)
    CASES += [_parallel("random", quick=True),
              _parallel("packed", {"output_attentions": False}, edges=(0, 1, 1, 40)),
              _parallel("odd", K=20, V=36), _parallel("one-token", T=1)]
_parallel, _chunk = _op("parallel_", "simple_gla"), _op("chunk_", "simple_gla")
CASES += [_normalized("fused_chunk_"), _op("fused_chunk_", "simple_gla")("resets", gate="resets", T=70, B=1),
          _parallel("g=0", gate="0"), _parallel("g=-20", gate="-20"), _parallel("resets", gate="resets")]
# Heads up to the widest that kernels support, and sizes just above a power of two. Only chunk_simple_gla has
# these cases, because the other chunked ops run the same code.
CASES += [_chunk(f"K={_K},V={_V}", K=_K, V=_V, B=1, T=80)
          for _K, _V in ((256, 256), (512, 64), (64, 512), (129, 20))]
