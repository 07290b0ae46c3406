"""The table of known failures that are neither known issues nor known flaws, KNOWN_FAILURES.

The files ``failures/*.cfg`` contain the table. A section describes one failure; its name is the id. Failures
of compilers are in known_issues.py, and flaws of single packages in known_flaws.py. ``flashlin why``,
docs/troubleshooting.md and the tests read the table. A section has these fields, of which *cause*, *fix*,
*proof* and one of *prints* and *asked* are required:

- prints: the texts that the failure prints, one in each line, with ``...`` for parts that vary
- asked: the words of questions that the entry answers, one question in each line
- seen in: a text that the traceback must also contain, for texts that other programs print as well
- general: ``yes`` if many failures print the same. It is reported only if no narrower failure is found
- noise: ``yes`` for a warning that programs often print before another failure ends them
- certain: ``yes`` if the text proves the cause
- where: the machines on which the failure occurs, in words
- cause: one or two sentences
- fix: the next step, with the exact command where one exists. Alternatives are separated by ", or "
- in flashlin: the measures that flashlin takes
- page: a page about the failure
- proof: the test, record or thread that shows it
"""
from __future__ import annotations

from configparser import ConfigParser, SectionProxy
from pathlib import Path

from flashlin.compat.known import EVERYWHERE, Known

REQUIRED = {"cause", "fix", "proof"}
TEXTS = {"prints", "asked"}
FIELDS = REQUIRED | TEXTS | {"seen in", "general", "noise", "certain", "where", "in flashlin", "page"}


def _known(id: str, of: SectionProxy) -> Known:
    if wrong := set(of) - FIELDS or REQUIRED - set(of) or (set() if TEXTS & set(of) else TEXTS):
        raise ValueError(f"{id}: got the fields {sorted(of)}, check {sorted(wrong)}; need {sorted(REQUIRED)}, "
                         f"and may have {sorted(FIELDS - REQUIRED)}")

    def said(field: str, default: str = "") -> str:
        return " ".join(of.get(field, default).split())

    def texts(field: str) -> tuple[str, ...]:
        return tuple(of[field].split("\n")) if field in of else ()

    return Known(
        id=id, effect=said("cause"), need=said("fix"), proof=said("proof"),
        symptoms=texts("prints"), asked=texts("asked"), seen_in=said("seen in"), url=said("page"),
        general=of.getboolean("general", False), noise=of.getboolean("noise", False),
        certain=of.getboolean("certain", False), cards=said("where", EVERYWHERE),
        handled=said("in flashlin", "it does not change this failure"))


def load(folder: Path) -> tuple[Known, ...]:
    """Return the failures of all files in a folder, in the order of the names of the files.

    Raises ValueError for a section with an unknown or a missing field. Raises FileNotFoundError if the folder
    has no such file, for example because a package was built without its data.
    """
    files = sorted(folder.glob("*.cfg"))
    if not files:
        raise FileNotFoundError(f"{folder}: got no *.cfg files, need those of flashlin; install it again")
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",),
                          empty_lines_in_values=False)
    for path in files:
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    return tuple(_known(id, parser[id]) for id in parser.sections())


KNOWN_FAILURES: tuple[Known, ...] = load(Path(__file__).with_name("failures"))
