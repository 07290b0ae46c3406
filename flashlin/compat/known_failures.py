"""The table of known failures that are neither known issues nor known flaws, KNOWN_FAILURES.

It contains limits of CUDA, tokens and offsets that are out of range, and missing requirements of Triton.
Failures of compilers are in known_issues.py, and those of single packages in known_flaws.py. Add a failure as
one ``Known(...)`` literal. ``flashlin why``, docs/troubleshooting.md and the tests read the table.
"""
from __future__ import annotations

from functools import partial

from flashlin.compat.known import EVERYWHERE, FLA, ILLEGAL, TRITON, Known

_TUNER = "triton/runtime/autotuner.py"
# Shared fields of failures on machines that lack a requirement of Triton.
_Unequipped = partial(Known, handled="with FLASHLIN_PATH=torch its ops run without Triton until this is "
                                     "fixed",
                      proof="found in the source of Triton 3.0 to 3.9")
# Shared fields of texts that many different failures print.
_General = partial(Known, general=True, cards="any; the lines before this one show the cause",
                   proof="printed by Triton 3.0 to 3.9")

KNOWN_FAILURES: tuple[Known, ...] = (
    Known(
        id="grid-axis-65535",
        effect="a launch has more than 65,535 programs on the second or third axis of its grid; in fla these "
               "axes are batch times heads, sequences times heads, or chunks",
        symptoms=("Triton Error [CUDA]: invalid argument",),
        handled="its ops run: their grids have one axis, or their launches are split by batch; "
                "flashlin.shield(kernel, batch=..., batch_axis=...) splits the launches of your own kernel",
        need="call it on slices of the batch, each with B * H up to 65,535: sequences do not depend on "
             "each other",
        url=FLA + "172", proof="tests/gpu/test_shield.py; matrix/results/holes-*.json"),
    Known(
        id="token-out-of-range",
        effect="a token is not in the vocabulary (or a target is not among the classes, or an index is not "
               "in its table). The kernel in the traceback is not the cause: it is the first call after the "
               "one that failed. The CUDA context is lost",
        symptoms=("CUDA error: device-side assert triggered",
                  "Triton Error [CUDA]: device-side assert triggered",
                  "Assertion `srcIndex < srcSelectDimSize` failed",
                  'Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed'),
        handled="flashlin.embedding, flashlin.guard_embeddings(model) and flashlin.check_tokens(tokens, "
                "vocab_size) raise a ValueError with the position and the value, and the CUDA context "
                "survives",
        need="compare tokens.min() and tokens.max() with the size of the vocabulary on the CPU, and count "
             "the tokens that were added to the tokenizer; restart the process; set CUDA_LAUNCH_BLOCKING=1 "
             "to see the call that fails",
        url=FLA + "38", proof="tests/gpu/test_tokens.py"),
    Known(
        id="shared-memory",
        effect="a tile of this kernel needs more shared memory than the GPU has for a program: 99 KB on "
               "sm_86, sm_89 and sm_120, 64 KB on sm_75. The same source needs more on some newer Triton "
               "releases",
        symptoms=("out of resource: shared memory",),
        cards="most often RTX 3090, RTX 4090, RTX 5090 and T4, with head sizes of 128 or more; every Triton",
        handled="its ops use a tile that fits the GPU, or else plain torch",
        need="smaller blocks, or num_stages of 1 or 2, or heads of 64",
        url=FLA + "241", proof="tests/plan/test_plan.py"),
    Known(
        id="offsets-beyond-32-bits",
        effect="a kernel computes offsets in 32 bits, but a tensor has more than 2^31 elements: the kernel "
               "reads or writes at wrong addresses. It may also return numbers that are finite and wrong",
        symptoms=(ILLEGAL,), cards=EVERYWHERE + "; fla before 0.6.0, and mamba_ssm (where strides count)",
        handled="its kernels use 64-bit offsets for such tensors, or the call runs in plain torch; "
                "flashlin.shield splits the launch of a kernel, or refuses it",
        need="fla 0.6.0 or newer; fewer sequences per call, so that batch times tokens times heads "
             "times head size stays below 2^31",
        url=FLA + "1080", proof="tests/plan/test_plan.py"),
    Known(
        id="empty-sequences",
        effect="cu_seqlens has the same number twice, which means a sequence without tokens, or its last "
               "number is not the number of tokens; kernels of fla then read outside the sequences, or skip "
               "tokens",
        symptoms=(ILLEGAL,),
        handled="its ops accept empty sequences, and numbers out of order cannot make them read elsewhere "
                "(FLASHLIN_DEBUG=1 makes these an error)",
        need="remove empty sequences; make cu_seqlens end with the number of tokens",
        url=FLA + "103", proof="tests/ops/test_simple_gla.py"),
    Known(
        id="mamba-extension-missing",
        effect="mamba_ssm or causal_conv1d is installed without its CUDA extension: it was built for no GPU, "
               "or the wheel belongs to another package",
        symptoms=("No module named 'selective_scan_cuda'", "No module named selective_scan_cuda",
                  "No module named 'causal_conv1d_cuda'", "No module named causal_conv1d_cuda"),
        cards="machines for whose torch, CUDA and Python no wheel exists",
        handled='flashlin.patch("mamba_ssm", "causal_conv1d"), or flashlin run: their layers then run '
                "without the extension, also on a CPU",
        need="pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps mamba_ssm "
             "causal_conv1d, with the CUDA toolkit of this torch",
        proof="tests/integrations/test_mamba_ssm.py"),
    Known(
        id="mamba-extension-of-another-torch",
        effect="the CUDA extension of mamba_ssm or causal_conv1d was built for another torch",
        symptoms=("selective_scan_cuda...undefined symbol", "causal_conv1d_cuda...undefined symbol"),
        cards="any, after an update of torch",
        handled='flashlin.patch("mamba_ssm", "causal_conv1d"), or flashlin run: their layers then run '
                "without the extension",
        need="build both again for this torch", proof="tests/integrations/test_mamba_ssm.py"),
    Known(
        id="fast-path-absent",
        effect="a model of transformers found no kernels, and computes in a torch loop, which is right but "
               "slow. It says that a library is not installed, whatever the reason is",
        symptoms=("The fast path is not available because",), cards="transformers before 5.15; any GPU",
        handled='flashlin.patch("transformers"), or flashlin run, gives these models kernels; flashlin '
                "doctor reports why their own kernels are missing",
        need="import each library that it names in a Python shell: the error shows the reason",
        url="https://github.com/huggingface/transformers/issues/41732",
        proof="tests/integrations/test_transformers.py"),
    Known(
        id="tensor-elsewhere",
        effect="a Triton kernel got a tensor on the CPU, or on another GPU than the current one",
        symptoms=("cannot be accessed from Triton (cpu tensor?)",),
        handled="its ops run on the device of their tensors, including a CPU; flashlin.shield starts a "
                "kernel on the GPU of its tensors",
        need="with torch.cuda.device(x.device): around the call; model.to(device) for tensors that are still "
             "on another device",
        url=TRITON + "2441", proof="tests/ops/test_hostile.py"),
    Known(
        id="autotuner-threads",
        effect="two threads make the first call of the same autotuned kernel at the same time",
        symptoms=("TypeError: 'NoneType' object is not a mapping",),
        seen_in=_TUNER,
        cards=EVERYWHERE + "; serving, DataParallel",
        handled="flashlin's own kernels are not tuned",
        need="one call of each shape before the threads start, or a lock around the first call",
        proof=TRITON + "11494"),
    Known(
        id="autotuner-of-fla-05",
        effect="fla 0.5 and newer passes an argument to the autotuner that this Triton does not accept",
        symptoms=("__init__() got an unexpected keyword argument 'do_bench'",),
        cards="Triton before 3.2, with fla 0.5.0 and newer; any GPU",
        handled="its own ops run on this Triton; fla itself does not",
        need="Triton 3.2 or newer (torch 2.6), or fla 0.4.1",
        proof="tested with fla 0.5.0 to 0.5.2 and Triton 3.1"),
    Known(
        id="small-heads",
        effect="a matrix product has a side shorter than 16: a head, a block or a chunk is too small",
        symptoms=("must be >= 16!", "Input shapes should have M >= 1, N >= 1 and K >= 16"),
        handled="its ops accept heads of any size up to 512",
        need="pad heads to 16", url=FLA + "88", proof="tests/ops/test_cases.py"),
    Known(
        id="mixed-dtypes",
        effect="the operands of a matrix product have different dtypes; often autocast has converted q and "
               "k, but not v or a state",
        symptoms=("Both operands must be same dtype",),
        handled="it raises an error that names the tensors and their dtypes, before a kernel starts",
        need="cast all of them to one dtype before the call",
        url=FLA + "1264", proof="tests/ops/test_hostile.py"),
    Known(
        id="fla-refuses-float32",
        effect="fla's chunked delta rules do not support float32",
        symptoms=("does not support float32. Please use bfloat16",), cards="fla; any GPU",
        handled="its delta rules support float32",
        need="cast to bfloat16", proof="found in the source of fla 0.6.0"),
    _Unequipped(
        id="no-compiler",
        effect="Triton compiles a small launcher in C, but finds no C compiler",
        symptoms=("Failed to find C compiler",), cards="containers and machines without build tools",
        need="apt-get install gcc, or CC=/path/to/compiler"),
    _Unequipped(
        id="no-python-headers",
        effect="Triton's launcher does not compile, because Python's headers are missing",
        symptoms=("fatal error: Python.h: No such file or directory",),
        cards="a system Python without its development files",
        need="apt-get install python3-dev, or a Python from uv or conda, which includes the headers"),
    _Unequipped(
        id="no-libcuda",
        effect="Triton does not find libcuda.so.1, the library of the GPU driver",
        symptoms=("libcuda.so cannot found!", "libcuda.so.1: cannot open shared object file"),
        cards="containers that were started without the GPU; WSL",
        need="docker run --gpus all, or sudo ldconfig, or LD_LIBRARY_PATH set to the folder of "
             "libcuda.so.1"),
    _Unequipped(
        id="cache-closed",
        effect="Triton cannot write compiled kernels to its cache",
        symptoms=("Permission denied: '.../.triton", "Read-only file system: '.../.triton"),
        cards="containers and clusters with a home folder that is read-only or belongs to another user",
        handled="flashlin doctor reports it before a kernel is compiled",
        need="set TRITON_CACHE_DIR to a writable folder of your own, such as a new one made by mktemp -d"),
    Known(
        id="torch-without-code",
        effect="the wheel of torch has no code for this GPU",
        symptoms=("no kernel image is available for execution on the device",),
        cards="B200 and RTX 5090 with a torch that is older than the GPU; old GPUs with a new torch",
        handled="flashlin doctor names the torch that has code for the GPU",
        need="compare torch.cuda.get_arch_list() with the sm of the GPU, and install another torch",
        proof="tests/test_advice.py"),
    Known(
        id="torch-and-triton-apart",
        effect="torch.compile uses an attribute that this Triton no longer has: this torch requires another "
               "Triton",
        symptoms=("object has no attribute 'launch_enter_hook'",),
        cards="a Triton that was updated without torch",
        handled="flashlin doctor names the required Triton and the command that installs it; its ops do not "
                "need torch.compile",
        need="pip install the Triton that torch requires (pip show torch)",
        proof="https://github.com/NixOS/nixpkgs/issues/432046"),
    # --- texts that many failures print ---
    _General(
        id="launcher-does-not-compile",
        effect="the C compiler rejected the launcher that Triton generates for a kernel; the lines before "
               "show the reason, often a missing Python.h or libcuda",
        symptoms=("'-lcuda'", "'-l:libcuda.so.1'"),
        handled="flashlin doctor checks all requirements of the launcher; with FLASHLIN_PATH=torch its ops "
                "run without Triton until this is fixed",
        need="read the line that begins with the name of the source file or with ld, and pass it to "
             "flashlin why"),
    _General(
        id="assembler-failed",
        effect="ptxas, the assembler, rejected the code that Triton generated; the lines after this one show "
               "the reason",
        symptoms=("PTXASError", "PTXAS error", "Internal Triton PTX codegen error"),
        cards="any, depending on the reason",
        handled="its ops avoid the known reasons; kernels of an op that have not been run on such a GPU are "
                "first tried in a child process",
        need="read the line that begins with ptxas, and pass it to flashlin why"),
    _General(
        id="compiler-pass-failed",
        effect="a pass of Triton's compiler failed; the lines that it wrote to stderr before show which one, "
               "and why",
        symptoms=("PassManager::run failed",
                  "Failures have been detected while processing an MLIR pass pipeline"),
        handled="its ops avoid the known reasons; kernels of an op that have not been run on such a GPU are "
                "first tried in a child process",
        need="run it again with 2>&1, and pass the lines before this one to flashlin why"),
)
