"""What pyproject.toml cannot say: the project's address, which only the place of the build knows.

PROJECT_URL, or on GitHub's machines the repository that is built. With it the wheel's metadata has URLs, and
the README's links, which on a package index have no files beside them, are absolute. Without it they stay as
they are.
"""
from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent


def address() -> str:
    on_github = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}"
    known = "GITHUB_REPOSITORY" in os.environ and "GITHUB_SERVER_URL" in os.environ
    return (os.environ.get("PROJECT_URL") or (on_github.format(**os.environ) if known else "")).rstrip("/")


def absolute(text: str, url: str, tag: str) -> str:
    """Links to files of the repository, as they are at that tag; pictures as what they are."""
    def link(found: re.Match[str]) -> str:
        picture, words, place = found.groups()
        return f"{picture}[{words}]({url}/{'raw' if picture else 'blob'}/{tag}/{place})"
    return re.sub(r"(!?)\[([^\]]*)\]\((?!#|[a-z]+:)([^)\s]+)\)", link, text)


def made(url: str) -> dict[str, object]:
    """What to tell setuptools."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"', (HERE / "flashlin/__init__.py").read_text(encoding="utf-8"), re.M)
    assert version, "flashlin/__init__.py has lost its version"
    urls = {"Homepage": url, "Issues": f"{url}/issues", "Changelog": f"{url}/blob/v{version[1]}/CHANGELOG.md"}
    return {"long_description": absolute(readme, url, f"v{version[1]}") if url else readme,
            "long_description_content_type": "text/markdown", "project_urls": urls if url else {}}


setup(**made(address()))
