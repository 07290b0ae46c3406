"""fla's layers on a GPU, raw and patched.

In some layers flashlin replaces functions. In others it only puts shield around fla's own kernels. The tests
need fla.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashlin
from matrix.stacks import seeds

if not torch.cuda.is_available():  # checked first, because every worker takes seconds to import fla
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("fla.layers")
import fla.layers

BF16 = torch.bfloat16
REFUSAL = "on Hopper GPUs produces incorrect results"  # fla's error with Triton 3.4 to 3.7.0 in gated backwards
WHERE = seeds.Where(torch.device("cuda"), BF16, small=False)
Build = Callable[[], Any]
OWN: dict[str, Build] = {
    "ABC": lambda: fla.layers.ABCAttention(hidden_size=256, num_heads=4, num_slots=32, layer_idx=0),
    "GatedSlotAttention": lambda: fla.layers.GatedSlotAttention(hidden_size=256, num_heads=4, num_slots=32,
                                                                layer_idx=0)}
GATED: dict[str, Build] = {
    "Comba": lambda: fla.layers.Comba(hidden_size=256, num_heads=4, head_dim=64, layer_idx=0),
    # the same layer as in tests/integrations/test_seeds.py, so that its kernels compile once
    "GatedDeltaNet": lambda: seeds.layer("GatedDeltaNet", WHERE)}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Disable trials in child processes, because they would compile every kernel a second time."""
    with seeds.quick(), flashlin.settings(canary="off"):
        yield


def trained(layer: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output o and the gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    o = layer(x)[0]
    o.float().square().mean().backward()
    assert x.grad is not None
    return {"o": o.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()
                                             if p.grad is not None}}


@pytest.mark.parametrize("name", OWN)
def test_what_flashlin_has_not_runs_as_raw_under_shield(name: str) -> None:
    torch.manual_seed(0)
    layer, x = OWN[name]().to(WHERE.device, BF16), WHERE.drawn(*WHERE.rows)
    try:
        raw = trained(copy.deepcopy(layer), x)
    except RuntimeError as error:
        if REFUSAL not in str(error):
            raise
        pytest.skip(f"raw: {error}")
    with flashlin.patched("fla") as report:
        ours = trained(layer, x)
        assert any(by.startswith("shield") for _, _, by in report.replaced)
    for key, value in raw.items():
        difference = (ours[key].float() - value.float()).norm() / value.float().norm().clamp(min=1e-9)
        assert difference < 2e-2, (key, float(difference))


@pytest.mark.parametrize("name", GATED)
def test_a_gated_layer_trains_where_raw_refuses(name: str) -> None:
    """With Triton 3.4 to 3.7.0 on Hopper, raw fla raises in backward. Elsewhere both agree."""
    torch.manual_seed(0)
    layer, x = GATED[name]().to(WHERE.device, BF16), WHERE.drawn(*WHERE.rows)
    with flashlin.patched("fla"):
        ours = trained(layer, x)
    assert all(value.isfinite().all() for value in ours.values())
    try:
        raw = trained(layer, x)
    except RuntimeError as error:
        if REFUSAL not in str(error):
            raise
        return
    for key, value in raw.items():
        assert (ours[key].float() - value.float()).norm() < 3e-2 * value.float().norm(), key
