"""Which launches a chunked delta problem with a decay for each key channel makes. Plain Python: no tensor, no
torch, no triton. Problem.H counts value heads; with b there are two writing vectors, without it there is
one."""
from __future__ import annotations

from flashlin.compat.target import Target, lanes
from flashlin.compat.traits import of_tile, trait_set
from flashlin.compat.versions import release
from flashlin.guards.family import Op, over_heads
from flashlin.guards.plan_types import Launch, Problem, traits_of
from flashlin.kernels import scans
from flashlin.kernels.configs import BLOCK, Config, Strip, over_v, padded
from flashlin.kernels.gla.recipe import halves_all, one_is_proven
from flashlin.kernels.recurrent import recipe as recurrent

# Choices, for speed. Two writing vectors, where they are halved, take chunks of 32: four tiles of 64 rows by
# K would leave a multiprocessor one program. Their scans, and those of chunks that short, have no registers
# to spare for a second stage. In float32, chunks of 32 beside more than 64 channels spill tens of kilobytes a
# thread.
SHORT = 32
WIDE = 64  # of the scores in 16 bits, where a program has a chunk to itself: channels at a time


# Of the gradients in 16 bits, the fastest on an H200 with Triton 3.6.0 (benchmarks/results/kernels-*). It is
# a choice, too, that releases before TIMED keep to 4 warps (3.2 cannot compile 8 for Hopper:
# reshape-outs-32), and waves of 64 lanes, of which 8 have too few registers each (0.8 KB a thread spill,
# compiled for gfx942 with 3.6.0).
OF_ONE, OF_TWO = Strip(64, 64, 8), Strip(32, 64, 4)
# The same of kernels of one reference: KDA, whose rate has no channels, keeps fewest tiles.
BY_ONE, BY_ONE_KDA = Strip(64, 64, 8), Strip(32, 32, 4)
TIMED = (3, 5)


@scans.calm
@recurrent.or_token_by_token
@scans.narrow_where_idle
def launches(problem: Problem, target: Target, narrow: bool) -> tuple[Launch, ...]:
    """Sums, what chunks need, and the scan; for gradients the scan that rebuilds states, the reverse scan,
    and the chunk's gradients."""
    if not halves_all(problem, target):
        # what it leaves to halving needs no tile that Hopper's known issue rules out
        wide = problem._replace(avoid=problem.avoid | trait_set("narrow_grads"))
        by_one = planned(wide, target, narrow, one=True)
        # with gradients, chunks of 64 take 4 % more memory than the halves' of 32 where heads have 64
        # channels
        larger = problem.needs_grad and "b" in problem.options and problem.K <= BLOCK
        fit = by_one[-1].block("BT") == BLOCK <= problem.K and not larger
        if one_is_proven(problem, target, by_one, fit):
            return by_one
    return planned(problem, target, narrow, one=False)


def planned(problem: Problem, target: Target, narrow: bool, one: bool) -> tuple[Launch, ...]:
    """one: those that take chunks which one decay reference serves by it (one_reference.py)."""
    bytes_each, dots = scans.operand_bytes(problem), traits_of(problem, "dot", "rmw_acc")
    size = scans.tf32_copies(bytes_each, target) * bytes_each
    per_chunk = traits_of(problem, "dot", "mixed_sum")
    # where nothing is said, as of a traced call, the kernels that may need more
    two = "b" in problem.options or not {"a", "beta"} & set(problem.options)

    def scanning(config: Config, tall: int = 3, square: int = 2) -> int:
        """tall, square: how many tiles of a chunk's rows by K and by itself are there at a time; without a
        second stage not all of them. Besides, v or do, the state, and rows of v between products, once more
        where warpgroups multiply (3.3 on sm_100, from 3.8 on)."""
        moved = 3 if target.capability >= (9, 0) else 2
        tiles = config.BT * (tall * config.BK + square * config.BT + config.BV)
        return bytes_each * (config.num_stages * tiles + config.BK * config.BV + moved * config.BT
                             * config.BV)

    def reverse(config: Config) -> int:
        return scanning(config, 1 + config.num_stages, 3)
    wide = min(WIDE // (bytes_each // 2), padded(problem.K))
    best = OF_TWO if two else OF_ONE
    warps = min(problem.max_warps, 8 if release(target.triton) >= TIMED and lanes(target.arch) == 32 else 4)
    strips = [Strip(min(16 if bytes_each == 4 else 32, padded(problem.K)), min(32, padded(problem.V)), 4)]
    fits = best.K <= padded(problem.K) and best.V <= padded(problem.V) and best.num_warps <= warps
    if bytes_each == 2 and fits:
        strips = [best, *strips, *([] if two else [best._replace(K=32)])]

    def finishing(BT: int, strip: Strip) -> int:
        tiles = 4 * BT * strip.V + 2 * strip.K * strip.V + 2 * BT * strip.K + 3 * BT ** 2
        return size * tiles + 4 * BT ** 2

    def grads(BT: int, strip: Strip, kernel: str = "dplr_grads") -> Launch:
        shared = finishing(BT, strip)
        if two and kernel == "dplr_grads_one":  # the gradients of two more scores
            shared += 2 * size * BT ** 2
        return scans.over_tokens(kernel, problem, dict(BT=BT, BK=strip.K, BV=strip.V), shared,
                                 per_chunk | narrow_grads(BT, strip), num_warps=strip.num_warps)

    def strip_beside(BT: int) -> Strip:
        good = [strip for strip in strips
                if finishing(BT, strip) <= target.shared and not narrow_grads(BT, strip) & problem.avoid]
        made = {grads(BT, strip): strip for strip in good or strips[-1:]}
        return made[scans.least_spilled(list(made), target)]

    def facts(config: Config) -> frozenset[str]:
        """The facts of a scan's tile and of the tiles that come with it."""
        forward = scans.narrow_state(config) | of_tile("narrow_scores", config.BT, wide)
        return forward | narrow_grads(config.BT, strip_beside(config.BT)) if problem.needs_grad else forward
    longest = 16 if bytes_each == 4 and problem.K > 64 else SHORT if two and not one else BLOCK
    candidates = (config for config in over_v(problem.K, problem.V, bytes_each, problem.max_warps, target)
                  if config.BT <= longest and (config.num_stages == 1 or (config.BT > SHORT and not two)))

    def shared(config: Config) -> int:
        return max(scanning(config), reverse(config._replace(num_stages=1)) if problem.needs_grad else 0)
    scan = scans.fitting(candidates, shared, problem, target, facts)
    BT = scan.BT

    def preparing(kernel: str, width: int, facts: frozenset[str] = frozenset()) -> Launch:
        return scans.over_tokens(kernel, problem, dict(BT=BT, BK=width),
                                 size * 4 * BT * width + 12 * BT ** 2, per_chunk | facts)

    def prepared(rest: str) -> Launch:
        kinds = [preparing("dplr_prepare" + rest, width, of_tile("narrow_scores", BT, width))
                 for width in (wide, max(16, wide // 2))]
        every = [way for launch in kinds for way in (launch, *scans.ways(launch, problem))]
        return scans.least_spilled(every, target)
    if one:
        strip = BY_ONE_KDA if "beta" in problem.options else BY_ONE
        strip = Strip(min(strip.K, padded(problem.K)), min(strip.V, padded(problem.V)),
                      min(strip.num_warps, warps))
        preparation = [preparing("dplr_prepare_one", min(WIDE, padded(problem.K))), prepared("_rest")]
        gradients = [grads(BT, strip, "dplr_grads_one"), grads(BT, strip_beside(BT), "dplr_grads_rest")]
    else:
        preparation, gradients = [prepared("")], [grads(BT, strip_beside(BT))]
    # tall: the scans multiply what they load, and of that no state is too tall for 4 warps, unless 3.0 and
    # 3.1 pipeline them (compiled for sm_90 under 3.0.0, 3.1.0 and 3.2.0).
    # beside what KDA's forward does to each chunk by itself, its scan is short: 4 parts gain nothing there
    worth = scans.WORTH if two or problem.needs_grad else 2 * scans.WORTH
    part = scans.part_length(problem, target, -(-problem.V // scan.BV), scans.BY_TRANSFER, worth)
    # (two writing vectors have no room for a second stage, which narrow states have to have)
    narrow = narrow and not two and scans.can_be_narrow(scan, problem)
    # of whole states a second stage would gain nothing where a card is full
    single = scan._replace(BV=scans.NARROW, num_stages=2) if narrow else scan._replace(num_stages=1)
    if narrow:
        scan = scans.deepest(single, scanning, target)
    kernels = [scans.channel_sums_launch(problem, BT), *preparation]

    def walk(kernel: str, config: Config, shared: int, tall: bool = False) -> Launch:
        return scans.state_launch(kernel, config, problem, shared, dots, tall, part)
    if part:
        kernels += [walk("dplr_alone", single, scanning(single)),
                    scans.carry_launch(problem, target, part, transfer=True)]
    kernels.append(walk("dplr_scan", scan, scanning(scan), scan.num_stages > 1))
    if problem.needs_grad:
        kernels += [walk("dplr_states", single, scanning(single)),
                    walk("dplr_reverse", single, reverse(single)), *gradients]
    return tuple(kernels)


def narrow_grads(BT: int, strip: Strip) -> frozenset[str]:
    """The fact of a tile of gradients, see compat/traits.py."""
    return of_tile("narrow_grads", BT, strip.K, strip.V)


SPECS = (over_heads(
    "dplr", launches, (
        Op("chunk_kda", "kda", "chunk", ("beta",)),
        Op("fused_recurrent_kda", "kda", "fused_recurrent", ("beta", "delta", "gk"), family="recurrent"),
        Op("kda", "kda", "auto", ("beta",)),
        Op("chunk_rwkv7", "rwkv7", "chunk", ("a", "b")),
        Op("rwkv7", "rwkv7", "auto", ("a", "b")),
        Op("chunk_dplr_delta_rule", "dplr_delta_rule", "chunk", ("a", "b")),
        Op("chunk_iplr_delta_rule", "iplr_delta_rule", "chunk", ("a", "b")),
        Op("chunk_gdn2", "gdn2", "chunk", ("a",)),
        Op("fused_recurrent_rwkv7", "rwkv7", "fused_recurrent", ("a", "b", "gk"), family="recurrent"),
        Op("fused_mul_recurrent_rwkv7", "rwkv7", "fused_recurrent", ("a", "b", "gk", "rate"),
           family="recurrent"),
        Op("fused_recurrent_dplr_delta_rule", "dplr_delta_rule", "fused_recurrent", ("a", "b", "gk"),
           family="recurrent"),
        Op("fused_recurrent_iplr_delta_rule", "iplr_delta_rule", "fused_recurrent", ("a", "b"),
           family="recurrent"),
        Op("fused_recurrent_gdn2", "gdn2", "fused_recurrent", ("a", "beta", "delta", "erase", "gk"),
           family="recurrent"))),)
