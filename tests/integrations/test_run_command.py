"""Compare ``flashlin run`` with ``python`` on the same programs.

Other tests cover console scripts, and the summary of all processes.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from flashlin.integrations import run_command
from tests.machines import BROKEN, ROOT, package
from tests.machines import run as flashlin

# Prints the state that the program sees, at its start and after an error that ends it.
SELF = """
import atexit, os, sys
from pathlib import Path
inherited = os.path.join("integrations", "inherited")
print(sorted(set(globals()) - {"atexit", "os", "sys", "Path", "inherited"}))
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(globals().get("__annotations__"), globals().get("__cached__", "none"), __builtins__)
print(sys.argv, sys.path[0], [one for one in sys.path if not one.endswith(inherited)])
print([one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not one.endswith(inherited)])

def frames(one):
    while one:
        yield one.tb_frame.f_code.co_filename, one.tb_lineno
        one = one.tb_next

def at_the_end():
    print(sys.last_type, sys.last_value, list(frames(sys.last_traceback)), getattr(sys, "last_exc", None))
    print(sys.excepthook, sys.modules["__main__"].__dict__ is globals())
atexit.register(at_the_end)

def fail():
    raise KeyError("here")
try:
    fail()
except KeyError as error:
    raise ValueError("there") from error
"""
HOOK = "import sys\ndef hook(*error):\n    print(error[:2])\n    {}\nsys.excepthook = hook\n1 / 0\n"
PROGRAMS = {  # name: (its text, the options of Python, the arguments)
    "self.py": (SELF, "", "self.py -- --lr 1 -- --quiet"),
    "module.py": (SELF, "", "-m module -- -m"),
    "folder/__main__.py": (SELF, "", "folder --"),
    "safe/__main__.py": (SELF, "-P", "safe") if sys.version_info >= (3, 11) else (SELF, "", "safe"),
    "compiled.pyc": (SELF, "", "compiled.pyc 1"),
    "other_name": (SELF, "", "other_name"),
    "no_code.pyc": ("not compiled", "", "no_code.pyc"),
    "link.py": (SELF, "", "link.py"),
    "base.py": ("class Odd(BaseException): ...\nraise Odd('odd')\n", "", "base.py"),
    "interrupted.py": ("import atexit, os, signal\natexit.register(print, 'end')\n"
                       "os.kill(os.getpid(), signal.SIGINT)\n", "", "interrupted.py"),
    "terminated.py": ("import os, signal\nprint(1, flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\n", "",
                      "terminated.py"),
    "hook_fails.py": (HOOK.format("raise RuntimeError('hook')"), "", "hook_fails.py"),
    "hook_exits.py": (HOOK.format("sys.exit(9)"), "", "hook_exits.py"),
    "imports.py": ("import mamba_ssm\n", "", "imports.py"),
    "nothing.py": ("\n", "", "nothing.py")}


@pytest.mark.skipif(sys.platform == "win32", reason="signals and links")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_run_as_python_runs_it(name: str, tmp_path: Path) -> None:
    if name == "hook_fails.py" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 also shows the frame of flashlin that called the hook")
    text, options, arguments = PROGRAMS[name]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if name in ("compiled.pyc", "other_name"):
        file.write_text(text)
        file.write_bytes(compiled(file))
    elif name == "link.py":
        (tmp_path / "below").mkdir()
        (tmp_path / "below" / name).write_text(text)
        file.symlink_to(Path("below", name))
    else:
        file.write_text(text)
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("def broken():\n    1 / 0\nbroken()\n")
    if name == "imports.py":
        file.write_text("import fla\n")

    def said(*command: str) -> tuple[int, str, str]:
        path = os.pathsep.join([str(ROOT), "", "/nowhere", ""])  # an empty entry is the current folder
        done = subprocess.run([sys.executable, *options.split(), *command, *arguments.split()], cwd=tmp_path,
                              capture_output=True, text=True, timeout=120,
                              env={**os.environ, "PYTHONPATH": path})
        return done.returncode, done.stdout, done.stderr
    assert said("-m", "flashlin", "run", "--quiet", "--patch", "fla") == said()


def compiled(file: Path) -> bytes:
    """Make a .pyc of a file, in a separate process."""
    script = "import py_compile, sys; py_compile.compile(sys.argv[1], sys.argv[1] + '.out', doraise=True)"
    subprocess.run([sys.executable, "-c", script, str(file)], check=True, timeout=60)
    return Path(f"{file}.out").read_bytes()


# --- console scripts ---

@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder on PATH that is not the current folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), "/usr/bin", "/bin"]))
    return tmp_path / "bin"


def command(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder / name


@pytest.mark.parametrize("first", [
    "#!/opt/env/bin/python3.11\n", "#!/usr/bin/env python\n",
    "#!/bin/sh\n'''exec' \"/a path/that is long/bin/python3\" \"$0\" \"$@\"\n' '''\n"])
def test_a_console_script_is_found_on_the_path(first: str, scripts: Path) -> None:
    script = command(scripts, "accelerate", first + "import sys\nprint(sys.argv, sys.path[0], __name__)\n")
    assert run_command.file_of("accelerate") == str(script)
    Path("accelerate").mkdir()  # a folder with the name of the script, as in a checkout of accelerate
    assert run_command.file_of("accelerate") == str(script)
    if "env" in first:
        done = flashlin("run", "--quiet", "--patch", "triton", "accelerate", "launch", "--", "x",
                        cwd=os.getcwd(), PATH=os.environ["PATH"])
        assert done.stdout == f"{[str(script), 'launch', '--', 'x']} {scripts} __main__\n", done.stderr
    Path("accelerate", "__main__.py").touch()
    assert run_command.file_of("accelerate") == "accelerate"


def test_the_script_of_this_python_comes_before_others(scripts: Path) -> None:
    command(scripts, "pytest", "#!/usr/bin/python\n")
    command(scripts, "./torchrun", "#!/usr/bin/python\n")
    assert Path(run_command.file_of("pytest")).parent == Path(sysconfig.get_path("scripts"))
    Path("pytest").touch()
    assert run_command.file_of("pytest") == "pytest"
    with pytest.raises(ValueError, match=r"program: got '\./torchrun', which does not exist"):
        run_command.file_of("./torchrun")


@pytest.mark.parametrize("text", ["#!/bin/sh\npython train.py\n", "\x7fELF python", ""])
def test_a_command_that_is_not_python_is_refused(text: str, scripts: Path) -> None:
    file = command(scripts, "job", text)
    done = flashlin("run", "job", cwd=os.getcwd(), PATH=os.environ["PATH"])
    assert done.returncode == 2 and done.stderr == (
        f"flashlin run: program: got 'job', which is {file}, not a Python program; need a Python file "
        "without python before it, a console script such as torchrun, or -m and a module\n")


# --- dependencies that are broken ---

def test_a_broken_dependency_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("print('ran')")
    done = flashlin("run", str(tmp_path / "x.py"), path=(package(tmp_path, "packaging", BROKEN),))
    assert (done.returncode, done.stdout) == (1, "")
    [line] = [line for line in done.stderr.splitlines() if line != "noise on stdout"]
    assert line.startswith("flashlin run: flashlin cannot be loaded: OSError: libcudart.so.12")
    assert line.endswith('fix: pip install --force-reinstall "packaging>=22"')


@pytest.mark.parametrize(("text", "names", "said"), [
    ("raise OSError('no such library')", "triton", "OSError: no such library"),
    ("raise SystemExit(3)", "triton", "SystemExit: 3"),
    (None, "flax", "ValueError: FLASHLIN_PATCH: got 'flax', need one of triton, fla")])
def test_in_a_child_it_is_one_line_and_the_child_runs(text: str | None, names: str, said: str,
                                                      tmp_path: Path) -> None:
    if text is not None:
        package(tmp_path, "packaging", text)
    path = os.pathsep.join([str(run_command.INHERITED), str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", "print('ran')"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": path, "FLASHLIN_PATCH": names})
    assert (done.returncode, done.stdout) == (0, "ran\n")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"flashlin: nothing is patched in this process ({said}")


def test_a_package_whose_patch_fails_is_a_warning(tmp_path: Path) -> None:
    """The patch of mamba_ssm needs torch, and is applied before the package is imported."""
    package(tmp_path, "mamba_ssm", "print('its own')")
    (tmp_path / "x.py").write_text("import mamba_ssm, sys\nprint(mamba_ssm.__name__)")
    done = flashlin("run", "--quiet", "--patch", "mamba_ssm", str(tmp_path / "x.py"),
                    path=(package(tmp_path, "torch", "raise OSError('no such library')"), tmp_path))
    assert (done.returncode, done.stdout) == (0, "its own\nmamba_ssm\n"), done.stderr
    assert "flashlin could not prepare mamba_ssm: OSError: no such library; it runs unchanged" in done.stderr


# --- the summary ---

CHILDREN = """
import multiprocessing, os, signal, subprocess, sys
import flashlin

def plans(count):
    for _ in range(count):
        flashlin.plan("rms_norm", target="H100,triton=3.6.0")

if __name__ == "__main__" and sys.argv[1:]:
    plans(1)
elif __name__ == "__main__":
    plans(1)
    for kind in ("fork", "spawn"):
        child = multiprocessing.get_context(kind).Process(target=plans, args=(4,))
        child.start()
        child.join()
    if not os.fork():
        plans(9)
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
    subprocess.run([sys.executable, "-c", "print('a child that plans nothing')"], check=True)
    again = [sys.executable, "-m", "flashlin", "run", "--patch", "triton", __file__, "few"]
    subprocess.run(again, check=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_summary_has_all_processes_and_leaves_nothing(tmp_path: Path) -> None:
    """A process that was killed or forked by multiprocessing counts its calls up to the last power of two.

    A second ``flashlin run`` in the program leaves its summary to the first one.
    """
    (tmp_path / "tmp").mkdir()
    (tmp_path / "x.py").write_text(CHILDREN)
    done = flashlin("run", "--patch", "triton", str(tmp_path / "x.py"), TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    kernels = lines[0].partition(", kernels ")[2]
    assert kernels and lines == [
        f"flashlin: rms_norm: 1 calls, kernels {kernels}",
        "flashlin: in 4 processes that the program started:",
        f"flashlin:   rms_norm: at least {4 + 4 + 8 + 1} calls, kernels {kernels}"]
    assert not list((tmp_path / "tmp").glob("flashlin-*"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="on Windows exec starts another process")
def test_a_program_that_exec_starts_prints_the_summary(tmp_path: Path) -> None:
    """A program that replaces itself by os.exec keeps its process, so it prints the summary.

    Its calls count although no package is patched.
    """
    (tmp_path / "tmp").mkdir()
    (tmp_path / "x.py").write_text(
        "import os, sys\n"
        "if not sys.argv[1:]:\n    os.execv(sys.executable, [sys.executable, __file__, 'again'])\n"
        "import flashlin\nflashlin.plan('rms_norm', target='cpu')\n")
    done = flashlin("run", "--patch", "", str(tmp_path / "x.py"), TMPDIR=str(tmp_path / "tmp"))
    assert (done.returncode, done.stderr) == (0, "flashlin: rms_norm: 1 calls, plain torch\n")
    assert not list((tmp_path / "tmp").glob("flashlin-*"))


def test_a_program_runs_without_a_place_for_temporary_files(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.py").write_text("print('ran')\n")
    for name in (run_command.VARIABLE, "PYTHONPATH", "FLASHLIN_SUMMARY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    run_command.run(str(tmp_path / "x.py"), [], [])
    out, err = capsys.readouterr()
    assert out == "ran\n" and err.startswith("flashlin: there will be no summary (")


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="no such files")
def test_a_program_may_come_through_a_pipe() -> None:
    """A shell does so with ``flashlin run <(...)``."""
    reads, writes = os.pipe()
    try:
        os.write(writes, b"number = 5\n")
        os.close(writes)
        main = ModuleType("piped")
        run_command._run_file(main, f"/dev/fd/{reads}")
    finally:
        os.close(reads)
    assert main.number == 5


def test_a_summary_without_stderr_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import sys\nsys.stderr.close()\n")
    done = flashlin("run", "--patch", "triton", str(tmp_path / "x.py"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


RANK = """
import os, sys
import triton
import torch, flashlin
os.write(1, f"{sys.argv[1:]} {triton.autotune.__module__}\\n".encode())  # one write: ranks must not mix
for _ in range(3):
    flashlin.rms_norm(torch.randn(4, 8), torch.ones(8), None)
"""


@pytest.mark.skipif(not shutil.which("torchrun", path=sysconfig.get_path("scripts")), reason="no torchrun")
def test_torchrun_is_found_and_its_ranks_are_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    done = flashlin("run", "--patch", "triton", "torchrun", "--standalone", "--nproc-per-node", "2",
                    str(tmp_path / "train.py"), "--lr", "1", OMP_NUM_THREADS="1", FLASHLIN_PATH="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['--lr', '1'] flashlin.shielding.autotune"] * 2
    assert done.stderr.splitlines()[-3:] == [
        "flashlin: in 2 processes that the program started:",
        "flashlin:   triton: 1 functions replaced in 3 places (flashlin.autotune)",
        "flashlin:   rms_norm: 6 calls, plain torch"]
