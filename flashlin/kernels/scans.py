"""Helpers for recipes of chunked families, which turn candidate configurations into Launches.

They estimate shared memory, choose the length of segments, avoid configurations that spill, and make the
Launches that several families have. Plain Python: this module imports neither torch nor triton.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isqrt

from flashlin.compat.known_issues import issues_here
from flashlin.compat.target import Target, lanes
from flashlin.compat.traits import OVERLAPPED, of_tile, trait_set
from flashlin.compat.versions import release
from flashlin.guards import launch_table
from flashlin.guards.family import Recipe
from flashlin.guards.plan_types import PARTS, Launch, Problem, operands_of, traits_of
from flashlin.kernels.configs import BLOCK, Config, is_hopper, padded

PADDING = 16  # elements of padding in a row of shared memory, for tiles that change their layout
HEADS = 16  # heads per program of the cumulative sum
CHANNELS = 64  # channels of all heads together, per program of the cumulative sum of decays per channel
LONG = (64, 32)  # chunk lengths that may be halved if a launch spills
# Sequences are split into segments of LEAST tokens or more if a scan would start at most 1 / WORTH of the
# programs that the GPU runs at a time (PROGRAMS for each multiprocessor). Each chunk of a segment costs two
# passes, and each segment costs one step of the sequential kernel that carries states. The fastest number of
# segments makes both times equal: sqrt(n * ratio) for n chunks, where ratio is the time of a chunk divided by
# the time of a step. On an H200 these are 4 and 0.3 microseconds for decays (BY_DECAY), and 3.5 and 7 for
# transfer matrices (BY_TRANSFER); benchmarks/results/parts-*.
PROGRAMS, WORTH, LEAST = 2, 3, 4 * BLOCK
BY_DECAY, BY_TRANSFER = 13.0, 0.5
# Tiles of the kernels that carry states: CARRIED is the largest side of a tile that is carried by decays.
# STRIP is the largest number of state columns of a program that carries by transfer matrices.
CARRIED, STRIP = 64, 16
# Windows (dplr/windows.py) have fewer than NEAR chunks. Releases before WINDOWED cannot compile a pipelined
# dplr_alone with windows.
NEAR, WINDOWED = 64, (3, 3)
# State columns per program of scans that would use only a small share of the GPU, and the fewest tokens of
# a call for which they are used. Shorter calls keep whole strips, so that the test cases cover both.
NARROW, ENOUGH = 32, 1024

# The forward scans in Gluon: the first Triton release that supports them; the number of chunks in the ring
# of buffers (benchmarks/results/overlapping-*); and the fewest tokens for which the GPU is busy for longer
# than the host needs to make the descriptors. The last number is a guess and has not been timed.
OVERLAPS, STAGES, BUSY = (3, 6), 3, 1024

# The number of segments of every sequence on any GPU; 0 chooses it by the GPU. Tests set it, and then clear
# the cache of dispatch.plan.
forced_parts = 0


def operand_bytes(problem: Problem) -> int:
    """Return the size in bytes of one element of a dot operand: 4 for float32, else 2."""
    return 4 if operands_of(problem) == "float32" else 2


def cumsum_launch(problem: Problem, BT: int = BLOCK, kernel: str = "gate_cumsum") -> Launch:
    """Return the launch of the kernel that sums the decays of heads within blocks of BT tokens.

    kernel: name of the kernel; ``delta_lines`` has the same tile and grid.
    """
    return over_tokens(kernel, problem, dict(BT=BT, BH=HEADS), columns=-(-problem.H // HEADS))


def sum_launch(problem: Problem, target: Target) -> list[Launch]:
    """Return the launch that sums gradients over heads with the same q and k, or none if torch adds them."""
    if not problem.needs_grad or "gva" not in problem.options:
        return []
    launch = over_tokens("sum_heads", problem, {"BT": 32, "BD": padded(problem.K)}, columns=problem.H)
    return [launch] if ran([launch], problem, target) else []


def channel_sums_launch(problem: Problem, BT: int) -> Launch:
    """Return the launch that sums the decays of key channels within chunks of BT tokens."""
    columns = -(-problem.H * problem.K // CHANNELS)
    return over_tokens("gla_sums", problem, dict(BT=BT, BC=CHANNELS), columns=columns)


def over_tokens(kernel: str, problem: Problem, tile: dict[str, int], shared: int = 8192,
                traits: frozenset[str] = frozenset(), num_stages: int = 1, num_warps: int = 4,
                columns: int = -1) -> Launch:
    """Return a launch with one program for each chunk of ``tile["BT"]`` tokens and each head.

    shared: bytes of shared memory, an upper estimate. columns: number of programs for each chunk, if this is
    not the number of heads.
    """
    n, columns = problem.batch_part or problem.N, problem.H if columns < 0 else columns
    rows = problem.T if problem.varlen else n * problem.T
    shares = max(1, -(-rows // (tile["BT"] * max(n, 1))))
    span = tile["BT"] * problem.H * max(problem.K, problem.V)
    return Launch(kernel, (n * shares * columns,), min(num_warps, problem.max_warps), num_stages,
                  tuple(tile.items()), shared, span, traits)


def shared_bytes(config: Config, bytes_each: int, target: Target) -> int:
    """Return an upper estimate, in bytes, of the shared memory of a scan.

    It counts the tiles once per stage, and the state and the scores as operands of dots. With chunks of 16
    tokens, Triton 3.8 changes the layout of the narrower of the K and V tiles through shared memory. So this
    tile counts twice if it has more than 16 columns. On AMD the last stage is not counted, because it loads
    into registers. The exception is fp32 on RDNA, which has no fp32 matrix instructions: there all stages
    count.
    """
    registers = target.backend == "hip" and (bytes_each == 2 or lanes(target.arch) == 64)
    buffers, state = config.num_stages - registers, config.BK * config.BV
    if registers:
        state = max(state, config.BT * max(config.BK, config.BV))
    narrow = min(config.BK, config.BV)
    tiles = config.BT * (2 * max(config.BK, config.BV) + narrow)
    moved = config.BT * (narrow + PADDING if moves(target) else narrow * (config.BT == 16 < narrow))
    elements = buffers * tiles + state + config.BT * config.BT + moved
    return tf32_copies(bytes_each, target) * bytes_each * elements


def moves(target: Target) -> bool:
    """Return True if tiles that change their layout need their own shared memory, in padded rows.

    This is the case before Triton 3.3, and on tensor cores before sm_80.
    """
    return release(target.triton) < (3, 3) or target.capability < (8, 0)


def tf32_copies(bytes_each: int, target: Target) -> int:
    """Return the number of copies of a dot operand in shared memory: 1 or 2.

    Three tf32 products split each fp32 operand into two halves. Before Triton 3.3 both halves go through
    shared memory.
    """
    return 2 if bytes_each == 4 and target.capability >= (8, 0) and release(target.triton) < (3, 3) else 1


def part_length(problem: Problem, target: Target, strips: int, ratio: float, worth: int = WORTH) -> int:
    """Return the tokens of a segment, a multiple of BLOCK, or 0 if sequences are not split.

    strips: programs for the state of one head. ratio: BY_DECAY or BY_TRANSFER. worth: the fewest segments
    that are faster than whole sequences.

    The lengths of packed sequences are unknown on the host, so their total number of tokens decides. With
    several packed sequences, segments are twice as long as otherwise (four times with BY_TRANSFER), because a
    sequence in two segments takes as long as a whole one: it needs two passes, one after the other.
    """
    if problem.invariant or problem.batch_part or PARTS in problem.avoid:
        return 0
    parts = forced_parts
    if not parts:
        programs = problem.H * strips * (1 if problem.varlen else problem.N)
        # not on AMD: kernels there must first run in a trial, whose sequences are too short to split
        room = PROGRAMS * target.sms // max(programs, 1) if target.backend == "cuda" else 0
        parts = min(room, problem.T // LEAST, isqrt(int(ratio * problem.T / BLOCK)))
        if parts < worth:
            return 0
        if problem.varlen and problem.N > 1:
            parts = max(WORTH, parts // (2 if ratio == BY_DECAY else 4))
    length = -(-problem.T // (parts * BLOCK)) * BLOCK
    return length if length < problem.T else 0


def numbered(problem: Problem, part: int) -> int:
    """Return the number of segments of a launch.

    For packed sequences it is an upper limit, because the host does not read their lengths. part: tokens of a
    segment, or 0 if sequences are not split.
    """
    n = problem.batch_part or problem.N
    if not part:
        return n
    return n + problem.T // part if problem.varlen else n * -(-problem.T // part)


def carry_launch(problem: Problem, target: Target, part: int, transfer: bool = False) -> Launch:
    """Return the launch of the kernel that carries states from segment to segment.

    part: tokens of a segment. transfer: True if states are carried by matrices instead of decays.
    """
    n = problem.batch_part or problem.N
    tall = padded(problem.K)
    width = min(STRIP if transfer else CARRIED, padded(problem.V))
    strips, span = n * problem.H * -(-problem.V // width), problem.K * max(problem.K, problem.V)
    if not transfer:
        tall = min(CARRIED, tall)
        return Launch("carry_decayed", (strips * -(-problem.K // tall),), min(4, problem.max_warps), 1,
                      (("BK", tall), ("BV", width)), 1024, span, frozenset(), part)

    # An upper estimate for all releases. Since Triton 3.8, shared memory has two copies of the strip of
    # states (width). With Triton 3.3, B200 has two copies of the transfer matrix (tall) as well.
    each = 4 * (2 if target.capability[0] == 10 else tf32_copies(4, target)) * (tall + 2 * width)
    # a slice of more than 64 columns would spill 1 KB, and with two warps one of more than 32
    deep = next((deep for deep in (64, 32) if deep <= min(tall, 16 * problem.max_warps)
                 and each * deep <= target.shared), 16)
    return Launch("carry_transferred", (strips,), min(4, problem.max_warps), 1,
                  (("BK", tall), ("BV", width), ("BC", deep)), each * deep, span,
                  trait_set("dot", "fp32_dot"), part)


def windows_launch(problem: Problem, target: Target, part: int, BT: int) -> Launch | None:
    """Return the launch of the kernel that finds windows of segments, or None if it cannot be used.

    There are none with few segments. There KDA without windows took 0.39 ms instead of 0.26 ms (6x1600x1x128,
    benchmarks/results/windows-kda-*).

    part: tokens of a segment, or 0. BT: tokens of a chunk.
    """
    if not part or not many(problem, target, part) or release(target.triton) < WINDOWED:
        return None
    launch = Launch("dplr_windows", (numbered(problem, part) * problem.H,), min(4, problem.max_warps), 1,
                    (("BT", BT), ("NEAR", NEAR)), 1024, problem.K * problem.V, frozenset(), part)
    return launch if ran([launch], problem, target) else None


def many(problem: Problem, target: Target, part: int) -> bool:
    """Return True if segments times heads are at least a quarter of the multiprocessors."""
    return numbered(problem, part) * problem.H >= target.sms // 4


def ran(launches: Iterable[Launch], problem: Problem, target: Target) -> bool:
    """Return True if all launches have run on this kind of GPU; always True for Triton's interpreter."""
    return target.backend == "interpreter" or all(may_start(one, problem, target) for one in launches)


def narrow_state(config: Config) -> frozenset[str]:
    """Return a set with the trait narrow_state if the tile of a scan is narrow, else an empty set."""
    return of_tile("narrow_state", config.BT, config.BK, config.BV)


def calm(recipe: Recipe) -> Recipe:
    """Return a recipe that replaces launches which are known to be slow (``launch_table.slow_on``).

    A slow launch is replaced by the same tile with other warps or stages. If a launch is still very slow, all
    launches of the problem get shorter chunks, which need twice the steps and memory for states. If every
    alternative is slow, the recipe returns the least slow launches.
    """
    def calmed(problem: Problem, target: Target) -> tuple[Launch, ...]:
        slow = slow_here(target)
        if not slow:
            return recipe(problem, target)

        def all_spilled(launches: tuple[Launch, ...]) -> int:
            return sum(spilled(launch, target) for launch in launches)

        def calmest() -> tuple[Launch, ...]:
            return tuple(least_spilled([launch, *ways(launch, problem)], target)
                         for launch in recipe(problem, target))
        best = calmest()
        for BT in LONG:
            if not any(launch.config in slow and slow[launch.config].very for launch in best):
                break
            problem = problem._replace(avoid=problem.avoid | {_chunks_of(BT)})
            shorter = calmest()
            if all_spilled(shorter) < all_spilled(best) and not any(objected(one, target) for one in shorter):
                best = shorter
        return best
    return calmed


def narrow_where_idle(recipe: Callable[[Problem, Target, bool], tuple[Launch, ...]]) -> Recipe:
    """Return a recipe that uses strips of half as many state columns if the GPU would be mostly idle.

    ``recipe`` gets a third argument, True for narrow strips. They are used on Hopper if twice as many
    programs still run at once and all their configurations have run before. Each step of a scan waits for its
    products, and narrow strips halve these products. They also free shared memory, so that the scan can load
    the next step ahead.
    """
    def made(problem: Problem, target: Target) -> tuple[Launch, ...]:
        whole = recipe(problem, target, False)
        if (problem.T < ENOUGH or problem.invariant or problem.batch_part or forced_parts
                or "narrow_state" in problem.avoid or not is_hopper(target)):
            return whole
        narrow = recipe(problem, target, True)
        own = [launch for launch in narrow if launch not in whole]
        if not own or any("narrow_state" not in launch.traits for launch in own):
            return whole
        # Remove the trait of the known issue hopper-narrow-state. These configurations have two stages or
        # more and have run, so the issue does not affect them.
        sure = {launch: launch._replace(traits=launch.traits - trait_set("narrow_state")) for launch in own}
        fine = all(launch.num_stages > 1 and launch.grid[0] <= target.sms and launch.shared <= target.shared
                   and may_start(launch, problem, target) for launch in sure.values())
        return tuple(sure.get(launch, launch) for launch in narrow) if fine else whole
    return made


def can_be_narrow(scan: Config, problem: Problem) -> bool:
    """Return True if the state tile of a scan can have half as many columns.

    A state with fewer than 64 rows keeps its columns (known issue hopper-narrow-state).
    """
    return operand_bytes(problem) == 2 and scan.BT == scan.BV == 64 <= scan.BK


def deepest(scan: Config, shared: Callable[[Config], int], target: Target) -> Config:
    """Return the configuration with as many stages as fit in shared memory, at most three."""
    for stages in range(3, scan.num_stages, -1):
        deeper = scan._replace(num_stages=stages)
        if shared(deeper) <= target.shared:
            return deeper
    return scan


def ways(launch: Launch, problem: Problem) -> Iterator[Launch]:
    """Yield launches with the same tile and other numbers of warps and stages, as alternatives for speed.

    A launch with fewer than 4 warps keeps this number, because it was not chosen for speed.
    """
    if "dot" in launch.traits and launch.num_warps == 4 < problem.max_warps:
        yield launch._replace(num_warps=8)
        yield launch._replace(num_warps=8, num_stages=1)
    if "dot" in launch.traits and launch.num_stages > 1:
        yield launch._replace(num_stages=1)


def least_spilled(launches: Sequence[Launch], target: Target) -> Launch:
    """Return the launch that spills least; all given launches compute the same.

    The first one wins ties. Later ones are ignored if planning would reject them.
    """
    first, *others = launches
    if not spilled(first, target):
        return first
    return min([first, *(other for other in others if not objected(other, target))],
               key=lambda launch: spilled(launch, target))


def least_spilled_that_fits(launches: Sequence[Launch], target: Target) -> Launch:
    """Return the launch that spills least and fits in shared memory, or the last launch if none fits."""
    return least_spilled([one for one in launches if one.shared <= target.shared] or launches[-1:], target)


def spilled(launch: Launch, target: Target) -> int:
    """Return the bytes that a thread spills, or 0 for a launch that is not known to be slow."""
    slow = slow_here(target)
    return slow[launch.config].spills if slow and launch.config in slow else 0


def slow_here(target: Target) -> dict[str, launch_table.Slow]:
    """Return the configurations that are known to be slow on a target.

    Only Hopper was timed. There, a configuration counts as slow only if ptxas could not allocate its
    registers and fell back to a small number. On other GPUs every slow entry of the launch table counts.
    """
    return launch_table.slow_on(target.sm, target.triton, (9, 0) <= target.capability < (10, 0))


def objected(launch: Launch, target: Target) -> bool:
    """Return True if a check would reject the launch on this target."""
    return (launch.shared > target.shared or launch_table.trust(launch.config, target) == "failed"
            or any(issue.remedies and issue.hits(launch.traits, launch.num_warps, launch.num_stages)
                   for issue in issues_here(target)))


def may_start(launch: Launch, problem: Problem, target: Target) -> bool:
    """Return True if a launch has run on this kind of GPU, or runs in a trial now.

    It is for kernels that hang or crash if they are wrong. A trial does not start what is known to fail.
    """
    tried = problem.trial and launch_table.trust(launch.config, target) != "failed"
    return tried or launch_table.has_run(launch.config, (problem.op,), problem.dtype, target)


def _chunks_of(BT: int) -> str:
    """Return the entry of Problem.avoid that forbids chunks of BT tokens."""
    return f"chunks of {BT}"


def fitting(configs: Iterable[Config], shared: Callable[[Config], int], problem: Problem, target: Target,
            facts: Callable[[Config], frozenset[str]] = narrow_state) -> Config:
    """Return the first candidate that fits in shared memory and has no trait in Problem.avoid.

    If there is none, return the last candidate, which the checks then refuse. facts: returns the traits of a
    candidate.
    """
    config = None
    for config in configs:
        if shared(config) <= target.shared and not (facts(config) | {_chunks_of(config.BT)}) & problem.avoid:
            break
    assert config is not None  # a kernel without candidates is a mistake in configs.py
    return config


def state_launch(kernel: str, config: Config, problem: Problem, shared: int, traits: frozenset[str],
                 tall: bool = True, part: int = 0) -> Launch:
    """Return a launch with one program for each sequence or segment, head, and tile of the state.

    shared: bytes of shared memory, an upper estimate. part: tokens of a segment, or 0. tall: True if a state
    tile with more rows than the chunk has tokens crashes compilers (known issue tall-state-32).
    """
    if tall and config.BT < 64 <= config.BK and "half_dot" in traits:
        traits = traits | trait_set("tall_state")
    if "dot" in traits:
        traits = traits | narrow_state(config)
    strips = -(-problem.K // config.BK) * -(-problem.V // config.BV)
    span = config.BT * problem.H * max(problem.K, problem.V)
    return Launch(kernel, (numbered(problem, part) * problem.H * strips,),
                  min(config.num_warps, problem.max_warps), config.num_stages,
                  (("BT", config.BT), ("BK", config.BK), ("BV", config.BV)), shared, span, traits, part)


def groups_of(problem: Problem, target: Target, part: int) -> int:
    """Return the groups of four warps of a scan in Gluon, 1 or 2, each for 64 columns of the state.

    One group computes a chunk faster than two. So programs have one if the GPU has a multiprocessor for each
    group. Calls of fewer than ENOUGH tokens have two if V allows it, so that the test cases cover both.
    """
    columns = problem.V // 64
    alone = problem.T >= ENOUGH and numbered(problem, part) * problem.H * columns <= target.sms
    return 1 if columns % 2 or alone else 2


def overlapped(kernel: str, problem: Problem, target: Target, part: int | None, tile: dict[str, int],
               shared: int, packed: bool = False) -> Launch | None:
    """Return the launch of a family's Gluon kernel, or None if the problem or the target does not allow it.

    The kernel supports dense sequences of whole chunks, and heads of 64 or 128. With packed, it also computes
    the whole chunks of packed sequences of at least one chunk on average. It waits at its own barriers,
    so a wrong one would make it hang. Therefore it is used only if it has run on this kind of GPU.
    part: tokens of a segment, or 0, or None for a kernel with one program for each chunk.
    tile: BT, BK, BV and others, such as GROUPS if a program computes GROUPS times BV columns.
    """
    columns = tile.get("BV", problem.V) * tile.get("GROUPS", 1)
    if (not is_hopper(target) or release(target.triton) < OVERLAPS or operand_bytes(problem) == 4
            or problem.max_warps < 4
            or (not packed or problem.batch_part or problem.N * tile["BT"] > problem.T if problem.varlen
                else problem.T % tile["BT"])
            or problem.invariant or problem.portable
            or not problem.T or problem.K not in (64, 128) or problem.V % columns):
        return None
    chunks, span = problem.T // tile["BT"] if part is None else 1, tile["BT"] * problem.H
    n = 1 if problem.varlen and part is None else numbered(problem, part or 0)
    grid = n * chunks * problem.H * (problem.V // columns)
    launch = Launch(kernel, (grid,), 4, 1, tuple(tile.items()), shared, span * max(problem.K, problem.V),
                    traits_of(problem, OVERLAPPED), part or 0)
    long = problem.trial or problem.T >= BUSY
    return launch if long and may_start(launch, problem, target) else None
