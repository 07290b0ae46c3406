"""Tiles, warps and stages: ordered candidates, best first. A recipe takes the first one whose shared memory fits the target."""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Config(NamedTuple):
    """BT tokens per chunk; a [BK, BV] tile of the state per program."""
    BT: int
    BK: int
    BV: int
    num_warps: int
    num_stages: int


STATE_TILE = 8192  # elements of an fp32 state tile: 64 registers a thread with 4 warps, which leaves room for the accumulators


def padded(size: int) -> int:
    """The power of two that holds ``size``; at least 16, the smallest side of a dot."""
    return max(16, 1 << (size - 1).bit_length())


def narrow(full: int, size: int) -> int:
    """How much of the other side fits beside a ``full`` side in one state tile."""
    return max(16, min(64, padded(size), STATE_TILE // full))


def over_v(K: int, V: int, bytes_each: int) -> Iterator[Config]:
    """Scans that hold all of K and a strip of V: forward and dv."""
    BK = padded(K)
    yield from _chunks(BK, narrow(BK, V), bytes_each)


def over_k(K: int, V: int, bytes_each: int) -> Iterator[Config]:
    """Scans that hold all of V and a strip of K: dq and dk."""
    BV = padded(V)
    yield from _chunks(narrow(BV, K), BV, bytes_each)


def _chunks(BK: int, BV: int, bytes_each: int) -> Iterator[Config]:
    # fp32 operands take twice the registers and shared memory, so their chunks are half as long.
    for BT in (64, 32, 16) if bytes_each == 2 else (32, 16):
        for num_stages in (2, 1):
            yield Config(BT, BK, BV, 4, num_stages)
    if BK > BV:
        yield Config(16, BK, 16, 4, 1)
    else:
        yield Config(16, 16, BV, 4, 1)


def token(K: int, V: int) -> Config:
    """The token-by-token kernel: no dots, so no chunks and no shared memory to speak of."""
    BK = padded(K)
    return Config(1, BK, max(8, min(32, padded(V), 4096 // BK)), 4 if BK >= 64 else 2, 1)
