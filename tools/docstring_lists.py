"""An extension of griffe for the documentation site, which reads docstrings with it: lists, links and types.

A docstring of flashlin describes only some arguments of a function, if another function documents the others. It
has no section ``Args:`` then, but lines such as ``mode: auto or chunk.``. Markdown would join these lines, so they
become a list. Names of documented functions become links to them. A module's own names of types are written out.
"""
from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from griffe import Extension

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
ITEM = re.compile(r"((?:\*{0,2}\w+, )*\*{0,2}\w+): ")
AFTER = ("All other ", "The other ", "Raises ", "Args:", "Returns:", "Raises:")  # lines that end a list

CHANNELS_FIRST = ("flashlin.ops.causal_conv1d", "flashlin.serving")  # their causal_conv1d_update is flashlin.mamba's


@lru_cache(maxsize=1)
def documented() -> frozenset[str]:
    """Return the full names that the pages of the reference document."""
    pages = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return frozenset(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))


def with_links(text: str, own: str, module: str) -> str:
    """Return a docstring in which names in double backquotes are links, except the object's own name.

    own: the object's name.
    module: the module that defines it. Some names exist twice, once with the interface of fla.
    """
    packages = ["flashlin.mamba", "flashlin"] if module.startswith(CHANNELS_FIRST) else ["flashlin"]
    known = documented() - ({"flashlin.causal_conv1d"} if module.startswith("flashlin.integrations") else set())

    def link(found: re.Match[str]) -> str:
        names = [f"{package}.{found[1].removeprefix('flashlin.')}" for package in packages]
        linked = [name for name in names if name in known and found[1] != own]
        return f"[`{found[1]}`][{linked[0]}]" if linked else found[0]
    return re.sub(r"``([\w.]+)``", link, text)


def with_lists(text: str, names: set[str], more: bool = False) -> str:
    """Return a docstring in which lines that begin with some of the names and a colon are items of a list.

    more: names in lower case may also be of a base class.
    """
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        found = ITEM.match(line)
        some = set(found[1].replace("*", "").split(", ")) if found else set()
        if found and (some <= names or (more and all(name.islower() for name in some))):
            if not inside and lines and lines[-1]:
                lines.append("")
            quoted = ", ".join(f"`{name}`" for name in found[1].split(", "))
            line, inside = f"- {quoted}: {line[found.end():]}", True
        elif inside and line and not line.startswith(AFTER):
            line = f"    {line.strip()}"
        elif inside:
            inside = False
            if line:
                lines.append("")
        lines.append(line)
    return "\n".join(lines)


def written_out(annotation: Any, module: Any) -> Any:
    """Return an annotation as text, with the module's own names of types replaced, if it has such names."""
    def value(found: re.Match[str]) -> str:
        member = module.members.get(found[0])
        own = member and not member.is_alias and member.is_attribute and "Tensor" in str(member.value)
        return str(member.value).replace('"', "").replace("'", "") if own else found[0]
    text = re.sub(r"\b[A-Z]\w*\b", value, str(annotation))
    return annotation if text == str(annotation) else text


class DocstringLists(Extension):  # type: ignore[misc]  # mypy does not look into griffe
    def on_function(self, *, func: Any, **_: Any) -> None:
        func.returns = written_out(func.returns, func.module)
        for parameter in func.parameters:
            parameter.annotation = written_out(parameter.annotation, func.module)
        if func.docstring:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = with_links(with_lists(func.docstring.value, names), func.name, func.module.path)

    def on_class(self, *, cls: Any, **_: Any) -> None:
        if cls.docstring:
            made = cls.members.get("__init__")
            of_init = {parameter.name for parameter in made.parameters} if made and made.is_function else set()
            text = with_lists(cls.docstring.value, {*cls.members, *of_init}, more=True)
            cls.docstring.value = with_links(text, cls.name, cls.module.path)
