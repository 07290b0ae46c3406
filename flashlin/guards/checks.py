"""Checks of planned launches.

Each check yields the reasons why the launches of a draft plan cannot or should not run. Planning handles the
first reason of the first check that yields one. The checks name no kernel and nearly no family: the record of
a family lists the limits of its kernels. To add a check, write a function and append it to ``CHECKS``.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from flashlin.compat.known import KnownIssue
from flashlin.compat.known_issues import issues_here
from flashlin.compat.target import GPUS, Target
from flashlin.compat.traits import TILE_FACTS
from flashlin.compat.versions import release
from flashlin.guards.family import Family
from flashlin.guards.launch_table import failure, has_run, trust
from flashlin.guards.plan_types import PARTS, Launch, Problem, Reason
from flashlin.policy import Policy


class Draft(NamedTuple):
    """A plan before its checks: the launches of a problem on a target.

    problem: the call as plain numbers and strings.
    family: the group of ops whose kernels run it.
    launches: the kernel launches that the problem would make on the target.
    target: the GPU and the releases of Triton, torch and ptxas.
    policy: the settings that apply to the call.
    """
    problem: Problem
    family: Family
    launches: tuple[Launch, ...]
    target: Target
    policy: Policy


Check = Callable[[Draft], Iterator[Reason]]

AXIS_LIMITS = (2**31 - 1, 65535, 65535)  # CUDA's maximum grid, by axis
OFFSET_LIMIT = 2**31 - 1
MAX_HEAD_DIM = 512
# Up to this number of tokens, without gradients, a token-by-token kernel is faster than a chunked kernel. It
# needs one short launch, while the chunk of the chunked kernel would be mostly padding.
FEW_TOKENS = 16
# Forces ranks to divide "heads" (where possible) or "tokens"; "" lets the checks choose. For tests and
# benchmarks only. They clear the cache of dispatch.plan when they change it.
forced_over = ""
# Options of a call that prevent ranks from dividing the heads, for any number of ranks, each with its reason.
UNSHARED = {"own_edges": "of packed sequences each knows its own edges alone",
            "few_qk_heads": "heads of q and k that they do not divide"}
# Families in which a token multiplies the state by a K x K matrix, not only by a decay. A rank in the middle
# of a sequence computes the product of these matrices, in an additional pass in float32.
TRANSFERRED = ("delta", "dplr")


def check_ranks(draft: Draft) -> Iterator[Reason]:
    """Choose whether the ranks that share each sequence divide its heads or carry states along its tokens."""
    problem = draft.problem
    if problem.ranks == 1 or problem.over:
        return
    got = f"each sequence on {problem.ranks} ranks, {problem.T} tokens on each, and "
    whys = {**{why: option in problem.options for option, why in UNSHARED.items()},
            f"{problem.H} heads, which {problem.ranks} does not divide": problem.H % problem.ranks,
            "states asked for": forced_over == "tokens",
            "states that only decay on the way": problem.family not in TRANSFERRED and not forced_over,
            "no rank between two others": problem.ranks == 2 and not forced_over}
    for why, holds in whys.items():
        if holds:
            yield Reason("ranks", got + why, "states carried from rank to rank", ("carry_states",),
                         forced=False)
    yield Reason("ranks", f"{got}{problem.H} heads, which {problem.ranks} divides",
                 f"whole sequences of {problem.H // problem.ranks} heads on each", ("share_heads",),
                 forced=False)


def check_path(draft: Draft) -> Iterator[Reason]:
    """Move the call to the torch path if the settings say ``path=torch``."""
    # A user's own kernel has no torch path, so the setting does not apply to it.
    if draft.policy.path == "torch" and draft.problem.given is None:
        yield Reason("setting", "path=torch", "a path other than torch for kernels", ("torch_path",),
                     forced=False)


def check_backend(draft: Draft) -> Iterator[Reason]:
    """Reject Triton kernels on an unsupported device, a torch build for other GPUs, or an old Triton."""
    target = draft.target
    if target.backend == "cpu":
        yield Reason("backend", "tensors on the CPU", "an NVIDIA GPU for the Triton kernels",
                     ("torch_path",), forced=False)
    if target.backend in GPUS and target.backend not in ("cuda", "hip"):
        yield Reason("backend", GPUS[target.backend], "an NVIDIA GPU for the Triton kernels", ("torch_path",))
    if target.other_build:
        yield Reason("backend", f"torch {target.torch}, a build for {target.other_build}",
                     f"a build of torch for {GPUS[target.backend]}", ("torch_path",))
    if not target.triton or release(target.triton)[:2] < (3, 0):
        got = f"Triton {target.triton} is too old" if target.triton else "Triton not usable"
        yield Reason("triton", got, "Triton 3.0 or newer", ("torch_path",))


def check_mode(draft: Draft) -> Iterator[Reason]:
    """Choose between chunk and token-by-token kernels for a call with ``mode="auto"``."""
    problem, target = draft.problem, draft.target
    if problem.mode != "auto":
        return
    if problem.needs_grad:
        yield Reason("mode", "mode=auto with gradients", "chunk, whose matmuls backward needs anyway",
                     ("chunk_mode",), forced=False)
    if problem.T <= FEW_TOKENS:
        yield Reason("mode", f"mode=auto and T={problem.T}",
                     f"fused_recurrent for T <= {FEW_TOKENS} without gradients", ("recurrent_mode",),
                     forced=False)
    if target.backend == "cuda" and target.capability < (8, 0):
        yield Reason("mode", f"mode=auto on {target.sm}",
                     "fused_recurrent below sm80: Triton has no tensor cores there "
                     "(users measured 9 s against 22 s chunked on a V100)", ("recurrent_mode",),
                     "https://github.com/fla-org/flash-linear-attention/issues/458", forced=False)
    yield Reason("mode", f"mode=auto and T={problem.T}", f"chunk for T > {FEW_TOKENS}", ("chunk_mode",),
                 forced=False)


def check_dtype(draft: Draft) -> Iterator[Reason]:
    """Reject dtypes without kernels, and bf16 operands in Triton's interpreter."""
    if draft.problem.dtype not in ("float16", "bfloat16", "float32"):
        yield Reason("dtype", draft.problem.dtype, "float16, bfloat16 or float32 for the kernels",
                     ("torch_path",))
    if draft.target.backend == "interpreter" and any("bf16" in launch.traits for launch in draft.launches):
        yield Reason("interpreter-bf16", "bf16 in Triton's interpreter, which multiplies the raw bits",
                     "fp32 operands", ("via_fp32",))


def check_head_dim(draft: Draft) -> Iterator[Reason]:
    """Reject head dimensions K or V above ``MAX_HEAD_DIM`` (512)."""
    if draft.family.head_dim and max(draft.problem.K, draft.problem.V) > MAX_HEAD_DIM:
        yield Reason("head-dim", f"K={draft.problem.K} V={draft.problem.V}",
                     f"K and V up to {MAX_HEAD_DIM} for the kernels", ("torch_path",))


def check_family(draft: Draft) -> Iterator[Reason]:
    """Reject options and sizes that the record of the family lists as unsupported by its kernels."""
    for option, got, need in draft.family.unsupported:
        if option in draft.problem.options:
            yield Reason(option, got, f"{need} for the kernels", ("torch_path",))
    for axis, most, got in draft.family.limits:
        if (size := getattr(draft.problem, axis)) > most:
            yield Reason("width", got.format(size), f"up to {most} for the kernels", ("torch_path",))


def check_grid(draft: Draft) -> Iterator[Reason]:
    """Reject launches with more programs on a grid axis than CUDA allows."""
    for launch in draft.launches:
        for axis, (size, limit) in enumerate(zip(launch.grid, AXIS_LIMITS, strict=False)):
            if size > limit:
                yield Reason("grid", f"{launch.kernel} starts {size} programs on grid axis {axis}",
                             f"at most {limit}", ("chunk_batch", "torch_path"))


def check_offsets(draft: Draft) -> Iterator[Reason]:
    """Reject launches whose largest element offset does not fit into 32 bits."""
    remedies = ("torch_path",) if draft.problem.given is None else ("chunk_batch",)
    for launch in draft.launches:
        if launch.span > OFFSET_LIMIT:
            yield Reason("offset", f"{launch.kernel} reaches element {launch.span} with 32-bit offsets",
                         f"at most {OFFSET_LIMIT}", remedies)


def check_shared(draft: Draft) -> Iterator[Reason]:
    """Reject launches that need more shared memory per block than the GPU has."""
    for launch in draft.launches:
        if launch.shared > draft.target.shared:
            yield Reason("shared-memory", f"{launch.kernel} needs {launch.shared} bytes per block",
                         f"at most {draft.target.shared} on {draft.target.sm}", ("torch_path",))


def check_known_issues(draft: Draft) -> Iterator[Reason]:
    """Reject launches that match a known issue on this machine, unless the policy ignores the issue."""
    if draft.policy.policy == "off":
        return
    for issue in issues_here(draft.target):
        if issue.remedies and issue.id not in draft.policy.ignore:
            for launch in draft.launches:
                if issue.hits(launch.traits, launch.num_warps, launch.num_stages):
                    yield _known(issue, launch, draft)


def _known(issue: KnownIssue, launch: Launch, draft: Draft) -> Reason:
    """Return the reason that a known issue gives against a launch.

    The reason is not forced if the issue names properties of the tile, because the recipe may offer another
    tile without them.
    """
    facts = issue.traits & TILE_FACTS - draft.problem.avoid
    tile = f" {launch.tile_text}" if facts and launch.tile else ""
    target = draft.target
    got = (f"{launch.kernel}{tile} with {launch.num_warps} warps, {draft.problem.dtype} on {target.sm}, "
           f"triton {target.triton} ({issue.effect})")
    return Reason(issue.id, got, issue.need, issue.remedies, issue.url, forced=not facts, avoid=facts)


def check_launch_table(draft: Draft) -> Iterator[Reason]:
    """Reject configurations that failed according to the launch table or to trials on this machine."""
    # The table lists flashlin's own kernels only.
    if draft.problem.given is not None or draft.policy.policy == "off":
        return
    for launch in draft.launches:
        if trust(launch.config, draft.target) == "failed":
            # Without a split into segments, the call needs fewer kernels and perhaps not this one.
            facts = frozenset({PARTS}) if launch.part else frozenset()
            yield Reason("launch-table", failure(launch.config, draft.target), "a configuration that works",
                         ("other_tile", "limit_num_warps", "torch_path"), avoid=facts)


def check_has_run(draft: Draft) -> Iterator[Reason]:
    """Reject kernels on an AMD GPU unless a record or a trial shows that they ran correctly there.

    A kernel that hangs on an AMD GPU may also freeze the desktop. The check does not apply to a user's own
    kernels, because their author decides where they run.
    """
    problem, target = draft.problem, draft.target
    if (target.backend != "hip" or problem.given is not None or draft.policy.policy == "off"
            or draft.policy.canary == "trial"):
        return
    ops = (problem.op, f"{problem.mode}_{problem.op}")  # a trial of ``chunk_gla`` counts for ``gla``
    if not all(has_run(launch.config, ops, problem.dtype, target) for launch in draft.launches):
        yield Reason("backend", "an AMD GPU on which these kernels have not run (flashlin warmup tries them)",
                     "an NVIDIA GPU, or flashlin warmup: see its --help first", ("torch_path",))


CHECKS: tuple[Check, ...] = (
    check_ranks, check_path, check_backend, check_mode, check_dtype, check_head_dim, check_family, check_grid,
    check_offsets, check_shared, check_known_issues, check_launch_table, check_has_run)
