"""What the inputs of cases are drawn with."""
from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.testing.cases import forgetting
from flashlin.testing.compare import Tensors


class Draw:
    """Random numbers in float32 on the CPU, of shapes in words: ``Draw(generator, B=2, T=9)("B T")`` is
    normal numbers [2, 9]. A size that is None is a dimension that is not there."""

    def __init__(self, generator: torch.Generator, **sizes: int | None) -> None:
        self.generator, self.sizes = generator, sizes

    def shape(self, dimensions: str) -> list[int]:
        sizes = [self.sizes[name] for name in dimensions.split()]
        return [size for size in sizes if size is not None]

    def __call__(self, dimensions: str) -> Tensor:
        return torch.randn(self.shape(dimensions), generator=self.generator)

    def uniform(self, dimensions: str) -> Tensor:
        """From 0 to 1."""
        return torch.rand(self.shape(dimensions), generator=self.generator)

    def decay(self, kind: str, dimensions: str, shift: float = 2.0) -> Tensor:
        """Log decays: of one of forgetting.KINDS (logsigmoid of normal numbers + shift); ``layer`` (uniform
        in -0.607 .. 0, as in RWKV-7); ``strong`` (uniform in -20 .. 0, the first channel all -20, the second
        all 0); or all the number that ``kind`` spells."""
        if kind in forgetting.KINDS:
            return forgetting.KINDS[kind](F.logsigmoid(self(dimensions) + shift))
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


def extents(B: int, T: int, edges: tuple[int, ...]) -> tuple[int, int, int]:
    """B, T and the number of sequences; packed ones, which lie between ``edges``, are one row."""
    return (1, edges[-1], len(edges) - 1) if edges else (B, T, B)


def bounds(edges: tuple[int, ...]) -> Tensors:
    """The op's cu_seqlens, if the sequences are packed."""
    return {"cu_seqlens": torch.tensor(edges, dtype=torch.int32)} if edges else {}


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """torch's dtype of that name; ``same`` is ``dtype``."""
    named: torch.dtype = dtype if name == "same" else getattr(torch, name)
    return named


def typed(made: Tensors, dtype: torch.dtype, own: Mapping[str, torch.dtype],
          without: Container[str] = ()) -> Tensors:
    """The tensors made, but for those in ``without``, in their own dtypes, or else in ``dtype``."""
    return {name: x.to(own.get(name, dtype)) for name, x in made.items() if name not in without}
