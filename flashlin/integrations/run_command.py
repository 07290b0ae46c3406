"""``flashlin run``: run a program unchanged, with flashlin in the packages that it uses.

Packages are patched when the program imports them. Python processes that the program starts (ranks of
torchrun, workers) find ``inherited/sitecustomize.py`` on their path, which applies the same patches there.
"""
from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from io import BytesIO
from pathlib import Path
from pkgutil import read_code
from types import ModuleType, TracebackType
from typing import Any

from flashlin.compat.import_hooks import not_prepared, remove, watch
from flashlin.integrations import summary
from flashlin.integrations.patching import PATCHES, comes, known, patch

VARIABLE = "FLASHLIN_PATCH"
INHERITED = Path(__file__).parent / "inherited"
MAY_NOT_LOAD = ("mamba_ssm", "causal_conv1d")  # their extensions may fail; the patch replaces these
_begun: set[str] = set()


def names_of(text: str, given_by: str = VARIABLE) -> tuple[str, ...]:
    """Return the packages in a text such as ``fla,transformers``.

    given_by: the name of the text in errors. Raises ValueError for a package that has no patch.
    """
    return known(filter(None, map(str.strip, text.split(","))), given_by)


def installed() -> tuple[str, ...]:
    """Return the installed packages that flashlin has patches for."""
    return tuple(filter(comes, PATCHES))


def begin(names: Sequence[str]) -> None:
    """Patch each package as soon as it is imported; if it is imported already, patch it now.

    A second call for a package does nothing, since ``flashlin run`` may itself run in a process that
    inherited the patches. Raises ImportError for a package that is not installed, unless its patch has stub
    modules for it.
    """
    for name in dict.fromkeys(names):
        if name in _begun:
            continue
        if name in sys.modules:
            patch(name)
        elif name in MAY_NOT_LOAD:
            sys.meta_path.insert(0, Before(name))
        elif not comes(name):
            patch(name)  # raises ImportError
        else:
            _once(name)
        _begun.add(name)


def _once(name: str) -> None:
    def arrived(module: ModuleType) -> None:
        # Patch when the package itself has run, and not when one of its submodules has. If the program has
        # put the package into sys.modules without an import, the first submodule that has run triggers the
        # patch.
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if module.__name__ == name or not getattr(spec, "_initializing", False):
            end()
            patch(name)
    end = watch([name], arrived)


class Before:
    """A finder in ``sys.meta_path`` that patches a package when it is first looked for."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Patch the package if this is its name, and return the spec that the other finders have."""
        if name != self.package:
            return None
        remove(self)
        try:
            patch(name)
        except Exception as error:
            not_prepared(name, error)
        return importlib.util.find_spec(name)


def inherit() -> None:
    """Apply the patches of the program in a Python process that it has started."""
    begin(names_of(os.environ.get(VARIABLE, "")))
    summary.begin()


def file_of(program: str) -> str:
    """Return the file of a program.

    program: a path, or the name of a console script, such as ``torchrun``, of this Python or on PATH.

    Raises ValueError if there is no such file, or if it is not a Python program.
    """
    holds_main = any(os.path.exists(os.path.join(program, f"__main__.{ending}")) for ending in ("py", "pyc"))
    if os.path.isfile(program) or holds_main:
        return program
    file = None
    if not os.path.dirname(program):
        folders = (sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))
        file = shutil.which(program, path=os.pathsep.join(folders))
    if file is None and os.path.exists(program):
        return program  # such as a folder without __main__: Python itself reports the error
    if file is None:
        raise ValueError(f"program: got {program!r}, which does not exist")
    if not _is_python(file):
        raise ValueError(f"program: got {program!r}, which is {file}, not a Python program; need a Python "
                         "file without python before it, a console script such as torchrun, or -m and a module")
    return file


def _is_python(file: str) -> bool:
    """Return True if a command is written in Python, as console scripts are."""
    with open(file, "rb") as opened:
        first, second = opened.readline(1000), opened.readline(1000)
    if zipfile.is_zipfile(file):  # a console script on Windows
        return True
    # pip writes the path of Python into the second line if it is too long for the first
    named = second if second.startswith(b"'''exec' ") else first
    return first.startswith(b"#!") and b"python" in named


def run(program: str, arguments: Sequence[str], names: Sequence[str], *, module: bool = False,
        quiet: bool = False) -> None:
    """Run a program as Python would, with these packages patched, also in the processes that it starts.

    program: a file or, with ``module``, the name of a module.
    quiet: print no summary. Otherwise stderr says at the end what ran through flashlin.

    Exceptions of the program, including SystemExit, propagate. Python shows them without flashlin's frames.
    """
    os.environ[VARIABLE] = ",".join(names)
    before = os.environ.get("PYTHONPATH")
    path = [part for part in before.split(os.pathsep) if part != str(INHERITED)] if before else []
    os.environ["PYTHONPATH"] = os.pathsep.join([str(INHERITED), *path])
    if not quiet:
        try:
            summary.begin(prints=True)
        except OSError as error:  # the program runs without a summary
            summary.tell(f"there will be no summary ({error})")
    sys.argv = ["-m" if module else program, *arguments]
    holds_main = os.path.isdir(program) or zipfile.is_zipfile(program)
    if getattr(sys.flags, "safe_path", False):  # then sys.path gets only a folder or zip file with a __main__
        sys.path[:0] = [os.path.abspath(program)] if holds_main and not module else []
    else:
        sys.path[0] = (os.getcwd() if module else os.path.abspath(program) if holds_main
                       else str(Path(program).resolve().parent))
    # The old __main__ is never restored, because threads and exit functions may read __main__ after the
    # program's last line.
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    try:
        if module or holds_main:  # use the function that Python itself uses for these
            run_module = runpy._run_module_as_main  # type: ignore[attr-defined]  # in no stub
            run_module(program if module else "__main__", alter_argv=module)
        else:
            _run_file(main, os.path.abspath(program))
    except BaseException as error:
        if not isinstance(error, SystemExit):
            _show_without_ours(error)
        raise


def _run_file(main: ModuleType, file: str) -> None:
    with open(file, "rb") as opened:
        source = opened.read()  # read once, because a pipe such as <(...) cannot be read again
    code = read_code(BytesIO(source))  # the code of a .pyc file with any name, else None
    loader = SourceFileLoader if code is None else SourcelessFileLoader
    if code is None and file.endswith(".pyc"):
        raise RuntimeError("Bad magic number in .pyc file")
    if code is None:
        code = compile(source, file, "exec", dont_inherit=True)
    main.__file__, main.__loader__ = file, loader("__main__", file)
    if sys.version_info < (3, 15):
        vars(main)["__cached__"] = None
    exec(code, vars(main))


def _show_without_ours(error: BaseException) -> None:
    """Have Python show an error that ends the program, beginning at the program's first frame.

    Python does everything else: ``sys.last_value`` and similar, the program's own ``sys.excepthook``, and the
    exit by a signal.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    shows = getattr(sys, "excepthook", sys.__excepthook__)

    def show(kind: type[BaseException], value: BaseException, all_frames: TracebackType | None) -> None:
        sys.excepthook = shows
        error.__traceback__ = sys.last_traceback = frames
        try:
            shows(kind, value, frames)
        except BaseException as failure:
            if failure.__traceback__ is not None:
                failure.__traceback__ = failure.__traceback__.tb_next
            raise
    sys.excepthook = show
