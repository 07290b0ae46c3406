"""settings(invariant=True) in Triton's interpreter. tests/invariance.py has the checks."""
from __future__ import annotations

import pytest
import torch

import flashlin
from flashlin.kernels import scans
from tests.invariance import OPS, Tensors, compare, inputs, run


@pytest.mark.parametrize("op", OPS)
@pytest.mark.alternate
def test_a_row_alone_a_prefix_and_a_prefill_in_pieces(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "forced_parts", 3)  # without the setting, sequences are split
    T, prefix = (600, 500) if op == "chunk_hgrn" else (210, 77)  # because its segments are longer
    x = inputs(op, T, 1, 16, torch.device("cpu"), torch.float32)
    with flashlin.settings(invariant=True):
        compare(op, x, prefix, cut=128)


PREFIX = 77  # within a chunk


def of_prefix(op: str, x: Tensors) -> dict[str, torch.Tensor]:
    """Return the outputs of the prefix, and its gradients of a loss that reads only these outputs."""
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    o, _ = run(op, leaves)
    before = o[:, :PREFIX]
    pull = torch.linspace(-1, 1, before.numel()).view_as(before)
    grads = torch.autograd.grad(before, [*leaves.values()], pull)
    return {"o": before, **{f"d{name}": grad if name == "u" else grad[:, :PREFIX]
                            for name, grad in zip(leaves, grads, strict=True)}}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.alternate
def test_later_tokens_change_no_earlier_bit(op: str) -> None:
    """Later gates decide how a kernel computes a chunk, but never with this setting."""
    x = inputs(op, 140, 1, 16, torch.device("cpu"), torch.float32)
    with flashlin.settings(invariant=True):
        right = of_prefix(op, x)
        for decay in (0.0, -5.0, -100.0):
            other = {name: t.clone() for name, t in x.items()}
            for name in other.keys() & {"g", "gk", "w"}:
                other[name][:, PREFIX:] = decay
            other["v" if "v" in other else "x"][:, PREFIX:] *= 3
            found = of_prefix(op, other)
            assert [name for name in right if not torch.equal(found[name], right[name])] == [], decay


def test_without_the_setting_later_gates_round_earlier_outputs() -> None:
    """The chunks of this call fit one decay reference, or do not, by the gates of their later tokens."""
    x = inputs("chunk_kda", 140, 1, 16, torch.device("cpu"), torch.float32)
    other = {**x, "g": x["g"].clone()}
    other["g"][:, 77:] = -100.0
    (o, _), (changed, _) = run("chunk_kda", x), run("chunk_kda", other)
    before, after = o[:, :77], changed[:, :77]
    assert not torch.equal(before, after)
    assert float((before - after).abs().max()) < 1e-5 * float(before.abs().max())
