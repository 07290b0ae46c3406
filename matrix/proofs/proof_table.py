"""List the launches of proof_kernels.py that show each known issue.

The test tests/matrix/test_known_issues.py compiles each launch with the oldest and the newest affected
release. The traits of a launch are read from its source in the same way as ``shield`` reads them, so a proof
also shows that the known issue matches the kernel.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import proof_kernels

from flashlin.compat.traits import trait_set, with_operands
from flashlin.kernels.shield import source
from flashlin.testing.compile import Result
from flashlin.testing.record import Recorded

NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
BF16, FP16, FP32 = "*bf16:16", "*fp16:16", "*fp32:16"


def not_ok(result: Result) -> bool:
    return not result.ok


def without_tensor_cores(result: Result) -> bool:
    return result.ok and not result.matrix


def with_tensor_cores(result: Result) -> bool:
    return result.ok and bool(result.matrix)


def with_a_third_buffer(result: Result) -> bool:
    """Return True if the kernel compiled and uses more than 40 KiB of shared memory.

    Two operands of 8 KiB in two stages need only 32 KiB, so more memory means a third buffer.
    """
    return result.ok and result.shared > 40 * 1024


class Proof(NamedTuple):
    """One launch that shows a known issue by failing to compile, or by compiling to different code.

    issue: id of the known issue.
    sm: compute capability on which the launch fails, under every release that has the issue.
    launch: the launch that fails.
    says: texts, any of which the failure prints.
    cured: a launch with the same work that follows the fix of the issue, and does not fail there.
    spared: a compute capability on which `launch` does not fail, or 0.
    fails: predicate that recognizes the failure in the result of the compilation.
    ptxas_of: release whose ptxas-blackwell replaces the bundled assembler, or an empty string.
    """
    issue: str
    sm: int
    launch: Recorded
    says: tuple[str, ...] = ()
    cured: Recorded | None = None
    spared: int = 0
    fails: Callable[[Result], bool] = not_ok
    ptxas_of: str = ""


def launch(kernel: str, pointers: str | tuple[str, ...], warps: int = 4, stages: int = 2,
           more: tuple[str, ...] = (), **constants: int) -> Recorded:
    """Return a launch of a proof kernel with its traits.

    kernel: name of the kernel in proof_kernels.py.
    pointers: pointer type of all arguments, or one type for each. The argument T is an int32 instead.
    more: traits that cannot be read from the source, and that only the recipes of flashlin set.
    constants: values of the constexpr arguments.
    """
    jit = getattr(proof_kernels, kernel)
    names = [name for name in jit.arg_names if name not in constants]
    kinds = iter([pointers] * len(names) if isinstance(pointers, str) else pointers)
    arguments = tuple((name, "i32" if name == "T" else next(kinds)) for name in names)
    dtypes = frozenset(NAMES[kind[1:].partition(":")[0]] for _, kind in arguments if kind != "i32")
    read, sizes = source.of(jit), tuple(constants.items())
    traits = with_operands(read.traits, dtypes, read.half, sizes) | trait_set(*more)
    return Recorded("proof_kernels", kernel, arguments, sizes, warps, stages, 0, tuple(sorted(traits)))


COPY = launch("cast", FP32)
HALF_PRODUCT = launch("product", (FP16, FP16, FP32), N=32)
BF16_PRODUCT = launch("product", (BF16, BF16, FP32), N=32)
IEEE_PRODUCT = launch("ieee_product", FP32, N=32)
ROW_SUMS = launch("row_sums", (FP16, FP16, FP32), N=32)
SCAN_8, SCAN_4 = (launch("scan", BF16, warps, K=64, V=64, BT=64) for warps in (8, 4))
SHORT_4, SHORT_2 = (launch("scan", BF16, warps, more=("tall_state",), K=64, V=32, BT=32) for warps in (4, 2))
FLAT_64 = launch("scan", BF16, more=("narrow_state",), K=32, V=128, BT=64)
FLAT_32 = launch("scan", BF16, K=32, V=128, BT=32)
TALL_4, TALL_2 = (launch("scan", BF16, warps, K=256, V=32, BT=32) for warps in (4, 2))
REVERSE_4, REVERSE_2 = (launch("reverse_scan", BF16, warps, N=64) for warps in (4, 2))
TF32_4, TF32_2 = (launch("reverse_scan", FP32, warps, N=64) for warps in (4, 2))
ADDED_4, ADDED_2 = (launch("added_to_loaded", (BF16, BF16, FP32), warps, N=64) for warps in (4, 2))
CHAINED_4, CHAINED_2 = (launch("chained", (BF16, BF16, FP32), warps, N=64) for warps in (4, 2))
NO_BF16 = "Feature '.bf16' requires .target sm_80 or higher"
UNKNOWN = ("is not defined for option 'gpu-name'",)

PROOFS = (
    # GPUs below sm_80
    Proof("bf16-pre-ampere-32", 70, launch("cast", (FP32, BF16)),
          (NO_BF16, "Feature 'cvt.bf16.f32' requires"), COPY, 80),
    Proof("bf16-pre-ampere-32", 75, BF16_PRODUCT, ("IndexError: map::at",), IEEE_PRODUCT, 80),
    # Volta tensor cores only multiply fp16, and Triton passes them the bits of bf16 unconverted.
    Proof("bf16-pre-ampere-32", 70, BF16_PRODUCT, cured=IEEE_PRODUCT, fails=with_tensor_cores),
    Proof("mma-to-mma-volta", 70, launch("mixed_sum", (FP16, FP16, FP32), more=("mixed_sum",), N=32),
          ("mma -> mma layout conversion is only supported on Ampere",), IEEE_PRODUCT, 75),
    Proof("v-first-volta", 70, launch("column_state", (FP16, FP32, FP32), more=("v_first",), N=64),
          ("Unsupported Shared -> DotOperand[MMAv1] conversion",
           "Failed to emit transfer from register to shared"),
          launch("column_state", FP32, more=("v_first",), N=64), 75),
    Proof("half-dot-volta-32", 70, ROW_SUMS, ("Failed to compute parent layout for slice layout",),
          launch("ieee_row_sums", FP32, N=32), 75),
    Proof("half-dot-33-pre-ampere", 70, HALF_PRODUCT,
          ("Unsupported rounding mode for conversion", "Unsupported conversion from"), IEEE_PRODUCT, 80),
    Proof("half-dot-33-pre-ampere", 75, BF16_PRODUCT,
          ("Unsupported rounding mode for conversion", "Unsupported conversion from"), IEEE_PRODUCT, 80),
    Proof("half-dot-34-pre-ampere", 75, HALF_PRODUCT, spared=80, fails=without_tensor_cores),
    Proof("tf32-dot-turing-32", 75, launch("product", FP32, N=32), ("IndexError: map::at",), IEEE_PRODUCT,
          80),
    Proof("both-halves-39", 75, launch("cast", (FP16, BF16)), (NO_BF16,), COPY, 80),
    # Hopper
    Proof("mma-to-mma-31", 90, SCAN_8, ("mma -> mma layout conversion is only supported on Ampere",), SCAN_4,
          80),
    Proof("reshape-outs-32", 90, SCAN_8, ("reshapeOuts",), SCAN_4, 80),
    Proof("stmatrix-33", 90, SCAN_8, ("chooseStMatrixLayoutLeadingOffset",), SCAN_4, 80),
    Proof("tall-state-32", 90, TALL_4,
          ("UNREACHABLE executed", "Failed to emit transfer from register to shared"), TALL_2, 80),
    Proof("tall-state-32", 90, SHORT_4,
          ("UNREACHABLE executed", "Failed to emit transfer from register to shared"), SHORT_2, 80),
    Proof("narrow-state-32", 90, FLAT_64, ("SIGSEGV", "UNREACHABLE executed",
                                           "Failed to emit transfer from register to shared"), FLAT_32, 80),
    # Blackwell
    Proof("blackwell-unknown-32", 120, COPY, UNKNOWN, spared=90),
    Proof("blackwell-unknown-32", 100, BF16_PRODUCT, ("getMMAVersionSafe",), spared=90),
    Proof("sm120-dot-330", 120, BF16_PRODUCT, ("getMMAVersionSafe",), COPY, 100),
    Proof("sm103-llvm-33", 103, launch("product", (BF16, BF16, FP32), N=64), ("Cannot select",), spared=100),
    Proof("hoist-tmem-34", 100, REVERSE_4, ("HoistTMEMAlloc",), REVERSE_2, 120),
    Proof("hoist-tmem-34-tf32", 100, TF32_4, ("HoistTMEMAlloc",), TF32_2, 90),
    Proof("latencies-35-tf32", 100, TF32_4,
          ("Failures have been detected while processing an MLIR pass pipeline",), TF32_2, 90),
    Proof("dominance-35", 100, ADDED_4, ("operand #2 does not dominate this use",), ADDED_2, 120),
    # Wrong values need a GPU to show. Compilation only shows that this release builds the loop differently.
    Proof("blackwell-chained-acc", 100, CHAINED_4, cured=CHAINED_2, spared=120, fails=with_a_third_buffer),
    # the assembler
    Proof("sm103-ptxas", 103, COPY, UNKNOWN, spared=100),
    Proof("sm103-ptxas", 103, COPY, ptxas_of="3.6.0"),
    Proof("sm110-ptxas", 110, COPY, UNKNOWN, spared=100),
    Proof("sm110-ptxas", 110, COPY, ptxas_of="3.7.1"),
    Proof("sm121-ptxas", 121, COPY, UNKNOWN, spared=120),
    Proof("sm121-ptxas", 121, COPY, ptxas_of="3.6.0"),
    Proof("ptxas-127-32", 90, COPY, ("Unsupported .version", "Triton only support CUDA 10.0 or higher",),
          ptxas_of="3.6.0"),
    Proof("ptxas-13-34", 90, COPY, ("Triton only support CUDA 10.0 or higher",), ptxas_of="3.7.1"),
    # any GPU
    Proof("row-sums-read-twice", 80, launch("summed_twice", FP32, more=("foreign",), N=64),
          ("loopResult.hasOneUse()",), launch("summed_at_the_end", FP32, N=64)),
    # functions of triton.language that this release lacks
    Proof("block-pointers-39", 90, launch("block_pointer", FP32), ("Block pointers have been removed",),
          COPY),
    Proof("gather-32", 90, launch("gathered", FP32), ("has no attribute 'gather'",), COPY),
    Proof("descriptors-33", 90, launch("described", FP32), ("has no attribute 'make_tensor_descriptor'",),
          COPY),
    Proof("bf16-atomics-33", 90, launch("added", BF16), ("atomic_add does not support bf16",),
          launch("added", FP32)),
)
