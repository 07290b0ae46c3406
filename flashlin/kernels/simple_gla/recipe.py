"""Recipe of the scalar-decay family: the launches of a problem, in plain Python without torch or triton."""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.compat.versions import release
from flashlin.guards.family import Op, Sizes, over_heads
from flashlin.guards.plan_types import Launch, Problem, traits_of
from flashlin.kernels import scans
from flashlin.kernels.configs import BLOCK, Config, Strip, is_hopper, over_k, over_v, padded
from flashlin.kernels.recurrent import recipe as recurrent

# Tiles of the gradients' kernels by the bytes of an operand, best first. If K exceeds 64, tiles of 64
# channels spill 700 bytes per thread except on Hopper. OF_GROUPS is for heads that share q and k. There the
# sums over heads also stay in registers, and 8 warps have twice as many registers as 4 (compiled for five
# GPUs with Triton 3.6.0).
OF_HEADS = {2: (Strip(64, 64, 4), Strip(32, 64, 4), Strip(32, 32, 4)),
            4: (Strip(32, 32, 4), Strip(32, 16, 4), Strip(16, 16, 4))}
OF_GROUPS = {2: (Strip(128, 64, 8), Strip(64, 32, 4), Strip(32, 32, 4)),
             4: (Strip(32, 16, 4), Strip(16, 16, 4))}
# Shared memory in bytes for storing the state's gradient before Triton 3.3 (at most 11 KB when compiled for
# five head sizes and three GPUs with 3.2.0).
ON_ITS_WAY = 12288
# Up to this many tokens the Gluon scan is faster on whole sequences: at 8x1024x8x64 it takes 25 us of GPU
# time, and 30 us with 4 segments (benchmarks/results/parts-*). Whole sequences also need less memory.
WHOLE = 1024
# Without a gate, the backward is three scans in a row. They leave most of a GPU idle if there are few heads.
# The kernels for a gate are two scans and one kernel over all chunks, so sequences of SHORT to WHOLE tokens
# use them as well. Shorter ones keep the three scans, so that trials of the quick cases also run those.
SHORT = 512
# A bound on registers lets two programs share a multiprocessor, each with four warps that multiply and one
# that loads. Without a bound, one program occupies all registers.
HALF_OF_REGISTERS, ALL_REGISTERS = {"REGISTERS": 128}, {"REGISTERS": 0}
HEADS = 16  # the largest number of heads over which one program sums dq and dk


@scans.calm
@scans.narrow_where_idle
def launches(problem: Problem, target: Target, narrow: bool) -> tuple[Launch, ...]:
    """Return the launches of a problem: sums of decays, forward, and backward if gradients are needed.

    The token-by-token forward has no backward of its own, so it uses the chunked one.

    narrow: whether scans use strips of ``scans.NARROW`` columns of the state.
    """
    if problem.mode == "auto":  # the launches depend on the mode, which a remedy chooses
        return ()
    bytes_each = scans.operand_bytes(problem)
    dots = traits_of(problem, "dot", "rmw_acc", *{"v_first"} & set(problem.options))
    gated = "g" in problem.options

    def shared(config: Config) -> int:
        return scans.shared_bytes(config, bytes_each, target)

    def stored(config: Config) -> int:
        """Return the shared bytes of a scan that stores the state's gradient (more before Triton 3.3)."""
        more = bytes_each == 2 and release(target.triton) < (3, 3) and not is_hopper(target)
        return shared(config) + ON_ITS_WAY * more
    size = problem.K, problem.V, bytes_each, problem.max_warps
    wide = scans.fitting(over_v(*size, target), shared, problem, target)
    part = scans.part_length(problem, target, -(-problem.V // wide.BV), scans.BY_DECAY)
    if problem.T <= WHOLE and not scans.forced_parts and _overlapped(problem, target, 0):
        part = 0
    by_chunk = gated or (not part and _short(problem, target, -(-problem.V // wide.BV)))
    if narrow and scans.can_be_narrow(wide, problem):
        wide = scans.deepest(wide._replace(BV=scans.NARROW), shared, target)

    def scan(kernel: str, config: Config) -> Launch:
        return scans.state_launch(kernel, config, problem, shared(config), dots, part=part)
    split = [scan("simple_gla_alone", wide), scans.carry_launch(problem, target, part)] if part else []
    if problem.mode == "fused_recurrent":
        kernels = [recurrent.forward(problem, target), *(split if problem.needs_grad else ())]
    else:
        kernels = [*split, _overlapped(problem, target, part) or scan("simple_gla_scan", wide)]
    if problem.needs_grad and by_chunk:
        # The scan of dv also stores the state's gradient. With fewer than 8 warps it spills 900 to 3,600
        # bytes per thread, except on Hopper.
        walking = wide
        if bytes_each == 2 and not is_hopper(target):
            widest = wide.BV if problem.max_warps >= 4 else min(32, wide.BV)
            strips = [wide._replace(BV=strip, num_warps=8, num_stages=1)
                      for strip in (64, 32, 16) if strip <= widest]
            walking = scans.fitting(strips, stored, problem, target)
        dv = scans.state_launch("simple_gla_dv", walking, problem, stored(walking), dots, part=part)
        grads = _overlapped_shared(problem, target) or _grads(
            problem, target, wide.BT, traits_of(problem, "dot", "mixed_sum"))
        dv, grads = _without_table(problem, target, dv, grads)
        kernels += [scan("simple_gla_states", wide), _overlapped_back(problem, target, dv, part) or dv, grads]
    elif problem.needs_grad:
        tall, dv = scans.fitting(over_k(*size, target), shared, problem, target), scan("simple_gla_dv", wide)
        kernels += [scan("simple_gla_dq", tall), scan("simple_gla_dk", tall),
                    _overlapped_back(problem, target, dv, part) or dv]
    if (by_chunk and problem.needs_grad) or (gated and problem.mode == "chunk"):
        kernels.insert(0, scans.cumsum_launch(problem))
    return tuple(kernels)


def _short(problem: Problem, target: Target, strips: int) -> bool:
    """Return True if the backward of a problem without a gate uses the kernels for a gate.

    The kernels for a gate were timed only with 16-bit tensors.

    strips: number of programs per head's state.
    """
    return (is_hopper(target) and scans.operand_bytes(problem) == 2 and SHORT <= problem.T <= WHOLE
            and not problem.invariant and problem.N * problem.H * strips <= target.sms)


def _overlapped(problem: Problem, target: Target, part: int) -> Launch | None:
    """Return the launch of the overlapping forward scan, or None if the plain scan should run.

    part: tokens of a segment, 0 if sequences are not split.
    """
    K, BT, BV = problem.K, BLOCK, 64
    # Without a gate, one program per multiprocessor is faster (benchmarks/results/two-programs-*).
    stages, bound = scans.STAGES, ALL_REGISTERS
    if "g" in problem.options:
        stages, bound = 2 if K > BLOCK else scans.STAGES, HALF_OF_REGISTERS
    shared = 2 * (stages * BT * (2 * K + BV) + K * BV) + 4 * BT * BV + 1024
    return scans.overlapped("simple_gla_overlapped", problem, target, part,
                            {"BT": BT, "BK": K, "BV": BV, "STAGES": stages, **bound}, shared)


def _overlapped_back(problem: Problem, target: Target, dv: Launch, part: int) -> Launch | None:
    """Return the launch of the overlapping scan of dv, or None if the plain launch ``dv`` should run.

    part: tokens of a segment, 0 if sequences are not split.
    """
    K, BT, BV, side = problem.K, BLOCK, 64, {"SIDE": dict(dv.tile).get("SIDE", 0)}
    if side["SIDE"] not in (0, BT):
        return None
    groups = 1 if problem.V % (2 * BV) else 2
    stages, bound = (2, HALF_OF_REGISTERS) if groups == 1 else (scans.STAGES, ALL_REGISTERS)
    slot = 2 * BT * (2 * K + groups * BV) + 4 * BT * 5
    tile = {"BT": BT, "BK": K, "BV": BV, "GROUPS": groups, "STAGES": stages, **bound, **side}
    return scans.overlapped("simple_gla_overlapped_back", problem, target, part, tile,
                            stages * slot + groups * 2 * (BT * BT + K * BV) + 1024)


def _overlapped_shared(problem: Problem, target: Target) -> Launch | None:
    """Return the launch of the overlapping kernel for heads that share q and k, or None.

    The kernel computes the gradients of a chunk. None means that the plain kernel should run.
    """
    K, V, BT, stages = 128, 64, BLOCK, 3
    if "gva" not in problem.options or (problem.K, problem.V) != (K, V):
        return None
    shared = 4 * (BT * K + stages * (BT + K) * V) + 4 * BT * (4 * stages + 8 + 2 * BT) + 1024
    return scans.overlapped("simple_gla_overlapped_shared", problem, target, None,
                            {"BT": BT, "BK": K, "BV": V, "BH": HEADS, "STAGES": stages}, shared)


def _grads(problem: Problem, target: Target, BT: int, traits: frozenset[str]) -> Launch:
    """Return the launch of the kernel that computes the gradients of a chunk.

    Its programs compute one head, or several heads of v if these share q and k.

    BT: tokens of a chunk.
    """
    bytes_each, several = scans.operand_bytes(problem), "gva" in problem.options
    size = scans.tf32_copies(bytes_each, target) * bytes_each
    strips = (OF_GROUPS if several else OF_HEADS)[bytes_each]
    tall = not several and bytes_each == 2 and not is_hopper(target) and problem.K > strips[0].K
    found = []
    for strip in strips[1:] if tall or strips[0].num_warps > problem.max_warps else strips:
        BK, BV = min(strip.K, padded(problem.K)), min(strip.V, padded(problem.V))
        shared = size * 2 * (BV * (BT + BK) + BT * BK + BT ** 2)
        kernel, heads = ("simple_gla_shared", {"BH": HEADS}) if several else ("simple_gla_grads", {})
        found.append(scans.over_tokens(kernel, problem, dict(BT=BT, BK=BK, BV=BV, **heads), shared, traits,
                                       num_warps=strip.num_warps))
    return scans.least_spilled_that_fits(found, target)


def _without_table(problem: Problem, target: Target, dv: Launch, grads: Launch) -> tuple[Launch, Launch]:
    """Return both launches changed to store the gradients of states in dq and dk, or unchanged.

    The gradients then need no memory of their own (``dstate_at`` in ``backward.py``). They are stored in
    blocks as wide as the strips that the kernel ``grads`` reads and then overwrites. It costs no time
    (benchmarks/notes/scalar-decay.md), so it is done unless it is known to fail or to be slow. Heads that
    share q and k have too few rows of dq and dk for it.
    """
    BT, side = dv.block("BT"), grads.block("BK")
    if ("gva" in problem.options or problem.V > 2 * BT or problem.K % side
            or any(BT % size for size in (side, dv.block("BV"), grads.block("BV")))):
        return dv, grads

    def inside(launch: Launch) -> Launch:
        return launch._replace(tile=(*launch.tile, ("SIDE", side)))

    def worse(launch: Launch) -> bool:
        return (scans.objected(inside(launch), target) > scans.objected(launch, target)
                or scans.spilled(inside(launch), target) > scans.spilled(launch, target))
    return (dv, grads) if worse(dv) or worse(grads) else (inside(dv), inside(grads))


# For Mamba2, H is the number of heads of v, and states have K columns.
_SCANS = {"training": Sizes(4, 2048, 80, 128, 64), "packed": Sizes(1, 32768, 80, 128, 64, N=16, packed=True)}
_MAMBA = ("g", "gva", "v_first")
SPECS = (over_heads(
    "simple_gla", launches, (
        Op("chunk_simple_gla", "simple_gla", "chunk", ("g",)),
        Op("fused_recurrent_simple_gla", "simple_gla", "fused_recurrent", ("g",)),
        Op("fused_chunk_simple_gla", "simple_gla", "chunk", ("g",)),
        Op("parallel_simple_gla", "simple_gla", "chunk", ("g",)),
        Op("simple_gla", "simple_gla", "auto", ("g",)),
        Op("chunk_retention", "retention", "chunk"),
        Op("fused_recurrent_retention", "retention", "fused_recurrent"),
        Op("fused_chunk_retention", "retention", "chunk"),
        Op("parallel_retention", "retention", "chunk"),
        Op("retention", "retention", "auto"),
        Op("chunk_linear_attn", "linear_attn", "chunk"),
        Op("fused_recurrent_linear_attn", "linear_attn", "fused_recurrent"),
        Op("fused_chunk_linear_attn", "linear_attn", "chunk"),
        Op("linear_attn", "linear_attn", "auto"),
        Op("chunk_lightning_attn", "lightning_attn", "chunk"),
        Op("fused_recurrent_lightning_attn", "lightning_attn", "fused_recurrent"),
        Op("mamba_chunk_scan_combined", "ssd", "chunk", _MAMBA, typical=_SCANS),
        Op("mamba_split_conv1d_scan_combined", "ssd", "chunk", _MAMBA,
           typical={"training": _SCANS["training"]}),
        Op("mamba3_siso_combined", "mamba3", "chunk", ("g", "v_first"), typical=_SCANS))),)
