"""The scalar arguments of chunked families. Their tensors are in ``inputs.py`` of each family."""
from __future__ import annotations

from typing import NamedTuple

from torch import dtype

# The gradients to compute if only the gradient of the initial state is needed, which goes to another rank.
STATE_ALONE = frozenset({"h0"})


class Scalars(NamedTuple):
    """The scalar arguments of one call of a chunked family's operator.

    scale: factor of the outputs.
    has_ht: True if the final states are returned.
    state_v_first: True if states are stored [V, K] instead of [K, V].
    out_dtype: dtype of the outputs.
    mode: "chunk" or "fused_recurrent".
    needs_grad: True if forward keeps tensors for backward.
    call: name of the public op, for messages.
    """
    scale: float
    has_ht: bool
    state_v_first: bool
    out_dtype: dtype
    mode: str
    needs_grad: bool
    call: str
