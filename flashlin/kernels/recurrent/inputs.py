"""What goes into the generic recurrence. With S the state [K, V] of one sequence and value head, for each
token t:

    P_t = e^{g_t + gamma} Diag(e^{gk_t}) S_{t-1} Diag(e^{gv_t})  [+ b_t (a_t^T S_{t-1})]
        (a reads the state before it decays)
    u_t = v_t, or with ``delta`` beta_t (v_t - P_t^T k_t)
        (the prediction reads the decayed state)
        with ``erase`` beside it beta_t v_t - P_t^T (a_t k_t)
        with ``undecayed`` beside it beta_t (v_t - S_{t-1}^T a_t), a_t being k_t if not given
    S_t = P_t + k_t u_t^T
    o_t = scale S_t^T q_t, or with ``before`` scale (S_{t-1} + Diag(u) k_t v_t^T)^T q_t
        (read before the update, with rwkv6's bonus)
"""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# What a call does besides the bare recurrence. The first three say what is computed; the rest what the
# kernels still have to do to their inputs (q and k to unit length; beta through a sigmoid, times 2; b, which
# is a rate so far, to -a b; gates to a bounded form), what a prediction reads otherwise (``erase`` and
# ``undecayed``, where b is None; backward knows neither, and gets the same call with an a and a b), and how
# states are laid out. ``bound`` carries its number, "bound:-5.0": flags are words, which torch.library takes
# as one string.
FLAGS = ("delta", "before", "reverse", "l2norm", "sigmoid", "neg_eigval", "rate", "erase", "undecayed",
         "bound", "v_first")


def bound_of(flags: tuple[str, ...]) -> float:
    """What bounds a gate of channels from below, 0 if nothing does."""
    return next((float(flag.removeprefix("bound:")) for flag in flags if flag.startswith("bound:")), 0.0)


class Inputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j // (HV /
    H).

    beta [B, T, HV] or, headwise, [B, T, HV, V]; None for ones. g [B, T, HV], gamma [HV], gk [B, T, HV, K], gv
    [B, T, HV, V]: natural-log decays that add up. A_log, dt_bias [HV]: where given, g is raw and decays by
    -e^{A_log} softplus(g + dt_bias). Without g, gk is what is raw, dt_bias is [HV, K], and with a bound the
    decay is bound sigmoid(e^{A_log} (gk + dt_bias)). bonus [HV, K]: rwkv6's u. a, b [B, T, HV, K]; with
    ``undecayed`` a is shaped like k, and brought to its length with ``l2norm``. h0 [N, HV, K, V], or [N, HV,
    V, K] with ``v_first``. bounds [N + 1], rising, within 0 .. T: sequence n is the rows bounds[n] .. bounds[n
    + 1] of the single batch row.
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

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.bounds is None else self.bounds.shape[0] - 1
