"""Cross entropy over a vocabulary, of given logits or of the logits of a linear layer.

Mirrors ``fla.modules.fused_cross_entropy`` and ``fla.modules.fused_linear_cross_entropy``. The loss of a row
with V columns is

    x = c tanh(s logits / c), or s logits without a softcap c
    L = log sum e^x
    loss = L - (1 - e) x_target - e mean(x) + a L^2

Sources: Szegedy et al. 2016 for label smoothing e, Chowdhery et al. 2022 for the squares a L^2 ("z loss"),
Gemma 2 (2024) for the softcap; Wijmans et al. 2024 and Hsu et al. 2024 (Liger) for the loss of a linear layer
in chunks.
"""
from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.compat.tracing import transformed
from flashlin.guards import scalars, tokens
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import check_device, check_floats, shown
from flashlin.kernels.cross_entropy import torch_path
from flashlin.kernels.cross_entropy.recipe import FAR
from flashlin.ops._common.arguments import check_nonempty, check_optional
from flashlin.ops._common.casting import as_planned, linear_dtype, wants_grad
from flashlin.ops._common.entry import entry, linear_entry, without_autocast
from flashlin.ops._common.operator import Gradients, Operator, kernels
from flashlin.ops._common.pipeline import call_of, parsed, planned

FAMILY = "cross_entropy"
CHUNK = 64  # the number of rows of a chunk is a multiple of this


class Terms(NamedTuple):
    """The numbers of the loss formula, in the order of the arguments of the forward kernel's launch function.

    scale: s, the factor on the logits.
    cap: c, the softcap, or None.
    smoothing: e, the label smoothing.
    squares: a, the factor of L^2.
    ignore_index: the target of rows that do not count.
    """
    scale: float
    cap: float | None
    smoothing: float
    squares: float
    ignore_index: int


@entry
def cross_entropy_loss(logits: Tensor, target: Tensor, label_smoothing: float = 0.0, logit_scale: float = 1.0,
                       lse_square_scale: float = 0.0, logit_softcapping: float | None = None,
                       ignore_index: int = -100, inplace_backward: bool = False,
                       process_group: Any = None) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy of each row of logits.

    Drop-in for ``fla.modules.fused_cross_entropy.cross_entropy_loss``. The loss of a row with V columns is

        x = c tanh(s logits / c), or s logits without a softcap c
        L = log sum e^x
        loss = L - (1 - e) x_target - e mean(x) + a L^2

    Args:
        logits: [N, V], bfloat16, float16 or float32 (float64 runs in plain torch), any V. Rows with
            contiguous columns are read without a copy.
        target: [N] int32 or int64; each value is the number of a column, or ignore_index.
        label_smoothing: e, from 0 to 1: the part of the target that is spread evenly over all columns.
        logit_scale: s, the factor on the logits.
        lse_square_scale: a, the factor on the square of the log-sum-exp of a row.
        logit_softcapping: c, above 0, or None for no softcap. The scale is applied before the softcap.
        ignore_index: any integer; rows with this target do not count.
        inplace_backward: backward overwrites the logits with their gradient, so nothing else may read their
            values after that. A second backward raises an error. If the kernels could not read the logits
            without a copy, or if no kernel runs, the gradient is a new tensor.
        process_group: None; a vocabulary that is split over several GPUs is not supported.

    Returns:
        (loss, z_loss), each [N] in float32 (float64 for float64 logits). z_loss is a L^2. It is included in
        loss and has no gradient of its own. Both are 0 in rows with ignore_index, and so is their gradient,
        even if such a row contains NaN.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it. A target out of range is also an
            error. On a GPU no call waits for this check: a later flashlin call raises the error, and until
            then the row counts as ignored. ``flashlin.check_tokens`` documents the check, and
            ``flashlin.settings(tokens=...)`` changes it.
        UnsupportedError: this machine cannot run the call.

    Differences from fla: CPU tensors work, targets out of range are reported, and rows with gaps between them
    are not copied. A second backward over overwritten logits is an error.
    """
    terms = _terms(label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index,
                   process_group)
    scalars.flags(inplace_backward=inplace_backward)
    check_nonempty("logits", logits, "[N, V]", (2,), "V")
    _check_target(target, logits, "logits")
    tokens.check("cross_entropy_loss", target, logits.shape[1], "target", ignore_index)
    loss, z_loss, *_ = OPERATOR.run_planned(Tensors(logits, target), Scalars(
        *terms, inplace_backward, wants_grad(logits), call_of("cross_entropy_loss", {logits.dtype})))
    return loss, z_loss.detach()


@linear_entry
def fused_linear_cross_entropy_loss(
    x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, logit_scale: float = 1.0, logit_softcapping: float | None = None,
    num_chunks: int = 8, reduction: str = "mean", use_l2warp: bool = False, l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True, process_group: Any = None) -> Tensor:
    """Compute the cross entropy of ``x @ weight.T + bias`` in chunks of rows, without storing all logits.

    Drop-in for ``fla.modules.fused_linear_cross_entropy.fused_linear_cross_entropy_loss``. Forward computes
    the gradients that are needed, chunk by chunk. Backward multiplies them by the gradient of the loss.

    Args:
        x: [N, D], any float dtype. x, weight and bias are multiplied in the autocast dtype, or without
            autocast in the dtype of x.
        target: [N], as in ``cross_entropy_loss``.
        weight: [V, D], any float dtype.
        bias: [V], any float dtype, or None.
        ignore_index: as in ``cross_entropy_loss``.
        label_smoothing: as in ``cross_entropy_loss``.
        logit_scale: as in ``cross_entropy_loss``.
        logit_softcapping: as in ``cross_entropy_loss``.
        num_chunks: the number of chunks for the N rows, at least 1. Fewer are used if N is small, or if V / D
            is below num_chunks.
        reduction: ``mean`` over the rows that are not ignored, or ``sum``.
        use_l2warp: add l2_penalty_factor / N times the highest logit of each row to the gradient of that
            logit, as RWKV does. The loss does not change. Logits are taken before logit_scale and
            logit_softcapping. N counts all rows, also with reduction ``sum``. Ignored rows also get this
            gradient. It is multiplied by the gradient of the loss. If several logits are highest, one of them
            gets it.
        l2_penalty_factor: the factor of use_l2warp.
        accumulate_grad_in_fp32: sum the gradients of weight and bias over the chunks in float32, else in
            their own dtype.
        process_group: None, as in ``cross_entropy_loss``.

    Returns:
        A float32 scalar (float64 for float64 x). If every row is ignored, it is 0, and so are its gradients
        except those of use_l2warp.

    Raises:
        TypeError, ValueError, UnsupportedError: as in ``cross_entropy_loss``. Second-order gradients are also
            an error; ``cross_entropy_loss`` of the logits has them on the torch path.

    Differences from fla: a second backward through the same graph is correct. No gradient is computed unless
    a tensor requires it. The gradient of weight is a product of 16-bit matrices summed in float32, so tensor
    cores compute it. torch.compile works.
    """
    terms = _terms(label_smoothing, logit_scale, 0.0, logit_softcapping, ignore_index, process_group)
    check_nonempty("x", x, "[N, D]", (2,))
    check_floats("weight", weight, "[V, D]")
    if weight.ndim != 2 or weight.shape[0] == 0 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight: got shape {shown(weight.shape)}, need [V, D] with V of at least 1 and D = "
                         f"{x.shape[1]}")
    check_device("weight", weight, x.device, "x")
    check_optional("x", x, [("bias", bias, weight.shape[:1], "[V]")])
    _check_target(target, x, "x")
    scalars.choice("reduction", reduction, ("mean", "sum"), "'mean' or 'sum'")
    num_chunks = scalars.integer("num_chunks", num_chunks, 1, "at least 1")
    penalty = 0.0
    if scalars.flag("use_l2warp", use_l2warp):
        penalty = scalars.number("l2_penalty_factor", l2_penalty_factor)
    accumulate_grad_in_fp32 = scalars.flag("accumulate_grad_in_fp32", accumulate_grad_in_fp32)
    tokens.check("fused_linear_cross_entropy_loss", target, weight.shape[0], "target", ignore_index)
    dtype = linear_dtype(x)
    needs_grad, call = wants_grad(x, weight, bias), call_of("fused_linear_cross_entropy_loss", {dtype})
    given = LinearTensors(x, target.contiguous(), weight, bias)
    how = LinearScalars(*terms, num_chunks, mean=reduction == "mean", penalty=penalty,
                        wide=accumulate_grad_in_fp32, dtype=dtype, wants_dx=wants_grad(x),
                        wants_dweight=wants_grad(weight), wants_dbias=wants_grad(bias), needs_grad=needs_grad,
                        call=call)
    if not torch.compiler.is_compiling() and transformed():
        return _whole_linear_loss(given, how)
    return cast(Tensor, LINEAR.run_planned(given, how)[0])


def _terms(label_smoothing: float, logit_scale: float, lse_square_scale: float,
           logit_softcapping: float | None, ignore_index: int, process_group: Any) -> Terms:
    if process_group is not None:
        raise ValueError(f"process_group: got {type(process_group).__name__}, need None: a vocabulary split "
                         "over several GPUs is not supported")
    return Terms(scalars.number("logit_scale", logit_scale),
                 None if logit_softcapping is None else
                 scalars.number("logit_softcapping", logit_softcapping, scalars.ABOVE_ZERO,
                                need="a number above 0, or None"),
                 scalars.number("label_smoothing", label_smoothing, 0.0, 1.0, "a number in 0 .. 1"),
                 scalars.number("lse_square_scale", lse_square_scale),
                 scalars.integer("ignore_index", ignore_index))


def _check_target(target: Any, rows: Tensor, beside: str) -> None:
    """Raise an error unless target is an integer tensor [N] on the device of the N rows.

    beside: the name of ``rows`` in error messages.
    """
    tokens.check_dtype("target", target)
    N = rows.shape[0]
    if tuple(target.shape) != (N,):
        raise ValueError(f"target: got shape {shown(target.shape)}, need [N] = [{N}]")
    check_device("target", target, rows.device, beside)


def counted(target: Tensor, V: int, ignore_index: int) -> Tensor:
    """Return the number of rows with a valid target as a scalar tensor, at least 1, to divide a mean by."""
    return ((target >= 0) & (target < V) & (target != ignore_index)).sum().clamp(min=1)


def _rows(logits: Tensor) -> Tensor:
    """Return logits themselves if the kernels can read their rows, else a contiguous copy.

    The kernels need contiguous columns, rows that do not overlap and at most 2**20 elements from row to row.
    """
    apart = logits.shape[1] <= logits.stride(0) <= FAR
    return logits if logits.stride(1) == 1 and apart else logits.contiguous()


def _problem(call: str, shape: tuple[int, ...], needs_grad: bool) -> Problem:
    (op, dtype, _), (N, V) = parsed(call), shape
    return Problem(op, FAMILY, "", B=1, T=N, H=1, K=V, V=V, N=1, dtype=dtype, needs_grad=needs_grad)


class Tensors(NamedTuple):
    """The tensor arguments of one cross entropy: logits [N, V] and target [N]."""
    logits: Tensor
    target: Tensor


class Scalars(NamedTuple):
    """The other arguments of one cross entropy.

    scale, cap, smoothing, squares, ignore_index: the fields of Terms.
    in_place: backward may overwrite the logits with their gradient.
    needs_grad: the logits need a gradient.
    call: the call string (op, dtype and options).
    """
    scale: float
    cap: float | None
    smoothing: float
    squares: float
    ignore_index: int
    in_place: bool
    needs_grad: bool
    call: str


def terms_of(how: Scalars | LinearScalars) -> Terms:
    """Return the numbers of the loss formula: scale, softcap, label smoothing, z-loss factor, ignore_index."""
    return Terms(how.scale, how.cap, how.smoothing, how.squares, how.ignore_index)


class Outputs(NamedTuple):
    """The results of one cross entropy, each [N].

    loss: the loss of each row, which includes z_loss.
    z_loss: lse_square_scale times the square of lse.
    lse: the log-sum-exp of each row, which backward reads.
    """
    loss: Tensor
    z_loss: Tensor
    lse: Tensor


def _cast(given: Tensors, how: Scalars, dot: str) -> tuple[Tensors, Scalars]:
    """Return the tensors and scalars as the kernels need them.

    The scalars tell backward to overwrite the caller's logits only if the caller asked for it, the logits are
    not copied here, and torch.compile does not trace.
    """
    readable, = as_planned((given.logits,), dot)
    rows = _rows(readable)
    in_place = how.in_place and rows is given.logits and not torch.compiler.is_compiling()
    if in_place != how.in_place:
        how = Scalars(*terms_of(how), in_place, how.needs_grad, how.call)
    return Tensors(rows, given.target.contiguous()), how


def _backward(plan: Plan, x: Tensors, y: Outputs, grads: Outputs, how: Scalars,
              wanted: frozenset[str]) -> Gradients:
    """Return the gradient of logits for the gradient of loss; z_loss has no gradient of its own."""
    if grads.loss is None:
        return {"logits": None}
    dlogits = kernels("cross_entropy", "backward").launch_backward(plan, _rows(x.logits), x.target, y.lse,
                                                       grads.loss.contiguous(), *terms_of(how), how.in_place)
    if how.in_place:
        torch.autograd.graph.increment_version(x.logits)  # other graphs that saved them now raise in backward
    return {"logits": dlogits}


OPERATOR = Operator(
    "cross_entropy", Tensors, Scalars, Outputs, 2, family=FAMILY,
    problem=lambda x, how: _problem(how.call, x.logits.shape, how.needs_grad), cast=_cast,
    on_torch=lambda x, how: torch_path.compute(x.logits, x.target, *terms_of(how)),
    forward=lambda plan, x, how: kernels("cross_entropy", "forward").launch_forward(
        plan, _rows(x.logits), x.target, *terms_of(how)),
    kept=lambda x, y, how: (x, (None, None, y.lse)), backward=_backward,
    empty=lambda x, how: [x.logits.new_empty(x.logits.shape[:1], dtype=torch.float32)
                          for _ in Outputs._fields],
    backward_on_torch=lambda x, y, grads, how, wanted: {
        "logits": None if grads.loss is None
        else torch_path.gradients(x.logits, x.target, y.lse, grads.loss, *terms_of(how))})


class LinearTensors(NamedTuple):
    """The tensor arguments of one linear cross entropy.

    x: [N, D].
    target: [N].
    weight: [V, D].
    bias: [V] or None.
    """
    x: Tensor
    target: Tensor
    weight: Tensor
    bias: Tensor | None


class LinearScalars(NamedTuple):
    """The other arguments of one linear cross entropy.

    scale, cap, smoothing, squares, ignore_index: the fields of Terms.
    num_chunks: the requested number of chunks.
    mean: return the mean over the rows that count, else their sum.
    penalty: the factor of use_l2warp, or 0.
    wide: sum the gradients of weight and bias over the chunks in float32.
    dtype: the dtype of the matrix products.
    wants_dx, wants_dweight, wants_dbias: the gradient of this tensor is needed.
    needs_grad: any gradient is needed.
    call: the call string (op, dtype and options).
    """
    scale: float
    cap: float | None
    smoothing: float
    squares: float
    ignore_index: int
    num_chunks: int
    mean: bool
    penalty: float
    wide: bool
    dtype: torch.dtype
    wants_dx: bool
    wants_dweight: bool
    wants_dbias: bool
    needs_grad: bool
    call: str


class LinearOutputs(NamedTuple):
    """The loss of a linear layer and its gradients, which forward computes.

    loss: a scalar.
    dx: the gradient of x before its multiplication by share. Forward does not multiply it, because in float16
    it would underflow before backward multiplies it by the factor of a gradient scaler.
    dweight, dbias: the gradients of weight and bias, already multiplied by share.
    share: a scalar, 1 / the number of rows that count for a mean, or 1 for a sum.

    The gradients are outputs because backward reads them (``ops/_common/gradients.py``). A gradient is None
    if it is not needed.
    """
    loss: Tensor
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    share: Tensor


@without_autocast
def _linear_loss(given: LinearTensors, how: LinearScalars) -> tuple[Tensor | None, ...]:
    """Return the fields of LinearOutputs; each chunk of rows is planned separately."""
    x, target, weight, bias = given
    dtype, (N, D), V = how.dtype, x.shape, weight.shape[0]
    matrix, line = weight.to(dtype), None if bias is None else bias.to(dtype)
    losses = torch.zeros(N, dtype=torch.promote_types(dtype, torch.float32), device=x.device)
    share = losses.new_ones(())
    if how.mean:
        share = 1 / counted(target, V, how.ignore_index).to(losses.dtype)
    penalty = how.penalty / N / share if how.penalty and N else None
    sums = torch.promote_types(losses.dtype, weight.dtype) if how.wide else weight.dtype
    dx = torch.zeros_like(x) if how.wants_dx else None
    dweight = torch.zeros_like(weight, dtype=sums) if how.wants_dweight else None
    dbias = None if bias is None or not how.wants_dbias else torch.zeros_like(bias, dtype=sums)
    # With more chunks the logits of a chunk would be smaller than x, which is in memory anyway.
    chunks = min(how.num_chunks, -(-V // D))
    C = -(-max(N, 1) // chunks // CHUNK) * CHUNK
    for first in range(0, N, C):
        chunk = slice(first, min(first + C, N))
        rows = x[chunk].to(dtype)
        losses[chunk], dlogits = _of_chunk(F.linear(rows, matrix, line), target[chunk], how, penalty)
        if dlogits is None:
            continue
        if dx is not None:
            dx[chunk] = dlogits @ matrix
        if dweight is not None:
            _add_product(dweight, dlogits.t(), rows)
        if dbias is not None:
            dbias += dlogits.sum(0, dtype=sums)
    return losses.sum() * share, dx, _averaged(dweight, share, weight), _averaged(dbias, share, bias), share


@without_autocast
def _whole_linear_loss(given: LinearTensors, how: LinearScalars) -> Tensor:
    """Return the loss by operations that torch.func can transform. All logits are in memory at once."""
    x, target, weight, bias = given
    logits = F.linear(x.to(how.dtype), weight.to(how.dtype), None if bias is None else bias.to(how.dtype))
    losses, _, _ = torch_path.compute(logits, target, *terms_of(how))
    total = losses.sum()
    if how.mean:
        total = total / counted(target, weight.shape[0], how.ignore_index)
    # A gradient for the highest logit of each row, which does not change the loss.
    if how.penalty and len(x):
        squares = logits.max(1).values.to(losses.dtype).square().sum() * (how.penalty / len(x) / 2)
        total = total + squares - squares.detach()
    return total


def _empty_linear(given: LinearTensors, how: LinearScalars) -> tuple[Tensor | None, ...]:
    x, _, weight, bias = given
    loss, share = (x.new_empty([], dtype=torch.promote_types(how.dtype, torch.float32)) for _ in range(2))
    return (loss, torch.empty_like(x) if how.wants_dx else None,
            torch.empty_like(weight) if how.wants_dweight else None,
            torch.empty_like(bias) if bias is not None and how.wants_dbias else None, share)


def _of_chunk(logits: Tensor, target: Tensor, how: LinearScalars,
              penalty: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the losses of a chunk of rows and their gradient for an output gradient of one.

    The gradient is None if it is not needed. It overwrites the logits where possible.
    penalty: this factor times the highest logit of each row is added to the gradient of that logit.
    """
    terms, plan = terms_of(how), planned(_problem(how.call, logits.shape, how.needs_grad), logits.device)
    # Read before the gradient overwrites the logits.
    highest = logits.max(1, keepdim=True) if how.needs_grad and penalty is not None else None
    if plan.problem.path == "torch":
        loss, _, lse = torch_path.compute(logits, target, *terms)
        if not how.needs_grad:
            return loss, None
        dlogits = torch_path.gradients(logits, target, lse, torch.ones_like(loss), *terms)
    else:
        readable, = as_planned((logits,), plan.problem.dot)
        loss, _, lse = kernels("cross_entropy", "forward").launch_forward(plan, readable, target, *terms)
        if not how.needs_grad:
            return loss, None
        dlogits = kernels("cross_entropy", "backward").launch_backward(
            plan, readable, target, lse, torch.ones_like(loss), *terms, True).to(logits.dtype)
    if highest is not None and penalty is not None:
        pull = highest.values.to(lse.dtype) * penalty
        dlogits.scatter_(1, highest.indices, (dlogits.gather(1, highest.indices) + pull).to(dlogits.dtype))
    return loss, dlogits


def _averaged(total: Tensor | None, share: Tensor, like: Tensor | None) -> Tensor | None:
    """Return total * share in the dtype of ``like``; it overwrites total if the dtypes are equal."""
    if total is None or like is None:
        return None
    return _times(total, share, total if total.dtype == like.dtype else torch.empty_like(like))


def _times(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Store x times the scalar tensor factor in out, rounded once, and return out.

    factor is reshaped to [1], because on a GPU a scalar tensor is first rounded to the 16 bits of x.
    """
    return torch.mul(x, factor.reshape(1), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total in place, in the dtype of total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    # Since torch 2.8, mm of 16-bit matrices can return float32 sums.
    elif a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        total += torch.mm(a, b, out_dtype=torch.float32)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _backward_linear(plan: Plan | None, x: LinearTensors, y: LinearOutputs, grads: LinearOutputs,
                     how: LinearScalars, wanted: frozenset[str]) -> Gradients:
    if (dloss := grads.loss) is None:
        return dict.fromkeys(wanted)
    factors = {"x": (y.dx, dloss * y.share), "weight": (y.dweight, dloss), "bias": (y.dbias, dloss)}
    return {name: None if grad is None else _times(grad, factor, torch.empty_like(grad))
            for name, (grad, factor) in factors.items()}


LINEAR = Operator(
    "linear_cross_entropy", LinearTensors, LinearScalars, LinearOutputs, len(LinearOutputs._fields),
    # The whole call is planned for its warnings and errors. Each of its chunks is planned again.
    problem=lambda given, how: _problem(how.call, (len(given.x), len(given.weight)), how.needs_grad),
    family=FAMILY, forward=lambda plan, given, how: _linear_loss(given, how),
    kept=lambda x, y, how: ((None,) * len(x), (None, *y[1:])), backward=_backward_linear,
    empty=_empty_linear, plain_backward=True,
    instead='cross_entropy_loss of the logits has them with flashlin.settings(path="torch")')
