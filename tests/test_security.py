"""Tests against attacks by another user of the machine.

The attacks are modules in the current directory, folders and links of other users, and files of any size.
SECURITY.md must list all code that imports, executes or writes files outside the package.
"""
from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashlin.compat import folders
from flashlin.compat.subprocesses import python
from flashlin.guards import local_results
from flashlin.testing import environments
from flashlin.testing.environments import NotInstallable, cache_folder, installed
from matrix import environments as others
from tests.machines import CLEAN, ROOT, package
from tools import first_aid, peers, setup_env

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files")
TRAP = "import os; open(os.environ['TRAP'], 'a').write(__name__ + '\\n'); raise SystemExit(3)"
NAMES = ("json", "re", "platform", "pip", "numpy", "torch", "triton", "flashlin", "packaging", "pydantic",
         "runpy", "sitecustomize", "usercustomize")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a current directory with modules that record their import; return the file of the record."""
    here = tmp_path / "here"
    here.mkdir()
    for name in NAMES:
        (here / f"{name}.py").write_text(TRAP)
    monkeypatch.chdir(here)
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    return tmp_path / "sprung"


def started(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False,
                          timeout=120, **options)


@pytest.mark.parametrize("search", ["", ":", "{root}:", ":{root}"])
def test_first_aid_imports_nothing_from_the_current_directory(search: str, trap: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """First aid imports nothing from the current directory, even if PYTHONPATH has an empty entry.

    Python treats an empty entry as the current directory.
    """
    monkeypatch.setenv("PYTHONPATH", search.format(root=ROOT))
    for module in ("json", "packaging"):
        good, text = first_aid.imported(module)
        assert good and not trap.exists(), text


def test_first_aid_that_was_saved_among_other_files_imports_none_of_them(trap: Path) -> None:
    saved = Path("first_aid.py")
    text = (ROOT / "tools" / "first_aid.py").read_text()
    saved.write_text(text.replace("IMPORTED = (", "IMPORTED = () and ("))
    ran = started("first_aid.py", env={**CLEAN, "TRAP": str(trap)})
    assert not trap.exists() and ran.returncode == 0, ran.stderr


def test_a_child_of_an_interactive_python_has_no_current_directory(trap: Path) -> None:
    """A child of an interactive Python does not import from the current directory.

    In the parent, sys.path begins with "", which means the current directory at each import.
    """
    code = ("import sys; assert sys.path[0] == ''; sys.path.remove('')\n"
            "from flashlin.compat.subprocesses import python; import subprocess; sys.path.insert(0, '')\n"
            "sys.exit(subprocess.run(python('flashlin.trial.child', '--help')).returncode)")
    ran = started("-c", code)
    assert (ran.returncode, trap.exists()) == (0, False), ran.stderr


def test_flashlin_of_a_checkout_is_found_by_a_child_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", *(one for one in sys.path if one != str(ROOT))])
    given = python("flashlin.trial.child")
    assert str(ROOT) in given and "" not in given


def test_python_m_flashlin_imports_as_flashlin_does(trap: Path, tmp_path: Path) -> None:
    """``python -m flashlin`` does not import from the current directory."""
    for name in ("flashlin", "json", "re", "runpy", "platform"):  # python -m imports these first
        Path(f"{name}.py").unlink()
    for name in ("torch", "triton"):
        package(tmp_path / "installed", name, "__version__ = '9.9'")
    ran = started("-m", "flashlin", "--version",
                  env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")})
    assert not trap.exists(), trap.read_text()
    assert ran.stdout.endswith(", torch 9.9, triton 9.9\n"), ran.stdout + ran.stderr


def test_pip_of_the_environment_is_pip(trap: Path) -> None:
    assert setup_env.pip(Path(sys.executable), "--help") and not trap.exists()


def test_no_pythonpath_of_ours_has_an_empty_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (environments, others):
        monkeypatch.setattr(module, "installed", lambda wanted, name, *rest, **options: tmp_path / name)
    for given in ("", ":", "/one:", ":/one::/two:"):
        monkeypatch.setenv("PYTHONPATH", given)
        for found in (environments.triton_environment("3.2.0"), others.stack_environment(fla="0.6.0"),
                      others.torch_environment("2.6.0", "3.2.0")):
            entries = found["PYTHONPATH"].split(os.pathsep)
            assert all(entries) and [one for one in entries if one in ("/one", "/two")] == [
                one for one in given.split(":") if one], (given, found)


# ---- folders ----

@pytest.fixture
def nobody() -> int:
    if os.geteuid() != 0:
        pytest.skip("only root can give files to other users")
    return 65533


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder like /tmp, where all users may write, but may rename only their own files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, shared: Path) -> Iterator[Path]:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")
    for name in ("FLASHLIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    monkeypatch.setattr(environments.tempfile, "tempdir", str(shared))
    yield shared


def planted(folder: Path, owner: int | None = None, mode: int = 0o755) -> Path:
    """Create a fake Triton release in ``folder``, as an attacker would, and return its path."""
    made = folder / f"triton-9.9.9-{sys.implementation.cache_tag}"
    package(made, "triton", TRAP)
    if owner is not None:
        for one in (folder, *folder.parents):
            if one.stat().st_mode & 0o1000:
                break
            os.chown(one, owner, owner)
        os.chown(made, owner, owner)
    folder.chmod(mode)
    return made


def test_without_a_home_nothing_is_imported_from_a_folder_of_another_user(
        homeless: Path, nobody: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_pip", lambda *given: pytest.fail("was installed there"))
    planted(cache_folder(), nobody)
    with pytest.raises(NotInstallable, match=r"belongs to another user \(number 65533\).*FLASHLIN_CACHE"):
        environments.triton_environment("9.9.9")


def test_nor_from_one_that_another_user_has_made_around_it(homeless: Path, nobody: int,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """No release is used from a folder that another user owns, because the owner may replace its content."""
    planted(cache_folder())
    os.chown(next(homeless.iterdir()), nobody, nobody)
    with pytest.raises(NotInstallable, match="belongs to another user"):
        environments.triton_environment("9.9.9")


def test_without_a_home_a_folder_of_ones_own_is_made(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_pip", lambda *given: None)
    home = installed(["thing==1"], "thing-1")
    assert home.is_relative_to(homeless) and str(os.geteuid()) in str(home.relative_to(homeless))
    assert next(homeless.iterdir()).stat().st_mode & 0o777 == 0o700
    assert installed(["thing==1"], "thing-1") == home


def test_a_cache_that_everyone_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(tmp_path / "cache", mode=0o777)
    with pytest.raises(NotInstallable, match=r"can be written by everyone.*FLASHLIN_CACHE"):
        installed(["triton==9.9.9"], "triton-9.9.9", tmp_path / "cache")
    (tmp_path / "cache").chmod(0o755)
    assert installed(["triton==9.9.9"], "triton-9.9.9", tmp_path / "cache").is_dir()
    tmp_path.chmod(0o777)
    with pytest.raises(NotInstallable, match="can be written by everyone"):
        installed(["triton==9.9.9"], "triton-9.9.9", tmp_path / "cache")


def test_a_release_of_another_user_in_ones_own_cache_is_refused(tmp_path: Path, nobody: int) -> None:
    os.chown(planted(tmp_path / "cache"), nobody, nobody)
    with pytest.raises(NotInstallable, match="belongs to another user"):
        installed(["triton==9.9.9"], "triton-9.9.9", tmp_path / "cache")


def test_a_link_is_judged_by_where_it_leads(shared: Path, tmp_path: Path, nobody: int) -> None:
    theirs = tmp_path / "theirs"
    planted(theirs)
    os.chown(theirs, nobody, nobody)
    (shared / "cache").symlink_to(theirs)
    with pytest.raises(NotInstallable, match="belongs to another user"):
        installed(["triton==9.9.9"], "triton-9.9.9", shared / "cache")


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotInstallable, match=r"thing==1: .*file.*FLASHLIN_CACHE"):
        installed(["thing==1"], "thing-1", tmp_path / "file" / "cache")


def test_new_folders_are_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folders.make(tmp_path / "one" / "two")
    finally:
        os.umask(before)
    assert [(tmp_path / one).stat().st_mode & 0o777 for one in ("one", "one/two")] == [0o700, 0o700]
    folders.make(tmp_path / "one" / "two")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        folders.make(tmp_path / "file")


def test_a_folder_that_another_user_makes_first_is_refused(shared: Path, nobody: int) -> None:
    (shared / "flashlin").mkdir()
    os.chown(shared / "flashlin", nobody, nobody)
    with pytest.raises(OSError, match="belongs to another user"):
        folders.make(shared / "flashlin")


# ---- other texts ----

def test_what_packages_write_is_not_executed() -> None:
    hostile = "[c for c in ().__class__.__base__.__subclasses__()][0].__name__"
    assert peers.same(hostile) == hostile
    plain = {"1e-5": "1e-05", "float('-inf')": "-inf", "None": "None", "(0.0, float('inf'))": "(0.0, inf)",
             "-1": "-1", "torch.float32": "torch.float32"}
    assert {one: peers.same(one) for one in plain} == plain


def test_no_advice_names_a_folder_that_another_user_can_make_first() -> None:
    """No advice puts Triton's cache into /tmp, where another user can create the folder first.

    Triton loads libraries from its cache, so the other user's code would run.
    """
    from flashlin.compat.known_failures import KNOWN_FAILURES
    from flashlin.diagnostics.environment import elsewhere
    for text in (elsewhere(), json.dumps([vars(one) for one in KNOWN_FAILURES], default=str)):
        assert "CACHE_DIR=/tmp/" not in text and "/tmp/triton" not in text and "TMPDIR/triton" not in text


# Names of functions and modules that start programs, execute or load code, or write files.
RISKY = {"subprocess", "tempfile", "runpy", "exec", "eval", "fork", "load", "pickle", "mkdir", "write_text",
         "write_bytes", "spec_from_file_location", "exec_module", "broadcast_object_list", "rmtree", "unlink",
         "chmod", "system", "popen", "Process", "run_to_end", "forked", "compiled_in_forks"}
ON_MODULES = {"load": "torch", "fork": "os", "system": "os", "popen": "os", "exec": "", "eval": ""}


def risky(path: Path) -> set[str]:
    """Return the names of RISKY that a file uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            found |= {owner} | ({name} if ON_MODULES.get(name, owner) == owner else set())
    return found & RISKY


def test_every_place_that_is_risky_is_in_the_review() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    files = [ROOT / "setup.py", *(path for folder in ("flashlin", "tools", "matrix", "benchmarks", "examples")
                                  for path in sorted((ROOT / folder).rglob("*.py")))]
    assert risky(ROOT / "flashlin/testing/environments.py") == {"Process", "tempfile", "rmtree", "chmod"}
    assert risky(ROOT / "flashlin/integrations/run_command.py") >= {"exec"}
    missing = {}
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        known = (name, *(f"{parent}/" for parent in Path(name).parents if parent.as_posix() in (
            "matrix", "benchmarks", "matrix/stacks", "tools")))
        if (found := risky(path)) and not any(f"`{one}`" in text for one in known):
            missing[name] = sorted(found)
    assert not missing
    named = re.findall(r"`((?:flashlin|tools|matrix|benchmarks)/[^`$<]*)`", text)
    assert all((ROOT / one).exists() for one in named if one != "flashlin/tritons")


def test_a_relative_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative XDG_CACHE_HOME is ignored, as the XDG specification requires.

    A folder below the current directory may belong to another user.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FLASHLIN_CACHE", "FLASHLIN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == tmp_path / ".cache/flashlin/tritons"
    assert local_results.place() == (tmp_path / ".cache/flashlin", "")
