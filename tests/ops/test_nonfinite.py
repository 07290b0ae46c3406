"""NaN and infinity in one of several sequences that seq_idx separates.

Such sequences share a state in the kernels. A value that is not finite must stay in its sequence and appear
in its outputs (kernels/pointwise/nonfinite.py).
"""
from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashlin
from flashlin.kernels.pointwise.nonfinite import contained

LENGTHS = ((5, 30, 1, 28), (34, 20, 10))  # lengths of the sequences in each row
T, H, P, N, G = 64, 4, 8, 8, 2
EDGES = [[sum(row[:n]) for n in range(len(row) + 1)] for row in LENGTHS]
Tensors = dict[str, torch.Tensor]


def made(dtype: torch.dtype = torch.float32, rows: int = 2) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)
    made = {"x": randn(rows, T, H, P), "dt": randn(rows, T, H).sigmoid(), "A": -0.02 * randn(H).abs(),
            "B": randn(rows, T, G, N), "C": randn(rows, T, G, N), "D": randn(H), "z": randn(rows, T, H, P),
            "initial_states": randn(rows, H, P, N)}
    return {name: x.to(dtype) if name in ("x", "B", "C", "z") else x for name, x in made.items()}


def numbers(rows: int = 2) -> torch.Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row))
                        for row in LENGTHS])[:rows]


def run(inputs: Tensors, cotangents: Tensors | None = None,
        **extra: Any) -> tuple[list[torch.Tensor], Tensors]:
    rows = len(inputs["x"])
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    found = flashlin.mamba_chunk_scan_combined(**leaves, chunk_size=64, seq_idx=numbers(rows),
                                               return_final_states=True, **extra)
    dys = [(cotangents or {}).get(name, torch.ones_like(y))
           for name, y in zip(("y", "ht"), found, strict=False)]
    grads = torch.autograd.grad(found[:2], list(leaves.values()), dys)
    return [y.detach() for y in found], dict(zip(leaves, grads, strict=True))


def sequence_of(row: int, token: int) -> slice:
    at = next(n for n, edge in enumerate(EDGES[row][1:]) if token < edge)
    return slice(EDGES[row][at], EDGES[row][at + 1])


OF_TOKENS = ("x", "dt", "B", "C", "z")


@pytest.mark.parametrize("name", ["x", "dt", "B", "C"])
@pytest.mark.parametrize(("row", "token"), [(0, 0), (0, 20), (0, 35), (0, 63), (1, 33), (1, 34)])
def test_a_sequence_is_marked_from_the_token_on_and_no_other(name: str, row: int, token: int) -> None:
    inputs = made()
    (y, ht), grads = run(inputs)
    inputs[name] = inputs[name].clone()
    inputs[name][row, token, 1] = torch.nan
    (broken, broken_ht), broken_grads = run(inputs)
    its = sequence_of(row, token)
    assert broken[row, token:its.stop].isnan().all()
    broken[row, token:its.stop] = y[row, token:its.stop]
    assert broken.equal(y)
    assert broken_ht[row].isnan().all() == (its.stop == T)
    broken_ht[row] = ht[row]
    assert broken_ht.equal(ht)
    for of, dx in broken_grads.items():
        if of in ("x", "dt", "B", "C"):
            marked = dx[row, its].isnan()
            marked[token - its.start] |= of == "dt"  # the clamp to dt_limit gives a NaN dt the gradient 0
            assert marked.all()
        if of in OF_TOKENS:
            dx[row, its] = grads[of][row, its]
            torch.testing.assert_close(dx, grads[of])
    assert broken_grads["initial_states"][row].isnan().all() == (its.start == 0)


def test_an_initial_state_marks_the_first_sequence() -> None:
    inputs = made()
    (y, ht), grads = run(inputs)
    inputs["initial_states"][1, 2, 3, 4] = math.inf
    (broken, broken_ht), broken_grads = run(inputs)
    assert broken[1, :34].isnan().all() and broken_ht.equal(ht)
    broken[1, :34] = y[1, :34]
    assert broken.equal(y)
    assert broken_grads["initial_states"][1].isnan().all() and broken_grads["initial_states"][0].equal(
        grads["initial_states"][0])


def test_gradients_of_outputs_mark_what_they_depend_on() -> None:
    inputs = made()
    (y, ht), grads = run(inputs)
    dy, dht = torch.ones_like(y), torch.ones_like(ht)
    dy[0, 20, 1, 2], dht[1, 3, 0, 0] = torch.nan, math.inf
    _, broken = run(inputs, {"y": dy, "ht": dht})
    for name in ("x", "dt", "B", "C"):
        assert broken[name][0, 5:21].isnan().all() and broken[name][1, 54:].isnan().all()
        for row, kept in ((0, slice(5)), (0, slice(21, None)), (1, slice(54))):
            torch.testing.assert_close(broken[name][row, kept], grads[name][row, kept])
    assert broken["initial_states"].equal(grads["initial_states"])


@pytest.mark.parametrize("first", [0, 5, 12])
def test_edges_and_numbers_together(first: int) -> None:
    """cu_seqlens and seq_idx may divide the tokens differently.

    Here a sequence of cu_seqlens contains tokens with several values of seq_idx. The first sequence may be
    empty.
    """
    edges = torch.tensor([0, first, 35, 35, T], dtype=torch.int32)
    inputs = made(rows=1)

    def states() -> tuple[torch.Tensor, torch.Tensor]:
        y, _, of_sequences = flashlin.mamba_chunk_scan_combined(**inputs, chunk_size=64, seq_idx=numbers(1),
                                                                cu_seqlens=edges, return_varlen_states=True,
                                                                return_final_states=True)
        return y, of_sequences
    y, of_sequences = states()
    inputs["initial_states"][0, 1] = torch.nan
    inputs["x"][0, 34, 2] = torch.nan
    broken, broken_states = states()
    # the second number of seq_idx begins at token 5
    assert broken_states[0, 1].isnan().all() == (first <= 5)
    assert broken_states[1].isnan().all() and not broken_states[2:].isnan().any()
    stop = min(first, 5)
    assert broken[0, :stop].isnan().all() and broken[0, 34].isnan().all()
    broken[0, :stop], broken[0, 34] = y[0, :stop], y[0, 34]
    assert broken.equal(y)


def test_a_sequence_for_each_token() -> None:
    """There may be as many sequences as tokens.

    An earlier version had too little memory for the index of the last sequence.
    """
    inputs = {name: x if name in ("A", "D", "initial_states") else x[:, :5]
              for name, x in made(rows=1).items()}
    inputs["x"][0, 2] = torch.nan
    tokens = torch.arange(6, dtype=torch.int32)
    y, of_sequences = flashlin.mamba_chunk_scan_combined(**inputs, chunk_size=64, seq_idx=tokens[None, :5],
                                                         cu_seqlens=tokens, return_varlen_states=True)
    for x in (y[0], of_sequences):
        assert x[2].isnan().all() and x[[0, 1, 3, 4]].isfinite().all()


def test_what_float16_cannot_hold_counts_as_well() -> None:
    """A product dt x that overflows in float16 counts as not finite.

    It is finite in float32, but the scan reads it in the dtype of x.
    """
    inputs = made(torch.float16)
    inputs["dt"] = inputs["dt"] + 2.0
    (y, _), _ = run(inputs)
    inputs["x"][0, 20, 1, 0] = 60000.0
    (broken, _), _ = run(inputs)
    assert broken[0, 20:35].isnan().all() and broken[0, 35:].equal(y[0, 35:]) and broken[0,
                                                                                         :20].equal(y[0, :20])


def test_a_decay_of_minus_infinity_is_finite_enough() -> None:
    inputs = made()
    inputs["A"][1] = -math.inf
    (y, _), _ = run(inputs)
    assert y.isfinite().all()


def test_a_token_that_forgets_everything_in_all_heads_is_not_marked() -> None:
    d = torch.randn(1, 3, 4)
    d[0, 1] = -math.inf  # a log decay
    [kept], marks = contained((d,), endless=True)
    assert torch.equal(kept, d) and torch.equal(marks, torch.zeros(1, 3))
    d[0, 2, 0] = math.nan
    assert contained((d,), endless=True)[1].isnan().tolist() == [[False, False, True]]
