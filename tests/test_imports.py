"""Tests of imports: the order of packages, files that must load without torch and Triton, and side effects.

Importing flashlin must change nothing in the process.
"""
from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashlin

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flashlin"
FILES = sorted(PACKAGE.rglob("*.py"))

# The order of the subpackages of flashlin: each may import itself and earlier ones only. PUBLIC stands for
# flashlin itself, whose names load on first use, and for its top-level modules. Later subpackages use the
# public ops.
PUBLIC = "(public names)"
ROOMS = ("compat", "guards", "kernels", "dispatch", "trial", "ops", "modules", "serving", PUBLIC, "testing",
         "shielding", "integrations", "backends", "diagnostics", "__main__")
# The modules that child processes run. CHILDREN run in child processes only: they may import every
# subpackage, and no module imports them.
CHILDREN = ("flashlin.trial.child", "flashlin.testing.plugin_child")
STARTED = (*CHILDREN, "flashlin.testing.compile", "flashlin.diagnostics.self_test",
           "flashlin.diagnostics.importing")
# Settings belong to no subpackage. Every subpackage may read them except compat, which states facts about
# releases and GPUs; the settings themselves use compat.
ANYWHERE_BUT_COMPAT = "flashlin.policy"

# Names of fla's packages that flashlin does not have: importing them raises an error that says what to use.
ERRORS = ("layers", "models")

# These files must load without torch and Triton: doctor works where either is broken, and plans can be made
# on a machine that has neither.
NO_TORCH = ("guards/plan_types.py", "guards/family.py", "guards/checks.py", "kernels/*/recipe.py",
            "kernels/families.py", "kernels/shield/source.py", "kernels/remedies.py", "kernels/configs.py",
            "dispatch.py", "diagnostics/calls.py", "diagnostics/doctor.py", "diagnostics/packages.py",
            "diagnostics/why.py", "integrations/probing.py", "policy.py",
            "compat/lazy_imports.py", "compat/locks.py", "compat/versions.py", "compat/releases.py",
             "compat/installed_triton.py", "compat/target.py", "compat/traits.py", "compat/known*.py",
            "__init__.py", "*/__init__.py", "kernels/*/__init__.py")


def imports(tree: ast.Module, module: str, everywhere: bool) -> Iterator[str]:
    """Yield the full names of the modules that a file imports.

    Imports for type checkers do not count. Imports inside functions count only if ``everywhere`` is True.
    """
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; the project writes full names"
            # The imported name may be a module: "from flashlin import dispatch" imports flashlin.dispatch.
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> int:
    """Return the index in ROOMS of the subpackage that a module belongs to."""
    second = module.split(".")[1] if "." in module else ""
    return len(ROOMS) if module in CHILDREN else ROOMS.index(second if second in ROOMS else PUBLIC)


def wrong_way(module: str, imported: list[str]) -> list[str]:
    """Return the imported modules that ``module`` must not import: their subpackage is later in ROOMS."""
    mine = [name for name in imported if name.split(".")[0] == "flashlin"]
    free = [name for name in mine if room(module) > 0 and f"{name}.".startswith(f"{ANYWHERE_BUT_COMPAT}.")]
    return [name for name in mine if name not in free and room(name) > room(module)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    # Imports inside functions count as well: a late import still makes one subpackage depend on another.
    module = module_of(path)
    wrong = wrong_way(module, list(imports(ast.parse(path.read_text()), module, everywhere=True)))
    assert not wrong, f"{module} may import {', '.join(ROOMS[:room(module) + 1])} (and flashlin.policy), not {', '.join(wrong)}"


def cycles(sources: dict[str, str]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or indirectly, also inside functions.

    sources: the source text of each module by its name.
    """
    def known(name: str) -> Iterator[str]:
        while name and name not in sources:
            name = name.rpartition(".")[0]
        yield from filter(None, [name])
    after = {module: {one for name in imports(ast.parse(text), module, everywhere=True)
                      for one in known(name)} - {module} for module, text in sources.items()}
    for _ in sources:  # extend each set of imports until it is transitive
        further = {module: reached.union(*(after[one] for one in reached))
                   for module, reached in after.items()}
        if further == after:
            break
        after = further
    circles = {tuple(sorted(one for one in after[module] if module in after[one]))
               for module in after if module in after[module]}
    return sorted(map(list, circles))


def test_no_module_imports_itself_through_others() -> None:
    assert cycles({module_of(path): path.read_text() for path in FILES}) == []


def test_a_cycle_is_found_where_it_is() -> None:
    late = "def f():\n    from p.b import x\n"
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.b\n"
    b, c = "from p import c", "import p.a"
    assert cycles({"p": "", "p.a": late, "p.b": b, "p.c": c, "p.d": "import p.a"}) == [["p.a", "p.b", "p.c"]]
    assert cycles({"p": "", "p.a": checked, "p.b": b, "p.c": c}) == []


def test_nobody_imports_what_children_run() -> None:
    for path in FILES:
        assert not {*CHILDREN} & {*imports(ast.parse(path.read_text()), module_of(path),
                                           everywhere=True)}, path


def test_what_children_run_is_known() -> None:
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and any(ast.unparse(part) == "python"
                                                  for part in (node.func, *node.args[:1])):
                found |= {part.value for part in node.args[:2] if isinstance(part, ast.Constant)
                          and str(part.value).startswith("flashlin.")}
    assert found == set(STARTED)


def test_the_package_knows_nothing_of_what_tests_it() -> None:
    for path in FILES:
        outside = {name.split(".")[0]
                   for name in imports(ast.parse(path.read_text()), module_of(path), everywhere=True)}
        assert not outside & {"matrix", "tests", "benchmarks", "tools"}, path


def test_the_settings_import_facts_and_only_when_asked_about_them() -> None:
    tree = ast.parse((PACKAGE / "policy.py").read_text())
    of_ours = [name for name in imports(tree, "flashlin.policy", everywhere=True)
               if name.startswith("flashlin")]
    lock, facts = "flashlin.compat.locks.ThreadLock", "flashlin.compat.known_issues.KNOWN_ISSUES"
    errors = "flashlin.compat.suggestions.need_one_of"
    assert sorted({*of_ours}) == [facts, lock, errors]
    assert not {facts, errors} & {*imports(tree, "flashlin.policy", everywhere=False)}


def without_torch() -> list[Path]:
    return sorted({path for pattern in NO_TORCH for path in PACKAGE.glob(pattern)
                   if path.parent.name not in ERRORS})


def test_every_pattern_of_torchless_files_finds_one() -> None:
    missing = [pattern for pattern in NO_TORCH if not list(PACKAGE.glob(pattern))]
    assert not missing


def blocked(names: tuple[str, ...]) -> str:
    """Return the first lines of a script that make the import of these packages fail."""
    return f"import sys\nfor name in {names!r}:\n    sys.modules[name] = None\n"


@pytest.mark.parametrize("path", without_torch(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_loads_without_torch_and_triton(path: Path) -> None:
    names = {name.split(".")[0]
             for name in imports(ast.parse(path.read_text()), module_of(path), everywhere=False)}
    assert not names & {"torch", "triton"}


def test_those_files_really_load_and_plan_with_torch_and_triton_blocked() -> None:
    # The test above reads each file alone; this test also covers the modules that the files import.
    modules = [module_of(path) for path in without_torch()]
    run(blocked(("torch", "triton")), f"""
        import importlib
        for module in {modules!r}:
            importlib.import_module(module)
        from flashlin.compat.target import parse
        problem = importlib.import_module("flashlin").Problem("chunk_simple_gla", "simple_gla", "chunk", 1, 64, 1, 64, 64, 1, "bfloat16")
        assert importlib.import_module("flashlin.dispatch").plan(problem, parse("triton=3.7.1,sm=90")).path == "triton"
        """)


SAME_ENVIRONMENT = """
    import os
    assert dict(os.environ) == before, {k: v for k, v in os.environ.items() if before.get(k) != v}
    """


def test_importing_flashlin_loads_and_changes_nothing() -> None:
    said = run("""
        import os, sys, warnings
        before, hooks, filters = dict(os.environ), (sys.excepthook, sys.displayhook), list(warnings.filters)
        import flashlin
        heavy = {"torch", "triton", "numpy", "pydantic"} & set(sys.modules)
        assert not heavy, heavy
        ours = {name for name in sys.modules if name.startswith("flashlin.")}
        # the modules that load all the others
        ours -= {"flashlin.compat", "flashlin.compat.lazy_imports", "flashlin.compat.import_hooks"}
        assert not ours, f"to be loaded when they are used: {ours}"
        assert (sys.excepthook, sys.displayhook) == hooks and list(warnings.filters) == filters
        """, SAME_ENVIRONMENT)
    assert said == ""


def test_importing_the_ops_touches_no_gpu_and_no_environment_and_loads_no_compiler() -> None:
    # Triton and torch's compiler take seconds to load. Torch's compiler fails to load if Triton is broken.
    rooms = ("ops", "modules", "serving", "trial", "shielding", "integrations")
    modules = [module_of(path) for path in FILES if path.relative_to(PACKAGE).parts[0] in rooms]
    said = run(f"""
        import importlib, os, sys, torch
        before, threads, dtype, loaded = dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), set(sys.modules)
        tf32 = torch.backends.cuda.matmul.allow_tf32
        for module in {modules!r}:
            importlib.import_module(module)
            heavy = {{"triton", "torch._dynamo", "torch._inductor"}} & set(sys.modules) - loaded
            assert not heavy, f"{{module}} loads {{heavy}}"
        assert not torch.cuda.is_initialized()
        assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
        assert torch.backends.cuda.matmul.allow_tf32 == tf32
        """, SAME_ENVIRONMENT)
    assert said == ""


REGISTERED = """
    def registered():
        return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("flashlin::")}
    """


def test_an_exported_program_loads_after_import_flashlin_alone(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            o: torch.Tensor = flashlin.chunk_gated_delta_rule(q, q, q, g, g.exp())[0]
            return o
    q = torch.nn.functional.normalize(torch.randn(1, 5, 2, 8), dim=-1)
    g = -torch.rand(1, 5, 2)
    torch.export.save(torch.export.export(Model(), (q, g), strict=False), tmp_path / "model.pt2")
    torch.save([q, g, Model()(q, g)], tmp_path / "call.pt")
    rooms = ("guards", "ops", "modules", "serving")
    modules = ["flashlin.tokens", *(module_of(path) for path in FILES if path.name == "torch_path.py"
                                    or path.relative_to(PACKAGE).parts[0] in rooms)]
    run("import flashlin, torch, importlib", REGISTERED, f"""
        assert not registered()
        q, g, right = torch.load({str(tmp_path / "call.pt")!r})
        torch.testing.assert_close(torch.export.load({str(tmp_path / "model.pt2")!r}).module()(q, g), right)
        found = registered()
        for module in {modules!r}:
            importlib.import_module(module)
        assert len(found) > 20 and registered() == found, registered() - found
        """)


@pytest.mark.parametrize("lines", [
    "import flashlin, torch._inductor.package",  # the loader of AOTInductor
    "import torch._export.serde.serialize; import flashlin",
])
@pytest.mark.alternate
def test_every_loader_of_exported_programs_finds_the_operators(lines: str) -> None:
    run("import torch", lines, REGISTERED, "assert 'flashlin::delta' in registered()")


def test_eager_calls_load_no_compiler_either() -> None:
    assert run("""
        import sys, torch
        from flashlin.testing.cases import CASES
        from flashlin.testing.compare import check
        for case in [case for case in CASES if case.quick]:
            check(case, torch.device("cpu"), torch.float32)
            assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules), case
        """) == ""


CALL = """
    import warnings
    warnings.simplefilter("error")
    import torch, flashlin
    x = torch.ones(1, 3, 2, 8, requires_grad=True)
    o, ht = flashlin.chunk_simple_gla(x, x, x, torch.zeros(1, 3, 2), scale=1.0, output_final_state=True)
    assert o[0, :, 0, 0].tolist() == [8, 16, 24] and ht[0, 0, 0, 0] == 3
    o.sum().backward()
    assert x.grad is not None
    from flashlin.compat.target import probe, triton_state
    assert probe(torch.device("cpu")).backend == "cpu"
    print(triton_state()[1])
    """


def test_without_triton_the_torch_path_serves() -> None:
    assert run(blocked(("triton",)), CALL).strip() == "not installed"


def test_without_triton_what_is_for_kernels_loads() -> None:
    assert run(blocked(("triton",)), "from flashlin import autotune, patch, patched, shield, unpatch") == ""


@pytest.mark.parametrize(("init", "language", "why"), [
    ("raise ImportError('libtriton.so: undefined symbol')", "",
     "import fails: ImportError: libtriton.so: undefined symbol"),
    ("raise RuntimeError('0 active drivers')", "", "import fails: RuntimeError: 0 active drivers"),
    ("__version__ = '3.3.0'", "raise ImportError('half a wheel')", "import fails: ImportError: half a wheel"),
    ("__version__ = '2.3.1'", "", "2.3.1 is older than 3.0"),
], ids=["broken library", "no driver", "half a wheel", "too old"])
@pytest.mark.alternate
def test_with_a_broken_triton_the_torch_path_serves(tmp_path: Path, init: str, language: str,
                                                    why: str) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(init)
    (tmp_path / "triton" / "language.py").write_text(language)
    assert run(CALL, first_on_path=tmp_path).strip() == why


def test_without_triton_a_gpu_plan_takes_the_torch_path_and_says_so() -> None:
    run(blocked(("triton",)), """
        import flashlin
        from flashlin.compat.target import parse
        problem = flashlin.Problem("chunk_simple_gla", "simple_gla", "chunk", 1, 64, 1, 64, 64, 1, "bfloat16")
        plan = flashlin.plan(problem, parse("sm=90"))
        assert plan.path == "torch" and plan.steps[0][0].code == "triton" and plan.steps[0][0].forced, plan
        """)


@pytest.mark.parametrize("name", flashlin.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(flashlin, name) is not None


def test_the_public_modules_load_when_first_used() -> None:
    run("""
        import sys, flashlin
        for name in ("backends", "mamba", "modules", "ops", "serving"):
            assert name in dir(flashlin) and name not in flashlin.__all__, name
        loaded = {name for name in dir(flashlin) if f"flashlin.{name}" in sys.modules}
        assert loaded <= {"ops", "modules"}, loaded  # dir asks them for the public names
        assert flashlin.serving.decode and flashlin.mamba.RMSNormGated and flashlin.backends.register
        assert flashlin.ops.gla.chunk_gla is flashlin.chunk_gla is flashlin.ops.chunk_gla
        assert flashlin.modules.norm.RMSNorm is flashlin.RMSNorm is flashlin.modules.RMSNorm
        """)


def test_no_module_of_the_package_has_the_name_of_a_public_function() -> None:
    modules = {module.name for module in pkgutil.iter_modules(flashlin.__path__)}
    assert "mamba" in modules and not modules & {*flashlin.__all__}


@pytest.mark.parametrize("name", ["layers", "models", "utils"])
def test_a_package_of_fla_that_flashlin_lacks_says_where_to_look(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"^flashlin has no {name}: if fla has it, keep fla.{name} "):
        getattr(flashlin, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        flashlin.no_such_thing  # noqa: B018


def run(*pieces: str, first_on_path: Path | None = None) -> str:
    """Run pieces of code as one script in a new Python process, and return its output.

    The calling test fails if the script fails.
    """
    path = os.pathsep.join([*([str(first_on_path)] if first_on_path else []), str(ROOT)])
    environment = {name: value
                   for name, value in os.environ.items()
                   if not name.startswith(("FLASHLIN_", "TRITON_"))} | {"PYTHONPATH": path}
    script = "\n".join(textwrap.dedent(piece) for piece in pieces)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300,
                          env=environment, cwd=ROOT.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_kernel_files_keep_their_annotations_as_they_are() -> None:
    """No kernel file turns annotations into strings by ``from __future__ import annotations``.

    The interpreters of Triton 3.0 and 3.1 do not recognize the annotation ``tl.constexpr`` as a string.
    """
    files = [file for file in (ROOT / "flashlin" / "kernels").rglob("*.py")
             if "@triton.jit" in file.read_text()]
    assert len(files) > 8
    assert not [file for file in files if "from __future__ import annotations" in file.read_text()]
