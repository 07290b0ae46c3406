"""Tests of a program written for fla in which ``fla.`` is replaced by ``flashlin.``.

An import from any module of fla must find the name if flashlin has it. Otherwise it must raise an error that
says what to do.
"""
from __future__ import annotations

import ast
import importlib.util
import pkgutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import flashlin
from flashlin import modules, ops
from flashlin.integrations.fla import NOT_FLA, OTHER_HARDWARE
from tests.machines import CLEAN, ROOT

OURS = frozenset(flashlin.__all__) - NOT_FLA


def places() -> list[tuple[str, str]]:
    """Return (module, name) for each public name of flashlin that the installed fla defines or re-exports.

    The function parses fla's source files instead of importing them, because the imports need a GPU.
    """
    found = []
    for file in metadata.files("fla-core") or ():
        parts = file.with_suffix("").parts
        if file.suffix != ".py" or parts[:2] not in (("fla", "ops"), ("fla", "modules")) or any(
                other in str(file) for other in OTHER_HARDWARE):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.parse(Path(file.locate()).read_text(encoding="utf-8")).body:
            defined = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            if isinstance(node, ast.ImportFrom) and parts[-1] == "__init__":
                defined = [one.asname or one.name for one in node.names]
            found += [(module, name) for name in defined if name in OURS]
    return found


def test_what_fla_has_is_where_fla_has_it() -> None:
    every = places()
    assert len(every) > 100 and ("fla.modules.norm.l2norm", "l2norm") in every
    wrong = []
    for module, name in every:
        try:
            there = importlib.import_module(f"flashlin{module[3:]}")
            wrong += [] if getattr(there, name) is getattr(flashlin, name) else [(module, name, "another")]
        except (ImportError, AttributeError) as error:
            wrong.append((module, name, str(error)))
    assert not wrong


@pytest.mark.parametrize("line", [
    "from flashlin.ops import chunk_gla, fused_recurrent_hgrn, chunk_gdn",
    "from flashlin.ops.simple_gla import chunk_simple_gla",
    "from flashlin.ops.simple_gla.chunk import chunk_simple_gla",
    "from flashlin.ops.generalized_delta_rule import chunk_dplr_delta_rule",
    "from flashlin.modules.convolution import ShortConvolution, causal_conv1d",  # fla before 0.4
    "from flashlin.modules.l2norm import l2_norm", "from flashlin.modules import FusedRMSNormGated",
    "import flashlin.modules.layernorm as norms; norms.RMSNorm",
    "import flashlin.modules.l2norm; flashlin.modules.l2norm.l2norm"])
@pytest.mark.alternate
def test_each_way_to_import_works_in_a_new_process(line: str) -> None:
    assert said(line) == (0, "")


def said(line: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=100, cwd=ROOT,
                          env={**CLEAN, "PYTHONPATH": str(ROOT)}, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("kind", ["layers", "models"])
def test_what_is_not_here_says_where_it_is(kind: str) -> None:
    for line in (f"from flashlin.{kind} import GatedDeltaNet", f"import flashlin.{kind}.gla"):
        code, text = said(line)
        assert code == 1 and text.splitlines()[-1].startswith(
            f"ImportError: flashlin has no {kind} of its own: keep `from fla.{kind} import ...`")
        assert 'flashlin.patch("fla")' in text


@pytest.mark.parametrize(("line", "what"), [
    ("from flashlin.ops.utils import prepare_chunk_indices", "ops.utils"), ("import flashlin.utils", "utils"),
    ("from flashlin.ops.gsa.chunk import chunk_gsa", "ops.gsa"), ("from flashlin import utils", "utils"),
    ("from flashlin.ops import chunk_gsa", "ops.chunk_gsa"), ("import flashlin.ops.gsa", "ops.gsa"),
    ("from flashlin.modules import GatedMLP", "modules.GatedMLP"),
    ("from flashlin.modules.l2norm import nothing", "modules.l2norm.nothing"),
    ("import flashlin.ops; flashlin.ops.chunk_gsa", "ops.chunk_gsa")])
def test_what_only_fla_has_says_so_and_what_to_do(line: str, what: str) -> None:
    code, text = said(line)
    kind = "AttributeError" if ";" in line else "ModuleNotFoundError"
    assert code == 1 and text.splitlines()[-1].startswith(
        f"{kind}: flashlin has no {what}: if fla has it, keep fla.{what} (docs/migration.md lists the "
        "names that flashlin has)")


def test_only_an_import_is_told_what_to_do() -> None:
    assert importlib.util.find_spec("flashlin.ops.gsa") is None and not hasattr(ops, "chunk_gsa")
    assert importlib.util.find_spec("flashlin.utils") is None and importlib.util.find_spec("flashlin.ops.gla")
    assert said("import sys, flashlin; assert not [finder for finder in sys.meta_path "
                "if finder.find_spec('flashlin.ops.gsa', [])]") == (0, "")
    assert "gsa" not in {one.name for one in pkgutil.iter_modules(ops.__path__)}
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'flashlin\.nothing'$"):
        importlib.import_module("flashlin.nothing")
    l2norm = importlib.import_module("flashlin.modules.l2norm")
    assert not hasattr(l2norm, "compat") and not hasattr(l2norm, "__wrapped__")


def test_paths_that_stand_in_hide_no_file_and_no_function() -> None:
    for package in (ops, modules):
        here = Path(next(iter(package.__path__)))
        assert len(package.OF_FLA) == len(set(package.OF_FLA)) > 20
        for path in package.OF_FLA:
            assert not (here / f"{path.replace('.', '/')}.py").exists(), path


def test_names_of_ops_are_no_torch() -> None:
    assert said("import sys; sys.modules['torch'] = sys.modules['triton'] = None; import flashlin, "
                "flashlin.ops, flashlin.modules; dir(flashlin.ops)") == (0, "")
