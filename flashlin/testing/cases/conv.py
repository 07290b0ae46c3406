"""Cases of the short convolution: widths, channels, states, packed sequences, and sequences shorter than the
filter."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import flashlin
from flashlin.kernels.conv.reference import convolve, shift
from flashlin.testing.compare import Case, Tensors

TOLERANCES = {"*": 0.005, "d*": 0.008, "dweight": 0.02, "dbias": 0.02}
EVERYTHING = ("bias", "residual", "initial_state")


def make(
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    B: int = 2,
    T: int = 70,
    D: int = 48,
    W: int = 4,
    given: tuple[str, ...] = EVERYTHING,
    edges: tuple[int, ...] = (),
    others: str = "same",
    of: int = 1,
) -> Tensors:
    """given: the optional tensors. others: dtype of all but x, ``same`` for x's. of: x is what lies first in
    rows of so many."""
    def randn(name: str, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes,
                           generator=generator).to(dtype if name == "same"
                                                   else getattr(torch, name)).to(device)
    if edges:
        B, T = 1, edges[-1]
    N = len(edges) - 1 if edges else B
    made = {"x": randn("same", B, T, D * of), "weight": randn(others, D, W)}
    for name, sizes in (("bias", (D,)), ("residual", (B, T, D)), ("initial_state", (N, D, W))):
        if name in given:
            made[name] = randn(others, *sizes)
    if edges:
        made["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32, device=device)
    return made


def call(extra: dict[str, Any], D: int, x: torch.Tensor, **tensors: torch.Tensor) -> Tensors:
    function: Callable[..., Any] = flashlin.causal_conv1d
    y, ht = function(x[..., :D], **tensors, **extra, output_final_state=True)
    return {"y": y, "ht": ht}


def reference(extra: dict[str, Any], D: int, x: torch.Tensor, **tensors: torch.Tensor) -> Tensors:
    y, ht = convolve(x[..., :D], **tensors, silu=extra.get("activation") is not None)
    return {"y": y, "ht": ht}


def call_update(extra: dict[str, Any], x: torch.Tensor, cache: torch.Tensor,
                **tensors: torch.Tensor) -> Tensors:
    """Two calls, without gradients (the second is the kernel's), and with them where there are any to
    compute."""
    function: Callable[..., Any] = flashlin.causal_conv1d_update
    window = cache.clone()
    with torch.no_grad():
        without, _ = function(x, window, **tensors, **extra)
    with_, after = function(x, cache.clone(), **tensors, **extra)
    return {"y": with_, "y_of_the_kernel": without, "cache": window, "cache_too": after}


def update_reference(extra: dict[str, Any], x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor,
                     bias: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> Tensors:
    y, after = convolve(x[:, None], weight, bias, None if residual is None else residual[:, None], cache,
                        extra.get("activation") is not None)
    return {"y": y[:, 0], "y_of_the_kernel": y[:, 0].detach(), "cache": after.detach(),
            "cache_too": after.detach()}


def make_update(device: torch.device, dtype: torch.dtype, generator: torch.Generator, *,
                given: tuple[str, ...] = EVERYTHING, **facts: Any) -> Tensors:
    made = make(device, dtype, generator, T=1, given=(*given, "initial_state"), **facts)
    for name in ("x", "residual"):
        if name in made:
            made[name] = made[name][:, 0]
    made["cache"] = made.pop("initial_state")
    return made


def make_shift(device: torch.device, dtype: torch.dtype, generator: torch.Generator, *, others: str = "same",
               cached: bool = True, **facts: Any) -> Tensors:
    made = make(device, dtype, generator, W=1, given=("initial_state",) if cached else (), others=others,
                **facts)
    del made["weight"]
    if cached:
        made["cache"] = made.pop("initial_state")[..., 0].contiguous()
    return made


def call_shift(D: int, x: torch.Tensor, **tensors: torch.Tensor) -> Tensors:
    function: Callable[..., Any] = flashlin.token_shift
    y, last = function(x[..., :D], **tensors, output_cache=True)
    return {"y": y, "last": last}


def shift_reference(D: int, x: torch.Tensor, **tensors: torch.Tensor) -> Tensors:
    y, last = shift(x[..., :D], **tensors)
    return {"y": y, "last": last}


def _shift(name: str, quick: bool = False, **facts: Any) -> Case:
    D = facts.get("D", 48)
    return Case("token_shift", name, partial(make_shift, **facts), partial(call_shift, D),
                partial(shift_reference, D), TOLERANCES, (), quick)


def _case(name: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    given, D = extra or {}, facts.get("D", 48)
    return Case("causal_conv1d", name, partial(make, **facts), partial(call, given, D),
                partial(reference, given, D), TOLERANCES, (), quick)


def _update(name: str, extra: dict[str, Any] | None = None, quick: bool = False, **facts: Any) -> Case:
    given = extra or {}
    return Case("causal_conv1d_update", name, partial(make_update, **facts), partial(call_update, given),
                partial(update_reference, given), TOLERANCES, ("cache",), quick)


SILU = {"activation": "silu"}
# empty ones, ones shorter than any filter, ones of several blocks
PACKED = (0, 1, 1, 3, 40, 41, 105, 107, 150)
CASES: list[Case] = [
    _case("random", SILU, quick=True), _case("packed", SILU, quick=True, edges=PACKED),
    _case("linear", {"activation": None}), _case("bare", given=()), _case("bare-silu", SILU, given=()),
    _case("bare-packed", SILU, edges=PACKED, given=()),
    _case("packed-linear", edges=PACKED, given=("initial_state",)),
    _case("no-bias", SILU, given=("residual",)), _case("one-token", SILU, B=5, T=1),
    _case("two-tokens", SILU, B=3, T=2), _case("short-without-state", SILU, B=3, T=2, given=("bias",)),
    _case("many-short", SILU, B=50, T=3, D=16), _case("empty-sequences", SILU, edges=(0, 0, 0, 7, 7)),
    _case("D=1", SILU, D=1), _case("D=3", SILU, D=3), _case("D=100", SILU, D=100),
    _case("D=300", SILU, D=300, T=40), _case("sliced", SILU, of=3),
    _case("sliced-odd", SILU, D=20, of=2, edges=PACKED), _case("one-row-of-many", SILU, B=3, T=1, of=2),
    _case("fp32-others", SILU, others="float32"), _case("long", SILU, T=1100, B=1, D=8),
    *(_case(f"W={W}", SILU, W=W, D=20, T=40) for W in (1, 2, 3, 5, 7, 8, 16)),
    _case("W=16-packed", SILU, W=16, D=20, edges=PACKED), _update("random", SILU, quick=True, B=5),
    _update("linear", B=5), _update("bare", SILU, given=(), B=1),
    _update("fp32-others", SILU, others="float32"), _update("D=300", SILU, D=300),
    *(_update(f"W={W}", SILU, W=W, D=20) for W in (1, 2, 3, 7, 16))]
CASES += [_shift("random", True), _shift("packed", edges=PACKED), _shift("bare", cached=False),
          _shift("bare-packed", cached=False, edges=PACKED), _shift("one-token", B=3, T=1),
          _shift("empty-sequences", edges=(0, 0, 0, 7, 7)), _shift("many-short", B=50, T=3, D=16),
          _shift("fp32-cache", others="float32"), _shift("sliced", of=2, D=20), _shift("D=1", D=1),
          _shift("D=300", D=300)]
# More blocks of rows than a large card has programs to share out the gradients of weight and bias.
CASES += [_case("many-blocks", SILU, B=1, T=1200, D=4096, given=("bias",))]
