"""What a call of a chunked family is beside its tensors (``inputs.py`` of each family has those)."""
from __future__ import annotations

from typing import NamedTuple

from torch import dtype

# What backward is asked for where only the gradient of a state that enters goes on, to another rank.
STATE_ALONE = frozenset({"h0"})


class Scalars(NamedTuple):
    """What goes into a family's operator beside its tensors, h0 and bounds; out come o, ht and what forward
    keeps for backward."""
    scale: float
    has_ht: bool
    state_v_first: bool
    out_dtype: dtype
    mode: str
    needs_grad: bool
    call: str
