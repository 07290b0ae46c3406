"""The plumbing of every op that goes chunk by chunk: check, plan, and run the family's kernels or its torch path, eagerly or traced.

A family says which tensors it takes; kernels/<name>/forward.py and backward.py compute:
    forward.run(plan, *tensors, h0, bounds, scale, has_ht, v_first, out_dtype) -> (o, ht or None, *kept)
    backward.run(plan, *tensors, h0, bounds, *kept, scale, v_first, do, dht, needs) -> gradients of tensors and h0, None where not asked for
with tensors in the family's order, contiguous, those of 16 bits in one dtype and the wide ones in float32; ``needs``: names that want a
gradient. Under torch.compile the same two functions run inside one library operator per direction, planned at run time, so that no length
is ever specialised. The torch path is plain differentiable torch; traced, it is inside of the operators, too, where a graph of it would not serve
all lengths.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.limits import FEW_TOKENS
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_cu_seqlens, check_qkv, check_state, check_values, need_tensor
from flashlin.ops._common.gradients import emptied, once, once_traced, pulled_back
from flashlin.ops._common.planned import constant_while_tracing, exporting, head_size_class, name_of, planned, suspect_layout, wants_grad

MODES = ("auto", "chunk", "fused_recurrent")


class Argument(NamedTuple):
    """shape: in letters of B, T, H, HV, K and V. wide: float32 in the kernels, whatever it comes as. constant: gets no gradient. hint:
    what an error adds to its shape."""
    shape: tuple[str, ...]
    wide: bool = False
    optional: bool = False
    constant: bool = False
    hint: str = ""


class Family(NamedTuple):
    """arguments: q, k, v first. torch_path(*tensors, h0, bounds, scale) -> (o, states). kept(needs_grad, *tensors): fakes of what forward
    keeps for backward. options: where the optional tensors are that planning knows of. one_graph: the torch
    path traced once serves all lengths."""
    name: str
    arguments: dict[str, Argument]
    torch_path: Callable[..., tuple[Tensor, Tensor]]
    kept: Callable[..., tuple[Tensor, ...]]
    options: tuple[tuple[int, str], ...]
    one_graph: bool


QKV = {"q": Argument(("B", "T", "H", "K")), "k": Argument(("B", "T", "H", "K")), "v": Argument(("B", "T", "HV", "V"))}


def run(family: Family, op: str, tensors: tuple[Tensor | None, ...], scale: float | None, h0: Tensor | None, has_ht: bool, state_v_first: bool,
        cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None = None, *, mode: str = "chunk", out_dtype: torch.dtype | None = None,
        grouped: bool = False, called: dict[str, str] | None = None) -> tuple[Tensor, Tensor | None]:
    """(o, final state or None). tensors: the family's, in its order. out_dtype: of o, where the caller goes on computing with it; else v's.
    grouped: v may have several heads to each of q's. called: public names of arguments, where they are not the family's."""
    names, arguments = tuple(family.arguments), tuple(family.arguments.values())
    q, k, v = tensors[:3]
    has_ht, state_v_first = scalars.flag("output_final_state", has_ht), scalars.flag("state_v_first", state_v_first)
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
        bounds = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q.shape, q.device, policy.current().debug, first)
        check_values("cu_seqlens", bounds)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: got a tensor without cu_seqlens, need both")
    if h0 is not None:
        check_state("initial_state", h0, B if bounds is None else bounds.shape[0] - 1, HV, K, V, state_v_first, q.device, bounds is not None, first)
    scale = K ** -0.5 if scale is None else scalars.number("scale", scale)
    out_dtype = out_dtype or v.dtype
    given = [x.detach() if argument.constant and x is not None else x for argument, x in zip(arguments, tensors, strict=True)]
    if scale < 0:  # some kernels keep the scale in an exponent
        given[0], scale = -q, -scale
    dtype = _common_dtype(arguments, given)
    given = [x if argument.wide or x is None or x.dtype == dtype else x.to(dtype) for argument, x in zip(arguments, given, strict=True)]
    needs_grad = wants_grad(*given, h0)
    if torch.compiler.is_compiling():
        plan, (path, dot) = None, _route(op, family.name, mode, name_of(dtype), head_size_class(K), head_size_class(V), state_v_first, q.device)
    else:
        if 1 < T < H:
            suspect_layout(op, T, H)
        plan = planned(problem_of(family, op, given, bounds, needs_grad, mode, state_v_first), q.device)
        path, dot = plan.problem.path, plan.problem.dot
    # Traced, a loop over chunks would be unrolled, and bounds cannot be read: then plain torch, too, runs inside of the operator.
    inside = plan is None and (not family.one_graph or bounds is not None or exporting())
    if path == "torch" and not inside:
        o, ht = _on_torch(family, given, h0, bounds, scale, state_v_first)
        return o.to(out_dtype), ht if has_ht else None
    # Odd head sizes would make every row of a tile misaligned (and crash some ptxas, fla #1262): they are padded with zeros.
    pads = {"K": -K % 8, "V": -V % 8}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for i, (argument, x) in enumerate(zip(arguments, given, strict=True)):
        if x is not None:
            if argument.wide or dot == "fp32":  # then nothing of 16 bits may reach a kernel, not even to be loaded or stored
                x = x.to(wide)
            if pads.get(argument.shape[-1]):
                x = F.pad(x, (0, pads[argument.shape[-1]]))
            given[i] = x.contiguous()
    if h0 is not None:
        h0 = h0.to(wide)
        if pads["K"] or pads["V"]:
            h0 = F.pad(h0, (0, pads["K"], 0, pads["V"]) if state_v_first else (0, pads["V"], 0, pads["K"]))
        h0 = h0.contiguous()
    kernel_dtype = torch.float32 if dot == "fp32" else out_dtype
    if plan is None:
        o, ht, *_ = getattr(torch.ops.flashlin, family.name)(*given, h0, bounds, scale, has_ht, state_v_first, kernel_dtype, op, mode, needs_grad)
    else:
        o, ht = _Chunks.apply(family, plan, scale, has_ht, state_v_first, kernel_dtype, *given, h0, bounds)
    if pads["K"] or pads["V"]:
        o = o[..., :V]
        ht = ht if not has_ht else ht[..., :V, :K] if state_v_first else ht[..., :K, :V]
    return o.to(out_dtype), ht if has_ht else None


def _on_torch(family: Family, tensors: Sequence[Tensor | None], h0: Tensor | None, bounds: Tensor | None, scale: float,
              state_v_first: bool) -> tuple[Tensor, Tensor]:
    o, ht = family.torch_path(*tensors, h0.transpose(-1, -2) if state_v_first and h0 is not None else h0, bounds, scale)
    return o, ht.transpose(-1, -2) if state_v_first else ht


def _common_dtype(arguments: tuple[Argument, ...], tensors: list[Tensor | None]) -> torch.dtype:
    """Of the tensors that are multiplied with each other."""
    common: torch.dtype | None = None
    for argument, x in zip(arguments, tensors, strict=True):
        if not argument.wide and x is not None and x.dtype != common:
            common = x.dtype if common is None else torch.promote_types(common, x.dtype)
    assert common is not None  # q is always there
    return common


def chosen_mode(family: Family, op: str, mode: str, q: Tensor, v: Tensor, needs_grad: bool, options: tuple[str, ...] = ()) -> str:
    """``chunk`` or ``fused_recurrent``; auto is decided by the plan. A traced call, of which T may not be known, goes chunk by chunk. q and v
    are checked already."""
    scalars.choice("mode", mode, MODES)
    if mode != "auto":
        return mode
    if torch.compiler.is_compiling():
        return "chunk"
    B, T, HV, V = v.shape
    asked = Problem(op, family.name, "auto", B, T, HV, q.shape[3], V, B, name_of(q.dtype), False, needs_grad, options)
    chosen = planned(asked, q.device).problem.mode
    return chosen if chosen != "auto" else "fused_recurrent" if T <= FEW_TOKENS and not needs_grad else "chunk"


def problem_of(family: Family, op: str, tensors: list[Tensor | None] | tuple[Tensor | None, ...], bounds: Tensor | None, needs_grad: bool,
               mode: str = "chunk", v_first: bool = False) -> Problem:
    """H counts value heads: they own the states."""
    q, v = tensors[0], tensors[2]
    assert q is not None and v is not None
    B, T, HV, V = v.shape
    H, K = q.shape[2:]
    options = [name for at, name in family.options if tensors[at] is not None]
    options = sorted([*options, *["gva"] * (HV != H), *["v_first"] * v_first])
    N = B if bounds is None else bounds.shape[0] - 1
    return Problem(op, family.name, mode, B, T, HV, K, V, N, name_of(q.dtype), bounds is not None, needs_grad, tuple(options))


@constant_while_tracing
def _route(op: str, family: str, mode: str, dtype: str, K: int, V: int, v_first: bool, device: torch.device) -> tuple[str, str]:
    """What torch.compile may know while tracing: no B, T or H, so that none is ever specialised."""
    problem = planned(Problem(op, family, mode, 1, 1, 1, K, V, 1, dtype, False, True, ("v_first",) * v_first), device).problem
    return problem.path, problem.dot


def _kernels(family: Family, direction: str) -> Any:
    """Triton is imported when it is needed, not before."""
    return import_module(f"flashlin.kernels.{family.name}.{direction}")


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, family: Family, plan: Plan, scale: float, has_ht: bool, state_v_first: bool, out_dtype: torch.dtype,
                *tensors: Tensor | None) -> Any:
        o, ht, *kept = _kernels(family, "forward").run(plan, *tensors, scale, has_ht, state_v_first, out_dtype)
        ctx.family, ctx.plan, ctx.scale, ctx.v_first = family, plan, scale, state_v_first
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        return o, ht

    @staticmethod
    @once()
    def backward(ctx: Any, saved: tuple[Tensor | None, ...], do: Tensor | None, dht: Tensor | None) -> Any:
        names = (*ctx.family.arguments, "h0", "bounds")
        needs = frozenset(name for name, wanted in zip(names, ctx.needs_input_grad[6:], strict=True) if wanted)
        return *[None] * 6, *_gradients(ctx.family, ctx.plan, saved, ctx.scale, ctx.v_first, do, dht, needs), None


def _gradients(family: Family, plan: Plan, saved: tuple[Tensor | None, ...], scale: float, state_v_first: bool, do: Tensor | None,
               dht: Tensor | None, needs: frozenset[str]) -> Any:
    """Of the family's tensors and h0, in their dtypes."""
    v = saved[2]
    assert v is not None
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dht = None if dht is None else dht.contiguous()
    return _kernels(family, "backward").run(plan, *saved, scale, state_v_first, do, dht, needs)


def family_of(name: str, arguments: dict[str, Argument], torch_path: Callable[..., tuple[Tensor, Tensor]],
              kept: Callable[..., tuple[Tensor, ...]] = lambda *_: (), one_graph: bool = False) -> Family:
    """A family with its library operators, flashlin::<name> and flashlin::<name>_backward. Their schemas are spelt out because torch 2.4
    cannot read them from annotations. Operators return no None: an empty vector stands for one."""
    options = ((at, name) for at, (name, argument) in enumerate(arguments.items()) if argument.optional and not argument.constant)
    family = Family(name, arguments, torch_path, kept, tuple(sorted(options, key=lambda option: option[1])), one_graph)
    names, count = tuple(arguments), len(arguments) + 2
    inputs = ", ".join(f"Tensor{'?' * argument.optional} {name}" for name, argument in arguments.items()) + ", Tensor? h0, Tensor? bounds"
    differentiable = [not argument.constant for argument in arguments.values()] + [True]

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        tensors, (scale, has_ht, state_v_first, out_dtype, op, mode, needs_grad) = arguments[:count], arguments[count:]
        plan = planned(problem_of(family, op, tensors[:-2], tensors[-1], needs_grad, mode, state_v_first), tensors[0].device)
        if plan.problem.path == "torch":
            if needs_grad:
                emptied.add(family.name)
            o, ht = _on_torch(family, tensors[:-2], tensors[-2], tensors[-1], scale, state_v_first)
            return o.to(out_dtype).contiguous(), _some(ht.contiguous() if has_ht else None, o), list(family.kept(needs_grad, *tensors[:-2]))
        o, ht, *kept = _kernels(family, "forward").run(plan, *tensors, scale, has_ht, state_v_first, out_dtype)
        return o, _some(ht, o), [_some(x, o) for x in kept]

    def forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        tensors, (_, has_ht, state_v_first, out_dtype, _, _, needs_grad) = arguments[:count], arguments[count:]
        q, v, bounds = tensors[0], tensors[2], tensors[-1]
        N, HV, K, V = v.shape[0] if bounds is None else bounds.shape[0] - 1, v.shape[2], q.shape[3], v.shape[3]
        shape = ((N, HV, V, K) if state_v_first else (N, HV, K, V)) if has_ht else (0,)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return v.new_empty(v.shape, dtype=out_dtype), q.new_empty(shape, dtype=wide), list(family.kept(needs_grad, *tensors[:-2]))

    def backward(*arguments: Any) -> list[Tensor]:
        *tensors, kept, do, dht, scale, state_v_first, op, mode = arguments
        plan = planned(problem_of(family, op, tuple(tensors[:-2]), tensors[-1], True, mode, state_v_first), tensors[0].device)
        if plan.problem.path == "torch":
            found = pulled_back(lambda *tensors: _on_torch(family, tensors[:-2], tensors[-2], tensors[-1], scale, state_v_first), tensors,
                                (*differentiable, False), (do, dht))
            return [_some(x, do) for x in found[:-1]]
        if family.name in emptied:
            kept = _kernels(family, "forward").run(plan, *tensors, scale, False, state_v_first, do.dtype)[2:]
        needs = frozenset(name for name, x in zip((*names, "h0"), tensors, strict=False) if x is not None)
        saved = (*tensors, *(None if x is None or x.ndim == 1 else x for x in kept))
        return [_some(x, do) for x in _gradients(family, plan, saved, scale, state_v_first, do, dht, needs)]

    def backward_fake(*arguments: Any) -> list[Tensor]:
        do = arguments[count + 1]
        return [torch.empty_like(x) if x is not None and wanted else _some(None, do)
                for x, wanted in zip(arguments, differentiable, strict=False)]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count], *output[2])
        ctx.scale, ctx.has_ht, ctx.v_first, _, ctx.op, ctx.mode, _ = inputs[count:]

    def differentiate(ctx: Any, do: Tensor, dht: Tensor | None, _: Any) -> Any:
        tensors, kept = ctx.saved_tensors[:count], list(ctx.saved_tensors[count:])
        found = getattr(torch.ops.flashlin, family.name + "_backward")(*tensors, kept, do, dht if ctx.has_ht else None, ctx.scale, ctx.v_first,
                                                                      ctx.op, ctx.mode)
        grads = [grad if x is not None and wanted else None for x, grad, wanted in zip(tensors, found, differentiable, strict=False)]
        return *grads, None, *[None] * 7

    op = torch.library.custom_op(f"flashlin::{family.name}", forward, mutates_args=(), schema=(
        f"({inputs}, float scale, bool has_ht, bool state_v_first, ScalarType out_dtype, str op, str mode, bool needs_grad) "
        "-> (Tensor, Tensor, Tensor[])"))
    op.register_fake(forward_fake)
    op.register_autograd(differentiate, setup_context=save)
    back = torch.library.custom_op(f"flashlin::{family.name}_backward", backward, mutates_args=(), schema=(
        f"({inputs}, Tensor[] kept, Tensor do, Tensor? dht, float scale, bool state_v_first, str op, str mode) -> Tensor[]"))
    back.register_fake(backward_fake)
    once_traced(back, lambda inputs: inputs[-2])
    return family


def _some(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if x is None else x
