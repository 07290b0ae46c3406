"""Windows of split sequences in Triton's interpreter: which segments have one, and what they leave out."""
from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.compat.target import probe
from flashlin.guards.plan_types import Plan, Problem
from flashlin.kernels import scans
from flashlin.kernels.batch import Batch
from flashlin.kernels.delta import parts
from flashlin.kernels.dplr import forward, raw, recipe, windows
from flashlin.kernels.dplr.backward import dplr_reverse
from flashlin.kernels.dplr.inputs import Inputs, Scalars
from flashlin.kernels.dplr.parts import dplr_alone
from flashlin.kernels.dplr.raw import prepare_raw
from flashlin.kernels.sequence_split import back_by_transfers, by_transfers
from flashlin.testing.compare import judge, poisoned
from tests import overlapped
from tests.gluon_on_cpu import running
from tests.overlapped import channels, delta, far

T, HV, K, V, CHUNK, SCALE = 512, 2, 16, 32, 16, -0.3


@pytest.fixture(autouse=True)
def four_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "forced_parts", 4)
    monkeypatch.setattr(recipe, "LONG", 64)


def inputs(kind: str = "forgetting", packed: bool = False) -> Inputs:
    """Return inputs whose decays reach 2^-24 within a few chunks, unless ``kind`` prevents it.

    The kind "grouped" has one key head for both value heads, and initial states in bf16.
    """
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
        x = x._replace(k=x.k * 1.55, beta=torch.ones(1, T, HV))
    if kind == "a large token":
        x.v[:, 250, 1] *= 1e18
    if kind == "no writes at the end":
        x.v[:, 200:256, 1] = 0
    if kind == "a large state":
        x = x._replace(h0=h0 * 1e17)
    if kind == "gates of -inf":
        x.g[:, ::7] = -torch.inf
    if kind == "grouped":
        x = x._replace(q=x.q[:, :, :1].contiguous(), k=x.k[:, :, :1].contiguous(), h0=h0.bfloat16())
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


def run(x: Inputs, monkeypatch: pytest.MonkeyPatch, drop: str = "",
        v_first: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Return the outputs and final states of the forward kernels, and the arguments of the transfers."""
    found: dict[str, Any] = {}

    def transfers(batch: Batch, part: dict[str, Any], *rest: Any) -> None:
        by_transfers(batch, part, *rest)
        found.update(part)
    with poisoned(), monkeypatch.context() as patch:
        patch.setattr(forward, "by_transfers", transfers)
        results = forward.launch_forward(
            plan_of(x, drop), x, Scalars(SCALE, True, v_first, torch.float32, "chunk"))
    return list(results), found


def gradients(x: Inputs, do: Tensor, dht: Tensor, drop: str = "", v_first: bool = False) -> dict[str, Any]:
    """Return the arguments of the reverse scan, which computed dy and dh0."""
    plan, state = plan_of(x, drop), torch.zeros_like(dht)
    batch = Batch(plan, x)
    part = next(batch.parts(plan.launch("dplr_prepare_raw"), scale=SCALE, do=do, dht=dht, dv=None, dh0=state,
                            dy=torch.zeros_like(x.v)))
    part["dstates"] = torch.empty(part["slots"], HV, K, V)
    with poisoned():
        prepare_raw(plan, part, -math.inf, G=torch.empty_like(x.g))
        constants = dict(K=K, V=V, TWO_WRITES=False, V_FIRST=v_first, VARLEN=batch.packed, PRECISION="ieee")
        reverse = dict(constants, HAS_LOW=False, GAPS=batch.gaps)
        by_transfers(batch, part, dplr_alone, constants, has_dht=True)
        back_by_transfers(batch, part, dplr_reverse, reverse, "dy", "dv", "dstates")
        batch.scan(dplr_reverse, dict(reverse, HAS_DHT=True, HAS_DH0=True, ALONE=False), part)
    return part


def assert_same(name: str, one: Tensor, right: Tensor) -> None:
    """Compare each head of 64 tokens, or of a state, with its own largest value."""
    dim = 2 if name in ("o", "dy") else 1
    for ours, exact in zip(one.unbind(dim), right.unbind(dim), strict=True):
        for i in range(0, ours.shape[1], 64 if dim == 2 else ours.shape[1]):
            piece = slice(i, i + 64)
            result = judge(name, ours[:, piece].nan_to_num(), exact.double()[:, piece].nan_to_num(), 1e-6)
            assert result.ok, (i, result)
    assert torch.equal(one.isnan(), right.isnan())


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
        assert_same(name, one, right)
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
        assert_same(name, one, right)


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
        assert_same(name, one, right)


def state_of(x: Inputs) -> Tensor:
    """Return the initial states, which all inputs of these tests have."""
    assert x.h0 is not None
    return x.h0


def erasing(x: Inputs) -> Tensor:
    """Return the matrix with which each token multiplies the decayed state, [T, HV, K, K] in float64."""
    rates = x.a
    if rates is None:
        assert x.beta is not None
        rates = x.beta[..., None]
    k, rates = x.k[0].double(), rates[0].double()
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
    h0 = state_of(x)
    for i in range(1, 4):
        for head in range(HV):
            chunks = int(part["windows"][i - 1, head])
            state = h0[0, head].double()
            for t in range(128 * i):
                state = by[t, head] @ state + (written[t, head] if t < 128 * i - CHUNK * chunks else 0)
            assert 0 < chunks < 8 and state.norm() <= written[128 * i - 1, head].norm() * 2**-24
            chunks = int(part["windows_back"][i, head])
            state = dht[0, head].double()
            for t in range(T - 1, 128 * i - 1, -1):
                state = by[t, head].T @ (state + (read[t, head] if t >= 128 * i + CHUNK * chunks else 0))
            first = torch.linalg.matrix_norm(by[128 * i, head], 2) * read[128 * i, head].norm()
            assert 0 < chunks < 8 and state.norm() <= first * 2**-24


def test_the_reverse_scan_reads_nothing_after_its_window() -> None:
    """With NaN after the windows, the gradients of entering states are the same in float32."""
    x = inputs()
    plan, do = plan_of(x), torch.randn(1, T, HV, V)
    part = next(Batch(plan, x).parts(plan.launch("dplr_prepare_raw"), scale=SCALE, do=do, dht=None))
    prepare_raw(plan, part, -math.inf, G=torch.empty_like(x.g))
    found, none = part["windows_back"], dict.fromkeys(("dht", "dy", "dv", "dstates", "undivided"))
    constants = dict(K=K, V=V, TWO_WRITES=False, HAS_DHT=False, HAS_DH0=False, ALONE=True, V_FIRST=False,
                     HAS_LOW=False, VARLEN=False, GAPS=False, PRECISION="ieee")
    spoiled = do.clone()
    for i, heads in enumerate(found.tolist()):
        for head, chunks in enumerate(heads):
            spoiled[:, 128 * i + CHUNK * chunks:128 * (i + 1), head] = torch.nan
    alone = []
    for windows_back, given in (
            (found, spoiled), (torch.zeros_like(found), do), (torch.full_like(found, -1), do)):
        alone.append(torch.full((4, HV, K, V), torch.nan))
        Batch(plan, x).scan(dplr_reverse, constants,
                            {**part, **none, "do": given, "windows_back": windows_back, "dh0": alone[-1]})
    ours, whole, skipped = (one[1:] for one in alone)  # the first segment needs none
    torch.testing.assert_close(ours, whole, rtol=0, atol=1e-6 * float(whole.abs().max()))
    assert spoiled.isnan().any() and skipped.isnan().all()


@pytest.mark.parametrize(("kind", "packed", "v_first"), [
    ("forgetting", True, True), ("grouped", False, False), ("a channel keeps everything", False, True),
    ("a channel keeps everything", True, False)])
@pytest.mark.alternate
def test_layouts_and_gradients(kind: str, packed: bool, v_first: bool,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(kind, packed)
    if v_first:
        x = x._replace(h0=state_of(x).mT.contiguous())
    do, dht = torch.randn(1, T, HV, V), torch.randn(state_of(x).shape)
    ours, found = run(x, monkeypatch, v_first=v_first)
    exact, _ = run(x, monkeypatch, "dplr_windows", v_first)
    back, right = (gradients(x, do, dht, drop, v_first) for drop in ("", "dplr_windows"))
    for name, one, other in (*zip(("o", "ht"), ours, exact, strict=True),
                             *((name, back[name], right[name]) for name in ("dy", "dh0"))):
        assert_same(name, one, other)
    keeps = kind == "a channel keeps everything"
    forgets, not_split = [True, not keeps], [0, int(keeps)]
    # segments that another one follows, and segments after another one
    ends, starts = ([0, 1, 3], [1, 2, 4]) if packed else ([0, 1, 2], [1, 2, 3])
    assert (back["windows"][ends] > 0).tolist() == [forgets] * 3
    # Segment 2 of the packed sequences has only 44 tokens, which do not forget enough.
    assert (back["windows_back"][starts] > 0).tolist() == [forgets, NO if packed else forgets, forgets]
    assert back["undivided"].tolist() == ([[1, 1], not_split] if packed else [not_split])
    assert found["undivided"].tolist() == [not_split] * (1 + packed)


@pytest.mark.parametrize("segments", [4, 8])
@pytest.mark.alternate
def test_a_window_in_one_direction_only(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segment 1 has no window at its end, and segment 2 none at its start, each in one head."""
    monkeypatch.setattr(scans, "forced_parts", segments)
    x, size = inputs(), T // segments
    x = x._replace(g=x.g * 3)
    do, dht = torch.randn(1, T, HV, V), torch.randn(1, HV, K, V)
    x.v[:, 2 * size - 1, 1], do[:, 2 * size, 0] = 0, 0
    ours, _ = run(x, monkeypatch)
    exact, _ = run(x, monkeypatch, "dplr_windows")
    back, right = gradients(x, do, dht), gradients(x, do, dht, "dplr_windows")
    for name, one, other in (*zip(("o", "ht"), ours, exact, strict=True),
                             *((name, back[name], right[name]) for name in ("dy", "dh0"))):
        assert_same(name, one, other)
    without = [(back[name][edges] <= 0).nonzero().tolist() for name, edges in (
        ("windows", slice(0, -1)), ("windows_back", slice(1, None)))]
    assert without == [[[1, 1]], [[1, 0]]]
    if segments == 4:  # then heads are not split
        assert back["undivided"].tolist() == [[1, 1]] and back["windows"][1, 1] == -1
    else:  # only these two segments have transfers; the others keep the poison
        assert back["undivided"].tolist() == [[0, 0]]
        assert back["transfer"].isfinite().all((2, 3)).nonzero().tolist() == [[1, 1], [2, 0]]


def noting(found: list[dict[str, Any]], plan: Plan, x: dict[str, Any], few: int, reverse: bool) -> None:
    """Find windows, and add a copy of x with them to ``found``."""
    windows.find_windows(plan, x, few, reverse)
    found.append(x.copy())


@pytest.mark.parametrize(("op", "segments", "keeping"), [
    ("chunk_kda", 3, -2.0), ("chunk_kda", 3, 2.0), ("chunk_gdn2", 6, -2.0)])
@pytest.mark.alternate
def test_whole_calls_as_on_a_gpu(op: str, segments: int, keeping: float,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gluon kernels of a plan with windows compute the same gradients as the oracle."""
    monkeypatch.setattr(scans, "forced_parts", segments)
    found: list[dict[str, Any]] = []

    monkeypatch.setattr(raw, "find_windows", partial(noting, found))
    call = partial(channels, op, torch.device("cpu"), B=1, T=768, H=2, HV=2, D=64, state=True, keeping=keeping,
                   gradients=True)
    with running("H200,triton=3.6.0,sms=8") as names:
        ours = call()
    assert {"dplr_windows", "dplr_overlapped", "dplr_overlapped_back", "dplr_overlapped_grads"} <= {*names}
    assert max(map(far, ours, call(oracle=True))) < 0.01
    for part in found:
        assert (part["windows"][:-1] > 0).all() == (keeping < 0)
    assert (found[-1]["windows_back"][1:] > 0).all() == (keeping < 0)


@pytest.mark.parametrize(("forgets", "facts"), [
    ("all", {"D": 128, "v_first": True}), ("no head", {"D": 128, "V": 64}),
    ("one head", {"D": 128, "V": 64}), ("no gate", {"V": 128})])
@pytest.mark.alternate
def test_gradients_of_a_gated_delta_rule(forgets: str, facts: dict[str, Any],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that forget have windows in both directions, and the others have transfers."""
    monkeypatch.setattr(scans, "forced_parts", 3)
    factor = {"all": [1.0, 1.0], "no head": [1e-3, 1e-3], "one head": [1e-3, 1.0]}.get(forgets)
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(parts, "find_windows", partial(noting, found))
    monkeypatch.setattr(overlapped, "decays", lambda x: F.logsigmoid(x) * torch.tensor(factor))
    call = partial(delta, torch.device("cpu"), **{**dict(B=1, T=576, H=1, HV=2, D=64), **facts},
                   gated=forgets != "no gate", state=True, gradients=True)
    with running("H200,triton=3.6.0,sms=8") as names:
        ours = call()
    assert {"delta_overlapped_alone", "delta_overlapped_back"} <= {*names} and "delta_reverse" not in names
    assert max(map(far, ours, call(oracle=True))) < 0.01
    assert len(found) == (2 if factor else 0)
    for part in found:
        assert (part["windows"][:-1] > 0).tolist() == 2 * [[one == 1 for one in factor or ()]]
        assert (part["windows"] >= 0).all()
    for part in found[1:]:
        assert (part["windows_back"][1:] > 0).tolist() == 2 * [[one == 1 for one in factor or ()]]


def test_facts_of_a_gated_delta_rule() -> None:
    """They agree with norms in float64, also in a last chunk of 6 tokens and with rates above 2."""
    torch.manual_seed(0)
    B, T, H, HV, K, V, scale = 2, 70, 1, 2, 16, 32, -0.3
    q, k, v, do = (torch.randn(B, T, *sides) for sides in ((H, K), (H, K), (HV, V), (HV, V)))
    k, beta, g = 0.9 * F.normalize(k, dim=-1), 3 * torch.rand(B, T, HV), -torch.rand(B, T, HV)
    chunks = [(b, begin, min(begin + 64, T)) for b in range(B) for begin in (0, 64)]
    G = torch.cat([g[b, begin:end].cumsum(0) / math.log(2) for b, begin, end in chunks]).T.contiguous()
    facts = torch.full((HV, windows.FACTS, len(chunks)), torch.nan)
    kk = k.square().sum(-1).view(-1, H).T.contiguous()
    for x, y, back in ((None, v, False), (q, do, True)):
        parts.delta_facts[len(chunks) * HV,](
            y, x, beta.view(-1, HV).T.contiguous(), G, kk, facts, facts, scale, T, H, HV, B * T, 64, 2,
            len(chunks), len(chunks), K=K, V=V, BT=64, BK=16, FACTS=windows.FACTS, BACK=back)
    for i, (b, begin, end) in enumerate(chunks):
        for head in range(HV):
            rows = (b, slice(begin, end))
            key, rate = k[rows][:, 0].double(), beta[rows][:, head].double()
            decays = g[rows][:, head].double().exp()
            steps = torch.eye(K).double() - rate[:, None, None] * key[:, :, None] * key[:, None, :]
            norm = torch.linalg.matrix_norm(steps * decays[:, None, None], 2)
            added = key.norm(dim=1) * (rate[:, None] * v[rows][:, head]).norm(dim=1)
            pulled = (scale * q[rows][:, 0]).double().norm(dim=1) * do[rows][:, head].double().norm(dim=1)
            after = torch.cat([norm.flip(0).cumprod(0).flip(0)[1:], torch.ones(1)])
            through = decays.cumprod(0)
            right = torch.stack([
                norm.log2().sum(), (added * after).sum(), added[-1],
                (pulled * through).sum() * norm.prod() / through[-1], pulled[0] * decays[0]])
            assert (pulled * norm.cumprod(0)).sum() <= right[3] * (1 + 1e-12)  # the tighter bound
            right[1:3] *= begin == 0  # windows of forward do not need the last segment
            right[3:] *= begin > 0
            torch.testing.assert_close(facts[head, :, i].double(), right, rtol=1e-4, atol=1e-4)


def test_a_state_on_its_way_is_awaited_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs()
    state = state_of(x)
    arrived = state.clone()
    monkeypatch.setattr(windows, "enter", lambda: state.copy_(arrived))
    state.fill_(torch.nan)
    _, found = run(x, monkeypatch)
    assert (found["windows"][:3] > 0).all()
