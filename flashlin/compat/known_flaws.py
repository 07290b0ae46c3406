"""The table of known flaws, KNOWN_FLAWS: slowdowns, wrong results and failures of other packages.

The file ``flaws.cfg`` contains the table. A section describes one flaw; its name is the id. Doctor,
``flashlin why``, docs/troubleshooting and the tests read the table. A section has these fields, of which
*package*, *cause*, *fix* and *proof* are required (``known.Flaw`` explains their meaning):

- package: the package that has the flaw; *since*, *fixed in*: its releases
- prints: the texts that the flaw prints, one in each line
- always, noise: ``yes``, or nothing
- beside: packages that must also be installed, each with ``before RELEASE`` if only such releases count
- without, broken, kernels, bound to: names
- models: names of models or of GROUPS; a minus sign takes a name or a group away
- where: ``gpu``, ``no gpu``, or the id of a known issue
- cause, fix: in words. Alternatives of a fix are separated by ", or "
- mended by, mended from: the packages whose patch removes the flaw, and the first release for which it does
- proof: the test, record or thread that shows it

A flaw is matched with the installed packages, the GPU and the functions to which the loaded models are bound.
It is never matched with the calls of a program, because flashlin cannot see them.
"""
from __future__ import annotations

from pathlib import Path

from flashlin.compat.entries import Entry, entries
from flashlin.compat.known import Flaw

GDN = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini")
KDA = ("kimi_linear", "glm5_next", "bailing_hybrid")
MAMBA2 = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
MAMBA = ("mamba", "falcon_mamba", "jamba")
CONV = ("lfm2", "lfm2_moe", "lfm3", "inkling", "inkling2", "inkling2_loop")
MODELS = (*GDN, *KDA, *MAMBA2, *MAMBA, "zamba", *CONV)
UNPATCHED = ("minimax", "recurrent_gemma", "zaya")  # recurrent models for which flashlin has no functions
GROUPS = {"GDN": GDN, "KDA": KDA, "MAMBA2": MAMBA2, "MAMBA": MAMBA, "MODELS": MODELS, "UNPATCHED": UNPATCHED}
REQUIRED = {"package", "cause", "fix", "proof"}
OPTIONAL = {"prints", "since", "fixed in", "where", "always", "noise", "beside", "without", "broken",
            "kernels", "bound to", "models", "mended by", "mended from"}


def _models(words: list[str]) -> tuple[str, ...]:
    taken, left = ([name for word in words if word.startswith("-") == minus
                    for name in GROUPS.get(word.removeprefix("-"), (word.removeprefix("-"),))]
                   for minus in (False, True))
    return tuple(name for name in taken if name not in left)


def _flaw(one: Entry) -> Flaw:
    return Flaw(
        id=one.id, package=one.said("package"), effect=one.said("cause"), need=one.said("fix"),
        proof=one.said("proof"), symptoms=one.lines("prints"), since=one.of.get("since"),
        fixed_in=one.of.get("fixed in"), card=one.said("where"), always=one.yes("always"),
        noise=one.yes("noise"),
        beside=tuple((name, release or None) for name, _, release in (
            part.partition(" before ") for part in one.names("beside"))),
        without=one.names("without"), broken=one.names("broken"), kernels=one.names("kernels"),
        bound=one.names("bound to"), models=_models(one.said("models").split()),
        mended_by=one.names("mended by"), mended_from=one.of.get("mended from"))


KNOWN_FLAWS: tuple[Flaw, ...] = tuple(
    map(_flaw, entries([Path(__file__).with_name("flaws.cfg")], REQUIRED, OPTIONAL)))
