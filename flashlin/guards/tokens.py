"""Out-of-range tokens: finding the first one and seeing to it that somebody is told. On a GPU nothing waits
(guards/deferred_checks.py); on the CPU the call itself raises; under torch.compile a library operator does
the same.
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
    """A call under check, so that an error that comes late can name it. where: the caller's code, or a text;
    spelled out only if needed."""
    op: str
    argument: str
    where: CodeType | str
    line: int
    shape: tuple[int, ...]
    vocab_size: int
    ignore_index: int | None

    def verdict(self, position: int, value: int) -> str:
        """The error's text, or "" if (position, value) is no out-of-range token. position counts through the
        tokens in order."""
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
    """See to it that the user hears of a token that is neither in 0 .. vocab_size - 1 nor ignore_index.
    tokens: int32 or int64, known to be. op, name: what the error calls the call and the tokens. Raises
    ValueError, now or at a later flashlin call."""
    if mode() == "off":
        return
    if torch.compiler.is_compiling():
        _check_op(tokens, _ANCHOR, vocab_size, ignore_index, op, name, traced_place())
    elif readable(tokens) and tokens.numel() and not torch._C._are_functorch_transforms_active():
        report(tokens, out_of_range(tokens, vocab_size, ignore_index)[1],
               call_of(op, name, tokens, vocab_size, ignore_index))


def out_of_range(tokens: Tensor, vocab_size: int, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens clamped into 0 .. vocab_size - 1, and a bool mask of those that were not and are not
    ignore_index; in tokens' shape."""
    index = tokens.clamp(0, min(vocab_size - 1, torch.iinfo(tokens.dtype).max))
    bad = index != tokens
    return index, bad if ignore_index is None else bad & (tokens != ignore_index)


def first_bad(tokens: Tensor, bad: Tensor, out: Tensor | None = None) -> Tensor:
    """[2] int64: the first position of ``bad`` in row-major order and its token, or position 0 and its token
    where nothing is bad: whether that token is bad is for the reader to see, which saves the device a step.
    At least one token. Written to out if given."""
    out = torch.empty(2, dtype=torch.int64, device=tokens.device) if out is None else out
    torch.argmax(bad.reshape(-1).view(torch.uint8), 0, keepdim=True, out=out[:1])
    torch.take(tokens.long(), out[:1], out=out[1:])
    return out


def keep_first(flag: Tensor, tokens: Tensor, bad: Tensor) -> None:
    """Put the first bad token into flag [2] int64 unless one is in it (position >= 0) or nothing is bad."""
    flag.copy_(torch.where((flag[:1] < 0) & bad.any(), first_bad(tokens, bad), flag))


def report(tokens: Tensor, bad: Tensor, call: deferred_checks.Verdict, shared: bool = False) -> bool:
    """Raise ValueError if a token is bad, or make a later call raise it. Return True if every token is known
    to be fine. shared: each rank of a group has this answer, and it always comes later
    (``deferred_checks.send``)."""
    if tokens.is_cuda:
        if deferred_checks.capturing():
            flag = deferred_checks.flag(tokens.device, call)
            if flag is not None:
                keep_first(flag, tokens, bad)
            return False
        # a capture may follow, and its first launch of a kernel must not be the process's first
        if deferred_checks.prime(tokens.device):
            keep_first(torch.full((2,), -1, device=tokens.device), tokens, bad)
        if shared or mode() == "async":
            slot = deferred_checks.take(tokens.device)
            first_bad(tokens, bad, slot.pair)
            deferred_checks.send(slot, call, shared)
            return False
    text = call.verdict(*first_bad(tokens, bad).tolist())
    if text:
        raise ValueError(text)
    return True


# torch.compile: one operator per door. The mask's user keeps the first one alive; check_tokens has no result
# to use, so its operator claims to write to a tensor, or the compiler would drop it.
# This module may be first imported in inference mode or under FakeTensorMode, hence ``apart``.
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
    return policy.current().tokens


def check_dtype(name: str, tokens: Any, distributed: bool = False) -> None:
    check_dense(name, tokens, "an int32 or int64 tensor", distributed)
    if tokens.dtype not in INTEGERS:
        raise TypeError(f"{name}: got dtype {tokens.dtype}, need int32 or int64")


def readable(*tensors: Tensor) -> bool:
    """Whether there are values to look at: not on meta, and not in a subclass that computes in its own way
    (FakeTensor, DTensor)."""
    return not any(map(without_values, tensors))


def call_of(op: str, argument: str, tokens: Tensor, vocab_size: int, ignore_index: int | None) -> Call:
    """The call as seen by the first caller outside flashlin and torch."""
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
    """The user's line that is being traced, for want of a stack at run time."""
    for frame in reversed(torch._guards.TracingContext.extract_stack()):
        if not frame.filename.startswith(_INSIDE):
            return f"at {frame.filename}:{frame.lineno} in {frame.name}, compiled"
    return "in compiled code"


# torch.compiler.assume_constant_result does just this, after loading the whole compiler, which eager calls do
# not need.
traced_place._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch sets it on any function

_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent.parent, Path(torch.__file__).parent))


def _unravelled(position: int, shape: tuple[int, ...]) -> str:
    """133 in [4, 64] -> `` = [2, 5]``; nothing where position says it all."""
    where = [position // math.prod(shape[axis + 1:]) % size for axis, size in enumerate(shape)]
    return f" = {shown(where)}" if len(where) > 1 else ""
