"""The table of known failures that are neither known issues nor known flaws, KNOWN_FAILURES.

The files ``failures/*.cfg`` contain the table. A section describes one failure; its name is the id. Failures
of compilers are in issues.cfg, and flaws of single packages in flaws.cfg. ``flashlin why``,
docs/troubleshooting.md and the tests read the table. A section has these fields, of which *cause*, *fix*,
*proof* and one of *prints* and *asked* are required:

- prints: the texts that the failure prints, one in each line, with ``...`` for parts that vary
- asked: the words of questions that the entry answers, one question in each line. Case, order and common
  words do not matter. The causes of such an entry have numbers: (1) ... (2) ... (3) ...
- seen in: a text that the traceback must also contain, for texts that other programs print as well
- general: ``yes`` if many failures print the same. It is reported only if no narrower failure is found
- noise: ``yes`` for a warning that programs often print before another failure ends them
- certain: ``yes`` if the text proves the cause
- tell apart: how to tell apart the causes of an answer to a question
- where: the machines on which the failure occurs, in words
- tell apart: for a question, how to find out which of its causes it is
- cause: one or two sentences
- fix: the next step, with the exact command where one exists. Alternatives are separated by ", or "
- in flashlin: the measures that flashlin takes
- page: a page about the failure
- proof: the test, record or thread that shows it
"""
from __future__ import annotations

from pathlib import Path

from flashlin.compat.entries import Entry, entries
from flashlin.compat.known import EVERYWHERE, Known

REQUIRED, TEXTS = {"cause", "fix", "proof"}, {"prints", "asked"}
OPTIONAL = TEXTS | {"seen in", "general", "noise", "certain", "where", "tell apart", "in flashlin", "page"}


def _known(one: Entry) -> Known:
    if not TEXTS & set(one.of):
        raise ValueError(f"{one.id}: got the fields {sorted(one.of)}, check asked or prints: need one")
    return Known(
        id=one.id, effect=one.said("cause"), need=one.said("fix"), proof=one.said("proof"),
        symptoms=one.lines("prints"), asked=one.lines("asked"), seen_in=one.said("seen in"),
        url=one.said("page"), general=one.yes("general"), noise=one.yes("noise"), certain=one.yes("certain"),
        cards=one.said("where", EVERYWHERE), handled=one.said("in flashlin"), apart=one.said("tell apart"))


def load(folder: Path) -> tuple[Known, ...]:
    """Return the failures of all files in a folder, in the order of the names of the files.

    Raises ValueError and FileNotFoundError as ``entries`` does.
    """
    return tuple(map(_known, entries(sorted(folder.glob("*.cfg")), REQUIRED, OPTIONAL)))


KNOWN_FAILURES: tuple[Known, ...] = load(Path(__file__).with_name("failures"))
