"""Checks of the values of a call in debug mode.

``watched`` runs a call of a public function. It raises FloatingPointError at the first input, output or
gradient that is not finite, and warns if the inputs make the state of the op grow without bound. Each check
reads values, so it waits for the GPU. Outside debug mode nothing here runs.
"""
from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashlin.guards.tensors import without_values
from flashlin.kernels.families import PUBLIC, family_of
from flashlin.ops._common.casting import name_of

DECAYING = ("simple_gla", "delta", "recurrent", "gla", "dplr", "hgrn")  # families with log decays
DECAYS = ("g", "gk", "gv", "w", "g_gamma", "ADT")
INFINITE = (*DECAYS, "logits")  # -inf is valid: it forgets everything, or masks a token
SLACK = 0.05  # by rounding to 16 bits, a key of length 1 and a rate of 2 may be larger by this
STATES = ("initial_state", "initial_states", "state", "final state")
BY_CHANNEL = ("conv_window", "selective")  # families with the layout [B, D, T]
UPSTREAM = "the layer or the parameter that made it went wrong first"
NARROW = "the incoming gradient is finite; clip the inputs, or compute this layer in float32"
LATER = ("a later layer or the loss made it. A GradScaler makes inf on purpose; in debug mode, lower its "
         "init_scale")
R = TypeVar("R")


class NumericsWarning(RuntimeWarning):
    """The inputs of a call can make its state grow without bound."""


class _Own(threading.local):
    """The state of one thread.

    busy: a call is being watched, so the calls within it are not.
    layer: the layer of the model that runs, for messages; ``flashlin.doctor`` sets it.
    """
    busy = False
    layer = ""


own = _Own()


def watched(function: Callable[..., R], run: Callable[..., R], args: Any, kwargs: Any) -> R:
    """Return ``run(*args, **kwargs)`` after checks of its inputs, and check its outputs and gradients.

    function: the undecorated public function; run: the same function with its decorator.

    Raises FloatingPointError if an input (except -inf as a log decay), an output or, in backward, a gradient
    is not finite. The message names the op, the tensor, the first such place and the next step. Warns with
    NumericsWarning about inputs with which the state grows. A call that is captured in a CUDA graph is not
    checked, because its values do not exist yet.
    """
    own.busy = True
    try:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return run(*args, **kwargs)
        try:
            given = inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            return run(*args, **kwargs)  # raises a better message
        op = function.__name__
        called = f"{op} in layer {own.layer}" if own.layer else op
        inputs = dict(_readable(given.arguments.items()))
        for name, x in inputs.items():
            _check(op, called, name, f"input {name}", UPSTREAM, x)
        growth = [*_growing(op, given.arguments)] if op in PUBLIC else []
        for said in growth:
            warnings.warn(f"{called}: {said}", NumericsWarning, stacklevel=3)
        for name, x in inputs.items() if torch.is_grad_enabled() else ():
            if x.requires_grad:  # an alias receives the gradient of this call alone
                given.arguments[name] = _hooked(x.view_as(x), op, called, name, f"gradient of {name}", NARROW)
        made = run(*given.args, **given.kwargs)
        outputs = made if isinstance(made, (tuple, list)) else (made,)
        second = "final state" if "output_final_state" in given.signature.parameters else "output 2"
        names = ("output", second, *map("output {}".format, range(3, len(outputs) + 1)))
        for name, y in _readable(zip(names, outputs, strict=False)):
            _check(op, called, name, name, "; ".join(growth) or _too_large(inputs), y)
            if y.requires_grad and y.grad_fn is not None:
                _hooked(y, op, called, name, f"gradient that arrives at the {name}", LATER)
        return made
    finally:
        own.busy = False


def _hooked(x: Any, *about: Any) -> Tensor:
    """Call ``_check`` on the gradient of x in backward, and return x."""
    x.register_hook(partial(_check, *about))
    return x  # type: ignore[no-any-return]


def _readable(items: Any) -> Iterator[tuple[str, Tensor]]:
    for name, x in list(items):
        if isinstance(x, Tensor) and x.is_floating_point() and not without_values(x):
            yield name, x


def _check(op: str, called: str, name: str, what: str, why: str, x: Tensor | None) -> None:
    """Raise FloatingPointError if x has a value that is not finite; -inf is valid for some inputs.

    x: a tensor, or None for the gradient of an output that the loss does not use.
    """
    if x is None or without_values(x):
        return
    x = x.detach()
    wrong = ~torch.isfinite(x)
    if what.startswith("input") and name in INFINITE:
        wrong &= x != -torch.inf
    if wrong.any():
        raise FloatingPointError(
            f"{called}: the {what} is {x[wrong][0].item()} at {_at(op, name, wrong)}, and not finite in "
            f"{int(wrong.sum())} of {x.numel()} values ({name_of(x.dtype)}, {list(x.shape)}): {why}")


def _at(op: str, name: str, wrong: Tensor) -> str:
    """Return the first true index in words: batch, token, head and channel where the layout has them."""
    index, family = wrong.nonzero()[0].tolist(), family_of(op) if op in PUBLIC else None
    last = "head" if family and family.head_dim else "channel"
    words: tuple[str, ...] = ()
    if family and name in STATES:
        words = ("sequence", last)
    elif family and (family.name in BY_CHANNEL or op == "causal_conv1d_fn"):
        words = ("batch", "channel", "token")
    elif name in ("ADT", "DT", "Trap"):
        words = ("batch", "head", "token")
    elif family and family.name in (*DECAYING, "conv") and len(index) > 2:
        words = ("batch", "token", last, "channel")
    return ", ".join(f"{word} {number}" for word, number in zip(words, index, strict=False)) or f"index {index}"


def _too_large(inputs: Mapping[str, Tensor]) -> str:
    size, name, dtype = max((float(x.detach().nan_to_num(neginf=0).abs().max()), name, x.dtype)
                            for name, x in inputs.items() if x.numel())
    return (f"its inputs are finite, the largest is {size:.3g} in {name}, and {name_of(dtype)} ends at "
            f"{torch.finfo(dtype).max:.3g}; scale the inputs down, or use bfloat16 instead of float16")


def _growing(op: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each input with which the state of the op can grow without bound."""
    family, x = family_of(op).name, {name: y.detach() for name, y in _readable(given.items()) if y.numel()}

    def told(name: str, values: Tensor, number: Tensor) -> str:
        return f"got {name} of {number.item():.3g} at {_at(op, name, values == number)}"
    for name in DECAYS if family in DECAYING and not given.get("use_gate_in_kernel") else ():
        if name not in x or (name == "w" and "r" not in given):
            continue
        g = x[name]
        least, most = g.aminmax()
        bound = given.get("lower_bound") or -5.0
        if most > 1e-6:
            yield (f"{told(name, g, most)}, need log decays of at most 0, as F.logsigmoid(gate) or -exp(A_log) "
                   "* softplus(gate + dt_bias); positive ones make the state grow without bound")
        if g.dtype.itemsize == 2 and least == -torch.inf:
            yield f"{told(name, g, least)}: the gate left {name_of(g.dtype)}'s range; compute it in float32"
        if given.get("safe_gate") and least < bound * (1 + SLACK):
            yield (f"{told(name, g, least)} with safe_gate, which promises at least {bound:g}; clamp the gate, "
                   "or leave safe_gate out")
    for name, limit, need in (
            ("A_log", 88.0, "at most 88, because exp(A_log) leaves float32"),
            ("A", 0.0, "rates below 0, as -exp(A_log)"),
            ("beta", torch.inf if given.get("use_beta_sigmoid_in_kernel") else 2 + SLACK,
             "at most 2 (1 without negative eigenvalues); apply sigmoid, or pass "
             "use_beta_sigmoid_in_kernel=True where the op has it")):
        if name in x and x[name].max() > limit:
            yield f"{told(name, x[name], x[name].max())}, need {need}"
    if family not in ("delta", "recurrent", "dplr"):
        return
    # A token multiplies the state along its key by 1 - rate, and the state grows if the rate is below 0 or
    # above 2. The rate is beta |k|^2, or -a b if these vectors are given.
    if "k" in x and "beta" in given and not given.get("use_qk_l2norm_in_kernel"):
        length = x["k"].float().norm(dim=-1)
        beta = x.get("beta", torch.ones_like(length)).float()
        if given.get("use_beta_sigmoid_in_kernel"):
            beta = beta.sigmoid() * (2 if given.get("allow_neg_eigval") else 1)
        beta = beta.amax(-1) if beta.dim() > 3 else beta
        length = length.repeat_interleave(beta.shape[2] // length.shape[2], 2)
        rate = beta * length ** 2
        worst = rate == rate.max()
        if length.max() > 1 + SLACK and rate.max() > 2 + SLACK:
            yield (f"got k of length {length[worst][0].item():.3g} at {_at(op, 'beta', worst)}, need length 1:"
                   f" a rate beta |k|^2 of {rate.max().item():.3g}, above 2, makes the state grow without "
                   "bound; pass use_qk_l2norm_in_kernel=True, or F.normalize(k, dim=-1)")
    elif "a" in x and "b" in x and "kk" not in x:
        product = (x["a"].float() * x["b"].float()).sum(-1)
        least, most = product.aminmax()
        if most > SLACK or least < -2 - SLACK:
            number = most if most > SLACK else least
            yield (f"got a and b with a scalar product of {number.item():.3g} at "
                   f"{_at(op, 'beta', product == number)}, need -2 to 0, as a = -key and b = key * rate with "
                   "keys of length 1; otherwise the state grows without bound")
