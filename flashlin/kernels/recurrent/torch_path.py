"""The generic recurrence in plain, differentiable torch: a loop over tokens, all sequences and heads at once.
Serves CPUs and cards that no Triton compiles for; right for short inputs, slow for long ones, which are what
chunked paths are for."""
from __future__ import annotations

import torch

from flashlin.kernels.recurrent.inputs import Inputs


def run(x: Inputs, flags: tuple[str, ...], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, HV, V], states [N, HV, K, V]) in float32, or float64 for float64 tensors. h0 is [N, HV, K,
    V]; g, beta, q and k are as the recurrence wants them (no gate, sigmoid or norm is left to do).

    With bounds their values are read on the host (for tensors on a GPU that is a synchronisation).
    """
    compute = torch.float64 if torch.float64 in (x.q.dtype, x.k.dtype, x.v.dtype) else torch.float32
    bounds = x.bounds
    x = Inputs(*(None if y is None else y.to(compute) for y in x._replace(bounds=None)))  # type: ignore[arg-type]
    group = x.v.shape[2] // max(x.q.shape[2], 1)
    q, k = (y if group == 1 else y.repeat_interleave(group, 2) for y in (x.q, x.k))
    beta = x.beta[..., None] if x.beta is not None and x.beta.ndim == 3 else x.beta
    h0 = x.v.new_zeros(x.sequences if bounds is None else bounds.shape[0] - 1, x.v.shape[2], q.shape[3],
                       x.v.shape[3]) if x.h0 is None else x.h0
    x = x._replace(q=q * scale, k=k, beta=beta, h0=h0)
    if bounds is not None:
        return _packed(x, flags, bounds.tolist())
    if "reverse" not in flags:
        return _rows(x, flags)
    o, states = _rows(_each(x, lambda y: y.flip(1)), flags)
    return o.flip(1), states


def _each(x: Inputs, change: object) -> Inputs:
    """x with ``change`` made to every tensor that has tokens."""
    names = ("q", "k", "v", "beta", "g", "gk", "gv", "a", "b")
    return x._replace(**{name: change(y) for name in names if (y := getattr(x, name)) is not None})  # type: ignore[operator]


def _rows(x: Inputs, flags: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.h0 is not None  # run has made one
    S, outputs = x.h0, []
    for t in range(x.q.shape[1]):
        q, k, v = x.q[:, t], x.k[:, t], x.v[:, t]
        if "before" in flags:
            o = _read(S, q) if x.bonus is None else _read(S, q) + (q * x.bonus * k).sum(-1, keepdim=True) * v
        added = None if x.a is None or x.b is None else x.b[:, t, :, :, None] * _read(S,
                                                                                      x.a[:, t])[:, :, None]
        for decay in (x.g if x.g is None else x.g[:, t, :, None, None],
                      x.gamma if x.gamma is None else x.gamma[:, None, None],
                      x.gk if x.gk is None else x.gk[:, t, :, :, None],
                      x.gv if x.gv is None else x.gv[:, t, :, None]):
            S = S if decay is None else S * decay.exp()
        S = S if added is None else S + added
        u = v - _read(S, k) if "delta" in flags else v
        u = u if x.beta is None else u * x.beta[:, t]
        S = S + k[..., None] * u[:, :, None]
        outputs.append(o if "before" in flags else _read(S, q))
    # nobody reads what the last token leaves: its gradient is zero, not None, also where it is the only one
    if outputs and "before" in flags:
        unread = [y[:, -1].flatten(2).sum(-1, keepdim=True)
                  for y in (x.beta, x.gk, x.a, x.b, x.gv) if y is not None]
        unread += [] if x.g is None else [x.g[:, -1, :, None]]
        outputs[-1] = outputs[-1] + torch.where(outputs[-1].new_ones(1, dtype=torch.bool), 0,
                                                sum(unread, k.new_zeros(1)))
    return torch.stack(outputs, 1) if outputs else x.v * (x.q * x.k).sum(-1,
                                                                         keepdim=True), S if outputs else S.clone()


def _read(S: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """S^T k: [B, HV, V] of [B, HV, K, V] and [B, HV, K]."""
    return (k[:, :, None] @ S)[:, :, 0]


def _packed(x: Inputs, flags: tuple[str, ...], edges: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of about the same length are padded to one batch: at most twice the work."""
    assert x.h0 is not None
    groups: dict[int, list[int]] = {}
    for n in range(len(edges) - 1):
        groups.setdefault((edges[n + 1] - edges[n] - 1).bit_length(), []).append(n)
    o, states = torch.zeros_like(x.v), torch.zeros_like(x.h0)
    for members in groups.values():
        first, last = (torch.tensor([edges[n + end] for n in members], device=o.device) for end in (0, 1))
        steps = torch.arange(max(edges[n + 1] - edges[n] for n in members), device=o.device)
        rows = last[:, None] - 1 - steps if "reverse" in flags else first[:, None] + steps
        inside = steps < (last - first)[:, None]
        rows, which = torch.where(inside, rows, 0), torch.tensor(members, device=o.device)

        def padded(y: torch.Tensor, rows: torch.Tensor = rows, inside: torch.Tensor = inside) -> torch.Tensor:
            # past a sequence's end all is zero: no key and no decay, so the state stands still
            return torch.where(inside.reshape(*inside.shape, *[1] * (y.ndim - 2)), y[0][rows], 0)
        o_, h_ = _rows(_each(x, padded)._replace(h0=x.h0[which]), flags)
        o = o.index_put((torch.zeros_like(rows[inside]), rows[inside]), o_[inside])
        states = states.index_put((which,), h_)
    return o, states
