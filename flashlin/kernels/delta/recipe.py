"""The launches of chunked delta rules on a target. Problem.H is the number of value heads.

Plain Python: this module imports neither torch nor triton.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.compat.traits import trait_set
from flashlin.compat.versions import release
from flashlin.guards.family import Op, Sizes, over_heads
from flashlin.guards.plan_types import Launch, Problem, traits_of
from flashlin.kernels import scans
from flashlin.kernels.configs import BLOCK, Config, is_hopper, over_v, padded, room
from flashlin.kernels.recurrent import recipe as recurrent

STAGES_BACK = 2  # chunks in the ring buffer of the Gluon reverse scan; each needs more memory than in forward


@scans.calm
@recurrent.or_token_by_token
@scans.narrow_where_idle
def launches(problem: Problem, target: Target, narrow: bool) -> tuple[Launch, ...]:
    """Return the launches of a chunked delta rule.

    Forward inverts a matrix for each chunk, then runs the scan. For gradients, a reverse scan computes the
    gradients of states, a scan recomputes the states, and a last kernel computes the other gradients.
    narrow: True for strips of half as many state columns.
    """
    before = "p" in problem.options  # the launch table has separate entries for kernels with p
    bytes_each, per_chunk = scans.operand_bytes(problem), traits_of(problem, "dot", *["before"] * before)
    dots = per_chunk | trait_set("rmw_acc")
    size = scans.tf32_copies(bytes_each, target) * bytes_each

    # On top of ``shared_bytes``, scans need the inverse, a product of its size, p and, for gradients, the
    # rounding error of the inverse.
    def shared(config: Config) -> int:
        squares = config.num_stages + 1 + problem.needs_grad
        p = before * config.num_stages * config.BT * config.BK
        return scans.shared_bytes(config, bytes_each, target) + size * (squares * config.BT ** 2 + p)

    def inverting(BT: int) -> int:  # k, p, and three float32 tiles of 32 x 32
        return size * (1 + before) * BT * wide + 12 * 32 ** 2

    def finishing(strip: int, num_stages: int) -> int:
        return size * (num_stages * (3 * BT * strip + 2 * strip ** 2) + 4 * BT * strip + 2 * BT ** 2
                       + before * BT)
    wide = min(256 // bytes_each, padded(problem.K))
    scan = scans.fitting(over_v(problem.K, problem.V, bytes_each, problem.max_warps, target),
                         lambda config: max(shared(config), inverting(config.BT)), problem, target)
    part = scans.part_length(problem, target, -(-problem.V // scan.BV), scans.BY_TRANSFER)
    narrow, BT = narrow and scans.can_be_narrow(scan, problem), scan.BT
    scan = scan._replace(BV=scans.NARROW) if narrow else scan
    inverse, fast = _overlapped_inverse(problem, target, BT), _overlapped(problem, target, part, BT)
    back = _overlapped(problem, target, part, BT, back=True) if problem.needs_grad else None
    finish = _overlapped_grads(problem, target, BT) if problem.needs_grad else None
    packed = _packed(problem, BT) if problem.varlen else []
    if problem.varlen and not (inverse and fast and (not problem.needs_grad or (back and finish))
                               and scans.ran(packed, problem, target)):
        inverse = fast = back = finish = None
        packed = []
    kernels = [scans.cumsum_launch(problem, BT)] if "g" in problem.options and (packed or not inverse) else []
    kernels += [*packed, *([scans.cumsum_launch(problem, BT, "delta_lines")] if inverse else [])]
    states = scans.deepest(scan, shared, target) if scan.num_stages == 2 and target.stages >= 3 else scan
    # One warp never waits at barriers, so it comes first. Two warps have more registers, in case one spills.
    inverses = [scans.over_tokens("delta_inverse", problem, dict(BT=BT, BK=wide), inverting(BT),
                                  per_chunk, num_warps=warps) for warps in (1, 2)]
    kernels.append(inverse or scans.least_spilled(inverses, target))

    def walk(kernel: str, config: Config, more: int = 0) -> Launch:
        return scans.state_launch(kernel, config, problem, shared(config) + more, dots, part=part)
    if part:
        # with few programs, narrow strips of delta_alone were faster (benchmarks/notes/delta-rule.md)
        alone = _overlapped_alone(problem, target, part, BT) if scans.many(problem, target, part) else None
        # without gradients, heads of 64 get 6 % faster or 22 % slower (benchmarks/notes/delta-rule.md)
        windowed = alone and inverse and "g" in problem.options  # the inverse also writes norms of keys
        if windowed and (back or (not problem.needs_grad and problem.K > BLOCK)):
            # 1 and 4 warps were slower (benchmarks/notes/delta-rule.md)
            facts = scans.over_tokens("delta_facts", problem, dict(BT=BT, BK=min(64, wide)), num_warps=2)
            windows = scans.windows_launch(problem, target, part, BT)
            kernels += [facts, windows] if windows and scans.ran([facts], problem, target) else []
        kernels += [alone or walk("delta_alone", states),
                    scans.carry_launch(problem, target, part, transfer=True)]
    # With p, K from 65 to 128 and 16 bits, registers are scarce. So delta_grads computes half as many
    # channels at a time. On Hopper, delta_scan also gets only one stage (benchmarks/results/kernels-*). On
    # other GPUs two stages spill less than one.
    slim = before and bytes_each == 2 and padded(problem.K) == 128
    forward = scan._replace(num_stages=1) if slim and is_hopper(target) and not narrow else scan
    kernels.append(fast or walk("delta_scan", forward))
    if problem.needs_grad:
        # without narrow states, a second stage needs too many registers (benchmarks/results/kernels-*)
        reverse = scan if narrow else scan._replace(num_stages=1)
        # Some tiles change their layout through shared memory. Since Triton 3.7, a float32 state of 256 rows
        # does so if warpgroups multiply; its memory is counted for every release. Since 3.8, rows of v in 16
        # bits do so, too.
        hopper = (9, 0) <= target.capability < (10, 0)
        moved = (4 - bytes_each) * scan.BK * scan.BV if scan.BK >= 256 and hopper else 0
        moved += 2 * scan.BT * scan.BV if bytes_each == 2 and release(target.triton) >= (3, 8) else 0
        most = room(target)
        ways = [(strip, num_stages) for strip in (most.columns, most.columns // 2, 16)
                for num_stages in most.stages]

        def tile(strip: int) -> dict[str, int]:
            return dict(BT=BT, BK=min(max(16, strip // 2) if slim else strip, padded(problem.K)),
                        BV=min(strip, padded(problem.V)))
        grads = [scans.over_tokens("delta_grads", problem, tile(strip), finishing(strip, num_stages),
                                   per_chunk | trait_set("mixed_sum"), num_stages)
                 for strip, num_stages in ways]
        if narrow or not fast:  # it also restores the states, but with fewer programs than narrow strips
            kernels.append(walk("delta_states", states))
        kernels += [back or walk("delta_reverse", reverse, moved), finish
                    or scans.least_spilled_that_fits(grads, target), *scans.sum_launch(problem, target)]
    return tuple(kernels)


def _overlapped_alone(problem: Problem, target: Target, part: int, BT: int) -> Launch | None:
    """Return the launch of the first step of split sequences in Gluon, or None if it cannot be used."""
    K, BV = problem.K, 64
    groups = 1 if problem.V % (2 * BV) else 2
    tile = {"BT": BT, "BK": K, "BV": BV, "GROUPS": groups, "STAGES": scans.STAGES}
    slot = 2 * BT * (K + 2 * BT + groups * BV) + 4 * BT * 5
    return _in_gluon("delta_overlapped_alone", problem, target, part, tile, scans.STAGES * slot + 1024)


def _packed(problem: Problem, BT: int) -> list[Launch]:
    """Return the launches that list whole chunks of packed sequences and copy the other tokens."""
    return [scans.over_tokens("whole_chunks", problem, {"BT": BT, "BC": 128}, num_warps=1, columns=1),
            scans.over_tokens("copy_tails", problem, {"BT": BT, "BC": 64})]


def _overlapped_inverse(problem: Problem, target: Target, BT: int) -> Launch | None:
    """Return the launch of the kernel of inverses in Gluon, or None if it cannot be used."""
    # At most 80 registers for each thread, so that six programs fit on a multiprocessor. With 72, the kernel
    # took 5 % less time, but a thread spilled up to 130 bytes with Triton 3.9.
    tile = {"BT": BT, "BK": problem.K, "REGISTERS": 80}
    shared = 2 * BT * (problem.K + 6 * 16) + 5120
    return _in_gluon("delta_overlapped_inverse", problem, target, None, tile, shared)


def _overlapped_grads(problem: Problem, target: Target, BT: int) -> Launch | None:
    """Return the launch of the gradients' kernel in Gluon, or None if it cannot be used."""
    V, tile = problem.V, {"BT": BT, "BK": 32, "BV": problem.V}
    shared = 2 * (3 * BT * V + 4 * 32 * (V + BT) + 2 * BT * BT) + 1024
    return _in_gluon("delta_overlapped_grads", problem, target, None, tile, shared) if V in (64, 128) else None


def _overlapped(problem: Problem, target: Target, part: int, BT: int, back: bool = False) -> Launch | None:
    """Return the launch of the forward scan in Gluon, or None if it cannot be used.

    back: True for the reverse scan instead.
    """
    K, BV, groups = problem.K, 64, scans.groups_of(problem, target, part)
    slot = 2 * BT * (2 * K + BT * (1 + back) + groups * BV) + 4 * BT * 5
    stages, scores = STAGES_BACK if back else scans.STAGES, 2 * BT * BT * (groups if back else 2)
    shared = stages * slot + groups * 2 * BV * (BT + back * K) + scores + 1024
    return _in_gluon("delta_overlapped_back" if back else "delta_overlapped", problem, target, part,
                     {"BT": BT, "BK": K, "BV": BV, "GROUPS": groups, "STAGES": stages}, shared)


def _in_gluon(kernel: str, problem: Problem, target: Target, part: int | None, tile: dict[str, int],
              shared: int) -> Launch | None:
    """Return the launch of a kernel in Gluon, or None. These kernels need chunks of 64 tokens and no p."""
    if tile["BT"] != BLOCK or "p" in problem.options:
        return None
    packed = kernel != "delta_overlapped_alone"
    return scans.overlapped(kernel, problem, target, part, tile, shared, packed)


def two_steps(sizes: Sizes) -> Sizes:
    """Return sizes with two rows per token, for a delta product of two steps (default of fla's layer)."""
    return sizes._replace(T=2 * sizes.T)


SPECS = (over_heads(
    "delta", launches, (
        Op("chunk_delta_rule", "delta_rule", "chunk"),
        Op("fused_recurrent_delta_rule", "delta_rule", "fused_recurrent", ("beta", "delta"),
           family="recurrent"),
        Op("delta_rule", "delta_rule", "auto"),
        Op("chunk_gated_delta_rule", "gated_delta_rule", "chunk", ("g",)),
        Op("fused_recurrent_gated_delta_rule", "gated_delta_rule", "fused_recurrent", ("beta", "delta", "g"),
           family="recurrent"),
        Op("gated_delta_rule", "gated_delta_rule", "auto", ("g",)),
        Op("chunk_gated_delta_product", "gated_delta_product", "chunk", ("g",), counted=two_steps),
        Op("fused_recurrent_gated_delta_product", "gated_delta_product", "fused_recurrent",
           ("beta", "delta", "g"), family="recurrent", counted=two_steps),
        Op("chunk_comba", "comba", "chunk", ("g", "p")),
        Op("fused_recurrent_comba", "comba", "fused_recurrent", ("a", "beta", "delta", "g", "undecayed"),
           family="recurrent"),
        Op("chunk_gdn", "gated_delta_rule", planned_as="chunk_gated_delta_rule"),
        Op("fused_recurrent_gdn", "gated_delta_rule", planned_as="fused_recurrent_gated_delta_rule"))),)
