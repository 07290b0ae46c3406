"""Recipe of the elementwise ops: their launches and tiles.

A Problem has T rows of H * K columns: H heads of K columns, or H = 1 for ops without heads. A parameter has
one element per column or per head, so its gradient is a sum over rows. Elementwise ops are limited by memory
bandwidth, and the tiles are chosen so that enough loads are in flight. This module is plain Python: it needs
no tensors, torch or triton.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, moving, rows_of_heads

# Names of the families, and of their kernels.
GATE, MIX, KEY, CORRECTION = "pointwise_gate", "pointwise_mix", "pointwise_key", "pointwise_correction"
SCALE, SKIP, READ = "pointwise_scale", "pointwise_skip", "pointwise_read"
APART = (SCALE, SKIP, READ)  # ops before and after a scan; their inputs may be non-contiguous slices
BY_HEAD = (CORRECTION, SCALE, READ)  # kernels that sum over the columns of a head


class Config(NamedTuple):
    """The configuration of an elementwise kernel.

    elements: rows times columns of a tile.
    num_warps: warps of a program.
    per_sm: programs per multiprocessor, if each takes several blocks of rows; 0 for one program per block.
    """
    elements: int
    num_warps: int
    per_sm: int = 0


# Backward keeps a sum for each parameter in registers, up to six.
FORWARD, BACKWARD = Config(2048, 4), Config(1024, 4, 4)


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the launch of forward and, if gradients are needed, that of backward."""
    forward = _launch(problem.family, FORWARD, problem, target)
    if not problem.needs_grad:
        return (forward,)
    config = FORWARD if problem.family in (SCALE, READ) else BACKWARD  # SCALE and READ have no parameters
    return forward, _launch(problem.family + "_backward", config, problem, target)


def strip_width(problem: Problem, BD: int) -> int:
    """Return the number of columns of a strip: K if the kernel sums over the columns of a head, else BD."""
    return problem.K if problem.family in BY_HEAD else BD


def _launch(kernel: str, config: Config, problem: Problem, target: Target) -> Launch:
    columns, warps = problem.H * problem.K, config.num_warps
    if problem.family in BY_HEAD:
        BD = block(problem.K, 8)
        warps = max(warps, BD // 256)
    else:
        BD = block(columns, 8, config.elements)
    elements = max(config.elements, BD)
    BT = elements // BD
    strips, blocks = cdiv(columns, strip_width(problem, BD)), cdiv(problem.T, BT)
    if config.per_sm:
        blocks = min(blocks, cdiv(config.per_sm * target.sms, max(strips, 1)))
    # The sums of each warp need shared memory; this is an upper bound.
    return moving(kernel, problem, strips * blocks, dict(BT=BT, BD=BD), shared=4 * elements + 4096,
                  span=BT * columns, num_warps=warps)


def rows(sizes: Sizes) -> Sizes:
    """Return sizes with one row of H * K columns for each token; the row is not divided into heads."""
    columns = sizes.H * sizes.K
    return Sizes(T=sizes.B * sizes.T, K=columns, V=columns)


MAX_COLUMNS = 4096  # limit of the columns per head, for kernels that sum over the columns of a head
_AXES = {"T": "rows", "K": "columns of a head"}
_LIMITS = (Limit("K", MAX_COLUMNS, "heads of {} columns"),)
_ROWS = {"training": Sizes(T=16384, K=4096), "decoding": Sizes(T=64, K=4096)}
_HEADS = {"training": Sizes(T=16384, H=64, K=64), "decoding": Sizes(T=64, H=64, K=64)}
_GATES = {"training": Sizes(T=16384, H=32), "decoding": Sizes(T=64, H=32)}
SPECS = (
    Family(GATE, launches, (Op("fused_gdn_gate", "gates", typical=_GATES,
                               counted=lambda sizes: rows_of_heads(sizes._replace(K=1))),
                            Op("fused_kda_gate", "gates")), _AXES, _HEADS, rows_of_heads),
    Family(MIX, launches, (Op("fused_addcmul_rwkv7", "rwkv7_steps"),), _AXES, _ROWS, rows),
    Family(KEY, launches, (Op("fused_k_rwkv7", "rwkv7_steps"),), _AXES, _ROWS, rows),
    Family(CORRECTION, launches, (Op("gate_output_correction", "rwkv7_steps"),), _AXES, _HEADS, rows_of_heads,
           limits=_LIMITS),
    # These kernels belong to the scans of Mamba2 and Mamba-3, whose ops plan them.
    Family(SCALE, launches, axes=_AXES, limits=_LIMITS),
    Family(SKIP, launches, axes=_AXES), Family(READ, launches, axes=_AXES, limits=_LIMITS))
