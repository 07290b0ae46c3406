"""Tests of when kernels with one decay reference per chunk are planned, forward and backward."""
from __future__ import annotations

import pytest

from flashlin.compat.target import parse
from matrix.workload import calls, seen
from tests import one_reference

CALLS = {(call.op, call.label): call for call in calls() if call.op in one_reference.GATES}


def by_one(op: str, label: str, machine: str) -> set[str]:
    launches = seen(CALLS[op, label], parse(machine)).launches
    return {launch.kernel for launch in launches if launch.kernel.endswith("_one")}


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1"])
@pytest.mark.parametrize("label", ["bfloat16 D=64", "bfloat16 D=128"])
@pytest.mark.parametrize("op", one_reference.GATES)
def test_they_are_where_they_have_run(op: str, label: str, triton: str) -> None:
    """Kernels with one decay reference are planned without a trial on machines where they have run.

    The launch table lists these machines. RWKV-7 with gradients and heads of 64 channels halves the chunk
    instead, because one reference takes 4 % more memory there (tests/ops/test_memory.py).
    """
    family, first = ("gla", "scores") if op in ("chunk_gla", "chunk_rwkv6") else ("dplr", "prepare")
    halves = (op, label) == ("chunk_rwkv7", "bfloat16 D=64")
    both = set() if halves else {f"{family}_{first}_one", f"{family}_grads_one"}
    assert by_one(op, label, f"triton={triton},sm=90,sms=132") == both


@pytest.mark.parametrize(("label", "machine"), [
    ("float16 D=128", "triton=3.6.0,sm=90,sms=132"), ("float32 D=128", "triton=3.6.0,sm=90,sms=132"),
    ("bfloat16 D=128", "triton=3.6.0,sm=80,sms=108"), ("bfloat16 D=128", "triton=3.5.1,sm=90,sms=132")])
@pytest.mark.parametrize("op", one_reference.GATES)
def test_they_are_nowhere_else(op: str, label: str, machine: str) -> None:
    assert not by_one(op, label, machine)
