"""Tiles, warps and stages: ordered candidates, best first. A recipe takes the first one whose shared memory
fits the target and to which no known issue objects. What is left out here is left out for speed: what fails
is a known issue's to reject."""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from flashlin.compat.target import Target, lanes


class Config(NamedTuple):
    """BT tokens per chunk; a [BK, BV] tile of the state per program."""
    BT: int
    BK: int
    BV: int
    num_warps: int
    num_stages: int


class Strip(NamedTuple):
    """What a program that has a chunk to itself takes at a time: columns of q and k, and columns of v."""
    K: int
    V: int
    num_warps: int


BLOCK = 64  # tokens over which decays are summed before the scans; the longest chunk
# the log decay that forgetting everything counts as: a multiple of it beside a sum costs no digits that
# matter
FORGOTTEN = -126 * math.log(2)
# elements of an fp32 state tile: 64 registers a thread with 4 warps, which leaves room for the accumulators
STATE_TILE = 8192


class Room(NamedTuple):
    """What a scan may take. state: elements of an fp32 state tile; longest: tokens of a chunk of 16-bit
    operands; stages: best first. columns: of q, k, v and of the state at a time where a program has a chunk
    to itself."""
    state: int = STATE_TILE
    longest: int = BLOCK
    stages: tuple[int, ...] = (2, 1)
    columns: int = 64


# Nobody has timed AMD's cards. Compiled with Triton 3.6.0 for heads of 128, scans with a stage spill nothing
# on CDNA (gfx942), whose waves have 64 lanes. On RDNA (gfx1100) they spill 2 to 4 KB a thread; with half the
# state and chunks of 32 tokens it is 0.5 to 1 KB, with a second stage twice that.
CDNA, RDNA = Room(), Room(STATE_TILE // 2, 32, (1,), 32)


def is_hopper(target: Target) -> bool:
    return target.backend == "cuda" and (9, 0) <= target.capability < (10, 0)


def room(target: Target) -> Room:
    return CDNA if target.backend != "hip" or lanes(target.arch) == 64 else RDNA


def padded(size: int) -> int:
    """The power of two that holds ``size``; at least 16, the smallest side of a dot."""
    return max(16, 1 << (size - 1).bit_length())


def over_k(K: int, V: int, bytes_each: int, max_warps: int, target: Target) -> Iterator[Config]:
    """Yield the scans that hold all of V and a strip of K: dq and dk."""
    for config in over_v(V, K, bytes_each, max_warps, target):
        yield config._replace(BK=config.BV, BV=config.BK)


def over_v(K: int, V: int, bytes_each: int, max_warps: int, target: Target) -> Iterator[Config]:
    """Yield the scans that hold all of K and a strip of V: forward and dv. The strip is half as wide where
    dots need three tf32 products."""
    BK, most = padded(K), room(target)
    BV = max(16, min(64, padded(V), most.state * 2 // bytes_each // BK))
    # Choices, for speed. fp32 operands take twice the registers and shared memory, so their chunks are half
    # as long; with two warps chunks of 64 spill 2 to 45 KB (compiled for sm_100 with 3.6.0 and 3.9.0), chunks
    # of 32 barely. Beside a strip narrower than 64, chunks of 64 take half the time of chunks of 32 on an
    # H200, where they run at all (benchmarks/results/sweep-*); on other cards nobody has timed them.
    timed = min(BK, BV) >= 64 or is_hopper(target)
    longest = most.longest // 2 if bytes_each == 4 else most.longest if max_warps >= 4 and timed else 32
    for BT in (64, 32, 16):
        for num_stages in most.stages:
            if longest >= BT:
                yield Config(BT, BK, BV, 4, num_stages)


def token(K: int, V: int) -> Config:
    """The token-by-token kernel: no dots, so no chunks and no shared memory to speak of."""
    BK = padded(K)
    return Config(1, BK, max(8, min(32, padded(V), 4096 // BK)), 4 if BK >= 64 else 2, 1)
