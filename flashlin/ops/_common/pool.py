"""Plain torch functions that copy rows out of a pool of states and write new states back."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashlin.kernels.recurrent.pool_torch import put, states_of


class Rows(NamedTuple):
    """The states of a batch of sequences, copied from a pool.

    places: the pool row of each sequence.
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
    places, known = indices.long(), (indices >= 0) & (indices < pool.shape[0])
    return Rows(pool, places, known, states_of(pool.detach(), places, known))


def put_back(rows: Rows, states: Tensor, y: Tensor) -> Tensor:
    """Write the new states to their rows of the pool, and return y [b, ..., ...].

    The result is zero for sequences without a row.
    """
    pool, places, known, _ = rows
    if places is None or known is None:
        pool.copy_(states.detach())
        return y
    put(pool, places, states.detach(), known)
    return torch.where(known[:, None, None], y, 0)
