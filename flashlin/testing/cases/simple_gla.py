"""Cases of the scalar-decay family: random and adversarial inputs, states, packed sequences, odd sizes."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.simple_gla.reference import recurrence
from flashlin.ops._common.slopes import lightning_slopes, retention_slopes
from flashlin.testing.cases import forgetting
from flashlin.testing.compare import Case, Maker, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.008, "dg": 0.02}
LAYER, LAYERS = 3, 12


def make(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    B: int = 2,
    T: int = 150,
    H: int = 2,
    K: int = 64,
    V: int = 64,
    gate: str = "none",
    kind: str = "random",
    state: bool = True,
    edges: tuple[int, ...] = (),
) -> Tensors:
    """gate: ``none``, one of forgetting.KINDS, or a number."""
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)
    if edges:
        B, T = 1, edges[-1]
    q, k, v = randn(B, T, H, K), randn(B, T, H, K), randn(B, T, H, V)
    if kind == "constant":
        q, k, v = (torch.full_like(x, 0.5) for x in (q, k, v))
    elif kind == "one-key":
        k = k[:, :1].expand_as(k).contiguous()
    made = {"q": q, "k": k, "v": v}
    if gate in forgetting.KINDS:
        made["g"] = forgetting.KINDS[gate](F.logsigmoid(torch.randn(B, T, H, generator=generator))).to(device)
    elif gate != "none":
        made["g"] = torch.full((B, T, H), float(gate), device=device)
    if state:
        made["initial_state"] = torch.randn(len(edges) - 1 if edges else B, H, K, V,
                                            generator=generator).to(device)
    if edges:
        made["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32, device=device)
    return made


def call(function: Callable[..., Any], extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    o, ht = function(**tensors, **extra, output_final_state=True)
    return {"o": o, "ht": ht}


def reference(gamma: Callable[[int, torch.device], torch.Tensor] | None, reverse: bool, q: torch.Tensor,
              k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None = None,
              initial_state: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None) -> Tensors:
    rates = None if gamma is None else gamma(q.shape[2], q.device)
    T, scale = q.shape[1], q.shape[3] ** -0.5
    if not reverse:
        o, ht = recurrence(q, k, v, g, rates, initial_state, cu_seqlens, scale)
        return {"o": o, "ht": ht}
    assert cu_seqlens is None  # reversed packed sequences have a test of their own
    o, ht = recurrence(q.flip(1), k.flip(1), v.flip(1), None if g is None else g.flip(1), rates,
                       initial_state, None, scale)
    return {"o": o[:, range(T - 1, -1, -1)], "ht": ht}


def call_parallel(function: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  **tensors: torch.Tensor) -> Tensors:
    """With the scores, unless the sequences are packed."""
    o, attn = function(q, k, v, **tensors, output_attentions="cu_seqlens" not in tensors)
    return {"o": o} if attn is None else {"o": o, "attn": attn}


def parallel(gamma: Callable[[int, torch.device], torch.Tensor] | None, q: torch.Tensor, k: torch.Tensor,
             v: torch.Tensor, g: torch.Tensor | None = None,
             cu_seqlens: torch.Tensor | None = None) -> Tensors:
    """o of the recurrence, and each score from its own sum of decays."""
    found = {"o": reference(gamma, False, q, k, v, g, None, cu_seqlens)["o"]}
    if cu_seqlens is not None:
        return found
    B, T, H, K = q.shape
    decay = q.new_zeros(B, T, H) if g is None else g
    decay = decay if gamma is None else decay + gamma(H, q.device).double()
    rows = [torch.stack([K ** -0.5 * (q[:, i] * k[:, j]).sum(-1) * decay[:, j + 1:i + 1].sum(1).exp()
                         if j <= i else q.new_zeros(B, H)
                         for j in range(T)], -1) for i in range(T)]
    return {**found, "attn": torch.stack(rows, 2)}


def normalized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor | None = None,
               z: torch.Tensor | None = None) -> Tensors:
    """Linear attention with its running sum of keys, token by token."""
    scale = q.shape[3] ** -0.5
    o, ht = recurrence(q, k, v, None, None, kv, None, scale)
    sums = k.cumsum(1) if z is None else k.cumsum(1) + z
    return {"o": o / (scale * (q * sums).sum(-1, keepdim=True) + 1e-10), "ht": ht, "z": sums[:, -1:]}


def call_normalized(function: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    kv: torch.Tensor, z: torch.Tensor) -> Tensors:
    o, (ht, z_out) = function(q=q, k=k, v=v, initial_state=(kv, z), output_final_state=True, normalize=True)
    return {"o": o, "ht": ht, "z": z_out}


def make_normalized(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Positive features, as linear attention uses: a normaliser near zero would magnify rounding without
    end."""
    B, T, H, K, V = 2, 100, 2, 32, 40
    q, k = (F.elu(torch.randn(B, T, H, K, generator=generator)).add(1.1).to(dtype).to(device)
            for _ in range(2))
    return {"q": q, "k": k, "v": torch.randn(B, T, H, V, generator=generator).to(dtype).to(device),
            "kv": torch.randn(B, H, K, V, generator=generator).to(device),
            "z": torch.rand(B, 1, H, K, generator=generator).to(dtype).to(device)}


def _family(op: str, maker: Callable[..., Maker], gamma: Any = None,
            extra: dict[str, Any] | None = None) -> list[Case]:
    function = getattr(flashlin, op)
    gated = op.endswith("simple_gla")
    gates = ("random", "0", "-20") if gated else ("none",)

    def case(name: str, quick: bool = False, reverse: bool = False, **facts: Any) -> Case:
        given = {**(extra or {}), **({"reverse": True} if reverse else {})}
        return Case(op, name, maker(**facts), partial(call, function, given),
                    partial(reference, gamma, reverse), TOLERANCES, (), quick)
    first = gates[0]
    cases = [case("random", quick=True, gate=first), case("constant", kind="constant", gate=first),
             case("one-key", kind="one-key", gate=first), case("no-state", gate=first, state=False, T=64),
             case("packed", gate=first, edges=(0, 1, 1, 66, 130, 150)),
             case("wide", gate=first, K=128, V=128, T=100), case("odd", gate=first, K=100, V=36, T=70),
             case("one-token", gate=first, T=1)]
    cases += [case(f"g={gate}", gate=gate) for gate in gates[1:]]
    if gated:
        cases += [case("resets", gate="resets", K=32, V=40, T=100, B=1), case("g=-inf", gate="-inf", T=20)]
    if op == "chunk_simple_gla":
        cases += [case("narrow", gate=first, K=64, V=32, T=70),
                  case("resets-packed", gate="resets", K=32, edges=(0, 4, 4, 70, 100)),
                  case("every-other", gate="every-other", K=32, V=32, T=128, B=1)]
    if op.startswith("fused_recurrent"):
        cases.append(case("reverse", gate="resets" if gated else first, T=70, reverse=True))
    return cases


def _maker(**facts: Any) -> Maker:
    return partial(make, **facts)


CASES: list[Case] = []
for _mode in ("chunk_", "fused_recurrent_"):
    _plain = {"normalize": False}
    CASES += _family(_mode + "simple_gla", _maker)
    CASES += _family(_mode + "retention", _maker, retention_slopes)
    CASES += _family(_mode + "linear_attn", _maker, None, _plain)
    CASES += _family(_mode + "lightning_attn", _maker,
                     lambda H, device: lightning_slopes(H, LAYER, LAYERS, device),
                     {"layer_idx": LAYER, "num_layers": LAYERS})
    CASES.append(Case(_mode + "linear_attn", "normalized", make_normalized,
                      partial(call_normalized, getattr(flashlin, _mode + "linear_attn")), normalized,
                      {**TOLERANCES, "dq": 0.02, "dk": 0.02}))
# The others by the chunked kernels: what is theirs is the plumbing, and the scores.
for _op, _gamma in (("simple_gla", None), ("retention", retention_slopes), ("linear_attn", None)):
    _gate, _extra = ("random" if _op == "simple_gla" else "none"), ({"normalize": False}
                                                                    if _op == "linear_attn" else {})
    _extents: dict[str, dict[str, Any]] = {"random": {}, "packed": {"edges": (0, 1, 1, 66, 70)}}
    for _id, _facts in _extents.items():
        CASES.append(Case("fused_chunk_" + _op, _id, _maker(gate=_gate, **{"T": 70, **_facts}),
                          partial(call, getattr(flashlin, "fused_chunk_" + _op), _extra),
                          partial(reference, _gamma, False), TOLERANCES, (), _id == "random"))
    if _op != "linear_attn":
        _extents = {"random": {}, "packed": {"edges": (0, 1, 1, 40)}, "odd": {"K": 20, "V": 36},
                    "one-token": {"T": 1}}
        for _id, _facts in _extents.items():
            CASES.append(Case("parallel_" + _op, _id, _maker(gate=_gate, state=False, **{"T": 40, **_facts}),
                              partial(call_parallel, getattr(flashlin, "parallel_" + _op)),
                              partial(parallel, _gamma), TOLERANCES, (), _id == "random"))
CASES.append(Case("fused_chunk_linear_attn", "normalized", make_normalized,
                  partial(call_normalized, flashlin.fused_chunk_linear_attn), normalized,
                  {**TOLERANCES, "dq": 0.02, "dk": 0.02}))
CASES.append(Case("fused_chunk_simple_gla", "resets", _maker(gate="resets", T=70, B=1),
                  partial(call, flashlin.fused_chunk_simple_gla, {}), partial(reference, None, False),
                  TOLERANCES))
for _gate in ("0", "-20", "resets"):
    CASES.append(Case("parallel_simple_gla", _gate if _gate == "resets" else f"g={_gate}",
                      _maker(gate=_gate, state=False, T=40),
                      partial(call_parallel, flashlin.parallel_simple_gla), partial(parallel, None),
                      TOLERANCES))
# Heads as wide as the kernels go, and one step past a power of two; only the chunked op, since the plumbing
# is shared.
for _K, _V in ((256, 256), (512, 64), (64, 512), (129, 20)):
    CASES.append(Case("chunk_simple_gla", f"K={_K},V={_V}", _maker(gate="random", K=_K, V=_V, B=1, T=80),
                      partial(call, flashlin.chunk_simple_gla, {}), partial(reference, None, False),
                      TOLERANCES))
