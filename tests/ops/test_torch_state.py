"""Process-wide settings of torch, which must not change the result of an op or make it raise."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashlin
from flashlin.compat import tf32
from flashlin.kernels import sequences
from flashlin.testing.compare import Case
from tests import torch_states

TORCH_PATHS = [*(Path(flashlin.__file__).parent / "kernels").glob("*/torch_path.py")]


@pytest.mark.parametrize("case", torch_states.CHOSEN, ids=str)
@pytest.mark.alternate
def test_results_are_the_same_in_every_state(case: Case) -> None:
    assert not [*torch_states.differences(case, torch.device("cpu"), torch.float32)]


@pytest.mark.parametrize("switch", torch_states.TF32)
def test_every_switch_of_tf32_is_read(switch: str) -> None:
    """Each torch setting that enables TF32 is read correctly.

    torch itself raises if ``get_float32_matmul_precision`` is called while ``fp32_precision`` is set.
    """
    assert tf32.setting() != "tf32"
    with torch_states.TF32[switch]():
        assert tf32.setting() == "tf32"
    assert tf32.setting() != "tf32"


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_running_sums_do_without_cumsum_that_may_raise(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """running_sum does not call cumsum where it may raise.

    Before torch 2.6 deterministic mode makes cumsum raise on a GPU, in forward and in backward.
    """
    x = torch.randn(5, 6, 7, dtype=torch.float64)
    x[1, 2, 3] = -torch.inf
    assert torch.equal(sequences.running_sum(x, dim), x.cumsum(dim))
    torch.testing.assert_close(sequences.sum_of_masked(x, dim), x.cumsum(dim))
    monkeypatch.setattr(sequences, "_CUMSUM_MAY_RAISE", True)
    monkeypatch.setattr(torch.Tensor, "cumsum", None)
    with torch_states.deterministic():
        assert sequences.running_sum(x.to("meta"), dim).shape == x.shape


@pytest.mark.parametrize("path", TORCH_PATHS, ids=lambda path: path.parent.name)
def test_torch_paths_take_running_sums(path: Path) -> None:
    assert ".cumsum(" not in path.read_text(encoding="utf-8")


def _raise() -> str:
    raise RuntimeError("mixed use of the interfaces")


def _torch(getter: Any = None, new: str | None = None, old: Any = _raise) -> Any:
    """Return a fake torch from which the TF32 setting can be read.

    getter: the private getter of torch 2.9, or None.
    new: the value of the public ``fp32_precision``, or None.
    old: the function ``get_float32_matmul_precision``.
    """
    private = SimpleNamespace(**{} if getter is None else {"_get_fp32_precision_getter": getter})
    matmul = SimpleNamespace(**{} if new is None else {"fp32_precision": new})
    return SimpleNamespace(_C=private, backends=SimpleNamespace(cuda=SimpleNamespace(matmul=matmul)),
                           get_float32_matmul_precision=old)


@pytest.mark.parametrize(("torch_of_then", "expected"), [
    (_torch(getter=lambda backend, of: "tf32" if (backend, of) == ("cuda", "matmul") else "ieee"), True),
    (_torch(getter=lambda backend, of: "none"), False),
    (_torch(new="tf32"), True), (_torch(new="ieee"), False),  # a torch without that private getter
    (_torch(old=lambda: "high"), True), (_torch(old=lambda: "medium"), True),  # before 2.9
    (_torch(old=lambda: "highest"), False)])
def test_the_setting_is_read_on_every_torch(torch_of_then: Any, expected: bool) -> None:
    assert (tf32._reader(torch_of_then)() == "tf32") is expected
