"""Replacements for the extensions ``selective_scan_cuda`` and ``causal_conv1d_cuda``.

Python files of mamba_ssm and causal_conv1d call them below their public functions. Arguments and results
equal those in the extensions. Nothing here is differentiable, since the callers have backward functions of
their own.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import mamba
from flashlin.kernels.sequences import wide


@torch.no_grad()
def fwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        delta_bias: Tensor | None, delta_softplus: bool) -> list[Tensor]:
    """Compute ``selective_scan_cuda.fwd`` on tensors as in ``selective_scan_fn``.

    Return y before its gate [b, D, T], the kept states [b, D, 1, 2 N] and, if z is given, y after its gate.
    Every second column of the kept states has the last state, which callers read. The other columns, which
    only the extension's backward reads, are zeros.
    """
    y, last = mamba.selective_scan_fn(u, delta, A, B, C, D, None, delta_bias, delta_softplus,
                                      return_last_state=True)
    kept = torch.stack([torch.zeros_like(last), last], -1).flatten(-2)[:, :, None]
    if z is None:
        return [y, kept]
    wide_y, wide_z = wide(y, z)
    return [y, kept, (wide_y * F.silu(wide_z)).to(y.dtype)]


def bwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        delta_bias: Tensor | None, dout: Tensor, x: Tensor, out: Tensor | None, dz: Tensor | None,
        delta_softplus: bool, recompute_out_z: bool) -> list[Tensor | None]:
    """Compute ``selective_scan_cuda.bwd``.

    Return the gradients of u, delta, A, B, C, D and delta_bias. If z is given, its gradient follows and is
    also written to dz, unless dz is None. With ``recompute_out_z``, y after the gate follows. x and out,
    which forward kept, are not read: forward runs again.
    """
    given = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "delta_bias": delta_bias}
    (y,), grads = _pulled_back(
        lambda **leaves: [mamba.selective_scan_fn(**leaves, delta_softplus=delta_softplus)],
        {**given, "z": z}, [dout])
    found = [grads.get(name) for name in given]
    if z is None:
        return found
    found.append(_written(dz, grads["z"]))
    return [*found, y] if recompute_out_z else found


@torch.no_grad()
def causal_conv1d_fwd_function(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None,
                               initial_states: Tensor | None, final_states_out: Tensor | None,
                               silu_activation: bool) -> Tensor:
    """Return y [b, D, T] for tensors as in ``causal_conv1d_fn``.

    final_states_out [b, D, W - 1] is written to, unless it is None.
    """
    y = mamba.causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, final_states_out is not None,
                               final_states_out, "silu" if silu_activation else None)
    return y if isinstance(y, Tensor) else y[0]


def causal_conv1d_bwd_function(x: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor,
                               seq_idx: Tensor | None, initial_states: Tensor | None,
                               dfinal_states: Tensor | None, dx: Tensor | None, return_dinitial_states: bool,
                               silu_activation: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and initial_states.

    The gradient of x is also written to dx, unless dx is None.
    """
    given = {"x": x, "weight": weight, "bias": bias,
             "initial_states": initial_states if return_dinitial_states else None}

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                 initial_states: Tensor | None = initial_states) -> list[Tensor]:
        found = mamba.causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, dfinal_states is not None,
                                       activation="silu" if silu_activation else None)
        return [found] if isinstance(found, Tensor) else list(found)
    _, grads = _pulled_back(convolve, given, [dout, dfinal_states][:1 + (dfinal_states is not None)])
    return _written(dx, grads["x"]), grads["weight"], grads.get("bias"), grads.get("initial_states")


@torch.no_grad()
def causal_conv1d_update_function(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None,
                                  silu_activation: bool, cache_seqlens: Tensor | None,
                                  conv_state_indices: Tensor | None) -> Tensor:
    """Return y for x [b, D, T], and update conv_state [b, D, L] in place."""
    return mamba.causal_conv1d_update(x, conv_state, weight, bias, "silu" if silu_activation else None,
                                      cache_seqlens, conv_state_indices)


def _written(out: Tensor | None, gradient: Tensor) -> Tensor:
    """Return the gradient, written into ``out`` unless ``out`` is None."""
    return gradient if out is None else out.copy_(gradient)


def _pulled_back(function: Callable[..., list[Tensor]], given: dict[str, Tensor | None],
                 grads: Sequence[Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the outputs of a function, and the gradients of its given tensors by name.

    given: tensors by the name of the argument; None is not passed.
    grads: gradients of the outputs.
    """
    with torch.enable_grad():
        leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
        outputs = function(**leaves)
        found = torch.autograd.grad(outputs, list(leaves.values()), list(grads))
    return [y.detach() for y in outputs], dict(zip(leaves, found, strict=True))
