"""Tests of errors about unknown names: they give at most five suggestions, for every kind of name."""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlin
from flashlin.__main__ import main
from flashlin.compat.known_issues import KNOWN_ISSUES
from flashlin.compat.suggestions import did_you_mean, either, need_one_of, similar
from flashlin.compat.target import CARDS
from flashlin.kernels.families import MODELS, PUBLIC, SHORT_NAMES

H100 = "H100,triton=3.6.0"


@pytest.mark.parametrize(("given", "close"), [
    ("chunk_gated_delta", ["chunk_gated_delta_rule", "chunk_gated_delta_product"]),
    ("chunk_glaa", ["chunk_gla"]), ("Chunk_GLA", ["chunk_gla"]), ("xyzzy", []),
    ("rmsnorm", ["RMSNorm", "rmsnorm_fn", "RMSNormGated", "RMSNormLinear", "FusedRMSNormGated"])])
def test_the_closest_names_come_first(given: str, close: list[str]) -> None:
    assert similar(given, flashlin.__all__) == close


def test_at_most_five_are_named() -> None:
    many = [f"chunk_{letter}" for letter in "abcdefghij"]
    assert similar("chunk", many) == many[:5] and len(similar("chunk_x", many)) == 5
    assert did_you_mean("chunk", many) == f"; did you mean {either(many[:5])}?"
    assert need_one_of("chunk", many).count("chunk_") == need_one_of("nothing", many).count("chunk_") == 5
    assert need_one_of("nothing", many).endswith(" or 5 others")
    few = need_one_of("chunk_c", many[:2])
    assert few == "need one of chunk_a, chunk_b; did you mean chunk_b or chunk_a?"


def test_names_are_joined_as_in_a_sentence() -> None:
    assert [either(list(names)) for names in ("", "a", "ab", "abc")] == ["", "a", "a or b", "a, b or c"]


def wrong_call() -> Any:
    x = torch.zeros(1, 3, 2, 8)
    return flashlin.chunk_gla(x, x, x, x, initial_stat=None)  # type: ignore[call-arg]


PLACES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: flashlin.chunk_gated_delta, AttributeError, "chunk_gated_delta_rule"),
    (lambda: flashlin.ops.chunk_gated_delta, AttributeError, "chunk_gated_delta_rule"),
    (lambda: flashlin.mamba.causal_conv1d, AttributeError, "causal_conv1d_fn"),
    (lambda: flashlin.gdn, AttributeError, "chunk_gdn"),
    (lambda: flashlin.plan("chunk_gated_delta", H100), ValueError, "chunk_gated_delta_rule"),
    (lambda: flashlin.explain("chunk_gated_delta", target=H100), ValueError, "chunk_gated_delta_rule"),
    (lambda: flashlin.doctor(op="chunk_gated_delta"), ValueError, "chunk_gated_delta_rule"),
    (lambda: flashlin.warmup(["chunk_gated_delta"]), ValueError, "chunk_gated_delta_rule"),
    (lambda: flashlin.explain("sdpa", target=H100), ValueError, "chunk_simple_gla"),
    (lambda: flashlin.plan("gla", dtyp="bf16"), TypeError, "dtype"),
    (lambda: flashlin.explain("gla", tagret=H100), TypeError, "target"),
    (lambda: flashlin.doctor(rum=True), TypeError, "run"),
    (wrong_call, TypeError, "initial_state"),
    (lambda: flashlin.settings(plicy="strict"), ValueError, "policy"),
    (lambda: flashlin.settings(ignore="gather-31"), ValueError, "gather-32"),
    (lambda: flashlin.plan("gla", "H1000"), ValueError, "H100"),
    (lambda: flashlin.plan("gla", "banana"), ValueError, "V100"),
    (lambda: flashlin.plan("gla", "sm=91"), ValueError, "90"),
    (lambda: flashlin.plan("gla", "backend=cudda"), ValueError, "cuda"),
    (lambda: flashlin.patch("flaa"), ValueError, "fla"),
]


@pytest.mark.parametrize(("call", "error", "meant"), PLACES)
def test_every_place_names_the_closest_and_at_most_five(call: Callable[[], Any], error: type[Exception],
                                                        meant: str) -> None:
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    assert re.search(rf"(did you mean|need one of) {meant}\b", said), said
    names = {*dir(flashlin), *CARDS, *flashlin.Policy._fields, *(issue.id for issue in KNOWN_ISSUES),
             *inspect.signature(flashlin.explain).parameters}
    offered = re.findall(r"[\w-]+", said.partition("; did you mean ")[2] or said.partition("need one of ")[2])
    assert len([name for name in offered if name in names]) <= 5, said


@pytest.mark.parametrize("name", ["dtyp", "zeal"])
def test_an_unknown_keyword_changes_no_signature(name: str) -> None:
    with pytest.raises(TypeError, match=f"^plan: got unexpected keyword {name}, need one of "):
        flashlin.plan("gla", **{name: 1})  # type: ignore[arg-type]
    assert list(inspect.signature(flashlin.plan).parameters)[:3] == ["problem", "target", "policy"]


@pytest.mark.parametrize(("arguments", "meant"), [
    (["explain", "chunk_gated_delta"], "chunk_gated_delta_rule or chunk_gated_delta_product"),
    (["doctor", "--op", "chunk_gated_delta"], "chunk_gated_delta_rule or chunk_gated_delta_product"),
    (["warmup", "--forget", "--op", "chunk_gated_delta"],
     "chunk_gated_delta_rule or chunk_gated_delta_product")])
def test_the_command_line_names_them_too(arguments: list[str], meant: str,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2 and capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


def test_python_adds_no_suggestion_of_its_own() -> None:
    with pytest.raises(AttributeError) as caught:
        flashlin.chunk_glaa  # noqa: B018
    assert caught.value.name == "chunk_glaa" and caught.value.obj is None


# --- short names of ops ---

@pytest.mark.parametrize(("name", "op"), [
    ("gdn", "chunk_gated_delta_rule"), ("GatedDeltaNet", "chunk_gated_delta_rule"),
    ("Gated DeltaNet", "chunk_gated_delta_rule"), ("deltanet", "chunk_delta_rule"),
    ("mamba2", "mamba_chunk_scan_combined"), ("Mamba-2", "mamba_chunk_scan_combined"),
    ("mamba", "selective_scan_fn"), ("mamba3", "mamba3_siso_combined"), ("kda", "kda"), ("KDA", "kda"),
    ("gla", "gla"), ("rwkv6", "rwkv6"), ("RWKV-7", "rwkv7"), ("retnet", "chunk_retention"),
    ("lightning", "chunk_lightning_attn"), ("hgrn", "chunk_hgrn"), ("hgrn2", "chunk_gla"),
    ("comba", "chunk_comba"), ("gdn2", "chunk_gdn2")])
def test_a_short_name_stands_for_an_op(name: str, op: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flashlin.plan(name, H100) == flashlin.plan(op, H100) and flashlin.plan(name, H100).asked.op == op
    said, whole = (flashlin.explain(one, target=H100) for one in (name, op))
    assert said == (whole if name in PUBLIC else f"{name} stands for {op}.\n\n{whole}")
    assert main(["explain", name, "--target", H100]) == 0 and capsys.readouterr().out == said + "\n"


def test_short_names_stand_for_public_ops_and_hide_none() -> None:
    assert {*SHORT_NAMES.values()} <= {*PUBLIC} and not {*MODELS} & {*PUBLIC}
    derived = {re.sub("_", "", op.removeprefix("chunk_")) for op in PUBLIC}
    assert not {re.sub("_", "", name) for name in MODELS} & derived, "already follows from the name of an op"
