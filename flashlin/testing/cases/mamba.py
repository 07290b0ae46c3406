"""Cases of Mamba and Mamba2: the scans with groups, gates, limits and packed rows, its fused layer, decoding
steps in place, gated norms."""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import flashlin
from flashlin.kernels.conv.reference import convolve
from flashlin.kernels.mamba.reference import scan, selective, silu, step, window
from flashlin.testing.compare import Case, Tensors

Generator = torch.Generator
SCAN = {"*": 0.005, "d*": 0.008, "ddt": 0.02, "dA": 0.02, "dD": 0.02, "ddt_bias": 0.02, "ddelta_bias": 0.02,
        "dzxbcdt": 0.02, "dconv1d_weight": 0.02, "dconv1d_bias": 0.02, "drmsnorm_weight": 0.02,
        "dweight": 0.02, "dbias": 0.02}
OPTIONAL = ("D", "z", "dt_bias", "initial_states")

# x, B and C are rounded between the convolution and the scan, y before its norm and its projection.
LAYER = {**SCAN, "*": 0.01, "d*": 0.016}


def random(generator: Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def numbers(lengths: tuple[int, ...], b: int = 1) -> torch.Tensor:
    """seq_idx of rows made of sequences of these lengths; of row i the first one is i tokens longer, at the
    cost of the last."""
    rows = []
    for i in range(b):
        changed = [lengths[0] + i, *lengths[1:-1], lengths[-1] - i] if len(lengths) > 1 else list(lengths)
        rows.append(torch.arange(len(lengths)).repeat_interleave(torch.tensor(changed)))
    return torch.stack(rows).int()


def make_scan(
    device: torch.device,
    dtype: torch.dtype,
    generator: Generator,
    *,
    b: int = 2,
    T: int = 150,
    H: int = 4,
    V: int = 32,
    G: int = 2,
    K: int = 64,
    given: tuple[str, ...] = OPTIONAL,
    wide_D: bool = False,
    step: str = "usual",
    seq: tuple[int, ...] = (),
    edges: tuple[int, ...] = (),
    others: str = "float32",
) -> Tensors:
    """Heads of V and states of K columns, as other makers call them. step: ``usual`` (after softplus about
    0.1, as layers initialise it), ``large`` (decays down to e^-50), ``tiny`` or ``forgetting`` (usual, but
    some heads keep nothing). others: dtype of dt and of what belongs to heads. seq: lengths of the sequences
    in each row. edges: of packed ones."""
    if edges:
        b, T = 1, edges[-1]
    own, P, N = getattr(torch, others) if others != "same" else dtype, V, K
    bias = {"usual": -2.0, "large": 3.0, "tiny": -9.0, "forgetting": -2.0}[step]
    made = {"x": random(generator, b, T, H, P).to(dtype), "dt": (random(generator, b, T, H) + bias).to(own),
            "A": -(1 + 3 * torch.rand(H, generator=generator)).to(own),
            "B": random(generator, b, T, G, N).to(dtype),
            "C": (random(generator, b, T, G, N) / N ** 0.5).to(dtype),
            "D": random(generator, *((H, P) if wide_D else (H,))).to(own),
            "z": random(generator, b, T, H, P).to(dtype), "dt_bias": random(generator, H).to(own),
            "initial_states": random(generator, b, H, P, N)}
    if step == "forgetting":
        made["A"][1:3] = torch.tensor([-1e6, -1e30])
    made = {name: x for name, x in made.items() if name not in OPTIONAL or name in given}
    if seq:
        made["seq_idx"] = numbers(seq, b)
    if edges:
        made["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32)
    return {name: x.to(device) for name, x in made.items()}


def call_scan(extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    options = {"dt_softplus": True, "return_final_states": True, **extra}
    function: Callable[..., Any] = flashlin.mamba_chunk_scan_combined
    found = function(**tensors, chunk_size=64, **options, return_varlen_states="cu_seqlens" in tensors)
    return dict(zip(("y", "ht", "states"), found, strict=False))


def scan_reference(
    extra: dict[str, Any],
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **tensors: torch.Tensor,
) -> Tensors:
    y, ht, states = scan(x, dt, A, B, C, h0=initial_states,
                         edges=None if cu_seqlens is None else cu_seqlens.tolist(),
                         softplus=extra.get("dt_softplus", True),
                         limit=extra.get("dt_limit", (0.0, math.inf)), **tensors)
    return {"y": y, "ht": ht, **({} if states is None else {"states": states})}


def make_selective(
    device: torch.device,
    dtype: torch.dtype,
    generator: Generator,
    *,
    b: int = 2,
    D: int = 40,
    T: int = 75,
    N: int = 16,
    G: int = 0,
    given: tuple[str, ...] = ("D", "z", "delta_bias"),
    step: str = "usual",
    others: str = "float32",
) -> Tensors:
    """step: as make_scan's, or ``positive`` without softplus. G = 0: B and C without groups. others: dtype of
    what belongs to channels."""
    own = getattr(torch, others) if others != "same" else dtype
    bias = {"usual": -2.0, "large": 3.0, "tiny": -9.0, "positive": 0.0, "forgetting": -2.0}[step]
    shape = (b, *[G] * bool(G), N, T)
    made = {"u": random(generator, b, D, T).to(dtype), "delta": (random(generator, b, D, T) + bias).to(dtype),
            "A": -(1 + 3 * torch.rand(D, N, generator=generator)).to(own), "D": random(generator, D).to(own),
            "z": random(generator, b, D, T).to(dtype), "delta_bias": random(generator, D).to(own),
            "B": random(generator, *shape).to(dtype), "C": (random(generator, *shape) / N ** 0.5).to(dtype)}
    if step == "positive":
        made["delta"] = made["delta"].abs()
    if step == "forgetting":
        made["A"][::3, ::2], made["A"][1::3] = -1e6, -1e30
    return {name: made[name].to(device) for name in ("u", "delta", "A", "B", "C", *given)}


def call_selective(extra: dict[str, Any], last: bool, **tensors: torch.Tensor) -> Tensors:
    """last: channels last, as a projection leaves them."""
    if last:
        tensors.update({name: tensors[name].mT.contiguous().mT
                        for name in ("u", "z", "B") if name in tensors})
    function: Callable[..., Any] = flashlin.selective_scan_fn
    y, ht = function(**tensors, **{"delta_softplus": True, **extra}, return_last_state=True)
    return {"y": y, "ht": ht}


def selective_reference(extra: dict[str, Any], delta_bias: torch.Tensor | None = None,
                        **tensors: torch.Tensor) -> Tensors:
    y, ht = selective(**tensors, bias=delta_bias, softplus=extra.get("delta_softplus", True))
    return {"y": y, "ht": ht}


def make_layer(
    device: torch.device,
    dtype: torch.dtype,
    generator: Generator,
    *,
    b: int = 2,
    T: int = 90,
    H: int = 4,
    V: int = 16,
    G: int = 2,
    K: int = 16,
    M: int = 0,
    W: int = 4,
    given: tuple[str, ...] = ("conv1d_bias", "rmsnorm_weight", "outproj_weight"),
    wide_D: bool = False,
    seq: tuple[int, ...] = (),
) -> Tensors:
    P, N = V, K
    D, C = H * P, H * P + 2 * G * N
    made = {"zxbcdt": random(generator, b, T, 2 * M + 2 * D + 2 * G * N + H),
            "conv1d_weight": random(generator, C, W) / W ** 0.5, "conv1d_bias": random(generator, C),
            "dt_bias": random(generator, H) - 2, "A": -1 - 3 * torch.rand(H, generator=generator),
            "D": random(generator, *((H, P) if wide_D else (H,))),
            "initial_states": random(generator, b, H, P, N), "rmsnorm_weight": 1 + 0.1 * random(generator, D),
            "outproj_weight": random(generator, 24, D + M) / D ** 0.5, "outproj_bias": random(generator, 24)}
    optional = ("conv1d_bias", "initial_states", "rmsnorm_weight", "outproj_weight", "outproj_bias")
    own = ("dt_bias", "A", "D", "initial_states")
    made = {name: x.to(torch.float32 if name in own else dtype)
            for name, x in made.items() if name not in optional or name in given}
    if seq:
        made["seq_idx"] = numbers(seq, b)
    return {name: x.to(device) for name, x in made.items()}


def call_layer(extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    function: Callable[..., Any] = flashlin.mamba_split_conv1d_scan_combined
    y, ht = function(**{"conv1d_bias": None, **tensors}, chunk_size=64, return_final_states=True, **extra)
    return {"y": y, "ht": ht}


def layer_reference(
    extra: dict[str, Any],
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    conv1d_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    rmsnorm_weight: torch.Tensor | None = None,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
) -> Tensors:
    H, P, G = D.shape[0], D.shape[1] if D.ndim == 2 else extra["headdim"], extra["ngroups"]
    N = (conv1d_weight.shape[0] - H * P) // 2 // G
    M = (zxbcdt.shape[2] - 2 * H * P - 2 * G * N - H) // 2
    gate, value, z, xBC, dt = torch.split(zxbcdt, [M, M, H * P, H * P + 2 * G * N, H], 2)
    xBC = convolved(xBC, conv1d_weight, conv1d_bias, None, seq_idx,
                    extra.get("activation", "silu") is not None)
    x, B, C = torch.split(xBC, [H * P, G * N, G * N], 2)
    b, T, _ = x.shape
    y, ht, _ = scan(
        x.reshape(b, T, H, P), dt, A, B.reshape(b, T, G, N), C.reshape(b, T, G, N),
        D=D, dt_bias=dt_bias, h0=initial_states, seq_idx=seq_idx, softplus=True)
    y = y.flatten(2)
    if rmsnorm_weight is None:
        y = y * silu(z)
    else:
        before = extra.get("norm_before_gate", True)
        y = normed(y if before else y * silu(z), rmsnorm_weight, None, H * P // G, extra["rmsnorm_eps"],
                   False) * (silu(z) if before else 1)
    y = torch.cat([silu(gate) * value, y], 2)
    if outproj_weight is not None:
        y = y @ outproj_weight.T + (0 if outproj_bias is None else outproj_bias)
    return {"y": y, "ht": ht}


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None,
              seq_idx: torch.Tensor | None, silu_: bool) -> torch.Tensor:
    """y [b, T, D] of x [b, T, D], sequence by sequence; state [b, D, W - 1]."""
    rows = []
    for i in range(x.shape[0]):
        edges = [0, *[t for t in range(1, x.shape[1]) if seq_idx is not None
                      and seq_idx[i, t] != seq_idx[i, t - 1]], x.shape[1]]
        parts = []
        for n in range(len(edges) - 1):
            h0 = None if state is None or n else torch.cat([torch.zeros_like(state[i:i + 1, :, :1]),
                                                            state[i:i + 1]], 2)
            y, _ = convolve(x[i:i + 1, edges[n]:edges[n + 1]], weight, bias, None, h0, silu_)
            parts.append(y * 0 if seq_idx is not None and seq_idx[i, edges[n]] < 0 else y)
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


def make_fn(
    device: torch.device,
    dtype: torch.dtype,
    generator: Generator,
    *,
    b: int = 2,
    D: int = 20,
    T: int = 70,
    W: int = 4,
    given: tuple[str, ...] = ("bias", "initial_states"),
    seq: tuple[int, ...] = (),
    padding: bool = False,
    others: str = "same",
) -> Tensors:
    own = getattr(torch, others) if others != "same" else dtype
    made = {"x": random(generator, b, D, T).to(dtype), "weight": random(generator, D, W).to(own),
            "bias": random(generator, D).to(own), "initial_states": random(generator, b, D, W - 1).to(own)}
    made = {name: x for name, x in made.items() if name not in ("bias", "initial_states") or name in given}
    if seq:
        made["seq_idx"] = numbers(seq, b)
        if padding:
            made["seq_idx"][made["seq_idx"] == 1] = -1
    return {name: x.to(device) for name, x in made.items()}


def call_fn(extra: dict[str, Any], last: bool, x: torch.Tensor, **tensors: torch.Tensor) -> Tensors:
    """last: channels last, as layers have them."""
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if last else x
    function: Callable[..., Any] = flashlin.causal_conv1d_fn
    if "seq_idx" in tensors:
        return {"y": function(x, **tensors, **extra)}
    y, ht = function(x, **tensors, **extra, return_final_states=True)
    return {"y": y, "ht": ht}


def fn_reference(extra: dict[str, Any], x: torch.Tensor, weight: torch.Tensor,
                 bias: torch.Tensor | None = None, initial_states: torch.Tensor | None = None,
                 seq_idx: torch.Tensor | None = None) -> Tensors:
    y = convolved(x.mT, weight, bias, initial_states, seq_idx, extra.get("activation") is not None).mT
    if seq_idx is not None:
        return {"y": y}
    before = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if initial_states is None else initial_states
    return {"y": y, "ht": torch.cat([before, x], 2)[:, :, x.shape[2]:]}


def make_window(
    device: torch.device,
    dtype: torch.dtype,
    generator: Generator,
    *,
    b: int = 5,
    D: int = 20,
    T: int = 1,
    W: int = 4,
    L: int = 4,
    bias: bool = True,
    ring: bool = False,
    pool: int = 0,
    others: str = "same",
) -> Tensors:
    own = getattr(torch, others) if others != "same" else dtype
    made = {"x": random(generator, b, D, T).to(dtype),
            "conv_state": random(generator, pool or b, D, L).to(own),
            "weight": random(generator, D, W).to(own)}
    if bias:
        made["bias"] = random(generator, D).to(own)
    if ring:
        made["cache_seqlens"] = torch.randint(0, 100, (b,), generator=generator, dtype=torch.int32)
    if pool:
        made["conv_state_indices"] = torch.randperm(pool, generator=generator)[:b].int()
        made["conv_state_indices"][1] = -1
    return {name: x.to(device) for name, x in made.items()}


def call_window(extra: dict[str, Any], conv_state: torch.Tensor, **tensors: torch.Tensor) -> Tensors:
    """Two calls, without gradients (the kernel's), and with them; the state is a view that the first must
    write through."""
    function: Callable[..., Any] = flashlin.mamba_causal_conv1d_update
    behind, after = conv_state.mT.contiguous(), conv_state.clone()
    with torch.no_grad():
        without = function(conv_state=behind.mT, **tensors, **extra)
    with_ = function(conv_state=after, **tensors, **extra)
    return {"y": with_, "y_of_the_kernel": without, "state": behind.mT, "state_too": after}


def window_reference(extra: dict[str, Any], x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor,
                     bias: torch.Tensor | None = None, cache_seqlens: torch.Tensor | None = None,
                     conv_state_indices: torch.Tensor | None = None) -> Tensors:
    rows = torch.arange(x.shape[0]) if conv_state_indices is None else conv_state_indices.long()
    known = rows >= 0
    y, after = window(x, conv_state[rows.clamp(min=0)], weight, bias, cache_seqlens,
                      extra.get("activation") is not None)
    state = conv_state.detach().clone()
    state[rows[known]] = after.detach()[known]
    y = torch.where(known[:, None, None], y, 0)
    return {"y": y, "y_of_the_kernel": y.detach(), "state": state, "state_too": state}


def make_step(
    device: torch.device,
    dtype: torch.dtype,
    generator: Generator,
    *,
    b: int = 3,
    H: int = 4,
    P: int = 20,
    G: int = 2,
    N: int = 24,
    tied: bool = True,
    given: tuple[str, ...] = ("D", "z", "dt_bias"),
    states: str = "float32",
    pool: int = 0,
) -> Tensors:
    """tied: one dt, A, D and dt_bias for each head, as Mamba2's; the call expands them. H = 0: a state
    without heads, as Mamba1's."""
    def per_head(*lead: int) -> torch.Tensor:
        return random(generator, *lead, H) if tied else random(generator, *lead, *([H] if H else []), P)
    heads = [H] if H else []
    kept = dtype if states == "same" else getattr(torch, states)
    made = {"state": random(generator, pool or b, *heads, P, N).to(kept),
            "x": random(generator, b, *heads, P).to(dtype), "dt": per_head(b).to(dtype),
            "A": -per_head().abs() if tied else -random(generator, *heads, P, N).abs(),
            **{name: random(generator, b, *([G] if H else []), N).to(dtype) for name in ("B", "C")},
            "D": per_head(), "z": random(generator, b, *heads, P).to(dtype), "dt_bias": per_head()}
    made = {name: x for name, x in made.items() if name not in ("D", "z", "dt_bias") or name in given}
    if pool:
        made["state_batch_indices"] = torch.randperm(pool, generator=generator)[:b].int()
        made["state_batch_indices"][1] = -1
    return {name: x.to(device) for name, x in made.items()}


def expanded(tied: bool, state: torch.Tensor, tensors: Tensors) -> Tensors:
    if not tied:
        return tensors
    P, N = state.shape[-2:]
    sizes = {"dt": (P,), "A": (P, N), "D": (P,), "dt_bias": (P,)}
    return {name: x[(...,) + (None,) * len(sizes[name])].expand(*x.shape, *sizes[name]) if name in sizes
            else x for name, x in tensors.items()}


def call_step(tied: bool, extra: dict[str, Any], state: torch.Tensor, **tensors: torch.Tensor) -> Tensors:
    """Two calls, without gradients (the kernel's), and with them; the state is a view that the first must
    write through."""
    function: Callable[..., Any] = flashlin.selective_state_update
    behind, after = state.mT.contiguous(), state.clone()
    given = expanded(tied, state, tensors)
    with torch.no_grad():
        without = function(behind.mT, **given, **extra)
    with_ = function(after, **given, **extra)
    return {"y": with_, "y_of_the_kernel": without, "state": behind.mT, "state_too": after}


def step_reference(tied: bool, extra: dict[str, Any], state: torch.Tensor,
                   state_batch_indices: torch.Tensor | None = None, **tensors: torch.Tensor) -> Tensors:
    given = expanded(tied, state, tensors)
    rows = torch.arange(given["x"].shape[0]) if state_batch_indices is None else state_batch_indices.long()
    known, heads = rows >= 0, state.ndim == 4
    if not heads:
        given = {name: x.unsqueeze(0 if name in ("A", "D", "dt_bias") else 1) for name, x in given.items()}
    pool = state if heads else state.unsqueeze(1)
    y, found = step(pool[rows.clamp(min=0)], **given, softplus=extra["dt_softplus"])
    after = pool.detach().clone()
    after[rows[known]] = found.detach()[known]
    y, after = torch.where(known[:, None, None], y, 0), after if heads else after.squeeze(1)
    y = y if heads else y.squeeze(1)
    return {"y": y, "y_of_the_kernel": y.detach(), "state": after, "state_too": after}


def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int, eps: float,
           centred: bool) -> torch.Tensor:
    rows: torch.Tensor = x.reshape(*x.shape[:-1], -1, size)
    rows = rows - rows.mean(-1, keepdim=True) if centred else rows
    y = (rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight
    return y if bias is None else y + bias


def make_norm(device: torch.device, dtype: torch.dtype, generator: Generator, *, D: int = 96,
              given: tuple[str, ...] = ("z",), others: str = "same") -> Tensors:
    own = getattr(torch, others) if others != "same" else dtype
    made = {"x": random(generator, 3, 37, D).to(dtype), "weight": random(generator, D).to(own),
            "bias": random(generator, D).to(own), "z": random(generator, 3, 37, D).to(dtype)}
    return {name: x.to(device) for name, x in made.items() if name in ("x", "weight") or name in given}


def call_norm(op: str, extra: dict[str, Any], **tensors: torch.Tensor) -> Tensors:
    return {"y": getattr(flashlin, op)(**{"bias": None, **tensors}, **extra)}


def norm_reference(op: str, extra: dict[str, Any], x: torch.Tensor, weight: torch.Tensor,
                   bias: torch.Tensor | None = None, z: torch.Tensor | None = None) -> Tensors:
    before = extra.get("norm_before_gate", True)
    x = x if z is None or before else x * silu(z)
    y = normed(x, weight, bias, extra.get("group_size") or x.shape[-1], extra.get("eps", 1e-6),
               op == "layernorm_fn" and not extra.get("is_rms_norm"))
    return {"y": y * silu(z) if z is not None and before else y}


def _scan(id: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    extra = extra or {}
    return Case("mamba_chunk_scan_combined", id, partial(make_scan, **facts), partial(call_scan, extra),
                partial(scan_reference, extra), SCAN, (), quick)


def _selective(id: str, extra: dict[str, Any] | None = None, quick: bool = False, last: bool = True,
               **facts: Any) -> Case:
    extra = extra or {}
    return Case("selective_scan_fn", id, partial(make_selective, **facts),
                partial(call_selective, extra, last), partial(selective_reference, extra), SCAN, (), quick)


def _layer(id: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    extra = {"ngroups": facts.get("G", 2), "headdim": facts.get("V", 16), "rmsnorm_eps": 1e-5,
             **(extra or {})}
    return Case("mamba_split_conv1d_scan_combined", id, partial(make_layer, **facts),
                partial(call_layer, extra), partial(layer_reference, extra), LAYER, (), quick)


def _fn(id: str, extra: dict[str, Any] | None = None, quick: bool = False, last: bool = True,
        **facts: Any) -> Case:
    extra = {"activation": "silu", **(extra or {})}
    return Case("causal_conv1d_fn", id, partial(make_fn, **facts), partial(call_fn, extra, last),
                partial(fn_reference, extra), SCAN, (), quick)


def _window(id: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    extra = {"activation": "silu", **(extra or {})}
    return Case("mamba_causal_conv1d_update", id, partial(make_window, **facts), partial(call_window, extra),
                partial(window_reference, extra), SCAN, ("conv_state",), quick)


def _step(id: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    tied, extra = facts.get("tied", True), {"dt_softplus": True, **(extra or {})}
    return Case("selective_state_update", id, partial(make_step, **facts), partial(call_step, tied, extra),
                partial(step_reference, tied, extra), SCAN, ("state",), quick)


def _norm(op: str, id: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    extra = extra or {}
    return Case(op, id, partial(make_norm, **facts), partial(call_norm, op, extra),
                partial(norm_reference, op, extra), SCAN, (), quick)


# Heads enough in a normalised slice: a sequence's first tokens are little more than D x, and of two heads
# with a small D their norm would divide by next to nothing, which enlarges the rounding of B and C to 16 bits
# (of 12 seeds dconv1d_weight is off by up to 0.019, with P = 64 by up to 0.034; with eight heads by 0.005).
GATE_FIRST, LINEAR = {"norm_before_gate": False}, {"activation": None}
CASES: list[Case] = [
    _scan("random", quick=True), _scan("bare", given=(), T=70),
    _scan("wide-D", {"dt_limit": (0.05, 0.2)}, wide_D=True, T=70), _scan("one-group", G=1, H=6, T=70),
    _scan("no-groups", G=4, T=70), _scan("no-gate", given=("D", "initial_states"), T=70),
    _scan("no-softplus", {"dt_softplus": False}, step="large", T=70), _scan("large-steps", step="large"),
    _scan("tiny-steps", step="tiny", T=70), _scan("forgetting", step="forgetting", seq=(5, 1, 40, 24), T=70),
    _scan("sequences", seq=(5, 1, 60, 70, 14)),
    _scan("token-each", seq=(1,) * 66, b=1, T=66, given=("initial_states",)), _scan("one-token", T=1),
    _scan("packed", edges=(0, 1, 1, 66, 130, 150)), _scan("packed-no-state", edges=(0, 40, 40), given=("z",)),
    _scan("packed-and-numbered", edges=(0, 30, 70), seq=(10, 20, 40)),
    _scan("same-dtype", others="same", T=70), _scan("odd", V=36, K=100, T=70),
    _scan("real", b=1, T=70, H=16, V=64, G=1, K=128),
    _scan("real-eight-groups", b=1, T=9, H=80, V=64, G=8, K=128), _selective("random", quick=True),
    _selective("tokens-together", last=False), _selective("bare", given=(), T=33),
    _selective("one-token", T=1), _selective("groups", G=2, D=70), _selective("a-group-each", G=3, D=3, T=40),
    _selective("no-gate", given=("D",), T=64),
    _selective("no-softplus", {"delta_softplus": False}, step="positive", given=("D", "z")),
    _selective("large-steps", step="large"), _selective("tiny-steps", step="tiny"),
    _selective("forgetting", step="forgetting", T=40), _selective("same-dtype", others="same"),
    _selective("one-state", N=1, T=40), _selective("odd-states", N=23, T=40),
    _selective("many-states", N=130, D=5, T=40), _selective("one-channel", D=1, N=3),
    _selective("real", b=1, D=256, T=200), _layer("random", quick=True, wide_D=True),
    _layer("gate-first", GATE_FIRST, seq=(30, 2, 58), H=16), _layer("bare", LINEAR, given=(), T=40),
    _layer("everything", given=("conv1d_bias", "initial_states", "rmsnorm_weight", "outproj_weight",
                                "outproj_bias"), M=12, T=40, G=1),
    _fn("random", quick=True), _fn("channels-first", last=False), _fn("bare", LINEAR, given=()),
    _fn("sequences", seq=(1, 2, 40, 27), given=("bias",)),
    _fn("sequences-state", seq=(2, 40, 28)), _fn("sequences-channels-first", last=False, seq=(3, 40, 27)),
    _fn("padding", seq=(20, 3, 47), padding=True),
    _fn("one-token", T=1), _fn("short", T=2), _fn("W=2", W=2), _fn("W=1", W=1, given=("bias",)),
    _fn("fp32-others", others="float32"), _window("random", quick=True), _window("W-1", L=3),
    _window("long-state", L=7, D=130), _window("bare", LINEAR, bias=False), _window("ring", L=3, ring=True),
    _window("ring-long", L=9, ring=True), _window("pool", pool=9, L=3),
    _window("pool-ring", pool=9, L=5, ring=True), _window("tokens", T=3), _window("many-tokens", T=9, L=3),
    _window("tokens-ring", T=3, L=5, ring=True), _window("many-tokens-ring", T=9, L=4, ring=True),
    _window("fp32-state", others="float32"), _window("W=2", W=2, L=1), _window("W=1", W=1, L=1),
    _step("random", quick=True), _step("general", tied=False), _step("no-heads", tied=False, H=0),
    _step("bare", {"dt_softplus": False}, given=()), _step("pool", pool=7),
    _step("pool-general", pool=7, tied=False, H=0), _step("same-dtype", states="same"),
    _step("no-bias", given=("D",)), _step("mamba1", tied=False, H=0, P=130, N=16),
    _step("real", b=2, H=80, P=64, G=8, N=128), _step("real-one-group", b=2, H=8, P=64, G=1, N=128),
    _norm("rmsnorm_fn", "random", quick=True), _norm("rmsnorm_fn", "gate-first", GATE_FIRST),
    _norm("rmsnorm_fn", "no-gate", given=()),
    _norm("rmsnorm_fn", "groups", {"group_size": 24, "eps": 1e-5}, others="float32"),
    _norm("rmsnorm_fn", "groups-gate-first", {"group_size": 24, **GATE_FIRST}),
    _norm("layernorm_fn", "random", quick=True, given=("z", "bias")),
    _norm("layernorm_fn", "groups-gate-first", {"group_size": 32, **GATE_FIRST}, given=("z", "bias")),
    _norm("layernorm_fn", "rms", {"is_rms_norm": True})]
