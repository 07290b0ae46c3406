"""Checks of arguments that several ops share.

guards/tensors.py and guards/scalars.py contain the basic checks.
"""
from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards.tensors import (
    check_apart,
    check_cu_seqlens,
    check_dense,
    check_device,
    check_dtype,
    check_floats,
    check_values,
    need_tensor,
    shown,
)
from flashlin.ops._common.casting import under_autocast
from flashlin.ops._common.entry import without_autocast
from flashlin.ops._common.pipeline import users_line

_suspected: set[str] = set()  # ops that have already warned about a suspicious layout


def check_nonempty(name: str, x: Any, meaning: str, dims: Collection[int], letter: str = "D",
                   at: int = -1) -> None:
    """Check that x is a floating-point tensor whose dimension ``at`` is not empty.

    meaning: the expected shape as the error prints it, in which ``letter`` names dimension ``at``.
    dims: allowed numbers of dimensions; if empty, any number but 0.
    """
    check_floats(name, x, meaning)
    if x.ndim == 0 or (dims and x.ndim not in dims) or x.shape[at] == 0:
        raise ValueError(f"{name}: got shape {shown(x.shape)}, need {meaning} with {letter} of at least 1")


def check_rows(name: str, x: Any, meaning: str, dims: int | None = None, columns: int = 1) -> None:
    """Check that x is a floating-point tensor whose rows are not empty.

    dims: number of dimensions of x; None for any.
    columns: the last ``columns`` dimensions of x form a row.
    """
    check_floats(name, x, meaning)
    if x.ndim < columns or x.ndim != (dims or x.ndim) or 0 in x.shape[x.ndim - columns:]:
        raise ValueError(f"{name}: got shape {shown(x.shape)}, need {meaning}" + " with at least 1 column"
                         * bool(columns))


def check_parameter(name: str, x: Any, count: int, meaning: str, beside: str, first: Tensor) -> None:
    """Check that a parameter x has ``count`` elements in any shape, on the device of ``first``.

    Models store parameters as [D] or as [1, 1, D], so the shape is free.
    meaning: the expected number of elements as the error prints it.
    beside: the name of ``first`` in the error.
    """
    check_dense(name, x, f"a tensor of {meaning} elements")
    check_dtype(name, x.dtype, "dtype ")
    if x.numel() != count:
        raise ValueError(f"{name}: got shape {shown(x.shape)}, need {meaning} = {count} elements")
    check_device(name, x, first.device, beside)


def check_optional(beside: str, first: Tensor,
                   given: Iterable[tuple[str, Any, tuple[int | None, ...], str]]) -> None:
    """Check each optional tensor that is not None with ``need_tensor``.

    given: (name, tensor or None, shape, meaning) of each tensor.
    All tensors must be on the device of ``first``; ``beside`` is the name of ``first`` in errors.
    """
    for name, x, shape, meaning in given:
        if x is not None:
            need_tensor(name, x, shape, meaning, first.device, beside)


def check_written(name: str, x: Tensor, op: str, why: str) -> None:
    """Check that a tensor x that the op overwrites requires no gradient and does not overlap itself.

    why: the end of the error's sentence, which says how the op uses x.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: got a tensor that requires a gradient, need one that does not: "
                         f"it is {why}")
    check_apart(name, x, op)


def check_packed(x: Tensor, cu_seqlens: Any, cu_seqlens_cpu: Any = None, first: str = "x",
                 values: bool = False) -> tuple[Tensor | None, int]:
    """Return the checked cu_seqlens of packed sequences and the number of sequences.

    x: the tokens [B, T, ...]. Without cu_seqlens each row of x is one sequence, and the result is (None, B).
    first: the name of x in errors.
    values: refuse a cu_seqlens without readable values, such as a meta tensor.
    """
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu: got a tensor without cu_seqlens, need both")
        return None, x.shape[0]
    bounds = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, x.shape, x.device, policy.current().debug, first)
    if values:
        check_values("cu_seqlens", bounds)
    return bounds, bounds.shape[0] - 1


def check_seq_idx(seq_idx: Any, b: int, T: int, x: Tensor) -> None:
    """Raise an error unless seq_idx is an integer tensor [b, T] on the device of x."""
    check_dense("seq_idx", seq_idx, "a tensor of integers of shape [b, T]")
    if (seq_idx.is_floating_point() or seq_idx.is_complex() or seq_idx.is_quantized
        or seq_idx.dtype == torch.bool):
        raise TypeError(f"seq_idx: got {seq_idx.dtype}, need a tensor of integers of shape [b, T]")
    if tuple(seq_idx.shape) != (b, T):
        raise ValueError(f"seq_idx: got shape {shown(seq_idx.shape)}, need [b, T] = {shown((b, T))}")
    check_device("seq_idx", seq_idx, x.device, "x")


def check_has(name: str, has: Tensor, N: int, device: torch.device) -> None:
    """Raise unless ``has`` is a bool tensor [N] on that device."""
    check_dense(name, has, "a bool tensor of shape [N]")
    if has.dtype != torch.bool:
        raise TypeError(f"{name}: got {has.dtype}, need a bool tensor of shape [N]")
    if has.shape != (N,):
        raise ValueError(f"{name}: got shape {shown(has.shape)}, need [N] = [{N}]")
    if has.device != device:
        raise ValueError(f"{name}: got device {has.device}, need {device}, where the tokens are")


def suspect_layout(op: str, T: int, H: int) -> None:
    """Warn once per op if T < H, because the tensors may be [B, H, T, D] instead of [B, T, H, D].

    A single token is decoding and gives no warning. Callers skip this check for packed sequences.
    """
    if torch.compiler.is_compiling() or not 1 < T < H:
        return
    if op not in _suspected and not op.startswith("mamba_"):  # mamba_ssm never had tensors of that layout
        _suspected.add(op)
        warnings.warn(f"{op}: got {T} tokens of {H} heads, from tensors that are [B, T, H, D] here; if yours "
                      "are [B, H, T, D], pass x.transpose(1, 2)", stacklevel=users_line())


def check_linear(first: str, x: Tensor, **given: Tensor | None) -> None:
    """Raise TypeError unless the weights and biases of a linear layer have the dtype of x.

    Under autocast any dtype is accepted, because autocast casts them.
    first: the name of x in the error.
    """
    if not under_autocast(x):
        for name, weight in given.items():
            if weight is not None and weight.dtype != x.dtype:
                raise TypeError(f"{name}: got dtype {weight.dtype}, need {x.dtype}, as {first} (or autocast)")


@without_autocast
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x W^T + b of a linear layer, with the product computed in ``dtype``."""
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
