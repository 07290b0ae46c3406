"""The table of known issues, KNOWN_ISSUES: failures of Triton, ptxas and kernels.

Add an issue as one ``KnownIssue(...)`` literal, or as ``_Compiled(...)`` if a test compiles its proof.
Dispatch, doctor, ``flashlin why``, docs/troubleshooting.md and the tests read the table.

An issue is matched with the traits, warps and stages of a launch, and with the GPU, Triton and ptxas of its
target. It is never matched with the name of an op. An issue without ``remedies`` is reported by doctor and
changes no plan. An issue with a trait of TILE_FACTS rejects one tile of several. Its first remedy is then
``other_tile``, for which planning prints no message.
"""
from __future__ import annotations

from functools import lru_cache, partial

from flashlin.compat.known import END, FLA, ILLEGAL, PRE_VOLTA, TRITON, KnownIssue
from flashlin.compat.target import Target
from flashlin.compat.traits import trait_set

VOLTA, TURING, AMPERE, HOPPER, BLACKWELL, GB300, SM11, SM12, SM121 = (
    (7, 0), (7, 5), (8, 0), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
PRE_AMPERE, ON_HOPPER, ON_BLACKWELL = (VOLTA, AMPERE), (HOPPER, BLACKWELL), (BLACKWELL, SM11)


@lru_cache(maxsize=64)
def issues_here(target: Target) -> tuple[KnownIssue, ...]:
    """Return the known issues that affect a target, in the order of the table."""
    return tuple(issue for issue in KNOWN_ISSUES if issue.here(target))


_PROVEN = "tests/matrix/test_known_issues.py"
_PROVEN_HERE_ONLY = _PROVEN + "; no public thread known"
_NARROW = "an H200 with Triton 3.6.0: matrix/results/narrow-tiles-NVIDIA-H200-triton-3.6.0.json"
_TUNING = "tests/matrix/test_shield_releases.py"
_OUR_TUNER = "flashlin.autotune, or flashlin.patched('triton')"
# Tuning comes before the launch, so no launch has this trait, and issues with it change no plan.
_TUNED = trait_set("autotuned")
_DOT, _HALF_DOT = trait_set("dot"), trait_set("half_dot")
# traits of kernels of other packages only
_FOREIGN, _FOREIGN_DOT = trait_set("foreign"), trait_set("foreign", "half_dot")
_TUNER = 'triton/runtime/autotuner.py", line ..., in '
# Shared fields of issues. _Compiled: issues whose proof a test compiles. _OfTuner: issues of Triton's
# autotuner. _Narrow: issues of tiles that are too narrow on Hopper.
_Compiled = partial(KnownIssue, proof=_PROVEN, confidence="compiled")
_OfTuner = partial(KnownIssue, traits=_TUNED, proof=_TUNING, confidence="ran")
_Narrow = partial(
    KnownIssue, symptoms=(ILLEGAL,), since="3.3.0", capabilities=ON_HOPPER, min_warps=4,
    remedies=("other_tile", "torch_path"), url=TRITON + "11366", proof=_NARROW, confidence="ran")

KNOWN_ISSUES: tuple[KnownIssue, ...] = (
    KnownIssue(
        id="before-volta", effect="Triton has no code generator for this GPU",
        symptoms=("which is too old to be supported by the triton GPU compiler",),
        capabilities=(PRE_VOLTA, VOLTA), need="a GPU of compute capability 7.0 or newer, or the torch path",
        remedies=("torch_path",), url="https://github.com/triton-lang/triton#compatibility",
        proof="Triton's readme", confidence="documented"),
    _Compiled(
        id="bf16-pre-ampere-32",
        effect="ptxas: Feature '.bf16' requires .target sm_80 or higher; dots raise IndexError: map::at on "
               "sm_75",
        symptoms=("Feature '.bf16' requires .target sm_80 or higher",
                  "Feature 'cvt.bf16.f32' requires .target sm_80 or higher", "IndexError: map::at"),
        fixed_in="3.3.0", capabilities=PRE_AMPERE, traits=trait_set("bf16"),
        need="no bf16 tensor in a kernel, or Triton 3.4", remedies=("via_fp32", "torch_path"),
        url="https://github.com/Lightning-AI/pytorch-lightning/issues/18070",
        proof=_PROVEN + ", which also shows that sm_70 would multiply bf16 bits as if they were fp16"),
    _Compiled(
        id="half-dot-volta-32",
        effect="the compiler aborts: Failed to compute parent layout for slice layout",
        symptoms=("LLVM ERROR: Failed to compute parent layout for slice layout",),
        since="3.2.0", fixed_in="3.3.0", capabilities=(VOLTA, TURING), traits=_HALF_DOT,
        need="fp32 operands, or Triton 3.4", remedies=("via_fp32", "torch_path")),
    _Compiled(
        id="mma-to-mma-volta",
        effect="the process aborts: mma -> mma layout conversion is only supported on Ampere",
        symptoms=("mma -> mma layout conversion is only supported on Ampere",),
        fixed_in="3.2.0", capabilities=(VOLTA, TURING), traits=trait_set("half_dot", "mixed_sum"),
        need="fp32 operands, or Triton 3.4", remedies=("via_fp32", "torch_path"), url=TRITON + "4492"),
    _Compiled(
        id="v-first-volta",
        effect="Unsupported Shared -> DotOperand[MMAv1] conversion, or an abort (3.2): products with a "
               "state stored [V, K]",
        symptoms=("Unsupported Shared -> DotOperand[MMAv1] conversion",
                  "LLVM ERROR: Failed to emit transfer from register to shared"),
        fixed_in="3.3.0", capabilities=(VOLTA, TURING), traits=trait_set("half_dot", "v_first"),
        need="fp32 operands, or Triton 3.4", remedies=("via_fp32", "torch_path"), proof=_PROVEN_HERE_ONLY),
    _Compiled(
        id="half-dot-33-pre-ampere",
        effect="'Unsupported conversion from bf16 to f16', 'Unsupported rounding mode for conversion': "
               "every dot on 16-bit operands fails to compile",
        symptoms=("Unsupported conversion from bf16 to f16", "Unsupported conversion from f16 to f16",
                  "LLVM ERROR: Unsupported rounding mode for conversion"),
        since="3.3.0", fixed_in="3.4.0", capabilities=PRE_AMPERE, traits=_HALF_DOT,
        need="fp32 operands, or Triton 3.4", remedies=("via_fp32", "torch_path"), url=FLA + "458"),
    KnownIssue(
        id="half-dot-34-pre-ampere",
        effect="no tensor cores: dots on 16-bit operands become scalar code that spills tens of kilobytes "
               "per thread",
        since="3.4.0", capabilities=PRE_AMPERE, traits=_HALF_DOT,
        spared=_FOREIGN,  # a kernel outside flashlin runs as its author wrote it, even if slowly
        need="fp32 operands, which spill a tenth of that", remedies=("via_fp32",), url=TRITON + "6698",
        proof=_PROVEN, confidence="compiled"),
    _Compiled(
        id="tf32-dot-turing-32",
        effect="IndexError: map::at while compiling a dot on fp32 operands with tf32 products",
        symptoms=("IndexError: map::at",),
        fixed_in="3.3.0", capabilities=(TURING, AMPERE), traits=trait_set("tf32_dot"),
        need="input_precision='ieee', as in flashlin's own kernels, or Triton 3.4",
        remedies=("torch_path",), url=FLA + "75"),
    _Compiled(
        id="mma-to-mma-31",
        effect="the process aborts: mma -> mma layout conversion is only supported on Ampere",
        symptoms=("mma -> mma layout conversion is only supported on Ampere",),
        fixed_in="3.2.0", capabilities=ON_HOPPER, traits=_DOT, min_warps=8,
        need="at most 4 warps, or Triton 3.4", remedies=("limit_num_warps", "torch_path"),
        url=TRITON + "4492"),
    _Compiled(
        id="reshape-outs-32", effect="the process aborts: assertion in LinearLayout::reshapeOuts",
        symptoms=("LinearLayout::reshapeOuts",
                  "Assertion `getTotalOutDimSize() == std::accumulate"),
        since="3.2.0", fixed_in="3.3.0", capabilities=ON_HOPPER, traits=_DOT, min_warps=8,
        need="at most 4 warps, or Triton 3.4", remedies=("limit_num_warps", "torch_path"), url=FLA + "196"),
    _Compiled(
        id="stmatrix-33", effect="PassManager::run failed: chooseStMatrixLayoutLeadingOffset",
        symptoms=("chooseStMatrixLayoutLeadingOffset", "Assertion `instrN >= numColsPerChunk"),
        since="3.3.0", fixed_in="3.4.0", capabilities=ON_HOPPER, traits=_DOT, min_warps=8,
        need="at most 4 warps, or Triton 3.4", remedies=("limit_num_warps", "torch_path"), url=FLA + "196"),
    _Compiled(
        id="tall-state-32",
        effect="the compiler aborts: 'Failed to emit transfer from register to shared' (3.2), UNREACHABLE "
               "(3.0, 3.1)",
        symptoms=("LLVM ERROR: Failed to emit transfer from register to shared",
                  "UNREACHABLE executed at ...Conversion/TritonGPUToLLVM/Utility.h"),
        fixed_in="3.3.0", capabilities=ON_HOPPER, traits=trait_set("tall_state", "half_dot"), min_warps=4,
        need="at most 2 warps for a state of 64 rows or more with shorter chunks, or Triton 3.3",
        remedies=("limit_num_warps", "torch_path"), proof=_PROVEN + ", and an H200; no public thread known"),
    _Compiled(
        id="narrow-state-32",
        effect="the compiler aborts: chunks of 64 tokens with a state of fewer than 64 rows ('Failed to emit "
               "transfer from register to shared' in 3.2, UNREACHABLE or a segmentation fault in 3.0 and "
               "3.1); with fewer than 64 columns the kernel compiles, but has not been run",
        symptoms=("LLVM ERROR: Failed to emit transfer from register to shared",
                  "UNREACHABLE executed at ...Conversion/TritonGPUToLLVM/Utility.h"),
        fixed_in="3.3.0", capabilities=ON_HOPPER, traits=trait_set("half_dot", "narrow_state"), min_warps=4,
        need="chunks of 32 tokens, or Triton 3.3", remedies=("other_tile", "torch_path"),
        proof=_PROVEN_HERE_ONLY),
    _Narrow(
        id="hopper-narrow-state",
        effect="illegal access or silently wrong results: chunks of 64 tokens with a state of fewer than 64 "
               "columns (with one stage, or any number of stages if a tensor does not begin at a multiple of 16 "
               "bytes, which the chunk ops copy) or fewer than 64 rows (with two stages)",
        traits=trait_set("half_dot", "narrow_state"),
        need="chunks of 32 tokens (in 3.6.0 also two stages with fewer than 64 columns, or one with fewer than "
             "64 rows)"),
    _Narrow(
        id="hopper-narrow-scores",
        effect="illegal access, or with 8 warps results that vary: scores of chunks of 64 tokens, from fewer "
               "than 64 channels at a time",
        traits=trait_set("half_dot", "narrow_scores"), need="64 channels at a time, or chunks of 32 tokens"),
    _Narrow(
        id="hopper-narrow-grads",
        effect="illegal access or silently wrong gradients: 4 warps for a chunk of 64 tokens, with fewer "
               "than 32 channels at a time, or with fewer than 64 channels and more than 32 columns",
        traits=trait_set("half_dot", "narrow_grads"),
        need="64 channels at a time, or 32 channels with 32 columns, or chunks of 32 tokens (in 3.6.0, 8 "
             "warps also work)"),
    _Compiled(
        id="blackwell-unknown-32", effect="the compiler aborts: it does not support the architecture",
        symptoms=('getMMAVersionSafe...Assertion `false && "computeCapability not supported"',
                  *(f"Value '{sm}' is not defined for option 'gpu-name'"
                    for sm in ("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"))),
        fixed_in="3.3.0", capabilities=(BLACKWELL, END), need="Triton 3.4", remedies=("torch_path",),
        url=TRITON + "6120"),
    _Compiled(
        id="sm120-dot-330", effect="every dot fails to compile",
        symptoms=('getMMAVersionSafe...Assertion `false && "computeCapability not supported"',),
        since="3.3.0", fixed_in="3.3.1", capabilities=(SM12, END), traits=_DOT, need="Triton 3.3.1",
        remedies=("torch_path",), url=TRITON + "6120"),
    _Compiled(
        id="sm103-llvm-33", effect="the compiler aborts: Cannot select",
        symptoms=("LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.shfl.sync",),
        since="3.3.0", fixed_in="3.4.0", capabilities=(GB300, SM11), traits=_DOT, need="Triton 3.6",
        remedies=("torch_path",), url=TRITON + "8473"),
    KnownIssue(
        id="sm103-llvm-350", effect="the compiler aborts: Cannot select: tcgen05.wait.st",
        symptoms=("LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.tcgen05.wait.st",),
        since="3.5.0", fixed_in="3.5.1", capabilities=(GB300, SM11), traits=_DOT, need="Triton 3.6",
        remedies=("torch_path",), url=TRITON + "8473",
        proof="the thread; seen once with the product of matrix/proofs, but no test runs 3.5.0"),
    _Compiled(
        id="sm103-ptxas", effect="ptxas does not support sm_103",
        symptoms=("Value 'sm_103a' is not defined for option 'gpu-name'",),
        since="3.3.0", ptxas_fixed_in="12.9", capabilities=(GB300, SM11),
        need="Triton 3.6, or Triton 3.4 and newer with ptxas 12.9 (TRITON_PTXAS_PATH)",
        remedies=("torch_path",), url=TRITON + "8473"),
    _Compiled(
        id="sm110-ptxas", effect="ptxas does not support sm_110",
        symptoms=("Value 'sm_110a' is not defined for option 'gpu-name'",),
        since="3.3.0", ptxas_fixed_in="13.0", capabilities=(SM11, SM12),
        need="Triton 3.7, or Triton 3.5 and newer with ptxas 13.0 (TRITON_PTXAS_PATH)",
        remedies=("torch_path",), proof=_PROVEN_HERE_ONLY),
    _Compiled(
        id="sm121-ptxas", effect="ptxas does not support sm_121",
        symptoms=("Value 'sm_121a' is not defined for option 'gpu-name'",),
        since="3.3.0", ptxas_fixed_in="12.9", capabilities=(SM121, END),
        need="Triton 3.6, or Triton 3.4 and newer with ptxas 12.9 (TRITON_PTXAS_PATH)",
        remedies=("torch_path",), url=TRITON + "10331"),
    _Compiled(
        id="ptxas-127-32",
        effect="Unsupported .version, or Triton only support CUDA 10.0 or higher: this Triton cannot use a "
               "ptxas newer than 12.6",
        symptoms=("Unsupported .version", "Triton only support CUDA 10.0 or higher"),
        fixed_in="3.3.0", ptxas_since="12.7",
        need="TRITON_PTXAS_PATH unset, or set to a ptxas 12.6, or Triton 3.3", remedies=("torch_path",),
        proof=_PROVEN_HERE_ONLY),
    _Compiled(
        id="ptxas-13-34",
        effect="Triton only support CUDA 10.0 or higher: this Triton rejects a ptxas of CUDA 13",
        symptoms=("Triton only support CUDA 10.0 or higher",), fixed_in="3.5.0", ptxas_since="13.0",
        need="TRITON_PTXAS_PATH unset, or set to a ptxas 12, or Triton 3.5", remedies=("torch_path",),
        proof=_PROVEN_HERE_ONLY),
    _Compiled(
        id="hoist-tmem-34",
        effect="Failed to hoist tmem_store: a state to which the difference of two products is added",
        symptoms=("UNREACHABLE executed at ...HoistTMEMAlloc.cpp", "Failed to hoist tmem_store"),
        since="3.4.0", fixed_in="3.5.0", capabilities=ON_BLACKWELL, traits=trait_set("half_dot", "rmw_acc"),
        min_warps=4, need="at most 2 warps, or Triton 3.5", remedies=("limit_num_warps", "torch_path"),
        url=FLA + "607", proof=_PROVEN + "; the reverse scan of flashlin's delta rule also fails"),
    _Compiled(
        id="hoist-tmem-34-tf32", effect="Failed to hoist tmem_store: as for hoist-tmem-34, but with tf32 "
                                        "products",
        symptoms=("UNREACHABLE executed at ...HoistTMEMAlloc.cpp", "Failed to hoist tmem_store"),
        since="3.4.0", fixed_in="3.5.0", capabilities=ON_BLACKWELL, traits=trait_set("tf32_dot", "rmw_acc"),
        min_warps=4, need="at most 2 warps, or Triton 3.5", remedies=("limit_num_warps",), url=FLA + "607"),
    _Compiled(
        id="latencies-35-tf32",
        effect="PassManager::run failed in TritonGPUAssignLatencies: a state in a loop of tf32 products",
        symptoms=("Pipeline failed while executing [`TritonGPUAssignLatencies`",),
        since="3.5.0", fixed_in="3.6.0", capabilities=ON_BLACKWELL, traits=trait_set("tf32_dot", "rmw_acc"),
        min_warps=4, min_stages=2, need="at most 2 warps, or one stage, or Triton 3.6",
        remedies=("limit_num_warps",), proof=_PROVEN_HERE_ONLY),
    _Compiled(
        id="dominance-35",
        effect="operand #2 does not dominate this use: a product is added to a value that the same iteration "
               "of a short loop has made",
        symptoms=("operand #2 does not dominate this use",),
        since="3.5.0", fixed_in="3.6.0", capabilities=ON_BLACKWELL, traits=trait_set("dot", "fresh_acc"),
        min_warps=4, min_stages=2, need="at most 2 warps, or one stage, or Triton 3.6",
        remedies=("limit_num_warps", "torch_path"), url=FLA + "638"),
    KnownIssue(
        id="blackwell-chained-acc",
        effect="silently wrong results: a loop that adds two products per iteration to one accumulator, "
               "where the products use a third buffer",
        since="3.4.0", fixed_in="3.9.0", capabilities=(BLACKWELL, SM12),
        traits=trait_set("dot", "chained_acc"), min_warps=4, min_stages=2,
        need="at most 2 warps, or an accumulator for each product, or Triton 3.9",
        remedies=("limit_num_warps",), url=TRITON + "10821",
        proof="the thread, for 3.6 to 3.8; " + _PROVEN + " shows the same buffers in 3.4 and 3.5"),
    KnownIssue(
        id="blackwell-tcgen05-state",
        effect="silently wrong or varying results: a state that is decayed and read by a dot in one loop",
        since="3.3.0", capabilities=(BLACKWELL, SM12), traits=trait_set("dot", "rmw_acc"), min_warps=4,
        min_stages=2, need="at most 2 warps, which keeps the loop off tcgen05", remedies=("limit_num_warps",),
        url=TRITON + "10993",
        proof="issue threads (also #9871, #10590, #10821 and fla #607); not run on such a GPU"),
    KnownIssue(
        id="wgmma-register-hazard",
        effect="sporadic wrong values: ptxas before 13.3 may overwrite wgmma operands that are still being "
               "read",
        fixed_in="3.9.0", ptxas_fixed_in="13.3", capabilities=ON_HOPPER, traits=_DOT, min_warps=4,
        min_stages=2,
        need="ptxas 13.3 (TRITON_PTXAS_PATH), or Triton 3.9, to exclude it; the configurations of flashlin "
             "have been run",
        url=TRITON + "9433", proof="matrix/results: launches repeated bitwise on an H200"),
    KnownIssue(
        id="blackwell-eight-warps", effect="results vary from run to run: products of products with 8 warps",
        since="3.3.0", fixed_in="3.8.0", capabilities=ON_BLACKWELL, traits=_FOREIGN_DOT, min_warps=8,
        min_stages=2, need="at most 4 warps for an affected kernel, or Triton 3.8", url=FLA + "1228",
        proof="the thread, also #1229, #1327"),
    KnownIssue(
        id="blackwell-backward-913",
        effect="illegal access, NaN or a hang: backward kernels of other packages with 4 or more warps",
        symptoms=("Triton Error [CUDA]: misaligned address", ILLEGAL),
        since="3.3.0", capabilities=ON_BLACKWELL, traits=_FOREIGN_DOT, min_warps=4,
        need="2 warps for an affected kernel", url=FLA + "913", proof="threads, also #727 and #1000"),
    KnownIssue(
        id="ptxas-131-bits", effect="results sometimes differ bitwise from run to run",
        ptxas_since="13.0", ptxas_fixed_in="13.3", capabilities=ON_BLACKWELL, traits=_DOT,
        need="another ptxas (TRITON_PTXAS_BLACKWELL_PATH)",
        url="https://github.com/pytorch/pytorch/issues/181248",
        proof="the thread, which does not state that 13.3 is free of it"),
    KnownIssue(
        id="hopper-gated-backward-640",
        effect="silently wrong gradients of q, k and gate: a gated backward with tiles of 64 columns",
        since="3.4.0", fixed_in="3.7.1", capabilities=ON_HOPPER, traits=_FOREIGN_DOT, min_warps=4,
        need="tiles of 32 or 128 columns, or Triton 3.7.1; flashlin's own backward was compared on an H200",
        url=FLA + "640", proof="the thread; fla itself refuses to run this backward there"),
    KnownIssue(
        id="hopper-wy-backward-984",
        effect="silently wrong gradients or an illegal access: the delta rule's backward with 4 warps and "
               "chunks of 64 tokens",
        symptoms=(ILLEGAL,), since="3.4.0", capabilities=ON_HOPPER, traits=_FOREIGN_DOT, min_warps=4,
        need="2 warps for that kernel; 3.8 and 3.9 have not been tried", url=FLA + "984", proof="the thread"),
    KnownIssue(
        id="hopper-32-columns",
        effect="illegal access: kernels of several products with tiles of 32 columns and 4 warps",
        symptoms=(ILLEGAL,),
        since="3.3.0", fixed_in="3.8.0", capabilities=ON_HOPPER, traits=_FOREIGN_DOT, min_warps=4,
        need="other tiles, or Triton 3.8", url=TRITON + "11366",
        proof="the thread, and fla #807 for 3.3 to 3.5"),
    KnownIssue(
        id="hopper-dot-trans-dot-32",
        effect="silently wrong values: a product whose operand is a transposed product",
        since="3.2.0", fixed_in="3.3.0", capabilities=ON_HOPPER,
        traits=trait_set("foreign", "dot"), min_warps=4, need="at most 2 warps, or another Triton",
        url=TRITON + "6124", proof="the thread"),
    KnownIssue(
        id="hopper-odd-columns-1262", effect="illegal access: 16-bit tiles with an odd number of columns",
        symptoms=(ILLEGAL,), since="3.7.0", fixed_in="3.8.0", ptxas_fixed_in="13.0", capabilities=ON_HOPPER,
        traits=_FOREIGN_DOT, need="an even number of columns (flashlin pads its tiles), or ptxas 13.0",
        url=FLA + "1262", proof="the thread"),
    KnownIssue(
        id="hopper-unit-scale-1262",
        effect="writes out of bounds: an integer argument scale=1, which Triton turns into a constant",
        symptoms=("Invalid __shared__ write", ILLEGAL),
        since="3.7.0", fixed_in="3.8.0", ptxas_fixed_in="13.1", capabilities=ON_HOPPER,
        traits=_FOREIGN_DOT, need="scale=1.0, or ptxas 13.1", url=FLA + "1262", proof="the thread"),
    KnownIssue(
        id="ptxas-1296-16-bit-sums",
        effect="values off by one: ptxas drops a constant from sums of packed 16-bit integers",
        ptxas_since="12.9.86", ptxas_fixed_in="13.3", capabilities=ON_HOPPER, traits=_FOREIGN,
        need="ptxas 13.3 (ptxas-blackwell in the wheel of Triton 3.8.0, by TRITON_PTXAS_PATH), or Triton 3.9",
        url=TRITON + "11581", proof="the thread, which reports on 12.9.86 and 13.3.33"),
    _Compiled(
        id="both-halves-39",
        effect="ptxas: Feature '.bf16' requires .target sm_80 or higher: fp16 values cast to bf16",
        symptoms=("Feature '.bf16' requires .target sm_80 or higher",),
        since="3.9.0", capabilities=PRE_AMPERE, traits=trait_set("both_halves"),
        need="a cast through fp32, or Triton 3.8", remedies=("via_fp32",), proof=_PROVEN_HERE_ONLY),
    _Compiled(
        id="row-sums-read-twice",
        effect="the compiler aborts (3.2 and before), or 'PassManager::run failed': a loop that accumulates "
               "the sums or maxima of the rows of a loaded tile, whose result is not read exactly once",
        symptoms=("Assertion `loopResult.hasOneUse()' failed",),
        fixed_in="3.8.0", traits=trait_set("foreign", "row_sums"),
        need="a loop that accumulates the tiles, whose rows are summed after the loop, or Triton 3.8",
        url="https://github.com/triton-lang/triton/pull/11682"),
    KnownIssue(
        id="row-sums-read-inside",
        effect="silently wrong values: a loop that accumulates the sums or maxima of the rows of a loaded "
               "tile, and also reads the accumulator, which then has its initial value",
        fixed_in="3.9.0", traits=trait_set("foreign", "read_row_sums"),
        need="a loop that accumulates the tiles, whose rows are summed at each read, or Triton 3.9",
        remedies=("torch_path",), url=TRITON + "11836",
        proof="the thread; compiled with 3.0 to 3.8, such a loop stores a constant"),
    KnownIssue(
        id="row-sums-joined",
        effect="the compiler aborts (3.2 and before), or 'PassManager::run failed': a loop that carries the "
               "sums of the rows of a loaded tile, added to another value than the accumulator of the "
               "previous iteration (total + x + sum) or, before 3.9, to nothing (their negative)",
        symptoms=("Assertion `isa<BlockArgument>(accumOperand)' failed",
                  "Assertion `oldUpdate->getNumOperands() == 2' failed"),
        traits=_FOREIGN, need="sums of a value that is computed from the tile, not of the loaded tile itself",
        url=TRITON + "11631", proof="the thread; compiled with 3.0 to 3.9"),
    _Compiled(
        id="block-pointers-39", effect="NotImplementedError: Block pointers have been removed",
        symptoms=("Block pointers have been removed",),
        since="3.9.0", traits=trait_set("make_block_ptr"), need="pointers and masks, or Triton 3.8",
        url=TRITON + "10833", proof=_PROVEN + "; builds of main report version 3.8.0 and also reject them"),
    _Compiled(
        id="gather-32", effect="AttributeError: triton.language has no gather",
        symptoms=("module 'triton.language' has no attribute 'gather'",),
        fixed_in="3.3.0", traits=trait_set("gather"), need="Triton 3.3", url=FLA + "329"),
    _Compiled(
        id="descriptors-33", effect="AttributeError: triton.language has no make_tensor_descriptor",
        symptoms=("module 'triton.language' has no attribute 'make_tensor_descriptor'",),
        fixed_in="3.4.0", traits=trait_set("make_tensor_descriptor"), need="Triton 3.4", url=FLA + "550"),
    KnownIssue(
        id="descriptors-allocator",
        effect="Kernel requires a runtime memory allocation, but no allocator was set",
        symptoms=("Kernel requires a runtime memory allocation, but no allocator was set",),
        since="3.4.0", capabilities=(HOPPER, END), traits=trait_set("make_tensor_descriptor"),
        need="triton.set_allocator(...) before the first launch", url=TRITON + "10002", proof="the thread"),
    _Compiled(
        id="bf16-atomics-33", effect="atomic_add does not support bf16",
        symptoms=("ValueError: atomic_add does not support bf16",),
        fixed_in="3.4.0", traits=trait_set("atomic_add", "bf16"), need="sums in fp32, or Triton 3.4",
        url="https://github.com/fla-org/flash-linear-attention/commit/a9dac8b1"),
    KnownIssue(
        id="amd-stages-36",
        effect="the compiler aborts: operation destroyed but still has uses, in loops of several loads with "
               "4 stages",
        symptoms=("LLVM ERROR: operation destroyed but still has uses",),
        since="3.6.0", amd=("gfx9", "gfx12"), traits=_FOREIGN_DOT, min_stages=4, need="at most 2 stages",
        url=TRITON + "9815", proof="the thread (gfx942), and vllm #44973 (gfx90a)"),
    KnownIssue(
        id="amd-stages-hang-36",
        effect="the compiler never finishes: a kernel of several products with 3 or more stages",
        symptoms=("No available shared memory broadcast block found",),
        since="3.6.0", amd=("gfx12",), traits=_FOREIGN_DOT, min_stages=3, need="at most 2 stages",
        url="https://github.com/vllm-project/vllm/issues/45929",
        proof="the thread (gfx1201; vllm prints the message while it waits)"),
    KnownIssue(
        id="amd-block-pointers",
        effect="illegal access, an aperture violation or a hang: a pipelined loop over block pointers",
        symptoms=("HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION",
                  "pipeliner doesn't know how to predicate this op"),
        since="3.5.0", fixed_in="3.9.0", amd=("gfx942", "gfx950"), traits=trait_set("make_block_ptr"),
        min_stages=2, need="one stage, or pointers and masks",
        url="https://github.com/ROCm/triton/issues/937",
        proof="the thread, about chunk_delta_h in vllm; 3.9 has no block pointers"),
    KnownIssue(
        id="amd-pingpong",
        effect="silently wrong results: products of large fp32 tiles with 8 warps, whose loads race",
        amd=("gfx942",), traits=trait_set("dot", "foreign"), min_warps=8, min_stages=2,
        need="TRITON_HIP_USE_BLOCK_PINGPONG=0, or fewer warps (fixed in Triton on 2026-09-14)",
        url=TRITON + "11696", proof="the thread"),
    KnownIssue(
        id="amd-scratch-38",
        effect="results vary: a kernel reads values from scratch memory before it has written them",
        since="3.8.0", fixed_in="3.9.0", amd=("gfx11", "gfx12"),
        need="a Triton build from AMD that contains triton-lang/triton#10906",
        url="https://github.com/ROCm/triton/pull/967",
        proof="the thread (gfx1151), which reports it for AMD's wheels of 3.8"),
    KnownIssue(
        id="amd-loop-37",
        effect="silently wrong results, or with 2 or more warps illegal accesses: a loop that sums and "
               "stores scalars",
        since="3.7.0", fixed_in="3.9.0", amd=("gfx11",),
        need="tl.static_range, or a Triton that contains triton-lang/triton#10496", url=TRITON + "11378",
        proof="the thread (gfx1151), and triton-lang/triton#11793 (gfx1100), which report it for AMD's "
              "wheels of 3.7; they do not say whether 3.8 contains the change"),
    KnownIssue(
        id="amd-loop-counts",
        effect="silently wrong results: the compiler decides a branch on a counter of a loop (such as the "
               "test for an epilogue) for fewer iterations than the loop may have",
        since="3.4.0", fixed_in="3.9.0", amd=("gfx9", "gfx11", "gfx12"), traits=_FOREIGN,
        need="Triton 3.9, or a comparison with a value that is computed without the loop",
        url="https://github.com/triton-lang/triton/pull/11429",
        proof=_PROVEN + ", for each GPU: a nested loop (3.5, 3.6), a loop of up to 8 iterations (3.8)",
        confidence="ran"),
    KnownIssue(
        id="amd-race-38",
        effect="results vary: products of 16-bit tiles of 16 x 16 x 256, as in aiter's gemm_a16w16",
        since="3.8.0", amd=("gfx950",), traits=_FOREIGN_DOT, min_warps=8, min_stages=2,
        need="another tile, as in aiter's fix", url="https://github.com/ROCm/aiter/pull/5428",
        proof="the thread"),
    KnownIssue(
        id="amd-conv-backward-1156",
        effect="silently wrong gradients, hipErrorIllegalAddress or a hang: backward of the short "
               "convolution of fla",
        symptoms=("hipErrorIllegalAddress",), amd=("gfx950",), traits=_FOREIGN,
        need="another convolution, such as flashlin's in plain torch", url=FLA + "1156",
        proof="the thread: an MI355X with ROCm 7.2, fla 0.4.2 and 0.5.2; its delta rule is right there"),
    _OfTuner(
        id="autotune-keys-31",
        effect="IndexError, or silently tuned for the wrong argument: an argument in the autotuner's key "
               "comes after one that the configurations set",
        symptoms=("IndexError: list index out of range",), seen_in=_TUNER + "run",
        fixed_in="3.2.0", need=_OUR_TUNER + ", or Triton 3.2", url=FLA + "354"),
    _OfTuner(
        id="autotune-unknown-keys-31", effect="ValueError at import: a key of the autotuner is not in list",
        symptoms=("ValueError: '...' is not in list",), seen_in=_TUNER + "__init__",
        fixed_in="3.2.0", need=_OUR_TUNER + ", or Triton 3.2"),
    _OfTuner(
        id="autotune-unknown-keys-39",
        effect="ValueError at import: key contains names that are not kernel arguments",
        symptoms=("ValueError: key contains names that are not kernel arguments",),
        since="3.9.0", need=_OUR_TUNER + ", or fla-core 0.6.0", url=TRITON + "11602"),
    _OfTuner(
        id="autotune-driver-33",
        effect="RuntimeError: 0 active drivers, when a module with a tuned kernel is imported without a GPU",
        symptoms=("RuntimeError: 0 active drivers ([]). There should only be one",),
        seen_in=_TUNER + "__init__", since="3.2.0", fixed_in="3.4.0", need=_OUR_TUNER + ", or Triton 3.4"),
    _OfTuner(
        id="autotune-one-bad-configuration",
        effect="one configuration that does not compile ends the call, or the process", need=_OUR_TUNER,
        url=FLA + "552"),
)
