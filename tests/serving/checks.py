"""Checks of flashlin.serving that run on a CPU, in the interpreter and on a GPU.

Random layers are compared with a float64 delta rule, token by token and head by head. Results must be
bitwise equal where that is promised, and slots of the pool that no request names must not change.
"""
from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashlin import serving
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.serving import delta
from flashlin.testing.compare import poisoned

KINDS = ("plain", "heads", "heads, raw", "channels", "channels, raw", "channels, raw, bounded")
Tokens = dict[str, Tensor | None]


class Layer(NamedTuple):
    """Sizes, dtypes and options of one layer.

    kind: one of KINDS, which describes the gates.
    dtype: dtype of the tokens.
    state: dtype of the pool of states.
    neg: allows negative eigenvalues.
    """
    kind: str
    H: int = 2
    HV: int = 4
    K: int = 24
    V: int = 40
    dtype: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    neg: bool = False
    device: str = "cpu"

    @property
    def raw(self) -> bool:
        return "raw" in self.kind

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.device)

    def integers(self, *values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values[0] if len(values) == 1 else values, dtype=dtype, device=self.device)

    def parameters(self) -> dict[str, Any]:
        """Return the options and parameters that every call of the layer receives."""
        options: dict[str, Any] = dict(use_qk_l2norm_in_kernel=True)
        if self.raw:
            bias = self.HV * self.K if "channels" in self.kind else self.HV
            options |= dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                            allow_neg_eigval=self.neg, A_log=self.normal(self.HV) / 2,
                            dt_bias=self.normal(bias))
        return options | (dict(lower_bound=-5.0) if "bounded" in self.kind else {})

    def tokens(self, rows: int) -> Tokens:
        """Return random q, k, v, g and beta of ``rows`` tokens, each [rows, heads, ...]."""
        g = self.normal(rows, self.HV, *[self.K] * ("channels" in self.kind))
        beta = self.normal(rows, self.HV)
        return {"q": self.normal(rows, self.H, self.K).to(self.dtype),
                "k": self.normal(rows, self.H, self.K).to(self.dtype),
                "v": self.normal(rows, self.HV, self.V).to(self.dtype),
                "g": None if self.kind == "plain" else g.to(self.dtype) if self.raw else -g.abs(),
                "beta": beta.to(self.dtype) if self.raw else beta.sigmoid()}

    def pool(self, slots: int) -> Tensor:
        return self.normal(slots, self.HV, self.V, self.K).to(self.state)


def at(tokens: Tokens, rows: Any) -> Tokens:
    return {name: None if x is None else x[rows] for name, x in tokens.items()}


def decoded(options: dict[str, Any], tokens: Tokens, states: Tensor, indices: Tensor, T: int = 1,
            **more: Any) -> Tensor:
    """Decode T tokens for each of N requests and return o [N * T, HV, V]; tokens are [N * T, ...]."""
    apart = {name: None if x is None else x.view(-1, T, *x.shape[1:]) for name, x in tokens.items()}
    with torch.no_grad(), poisoned():
        return serving.decode(**apart, states=states, indices=indices, **options, **more).flatten(0, 1)


def prefilled(options: dict[str, Any], tokens: Tokens, states: Tensor, indices: Tensor, lengths: list[int],
              has: list[bool], mode: str) -> Tensor:
    """Prefill packed tokens [rows, ...] of several requests and return o [rows, HV, V].

    lengths: number of tokens of each request.
    has: for each request, True if it continues from its state in the pool.
    """
    device = states.device
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    packed = {name: None if x is None else x[None] for name, x in tokens.items()}
    with torch.no_grad(), poisoned():
        return serving.prefill(**packed, states=states, indices=indices, cu_seqlens=edges,
                               has_initial_state=torch.tensor(has, dtype=torch.bool, device=device),
                               mode=mode, **options)[0]


def sequential(layer: Layer, tokens: Tokens, options: dict[str, Any], S: Tensor) -> tuple[Tensor, Tensor]:
    """Run one request's tokens from state S, and return o [rows, HV, V] and the new S [HV, V, K] in float64.

    The state is rounded to its dtype after each token.
    """
    wide = {name: x.double().cpu() for name, x in (*tokens.items(), *options.items())
            if isinstance(x, Tensor)}
    q, k, v, beta, g = wide["q"], wide["k"], wide["v"], wide["beta"], wide.get("g")
    states = [*S.double().cpu()]
    outputs = torch.zeros(v.shape, dtype=torch.float64)
    for t in range(len(v)):
        for h in range(layer.HV):
            of = h * layer.H // layer.HV
            read, key = (x[t, of] / (x[t, of].dot(x[t, of]) + 1e-6) ** 0.5 for x in (q, k))
            strength = (1 + layer.neg) / (1 + (-beta[t, h]).exp()) if layer.raw else beta[t, h]
            if g is not None:
                rate = g[t, h]
                if layer.raw:
                    speed = wide["A_log"][h].exp()
                    rate = rate + wide["dt_bias"].view(layer.HV, -1)[h].view(rate.shape)
                    rate = (-5 / (1 + (-speed * rate).exp()) if "bounded" in layer.kind
                            else -speed * rate.exp().log1p())
                states[h] = states[h] * rate.exp()
            wrong = v[t, h] - states[h] @ key
            states[h] = states[h] + torch.outer(strength * wrong, key)
            outputs[t, h] = states[h] @ read * layer.K ** -0.5
            states[h] = states[h].to(layer.state).double()
    return outputs, torch.stack(states)


def close(got: Tensor, wanted: Tensor, allowed: float) -> None:
    difference = got.double().cpu() - wanted
    error = float(difference.norm() / max(float(wanted.norm()), 1e-9))
    assert error <= allowed, f"{error:.1e} of the right answer, need {allowed:.0e}"  # False for NaN


def same(got: Tensor, wanted: Tensor) -> None:
    assert torch.equal(got, wanted), f"{int((got != wanted).sum())} of {got.numel()} elements differ"


def untouched(pool: Tensor, before: Tensor, written: set[int]) -> None:
    rest = [slot for slot in range(len(pool)) if slot not in written]
    same(pool[rest], before[rest])


def allowed(layer: Layer) -> tuple[float, float]:
    """Return the allowed relative errors of outputs and of states."""
    full = 2e-6 if layer.device == "cpu" else 2e-5  # on a GPU, exp is less exact, and products are 3xTF32
    most = {torch.float32: full, torch.float16: 1e-3, torch.bfloat16: 6e-3}
    return max(most[layer.dtype], most[layer.state]), 2 * most[layer.state]


def check_decoding(layer: Layer) -> None:
    """Check one decoding step in which two padded requests name the slots -1 and 6, just outside the pool."""
    options, pool = layer.parameters(), layer.pool(6)
    before, tokens, slots = pool.clone(), layer.tokens(5), [4, -1, 0, 6, 3]
    o = decoded(options, tokens, pool, layer.integers(slots))
    for n, slot in enumerate(slots):
        if slot in (-1, 6):
            assert not o[n].any()
            continue
        wanted, S = sequential(layer, at(tokens, [n]), options, before[slot])
        close(o[[n]], wanted, allowed(layer)[0])
        close(pool[slot], S, allowed(layer)[1])
    untouched(pool, before, {4, 0, 3})


def check_drafts(layer: Layer, drafts: int = 2) -> None:
    """Check speculative decoding with all numbers of accepted drafts against plain decoding, bitwise."""
    options, T = layer.parameters(), drafts + 1
    patterns = [[a] for a in range(1, T + 1)] if drafts > 1 else [[1], [2]]
    N = len(patterns)
    pool, alone = layer.pool((N + 1) * T), layer.pool(N)
    rows = torch.randperm(N * T).view(N, T)
    table = torch.cat([rows, torch.full((1, T), -1)]).to(torch.int32).to(layer.device)  # and a padded request
    own = torch.arange(N, dtype=torch.int32, device=layer.device)
    pool[rows[:, 0].to(layer.device)] = alone
    before = pool.clone()
    counts = torch.ones(N + 1, dtype=torch.int32)
    for step in range(3):
        tokens = layer.tokens((N + 1) * T)
        o = decoded(options, tokens, pool, table, T, num_accepted_tokens=counts.to(layer.device))
        assert not o[N * T:].any()
        counts = torch.tensor([1 + (p[0] + step) % T for p in patterns] + [1], dtype=torch.int32)
        for t in range(T):
            going = [n for n in range(N) if t < counts[n]]
            if going:
                mine = [n * T + t for n in going]
                same(o[mine], decoded(options, at(tokens, mine), alone, own[going]))
        same(pool[[int(rows[n, counts[n] - 1]) for n in range(N)]], alone)
    untouched(pool, before, set(range(N * T)))


def check_drafts_of_several_lengths(layer: Layer) -> None:
    """Check packed drafts of several lengths, some from a zero state and some without a slot to store to."""
    options, lengths, counts = layer.parameters(), [1, 3, 0, 2], [2, 0, 1, 3]
    pool = layer.pool(14)
    before, tokens = pool.clone(), layer.tokens(sum(lengths))
    table = layer.integers([[0, 1, 2], [3, -1, 5], [6, 7, 8], [9, 10, 11]])
    edges = [0, *accumulate(lengths)]
    packed = {name: None if x is None else x[None] for name, x in tokens.items()}
    with torch.no_grad(), poisoned():
        o = serving.decode(**packed, states=pool, indices=table, cu_seqlens=layer.integers(edges),
                           num_accepted_tokens=layer.integers(counts), **options)[0]
    for n, (first, last) in enumerate(pairwise(edges)):
        S = before[[table[n, max(counts[n] - 1, 0)].item()]] * bool(counts[n])
        for t in range(last - first):
            same(o[[first + t]], decoded(options, at(tokens, [first + t]), S, layer.integers([0])))
            slot = int(table[n, t])
            if slot >= 0:
                same(pool[slot], S[0])
    untouched(pool, before, {0, 3, 5, 9, 10})


def check_prompts(layer: Layer, mode: str, lengths: list[int]) -> None:
    """Check packed prompts, in one call and in two pieces each.

    One request is padding, one may be empty, and the last one continues from its slot. In mode
    fused_recurrent the results must be bitwise those of decoding.
    """
    options, N = layer.parameters(), len(lengths)
    slots = [*range(N)][::-1]
    slots[1] = N + 1  # outside the pool: a padded request
    indices, has = layer.integers(slots), [n == N - 1 for n in range(N)]
    pool = layer.pool(N + 1)
    before, tokens = pool.clone(), layer.tokens(sum(lengths))
    o = prefilled(options, tokens, pool, indices, lengths, has, mode)
    edges = [0, *accumulate(lengths)]
    own = layer.pool(N)
    for n, (first, last) in enumerate(pairwise(edges)):
        S = before[min(slots[n], N)].clone() * has[n]
        if n == 1:
            assert not o[first:last].any()
        elif last > first and mode == "chunk":
            wanted, after = sequential(layer, at(tokens, slice(first, last)), options, S)
            close(o[first:last], wanted, 3 * allowed(layer)[0])
            close(pool[slots[n]], after, 3 * max(allowed(layer)))
        elif last > first:
            own[n] = S
            for t in range(first, last):
                same(o[[t]], decoded(options, at(tokens, [t]), own, layer.integers([n])))
            same(pool[slots[n]], own[n])
    untouched(pool, before, {slots[n] for n in range(N) if lengths[n] and n != 1})
    again = before.clone()  # first half of each prompt, then the second halves in another order
    cut, order = [length // 2 for length in lengths], [*range(N)][::-1]
    firsts = torch.cat([torch.arange(edges[n], edges[n] + cut[n]) for n in range(N)])
    rest = torch.cat([torch.arange(edges[n] + cut[n], edges[n + 1]) for n in order])
    pieces = torch.zeros_like(o)
    pieces[firsts] = prefilled(options, at(tokens, firsts), again, indices, cut, has, mode)
    pieces[rest] = prefilled(options, at(tokens, rest), again, indices[order],
                             [lengths[n] - cut[n] for n in order],
                             [has[n] or cut[n] > 0 for n in order], mode)
    if mode == "fused_recurrent":
        same(pieces, o)
        same(again, pool)
    else:
        close(pieces, o.double().cpu(), 4 * allowed(layer)[0])
        close(again, pool.double().cpu(), 4 * max(allowed(layer)))


def check_rows_of_nobody(layer: Layer) -> None:
    """Check that rows before the first and after the last sequence get zeros and change no state.

    Only cu_seqlens on a GPU can leave such rows, because the host does not read its values.
    """
    pool, tokens = layer.pool(3), layer.tokens(6)
    before = pool.clone()
    x = Inputs(**{name: y[None] for name, y in tokens.items() if y is not None},  # type: ignore[arg-type]
               bounds=layer.integers(1, 3, 5))
    beside = delta.Beside(pool, layer.integers([[2], [0]]), None, layer.K ** -0.5, "l2norm", layer.dtype,
                          "fused_recurrent_gated_delta_rule")
    with poisoned():
        o = delta.DECODE.run_planned(x, beside)[0]
    assert not o[[0, 5]].any()
    options = dict(use_qk_l2norm_in_kernel=True)
    alone = before.clone()
    for rows, slot in (([1, 2], 2), ([3, 4], 0)):
        for row in rows:
            same(o[[row]], decoded(options, at(tokens, [row]), alone, layer.integers([slot])))
    same(pool, alone)


def check_isolation(layer: Layer, mode: str) -> None:
    """Check that NaN and inf in one request's tokens or state, or in unread slots, reach no other request."""
    options, pool, tokens = layer.parameters(), layer.pool(4), layer.tokens(6)
    slots, lengths, has = layer.integers(2, 0, 1), [2, 2, 2], [True, False, True]
    states = pool.clone()
    right = prefilled(options, tokens, states, slots, lengths, has, mode)
    for name in ("q", "k", "v", "beta"):
        broken = dict(tokens)
        x = broken[name]
        assert x is not None
        broken[name] = x.clone()
        broken[name][5] = float("nan") if name != "v" else float("inf")  # type: ignore[index]
        unclean = pool.clone()
        unclean[0], unclean[3], unclean[1, 0, 0, 0] = float("nan"), float("inf"), float("nan")
        o = prefilled(options, broken, unclean, slots, lengths, has, mode)
        same(o[:4], right[:4])
        same(unclean[[2, 0]], states[[2, 0]])
        assert not o[4:].isfinite().all() and bool(unclean[3].isinf().all())
