"""Mamba-3 with one input and one output a head (SISO), chunk by chunk; mirrors
``mamba_ssm.ops.triton.mamba3.mamba3_siso_combined``.

    theta_t = theta_{t-1} + pi tanh(Angles_t) DT_t
    q_t, k_t = Q_t + Q_bias, K_t + K_bias, turned by theta_t        r_t = sigmoid(Trap_t)
    S_t = e^{ADT_t} (S_{t-1} + (1 - r_t) DT_t v_{t-1} k_{t-1}^T) + r_t DT_t v_t k_t^T
    y_t = (S_t q_t + D v_t) silu(Z_t)
Source: Lahoti et al. 2026 (arXiv 2603.15569). Composed: all later tokens read k_j and v_j with one weight,
r_j DT_j + (1 - r_{j+1}) DT_{j+1}, times the decays since, so one scan of simple GLA (simple_gla.py) does, in
which every q comes a token earlier and finds what the token before has left; what it finds decays once more,
and its own k and v are read with r_t DT_t, where D and Z are read, too (kernels/pointwise). Angles are summed
and q and k turned by kernels/rotation.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import need_tensor, shareable, shown
from flashlin.kernels.rotation import torch_path
from flashlin.kernels.rotation.inputs import Inputs, Outputs
from flashlin.kernels.rotation.recipe import FAMILY
from flashlin.kernels.sequences import widest
from flashlin.ops import simple_gla
from flashlin.ops._common.arguments import check_optional, check_packed, check_rows
from flashlin.ops._common.casting import (
    as_planned,
    common_dtype,
    contiguous,
    dtype_as_planned,
    dtypes_of,
    strictest,
    wants_grad,
)
from flashlin.ops._common.chunked import Request, run_chunked
from flashlin.ops._common.entry import entry
from flashlin.ops._common.operator import Gradients, Operator, kernels
from flashlin.ops._common.pointwise import read


class States(NamedTuple):
    """What a sequence leaves to its next token. angle [n, H, R]; ssm [n, H, P, N]; k [n, H, N], turned and
    with its bias, and v [n, H, P] of the last token."""
    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor


@entry
def mamba3_siso_combined(
    Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, Q_bias: Tensor, K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None, Z: Tensor | None = None,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mamba-3's scan. Drop-in for ``mamba_ssm.ops.triton.mamba3.mamba3_siso_combined.mamba3_siso_combined``.
    Composed: a scan of simple GLA, in which every q comes a token earlier, and a rotation.

    Args:
        Q, K: [b, T, G, N], N even, G a divisor of H: head h reads group h // (H / G). V: [b, T, H, P].
            bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as torch
            promotes them. With cu_seqlens b is 1 and the sequences are packed along T.
        ADT: [b, H, T] log decays A dt, normally <= 0. DT: [b, H, T], the steps, after softplus. Trap: [b, H,
            T], of whose sigmoid r a token's own side gets r and the side of the token before it 1 - r.
        Q_bias, K_bias: [H, N], added before the rotation.
        Angles: [b, T, H, R], R at most N / 2: pair (2 i, 2 i + 1) of q and k is turned by the running sum of
            pi tanh(Angles) DT; the other channels are not.
        D: [H], a skip connection. Z: [b, T, H, P], a gate: y is multiplied by silu(Z).
        Input_States: angles [n, H, R], states [n, H, P, N], the last k [n, H, N] (after bias and rotation)
            and the last v [n, H, P] of each of n sequences, as return_final_states gives them. All four get
            gradients.
        chunk_size: accepted for compatibility (at least 1); the launch table chooses the chunk, which changes
            nothing beyond rounding.
        return_final_states: also return the states after each sequence.
        cu_seqlens: [n + 1] int32 or int64 on Q's device: sequence i is rows cu_seqlens[i] .. cu_seqlens[i +
            1]. Empty ones are fine.

    Returns:
        y [b, T, H, P] in V's dtype; with return_final_states (y, angles in 0 .. 2 pi, states, k, v), angles
        and states in float32 (float64 for float64 tensors). cu_seqlens has to cover all rows, else
        ValueError. Where its values are not read (on a GPU outside debug mode, or compiled), rows that it
        leaves out are zero, as are their gradients. Gradients reach every floating-point argument through
        each of them.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from mamba_ssm: float32 stays float32 (there everything becomes bfloat16), and so do Angles and
    Trap; tanh, cos and sin are exact; angles are summed so that long sequences lose no digits; N and P need
    not be powers of two, R not be even; no tensor descriptors, so cards before Hopper and Triton before 3.4
    will do, and CPU tensors; no autotuning, and gradients repeat to the bit.
    """
    op = "mamba3_siso_combined"
    return_final_states = scalars.flag("return_final_states", return_final_states)
    scalars.integer("chunk_size", chunk_size, 1, "an integer of at least 1")
    _check(Q, K, V, ADT, DT, Trap, Q_bias, K_bias)
    bounds, n = check_packed(Q, cu_seqlens, None, "Q", values=True)
    if bounds is not None and n == 0:
        raise ValueError("cu_seqlens: got shape [1], need the edges of at least one sequence")
    states = _check_others(Q, V, Angles, D, Z, Input_States, n)

    given = (Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z)
    T, dtype, wide = V.shape[1], common_dtype(Q, K, V), widest(*given)
    packed = None if bounds is None else torch_path.packed_of(T, bounds)
    decay, step, trap = (x.mT.to(wide) for x in (ADT, DT, Trap))
    own = step * trap.sigmoid()
    past = step - own
    # what is not finite in a token's step stays out of the token before it, which has a chunk of its own
    weight = own + torch_path.after(past.nan_to_num(0, 0, 0), packed)
    inputs = Inputs(Q, K, Q_bias, K_bias, Angles, step, weight, None if states is None else states.angle,
                    bounds=bounds)
    q, k, q_first, last_k, alike, angle = turned(op, inputs, dtype)

    found = None if states is None else _found(states, torch_path.first(past, packed), dtype)
    request = Request(op, 1.0, found, return_final_states, bounds, state_v_first=True)
    y, ssm = run_chunked(simple_gla.FAMILY, request, (q, k, V.to(dtype), decay, None))
    del q, k
    kept, itself = torch_path.unless_first(decay.exp(), packed), own * alike
    y = read(op, y, V, itself if D is None else itself + D.to(wide), Z, kept, V.dtype)
    if packed is not None:
        y = torch.where(packed.covered[:, None, None], y, 0)
    if found is not None and T:
        y = _with_first(y, q_first, found, torch_path.first(decay, packed).exp(),
                        None if Z is None else torch_path.first(Z, packed), packed)
    if ssm is None:
        return y
    last_angle, last_v = (torch_path.last(x, packed) for x in (angle, V))
    if states is not None:  # what a sequence without tokens began with
        began = states.angle.double().remainder(torch_path.TURN).to(wide)
        last_angle, last_k, last_v = (
            torch_path.where_any(packed, T, x, start.to(x.dtype))
            for x, start in ((last_angle, began), (last_k, states.k), (last_v, states.v)))
    return y, last_angle, ssm.to(wide), last_k, last_v


def _found(states: States, past: Tensor, dtype: torch.dtype) -> Tensor:
    """The state [n, H, P, N] that first tokens find, of which their own side of the token before them, past
    [n, H], is a part."""
    k, v = states.k.to(dtype), states.v.to(dtype)
    return states.ssm + (past[..., None] * v)[..., None] * k[:, :, None]


def _with_first(y: Tensor, q: Tensor, found: Tensor, kept: Tensor, z: Tensor | None,
                packed: torch_path.Packed | None) -> Tensor:
    """y with what first tokens read of that state. q [n, H, N], kept [n, H], z [n, H, P]: of first tokens."""
    more = kept[..., None] * (found * q[:, :, None]).sum(-1)
    if z is not None:
        more = more * F.silu(z.to(more.dtype))
    if packed is None:
        return y.index_add(1, torch.zeros(1, dtype=torch.long, device=y.device), more.to(y.dtype)[:, None])
    more = torch.where(torch_path.any_rows(packed, more), more, 0)
    return y.index_add(1, packed.begins.clamp(max=y.shape[1] - 1), more.to(y.dtype)[None])


def _check(Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, Q_bias: Tensor,
           K_bias: Tensor) -> None:
    """Check the tensors that every call has, but for Angles."""
    check_rows("V", V, "[b, T, H, P]", 4)
    b, T, H, _ = V.shape
    need_tensor("Q", Q, (b, T, None, None), "[b, T, G, N]", V.device, "V")
    G, N = Q.shape[2:]
    if N == 0 or N % 2 or not shareable(H, G):
        raise ValueError(f"Q: got shape {shown(Q.shape)}, need [b, T, G, N] with G a divisor of the {H} "
                         "heads of V and N even, at least 2")
    need_tensor("K", K, tuple(Q.shape), "[b, T, G, N]", V.device, "V")
    for name, x in (("ADT", ADT), ("DT", DT), ("Trap", Trap)):
        need_tensor(name, x, (b, H, T), "[b, H, T]", V.device, "V")
    for name, x in (("Q_bias", Q_bias), ("K_bias", K_bias)):
        need_tensor(name, x, (H, N), "[H, N]", V.device, "V")


def _check_others(Q: Tensor, V: Tensor, Angles: Tensor, D: Tensor | None, Z: Tensor | None, given: Any,
                  n: int) -> States | None:
    """Input_States, of n sequences."""
    (b, T, H, P), N = V.shape, Q.shape[3]
    need_tensor("Angles", Angles, (b, T, H, None), "[b, T, H, R]", V.device, "V")
    R = Angles.shape[3]
    if 2 * R > N:
        raise ValueError(f"Angles: got shape {shown(Angles.shape)}, need [b, T, H, R] with R at most N / 2 = "
                         f"{N // 2}")
    check_optional("V", V, (("D", D, (H,), "[H]"), ("Z", Z, (b, T, H, P), "V's shape")))
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 4:
        raise TypeError(f"Input_States: got {type(given).__name__}, need (angles [n, H, R], states [n, H, P, "
                        "N], k [n, H, N], v [n, H, P]) or None")
    shapes = {"angles": ((n, H, R), "[n, H, R]"), "states": ((n, H, P, N), "[n, H, P, N]"),
              "k": ((n, H, N), "[n, H, N]"), "v": ((n, H, P), "[n, H, P]")}
    for (name, (shape, meaning)), x in zip(shapes.items(), given, strict=True):
        need_tensor(f"Input_States: {name}", x, shape, meaning, V.device, "V")
    return States(*given)


# --- the rotation, which is plain torch under torch.compile ---

class Scalars(NamedTuple):
    dtype: torch.dtype
    needs_grad: bool
    call: str


def turned(op: str, x: Inputs, dtype: torch.dtype) -> Outputs:
    """q, k, q_first and k_last of that dtype; the others in float32, or float64 if a tensor has that."""
    if not x.angles.shape[3]:
        return torch_path.compute(x, dtype)
    y = OPERATOR.run_planned(x, Scalars(dtype, wants_grad(*x), op))
    return Outputs(*(vectors.to(dtype) for vectors in y[:4]), *y[4:])


def problem_of(x: Inputs, how: Scalars) -> Problem:
    (B, T, _, K), (H, R) = x.q.shape, x.angles.shape[2:]
    return Problem(how.call, FAMILY, "", B=B, T=T, H=H, K=K, V=R, N=x.sequences,
                   dtype=strictest(dtypes_of(x[:-1])), varlen=x.bounds is not None,
                   needs_grad=how.needs_grad)


def _cast(x: Inputs, how: Scalars, dot: str) -> tuple[Inputs, Scalars]:
    if dot != "native":
        x, how = as_planned(x, dot), how._replace(dtype=dtype_as_planned(how.dtype, dot))
    return Inputs(*contiguous(*x)), how


def _forward(plan: Plan, x: Inputs, how: Scalars) -> Any:
    return kernels(FAMILY, "forward").launch_forward(plan, x, how.dtype)


def _backward(plan: Plan, x: Inputs, y: Outputs, grads: Outputs, how: Scalars,
              wanted: frozenset[str]) -> Gradients:
    (B, T, _, K), H = x.q.shape, x.angles.shape[2]
    q, k = (torch.zeros(B, T, H, K, dtype=how.dtype, device=x.q.device) if dy is None else dy
            for dy in (grads.q, grads.k))
    dy = Outputs(*contiguous(q, k, *grads[2:]))
    found = kernels(FAMILY, "backward").launch_backward(plan, x, y.angle, dy)
    return {name: None if dx is None else dx.to(getattr(x, name).dtype)
            for name, dx in found._asdict().items()}


OPERATOR = Operator("turning", Inputs, Scalars, Outputs, 6, family=FAMILY, problem=problem_of,
                    on_torch=lambda x, how: torch_path.compute(x, how.dtype), cast=_cast, forward=_forward,
                    kept=lambda x, y, how: (x, (*[None] * 5, y.angle)), backward=_backward)
