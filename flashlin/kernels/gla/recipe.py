"""Which launches a problem with a decay for each key channel makes; RWKV-6 has u among its options. Plain
Python: no tensor, no torch, no triton."""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.compat.versions import release
from flashlin.guards.family import Op, over_heads
from flashlin.guards.plan_types import Launch, Problem, operands_of, traits_of
from flashlin.kernels import scans
from flashlin.kernels.configs import Config, is_hopper, over_v, padded
from flashlin.kernels.recurrent import recipe as recurrent

# Where a program has a chunk to itself. Of the scores, channels at a time; of the gradients, which hold half
# a dozen tiles of a chunk's rows and would spill with more, channels and columns of v at a time; those of one
# reference take twice the columns. With 8 warps and 64 neither is faster (benchmarks/results/kernels-*).
SCORES, GRADS = 64, 32
TRIED = (3, 6)  # the first release under which kernels of one reference have been started


@scans.calm
@recurrent.or_token_by_token
def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Sums, scores and the scan; for gradients the scan that rebuilds states, the reverse scan, and the
    chunk's gradients."""
    if not halves_all(problem, target):
        by_one = planned(problem, target, one=True)
        if one_is_proven(problem, target, by_one):
            return by_one
    return planned(problem, target, one=False)


def planned(problem: Problem, target: Target, one: bool) -> tuple[Launch, ...]:
    """one: those that take chunks which one decay reference serves by it (one_reference.py)."""
    bytes_each, dots = scans.operand_bytes(problem), traits_of(problem, "dot", "rmw_acc")
    size = scans.tf32_copies(bytes_each, target) * bytes_each
    # RWKV-6's read before the update: they are told apart from gated linear attention's in the launch table
    per_chunk = traits_of(problem, "dot", "mixed_sum", *["before"] * ("u" in problem.options))

    # in 16 bits the scores, too, and decays on their way from one layout to another; fp32 never has all at
    # once, but of 16 tokens, unpadded, 3.8 moves k from one layout to another beside more than 16 columns of v
    def shared(config: Config) -> int:
        columns = config.BT + (scans.PADDING if scans.moves(target) else 0)
        more = (config.num_stages * bytes_each * config.BT * columns + 16 * config.BK if bytes_each == 2
                else 64 * config.BK * (columns == 16 < config.BV))
        return scans.shared_bytes(config, bytes_each, target) + more
    candidates = over_v(problem.K, problem.V, bytes_each, problem.max_warps, target)
    scan = scans.fitting(candidates, shared, problem, target)
    BT, wide = scan.BT, min(SCORES, padded(problem.K))
    # both operands, of fp32 two parts of each; the scores; decays on their way (3.4, in chunks of 32 tokens)
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
        # on Hopper in 16 bits a second stage takes 0.32 ms for 0.39 (benchmarks/NOTES.md, change 6)
        two = is_hopper(target) and bytes_each == 2 and release(target.triton) >= TRIED
        single = scan if two else scan._replace(num_stages=1)
        kernels += [walk("gla_states", scan), walk("gla_reverse", single)]
        kernels += ([grads("gla_grads_one", 2 * GRADS), grads("gla_grads_rest", GRADS)] if one
                    else [grads("gla_grads", GRADS)])
    return tuple(kernels)


def halves_all(problem: Problem, target: Target) -> bool:
    """Whether kernels halve every chunk, see one_reference.py: in float16; in float32, where sums of up to 120
    bits round by more than halving loses, 4e-6 of a gradient for 2e-7 (the interpreter, which knows no
    bfloat16, does not); where a prefix has to have the same bits, since one reference depends on a chunk's last
    token; and on cards but Hopper, where nobody has timed it."""
    if problem.invariant or operands_of(problem) == "float16":
        return True
    return target.backend != "interpreter" and not (is_hopper(target) and scans.operand_bytes(problem) == 2)


def one_is_proven(problem: Problem, target: Target, launches: tuple[Launch, ...], fit: bool = True) -> bool:
    """Whether these launches, of one decay reference, may be started: if they fit, once its own have run on
    such a card."""
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
           family="recurrent"),
        Op("rwkv6", "rwkv6", "auto", ("u",)))),)
