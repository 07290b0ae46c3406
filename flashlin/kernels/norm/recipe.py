"""Recipe of the norms: their launches and tiles.

A norm is limited by memory bandwidth. The tiles are chosen so that enough loads are in flight: enough bytes
per program, and enough programs per multiprocessor. This module is plain Python: it needs no tensors, torch
or triton.
"""
from __future__ import annotations

from math import gcd
from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, heads_as_rows, moving, rows_of_heads

LAYER, RMS, L2 = 0, 1, 2           # kind of the norm, a constexpr of the kernels
NO_GATE, SWISH, SIGMOID = 0, 1, 2  # activation of the gate, a constexpr of the kernels


class Config(NamedTuple):
    """The configuration of a norm kernel for rows of up to D elements.

    D: largest number of elements of a row; 0 if rows may have any length. For ``norm_backward_columns``, the
        number of columns of a strip.
    elements: elements of a tile [BT, BD]. BD is the row length, rounded up to a power of two, and BT is the
        largest number of rows that fit. Rows that are longer than a tile are read in blocks.
    num_warps: warps of a program.
    per_sm: programs per multiprocessor, if each takes several blocks of rows; 0 for one program per block.
    num_stages: largest number of blocks of rows in flight in such a program. The program computes one of them
        while it loads the others.
    """
    D: int
    elements: int
    num_warps: int
    per_sm: int = 0
    num_stages: int = 1


# The first entry whose D is large enough is used. Longer rows are read in blocks of BLOCK.elements, and their
# sums over rows are computed in strips of COLUMNS.D columns.
FORWARD = (Config(1024, 1024, 4), Config(2048, 2048, 4), Config(4096, 4096, 8), Config(8192, 8192, 8),
           Config(16384, 16384, 16))
BACKWARD = (Config(2048, 2048, 4, 4, 3), Config(4096, 4096, 8, 2, 3), Config(8192, 8192, 16, 1, 3))
BLOCK, COLUMNS = Config(0, 4096, 8), Config(512, 4096, 4, 4)


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the launch of forward, then that of backward; rows too long for the registers need two.

    The Problem has T tokens of H groups of K elements.
    """
    made = [_rows("norm_forward", _of(FORWARD, problem.K) or BLOCK, problem, target)]
    if problem.needs_grad and (config := _of(BACKWARD, problem.K)):
        made.append(_rows("norm_backward", config, problem, target))
    elif problem.needs_grad:
        made += [_rows("norm_backward_rows", BLOCK, problem, target), _columns(problem, target)]
    return tuple(made)


def _of(table: tuple[Config, ...], D: int) -> Config | None:
    return next((config for config in table if D <= config.D), None)


def _rows(kernel: str, config: Config, problem: Problem, target: Target) -> Launch:
    BD = block(problem.K, 8, config.elements)
    BT = config.elements // BD
    programs = cdiv(problem.T * problem.H, BT)
    shared = _bytes(BT, BD, 1)
    # Start no more programs than the GPU runs at once, because the last ones would run alone. A bias
    # gradient and a gate each need so many registers that a quarter fewer programs fit.
    if config.per_sm:
        more = sum(name in problem.options for name in ("bias", "gate"))
        per_sm = config.per_sm - config.per_sm * more // 4
        programs = _aligned(min(programs, per_sm * target.sms), BT, problem)
        # Number of tensors that are loaded ahead: s, dy, the gate, and with a residual the gradient dtotal.
        ahead = 2 + sum(name in problem.options for name in ("gate", "residual"))
        stages = next(stages for stages in range(config.num_stages, 0, -1)
                      if stages == 1 or per_sm * _bytes(BT, BD, ahead * (stages - 1)) <= target.shared)
        config, shared = config._replace(num_stages=stages), _bytes(BT, BD, max(1, ahead * (stages - 1)))
    return moving(kernel, problem, programs, dict(BT=BT, BD=BD), shared=shared, span=BT * problem.K,
                  num_warps=config.num_warps, num_stages=config.num_stages)


def _bytes(BT: int, BD: int, tiles: int) -> int:
    """Return the bytes of shared memory for the given number of tiles with 16-bit elements.

    Elements have 16 bits, because rows in fp32 are not loaded ahead. An exchange between warps needs no more
    than one such tile. The result includes the sums of each warp and the statistics of the rows.
    """
    return 2 * BT * BD * tiles + 16 * BT + 4096


def _columns(problem: Problem, target: Target) -> Launch:
    """Return the launch of ``norm_backward_columns``.

    Programs sum strips of COLUMNS.D columns. Each strip is divided among enough programs to fill the GPU.
    """
    BD, BT = COLUMNS.D, COLUMNS.elements // COLUMNS.D
    strips = cdiv(problem.K, BD)
    groups = _aligned(min(cdiv(problem.T * problem.H, BT), cdiv(COLUMNS.per_sm * target.sms, strips)), BT,
                      problem)
    return moving("norm_backward_columns", problem, strips * groups, dict(BT=BT, BD=BD),
                  shared=_bytes(BT, BD, 1), span=BT * problem.K, num_warps=COLUMNS.num_warps)


def _aligned(programs: int, BT: int, problem: Problem) -> int:
    """Round the number of programs up, so that the stride between a program's rows is a multiple of H.

    H is the number of groups. Each group then stays in the same registers of the program.
    """
    unit = problem.H // gcd(problem.H, BT)
    return cdiv(programs, unit) * unit


SPECS = (Family(
    "norm", launches, (
        Op("rms_norm", "norm", options=("weight",)),
        Op("layer_norm", "norm", options=("bias", "weight")),
        Op("l2norm", "norm"),
        Op("group_norm", "norm", options=("bias", "weight"), counted=rows_of_heads),
        Op("rms_norm_gated", "norm", options=("gate", "weight")),
        Op("layer_norm_gated", "norm", options=("bias", "gate", "weight")),
        Op("rmsnorm_fn", "norm", options=("gate", "weight"), counted=rows_of_heads),
        Op("layernorm_fn", "norm", options=("gate", "weight"), counted=rows_of_heads),
        Op("l2_norm", "norm", planned_as="l2norm"),
        Op("rms_norm_linear", "norm_linear", planned_as="rms_norm"),
        Op("layer_norm_linear", "norm_linear", planned_as="layer_norm"),
        Op("group_norm_linear", "norm_linear", planned_as="group_norm"),
        Op("rms_norm_swish_gate_linear", "norm_linear", planned_as="rms_norm_gated"),
        Op("layer_norm_swish_gate_linear", "norm_linear", planned_as="layer_norm_gated")),
    axes={"T": "rows", "H": "groups of a row", "K": "elements of a row, or of a group"},
    typical={"training": Sizes(T=16384, K=4096), "decoding": Sizes(T=64, K=4096)},
    counted=heads_as_rows),)
