"""flashlin as a backend of the real fla, by fla's own extension point."""
from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import flashlin
from flashlin import backends
from flashlin.compat import target as machine
from flashlin.compat.target import parse

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the missing GPU
    import fla.ops


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    backends.unregister()


def calls() -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in "qkv")
    g, beta, wide = -torch.rand(1, 40, 2), torch.rand(1, 40, 2), -torch.rand(1, 40, 2, 16)
    qkv = {"q": q, "k": k, "v": v}
    return {"chunk_gated_delta_rule": {**qkv, "g": g, "beta": beta, "use_qk_l2norm_in_kernel": True},
            "chunk_kda": {**qkv, "g": wide, "beta": beta, "use_qk_l2norm_in_kernel": True},
            "chunk_dplr_delta_rule": {**qkv, "a": 0.1 * q, "b": 0.1 * k, "gk": wide},
            **{name: {**qkv, "g": g} for name in ("fused_recurrent_simple_gla", "fused_chunk_simple_gla",
                                                  "parallel_simple_gla")}}


@pytest.mark.parametrize("name", calls())
def test_fla_asks_flashlin_first(name: str) -> None:
    given = calls()[name]
    with pytest.raises(RuntimeError, match="active drivers"):
        getattr(fla.ops, name)(**given)
    assert name in backends.register() == backends.register()
    assert torch.equal(getattr(fla.ops, name)(**given)[0], getattr(flashlin, name)(**given)[0])
    q, *_ = given.values()
    q.requires_grad_()
    getattr(fla.ops, name)(**given)[0].sum().backward()
    assert q.grad is not None
    backends.unregister()
    with pytest.raises(RuntimeError, match="active drivers"):
        getattr(fla.ops, name)(**given)


def test_what_is_switched_off_is_fla_s(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.register()
    monkeypatch.setenv("FLA_FLASHLIN", "0")
    with pytest.raises(Exception, match="active drivers"):
        fla.ops.chunk_gated_delta_rule(**calls()["chunk_gated_delta_rule"])


def test_the_plan_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """If flashlin would refuse a call, or use plain torch on a GPU, fla's own kernels run."""
    verify = backends.verifier(fla.ops.chunk_gated_delta_rule)
    given = calls()["chunk_gated_delta_rule"]
    assert verify(**given) == (True, None)
    assert verify(**given, an_unknown_keyword=1) == (True, None)
    assert verify(**given, cp_context=object()) == (True, None)
    machine.pretend(parse("triton=3.2.0,sm=75"))
    with flashlin.settings(policy="strict", path="triton"):
        accepted, why = verify(**{key: x.bfloat16() if isinstance(x, torch.Tensor) else x
                                  for key, x in given.items()})
    assert not accepted and why is not None and "bf16-pre-ampere-32" in why


def test_an_older_fla_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.backends", ModuleType("fla.backends"))
    monkeypatch.setattr(sys.modules["fla"], "backends", sys.modules["fla.backends"], raising=False)
    with pytest.raises(ImportError, match=r"need flash-linear-attention 0\.6 or newer"):
        backends.register()
