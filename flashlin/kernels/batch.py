"""Host code that kernels over sequences share: sizes, buffers, slices of the batch, and launches.

A ``Batch`` describes one call. Families allocate outputs with it and start the launches of their plan.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from flashlin.compat import tf32
from flashlin.compat.launch import start
from flashlin.guards.plan_types import Launch, Plan
from flashlin.kernels.configs import FORGOTTEN
from flashlin.kernels.tile_ops import gate_cumsum, sum_heads

WHOLE = 2**31 - 1  # tokens of a segment if sequences are not split
# The constexpr DECAY of kernels: none, one rate for each head (gamma), or one for each token and head (g).
NO_DECAY, HEAD_DECAY, TOKEN_DECAY = 0, 1, 2
# Kernel arguments with one entry for each sequence. Any other tensor with more than two dimensions is
# [B, T, ...]; the remaining tensors are parameters of heads.
STATES = ("h0", "ht", "dh0", "dht", "indices", "accepted")
GROUPED = ("q", "k", "p")  # tensors with H heads; several heads of v may share one of them


def summed(plan: Plan, g: torch.Tensor | None, bounds: torch.Tensor | None, N: int,
           G: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return the cumulative sums of log decays g [B, T, H] within blocks of tokens: G [H, B * T] in float32.

    The scans read decays in this form. G: the tensor to fill; None allocates one. N: number of sequences in
    this launch. Without g, return None.
    """
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


def zero_forgotten(dg: torch.Tensor | None, g: torch.Tensor | None, lowest: float = -math.inf) -> None:
    """Set dg to zero, in place, where the log decay g is so low that a state is forgotten (FORGOTTEN).

    At such tokens dg is only a rounding error, because large terms cancel in its sums. For a gate e^A f(x),
    the gradient of A is this error times the decay, which may be of any size.

    lowest: lower bound of g. If it is above FORGOTTEN, there is nothing to set.
    """
    if dg is not None and g is not None and lowest <= FORGOTTEN:
        torch.ops.aten.threshold_backward.grad_input(dg, g, FORGOTTEN, grad_input=dg)  # a single launch


class Batch:
    """The sizes of one call over sequences, and the slices of its batch that go into separate launches.

    x: NamedTuple of tensors, which include q [B, T, H, K], v [B, T, HV, V] and bounds [N + 1] or None.
    most: upper limit of the sequences in a launch, in addition to the limit of the plan; 0 for no limit.
    """

    def __init__(self, plan: Plan, x: Any, most: int = 0) -> None:
        self.plan, self.x = plan, x
        self.B, self.T, self.H, self.K = x.q.shape
        _, _, self.HV, self.V = x.v.shape
        self.packed = x.bounds is not None
        self.N = x.bounds.shape[0] - 1 if self.packed else self.B
        self.slices = parts(plan, self.N, most) if self.HV else []  # no launches without heads
        part = max([launch.part for launch in plan.launches])
        self.split, self.L = 0 < part < self.T, part or WHOLE
        # True if kernels zero the rows outside the packed sequences. Only a launch of all sequences can do
        # so. A launch of some sequences would also zero the rows of the other sequences.
        self.gaps = self.packed and len(self.slices) == 1
        self.fills = self.gaps if self.packed else bool(self.slices)  # True if kernels write every row
        self.decay = (TOKEN_DECAY if x.g is not None else
                      HEAD_DECAY if getattr(x, "gamma", None) is not None else NO_DECAY)
        self.device = x.q.device

    def new(self, *columns: int, dtype: torch.dtype, heads: int | None = None) -> torch.Tensor:
        """Return an output buffer [B, T, heads, *columns]; heads is HV by default.

        It is filled with zeros if the kernels do not write every row.
        """
        make, heads = torch.empty if self.fills else torch.zeros, self.HV if heads is None else heads
        return make(self.B, self.T, heads, *columns, dtype=dtype, device=self.device)

    def outputs(self, dtype: torch.dtype, has_ht: bool,
                v_first: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return buffers for o [B, T, HV, V] and, if has_ht, for the final states (else None).

        The states are fp32, [N, HV, K, V] or, with v_first, [N, HV, V, K].
        """
        o, sides = self.new(self.V, dtype=dtype), (self.V, self.K) if v_first else (self.K, self.V)
        if not has_ht:
            return o, None
        return o, torch.empty(self.N, self.HV, *sides, dtype=torch.float32, device=self.device)

    def gradients(self, needs: frozenset[str], *names: str) -> dict[str, torch.Tensor | None]:
        """Return buffers for dh0 and for the gradients of the named tensors [B, T, ...].

        Keys are the names of the kernels' arguments, such as "dq". A value is None if the call lacks the
        tensor. Each buffer has the dtype of its tensor and HV heads.
        """
        grads: dict[str, torch.Tensor | None] = {"dh0": self.initial_gradient(needs)}
        for name in names:
            x = getattr(self.x, name)
            columns = () if x is None or x.ndim == 3 else (x.shape[3],)
            grads["d" + name] = None if x is None else self.new(*columns, dtype=x.dtype)
        return grads

    def by_tensor(self, grads: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Return gradients under the names of their tensors ("dq" becomes "q").

        Gradients of q, k and p are summed over the value heads that share a head.
        """
        made = {name[1:]: grad for name, grad in grads.items()}
        for name in GROUPED if self.HV != self.H else ():
            if (grad := made.get(name)) is not None:
                made[name] = self.of_groups(grad)
        return made

    def scan(self, kernel: Any, constants: dict[str, Any], part: dict[str, Any]) -> None:
        """Start a kernel that has one program for each segment of a sequence, head and strip of columns of v.

        constants: arguments of this launch. part: the arguments that the launches of a batch slice share,
        see ``parts``. ``start`` takes them as ``arguments`` and ``shared``.
        """
        launch = self.plan.launch(kernel.fn.__name__)
        columns = 1
        for name, size in launch.tile:  # takes half the time of dict(launch.tile), and runs in every call
            if name in ("BV", "GROUPS"):
                columns *= size
        strips = -(-self.V // columns)
        start(launch, kernel, part["parts"] * self.HV * strips, constants, part)

    def initial_gradient(self, needs: frozenset[str]) -> torch.Tensor | None:
        """Return a float32 buffer for the gradient of h0, or None if no such gradient is needed."""
        h0 = self.x.h0
        return torch.empty_like(h0, dtype=torch.float32) if h0 is not None and "h0" in needs else None

    def of_groups(self, x: torch.Tensor) -> torch.Tensor:
        """Sum gradients over the heads that share one head of q and k.

        x: [B, T, n * H, K]. The result is [B, T, H, K] in the dtype of q; x itself if n is 1.
        """
        if self.H == x.shape[2]:
            return x
        if x.numel() and self.plan.has("sum_heads"):
            made = x.new_empty(self.B, self.T, self.H, self.K, dtype=self.x.q.dtype)
            rows, launch = self.B * self.T * self.H, self.plan.launch("sum_heads")
            start(launch, sum_heads, -(-rows // launch.block("BT")), dict(
                x=x, y=made, rows=rows, n=x.shape[2] // self.H, D=self.K))
            return made
        heads: torch.Tensor = x.unflatten(2, (self.H, -1))
        return heads.sum(3).to(self.x.q.dtype)  # torch adds in float32, and rounds at the end

    def parts(self, launch: Launch, /, **more: Any) -> Iterator[dict[str, Any]]:
        """Yield, for each slice of the batch, the arguments that its kernels share, by parameter name.

        ``start`` takes them as ``shared``. They are:
            the tensors of x and the values of ``more``, cut to the sequences of the slice
            T, H, HV
            N: number of sequences in the slice
            L: tokens of a segment, if sequences are split
            S: programs for each sequence, given the chunk length of ``launch``
            slots: entries of a table with one entry for each chunk
        Three values are for host code only:
            part: the slice of the sequences
            rows: number of their rows
            parts: number of segments, which is an upper limit for packed sequences
        """
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
            mine.clear()  # frees scratch memory before gradients are summed


def cut(given: dict[str, Any], part: slice) -> dict[str, Any]:
    """Return a launch's arguments, by name, cut to a slice of its sequences.

    Packed sequences share one row of tokens, so only their states and bounds are cut.
    """
    packed = given["bounds"] is not None
    mine = {name: x[part] if isinstance(x, torch.Tensor) and (name in STATES or (x.ndim > 2 and not packed))
            else x for name, x in given.items()}
    if packed:
        mine["bounds"] = given["bounds"][part.start:part.stop + 1]
    return mine


def parts(plan: Plan, N: int, most: int = 0) -> list[slice]:
    """Return the slices of N sequences that go into separate launches.

    A slice has at most as many sequences as the plan's ``batch_part`` and ``most``; 0 is no limit for either.
    """
    size = plan.problem.batch_part or max(N, 1)
    size = min(size, most) if most else size
    if size >= N:
        return [slice(0, N)] if N else []
    return [slice(n, min(n + size, N)) for n in range(0, N, size)]


def strides(x: torch.Tensor | None, *names: str) -> dict[str, int]:
    """Return the strides of the first dimensions of x under the given names; all are zero if x is None."""
    return dict(zip(names, (0,) * len(names) if x is None else x.stride(), strict=False))


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, heads, D] itself if one stride leads from any token to the next, else a copy.

    The [heads, D] values of a token must be contiguous. Slices of a fused projection fulfil both conditions.
    """
    B, T, heads, D = x.shape
    one_distance = B <= 1 or T <= 1 or x.stride(0) == T * x.stride(1)
    rows = one_distance and (D <= 1 or x.stride(3) == 1) and (heads <= 1 or x.stride(2) == D)
    return x if rows else x.contiguous()


def row_stride(x: torch.Tensor) -> int:
    """Return the stride, in elements, from one token of x [B, T, ...] to the next.

    The same stride leads from the last token of a batch row to the first token of the next row.
    """
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


def precision(plan: Plan) -> str:
    """Return the ``input_precision`` with which kernels multiply fp32 operands.

    It is "tf32x3" (three tf32 products, error 1e-5) since sm_80, and "ieee" before. It is "tf32" only if
    torch's setting allows that.
    """
    if plan.target.backend != "cuda" or plan.target.capability < (8, 0):
        return "ieee"
    return "tf32" if tf32.setting() == "tf32" else "tf32x3"
