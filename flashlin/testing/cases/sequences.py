"""Helpers that the references and cases of all ops over sequences share."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from flashlin.kernels.norm.reference import normalise
from flashlin.kernels.pointwise.reference import gate, gate_of_heads

# Options of ops: computations that layers leave to the kernels, and the layout of states.
L2, V_FIRST = {"use_qk_l2norm_in_kernel": True}, {"state_v_first": True}
INSIDE = {**L2, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
# Settings of cases with long sequences. Kernels split them into segments if the GPU has idle SMs. Some have
# few heads, so scans use narrow strips of states; others have the head sizes of real models. SLOW: a log
# decay so weak that states pass through the segments.
LONG: dict[str, dict[str, Any]] = {"in-parts": {"B": 1, "T": 1600, "K": 32, "V": 40},
                                   "in-parts-packed": {"edges": (0, 1, 1, 1480, 1600), "K": 32, "V": 40},
                                   "in-parts-64": {"B": 8, "T": 1600, "H": 2, "K": 64, "V": 64},
                                   "in-parts-wide": {"B": 6, "T": 1600, "H": 1, "K": 128, "V": 128},
                                   "in-parts-256": {"B": 1, "T": 1600, "H": 1, "K": 256, "V": 256},
                                   "narrow-strips": {"B": 2, "T": 1024, "H": 2, "K": 64, "V": 64},
                                   "narrow-strips-parts": {"B": 1, "T": 1590, "H": 1, "K": 128, "V": 128}}
SLOW = "-0.002"
# Sequences of six segments on a GPU like the H100.
SIX: dict[str, Any] = {"B": 1, "T": 4672, "H": 6, "V": 64}
# The ops' names of initial states and of the bounds of packed sequences, keyed by the recurrences' names.
NAMES = {"h0": "initial_state", "bounds": "cu_seqlens"}


def outputs(
    recurrence: Callable[..., tuple[Tensor, Tensor]],
    names: Mapping[str, str],
    *,
    scale: float | None = None,
    state_v_first: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    **given: Any) -> tuple[Tensor, Tensor]:
    """Return (o, final states) of an op in float64.

    It applies the op's options before and after its recurrence, without any code of the op itself.

    names: the op's names of tensors that differ from the recurrence's, keyed by the recurrence's names. Names
        in NAMES need not be given.
    scale: None for K ** -0.5.
    given: the op's tensors, and options to pass on to the recurrence.
    """
    ours = {theirs: ours for ours, theirs in {**NAMES, **names}.items()}
    x = {ours.get(name, name): value for name, value in given.items()}
    if use_qk_l2norm_in_kernel:
        x |= {name: normalise("l2", x[name], eps=1e-6)[0] for name in ("q", "k")}
    if use_gate_in_kernel:
        name = "g" if "g" in x else "gk"  # one decay per head, or one per channel as in KDA
        rule = gate_of_heads if x[name].ndim == 3 else gate
        x[name] = rule(x[name], x.pop("A_log", None), x.pop("dt_bias"), lower_bound)
    if use_beta_sigmoid_in_kernel:
        x["beta"] = x["beta"].sigmoid() * (2 if allow_neg_eigval else 1)
    if state_v_first and "h0" in x:
        x["h0"] = x["h0"].mT
    o, ht = recurrence(**x, scale=x["q"].shape[-1] ** -0.5 if scale is None else scale)
    return o, ht.mT if state_v_first else ht
