"""Backward of the row-wise normalisations.

The symbols s, m, r, w, b, z and a are defined in forward.py. Let n be the normalised row (s - m) r,
and let u be w dy. Then:

    ds = r (u - mean(u) - n mean(u n)) + dtotal
    dw = sum over rows of dy n
    db = sum over rows of dy

For an RMS norm or an l2 norm, mean(u) is absent. For an l2 norm, mean(u n) is the sum of u n instead. With a
gate z, dz = dy (n w + b) a'(z), and dy a(z) replaces dy in all other formulas. dx and dresidual are both
equal to ds.

A program processes several blocks of BT rows, in a grid-stride loop, and keeps its partial sums of dw and db
in registers. The partial sums of all programs are [programs, D] in fp32, and torch adds them. The weight of a
group norm has G rows. In that case the stride of the loop is a multiple of G. Each of a program's BT rows
then uses the same row of the weight in all blocks, and the partial sums are [programs * BT / G, G, D]. While
a program computes one block, it loads the next blocks to shared memory. Loads of a single row would leave
most of the memory bandwidth idle.

Rows that are too long for the registers need two kernels: norm_backward_rows reads along rows for ds, and
norm_backward_columns reads down columns for dw and db. The kernels use no atomics, and a plan fixes the order
of summation, so the results are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.norm.forward import lines, opened, put, scaled, tile


@triton.jit
def stats_of(mean, rstd, first, rows, BT: tl.constexpr, KIND: tl.constexpr):
    """Load the statistics of BT rows: the mean m and the factor r = rstd, both [BT] in fp32.

    m is zeros unless KIND is a layer norm.
    """
    row = tl.arange(0, BT)
    r = tl.load(rstd + first + row, mask=first + row < rows, other=0.0)
    if KIND == 0:
        m = tl.load(mean + first + row, mask=first + row < rows, other=0.0)
    else:
        m = tl.zeros([BT], dtype=tl.float32)
    return m, r


@triton.jit
def normalised(b_s, m, r, KIND: tl.constexpr, NORMED: tl.constexpr):
    """Return the normalised rows n [BT, BD] in fp32, from a tile b_s of the tensor that forward saved.

    m, r: [BT], the mean and the factor of each row. NORMED is True if forward saved normalised rows.
    """
    n = b_s.to(tl.float32)
    if KIND == 0:
        n -= m[:, None]
    if not NORMED:
        n *= r[:, None]
    return n


@triton.jit
def before_gate(u, n, w, b, gate, dgate, first, rows, d0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
                GATE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, EVICT: tl.constexpr):
    """Return the gradient [BT, BD] of the value before the gate, and store the gradient of the gate in dgate.

    u is the gradient dy of the output; n, w and b are the normalised rows, the weight and the bias.

    u, n, w, b: [BT, BD].
    gate, dgate: [rows, D].
    first: the program's first row.
    """
    factor, slope = opened(tile(gate, first, rows, d0, D, BT, BD, EVICT), GATE)
    put(dgate, u * slope * scaled(n, w, b, HAS_WEIGHT, HAS_BIAS), first, rows, d0, D, BT, BD)
    return u * factor


@triton.jit
def put_share(x, share, number, d0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
              GROUPS: tl.constexpr):
    """Store a program's partial sum of dw or db, given as ``share`` [BT, BD].

    number: index of the partial sum. d0: first column. The BT rows are summed to one row of D columns. With
    groups they are stored as BT separate rows.
    """
    col = d0 + tl.arange(0, BD)
    if GROUPS == 1:
        tl.store(x + number.to(tl.int64) * D + col, tl.sum(share, 0), mask=col < D)
    else:
        row = tl.arange(0, BT)
        tl.store(x + number.to(tl.int64) * BT * D + (row[:, None] * D + col[None, :]), share,
                 mask=(col < D)[None, :])


@triton.jit(do_not_specialize=["rows"])
def norm_backward(
    s,  # [rows, D]
    weight, bias,  # [GROUPS, D]
    gate,  # [rows, D]
    mean, rstd,  # [rows], fp32
    dy, dtotal, dx, dresidual, dgate,  # [rows, D]
    # Partial sums, fp32: [programs, D]; of a group norm [programs * BT / GROUPS, GROUPS, D].
    dweight,
    dbias,  # like dweight
    rows,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr,
    GATE: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DTOTAL: tl.constexpr, HAS_DRESIDUAL: tl.constexpr, HAS_DWEIGHT: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
):
    """Compute dx, dresidual and dgate [rows, D], and partial sums of dweight and dbias.

    This kernel is for rows that fit into registers. A program processes several blocks of BT rows, in a
    grid-stride loop. dx and dresidual have the same values, but may have different dtypes.
    """
    COUNT: tl.constexpr = 1 if KIND == 2 else D
    program = tl.program_id(0)
    step = tl.num_programs(0) * BT
    first = program.to(tl.int64) * BT
    w, b = lines(
        weight, bias, first, 0, D=D, BT=BT, BD=BD, GROUPS=GROUPS, HAS_WEIGHT=HAS_WEIGHT, HAS_BIAS=HAS_BIAS)
    if HAS_DWEIGHT:
        dw = tl.zeros([BT, BD], dtype=tl.float32)
    if HAS_DBIAS:
        db = tl.zeros([BT, BD], dtype=tl.float32)
    for _ in tl.range(0, (rows - first + step - 1) // step, num_stages=STAGES):
        m, r = stats_of(mean, rstd, first, rows, BT, KIND)
        n = normalised(tile(s, first, rows, 0, D, BT, BD, "evict_first"), m, r, KIND, NORMED)
        u = tile(dy, first, rows, 0, D, BT, BD, "evict_first").to(tl.float32)
        if GATE != 0:
            u = before_gate(u, n, w, b, gate, dgate, first, rows, 0, D=D, BT=BT, BD=BD, GATE=GATE,
                            HAS_WEIGHT=HAS_WEIGHT, HAS_BIAS=HAS_BIAS, EVICT="evict_first")
        if HAS_DWEIGHT:
            dw += u * n
        if HAS_DBIAS:
            db += u
        if HAS_WEIGHT:
            u *= w
        ds = u - n * (tl.sum(u * n, 1) / COUNT)[:, None]
        if KIND == 0:
            ds -= (tl.sum(u, 1) / D)[:, None]
        ds *= r[:, None]
        if HAS_DTOTAL:
            ds += tile(dtotal, first, rows, 0, D, BT, BD, "evict_first").to(tl.float32)
        put(dx, ds, first, rows, 0, D, BT, BD)
        if HAS_DRESIDUAL:
            put(dresidual, ds, first, rows, 0, D, BT, BD)
        first += step
    if HAS_DWEIGHT:
        put_share(dweight, dw, program, 0, D, BT, BD, GROUPS)
    if HAS_DBIAS:
        put_share(dbias, db, program, 0, D, BT, BD, GROUPS)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_rows(
    s,  # [rows, D]
    weight, bias,  # [GROUPS, D]
    gate,  # [rows, D]
    mean, rstd,  # [rows], fp32
    dy, dtotal, dx, dresidual, dgate,  # [rows, D]
    rows,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr,
    GATE: tl.constexpr, GROUPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DTOTAL: tl.constexpr, HAS_DRESIDUAL: tl.constexpr,
):
    """Compute dx, dresidual and dgate [rows, D] for rows of any length; a program computes BT rows.

    dx and dresidual have the same values, but may have different dtypes.
    """
    COUNT: tl.constexpr = 1 if KIND == 2 else D
    first = tl.program_id(0).to(tl.int64) * BT
    m, r = stats_of(mean, rstd, first, rows, BT, KIND)
    along = tl.zeros([BT], dtype=tl.float32)
    level = tl.zeros([BT], dtype=tl.float32)
    for d0 in range(0, D, BD):
        n = normalised(tile(s, first, rows, d0, D, BT, BD, "evict_last"), m, r, KIND, NORMED)
        u = tile(dy, first, rows, d0, D, BT, BD, "evict_last").to(tl.float32)
        w, b = lines(weight, bias, first, d0, D=D, BT=BT, BD=BD, GROUPS=GROUPS, HAS_WEIGHT=HAS_WEIGHT,
                     HAS_BIAS=HAS_BIAS)
        if GATE != 0:
            u = before_gate(u, n, w, b, gate, dgate, first, rows, d0, D=D, BT=BT, BD=BD, GATE=GATE,
                            HAS_WEIGHT=HAS_WEIGHT, HAS_BIAS=HAS_BIAS, EVICT="evict_last")
        if HAS_WEIGHT:
            u *= w
        along += tl.sum(u * n, 1)
        if KIND == 0:
            level += tl.sum(u, 1)
    along /= COUNT
    level /= D
    for d0 in range(0, D, BD):
        n = normalised(tile(s, first, rows, d0, D, BT, BD, "evict_first"), m, r, KIND, NORMED)
        u = tile(dy, first, rows, d0, D, BT, BD, "evict_first").to(tl.float32)
        if GATE != 0:
            factor, _ = opened(tile(gate, first, rows, d0, D, BT, BD, "evict_first"), GATE)
            u *= factor
        w, b = lines(weight, bias, first, d0, D=D, BT=BT, BD=BD, GROUPS=GROUPS, HAS_WEIGHT=HAS_WEIGHT,
                     HAS_BIAS=False)
        if HAS_WEIGHT:
            u *= w
        ds = (u - level[:, None] - n * along[:, None]) * r[:, None]
        if HAS_DTOTAL:
            ds += tile(dtotal, first, rows, d0, D, BT, BD, "evict_first").to(tl.float32)
        put(dx, ds, first, rows, d0, D, BT, BD)
        if HAS_DRESIDUAL:
            put(dresidual, ds, first, rows, d0, D, BT, BD)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_columns(
    s, gate,  # [rows, D]
    mean, rstd,  # [rows], fp32
    dy,  # [rows, D]
    # Partial sums, fp32: [programs, D]; of a group norm [programs * BT / GROUPS, GROUPS, D].
    dweight,
    dbias,  # like dweight
    rows,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr,
    GATE: tl.constexpr, GROUPS: tl.constexpr, HAS_DWEIGHT: tl.constexpr, HAS_DBIAS: tl.constexpr,
):
    """Compute partial sums of dweight and dbias, for rows that are too long for the registers.

    A program sums BD columns over several blocks of BT rows, in a grid-stride loop.
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    group = tl.program_id(0) // STRIPS
    d0 = tl.program_id(0) % STRIPS * BD
    step = tl.num_programs(0) // STRIPS * BT
    first = group.to(tl.int64) * BT
    dw = tl.zeros([BT, BD], dtype=tl.float32)
    db = tl.zeros([BT, BD], dtype=tl.float32)
    for _ in range((rows - first + step - 1) // step):
        u = tile(dy, first, rows, d0, D, BT, BD, "evict_first").to(tl.float32)
        if GATE != 0:
            # The second result is not named "_", because "_" is the loop variable.
            factor, slope = opened(tile(gate, first, rows, d0, D, BT, BD, "evict_first"), GATE)
            u *= factor
        db += u
        if HAS_DWEIGHT:
            m, r = stats_of(mean, rstd, first, rows, BT, KIND)
            dw += u * normalised(tile(s, first, rows, d0, D, BT, BD, "evict_first"), m, r, KIND, NORMED)
        first += step
    if HAS_DWEIGHT:
        put_share(dweight, dw, group, d0, D, BT, BD, GROUPS)
    if HAS_DBIAS:
        put_share(dbias, db, group, d0, D, BT, BD, GROUPS)


def launch_backward(plan: Plan, s: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None,
                    mean: Tensor | None, rstd: Tensor, dy: Tensor, dtotal: Tensor | None, kind: int,
                    activation: int, normed: bool, dx_dtype: torch.dtype,
                    dresidual_dtype: torch.dtype | None, needs_dweight: bool, needs_dbias: bool) -> tuple[
        Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Launch the backward kernels of a norm; return (dx, dresidual, dgate, dweight, dbias).

    A gradient that is not needed is None. dweight and dbias are [D] in fp32, for a group norm [G * D].

    s: the rows x + residual that forward saved, or the normalised rows if normed.
    mean, rstd: the statistics that launch_forward returned.
    dy: gradient of the output. dtotal: gradient of x + residual, or None.
    kind, activation: constants of norm/recipe.py: the norm, and the activation of the gate.
    dresidual_dtype: dtype of dresidual; None if dresidual is not needed, or if dx also serves as dresidual.

    All tensors are contiguous.
    """
    D, groups = s.shape[-1], plan.problem.H
    rows = s.numel() // D
    dx = torch.empty_like(s, dtype=dx_dtype)
    dresidual = None if dresidual_dtype is None else torch.empty_like(s, dtype=dresidual_dtype)
    dgate = None if gate is None else torch.empty_like(gate)
    wide = plan.launches[-1].kernel != "norm_backward"
    for_rows, for_sums = plan.launch("norm_backward_rows" if wide else "norm_backward"), plan.launches[-1]
    shares = for_sums.grid[0] // -(-D // for_sums.block("BD")) * (for_sums.block("BT") if groups > 1 else 1)
    wanted = needs_dweight + needs_dbias
    parts = s.new_empty((wanted, shares, D), dtype=torch.float32)
    dweight, dbias = parts[0] if needs_dweight else None, parts[-1] if needs_dbias else None
    read = dict(s=s, gate=gate, mean=mean, rstd=rstd, dy=dy, rows=rows,
                D=D, KIND=kind, NORMED=normed, GATE=activation, GROUPS=groups)
    for_dx = dict(weight=weight, bias=bias, dtotal=dtotal, dx=dx, dresidual=dresidual, dgate=dgate,
                  HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, HAS_DTOTAL=dtotal is not None,
                  HAS_DRESIDUAL=dresidual is not None)
    sums = dict(dweight=dweight, dbias=dbias, HAS_DWEIGHT=needs_dweight, HAS_DBIAS=needs_dbias)
    # Rows in fp32 keep enough bytes in flight without a prefetch of the next rows.
    narrow = all(t is None or t.element_size() < 4 for t in (s, dy, gate, dtotal))
    if rows and not wide:
        start(for_rows, norm_backward, for_rows.grid[0], dict(
            read, **for_dx, **sums, STAGES=for_rows.num_stages if narrow else 1))
    elif rows:
        start(for_rows, norm_backward_rows, for_rows.grid[0], dict(read, **for_dx))
        if wanted:
            start(for_sums, norm_backward_columns, for_sums.grid[0], dict(read, **sums))
    if wanted and rows:
        total = parts.view(wanted, -1, groups * D).sum(1)
    else:
        total = parts.new_zeros((wanted, groups * D))
    return dx, dresidual, dgate, total[0] if needs_dweight else None, total[-1] if needs_dbias else None
