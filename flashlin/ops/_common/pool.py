"""Rows of a pool of states, in plain torch: copies of them to compute with, and what became of those written
back."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The row of each sequence in a pool, and whether there is such a row; both None where sequence n has row
    n. states: copies of them."""
    pool: Tensor
    places: Tensor | None
    known: Tensor | None
    states: Tensor


def taken(pool: Tensor, indices: Tensor | None) -> Rows:
    """The rows that indices [b] name, of which those below 0 or past the end name none."""
    if indices is None:
        return Rows(pool, None, None, pool.detach().clone())
    size = pool.shape[0]
    places = indices.long().clamp(0, max(size - 1, 0))
    states = pool.detach()[places] if size else pool.new_zeros(len(indices), *pool.shape[1:])
    return Rows(pool, places, (indices >= 0) & (indices < size), states)


def put_back(rows: Rows, states: Tensor, y: Tensor) -> Tensor:
    """y [b, ..., ...], zero for sequences that have no row, after writing the states to the rows."""
    pool, places, known, _ = rows
    states = states.detach().to(pool.dtype)
    if places is None or known is None:
        pool.copy_(states)
        return y
    if not torch.compiler.is_compiling() and pool.device.type != "meta":
        pool[places[known]] = states[known]
    else:
        # there is no room for a number of rows that nobody knows: those without one go to a row that is cut
        # off again
        larger = torch.cat([pool, pool.new_zeros(1, *pool.shape[1:])])
        pool.copy_(larger.index_copy(0, torch.where(known, places, pool.shape[0]), states)[:-1])
    return torch.where(known[:, None, None], y, 0)
