"""Windows of split sequences in Triton's interpreter: which segments have one, and what they leave out."""
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashlin.compat.target import probe
from flashlin.guards.plan_types import Plan, Problem
from flashlin.kernels import scans
from flashlin.kernels.batch import Batch
from flashlin.kernels.dplr import forward, recipe, windows
from flashlin.kernels.dplr.backward import dplr_reverse
from flashlin.kernels.dplr.inputs import Inputs, Scalars
from flashlin.kernels.dplr.raw import prepare_raw
from flashlin.testing.compare import judge, poisoned

T, HV, K, V, CHUNK, SCALE = 512, 2, 16, 32, 16, -0.3


@pytest.fixture(autouse=True)
def four_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "forced_parts", 4)
    monkeypatch.setattr(recipe, "LONG", 64)


def inputs(kind: str = "forgetting", packed: bool = False) -> Inputs:
    """Return inputs whose decays reach 2^-24 within a few chunks, unless ``kind`` prevents it."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, T, HV, D) for D in (K, K, V, K))
    h0 = torch.randn(2 if packed else 1, HV, K, V)
    x = Inputs(q, F.normalize(k, dim=-1), v, -0.25 * (1 + g.sigmoid()), None, None, torch.rand(1, T, HV),
               None, None, h0, torch.tensor([0, 300, T]) if packed else None)
    if kind == "rates":
        x = x._replace(a=torch.rand(1, T, HV, K), beta=None)
    if kind == "a channel keeps everything":
        x.g[:, :, 1, 3] = 0
    if kind == "tokens grow the state":
        x = x._replace(k=x.k * 3, beta=torch.ones(1, T, HV))
    if kind == "a large token":
        x.v[:, 250, 1] *= 1e18
    if kind == "no writes at the end":
        x.v[:, 200:256, 1] = 0
    if kind == "a large state":
        x = x._replace(h0=h0 * 1e17)
    if kind == "gates of -inf":
        x.g[:, ::7] = -torch.inf
    if kind.startswith("nan in "):
        getattr(x, kind[7:]).view(1, T, HV, -1)[0, 150, 1, 0] = torch.nan
    return x


def plan_of(x: Inputs, drop: str = "") -> Plan:
    """Return a plan in chunks of 16 tokens, without the launches of the kernel ``drop``."""
    assert x.h0 is not None
    problem = Problem("chunk_kda", "dplr", "chunk", 1, T, HV, K, V, len(x.h0), "float32",
                      varlen=x.bounds is not None, options=("a",) if x.beta is None else ("beta",),
                      needs_grad=True)
    target = probe(torch.device("cpu"))
    launches = recipe.planned(problem, target, False, "short")
    return Plan(problem, problem, target, tuple(one for one in launches if one.kernel != drop), ())


def run(x: Inputs, monkeypatch: pytest.MonkeyPatch, drop: str = "") -> tuple[list[Any], dict[str, Any]]:
    """Return the outputs and final states of the forward kernels, and the arguments of the transfers."""
    found: dict[str, Any] = {}
    by_transfers = forward.by_transfers
    with poisoned(), monkeypatch.context() as patch:
        patch.setattr(forward, "by_transfers", lambda batch, part, *rest: (by_transfers(batch, part, *rest),
                                                                           found.update(part)))
        how = Scalars(SCALE, True, False, torch.float32, "chunk")
        results = forward.launch_forward(plan_of(x, drop), x, how)
    return list(results), found


# True for segments of the two heads that have a window; the last of the four segments needs none.
ALL, FIRST, NONE = [[True, True]] * 3, [[True, False]] * 3, [[False, False]] * 3
BOTH, ONE, NO = [True, True], [True, False], [False, False]
KINDS: dict[str, list[list[bool]]] = {
    "forgetting": ALL, "rates": ALL, "gates of -inf": ALL, "a channel keeps everything": FIRST,
    "tokens grow the state": NONE, "a large token": [BOTH, BOTH, ONE],
    "no writes at the end": [BOTH, ONE, BOTH], "a large state": [NO, BOTH, BOTH],
    # the window of seven chunks that begins before the NaN in v contains it
    "nan in v": [BOTH, BOTH, ONE],
    **{f"nan in {name}": [BOTH, ONE, ONE] for name in ("k", "g", "beta")}}


@pytest.mark.parametrize("kind", KINDS)
def test_windows_change_nothing_beyond_rounding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(kind)
    ours, found = run(x, monkeypatch)
    exact, _ = run(x, monkeypatch, "dplr_windows")
    assert (found["windows"][:3] > 0).tolist() == KINDS[kind], found["windows"]
    assert found["undivided"][0].eq(0).tolist() == [all(head) for head in zip(*KINDS[kind], strict=True)]
    for name, one, right in zip(("o", "ht"), ours, exact, strict=True):
        assert torch.equal(one.isnan(), right.isnan())
        assert judge(name, one.nan_to_num(), right.nan_to_num().double(), 1e-6).ok
    if kind.startswith("nan"):
        assert ours[1].isnan().any() and not ours[1][:, 0].isnan().any()


def test_packed_sequences_have_their_own_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs("a channel keeps everything", packed=True)
    ours, found = run(x, monkeypatch)
    exact, _ = run(x, monkeypatch, "dplr_windows")
    # the segments are tokens 0-127, 128-255 and 256-299 of one sequence, 0-127 and 128-211 of the other
    assert (found["windows"][[0, 1, 3]] > 0).tolist() == FIRST
    assert found["undivided"].tolist() == [[0, 1], [0, 1]]
    for name, one, right in zip(("o", "ht"), ours, exact, strict=True):
        assert judge(name, one, right.double(), 1e-6).ok


def test_with_many_segments_the_others_use_their_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "forced_parts", 8)
    x = inputs("a channel keeps everything")
    x = x._replace(g=x.g * 3)
    ours, found = run(x, monkeypatch)
    exact, _ = run(x, monkeypatch, "dplr_windows")
    assert (found["windows"][:7].min(0).values > 0).tolist() == [True, False]
    assert found["windows"][:, 1].eq(0).all() and found["undivided"].eq(0).all()
    assert found["transfer"][1:7, 1].isfinite().all() and found["transfer"][:, 0].isnan().all()  # poison
    for name, one, right in zip(("o", "ht"), ours, exact, strict=True):
        assert judge(name, one, right.double(), 1e-6).ok


def erasing(x: Inputs) -> torch.Tensor:
    """Return the matrix with which each token multiplies the decayed state, [T, HV, K, K] in float64."""
    k, rates = x.k[0].double(), (x.beta[..., None] if x.a is None else x.a)[0].double()  # type: ignore[index]
    return torch.eye(K, dtype=torch.double) - k[..., None] * (rates * k)[..., None, :]


@pytest.mark.parametrize("kind", ["forgetting", "rates", "gates of -inf"])
def test_what_a_window_leaves_out_is_within_its_bound(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of states and of their gradients that windows leave out are computed in float64."""
    x = inputs(kind)
    do, dht = torch.randn(1, T, HV, V), torch.randn(1, HV, K, V)
    plan = plan_of(x)
    part = next(Batch(plan, x).parts(plan.launch("dplr_prepare_raw"), scale=SCALE, do=do, dht=dht))
    with poisoned():
        prepare_raw(plan, part, -math.inf, G=torch.empty_like(x.g))
    by, g, k = erasing(x), x.g[0].double(), x.k[0].double()
    bits = torch.linalg.matrix_norm(by, 2).log2() + (g.amax(-1) / math.log(2)).clamp(min=-126)
    bits = bits.view(-1, CHUNK, HV).sum(1)
    torch.testing.assert_close(part["facts"][:, 0].T.double(), bits, rtol=1e-5, atol=1e-3)
    by = by * g.exp()[..., None, :]
    written = k[..., None] * (x.v * (1 if x.beta is None else x.beta[..., None]))[0].double()[..., None, :]
    read = SCALE * x.q[0].double()[..., None] * do[0].double()[..., None, :]
    for i in range(1, 4):
        for head in range(HV):
            chunks = int(part["windows"][i - 1, head])
            state = x.h0[0, head].double()  # type: ignore[index]
            for t in range(128 * i):
                state = by[t, head] @ state + (written[t, head] if t < 128 * i - CHUNK * chunks else 0)
            assert 0 < chunks < 8 and state.norm() <= written[128 * i - 1, head].norm() * 2**-24
            chunks = int(part["windows_back"][i, head])
            state = dht[0, head].double()
            for t in range(T - 1, 128 * i - 1, -1):
                state = by[t, head].T @ (state + (read[t, head] if t >= 128 * i + CHUNK * chunks else 0))
            first = torch.linalg.matrix_norm(by[128 * i, head], 2) * read[128 * i, head].norm()
            assert 0 < chunks < 8 and state.norm() <= first * 2**-24


def test_the_reverse_scan_stops_at_the_end_of_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the terms of later tokens, the gradients of entering states are the same in float32."""
    x = inputs()
    plan, do = plan_of(x), torch.randn(1, T, HV, V)
    part = next(Batch(plan, x).parts(plan.launch("dplr_prepare_raw"), scale=SCALE, do=do, dht=None))
    prepare_raw(plan, part, -math.inf, G=torch.empty_like(x.g))
    assert (part["windows_back"][:3] > 0).all()
    constants = dict(K=K, V=V, TWO_WRITES=False, HAS_DHT=False, HAS_DH0=False, ALONE=True, V_FIRST=False,
                     HAS_LOW=False, VARLEN=False, GAPS=False, PRECISION="ieee")
    alone = []
    for windows_back in (part["windows_back"], torch.zeros_like(part["windows_back"]),
                         torch.full_like(part["windows_back"], -1)):
        alone.append(torch.full((4, HV, K, V), torch.nan))
        none = dict.fromkeys(("dht", "dy", "dv", "dstates", "undivided"))
        Batch(plan, x).scan(dplr_reverse, constants,
                            {**part, **none, "windows_back": windows_back, "dh0": alone[-1]})
    ours, whole, skipped = (one[1:] for one in alone)
    torch.testing.assert_close(ours, whole, rtol=0, atol=1e-6 * float(whole.abs().max()))
    assert not torch.equal(ours, whole) and skipped.isnan().all()


def test_a_state_on_its_way_is_awaited_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x, order = inputs(), []
    monkeypatch.setattr(windows, "enter", lambda: order.append("wait"))
    start = windows.start
    monkeypatch.setattr(windows, "start", lambda *given: (order.append("start"), start(*given)))
    run(x, monkeypatch)
    assert order == ["wait", "start"]
