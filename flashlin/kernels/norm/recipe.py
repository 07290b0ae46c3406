"""Which launches a norm makes, and with which tiles. Plain Python: no tensor, no torch, no triton.

A norm only moves memory, so the choice is how much of it is under way: enough bytes per program, enough
programs per multiprocessor.
"""
from __future__ import annotations

from math import gcd
from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, heads_as_rows, moving, rows_of_heads

LAYER, RMS, L2 = 0, 1, 2           # what a kernel does to a row, as a constexpr
NO_GATE, SWISH, SIGMOID = 0, 1, 2  # and what to a gate


class Config(NamedTuple):
    """For rows of up to D elements: programs of ``elements`` (as many whole rows as that is, at least one)
    and ``num_warps``.

    per_sm: programs per multiprocessor of a kernel whose programs share out the rows. num_stages: how many
    steps' rows such a program has in hand, at most; those of all but one are on their way.
    """
    D: int
    elements: int
    num_warps: int
    per_sm: int = 0
    num_stages: int = 1


# The first entry whose D is large enough. Longer rows go in blocks of BLOCK, and their sums over rows in
# strips of COLUMNS.D columns.
FORWARD = (Config(1024, 1024, 4), Config(2048, 2048, 4), Config(4096, 4096, 8), Config(8192, 8192, 8),
           Config(16384, 16384, 16))
BACKWARD = (Config(2048, 2048, 4, 4, 3), Config(4096, 4096, 8, 2, 3), Config(8192, 8192, 16, 1, 3))
BLOCK, COLUMNS = Config(0, 4096, 8), Config(512, 4096, 4, 4)


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launch, then backward's one, or two where rows are too long for the registers. T tokens of H
    groups of K elements."""
    made = [_rows("norm_forward", _of(FORWARD, problem.K) or BLOCK, problem, target)]
    if problem.needs_grad:
        config = _of(BACKWARD, problem.K)
        if config is not None:
            made.append(_rows("norm_backward", config, problem, target))
        else:
            made += [_rows("norm_backward_rows", BLOCK, problem, target), _columns(problem, target)]
    return tuple(made)


def _of(table: tuple[Config, ...], D: int) -> Config | None:
    return next((config for config in table if D <= config.D), None)


def _rows(kernel: str, config: Config, problem: Problem, target: Target) -> Launch:
    BD = block(problem.K, 8, config.elements)
    BT = config.elements // BD
    programs = cdiv(problem.T * problem.H, BT)
    shared = _bytes(BT, BD, 1)
    # no more than run at once, or the last ones run alone: a bias's gradient or a gate takes the registers of
    # every fourth
    if config.per_sm:
        more = sum(name in problem.options for name in ("bias", "gate"))
        per_sm = config.per_sm - config.per_sm * more // 4
        programs = _aligned(min(programs, per_sm * target.sms), BT, problem)
        # x and dy, and with a residual the gradient of the sum
        ahead = 2 + sum(name in problem.options for name in ("gate", "residual"))
        stages = next(stages for stages in range(config.num_stages, 0, -1)
                      if stages == 1 or per_sm * _bytes(BT, BD, ahead * (stages - 1)) <= target.shared)
        config, shared = config._replace(num_stages=stages), _bytes(BT, BD, max(1, ahead * (stages - 1)))
    return _launch(kernel, config, problem, programs, BT, BD, shared)


def _bytes(BT: int, BD: int, tiles: int) -> int:
    """Of shared memory: so many tiles of 16 bits, since rows of fp32 are not fetched ahead (and more than one
    such tile is not exchanged between warps); the sums of each warp, and what is known of rows."""
    return 2 * BT * BD * tiles + 16 * BT + 4096


def _columns(problem: Problem, target: Target) -> Launch:
    """Strips of D columns, each shared by enough groups of rows to fill the card."""
    BD, BT = COLUMNS.D, COLUMNS.elements // COLUMNS.D
    strips = cdiv(problem.K, BD)
    groups = _aligned(min(cdiv(problem.T * problem.H, BT), cdiv(COLUMNS.per_sm * target.sms, strips)), BT,
                      problem)
    return _launch("norm_backward_columns", COLUMNS, problem, strips * groups, BT, BD, _bytes(BT, BD, 1))


def _aligned(programs: int, BT: int, problem: Problem) -> int:
    """So many more that the step between a program's rows is a multiple of the groups (H), which then keep to
    their registers."""
    unit = problem.H // gcd(problem.H, BT)
    return cdiv(programs, unit) * unit


def _launch(kernel: str, config: Config, problem: Problem, programs: int, BT: int, BD: int,
            shared: int) -> Launch:
    return moving(kernel, problem, programs, dict(BT=BT, BD=BD), shared=shared,
                  span=BT * problem.K, num_warps=config.num_warps, num_stages=config.num_stages)


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
