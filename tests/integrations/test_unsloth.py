"""Programs that load unsloth, whose packages have the structure of the small one here.

unsloth carries a copy of fla and puts it into sys.modules under that name. It runs modeling files that it
has rewritten.
"""
from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flashlin
from flashlin.integrations import patching, run_command
from flashlin.integrations.probing import bound_in, called_by
from flashlin.integrations.transformers import decorated
from flashlin.testing.environments import NotInstallable, installed
from tests.share import WHOLE

pytest.importorskip("transformers")
FILES = {
    "__init__.py": "",
    "_vendored/fla/__init__.py": "__version__ = '0.5.1'\n",
    "_vendored/fla/ops/__init__.py": "",
    "_vendored/fla/ops/gated_delta_rule/__init__.py": "from .chunk import chunk_gated_delta_rule\n",
    "_vendored/fla/ops/gated_delta_rule/chunk.py": '''
def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs):
    return "its own"
''',
    "vendor.py": '''
import importlib, importlib.util, pathlib, sys


def inject():
    home = pathlib.Path(__file__).parent / "_vendored" / "fla"
    spec = importlib.util.spec_from_file_location("fla", home / "__init__.py",
                                                  submodule_search_locations=[str(home)])
    sys.modules["fla"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["fla"])
    return importlib.import_module("fla.ops.gated_delta_rule")
''',
    "compiler.py": '''
import importlib.util, sys


def create_new_function(name, source, file):
    """The module of a source that it executes itself."""
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, file))
    sys.modules[name] = module
    exec(compile(source, file, "exec"), vars(module))
    return module
'''}
COMPILED = "unsloth_compiled_module_small"
SOURCE = '''
import functools
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback


def not_compiled(func):
    disabled = func

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        return disabled(*args, **kwargs) if disabled else func(*args, **kwargs)
    return wrapper


@not_compiled
@use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
def torch_chunk_gated_delta_rule(query, key, value, g, beta, **kwargs):
    return "torch"


@not_compiled
def Layer_forward(self, *given):
    return torch_chunk_gated_delta_rule(*given)


class Layer(nn.Module):
    def forward(self, *given):
        return Layer_forward(self, *given)
'''


class NoFla:
    """A finder for ``sys.meta_path`` for which fla is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "fla":
            raise ModuleNotFoundError("No module named 'fla'", name="fla")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a process that has not imported fla, with unsloth_zoo on its path."""
    for name, text in FILES.items():
        file = tmp_path / "unsloth_zoo" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    before = dict(sys.modules)
    for name in [one for one in before if one.partition(".")[0] in ("fla", "unsloth_zoo", COMPILED)]:
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [NoFla(), *sys.meta_path])
    monkeypatch.setattr(run_command, "_begun", set())
    yield
    for name in [one for one in sys.modules if one.partition(".")[0] in ("fla", "unsloth_zoo", COMPILED)]:
        del sys.modules[name]
    sys.modules.update({name: one for name, one in before.items() if name not in sys.modules})


def injected() -> ModuleType:
    module: ModuleType = importlib.import_module("unsloth_zoo.vendor").inject()
    return module


def given() -> tuple[torch.Tensor, ...]:
    q, k, v = torch.randn(3, 1, 12, 2, 16).unbind()
    return q, k, v, -torch.rand(1, 12, 2), torch.rand(1, 12, 2)


@pytest.mark.usefixtures("program")
def test_a_copy_of_fla_that_unsloth_carries_is_patched_before_and_after_it_is_loaded() -> None:
    for early in (True, False):
        own = None if early else injected().chunk_gated_delta_rule
        with flashlin.patched("fla") as report:
            ops = injected() if early else sys.modules["fla.ops.gated_delta_rule"]
            assert isinstance(ops.chunk_gated_delta_rule(*given())[0], torch.Tensor)
            assert ("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule",
                    "flashlin.chunk_gated_delta_rule") in report.replaced
        assert ops.chunk_gated_delta_rule(*given()) == "its own"
        assert early or ops.chunk_gated_delta_rule is own
        for name in [one for one in sys.modules if one.partition(".")[0] == "fla"]:
            del sys.modules[name]


@pytest.mark.usefixtures("program")
def test_flashlin_run_patches_the_copy_when_it_is_loaded() -> None:
    assert "fla" in run_command.installed()
    run_command.begin(["fla"])
    try:
        assert "fla" not in patching._in_force
        assert isinstance(injected().chunk_gated_delta_rule(*given())[0], torch.Tensor)
    finally:
        flashlin.unpatch("fla")


def test_a_package_without_a_copy_carries_none(program: None, tmp_path: Path) -> None:
    (tmp_path / "unsloth_zoo" / "_vendored" / "fla" / "__init__.py").unlink()
    assert "fla" not in run_command.installed()
    with pytest.raises(ImportError, match="fla is not installed"):
        flashlin.patch("fla")


@pytest.mark.usefixtures("program")
def test_fla_itself_is_patched_when_it_is_whole(tmp_path: Path) -> None:
    """An installed fla is patched only after its import is complete.

    The import hook also sees modules of fla that load while the package is still being imported.
    """
    home = tmp_path / "installed" / "fla"
    home.mkdir(parents=True)
    (home / "part.py").write_text("")
    (home / "__init__.py").write_text("import fla.part\nfrom flashlin.integrations.patching import _in_force\n"
                                      "begun = list(_in_force)\n")
    sys.meta_path = [one for one in sys.meta_path if not isinstance(one, NoFla)]
    sys.path.insert(0, str(home.parent))
    run_command.begin(["fla"])
    try:
        assert "fla" not in importlib.import_module("fla").begun and "fla" in patching._in_force
    finally:
        flashlin.unpatch("fla")


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("early", [True, False])
def test_files_that_unsloth_runs_are_seen(early: bool, tmp_path: Path) -> None:
    """Functions in the files that unsloth has rewritten are patched and restored.

    They are inside a wrapper of unsloth, which is called like the function.
    """
    compiler = importlib.import_module("unsloth_zoo.compiler")
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    if not hasattr(hub, "use_kernel_func_from_hub_with_fallback"):
        pytest.skip("no decorated functions")

    def made() -> Any:
        return compiler.create_new_function(COMPILED, SOURCE, str(tmp_path / f"{COMPILED}.py"))
    module = None if early else made()
    own = None if module is None else module.torch_chunk_gated_delta_rule
    with flashlin.patched("transformers"):
        module = module or made()
        layer = module.Layer()
        assert isinstance(layer(*given())[0], torch.Tensor)
        assert [one.implementation for one in called_by(layer)] == ["flashlin"]
    assert layer(*given()) == "torch" and (early or module.torch_chunk_gated_delta_rule is own)
    assert [(one.name, one.kernel) for one in decorated(module)] == [
        ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule")]
    assert [(one.kernel, one.implementation) for one in bound_in(module)] == [
        ("chunk_gated_delta_rule", "torch")]
    assert compiler.create_new_function.__code__.co_filename.startswith(str(tmp_path))


# A program with the real unsloth_zoo. The package loads its copy of fla only if torch reports a GPU, so the
# program replaces that check. The test sets environment variables for its other checks: that unsloth is
# installed, that a CPU is allowed, and that it uses its own copy of fla.
RELEASE = "2026.10.9"
REAL = """
import sys
import flashlin
from flashlin.integrations.probing import bound_in

EARLY = {early}
MODELS = ("qwen3_next", "qwen3_5", "kimi_linear")


def bound():
    return {{(one.kernel, one.implementation) for name in MODELS
            for one in bound_in(sys.modules[f"transformers.models.{{name}}.modeling_{{name}}"])}}


if EARLY:
    flashlin.patch("fla", "transformers")
from unsloth_zoo.temporary_patches import fla_vendor
fla_vendor._torch_triton_cuda_supported = lambda: True
fla_vendor.patch_vendor_fla()
assert "_vendored" in sys.modules["fla"].__file__, sys.modules["fla"].__file__
for name in MODELS:
    __import__(f"transformers.models.{{name}}.modeling_{{name}}")
raw = {{("chunk_gated_delta_rule", "fla"), ("fused_recurrent_gated_delta_rule", "fla"), ("chunk_kda", "fla"),
       ("fused_recurrent_kda", "fla"), ("causal_conv1d_fn", "torch"), ("causal_conv1d_update", "torch")}}
if not EARLY:
    assert bound() == raw, bound()
    flashlin.patch("fla", "transformers")
ours = {{(kernel, "flashlin") for kernel, _ in raw}}
assert bound() == ours, bound()
fla_vendor.patch_vendor_fla()  # which it does again whenever it loads a model
assert bound() == ours, bound()

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
q, k, v = torch.randn(3, 1, 12, 2, 16).unbind()
for function, g in ((chunk_gated_delta_rule, -torch.rand(1, 12, 2)), (chunk_kda, -torch.rand(1, 12, 2, 16))):
    given = dict(q=q, k=k, v=v, g=g, beta=torch.rand(1, 12, 2))
    assert torch.equal(function(**given)[0], getattr(flashlin, function.__name__)(**given)[0])

flashlin.unpatch("fla", "transformers")
assert bound() == raw, bound()
"""


@pytest.mark.skipif(not WHOLE, reason="fetches unsloth_zoo")
@pytest.mark.parametrize("early", [True, False])
def test_the_real_package(early: bool, tmp_path: Path) -> None:
    try:
        folders = [installed([f"unsloth_zoo=={RELEASE}"], f"unsloth_zoo-{RELEASE}"),
                   installed(["requests"], "requests", dependencies=True)]
    except NotInstallable as error:
        pytest.skip(str(error))
    (tmp_path / "unsloth").mkdir()
    (tmp_path / "unsloth" / "__init__.py").touch()
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [root, *folders, tmp_path])),
                   "UNSLOTH_IS_PRESENT": "1", "UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_FORCE_VENDORED_FLA": "1"}
    ran = subprocess.run([sys.executable, "-c", REAL.format(early=early)], capture_output=True, text=True,
                         cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
