"""Find the packed documents of a row from the arguments of a model, and pass them to its layers.

Trainers pack several documents into a row. Some mark the documents by ``cu_seq_lens_q`` (bounds, for flash
attention) or ``seq_idx`` (the document of each token). Others use ``position_ids`` that begin again, or an
``attention_mask`` (document numbers [B, T], or a block mask [B, 1, T, T]). Recurrent layers need one of the
first two, and many models pass neither to them.

``watched`` wraps the forward of a model. It turns the marks into one ``seq_idx`` [B, T] and passes this to
the layers. It uses only tensor operations that torch.compile can trace. A call waits for the GPU only if it
has an integer mask and no positions, or before a warning. ``masking`` wraps the functions that make attention
masks, so attention layers keep the same documents apart. Functions that mix documents report this, and each
model gives one warning.
"""
from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashlin.compat.tracing import transient
from flashlin.ops._common.pipeline import constant_while_tracing

MARKS = ("cu_seq_lens_q", "seq_idx")
Tokens = tuple[int, int] | None  # [B, T] of a call
CACHES = ("cache", "past_key_values", "cache_params")  # since transformers 5.24 all models use the first
APART = "Give it a document a row, padded. It is so with every kernel."
UNSEEN = -80.0  # an additive mask at or below this gives a weight of 0 in float32


@dataclass
class Call:
    """One call of a model.

    model: name of the model's class.
    given: the argument that marks documents, or "".
    marks: the documents, as keywords for the models that this model contains.
    several: True if a row has more than one document. It may first be a tensor [B, T - 1] that is True where
        a document begins. That tensor is read only when a warning depends on it.
    by_padding: True if the mark is a mask [B, T] that may mark nothing but padding.
    tokens: [B, T] of the call.
    fresh: True if the caller gives no cache.
    goes_on: True if several tokens follow a cached state.
    warn: a function that warns once for each model name.
    """
    model: str
    given: str
    marks: dict[str, Tensor]
    several: bool | Tensor
    by_padding: bool
    tokens: Tokens
    fresh: bool
    goes_on: bool
    warn: Callable[[str, str], None]


class _Calls(threading.local):
    now: Call | None = None


_CALLS = _Calls()


def watched(forward: Callable[..., Any], *, by_seq_idx: bool, said: set[str], mixes: str = "",
            but_flash: bool = False) -> Callable[..., Any]:
    """Return ``forward`` of a model's class, wrapped to find marked documents first.

    by_seq_idx: True if its layers keep documents apart by seq_idx. They then get a seq_idx, even if the model
        around them has dropped the keyword.
    said: names of the models that have been warned about.
    mixes: the reason why the model mixes documents, whatever marks them; ``""`` if it does not. One warning
        states this reason.
    but_flash: True if ``mixes`` does not apply when the model uses flash attention.
    """
    parameters = inspect.signature(forward).parameters.values()
    takes_more = by_seq_idx and any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD][1:]
    warn = once(said)

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        if len(args) > len(names) or any(name in given for name in names[:len(args)]):
            return forward(self, *args, **given)  # raises forward's own TypeError
        given = {**dict(zip(names, args, strict=False)), **given}
        around, tokens = _CALLS.now, _tokens(given)
        if around is not None:
            if takes_more and not _marks(given) and tokens == around.tokens:
                given = {**given, **around.marks}
            return forward(self, **given)
        now = _marked(type(self).__name__, given, tokens, warn)
        if not now.marks and not now.goes_on:
            return forward(self, **given)
        if mixes and now.marks and not (but_flash and "flash" in str(self.config._attn_implementation)):
            _leaks(now, mixes)
        _CALLS.now = now
        try:
            return forward(self, **_with_marks(given, now, takes_more))
        finally:
            _CALLS.now = None
    return call


def _marked(model: str, given: dict[str, Any], tokens: Tokens, warn: Callable[[str, str], None]) -> Call:
    """Return the Call for a model that is called with these keywords."""
    marks = _marks(given)
    several, name = bool(marks), next(iter(marks), "")
    if marks and "seq_idx" not in marks and tokens is not None:  # some layers read only seq_idx
        seq_idx = seq_idx_of(*tokens, None, marks["cu_seq_lens_q"])
        marks = marks if seq_idx is None else {**marks, "seq_idx": seq_idx}
    fresh = all(given.get(one) is None for one in CACHES)
    begins = None if marks else _beginnings(given, tokens, fresh)
    by_padding = begins is not None and given.get("position_ids") is None and _padding(given) is not None
    if begins is not None and tokens is not None:
        name = "attention_mask" if given.get("position_ids") is None else "position_ids"
        number = torch.nn.functional.pad(begins, (1, 0)).cumsum(1, dtype=torch.int32)
        marks = {"seq_idx": number.expand(tokens[0], -1)}
    goes_on = not fresh and not torch.compiler.is_compiling() and _goes_on(given, tokens)
    return Call(model, name, marks, several if begins is None else begins, by_padding, tokens, fresh, goes_on,
                warn)


def _with_marks(given: dict[str, Any], call: Call, takes_more: bool) -> dict[str, Any]:
    """Return the keywords to pass to the wrapped model, with the document marks if it accepts them.

    A mask of document numbers is replaced by a mask of ones and zeros, because layers multiply their inputs
    by the mask.
    """
    if takes_more:
        given = {**given, **call.marks}
    if (mask := _padding(given)) is not None and mask.dtype is not torch.bool and call.marks and call.fresh:
        given = {**given, "attention_mask": (mask != 0).to(mask.dtype)}
    return given


def _marks(given: dict[str, Any]) -> dict[str, Tensor]:
    return {name: given[name] for name in MARKS if given.get(name) is not None}


def _tokens(given: dict[str, Any]) -> Tokens:
    """Return (B, T) of the tokens or embeddings of a call, or None if it has neither in this shape."""
    tokens = next((one for one in (given.get("input_ids"), given.get("inputs_embeds"))
                   if isinstance(one, Tensor)), None)
    return None if tokens is None or tokens.ndim < 2 else (tokens.shape[0], tokens.shape[1])


def _padding(given: dict[str, Any]) -> Tensor | None:
    """Return the padding mask of a call, or None. It is [B, T], or longer if it also covers cached tokens."""
    mask = given.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _beginnings(given: dict[str, Any], tokens: Tokens, fresh: bool) -> Tensor | None:
    """Return a tensor [B or 1, T - 1] that is True where a token begins a new document; None without marks.

    Padding begins no document, nor does the first token after left padding. With a cache, a mask marks
    padding, and positions begin again after it. So with a cache, positions are read only if there is no mask.

    An integer mask without positions may number documents or mark padding. Only in this case, values are read
    from the device, if they can be read. That adds little, since transformers reads the mask in each call.
    """
    if tokens is None or tokens[1] < 2:
        return None
    T = tokens[1]
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim not in (2, 3) or positions.shape[-1] != T:
        positions = None
    if mask is not None and not fresh:
        return None
    if isinstance(mask, dict):  # the caller made one mask for each kind of layer
        mask = next((one for one in mask.values() if isinstance(one, Tensor) and one.ndim == 4), None)
    begins, real = None, None
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-2:] == (T, T):
        real = _visible(mask[:, 0].diagonal(0, 1, 2))
        begins = ~_visible(mask[:, 0].diagonal(-1, 1, 2))
    elif (padding := _padding(given)) is not None and padding.shape[1] >= T:
        padding = padding[:, -T:]
        if positions is None and (padding.dtype is torch.bool
                                  or (_readable(padding) and not bool((padding > 1).any()))):
            return None
        real = padding != 0
        begins = padding[:, 1:] != _before(padding, real)
    if positions is not None:
        restarts = _restarts(positions, real)
        begins = restarts if begins is None else begins | restarts
    if begins is None or real is None:
        return begins
    return begins & real[:, 1:] & (real[:, :-1].cumsum(1) > 0)


def _restarts(positions: Tensor, real: Tensor | None) -> Tensor:
    """Return True where a position begins again.

    A position begins again if it is not one more than the position of the token before. For a token after
    padding, it must also not be one more than that of the last token before the padding.

    positions: [B or 1, T], or [R, B, T] of models with images. With R = 4, row 0 has the text positions. With
        another R, a document begins where all rows are 0, because within an image rows repeat or jump.
    real: [B, T], True for tokens that are not padding, or None.
    """
    if positions.ndim == 3 and positions.shape[0] != 4:
        return (positions == 0).all(0)[:, 1:]
    text = positions[0] if positions.ndim == 3 else positions
    begins = text[:, 1:] - text[:, :-1] != 1
    return begins if real is None else begins & (text[:, 1:] - _before(text, real) != 1)


def _before(values: Tensor, real: Tensor) -> Tensor:
    """Return, for each token but the first, the value [B, T - 1] of the last real token before it."""
    at = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, at, 0).cummax(1).values[:, :-1]
    return values.expand(real.shape[0], -1).gather(1, last)


def _visible(mask: Tensor) -> Tensor:
    """Return True where a mask lets one token see another.

    In a mask of booleans or integers, that is a nonzero value. In an additive mask, it is a value above
    ``UNSEEN``.
    """
    return mask > UNSEEN if mask.is_floating_point() else mask != 0


def _readable(x: Tensor) -> bool:
    """Return True if values of a tensor may be read now."""
    in_functorch = torch._C._functorch.peek_interpreter_stack() is not None
    return not (transient() or in_functorch or x.device.type == "meta"
                or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


def _goes_on(given: dict[str, Any], tokens: Tokens) -> bool:
    """Return True if several tokens come after a cached state."""
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    if cache is None or tokens is None or tokens[1] == 1:
        return False
    has = getattr(cache, "has_previous_state", False)
    return bool(has() if callable(has) else has)


def masking(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of transformers that makes attention masks, wrapped to use the documents of the call.

    ``watched`` has found the documents. transformers finds documents by position_ids only if there is neither
    a mask nor a cache. So the function gets no mask and no cache, but positions that begin again at each
    document and at padding. Padding is then separated like a document, without the mask.
    """
    names = list(inspect.signature(create).parameters)

    @functools.wraps(create)
    def made(*args: Any, **given: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **given}
        call, mask = _CALLS.now, given.get("attention_mask")
        embeddings = given.get("inputs_embeds", given.get("input_embeds"))
        if (call is None or call.tokens is None or not call.marks or not isinstance(embeddings, Tensor)
                or tuple(embeddings.shape[:2]) != call.tokens
                or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2))):
            return create(**given)
        (rows, tokens), seq_idx = call.tokens, call.marks.get("seq_idx")
        if "flash" in str(given["config"]._attn_implementation):
            found = create(**given)
            if found is not None or (rows > 1 and "cu_seq_lens_q" not in call.marks):
                _leaks(call, "flash attention separates documents only in one row without an attention_mask, or "
                             "by cu_seq_lens_q")
            return found
        if not call.fresh:
            _leaks(call, "its attention looks across documents if there is a cache")
        if seq_idx is None or not call.fresh:
            return create(**given)
        begins = seq_idx[:, 1:] != seq_idx[:, :-1]
        if mask is not None:
            real = mask[:, -tokens:] != 0
            begins = begins | (real[:, 1:] != real[:, :-1])
        at = torch.arange(tokens, device=begins.device)
        positions = at - torch.where(torch.nn.functional.pad(begins, (1, 0)), at, 0).cummax(1).values
        return create(**{**given, "attention_mask": None, "position_ids": positions,
                         **{name: None for name in CACHES if name in given}})
    return made


def told(function: str, marked: bool) -> None:
    """Warn once if the caller marked documents, but the model calls a function without the marks.

    function: the name of a function that mixes tokens.
    marked: True if the function was given the documents.
    """
    if (call := _CALLS.now) is not None and call.given and not marked:
        _leaks(call, f"its layers call {function} without: documents of one row run into each other")


def state_dropped(function: str) -> None:
    """Warn once if a function starts from a zero state although the cache of its model has a state.

    function: the name of a function that processes many tokens.
    """
    if (call := _CALLS.now) is not None and call.goes_on:
        call.warn(call.model, f"{call.model} got several tokens after a cached state, and its layers call "
                              f"{function} without that state: earlier tokens are forgotten. Give it all tokens "
                              "at once, or one at a time. This happens with every kernel.")


def _leaks(call: Call, why: str) -> None:
    """Warn once that a model mixes documents, if a row has several.

    Under torch.compile, for example, the number of documents cannot be read. Then warn as well, unless the
    mark is a mask that most likely marks padding.
    """
    got = f"{call.model} got {call.given}"
    if isinstance(call.several, Tensor):
        if not _readable(call.several):
            if not call.by_padding:
                call.warn(call.model, f"{got} where its values cannot be read, as under torch.compile. If a "
                                      f"row holds several documents: {why}. {APART}")
            return
        call.several = bool(call.several.any())
    if call.several:
        call.warn(call.model, f"{got}, and {why}. {APART}")


def once(said: set[str]) -> Callable[[str, str], None]:
    """Return a function that warns once for each model.

    While torch.compile traces, it runs as plain Python, so a compiled model also warns.
    """
    def warn(model: str, sentence: str) -> None:
        if model not in said:
            said.add(model)
            warnings.warn(sentence, RuntimeWarning, stacklevel=3)
    return constant_while_tracing(warn)  # type: ignore[no-any-return]


def seq_idx_of(rows: int, tokens: int, seq_idx: Tensor | None, bounds: Tensor | None) -> Tensor | None:
    """Return the documents of tokens as seq_idx [rows, tokens], from a seq_idx or the bounds of one row.

    rows, tokens: shape of the input.
    seq_idx: document of each token, or None. If a cache has put tokens before the row, these belong to the
        first document of the row.
    bounds: cu_seqlens of one row, or None.
    """
    if seq_idx is None and bounds is not None and rows == 1:
        at = torch.arange(tokens, device=bounds.device, dtype=bounds.dtype)
        return torch.searchsorted(bounds[1:].contiguous(), at, right=True, out_int32=True)[None]
    if seq_idx is not None and (missing := tokens - seq_idx.shape[1]) > 0:
        return torch.cat([seq_idx[:, :1].expand(-1, missing), seq_idx], 1)
    return seq_idx


def forgetting(decay: Tensor, seq_idx: Tensor) -> Tensor:
    """Return the decay [B, T, ...] (natural logs) with -inf where a document begins.

    There the state is forgotten. Nothing is read from the device.
    """
    new = torch.nn.functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    return decay.masked_fill(new.view(*new.shape, *[1] * (decay.ndim - 2)), -torch.inf)
