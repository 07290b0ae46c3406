"""Engines in miniature, for the tests of flashlin.serving: calls of random shapes, and the delta rules in
float64, a token of a head at a time, which share nothing with the package."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashlin import serving

KINDS = ("plain", "gated", "gated by a gate", "kda", "kda by a gate", "kda by a bounded gate")


class Layer(NamedTuple):
    """A layer's sizes and options. kind: one of KINDS."""
    kind: str
    H: int = 2
    HV: int = 4
    K: int = 24
    V: int = 40
    dtype: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    neg: bool = False
    device: str = "cpu"

    @property
    def options(self) -> dict[str, Any]:
        gate = "gate" in self.kind
        return dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=gate,
                    allow_neg_eigval=gate and self.neg, use_gate_in_kernel=gate,
                    lower_bound=-5.0 if "bounded" in self.kind else None)

    def parameters(self) -> dict[str, Tensor]:
        if "gate" not in self.kind:
            return {}
        by_channel = "kda" in self.kind
        return {"A_log": torch.randn(self.HV, device=self.device) / 2,
                "dt_bias": torch.randn(self.HV * self.K if by_channel else self.HV, device=self.device)}

    def tokens(self, rows: int) -> dict[str, Tensor | None]:
        """q, k, v, g and beta of so many tokens, [rows, heads, ...]."""
        g = torch.randn(rows, self.HV, *[self.K] * ("kda" in self.kind), device=self.device)
        beta = torch.randn(rows, self.HV, device=self.device)
        gate = "gate" in self.kind
        return {"q": torch.randn(rows, self.H, self.K, device=self.device).to(self.dtype),
                "k": torch.randn(rows, self.H, self.K, device=self.device).to(self.dtype),
                "v": torch.randn(rows, self.HV, self.V, device=self.device).to(self.dtype),
                "g": None if self.kind == "plain" else g.to(self.dtype) if gate else -g.abs(),
                "beta": beta.to(self.dtype) if gate else beta.sigmoid()}

    def pool(self, slots: int) -> Tensor:
        return torch.randn(slots, self.HV, self.V, self.K, device=self.device).to(self.state)

    def decode(self, tokens: dict[str, Tensor | None], parameters: dict[str, Tensor], states: Tensor,
               indices: Tensor, **more: Any) -> Tensor:
        return serving.decode(**tokens, states=states, indices=indices, **parameters, **self.options, **more)

    def prefill(self, tokens: dict[str, Tensor | None], parameters: dict[str, Tensor], states: Tensor,
                indices: Tensor, lengths: list[int], has: list[bool], mode: str) -> Tensor:
        """tokens: [rows, ...], packed."""
        edges = torch.tensor([0, *lengths], device=self.device).cumsum(0).to(indices.dtype)
        packed = {name: None if x is None else x[None] for name, x in tokens.items()}
        return serving.prefill(**packed, states=states, indices=indices, cu_seqlens=edges,
                               has_initial_state=torch.tensor(has, dtype=torch.bool, device=self.device),
                               mode=mode, **parameters, **self.options)[0]


def at(tokens: dict[str, Tensor | None], rows: Any) -> dict[str, Tensor | None]:
    return {name: None if x is None else x[rows] for name, x in tokens.items()}


def sequential(layer: Layer, tokens: dict[str, Tensor | None], parameters: dict[str, Tensor],
               S: Tensor) -> tuple[Tensor, Tensor]:
    """(o [rows, HV, V], S [HV, V, K]) after one request's tokens [rows, ...] from S, in float64. The state is
    rounded to its dtype after each token."""
    q, k, v, g, beta = (None if tokens[name] is None else tokens[name].double().cpu()  # type: ignore[union-attr]
                        for name in ("q", "k", "v", "g", "beta"))
    assert q is not None and k is not None and v is not None and beta is not None
    weights = {name: x.double().cpu() for name, x in parameters.items()}
    gated = "gate" in layer.kind
    states = [x.double().cpu() for x in S]
    outputs = torch.zeros(len(v), layer.HV, layer.V, dtype=torch.float64)
    for t in range(len(v)):
        for h in range(layer.HV):
            of = h * layer.H // layer.HV
            r, key = (x[t, of] / (x[t, of].dot(x[t, of]) + 1e-6) ** 0.5 for x in (q, k))
            strength = beta[t, h]
            if gated:
                strength = (1 + layer.neg) / (1 + (-strength).exp())
            if g is not None:
                rate = g[t, h]
                if gated:
                    bias = weights["dt_bias"].view(layer.HV, -1)[h]
                    speed = weights["A_log"][h].exp()
                    raw = rate + (bias if rate.ndim else bias[0])
                    bounded = "bounded" in layer.kind
                    rate = -5 / (1 + (-speed * raw).exp()) if bounded else -speed * raw.exp().log1p()
                states[h] = states[h] * rate.exp()
            wrong = v[t, h] - states[h] @ key
            states[h] = states[h] + torch.outer(strength * wrong, key)
            outputs[t, h] = states[h] @ r * layer.K ** -0.5
            states[h] = states[h].to(layer.state).double()
    return outputs, torch.stack(states)


def apart(got: Tensor, wanted: Tensor) -> float:
    """The error's length in parts of the right answer's."""
    difference = got.double().cpu() - wanted
    assert bool(difference.isfinite().all())
    return float(difference.norm() / max(float(wanted.norm()), 1e-9))
