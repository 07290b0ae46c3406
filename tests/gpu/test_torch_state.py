"""Process-wide settings of torch change no result on a GPU, neither of kernels nor of the torch path.

With each switch that allows TF32, results stay right.
"""
from __future__ import annotations

import pytest
import torch

import flashlin
from flashlin.testing.compare import Case
from tests import torch_states

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("case", torch_states.CHOSEN, ids=str)
def test_results_are_the_same_in_every_state(case: Case, path: str) -> None:
    with flashlin.settings(path=path):
        assert not [*torch_states.differences(case, GPU, torch.float32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", torch_states.CHOSEN, ids=str)
def test_results_are_right_where_tf32_is_allowed(case: Case, dtype: torch.dtype) -> None:
    assert not [*torch_states.wrong_with_tf32(case, GPU, dtype)]
