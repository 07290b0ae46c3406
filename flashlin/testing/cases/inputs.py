"""Declarations of an op's tensors: the shape, the values and the dtype of each.

A `Maker` makes the tensors of a case from a table of `Input` and from the case's settings. The settings,
called `facts` in code, are sizes and options that a case can choose.
"""
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
    """Make some tokens of the log decays g [B, T, ...] forget everything, in place, and return g.

    The log decays of these tokens are the values of STRENGTHS in turn. The tokens include neighbours, both
    sides of a chunk boundary and the last token. Every other head or channel also forgets everything at its
    first token, so that its initial state has no effect.
    """
    T, strengths = g.shape[1], cycle(STRENGTHS)
    for t in (3, 4, 29, 31, 32, 63, 64, 77, T - 1):
        if t < T:
            g[:, t] = next(strengths)
    g[:, 0, ..., 1::2] = -math.inf
    return g


def every_other(value: float, dim: int = 1) -> Callable[[Tensor], Tensor]:
    """Return a function that gives every other entry of a dimension this value, beginning with the first."""
    return lambda x: x.index_fill(dim, torch.arange(0, x.shape[dim], 2), value)


# Functions that turn random log decays into the decays of a case, by the value of its setting ``gate``.
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {"random": lambda g: g, "resets": with_resets,
                                                "every-other": every_other(-math.inf),
                                                "strongest": lambda g: torch.full_like(g, -5.0),
                                                "channels": lambda g: every_other(-5.0, -1)(g + 5)}


def raw_gates(kind: str, g: Tensor) -> Tensor:
    """Return raw gates g [B, T, ...], changed so that the tokens of ``kind`` forget everything.

    A raw gate becomes the log decay -softplus(g) inside the op. The gates stay finite, because their exact
    gradients would otherwise be NaN.
    """
    return -DECAYS[kind](-g).clamp(min=-1e9)


class Draw:
    """A source of random float32 numbers on the CPU. Shapes are given as names of a case's settings.

    ``Draw(generator, {"B": 2, "T": 9})("B T")`` returns normal numbers [2, 9].

    A size may be a product of settings, such as ``H*K``, or a setting that names another one. A size of None
    is left out of the shape, and a tuple adds several sizes.

    generator: torch's generator.
    facts: the settings.
    kept: tensors that a ``Values`` function stores by name, so that another one can use them.
    """

    def __init__(self, generator: torch.Generator, facts: Mapping[str, Any]) -> None:
        self.generator, self.facts, self.kept = generator, facts, Tensors()

    def __getitem__(self, fact: str) -> Any:
        return self.facts[fact]

    def shape(self, dimensions: str) -> list[int]:
        """Return the sizes for a text such as ``"B T H*K"``."""
        sizes = map(self.size, dimensions.split())
        return [n for one in sizes if one is not None for n in (one if isinstance(one, tuple) else [one])]

    def size(self, dimension: str) -> Any:
        """Return the size of one dimension: an int, a tuple of several, or None for no dimension."""
        factors = [self.facts[name] for name in dimension.split("*")]
        sizes = [self.size(one) if isinstance(one, str) else one for one in factors]
        return math.prod(sizes) if len(sizes) > 1 else sizes[0]

    def __call__(self, dimensions: str) -> Tensor:
        """Return normal numbers of the shape that the text describes."""
        return torch.randn(self.shape(dimensions), generator=self.generator)

    def uniform(self, dimensions: str) -> Tensor:
        """Return uniform numbers from 0 to 1."""
        return torch.rand(self.shape(dimensions), generator=self.generator)

    def integers(self, high: int, dimensions: str) -> Tensor:
        """Return random integers from 0 to high - 1."""
        return torch.randint(0, high, self.shape(dimensions), generator=self.generator)

    def decay(self, kind: str, dimensions: str, shift: float = 2.0) -> Tensor:
        """Return log decays of a kind.

        kind: one of

        - a key of DECAYS: logsigmoid of normal numbers + shift, then changed by its function.
        - ``layer``: uniform in -0.607 .. 0, as in RWKV-7.
        - ``strong``: uniform in -20 .. 0, with the first channel all -20 and the second all 0.
        - a number as text: all log decays are this number.
        """
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
        """Return rates of a kind.

        kind: ``random`` for rates in 0 .. 1, or a number as text for constant rates.
        raw: return random rates before their sigmoid.
        """
        if kind != "random":
            return torch.full(self.shape(dimensions), float(kind))
        logits = self(dimensions)
        return logits if raw else logits.sigmoid()


Values = Callable[[Draw, str], Tensor]


def unit(draw: Draw, shape: str) -> Tensor:
    """Return random vectors of length 1."""
    return F.normalize(draw(shape), dim=-1)


def keys(draw: Draw, shape: str) -> Tensor:
    """Return keys of the kind in the case's setting ``keys``, one of KEYS."""
    return KEYS[draw["keys"]](draw(shape))


def decays(shift: float = 2.0, size: float = 1.0) -> Values:
    """Return a function that makes log decays of the kind in the case's setting ``gate``.

    With the setting ``raw`` it makes gates, which become decays inside the op.

    shift: see Draw.decay.
    size: standard deviation of the raw gates.
    """
    def values(draw: Draw, shape: str) -> Tensor:
        if draw.facts.get("raw"):
            return raw_gates(draw["gate"], size * draw(shape))
        return draw.decay(draw["gate"], shape, shift)
    return values


def rates(draw: Draw, shape: str) -> Tensor:
    """Return rates of the kind in the case's setting ``rate``.

    With the setting ``raw``, return them before their sigmoid.
    """
    return draw.rates(draw["rate"], shape, draw.facts.get("raw", False))


def times(factor: float, plus: float = 0.0) -> Values:
    """Return a function that makes normal numbers times ``factor``, plus ``plus``."""
    return lambda draw, shape: draw(shape) * factor + plus


class Input(NamedTuple):
    """The declaration of one tensor of an op.

    shape: names of sizes, separated by spaces, see Draw.
    of: function that makes the values in float32.
    dtype: ``same`` for the dtype of the case, the name of a dtype, or a setting that names one.
    when: the tensor is made only if this setting is true. With ``given``, it is always drawn, but dropped
        unless the setting ``given`` lists its name. So tensors drawn later keep their values.
    """
    shape: str
    of: Values = Draw.__call__
    dtype: str = "same"
    when: str = ""

    def made(self, name: str, facts: Mapping[str, Any]) -> bool:
        """Return True if a case with these settings has the tensor, which is called ``name``."""
        given = facts["given"] is None or name in facts["given"]
        return bool(given if self.when == "given" else not self.when or facts[self.when]
                    ) and name not in facts["without"]


FLOAT32 = "float32"
GIVEN: Mapping[str, Any] = MappingProxyType(
    {"given": None, "without": (), "edges": (), "state_v_first": False})


@dataclass(frozen=True)
class Maker:
    """A description of a case's tensors, which makes them in the order of their declaration.

    inputs: the declared tensors by name.
    facts: the settings that a case can choose (sizes and options), with their defaults.
    derived: returns settings that follow from others.
    finish: changes the finished tensors.

    A case can also choose these settings for every maker:

    edges: bounds of packed sequences.
    state_v_first: states have the layout V K.
    given: names of the optional tensors to pass; None for all.
    without: names of tensors to leave out.
    """
    inputs: Mapping[str, Input]
    facts: Mapping[str, Any]
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda facts: {}
    finish: Callable[[Tensors, Draw], Tensors] = lambda made, draw: made

    def __call__(self, dtype: torch.dtype, generator: torch.Generator, **chosen: Any) -> Tensors:
        """Return the tensors of a case by name, with ``cu_seqlens`` if it has ``edges``.

        dtype: dtype of the case.
        chosen: settings that differ from the defaults.

        Raises TypeError for an unknown setting.
        """
        facts = {**GIVEN, **self.facts, **chosen}
        if unknown := chosen.keys() - {*GIVEN, *self.facts}:
            raise TypeError(f"facts: got {', '.join(sorted(unknown))}, need {', '.join(self.facts)}")
        edges = facts["edges"]
        facts |= {"B": 1, "T": edges[-1]} if edges else {}  # packed sequences have a batch of 1
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
        """Return the dtype of a declared tensor in a case of ``dtype``."""
        name = draw.facts.get(one.dtype, one.dtype)
        found: torch.dtype = dtype if name == "same" else getattr(torch, name)
        return found

    def having(self, **facts: Any) -> Maker:
        """Return a maker with other defaults of these settings."""
        return self.but(facts={**self.facts, **facts})

    def but(self, **fields: Any) -> Maker:
        """Return a maker with other fields."""
        return replace(self, **fields)


def renamed(inputs: Mapping[str, Input], **names: str) -> dict[str, Input]:
    """Return the inputs under other names: ``r="q"`` renames q to r."""
    ours = {theirs: name for name, theirs in names.items()}
    return {ours.get(name, name): one for name, one in inputs.items()}


def _unit(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.normalize(change(x), dim=-1)


# Functions that turn normal numbers into keys [B, T, H, K]. All keys have length 1, except "raw" and zero
# keys.
KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": _unit(lambda x: x),
    "one-key": _unit(lambda x: x[:, :1].expand_as(x)),
    "alike": _unit(lambda x: F.silu(x + 2)),
    "period-4": _unit(lambda x: x[:, torch.arange(x.shape[1]) % 4]),
    "raw": lambda x: x,
    "zero": torch.zeros_like,
    "every-other-zero": _unit(every_other(0))}
