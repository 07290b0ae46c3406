"""References in float64 of Mamba, Mamba2, Mamba-3 and the causal convolution, token by token.

They are written from the formulas. All other implementations are compared with them, including
``kernels/selective``.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashlin.kernels.oracle import before, token_by_token


def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x)."""
    return x / (1 + (-x).exp())


def step_size(dt: Tensor, bias: Tensor | None, softplus: bool,
              limit: tuple[float, float] = (-math.inf, math.inf)) -> Tensor:
    """Return the time step: dt plus bias, then softplus if asked for, then clamped to ``limit``."""
    dt = dt if bias is None else dt + bias
    dt = torch.logaddexp(dt, torch.zeros_like(dt)) if softplus else dt
    return dt.clamp(*limit)


def step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
         z: Tensor | None = None, dt_bias: Tensor | None = None,
         softplus: bool = False) -> tuple[Tensor, Tensor]:
    """Compute one token of the state space model; return y [..., H, P] and the state [..., H, P, N].

        h = e^{dt A} h + dt x B^T
        y = (h C + D x) silu(z)

    x, dt, z: [..., H, P]. A: [H, P, N]. B, C: [..., G, N]. D, dt_bias: [H, P]. In dt, A and D, the dimensions
    P and N may be 1 and then broadcast.
    """
    dt = step_size(dt, dt_bias, softplus)
    B, C = (m.repeat_interleave(x.shape[-2] // m.shape[-2], -2).unsqueeze(-2) for m in (B, C))
    state = (dt[..., None] * A).exp() * state + (dt * x)[..., None] * B
    y = (state * C).sum(-1)
    y = y if D is None else y + D * x
    return y if z is None else y * silu(z), state


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
         z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
         seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
         dt_limit: tuple[float, float] = (0.0, math.inf),
         return_varlen_states: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run Mamba2's scan, one step for each token; return (y, final states, states of packed sequences).

    y is [b, T, H, P]. The final states, after each batch row, are [b, H, P, N]. The states after each packed
    sequence are [n, H, P, N], or None without return_varlen_states.

    x, z: [b, T, H, P]. dt: [b, T, H]. A, dt_bias: [H]. B, C: [b, T, G, N]. D: [H] or [H, P]. initial_states:
    [b, H, P, N]. seq_idx: [b, T]; the state is reset to zero before a token whose value differs from the
    previous token's. It is also zero before each packed sequence except the first.
    """
    b, T, H, P = x.shape
    dt = step_size(dt, dt_bias, dt_softplus, dt_limit)[..., None]
    begins = torch.zeros(b, T, dtype=torch.bool, device=x.device)
    if seq_idx is not None:
        begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    D = None if D is None else D.view(H, -1)

    def numbered(state: Tensor, begins: Tensor, **token: Any) -> tuple[Tensor, Tensor]:
        y, state = step(torch.where(begins, 0, state), A=A[:, None, None], D=D, **token)
        return state, y
    states = before(None, x, cu_seqlens, H, P, B.shape[3])
    states = states if initial_states is None else torch.cat([initial_states, states[b:]])
    y, ends = token_by_token(numbered, dict(x=x, dt=dt, B=B, C=C, begins=begins), states, cu_seqlens)
    y = y if z is None else y * silu(z)
    if cu_seqlens is None:
        return y, ends, None
    last = max(cu_seqlens.diff().nonzero().flatten().tolist(), default=0)  # the last nonempty sequence
    return y, ends[last:last + 1], ends if return_varlen_states else None


def selective(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
              z: Tensor | None = None, delta_bias: Tensor | None = None,
              delta_softplus: bool = False) -> tuple[Tensor, Tensor]:
    """Run Mamba's selective scan, one step per token; return y [b, D, T] and the final state [b, D, N].

    Each channel is computed as a head of size 1.

    u, delta, z: [b, D, T]. A: [D, N]. B, C: [b, N, T], [b, G, N, T] or [D, N]. D, delta_bias: [D].
    """
    b, channels, T = u.shape
    dt = step_size(delta, None if delta_bias is None else delta_bias[:, None], delta_softplus)

    def grouped(m: Tensor) -> Tensor:
        """Return B or C as [b, G, N, T]; if it is [D, N], each channel is a group."""
        return m[None, :, :, None].expand(b, -1, -1, T) if m.ndim == 2 else m if m.ndim == 4 else m[:, None]
    def of_channels(state: Tensor, **token: Any) -> tuple[Tensor, Tensor]:
        y, state = step(state, A=A[:, None], D=None if D is None else D[:, None], **token)
        return state, y
    tokens = {"x": u.mT[..., None], "dt": dt.mT[..., None], "B": grouped(B).permute(0, 3, 1, 2),
              "C": grouped(C).permute(0, 3, 1, 2)}
    y, state = token_by_token(of_channels, tokens, u.new_zeros(b, channels, 1, A.shape[1]))
    y = y[..., 0].mT
    return y if z is None else y * silu(z), state[:, :, 0]


def window(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None,
           cache_seqlens: Tensor | None = None, activation: str | None = "silu") -> tuple[Tensor, Tensor]:
    """Convolve T new tokens x [b, D, T]; return y [b, D, T] and the new state [b, D, L].

    The state of a sequence is its last L tokens, with the newest one last. With cache_seqlens [b] it is a
    ring buffer, and token t of the whole sequence is at position t mod L.
    """
    T, (L, W) = x.shape[2], (state.shape[2], weight.shape[1])
    y, after = torch.zeros_like(x), state.clone()
    for i, turns in enumerate([0] * len(x) if cache_seqlens is None else cache_seqlens.tolist()):
        tokens = torch.cat([state[i].roll(-turns, 1), x[i]], 1)  # oldest first
        windows = tokens.unfold(1, W, 1)[:, L - W + 1:]  # [D, T, W]
        y[i] = (windows * weight[:, None]).sum(-1) + (0 if bias is None else bias[:, None])
        after[i] = tokens[:, T:].roll(0 if cache_seqlens is None else turns + T, 1)
    return silu(y) if activation else y, after


def trapezoid(Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, Q_bias: Tensor,
              K_bias: Tensor, Angles: Tensor, D: Tensor | None = None, Z: Tensor | None = None,
              states: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
              bounds: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run Mamba-3, one step for each token; return y and the final (angles, states, k, v).

        theta <- theta + pi tanh(Angles) DT
        k = (K + K_bias) e^{i theta}
        q = (Q + Q_bias) e^{i theta}
        r = 1 / (1 + e^{-Trap})
        S <- e^{ADT} (S + (1 - r) DT v_before k_before^T) + r DT v k^T
        y = (S q + D v) silu(Z)

    Pairs of channels (2 i, 2 i + 1) are complex numbers. ops/mamba3.py describes the shapes.
    """
    H, P, N, R = *V.shape[2:], Q.shape[3], Angles.shape[3]
    Q, K = (x.repeat_interleave(H // max(x.shape[2], 1), 2) for x in (Q, K))

    def step(carried: tuple[Tensor, ...], q: Tensor, key: Tensor, value: Tensor, adt: Tensor, dt: Tensor,
             trap: Tensor, angles: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        theta, S, k, v = carried
        dt, share = dt[:, None], 1 / (1 + (-trap[:, None]).exp())
        theta = theta + math.pi * angles.tanh() * dt
        S = S + ((1 - share) * dt * v)[:, :, None] * k[:, None, :]
        k = turned(key + K_bias, theta)
        S = adt.exp()[:, None, None] * S + (share * dt * value)[:, :, None] * k[:, None, :]
        out = (S * turned(q + Q_bias, theta)[:, None, :]).sum(-1)
        return (theta, S, k, value), out if D is None else out + D[:, None] * value
    tokens = {"q": Q, "key": K, "value": V, "adt": ADT.mT, "dt": DT.mT, "trap": Trap.mT, "angles": Angles}
    first = states or tuple(before(None, V, bounds, H, *sizes) for sizes in ((R,), (P, N), (N,), (P,)))
    y, (theta, S, k, v) = token_by_token(step, tokens, first, bounds)
    return y if Z is None else y * silu(Z), theta.remainder(2 * math.pi), S, k, v


def turned(x: Tensor, theta: Tensor) -> Tensor:
    """Rotate the first R pairs of channels of x [H, N] by the angles theta [H, R].

    Channels (2 i, 2 i + 1) are a pair. Channels after the first 2 R do not change.
    """
    R = theta.shape[1]
    pairs = torch.complex(x[:, :2 * R:2], x[:, 1:2 * R:2]) * torch.polar(torch.ones_like(theta), theta)
    return torch.cat([torch.view_as_real(pairs).reshape(len(x), 2 * R), x[:, 2 * R:]], 1)
