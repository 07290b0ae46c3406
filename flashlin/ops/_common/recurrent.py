"""Shared code of the ops that compute token by token: check, plan and run the generic recurrence.

kernels/recurrent/inputs.py contains its formula. Inference runs everything in one launch. With gradients, and
on the torch path, torch first computes norms, gates, sigmoids and rates.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import check_indices, check_pool, check_qkv, check_state, need_tensor
from flashlin.kernels.delta import torch_path as chunked_delta
from flashlin.kernels.delta.inputs import Inputs as DeltaInputs
from flashlin.kernels.gla import torch_path as chunked_gla
from flashlin.kernels.gla.inputs import Inputs as GLAInputs
from flashlin.kernels.pointwise.torch_path import gate
from flashlin.kernels.recurrent import torch_path
from flashlin.kernels.recurrent.inputs import FLAGS, Inputs, bound_of
from flashlin.kernels.recurrent.pool_torch import rows_of
from flashlin.kernels.recurrent.recipe import kept
from flashlin.ops._common.arguments import check_packed, suspect_layout
from flashlin.ops._common.casting import (
    as_planned,
    can_write,
    common_dtype,
    contiguous,
    count_of,
    dense,
    dtype_as_planned,
    empty_outputs,
    wants_grad,
)
from flashlin.ops._common.operator import Operator, Overwriting, kernels
from flashlin.ops._common.pipeline import problem_of_heads, traced_over_heads
from flashlin.ops._common.pool import taken
from flashlin.ops._common.preprocess import beta_of_logits, by_value_head, exact, l2normalized, wide
from flashlin.ops._common.replay import Call, key_of, run_replayed

LONG = 32  # with more tokens the torch path computes chunk by chunk, if the call has a chunked form
SHAPES = {"g": ("B", "T", "HV"), "gamma": ("HV",), "gk": ("B", "T", "HV", "K"), "gv": ("B", "T", "HV", "V"),
          "bonus": ("HV", "K"), "a": ("B", "T", "HV", "K"), "b": ("B", "T", "HV", "K"), "A_log": ("HV",),
          "dt_bias": ("HV",)}
# Flags by the public options that set them.
OPTIONS = {"reverse": "reverse", "use_qk_l2norm_in_kernel": "l2norm", "use_beta_sigmoid_in_kernel": "sigmoid",
           "allow_neg_eigval": "neg_eigval", "state_v_first": "v_first"}


class Scalars(NamedTuple):
    """The scalars of a token-by-token call.

    flags: words separated by blanks, because a library operator accepts no tuple of strings.
    """
    scale: float
    has_ht: bool
    out_dtype: torch.dtype
    flags: str
    needs_grad: bool
    call: str

    @property
    def words(self) -> tuple[str, ...]:
        """The flags as a tuple of words."""
        return tuple(self.flags.split())


class Outputs(NamedTuple):
    """The outputs of a token-by-token call: o, the final state, and the states that backward needs."""
    o: Tensor
    ht: Tensor | None
    states: Tensor | None


def flags_of(*always: str, bound: float | None = None, **options: bool) -> tuple[str, ...]:
    """Return the flags (kernels/recurrent/inputs.py) of an op.

    always: flags that the op always has. bound: lower bound of its gate. options: public options of the op;
        they are checked here, and the set ones become flags.
    """
    chosen = [OPTIONS[name] for name, value in options.items() if scalars.flag(name, value)]
    return (*always, *[f"bound:{bound}"] * (bound is not None), *chosen)


def run_recurrent(op: str, x: Inputs, flags: tuple[str, ...] = (), scale: float | None = None,
                  has_ht: bool = False, indices: Tensor | None = None, in_place: bool = False,
                  called: Mapping[str, str] | None = None) -> tuple[Tensor, Tensor | None]:
    """Check and run a token-by-token call, and return (o in v's dtype, final state or None).

    x.bounds: cu_seqlens as the user passed them.
    in_place or indices: states are read from x.h0 and written back to it, and x.h0 is returned as the final
        state.
    called: public names of the inputs that the op requires.
    """
    # A key does not contain the values of cu_seqlens, and an overwritten tensor is checked in each call.
    given = x
    key = None if in_place is not False or indices is not None or x.bounds is not None else key_of(
        x, op, flags, scale, has_ht)
    if (again := OPERATOR.run_again(key, x)) is not None:
        o, ht = again
        return o, ht if has_ht else None
    has_ht, in_place = scalars.flag("output_final_state", has_ht), scalars.flag("inplace_state", in_place)
    x = _checked(x, flags, indices, in_place, called or {})
    scale = x.q.shape[3] ** -0.5 if scale is None else scalars.number("scale", scale)
    vectors = ("q", "k", "v") if "erase" in flags else ("q", "k", "v", "a", "b")  # with "erase" a is a rate
    common, out_dtype = common_dtype(x.v, *[getattr(x, name) for name in vectors]), x.v.dtype
    x = x._replace(**{name: y.to(common) for name in vectors
                      if (y := getattr(x, name)) is not None and y.dtype != common})
    if x.gamma is not None and x.gamma.requires_grad:
        x, key = x._replace(gamma=x.gamma.detach()), None  # gamma is a constant on every path
    how = Scalars(scale, has_ht, out_dtype, " ".join(flags), wants_grad(*x), op)
    if indices is not None or in_place:
        if how.needs_grad:
            raise ValueError(f"{op}: got tensors that require gradients, need torch.no_grad() or "
                             "inference_mode() with "
                             f"{'state_indices' if indices is not None else 'inplace_state'}, which "
                             "overwrites states")
        pool = x.h0
        assert pool is not None  # _checked
        o = IN_PLACE.run_planned(x._replace(h0=None), InPlace(pool, indices, scale, out_dtype, how.flags, op))
        return o.to(out_dtype), pool if has_ht else None
    if how.needs_grad:  # a replay can only repeat casts, and kernels with gradients get prepared tensors
        key = None
    if x.bounds is None:
        suspect_layout(op, *x.q.shape[1:3])
    o, ht = OPERATOR.run_planned(x, how, key, given)
    return o.to(out_dtype), ht if has_ht else None


def prepared(x: Inputs, how: Scalars) -> tuple[Inputs, Scalars]:
    """Compute norms, gates, sigmoids and rates in differentiable torch, and return the plain recurrence."""
    words = how.words
    if x.q.dtype == torch.float64:
        x = x._replace(**{name: exact(y, x.q) for name, y in x._asdict().items()
                          if y is not None and y.is_floating_point()})
    if "l2norm" in words:
        x = x._replace(q=l2normalized(x.q), k=l2normalized(x.k))
        if x.a is not None and "undecayed" in words:
            x = x._replace(a=l2normalized(x.a))
    if x.g is not None and x.A_log is not None:
        x = x._replace(g=gate(x.g, x.A_log, x.dt_bias), A_log=None, dt_bias=None)
    elif x.gk is not None and x.A_log is not None:
        x = x._replace(gk=gate(x.gk, x.A_log[:, None], x.dt_bias, bound_of(words) or None), A_log=None,
                       dt_bias=None)
    if x.beta is not None and "sigmoid" in words:
        x = x._replace(beta=beta_of_logits(x.beta, "neg_eigval" in words))
    if x.a is not None and x.b is not None and "rate" in words:
        x = x._replace(b=-wide(x.a) * x.b)
    left = ["delta", "before", "reverse", "v_first"]
    if "erase" in words or "undecayed" in words:
        x, left = as_dplr(x, "erase" in words), left[1:]
    return x, how._replace(flags=" ".join(word for word in words if word in left))


def as_dplr(x: Inputs, erase: bool) -> Inputs:
    """Return a delta rule with the flag ``erase`` or ``undecayed`` as a recurrence without ``delta``.

    The term that the delta rule subtracts becomes b (a^T S), in which a reads the state before it decays.
    Products are computed in float32 or wider before they are rounded.
    """
    v, written = x.v, by_value_head(x.k, x.v)
    if erase:
        assert x.a is not None and x.beta is not None and x.gk is not None
        dtype = common_dtype(x.q, x.k, v)
        read, v = -wide(x.a) * written * wide(x.gk).exp(), wide(x.beta) * v
    else:
        dtype = common_dtype(x.q, x.k, v, x.a)
        read = -by_value_head(x.k if x.a is None else x.a, v)
        if x.beta is not None:
            rate = wide(x.beta)[..., None]
            read, v = rate * read, rate * v
    return x._replace(v=v.to(x.v.dtype), beta=None, a=read.to(dtype), b=written)


def _checked(x: Inputs, flags: tuple[str, ...], indices: Tensor | None, in_place: bool,
             called: Mapping[str, str]) -> Inputs:
    """Check the tensors of a token-by-token call and its cu_seqlens, and return them."""
    first = called.get("q", "q")
    check_qkv(x.q, x.k, x.v, grouped=True, first=first)
    B, T, _, K = x.q.shape
    HV, V = x.v.shape[2:]
    device, v_first = x.q.device, "v_first" in flags
    erase, undecayed = "erase" in flags, "undecayed" in flags
    if unknown := {flag.partition(":")[0] for flag in flags} - set(FLAGS):  # a mistake in an op's own code
        raise ValueError(f"flags: got {', '.join(unknown)}, need some of {', '.join(FLAGS)}")
    if x.beta is not None or "beta" in called:
        if "delta" not in flags:
            raise ValueError("beta: got a tensor, need None without delta")
        beta = called.get("beta", "beta")
        if erase or (not undecayed and isinstance(x.beta, Tensor) and x.beta.ndim == 4):
            need_tensor(beta, x.beta, (B, T, HV, V), "[B, T, HV, V]", device)
        else:
            need_tensor(beta, x.beta, (B, T, HV),
                        "[B, T, HV]" if undecayed else "[B, T, HV] or [B, T, HV, V]", device)
    sizes = {"B": B, "T": T, "H": x.q.shape[2], "HV": HV, "K": K, "V": V}
    shapes = SHAPES if x.g is not None or x.gk is None else {**SHAPES, "dt_bias": ("HV", "K")}
    shapes = {**shapes, "a": ("B", "T", "H", "K")} if undecayed else shapes
    for name, letters in shapes.items():
        if (y := getattr(x, name)) is not None or name in called:
            need_tensor(called.get(name, name), y, tuple([sizes[letter] for letter in letters]),
                        f"[{', '.join(letters)}]", device, first)
    if not (erase or undecayed) and ((x.a is None) != (x.b is None)
                                     or (x.a is not None and "delta" in flags)):
        raise ValueError("a, b: got one of them or delta with them, need both, and without delta")
    if x.bounds is not None:
        x = x._replace(bounds=check_packed(x.q, x.bounds, None, first, values=True)[0])
    N = count_of(x.v, x.bounds)
    if indices is not None:
        check_pool("initial_state", x.h0, None, HV, K, V, v_first, device, "state_indices")
        readable = policy.current().debug or (device.type == "cpu" and not torch.compiler.is_compiling())
        check_indices(indices, N, x.h0.shape[0] if x.h0 is not None else 0, device, readable)
    elif in_place:
        check_pool("initial_state", x.h0, N, HV, K, V, v_first, device, "inplace_state")
    elif x.h0 is not None:
        check_state("initial_state", x.h0, N, H=HV, K=K, V=V, v_first=v_first, device=device,
                    packed=x.bounds is not None, first=first)
    return x


def problem_of(x: Inputs, how: Any, *options: str) -> Problem:
    """Return the Problem of a token-by-token call.

    how: the scalars of any operator of this module. options: words that the operator adds to the call's
        flags.
    """
    given = [name for name in ("beta", "g", "gamma", "gk", "gv", "bonus", "a", "b", "A_log")
             if getattr(x, name) is not None]
    return problem_of_heads(how.call, "recurrent", "fused_recurrent", x.q, x.v, x.bounds,
                            isinstance(how, Scalars) and how.needs_grad,
                            (*options, *how.flags.split(), *given))


def _on_torch(x: Inputs, how: Scalars) -> tuple[Tensor, Tensor]:
    x, how = prepared(x, how)
    words = how.words
    v_first, delta = "v_first" in words, "delta" in words
    x = x._replace(h0=x.h0.mT) if v_first and x.h0 is not None else x
    plain = "reverse" not in words and all(y is None for y in (x.gamma, x.gv, x.a, x.b))
    chunked = plain and x.q.shape[1] > LONG and ("before" in words) == (x.bonus is not None)
    # These two branches compute the same recurrence chunk by chunk, with gla or with a delta rule.
    if chunked and not delta and x.gk is not None and x.g is None and x.q.shape[2] == x.v.shape[2]:
        o, ht = chunked_gla.compute(GLAInputs(x.q, x.k, x.v, x.gk, x.bonus, x.h0, x.bounds), how.scale)
    elif chunked and delta and x.gk is None and x.bonus is None and (x.beta is None or x.beta.ndim == 3):
        beta = x.v.new_ones(x.v.shape[:3]) if x.beta is None else x.beta
        o, ht = chunked_delta.compute(DeltaInputs(x.q, x.k, x.v, beta, x.g, None, x.h0, x.bounds), how.scale)
    else:
        o, ht = torch_path.compute(x, words, how.scale)
    return o, ht.mT if v_first else ht


def _cast(x: Inputs, how: Scalars, dot: str) -> tuple[Inputs, Scalars]:
    """Return tensors and scalars in the form that the kernels need.

    Kernels with gradients get the tensors that ``prepared`` returns.
    """
    if how.needs_grad:
        x, how = prepared(x, how)
    out_dtype = dtype_as_planned(how.out_dtype, dot)
    return loadable(x, dot, how.needs_grad), Scalars(how.scale, how.has_ht, out_dtype, how.flags,
                                                      how.needs_grad, how.call)


def loadable(x: Inputs, dot: str, needs_grad: bool = False) -> Inputs:
    """Return the tensors in a form that the kernels can load: in the planned dtype and contiguous.

    Each tensor has q's dtype or float32. Without gradients the tokens of q, k and v need not be contiguous.
    """
    operands: list[Any] = list(as_planned(x, dot))
    dtypes = (operands[0].dtype, torch.float32)
    apart = 0 if needs_grad or torch.compiler.is_compiling() else 3
    for at, y in enumerate(operands[:-1]):  # bounds, the last operand, do not change
        if y is not None:
            y = y if y.dtype in dtypes else y.float()
            operands[at] = y if at < apart else y.contiguous()
    return Inputs(*operands)


def _forward(plan: Plan, x: Inputs, how: Scalars, call: Call | None = None) -> Any:
    return run_replayed(kernels("recurrent", "forward").launch_forward, plan, x, (how,),
                        lambda x: (x, how.words, how.scale, how.has_ht, how.out_dtype), OPERATOR, call)


def _empty(x: Inputs, how: Scalars) -> Outputs:
    outputs = empty_outputs(x, how, "v_first" in how.words)
    if not how.needs_grad:
        return Outputs(*outputs, None)
    (_, T, HV, V), K = x.v.shape, x.q.shape[3]
    rows = kept(T, count_of(x.v, x.bounds), x.bounds is not None)
    return Outputs(*outputs, x.q.new_empty((rows, HV, K, V), dtype=torch.float32))


def _backward(plan: Plan, x: Inputs, y: Outputs, grads: Outputs, how: Scalars, wanted: frozenset[str]) -> Any:
    together = {"q", "k"} if x.a is None else {"q", "k", "a", "b"}  # gradients that the kernel always writes
    do, (dht,) = dense(grads.o, x.v), contiguous(grads.ht)
    return run_replayed(kernels("recurrent", "backward").launch_backward, plan, (*x, y.states, do, dht),
                        (how, wanted),
                        lambda _: (x, y.states, how.words, how.scale, do, dht, wanted | together))


OPERATOR = Operator(
    "recurrent", Inputs, Scalars, Outputs, 2, family="recurrent", problem=problem_of, on_torch=_on_torch,
    cast=_cast, while_tracing=lambda x, how: traced_over_heads(x, how, "fused_recurrent"),
    # A traced loop over tokens or chunks would be unrolled, and bounds cannot be read during tracing.
    inside=lambda x: x.q.shape[1] > 1 or x.bounds is not None,
    forward=_forward, kept=lambda x, y, how: (x, (None, None, y.states)), backward=_backward, empty=_empty)


class InPlace(NamedTuple):
    """The scalars and the pool of a call that writes states back to a pool.

    pool: the states. indices: the pool row of each sequence, or None for row n.
    """
    pool: Tensor
    indices: Tensor | None
    scale: float
    out_dtype: torch.dtype
    flags: str
    call: str


def _update(plan: Plan, x: Inputs, how: InPlace) -> Tensor:
    """Run the kernels and return o; the states in the pool are updated."""
    if not can_write(plan, how.pool, x.q.dtype):
        return _update_by_copies(x, how)
    dot = plan.problem.dot
    o: Tensor
    o, _, _ = kernels("recurrent", "forward").launch_forward(
        plan, loadable(x, dot)._replace(h0=how.pool), tuple(how.flags.split()), how.scale, False,
        dtype_as_planned(how.out_dtype, dot), True, how.indices)
    return o.to(how.out_dtype)


def _update_by_copies(x: Inputs, how: InPlace) -> Tensor:
    """Run the call on copies of the pool's rows, if no kernel can write to the pool.

    The new states are copied back to the pool.
    """
    pool, indices, scale, out_dtype, flags, op = how
    rows = None if indices is None else taken(pool, indices)
    x = x._replace(h0=pool if rows is None else rows.states)
    o, ht = run_recurrent(op, x, tuple(flags.split()), scale, True)
    assert ht is not None
    if rows is None or rows.places is None or rows.known is None:
        pool.copy_(ht)
        return o.to(out_dtype)
    known = rows.known
    pool[rows.places[known]] = ht[known].to(pool.dtype)
    if x.bounds is not None:
        return rows_of(o, x.bounds, known).to(out_dtype)
    return torch.where(known[:, None, None, None], o, 0).to(out_dtype)


IN_PLACE = Overwriting(
    "recurrent_in_place", Inputs, InPlace, "pool", family="recurrent", problem=problem_of,
    while_tracing=lambda x, how: traced_over_heads(x, how, "fused_recurrent"), launch=_update,
    empty=lambda x, how: x.v.new_empty(x.v.shape, dtype=how.out_dtype))
