"""The inverse of a unit lower triangular tile: what the chunks of every delta family need. 16x16 blocks are
substituted in float32 through scratch memory, then merged by products."""

import triton
import triton.language as tl

from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import precision
from flashlin.kernels.scans import operand_bytes


@triton.jit
def blocks(at, SIDE: tl.constexpr):
    """Where the 16x16 blocks on the diagonal of a [SIDE, SIDE] tile lie in scratch [SIDE, 16], and which of
    its elements they are."""
    rows = tl.arange(0, SIDE)
    return at + rows[:, None] * 16 + (rows % 16)[None, :], (rows // 16)[:, None] == (rows // 16)[None, :]


@triton.jit
def substitute(scratch, ROWS: tl.constexpr):
    """For scratch [ROWS, 16] holding 16x16 blocks M, strictly lower triangular, put (I + M)^-1 of each in its
    place: substitution in float32, all blocks at once. Through memory, since only there every column of the
    inverse reads the same row of M without an exchange between threads at each of the 15 steps."""
    columns = tl.arange(0, ROWS)  # column c of X is column c % 16 of block c // 16
    j = tl.arange(0, 16)
    top = scratch + (columns // 16 * 256)[None, :]
    X = tl.where(j[:, None] == (columns % 16)[None, :], 1.0, 0.0)
    for i in tl.static_range(1, 16):  # unrolled, so that no step waits for its row of M
        m = tl.load(top + i * 16 + j[:, None])
        X -= tl.where(j[:, None] == i, tl.sum(m * X, 0)[None, :], 0.0)
    tl.debug_barrier()
    tl.store(top + j[:, None] * 16 + (columns % 16)[None, :], X)


@triton.jit
def top_half(x):
    """float32 cut to the bits that bf16 has. (Rounding to bf16 and back would be converted one number at a
    time, which is slow.)"""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b for float32 tiles. "split": each as the sum of two bf16 numbers, which keeps 16 bits at the price
    of three fast products: tf32's 11 are too few here, since in coherent rows their errors add up instead of
    averaging out."""
    if PRECISION == "split":
        a_top = top_half(a)
        b_top = top_half(b)
        a_high = a_top.to(tl.bfloat16)
        b_high = b_top.to(tl.bfloat16)
        a_low = (a - a_top).to(tl.bfloat16)
        b_low = (b - b_top).to(tl.bfloat16)
        small = tl.dot(a_high, b_low, tl.dot(a_low, b_high))
        return tl.dot(a_high, b_high, small)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def lower_blocks(scratch, half, BT: tl.constexpr, SIDE: tl.constexpr):
    """Where the 16x16 blocks of a lower triangular tile [SIDE, SIDE] lie in scratch [BT, 24], and which of
    the tile's elements they are. half: which tile on the diagonal of [BT, BT]. First come all blocks on the
    diagonal, as ``substitute`` wants them, then for each tile of 32 the one below its diagonal."""
    rows = tl.arange(0, SIDE)
    apart = (rows // 16)[:, None] - (rows // 16)[None, :]
    at = scratch + (half * SIDE + rows)[:, None] * 16 + (rows % 16)[None, :]
    return at + apart * (BT * 16 - half * 256 - 256), apart >= 0


@triton.jit
def merge(scratch, half, BT: tl.constexpr, PRECISION: tl.constexpr):
    """In scratch as ``lower_blocks`` lays it out, where blocks on the diagonal are inverted: put -Y C X in
    the place of M's block C below the diagonal of a tile of 32, X and Y being the inverses above and beside
    it, which is the tile's inverse. Exact algebra whose terms stay as small as the inverse is. (Powers of M
    do not: for keys that resemble each other they grow like binomials, while the inverse has entries of
    about 1.)"""
    side = tl.arange(0, 16)
    at = scratch + half * 512 + side[:, None] * 16 + side[None, :]
    corner = at + (BT * 16 - half * 256)
    below = -product(product(tl.load(at + 256), tl.load(corner), PRECISION), tl.load(at), PRECISION)
    tl.debug_barrier()
    tl.store(corner, below)


@triton.jit
def inverse(M, scratch, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + M)^-1 for M [SIDE, SIDE], strictly lower triangular; SIDE 16, 32 or 64. scratch [SIDE, 16],
    float32."""
    at, diagonal = blocks(scratch, SIDE)
    tl.store(at, M, mask=diagonal)
    tl.debug_barrier()
    substitute(scratch, SIDE)
    tl.debug_barrier()
    X = tl.load(at, mask=diagonal, other=0.0)
    rows = tl.arange(0, SIDE)
    if SIDE > 16:
        pair = (rows // 32)[:, None] == (rows // 32)[None, :]
        corners = tl.where(pair & ((rows // 16)[:, None] != (rows // 16)[None, :]), M, 0.0)
        X -= product(product(X, corners, PRECISION), X, PRECISION)
        if SIDE > 32:
            X -= product(product(X, tl.where(pair, 0.0, M), PRECISION), X, PRECISION)
    return X


def merging(plan: Plan) -> str:
    """How the inverse's blocks are multiplied: see product. Without bf16 products, as float32."""
    full = precision(plan)
    return "split" if full != "ieee" and operand_bytes(plan.problem) == 2 else full
