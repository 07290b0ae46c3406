"""Tests that explain plans exactly what a call would do, for every public op, size and dtype name."""
from __future__ import annotations

import inspect
import json
import re
from functools import partial
from typing import Any

import pytest
import torch

import flashlin
from flashlin import dispatch, policy
from flashlin.__main__ import main
from flashlin.compat.target import Target, parse
from flashlin.diagnostics import doctor as diagnosis
from flashlin.dispatch import OPS
from flashlin.guards.family import problem_of
from flashlin.guards.plan_types import Plan, Problem
from flashlin.kernels.families import PUBLIC, family_of, typical
from flashlin.policy import Policy
from matrix import workload
from tests.machines import H200, made

# Sizes of the matrix's calls, as a user would pass them to explain. Other ops use the sizes of the problem.
SCAN = dict(B=2, T=128, H=8, K=128, V=64)
SAID: dict[str, dict[str, int]] = {
    "rms_norm": dict(B=4, T=64, H=1, K=2048), "l2norm": dict(B=4, T=64, H=1, K=128),
    "rms_norm_gated": dict(B=4, T=64, H=1, K=128), "layer_norm": dict(B=4, T=64, H=1, K=2048),
    "layer_norm_gated": dict(B=4, T=64, H=1, K=128), "group_norm": dict(B=4, T=64, H=8, K=256),
    "rmsnorm_fn": dict(B=4, T=64, H=8, K=256), "layernorm_fn": dict(B=4, T=64, K=2048),
    "causal_conv1d": dict(B=2, T=64, K=1024, V=4), "causal_conv1d_update": dict(B=2, K=1024, V=4),
    "token_shift": dict(B=2, T=64, K=1024), "causal_conv1d_fn": dict(B=2, T=64, K=1024),
    "mamba_causal_conv1d_update": dict(B=2, K=1024), "chunk_hgrn": dict(B=2, T=1024, K=1024),
    "fused_recurrent_hgrn": dict(B=2, T=1, K=1024), "mamba_chunk_scan_combined": SCAN,
    "mamba_split_conv1d_scan_combined": SCAN, "mamba3_siso_combined": SCAN,
    "selective_state_update": dict(B=2),
    "selective_scan_fn": dict(B=2, T=64, V=1024), "fused_gdn_gate": dict(B=2, T=64, H=32),
    "fused_kda_gate": dict(B=2, T=64, H=32, K=64), "fused_addcmul_rwkv7": dict(B=2, T=64, H=32, K=64),
    # T counts tokens, each of which has two rows of k and v
    "chunk_gated_delta_product": dict(B=2, T=128, H=4, K=128, V=128),
    "fused_recurrent_gated_delta_product": dict(B=2, T=128, H=4, K=128, V=128),
    "fused_k_rwkv7": dict(B=2, T=64, H=32, K=64), "gate_output_correction": dict(B=2, T=64, H=32, K=64),
    "rotary_embedding": dict(B=2, T=64, H=8, K=128), "cross_entropy_loss": dict(T=8, K=32000),
    "fused_linear_cross_entropy_loss": dict(T=128, K=32000)}
# Plain calls for ops whose call in the matrix has special arguments.
PLAIN = {"layernorm_fn": partial(
    workload.made, "layernorm_fn", torch.bfloat16,
    lambda own: dict(x=own(4, 64, 2048), weight=own(2048), bias=None, z=own(4, 64, 2048)))}
STATES = {"initial_state", "final_state"}  # explain has no options for states


@pytest.fixture(scope="module")
def matrix_calls() -> dict[str, workload.Call]:
    """Return the first call of each op in the matrix."""
    return {call.op: call for call in reversed(list(workload.calls()))}


def explained(monkeypatch: pytest.MonkeyPatch, op: str, **sizes: Any) -> Problem:
    """Return the problem that ``explain`` plans for an op and sizes."""
    asked: list[Problem] = []

    def noting(problem: Problem, target: Target, policy: Policy) -> Plan:
        asked.append(problem)
        return original(problem, target, policy)
    original = dispatch.plan
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "plan", noting)
        flashlin.explain(op, target=H200, **sizes)
    [problem] = asked
    return problem


@pytest.mark.parametrize("op", OPS)
def test_explain_plans_what_the_call_does(op: str, matrix_calls: dict[str, workload.Call],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    call = matrix_calls[op]._replace(run=PLAIN[op]) if op in PLAIN else matrix_calls[op]
    seen = [plan.asked for plan in workload.seen(call, parse(H200)).plans]
    real = next(problem for problem in seen if (problem.op, problem.family) == (op, OPS[op][0]))
    real = real._replace(options=tuple(name for name in real.options if name not in STATES))
    said = SAID.get(op) or {name: getattr(real, name) for name in "BTHKV"}
    assert explained(monkeypatch, op, **said, needs_grad=op != "fused_recurrent_hgrn") == real


def test_every_public_function_of_the_ops_is_known_to_explain() -> None:
    public = {name for name in flashlin.__all__ if inspect.isfunction(getattr(flashlin, name))
              and getattr(flashlin, name).__module__.startswith("flashlin.ops.")}
    assert public == set(PUBLIC)
    for name, op in PUBLIC.items():
        if op.planned_as:
            assert flashlin.explain(name, target=H200) == flashlin.explain(op.planned_as, target=H200)


def test_a_causal_conv1d_update_of_mamba_runs_in_its_kernel() -> None:
    said = flashlin.explain("mamba_causal_conv1d_update", target=H200)
    assert "launch   conv_window" in said and "width" not in said
    assert "Sizes: K channels, V taps of a filter." in said
    assert "With gradients, causal_conv1d_fn runs" in said
    assert "With gradients" not in flashlin.explain("rms_norm", target=H200)


@pytest.mark.parametrize("op", OPS)
def test_sizes_that_are_not_given_are_those_of_typical_calls(op: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    this, problem = PUBLIC[op], explained(monkeypatch, op)
    usual = problem_of(family_of(op), this, next(iter(typical(op).values())), "bfloat16", True)
    assert problem == usual._replace(B=problem.B, T=problem.T, N=problem.N)
    assert problem.needs_grad != bool(this.in_place)


def test_packed_sequences_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = explained(monkeypatch, "chunk_kda", B=4, T=100, varlen=True)
    assert (problem.B, problem.T, problem.N, problem.varlen) == (1, 400, 4, True)
    assert explained(monkeypatch, "causal_conv1d", T=100, N=7, varlen=True).N == 7


@pytest.mark.parametrize(("given", "name"), [
    ("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"), ("float", "float32"),
    ("double", "float64"), ("torch.bfloat16", "bfloat16"), ("BF16", "bfloat16"), (torch.bfloat16, "bfloat16"),
    (torch.half, "float16"), (torch.float64, "float64")])
def test_a_dtype_has_many_names(given: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explained(monkeypatch, "chunk_gla", dtype=given).dtype == name


@pytest.mark.parametrize("given", ["banana", "", "bf", "int8", torch.int64, None, 16])
def test_what_is_no_dtype_of_ours_is_refused(given: Any) -> None:
    with pytest.raises(ValueError,
                       match=r"dtype: got .*, need one of bfloat16, float16, float32, float64 \(or bf16, "
                             r"fp16, half, fp32"):
        flashlin.explain("chunk_gla", target=H200, dtype=given)


@pytest.mark.parametrize(("sizes", "said"), [
    (dict(varlen=True), "varlen: got True, need False: rms_norm takes no packed sequences"),
    (dict(N=3), "N: got 3 without varlen"), (dict(T=0), "T: got 0, need 1 or more"),
    (dict(B="4"), "B: got '4', need 1 or more"), (dict(K=1.5), "K: got 1.5, need 1 or more"),
    (dict(B=None), "B: got None, need 1 or more"), (dict(T=True), "T: got True, need 1 or more")])
def test_sizes_that_the_op_cannot_have_are_refused(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        flashlin.explain("rms_norm", target=H200, **sizes)


def test_a_function_in_place_of_its_name_is_told_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^op: got the function chunk_gla, need its name, 'chunk_gla'$"):
        flashlin.explain(flashlin.chunk_gla, target=H200)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [90, ("H100", "3.2.0"), {"card": "H100"}])
def test_a_target_that_is_no_text_is_refused(given: Any) -> None:
    for ask in (flashlin.doctor, partial(flashlin.plan, "chunk_gla")):
        with pytest.raises(TypeError, match=r"^target: got .*, need a text such as 'H100,triton=3.2.0'"):
            ask(target=given)


def test_explain_tells_the_trail_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "chunk_simple_gla", "--dtype", "float16", "--target", "triton=3.3.1,sm=75", "-B",
                 "4"]) == 0
    said = capsys.readouterr().out
    assert "B=4 T=2048 H=16 K=128 V=128 float16 g needs_grad" in said and "launch   simple_gla_scan" in said
    assert "half-dot-33-pre-ampere: needs fp32 operands, or Triton 3.4; so it runs on fp32 copies (other arithmetic" in said
    assert "triton via fp32: 5 launches, backward included" in said
    refused = flashlin.explain("chunk_simple_gla", target="triton=3.5.0,sm=103", policy=Policy(path="triton"))
    assert "cannot run" in refused and "FLASHLIN_PATH=auto" in refused
    assert "mode: takes fused_recurrent" in flashlin.explain("simple_gla", target=H200, T=1, needs_grad=False)
    assert "B=1 T=24 H=1 K=512 V=512" in flashlin.explain("rms_norm", target=H200, B=2, T=3, H=4, K=512)


def test_explain_says_so_where_this_machine_cannot_be_asked(monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(diagnosis, "examine", lambda: made(torch_error="ImportError: libcudart.so.12"))
    assert main(["explain", "chunk_simple_gla"]) == 2
    assert "libcudart.so.12" in capsys.readouterr().err


# --- the plan as a value ---

def test_plan_is_explain_as_a_value() -> None:
    made = flashlin.plan("chunk_gla", B=4, T=512, dtype="fp16", target="T4,triton=3.3.1")
    assert (made.asked.op, made.asked.B, made.asked.T, made.asked.dtype) == ("chunk_gla", 4, 512, "float16")
    assert made.problem.dot == "fp32" and made.target.name == "T4"
    assert flashlin.explain("chunk_gla", B=4, T=512, dtype="fp16",
                            target="T4,triton=3.3.1").startswith(str(made))
    assert flashlin.plan(made.asked, "T4,triton=3.3.1") == flashlin.plan(made.asked, made.target) == made
    assert flashlin.plan("l2_norm", "H100,triton=3.6.0").asked.op == "l2norm"


def test_plan_obeys_the_policy_in_force_for_an_op_and_is_pure_for_a_problem() -> None:
    asked = flashlin.plan("chunk_gla", H200).asked
    with flashlin.settings(path="torch"):
        assert flashlin.plan("chunk_gla", H200).path == "torch"
        assert flashlin.plan(asked, H200).path == "triton"
    assert flashlin.plan("chunk_gla", H200, Policy(path="torch")).path == "torch"


@pytest.mark.parametrize(("given", "error", "said"), [
    (dict(problem="chunk_glaa"), ValueError, "op: got 'chunk_glaa', need one of "),
    (dict(problem="CHUNK_GLA"), ValueError, "known names; did you mean chunk_gla?"),
    (dict(problem="softmax_of_all"), ValueError, "need one of chunk_simple_gla, fused_recurrent_simple_gla, "),
    (dict(problem=3), ValueError, "op: got 3, need one of chunk_simple_gla"),
    (dict(problem="chunk_gla", target="H1000"), ValueError, "did you mean H100?"),
    (dict(problem="chunk_gla", dtype="banana"), ValueError, "dtype: got 'banana'"),
    (dict(problem="chunk_gla", mode="auto"), ValueError, "mode: got 'auto'"),
    (dict(problem=[]), ValueError, "op: got [], need one of chunk_simple_gla"),
    (dict(problem="chunk_gla", B=None), ValueError, "B: got None, need 1 or more"),
    *((dict(problem="chunk_gla", ranks=given), ValueError, f"ranks: got {given!r} for chunk_gla, need 1, or more")
      for given in ("x", None, 2.5, True, 0, [])),
    (dict(problem="rms_norm", ranks=2), ValueError, "ranks: got 2 for rms_norm, need 1"),
    (dict(problem="chunk_gla", policy="strict"), TypeError, "policy: got 'strict', need a Policy"),
    (dict(problem=Problem("l2norm", "norm", "", 1, 1, 1, 8, 0, 1, "float32"), T=4), TypeError,
     "T: got it together with a Problem")])
def test_what_cannot_be_planned_is_refused(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        flashlin.plan(**{"target": H200, **given})


def both(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, Any]]:
    """Return what ``flashlin explain`` prints as text and as JSON."""
    assert main(["explain", *arguments]) == 0
    text = capsys.readouterr().out
    assert main(["explain", *arguments, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def test_explain_in_json_has_the_facts_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    text, found = both(capsys, "gdn", "--target", "T4,triton=3.3.1", "-T", "512")
    assert (found["op"], found["path"], found["verdict"]) == ("chunk_gated_delta_rule", "triton", "degraded")
    assert f"{found['asked as']} stands for {found['op']}." in text
    assert f"call     {found['call']}\n" in text and f"target   {found['target']}\n" in text
    assert f"Sizes: {', '.join(f'{axis} {what}' for axis, what in found['sizes'].items())}." in text
    assert found["policy"] == {"policy": "auto", "path": "auto", "ignore": []}
    [step] = found["steps"]
    assert f"{step['code']}: {step['because']}, need {step['need']}   {step['url']}" in text
    assert f"so it {step['effect']} (other arithmetic" in text and step["forced"] and not step["exact"]
    assert f"on the path {found['way']}: {len(found['launches'])} launches" in text
    assert f"Evidence: {found['evidence']}." in text and f"Its cost: {found['cost']}." in text
    assert [launch["kernel"] for launch in found["launches"]] == re.findall(r"launch   (\w+)", text)
    for launch in found["launches"]:
        tile = " ".join(f"{name}={size}" for name, size in launch["tile"].items())
        assert f"grid={tuple(launch['grid'])} {tile} num_warps={launch['num_warps']}" in text
    assert not (found["refused"] or found["advice"] or found["may be wrong"] or found["with gradients"])


def test_explain_in_json_says_why_a_call_is_refused(capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLIN_PATH", "triton")
    monkeypatch.setattr(policy, "_current", None)
    text, found = both(capsys, "chunk_gla", "--target", "cpu,triton=3.6.0")
    [reason] = found["refused"]
    assert f"{reason['code']}: {reason['because']}, need {reason['need']}" in text
    assert found["path"] == "refused" and found["policy"]["path"] == "triton" and not found["launches"]
    assert f"It cannot run. {found['advice']}." in text and found["evidence"] == ""


def test_explain_in_json_names_what_may_be_wrong_and_what_gradients_run(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text, found = both(capsys, "causal_conv1d_update", "--target", H200)
    assert f"With gradients, {found['with gradients']} runs instead" in text
    monkeypatch.setenv("FLASHLIN_IGNORE", "half-dot-33-pre-ampere")
    monkeypatch.setattr(policy, "_current", None)
    text, found = both(capsys, "chunk_gla", "--target", "T4,triton=3.3.1")
    assert found["may be wrong"] == found["policy"]["ignore"] == ["half-dot-33-pre-ampere"]
    assert "It may be wrong: half-dot-33-pre-ampere" in text and found["verdict"] == "problem"
