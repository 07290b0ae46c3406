"""Tests of the environments with other Triton releases: their location, progress messages and cleanup.

An interrupted download must leave nothing behind. A fake pip is used here; tests/matrix uses the real one.
"""
from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flashlin.testing import environments
from flashlin.testing.environments import NotInstallable, cache_folder, installed, triton_environment

TAG = sys.implementation.cache_tag
PIP = """
import os, sys, time
from pathlib import Path
target = Path(sys.argv[sys.argv.index("--target") + 1])
Path(os.environ["TMPDIR"], "wheel").write_bytes(bytes(3_000_000))
for _ in range(6000):  # until that has been reported, a minute at most
    if {told!r} is None or os.path.exists({told!r}):
        break
    time.sleep(0.01)
if {code}:
    sys.exit("ERROR: No matching distribution")
(target / "package.py").write_bytes(bytes(2_000_000))
"""


def pip_is(monkeypatch: pytest.MonkeyPatch, code: int = 0, told: Path | None = None) -> None:
    """Replace pip by a script that ends with ``code``.

    told: after its download, the script waits until this file exists; None for no wait.
    """
    text = PIP.format(code=code, told=told and str(told))
    monkeypatch.setattr(environments, "python", lambda *words: [sys.executable, "-c", text, *words])
    monkeypatch.setattr(environments, "EVERY", 0.15)


def test_how_far_a_download_is_is_told_and_a_second_call_says_nothing(monkeypatch: pytest.MonkeyPatch,
                                                                      tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    pip_is(monkeypatch, told=seen)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if text.startswith("thing==1: 3 MB so far, "):
            seen.touch()
    home = installed(["thing==1"], "thing-1", tmp_path, tell=tell)
    assert [path.name for path in home.iterdir()] == ["package.py"] and home == tmp_path.resolve() / f"thing-1-{TAG}"
    assert told[0] == f"downloading thing==1 into {tmp_path.resolve()}, once"
    # on a busy machine, the first lines may come before pip has started
    sizes = [int(re.fullmatch(r"thing==1: ([0-5]) MB so far, \d+ s", line)[1])  # type: ignore[index]
             for line in told[1:-1]]
    assert 3 in sizes and sizes == sorted(sizes) and told[-1].startswith("thing==1: done, 2 MB in ")
    assert installed(["thing==1"], "thing-1", tmp_path, tell=told.append) == home
    assert told[-1].startswith("thing==1: done")


def test_what_fails_leaves_nothing_and_quotes_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip_is(monkeypatch, code=1)
    with pytest.raises(NotInstallable, match=r"^pip install thing==1: ERROR: No matching distribution$"):
        installed(["thing==1"], "thing-1", tmp_path, tell=lambda text: None)
    assert [path.name for path in tmp_path.iterdir()] == [f".thing-1-{TAG}.lock"]


def test_in_code_it_is_told_on_stderr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    pip_is(monkeypatch)
    found = triton_environment("3.6.0", cache=tmp_path)
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path.resolve() / f"triton-3.6.0-{TAG}")
    shown = capsys.readouterr()
    assert not shown.out and shown.err.startswith("flashlin: downloading triton==3.6.0 into ")


def test_the_cache_is_the_users_and_not_the_projects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHLIN_CACHE", "here")
    assert cache_folder() == Path("here")
    monkeypatch.delenv("FLASHLIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "flashlin" / "tritons"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "flashlin" / "tritons"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder().parts[-2:] == ("flashlin", "tritons")


def test_a_folder_that_goes_while_its_size_is_told_counts_nothing(monkeypatch: pytest.MonkeyPatch,
                                                                  tmp_path: Path) -> None:
    (tmp_path / "unpacking").mkdir()
    (tmp_path / "wheel").write_bytes(bytes(7))
    scan = os.scandir

    def gone(path: str) -> Any:
        if Path(path).name == "unpacking":
            Path(path).rmdir()
        return scan(path)
    monkeypatch.setattr(os, "scandir", gone)
    assert environments._written(tmp_path) == 7
