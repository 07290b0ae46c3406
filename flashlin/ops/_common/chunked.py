"""Ops that compute chunk by chunk: their argument checks, and the operator of each family.

A family declares its tensors. kernels/<name>/forward.py and backward.py compute:

    launch_forward(plan, x, how) -> (o, ht or None, *kept)
    launch_backward(plan, x, how, do, dht, needs, *kept) -> gradients by name, None if not requested

x: the Inputs of kernels/<name>/inputs.py. All tensors are contiguous. The 16-bit tensors share one dtype, and
    wide tensors are float32, or have the dtype of q (``Argument.either``).
how: the Scalars.
needs: the names of the tensors that need a gradient.

Under torch.compile the same two functions run inside one library operator per direction. The operator plans
when it runs, so torch.compile never specialises a length. The torch path is plain differentiable torch. If a
traced graph of the torch path would not be valid for all lengths, the torch path runs inside the operators.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.checks import FEW_TOKENS
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import check_qkv, check_state, need_tensor
from flashlin.kernels.chunked import Scalars
from flashlin.ops._common.arguments import check_packed, suspect_layout
from flashlin.ops._common.casting import (
    as_planned,
    common_dtype,
    dense,
    dtype_as_planned,
    empty_outputs,
    wants_grad,
)
from flashlin.ops._common.entry import outside
from flashlin.ops._common.gradients import pulled_back
from flashlin.ops._common.operator import Gradients, Operator, kernels
from flashlin.ops._common.pipeline import TracedCall, exporting, planned, problem_of_heads, traced_over_heads
from flashlin.ops._common.replay import Call, calls, key_of, run_replayed

MODES = ("auto", "chunk", "fused_recurrent")
CHUNK_SIZES = (16, 32, 64)  # of the delta rules and DPLR; chunk_kda accepts 32 and 64, chunk_gdn2 only 64


class Argument(NamedTuple):
    """One tensor argument of a chunked family.

    shape: letters of B, T, H, HV, K and V.
    wide: the kernels read it in float32, whatever dtype the caller passes.
    either: an exception to ``wide``: the kernels also accept the dtype of q, and then nothing is converted.
    unless: name of a tensor; if the call has it, this argument is not wide.
    constant: it gets no gradient.
    hint: text that an error appends to the expected shape.
    """
    shape: tuple[str, ...]
    wide: bool = False
    either: bool = False
    optional: bool = False
    constant: bool = False
    hint: str = ""
    unless: str = ""


class Request(NamedTuple):
    """The arguments of a chunked op other than its tensors, as the user passed them.

    op: the op's public name, with which errors and plans begin.
    has_ht: True if the final state is returned.
    mode: one of MODES.
    reverse: process each sequence from its last token to its first.
    cp_context, process_group: set if several ranks share the sequences, see ranks.py.
    """
    op: str
    scale: float | None
    h0: Tensor | None
    has_ht: bool
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    state_v_first: bool = False
    mode: str = "chunk"
    reverse: bool = False
    cp_context: Any = None
    process_group: Any = None


class Asked(NamedTuple):
    """The fields of Scalars that planning reads, for a call whose other scalars are not known yet."""
    call: str
    needs_grad: bool
    mode: str = "chunk"
    state_v_first: bool = False


class Raw(NamedTuple):
    """Inputs of a family that its kernels can compute from raw ones.

    tensor: name of a tensor that only calls with raw inputs have.
    kernel: the kernel that reads raw inputs.
    ready: ``ready(x, how)`` returns x with these inputs computed by other ops, and without ``tensor``.
    backward: ``backward(x, how, wanted, raw, run)`` returns the gradients of raw inputs x by name. ``run(x,
        wanted)`` runs backward's kernels. If ``raw`` is True, they read the raw gate. All other inputs are
        already computed.
    """
    tensor: str
    kernel: str
    ready: Callable[[Any, Any], Any]
    backward: Callable[..., Gradients]


@dataclass(eq=False)
class Chunked:
    """A family of ops that compute chunk by chunk.

    name: the name of the folder in kernels/, of the Family that plans it, and of its torch.library operators.
    tensors: NamedTuple class of the inputs: the arguments in their order, h0 and bounds.
    arguments: the declared tensors by public name; q, k, v come first.
    torch_path: computes (o, states) from (x, scale).
    kept: names of the tensors that forward keeps for backward.
    room: ``room(needs_grad, *tensors)`` returns empty tensors like the kept tensors.
    one_graph: True if one traced graph of the torch path is valid for all lengths.
    decays: ``decays(x)`` returns the log decays [B, HV] or [B, HV, K] by which all tokens of x together scale
        a state. The field is None for a family whose tokens do more to a state than scale it.
    scalars: NamedTuple class of the arguments that are no tensors: ``Scalars``, or a class with additional
        fields. Such a class also ends with ``needs_grad`` and ``call``, and the torch path gets the
        additional fields by name.
    raw: the inputs that its kernels can compute from raw ones, or None.
    over_ranks: runs a call whose sequences several ranks share (``run_over_ranks``).
    options: names and indices of the optional tensors that planning distinguishes.
    operator: the kernels of the family as a differentiable operator.
    """
    name: str
    tensors: type[tuple[Any, ...]]
    arguments: dict[str, Argument]
    torch_path: Callable[..., tuple[Tensor, Tensor]]
    kept: tuple[str, ...] = ()
    room: Callable[..., tuple[Tensor | None, ...]] = lambda *_: ()
    one_graph: bool = False
    decays: Callable[[Any], Tensor] | None = None
    scalars: Any = Scalars
    raw: Raw | None = None
    over_ranks: Callable[..., tuple[Tensor, Tensor | None]] = field(kw_only=True)

    def __post_init__(self) -> None:
        self.options = [(name, at) for at, (name, argument) in enumerate(self.arguments.items())
                        if argument.optional and not argument.constant]
        self.own = [name for name in self.scalars._fields if name not in Scalars._fields]
        self.operator: Operator[Any, Scalars, Any] = Operator(
            self.name, self.tensors, self.scalars, outputs_of(self.kept), 2, family=self.name,
            problem=self.problem, on_torch=self.on_torch, cast=self.cast, inside=self.inside,
            while_tracing=self.while_tracing, forward=self.forward, filled=self.filled,
            kept=lambda x, y, how: (x, (None, None, *y[2:])), empty=self.empty,
            backward=self.backward if self.raw else self.launch_backward)

    def problem(self, x: Sequence[Tensor | None], how: Scalars | Asked, back: bool = False) -> Problem:
        """Return the Problem of a call.

        x: the family's tensors in their order, then h0 (not read) and bounds.
        back: return the problem of forward and backward of a call with raw inputs. Its forward has another
            plan, because backward may need other kernels.
        """
        q, v = x[0], x[2]
        assert q is not None and v is not None
        options = [name for name, at in self.options if x[at] is not None]
        if v.shape[2] != q.shape[2]:
            options.append("gva")
        options += ["v_first"] * how.state_v_first
        needs_grad = back or (how.needs_grad and (self.raw is None or not self.is_raw(x)))
        return problem_of_heads(how.call, self.name, how.mode, q, v, x[-1], needs_grad, options)

    def is_raw(self, x: Sequence[Tensor | None]) -> bool:
        """Return True if some inputs are raw. x: the family's tensors in their order."""
        return self.raw is not None and x[[*self.arguments].index(self.raw.tensor)] is not None

    def while_tracing(self, x: Any, how: Scalars) -> TracedCall:
        """Return the facts from which planning chooses a path while torch.compile traces."""
        return traced_over_heads(x, how, how.mode, ("v_first",) * how.state_v_first)

    def inside(self, x: Any) -> bool:
        """Return True if the torch path runs inside the library operator while torch.compile traces.

        A traced loop over chunks would be unrolled, and bounds cannot be read during tracing. Under autocast
        it also runs inside, because otherwise AOTAutograd would trace the matrix products of backward under
        autocast.
        """
        return not self.one_graph or x.bounds is not None or exporting() or outside.autocast

    def cast(self, x: Any, how: Scalars, dot: str) -> tuple[Any, Scalars]:
        """Return the tensors and scalars in the form that the kernels need.

        Head sizes that are not a multiple of 8 are padded with zeros. Otherwise every row of a tile would be
        misaligned, which also crashes some releases of ptxas (fla #1262). ``trimmed`` removes the padding
        from the outputs.
        """
        K, V = x.q.shape[3], x.v.shape[3]
        pads = {"K": -K % 8, "V": -V % 8} if K % 8 or V % 8 else {}
        wide = torch.float64 if x.q.dtype == torch.float64 else torch.float32
        # `*operands, bounds = ...` is avoided, because torch 2.11's compiler would make operands a tuple.
        # The loop below does not change bounds, the last operand.
        operands = list(x)
        if dot != "native":
            operands = list(as_planned(x, dot))
            how = how._replace(out_dtype=dtype_as_planned(how.out_dtype, dot))
        for at, argument in enumerate((*self.arguments.values(), STATE[how.state_v_first])):
            y = operands[at]
            if y is not None:
                given = argument.either and y.dtype == x.q.dtype
                given = given or getattr(x, argument.unless, None) is not None
                y = y.to(wide) if argument.wide and not given else y
                if pads:
                    amounts = [n for letter in argument.shape[:-3:-1] for n in (0, pads.get(letter, 0))]
                    y = F.pad(y, amounts) if any(amounts) else y
                operands[at] = y.contiguous()
        return operands, how

    def forward(self, plan: Plan, x: Any, how: Scalars, call: Call | None = None) -> Any:
        """Run the family's forward kernels, by a replay if a replay recipe exists."""
        if self.raw and self.is_raw(x) and not plan.has(self.raw.kernel):
            x = self.raw.ready(x, how)
        return run_replayed(kernels(self.name, "forward").launch_forward, plan, x, (how,),
                            forward_of=self.operator, call=call, align=True)

    def filled(self, x: Any, how: Scalars, made: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the outputs of forward, with NaN for kept tensors of ``room`` that its plan did not need.

        A traced graph keeps all tensors of ``room``, and a later plan of backward may read them.
        """
        if not how.needs_grad or all(y is not None for y in made[2:]):
            return made
        room = self.room(True, *(y if y is None else y.to("meta") for y in x[:-2]))
        return *made[:2], *(torch.full_like(like, torch.nan, device=x.q.device)
                            if y is None and like is not None else y
                            for y, like in zip(made[2:], room, strict=True))

    def on_torch(self, x: Any, how: Scalars) -> tuple[Tensor, Tensor]:
        """Return (o, final state) by plain differentiable torch."""
        if self.raw and self.is_raw(x):
            x = self.raw.ready(x, how)
        x = x._replace(h0=x.h0.mT) if how.state_v_first and x.h0 is not None else x
        o, ht = self.torch_path(x, how.scale, **{name: getattr(how, name) for name in self.own})
        return o, ht.mT if how.state_v_first else ht

    def empty(self, x: Any, how: Scalars) -> tuple[Tensor | None, ...]:
        """Return empty tensors like the outputs and kept tensors of forward."""
        return *empty_outputs(x, how, how.state_v_first), *self.room(how.needs_grad, *x[:-2])

    def backward(self, plan: Plan, x: Any, y: Any, grads: Any, how: Scalars,
                 wanted: frozenset[str]) -> Gradients:
        """Run the family's backward kernels and return gradients by name.

        Backward of raw inputs has a plan of its own. If kernels cannot run it now, for example after other
        ``settings``, plain torch runs it.
        """
        if (raw := self.raw) is None or not self.is_raw(x):
            return self.launch_backward(plan, x, y, grads, how, wanted)
        plan = planned(self.problem(x, how, back=True), x.q.device)
        if plan.problem.path == "torch" or plan.problem.dot != "native":
            return pulled_back(lambda x: self.on_torch(x, how), x, wanted, grads[:2])
        return raw.backward(x, how, wanted, plan.has(raw.kernel), lambda x, needs: self.launch_backward(
            plan, x, y, grads, how, needs))

    def launch_backward(self, plan: Plan, x: Any, y: Any, grads: Any, how: Scalars,
                        wanted: frozenset[str]) -> Gradients:
        """Run the launches of a backward's plan, by a replay if a replay recipe exists."""
        count = len(x)
        gradients: Gradients = run_replayed(
            kernels(self.name, "backward").launch_backward, plan,
            (*x, dense(grads.o, x.v), None if grads.ht is None else grads.ht.contiguous(), *y[2:]),
            (how, wanted), lambda given: (
                self.operator.tensors(*given[:count]), how, *given[count:count + 2], wanted,
                *given[count + 2:]), own=len(y) - 2, align=True)
        return gradients

    def trimmed(self, outputs: tuple[Tensor, Tensor], x: Any, how: Scalars) -> tuple[Tensor, Tensor]:
        """Return the outputs without the columns that ``cast`` added."""
        (o, ht), K, V = outputs, x.q.shape[3], x.v.shape[3]
        return o[..., :V], (ht if not how.has_ht else ht[..., :V, :K] if how.state_v_first
                            else ht[..., :K, :V])


def outputs_of(kept: tuple[str, ...]) -> Any:
    """Return the NamedTuple class of o, the final state and the tensors kept for backward."""
    return NamedTuple("Outputs", [("o", Tensor), *((name, Tensor | None) for name in ("ht", *kept))])


QKV = {"q": Argument(("B", "T", "H", "K")), "k": Argument(("B", "T", "H", "K")),
       "v": Argument(("B", "T", "HV", "V"))}
STATE = {False: Argument(("N", "HV", "K", "V"), wide=True), True: Argument(("N", "HV", "V", "K"), wide=True)}


def run_chunked(family: Chunked, request: Request, tensors: tuple[Tensor | None, ...], *,
                out_dtype: torch.dtype | None = None, grouped: bool = False,
                called: Mapping[str, str] | None = None,
                run: Callable[[Any, Scalars], tuple[Tensor, Tensor]] | None = None,
                **own: Any) -> tuple[Tensor, Tensor | None]:
    """Check and run a call of a chunked op, and return (o, final state or None).

    tensors: the family's tensors, in its order.
    out_dtype: dtype of o if the caller continues to compute with o; default v's dtype.
    grouped: v may have several heads for each head of q.
    called: the op's own names of the family's tensors, for errors. A tensor listed here is required, even if
        it is optional in the family.
    run: a function that runs the checked call instead of the family's operator.
    own: the fields of the family's scalars that ``Scalars`` does not have.
    """
    called = called or {}
    if request.process_group is not None or request.cp_context is not None:
        return family.over_ranks(family, request, tensors, out_dtype=out_dtype, grouped=grouped,
                                 called=called, **own)
    op, scale, h0, has_ht, cu_seqlens, cu_seqlens_cpu, state_v_first, mode, reverse, *_ = request
    given = (*tensors, h0, cu_seqlens)
    # A key does not contain the values of cu_seqlens, so a call with packed sequences has no key.
    key = None if run is not None or cu_seqlens is not None or cu_seqlens_cpu is not None else key_of(
        given, op, scale, has_ht, state_v_first, mode, reverse, out_dtype, *own.values())
    # The key is None while torch.compile traces; otherwise the graph would guard on the table of calls.
    if key is not None and key in calls and (again := family.operator.run_again(key, given)) is not None:
        o, ht = again
        return o, ht if has_ht else None
    arguments = tuple(family.arguments.values())
    q, k, v = tensors[:3]
    has_ht, reverse = scalars.flag("output_final_state", has_ht), scalars.flag("reverse", reverse)
    state_v_first = scalars.flag("state_v_first", state_v_first)
    first = called.get("q", "q")
    check_qkv(q, k, v, grouped, first)
    assert q is not None and k is not None and v is not None  # checked
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    check_beside(family, tensors, called, {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V})
    if mode not in MODES:
        scalars.choice("mode", mode, MODES)
    bounds, N = None, B
    if cu_seqlens is not None or cu_seqlens_cpu is not None:
        bounds, N = check_packed(q, cu_seqlens, cu_seqlens_cpu, first, values=True)
    elif key is not None and 1 < T < H:
        suspect_layout(op, T, H)
    if h0 is not None:
        check_state("initial_state", h0, N, H=HV, K=K, V=V, v_first=state_v_first, device=q.device,
                    packed=bounds is not None, first=first)
    scale = K ** -0.5 if scale is None else scalars.number("scale", scale)
    if scale < 0:  # some kernels put the scale into an exponent, so it must not be negative
        tensors, scale = (-q, *tensors[1:]), -scale
    padded = K % 8 != 0 or V % 8 != 0
    if q is not tensors[0] or reverse or padded:
        key = None  # a replay can only repeat casts, and the kernels need more than casts here
    # Wide tensors are not operands of the matrix products, so they do not need the common dtype.
    multiplied = [x for argument, x in zip(arguments, tensors, strict=True)
                  if x is not None and not argument.wide]
    dtype = q.dtype if len({x.dtype for x in multiplied}) == 1 else common_dtype(*multiplied)
    cast: list[Tensor | None] = []
    for argument, x in zip(arguments, tensors, strict=True):
        if x is not None:
            if argument.constant and x.requires_grad:
                x, key = x.detach(), None
            x = x.flip(1) if reverse and "T" in argument.shape else x
            x = x if argument.wide or x.dtype == dtype else x.to(dtype)
        cast.append(x)
    if reverse and bounds is not None:
        bounds, h0 = T - bounds.flip(0), None if h0 is None else h0.flip(0)
    out_dtype = out_dtype or v.dtype
    x = family.operator.tensors(*cast, h0, bounds)
    how = family.scalars(scale=scale, has_ht=has_ht, state_v_first=state_v_first, out_dtype=out_dtype,
                         mode=mode, needs_grad=wants_grad(*x), call=op, **own)
    o, ht = family.operator.run_planned(x, how, key, given) if run is None else run(x, how)
    if padded:
        o, ht = family.trimmed((o, ht), x, how)
    if reverse:
        o, ht = o.flip(1), ht if bounds is None or not has_ht else ht.flip(0)
    return o.to(out_dtype), ht if has_ht else None


def check_beside(family: Chunked, tensors: Sequence[Tensor | None], called: Mapping[str, str],
                 sizes: Mapping[str, int]) -> None:
    """Check the tensors of a chunked call other than q, k and v.

    called: the op's own names of the family's tensors, for errors. sizes: the size for each letter of a
    shape.
    """
    q = tensors[0]
    assert q is not None
    for (name, argument), x in zip(family.arguments.items(), tensors, strict=True):
        if name not in QKV and (x is not None or not argument.optional or name in called):
            need_tensor(called.get(name, name), x, tuple([sizes[letter] for letter in argument.shape]),
                        f"[{', '.join(argument.shape)}]{argument.hint}", q.device, called.get("q", "q"))


def by_chunks(family: Chunked, op: str, mode: str, tensors: tuple[Tensor | None, ...],
              *others: Tensor | None) -> bool:
    """Return True if an op with a choice of modes computes chunk by chunk.

    The modes "chunk" and "fused_recurrent" decide it. In mode "auto", a call with one beta per value channel
    computes token by token, because the chunked kernels cannot compute it. Any other traced call computes
    chunk by chunk, because its T may be unknown. For all other calls the plan decides. If the plan leaves
    the mode at "auto", calls with more than FEW_TOKENS tokens or with gradients compute chunk by chunk.
    tensors: the family's tensors in its order; q, k and v are already checked.
    others: further tensors that may require gradients.
    """
    scalars.choice("mode", mode, MODES)
    if mode != "auto":
        return mode == "chunk"
    beta = dict(zip(family.arguments, tensors, strict=True)).get("beta")
    if isinstance(beta, Tensor) and beta.ndim == 4:
        return False
    if torch.compiler.is_compiling():
        return True
    asked = family.problem((*tensors, None, None), Asked(op, wants_grad(*tensors, *others), "auto"))
    assert tensors[0] is not None
    chosen = planned(asked, tensors[0].device).problem.mode
    return chosen == "chunk" or (chosen == "auto" and (asked.T > FEW_TOKENS or asked.needs_grad))


def check_options(chunk_size: Any, chunk_sizes: tuple[int | None, ...],
                  lower_bound: float | None = None) -> None:
    """Check options that the delta rules accept for compatibility but do not use."""
    scalars.choice("chunk_size", chunk_size, chunk_sizes)
    if lower_bound is not None:
        scalars.number("lower_bound", lower_bound, high=-scalars.ABOVE_ZERO, need="a number below 0, or None")
