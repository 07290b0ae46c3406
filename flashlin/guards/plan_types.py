"""Data types of planning.

A ``Problem`` describes a call. A ``Launch`` describes one kernel launch. A ``Reason`` says why a launch
cannot or should not run. A ``Plan`` contains the decisions that lead from the requested problem to its
launches.
"""
from __future__ import annotations

from typing import Any, NamedTuple

from flashlin.compat.target import Target
from flashlin.compat.traits import trait_set, with_operands

# The dtypes of the ops by torch's names, each with its usual short names.
DTYPES = {"bfloat16": ("bf16",), "float16": ("fp16", "half"), "float32": ("fp32", "float"),
          "float64": ("fp64", "double")}


def dtype_name(given: object) -> str:
    """Return torch's name of a dtype without ``torch.``, such as ``bfloat16``.

    given: a ``torch.dtype``, its name, or a short name such as ``bf16``. Raises ValueError with the list of
    names for any other value.
    """
    text = str(given).removeprefix("torch.").lower()
    for name, short in DTYPES.items():
        if text in (name, *short):
            return name
    raise ValueError(f"dtype: got {given!r}, need one of {', '.join(DTYPES)} (or "
                     f"{', '.join(one for short in DTYPES.values() for one in short)})")


PARTS = "parts"  # in Problem.avoid: do not split sequences into segments


class Problem(NamedTuple):
    """A call as plain numbers and strings, without tensors.

    Remedies rewrite ``mode`` and the fields from ``path`` to ``avoid``.

    op: the public name.
    family: the name of the family whose recipe plans the call.
    mode: ``chunk``, ``fused_recurrent``, ``auto`` until the plan decides, or ``""`` for ops without modes.
    B, T, H: batch size, tokens per sequence, and heads. K, V: head dimensions of q and k, and of v.
    N: the number of sequences, which is B unless sequences are packed.
    dtype: torch's name of the dtype without ``torch.``.
    varlen: sequences are packed along T.
    needs_grad: the call needs gradients.
    options: names of the optional tensors and flags in use, sorted.
    path: ``triton`` or ``torch``.
    max_warps: the largest number of warps of a launch.
    dot: ``native``, or ``fp32`` if kernels run on fp32 copies.
    batch_part: how many batch entries one launch computes at a time; 0 for the whole batch.
    avoid: tile traits (``TILE_FACTS``) that recipes must avoid. If ``PARTS`` is among them, recipes split
    no sequence into segments.
    given: the launch of a user's own kernel (``shield``). Then B and N are its batch, and T, H, K and V have
    no meaning.
    invariant: results must not depend on the number of sequences or on their lengths.
    ranks: the number of ranks that share each sequence; each rank has T of its tokens.
    over: the dimension that ranks divide, ``heads`` or ``tokens``, and ``""`` until the plan decides.
    trial: kernels that have not been run on this kind of GPU may be started.
    portable: plain Triton kernels replace those in Gluon and the one that computes KDA's gate.
    """
    op: str
    family: str
    mode: str
    B: int
    T: int
    H: int
    K: int
    V: int
    N: int
    dtype: str
    varlen: bool = False
    needs_grad: bool = False
    options: tuple[str, ...] = ()
    path: str = "triton"
    max_warps: int = 8
    dot: str = "native"
    batch_part: int = 0
    avoid: frozenset[str] = frozenset()
    given: Given | None = None
    invariant: bool = False
    ranks: int = 1
    over: str = ""
    trial: bool = False
    portable: bool = False

    def __str__(self) -> str:
        if self.given is not None:
            launch = self.given.launch
            batch = f" batch={self.B} on axis {self.given.axis}" if self.given.axis >= 0 else ""
            return (f"grid={launch.grid} {self.dtype} num_warps={launch.num_warps} "
                    f"num_stages={launch.num_stages}{batch}")
        flags = [flag for flag in ("varlen", "needs_grad", "invariant", "portable") if getattr(self, flag)]
        mode = [f"mode={self.mode}"] if self.mode else []
        sizes = f"B={self.B} T={self.T} H={self.H} K={self.K} V={self.V}"
        number = [f"N={self.N}"] if self.N != self.B else []
        ranks = [f"ranks={self.ranks}"] * (self.ranks > 1) + [f"over={self.over}"] * bool(self.over)
        return " ".join([sizes, *number, self.dtype, *self.options, *flags, *mode, *ranks,
                         f"path={self.path}"])


def operands_of(problem: Problem) -> str:
    """Return the dtype that the kernels load: float32 if they run on fp32 copies, else the call's dtype."""
    return "float32" if problem.dot == "fp32" else problem.dtype


def traits_of(problem: Problem, *names: str) -> frozenset[str]:
    """Return the named traits and the traits that follow from the dtype of the operands."""
    return with_operands(trait_set(*names), frozenset({operands_of(problem)}))


class Launch(NamedTuple):
    """One kernel launch as plain numbers and strings.

    kernel: the name of the kernel.
    grid: the number of programs on each grid axis.
    num_warps, num_stages: Triton's compile options.
    tile: block sizes by name.
    shared: an upper estimate of the shared memory per block in bytes.
    span: the largest offset that the kernel computes in 32 bits, in elements.
    traits: properties that known issues test, see compat/traits.py.
    part: the number of tokens per segment if sequences are split, else 0.
    """
    kernel: str
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    tile: tuple[tuple[str, int], ...]
    shared: int
    span: int
    traits: frozenset[str]
    part: int = 0

    def block(self, name: str) -> int:
        """Return the block size of this name from the tile."""
        return dict(self.tile)[name]

    @property
    def tile_text(self) -> str:
        """Return the block sizes as text, such as ``BT=64 BK=32``."""
        return " ".join(f"{name}={size}" for name, size in self.tile)

    @property
    def config(self) -> str:
        """Return the key of this launch in the launch table: kernel, tile, warps, stages and traits."""
        return (f"{self.kernel} {self.tile_text} warps={self.num_warps} stages={self.num_stages} "
                f"{' '.join(sorted(self.traits))}").strip()

    def __str__(self) -> str:
        parts = f" segments of {self.part} tokens" if self.part else ""
        return (f"{self.kernel} grid={self.grid} {self.tile_text} num_warps={self.num_warps} "
                f"num_stages={self.num_stages}{parts}")


class Given(NamedTuple):
    """A launch of a user's own kernel, and the declarations of its caller.

    launch: the requested launch.
    axis: the grid axis that counts the batch, or -1 if it is not declared.
    whole: the reason why the batch cannot be split, or ``""`` if it can.
    outputs: True if the caller declares the tensors that the kernel writes.
    reach: (base, step) for each long tensor. With n batch entries, its last element is base + n * step.
    half: True if the source itself casts operands to 16 bits. Then fp32 arguments do not change the traits.
    """
    launch: Launch
    axis: int = -1
    whole: str = ""
    outputs: bool = False
    reach: tuple[tuple[int, int], ...] = ()
    half: bool = False


class Reason(NamedTuple):
    """The result of a failed check: why a launch cannot or should not run.

    code: a short name of the check, or the id of a known issue.
    got: the fact that the check rejects.
    need: the requirement.
    remedies: names of the remedies that resolve it, best first.
    url: a page about the problem.
    forced: False if a remedy is the normal case, such as the torch path for CPU tensors. Then nothing is
    announced, and the policy ``strict`` accepts the remedy.
    avoid: the tile traits that it rejects, if the recipe has tiles without them.
    """
    code: str
    got: str
    need: str
    remedies: tuple[str, ...] = ()
    url: str = ""
    forced: bool = True
    avoid: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.code}: {self.got}, need {self.need}" + (f"   {self.url}" if self.url else "")


class Plan(NamedTuple):
    """The result of planning a call.

    asked: the requested problem.
    problem: the problem that runs, after all remedies.
    target: the machine.
    launches: the launches of ``problem``.
    steps: the reasons and the remedies, as (reason, remedy), that lead from ``asked`` to ``problem``.
    refused: the reasons for a refusal; empty if the call can run.
    """
    asked: Problem
    problem: Problem
    target: Target
    launches: tuple[Launch, ...]
    steps: tuple[tuple[Reason, str], ...]
    refused: tuple[Reason, ...] = ()

    @property
    def path(self) -> str:
        """Return the path of the call: ``triton``, ``torch``, or ``refused`` if it cannot run."""
        return "refused" if self.refused else self.problem.path

    def launch(self, *kernels: str) -> Launch:
        """Return the launch of the first of these kernels that is planned. Raise a KeyError if none is."""
        for kernel in kernels:
            for launch in self.launches:  # every call runs this loop; a generator takes twice as long
                if launch.kernel == kernel:
                    return launch
        raise KeyError(f"{self.asked.op}: no launch of {' or '.join(kernels)} is planned")

    def has(self, kernel: str) -> bool:
        """Return True if a launch of this kernel is planned."""
        return any(launch.kernel == kernel for launch in self.launches)

    @property
    def part(self) -> int:
        """Return the number of tokens per segment if sequences are split, else 0."""
        return max([launch.part for launch in self.launches], default=0)

    def __str__(self) -> str:
        lines = [f"{self.asked.op}: {'cannot run' if self.refused else self.path + ' path'}",
                 f"  call     {self.asked}", f"  target   {self.target}"]
        lines += [f"  because  {reason}\n  so       {remedy}" for reason, remedy in self.steps]
        lines += [f"  because  {reason}" for reason in self.refused]
        lines += [f"  launch   {launch}" for launch in self.launches]
        return "\n".join(lines)


class UnsupportedError(NotImplementedError):
    """Raised by a call that cannot run on this machine.

    The message has one line each for the call, the target and the advice, and one for each reason.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        because = "\n           ".join(str(reason) for reason in plan.refused)
        super().__init__(f"{plan.asked.op} cannot run here.\n  call     {plan.asked}\n"
                         f"  target   {plan.target}\n  because  {because}\n  do       {advice(plan)}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Without this method, unpickling would pass the message to __init__, which expects a plan. A
        # multiprocessing Pool would then wait forever for the worker.
        return type(self), (self.plan,), self.__dict__


def advice(plan: Plan) -> str:
    """Return a sentence that tells the user how to make a refused call run."""
    offered = {remedy for reason in plan.refused for remedy in reason.remedies}
    given = plan.asked.given
    if given is not None and "chunk_batch" in offered and given.whole:
        return given.whole
    if given is not None and "via_fp32" in offered and plan.problem.dot == "native":
        return ("FLASHLIN_POLICY=auto allows fp32 copies" if given.outputs else
                'shield(..., outputs=["name", ...]) names the tensors that the kernel writes: then it can '
                'run on fp32 copies')
    if given is not None:
        return "; ".join(f"it needs {reason.need}" for reason in plan.refused)
    if "torch_path" in offered:
        return ("FLASHLIN_PATH=auto and FLASHLIN_POLICY=auto allow the torch path, which runs this call "
                "anywhere")
    return "; ".join(f"{reason.got}: bring it to {reason.need}" for reason in plan.refused)
