"""Failures that are neither a compiler's (known_issues.py) nor one package's (known_flaws.py), as data:
limits of CUDA, tokens and offsets out of range, what Triton needs around it. Adding one is one
``Failure(...)`` literal in KNOWN_FAILURES; ``flashlin why``, docs/TROUBLESHOOTING.md and the tests read that
tuple.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.known_issues import ILLEGAL


class Failure(NamedTuple):
    """effect: what has happened. symptoms, seen_in: as in ``KnownIssue``. where: the cards and releases.
    here: what flashlin does about it. otherwise: what to do without it. source: who found it, or what shows
    it, or ``thread``. general: many failures print the same; it is told where nothing narrower is found."""
    id: str
    effect: str
    symptoms: tuple[str, ...]
    where: str
    here: str
    otherwise: str
    source: str
    seen_in: str = ""
    url: str = ""
    general: bool = False


_FLA = "https://github.com/fla-org/flash-linear-attention/issues/"
_TRITON = "https://github.com/triton-lang/triton/issues/"
_EVERYWHERE = "every card, every Triton"
_TUNER = "triton/runtime/autotuner.py"

KNOWN_FAILURES: tuple[Failure, ...] = (
    Failure(
        id="grid-axis-65535",
        effect="a launch has more than 65,535 programs on the second or third axis of its grid: in fla "
               "batch times heads, sequences times heads, or chunks",
        symptoms=("Triton Error [CUDA]: invalid argument",),
        where=_EVERYWHERE,
        here="its ops run: its grids are flat, or its launches are split by batch; flashlin.shield(kernel, "
             "batch=..., batch_axis=...) does that for a kernel of yours",
        otherwise="call it for parts of the batch, each with B * H up to 65,535: sequences do not depend on "
                  "each other",
        url=_FLA + "172",
        source="tests/gpu/test_shield.py; matrix/results/holes-*.json"),
    Failure(
        id="token-out-of-range",
        effect="a token is not in the vocabulary (or a target not among the classes, an index not in its "
               "table). The kernel in the traceback is innocent: it is the first call after the broken one, "
               "and the CUDA context is lost",
        symptoms=("CUDA error: device-side assert triggered",
                  "Triton Error [CUDA]: device-side assert triggered",
                  "Assertion `srcIndex < srcSelectDimSize` failed",
                  'Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed'),
        where=_EVERYWHERE,
        here="flashlin.embedding, flashlin.guard_embeddings(model) and flashlin.check_tokens(tokens, "
             "vocab_size) make it a ValueError with position and value, and the context lives",
        otherwise="compare tokens.min() and tokens.max() with the vocabulary on the CPU, with the "
                  "tokenizer's added tokens in mind; start the process anew; CUDA_LAUNCH_BLOCKING=1 names "
                  "the real call",
        url=_FLA + "38",
        source="tests/gpu/test_tokens.py"),
    Failure(
        id="shared-memory",
        effect="a tile of this kernel needs more shared memory than the card has for a program: 99 KB on "
               "sm_86, sm_89 and sm_120, 64 KB on sm_75. The same source needs more on some newer Triton",
        symptoms=("out of resource: shared memory",),
        where="most often RTX 3090, RTX 4090, RTX 5090 and T4, with head sizes from 128 on; every Triton",
        here="its ops take a tile that fits the card, else plain torch",
        otherwise="smaller blocks, or num_stages of 2 or 1; heads of 64",
        url=_FLA + "241",
        source="tests/plan/test_plan.py"),
    Failure(
        id="offsets-beyond-32-bits",
        effect="a kernel counts elements in 32 bits, and a tensor has more than 2^31 of them: what is read "
               "or written is elsewhere. It may also end in numbers that are wrong and finite",
        symptoms=(ILLEGAL,),
        where=_EVERYWHERE + "; fla before 0.6.0, mamba_ssm (there strides count)",
        here="its kernels count such tensors in 64 bits, or the call runs in plain torch; a kernel under "
             "flashlin.shield is launched in parts, or refused",
        otherwise="fla 0.6.0 or newer; fewer sequences in a call, so that batch times tokens times heads "
                  "times head size stays below 2^31",
        url=_FLA + "1080",
        source="tests/plan/test_plan.py"),
    Failure(
        id="empty-sequences",
        effect="cu_seqlens has the same number twice, which is a sequence without tokens, or ends elsewhere "
               "than the tokens do; kernels of fla read or leave out what is beside it",
        symptoms=(ILLEGAL,),
        where=_EVERYWHERE,
        here="its ops take empty sequences, and an edge out of order cannot make them read elsewhere "
             "(FLASHLIN_DEBUG=1 makes it an error)",
        otherwise="drop the empty ones; let cu_seqlens end at the number of tokens",
        url=_FLA + "103",
        source="tests/ops/test_simple_gla.py"),
    Failure(
        id="mamba-extension-missing",
        effect="mamba_ssm or causal_conv1d is there without its CUDA extension: built for no GPU, or its "
               "wheel is of another package",
        symptoms=("No module named 'selective_scan_cuda'", "No module named selective_scan_cuda",
                  "No module named 'causal_conv1d_cuda'", "No module named causal_conv1d_cuda"),
        where="wherever there is no wheel for this torch, CUDA and Python",
        here='flashlin.patch("mamba_ssm", "causal_conv1d"), or flashlin run: their layers run without the '
             "extension, on a CPU, too",
        otherwise="pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps mamba_ssm "
                  "causal_conv1d, with the CUDA toolkit of this torch",
        source="tests/integrations/test_mamba_ssm.py"),
    Failure(
        id="mamba-extension-of-another-torch",
        effect="the CUDA extension of mamba_ssm or causal_conv1d was built for another torch",
        symptoms=("selective_scan_cuda...undefined symbol", "causal_conv1d_cuda...undefined symbol"),
        where="after torch was updated",
        here='flashlin.patch("mamba_ssm", "causal_conv1d"), or flashlin run: their layers run without the '
             "extension",
        otherwise="build both anew for this torch",
        source="tests/integrations/test_mamba_ssm.py"),
    Failure(
        id="fast-path-absent",
        effect="a model of transformers found no kernels, says that a library is not installed, whatever "
               "the reason was, and computes in a torch loop, which is right and slow",
        symptoms=("The fast path is not available because",),
        where="transformers before 5.15; any card",
        here='flashlin.patch("transformers"), or flashlin run, gives these models kernels; flashlin doctor '
             "tells why theirs are not there",
        otherwise="import the libraries it names by hand: the error is the reason",
        url="https://github.com/huggingface/transformers/issues/41732",
        source="tests/integrations/test_transformers.py"),
    Failure(
        id="tensor-elsewhere",
        effect="a Triton kernel was given a tensor on the CPU, or on another GPU than the current one",
        symptoms=("cannot be accessed from Triton (cpu tensor?)",),
        where=_EVERYWHERE,
        here="its ops run on the device of their tensors, a CPU included, and so does a kernel under "
             "flashlin.shield on a GPU",
        otherwise="with torch.cuda.device(x.device): around the call; model.to(device) for what was left "
                  "behind",
        url=_TRITON + "2441",
        source="tests/ops/test_hostile.py"),
    Failure(
        id="autotuner-threads",
        effect="two threads call the same autotuned kernel for the first time",
        symptoms=("TypeError: 'NoneType' object is not a mapping",),
        seen_in=_TUNER,
        where=_EVERYWHERE + "; serving, DataParallel",
        here="flashlin's own kernels are not tuned",
        otherwise="one call of each shape before the threads start, or a lock around the first",
        url=_TRITON + "11494",
        source="thread"),
    Failure(
        id="autotuner-of-fla-05",
        effect="fla 0.5 and newer gives the autotuner an argument that this Triton does not know",
        symptoms=("__init__() got an unexpected keyword argument 'do_bench'",),
        where="Triton before 3.2, with fla 0.5.0 and newer; any card",
        here="its own ops run on this Triton; fla itself does not",
        otherwise="Triton 3.2 or newer (torch 2.6), or fla 0.4.1",
        source="fla 0.5.0 to 0.5.2 under Triton 3.1"),
    Failure(
        id="small-heads",
        effect="a product of matrices has a side shorter than 16: a head, a block or a chunk is too small",
        symptoms=("must be >= 16!", "Input shapes should have M >= 1, N >= 1 and K >= 16"),
        where=_EVERYWHERE,
        here="its ops take heads of any size up to 512",
        otherwise="pad heads to 16",
        url=_FLA + "88",
        source="tests/ops/test_cases.py"),
    Failure(
        id="mixed-dtypes",
        effect="the operands of a product have different dtypes, often q and k after autocast beside a v or "
               "a state that it did not touch",
        symptoms=("Both operands must be same dtype",),
        where=_EVERYWHERE,
        here="it names the tensors and their dtypes before anything is started",
        otherwise="cast all of them to one dtype before the call",
        url=_FLA + "1264",
        source="tests/ops/test_hostile.py"),
    Failure(
        id="fla-refuses-float32",
        effect="fla's chunked delta rules do not take float32",
        symptoms=("does not support float32. Please use bfloat16",),
        where="fla; any card",
        here="its delta rules take float32",
        otherwise="cast to bfloat16",
        source="read in fla 0.6.0"),
    Failure(
        id="no-compiler",
        effect="Triton compiles a small launcher in C and finds no compiler",
        symptoms=("Failed to find C compiler",),
        where="containers and machines without build tools",
        here="FLASHLIN_PATH=torch runs its ops without Triton meanwhile",
        otherwise="apt-get install gcc, or CC=/path/to/compiler",
        source="read in Triton 3.0 to 3.9"),
    Failure(
        id="no-python-headers",
        effect="Triton's launcher does not compile: Python's headers are missing",
        symptoms=("fatal error: Python.h: No such file or directory",),
        where="a system Python without its development files",
        here="FLASHLIN_PATH=torch runs its ops without Triton meanwhile",
        otherwise="apt-get install python3-dev, or a Python of uv or conda, which brings them",
        source="read in Triton 3.0 to 3.9"),
    Failure(
        id="no-libcuda",
        effect="Triton does not find the driver's library",
        symptoms=("libcuda.so cannot found!", "libcuda.so.1: cannot open shared object file"),
        where="containers that were started without the GPU; WSL",
        here="FLASHLIN_PATH=torch runs its ops without Triton meanwhile",
        otherwise="docker run --gpus all; or sudo ldconfig; or LD_LIBRARY_PATH at the folder of "
                  "libcuda.so.1",
        source="read in Triton 3.0 to 3.9"),
    Failure(
        id="cache-closed",
        effect="Triton cannot write what it has compiled",
        symptoms=("Permission denied: '.../.triton", "Read-only file system: '.../.triton"),
        where="a home that is read-only, or another user's: containers and clusters",
        here="flashlin doctor finds it before anything is compiled",
        otherwise="set TRITON_CACHE_DIR to a writable folder of your own, such as a new one of mktemp -d",
        source="read in Triton 3.0 to 3.9"),
    Failure(
        id="torch-without-code",
        effect="the wheel of torch has no code for this card",
        symptoms=("no kernel image is available for execution on the device",),
        where="B200 and RTX 5090 with a torch that is older than they are; old cards with a new torch",
        here="flashlin doctor names the torch that has code for the card",
        otherwise="compare torch.cuda.get_arch_list() with the card's sm, and install another torch",
        source="tests/test_advice.py"),
    Failure(
        id="torch-and-triton-apart",
        effect="torch.compile of this torch asks this Triton for what it no longer has: they are no pair",
        symptoms=("object has no attribute 'launch_enter_hook'",),
        where="a Triton that was updated without torch",
        here="flashlin doctor names the pair and the command that brings it back; its ops do not need "
             "torch.compile",
        otherwise="pip install the Triton that torch asks for (pip show torch)",
        url="https://github.com/NixOS/nixpkgs/issues/432046",
        source="thread"),
    # --- what many failures print ---
    Failure(
        id="launcher-does-not-compile",
        general=True,
        effect="the C compiler refused the launcher that Triton makes for a kernel, for a reason in the "
               "lines before: often that Python.h or libcuda is missing",
        symptoms=("'-lcuda'", "'-l:libcuda.so.1'"),
        where="any; the lines before decide",
        here="flashlin doctor looks for all that it needs; FLASHLIN_PATH=torch runs its ops meanwhile",
        otherwise="read the line that begins with the source's name or with ld, and give that, too",
        source="Triton 3.0 to 3.9"),
    Failure(
        id="assembler-failed",
        general=True,
        effect="ptxas, the assembler, refused what Triton made, for a reason in the lines after it",
        symptoms=("PTXASError", "PTXAS error", "Internal Triton PTX codegen error"),
        where="any; the reason decides",
        here="known reasons are planned around; an op's kernels that nobody has run on such a card are "
             "first tried in a child process",
        otherwise="read the line that begins with ptxas, and give that, too",
        source="Triton 3.0 to 3.9"),
    Failure(
        id="compiler-pass-failed",
        general=True,
        effect="a pass of Triton's compiler failed; which one is told by lines that it wrote to stderr "
               "before",
        symptoms=("PassManager::run failed",
                  "Failures have been detected while processing an MLIR pass pipeline"),
        where="any; the lines before decide",
        here="known reasons are planned around; an op's kernels that nobody has run on such a card are "
             "first tried in a child process",
        otherwise="run it again with 2>&1, and give the lines before this one, too",
        source="Triton 3.0 to 3.9"),
)
