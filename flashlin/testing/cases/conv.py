"""Cases of the short convolution and the token shift.

They vary filter widths, channels, states and packed sequences, also with sequences shorter than the filter.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashlin
from flashlin.kernels.conv.reference import convolve, shift
from flashlin.testing.cases.inputs import Input, Maker
from flashlin.testing.cases.op import Op
from flashlin.testing.compare import Case

TOLERANCES = {"*": 0.005, "d*": 0.008, "dweight": 0.02, "dbias": 0.02}
# B, T, C, W: batch, tokens, channels, filter width. of: x has C * of columns, and the op gets a slice of it,
# the first C columns. others: dtype of all tensors except x.
OTHERS = {"bias": Input("C", dtype="others", when="given"),
          "residual": Input("B T C", dtype="others", when="given"),
          "initial_state": Input("N C W", dtype="others", when="given")}
FACTS = {"B": 2, "T": 70, "C": 48, "W": 4, "of": 1, "others": "same"}
_make = Maker({"x": Input("B T C*of"), "weight": Input("C W", dtype="others"), **OTHERS}, FACTS)
_make_update = Maker({"x": Input("B C*of"), "weight": Input("C W", dtype="others"), "bias": OTHERS["bias"],
                      "residual": Input("B C", dtype="others", when="given"),
                      "cache": Input("N C W", dtype="others")}, FACTS)
_make_shift = Maker({"x": Input("B T C*of"), "cache": Input("N C", dtype="others", when="given")}, FACTS)


def of_first_part(function: Callable[..., Any], x: Tensor, weight: Tensor, **given: Any) -> Any:
    """Call a function on the first `len(weight)` columns of x, one for each channel of the filter."""
    return function(x[..., :len(weight)], weight, **given)


def call_update(x: Tensor, cache: Tensor, **given: Any) -> tuple[Tensor, ...]:
    """Call causal_conv1d_update twice: without gradients (its kernel), then with them.

    Returns (y with gradients, y without, cache after the call without, cache after the call with).
    """
    window = cache.clone()
    with torch.no_grad():
        without, _ = flashlin.causal_conv1d_update(x, window, **given)
    with_, after = flashlin.causal_conv1d_update(x, cache.clone(), **given)
    return with_, without, window, after


def update_reference(x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None = None,
                     residual: Tensor | None = None, activation: str | None = None) -> tuple[Tensor, ...]:
    """Compute causal_conv1d_update in float64.

    Returns (y, y, cache, cache), because ``call_update`` runs the op twice, without and with gradients.
    """
    y, after = convolve(x[:, None], weight, bias, None if residual is None else residual[:, None], cache,
                        activation)
    return y[:, 0], y[:, 0].detach(), after.detach(), after.detach()


def of_shifted(function: Callable[..., Any], x: Tensor, cache: Tensor | None = None, **given: Any) -> Any:
    """Call a function on x or, with a cache of C channels, on the first C columns of x."""
    return function(x if cache is None else x[..., :cache.shape[-1]], cache=cache, **given)


_conv = Op("causal_conv1d", _make, partial(of_first_part, convolve), TOLERANCES,
           {"y": "B T C", "ht": "N C W"}, call=partial(of_first_part, flashlin.causal_conv1d))
_update = Op("causal_conv1d_update", _make_update, update_reference, TOLERANCES,
             ("y", "y_of_the_kernel", "cache", "cache_too"), {}, call_update, ("cache",))
_shift = Op("token_shift", _make_shift, partial(of_shifted, shift), TOLERANCES,
            {"y": "B T C", "last": "N C"}, {"output_cache": True}, partial(of_shifted, flashlin.token_shift))
SILU = {"activation": "silu"}
# Bounds of sequences that are empty, shorter than any filter, or several blocks long.
PACKED = (0, 1, 1, 3, 40, 41, 105, 107, 150)
CASES: list[Case] = [
    _conv("random", SILU, quick=True), _conv("packed", SILU, quick=True, edges=PACKED),
    _conv("linear", {"activation": None}), _conv("bare", given=()), _conv("bare-silu", SILU, given=()),
    _conv("bare-packed", SILU, edges=PACKED, given=()),
    _conv("packed-linear", edges=PACKED, given=("initial_state",)),
    _conv("no-bias", SILU, given=("residual",)), _conv("one-token", SILU, B=5, T=1),
    _conv("two-tokens", SILU, B=3, T=2), _conv("short-without-state", SILU, B=3, T=2, given=("bias",)),
    _conv("many-short", SILU, B=50, T=3, C=16), _conv("empty-sequences", SILU, edges=(0, 0, 0, 7, 7)),
    _conv("D=1", SILU, C=1), _conv("D=3", SILU, C=3), _conv("D=100", SILU, C=100),
    _conv("D=300", SILU, C=300, T=40), _conv("sliced", SILU, of=3),
    _conv("sliced-odd", SILU, C=20, of=2, edges=PACKED), _conv("one-row-of-many", SILU, B=3, T=1, of=2),
    _conv("fp32-others", SILU, others="float32"), _conv("long", SILU, T=1100, B=1, C=8),
    *(_conv(f"W={W}", SILU, W=W, C=20, T=40) for W in (1, 2, 3, 5, 7, 8, 16)),
    _conv("W=16-packed", SILU, W=16, C=20, edges=PACKED), _update("random", SILU, quick=True, B=5),
    _update("linear", B=5), _update("bare", SILU, given=(), B=1),
    _update("fp32-others", SILU, others="float32"), _update("D=300", SILU, C=300),
    *(_update(f"W={W}", SILU, W=W, C=20) for W in (1, 2, 3, 7, 16))]
CASES += [_shift("random", quick=True), _shift("packed", edges=PACKED), _shift("bare", given=()),
          _shift("bare-packed", given=(), edges=PACKED), _shift("one-token", B=3, T=1),
          _shift("empty-sequences", edges=(0, 0, 0, 7, 7)), _shift("many-short", B=50, T=3, C=16),
          _shift("fp32-cache", others="float32"), _shift("sliced", of=2, C=20), _shift("D=1", C=1),
          _shift("D=300", C=300)]
# This case has more blocks of rows than a large GPU runs programs at once. So each program sums the weight
# gradients of several blocks.
CASES += [_conv("many-blocks", SILU, B=1, T=1200, C=4096, given=("bias",))]
