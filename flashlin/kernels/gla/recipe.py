"""Which launches a problem with a decay for each key channel makes; RWKV-6 has u among its options. Plain
Python: no tensor, no torch, no triton."""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Op, over_heads
from flashlin.guards.problem import Launch, Problem
from flashlin.kernels.configs import Config, is_hopper, over_v, padded
from flashlin.kernels.recurrent import recipe as recurrent
from flashlin.kernels.scans import (
    BY_DECAY,
    PADDING,
    calm,
    carry_launch,
    dot_traits,
    fitting,
    moves,
    operand_bytes,
    over_tokens,
    part_length,
    shared_bytes,
    state_launch,
    tf32_copies,
)

CHANNELS = 64  # of the sums, a program; they know no heads
# Where a program has a chunk to itself. Of the scores, channels at a time; of the gradients, which hold half
# a dozen tiles of a chunk's rows and would spill with more, channels and columns of v at a time. With 8 warps
# and 64 they are no faster (benchmarks/results/kernels-*).
SCORES, GRADS = 64, 32
# Where a chunk has two ways to its scores, with 64 channels 0.8 KB a thread spill (3.6.0, sm_90).
SCORES_OF_TWO_WAYS = 32


@calm
@recurrent.or_token_by_token
def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Sums, scores and the scan; for gradients the scan that rebuilds states, the reverse scan, and the
    chunk's gradients."""
    bytes_each, dots = operand_bytes(problem), dot_traits(problem)
    size = tf32_copies(bytes_each, target) * bytes_each
    # RWKV-6's read before the update: they are told apart from gated linear attention's in the launch table
    per_chunk = dots - {"rmw_acc"} | {"mixed_sum"} | ({"before"} if "u" in problem.options else set())

    # in 16 bits the scores, too, and decays on their way from one layout to another; fp32 never has all at
    # once
    def shared(config: Config) -> int:
        columns = config.BT + (PADDING if moves(target) else 0)
        more = config.num_stages * bytes_each * config.BT * columns + 16 * config.BK if bytes_each == 2 else 0
        return shared_bytes(config, bytes_each, target) + more
    candidates = over_v(problem.K, problem.V, bytes_each, problem.max_warps, target)
    scan = fitting(candidates, shared, problem, target)
    BT, wide = scan.BT, min(SCORES if halves_all(problem, target) else SCORES_OF_TWO_WAYS, padded(problem.K))
    # both operands, of fp32 two parts of each; the scores; decays on their way (3.4, in chunks of 32 tokens)
    scoring = 2 * bytes_each * BT * wide * (2 if bytes_each == 4 else 1) + 4 * BT ** 2 + 16 * wide
    part = part_length(problem, target, -(-problem.V // scan.BV), BY_DECAY)
    kernels = [over_tokens("gla_sums", problem, dict(BT=BT, BC=CHANNELS),
                           -(-problem.H * problem.K // CHANNELS)),
               over_tokens("gla_scores", problem, dict(BT=BT, BK=wide), problem.H, scoring, per_chunk)]
    if part:
        kernels += [state_launch("gla_alone", scan, problem, shared(scan), dots, part=part),
                    carry_launch(problem, target, part)]
    kernels.append(state_launch("gla_scan", scan, problem, shared(scan), dots, part=part))
    if problem.needs_grad:
        single = scan._replace(num_stages=1)
        narrow, strip = min(GRADS, padded(problem.K)), min(GRADS, padded(problem.V))
        finishing = size * (2 * BT * strip + 2 * narrow * strip + BT * narrow + BT ** 2) + 4 * BT ** 2
        kernels += [state_launch("gla_states", scan, problem, shared(scan), dots, part=part),
                  state_launch("gla_reverse", single, problem, shared(single), dots, part=part),
                  over_tokens("gla_grads", problem, dict(BT=BT, BK=narrow, BV=strip), problem.H, finishing,
                              per_chunk)]
    return tuple(kernels)


def halves_all(problem: Problem, target: Target) -> bool:
    """Whether kernels halve every chunk, see forward.py: in float16; where a prefix has to have the same bits,
    since one reference depends on a chunk's last token; and on cards but Hopper, a choice. There the two ways
    beside each other spill up to 6 KB a thread (compiled for sm_80 with 3.6.0), and nobody has timed them."""
    half = problem.dtype == "float16" and problem.dot == "native"
    return half or problem.invariant or not (is_hopper(target) or target.backend == "interpreter")


SPECS = (over_heads(
    "gla", launches, (
        Op("chunk_gla", "gla", "chunk"),
        Op("fused_recurrent_gla", "gla", "fused_recurrent", ("gk",), family="recurrent"),
        Op("gla", "gla", "auto"),
        Op("chunk_rwkv6", "rwkv6", "chunk", ("u",)),
        Op("fused_recurrent_rwkv6", "rwkv6", "fused_recurrent", ("before", "bonus", "gk"),
           family="recurrent"),
        Op("rwkv6", "rwkv6", "auto", ("u",)))),)
