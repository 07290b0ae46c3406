"""The elementwise ops: dtypes, shapes, drop-in rules, exact error texts, torch.compile, planned launches."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.compat.target import parse
from flashlin.dispatch import OPS, plan
from flashlin.guards.plan_types import Problem
from flashlin.kernels.pointwise.recipe import CORRECTION, GATE, MAX_COLUMNS, SCALE, SKIP
from flashlin.ops._common.pointwise import Scalars, problem_of
from flashlin.testing.cases.pointwise import CASES
from flashlin.testing.compare import Case, check

CPU = torch.device("cpu")
MINE = [op for op, (family, _) in OPS.items() if family.startswith("pointwise")]
H200 = parse("triton=3.6.0,sm=90")


pytestmark = pytest.mark.usefixtures("torch_path")


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape,
                       generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_path_is_the_reference_in_float64(case: Case) -> None:
    assert all(verdict.ok for verdict in check(case, CPU, torch.float64))


def test_gates_are_what_the_ops_do_inside() -> None:
    q, v = F.normalize(randn(1, 9, 2, 8), dim=-1), randn(1, 9, 2, 4)
    g, beta, A_log, dt_bias = randn(1, 9, 2), randn(1, 9, 2).sigmoid(), randn(2), randn(2)
    inside, _ = flashlin.chunk_gated_delta_rule(q, q, v, g, beta, use_gate_in_kernel=True, A_log=A_log,
                                                dt_bias=dt_bias)
    outside, _ = flashlin.chunk_gated_delta_rule(q, q, v, flashlin.fused_gdn_gate(g, A_log, dt_bias), beta)
    torch.testing.assert_close(inside, outside, rtol=0, atol=0)


def test_a_gate_of_channels_with_one_channel_is_a_gate_of_heads() -> None:
    g, A_log, dt_bias = randn(2, 5, 3), randn(3), randn(3)
    torch.testing.assert_close(flashlin.fused_kda_gate(g[..., None], A_log, dt_bias)[..., 0],
                               flashlin.fused_gdn_gate(g, A_log, dt_bias))


@pytest.mark.parametrize("A_log", [randn(3), randn(1, 1, 3, 1)], ids=["[H]", "[1, 1, H, 1]"])
@pytest.mark.parametrize("dt_bias", [randn(12), randn(3, 4)], ids=["[H * K]", "[H, K]"])
def test_parameters_come_in_any_shape_and_so_do_their_gradients(A_log: torch.Tensor,
                                                                dt_bias: torch.Tensor) -> None:
    g = randn(2, 5, 3, 4, dtype=torch.bfloat16, grad=True)
    leaves = [A_log.clone().bfloat16().requires_grad_(), dt_bias.clone().requires_grad_()]
    y = flashlin.fused_kda_gate(g, *leaves)
    assert y.dtype == torch.float32 and y.shape == g.shape and bool((y < 0).all())
    y.sum().backward()
    assert g.grad is not None and g.grad.dtype == torch.bfloat16
    for leaf in leaves:
        assert leaf.grad is not None and (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


def test_a_lower_bound_is_one() -> None:
    y = flashlin.fused_kda_gate(torch.tensor([[[-1000.0, 0.0, 1000.0]]]), lower_bound=-5)
    torch.testing.assert_close(y, torch.tensor([[[0.0, -2.5, -5.0]]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_gates_have_the_output_dtype(dtype: torch.dtype) -> None:
    g = randn(4, 3, dtype=torch.bfloat16)
    assert flashlin.fused_gdn_gate(g, randn(3), output_dtype=dtype).dtype == dtype
    assert flashlin.fused_kda_gate(g[None], output_dtype=dtype).dtype == dtype


def test_the_outputs_of_rwkv7_have_the_first_ones_dtype() -> None:
    h, d, x = randn(1, 3, 8, dtype=torch.bfloat16), randn(1, 3, 8), randn(1, 1, 8)
    found = flashlin.fused_addcmul_rwkv7(h, d, x, x, x, x, x)
    assert len(found) == 6 and found[5] is None
    assert {y.dtype for y in found if y is not None} == {torch.bfloat16}
    torch.testing.assert_close(found[0], (h.float() + d * x).bfloat16(), rtol=0, atol=0)
    assert flashlin.fused_k_rwkv7(h, d, x, torch.tensor([0, 3]), torch.tensor([0, 3])).dtype == torch.bfloat16
    heads = randn(1, 3, 2, 4)
    assert flashlin.gate_output_correction(h, heads, heads, randn(2, 4), heads, d).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [(0, 4), (3, 0)], ids=str)
def test_rows_may_be_none_at_all(rows: tuple[int, int]) -> None:
    x, mu, heads, u = randn(*rows, 6, grad=True), randn(6, grad=True), randn(*rows, 2, 3, grad=True), randn(2,
                                                                                                            3,
                                                                                                            grad=True)
    found = [flashlin.fused_gdn_gate(x, mu), flashlin.fused_kda_gate(heads, mu[:2], mu),
             *flashlin.fused_addcmul_rwkv7(x, x, mu, mu, mu, mu, mu, mu), flashlin.fused_k_rwkv7(x, x, mu),
             flashlin.gate_output_correction(x, heads, heads, u, heads, x)]
    assert all(y is not None and y.shape[:2] == rows for y in found)
    sum(y.sum() for y in found if y is not None).backward()
    for leaf in (x, mu, heads, u):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


def test_strided_tensors_give_what_their_copies_give() -> None:
    fused = randn(2, 5, 24)
    h, d = fused.split(12, 2)
    mu, heads = randn(24)[::2], randn(2, 4, 5, 3).transpose(1, 2)
    for got, expected in zip(flashlin.fused_addcmul_rwkv7(h, d, mu, mu, mu, mu, mu),
                             flashlin.fused_addcmul_rwkv7(
h.contiguous(), d.contiguous(), *[mu.contiguous()] * 5), strict=True):
        assert got is expected is None or torch.equal(got, expected)
    u = randn(3, 4).T
    expected = (h.reshape(2, 5, 4, 3) + (heads * heads * u).sum(-1, keepdim=True) * heads).flatten(2) * d
    torch.testing.assert_close(flashlin.gate_output_correction(h, heads, heads, u, heads, d), expected)


def test_backward_writes_to_no_argument_of_rwkv7() -> None:
    """Backward of fused_addcmul_rwkv7 changes none of its arguments.

    The backward of fla overwrites hidden_states with its gradient.
    """
    h, delta, mu = randn(2, 5, 12, grad=True), randn(2, 5, 12, grad=True), randn(12, grad=True)
    given = [x.detach().clone() for x in (h, delta, mu)]
    for _ in range(2):
        found = flashlin.fused_addcmul_rwkv7(h, delta, mu, mu, mu, mu, mu, mu)
        torch.stack([y for y in found if y is not None]).square().sum().backward()
        assert all(map(torch.equal, (h, delta, mu), given))


def test_gradients_are_those_of_differences() -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
    g, A, b, x, u = leaf(1, 2, 2, 3), leaf(2), leaf(6), leaf(1, 2, 6), leaf(2, 3)
    wide = torch.float64
    assert torch.autograd.gradcheck(lambda g, A, b: flashlin.fused_kda_gate(g, A, b, output_dtype=wide),
                                    (g, A, b))
    assert torch.autograd.gradcheck(lambda g, A, b: flashlin.fused_kda_gate(g, A, b, -5.0, wide), (g, A, b))
    assert torch.autograd.gradcheck(flashlin.fused_addcmul_rwkv7,
                                    (x, leaf(1, 2, 6), *(leaf(6) for _ in range(6))))
    assert torch.autograd.gradcheck(flashlin.fused_k_rwkv7, (x, leaf(1, 2, 6), b))
    assert torch.autograd.gradcheck(flashlin.gate_output_correction,
                                    (x, g, leaf(1, 2, 2, 3), u, leaf(1, 2, 2, 3), leaf(1, 2, 6)))


X, HEADS, MU = torch.zeros(2, 3, 8), torch.zeros(2, 3, 2, 4), torch.zeros(8)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: flashlin.fused_gdn_gate([1.0], MU), TypeError, "g: got list, need a tensor of shape [..., HV]"),
    (lambda: flashlin.fused_gdn_gate(torch.tensor(1.0), MU), ValueError,
     "g: got shape [], need [..., HV] with at least 1 column"),
    (lambda: flashlin.fused_gdn_gate(X[..., :0], MU[:0]), ValueError,
     "g: got shape [2, 3, 0], need [..., HV] with at least 1 column"),
    (lambda: flashlin.fused_gdn_gate(X.int(), MU), TypeError,
     "g: got dtype torch.int32, need bfloat16, float16, float32 or float64"),
    (lambda: flashlin.fused_gdn_gate(X, MU[:7]), ValueError, "A_log: got shape [7], need HV = 8 elements"),
    (lambda: flashlin.fused_gdn_gate(X, None), TypeError,
     "A_log: got NoneType, need a tensor of HV elements"),
    (lambda: flashlin.fused_gdn_gate(X, MU, MU.int()), TypeError,
     "dt_bias: got dtype torch.int32, need bfloat16, float16, float32 or float64"),
    (lambda: flashlin.fused_gdn_gate(X, MU.to("meta")), ValueError,
     "A_log: got device meta, need cpu, where g is"),
    (lambda: flashlin.fused_gdn_gate(X, MU, output_dtype=torch.int8), TypeError,
     "output_dtype: got torch.int8, need bfloat16, float16, float32 or float64"),
    (lambda: flashlin.fused_kda_gate(MU), ValueError,
     "g: got shape [8], need [..., H, K] with at least 1 column"),
    (lambda: flashlin.fused_kda_gate(HEADS[:, :, :0]), ValueError,
     "g: got shape [2, 3, 0, 4], need [..., H, K] with at least 1 column"),
    (lambda: flashlin.fused_kda_gate(HEADS, MU), ValueError, "A_log: got shape [8], need H = 2 elements"),
    (lambda: flashlin.fused_kda_gate(HEADS, dt_bias=MU[:2]), ValueError,
     "dt_bias: got shape [2], need H * K = 8 elements"),
    (lambda: flashlin.fused_kda_gate(HEADS, lower_bound=5.0), ValueError,
     "lower_bound: got 5.0, need a number below 0, or None"),
    (lambda: flashlin.fused_kda_gate(HEADS, lower_bound=float("nan")), ValueError,
     "lower_bound: got nan, need a number below 0, or None"),
    (lambda: flashlin.fused_addcmul_rwkv7(MU, MU, MU, MU, MU, MU, MU), ValueError,
     "hidden_states: got shape [8], need [B, T, D] with at least 1 column"),
    (lambda: flashlin.fused_addcmul_rwkv7(X, X[:1], MU, MU, MU, MU, MU), ValueError,
     "delta: got shape [1, 3, 8], need hidden_states' shape = [2, 3, 8]"),
    (lambda: flashlin.fused_addcmul_rwkv7(X, X.to("meta"), MU, MU, MU, MU, MU), ValueError,
     "delta: got device meta, need cpu, where hidden_states is"),
    (lambda: flashlin.fused_addcmul_rwkv7(X, X, MU, MU, MU, None, MU), TypeError,
     "xv: got NoneType, need a tensor of D elements"),
    (lambda: flashlin.fused_addcmul_rwkv7(X, X, MU, MU, MU, MU, MU, X), ValueError,
     "xg: got shape [2, 3, 8], need D = 8 elements"),
    (lambda: flashlin.fused_k_rwkv7(HEADS, HEADS, MU), ValueError,
     "k: got shape [2, 3, 2, 4], need [B, T, D] with at least 1 column"),
    (lambda: flashlin.fused_k_rwkv7(X, None, MU), TypeError,
     "a: got NoneType, need a tensor of shape k's shape"),
    (lambda: flashlin.fused_k_rwkv7(X, X, MU[:1]), ValueError, "ka: got shape [1], need D = 8 elements"),
    (lambda: flashlin.gate_output_correction(X, X, X, MU, X, X), ValueError,
     "r: got shape [2, 3, 8], need [B, T, H, D] with at least 1 column"),
    (lambda: flashlin.gate_output_correction(X, HEADS, X, MU, HEADS, X), ValueError,
     "k: got shape [2, 3, 8], need r's shape = [2, 3, 2, 4]"),
    (lambda: flashlin.gate_output_correction(HEADS, HEADS, HEADS, MU, HEADS, X), ValueError,
     "o: got shape [2, 3, 2, 4], need [B, T, H * D] = [2, 3, 8]"),
    (lambda: flashlin.gate_output_correction(X, HEADS, HEADS, MU, HEADS, X), ValueError,
     "r_k: got shape [8], need [H, D] = [2, 4]"),
])
def test_wrong_arguments_are_named(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_compiles_to_one_graph_for_all_numbers_of_rows() -> None:
    from torch._dynamo.testing import CompileCounter
    graphs = CompileCounter()

    def block(x: torch.Tensor, mu: torch.Tensor) -> Any:
        heads = x.unflatten(2, (2, 4))
        r, w, *_ = flashlin.fused_addcmul_rwkv7(x, x, mu, mu, mu, mu, mu, mu)
        k = flashlin.fused_k_rwkv7(r, w, mu) + flashlin.fused_gdn_gate(x, mu) + flashlin.fused_kda_gate(heads,
                                                                                                        mu[
                                                                                                            :2], mu, -5.0).flatten(2)
        return flashlin.gate_output_correction(k, heads, heads, mu.view(2, 4), heads, x)
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    mu = randn(8, grad=True)
    for T in (3, 5, 9, 13):
        torch.testing.assert_close(compiled(randn(2, T, 8), mu), block(randn(2, T, 8), mu))
    assert graphs.frame_count <= 2  # one for the first length, one for all other lengths


# Planned launches

def problem(op: str, T: int, H: int, K: int, dtype: str = "bfloat16") -> Problem:
    return Problem(op, OPS[op][0], "", 1, T, H, K, K, 1, dtype, False, True)


@pytest.mark.parametrize("T", [0, 1, 100, 10**7])
@pytest.mark.parametrize(("H", "K"), [(1, 1), (1, 3), (32, 1), (3, 100), (64, 64), (16, 512), (700, 8)])
@pytest.mark.parametrize("op", MINE)
def test_no_size_needs_a_remedy_and_programs_cover_it(op: str, H: int, K: int, T: int) -> None:
    planned = plan(problem(op, T, H, K), H200)
    assert planned.path == "triton" and not planned.steps and not planned.refused
    forward, backward = planned.launches
    for launch in planned.launches:
        assert launch.block("BT") * launch.block("BD") <= 2048 and launch.num_warps == 4
    strips = {launch: H if OPS[op][0] == CORRECTION else -(-H * K // launch.block("BD"))
              for launch in planned.launches}
    assert forward.grid[0] == strips[forward] * -(-T // forward.block("BT"))
    assert backward.grid[0] % strips[backward] == 0 and backward.grid[0] <= 4 * 132 + strips[backward]


@pytest.mark.parametrize("T", [0, 1, 100, 10**7])
@pytest.mark.parametrize(("H", "K"), [(1, 1), (3, 20), (80, 64), (700, 8)])
def test_parts_of_a_scan_cover_their_rows(H: int, K: int, T: int) -> None:
    for family in (SCALE, SKIP):
        planned = plan(part_of_a_scan(family, T, H, K), H200)
        assert planned.path == "triton" and not planned.steps and not planned.refused
        forward, backward = planned.launches
        # The backward of SKIP also divides the rows among programs, so its grid is not checked here.
        for launch in (forward, backward) if family == SCALE else (forward,):
            strips = H if family == SCALE else -(-H * K // launch.block("BD"))
            assert launch.grid[0] == strips * -(-T // launch.block("BT"))
            assert family == SKIP or launch.block("BD") >= K


def part_of_a_scan(family: str, T: int, H: int, K: int) -> Problem:
    return Problem("mamba_chunk_scan_combined", family, "", 1, T, H, K, K, 1, "bfloat16", False, True)


def test_heads_wider_than_the_kernels_take_the_torch_path() -> None:
    assert [plan(part_of_a_scan(family, 64, 2, MAX_COLUMNS + 1), H200).path
            for family in (SCALE, SKIP)] == ["torch", "triton"]
    planned = plan(problem("gate_output_correction", 64, 2, MAX_COLUMNS + 1), H200)
    assert planned.path == "torch" and [reason.code for reason, _ in planned.steps] == ["width"]
    widest = plan(problem("gate_output_correction", 64, 2, MAX_COLUMNS), H200).launches
    assert [(launch.block("BT"), launch.block("BD"), launch.num_warps)
            for launch in widest] == [(1, 4096, 16)] * 2
    assert plan(problem("fused_kda_gate", 64, 2, MAX_COLUMNS + 1), H200).path == "triton"


def test_bfloat16_on_a_turing_card_with_triton_32_runs_on_fp32_copies() -> None:
    planned = plan(problem("fused_k_rwkv7", 64, 1, 256), parse("triton=3.2.0,sm=75"))
    assert planned.problem.dot == "fp32" and [reason.code
                                              for reason, _ in planned.steps] == ["bf16-pre-ampere-32"]
    assert not plan(problem("fused_k_rwkv7", 64, 1, 256, "float16"), parse("triton=3.2.0,sm=75")).steps


def test_one_bfloat16_tensor_is_enough_to_plan_for_it() -> None:
    x, half, wide = torch.zeros(2, 4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4,
                                                                                         dtype=torch.float64)
    for dtype, others, expected in ((torch.float32, (half, None), "bfloat16"),
                                    (torch.bfloat16, (x[0], None), "bfloat16"),
                                    (torch.float32, (half, wide), "float64"),
                                    (torch.float32, (x[0], None), "float32")):
        how = Scalars(GATE, 4, 1, dtype, None, "fused_gdn_gate")
        assert problem_of((x, *others), how).dtype == expected
