"""Where documents begin in rows that hold several: what models say of it, and who is not told.

Trainers pack documents into rows and tell the model by one of three arguments: ``cu_seq_lens_q`` (bounds, for
flash attention), ``seq_idx`` (each token's document), or ``position_ids`` that begin again at 0. Attention
looks at the third; recurrent layers need one of the first two, and some are told nothing.
"""
from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MARKS = ("cu_seq_lens_q", "seq_idx")
CACHES = ("cache", "past_key_values", "cache_params")  # from 5.24 on all models have the first
APART = "Give it a document a row, padded. It is so with every kernel."


class Call(NamedTuple):
    """A call of a model. given: what says where documents begin, or "". marks: that, as keywords for the
    models inside. tokens: [B, T] of the call. goes_on: several tokens after a state that is cached. said: the
    models that have been warned about."""
    model: str
    given: str
    marks: dict[str, Tensor]
    tokens: tuple[int, ...]
    goes_on: bool
    said: set[str]


class _Calls(threading.local):
    now: Call | None = None


_CALLS = _Calls()


def watched(forward: Callable[..., Any], *, by_seq_idx: bool, attends_across: bool,
            said: set[str]) -> Callable[..., Any]:
    """``forward`` of a model's class, which sees to it that recurrent layers are told where documents begin,
    and remembers what it was given for ``told`` and ``state_dropped``.

    by_seq_idx: its layers keep documents apart by seq_idx; then they get one where position_ids alone begin
    again, also where the model around it dropped the keyword. One read from the device for a call with
    position_ids and no mask; none under torch.compile, where the model is called as it is.
    attends_across: its attention mixes documents, unless it is flash attention.
    """
    takes_more = by_seq_idx and any(one.kind is one.VAR_KEYWORD
                                    for one in inspect.signature(forward).parameters.values())

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **given)
        around = _CALLS.now
        if around is not None:
            if takes_more and not _marks(given) and _tokens(args, given) == around.tokens:
                given = {**given, **around.marks}
            return forward(self, *args, **given)
        marks = _marks(given)
        name = next(iter(marks), "")
        if not marks and (seq_idx := _numbered(given, _tokens(args, given))) is not None:
            name, marks = "position_ids", {"seq_idx": seq_idx}
        goes_on = _goes_on(args, given)
        if not marks and not goes_on:
            return forward(self, *args, **given)
        now = Call(type(self).__name__, name, marks, _tokens(args, given), goes_on, said)
        if marks and attends_across and "flash" not in str(self.config._attn_implementation):
            _warn(now, f"got {name}, and its attention looks across documents, unless it is flash attention "
                       "with cu_seq_lens_q")
        _CALLS.now = now
        try:
            return forward(self, *args, **(given | marks if takes_more else given))
        finally:
            _CALLS.now = None
    return call


def mixing(forward: Callable[..., Any], model: str, why: str, said: set[str]) -> Callable[..., Any]:
    """``forward`` of a model of fla that mixes the documents of a row whatever it is told: given cu_seqlens,
    one warning for all classes of the ``model``."""
    @functools.wraps(forward)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        if given.get("cu_seqlens") is not None and not torch.compiler.is_compiling() and model not in said:
            said.add(model)
            warnings.warn(f"{type(self).__name__} got cu_seqlens, and {why}: documents of one row run into "
                          f"each other. {APART}", RuntimeWarning, stacklevel=2)
        return forward(self, *args, **given)
    return call


def _marks(given: dict[str, Any]) -> dict[str, Tensor]:
    return {name: given[name] for name in MARKS if given.get(name) is not None}


def _tokens(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[int, ...]:
    """[B, T] of a call."""
    tokens = next((one for one in (given.get("input_ids"), given.get("inputs_embeds"), *args[:1])
                   if isinstance(one, Tensor)), None)
    return () if tokens is None else tuple(tokens.shape[:2])


def _numbered(given: dict[str, Any], tokens: tuple[int, ...]) -> Tensor | None:
    """The document [B, T] of each token, where position_ids [B or 1, T] begin again within a row. With a mask
    they do so behind padding."""
    positions = given.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[1] < 2:
        return None
    if given.get("attention_mask") is not None:
        return None
    begins = positions == 0
    if not begins[:, 1:].any():
        return None
    return begins.cumsum(1, dtype=torch.int32).expand(*tokens[:1] or (-1,), -1)


def _goes_on(args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Whether several tokens come after a state that is cached."""
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    if cache is None or _tokens(args, given)[1:] in ((), (1,)):
        return False
    has = getattr(cache, "has_previous_state", False)
    return bool(has() if callable(has) else has)


def told(function: str, marked: bool) -> None:
    """A function that mixes tokens says whether it was told where documents begin. If its model was and it
    was not: one warning."""
    if torch.compiler.is_compiling():
        return
    call = _CALLS.now
    if call is not None and call.given and not marked:
        _warn(call, f"got {call.given}, and its layers call {function} without: documents of one row run "
                    "into each other. Give it a document a row, padded")


def state_dropped(function: str) -> None:
    """A function of many tokens begins at a state of zero. If its model has one in the cache: one warning."""
    if torch.compiler.is_compiling():
        return
    call = _CALLS.now
    if call is not None and call.goes_on:
        _warn(call, f"got several tokens after a cached state, and its layers call {function} without "
                    "it: what came before is forgotten. Give it all tokens at once, or one at a time")


def _warn(call: Call, sentence: str) -> None:
    if call.model not in call.said:
        call.said.add(call.model)
        warnings.warn(f"{call.model} {sentence}. It is so with every kernel.",
                      RuntimeWarning, stacklevel=2)


def seq_idx_of(rows: int, tokens: int, seq_idx: Tensor | None, bounds: Tensor | None) -> Tensor | None:
    """[rows, tokens] for the ops that take it, from seq_idx or, for one row, the bounds of its documents.
    Tokens that a cache has put before the row belong to its first document."""
    if seq_idx is None and bounds is not None and rows == 1:
        at = torch.arange(tokens, device=bounds.device, dtype=bounds.dtype)
        return torch.searchsorted(bounds[1:].contiguous(), at, right=True, out_int32=True)[None]
    if seq_idx is not None and (missing := tokens - seq_idx.shape[1]) > 0:
        return torch.cat([seq_idx[:, :1].expand(-1, missing), seq_idx], 1)
    return seq_idx


def forgetting(decay: Tensor, seq_idx: Tensor) -> Tensor:
    """decay [B, T, ...], natural logs, with -inf where a document begins within a row: there the state is
    forgotten. Nothing is read from the device."""
    new = torch.nn.functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    return decay.masked_fill(new.view(*new.shape, *[1] * (decay.ndim - 2)), -torch.inf)
