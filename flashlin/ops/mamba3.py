"""Mamba-3 with one input and one output for each head (SISO), computed chunk by chunk.

Mirrors ``mamba_ssm.ops.triton.mamba3.mamba3_siso_combined``. The recurrence is

    theta_t = theta_{t-1} + pi tanh(Angles_t) DT_t
    q_t, k_t = Q_t + Q_bias, K_t + K_bias, rotated by theta_t        r_t = sigmoid(Trap_t)
    S_t = e^{ADT_t} (S_{t-1} + (1 - r_t) DT_t v_{t-1} k_{t-1}^T) + r_t DT_t v_t k_t^T
    y_t = (S_t q_t + D v_t) silu(Z_t)

Source: Lahoti et al. 2026 (arXiv 2603.15569). Composed: it runs a rotation, one scan of simple GLA
(simple_gla.py) and an elementwise kernel.

Why one scan suffices: every later token reads k_j and v_j with the same weight, r_j DT_j + (1 - r_{j+1})
DT_{j+1}, times the decays since token j. The scan uses this weight, and shifts each q to the previous token,
so that q_t reads the state after token t - 1. The elementwise kernel (kernels/pointwise) decays that result
once more. It also adds the product of q with the token's own k and v, weighted by r_t DT_t, and applies D and
Z. kernels/rotation sums the angles and rotates q and k.
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
from flashlin.ops._common.casting import cast_call, common_dtype, contiguous, dtypes_of, strictest, wants_grad
from flashlin.ops._common.chunked import Request, run_chunked
from flashlin.ops._common.entry import entry
from flashlin.ops._common.operator import Gradients, Operator, kernels
from flashlin.ops._common.pointwise import read


class States(NamedTuple):
    """The states after a sequence, from which its next token continues.

    angle: [n, H, R], the summed angles.
    ssm: [n, H, P, N], the state of the scan.
    k: [n, H, N], the k of the last token, after bias and rotation.
    v: [n, H, P], the v of the last token.
    """
    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor


@entry
def mamba3_siso_combined(
    Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, Q_bias: Tensor, K_bias: Tensor,
    Angles: Tensor, D: Tensor | None = None, Z: Tensor | None = None,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None, chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the scan of Mamba-3, with one input and one output for each head, chunk by chunk.

    Drop-in for ``mamba_ssm.ops.triton.mamba3.mamba3_siso_combined.mamba3_siso_combined``. Composed: it
    runs a rotation, and a scan of simple GLA with each q shifted to the previous token. The recurrence is

        theta_t = theta_{t-1} + pi tanh(Angles_t) DT_t
        q_t, k_t = Q_t + Q_bias, K_t + K_bias, rotated by theta_t        r_t = sigmoid(Trap_t)
        S_t = e^{ADT_t} (S_{t-1} + (1 - r_t) DT_t v_{t-1} k_{t-1}^T) + r_t DT_t v_t k_t^T
        y_t = (S_t q_t + D v_t) silu(Z_t)

    Args:
        Q: [b, T, G, N], bfloat16, float16 or float32 (float64 runs in plain torch), N even, G a divisor of H.
            Head h reads group h // (H / G). Mixed dtypes of Q, K and V follow torch's promotion. With
            cu_seqlens b is 1 and sequences are packed along T.
        K: [b, T, G, N], like Q.
        V: [b, T, H, P].
        ADT: [b, H, T], the log decays A dt, normally <= 0.
        DT: [b, H, T], the step sizes, after softplus.
        Trap: [b, H, T], the logits of r. A token's own product v k^T has the weight r, and the previous
            token's product has the weight 1 - r.
        Q_bias: [H, N], added to Q before the rotation.
        K_bias: [H, N], added to K before the rotation.
        Angles: [b, T, H, R], R at most N / 2. Channels (2 i, 2 i + 1) of q and k are rotated by the running
            sum of pi tanh(Angles) DT. Channels from 2 R on are not rotated.
        D: [H] or None, a skip connection.
        Z: [b, T, H, P] or None, a gate: y is multiplied by silu(Z).
        Input_States: the states of n sequences, as return_final_states returns them: the angles [n, H, R],
            the states [n, H, P, N], the last k [n, H, N] (after bias and rotation) and the last v [n, H, P].
            All four get gradients.
        chunk_size: at least 1, accepted for compatibility. The launch table chooses the chunk size, which
            changes the result only by rounding.
        return_final_states: also return the states after each sequence.
        cu_seqlens: [n + 1] int32 or int64 on the device of Q. Sequence i has the rows cu_seqlens[i] to
            cu_seqlens[i + 1] (exclusive). Empty sequences are allowed.

    Returns:
        y [b, T, H, P] in the dtype of V. With return_final_states it is (y, angles, states, k, v), where the
        angles lie in 0 .. 2 pi, and angles and states are in float32 (float64 for float64 tensors). Every
        float argument gets gradients through each result. cu_seqlens must cover all rows, else ValueError.
        On a GPU the values are checked only in debug mode, and in compiled code never. Without the check,
        rows outside all sequences and their gradients are zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from mamba_ssm: float32 tensors, Angles and Trap stay in float32, while mamba_ssm converts
    them to bfloat16. tanh, cos and sin are exact, and the sum of the angles stays accurate in long sequences.
    N and P need not be powers of two, and R may be odd. The kernels use no tensor descriptors, so they run on
    GPUs before Hopper and on Triton before 3.4. CPU tensors work. There is no autotuning, and repeated runs
    give bitwise identical gradients.
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
    # The weight of a token contains the next token's step. A step that is not finite must not reach the token
    # before it, which may be in another chunk.
    weight = own + torch_path.after(past.nan_to_num(0, 0, 0), packed)
    inputs = Inputs(Q, K, Q_bias, K_bias, Angles, step, weight, None if states is None else states.angle,
                    bounds=bounds)
    q, k, q_first, last_k, alike, angle = turned(op, inputs, dtype)

    found = None
    if states is not None:  # the first token reads the initial state plus past v k^T of the token before it
        written = torch_path.first(past, packed)[..., None] * states.v.to(dtype)
        found = states.ssm + written[..., None] * states.k.to(dtype)[:, :, None]
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
    if states is not None:  # a sequence without tokens returns its initial states
        began = states.angle.double().remainder(torch_path.TURN).to(wide)
        last_angle, last_k, last_v = (
            torch_path.where_any(packed, T, x, start.to(x.dtype))
            for x, start in ((last_angle, began), (last_k, states.k), (last_v, states.v)))
    return y, last_angle, ssm.to(wide), last_k, last_v


def _with_first(y: Tensor, q: Tensor, found: Tensor, kept: Tensor, z: Tensor | None,
                packed: torch_path.Packed | None) -> Tensor:
    """Return y plus the values that the first token of each sequence reads from its initial state.

    q: [n, H, N], the rotated q of the first tokens.
    found: [n, H, P, N], the states that the first tokens read.
    kept: [n, H], the decay e^{ADT} of the first tokens.
    z: [n, H, P], the gate of the first tokens, or None.
    packed: the rows of packed sequences, or None for a dense batch.
    """
    more = kept[..., None] * (found * q[:, :, None]).sum(-1)
    if z is not None:
        more = more * F.silu(z.to(more.dtype))
    if packed is None:
        return y.index_add(1, torch.zeros(1, dtype=torch.long, device=y.device), more.to(y.dtype)[:, None])
    more = torch.where(torch_path.any_rows(packed, more), more, 0)
    return y.index_add(1, packed.begins.clamp(max=y.shape[1] - 1), more.to(y.dtype)[None])


def _check(Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, Q_bias: Tensor,
           K_bias: Tensor) -> None:
    """Raise an error unless the required tensors other than Angles have valid shapes and devices."""
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
    """Check Angles, D, Z and Input_States, and return Input_States as States of n sequences, or None."""
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


# --- The rotation, which runs in plain torch under torch.compile. ---

class Scalars(NamedTuple):
    """The other arguments of one rotation.

    dtype: the dtype of the rotated q and k.
    needs_grad: some tensor needs a gradient.
    call: the name of the op.
    """
    dtype: torch.dtype
    needs_grad: bool
    call: str


def turned(op: str, x: Inputs, dtype: torch.dtype) -> Outputs:
    """Run the rotation: add the biases, sum the angles, and rotate q and k.

    The first four results (q, k, q_first, k_last) are in ``dtype``. The others are in float32, or in float64
    if a tensor of x is.
    """
    if not x.angles.shape[3]:
        return torch_path.compute(x, dtype)
    y = OPERATOR.run_planned(x, Scalars(dtype, wants_grad(*x), op))
    return Outputs(*(vectors.to(dtype) for vectors in y[:4]), *y[4:])


def problem_of(x: Inputs, how: Scalars) -> Problem:
    """Return the problem of one rotation for planning, with N as K and R as V."""
    (B, T, _, K), (H, R) = x.q.shape, x.angles.shape[2:]
    return Problem(how.call, FAMILY, "", B=B, T=T, H=H, K=K, V=R, N=x.sequences,
                   dtype=strictest(dtypes_of(x[:-1])), varlen=x.bounds is not None, needs_grad=how.needs_grad)


def _cast(x: Inputs, how: Scalars, dot: str) -> tuple[Inputs, Scalars]:
    if dot != "native":
        x, how = cast_call(x, how, dot)
    return Inputs(*contiguous(*x)), how


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
                    on_torch=lambda x, how: torch_path.compute(x, how.dtype), cast=_cast,
                    forward=lambda plan, x, how: kernels(FAMILY, "forward").launch_forward(
                        plan, x, how.dtype),
                    kept=lambda x, y, how: (x, (*[None] * 5, y.angle)), backward=_backward)
