"""Test that a new family works everywhere after adding only a folder, a file of ops and a file of cases."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flashlin.dispatch import OPS
from flashlin.guards.family import USES
from flashlin.kernels import families
from flashlin.kernels.families import PUBLIC, typical

ROOT = Path(__file__).resolve().parent.parent

RECIPE = """
from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit, Op, Sizes, Unsupported
from flashlin.guards.plan_types import Launch, Problem


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    return (Launch("doubling", (problem.T,), 4, 1, (("BD", 128),), 0, problem.K, frozenset()),)


def rows(sizes: Sizes) -> Sizes:
    return Sizes(T=sizes.B * sizes.T, K=sizes.K, V=sizes.K)


SPECS = (Family(
    "doubling", launches,
    (Op("doubled", "doubling", options=("bias",)), Op("twice", "doubling", planned_as="doubled")),
    axes={"T": "rows", "K": "elements of a row"}, typical={"training": Sizes(T=4096, K=1000)}, counted=rows,
    limits=(Limit("K", 2000, "rows of {} elements"),),
    unsupported=(Unsupported("odd", "odd numbers", "even ones"),)),)
"""
FUNCTIONS = """
import torch

from flashlin import dispatch, policy
from flashlin.compat.target import probe
from flashlin.guards.plan_types import Problem


def doubled(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    T, K = x.shape
    dtype = str(x.dtype).removeprefix("torch.")
    problem = Problem("doubled", "doubling", "", 1, T, 1, K, K, 1, dtype)
    dispatch.plan(problem, probe(x.device), policy.current())
    return factor * x


twice = doubled
"""
CASES = """
from flashlin.testing.cases.inputs import Input, Maker
from flashlin.testing.cases.op import Op


def reference(x, factor=2.0):
    return x * factor


make = Maker({"x": Input("T D")}, {"T": 3, "D": 5})
doubled = Op("doubled", make, reference, {"*": 0.01, "d*": 0.01}, {"o": "T D"}, {})
CASES = [doubled("random", quick=True)]
"""
FILES = {"kernels/doubling/__init__.py": "", "kernels/doubling/recipe.py": RECIPE,
         "kernels/doubling/forward.py": "", "ops/doubling.py": FUNCTIONS, "testing/cases/doubling.py": CASES}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package, the matrix and the tools, add the new family, and return the folder."""
    folder = tmp_path_factory.mktemp("copy")
    for part in ("flashlin", "matrix", "tests", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name, text in FILES.items():
        (folder / "flashlin" / name).parent.mkdir(exist_ok=True)
        (folder / "flashlin" / name).write_text(text)
    return folder


@pytest.mark.alternate
def test_a_family_of_three_places_is_everywhere(copy: Path) -> None:
    run(copy, """
        import torch, flashlin
        from flashlin.compat.target import parse
        from flashlin.dispatch import OPS
        from flashlin.guards.plan_types import Problem

        H200 = "triton=3.6.0,sm=90"
        # its public names, and what a type checker knows of them
        assert {"doubled", "twice"} <= set(flashlin.__all__) & set(dir(flashlin))
        assert flashlin.twice is flashlin.doubled and flashlin.doubled(torch.ones(1, 2)).tolist() == [[2, 2]]
        from tools.stubs import stub
        assert "from flashlin.ops.doubling import doubled\\n" in stub("flashlin")

        # planned, within its limits
        def plan(K, *options):
            problem = Problem("doubled", "doubling", "", 1, 8, 1, K, K, 1, "float32", options=options)
            return flashlin.plan(problem, parse(H200))
        assert [launch.kernel for launch in plan(2000).launches] == ["doubling"]
        [(reason, _)] = plan(2001).steps
        assert str(reason) == "width: rows of 2001 elements, need up to 2000 for the kernels"
        [(reason, _)] = plan(8, "odd").steps
        assert str(reason) == "odd: odd numbers, need even ones for the kernels"

        # doctor and explain
        [row] = [row for row in flashlin.doctor(target=H200).plans if row.op == "doubled"]
        assert row.path == "triton" and list(OPS)[-1] == "doubled"
        [row] = flashlin.doctor(op="twice").plans
        assert row.op == "doubled" and row.verdict != "problem"
        said = flashlin.explain("twice", target=H200, B=2, T=3)
        assert "B=1 T=6 H=1 K=1000 V=1000 bfloat16 bias needs_grad" in said
        assert "Sizes: T rows, K elements of a row." in said

        # warmup runs its case in a child
        [tried] = flashlin.warmup(["doubled"], ["float32"], device="cpu")
        assert tried.fine and tried.verdict == "torch path", tried

        # the matrix
        from matrix import workload
        [call] = [call for call in workload.calls() if str(call) == "doubled bfloat16 random"]
        [seen] = workload.seen(call, parse(H200)).plans
        assert seen.asked.op == "doubled" and seen.path == "triton"
        """)


def test_what_its_cases_declare_is_tested_everywhere(copy: Path) -> None:
    """General tests cover the new op from the declaration of its case, without naming the op."""
    run(copy, """
        import torch
        from flashlin.testing.cases import CASES
        from flashlin.testing.compare import check
        from tests import hostile, isolation

        [case] = [case for case in CASES if str(case) == "doubled-factor=4.0"]
        assert all(one.ok for one in check(case, torch.device("cpu"), torch.float32))
        wrong = case._replace(reference=lambda x: {"o": 2 * x})
        assert [one.tensor for one in check(wrong, torch.device("cpu"), torch.float32)] == ["o", "dx"]
        assert not any(one.ok for one in check(wrong, torch.device("cpu"), torch.float32))

        given = hostile.arguments("doubled")
        assert given["x"].shape == (6, 8) and given["factor"] == 4.0 and len(given) == 2

        [call] = [call for call in isolation.CALLS if call.op == "doubled"]
        assert (call.inputs, call.outputs) == ("x:TD", "TD") and list(isolation.leaks(call)) == []
        spread = call._replace(function=lambda x: x + 0 * x.sum())
        assert "nan in x reaches output 0" in list(isolation.leaks(spread))
        """)


def test_doctor_runs_its_cases(copy: Path) -> None:
    said = run(copy, """
        import runpy, sys
        sys.argv = ["quick", "--device", "cpu", "--op", "doubled"]
        runpy.run_module("flashlin.diagnostics.self_test", run_name="__main__")
        """)
    assert '["doubled-random", "float32"]' in said and '"ok": true' in said


def test_records_fit_together() -> None:
    records = list(families._records())
    ops = [op for family in records for op in family.ops]
    assert len({family.name for family in records}) == len(records)
    assert len({op.name for op in ops}) == len(ops)
    for family in records:
        assert {limit.axis for limit in family.limits} <= set(family.axes) <= set("BTHKV"), family
    for op in PUBLIC.values():
        assert op.planned_as in ("", *OPS) and op.options == tuple(sorted(op.options)), op
        assert (ROOT / "flashlin" / "ops" / f"{op.module}.py").exists(), op
        assert typical(op.name) and set(typical(op.name)) <= set(USES), op


def run(copy: Path, script: str) -> str:
    ours = ("FLASHLIN_", "TRITON_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"PYTHONPATH": str(copy), "FLASHLIN_HOME": str(copy / "home")}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True,
                          timeout=300, env=environment, cwd=copy, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
