"""Checks for out-of-range tokens.

The check finds the first token that is not in the vocabulary and reports it. On a GPU no call waits for the
result, and a later call raises the error (guards/deferred_checks.py). On the CPU the call itself raises it.
Under torch.compile a library operator does the same.
"""
from __future__ import annotations

import math
import os
import sys
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashlin import policy
from flashlin.guards import deferred_checks
from flashlin.guards.tensors import INTEGERS, check_dense, shown, without_values


class Call(NamedTuple):
    """A call whose tokens are checked; an error that is raised later names it.

    op, argument: the names of the op and of the tokens.
    where: the caller's code object, or a text that names the caller's position. It is formatted only for an
        error.
    line: the caller's line, if ``where`` is a code object.
    shape: the shape of the tokens.
    vocab_size: tokens from 0 to ``vocab_size - 1`` are valid.
    ignore_index: one more valid token, or None.
    """
    op: str
    argument: str
    where: CodeType | str
    line: int
    shape: tuple[int, ...]
    vocab_size: int
    ignore_index: int | None

    def verdict(self, position: int, value: int) -> str:
        """Return the error message for a token, or an empty string if the token is valid.

        position: the token's index in the flattened tokens, or -1 if no token was reported.
        value: the token.
        """
        if position < 0 or 0 <= value < self.vocab_size or value == self.ignore_index:
            return ""
        or_ignored = "" if self.ignore_index is None else f" or ignore_index = {self.ignore_index}"
        return (f"{self}: {self.argument}: got {value} at position "
                f"{position}{_unravelled(position, self.shape)}, "
                f"need 0 <= token < {self.vocab_size}, the vocabulary size{or_ignored}")

    def __str__(self) -> str:
        if isinstance(self.where, str):
            return f"{self.op} called {self.where}"
        return f"{self.op} called at {self.where.co_filename}:{self.line} in {self.where.co_name}"


def check(op: str, tokens: Tensor, vocab_size: int, name: str, ignore_index: int | None) -> None:
    """Raise ValueError, now or in a later flashlin call, if a token is out of range.

    A token is valid if it is in 0 .. vocab_size - 1 or is ignore_index.
    op, name: the names of the op and of the tokens, for the error.
    tokens: int32 or int64; the caller has checked the dtype.
    """
    if mode() == "off":
        return
    if torch.compiler.is_compiling():
        _check_op(tokens, _ANCHOR, vocab_size, ignore_index, op, name, traced_place())
    elif readable(tokens) and tokens.numel() and not torch._C._are_functorch_transforms_active():
        report(tokens, out_of_range(tokens, vocab_size, ignore_index)[1],
               call_of(op, name, tokens, vocab_size, ignore_index))


def out_of_range(tokens: Tensor, vocab_size: int, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the tokens clamped to 0 .. vocab_size - 1, and a bool mask of the invalid tokens.

    A token is invalid if clamping changes it, unless it is ignore_index. Both results have the shape of
    tokens.
    """
    index = tokens.clamp(0, min(vocab_size - 1, torch.iinfo(tokens.dtype).max))
    bad = index != tokens
    return index, bad if ignore_index is None else bad & (tokens != ignore_index)


def first_bad(tokens: Tensor, bad: Tensor, out: Tensor | None = None) -> Tensor:
    """Return [2] int64: the first bad position in row-major order, and the token at that position.

    If no token is bad, the result is position 0 and its valid token. The reader tells the two cases apart by
    the token, which saves a step on the device.
    tokens: at least one token.
    bad: a bool mask in the shape of tokens.
    out: [2] int64, receives the result if given.
    """
    out = torch.empty(2, dtype=torch.int64, device=tokens.device) if out is None else out
    torch.argmax(bad.reshape(-1).view(torch.uint8), 0, keepdim=True, out=out[:1])
    torch.take(tokens.long(), out[:1], out=out[1:])
    return out


def keep_first(flag: Tensor, tokens: Tensor, bad: Tensor) -> None:
    """Write the first bad position and its token to flag [2] int64, if any token is bad.

    A flag that already contains a bad token (position >= 0) keeps it.
    """
    flag.copy_(torch.where((flag[:1] < 0) & bad.any(), first_bad(tokens, bad), flag))


def report(tokens: Tensor, bad: Tensor, call: deferred_checks.Verdict, shared: bool = False) -> bool:
    """Raise ValueError if a token is bad, or make a later call raise it.

    Return True if all tokens are known to be valid, and False if the result is not known yet.
    bad: a bool mask of the bad tokens.
    call: the checked call, which makes the error message.
    shared: all ranks of a group send this result. A GPU result is then always read by a later call, also with
        the setting ``sync`` (``deferred_checks.send``).
    """
    if tokens.is_cuda:
        if deferred_checks.capturing():
            if (flag := deferred_checks.flag(tokens.device, call)) is not None:
                keep_first(flag, tokens, bad)
            return False
        # A capture may follow, and a kernel's first launch in a process must not happen during a capture.
        # Therefore launch the kernels that write a flag once now.
        if deferred_checks.prime(tokens.device):
            keep_first(torch.full((2,), -1, device=tokens.device), tokens, bad)
        if shared or mode() == "async":
            slot = deferred_checks.take(tokens.device)
            first_bad(tokens, bad, slot.pair)
            deferred_checks.send(slot, call, shared)
            return False
    if text := call.verdict(*first_bad(tokens, bad).tolist()):
        raise ValueError(text)
    return True


# torch.compile removes operators without a used result. This operator has no result, so it claims to write to
# this tensor. ``apart`` creates a normal tensor even if this module is first imported in inference mode or
# under FakeTensorMode.
_ANCHOR: Tensor = deferred_checks.apart(partial(torch.zeros, 1, dtype=torch.int8, device="cpu"))


@torch.library.custom_op(
    "flashlin::check_tokens", mutates_args=("anchor",),
    schema="(Tensor tokens, Tensor(a!) anchor, SymInt vocab_size, int? ignore_index, str op, str name, str "
           "place) -> ()")
def _check_op(tokens: Tensor, anchor: Tensor, vocab_size: int, ignore_index: int | None, op: str, name: str,
              place: str) -> None:
    deferred_checks.poll()
    if tokens.numel() and mode() != "off":
        bad = out_of_range(tokens, vocab_size, ignore_index)[1]
        report(tokens, bad, Call(op, name, place, 0, tuple(tokens.shape), vocab_size, ignore_index))


@_check_op.register_fake
def _(tokens: Tensor, anchor: Tensor, vocab_size: int, ignore_index: int | None, op: str, name: str,
      place: str) -> None:
    return None


def mode() -> str:
    """Return the current setting for token checks: ``async``, ``sync`` or ``off``."""
    return policy.current().tokens


def check_dtype(name: str, tokens: Any, distributed: bool = False) -> None:
    """Raise TypeError unless tokens is a dense int32 or int64 tensor.

    distributed: also accept a DTensor.
    """
    check_dense(name, tokens, "an int32 or int64 tensor", distributed)
    if tokens.dtype not in INTEGERS:
        raise TypeError(f"{name}: got dtype {tokens.dtype}, need int32 or int64")


def readable(*tensors: Tensor) -> bool:
    """Return True if the values of all tensors can be read.

    Tensors on meta, and subclasses such as FakeTensor and DTensor, have no readable values.
    """
    return not any(map(without_values, tensors))


def call_of(op: str, argument: str, tokens: Tensor, vocab_size: int, ignore_index: int | None) -> Call:
    """Return a ``Call`` that names the line of the first caller outside flashlin and torch."""
    frame = users_frame()
    return Call(op, argument, frame.f_code, frame.f_lineno, tuple(tokens.shape), vocab_size, ignore_index)


def users_frame() -> FrameType:
    """Return the frame of the first caller outside flashlin and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("flashlin",
                                                                                                  "torch"):
        frame = frame.f_back
    return frame


def traced_place() -> str:
    """Return the user's line that torch.compile is tracing, because compiled code has no Python stack."""
    for frame in reversed(torch._guards.TracingContext.extract_stack()):
        if not frame.filename.startswith(_INSIDE):
            return f"at {frame.filename}:{frame.lineno} in {frame.name}, compiled"
    return "in compiled code"


# torch.compiler.assume_constant_result does the same, but loads the whole compiler, which eager calls do not
# need.
traced_place._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch sets it on any function

_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent.parent, Path(torch.__file__).parent))


def _unravelled(position: int, shape: tuple[int, ...]) -> str:
    """Return a position in flattened tokens as an index: 133 in shape [4, 64] gives `` = [2, 5]``.

    For tokens with one dimension the result is an empty string.
    """
    where = [position // math.prod(shape[axis + 1:]) % size for axis, size in enumerate(shape)]
    return f" = {shown(where)}" if len(where) > 1 else ""
