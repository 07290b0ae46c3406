"""The selective scan of Mamba on the torch path; tests/interpret tests the kernels.

The tests cover gradients, B and C without a token dimension, errors that name the argument and torch.compile.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch

import flashlin
from flashlin import mamba
from flashlin.compat.target import parse
from flashlin.dispatch import plan
from flashlin.guards.plan_types import Problem
from flashlin.kernels.mamba import reference
from flashlin.testing.cases.mamba import make_selective
from flashlin.testing.compare import judge

CPU = torch.device("cpu")
H200 = parse("triton=3.6.0,sm=90")


def made(dtype: torch.dtype = torch.float64, **facts: Any) -> dict[str, torch.Tensor]:
    given = make_selective(dtype, torch.Generator().manual_seed(0), **{"T": 5, "D": 4, "N": 3, **facts})
    return {name: x.to(dtype) for name, x in given.items()}


def test_gradients_are_those_of_differences() -> None:
    given = {name: x.requires_grad_() for name, x in made(G=2).items()}
    names = list(given)

    def scan(*tensors: torch.Tensor) -> Any:
        return flashlin.selective_scan_fn(**dict(zip(names, tensors, strict=True)), delta_softplus=True,
                                          return_last_state=True)
    assert torch.autograd.gradcheck(scan, tuple(given.values()))


@pytest.mark.parametrize("fixed", ["B", "C", "BC"])
def test_B_and_C_without_tokens_are_those_of_all_tokens(fixed: str) -> None:
    given = made(T=70)
    given.update({name: torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
                  for name in fixed})
    bias = given.pop("delta_bias")
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    y, last = flashlin.selective_scan_fn(**leaves, delta_bias=bias, delta_softplus=True,
                                         return_last_state=True)
    wanted, after = reference.selective(**leaves, delta_bias=bias, delta_softplus=True)
    assert judge("y", y, wanted, 1e-11).ok and judge("last", last, after, 1e-11).ok
    for name, got, right in zip(leaves,
                                *(torch.autograd.grad((out.sin().sum() + state.sum()), list(leaves.values()))
                                  for out, state in ((y, last), (wanted, after))), strict=True):
        assert judge(name, got, right, 1e-11).ok


def test_they_take_the_torch_path_and_say_so() -> None:
    planned = plan(Problem("selective_scan_fn", "selective", "", 2, 64, 1, 16, 256, 2, "bfloat16", False,
                           True, ("fixed",)), H200)
    assert planned.path == "torch" and [reason.code for reason, _ in planned.steps] == ["fixed"]


def test_many_states_take_the_torch_path() -> None:
    def path(N: int) -> str:
        return plan(Problem("selective_scan_fn", "selective", "", 2, 64, 1, N, 256, 2, "bfloat16", False,
                            True), H200).path
    assert (path(256), path(257)) == ("triton", "torch")


@pytest.mark.parametrize(("N", "BN", "BD", "warps", "strips"),
                         [(1, 4, 32, 1, 4), (16, 16, 32, 1, 4), (24, 32, 32, 2, 4), (64, 64, 32, 4, 4),
                          (128, 128, 32, 8, 4), (256, 256, 16, 8, 7)])
def test_a_thread_has_at_most_sixteen_elements_and_strips_cover_groups(N: int, BN: int, BD: int, warps: int,
                                                                       strips: int) -> None:
    planned = plan(Problem("selective_scan_fn", "selective", "", 2, 64, 3, N, 300, 2, "float32", False, True),
                   H200)
    assert not planned.steps
    for launch in planned.launches:
        assert (launch.block("BN"), launch.block("BD"), launch.num_warps) == (BN, BD, warps)
        assert launch.grid == (2 * 3 * strips,)  # two rows, three groups of a hundred channels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_of_what_comes_back(dtype: torch.dtype) -> None:
    given = made(torch.float32)
    given.update({name: given[name].to(dtype) for name in ("u", "B", "C", "z")})
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    y, last = flashlin.selective_scan_fn(**leaves, return_last_state=True)
    assert y.dtype == dtype and last.dtype == torch.float32
    (y.float().sum() + last.sum()).backward()
    assert all(x.grad is not None and (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
               for x in leaves.values())


def test_without_the_last_state_y_comes_alone() -> None:
    given = made()
    y = flashlin.selective_scan_fn(**given)
    assert isinstance(y, torch.Tensor) and torch.equal(y,
                                                       flashlin.selective_scan_fn(**given,
                                                                                  return_last_state=True)[0])
    assert mamba.selective_scan_fn is flashlin.selective_scan_fn


@pytest.mark.parametrize("shape", [{"T": 0}, {"B": 0}], ids=str)
def test_there_may_be_no_tokens_and_no_rows(shape: dict[str, int]) -> None:
    leaves = {name: x.requires_grad_() for name, x in made(**shape).items()}
    y, last = flashlin.selective_scan_fn(**leaves, return_last_state=True)
    assert y.shape == leaves["u"].shape and not last.any()
    (y.sum() + last.sum()).backward()
    assert leaves["u"].grad is not None and not leaves["u"].grad.any()
    assert last.requires_grad


def test_the_last_state_is_a_tensor_of_its_own() -> None:
    """The last state has its own memory, so an update in place does not change backward.

    Decoding updates the state in place, possibly before backward of the prompt.
    """
    given = {name: x.requires_grad_() for name, x in made(T=70).items()}
    y, last = flashlin.selective_scan_fn(**given, delta_softplus=True, return_last_state=True)
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()
    last.detach().mul_(2)
    y.sum().backward()


def test_a_longer_row_is_its_beginning_and_the_steps_after_it() -> None:
    """Prefill of 6 tokens and decoding of 3 give the results of one call with 9 tokens."""
    given = made(torch.float32, T=9, N=4)
    prompt = {name: x[..., :6] if name in ("u", "delta", "z", "B", "C") else x for name, x in given.items()}
    whole, last = flashlin.selective_scan_fn(**given, delta_softplus=True, return_last_state=True)
    y, state = flashlin.selective_scan_fn(**prompt, delta_softplus=True, return_last_state=True)
    rows = [y]
    for t in range(6, 9):
        of = {name: given[name][..., t] for name in ("u", "delta", "z", "B", "C")}
        rows.append(flashlin.selective_state_update(state, of["u"], of["delta"], given["A"], of["B"], of["C"],
                                                    given["D"], of["z"], given["delta_bias"], True)[...,
                                                    None])
    torch.testing.assert_close(torch.cat(rows, 2), whole)
    torch.testing.assert_close(state, last)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"u": torch.zeros(2, 5)}, ValueError, "u: got shape [2, 5], need [b, D, T]"),
    ({"u": None}, TypeError, "u: got NoneType, need a tensor of shape [b, D, T]"),
    ({"delta": torch.zeros(2, 4, 6)}, ValueError, "delta: got shape [2, 4, 6], need u's shape = [2, 4, 5]"),
    ({"A": torch.zeros(5, 3)}, ValueError, "A: got shape [5, 3], need [D, N] = [4, any]"),
    ({"A": torch.zeros(4, 0)}, ValueError, "A: got shape [4, 0], need [D, N] with N of at least 1"),
    ({"u": torch.zeros(2, 0, 5)}, ValueError, "u: got shape [2, 0, 5], need [b, D, T] with D of at least 1"),
    ({"A": torch.zeros(4, 3, dtype=torch.complex64)}, TypeError, "A: got dtype torch.complex64"),
    ({"B": torch.zeros(2, 3, 6)}, ValueError,
     "B: got shape [2, 3, 6], need [D, N], [b, N, T] or [b, G, N, T] = [2, 3, 5]"),
    ({"B": torch.zeros(2, 1, 3, 6)}, ValueError,
     "B: got shape [2, 1, 3, 6], need [D, N], [b, N, T] or [b, G, N, T] = [2, any, 3, 5]"),
    ({"B": torch.zeros(3, 4)}, ValueError,
     "B: got shape [3, 4], need [D, N], [b, N, T] or [b, G, N, T] = [4, 3]"),
    ({"B": None}, TypeError, "B: got NoneType"),
    ({"B": torch.zeros(2, 3, 3, 5)}, ValueError, "B: got 3 groups, need a divisor of the 4 channels of u"),
    ({"C": torch.zeros(2, 2, 3, 5)}, ValueError, "C: got 2 groups, need 1, as B"),
    ({"D": torch.zeros(3)}, ValueError, "D: got shape [3], need [D] = [4]"),
    ({"z": torch.zeros(2, 4)}, ValueError, "z: got shape [2, 4], need u's shape = [2, 4, 5]"),
    ({"delta_bias": torch.zeros(4, device="meta")}, ValueError,
     "delta_bias: got device meta, need cpu, where u is")]


@pytest.mark.parametrize(("change", "error", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_wrong_arguments_are_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        flashlin.selective_scan_fn(**{**made(torch.float32), **change})
    assert str(raised.value).startswith(text)


def test_lengths_share_graphs() -> None:
    from torch._dynamo.testing import CompileCounter
    graphs = CompileCounter()
    compiled = torch.compile(lambda **tensors: flashlin.selective_scan_fn(**tensors, delta_softplus=True),
                             fullgraph=True, backend=graphs)
    for T in (70, 100, 110, 120, 127, 90):
        given = made(torch.float32, T=T)
        torch.testing.assert_close(compiled(**given),
                                   flashlin.selective_scan_fn(**given, delta_softplus=True))
    # one for the first length, one for all others, one for each number of doubling steps
    assert graphs.frame_count <= 3


def test_offsets_beyond_32_bits_are_left_to_torch() -> None:
    def planned(T: int) -> Any:
        return plan(Problem("selective_scan_fn", "selective", "", 1, T, 1, 256, 64, 1, "bfloat16"), H200)
    assert planned(8_000_000).path == "triton"
    assert planned(9_000_000).path == "torch" and [reason.code
                                                   for reason, _ in planned(9_000_000).steps] == ["offset"]
