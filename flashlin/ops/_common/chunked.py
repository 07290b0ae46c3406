"""The plumbing of every op that goes chunk by chunk: check, plan, and run the family's kernels or its torch
path, eagerly or traced.

A family says which tensors it takes; kernels/<name>/forward.py and backward.py compute:
    forward.run(plan, x, how) -> (o, ht or None, *kept)
    backward.run(plan, x, how, do, dht, needs, *kept) -> gradients by name, None where not asked for
with x the Inputs of kernels/<name>/inputs.py, contiguous, those of 16 bits in one dtype and the wide ones in
float32; how: Scalars; ``needs``: names that want a gradient. Under torch.compile the same two functions run inside one library
operator per direction, planned at run time, so that no length is ever specialised. The torch path is plain
differentiable torch; traced, it is inside of the operators, too, where a graph of it would not serve all
lengths.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.limits import FEW_TOKENS
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_cu_seqlens, check_qkv, check_state, check_values, need_tensor
from flashlin.kernels.chunked import Scalars
from flashlin.ops._common.operator import Gradients, Operator, Traced, kernels
from flashlin.ops._common.planned import (
    as_planned,
    constant_while_tracing,
    dtype_as_planned,
    exporting,
    head_size_class,
    name_of,
    planned,
    suspect_layout,
    wants_grad,
)

MODES = ("auto", "chunk", "fused_recurrent")


class Argument(NamedTuple):
    """shape: in letters of B, T, H, HV, K and V. wide: float32 in the kernels, whatever it comes as.
    constant: gets no gradient. hint: what an error adds to its shape."""
    shape: tuple[str, ...]
    wide: bool = False
    optional: bool = False
    constant: bool = False
    hint: str = ""


class Chunked(NamedTuple):
    """arguments: q, k, v first. torch_path(x, scale) -> (o, states), with x
    the operator's tensors. options: where the
    optional tensors are that planning knows of. one_graph: the torch path traced once serves all lengths.
    operator: its kernels."""
    name: str
    arguments: dict[str, Argument]
    torch_path: Callable[..., tuple[Tensor, Tensor]]
    options: tuple[tuple[int, str], ...]
    one_graph: bool
    operator: Operator[Any, Scalars, Any]


QKV = {"q": Argument(("B", "T", "H", "K")), "k": Argument(("B", "T", "H", "K")),
       "v": Argument(("B", "T", "HV", "V"))}


def run(
    family: Chunked,
    op: str,
    tensors: tuple[Tensor | None, ...],
    scale: float | None,
    h0: Tensor | None,
    has_ht: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    mode: str = "chunk",
    out_dtype: torch.dtype | None = None,
    grouped: bool = False,
    called: dict[str, str] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(o, final state or None). tensors: the family's, in its order. out_dtype: of o, where the caller goes
    on computing with it; else v's. grouped: v may have several heads to each of q's. called: public names of
    arguments, where they are not the family's."""
    names, arguments = tuple(family.arguments), tuple(family.arguments.values())
    q, k, v = tensors[:3]
    has_ht, state_v_first = scalars.flag("output_final_state", has_ht), scalars.flag("state_v_first",
                                                                                     state_v_first)
    called = called or {}
    first = called.get("q", "q")
    check_qkv(q, k, v, grouped, first)
    assert q is not None and k is not None and v is not None  # checked
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    sizes = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}
    for name, argument, x in zip(names[3:], arguments[3:], tensors[3:], strict=True):
        if x is not None or not argument.optional:
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
    dtype = _common_dtype(arguments, given)
    given = [x if argument.wide or x is None or x.dtype == dtype else x.to(dtype)
             for argument, x in zip(arguments, given, strict=True)]
    needs_grad = wants_grad(*given, h0)
    if torch.compiler.is_compiling():
        plan, (path, dot) = None, _route(op, family.name, mode, name_of(dtype), head_size_class(K),
                                         head_size_class(V), state_v_first, q.device)
    else:
        if 1 < T < H:
            suspect_layout(op, T, H)
        plan = planned(problem_of(family, op, given, bounds, needs_grad, mode, state_v_first), q.device)
        path, dot = plan.problem.path, plan.problem.dot
    # Traced, a loop over chunks would be unrolled, and bounds cannot be read: then plain torch, too, runs
    # inside of the operator.
    inside = plan is None and (not family.one_graph or bounds is not None or exporting())
    if path == "torch" and not inside:
        o, ht = _on_torch(family, family.operator.tensors(*given, h0, bounds), scale, state_v_first)
        return o.to(out_dtype), ht if has_ht else None
    # Odd head sizes would make every row of a tile misaligned (and crash some ptxas, fla #1262): they are
    # padded with zeros.
    pads = {"K": -K % 8, "V": -V % 8}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    *found, h0, bounds = as_planned(family.operator.tensors(*given, h0, bounds), dot)
    given = []
    for argument, y in zip(arguments, found, strict=True):
        if y is not None:
            y = y.to(wide) if argument.wide else y
            pad = pads.get(argument.shape[-1])
            y = (F.pad(y, (0, pad)) if pad else y).contiguous()
        given.append(y)
    if h0 is not None:
        h0 = h0.to(wide)
        if pads["K"] or pads["V"]:
            h0 = F.pad(h0, (0, pads["K"], 0, pads["V"]) if state_v_first else (0, pads["V"], 0, pads["K"]))
        h0 = h0.contiguous()
    how = Scalars(scale, has_ht, state_v_first, dtype_as_planned(out_dtype, dot), mode, needs_grad, op)
    o, ht = family.operator(plan, (*given, h0, bounds), how)
    if pads["K"] or pads["V"]:
        o = o[..., :V]
        ht = ht if not has_ht else ht[..., :V, :K] if state_v_first else ht[..., :K, :V]
    return o.to(out_dtype), ht if has_ht else None


def _on_torch(family: Chunked, x: Any, scale: float, state_v_first: bool) -> tuple[Tensor, Tensor]:
    turned = state_v_first and x.h0 is not None
    o, ht = family.torch_path(x._replace(h0=x.h0.transpose(-1, -2)) if turned else x, scale)
    return o, ht.transpose(-1, -2) if state_v_first else ht


def _common_dtype(arguments: tuple[Argument, ...], tensors: list[Tensor | None]) -> torch.dtype:
    """Of the tensors that are multiplied with each other."""
    common: torch.dtype | None = None
    for argument, x in zip(arguments, tensors, strict=True):
        if not argument.wide and x is not None and x.dtype != common:
            common = x.dtype if common is None else torch.promote_types(common, x.dtype)
    assert common is not None  # q is always there
    return common


def chosen_mode(family: Chunked, op: str, mode: str, q: Tensor, v: Tensor, needs_grad: bool,
                options: tuple[str, ...] = ()) -> str:
    """``chunk`` or ``fused_recurrent``; auto is decided by the plan. A traced call, of which T may not be
    known, goes chunk by chunk. q and v are checked already."""
    scalars.choice("mode", mode, MODES)
    if mode != "auto":
        return mode
    if torch.compiler.is_compiling():
        return "chunk"
    B, T, HV, V = v.shape
    asked = Problem(op, family.name, "auto", B=B, T=T, H=HV, K=q.shape[3], V=V, N=B, dtype=name_of(q.dtype),
                    varlen=False, needs_grad=needs_grad, options=options)
    chosen = planned(asked, q.device).problem.mode
    return (chosen if chosen != "auto" else "fused_recurrent" if T <= FEW_TOKENS and not needs_grad
            else "chunk")


def problem_of(family: Chunked, op: str, tensors: list[Tensor | None] | tuple[Tensor | None, ...],
               bounds: Tensor | None, needs_grad: bool, mode: str = "chunk",
               v_first: bool = False) -> Problem:
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


@constant_while_tracing
def _route(op: str, family: str, mode: str, dtype: str, K: int, V: int, v_first: bool,
           device: torch.device) -> tuple[str, str]:
    """What torch.compile may know while tracing: no B, T or H, so that none is ever specialised."""
    problem = planned(Problem(op, family, mode, B=1, T=1, H=1, K=K, V=V, N=1, dtype=dtype, varlen=False,
                              needs_grad=True, options=("v_first",) * v_first),
                      device).problem
    return problem.path, problem.dot


def family_of(name: str, tensors: type[tuple[Any, ...]], arguments: dict[str, Argument],
              torch_path: Callable[..., tuple[Tensor, Tensor]], kept: tuple[str, ...] = (),
              room: Callable[..., tuple[Tensor | None, ...]] = lambda *_: (),
              one_graph: bool = False) -> Chunked:
    """tensors: the NamedTuple of what goes in: the arguments, h0 and bounds. kept: names of what forward keeps
    for backward; room(needs_grad, *tensors): tensors like that."""
    results = {"o": False, "ht": True, **dict.fromkeys(kept, True)}
    options = ((at, name)
               for at, (name, argument) in enumerate(arguments.items()) if argument.optional
               and not argument.constant)

    def problem(x: Any, how: Scalars) -> Problem:
        return problem_of(family, how.call, x[:-2], x.bounds, how.needs_grad, how.mode, how.state_v_first)

    def forward(plan: Plan, x: Any, how: Scalars) -> Any:
        return kernels(name, "forward").run(plan, x, how)

    def on_torch(x: Any, how: Scalars) -> tuple[Tensor, Tensor]:
        return _on_torch(family, x, how.scale, how.state_v_first)

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
        gradients: Gradients = kernels(name, "backward").run(plan, x, how, do, dht, wanted, *y[2:])
        return gradients

    operator: Operator[Any, Scalars, Any] = Operator(
        name, tensors, Scalars, _fields("Outputs", results), 2, forward=forward,
        kept=lambda x, y, how: (x, (None, None, *y[2:])), backward=backward,
        traced=Traced(problem, empty, on_torch))
    family = Chunked(name, arguments, torch_path, tuple(sorted(options, key=lambda option: option[1])),
                    one_graph, operator)
    return family


def _fields(name: str, optional: dict[str, bool]) -> Any:
    """A NamedTuple class of tensors."""
    return NamedTuple(name, [(field, Tensor | None if may_miss else Tensor)
                             for field, may_miss in optional.items()])
