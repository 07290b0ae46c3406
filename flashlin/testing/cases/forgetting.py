"""Gates with tokens that forget everything, as those between documents do, for the cases of every op that has
decays."""
from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle

import torch

STRENGTHS = (-math.inf, -1e9, -1e6, -1e4)


def with_resets(g: torch.Tensor) -> torch.Tensor:
    """g [B, T, ...] with log decays of all STRENGTHS at some tokens: one right after another, on both sides
    of a chunk's edge, the last one, and of every other head or channel the first one, too, so that nothing is
    left of its initial state."""
    T, strengths = g.shape[1], cycle(STRENGTHS)
    for t in (3, 4, 29, 31, 32, 63, 64, 77, T - 1):
        if t < T:
            g[:, t] = next(strengths)
    g[:, 0, ..., 1::2] = -math.inf
    return g


def every_other(g: torch.Tensor) -> torch.Tensor:
    """g [B, T, ...] with as many tokens that forget everything as leave any decay between two of them."""
    g[:, ::2] = -math.inf
    return g


# What makes the gate of a case out of random log decays, by the name that its maker takes.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"random": lambda g: g, "resets": with_resets,
                                                            "every-other": every_other}


def raw(kind: str, g: torch.Tensor) -> torch.Tensor:
    """g [B, T, ...], raw gates whose softplus is taken off, so changed that the same tokens forget
    everything; finite, or gradients are NaN on paper, too."""
    return -KINDS[kind](-g).clamp(min=-1e9)
