"""torch.func transforms and forward-mode AD, on the torch path in float64.

Per-sample gradients, Jacobian-vector products and batches of vmap equal the results of backward. No kernel
starts inside a transform.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn
from torch.autograd import forward_ad

import flashlin
from flashlin import mamba
from flashlin.compat import launch as door
from flashlin.compat import target as machine
from tests.hostile import OPS, arguments
from tests.ops.test_composed import inner_inputs
from tests.ops.test_dynamic import tensors_of

Leaves = dict[str, Tensor]
# These ops write to their arguments and have no gradients.
WRITING = ("causal_conv1d_update", "mamba_causal_conv1d_update", "selective_state_update")
INSTEAD = {"inplace": False, "inplace_backward": False, "final_states_out": None,
           "output_dtype": torch.float64, "out_dtype": None}
CHUNKED = ("chunk_simple_gla", "chunk_kda", "chunk_rwkv6", "mamba3_siso_combined")


def long(op: str) -> dict[str, Any]:
    """Return the necessary arguments of an op, with more tokens than fit into a chunk."""
    T, H, K = 70, 2, 4
    q, g = F.normalize(randn(1, T, H, K), dim=-1), -torch.rand(1, T, H, K)
    if op == "mamba3_siso_combined":
        tokens = {name: randn(1, H, T) for name in ("DT", "Trap")}
        return {**{name: randn(1, T, H, K) for name in "QKV"}, **tokens, "ADT": -torch.rand(1, H, T),
                "Q_bias": randn(H, K), "K_bias": randn(H, K), "Angles": randn(1, T, H, 1),
                "Z": None, "D": None}
    named = {"r": q, "w": g, "u": randn(H, K)} if op == "chunk_rwkv6" else {"q": q}
    gates = {"chunk_simple_gla": {"g": g[..., 0]}, "chunk_kda": {"g": g, "beta": g[..., 0].exp()}}
    return {**named, "k": q.roll(1, 1), "v": randn(1, T, H, K), **gates.get(op, {})}


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    **{op: (getattr(flashlin, op), partial(arguments, op)) for op in OPS if op not in WRITING},
    **{f"{op}, long": (getattr(flashlin, op), partial(long, op)) for op in CHUNKED},
    "mamba_inner_fn": (mamba.mamba_inner_fn, partial(inner_inputs, "everything"))}


class Problem:
    """A scalar function of the floating-point tensors of a call, with its gradients by backward."""

    def __init__(self, function: Callable[..., Any], given: dict[str, Any]) -> None:
        self.function = function
        self.given = {name: INSTEAD.get(name, x) for name, x in given.items()}
        self.leaves: Leaves = {}
        for name, x in self.given.items():
            for at, part in enumerate(x if isinstance(x, tuple) else (x,)):
                if isinstance(part, Tensor) and part.is_floating_point():
                    self.leaves[f"{name} {at}"] = part.double()
        self.weights = [randn(y.shape, dtype=torch.float64) for y in self.outputs(self.leaves)]
        self.tangents = {name: torch.randn_like(x) for name, x in self.leaves.items()}

    def outputs(self, leaves: Leaves) -> list[Tensor]:
        def of(name: str, x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(leaves.get(f"{name} {at}", part) for at, part in enumerate(x))
            return leaves.get(f"{name} 0", x)
        return tensors_of(self.function(**{name: of(name, x) for name, x in self.given.items()}))

    def loss(self, leaves: Leaves) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for weight, y in zip(self.weights, self.outputs(leaves), strict=True):
            total = total + (weight * y.sin()).sum()
        return total

    def gradients(self, leaves: Leaves) -> Leaves:
        own = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        found = torch.autograd.grad(self.loss(own), list(own.values()), allow_unused=True,
                                    materialize_grads=True)
        return dict(zip(own, found, strict=True))

    def product(self) -> Tensor:
        """Return the derivative of the loss in the direction of the tangents."""
        return torch.stack([(x * self.tangents[name]).sum()
                            for name, x in self.gradients(self.leaves).items()]).sum()


def assert_same(found: Leaves, wanted: Leaves) -> None:
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-8,
                                   msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.alternate
def test_transforms_equal_backward(name: str) -> None:
    torch.manual_seed(0)
    function, make = CALLS[name]
    problem = Problem(function, make())
    assert_same(torch.func.grad(problem.loss)(problem.leaves), problem.gradients(problem.leaves))
    samples = {key: torch.stack([x, 0.9 * x]) for key, x in problem.leaves.items()}
    by_sample = torch.func.vmap(torch.func.grad(problem.loss))(samples)
    for at in range(2):
        assert_same({key: x[at] for key, x in by_sample.items()},
                    problem.gradients({key: x[at] for key, x in samples.items()}))
    wanted = problem.product()
    _, found = torch.func.jvp(problem.loss, (problem.leaves,), (problem.tangents,))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    with forward_ad.dual_level():
        dual = {key: forward_ad.make_dual(x, problem.tangents[key]) for key, x in problem.leaves.items()}
        tangent = forward_ad.unpack_dual(problem.loss(dual)).tangent
    torch.testing.assert_close(tangent, wanted, rtol=1e-6, atol=1e-8)


@pytest.fixture
def started() -> Iterator[list[str]]:
    """Collect the names of kernels that start on a simulated GPU. No kernel runs."""
    found: list[str] = []
    machine.pretend(machine.parse("triton=3.6.0,sm=90"))
    door.replace_starter(lambda launch, *rest: found.append(launch.kernel))
    yield found
    door.replace_starter(None)
    machine.pretend(None)


def in_forward_mode(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]), "grad": lambda call, x: torch.func.grad(call)(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),)), "forward mode": in_forward_mode}


@pytest.mark.parametrize("way", TRANSFORMS)
def test_no_kernel_is_started_inside(way: str, started: list[str]) -> None:
    x, weight = randn(1, 6, 2, 16), randn(16)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: flashlin.chunk_gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 0])[0].sum(),
        lambda x: flashlin.rms_norm(x, weight, None).sum(), lambda x: flashlin.token_shift(x[0]).sum()]
    for call in calls:
        TRANSFORMS[way](call, x)
        assert not started
        call(x)
        assert started
        started.clear()


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    """A NaN stays in its sequence inside a transform.

    Outputs and tangents of the other sequence are finite.
    """
    x, A, B, dt = randn(1, 6, 2, 4), -torch.rand(2), randn(1, 6, 1, 3), torch.rand(1, 6, 2)
    x[0, 1] = torch.nan
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)

    def run(B: Tensor) -> Tensor:
        y: Tensor = flashlin.mamba_chunk_scan_combined(x, dt, A, B, B, 16, seq_idx=seq_idx)
        return y
    y, tangent = torch.func.jvp(run, (B,), (torch.ones_like(B),))
    torch.testing.assert_close(y, run(B), equal_nan=True)
    assert y[:, 1:3].isnan().all() and y[:, 3:].isfinite().all() and tangent[:, 3:].isfinite().all()


def test_an_embedding_has_tangents() -> None:
    tokens, weight = torch.tensor([1, 3, 1]), randn(4, 5)
    tangent = torch.randn_like(weight)
    with forward_ad.dual_level():
        rows = flashlin.embedding(tokens, forward_ad.make_dual(weight, tangent))
        assert torch.equal(forward_ad.unpack_dual(rows).tangent, tangent[tokens])
    _, found = torch.func.jvp(lambda weight: flashlin.embedding(tokens, weight), (weight,), (tangent,))
    assert torch.equal(found, tangent[tokens])
