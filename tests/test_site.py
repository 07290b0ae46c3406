"""Tests of the documentation site: its pages are in the nav, every public name has its place, and it builds.

tests/test_readme.py tests the text of the pages. ``make docs`` builds the site.
"""
from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import flashlin
import flashlin.backends
import flashlin.mamba
import flashlin.modules
import flashlin.serving
from tools import build_site, documents, setup_env

ROOT = build_site.ROOT
CONFIG = (ROOT / "zensical.toml").read_text(encoding="utf-8")
REFERENCE = {page: page.read_text(encoding="utf-8")
             for page in sorted((ROOT / "docs" / "reference").glob("*.md"))}
PACKAGES = (flashlin, flashlin.mamba, flashlin.serving, flashlin.modules, flashlin.backends)
needs_zensical = pytest.mark.skipif(bool(build_site.missing()), reason=build_site.missing() or "-")


# --- the nav ---

def test_every_page_is_in_the_nav_once() -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
    made = set(documents.troubleshooting())  # only the index is in the repository
    assert sorted(re.findall(r'= "([\w./-]+\.md)"', CONFIG)) == sorted(pages | made)


# --- the reference ---

def documented() -> dict[str, Path]:
    """Return the page of each full name that the reference documents with ``:::``."""
    found = [(name, page) for page, text in REFERENCE.items()
             for name in re.findall(r"^:::(.*)$", text, re.MULTILINE)]
    twice = [name for name, count in Counter(name for name, _ in found).items() if count > 1]
    assert not twice, f"documented twice: {twice}"
    return {name.strip(): page for name, page in found}


def thing(full: str) -> Any:
    package, _, name = full.rpartition(".")
    [module] = [module for module in PACKAGES if module.__name__ == package]
    return getattr(module, name)


def test_every_public_name_is_documented_on_one_page() -> None:
    """An object has one entry. The page has its other names, except those of flashlin.modules."""
    entries = documented()
    public = {f"{package.__name__}.{name}" for package in PACKAGES for name in package.__all__}
    assert set(entries) <= public, "not public"
    ids = Counter(id(thing(name)) for name in entries)
    assert max(ids.values()) == 1, [name for name in entries if ids[id(thing(name))] > 1]
    page_of = {id(thing(name)): page for name, page in entries.items()}
    others = public - set(entries) - {f"flashlin.modules.{name}" for name in flashlin.__all__}
    for name in sorted(others):
        pages = {page for page, text in REFERENCE.items() if f"`{name}`" in text}
        want = page_of.get(id(thing(name)))
        assert pages and (want is None or want in pages), f"{name}: on {sorted(page.name for page in pages)}"
        assert want or not callable(thing(name)), f"{name}: has no entry"
    for name in flashlin.modules.__all__:
        assert id(getattr(flashlin.modules, name)) in page_of, name


@pytest.mark.parametrize("page", sorted({*documented().values()}), ids=lambda page: page.stem)
def test_a_page_of_the_reference_has_an_example_with_a_result(page: Path) -> None:
    [example] = re.findall(r"^```python\n(.*?)^```", REFERENCE[page], re.DOTALL | re.MULTILINE)
    assert re.search(r"^ *(assert |torch\.testing\.assert_close)", example, re.MULTILINE)
    assert REFERENCE[page].index(example) < REFERENCE[page].index("\n::: ")


# --- the build ---

@needs_zensical
@pytest.mark.alternate
def test_the_site_builds_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    copy(tmp_path, CONFIG)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    code, messages = build_site.build(tmp_path)
    assert code == 0, messages
    assert (tmp_path / "build" / "site" / "site.css").is_file()
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "build" / "site").glob("**/*.html")]
    loaded = [tag for page in pages for tag in re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=[^>]*>|<link\b[^>]*>", page)]
    assert (tmp_path / "build" / "site" / "troubleshooting" / "builds.html").is_file()
    assert len(pages) > 40 and loaded and not [tag for tag in loaded if "//" in tag]


BROKEN = {"[x](nowhere.md)": "nowhere.md", "[x](other.md#nothing)": "anchor does not exist",
          "[x](#nothing)": "anchor does not exist", "::: flashlin.nothing": "Could not collect 'flashlin.nothing'",
          "[`x`][flashlin.nothing]": "flashlin.nothing"}


@needs_zensical
@pytest.mark.parametrize("text", ["[x](other.md#a-heading)", *BROKEN])
def test_a_broken_reference_fails_the_build(text: str, tmp_path: Path) -> None:
    copy(tmp_path, re.sub(r"^nav = \[.*?^\]$", "", CONFIG, flags=re.DOTALL | re.MULTILINE))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{text}\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## A heading\n")
    (tmp_path / "docs" / "site.css").touch()
    code, messages = build_site.build(tmp_path)
    assert (code != 0) == (text in BROKEN), messages
    assert BROKEN.get(text, "No issues found") in messages and "Traceback" not in messages


def copy(folder: Path, config: str) -> None:
    (folder / "zensical.toml").write_text(config)
    for name in ("flashlin", "tools"):
        (folder / name).symlink_to(ROOT / name)


def test_messages_without_tracebacks() -> None:
    shown = build_site.readable("1 issue found\nTraceback (most recent call last):\n  File x\n    f()\n"
                                "RuntimeError: Aborted because --strict flag is set\n")
    assert shown == "1 issue found"
    assert build_site.readable("Traceback (most recent call last):\n  f()\nKeyError: 'a'\n") == "KeyError: 'a'"


# --- the environment ---

@pytest.mark.parametrize("works", [True, False])
def test_the_site_needs_no_torch_and_may_be_impossible(
        works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, ...]] = []

    def pip(python: Path, *arguments: str, may_fail: bool = False) -> bool:
        asked.append(arguments)
        assert may_fail
        return works
    monkeypatch.setattr(setup_env, "pip", pip)
    monkeypatch.setattr(setup_env.os, "name", "posix")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    for _ in range(2):
        setup_env.main(str(tmp_path), "docs")
    assert len(asked) == (1 if works else 2), "it tries again only if it failed"
    names = [Requirement(one).name for one in asked[0] if not one.startswith("-") and one != "1"]
    assert names == ["zensical", "mkdocstrings-python", "ruff"]
    assert ("the site is not built" in capsys.readouterr().out) != works


def test_without_zensical_a_message_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build_site, "find_spec", lambda name: None)
    assert build_site.main() == 0
    assert re.fullmatch(r"build_site: skipped, zensical (needs Python 3.11|is not installed).*\n", capsys.readouterr().out)


# --- docstrings ---

def test_arguments_in_a_docstring_become_a_list() -> None:
    lists = pytest.importorskip("tools.docstring_lists", reason="griffe is not installed", exc_type=ImportError)
    text = ("Compute.\n\nDrop-in for f.\nmode: a\n    or b.\nx, *y: c.\nAll other arguments.\n"
            "Note: no list.\n\n    mode = 1")
    assert lists.with_lists(text, {"mode", "x", "y"}) == (
        "Compute.\n\nDrop-in for f.\n\n- `mode`: a\n    or b.\n- `x`, `*y`: c.\n\nAll other "
        "arguments.\nNote: no list.\n\n    mode = 1")
    assert lists.with_links("``gla`` and ``chunk_gla``, ``flashlin.kda``, ``K``", "gla", "flashlin.ops.gla") == (
        "``gla`` and [`chunk_gla`][flashlin.chunk_gla], [`flashlin.kda`][flashlin.kda], ``K``")
    update = "``causal_conv1d_update``"
    assert lists.with_links(update, "x", "flashlin.ops.conv") == "[`causal_conv1d_update`][flashlin.causal_conv1d_update]"
    assert "[flashlin.mamba.causal_conv1d_update]" in lists.with_links(update, "x", "flashlin.serving.conv")
    assert lists.with_links("``causal_conv1d``", "patch", "flashlin.integrations.patching") == "``causal_conv1d``", "a package"


def test_the_own_types_of_a_module_are_written_out() -> None:
    griffe = pytest.importorskip("griffe", reason="griffe is not installed")
    lists = pytest.importorskip("tools.docstring_lists")
    with griffe.temporary_visited_module('Found = tuple[Tensor, "Tensor | None"]\nOTHER = 1\n'
                                         "def f(x: Found | OTHER) -> Found: ...") as module:
        function = module["f"]
        assert lists.written_out(function.returns, module) == "tuple[Tensor, Tensor | None]"
        assert lists.written_out(function.parameters["x"].annotation, module) == "tuple[Tensor, Tensor | None] | OTHER"
        assert lists.written_out(None, module) is None


@pytest.mark.parametrize("there", [True, False])
def test_the_page_of_the_matrix_needs_torch(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("docs/support", "matrix/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(build_site, "find_spec", lambda name: there or None)
    build_site.add_matrix(tmp_path)
    page = tmp_path / "build" / "site" / "support" / "matrix.html"
    assert page.exists() == there and ("is not written" in capsys.readouterr().out) != there
    assert not there or 'href="index.html"' in page.read_text(encoding="utf-8")
