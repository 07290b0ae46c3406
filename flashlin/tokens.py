"""Checks of token ids against the size of the vocabulary.

On a GPU one token past the table causes a device-side assert, which destroys the CUDA context and does not
name the call. Here it raises a ValueError that names the first bad position, its value and the vocabulary
size, and the context stays usable.

On the GPU no call waits. A bad position gives a zero row and no gradient. The error is raised by the next
flashlin call after the result of the check has arrived (guards/deferred_checks.py).
``flashlin.settings(tokens="sync")`` raises the error in the call itself, and ``"off"`` uses plain torch. On
the CPU the call itself raises. Under torch.compile one library operator makes these checks.

Under torch.func transforms, and for tensors without readable values (meta, fake, DTensor), no error is raised.
A bad position then gives a zero row, or the result of plain torch.
"""
from __future__ import annotations

import math
import warnings
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashlin.compat.tracing import transformed
from flashlin.guards import deferred_checks, scalars
from flashlin.guards.deferred_checks import synchronize as synchronize
from flashlin.guards.tensors import shown
from flashlin.guards.tokens import Call, call_of, check, check_dtype, mode, out_of_range, readable, report, traced_place
from flashlin.ops._common.entry import without_autocast


def check_tokens(tokens: Tensor, vocab_size: int, name: str = "tokens", *,
                 ignore_index: int | None = None) -> None:
    """Raise ValueError if a token is not in 0 .. vocab_size - 1.

    By default it does not synchronise with a GPU; the error is raised by a later flashlin call.

    Args:
        tokens: int32 or int64, any shape, any strides.
        vocab_size: at least 1.
        name: name of the tokens in the error.
        ignore_index: a value that is also valid, as in cross_entropy (-100).

    Raises:
        ValueError: a token out of range. The error names the first position, its value, the vocabulary size
            and the call that passed it.
        TypeError: tokens is no int32 or int64 tensor, or vocab_size no int.

    It also works inside torch.compile, but the compiled function is then not run as a CUDA graph
    (mode="reduce-overhead").
    """
    if not torch.compiler.is_compiling():
        deferred_checks.poll()
    if mode() == "off":
        return
    check_dtype(name, tokens, distributed=True)
    if not isinstance(vocab_size, (int, torch.SymInt)):
        raise TypeError(f"vocab_size: got {type(vocab_size).__name__}, need an int")
    if vocab_size < 1:
        raise ValueError(f"vocab_size: got {vocab_size}, need at least 1")
    if ignore_index is not None:
        ignore_index = scalars.integer("ignore_index", ignore_index, need="an integer, or None")
    check("check_tokens", tokens, vocab_size, name, ignore_index)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
              norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    """Return rows of weight; tokens may be out of range. Drop-in for ``torch.nn.functional.embedding``.

    Args:
        input: tokens, int32 or int64, any shape, any strides.
        weight: [V, D], on the same device.
        padding_idx: in -V .. V - 1, or None.
        max_norm: as in torch.
        norm_type: as in torch.
        scale_grad_by_freq: as in torch.
        sparse: as in torch.

    Returns:
        [*input.shape, D] in weight's dtype. If a token is out of range and the call does not raise (on a GPU,
        by default), its row is zero. Such a token adds no gradient to weight, causes no renorm of a row, and
        does not count in scale_grad_by_freq or in a sparse gradient.

    Raises:
        ValueError: a token out of range, now or at a later flashlin call; an argument that does not fit.
        TypeError: input's dtype.

    A host sync happens only where torch itself has one (max_norm), and in the backward of sparse=True.
    """
    options = Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return _embedding("embedding", input, weight, options)


class Options(NamedTuple):
    """The arguments of ``torch.nn.functional.embedding`` that follow the tensors, in its order."""
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool


class guard_embeddings:
    """A guard that makes every nn.Embedding of a model report out-of-range tokens under its qualified name.

    The modules then behave like ``flashlin.embedding``. The change is in place. ``remove()`` or the end of a
    ``with`` block reverts it. Parameters, state_dict, hooks and the types of modules do not change. A
    subclass with its own forward, or a module whose forward another library has set, stays unguarded, with a
    warning that names it. Do not use it with nn.DataParallel: its replicas copy
    the guarded forward, which belongs to the original module.

    names: names of the guarded modules.
    unguarded: names of the modules that stay unguarded.
    Raises TypeError if model is no nn.Module.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: got {type(model).__name__}, need an nn.Module")
        self.names: list[str] = []
        self.unguarded: list[str] = []
        self._modules: list[nn.Module] = []
        for name, module in model.named_modules():
            name = name or type(module).__name__
            if not isinstance(module, nn.Embedding) or _is_guarded(module):
                continue
            if type(module).forward is not nn.Embedding.forward or "forward" in vars(module):
                self.unguarded.append(name)
                continue
            # Use a bound method named forward instead of a closure: copy.deepcopy binds it to the copy, and
            # pickling a module restores a plain one.
            vars(module).update(forward=MethodType(forward, module), _flashlin_name=name)
            self.names.append(name)
            self._modules.append(module)
        if self.unguarded:
            warnings.warn(f"guard_embeddings: {', '.join(self.unguarded)} with a forward of their own stay "
                          "unguarded; flashlin.check_tokens can check their input", stacklevel=2)

    def remove(self) -> None:
        """Restore the original forward of the modules. A second call has no effect."""
        for module in self._modules:
            if _is_guarded(module):
                del vars(module)["forward"], vars(module)["_flashlin_name"]
        self._modules = []

    def __enter__(self) -> guard_embeddings:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def forward(self: Any, input: Tensor) -> Tensor:
    """Return the embedding of a guarded nn.Embedding; this function replaces the module's own forward."""
    options = Options(self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
    return _embedding(f"embedding {self._flashlin_name!r}", input, self.weight, options)


def _is_guarded(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is forward


@without_autocast
def _embedding(op: str, input: Tensor, weight: Tensor, options: Options) -> Tensor:
    compiling = torch.compiler.is_compiling()
    if not compiling:
        deferred_checks.poll()
    if mode() == "off":
        return F.embedding(input, weight, *options)
    check_dtype("input", input, distributed=True)
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: got {type(weight).__name__}, need a tensor of shape [V, D]")
    if weight.ndim != 2:
        raise ValueError(f"weight: got shape {shown(weight.shape)}, need [V, D]")
    V, padding_idx = weight.shape[0], options.padding_idx
    if padding_idx is not None and not -V <= (at := scalars.integer("padding_idx", padding_idx)) < max(V, 1):
        raise ValueError(f"padding_idx: got {at}, need {-V} <= padding_idx < {V}, the rows of weight")
    if options.max_norm is not None:
        for name in ("max_norm", "norm_type"):
            scalars.number(name, getattr(options, name), -math.inf, math.inf, "a number")
    if not compiling:
        if not readable(input, weight) or input.numel() == 0:
            return F.embedding(input, weight, *options)
        if input.device != weight.device:
            raise ValueError(f"input: got device {input.device}, need {weight.device}, where weight is")
        if V == 0:
            raise ValueError(
                f"weight: got a vocabulary of 0 rows, need at least 1 for {input.numel()} tokens")
    index, bad = out_of_range(input, V)
    if compiling:
        # The operator returns the same mask. It is used, so that the compiler does not drop the operator.
        bad = _bad_op(input, V, op, traced_place())
    elif transformed():
        return F.embedding(index, weight, *options).masked_fill(bad.unsqueeze(-1), 0)
    elif report(input, bad, call_of(op, "input", input, V, None)):
        return F.embedding(input, weight, *options)
    return masked_embedding(weight, index, bad, options)


def masked_embedding(weight: Tensor, index: Tensor, bad: Tensor, options: Options) -> Tensor:
    """Return F.embedding with zero rows at ``bad`` positions, which touch no row of weight.

    weight: [V, D].
    index: int32 or int64; it must be in range at bad positions also.
    bad: bool, of index's shape.
    It reads no values on the host.
    """
    if options.max_norm is not None:
        _renorm(weight, index, bad, options.max_norm, options.norm_type)
    V = weight.shape[0]
    skip = V if options.padding_idx is None else options.padding_idx % V
    rows: Tensor = _Masked.apply(  # type: ignore[no-untyped-call]  # torch has no type for apply
        weight, index, bad, skip, options.scale_grad_by_freq, options.sparse)
    return rows


def _renorm(weight: Tensor, index: Tensor, bad: Tensor, max_norm: float, norm_type: float) -> None:
    """Renorm the rows in use in place, as F.embedding does, without the rows of bad positions.

    Bad positions use the first good index instead of their own. If no position is good, they use index 0, and
    its row is restored afterwards.
    """
    if not weight.shape[0]:  # no rows, so there are no tokens
        return
    with torch.no_grad():
        # Append a valid token 0. There may be no tokens, and compiled code does not test for that.
        good = torch.argmax(F.pad((~bad).reshape(-1).to(torch.uint8), (0, 1), value=1), 0, keepdim=True)
        stand_in = torch.take(F.pad(index.reshape(-1), (0, 1)), good)
        row = weight.index_select(0, stand_in)
        torch.embedding_renorm_(weight, torch.where(bad, stand_in, index), max_norm, norm_type)
        weight.index_copy_(0, stand_in.long(), torch.where(bad.all(), row, weight.index_select(0, stand_in)))


class _Masked(torch.autograd.Function):
    """An embedding whose bad positions have zero rows and add no gradient.

    Backward sends bad positions to a row that torch skips: padding_idx, or an extra row past the table that
    is cut off again. Therefore they do not add to a row, do not count in scale_grad_by_freq, and do not
    appear in a sparse gradient.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, bad: Tensor, skip: int, scale_grad_by_freq: bool,
                sparse: bool) -> Tensor:
        ctx.save_for_backward(index, bad)
        ctx.rows, ctx.skip, ctx.scale, ctx.sparse = weight.shape[0], skip, scale_grad_by_freq, sparse
        # masked_fill makes a new tensor: with masked_fill_, torch 2.11's compiler loses weight's gradient.
        return torch.embedding(weight, index).masked_fill(bad.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        index, bad = ctx.saved_tensors
        index, V = index.masked_fill(bad, ctx.skip), ctx.rows
        if ctx.sparse:
            rows = torch.ops.aten.embedding_sparse_backward(grad, index, V, ctx.skip, ctx.scale)
        else:
            rows = torch.ops.aten.embedding_dense_backward(grad, index, max(V, ctx.skip + 1), ctx.skip,
                                                           ctx.scale)[:V]
        return rows, None, None, None, None, None


@torch.library.custom_op("flashlin::out_of_range", mutates_args=(),
                         schema="(Tensor tokens, SymInt vocab_size, str op, str place) -> Tensor")
def _bad_op(tokens: Tensor, vocab_size: int, op: str, place: str) -> Tensor:
    deferred_checks.poll()
    bad = out_of_range(tokens, vocab_size)[1]
    if tokens.numel() and mode() != "off":
        report(tokens, bad, Call(op, "input", place, 0, tuple(tokens.shape), vocab_size, None))
    return bad


@_bad_op.register_fake
def _(tokens: Tensor, vocab_size: int, op: str, place: str) -> Tensor:
    return torch.empty_like(tokens, dtype=torch.bool)
