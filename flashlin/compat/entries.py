"""Read the tables of known failures and known flaws, whose entries are sections of ``*.cfg`` files."""
from __future__ import annotations

from collections.abc import Iterator
from configparser import ConfigParser, SectionProxy
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One section. Its name is the id of the failure.

    of: the fields by name. A value may have several lines.
    """
    id: str
    of: SectionProxy

    def said(self, field: str, default: str = "") -> str:
        """Return a field as one line."""
        return " ".join(self.of.get(field, default).split())

    def lines(self, field: str) -> tuple[str, ...]:
        """Return the lines of a field; ``()`` without the field."""
        return tuple(self.of[field].split("\n")) if field in self.of else ()

    def names(self, field: str) -> tuple[str, ...]:
        """Return the parts of a field that commas separate; ``()`` without the field."""
        return tuple(self.said(field).split(", ")) if field in self.of else ()

    def yes(self, field: str) -> bool:
        """Return True if a field is ``yes``."""
        return self.of.getboolean(field, False)


def entries(files: list[Path], required: set[str], optional: set[str]) -> Iterator[Entry]:
    """Yield the sections of the files, in their order.

    Raises ValueError for a section with an unknown or a missing field. Raises FileNotFoundError if there is
    no file, for example because a package was built without its data.
    """
    if not files:
        raise FileNotFoundError("got no *.cfg files of failures, need those of flashlin; install it again")
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",),
                          empty_lines_in_values=False)
    for path in files:
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    for id in parser.sections():
        given = set(parser[id])
        if wrong := given - required - optional or required - given:
            raise ValueError(f"{id}: got the fields {sorted(given)}, check {sorted(wrong)}; need "
                             f"{sorted(required)}, and may have {sorted(optional)}")
        yield Entry(id, parser[id])
