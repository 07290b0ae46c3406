"""Plain torch functions that copy rows out of a pool of states and write new states back."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The states of a batch of sequences, copied from a pool.

    places: the pool row of each sequence, clamped to the pool.
    known: True for each sequence whose row exists.
    states: copies of the rows.
    places and known are None if sequence n uses row n.
    """
    pool: Tensor
    places: Tensor | None
    known: Tensor | None
    states: Tensor


def taken(pool: Tensor, indices: Tensor | None) -> Rows:
    """Return copies of the pool rows that indices [b] name.

    An index below 0 or past the end names no row.
    """
    if indices is None:
        return Rows(pool, None, None, pool.detach().clone())
    size = pool.shape[0]
    places = indices.long().clamp(0, max(size - 1, 0))
    states = pool.detach()[places] if size else pool.new_zeros(len(indices), *pool.shape[1:])
    return Rows(pool, places, (indices >= 0) & (indices < size), states)


def put_back(rows: Rows, states: Tensor, y: Tensor) -> Tensor:
    """Write the new states to their rows of the pool, and return y [b, ..., ...].

    The result is zero for sequences without a row.
    """
    pool, places, known, _ = rows
    states = states.detach().to(pool.dtype)
    if places is None or known is None:
        pool.copy_(states)
        return y
    if not torch.compiler.is_compiling() and pool.device.type != "meta":
        pool[places[known]] = states[known]
    else:
        # The number of known rows cannot be read here. Sequences without a row write to an extra row, which
        # is cut off again.
        larger = torch.cat([pool, pool.new_zeros(1, *pool.shape[1:])])
        pool.copy_(larger.index_copy(0, torch.where(known, places, pool.shape[0]), states)[:-1])
    return torch.where(known[:, None, None], y, 0)
