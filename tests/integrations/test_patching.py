"""Bindings, the import hook, patch with its report, by_name and flashlin run.

The packages of these tests are small and made here.
"""
from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flashlin
from flashlin.__main__ import main
from flashlin.compat.import_hooks import watch
from flashlin.integrations import calling, patching
from flashlin.integrations.bindings import Bindings, named_like
from flashlin.integrations.calling import by_name
from flashlin.integrations.patching import PATCHES, Patch

ROOT = Path(flashlin.__file__).parents[1]


def original(x: int, scale: float = 2.0, *, flag: bool = False, **kwargs: Any) -> tuple[Any, ...]:
    """What it is for."""
    return "original", x, scale, flag, kwargs


class Layer(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function


class Toy(Patch):
    """A patch that replaces ``f`` of the package ``toy``, in loaded and in later modules."""
    package, watched = "toy", ("toy",)

    def begin(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
            self.arrived(sys.modules[name])
        self.bindings.sweep()

    def arrived(self, module: ModuleType) -> None:
        f = vars(module).get("f")
        if f is not None and f.__module__ == module.__name__ and not self.bindings.knows(f):
            def ours(*args: Any) -> str:
                return "ours"
            self.bindings.swap(f, named_like(ours, f), "flashlin.f")
        self.bindings.sweep([module])


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Make a package that binds a function in all possible places."""
    home = tmp_path / "toy"
    home.mkdir()
    (home / "__init__.py").write_text("from toy.ops import f\nTABLE = {'f': f}\n")
    (home / "ops.py").write_text("def f():\n    return 'theirs'\n")
    (home / "wrap.py").write_text(
        "from toy import f\ndef around(inner):\n    def call():\n        return inner()\n    return call\n"
        "wrapped = around(f)\n")
    (home / "late.py").write_text("from toy.ops import f\nimport toy.later_still\n")
    (home / "later_still.py").write_text("from toy import f as g\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PATCHES, "toy", Toy)
    yield importlib.import_module("toy")
    flashlin.unpatch("toy")
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
        del sys.modules[name]


def bindings_of(toy: ModuleType, layer: Layer) -> list[Any]:
    wrap = sys.modules["toy.wrap"]
    return [toy.f, toy.ops.f, toy.TABLE["f"], wrap.f, wrap.wrapped.__closure__[0].cell_contents,
            layer.function]


def test_every_place_is_replaced_and_is_the_same_object_afterwards(toy: ModuleType) -> None:
    importlib.import_module("toy.wrap")
    theirs, layer, finders = toy.f, Layer(toy.f), list(sys.meta_path)
    with flashlin.patched("toy") as report:
        assert [f() for f in bindings_of(toy, layer)] == ["ours"] * 6
        assert sys.modules["toy.wrap"].wrapped() == "ours"
        late = importlib.import_module("toy.late")  # imported inside of the block, with its own imports
        assert late.f() == sys.modules["toy.later_still"].g() == "ours"
        built_inside, table = Layer(toy.f), toy.TABLE
        assert "toy: 1 functions replaced in 6 places (flashlin.f)" in str(report)
        assert "toy.wrap.wrapped.inner: flashlin.f" in report.lines()
    assert all(f is theirs for f in bindings_of(toy, layer)) and table["f"] is theirs
    assert built_inside.function is theirs and late.f is theirs
    assert sys.modules["toy.later_still"].g is theirs
    assert not [finder for finder in sys.meta_path if finder not in finders]


def test_patched_models_are_copied_and_pickled_by_name(toy: ModuleType) -> None:
    with flashlin.patched("toy"):
        layer = Layer(toy.f)
        assert copy.deepcopy(layer).function is layer.function
        data = pickle.dumps(layer)
        assert pickle.loads(data).function is toy.ops.f
    assert pickle.loads(data).function() == "theirs"  # without the patch it is the package's function


def test_blocks_in_threads_and_patch_count(toy: ModuleType) -> None:
    """Threads may enter and leave ``patched`` blocks in any order; the last one ends the patch."""
    entered, leave = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]
    seen: list[str] = []

    def run(at: int) -> None:
        with flashlin.patched("toy"):
            entered[at].set()
            leave[at].wait(30)
            seen.append(toy.f())
    threads = [threading.Thread(target=run, args=(at,)) for at in range(3)]
    for at, thread in enumerate(threads):
        thread.start()
        entered[at].wait(30)
    for at in (1, 0, 2):
        leave[at].set()
        threads[at].join(30)
        assert toy.f() == ("theirs" if at == 2 else "ours")
    assert seen == ["ours"] * 3
    flashlin.patch("toy")
    with flashlin.patched("toy"):
        flashlin.unpatch("toy")
        assert toy.f() == "ours"  # the block is still active
    assert toy.f() == "theirs"


def test_a_block_that_raises_puts_everything_back(toy: ModuleType) -> None:
    with pytest.raises(KeyError), flashlin.patched("toy"):
        raise KeyError
    assert toy.f() == "theirs"


@pytest.mark.parametrize("first", [0, 1])
def test_two_patches_of_one_place_end_in_any_order(first: int) -> None:
    module = ModuleType("shared_place")
    vars(module)["f"] = original
    sys.modules["shared_place"] = module
    try:
        one, two = Bindings(), Bindings()

        def stand_in() -> str:
            return "stand-in"

        def other() -> str:
            return "other"
        one.swap(original, stand_in, "one")
        one.sweep([module])
        two.put(module, "f", other, "two")
        two.stands_for(other, original)
        assert module.f is other
        for bindings in ((one, two), (two, one))[first]:
            bindings.undo()
        assert module.f is original
    finally:
        del sys.modules["shared_place"]


def test_what_somebody_else_binds_meanwhile_stays(toy: ModuleType) -> None:
    def third() -> str:
        return "third"
    with flashlin.patched("toy"):
        toy.f = third
    assert toy.f is third and toy.ops.f() == "theirs"


def test_an_import_does_not_fail_by_a_patch(toy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with flashlin.patched("toy"):
        def fails(self: Any, module: ModuleType) -> None:
            raise RuntimeError("no such thing")
        monkeypatch.setattr(Toy, "arrived", fails)
        with pytest.warns(RuntimeWarning, match=r"could not prepare toy\.wrap: RuntimeError: no such thing"):
            assert importlib.import_module("toy.wrap").wrapped() == "ours"


def test_a_module_is_watched_twice_executed_again_and_only_looked_for(toy: ModuleType) -> None:
    seen: list[str] = []
    ends = [watch(["toy"], lambda module: seen.append(module.__name__)) for _ in range(2)]
    try:
        assert importlib.util.find_spec("toy.late") is not None and not seen
        wrap = importlib.import_module("toy.wrap")
        assert seen == ["toy.wrap"] * 2
        assert type(wrap.__loader__) is type(wrap.__spec__.loader) is SourceFileLoader
        importlib.reload(wrap)
        assert seen == ["toy.wrap"] * 4
        spec = importlib.util.find_spec("toy.late")
        assert spec is not None and spec.loader is not None
        copy.deepcopy(spec).loader.exec_module(ModuleType("toy.late"))
        assert seen[4:] == ["toy.later_still"] * 2 + ["toy.late"] * 2
    finally:
        for end in ends:
            end()


def test_an_import_meanwhile_asks_every_finder(toy: ModuleType, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that ends in another thread removes a finder while an import iterates over the finders."""
    class Ends:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "beside_toy":
                flashlin.unpatch("toy")
    (tmp_path / "beside_toy.py").write_text("")
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    sys.meta_path.insert(sys.meta_path.index(PathFinder), Ends())
    flashlin.patch("toy")
    importlib.import_module("beside_toy")
    assert toy.f() == "theirs"
    monkeypatch.delitem(sys.modules, "beside_toy")


def test_a_stand_in_keeps_what_is_known_of_a_function(toy: ModuleType) -> None:
    def ours(x: int, *, scale: float = 2.0) -> tuple[int, float]:
        return x, scale
    toy.g = None
    bindings = Bindings()
    bindings.fill(toy, "g", ours, "ours")
    bindings.fill(toy, "f", ours, "it has its own")
    assert toy.g(3) == (3, 2.0) and toy.f() == "theirs"
    assert inspect.signature(toy.g) == inspect.signature(ours) and toy.g.__annotations__ == ours.__annotations__
    assert (toy.g.__module__, toy.g.__name__) == ("toy", "g")
    assert pickle.loads(pickle.dumps(toy.g)) is toy.g
    bindings.undo()
    assert toy.g is None
    assert by_name(original, ours).__doc__ == original.__doc__ == "What it is for."


@pytest.mark.parametrize("names", [("toy", "toys"), ("toys", "toy")])
def test_patches_end_in_one_order(toy: ModuleType, names: tuple[str, str],
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches end in the reverse order of PATCHES, whatever their order in the call.

    Models of transformers look functions up in mamba_ssm again, so mamba_ssm must be restored first.
    """
    ended: list[str] = []

    class Ends(Toy):
        def end(self) -> None:
            super().end()
            ended.append(type(self).__name__)

    class First(Ends): ...
    monkeypatch.setitem(PATCHES, "toy", Ends)
    monkeypatch.setitem(PATCHES, "toys", First)
    with flashlin.patched(*names):
        assert toy.f() == "ours"
    assert ended == ["First", "Ends"] and toy.f() == "theirs"


class Fails(Patch):
    package = "fails"

    def __init__(self) -> None:
        super().__init__()
        self.bindings.put(sys.modules["toy"], "mark", "begun", "a mark")

    def begin(self) -> None:
        raise ImportError("fails is not installed")


class FailsToEnd(Fails):
    def begin(self) -> None: ...

    def end(self) -> None:
        super().end()
        raise OSError("no end")


@pytest.mark.parametrize("context", [False, True])
def test_an_error_leaves_nothing_half_done(toy: ModuleType, context: bool,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATCHES, "fails", Fails)
    with pytest.raises(ImportError, match="fails is not installed"):
        if context:
            with flashlin.patched("toy", "fails"):
                pass
        else:
            flashlin.patch("toy", "fails")
    assert toy.f() == "theirs" and not hasattr(toy, "mark")
    assert not patching._in_force and not patching._for_good and not +patching._blocks

    def model(self: Any, given: Any) -> None:
        raise AttributeError("no model")
    monkeypatch.setattr(Toy, "model", model)
    with pytest.raises(AttributeError, match="no model"):
        flashlin.patch("toy", model=1)
    assert toy.f() == "theirs"


def test_one_that_cannot_end_does_not_keep_others_from_it(toy: ModuleType,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATCHES, "fails", FailsToEnd)
    for names in (("fails", "toy"), ("toy", "fails")):
        with pytest.raises(OSError, match="no end"), flashlin.patched(*names):
            assert toy.f() == "ours" and toy.mark == "begun"
        assert toy.f() == "theirs" and not hasattr(toy, "mark")
        assert not patching._in_force and not patching._unwatch


def test_a_patch_keeps_no_model_alive(toy: ModuleType) -> None:
    layer = Layer(toy.f)
    with flashlin.patched("toy"):
        assert layer.function() == "ours"
        layer.weight = torch.nn.Parameter(torch.ones(1))
        weight = weakref.ref(layer.weight)
        del layer
        gc.collect()
        assert weight() is None


def test_what_is_read_again_is_not_wrapped_again(toy: ModuleType) -> None:
    """A module may be half imported when a patch begins, and complete later."""
    theirs = toy.f
    with flashlin.patched("toy") as report:
        ours, places = toy.f, len(report.replaced)
        patching.arrived(toy.ops)
        assert toy.f is toy.ops.f is ours and len(report.replaced) == places
        importlib.reload(toy.ops)  # another function
        assert toy.ops.f() == "ours" and toy.ops.f is not ours
    assert toy.f is theirs and toy.ops.f is not theirs and toy.ops.f() == "theirs"


def test_unknown_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"package: got 'flax', need one of triton, fla"):
        flashlin.patch("triton", "flax")
    assert "triton" not in patching._in_force  # no patch is half applied
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(ImportError, match=r"fla is not installed: pip install flash-linear-attention"):
        flashlin.patch("fla")


# --- by_name ---

def ours(x: int, *, scale: float = 2.0, process_group: Any = None) -> tuple[Any, ...]:
    return "ours", x, scale


def test_by_name_takes_the_originals_positions() -> None:
    call = by_name(original, ours)
    assert inspect.unwrap(call) is original  # registries find the original in this way
    assert call(1) == ("ours", 1, 2.0) and call(1, 3.0) == ("ours", 1, 3.0)
    assert call(x=1, scale=3.0) == ("ours", 1, 3.0) and call(1, flag=False) == ("ours", 1, 2.0)
    assert call.__name__ == "original" and call.__module__ == original.__module__


@pytest.fixture
def untold() -> Iterator[None]:
    calling._told.clear()
    yield
    calling._told.clear()


def test_by_name_leaves_what_only_the_original_has_to_it(untold: None) -> None:
    call = by_name(original, ours)
    with pytest.warns(UserWarning, match=r"original: got flag, which only the package's own function supports"):
        assert call(1, flag=True)[0] == "original"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(1, flag=True)[0] == "original"  # the warning comes only once


def test_by_name_tells_of_keywords_that_nobody_reads(untold: None) -> None:
    with pytest.warns(UserWarning, match=r"original: got head_last, which the package's own function also ignores"):
        assert by_name(original, ours)(1, head_last=True) == ("ours", 1, 2.0)


def test_by_name_refused_parameters_go_to_the_original(untold: None) -> None:
    def theirs(x: int, process_group: Any = None) -> str:
        return "original"
    call = by_name(theirs, ours)
    assert call(1, None)[0] == "ours" and call(1, process_group=None)[0] == "ours"
    with pytest.warns(UserWarning, match="process_group"):
        assert call(1, object()) == "original"


@pytest.mark.parametrize("arguments, keywords", [((1, 2.0, 3), {}), ((1,), {"x": 2}), ((), {})])
def test_by_name_wrong_calls_are_the_originals_errors(arguments: tuple[Any, ...],
                                                      keywords: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        original(*arguments, **keywords)
    with pytest.raises(TypeError):
        by_name(original, ours)(*arguments, **keywords)


# --- flashlin run ---

PROGRAM = """
import subprocess, sys
import triton
print(sys.argv[1:], __name__, triton.autotune.__module__, flush=True)
if sys.argv[1:] == ["parent"]:
    subprocess.run([sys.executable, __file__, "child"], check=True)
    import torch, flashlin
    flashlin.rms_norm(torch.randn(4, 8), torch.ones(8), None)
raise SystemExit(3)
""".replace("subprocess.run([sys.executable, __file__, \"child\"], check=True)",
            "assert subprocess.run([sys.executable, __file__, \"child\"]).returncode == 3")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flashlin", "run", *arguments], capture_output=True,
                          text=True, timeout=120, env={**os.environ, **environment})


@pytest.mark.alternate
def test_run_patches_a_program_and_its_children(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    done = run("--patch", "triton", str(program), "parent")
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["['parent'] __main__ flashlin.shielding.autotune",
                                        "['child'] __main__ flashlin.shielding.autotune"]
    assert "flashlin: triton: 1 functions replaced in 3 places (flashlin.autotune)" in done.stderr
    assert "flashlin: rms_norm: 1 calls, plain torch" in done.stderr


def test_run_as_a_module_quietly_by_the_variable(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(PROGRAM)
    done = run("--quiet", "-m", "prog", "--lr", "1", FLASHLIN_PATCH="triton", PYTHONPATH=os.pathsep.join(
        [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    assert done.returncode == 3 and "functions replaced" not in done.stderr, done.stderr
    assert done.stdout.splitlines() == ["['--lr', '1'] __main__ flashlin.shielding.autotune"]


WHERE = ("import os, sys\n"
         "print(sys.argv, __file__, __name__, __package__, sys.path[0], os.getcwd() in sys.path)\n")
PROGRAMS = {  # name: (its text, the arguments that start it)
    "raises": ("def f():\n    raise KeyError(1)\nf()\n", ["raises.py"]),
    "broken_pipe": ("raise BrokenPipeError('a socket of its own')\n", ["broken_pipe.py"]),
    "text": ("raise SystemExit('as text')\n", ["text.py"]),
    "closes": ("import sys; print(sys.stdin.read()); sys.stdout.close()\n", ["closes.py"]),
    "no_python": ("def f(:\n", ["no_python.py"]),
    "at_once": ("import os; print('x', flush=True); os._exit(7)\n", ["at_once.py"]),
    "below/where": (WHERE, ["below/where.py", "--quiet", "-x"]),
    "whole/__main__": (WHERE, ["whole", "1"]),
    "package/__main__": (WHERE + "raise SystemExit(4)\n", ["-m", "package", "-m"]),
    "nowhere": ("", ["-m", "not_here"]),
    "goes_on": ("""
import __main__, multiprocessing, pickle, threading
class Mine: ...
def kind(one):
    return type(one).__module__
def later():
    threading.main_thread().join()
    print(pickle.loads(pickle.dumps(Mine())).__class__ is Mine is __main__.Mine)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(kind, [Mine()]), flush=True)
    threading.Thread(target=later).start()
""", ["goes_on.py"])}


@pytest.mark.parametrize("name", PROGRAMS)
def test_run_is_as_python_runs_it(name: str, tmp_path: Path) -> None:
    """Output, error texts and exit codes are the same, for files, folders and modules."""
    file = tmp_path / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    text, arguments = PROGRAMS[name]
    file.write_text(text)

    def said(*command: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, *command, *arguments], capture_output=True, text=True,
                              timeout=120, cwd=tmp_path, input="given",
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
        return done.returncode, done.stdout, done.stderr
    assert said("-m", "flashlin", "run", "--quiet", "--patch", "mamba_ssm") == said()


def test_run_inside_of_run_patches_once(tmp_path: Path) -> None:
    """A program that applies a patch itself gets it once if the process already has it."""
    (tmp_path / "toolkit.py").write_text("""
import flashlin, os
flashlin.patch("triton")
import triton
print(triton.autotune.__module__, os.environ["PYTHONPATH"].count("inherited"))
""")
    done = run("--quiet", "--patch", "triton", "-m", "flashlin", "run", "--patch", "triton",
               str(tmp_path / "toolkit.py"))
    assert (done.returncode, done.stdout) == (0, "flashlin.shielding.autotune 1\n"), done.stderr


@pytest.mark.parametrize("arguments, said", [
    (["--patch", "flax", "x.py"], "--patch: got 'flax', need one of triton, fla"),
    (["nowhere.py"], "program: got 'nowhere.py', which does not exist")])
def test_run_with_wrong_arguments(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_run_says_which_package_is_missing(toy: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(PATCHES, "fails", Fails)
    assert main(["run", "--patch", "fails", __file__]) == 2
    assert capsys.readouterr().err == "flashlin run: fails is not installed\n"
