"""Declared tensors: the shape, the values and the dtype of each tensor of an op, from which cases make it."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.testing.compare import Tensors

STRENGTHS = (-math.inf, -1e9, -1e6, -1e4)


def with_resets(g: Tensor) -> Tensor:
    """Return g [B, T, ...] with log decays of all STRENGTHS at some tokens.

    These are neighbours, both sides of a chunk's edge and the last token. Every other head or channel also
    forgets at its first token, so that nothing is left of its initial state."""
    T, strengths = g.shape[1], cycle(STRENGTHS)
    for t in (3, 4, 29, 31, 32, 63, 64, 77, T - 1):
        if t < T:
            g[:, t] = next(strengths)
    g[:, 0, ..., 1::2] = -math.inf
    return g


def every_other(g: Tensor) -> Tensor:
    """Return g [B, T, ...] with as many tokens that forget everything as leave any decay between two of them."""
    g[:, ::2] = -math.inf
    return g


# What makes the gate of a case out of random log decays, by the name that its maker takes.
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {"random": lambda g: g, "resets": with_resets,
                                                "every-other": every_other}


def raw_gates(kind: str, g: Tensor) -> Tensor:
    """Return raw gates g [B, T, ...], whose softplus is taken off, changed so that the same tokens forget
    everything. They stay finite, or gradients would be NaN on paper."""
    return -DECAYS[kind](-g).clamp(min=-1e9)


class Draw:
    """Random numbers in float32 on the CPU. Shapes are the names of facts: ``Draw(generator, {"B": 2, "T":
    9})("B T")`` returns normal numbers [2, 9].

    A size may be a product of facts, such as ``H*K``, or a fact that names another one. A size that is None
    is no dimension, and a tuple is several. kept: values that tensors share.
    """

    def __init__(self, generator: torch.Generator, facts: Mapping[str, Any]) -> None:
        self.generator, self.facts, self.kept = generator, facts, Tensors()

    def __getitem__(self, fact: str) -> Any:
        return self.facts[fact]

    def shape(self, dimensions: str) -> list[int]:
        sizes = [self.size(name) for name in dimensions.split()]
        several = [size if isinstance(size, tuple) else (size,) for size in sizes if size is not None]
        return [n for size in several for n in size]

    def size(self, dimension: str) -> Any:
        factors = [self.facts[name] for name in dimension.split("*")]
        sizes = [self.size(one) if isinstance(one, str) else one for one in factors]
        return math.prod(sizes) if len(sizes) > 1 else sizes[0]

    def __call__(self, dimensions: str) -> Tensor:
        return torch.randn(self.shape(dimensions), generator=self.generator)

    def uniform(self, dimensions: str) -> Tensor:
        """From 0 to 1."""
        return torch.rand(self.shape(dimensions), generator=self.generator)

    def integers(self, high: int, dimensions: str) -> Tensor:
        """From 0 to high - 1."""
        return torch.randint(0, high, self.shape(dimensions), generator=self.generator)

    def decay(self, kind: str, dimensions: str, shift: float = 2.0) -> Tensor:
        """Log decays: of one of DECAYS (logsigmoid of normal numbers + shift); ``layer`` (uniform
        in -0.607 .. 0, as in RWKV-7); ``strong`` (uniform in -20 .. 0, the first channel all -20, the second
        all 0); or all the number that ``kind`` spells."""
        if kind in DECAYS:
            return DECAYS[kind](F.logsigmoid(self(dimensions) + shift))
        if kind == "layer":
            return -0.6065306597 * self.uniform(dimensions)
        if kind == "strong":
            g = -20 * self.uniform(dimensions)
            g[..., 0], g[..., 1] = -20, 0
            return g
        return torch.full(self.shape(dimensions), float(kind))

    def rates(self, kind: str, dimensions: str, raw: bool = False) -> Tensor:
        """``random`` in 0 .. 1, or with ``raw`` what becomes that in a sigmoid; or all the number that
        ``kind`` spells."""
        if kind != "random":
            return torch.full(self.shape(dimensions), float(kind))
        logits = self(dimensions)
        return logits if raw else logits.sigmoid()


Values = Callable[[Draw, str], Tensor]


def unit(draw: Draw, shape: str) -> Tensor:
    return F.normalize(draw(shape), dim=-1)


def keys(draw: Draw, shape: str) -> Tensor:
    """Return keys of the kind that the fact ``keys`` names, one of KEYS."""
    return KEYS[draw["keys"]](draw(shape))


def decays(shift: float = 2.0, size: float = 1.0) -> Values:
    """Log decays of the kind that the fact ``gate`` names. With the fact ``raw`` they are gates of this size,
    which become decays inside the op."""
    def values(draw: Draw, shape: str) -> Tensor:
        if draw.facts.get("raw"):
            return raw_gates(draw["gate"], size * draw(shape))
        return draw.decay(draw["gate"], shape, shift)
    return values


def rates(draw: Draw, shape: str) -> Tensor:
    """Return rates of the kind that the fact ``rate`` names; with the fact ``raw``, before their sigmoid."""
    return draw.rates(draw["rate"], shape, draw.facts.get("raw", False))


def times(factor: float, plus: float = 0.0) -> Values:
    return lambda draw, shape: draw(shape) * factor + plus


class Input(NamedTuple):
    """A tensor of an op. shape: the name of a size for each dimension. dtype: ``same`` for that of the case,
    another, or a fact that names it. when: the fact without which the tensor is not made. With
    ``given`` a tensor that is not in this list of names is drawn and dropped, so that others keep their
    values.
    """
    shape: str
    of: Values = Draw.__call__
    dtype: str = "same"
    when: str = ""

    def made(self, name: str, facts: Mapping[str, Any]) -> bool:
        """Return whether a case of these facts has the tensor, which is called ``name``."""
        given = facts["given"] is None or name in facts["given"]
        return bool(given if self.when == "given" else not self.when or facts[self.when]
                    ) and name not in facts["without"]


FLOAT32 = "float32"
GIVEN: Mapping[str, Any] = MappingProxyType(
    {"given": None, "without": (), "edges": (), "state_v_first": False})


@dataclass(frozen=True)
class Maker:
    """Makes the tensors of a case, in the order in which they are declared.

    facts: what a case may choose, with the usual values; sizes among them. derived: facts that follow from
    others. finish: changes the tensors made. Of every maker a case may choose ``edges`` of packed sequences,
    ``state_v_first``, names ``given`` of tensors that are so declared (all if None), or those to go
    ``without``.
    """
    inputs: Mapping[str, Input]
    facts: Mapping[str, Any]
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda facts: {}
    finish: Callable[[Tensors, Draw], Tensors] = lambda made, draw: made

    def __call__(self, dtype: torch.dtype, generator: torch.Generator, **chosen: Any) -> Tensors:
        facts = {**GIVEN, **self.facts, **chosen}
        if unknown := chosen.keys() - {*GIVEN, *self.facts}:
            raise TypeError(f"facts: got {', '.join(sorted(unknown))}, need {', '.join(self.facts)}")
        edges = facts["edges"]
        facts |= {"B": 1, "T": edges[-1]} if edges else {}  # packed sequences are one row
        facts = {"N": len(edges) - 1 if edges else facts.get("B"), **facts}
        draw, made = Draw(generator, {**facts, **self.derived(facts)}), Tensors()
        for name, one in self.inputs.items():
            if one.when in ("", "given") or draw[one.when]:
                turned = facts["state_v_first"] and "state" in name
                shape = one.shape.replace("K V", "V K") if turned else one.shape
                x = one.of(draw, shape).contiguous()
                if one.made(name, facts):
                    made[name] = x.to(self.dtype_of(one, draw, dtype)) if x.is_floating_point() else x
        bounds = {"cu_seqlens": torch.tensor(edges, dtype=facts.get("bounds", torch.int32))} if edges else {}
        return self.finish(made | bounds, draw)

    def dtype_of(self, one: Input, draw: Draw, dtype: torch.dtype) -> torch.dtype:
        name = draw.facts.get(one.dtype, one.dtype)
        found: torch.dtype = dtype if name == "same" else getattr(torch, name)
        return found

    def having(self, **facts: Any) -> Maker:
        """With other facts as the usual ones."""
        return self.but(facts={**self.facts, **facts})

    def but(self, **fields: Any) -> Maker:
        """With other fields."""
        return replace(self, **fields)


def renamed(inputs: Mapping[str, Input], **names: str) -> dict[str, Input]:
    """The inputs with other names: ``r="q"`` calls q r."""
    ours = {theirs: name for name, theirs in names.items()}
    return {ours.get(name, name): one for name, one in inputs.items()}


def _unit(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.normalize(change(x), dim=-1)


def _every_other_zero(x: Tensor) -> Tensor:
    x[:, ::2] = 0
    return x


# Keys [B, T, H, K] of normal numbers, of length 1 but for "raw" ones.
KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": _unit(lambda x: x),
    "one-key": _unit(lambda x: x[:, :1].expand_as(x)),
    "alike": _unit(lambda x: F.silu(x + 2)),
    "period-4": _unit(lambda x: x[:, torch.arange(x.shape[1]) % 4]),
    "raw": lambda x: x,
    "zero": torch.zeros_like,
    "every-other-zero": _unit(_every_other_zero)}
