"""Values that are not finite do not spread in the kernels on a GPU. tests/isolation.py has the calls."""
from __future__ import annotations

import pytest
import torch

from tests import isolation

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


@pytest.mark.parametrize("call",
                         [call for call in isolation.CALLS if call.packed or call.numbered
                          or not call.op.startswith("fused")], ids=str)
def test_what_is_not_finite_stays_in_its_chunk_head_and_sequence(call: isolation.Call) -> None:
    with torch.device("cuda", torch.cuda.current_device()):
        assert list(isolation.leaks(call, briefly=True)) == []
