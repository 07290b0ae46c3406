"""Values that are not finite do not spread in the kernels. tests/isolation.py has the calls."""
from __future__ import annotations

import pytest

from tests import isolation
from tests.share import WHOLE

# One cheap call of each kind: a state per chunk, segments of HGRN, a convolution, states that are updated in
# place, and sequences that share a state. The kernels of the other calls divide sequences in the same ways.
CHOSEN = ("chunk_simple_gla-packed", "fused_recurrent_hgrn-packed", "causal_conv1d-packed-activation",
          "selective_state_update-dense", "causal_conv1d_update-dense", "mamba_causal_conv1d_update-dense",
          "mamba_chunk_scan_combined-numbered-chunk_size-return_final_states")


@pytest.mark.parametrize("call", [call for call in isolation.CALLS if WHOLE or str(call) in CHOSEN], ids=str)
@pytest.mark.alternate
def test_what_is_not_finite_stays_in_its_chunk_head_and_sequence(call: isolation.Call) -> None:
    assert list(isolation.leaks(call, briefly=True)) == []
