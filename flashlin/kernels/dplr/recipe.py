"""Recipe of the delta families with a decay for each key channel, in plain Python without torch or triton.

The problem's H is the number of value heads. With the option "b" (DPLR) there are two vectors, k and b, that
write to the state; without it there is only k.
"""
from __future__ import annotations

from flashlin.compat.target import Target, lanes
from flashlin.compat.traits import of_tile, trait_set
from flashlin.compat.versions import is_unreleased, release
from flashlin.guards.family import Op, over_heads
from flashlin.guards.plan_types import Launch, Problem, traits_of
from flashlin.kernels import scans
from flashlin.kernels.configs import BLOCK, Config, Strip, is_hopper, over_v, padded
from flashlin.kernels.gla.recipe import halves_all, one_is_proven
from flashlin.kernels.recurrent import recipe as recurrent

# Choices for speed. With two writing vectors, halved chunks have HALVED tokens, because four tiles of 64 rows
# by K would leave a multiprocessor only one program. With one, they have HALVED tokens where longer ones
# spill (AMPERE_SPILLS). The scans of two writing vectors, and of chunks that short, have no registers for a
# second stage. In float32, chunks of 32 tokens with more than 64 channels spill tens of kilobytes per thread.
HALVED = 32
WIDE = 64  # channels at a time of the scores' kernel in 16 bits, which has one program per chunk

# Tiles of the gradients' kernel in 16 bits. OF_ONE, for one writing vector, is the fastest on an H200 with
# Triton 3.6.0 (benchmarks/results/kernels-*). OF_TWO, for two, was the fastest before HALF. Releases before
# TIMED use 4 warps, except 3.4 on Hopper. Known issues exclude 8 warps there before 3.4. GPUs with 64 lanes
# per warp also use 4. There 8 warps have too few registers each: 0.8 KB per thread spill, compiled for gfx942
# with 3.6.0.
OF_ONE, OF_TWO = Strip(64, 64, 8), Strip(32, 64, 4)
# Tiles that were only timed on Hopper (benchmarks/results/chunk-programs-*, halved-tiles-*): SMALL for heads
# of up to 64 with one writing vector, HALF for two. With 3.4, OF_ONE spills up to 2.5 KB there, and SMALL
# nothing. Before 3.4, HALF with 32 columns spills least for one writing vector.
SMALL, HALF = Strip(32, 32, 8), Strip(16, 64, 4)
TIMED, EIGHT_WARPS = (3, 5), (3, 4)
# Releases with which halved chunks of 64 tokens with one writing vector spill 1.1 to
# 2.6 KB on A100 and Orin (compiled). They are replaced by chunks of 32. The same holds on Hopper before
# EIGHT_WARPS, and for packed sequences with 3.9.
AMPERE_SPILLS = ((3, 3), (3, 4))
# With FEW segments or fewer, transfers take longer than a scan of whole sequences. Then windows (windows.py)
# are used only with a backward, for gates that are computed before, and for segments of LONG tokens or more.
FEW, LONG = 5, 1024
RAW = {"A_log", "dt_bias"}  # options of calls for which raw.py computes norms and gate


@scans.calm
@recurrent.or_token_by_token
@scans.narrow_where_idle
def launches(problem: Problem, target: Target, narrow: bool) -> tuple[Launch, ...]:
    """Return the launches of a problem: decay sums, operands of chunks, the scan and the backward.

    Only a problem with gradients has a backward. The backward has a scan that recomputes the states, a
    reverse scan, and the gradients of each chunk.

    narrow: whether scans use strips of ``scans.NARROW`` columns of the state.
    """
    asked = RAW.intersection(problem.options)
    problem = problem._replace(options=tuple(name for name in problem.options if name not in RAW))
    whole = _whole(problem, target, narrow)
    if _writes_twice(problem) or problem.portable or problem.K > 2 * WIDE or halves_all(problem, target):
        return whole
    short = planned(problem, target, narrow, "bounded" if asked else "short")
    short = _beside(problem, short, whole) if problem.needs_grad else short
    # For gates that are computed before, short chunks of split sequences are slower without windows
    # (1x8192x2x128: 170 us instead of 120). They are not timed if the scan is in plain Triton.
    kernels, split = {one.kernel for one in short}, any(one.part for one in short)
    suits = asked or ("dplr_overlapped" in kernels and ("dplr_windows" in kernels or not split))
    return short if short and suits and scans.ran(short, problem, target) else whole


def _writes_twice(problem: Problem) -> bool:
    """Return True if two vectors write to the state, or if the options do not tell, as in a traced call.

    Two writing vectors may need more of everything.
    """
    return "b" in problem.options or not {"a", "beta"} & set(problem.options)


def _whole(problem: Problem, target: Target, narrow: bool) -> tuple[Launch, ...]:
    """Return the launches of a problem in chunks of up to 64 tokens."""
    if not halves_all(problem, target):
        # The kernels for the remaining chunks can choose other tiles, so they always avoid the tiles of the
        # known issue hopper-narrow-grads.
        wide = problem._replace(avoid=problem.avoid | trait_set("narrow_grads"))
        by_one = planned(wide, target, narrow, "one")
        # With gradients and heads of 64 channels, chunks of 64 tokens would use 4 % more memory than halved
        # chunks of 32 tokens.
        larger = problem.needs_grad and "b" in problem.options and problem.K <= BLOCK
        fit = by_one[-1].block("BT") == BLOCK <= problem.K and not larger
        if one_is_proven(problem, target, by_one, fit):
            return by_one
    return planned(problem, target, narrow, "halves")


def _beside(problem: Problem, short: tuple[Launch, ...], whole: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """Return the launches of a backward whose scans have chunks of 16 tokens; none if they cannot be used.

    The gradients of chunks have 64 tokens. Only scans in Gluon store the states of such chunks. If sequences
    are split, scans in plain Triton compute the segments' transfers, and chunks of 16 tokens make them slow.

    problem: the problem of both. short, whole: the launches of a problem in chunks of 16 tokens, and of 64.
    """
    scanned = {launch.kernel for launch in short}
    long = {launch.kernel: launch for launch in whole}
    finishing = long.get("dplr_overlapped_grads") or long.get("dplr_grads_one")
    if (finishing is None or finishing.block("BT") != BLOCK
            or (any(launch.part for launch in short) and "dplr_windows" not in scanned)
            or not {"dplr_overlapped", "dplr_overlapped_back"} <= scanned):
        return ()
    sums = scans.over_tokens("dplr_sums", problem, dict(BT=BLOCK, BK=min(32, padded(problem.K))), num_warps=2)
    return *short, sums, finishing, long["dplr_grads_rest"]


def planned(problem: Problem, target: Target, narrow: bool, kind: str) -> tuple[Launch, ...]:
    """Return the launches of a problem with one kind of kernels.

    narrow: whether scans use strips of ``scans.NARROW`` columns of the state.
    kind: ``halves`` if all chunks are computed by halving. ``one`` if chunks that fit one decay reference use
        it (``one_reference.py``). ``short`` if the kernel of ``raw.py`` prepares chunks of 16 tokens, and
        ``bounded`` if these chunks always fit. The launches of the last two compute no gradients of chunks.
    """
    short = kind in ("short", "bounded")
    bytes_each, dots = scans.operand_bytes(problem), traits_of(problem, "dot", "rmw_acc")
    size = scans.tf32_copies(bytes_each, target) * bytes_each
    per_chunk, two = traits_of(problem, "dot", "mixed_sum"), _writes_twice(problem)

    def scanning(config: Config, tall: int = 3, square: int = 2) -> int:
        """Return the bytes of shared memory that a scan needs.

        tall, square: numbers of tiles [BT, BK] and [BT, BT] that are in shared memory at the same time.
            With one stage Triton reuses buffers, so a kernel may load more tiles than these.

        Other buffers are v or do, the state, and rows of v between products. If warpgroups multiply (Triton
        3.3 on sm_100, and 3.8 and later), such rows need one more buffer.
        """
        moved = 3 if target.capability >= (9, 0) else 2
        tiles = config.BT * (tall * config.BK + square * config.BT + config.BV)
        return bytes_each * (config.num_stages * tiles + (config.BK + moved * config.BT) * config.BV)

    def reverse(config: Config) -> int:
        return scanning(config, 1 + config.num_stages, 3)
    wide = min(WIDE // (bytes_each // 2), padded(problem.K))
    hopper, version = is_hopper(target), release(target.triton)
    old = hopper and version < EIGHT_WARPS + (1,) * is_unreleased(target.triton)
    eight = lanes(target.arch) == 32 and (not old if hopper else version >= TIMED)
    warps = min(problem.max_warps, 8 if eight else 4)
    small = problem.K <= BLOCK and hopper
    best = SMALL if small or (hopper and version < TIMED) else OF_ONE
    if two or old:
        best = OF_TWO if not hopper else HALF._replace(V=64 if two else 32)
    narrow_strip = Strip(min(16 if bytes_each == 4 else 32, padded(problem.K)), min(32, padded(problem.V)), 4)
    strips, narrowest = [narrow_strip], narrow_strip._replace(K=16)
    fits = best.K <= padded(problem.K) and best.V <= padded(problem.V) and best.num_warps <= warps
    if bytes_each == 2 and fits:
        strips = [best, narrow_strip, *([] if two else [best._replace(K=32)])]

    def finishing(BT: int, strip: Strip) -> int:
        tiles = 4 * BT * strip.V + 2 * strip.K * strip.V + 2 * BT * strip.K + 3 * BT ** 2
        return size * tiles + 4 * BT ** 2

    def grads(BT: int, kernel: str = "dplr_grads", strips: list[Strip] = strips) -> Launch:
        # With one decay reference and two writing vectors there are two more gradients of scores.
        more = 2 * size * BT ** 2 if two and kernel == "dplr_grads_one" else 0
        good = [strip for strip in strips if finishing(BT, strip) <= target.shared
                and not narrow_grads(BT, strip) & problem.avoid] or strips[-1:]
        made = [scans.over_tokens(kernel, problem, dict(BT=BT, BK=strip.K, BV=strip.V),
                                  finishing(BT, strip) + more, per_chunk | narrow_grads(BT, strip),
                                  num_warps=strip.num_warps) for strip in [*good, narrowest]]
        # The narrowest tile needs the most steps and the fewest registers, so it is the last candidate.
        last = [] if narrow_grads(BT, narrowest) & problem.avoid else made[-1:]
        return scans.least_spilled([*made[:-1], *others(made[:-1]), *last], target)

    def others(launches: list[Launch]) -> list[Launch]:
        return [way for launch in launches for way in scans.ways(launch, problem)]

    def facts(config: Config) -> frozenset[str]:
        """Return the traits of a scan's tile, and of the score and gradient tiles for the same chunks."""
        forward = scans.narrow_state(config) | of_tile("narrow_scores", config.BT, wide)
        backward = grads(config.BT).traits & trait_set("narrow_grads") if problem.needs_grad else frozenset()
        return forward | backward
    spills = old or (hopper and problem.varlen and version[:2] == (3, 9)) or (
        target.capability in ((8, 0), (8, 7)) and version[:2] in AMPERE_SPILLS)
    halved = kind == "halves" and (two or (spills and bytes_each == 2))
    longest = 16 if short or (bytes_each == 4 and problem.K > 64) else HALVED if halved else BLOCK
    # With two warps, strips of 64 columns of a state of 128 rows spill 1.2 to 2.4 KB per thread, strips of 32
    # at most 0.3 KB (compiled for sm_100 with 3.7.1). Sequences are then split less often, because a scan has
    # twice as many programs. Neither was timed.
    few, large = problem.max_warps < 4, problem.K > 2 * WIDE
    most = 32 if few and problem.K > WIDE else 64
    if version[:2] == (3, 4) and target.capability >= (10, 0) and (large or (few and two and most == 32)):
        most = 16  # 32 columns spill 1.0 to 20 KB (compiled for sm_100 and sm_120)
        longest = min(longest, 16) if few and large else longest
    candidates = (config._replace(BV=min(config.BV, most))
                  for config in over_v(problem.K, problem.V, bytes_each, problem.max_warps, target)
                  if config.BT <= longest and (config.num_stages == 1 or (config.BT > HALVED and not two)))

    def shared(config: Config) -> int:
        return max(scanning(config), reverse(config._replace(num_stages=1)) if problem.needs_grad else 0)
    scan = scans.fitting(candidates, shared, problem, target, facts)
    BT = scan.BT

    def preparing(kernel: str, width: int, facts: frozenset[str] = frozenset(), num_warps: int = 4) -> Launch:
        return scans.over_tokens(kernel, problem, dict(BT=BT, BK=width), size * 4 * BT * width + 12 * BT ** 2,
                                 per_chunk | facts, num_warps=num_warps)

    def prepared(kernel: str, num_warps: int = 4) -> Launch:
        kinds = [preparing(kernel, width, of_tile("narrow_scores", BT, width), num_warps)
                 for width in dict.fromkeys((wide, max(16, wide // 2), 16))]
        return scans.least_spilled([way for one in kinds for way in (one, *others([one]))], target)
    if short:
        tile = dict(BT=BT, BK=min(WIDE, padded(problem.K)), BOUNDED=int(kind == "bounded"),
                    REGISTERS=168 if target.backend == "cuda" else 0)
        # Triton 3.8 needs 4,608 bytes of shared memory, earlier releases at most 4,096.
        preparation = [scans.over_tokens("dplr_prepare_raw", problem, tile, 5 * 1024, per_chunk, num_warps=2)]
        gradients = []
        scan = scans.deepest(scan, scanning, target)
    elif kind == "one":
        # KDA has one rate for all channels, so it needs the fewest tiles.
        strip = narrow_strip if "beta" in problem.options else SMALL if small and not two else OF_ONE
        strip = Strip(min(strip.K, padded(problem.K)), min(strip.V, padded(problem.V)),
                      min(strip.num_warps, warps))
        preparation = [preparing("dplr_prepare_one", min(WIDE, padded(problem.K))),
                       prepared("dplr_prepare_rest", warps if two else 4)]
        overlapped = None if two else _overlapped_grads(problem, target, BT)
        # For two writing vectors, 8 warps and narrow tiles were the fastest if no chunk fits.
        rest = [narrow_strip._replace(num_warps=warps)] if two else strips
        gradients = [overlapped or grads(BT, "dplr_grads_one", [strip]), grads(BT, "dplr_grads_rest", rest)]
    else:
        preparation, gradients = [prepared("dplr_prepare")], [grads(BT)]
    def split(worth: int) -> int:
        return scans.part_length(problem, target, -(-problem.V // scan.BV), scans.BY_TRANSFER, worth)
    part = split(scans.WORTH) if short else 0
    windows = None
    if problem.T > FEW * part or (kind == "short" and problem.needs_grad and part >= LONG):
        windows = scans.windows_launch(problem, target, part, BT)
    if not windows:
        # KDA's forward has a higher ``worth``, because it spends most of its time in the kernel that prepares
        # chunks. Its scan takes little time, so a split into 4 segments gains nothing.
        part = split(scans.WORTH if two or problem.needs_grad else 2 * scans.WORTH)
    # Narrow states need a second stage, for which two writing vectors leave no registers.
    narrow = narrow and not two and scans.can_be_narrow(scan, problem)
    # With whole states, a second stage would gain nothing on a busy GPU.
    single = scan._replace(BV=scans.NARROW, num_stages=2) if narrow else scan._replace(num_stages=1)
    scan = scans.deepest(single, scanning, target) if narrow else scan
    kernels = [*([] if short else [scans.channel_sums_launch(problem, BT)]), *preparation,
               *([windows] if windows else [])]

    # ``tall`` marks scans for which the known issue tall-state-32 may crash the compiler. These scans
    # multiply operands as they were loaded, so 4 warps crash only in a pipelined loop (several stages) of
    # Triton 3.0 or 3.1. This was compiled for sm_90 with 3.0.0, 3.1.0 and 3.2.0.
    def walk(kernel: str, config: Config, shared: int, tall: bool = False) -> Launch:
        return scans.state_launch(kernel, config, problem, shared, dots, tall, part)
    single = scans.deepest(single, reverse, target) if part and short else single
    if part:
        kernels += [walk("dplr_alone", single, scanning(single)),
                    scans.carry_launch(problem, target, part, transfer=True)]
    fast = _overlapped(problem, target, part, BT, two)
    kernels.append(fast or walk("dplr_scan", scan, scanning(scan), scan.num_stages > 1))
    if problem.needs_grad:
        if not fast:
            kernels.append(walk("dplr_states", single, scanning(single)))
        back = _overlapped(problem, target, part, BT, two, back=True)
        if part or not back:  # split sequences always need dplr_reverse, with ALONE
            if two and large and hopper:  # 32 columns with 4 warps spill 1.1 to 2.3 KB
                single = single._replace(num_warps=warps) if version >= TIMED else single._replace(BV=16)
            kernels.append(walk("dplr_reverse", single, reverse(single)))
        kernels += [*([back] if back else []), *gradients]
    return tuple(kernels)


def _overlapped(problem: Problem, target: Target, part: int, BT: int, two: bool,
                back: bool = False) -> Launch | None:
    """Return the launch of the forward scan in Gluon, or None if it cannot be used.

    Backward also uses it, to recompute the states. Then it needs less memory.

    back: True for the reverse scan instead. It supports one writing vector.
    """
    K, BV, groups = problem.K, 64, scans.groups_of(problem, target, part)
    slot = 2 * BLOCK * ((3 + two) * K + (2 + two + back) * BT + groups * BV) + 4 * K * BLOCK // BT
    fixed = groups * BV * (2 * BLOCK + 2 * K if back else 4 * BLOCK) + 1024
    stages = min(scans.STAGES, (target.shared - fixed) // slot)
    if stages < 2 or BT not in (16, BLOCK) or problem.T % BLOCK or (two and back):
        return None
    return scans.overlapped("dplr_overlapped_back" if back else "dplr_overlapped", problem, target, part,
                            {"BT": BT, "BK": K, "BV": BV, "GROUPS": groups, "STAGES": stages},
                            stages * slot + fixed)


def _overlapped_grads(problem: Problem, target: Target, BT: int) -> Launch | None:
    """Return the launch of the gradients' kernel in Gluon, or None if it cannot be used."""
    K, V, BK = problem.K, problem.V, 32
    if BT != BLOCK or K not in (64, 128) or V not in (64, 128):
        return None
    shared = 2 * (3 * BT * V + 4 * BK * V + 2 * BT * (BT + BK)) + 4 * BT * BK + 1024
    return scans.overlapped("dplr_overlapped_grads", problem, target, None, {"BT": BT, "BK": BK, "BV": V},
                            shared)


def narrow_grads(BT: int, strip: Strip) -> frozenset[str]:
    """Return the trait "narrow_grads" if it applies to a tile of the gradients' kernel.

    ``compat/traits.py`` defines the trait.

    BT: tokens of a chunk.
    """
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
