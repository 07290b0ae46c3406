"""What the recipes of the chunked families share: from candidates to Launches. Plain Python: no tensor, no
torch, no triton."""
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

PADDING = 16  # elements, of a row that changes its layout
HEADS = 16  # heads per program of the cumulative sum
CHANNELS = 64  # channels of any heads per program of their cumulative sum
LONG = (64, 32)  # tokens of chunks that may be halved where something spills
# Sequences are split where scans have at most a third (WORTH) of the PROGRAMS that a multiprocessor has under
# way at a time, into parts of LEAST tokens or more. A chunk of a part costs two passes, a part a step of
# those that carry states on one after the other. Fastest is as many parts that both take as long: of n chunks
# the root of n times the ratio of what they cost (on an H200 4 microseconds beside 0.3, 3.5 beside 7;
# benchmarks/results/parts-*).
PROGRAMS, WORTH, LEAST = 2, 3, 4 * BLOCK
BY_DECAY, BY_TRANSFER = 13.0, 0.5
# Of what is carried from part to part: sides of a tile, and columns of a state beside a matrix.
CARRIED, STRIP = 64, 16
# Columns of the states of scans that leave most of a card idle. Of so many tokens, since whoever tries all
# cases is to try others with whole strips, too.
NARROW, ENOUGH = 32, 1024

# Of the forward scans in Gluon: the first release that can; chunks under way
# (benchmarks/results/overlapping-*); how many tokens keep a card busy for longer than their descriptors do
# the host, which is a guess nobody has timed.
OVERLAPS, STAGES, BUSY = (3, 6), 3, 1024

# Into how many parts every sequence is split, whatever the card: for tests, which forget plans (dispatch.plan
# has a cache) when they change it.
forced_parts = 0


def operand_bytes(problem: Problem) -> int:
    """Size in bytes of a dot operand."""
    return 4 if operands_of(problem) == "float32" else 2


def cumsum_launch(problem: Problem, BT: int = BLOCK) -> Launch:
    """The kernel that sums the decays of heads within blocks of BT tokens."""
    return over_tokens("gate_cumsum", problem, dict(BT=BT, BH=HEADS), columns=-(-problem.H // HEADS))


def channel_sums_launch(problem: Problem, BT: int) -> Launch:
    """Return the launch that sums the decays of key channels within chunks of BT tokens."""
    columns = -(-problem.H * problem.K // CHANNELS)
    return over_tokens("gla_sums", problem, dict(BT=BT, BC=CHANNELS), columns=columns)


def over_tokens(kernel: str, problem: Problem, tile: dict[str, int], shared: int = 8192,
                traits: frozenset[str] = frozenset(), num_stages: int = 1, num_warps: int = 4,
                columns: int = -1) -> Launch:
    """Return a launch with a program for each chunk of ``tile["BT"]`` tokens and each head.

    shared: bytes, an upper estimate. columns: programs of a chunk, if they are not its heads.
    """
    n, columns = problem.batch_part or problem.N, problem.H if columns < 0 else columns
    rows = problem.T if problem.varlen else n * problem.T
    shares = max(1, -(-rows // (tile["BT"] * max(n, 1))))
    span = tile["BT"] * problem.H * max(problem.K, problem.V)
    return Launch(kernel, (n * shares * columns,), min(num_warps, problem.max_warps), num_stages,
                  tuple(tile.items()), shared, span, traits)


def shared_bytes(config: Config, bytes_each: int, target: Target) -> int:
    """An upper estimate of a scan's shared memory: its tiles once per stage, the state and the scores as
    operands of dots; of 16 tokens the narrower tile once more, if it has more than 16 columns, since 3.8 moves
    it from one layout to another. On AMD the last stage loads into registers, from which a tile may go where
    the state does; except for fp32 on RDNA, which has no matrix instructions for it."""
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
    """Before 3.3, and on old tensor cores, tiles that change their layout go through shared memory of their
    own, in padded rows."""
    return release(target.triton) < (3, 3) or target.capability < (8, 0)


def tf32_copies(bytes_each: int, target: Target) -> int:
    """Before 3.3 the two halves that three tf32 products split an operand into both go through shared
    memory."""
    return 2 if bytes_each == 4 and target.capability >= (8, 0) and release(target.triton) < (3, 3) else 1


def part_length(problem: Problem, target: Target, strips: int, ratio: float, worth: int = WORTH) -> int:
    """Tokens of the parts that sequences are split into, a multiple of BLOCK; 0 where they are not. strips:
    programs to a head's state. ratio: BY_DECAY or BY_TRANSFER. worth: fewer parts gain nothing. Of packed
    sequences nobody knows which are long, so what counts is how many tokens there are; those of several are
    twice as long, since one that is cut in two takes as long as before: two passes, one after the other."""
    if problem.invariant or problem.batch_part or PARTS in problem.avoid:
        return 0
    parts = forced_parts
    if not parts:
        programs = problem.H * strips * (1 if problem.varlen else problem.N)
        # not on AMD: what is started there has run in a trial, whose sequences are too short to be split
        room = PROGRAMS * target.sms // max(programs, 1) if target.backend == "cuda" else 0
        parts = min(room, problem.T // LEAST, isqrt(int(ratio * problem.T / BLOCK)))
        if parts < worth:
            return 0
        if problem.varlen and problem.N > 1:
            parts = max(WORTH, parts // (2 if ratio == BY_DECAY else 4))
    length = -(-problem.T // (parts * BLOCK)) * BLOCK
    return length if length < problem.T else 0


def numbered(problem: Problem, part: int) -> int:
    """How many numbers of parts a launch has; of packed sequences not all are in use."""
    n = problem.batch_part or problem.N
    if not part:
        return n
    return n + problem.T // part if problem.varlen else n * -(-problem.T // part)


def carry_launch(problem: Problem, target: Target, part: int, transfer: bool = False) -> Launch:
    """The kernel that carries states from part to part. transfer: by matrices."""
    n = problem.batch_part or problem.N
    tall = padded(problem.K)
    width = min(STRIP if transfer else CARRIED, padded(problem.V))
    strips, span = n * problem.H * -(-problem.V // width), problem.K * max(problem.K, problem.V)
    if not transfer:
        tall = min(CARRIED, tall)
        return Launch("carry_decayed", (strips * -(-problem.K // tall),), min(4, problem.max_warps), 1,
                      (("BK", tall), ("BV", width)), 1024, span, frozenset(), part)

    # the strip of states is there twice from Triton 3.8 on; B200 under 3.3 has the matrix twice, too
    each = 4 * (2 if target.capability[0] == 10 else tf32_copies(4, target)) * (tall + 2 * width)
    # a taller matrix at once spills a kilobyte
    deep = next((deep for deep in (64, 32) if deep <= tall and each * deep <= target.shared), 16)
    return Launch("carry_transferred", (strips,), min(4, problem.max_warps), 1,
                  (("BK", tall), ("BV", width), ("BC", deep)), each * deep, span,
                  trait_set("dot", "fp32_dot"), part)


def narrow_state(config: Config) -> frozenset[str]:
    """The fact of a scan's tile, see compat/traits.py."""
    return of_tile("narrow_state", config.BT, config.BK, config.BV)


def calm(recipe: Recipe) -> Recipe:
    """A recipe that leaves out what is known to be slow (``launch_table.slow_on``), as far as there is
    anything else: of a slow launch the same tile with other warps and stages; where every way is very slow,
    all launches of the problem with shorter chunks, which take twice the steps and the memory for states. Of
    what is slow in every way the least slow."""
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
    """A recipe that may be asked for strips of half a state's columns, and is where twice the programs still
    run at once and all of them have run before: a step of a scan waits for its products, which are half as
    large then, and there is room for what the next step needs to be on its way."""
    def made(problem: Problem, target: Target) -> tuple[Launch, ...]:
        whole = recipe(problem, target, False)
        if (problem.T < ENOUGH or problem.invariant or problem.batch_part or forced_parts
                or "narrow_state" in problem.avoid or not is_hopper(target)):
            return whole
        narrow = recipe(problem, target, True)
        own = [launch for launch in narrow if launch not in whole]
        if not own or any("narrow_state" not in launch.traits for launch in own):
            return whole
        # what is suspected of such tiles is so with one stage, and none is taken that has not run
        sure = {launch: launch._replace(traits=launch.traits - trait_set("narrow_state")) for launch in own}
        fine = all(launch.num_stages > 1 and launch.grid[0] <= target.sms and launch.shared <= target.shared
                   and may_start(launch, problem, target) for launch in sure.values())
        return tuple(sure.get(launch, launch) for launch in narrow) if fine else whole
    return made


def can_be_narrow(scan: Config, problem: Problem) -> bool:
    """Whether a scan's states have columns to halve; beside fewer rows than 64 they stay whole
    (hopper-narrow-state)."""
    return operand_bytes(problem) == 2 and scan.BT == scan.BV == 64 <= scan.BK


def deepest(scan: Config, shared: Callable[[Config], int], target: Target) -> Config:
    """A scan with as many stages as there is shared memory for, three at most."""
    for stages in range(3, scan.num_stages, -1):
        deeper = scan._replace(num_stages=stages)
        if shared(deeper) <= target.shared:
            return deeper
    return scan


def ways(launch: Launch, problem: Problem) -> Iterator[Launch]:
    """The same tile with other warps and stages, where these are for speed alone: less than 4 warps are for
    other reasons."""
    if "dot" in launch.traits and launch.num_warps == 4 < problem.max_warps:
        yield launch._replace(num_warps=8)
        yield launch._replace(num_warps=8, num_stages=1)
    if "dot" in launch.traits and launch.num_stages > 1:
        yield launch._replace(num_stages=1)


def least_spilled(launches: Sequence[Launch], target: Target) -> Launch:
    """The first of these ways to compute the same that is not slow or, if all are, that spills least. After
    the first, those do not count that planning would reject."""
    first, *others = launches
    if not spilled(first, target):
        return first
    return min([first, *(other for other in others if not objected(other, target))],
               key=lambda launch: spilled(launch, target))


def least_spilled_that_fits(launches: Sequence[Launch], target: Target) -> Launch:
    """Return the least spilled of those whose shared memory fits; the last one if none does."""
    return least_spilled([one for one in launches if one.shared <= target.shared] or launches[-1:], target)


def spilled(launch: Launch, target: Target) -> int:
    """Bytes that a thread spills, 0 of a launch that is not known to be slow."""
    slow = slow_here(target)
    return slow[launch.config].spills if slow and launch.config in slow else 0


def slow_here(target: Target) -> dict[str, launch_table.Slow]:
    """On Hopper, where configurations were timed, a configuration is only slow where ptxas has given up."""
    return launch_table.slow_on(target.sm, target.triton, (9, 0) <= target.capability < (10, 0))


def objected(launch: Launch, target: Target) -> bool:
    """Whether a check would reject it."""
    return (launch.shared > target.shared or launch_table.trust(launch.config, target) == "failed"
            or any(issue.remedies and issue.hits(launch.traits, launch.num_warps, launch.num_stages)
                   for issue in issues_here(target)))


def may_start(launch: Launch, problem: Problem, target: Target) -> bool:
    """Return whether a launch that hangs or fails if it is wrong has run on such a card, or is tried now."""
    return problem.trial or launch_table.has_run(launch.config, (problem.op,), problem.dtype, target)


def _chunks_of(BT: int) -> str:
    """What to avoid, as facts of a tile are, where chunks are not to be so long."""
    return f"chunks of {BT}"


def fitting(configs: Iterable[Config], shared: Callable[[Config], int], problem: Problem, target: Target,
            facts: Callable[[Config], frozenset[str]] = narrow_state) -> Config:
    """The first candidate whose shared memory fits and that has none of the facts which the problem has to
    avoid; if there is none, the last one, which the checks then refuse."""
    config = None
    for config in configs:
        if shared(config) <= target.shared and not (facts(config) | {_chunks_of(config.BT)}) & problem.avoid:
            break
    assert config is not None  # a kernel without candidates is a mistake in configs.py
    return config


def state_launch(kernel: str, config: Config, problem: Problem, shared: int, traits: frozenset[str],
                 tall: bool = True, part: int = 0) -> Launch:
    """A program per sequence, or part of one, head and tile of the state. tall: whether a state taller than
    its chunks crashes compilers (tall-state-32)."""
    if tall and config.BT < 64 <= config.BK and "half_dot" in traits:
        traits = traits | trait_set("tall_state")
    if "dot" in traits:
        traits = traits | narrow_state(config)
    strips = -(-problem.K // config.BK) * -(-problem.V // config.BV)
    span = config.BT * problem.H * max(problem.K, problem.V)
    return Launch(kernel, (numbered(problem, part) * problem.H * strips,),
                  min(config.num_warps, problem.max_warps), config.num_stages,
                  (("BT", config.BT), ("BK", config.BK), ("BV", config.BV)), shared, span, traits, part)


def overlapped(kernel: str, problem: Problem, target: Target, part: int, tile: dict[str, int],
               shared: int) -> Launch | None:
    """A family's kernel in Gluon, which takes whole chunks of dense sequences, and heads of 64 or 128. What
    waits for barriers of its own hangs where one of them is wrong, so it is taken where it has run. tile: BT,
    BK, which is K, BV and STAGES; GROUPS, if a program has several times BV columns."""
    columns = tile["BV"] * tile.get("GROUPS", 1)
    if (not is_hopper(target) or release(target.triton) < OVERLAPS or operand_bytes(problem) == 4
            or problem.max_warps < 4 or problem.varlen or problem.invariant or problem.T % tile["BT"]
            or not problem.T or tile["BK"] not in (64, 128) or problem.V % columns):
        return None
    grid, span = numbered(problem, part) * problem.H * (problem.V // columns), tile["BT"] * problem.H
    launch = Launch(kernel, (grid,), 4, 1, tuple(tile.items()), shared,
                    span * max(problem.K, problem.V),
                    traits_of(problem, OVERLAPPED), part)
    long = problem.trial or problem.T >= BUSY
    return launch if long and may_start(launch, problem, target) else None
