"""Sequences split over several ranks: the tokens of each rank, and the exchanges between ranks.

Each rank of a torch.distributed group has the same number of tokens of one long row; rank r has the r-th
piece. All exchanges go through torch.distributed. The group determines its ranks and how long they wait for
each other (``timeout``).
"""
from __future__ import annotations

import copy
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.compat.tracing import transformed
from flashlin.guards import deferred_checks
from flashlin.guards.tensors import FLOATS, check_cu_seqlens, without_values
from flashlin.guards.tokens import report, users_frame
from flashlin.ops._common.pipeline import constant_while_tracing

CONTEXT = ("group", "cu_seqlens", "pre_num_ranks", "post_num_ranks")
SIZES = 11  # the number of sizes that ranks exchange in each call; unused ones are 0
_agreed: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Tensor]] = weakref.WeakKeyDictionary()


F_ = TypeVar("F_", bound=Callable[..., Any])


def untraced(function: F_) -> F_:
    """Return the function in a form that torch.compile does not trace.

    torch.compiler.disable imports torch's compiler, which takes seconds. So it is applied only in calls that
    are made after the program has imported the compiler.
    """
    made: list[Callable[..., Any]] = []

    @constant_while_tracing
    def make() -> bool:
        if not made:
            made.append(torch.compiler.disable(function))
        return True

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        make()
        return made[0](*args, **kwargs)
    return cast("F_", run)


class Shard(NamedTuple):
    """The tokens of one rank: its piece of a row that all ranks share.

    op, group, rank, size: the op, the group, the number of this rank, and the number of ranks.
    before: number of earlier ranks that have tokens of this rank's first sequence.
    after: number of later ranks that have tokens of this rank's last sequence.
    begin: index of the local token at which the last sequence begins, 0 if it began on an earlier rank.
    bounds, bounds_cpu: edges of the rank's own sequences, None if each row of the batch is one sequence.
    first: index of the rank's first sequence within the call.
    total: number of sequences of the call, 0 if unknown.
    whole: the edges of the whole call, None if only the rank's own edges are known.
    zigzag: how to exchange the caller's tokens; empty if each rank already has contiguous tokens.

    In the zigzag layout the row is cut into 2 * size pieces. The caller's tokens on rank r are the pieces r
    and 2 * size - 1 - r, one after the other. All other fields describe the contiguous pieces 2 r and 2 r +
    1. ``zigzag`` contains four lists: the order in which the caller's two pieces are sent, the number of
    pieces to each rank, the number of pieces from each rank, and the order that sorts the received pieces.
    """
    op: str
    group: Any
    rank: int
    size: int
    before: int = 0
    after: int = 0
    begin: int = 0
    bounds: Tensor | None = None
    bounds_cpu: Tensor | None = None
    first: int = 0
    total: int = 0
    whole: Tensor | None = None
    zigzag: tuple[list[int], ...] = ()

    @untraced
    def there(self, x: Tensor | None, way: int = 1) -> Any:
        """Return the rank's own contiguous tokens from the caller's x [B, T, ...].

        way: 1; or -1 to return the caller's tokens from the rank's own contiguous tokens x.
        """
        if x is None or not self.zigzag:
            return x
        before, sent, came, after = self.zigzag[::way]
        parts = x.unflatten(1, (2, -1))[0]
        return exchanged(self, parts[before], sent, came)[after].flatten(0, 1)[None]

    def back(self, x: Tensor) -> Tensor:
        """Return the caller's tokens from the rank's own contiguous tokens."""
        return cast(Tensor, self.there(x, -1))

    def own(self, states: Tensor) -> Tensor:
        """Return the initial states of the rank's own sequences from the states of the whole call."""
        if self.bounds is None:
            return states
        return states[self.first:self.first + self.bounds.shape[0] - 1]

    def share(self, states: Tensor, B: int) -> Tensor:
        """Return the final states [N, ...] of the whole call, zero for sequences that end on other ranks.

        states: the final states of the rank's own sequences. B: rows of the batch.
        """
        elsewhere = B if self.after else 0
        n = states.shape[0] - elsewhere
        behind = max(self.total - self.first - n, elsewhere)
        return F.pad(states[:n], [0, 0] * (states.ndim - 1) + [self.first, behind])

    @untraced
    def window(self, x: Tensor, size: int, states: Tensor | None) -> Tensor:
        """Return the ``size`` tokens before each sequence on this rank as convolution states [n, D, size].

        If the rank's first sequence began on an earlier rank, the tokens before it come from the previous
        rank. The tokens before all other sequences come from ``states``. The newest token is the last one.
        x: the rank's tokens [B, T, D].
        states: the initial states [N, D, size] of the whole call, None for zeros.
        """
        B, T, D = x.shape
        n = B if self.bounds is None else self.bounds.shape[0] - 1
        wide = torch.promote_types(x.dtype, torch.float32)  # for initial states and gradients in float32
        own = (x.new_zeros(n, D, size) if states is None else self.own(states)).to(wide)
        if self.size == 1:
            return own
        if T < size - 1:
            raise ValueError(f"{self.op}: got {T} tokens on each rank, need at least {size - 1}, all that a "
                             "token looks back on")
        # The window that the last sequence passes on: its initial window followed by its tokens here.
        left = torch.cat([own[n - B:], x[:, max(self.begin, T - size):].mT.to(wide)], 2)[..., -size:]
        to = torch.arange(self.size, device=x.device).view(-1, 1, 1, 1)
        sent = torch.where((to == self.rank + 1) & (self.after > 0), left, 0)
        came = exchanged(self, sent)[self.rank - 1]
        # A rank that receives no window receives zeros. It adds them, so that its backward also takes part in
        # the exchange of gradients, in which every rank must take part.
        return torch.cat([came if self.before else own[:B] + came, own[B:]])


def check_ranks(cp_context: Any, process_group: Any) -> None:
    """Raise TypeError or ValueError unless cp_context and process_group have the right types or are None."""
    if process_group is not None:
        check_group("process_group", process_group)
    if cp_context is None:
        return
    if missing := [name for name in CONTEXT if not hasattr(cp_context, name)]:
        raise TypeError(f"cp_context: got {type(cp_context).__name__} without {missing[0]}, need what "
                        "fla.ops.cp.build_cp_context makes (without fla: process_group=)")
    if cp_context.group is not None:
        check_group("cp_context.group", cp_context.group)


def check_group(name: str, group: Any) -> None:
    """Raise TypeError or ValueError unless the group belongs to torch.distributed and has this process."""
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{name}: got {type(group).__name__}, need a group of torch.distributed")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name}: got a group without this process, need one of its own")


@untraced
def in_rows(cp_context: Any, process_group: Any, n: int) -> tuple[Any, int]:
    """Return a context and a number of ranks for an op that computes n rows for each token.

    With a cp_context, the context is a copy whose edges count rows instead of tokens, and the number of
    ranks is 1. With a process_group, the context is None, and the number of ranks is the group's size.
    """
    check_ranks(cp_context, process_group)
    if cp_context is None:
        return None, dist.get_world_size(process_group)
    counted = copy.copy(cp_context)
    vars(counted).update({name: edges * n for name, edges in vars(cp_context).items()
                          if name.startswith("cu_seqlens") and edges is not None})
    return counted, 1


@untraced
def shard_of(op: str, x: Tensor, sizes: Sequence[int], cp_context: Any, process_group: Any,
             cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, **states: bool) -> Shard:
    """Return the Shard of this rank, whose tokens are x [B, T, ...].

    One of cp_context and process_group is not None.
    cu_seqlens: edges of the whole row. The host reads them, from cu_seqlens_cpu if given. They are ignored
        with a context, which has its own edges.
    sizes: numbers that must be equal in the calls of all ranks, in addition to B and T.
    states: True by name for each kind of state that the call has; fla's context does not support states.
    """
    check_ranks(cp_context, process_group)
    if transformed():
        raise ValueError(f"{op}: got a call inside a transform of torch.func or forward-mode AD, need one "
                         "outside: ranks exchange states there by autograd functions of backward only")
    for name, given in {"": x, "cu_seqlens: ": cu_seqlens, "cu_seqlens_cpu: ": cu_seqlens_cpu}.items():
        if isinstance(given, Tensor) and (kind := without_values(given)):
            raise ValueError(f"{op}: {name}got {kind} where ranks share the sequences, need a tensor with "
                             "values: ranks exchange them")
    if x.shape[1] == 0:
        raise ValueError(f"{op}: got no tokens on this rank, need at least 1")
    if cp_context is None:
        return of_group(op, process_group, x, sizes, cu_seqlens, cu_seqlens_cpu)
    for name, there in {"process_group": process_group is not None, **states}.items():
        if there:
            raise ValueError(f"{name}: got one together with cp_context, need none: a context of fla has the "
                             "edges of one rank's sequences and no states (process_group= supports states)")
    return of_context(op, cp_context, x, sizes)


def of_group(op: str, group: Any, x: Tensor, sizes: Sequence[int], cu_seqlens: Tensor | None = None,
             cu_seqlens_cpu: Tensor | None = None) -> Shard:
    """Return the Shard of this rank for a process_group."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    B, T = x.shape[:2]
    count = cu_seqlens.numel() if isinstance(cu_seqlens, Tensor) else 0
    agree(op, group, (B, T, count, FLOATS.index(x.dtype), *sizes), x.device,
          waits=count > 0 and cu_seqlens_cpu is None)
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu: got a tensor without cu_seqlens, need both")
        return Shard(op, group, rank, size, before=rank, after=size - 1 - rank, total=B)
    edges = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, torch.Size((B, T * size)), x.device,
                             policy.current().debug)
    host = (edges if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    if policy.current().debug:
        agree(op, group, (B, T, count, FLOATS.index(x.dtype), zlib.crc32(repr(host).encode())), x.device)
    start, end, count = rank * T, rank * T + T, len(host) - 1
    here = [n for n in range(count)
            if (host[n] < end and host[n + 1] > start if host[n] < host[n + 1] else
                min(host[n] // T, size - 1) == rank)]  # an empty sequence belongs to the rank of its position
    first, last = here[0], here[-1]
    mine = torch.tensor([min(max(edge, start), end) - start for edge in host[first:last + 2]],
                        dtype=edges.dtype)
    return Shard(op, group, rank, size, before=max(rank - host[first] // T, 0),
                 after=max((host[last + 1] - 1) // T - rank, 0), begin=max(host[last] - start, 0),
                 bounds=(edges[first:last + 2] - start).clamp(0, T),
                 bounds_cpu=mine, first=first, total=count, whole=edges)


def of_context(op: str, context: Any, x: Tensor, sizes: Sequence[int]) -> Shard:
    """Return the Shard of this rank for a context made by ``fla.ops.cp.build_cp_context``.

    A context without a group has one rank.
    """
    layout = getattr(context, "layout", "contiguous")
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"cp_context: got layout {layout!r}, need 'contiguous' or 'zigzag'")
    if getattr(context, "pre_num_ranks_dev", None) is not None:
        raise ValueError("cp_context: got ranks counted on the device, need them on the host: there is no "
                         "capture of calls over several ranks")
    (B, T), cpu = x.shape[:2], getattr(context, "cu_seqlens_cpu", None)
    if context.group is None:
        return Shard(op, None, 0, 1, bounds=context.cu_seqlens, bounds_cpu=cpu)
    rank, size = dist.get_rank(context.group), dist.get_world_size(context.group)
    agree(op, context.group, (B, T, 0, FLOATS.index(x.dtype), *sizes), x.device)
    bounds = check_cu_seqlens(context.cu_seqlens, cpu, x.shape, x.device, policy.current().debug)
    if layout == "zigzag":
        begins = bounds.new_zeros(T + 1, dtype=torch.uint8).index_fill(0, bounds.long(), 1)[:T].view(2, -1)
        begins[:, 0] = torch.tensor(context.is_first_by_part)
        parts = torch.stack(gathering(op, context.group, begins)())
        row = torch.cat([parts[:, 0], parts[:, 1].flip(0)]).flatten()
        edges = F.pad(row.nonzero()[:, 0], (0, 1), value=row.numel())
        return of_group(op, context.group, x, sizes, edges)._replace(zigzag=zigzag(rank, size))
    cpu = bounds.cpu() if cpu is None else cpu
    return Shard(op, context.group, rank, size, before=int(context.pre_num_ranks),
                 after=int(context.post_num_ranks), begin=int(cpu[-2]), bounds=bounds, bounds_cpu=cpu)


def zigzag(rank: int, size: int) -> tuple[list[int], ...]:
    """Return the four lists of ``Shard.zigzag`` for a rank.

    Received pieces arrive in the order of ranks.
    """
    last, ranks = 2 * size - 1, range(size)
    to = [rank // 2, (last - rank) // 2]
    of = [min(part, last - part) for part in (2 * rank, 2 * rank + 1)]
    return [0, 1], [*map(to.count, ranks)], [*map(of.count, ranks)], [0, 1] if of == sorted(of) else [1, 0]


class Sizes(NamedTuple):
    """The sizes that this rank passed to ``agree`` in one call, for a comparison that finishes later.

    op: the op's name.
    where: file, line and function of the caller.
    rank: number of this rank.
    """
    op: str
    where: str
    rank: int
    sizes: tuple[int, ...]

    def verdict(self, position: int, value: int) -> str:
        """Return the error's text, or "" if ``value`` equals this rank's size at that position.

        position: flat index into the sizes of all ranks [ranks, SIZES].
        """
        rank, at = divmod(position, SIZES)
        if position < 0 or at >= len(self.sizes) or value == self.sizes[at]:
            return ""
        other = (*self.sizes[:at], value, *self.sizes[at + 1:])
        return f"{self}: {unequal(dict(sorted({self.rank: self.sizes, rank: other}.items())))}"

    def __str__(self) -> str:
        return f"{self.op} called {self.where}"


def agree(op: str, group: Any, sizes: tuple[int, ...], device: torch.device, waits: bool = False) -> None:
    """Raise ValueError unless all ranks pass the same sizes.

    sizes: B, T, the number of values in cu_seqlens (0 without it), the index of the dtype in FLOATS, and
        further numbers. Every call exchanges its sizes. If only some calls did, a rank could take
        the sizes that another rank sends for other data.

    Reading the sizes of other ranks waits for the GPU. A rank waits if its own sizes are new to it, in debug
    mode, with ``tokens="sync"``, and in calls that wait anyway (``waits``). Otherwise the GPU compares the
    sizes, and a later call raises the error, the same one on each rank (``guards/deferred_checks.py``).
    """
    seen, call = _agreed.setdefault(group, {}), (device, *sizes)
    known = seen.get(call)
    mine = torch.tensor([*sizes, *[0] * (SIZES - len(sizes))], device=device) if known is None else known
    deferred_checks.settle()
    told = gathering(op, group, mine)()
    settings = policy.current()
    if known is not None and mine.is_cuda and not (waits or settings.debug or settings.tokens == "sync"):
        frame, everyone = users_frame(), torch.stack(told)
        where = f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        report(everyone, everyone != mine, Sizes(op, where, dist.get_rank(group), sizes), shared=True)
        return
    found = {rank: tuple(one.tolist()[:len(sizes)]) for rank, one in enumerate(told)}
    if len(set(found.values())) > 1:
        raise ValueError(f"{op}: {unequal(found)}")
    seen[call] = mine


def unequal(found: dict[int, tuple[int, ...]]) -> str:
    """Return the error's text for sizes that differ between ranks.

    found: the sizes by rank, as ``agree`` compares them.
    """
    tokens, edges, dtypes = ([one[at] for one in found.values()] for at in (1, 2, 3))
    if len(set(tokens)) > 1:
        what = f"{tokens} tokens"
    elif len(set(edges)) > 1:
        what = f"cu_seqlens of {edges} values (0: none)"
    elif len(set(dtypes)) > 1:
        what = f"dtypes {[str(FLOATS[at]) for at in dtypes]}"
    else:
        what = f"sizes {[list(one) for one in found.values()]}"
    return f"got {what} on ranks {', '.join(map(str, found))}, need the same on each"


@contextmanager
def answered(op: str, group: Any) -> Iterator[None]:
    """Add an explanation to the error of an exchange that fails within the ``with`` block."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{op}: rank {dist.get_rank(group)} of {dist.get_world_size(group)} got no answer from the "
            "others: one of them has failed (its own error comes first, look there), or has made another "
            f"call; torch.distributed says: {error}") from error


def gathering(op: str, group: Any, x: Tensor) -> Callable[[], list[Tensor]]:
    """Start to send x to every rank; return a function that waits for all ranks' x, in their order."""
    x = x.contiguous()
    out = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    with answered(op, group):
        work = dist.all_gather(out, x, group=group, async_op=True)

    def arrived() -> list[Tensor]:
        with answered(op, group):
            work.wait()
        return out
    return arrived


class _Exchange(torch.autograd.Function):
    """A differentiable all-to-all over the slices of x [n, ...].

    sent: number of slices for each rank, in order; None for one slice each.
    came: number of slices that come from each rank.
    The gradient is the same exchange in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, op: str, group: Any, x: Tensor, sent: list[int] | None,
                came: list[int] | None) -> Tensor:
        ctx.back = op, group, came, sent
        x = x.resolve_neg().contiguous()  # the backend reads raw memory
        y = torch.empty_like(x)
        if x.numel():
            with answered(op, group):
                # The exchange sends bytes, because some backends do not support every dtype.
                there, here = (t.view(len(t), -1).view(torch.uint8) for t in (x, y))
                dist.all_to_all_single(here, there, came, sent, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, group, *turned = ctx.back
        return None, None, _Exchange.apply(op, group, grads[0], *turned), None, None


def exchanged(shard: Shard, x: Tensor, sent: list[int] | None = None,
              came: list[int] | None = None) -> Tensor:
    """Return the slices that the other ranks send in a differentiable all-to-all of x [n, ...].

    sent, came: number of slices for each rank and from each rank; None for one slice each.
    """
    return cast(Tensor, _Exchange.apply(shard.op, shard.group, x, sent, came))


def traded(shard: Shard, x: Tensor, divided: int, joined: int) -> Tensor:
    """Return x with dimension ``divided`` divided among the ranks, and their parts of ``joined`` joined.

    With dimensions 2 and 1, tokens [B, T, H, ...] of this rank become its heads [B, size T, H / size, ...] of
    all tokens. With 1 and 2, such heads become all heads of this rank's tokens.
    """
    x = exchanged(shard, x.unflatten(divided, (shard.size, -1)).movedim(divided, 0))
    return x.movedim(0, joined).flatten(joined, joined + 1)


def folded(states: Sequence[Tensor], transfers: Sequence[Tensor]) -> Tensor:
    """Return the state after several ranks, by applying each rank's transfer to the state before it.

    states: [B, H, K, V] for each rank, the state after its own tokens without the states of earlier ranks.
    transfers: for each rank but the first, the effect on an entering state: a matrix [B, H, K, K], or decays
        [B, H] or [B, H, K].
    It computes in float64 and in a fixed order, so the result does not depend on torch's settings for 32-bit
    products.
    """
    state = states[0].double()
    for one, transfer in zip(states[1:], transfers, strict=True):
        D = transfer.double()
        state = one.double() + (D @ state if D.ndim == 4 else D.view(*D.shape, *[1] * (4 - D.ndim)) * state)
    return state.to(states[0].dtype)
