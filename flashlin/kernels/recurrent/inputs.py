"""The inputs and the formula of the generic recurrence.

For each token t, with S the state [K, V] of one sequence and value head:

    P_t = e^{g_t + gamma} Diag(e^{gk_t}) S_{t-1} Diag(e^{gv_t})  [+ b_t (a_t^T S_{t-1})]
        (a reads the state before it decays)
    u_t = v_t                               without ``delta``
        = beta_t (v_t - P_t^T k_t)          with ``delta``; the prediction reads the decayed state
        = beta_t v_t - P_t^T (a_t k_t)      with ``delta`` and ``erase``
        = beta_t (v_t - S_{t-1}^T a_t)      with ``delta`` and ``undecayed``; a_t is k_t if not given
    S_t = P_t + k_t u_t^T
    o_t = scale S_t^T q_t                                  without ``before``
        = scale (S_{t-1} + Diag(bonus) k_t v_t^T)^T q_t    with ``before``, as in rwkv6
"""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# The flags of a call; torch.library passes them as one string of words.
#     delta, before: choose the formula above.
#     reverse: run from the last token to the first.
#     l2norm: normalize q and k to unit length.
#     sigmoid: apply a sigmoid to beta; neg_eigval: and multiply it by 2.
#     rate: b is a rate, and the kernel uses -a b instead.
#     erase, undecayed: change what a prediction reads; b is None then. Backward does not support them, and
#         gets an equivalent call with a and b.
#     bound: gates have a bounded form; the flag includes the number, as in "bound:-5.0".
#     v_first: states are stored [V, K].
FLAGS = ("delta", "before", "reverse", "l2norm", "sigmoid", "neg_eigval", "rate", "erase", "undecayed",
         "bound", "v_first")


def bound_of(flags: tuple[str, ...]) -> float:
    """Return the lower bound of a channel gate's log decay, or 0.0 if the flags have no bound."""
    return next((float(flag.removeprefix("bound:")) for flag in flags if flag.startswith("bound:")), 0.0)


class Inputs(NamedTuple):
    """The input tensors of one call of the generic recurrence.

    q, k: [B, T, H, K].
    v: [B, T, HV, V]. HV is a multiple of H; value head j reads head j // (HV / H) of q and k.
    beta: [B, T, HV], or [B, T, HV, V] for one value per channel; None for ones.
    g, gamma, gk, gv: [B, T, HV], [HV], [B, T, HV, K], [B, T, HV, V]; log decays, which are added.
    bonus: [HV, K], the u of rwkv6.
    a, b: [B, T, HV, K]. With ``undecayed``, a has the shape of k, and ``l2norm`` also normalizes a.
    A_log, dt_bias: [HV]. If A_log is given, g is a raw gate with log decay -e^{A_log} softplus(g + dt_bias).
        Without g, gk is the raw gate and dt_bias is [HV, K]. With a bound, its log decay is
        bound sigmoid(e^{A_log} (gk + dt_bias)).
    h0: initial states [N, HV, K, V] or, with ``v_first``, [N, HV, V, K]; None for zeros.
    bounds: [N + 1], ascending, within 0 .. T. Sequence n is the rows bounds[n] .. bounds[n + 1] of the single
        batch row.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None = None
    g: Tensor | None = None
    gamma: Tensor | None = None
    gk: Tensor | None = None
    gv: Tensor | None = None
    bonus: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    h0: Tensor | None = None
    bounds: Tensor | None = None
