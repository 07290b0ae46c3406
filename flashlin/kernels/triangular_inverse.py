"""The inverse of a unit lower triangular tile I + M, which every chunk of the delta families needs.

The 16x16 blocks on the diagonal are inverted by substitution in float32, through scratch memory. Products
then merge them to larger inverses.
"""

import triton
import triton.language as tl

from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import precision
from flashlin.kernels.scans import operand_bytes


@triton.jit
def blocks(at, SIDE: tl.constexpr):
    """Return addresses and mask of the 16x16 blocks on the diagonal of a [SIDE, SIDE] tile.

    Both are [SIDE, SIDE]. The addresses are in scratch memory [SIDE, 16] at ``at``; the mask selects the
    elements of the blocks.
    """
    rows = tl.arange(0, SIDE)
    return at + rows[:, None] * 16 + (rows % 16)[None, :], (rows // 16)[:, None] == (rows // 16)[None, :]


@triton.jit
def substitute(scratch, ROWS: tl.constexpr):
    """Replace each strictly lower triangular 16x16 block M in scratch [ROWS, 16] by (I + M)^-1.

    It substitutes in float32, in all blocks at once. M stays in memory because every column of the inverse
    reads the same row of M at each of the 15 steps. From registers, threads would have to exchange this row.
    """
    columns = tl.arange(0, ROWS)  # column c of X is column c % 16 of block c // 16
    j = tl.arange(0, 16)
    top = scratch + (columns // 16 * 256)[None, :]
    X = tl.where(j[:, None] == (columns % 16)[None, :], 1.0, 0.0)
    for i in tl.static_range(1, 16):  # unrolled, so that rows of M are loaded ahead
        m = tl.load(top + i * 16 + j[:, None])
        X -= tl.where(j[:, None] == i, tl.sum(m * X, 0)[None, :], 0.0)
    tl.debug_barrier()
    tl.store(top + j[:, None] * 16 + (columns % 16)[None, :], X)


@triton.jit
def top_half(x):
    """Truncate float32 values to the bits of bf16, as float32.

    A conversion to bf16 and back would be slow, because it would convert one number at a time.
    """
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return the matrix product of two float32 tiles.

    PRECISION is an ``input_precision`` of tl.dot, or "split". "split" writes each operand as the sum of two
    bf16 numbers, which keeps 16 bits at the cost of three fast products. The 11 bits of tf32 are too few
    here: if rows resemble each other, the errors add up instead of averaging out.
    """
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
    """Return addresses and mask of the 16x16 blocks of a lower triangular tile [SIDE, SIDE].

    The scratch memory has BT * 24 elements for the whole [BT, BT] matrix. First come the blocks on its
    diagonal, in the layout of ``substitute``. Then comes, for each tile of 32, the block below its diagonal.

    half: number of this tile on the diagonal of the [BT, BT] matrix.
    """
    rows = tl.arange(0, SIDE)
    apart = (rows // 16)[:, None] - (rows // 16)[None, :]
    at = scratch + (half * SIDE + rows)[:, None] * 16 + (rows % 16)[None, :]
    return at + apart * (BT * 16 - half * 256 - 256), apart >= 0


@triton.jit
def merge(scratch, half, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Complete the inverse of a 32x32 tile in scratch memory, whose two 16x16 diagonal blocks are inverted.

    The inverse of [[X^-1, 0], [C, Y^-1]] is [[X, 0], [-Y C X, Y]], so it replaces the block C by -Y C X.
    Scratch has the layout of ``lower_blocks``; half: number of the tile on the diagonal.

    This is exact, and its terms stay as small as the inverse. Powers of M would not: for keys that resemble
    each other they grow like binomials, while the inverse has entries of about 1.
    """
    side = tl.arange(0, 16)
    at = scratch + half * 512 + side[:, None] * 16 + side[None, :]
    corner = at + (BT * 16 - half * 256)
    below = -product(product(tl.load(at + 256), tl.load(corner), PRECISION), tl.load(at), PRECISION)
    tl.debug_barrier()
    tl.store(corner, below)


@triton.jit
def inverse(M, scratch, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + M)^-1 for a strictly lower triangular M [SIDE, SIDE].

    SIDE is 16, 32 or 64. scratch: [SIDE, 16], float32.
    """
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
    """Return the PRECISION of products between blocks of the inverse, see ``product``.

    It is "split" for 16-bit operands on GPUs with bf16 products, else the precision of fp32 operands.
    """
    full = precision(plan)
    return "split" if full != "ieee" and operand_bytes(plan.problem) == 2 else full
