"""Recipe of gated linear attention and RWKV-6: the launches of a problem, in plain Python.

It needs neither torch nor triton. RWKV-6 has "u" among the problem's options.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.compat.versions import release
from flashlin.guards.family import Op, over_heads
from flashlin.guards.plan_types import Launch, Problem, operands_of, traits_of
from flashlin.kernels import scans
from flashlin.kernels.configs import Config, is_hopper, over_v, padded
from flashlin.kernels.recurrent import recipe as recurrent

# Tiles of the kernels with one program per chunk. SCORES: channels at a time. GRADS: channels and columns of
# v at a time; these kernels have half a dozen tiles of a chunk's rows and would spill with wider ones. The
# gradients with one decay reference use twice the columns. Neither kernel is faster with 8 warps and 64
# columns (benchmarks/results/kernels-*).
SCORES, GRADS = 64, 32
TRIED = (3, 6)  # the first Triton release with which kernels for one decay reference have run


@scans.calm
@recurrent.or_token_by_token
def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the launches of a problem: decay sums, scores, the scan and, if needed, the backward.

    The backward has a scan that recomputes the states, a reverse scan, and the gradients of each chunk.
    """
    if not halves_all(problem, target):
        by_one = planned(problem, target, one=True)
        if one_is_proven(problem, target, by_one):
            return by_one
    return planned(problem, target, one=False)


def planned(problem: Problem, target: Target, one: bool) -> tuple[Launch, ...]:
    """Return the launches of a problem with or without the kernels for one decay reference.

    one: whether chunks that fit one decay reference use it (``one_reference.py``).
    """
    bytes_each, dots = scans.operand_bytes(problem), traits_of(problem, "dot", "rmw_acc")
    size = scans.tf32_copies(bytes_each, target) * bytes_each
    # The kernels of RWKV-6 read before the update. This trait separates them from those of gated linear
    # attention in the launch table.
    per_chunk = traits_of(problem, "dot", "mixed_sum", *["before"] * ("u" in problem.options))

    # In 16 bits, a scan also needs shared memory for the scores and for decays that change their layout. In
    # fp32 these are never in shared memory at the same time. But with chunks of 16 tokens in rows without
    # padding, Triton 3.8 changes the layout of k through shared memory if there are more than 16 columns of
    # v.
    def shared(config: Config) -> int:
        columns = config.BT + (scans.PADDING if scans.moves(target) else 0)
        more = (config.num_stages * bytes_each * config.BT * columns + 16 * config.BK if bytes_each == 2
                else 64 * config.BK * (columns == 16 < config.BV))
        return scans.shared_bytes(config, bytes_each, target) + more
    candidates = over_v(problem.K, problem.V, bytes_each, problem.max_warps, target)
    scan = scans.fitting(candidates, shared, problem, target)
    BT, wide = scan.BT, min(SCORES, padded(problem.K))
    # The shared memory of the scores' kernel: both operands (two halves of each in fp32), the scores, and
    # decays that change their layout (seen with Triton 3.4 and chunks of 32 tokens).
    scoring = 2 * bytes_each * BT * wide * (2 if bytes_each == 4 else 1) + 4 * BT ** 2 + 16 * wide

    def grads(kernel: str, columns: int) -> Launch:
        narrow, strip = min(GRADS, padded(problem.K)), min(columns, padded(problem.V))
        finishing = size * (2 * BT * strip + 2 * narrow * strip + BT * narrow + BT ** 2) + 4 * BT ** 2
        return scans.over_tokens(kernel, problem, dict(BT=BT, BK=narrow, BV=strip), finishing, per_chunk)
    part = scans.part_length(problem, target, -(-problem.V // scan.BV), scans.BY_DECAY)
    scores = scans.over_tokens("gla_scores", problem, dict(BT=BT, BK=wide), scoring, per_chunk)
    kernels = ([scores._replace(kernel="gla_scores_one"), scores._replace(kernel="gla_scores_rest")] if one
               else [scans.channel_sums_launch(problem, BT), scores])

    def walk(kernel: str, config: Config) -> Launch:
        return scans.state_launch(kernel, config, problem, shared(config), dots, part=part)
    if part:
        kernels += [walk("gla_alone", scan), scans.carry_launch(problem, target, part)]
    kernels.append(walk("gla_scan", scan))
    if problem.needs_grad:
        # On Hopper in 16 bits a second stage lowers the time of gla_reverse from 0.39 to 0.32 ms
        # (benchmarks/notes/decay-per-channel.md).
        two = is_hopper(target) and bytes_each == 2 and release(target.triton) >= TRIED
        single = scan if two else scan._replace(num_stages=1)
        kernels += [walk("gla_states", scan), walk("gla_reverse", single)]
        kernels += ([grads("gla_grads_one", 2 * GRADS), grads("gla_grads_rest", GRADS)] if one
                    else [grads("gla_grads", GRADS)])
    return tuple(kernels)


def halves_all(problem: Problem, target: Target) -> bool:
    """Return True if kernels compute all chunks by halving and never with one decay reference.

    ``one_reference.py`` describes both methods. Halving is used in four cases:

    1. float16.
    2. float32. There the sums of up to 120 bits have rounding errors that exceed those of halving: 4e-6 of a
       gradient instead of 2e-7. The interpreter is an exception. It computes bfloat16 wrongly, so there the
       kernels for one decay reference are tested in float32.
    3. Problems where a prefix must give the same bits, since one reference depends on a chunk's last token.
    4. GPUs other than Hopper, because one reference has not been timed there.
    """
    if problem.invariant or operands_of(problem) == "float16":
        return True
    return target.backend != "interpreter" and not (is_hopper(target) and scans.operand_bytes(problem) == 2)


def one_is_proven(problem: Problem, target: Target, launches: tuple[Launch, ...], fit: bool = True) -> bool:
    """Return True if these launches for one decay reference may run.

    ``fit`` must be True, Triton must be 3.6 or later, and the kernels for one decay reference must have run
    on this kind of GPU before. The interpreter may always run them.

    fit: the result of further conditions that the caller checks, such as the chunk length for DPLR.
    """
    if target.backend == "interpreter":
        return True
    own = [launch for launch in launches if launch.kernel.endswith(("_one", "_rest"))]
    return fit and release(target.triton) >= TRIED and all(
        scans.may_start(launch, problem, target) for launch in own)


SPECS = (over_heads(
    "gla", launches, (
        Op("chunk_gla", "gla", "chunk"),
        Op("fused_recurrent_gla", "gla", "fused_recurrent", ("gk",), family="recurrent"),
        Op("gla", "gla", "auto"),
        Op("chunk_rwkv6", "rwkv6", "chunk", ("u",)),
        Op("fused_recurrent_rwkv6", "rwkv6", "fused_recurrent", ("before", "bonus", "gk"),
           family="recurrent"), Op("rwkv6", "rwkv6", "auto", ("u",)))),)
