"""Candidate tiles, warps and stages of the scans, best first.

A recipe takes the first candidate whose shared memory fits the target and that no known issue rejects.
Candidates are left out here only because they are slow. Known issues reject the configurations that fail.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from flashlin.compat.target import Target, lanes


class Config(NamedTuple):
    """A configuration of a scan: BT tokens in a chunk, and a [BK, BV] tile of the state for each program."""
    BT: int
    BK: int
    BV: int
    num_warps: int
    num_stages: int


class Strip(NamedTuple):
    """The columns that a kernel with one program per chunk processes in one step.

    K: columns of q and k.
    V: columns of v.
    """
    K: int
    V: int
    num_warps: int


BLOCK = 64  # tokens over which decays are summed before the scans; the longest chunk
FACTS = 5  # numbers of a chunk that bound its effect on states, see dplr/windows.py
# Log decays below this value count as this value. The state is forgotten either way, and sums keep enough
# digits even if they contain this value several times.
FORGOTTEN = -126 * math.log(2)
# Elements of an fp32 state tile: 64 registers per thread with 4 warps. Enough registers remain for the
# accumulators.
STATE_TILE = 8192


class Room(NamedTuple):
    """The upper limits of tiles on one kind of GPU.

    state: elements of an fp32 state tile.
    longest: tokens of a chunk, for 16-bit operands.
    stages: numbers of pipeline stages to try, best first.
    columns: columns of q, k, v and the state in one step of a kernel with one program per chunk.
    """
    state: int = STATE_TILE
    longest: int = BLOCK
    stages: tuple[int, ...] = (2, 1)
    columns: int = 64


# AMD GPUs have not been timed. These limits come from compilations with Triton 3.6.0 for heads of 128.
# On CDNA (gfx942), whose waves have 64 lanes, scans with one stage spill nothing. On RDNA (gfx1100) they
# spill 2 to 4 KB per thread. With half the state and chunks of 32 tokens they spill 0.5 to 1 KB, and twice
# that with a second stage.
CDNA, RDNA = Room(), Room(STATE_TILE // 2, 32, (1,), 32)


def is_hopper(target: Target) -> bool:
    """Return True if the GPU is an NVIDIA GPU of compute capability 9.x."""
    return target.backend == "cuda" and (9, 0) <= target.capability < (10, 0)


def room(target: Target) -> Room:
    """Return the limits of tiles on a target; NVIDIA GPUs have the same limits as CDNA."""
    return CDNA if target.backend != "hip" or lanes(target.arch) == 64 else RDNA


def padded(size: int) -> int:
    """Return the next power of two that is at least ``size``, and at least 16, the smallest side of a dot."""
    return max(16, 1 << (size - 1).bit_length())


def over_k(K: int, V: int, bytes_each: int, max_warps: int, target: Target) -> Iterator[Config]:
    """Yield configurations of scans whose programs have all of V and a strip of K, for dq and dk."""
    for config in over_v(V, K, bytes_each, max_warps, target):
        yield config._replace(BK=config.BV, BV=config.BK)


def over_v(K: int, V: int, bytes_each: int, max_warps: int, target: Target) -> Iterator[Config]:
    """Yield configurations of scans whose programs have all of K and a strip of V, for forward and dv.

    The strip is half as wide for fp32 operands, whose dots need three tf32 products. bytes_each: bytes of an
    operand's element.
    """
    BK, most = padded(K), room(target)
    BV = max(16, min(64, padded(V), most.state * 2 // bytes_each // BK))
    # These choices are for speed. fp32 operands need twice the registers and shared memory, so their chunks
    # are half as long. With two warps, chunks of 64 tokens spill 2 to 45 KB (compiled for sm_100 with Triton
    # 3.6.0 and 3.9.0), and chunks of 32 almost nothing. With a strip narrower than 64, chunks of 64 were
    # faster than chunks of 32 on an H200, if they ran at all. Other GPUs have not been timed.
    timed = min(BK, BV) >= 64 or is_hopper(target)
    longest = most.longest // 2 if bytes_each == 4 else most.longest if max_warps >= 4 and timed else 32
    for BT in (64, 32, 16):
        for num_stages in most.stages:
            if longest >= BT:
                yield Config(BT, BK, BV, 4, num_stages)


def token(K: int, V: int) -> Config:
    """Return the configuration of the token-by-token kernel, which has no dots and little shared memory."""
    BK = padded(K)
    return Config(1, BK, max(8, min(32, padded(V), 4096 // BK)), 4 if BK >= 64 else 2, 1)
