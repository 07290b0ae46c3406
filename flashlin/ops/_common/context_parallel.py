"""Chunked ops over several ranks: each rank computes some of the heads, or ranks pass states on.

By heads: an all-to-all gives each rank all tokens of its heads. The op runs unchanged, and a second
all-to-all restores the layout.

By states: one autograd node per call (``_Chain``) runs the family's own forward and backward, by kernels or
plain torch, between the exchanges.

Forward:
1. Each rank takes its tokens of its last sequence and computes the state after them. It starts from the
   caller's initial state if the sequence starts on this rank, else from zero. If the rank has tokens of only
   one sequence, and this sequence starts on the rank, the op's own run computes that state.
2. Each rank computes the effect of its tokens on an entering state, by ``Chunked.decays`` or by the op
   itself.
3. The op runs. Before its first kernel that reads the entering states (``launch.enter``), it waits for all
   ranks' states and combines the states of the ranks before this one.

Backward:
1. Each rank computes the gradient of its entering state from its own tokens alone.
2. The gradients of all ranks are combined, from the last rank to the first.
3. The op's backward runs with the combined gradient of the ranks after this one.
"""
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashlin.compat import launch
from flashlin.guards.plan_types import Plan
from flashlin.guards.tensors import check_qkv, check_state
from flashlin.kernels.chunked import Scalars
from flashlin.ops._common import chunked, ranks
from flashlin.ops._common.casting import SIXTEEN_BITS, count_of, wants_grad
from flashlin.ops._common.chunked import Chunked, Request, check_beside, run_chunked
from flashlin.ops._common.gradients import pulled_back
from flashlin.ops._common.operator import Gradients, Operator, Outputs
from flashlin.ops._common.pipeline import planned
from flashlin.ops._common.ranks import Shard

INSTEAD = "none have them over several ranks"


@ranks.untraced
def run_over_ranks(family: Chunked, request: Request, tensors: tuple[Tensor | None, ...],
        **how: Any) -> tuple[Tensor, Tensor | None]:
    """Run a chunked op whose request has a process_group or a cp_context.

    how: the keyword arguments of ``run_chunked``.
    """
    op, context, group = request.op, request.cp_context, request.process_group
    alone = request._replace(cp_context=None, process_group=None)
    q, k, v = tensors[:3]
    first = how["called"].get("q", "q")
    check_qkv(q, k, v, how["grouped"], first)
    assert q is not None and v is not None  # checked
    (B, T, H, K), (HV, V), h0 = q.shape, v.shape[2:], request.h0
    check_beside(family, tensors, how["called"], {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V})
    sizes = (H, HV, K, V, bool(request.has_ht))
    shard = ranks.shard_of(op, q, sizes, context, group, request.cu_seqlens, request.cu_seqlens_cpu,
                           initial_state=h0 is not None, output_final_state=bool(request.has_ht))
    if h0 is not None:
        check_state("initial_state", h0, shard.total, H=HV, K=K, V=V, v_first=bool(request.state_v_first),
                    device=q.device, packed=request.cu_seqlens is not None, first=first)
    tensors = tuple(shard.there(x) if "T" in argument.shape else x
                    for x, argument in zip(tensors, family.arguments.values(), strict=True))
    mine = alone._replace(h0=None if h0 is None else shard.own(h0), cu_seqlens=shard.bounds,
                          cu_seqlens_cpu=shard.bounds_cpu)
    if shard.size == 1:
        o, ht = run_chunked(family, mine, tensors, **how)
        return shard.back(o), ht
    options = ["own_edges"] * (context is not None) + ["few_qk_heads"] * bool(H % shard.size)
    asked = family.problem((*tensors, None, shard.bounds), chunked.Asked(
        op, wants_grad(*tensors, h0), request.mode, request.state_v_first))
    asked = asked._replace(ranks=shard.size, options=tuple(sorted({*asked.options, *options})))
    if planned(asked, q.device).problem.over == "heads":
        return _by_heads(family, alone, tensors, shard, how)
    o, ht = run_chunked(family, mine, tensors, **how, run=lambda x, scalars: operator(family).run_planned(
        x, Over(scalars, shard, scalars.needs_grad, scalars.call)))
    return shard.back(o), None if ht is None else shard.share(ht, B)


def _by_heads(family: Chunked, request: Request, tensors: tuple[Tensor | None, ...], shard: Shard,
              how: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Run a chunked op with some of the heads on each rank, between two all-to-all exchanges."""
    def mine(x: Tensor, dim: int) -> Tensor:
        return x.chunk(shard.size, dim)[shard.rank]

    given = [x if x is None else ranks.traded(shard, x, 2, 1) if "T" in argument.shape else mine(x, 0)
             for x, argument in zip(tensors, family.arguments.values(), strict=True)]
    h0 = None if request.h0 is None else mine(request.h0, 1)
    o, ht = run_chunked(family, request._replace(h0=h0), tuple(given), **how)
    o = ranks.traded(shard, o, 1, 2)
    if ht is not None:  # each rank receives the final states of the sequences that end on it
        end = torch.full((ht.shape[0],), shard.size - 1, device=ht.device)
        edges, T = shard.whole, o.shape[1]
        if edges is not None:
            last = torch.where(edges.diff() > 0, edges[1:] - 1, edges[1:])
            end = (last // T).clamp(max=shard.size - 1)
        to = torch.arange(shard.size, device=ht.device)[:, None]
        ht = ranks.exchanged(shard, torch.where((end == to)[..., None, None, None], ht, 0))
        ht = ht.movedim(0, 1).flatten(1, 2)
    return o, ht


def _zeros(x: Any, columns: int) -> Tensor:
    """Return zeros [B, HV, K, columns] in float32 or wider."""
    wide = torch.promote_types(x.q.dtype, torch.float32)
    return torch.zeros(x.q.shape[0], x.v.shape[2], x.q.shape[3], columns, dtype=wide, device=x.q.device)


def _turned(states: Tensor, how: Scalars) -> Tensor:
    """Return states converted from [B, HV, K, V] to the layout of the call (state_v_first), or back."""
    return states.mT if how.state_v_first else states


class Over(NamedTuple):
    """The scalars of a call over several ranks.

    how: the scalars of the family.
    shard: the tokens of this rank.
    needs_grad: True if backward may follow.
    call: the call string, whose first word is the op.
    """
    how: Scalars
    shard: Shard
    needs_grad: bool
    call: str


@cache
def operator(family: Chunked) -> Operator[Any, Over, Any]:
    """Return the family's operator that receives states from other ranks and passes states on."""
    chain = _Chain(family)
    return Operator(f"{family.name}_across", family.tensors, Over, chain.outputs, 2, family=family.name,
                    problem=lambda x, over: family.problem(x, over.how), cast=chain.cast,
                    forward=chain.forward, kept=chain.kept, backward=chain.backward, instead=INSTEAD)


class _Chain:
    """Forward and backward of a family's op with exchanges of states between ranks.

    Its outputs are the family's outputs, ``began`` and ``transfers``.
    began: the states that this rank's sequences started from.
    transfers: the transfers of the later ranks that this rank's last sequence passes through completely. A
        transfer is the effect of a rank's tokens on the state that enters the rank. The rank on which the
        sequence ends is not included.
    """

    def __init__(self, family: Chunked) -> None:
        self.family = family
        self.outputs = chunked.outputs_of((*family.kept, "began", "transfers"))

    def cast(self, x: Any, over: Over, dot: str) -> tuple[Any, Over]:
        x, how = self.family.cast(x, over.how, dot)
        return x, over._replace(how=how)

    def forward(self, plan: Plan, x: Any, over: Over) -> Outputs:
        how, shard, B = over.how, over.shard, x.q.shape[0]
        y: Outputs = ()
        if shard.after and not shard.before and not shard.begin:
            # No state from another rank enters this sequence, so the op itself computes the state to pass on.
            y = self._forward(plan, x, how._replace(has_ht=True))
            left = _turned(self.family.operator.outputs(*y).ht[-B:], how)
        else:
            left = self._left(x, how, shard)
        transfer = self._transfer(x, how, shard)
        parts = left.flatten() if transfer is None else torch.cat([left.flatten(), transfer.flatten()])
        arrived = ranks.gathering(shard.op, shard.group, parts)
        began, size, first = x.h0, left.numel(), shard.rank - shard.before
        transfers: list[Tensor] = []
        if shard.before:  # NaN until the states arrive, so that a read before their arrival is visible
            rest = x.h0 if x.h0 is not None else _turned(
                left.new_zeros(count_of(x.q, x.bounds), *left.shape[1:]), how)
            began = torch.cat([torch.full_like(rest[:B], float("nan")), rest[B:]])
        else:
            y = y or self._forward(plan, x, how)  # this rank needs no states of other ranks

        def wait() -> None:
            told = arrived()
            transfers.extend(one[size:].view_as(transfer) for one in told if transfer is not None)
            if shard.before:
                states = [one[:size].view_as(left) for one in told[first:shard.rank]]
                began[:B] = _turned(ranks.folded(states, transfers[first + 1:shard.rank]), how)
        with launch.entering(wait):
            if shard.before:
                y = self._forward(plan, x._replace(h0=began), how)
        behind = transfers[shard.rank + 1:shard.rank + shard.after]
        return *y, began, torch.stack(behind) if behind and how.needs_grad else None

    def kept(self, x: Any, y: Any, over: Over) -> tuple[Outputs, Outputs]:
        return x._replace(h0=y.began), (None, None, *y[2:-2], None, y.transfers)

    def backward(self, plan: Plan, x: Any, y: Any, grads: Any, over: Over,
                 wanted: frozenset[str]) -> Gradients:
        how, shard, B = over.how, over.shard, x.q.shape[0]
        alone = _zeros(x, x.v.shape[3])
        if shard.before:
            of_state = self._backward(plan, x, y, grads, how, frozenset({"h0"}))["h0"]
            if of_state is not None:
                alone = _turned(of_state, how)[:B].to(alone.dtype)
        arrived = ranks.gathering(shard.op, shard.group, alone)
        if shard.after:
            behind = arrived()[shard.rank + 1:shard.rank + shard.after + 1][::-1]
            transfers = () if y.transfers is None else y.transfers.unbind(0)[::-1]
            came = _turned(ranks.folded(behind, [D.mT if D.ndim == 4 else D for D in transfers]), how)
            n = count_of(x.q, x.bounds)
            dht = came.new_zeros(n, *came.shape[1:]) if grads.ht is None else grads.ht.clone()
            dht[n - B:] += came
            grads = grads._replace(ht=dht)
        gradients = dict(self._backward(plan, x, y, grads, how, wanted))
        if not shard.after:  # without later ranks, nothing above has waited for the exchange
            arrived()
        # The first entering states came from earlier ranks, so the caller's gradient for them is zero.
        if shard.before and (dh0 := gradients.get("h0")) is not None:
            gradients["h0"] = torch.cat([torch.zeros_like(dh0[:B]), dh0[B:]])
        return gradients

    def _left(self, x: Any, how: Scalars, shard: Shard) -> Tensor:
        """Return the state [B, HV, K, V] that this rank's tokens of its last sequence pass to the next rank.

        It starts from the caller's initial state if the sequence starts on this rank, else from zero. States
        from earlier ranks are not included.
        """
        if not shard.after:
            return _zeros(x, x.v.shape[3])
        entered = shard.before and not shard.begin
        h0 = None if entered or x.h0 is None else x.h0[x.h0.shape[0] - x.q.shape[0]:]
        tokens = [y[:, shard.begin:].contiguous() if y is not None and "T" in argument.shape else y
                  for y, argument in zip(x, self.family.arguments.values(), strict=False)]
        return _turned(self._state_after(x._make([*tokens, h0, None]), how), how)

    def _transfer(self, x: Any, how: Scalars, shard: Shard) -> Tensor | None:
        """Return the effect of this rank's tokens on an entering state, or None in a group of two ranks.

        The effect is a decay [B, HV] or [B, HV, K], or a matrix [B, HV, K, K]. Other ranks need it only if
        one sequence enters this rank, covers all its tokens and continues on the next rank. Otherwise the
        result is zeros, because all ranks exchange tensors of the same shape. In a group of two ranks, no
        rank lies between two others, so no effect is exchanged.
        """
        if shard.size == 2:
            return None
        K = x.q.shape[3]
        middle = shard.before and shard.after and not shard.begin
        if self.family.decays is not None:
            decays: Tensor = self.family.decays(x)
            return decays.exp() if middle else torch.zeros_like(decays)
        if not middle:
            return _zeros(x, K)
        # Backward multiplies by the transpose, which needs more precision than 16-bit dtypes have.
        exact = x._make([y.float() if y is not None and y.dtype in SIXTEEN_BITS else y for y in x])
        eye = _zeros(x, K) + torch.eye(K, device=x.q.device)
        return self._state_after(exact._replace(v=exact.v.new_zeros(*x.v.shape[:3], K), h0=eye, bounds=None),
                                 how._replace(state_v_first=False))

    def _state_after(self, x: Any, how: Scalars) -> Tensor:
        """Return the final states of a separate call on these tokens, with its own plan."""
        how = how._replace(has_ht=True, needs_grad=False, out_dtype=x.v.dtype)
        return self.family.trimmed(self.family.operator.run_planned(x, how), x, how)[1]

    def _forward(self, plan: Plan, x: Any, how: Scalars) -> Outputs:
        if plan.problem.path != "torch":
            return tuple(self.family.forward(plan, x, how))
        launch.enter()
        return *self.family.on_torch(x, how), *(None for _ in self.family.kept)

    def _backward(self, plan: Plan, x: Any, y: Any, grads: Any, how: Scalars,
                  wanted: frozenset[str]) -> Gradients:
        if plan.problem.path != "torch":
            own = self.family.operator.own(self.family.operator.outputs(*y[:-2]))
            return self.family.backward(plan, x, own, grads, how, wanted)
        return pulled_back(lambda x: self.family.on_torch(x, how), x, wanted, (grads.o, grads.ht))
