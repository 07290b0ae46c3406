"""Windows of split sequences in Triton's interpreter: when they are used, and what they may change."""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashlin.compat.target import probe
from flashlin.guards.plan_types import Plan, Problem
from flashlin.kernels import scans
from flashlin.kernels.batch import Batch
from flashlin.kernels.delta.reference import recurrence
from flashlin.kernels.dplr import forward, recipe
from flashlin.kernels.dplr.backward import dplr_reverse
from flashlin.kernels.dplr.inputs import Inputs, Scalars
from flashlin.kernels.dplr.raw import prepare_raw
from flashlin.kernels.sequence_split import back_by_transfers
from flashlin.testing.compare import judge, poisoned

B, T, HV, K, V, PARTS, CHUNK = 2, 512, 2, 16, 32, 4, 16
L = T // PARTS


@pytest.fixture(autouse=True)
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scans, "forced_parts", PARTS)
    monkeypatch.setattr(recipe, "LONG", L // 2)
    yield


def inputs(kind: str = "", gate: float = -1.0, packed: bool = False) -> Inputs:
    """Return the inputs of a call whose decays forget 2^-24 within a few chunks, if ``kind`` allows it."""
    torch.manual_seed(0)
    rows = (1, B * T) if packed else (B, T)
    q, k, v, g = (torch.randn(*rows, HV, D) for D in (K, K, V, K))
    x = Inputs(q, F.normalize(k, dim=-1), v, gate * (1 + g.sigmoid()), None, None, torch.rand(*rows, HV), None,
               None, torch.randn(B, HV, K, V), torch.tensor([0, 600, B * T]) if packed else None)
    if kind == "rates":
        x = x._replace(a=0.1 * torch.rand(*rows, HV, K), beta=None)
    if kind == "keeps":  # a channel that never decays, in one head
        x.g[:, :, 1, 3] = 0
    if kind == "large":  # tokens in the middle of the first segment are 1e20 times as large as others
        x.v[:, 20:30] *= 1e20
    if kind == "padded":  # the last tokens of the second segment write nothing
        x.v[:, 2 * L - 20:2 * L] = 0
    if kind == "grows":  # keys so long that tokens enlarge the state
        x = x._replace(k=x.k * 2, beta=torch.ones_like(x.beta))  # type: ignore[arg-type]
    if kind == "state":
        x.h0.mul_(1e25)  # type: ignore[union-attr]
    if kind == "forgets":
        x.g[:, ::7] = -torch.inf
    for name, tensor in x._asdict().items():
        if kind == "nan in " + name:
            tensor.view(B, T, HV, -1)[0, 30, 0, 0] = torch.nan
    return x


def plan_of(x: Inputs, windows: bool = True) -> Plan:
    packed = x.bounds is not None
    problem = Problem("chunk_kda", "dplr", "chunk", x.q.shape[0], x.q.shape[1], HV, K, V, B, "float32",
                      varlen=packed, options=("a",) if x.beta is None else ("beta",), needs_grad=True)
    target = probe(torch.device("cpu"))
    launches = [one for one in recipe.planned(problem, target, False, "short")
                if windows or one.kernel != "dplr_windows"]
    return Plan(problem, problem, target, tuple(launches), ())


def run(x: Inputs, windows: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the output and the final state of the forward kernels, and the arguments of the transfers."""
    found: dict[str, Any] = {}
    carry = forward.by_transfers
    monkeypatch.setattr(forward, "by_transfers", lambda batch, part, *rest: (
        carry(batch, part, *rest), found.update(part)))
    with poisoned():
        o, ht = forward.launch_forward(plan_of(x, windows), x, Scalars(0.3, True, False, torch.float32, "chunk"))
    monkeypatch.undo()
    assert ht is not None
    return [o, ht], found


def norms(x: Inputs) -> torch.Tensor:
    """Return the spectral norm of the matrix with which each token multiplies the state, [B, T, HV]."""
    k, decay = x.k.double(), x.g.double().exp()
    rates = x.beta.double()[..., None] if x.a is None else x.a.double()  # type: ignore[union-attr]
    erase = torch.eye(K, dtype=torch.double) - k[..., None] * (rates * k)[..., None, :]
    return torch.linalg.matrix_norm(erase, 2) * decay.amax(-1)


KINDS = {"": (1, 1), "rates": (1, 1), "keeps": (1, 0), "large": (1, 1), "padded": (1, 1), "grows": (1, 1),
         "state": (1, 1), "forgets": (1, 1), **{"nan in "+n: (0,0) for n in ("k","v","g","beta")}}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_change_nothing_beyond_rounding(kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(kind, packed=packed)
    exact, _ = run(x, False, monkeypatch)
    monkeypatch.setattr(scans, "forced_parts", PARTS)
    monkeypatch.setattr(recipe, "LONG", L // 2)
    ours, found = run(x, True, monkeypatch)
    print(kind, packed, found["windows"].tolist())
    for name, one, right in zip(("o", "ht"), ours, exact, strict=True):
        print(judge(name, one, right.double(), 1e-5))
        if "nan" in kind: assert torch.equal(one.isnan(), right.isnan()) and one.isnan().any()
