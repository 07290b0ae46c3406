"""Second-order gradients: the torch path has them, and the kernels of every op raise an error.

tests/interpret checks the first-order gradients of the kernels.
"""
from __future__ import annotations

from threading import Thread

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.compat import launch as door
from flashlin.compat.target import parse, pretend
from flashlin.policy import Policy
from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case, Tensors

FIRST = {case.op: case for case in reversed(CASES)}     # one case of each op
OPERATORS = ("chunk_simple_gla", "chunk_kda", "fused_recurrent_kda", "chunk_hgrn", "layer_norm",
             "causal_conv1d", "selective_scan_fn",
             # when traced, the gradients of the next two are computed by library operators of their own
             "cross_entropy_loss", "fused_linear_cross_entropy_loss")


@pytest.fixture
def starts() -> list[str]:
    """Return a list that collects the names of started kernels on a simulated GPU.

    The kernels do not run, so they write nothing.
    """
    seen: list[str] = []
    pretend(parse("triton=3.6.0,sm=90"))
    door.replace_starter(lambda launch, *rest: seen.append(launch.kernel))
    return seen


def tensors_of(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensors, Tensors]:
    """Return all tensors of a case, and the ones among them that get a gradient."""
    made = case.make(dtype, torch.Generator().manual_seed(0))
    return made, {name: x.requires_grad_()
                  for name, x in made.items() if x.is_floating_point() and name not in case.constant}


def first_order(case: Case, made: Tensors, leaves: Tensors) -> list[torch.Tensor]:
    """Return the gradients of a sum that is linear in the outputs.

    The output gradient is therefore constant. Only tensors that forward saved can be differentiated again.
    """
    outputs = [o for o in case.call(**made).values() if o.requires_grad]
    grads = torch.autograd.grad(sum((o * torch.linspace(-1, 1, o.numel()).reshape(o.shape)).sum()
                                    for o in outputs), list(leaves.values()),
                                create_graph=True, allow_unused=True)
    return [x for x in grads if x is not None and x.requires_grad]


def seconds(grads: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
    return torch.autograd.grad(sum(grad.sum() for grad in grads), x, retain_graph=True,
                               allow_unused=True)[0] if grads else None


@pytest.mark.parametrize("op, traced", [*((op, False) for op in FIRST), *((op, True) for op in OPERATORS)])
@pytest.mark.filterwarnings("ignore:.*torch path")
def test_what_the_torch_path_has_the_kernels_refuse(op: str, traced: bool, starts: list[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels raise an error for each tensor whose second derivative the torch path returns.

    traced: calls the ops through their library operators.
    """
    case = FIRST[op]
    with flashlin.settings(path="torch"):
        made, leaves = tensors_of(case)
        grads = first_order(case, made, leaves)
        nowhere = op == "fused_linear_cross_entropy_loss"   # raises the error on each path
        wanted = leaves if nowhere else [name
                                         for name, x in leaves.items()
                                         if (found := seconds(grads, x)) is not None
                                         and found.any()]
    assert not starts and (wanted or op in ("token_shift", "rotary_embedding")), "linear, the only ones"
    made, leaves = tensors_of(case)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: traced)
    grads = first_order(case, made, leaves)
    if op == "selective_state_update":      # runs in plain torch if a tensor requires a gradient
        assert all(seconds(grads, leaves[name]) is not None for name in wanted)
        return
    assert starts
    for name in wanted:
        with pytest.raises(RuntimeError, match=r"there are no second-order gradients here; .*path=.torch"):
            seconds(grads, leaves[name])


@pytest.mark.parametrize("op", ["kda", "gated_norm", "cross_entropy"])
def test_the_torch_path_s_are_right(op: str) -> None:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    call, tensors = {
        "kda": (lambda q, k, v, g, beta, h0: flashlin.chunk_kda(q, k, v, -g.exp(), beta.sigmoid(), 0.5, h0,
                                                                True),
                (leaf(1, 3, 1, 2), leaf(1, 3, 1, 2), leaf(1, 3, 1, 2), leaf(1, 3, 1, 2), leaf(1, 3, 1),
                 leaf(1, 1, 2, 2))),
        "gated_norm": (lambda x, g, weight, bias, residual: flashlin.layer_norm_gated(x, g, weight, bias,
                                                                                      residual=residual,
                                                                                      prenorm=True),
                       (leaf(2, 4), leaf(2, 4), leaf(4), leaf(4), leaf(2, 4))),
        "cross_entropy": (lambda x: flashlin.cross_entropy_loss(x, torch.tensor([1, -100, 2]), 0.1, 1.5, 0.2,
                                                                3.0)[0], (leaf(3, 4),)),
    }[op]
    with flashlin.settings(path="torch"):
        assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("op", FIRST)
@pytest.mark.filterwarnings("ignore:.*torch path")
def test_backward_keeps_the_policy_of_its_forward(op: str, starts: list[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward plans with the policy of its forward, or does not plan at all.

    It runs in another thread and under other settings here.
    """
    case, asked = FIRST[op], set[Policy]()
    made, leaves = tensors_of(case)
    with flashlin.settings(ignore={"sm121-ptxas"}) as of_forward:
        loss = sum(o.sum() for o in case.call(**made).values() if o.requires_grad)
    plan = dispatch.plan
    monkeypatch.setattr(dispatch, "plan",
                        lambda problem, target, policy: asked.add(policy) or plan(problem, target, policy))
    failed: list[Exception] = []

    def backward() -> None:
        try:
            with flashlin.settings(path="torch"):
                torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        except Exception as error:
            failed.append(error)
    thread = Thread(target=backward)
    thread.start()
    thread.join()
    assert not failed and asked <= {of_forward}, failed
