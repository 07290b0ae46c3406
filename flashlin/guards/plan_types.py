"""The nouns: Problem (a call), Launch (one kernel start), Reason (what stands against it), Plan (the decision
trail)."""
from __future__ import annotations

from typing import Any, NamedTuple

from flashlin.compat.target import Target
from flashlin.compat.traits import trait_set, with_operands

# The dtypes of the ops by torch's names, each with its usual short ones.
DTYPES = {"bfloat16": ("bf16",), "float16": ("fp16", "half"), "float32": ("fp32", "float"),
          "float64": ("fp64", "double")}


def dtype_name(given: object) -> str:
    """torch's name of a dtype without ``torch.``, out of a ``torch.dtype``, that name or a short one. Raises
    ValueError that lists them."""
    text = str(given).removeprefix("torch.").lower()
    for name, short in DTYPES.items():
        if text in (name, *short):
            return name
    raise ValueError(f"dtype: got {given!r}, need one of {', '.join(DTYPES)} (or "
                     f"{', '.join(one for short in DTYPES.values() for one in short)})")


PARTS = "parts"  # in Problem.avoid: sequences stay whole


class Problem(NamedTuple):
    """A call as facts: ints, bools and strings out of its tensors, never a tensor.

    op: the public name; family: whose recipe serves it; mode: ``chunk``, ``fused_recurrent``, or ``auto``
    until the plan decides (``""`` for ops without modes). N: number of sequences (B unless varlen). dtype:
    torch's name without ``torch.``. options: names of the optional tensors and flags in use, sorted. Remedies
    rewrite mode and the fields from path to avoid. avoid: facts of a tile (``TILE_FACTS``): recipes pass over
    candidates that have one; ``PARTS``: they split no sequence. invariant: nothing may depend on how many
    sequences there are, or how long they are; trial: what nobody has run may be started. given: set where the
    kernel is a user's own (``shield``); then B and N are its batch, and T, H, K, V say nothing. ranks: how
    many share each sequence, of which each has T tokens; over: what they divide between them, ``heads`` or
    ``tokens``, and ``""`` until the plan decides.
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

    def __str__(self) -> str:
        if self.given is not None:
            launch = self.given.launch
            batch = f" batch={self.B} on axis {self.given.axis}" if self.given.axis >= 0 else ""
            return (f"grid={launch.grid} {self.dtype} num_warps={launch.num_warps} "
                    f"num_stages={launch.num_stages}{batch}")
        flags = [flag for flag in ("varlen", "needs_grad", "invariant") if getattr(self, flag)]
        mode = [f"mode={self.mode}"] if self.mode else []
        sizes = f"B={self.B} T={self.T} H={self.H} K={self.K} V={self.V}"
        number = [f"N={self.N}"] if self.N != self.B else []
        ranks = [f"ranks={self.ranks}"] * (self.ranks > 1) + [f"over={self.over}"] * bool(self.over)
        return " ".join([sizes, *number, self.dtype, *self.options, *flags, *mode, *ranks,
                         f"path={self.path}"])


def operands_of(problem: Problem) -> str:
    """The dtype of what our kernels load: of fp32 copies or of the call's own tensors."""
    return "float32" if problem.dot == "fp32" else problem.dtype


def traits_of(problem: Problem, *names: str) -> frozenset[str]:
    """These traits and those that follow from the operands of our kernels."""
    return with_operands(trait_set(*names), frozenset({operands_of(problem)}))


class Launch(NamedTuple):
    """One kernel start as facts. tile: block sizes by name. shared: bytes, an upper estimate. span: the
    largest offset that the kernel computes in 32 bits, in elements. traits: what known issues look for,
    see compat/traits.py. part: tokens of the parts that sequences are split into, 0 where
    they are not."""
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
        return dict(self.tile)[name]

    @property
    def tile_text(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.tile)

    @property
    def config(self) -> str:
        """What the launch table knows it by: the kernel, its tile, warps, stages and what its operands
        are."""
        return (f"{self.kernel} {self.tile_text} warps={self.num_warps} stages={self.num_stages} "
                f"{' '.join(sorted(self.traits))}").strip()

    def __str__(self) -> str:
        parts = f" parts of {self.part} tokens" if self.part else ""
        return (f"{self.kernel} grid={self.grid} {self.tile_text} num_warps={self.num_warps} "
                f"num_stages={self.num_stages}{parts}")


class Given(NamedTuple):
    """A user's launch as it was asked for, and what its caller declared about it.

    axis: the grid axis that counts the batch, -1 if undeclared. whole: why the batch cannot be split, ``""``
    if it can. outputs: whether the tensors it writes are declared. reach: (base, step) for each long tensor:
    its last element, in a part of n of the batch, is base + n * step. half: whether the source itself makes
    16-bit operands, so that fp32 arguments leave the traits as they are.
    """
    launch: Launch
    axis: int = -1
    whole: str = ""
    outputs: bool = False
    reach: tuple[tuple[int, int], ...] = ()
    half: bool = False


class Reason(NamedTuple):
    """What stands against a launch: what was got, what is needed, and the remedies that take it away, best
    first.

    forced: False where a remedy is the normal way (CPU tensors take the torch path), so nothing is announced
    and strict accepts it. avoid: the facts of a tile that it objects to, where the recipe has tiles without
    them.
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
    """asked -> problem by the steps (reason, remedy); the launches of the rewritten problem; or refused, and
    why."""
    asked: Problem
    problem: Problem
    target: Target
    launches: tuple[Launch, ...]
    steps: tuple[tuple[Reason, str], ...]
    refused: tuple[Reason, ...] = ()

    @property
    def path(self) -> str:
        return "refused" if self.refused else self.problem.path

    def launch(self, *kernels: str) -> Launch:
        """Return the launch of the first of these kernels that is planned. Raise a KeyError if none is."""
        for kernel in kernels:
            for launch in self.launches:  # every call of an op comes here: half the time of a generator
                if launch.kernel == kernel:
                    return launch
        raise KeyError(f"{self.asked.op}: no launch of {' or '.join(kernels)} is planned")

    @property
    def part(self) -> int:
        """Tokens of the parts that sequences are split into, 0 where they are not."""
        return max([launch.part for launch in self.launches], default=0)

    def __str__(self) -> str:
        lines = [f"{self.asked.op}: {'cannot run' if self.refused else self.path + ' path'}",
                 f"  call     {self.asked}", f"  target   {self.target}"]
        lines += [f"  because  {reason}\n  so       {remedy}" for reason, remedy in self.steps]
        lines += [f"  because  {reason}" for reason in self.refused]
        lines += [f"  launch   {launch}" for launch in self.launches]
        return "\n".join(lines)


class UnsupportedError(NotImplementedError):
    """This call cannot run on this machine. Four lines: the call, the target, the reasons, what to do."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        because = "\n           ".join(str(reason) for reason in plan.refused)
        super().__init__(f"{plan.asked.op} cannot run here.\n  call     {plan.asked}\n"
                         f"  target   {plan.target}\n  because  {because}\n  do       {advice(plan)}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Without it an exception is made again from its message, which __init__ does not take: a Pool waits
        # forever for such a worker.
        return type(self), (self.plan,), self.__dict__


def advice(plan: Plan) -> str:
    """What a user can do about a refusal."""
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
