"""Tests of the messages of plans: the error of a refused plan, and the warning about an inexact remedy.

An op warns about the same reason only once.
"""
from __future__ import annotations

import warnings

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.compat.target import parse, pretend
from flashlin.guards.plan_types import Plan, Problem, Reason, UnsupportedError
from flashlin.ops._common.casting import name_of, wants_grad
from flashlin.ops._common.pipeline import planned
from flashlin.policy import Policy

CPU = torch.device("cpu")
T4 = parse("triton=3.3.1,sm=75,torch=2.9.0")
H100 = parse("triton=3.6.0,sm=90,torch=2.9.0")
CALL = Problem("chunk_simple_gla", "simple_gla", "chunk", 2, 256, 8, 64, 64, 2, "bfloat16", False, True,
               ("g",))


pytestmark = pytest.mark.usefixtures("default_settings")


def told(problem: Problem) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        planned(problem, CPU)
    return [str(warning.message) for warning in found]


def test_an_inexact_remedy_is_told_in_one_line() -> None:
    pretend(T4)
    assert told(CALL) == [
        "chunk_simple_gla runs on fp32 copies here. half-dot-33-pre-ampere: simple_gla_scan with 4 warps, "
        "bfloat16 on sm75, triton 3.3.1 "
        "('Unsupported conversion from bf16 to f16', 'Unsupported rounding mode for conversion': every dot "
        "on 16-bit operands fails to "
        "compile), need fp32 operands, or Triton 3.4   "
        "https://github.com/fla-org/flash-linear-attention/issues/458"]


def test_each_op_and_reason_is_told_once() -> None:
    pretend(T4)
    assert len(told(CALL)) == 1
    assert told(CALL) == told(CALL._replace(T=512)) == told(CALL._replace(K=128)) == []
    assert len(told(CALL._replace(op="chunk_retention"))) == 1
    assert [line.partition(":")[0]
            for line in told(CALL._replace(K=1024))] == [
                "chunk_simple_gla runs in plain torch here. head-dim"]
    assert told(CALL._replace(K=1024)) == []


def test_what_is_normal_or_exact_is_not_told() -> None:
    assert told(CALL) == []  # plain torch for CPU tensors is normal
    pretend(H100)
    assert told(CALL) == []
    assert told(CALL._replace(op="simple_gla", mode="auto")) == []
    assert told(CALL._replace(B=2**30, N=2**30)) == []  # runs in several launches
    flashlin.settings(path="torch")
    assert told(CALL) == []


@pytest.mark.parametrize("op", ("rms_norm", "chunk_simple_gla", "chunk_retention"))
def test_a_warning_points_at_the_line_that_called_the_op(op: str) -> None:
    x = torch.zeros(2, 8, 4, 64, dtype=torch.float64)
    pretend(H100)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        getattr(flashlin, op)(x, *([None, None] if op == "rms_norm" else [x, x]))
    assert [warning.filename for warning in found] == [__file__]


def test_a_refusal_is_raised_with_its_plan_each_time() -> None:
    pretend(T4)
    flashlin.settings(policy="strict")
    for _ in range(2):
        with pytest.raises(UnsupportedError) as error:
            planned(CALL, CPU)
        assert isinstance(error.value, NotImplementedError)
        assert error.value.plan == dispatch.plan(CALL, T4,
                                                 Policy("strict")) and error.value.plan.path == "refused"


def test_an_unsupported_error_says_it_in_four_lines() -> None:
    pretend(parse("triton=3.2.0,sm=75,torch=2.6.0,name=Tesla T4"))
    flashlin.settings(path="triton")
    with pytest.raises(UnsupportedError) as error:
        planned(CALL._replace(K=1024, V=128), CPU)
    assert str(error.value) == """\
chunk_simple_gla cannot run here.
  call     B=2 T=256 H=8 K=1024 V=128 bfloat16 g needs_grad mode=chunk path=triton
  target   Tesla T4 sm75, triton 3.2.0, ptxas 12.4.99, torch 2.6.0
  because  head-dim: K=1024 V=128, need K and V up to 512 for the kernels
  do       FLASHLIN_PATH=auto and FLASHLIN_POLICY=auto allow the torch path, which runs this call anywhere"""


def test_a_refusal_without_the_torch_path_says_what_to_change() -> None:
    reason = Reason("grid", "some_kernel starts 70000 programs on grid axis 1", "at most 65535",
                    ("chunk_batch",), "https://example.org")
    assert str(UnsupportedError(Plan(CALL._replace(N=5, varlen=True), CALL, H100, (), (),
                                     (reason, reason._replace(code="other"))))) == """\
chunk_simple_gla cannot run here.
  call     B=2 T=256 H=8 K=64 V=64 N=5 bfloat16 g varlen needs_grad mode=chunk path=triton
  target   H100 sm90, triton 3.6.0, ptxas 12.8.93, torch 2.9.0
  because  grid: some_kernel starts 70000 programs on grid axis 1, need at most 65535   https://example.org
           other: some_kernel starts 70000 programs on grid axis 1, need at most 65535   https://example.org
  do       some_kernel starts 70000 programs on grid axis 1: bring it to at most 65535; \
some_kernel starts 70000 programs on grid axis 1: bring it to at most 65535"""


def test_a_plan_is_shown_with_its_trail() -> None:
    assert str(dispatch.plan(CALL._replace(op="simple_gla", mode="auto", dtype="float32", needs_grad=False,
                                           options=(), T=1), H100)) == """\
simple_gla: triton path
  call     B=2 T=1 H=8 K=64 V=64 float32 mode=auto path=triton
  target   H100 sm90, triton 3.6.0, ptxas 12.8.93, torch 2.9.0
  because  mode: mode=auto and T=1, need fused_recurrent for T <= 16 without gradients
  so       recurrent_mode
  launch   recurrent_forward grid=(32,) BT=1 BK=64 BV=32 num_warps=4 num_stages=1"""


def test_dtypes_have_torchs_names() -> None:
    assert [name_of(dtype) for dtype in (torch.bfloat16, torch.float64, torch.int8)] == ["bfloat16",
                                                                                         "float64", "int8"]


def test_gradients_are_wanted_where_autograd_would_give_them() -> None:
    x, leaf = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert wants_grad(x, None, leaf) and not wants_grad(x, None)
    with torch.no_grad():
        assert not wants_grad(leaf)


@pytest.mark.parametrize("rates", ["erase", "undecayed"])
def test_with_gradients_a_rate_is_planned_as_what_then_runs(rates: str) -> None:
    """Calls of fused_recurrent_gdn2 with gradients run another recurrence, and are planned as that one."""
    def config(needs_grad: bool, *options: str) -> str:
        asked = Problem("fused_recurrent_gdn2", "recurrent", "fused_recurrent", 128, 1, 16, 128, 128, 128,
                        dtype="bfloat16", needs_grad=needs_grad, options=options)
        return dispatch.plan(asked, parse("H200,triton=3.6.0"), Policy()).launch("recurrent_forward").config
    asked = ("a", "beta", "delta", "gk", rates)
    assert config(True, *asked) == config(True, "a", "b", "gk") != config(False, "beta", "delta", "gk")
    assert (config(True, *asked) != config(False, *asked)) == (rates == "erase")
