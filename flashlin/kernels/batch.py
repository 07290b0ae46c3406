"""The host's view of a call over sequences: its sizes, buffers, parts of the batch, and starts of kernels."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashlin.compat import tf32
from flashlin.compat.launch import start
from flashlin.guards.plan_types import Launch, Plan
from flashlin.kernels.configs import FORGOTTEN
from flashlin.kernels.tile_ops import gate_cumsum

WHOLE = 2**31 - 1  # tokens of a part where sequences are not split
# How a kernel gets its decay, as a constexpr.
NO_DECAY, HEAD_DECAY, TOKEN_DECAY = 0, 1, 2
# Arguments of kernels that have one entry for each sequence; of the other tensors those with more than two
# dimensions are [B, T, ...], the rest are parameters of heads.
STATES = ("h0", "ht", "dh0", "dht", "indices", "accepted")
GROUPED = ("q", "k", "p")  # tensors of H heads, each of which belongs to a group of heads of v


def summed(plan: Plan, g: torch.Tensor | None, bounds: torch.Tensor | None, N: int,
           G: torch.Tensor | None = None) -> torch.Tensor | None:
    """[H, rows] float32, or G filled: the decays summed within blocks, as the scans want them. N: sequences
    in this launch."""
    if g is None:
        return None
    B, T, H = g.shape
    launch = plan.launch("gate_cumsum")
    tile = dict(launch.tile)
    if G is None:
        G = torch.empty(H, B * T, dtype=torch.float32, device=g.device)
    shares = max(1, -(-B * T // (tile["BT"] * max(N, 1))))
    start(launch, gate_cumsum, N * shares * -(-H // tile["BH"]), dict(
        g=g, G=G, bounds=bounds, T=T, N=N, H=H, R=G.stride(0), S=shares, VARLEN=bounds is not None))
    return G


def zero_forgotten(dg: torch.Tensor | None, g: torch.Tensor | None) -> None:
    """In place: 0 where g forgets everything. What cancels in the sums behind dg leaves a rounding error
    there, and the parameters of a gate e^A f(x) would get that times a decay of any size."""
    if dg is not None and g is not None:
        torch.ops.aten.threshold_backward.grad_input(dg, g, FORGOTTEN, grad_input=dg)  # one launch


class Batch:
    """The sizes of a call over sequences, and its launches, each with its part of the sequences.

    x: a NamedTuple of tensors, among them q [B, T, H, K], v [B, T, HV, V] and bounds [N + 1] or None. most:
    how many sequences a launch may have, whatever the plan says; 0 for any number.
    """

    def __init__(self, plan: Plan, x: Any, most: int = 0) -> None:
        self.plan, self.x = plan, x
        self.B, self.T, self.H, self.K = x.q.shape
        _, _, self.HV, self.V = x.v.shape
        self.packed = x.bounds is not None
        self.N = x.bounds.shape[0] - 1 if self.packed else self.B
        self.slices = parts(plan, self.N, most) if self.HV else []  # without heads no program would run
        part = max([launch.part for launch in plan.launches])
        self.split, self.L = part > 0, part or WHOLE
        # Whether kernels zero the rows outside the packed sequences: one launch of all of them can, one of
        # several cannot, since to it the others' rows are outside, too.
        self.gaps = self.packed and len(self.slices) == 1
        self.fills = self.gaps if self.packed else bool(self.slices)  # whether kernels write every row
        self.decay = (TOKEN_DECAY if x.g is not None else
                      HEAD_DECAY if getattr(x, "gamma", None) is not None else NO_DECAY)
        self.device = x.q.device

    def new(self, *columns: int, dtype: torch.dtype, heads: int | None = None) -> torch.Tensor:
        """[B, T, HV or heads, *columns] for kernels to write: zeros where they do not write every row."""
        make, heads = torch.empty if self.fills else torch.zeros, self.HV if heads is None else heads
        return make(self.B, self.T, heads, *columns, dtype=dtype, device=self.device)

    def outputs(self, dtype: torch.dtype, has_ht: bool,
                v_first: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return o [B, T, HV, V] and the final state or None, for kernels to write. The state is fp32,
        [N, HV, K, V] or, with v_first, [N, HV, V, K]."""
        o, sides = self.new(self.V, dtype=dtype), (self.V, self.K) if v_first else (self.K, self.V)
        if not has_ht:
            return o, None
        return o, torch.empty(self.N, self.HV, *sides, dtype=torch.float32, device=self.device)

    def gradients(self, needs: frozenset[str], *names: str) -> dict[str, torch.Tensor | None]:
        """Return dh0 and the gradients of these tensors [B, T, ...], None of those that the call lacks, by
        the names that kernels give them. Each has the dtype of its tensor, and heads of v."""
        grads: dict[str, torch.Tensor | None] = {"dh0": self.initial_gradient(needs)}
        for name in names:
            x = getattr(self.x, name)
            columns = () if x is None or x.ndim == 3 else (x.shape[3],)
            grads["d" + name] = None if x is None else self.new(*columns, dtype=x.dtype)
        return grads

    def by_tensor(self, grads: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Return gradients by the names of their tensors. Those of heads in groups are added up."""
        made = {name[1:]: grad for name, grad in grads.items()}
        for name in GROUPED if self.HV != self.H else ():
            if (grad := made.get(name)) is not None:
                made[name] = self.of_groups(grad)
        return made

    def scan(self, kernel: Any, constants: dict[str, Any], part: dict[str, Any]) -> None:
        """Start the plan's launch of a kernel that has a program for each part of a sequence, head and strip
        of columns of v. constants, part: as ``start`` takes ``arguments`` and ``shared``."""
        launch = self.plan.launch(kernel.fn.__name__)
        columns = 1
        for name, size in launch.tile:  # in every call: half the time of a dict
            if name in ("BV", "GROUPS"):
                columns *= size
        strips = -(-self.V // columns)
        start(launch, kernel, part["parts"] * self.HV * strips, constants, part)

    def initial_gradient(self, needs: frozenset[str]) -> torch.Tensor | None:
        """dh0 for kernels to write, fp32, if it is needed."""
        h0 = self.x.h0
        return torch.empty_like(h0, dtype=torch.float32) if h0 is not None and "h0" in needs else None

    def of_groups(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H, K]: the gradients [B, T, several H, K] of the value heads that share one q and k, or of
        several of these at a time, added up."""
        if self.H == x.shape[2]:
            return x
        heads: torch.Tensor = x.unflatten(2, (self.H, -1))
        return heads.sum(3, dtype=torch.float32).to(self.x.q.dtype)

    def parts(self, launch: Launch, /, **more: Any) -> Iterator[dict[str, Any]]:
        """For each launch the values that its kernels share, by the names of their parameters (``start``
        takes them as ``shared``): the tensors of x and the values of ``more``, cut to the launch's sequences;
        T, H, HV and N, the number of its sequences; L, tokens of the parts that they are split into; for
        chunks as those of ``launch`` S, programs to a sequence, and slots, entries of a table of chunks. Not
        for kernels: part, which sequences they are, rows, how many rows they have, and parts, how many numbers
        of parts."""
        BT = dict(launch.tile)["BT"]
        shared = {"T": self.T, "H": self.H, "HV": self.HV, "L": self.L, **self.x._asdict(), **more}
        for part in self.slices:
            n = part.stop - part.start
            mine = shared if n == self.N else cut(shared, part)
            mine["N"], mine["part"] = n, part
            mine["rows"] = rows = self.B * self.T if self.packed else n * self.T
            mine["S"], mine["slots"] = -(-rows // (BT * n)) or 1, rows // BT + n + 1
            mine["parts"] = n * (-(-self.T // self.L) or 1) if not self.packed else n + rows // self.L
            yield mine
            mine.clear()  # scratch goes before gradients are added up


def cut(given: dict[str, Any], part: slice) -> dict[str, Any]:
    """Return what some of the sequences have of a launch's values. Packed ones keep the whole row: of theirs
    the states and the bounds are cut."""
    packed = given["bounds"] is not None
    mine = {name: x[part] if isinstance(x, torch.Tensor) and (name in STATES or (x.ndim > 2 and not packed))
            else x for name, x in given.items()}
    if packed:
        mine["bounds"] = given["bounds"][part.start:part.stop + 1]
    return mine


def parts(plan: Plan, N: int, most: int = 0) -> list[slice]:
    """The sequences of each launch: all of them, or the plan's batch_part at a time, or ``most`` if that is
    less."""
    size = plan.problem.batch_part or max(N, 1)
    size = min(size, most) if most else size
    if size >= N:
        return [slice(0, N)] if N else []
    return [slice(n, min(n + size, N)) for n in range(0, N, size)]


def strides(x: torch.Tensor | None, *names: str) -> dict[str, int]:
    """The strides of x's first dimensions by those names; zeros if there is no x."""
    return dict(zip(names, (0,) * len(names) if x is None else x.stride(), strict=False))


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, heads, D] itself if its tokens lie at one distance from each other, as in a slice of a
    fused projection; else a copy."""
    B, T, heads, D = x.shape
    one_distance = B <= 1 or T <= 1 or x.stride(0) == T * x.stride(1)
    rows = one_distance and (D <= 1 or x.stride(3) == 1) and (heads <= 1 or x.stride(2) == D)
    return x if rows else x.contiguous()


def row_stride(x: torch.Tensor) -> int:
    """Return the elements from one token of x [B, T, ...] to the next, through the whole batch."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


def precision(plan: Plan) -> str:
    """Return how kernels multiply fp32 operands: as three tf32 products (error 1e-5) from sm_80 on, and as
    fp32 before. One tf32 product is used only if torch's setting allows it."""
    if plan.target.backend != "cuda" or plan.target.capability < (8, 0):
        return "ieee"
    return "tf32" if tf32.setting() == "tf32" else "tf32x3"
