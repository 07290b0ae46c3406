"""Rotary embeddings as a module; mirrors ``fla.modules.RotaryEmbedding``.

Checkpoints contain no state of this module, neither here nor in fla.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashlin.compat.tracing import transient
from flashlin.guards import scalars
from flashlin.guards.tensors import check_floats, shown
from flashlin.ops.rotary import rotary_embedding


class Tables(NamedTuple):
    """The cosines and sines of one ``RotaryEmbedding`` for TR positions.

    q, k: (cos, sin) for queries and for keys, each [TR, dim // 2].
    source: the frequencies from which the tables were made.
    version: torch's in-place version counter of the frequencies at that time.
    """
    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    source: Tensor
    version: int


class RotaryEmbedding(nn.Module):
    """A rotary embedding of q and k by angles of position / base^(2 i / dim), by ``rotary_embedding``.

    Drop-in for ``fla.modules.RotaryEmbedding``.

    Args:
        dim: number of rotated channels of each head, an even number.
        base: base of the frequencies.
        scale_base: None, or the base of the xPos decay (Sun et al. 2022). q is scaled by s_i^p and k by
            s_i^-p. Here s_i = (2 i / dim + 0.4) / 1.4 and p = (position - centre) / scale_base. A score then
            depends only on the distance. The centre is half of the first length seen.
        interleaved: pairs are channels (2 i, 2 i + 1) instead of (i, dim / 2 + i).
        pos_idx_in_fp32: multiply positions and frequencies in float32, whatever dtype the module was
            converted to. False multiplies in inv_freq's dtype, for models that were trained so.
        device: device of the frequencies.

    Raises ValueError if dim is not an even number of at least 2.

    Tables are cached and grow by doubling. They are rebuilt for another device or other frequencies. They are
    float32, while fla rounds them to q's dtype. fla also moves the centre of xPos for each longer sequence,
    after which cached keys no longer match.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(self, dim: int, base: float = 10000.0, scale_base: float | None = None,
                 interleaved: bool = False, pos_idx_in_fp32: bool = True,
                 device: torch.device | str | None = None) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"dim: got {dim}, need an even number of at least 2")
        self.dim, self.base, self.scale_base = dim, float(base), scale_base
        self.interleaved, self.pos_idx_in_fp32, self.device = interleaved, pos_idx_in_fp32, device
        for name, wanted in (("inv_freq", True), ("scale", scale_base is not None)):
            buffer = torch.empty(dim // 2, dtype=torch.float32, device=device) if wanted else None
            self.register_buffer(name, buffer, persistent=False)
        self._tables: Tables | None = None
        self._centre: int | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the frequencies and scales from dim and base."""
        with torch.no_grad():
            self.inv_freq.copy_(self._frequencies(self.inv_freq.device))
            if self.scale is not None:
                self.scale.copy_(self._scales(self.scale.device))

    def extra_repr(self) -> str:
        """Return the options for torch's printed form of the module."""
        scale = "" if self.scale_base is None else f", scale_base={self.scale_base}"
        return (f"dim={self.dim}, base={self.base}, interleaved={self.interleaved}{scale}, "
                f"pos_idx_in_fp32={self.pos_idx_in_fp32}")

    def forward(self, q: Tensor, k: Tensor, seqlen_offset: int | Tensor = 0, cu_seqlens: Tensor | None = None,
                max_seqlen: int | None = None, chunk_indices: Any = None) -> tuple[Tensor, Tensor]:
        """Return the rotated (q, k), each [B, T, its heads, D] with D of at least dim.

        seqlen_offset: added to every position, an int or a tensor [N] of int32 or int64.
        cu_seqlens: as in ``rotary_embedding``.
        max_seqlen: number of positions that may occur. None means T positions after an int seqlen_offset. The
            values of a tensor seqlen_offset are not read. If seqlen_offset is a tensor, give max_seqlen in
            the first call. Later calls may omit it, because they use the cached tables. Without cached tables
            the call raises a ValueError.
        Positions beyond the tables are handled as in ``rotary_embedding``.
        """
        for name, x in (("q", q), ("k", k)):
            check_floats(name, x, "[B, T, H, D]")
            if x.ndim != 4 or x.shape[3] < self.dim:
                raise ValueError(f"{name}: got shape {shown(x.shape)}, need [B, T, H, D] with D of at least "
                                 f"dim = {self.dim}")
        if max_seqlen is not None:
            max_seqlen = scalars.integer("max_seqlen", max_seqlen, 0, "an integer of at least 0, or None",
                                          scalars.INT32)
        elif not isinstance(seqlen_offset, Tensor):
            max_seqlen = q.shape[1] + scalars.integer("seqlen_offset", seqlen_offset,
                                                      need="an integer, or a tensor of shape [N]",
                                                      high=scalars.INT32)
        tables = self._tables_for(max_seqlen, q.device, q.dtype == torch.float64)
        q, k = (rotary_embedding(x, *table, self.interleaved, False, seqlen_offset, cu_seqlens)
                for x, table in ((q, tables.q), (k, tables.k)))
        return q, k

    def _tables_for(self, length: int | None, device: torch.device, wide: bool) -> Tables:
        """Return tables of at least ``length`` positions; None for the cached tables."""
        # Under torch.compile each growth of a cached table would recompile. Tables made here are fused with
        # the operations that read them.
        if transient() and length is not None:
            return self._made(length, self._centre_of(length), device, wide, 0)
        version = 0 if self.inv_freq.is_inference() else self.inv_freq._version
        kept = self._tables
        if length is None:
            if kept is None:
                raise ValueError("max_seqlen: got None with a tensor as seqlen_offset, need the number of "
                                 "positions that may occur, in the first call")
            length = len(kept.q[0])
        if kept is not None and kept.source is self.inv_freq and kept.version == version:
            cos = kept.q[0]
            if length <= len(cos) and cos.device == device and (cos.dtype == torch.float64) == wide:
                return kept
        self._centre = self._centre_of(length)
        # Autograd could not save tables that were made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            enough = 1 << max(length - 1, 0).bit_length()
            self._tables = self._made(enough, self._centre, device, wide, version)
        return self._tables

    def _centre_of(self, length: int) -> int:
        return length // 2 if self._centre is None else self._centre

    def _made(self, length: int, centre: int, device: torch.device, wide: bool, version: int) -> Tables:
        exact, dtype = self.inv_freq.to(device), torch.float64 if wide else torch.float32
        if self.pos_idx_in_fp32:
            exact = exact if exact.dtype == torch.float32 else self._frequencies(device)
        angles = torch.arange(length, device=device).to(exact.dtype)[:, None] * exact
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        if self.scale is None:
            return Tables((cos, sin), (cos, sin), self.inv_freq, version)
        assert self.scale_base is not None  # for the type checker only
        power = (torch.arange(length, device=device) - centre)[:, None] / self.scale_base
        scale = self._scales(device).to(dtype) ** power
        return Tables((cos * scale, sin * scale), (cos / scale, sin / scale), self.inv_freq, version)

    def _channels(self, device: torch.device) -> Tensor:
        """Return the first channel of each pair: 0, 2, 4 ..."""
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _frequencies(self, device: torch.device) -> Tensor:
        return 1 / self.base ** (self._channels(device) / self.dim)

    def _scales(self, device: torch.device) -> Tensor:
        return (self._channels(device) + 0.4 * self.dim) / (1.4 * self.dim)
