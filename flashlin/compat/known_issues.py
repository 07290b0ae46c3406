"""Known issues as data. Adding one is one ``KnownIssue(...)`` literal in KNOWN_ISSUES; dispatch, doctor and the tests read that tuple.

Matched on what a launch is (traits, warps, stages), where it runs (capability, Triton, ptxas) and bounds on the problem, never on
an op's name. ``remedies`` empty means: told by doctor, never acted upon.
"""
from __future__ import annotations

from functools import lru_cache

from pydantic import BaseModel, ConfigDict

from flashlin.compat.target import Target
from flashlin.compat.versions import affected


class Range(BaseModel):
    """Versions ``since`` .. ``fixed_in``; None leaves a side open."""
    model_config = ConfigDict(frozen=True, extra="forbid")
    since: str | None = None
    fixed_in: str | None = None


class KnownIssue(BaseModel):
    """One failure of Triton, ptxas or a kernel. effect: what the user sees. traits: all must be on the launch.
    capabilities: half-open range of (major, minor). proof: the test or thread behind it; confidence: how sure that makes us."""
    model_config = ConfigDict(frozen=True, extra="forbid")
    id: str
    effect: str
    triton: Range = Range()
    ptxas: Range | None = None
    capabilities: tuple[tuple[int, int], tuple[int, int]]
    traits: frozenset[str] = frozenset()
    min_warps: int = 1
    min_stages: int = 1
    need: str
    remedies: tuple[str, ...]
    url: str
    proof: str
    confidence: str

    def here(self, target: Target) -> bool:
        """Whether this machine is one of those affected, whatever is launched."""
        low, high = self.capabilities
        return (target.backend == "cuda" and low <= target.capability < high
                and affected(target.triton, self.triton.since, self.triton.fixed_in)
                and (self.ptxas is None or affected(target.ptxas, self.ptxas.since, self.ptxas.fixed_in)))

    def hits(self, traits: frozenset[str], num_warps: int, num_stages: int) -> bool:
        """Whether a launch with these facts triggers it."""
        return self.traits <= traits and num_warps >= self.min_warps and num_stages >= self.min_stages


@lru_cache(maxsize=64)
def issues_here(target: Target) -> tuple[KnownIssue, ...]:
    return tuple(issue for issue in KNOWN_ISSUES if issue.here(target))


_FLA = "https://github.com/fla-org/flash-linear-attention/issues/"
_TRITON = "https://github.com/triton-lang/triton/issues/"
PRE_VOLTA, VOLTA, TURING, AMPERE, HOPPER, BLACKWELL, GB300, SM11, SM12, SM121, END = (
    (0, 0), (7, 0), (7, 5), (8, 0), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (99, 0))

KNOWN_ISSUES: tuple[KnownIssue, ...] = (
    KnownIssue(
        id="before-volta", effect="Triton has no code generator for this card",
        capabilities=(PRE_VOLTA, VOLTA), need="a card of compute capability 7.0 or newer, or the torch path",
        remedies=("torch_path",), url="https://github.com/triton-lang/triton#compatibility", proof="Triton's readme", confidence="documented"),
    KnownIssue(
        id="bf16-pre-ampere-32", effect="ptxas: Feature '.bf16' requires .target sm_80 or higher; dots raise IndexError: map::at on sm_75",
        triton=Range(fixed_in="3.3.0"), capabilities=(VOLTA, AMPERE), traits=frozenset({"bf16"}),
        need="no bf16 tensor in a kernel, or Triton 3.4", remedies=("via_fp32", "torch_path"),
        url="https://github.com/Lightning-AI/pytorch-lightning/issues/18070",
        proof="tests/matrix/test_pre_ampere.py", confidence="compiled"),
    KnownIssue(
        id="half-dot-volta-32", effect="the compiler aborts: Failed to compute parent layout for slice layout",
        triton=Range(since="3.2.0", fixed_in="3.3.0"), capabilities=(VOLTA, TURING), traits=frozenset({"half_dot"}),
        need="fp32 operands, or Triton 3.4", remedies=("via_fp32", "torch_path"), url="",
        proof="tests/matrix/test_pre_ampere.py", confidence="compiled"),
    KnownIssue(
        id="half-dot-33-pre-ampere", effect="'Unsupported conversion from bf16 to f16', 'Unsupported rounding mode for conversion': every dot "
        "on 16-bit operands fails to compile",
        triton=Range(since="3.3.0", fixed_in="3.4.0"), capabilities=(VOLTA, AMPERE), traits=frozenset({"half_dot"}),
        need="fp32 operands, or Triton 3.4", remedies=("via_fp32", "torch_path"), url=_FLA + "458",
        proof="tests/matrix/test_pre_ampere.py", confidence="compiled"),
    KnownIssue(
        id="half-dot-34-pre-ampere", effect="no tensor cores: dots on 16-bit operands become scalar code that spills tens of kilobytes a thread",
        triton=Range(since="3.4.0"), capabilities=(VOLTA, AMPERE), traits=frozenset({"half_dot"}),
        need="fp32 operands, whose scalar code hardly spills, or the torch path", remedies=(), url=_TRITON + "6698",
        proof="tests/matrix/test_pre_ampere.py", confidence="compiled"),
    KnownIssue(
        id="tf32-dot-turing-32", effect="IndexError: map::at while compiling a dot on fp32 operands with tf32 products",
        triton=Range(fixed_in="3.3.0"), capabilities=(TURING, AMPERE), traits=frozenset({"tf32_dot"}),
        need="input_precision='ieee', as flashlin's own kernels have it, or Triton 3.4", remedies=("torch_path",), url=_FLA + "75",
        proof="tests/matrix/test_pre_ampere.py", confidence="compiled"),
    KnownIssue(
        id="mma-to-mma-31", effect="the process aborts: mma -> mma layout conversion is only supported on Ampere",
        triton=Range(fixed_in="3.2.0"), capabilities=(HOPPER, BLACKWELL), traits=frozenset({"dot"}), min_warps=8,
        need="at most 4 warps, or Triton 3.4", remedies=("limit_num_warps", "torch_path"), url=_TRITON + "4492",
        proof="tests/matrix/test_hopper_warps.py", confidence="compiled"),
    KnownIssue(
        id="reshape-outs-32", effect="the process aborts: assertion in LinearLayout::reshapeOuts",
        triton=Range(since="3.2.0", fixed_in="3.3.0"), capabilities=(HOPPER, BLACKWELL), traits=frozenset({"dot"}), min_warps=8,
        need="at most 4 warps, or Triton 3.4", remedies=("limit_num_warps", "torch_path"), url=_FLA + "196",
        proof="tests/matrix/test_hopper_warps.py", confidence="compiled"),
    KnownIssue(
        id="stmatrix-33", effect="PassManager::run failed: chooseStMatrixLayoutLeadingOffset",
        triton=Range(since="3.3.0", fixed_in="3.4.0"), capabilities=(HOPPER, BLACKWELL), traits=frozenset({"dot"}), min_warps=8,
        need="at most 4 warps, or Triton 3.4", remedies=("limit_num_warps", "torch_path"), url=_FLA + "196",
        proof="tests/matrix/test_hopper_warps.py", confidence="compiled"),
    KnownIssue(
        id="tall-state-32", effect="the compiler aborts: 'Failed to emit transfer from register to shared' (3.2), UNREACHABLE (3.0, 3.1)",
        triton=Range(fixed_in="3.3.0"), capabilities=(HOPPER, BLACKWELL), traits=frozenset({"tall_state", "half_dot"}), min_warps=4,
        need="at most 2 warps for a state of 256 rows, or Triton 3.3", remedies=("limit_num_warps", "torch_path"),
        url="", proof="tests/matrix/test_hopper_warps.py, and an H200; no public thread known", confidence="compiled"),
    KnownIssue(
        id="blackwell-unknown-32", effect="the compiler aborts: the architecture is unknown to it",
        triton=Range(fixed_in="3.3.0"), capabilities=(BLACKWELL, END), need="Triton 3.4", remedies=("torch_path",),
        url=_TRITON + "6120", proof="compile probes of the releases", confidence="compiled"),
    KnownIssue(
        id="sm120-dot-330", effect="every dot fails to compile", triton=Range(since="3.3.0", fixed_in="3.3.1"),
        capabilities=(SM12, END), traits=frozenset({"dot"}), need="Triton 3.3.1", remedies=("torch_path",),
        url=_TRITON + "6120", proof="compile probes of the releases", confidence="compiled"),
    KnownIssue(
        id="sm103-35", effect="ptxas does not know sm_103, or the compiler aborts", triton=Range(since="3.3.0", fixed_in="3.6.0"),
        capabilities=(GB300, SM11), need="Triton 3.6", remedies=("torch_path",), url=_TRITON + "8473",
        proof="compile probes of the releases", confidence="compiled"),
    KnownIssue(
        id="sm110-36", effect="ptxas does not know sm_110, or the compiler aborts", triton=Range(since="3.3.0", fixed_in="3.7.1"),
        capabilities=(SM11, SM12), need="Triton 3.7.1", remedies=("torch_path",), url="",
        proof="compile probes of the releases; no public thread known", confidence="compiled"),
    KnownIssue(
        id="sm121-35", effect="ptxas does not know sm_121", triton=Range(since="3.3.0", fixed_in="3.6.0"),
        capabilities=(SM121, END), need="Triton 3.6", remedies=("torch_path",), url=_TRITON + "10331",
        proof="compile probes of the releases", confidence="compiled"),
    KnownIssue(
        id="blackwell-tcgen05-state", effect="silently wrong or varying results: a state that is decayed and read by a dot in one loop",
        triton=Range(since="3.3.0"), capabilities=(BLACKWELL, SM12), traits=frozenset({"dot", "rmw_acc"}), min_warps=4, min_stages=2,
        need="at most 2 warps, which keeps the loop off tcgen05", remedies=("limit_num_warps",), url=_TRITON + "10993",
        proof="issue threads (also #9871, #10590, #10821 and fla #607); no hardware at hand", confidence="thread"),
    KnownIssue(
        id="wgmma-register-hazard", effect="sporadic wrong values: ptxas before 13.3 may overwrite wgmma operands still being read",
        triton=Range(fixed_in="3.9.0"), ptxas=Range(fixed_in="13.3"), capabilities=(HOPPER, BLACKWELL), traits=frozenset({"dot"}),
        min_warps=4, min_stages=2, need="ptxas 13.3 (TRITON_PTXAS_PATH) or Triton 3.9 for certainty; our own configurations were run",
        remedies=(), url=_TRITON + "9433", proof="matrix/results: launches repeated bitwise on an H200", confidence="thread"),
)
