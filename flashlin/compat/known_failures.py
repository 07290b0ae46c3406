"""Failures that are neither a compiler's (known_issues.py) nor one package's (known_flaws.py), as data:
limits of CUDA, tokens and offsets out of range, what Triton needs around it. Adding one is one
``Known(...)`` literal in KNOWN_FAILURES; ``flashlin why``, docs/TROUBLESHOOTING.md and the tests read that
tuple.
"""
from __future__ import annotations

from functools import partial

from flashlin.compat.known import EVERYWHERE, FLA, ILLEGAL, TRITON, Known

_TUNER = "triton/runtime/autotuner.py"
# Failures that have facts in common: of machines that lack what Triton needs, and of texts that many print.
_Unequipped = partial(Known, handled="FLASHLIN_PATH=torch runs its ops without Triton meanwhile",
                      proof="read in Triton 3.0 to 3.9")
_General = partial(Known, general=True, cards="any; the lines before decide", proof="Triton 3.0 to 3.9")

KNOWN_FAILURES: tuple[Known, ...] = (
    Known(
        id="grid-axis-65535",
        effect="a launch has more than 65,535 programs on the second or third axis of its grid: in fla "
               "batch times heads, sequences times heads, or chunks",
        symptoms=("Triton Error [CUDA]: invalid argument",),
        handled="its ops run: its grids are flat, or its launches are split by batch; "
                "flashlin.shield(kernel, batch=..., batch_axis=...) does that for a kernel of yours",
        need="call it for parts of the batch, each with B * H up to 65,535: sequences do not depend on "
             "each other",
        url=FLA + "172",
        proof="tests/gpu/test_shield.py; matrix/results/holes-*.json"),
    Known(
        id="token-out-of-range",
        effect="a token is not in the vocabulary (or a target not among the classes, an index not in its "
               "table). The kernel in the traceback is innocent: it is the first call after the broken one, "
               "and the CUDA context is lost",
        symptoms=("CUDA error: device-side assert triggered",
                  "Triton Error [CUDA]: device-side assert triggered",
                  "Assertion `srcIndex < srcSelectDimSize` failed",
                  'Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed'),
        handled="flashlin.embedding, flashlin.guard_embeddings(model) and flashlin.check_tokens(tokens, "
                "vocab_size) make it a ValueError with position and value, and the context lives",
        need="compare tokens.min() and tokens.max() with the vocabulary on the CPU, with the "
             "tokenizer's added tokens in mind; start the process anew; CUDA_LAUNCH_BLOCKING=1 names "
             "the real call",
        url=FLA + "38",
        proof="tests/gpu/test_tokens.py"),
    Known(
        id="shared-memory",
        effect="a tile of this kernel needs more shared memory than the card has for a program: 99 KB on "
               "sm_86, sm_89 and sm_120, 64 KB on sm_75. The same source needs more on some newer Triton",
        symptoms=("out of resource: shared memory",),
        cards="most often RTX 3090, RTX 4090, RTX 5090 and T4, with head sizes from 128 on; every Triton",
        handled="its ops take a tile that fits the card, else plain torch",
        need="smaller blocks, or num_stages of 2 or 1; heads of 64",
        url=FLA + "241",
        proof="tests/plan/test_plan.py"),
    Known(
        id="offsets-beyond-32-bits",
        effect="a kernel counts elements in 32 bits, and a tensor has more than 2^31 of them: what is read "
               "or written is elsewhere. It may also end in numbers that are wrong and finite",
        symptoms=(ILLEGAL,),
        cards=EVERYWHERE + "; fla before 0.6.0, mamba_ssm (there strides count)",
        handled="its kernels count such tensors in 64 bits, or the call runs in plain torch; a kernel under "
                "flashlin.shield is launched in parts, or refused",
        need="fla 0.6.0 or newer; fewer sequences in a call, so that batch times tokens times heads "
             "times head size stays below 2^31",
        url=FLA + "1080",
        proof="tests/plan/test_plan.py"),
    Known(
        id="empty-sequences",
        effect="cu_seqlens has the same number twice, which is a sequence without tokens, or ends elsewhere "
               "than the tokens do; kernels of fla read or leave out what is beside it",
        symptoms=(ILLEGAL,),
        handled="its ops take empty sequences, and an edge out of order cannot make them read elsewhere "
                "(FLASHLIN_DEBUG=1 makes it an error)",
        need="drop the empty ones; let cu_seqlens end at the number of tokens",
        url=FLA + "103",
        proof="tests/ops/test_simple_gla.py"),
    Known(
        id="mamba-extension-missing",
        effect="mamba_ssm or causal_conv1d is there without its CUDA extension: built for no GPU, or its "
               "wheel is of another package",
        symptoms=("No module named 'selective_scan_cuda'", "No module named selective_scan_cuda",
                  "No module named 'causal_conv1d_cuda'", "No module named causal_conv1d_cuda"),
        cards="wherever there is no wheel for this torch, CUDA and Python",
        handled='flashlin.patch("mamba_ssm", "causal_conv1d"), or flashlin run: their layers run without the '
                "extension, on a CPU, too",
        need="pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps mamba_ssm "
             "causal_conv1d, with the CUDA toolkit of this torch",
        proof="tests/integrations/test_mamba_ssm.py"),
    Known(
        id="mamba-extension-of-another-torch",
        effect="the CUDA extension of mamba_ssm or causal_conv1d was built for another torch",
        symptoms=("selective_scan_cuda...undefined symbol", "causal_conv1d_cuda...undefined symbol"),
        cards="after torch was updated",
        handled='flashlin.patch("mamba_ssm", "causal_conv1d"), or flashlin run: their layers run without the '
                "extension",
        need="build both anew for this torch",
        proof="tests/integrations/test_mamba_ssm.py"),
    Known(
        id="fast-path-absent",
        effect="a model of transformers found no kernels, says that a library is not installed, whatever "
               "the reason was, and computes in a torch loop, which is right and slow",
        symptoms=("The fast path is not available because",),
        cards="transformers before 5.15; any card",
        handled='flashlin.patch("transformers"), or flashlin run, gives these models kernels; flashlin '
                "doctor tells why theirs are not there",
        need="import the libraries it names by hand: the error is the reason",
        url="https://github.com/huggingface/transformers/issues/41732",
        proof="tests/integrations/test_transformers.py"),
    Known(
        id="tensor-elsewhere",
        effect="a Triton kernel was given a tensor on the CPU, or on another GPU than the current one",
        symptoms=("cannot be accessed from Triton (cpu tensor?)",),
        handled="its ops run on the device of their tensors, a CPU included, and so does a kernel under "
                "flashlin.shield on a GPU",
        need="with torch.cuda.device(x.device): around the call; model.to(device) for what was left "
             "behind",
        url=TRITON + "2441",
        proof="tests/ops/test_hostile.py"),
    Known(
        id="autotuner-threads",
        effect="two threads call the same autotuned kernel for the first time",
        symptoms=("TypeError: 'NoneType' object is not a mapping",),
        seen_in=_TUNER,
        cards=EVERYWHERE + "; serving, DataParallel",
        handled="flashlin's own kernels are not tuned",
        need="one call of each shape before the threads start, or a lock around the first",
        proof=TRITON + "11494"),
    Known(
        id="autotuner-of-fla-05",
        effect="fla 0.5 and newer gives the autotuner an argument that this Triton does not know",
        symptoms=("__init__() got an unexpected keyword argument 'do_bench'",),
        cards="Triton before 3.2, with fla 0.5.0 and newer; any card",
        handled="its own ops run on this Triton; fla itself does not",
        need="Triton 3.2 or newer (torch 2.6), or fla 0.4.1",
        proof="fla 0.5.0 to 0.5.2 under Triton 3.1"),
    Known(
        id="small-heads",
        effect="a product of matrices has a side shorter than 16: a head, a block or a chunk is too small",
        symptoms=("must be >= 16!", "Input shapes should have M >= 1, N >= 1 and K >= 16"),
        handled="its ops take heads of any size up to 512",
        need="pad heads to 16",
        url=FLA + "88",
        proof="tests/ops/test_cases.py"),
    Known(
        id="mixed-dtypes",
        effect="the operands of a product have different dtypes, often q and k after autocast beside a v or "
               "a state that it did not touch",
        symptoms=("Both operands must be same dtype",),
        handled="it names the tensors and their dtypes before anything is started",
        need="cast all of them to one dtype before the call",
        url=FLA + "1264",
        proof="tests/ops/test_hostile.py"),
    Known(
        id="fla-refuses-float32",
        effect="fla's chunked delta rules do not take float32",
        symptoms=("does not support float32. Please use bfloat16",),
        cards="fla; any card",
        handled="its delta rules take float32",
        need="cast to bfloat16",
        proof="read in fla 0.6.0"),
    _Unequipped(
        id="no-compiler",
        effect="Triton compiles a small launcher in C and finds no compiler",
        symptoms=("Failed to find C compiler",),
        cards="containers and machines without build tools",
        need="apt-get install gcc, or CC=/path/to/compiler"),
    _Unequipped(
        id="no-python-headers",
        effect="Triton's launcher does not compile: Python's headers are missing",
        symptoms=("fatal error: Python.h: No such file or directory",),
        cards="a system Python without its development files",
        need="apt-get install python3-dev, or a Python of uv or conda, which brings them"),
    _Unequipped(
        id="no-libcuda",
        effect="Triton does not find the driver's library",
        symptoms=("libcuda.so cannot found!", "libcuda.so.1: cannot open shared object file"),
        cards="containers that were started without the GPU; WSL",
        need="docker run --gpus all; or sudo ldconfig; or LD_LIBRARY_PATH at the folder of "
             "libcuda.so.1"),
    _Unequipped(
        id="cache-closed",
        effect="Triton cannot write what it has compiled",
        symptoms=("Permission denied: '.../.triton", "Read-only file system: '.../.triton"),
        cards="a home that is read-only, or another user's: containers and clusters",
        handled="flashlin doctor finds it before anything is compiled",
        need="set TRITON_CACHE_DIR to a writable folder of your own, such as a new one of mktemp -d"),
    Known(
        id="torch-without-code",
        effect="the wheel of torch has no code for this card",
        symptoms=("no kernel image is available for execution on the device",),
        cards="B200 and RTX 5090 with a torch that is older than they are; old cards with a new torch",
        handled="flashlin doctor names the torch that has code for the card",
        need="compare torch.cuda.get_arch_list() with the card's sm, and install another torch",
        proof="tests/test_advice.py"),
    Known(
        id="torch-and-triton-apart",
        effect="torch.compile of this torch asks this Triton for what it no longer has: they are no pair",
        symptoms=("object has no attribute 'launch_enter_hook'",),
        cards="a Triton that was updated without torch",
        handled="flashlin doctor names the pair and the command that brings it back; its ops do not need "
                "torch.compile",
        need="pip install the Triton that torch asks for (pip show torch)",
        proof="https://github.com/NixOS/nixpkgs/issues/432046"),
    # --- what many failures print ---
    _General(
        id="launcher-does-not-compile",
        effect="the C compiler refused the launcher that Triton makes for a kernel, for a reason in the "
               "lines before: often that Python.h or libcuda is missing",
        symptoms=("'-lcuda'", "'-l:libcuda.so.1'"),
        handled="flashlin doctor looks for all that it needs; FLASHLIN_PATH=torch runs its ops meanwhile",
        need="read the line that begins with the source's name or with ld, and give that, too"),
    _General(
        id="assembler-failed",
        effect="ptxas, the assembler, refused what Triton made, for a reason in the lines after it",
        symptoms=("PTXASError", "PTXAS error", "Internal Triton PTX codegen error"),
        cards="any; the reason decides",
        handled="known reasons are planned around; an op's kernels that nobody has run on such a card are "
                "first tried in a child process",
        need="read the line that begins with ptxas, and give that, too"),
    _General(
        id="compiler-pass-failed",
        effect="a pass of Triton's compiler failed; which one is told by lines that it wrote to stderr "
               "before",
        symptoms=("PassManager::run failed",
                  "Failures have been detected while processing an MLIR pass pipeline"),
        handled="known reasons are planned around; an op's kernels that nobody has run on such a card are "
                "first tried in a child process",
        need="run it again with 2>&1, and give the lines before this one, too"),
)
