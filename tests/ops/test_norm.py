"""The norms: shapes, dtypes, drop-in rules, exact error texts, modules, torch.compile, planned launches."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.compat.target import parse
from flashlin.dispatch import plan
from flashlin.guards.plan_types import Problem
from flashlin.kernels.norm import recipe
from flashlin.modules import FusedLayerNormGated, FusedRMSNormGated, GroupNorm, L2Norm, LayerNorm, RMSNorm
from flashlin.testing.cases.norm import CASES
from flashlin.testing.compare import Case, check

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])


pytestmark = pytest.mark.usefixtures("torch_path")


def norm(op: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(flashlin, op)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_path_is_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert all(verdict.ok for verdict in check(case, CPU, dtype))


def test_layer_norm_is_torchs() -> None:
    x, w, b = torch.randn(3, 5, 48), torch.randn(48), torch.randn(48)
    torch.testing.assert_close(flashlin.layer_norm(x, w, b), F.layer_norm(x, (48,), w, b))


def test_l2norm_has_eps_inside_the_root_and_zero_rows_have_a_finite_gradient() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    y = flashlin.l2norm(x)
    y.backward(torch.ones_like(y))
    assert (y == 0).all()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 1000.0))
    torch.testing.assert_close(flashlin.l2norm(torch.tensor([[3e-3, 4e-3]])),
                               torch.tensor([[3e-3, 4e-3]]) / (25e-6 + 1e-6) ** 0.5)
    assert flashlin.l2_norm is flashlin.l2norm


@BOTH
@pytest.mark.parametrize(("x", "residual", "in_fp32", "expected"), [
    ("bfloat16", "bfloat16", False, "bfloat16"), ("bfloat16", "float32", False, "float32"),
    ("float32", "bfloat16", False, "bfloat16"), ("bfloat16", "bfloat16", True, "bfloat16"),
    ("bfloat16", "", True, "float32"), ("bfloat16", "", False, "bfloat16"), ("float32", "", True, "float32"),
])
def test_the_sum_has_residuals_dtype_or_fp32_or_is_x(op: str, x: str, residual: str, in_fp32: bool,
                                                     expected: str) -> None:
    given = torch.randn(3, 8, dtype=getattr(torch, x))
    added = torch.randn(3, 8, dtype=getattr(torch, residual)) if residual else None
    y, total = norm(op)(given, torch.ones(8), None, added, prenorm=True, residual_in_fp32=in_fp32)
    assert y.dtype == given.dtype
    assert total.dtype == getattr(torch, expected)
    assert (total is given) == (added is None and total.dtype == given.dtype)
    torch.testing.assert_close(total,
                               (given.float() + (0 if added is None else added.float())).to(total.dtype))


def test_without_prenorm_there_is_one_result() -> None:
    x = torch.randn(2, 4)
    assert isinstance(flashlin.rms_norm(x, None, None, x, residual_in_fp32=True), torch.Tensor)


@BOTH
@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16), (16,), (2, 3, 4, 5, 16)], ids=str)
def test_any_leading_dimensions_also_none_and_also_empty(op: str, shape: tuple[int, ...]) -> None:
    x, w = torch.randn(shape, requires_grad=True), torch.ones(16, requires_grad=True)
    y, total = norm(op)(x, w, None, torch.randn(shape), prenorm=True)
    assert y.shape == total.shape == shape
    (y.sum() + total.sum()).backward()
    assert x.grad is not None and x.grad.shape == shape
    assert w.grad is not None and w.grad.shape == (16,)


def test_rows_of_more_than_64_kilobytes() -> None:
    x = torch.randn(2, 70_000)
    torch.testing.assert_close(flashlin.layer_norm(x, None, None), F.layer_norm(x, (70_000,)))


def test_strided_input() -> None:
    x = torch.randn(4, 3, 16).transpose(0, 2)[1:, :, ::2]
    torch.testing.assert_close(flashlin.layer_norm(x, None, None), F.layer_norm(x.contiguous(), x.shape[-1:]))


def test_weights_of_another_dtype_get_gradients_in_theirs() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    w, b = torch.ones(8, requires_grad=True), torch.ones(8, dtype=torch.float16, requires_grad=True)
    flashlin.layer_norm(x, w, b).float().sum().backward()
    assert [t.grad.dtype for t in (x, w, b) if t.grad is not None] == [torch.bfloat16, torch.float32,
                                                                       torch.float16]


@BOTH
def test_gradcheck(op: str) -> None:
    x, r, w, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True)
                  for shape in ((3, 6), (3, 6), (6,), (6,)))
    assert torch.autograd.gradcheck(lambda x, w, b, r: norm(op)(x, w, b, r, prenorm=True), (x, w, b, r))
    assert torch.autograd.gradcheck(flashlin.l2norm, (x,))
    assert torch.autograd.gradcheck(lambda x, w, b, r: flashlin.group_norm(x, w, b, r, prenorm=True,
                                                                           num_groups=2), (x, w, b, r))
    for activation in ("swish", "sigmoid"):
        assert torch.autograd.gradcheck(lambda x, g, w, b, a=activation: norm(op + "_gated")(x, g, w, b, a),
                                        (x, r, w, b))


def test_group_norm_is_torchs_on_each_token() -> None:
    x, w, b = torch.randn(3, 5, 48), torch.randn(48), torch.randn(48)
    torch.testing.assert_close(flashlin.group_norm(x, w, b, num_groups=6),
                               F.group_norm(x.view(15, 48), 6, w, b).view_as(x))
    strided = torch.randn(48, 5, 3).transpose(0, 2)
    y, total = flashlin.group_norm(strided, w, b, strided, prenorm=True, num_groups=6)
    torch.testing.assert_close(y, F.group_norm(2 * strided.reshape(15, 48), 6, w, b).view_as(y))
    torch.testing.assert_close(total, 2 * strided)


def test_the_gate_comes_last() -> None:
    x, g, w, b = torch.randn(3, 5, 48), torch.randn(3, 5, 48) * 30, torch.randn(48), torch.randn(48)
    torch.testing.assert_close(flashlin.layer_norm_gated(x, g, w, b),
                               F.layer_norm(x, (48,), w, b, 1e-6) * F.silu(g))
    torch.testing.assert_close(flashlin.rms_norm_gated(x, g, w, None, "sigmoid"),
                               F.rms_norm(x, (48,), w, 1e-6) * g.sigmoid())
    far = torch.tensor([[-1000.0, 1000.0]], requires_grad=True)
    flashlin.rms_norm_gated(torch.ones(1, 2), far, None, None).sum().backward()
    assert far.grad is not None
    torch.testing.assert_close(far.grad, torch.tensor([[0.0, 1.0]]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16), (16,)], ids=str)
def test_gated_and_grouped_rows_may_be_none_at_all(shape: tuple[int, ...]) -> None:
    x, g, w = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True), torch.ones(16,
                                                                                                         requires_grad=True)
    y = flashlin.rms_norm_gated(flashlin.group_norm(x, w, None, num_groups=4), g, w, None)
    assert isinstance(y, torch.Tensor) and y.shape == shape
    y.sum().backward()
    assert x.grad is not None and g.grad is not None and g.grad.shape == shape and w.grad is not None and w.grad.shape == (16,)


def test_the_gates_gradient_has_the_gates_dtype() -> None:
    x, g = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    y = flashlin.rms_norm_gated(x, g, None, None)
    assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and g.grad is not None and (x.grad.dtype, g.grad.dtype) == (torch.bfloat16,
                                                                                          torch.float32)


X = torch.zeros(2, 3, 8)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: flashlin.rms_norm([1.0], None, None), TypeError, "x: got list, need a tensor of shape [..., D]"),
    (lambda: flashlin.rms_norm(torch.tensor(1.0), None, None), ValueError,
     "x: got shape [], need [..., D] with D of at least 1"),
    (lambda: flashlin.l2norm(torch.zeros(3, 0)), ValueError,
     "x: got shape [3, 0], need [..., D] with D of at least 1"),
    (lambda: flashlin.l2norm(torch.zeros(3, dtype=torch.int64)), TypeError,
     "x: got dtype torch.int64, need bfloat16, float16, float32 or float64"),
    (lambda: flashlin.l2norm(X, output_dtype=torch.int8), TypeError,
     "output_dtype: got torch.int8, need bfloat16, float16, float32 or float64"),
    (lambda: flashlin.rms_norm(X, torch.zeros(7), None), ValueError, "weight: got shape [7], need [D] = [8]"),
    (lambda: flashlin.layer_norm(X, None, torch.zeros(1, 8)), ValueError,
     "bias: got shape [1, 8], need [D] = [8]"),
    (lambda: flashlin.layer_norm(X, None, 1.0), TypeError, "bias: got float, need a tensor of shape [D]"),
    (lambda: flashlin.layer_norm(X, None, None, X[0]), ValueError,
     "residual: got shape [3, 8], need x's shape = [2, 3, 8]"),
    (lambda: flashlin.rms_norm(X, torch.zeros(8, device="meta"), None), ValueError,
     "weight: got device meta, need cpu, where x is"),
    (lambda: flashlin.rms_norm(X, None, None, eps=-1.0), ValueError,
     "eps: got -1.0, need a number of at least 0"),
    (lambda: flashlin.group_norm(X, None, None, num_groups=3), ValueError,
     "num_groups: got 3, need a divisor of D = 8"),
    (lambda: flashlin.group_norm(X, None, None, num_groups=0), ValueError,
     "num_groups: got 0, need a divisor of D = 8"),
    (lambda: GroupNorm(3, 8), ValueError, "num_groups: got 3, need a divisor of hidden_size = 8"),
    (lambda: flashlin.rms_norm_gated(X, X[0], None, None), ValueError,
     "g: got shape [3, 8], need x's shape = [2, 3, 8]"),
    (lambda: flashlin.rms_norm_gated(X, None, None, None), TypeError,
     "g: got NoneType, need a tensor of shape x's shape"),
    (lambda: flashlin.layer_norm_gated(X, X.to("meta"), None, None), ValueError,
     "g: got device meta, need cpu, where x is"),
    (lambda: flashlin.layer_norm_gated(X, X, None, None, "relu"), ValueError,
     "activation: got 'relu', need one of swish, silu, sigmoid"),
    (lambda: flashlin.layer_norm_gated(X, X, None, None, ""), ValueError,
     "activation: got '', need one of swish, silu, sigmoid"),
    (lambda: FusedRMSNormGated(8, activation="relu"), ValueError,
     "activation: got 'relu', need one of swish, silu, sigmoid"),
    (lambda: flashlin.rms_norm(X, None, None, eps=float("nan")), ValueError,
     "eps: got nan, need a number of at least 0"),
])
def test_wrong_arguments_are_named(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "l2norm"])
def test_an_unknown_keyword_is_an_error(op: str) -> None:
    arguments = (X,) if op == "l2norm" else (X, None, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        norm(op)(*arguments, epsilon=1e-5)


@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_modules_are_the_functions(module: type[LayerNorm] | type[RMSNorm]) -> None:
    op = "layer_norm" if module is LayerNorm else "rms_norm"
    made = module(16, bias=True, eps=1e-3, dtype=torch.float64)
    x, residual = torch.randn(2, 16), torch.randn(2, 16)
    torch.nn.init.normal_(made.weight)
    expected = norm(op)(x, made.weight, made.bias, residual, 1e-3, True)
    for got, wanted in zip(made(x, residual, prenorm=True), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert made.weight.dtype == torch.float64


@pytest.mark.parametrize(("arguments", "names", "shown"), [
    ({}, ["weight"], "16, eps=1e-05"), ({"bias": True}, ["weight", "bias"], "16, bias=True, eps=1e-05"),
    ({"elementwise_affine": False, "bias": True}, [], "16, elementwise_affine=False, eps=1e-05"),
])
@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_state_dict_names_and_repr(module: type[LayerNorm] | type[RMSNorm], arguments: dict[str, bool],
                                   names: list[str], shown: str) -> None:
    made = module(16, **arguments)
    assert list(made.state_dict()) == names
    assert repr(made) == f"{module.__name__}({shown})"
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(7)
    made.reset_parameters()
    assert all((value == (1 if name == "weight" else 0)).all() for name, value in made.state_dict().items())
    torch.nn.LayerNorm(16, elementwise_affine="weight" in names,
                       bias="bias" in names).load_state_dict(made.state_dict())


@pytest.mark.parametrize(("made", "names", "shown"), [
    (lambda: GroupNorm(4, 16), ["weight"], "GroupNorm(4, 16, eps=1e-05)"),
    (lambda: GroupNorm(4, 16, bias=True, is_rms_norm=True), ["weight", "bias"],
     "GroupNorm(4, 16, bias=True, eps=1e-05, is_rms_norm=True)"),
    (lambda: FusedRMSNormGated(16, True, 1e-6), ["weight"],
     "FusedRMSNormGated(16, eps=1e-06, activation=swish)"),
    (lambda: FusedLayerNormGated(16, True, True, activation="sigmoid"), ["weight", "bias"],
     "FusedLayerNormGated(16, bias=True, eps=1e-05, activation=sigmoid)"),
    (lambda: FusedRMSNormGated(16, elementwise_affine=False), [],
     "FusedRMSNormGated(16, elementwise_affine=False, eps=1e-05, activation=swish)"),
])
def test_gated_and_grouped_modules(made: Callable[[], torch.nn.Module], names: list[str], shown: str) -> None:
    module = made()
    assert list(module.state_dict()) == names and repr(module) == shown
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    x, g, residual = torch.randn(2, 16), torch.randn(2, 16), torch.randn(2, 16)
    if isinstance(module, GroupNorm):
        got, expected = module(x, residual, True), flashlin.group_norm(x, weight, bias, residual, 1e-5, True,
                                                                       False, module.is_rms_norm, 4)
    else:
        op = "layer_norm_gated" if isinstance(module, FusedLayerNormGated) else "rms_norm_gated"
        got, expected = module(x, g, residual, True), norm(op)(x, g, weight, bias, module.activation,
                                                               residual, True, False, module.eps)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_l2norm_module() -> None:
    made = L2Norm(1e-3, torch.float32)
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(made(x), flashlin.l2norm(x, 1e-3, torch.float32))
    assert repr(made) == "L2Norm(eps=0.001, output_dtype=torch.float32)" and repr(
        L2Norm()) == "L2Norm(eps=1e-06)"


def test_compiles_to_one_graph_for_all_numbers_of_rows() -> None:
    from torch._dynamo.testing import CompileCounter
    graphs = CompileCounter()

    def block(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        y, total = flashlin.rms_norm(x, w, None, residual, prenorm=True)
        y = flashlin.rms_norm_gated(flashlin.group_norm(y, w, w, num_groups=2), residual, w, w)
        return flashlin.l2norm(flashlin.layer_norm(y, w, w)), total
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    w = torch.ones(16, requires_grad=True)
    for rows in (3, 5, 8, 13):
        x, residual = torch.randn(rows, 16, requires_grad=True), torch.randn(rows, 16)
        for got, expected in zip(compiled(x, residual, w), block(x, residual, w), strict=True):
            torch.testing.assert_close(got, expected)
    assert graphs.frame_count <= 2  # one for the first length, one for all other lengths


def test_compiles_with_every_size_symbolic() -> None:
    x, w = torch.randn(3, 16), torch.randn(16)
    compiled = torch.compile(flashlin.rms_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x, w, None), flashlin.rms_norm(x, w, None))


def problem(T: int, D: int, dtype: str = "bfloat16", options: tuple[str, ...] = ("weight",),
            op: str = "rms_norm") -> Problem:
    return Problem(op, "norm", "", 1, T, 1, D, D, 1, dtype, False, True, options)


@pytest.mark.parametrize("D",
                         [1, 3, 64, 100, 128, 1000, 2048, 4096, 5000, 8192, 8193, 16384, 20000, 100_000,
                          1_000_000])
@pytest.mark.parametrize("T", [0, 1, 100, 10**9])
@pytest.mark.parametrize("target",
                         ["triton=3.7.1,sm=75", "triton=3.4.0,sm=80", "triton=3.6.0,sm=90",
                          "triton=3.9.0,sm=120"])
def test_no_size_needs_a_remedy(D: int, T: int, target: str) -> None:
    planned = plan(problem(T, D), parse(target))
    assert planned.path == "triton" and not planned.steps and not planned.refused
    for launch in planned.launches:
        assert launch.block("BT") * launch.block("BD") <= 16384 and launch.num_warps in (4, 8, 16)


def test_one_program_covers_whole_rows_up_to_16384_elements() -> None:
    target = parse("triton=3.6.0,sm=90")
    for D, rows_each in ((64, 16), (128, 8), (2048, 1), (8192, 1), (16384, 1)):
        forward = plan(problem(4096, D), target).launch("norm_forward")
        assert forward.block("BD") == D and forward.block("BT") == rows_each and forward.grid == (4096
                                                                                                  // rows_each,)


def test_programs_of_backward_follow_the_card_and_not_the_rows() -> None:
    for sms in (40, 132):
        for rows in (10**4, 10**7):
            assert plan(problem(rows, 2048),
                        parse(f"triton=3.6.0,sm=90,sms={sms}")).launch("norm_backward").grid == (4 * sms,)
    few = plan(problem(5, 2048), parse("triton=3.6.0,sm=90")).launch("norm_backward")
    assert few.grid == (5,)


@pytest.mark.parametrize("target", [75, 86, 90, 120])
@pytest.mark.parametrize("D", [8, 128, 2048, 4096, 8192])
@pytest.mark.parametrize("more", [(), ("residual",), ("bias", "gate", "residual")])
def test_rows_on_their_way_leave_room_for_the_other_programs(D: int, more: tuple[str, ...],
                                                             target: int) -> None:
    card = parse(f"triton=3.6.0,sm={target},sms=10")
    launch = plan(problem(10**6, D, options=("weight", *more)), card).launch("norm_backward")
    assert launch.num_stages == 1 or launch.shared * launch.grid[0] // 10 <= card.shared
    assert target != 90 or launch.num_stages == 3


def test_long_rows_take_one_kernel_along_them_and_one_down_their_columns() -> None:
    kernels = [launch.kernel for launch in plan(problem(64, 20_000), parse("triton=3.6.0,sm=90")).launches]
    assert kernels == ["norm_forward", "norm_backward_rows", "norm_backward_columns"]


def test_bfloat16_on_a_turing_card_with_triton_32_runs_on_fp32_copies() -> None:
    planned = plan(problem(64, 256), parse("triton=3.2.0,sm=75"))
    assert planned.problem.dot == "fp32" and [reason.code
                                              for reason, _ in planned.steps] == ["bf16-pre-ampere-32"]
    assert not plan(problem(64, 256, "float16"), parse("triton=3.2.0,sm=75")).steps


def test_there_are_no_dots_for_known_issues_to_be_about() -> None:
    assert {trait for launch in recipe.launches(problem(64, 256), parse("triton=3.2.0,sm=90"))
            for trait in launch.traits} == {"bf16"}


def test_one_bfloat16_tensor_is_enough_to_plan_for_it() -> None:
    from flashlin.ops.norm import RMS, Asked, Tensors, problem_of, scalars_of
    x, w = torch.zeros(4, 8), torch.zeros(8, dtype=torch.bfloat16)

    def planned(op: str, *tensors: torch.Tensor | None) -> Problem:
        given = Tensors(x, *tensors)
        return problem_of(given, scalars_of(given, Asked(op, RMS, 1e-5)))
    assert planned("rms_norm", None, w).dtype == "bfloat16"
    assert planned("rms_norm_gated", None, None, None, x.bfloat16()).dtype == "bfloat16"
    assert planned("rms_norm", w.double()).dtype == "float64"
    assert planned("layer_norm", w, w, w).options == ("bias", "is_rms_norm", "residual", "weight")


@pytest.mark.parametrize("G", [1, 2, 3, 7, 16, 48, 97, 1000])
@pytest.mark.parametrize("D", [1, 64, 100, 3000, 20_000])
@pytest.mark.parametrize("T", [0, 1, 5, 300, 10**6])
def test_a_program_s_rows_of_a_group_norm_keep_to_one_line_of_the_weight(T: int, D: int, G: int) -> None:
    asked = problem(T, D, op="group_norm")._replace(H=G)
    sums = plan(asked, parse("triton=3.6.0,sm=90")).launches[-1]
    rows = sums.grid[0] // -(-D // sums.block("BD")) * sums.block("BT")
    assert rows % G == 0
    assert sums.grid[0] <= 8 * 132 * max(1, G)
