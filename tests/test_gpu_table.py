"""Which GPUs of a machine share the cases of ``python -m flashlin.testing.gpu``. What it does there needs one: tests/gpu."""
from __future__ import annotations

import pytest
import torch

from flashlin.testing import gpu


@pytest.mark.parametrize(("shown", "names"), [(None, ["0", "2"]), ("4,5,7", ["4", "7"])])
def test_cards_like_the_first_one_share_the_cases(shown: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cards = ("H200", "T4", "H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: cards[index])
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert gpu.gpus() == names
