"""The plumbing of every op that goes chunk by chunk: check, plan, and run the family's kernels or its torch
path, eagerly or traced.

A family says which tensors it takes; kernels/<name>/forward.py and backward.py compute:
    forward.run(plan, *tensors, h0, bounds, scale, has_ht, v_first, out_dtype) -> (o, ht or None, *kept)
    backward.run(plan, *tensors, h0, bounds, *kept, scale, v_first, do, dht, needs) -> gradients of tensors
    and h0, None where not asked for
with tensors in the family's order, contiguous, those of 16 bits in one dtype and the wide ones in float32;
``needs``: names that want a gradient. Under torch.compile the same two functions run inside one library
operator per direction, planned at run time, so that no length is ever specialised. The torch path is plain
differentiable torch; traced, it is inside of the operators, too, where a graph of it would not serve all
lengths.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.limits import FEW_TOKENS
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_cu_seqlens, check_qkv, check_state, check_values, need_tensor
from flashlin.ops._common.operator import Gradients, Operator, Traced, kernels
from flashlin.ops._common.planned import (
    as_planned,
    common_dtype,
    dtype_as_planned,
    exporting,
    head_size_class,
    name_of,
    planned,
    suspect_layout,
    traced_way,
    wants_grad,
)

MODES = ("auto", "chunk", "fused_recurrent")
CHUNK_SIZES = (16, 32, 64)  # what the ops of the delta rules take


class Argument(NamedTuple):
    """shape: in letters of B, T, H, HV, K and V. wide: float32 in the kernels, whatever it comes as.
    constant: gets no gradient. hint: what an error adds to its shape."""
    shape: tuple[str, ...]
    wide: bool = False
    optional: bool = False
    constant: bool = False
    hint: str = ""


class Chunked(NamedTuple):
    """arguments: q, k, v first. torch_path(*tensors, h0, bounds, scale) -> (o, states). options: where the
    optional tensors are that planning knows of. one_graph: the torch path traced once serves all lengths.
    operator: its kernels."""
    name: str
    arguments: dict[str, Argument]
    torch_path: Callable[..., tuple[Tensor, Tensor]]
    options: tuple[tuple[int, str], ...]
    one_graph: bool
    operator: Operator[Any, Scalars, Any]


class Request(NamedTuple):
    """What a chunked op is asked for beside its tensors, as the user gave it. op: its public name, which
    errors and plans begin with. has_ht: whether the final state is returned. mode: one of MODES."""
    op: str
    scale: float | None
    h0: Tensor | None
    has_ht: bool
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    state_v_first: bool = False
    mode: str = "chunk"


class Scalars(NamedTuple):
    """What goes into a family's operator beside its tensors, h0 and bounds; out come o, ht and what forward
    keeps for backward."""
    scale: float
    has_ht: bool
    state_v_first: bool
    out_dtype: torch.dtype
    mode: str
    needs_grad: bool
    call: str


QKV = {"q": Argument(("B", "T", "H", "K")), "k": Argument(("B", "T", "H", "K")),
       "v": Argument(("B", "T", "HV", "V"))}
STATE = {False: Argument(("N", "HV", "K", "V"), wide=True), True: Argument(("N", "HV", "V", "K"), wide=True)}


def run(
    family: Chunked,
    request: Request,
    tensors: tuple[Tensor | None, ...],
    *,
    out_dtype: torch.dtype | None = None,
    grouped: bool = False,
    called: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Tensor, Tensor | None]:
    """(o, final state or None). tensors: the family's, in its order. out_dtype: of o, where the caller goes
    on computing with it; else v's. grouped: v may have several heads to each of q's. called: public names of
    arguments; a tensor that is in it must be there, even if the family can do without."""
    arguments = tuple(family.arguments.values())
    q, k, v = tensors[:3]
    op, scale, h0, has_ht, cu_seqlens, cu_seqlens_cpu, state_v_first, mode = request
    has_ht = scalars.flag("output_final_state", has_ht)
    state_v_first = scalars.flag("state_v_first", state_v_first)
    first = called.get("q", "q")
    check_qkv(q, k, v, grouped, first)
    assert q is not None and k is not None and v is not None  # checked
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    sizes = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}
    for (name, argument), x in zip(family.arguments.items(), tensors, strict=True):
        if name not in QKV and (x is not None or not argument.optional or name in called):
            need_tensor(called.get(name, name), x, tuple([sizes[letter] for letter in argument.shape]),
                        f"[{', '.join(argument.shape)}]{argument.hint}", q.device, first)
    scalars.choice("mode", mode, MODES)
    bounds = None
    if cu_seqlens is not None:
        bounds = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q.shape, q.device, policy.current().debug,
                                  first)
        check_values("cu_seqlens", bounds)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: got a tensor without cu_seqlens, need both")
    if h0 is not None:
        check_state("initial_state", h0, B if bounds is None else bounds.shape[0] - 1, H=HV, K=K, V=V,
                    v_first=state_v_first, device=q.device, packed=bounds is not None, first=first)
    scale = K ** -0.5 if scale is None else scalars.number("scale", scale)
    out_dtype = out_dtype or v.dtype
    given = [x.detach() if argument.constant and x is not None else x
             for argument, x in zip(arguments, tensors, strict=True)]
    if scale < 0:  # some kernels keep the scale in an exponent
        given[0], scale = -q, -scale
    # wide tensors are not multiplied with the others
    dtype = common_dtype(q, *[x for argument, x in zip(arguments, given, strict=True) if not argument.wide])
    given = [x if argument.wide or x is None or x.dtype == dtype else x.to(dtype)
             for argument, x in zip(arguments, given, strict=True)]
    needs_grad = wants_grad(*given, h0)
    if torch.compiler.is_compiling():
        plan, (path, dot) = None, traced_way(op, family.name, mode, name_of(dtype), head_size_class(K),
                                             head_size_class(V), q.device, state_v_first)
    else:
        if 1 < T < H:
            suspect_layout(op, T, H)
        plan = planned(problem_of(family, op, given, bounds, needs_grad, mode, state_v_first), q.device)
        path, dot = plan.problem.path, plan.problem.dot
    # Traced, a loop over chunks would be unrolled, and bounds cannot be read: then plain torch, too, runs
    # inside of the operator.
    inside = plan is None and (not family.one_graph or bounds is not None or exporting())
    if path == "torch" and not inside:
        o, ht = _on_torch(family, given, h0, bounds, scale, state_v_first)
        return o.to(out_dtype), ht if has_ht else None
    # Odd head sizes would make every row of a tile misaligned (and crash some ptxas, fla #1262): they are
    # padded with zeros.
    pads = {"K": -K % 8, "V": -V % 8} if K % 8 or V % 8 else {}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    *operands, bounds = as_planned(family.operator.tensors(*given, h0, bounds), dot)
    for at, argument in enumerate((*arguments, STATE[state_v_first])):
        x = operands[at]
        if x is not None:
            x = x.to(wide) if argument.wide else x
            if pads:
                amounts = [n for letter in argument.shape[:-3:-1] for n in (0, pads.get(letter, 0))]
                x = F.pad(x, amounts) if any(amounts) else x
            operands[at] = x.contiguous()
    how = Scalars(scale, has_ht, state_v_first, dtype_as_planned(out_dtype, dot), mode, needs_grad, op)
    o, ht = family.operator(plan, (*operands, bounds), how)
    if pads:
        o = o[..., :V]
        ht = ht if not has_ht else ht[..., :V, :K] if state_v_first else ht[..., :K, :V]
    return o.to(out_dtype), ht if has_ht else None


def _on_torch(family: Chunked, tensors: Sequence[Tensor | None], h0: Tensor | None, bounds: Tensor | None,
              scale: float, state_v_first: bool) -> tuple[Tensor, Tensor]:
    o, ht = family.torch_path(*tensors, h0.mT if state_v_first and h0 is not None else h0, bounds, scale)
    return o, ht.mT if state_v_first else ht


def by_chunks(family: Chunked, op: str, mode: str, tensors: tuple[Tensor | None, ...],
              options: tuple[str, ...] = (), beta: Tensor | None = None) -> bool:
    """Whether an op with a choice of modes goes chunk by chunk. auto is decided by the plan; a traced call,
    of which T may not be known, goes chunk by chunk, and a beta per value channel token by token. tensors:
    all that may want gradients, q, k and v first, which are checked already."""
    scalars.choice("mode", mode, MODES)
    if mode != "auto":
        return mode == "chunk"
    if isinstance(beta, Tensor) and beta.ndim == 4:
        return False
    if torch.compiler.is_compiling():
        return True
    q, _, v = tensors[:3]
    assert q is not None and v is not None
    B, T, HV, V = v.shape
    needs_grad = wants_grad(*tensors)
    asked = Problem(op, family.name, "auto", B=B, T=T, H=HV, K=q.shape[3], V=V, N=B, dtype=name_of(q.dtype),
                    varlen=False, needs_grad=needs_grad, options=options)
    chosen = planned(asked, q.device).problem.mode
    return chosen == "chunk" or (chosen == "auto" and (T > FEW_TOKENS or needs_grad))


def problem_of(family: Chunked, op: str, tensors: Sequence[Tensor | None], bounds: Tensor | None,
               needs_grad: bool, mode: str = "chunk", v_first: bool = False) -> Problem:
    """H counts value heads: they own the states."""
    q, v = tensors[0], tensors[2]
    assert q is not None and v is not None
    B, T, HV, V = v.shape
    H, K = q.shape[2:]
    options = [name for at, name in family.options if tensors[at] is not None]
    options = sorted([*options, *["gva"] * (HV != H), *["v_first"] * v_first])
    N = B if bounds is None else bounds.shape[0] - 1
    return Problem(op, family.name, mode, B=B, T=T, H=HV, K=K, V=V, N=N, dtype=name_of(q.dtype),
                   varlen=bounds is not None, needs_grad=needs_grad, options=tuple(options))


def check_options(chunk_size: Any, chunk_sizes: tuple[int | None, ...], cp_context: Any,
                  lower_bound: float | None = None) -> None:
    """What the ops of the delta rules take for compatibility and only look at."""
    scalars.choice("chunk_size", chunk_size, chunk_sizes)
    if cp_context is not None:
        raise ValueError(f"cp_context: got {type(cp_context).__name__}, need None: flashlin has no context "
                         "parallelism")
    if lower_bound is not None:
        scalars.number("lower_bound", lower_bound, high=-scalars.ABOVE_ZERO, need="a number below 0, or None")


def family_of(name: str, arguments: dict[str, Argument], torch_path: Callable[..., tuple[Tensor, Tensor]],
              kept: tuple[str, ...] = (), room: Callable[..., tuple[Tensor | None, ...]] = lambda *_: (),
              one_graph: bool = False) -> Chunked:
    """kept: names of what forward keeps for backward; room(needs_grad, *tensors): tensors like that."""
    inputs = {**{name: argument.optional for name, argument in arguments.items()}, "h0": True, "bounds": True}
    results = {"o": False, "ht": True, **dict.fromkeys(kept, True)}
    options = ((at, name)
               for at, (name, argument) in enumerate(arguments.items()) if argument.optional
               and not argument.constant)

    def problem(x: Any, how: Scalars) -> Problem:
        return problem_of(family, how.call, x[:-2], x.bounds, how.needs_grad, how.mode, how.state_v_first)

    def forward(plan: Plan, x: Any, how: Scalars) -> Any:
        return kernels(name, "forward").run(plan, *x, how.scale, how.has_ht, how.state_v_first, how.out_dtype)

    def on_torch(x: Any, how: Scalars) -> tuple[Tensor, Tensor]:
        return _on_torch(family, x[:-2], x.h0, x.bounds, how.scale, how.state_v_first)

    def empty(x: Any, how: Scalars) -> tuple[Tensor | None, ...]:
        N, HV, K, V = x.v.shape[0] if x.bounds is None else x.bounds.shape[0] - 1, x.v.shape[2], x.q.shape[
            3], x.v.shape[3]
        state = (N, HV, V, K) if how.state_v_first else (N, HV, K, V)
        wide = torch.promote_types(x.q.dtype, torch.float32)
        return (x.v.new_empty(x.v.shape, dtype=how.out_dtype),
                x.q.new_empty(state, dtype=wide) if how.has_ht else None, *room(how.needs_grad, *x[:-2]))

    def backward(plan: Plan, x: Any, y: Any, grads: Any, how: Scalars, wanted: frozenset[str]) -> Gradients:
        do = torch.zeros_like(x.v) if grads.o is None else grads.o.contiguous()
        dht = None if grads.ht is None else grads.ht.contiguous()
        found = kernels(name, "backward").run(plan, *x, *y[2:], how.scale, how.state_v_first, do, dht, wanted)
        return dict(zip((*arguments, "h0"), found, strict=True))

    operator: Operator[Any, Scalars, Any] = Operator(
        name, _fields("Tensors", inputs), Scalars, _fields("Outputs", results), 2, forward=forward,
        kept=lambda x, y, how: (x, (None, None, *y[2:])), backward=backward,
        traced=Traced(problem, empty, on_torch))
    family = Chunked(name, arguments, torch_path, tuple(sorted(options, key=lambda option: option[1])),
                    one_graph, operator)
    return family


def _fields(name: str, optional: dict[str, bool]) -> Any:
    """A NamedTuple class of tensors."""
    return NamedTuple(name, [(field, Tensor | None if may_miss else Tensor)
                             for field, may_miss in optional.items()])
