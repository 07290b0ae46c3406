"""The classes of known failures: ``Known``, and its subclasses ``KnownIssue`` and ``Flaw``.

Three tables contain their instances: ``known_issues`` (failures of Triton, ptxas and kernels),
``known_flaws`` (of other packages) and ``known_failures`` (all others). ``flashlin why``, doctor, dispatch,
docs/troubleshooting.md and the tests read these tables.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flashlin.compat.target import USUAL_CARD, Target
from flashlin.compat.versions import affected, between

PRE_VOLTA, END = (0, 0), (99, 0)  # bounds of compute capabilities
EVERYWHERE = "every GPU, every Triton"
CONFIDENCE = {"compiled": "compiled in our tests, where it fails like this", "ran": "seen in our own runs",
              "thread": "reported in the thread; we have not run it", "documented": "documented"}


@dataclass(frozen=True, kw_only=True)
class Known:
    """A known failure.

    effect: the result that the user gets.
    need: the fix. Alternatives are separated by ", or ", and some of them call a function of flashlin.
    proof: the test, record or thread that shows the failure.
    confidence: a key of CONFIDENCE, which says how well the proof shows it.
    symptoms: the texts that are printed, with ``...`` for parts that vary; empty if nothing is printed.
    asked: questions in plain words that the failure answers, such as ``why nan``.
    seen_in: a text that the traceback must also contain, for symptoms that other programs print as well.
    url: a page about the failure.
    since, fixed_in: the first affected release, and the first that is not; None leaves that side open.
    general: True if many failures print the same. It is reported only if no narrower failure is found.
    noise: True for a warning that programs often print before another failure ends them.
    certain: False if the symptom does not prove this failure.
    cards: the machines on which the failure occurs, in words.
    handled: the measures that flashlin takes, in words.
    apart: how to tell apart the causes of an answer to a question.

    Only failures that no code looks for use ``cards`` and ``handled``. The subclasses derive these texts from
    their other fields.
    """
    id: str
    effect: str
    need: str
    proof: str
    confidence: str = ""
    symptoms: tuple[str, ...] = ()
    seen_in: str = ""
    url: str = ""
    since: str | None = None
    fixed_in: str | None = None
    general: bool = False
    noise: bool = False
    certain: bool = True
    cards: str = EVERYWHERE
    handled: str = ""
    apart: str = ""
    asked: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Return the effect; a flaw adds its package as the subject."""
        return self.effect

    @property
    def where(self) -> str:
        """Return the GPUs, releases and packages on which the failure occurs, in words."""
        return self.cards

    @property
    def otherwise(self) -> str:
        """Return the fix without flashlin: ``need`` without the alternatives that call flashlin."""
        clauses = (", or ".join(way for way in clause.split(", or ") if not re.search(r"\bflashlin\.\w", way))
                   for clause in self.need.split("; "))
        return "; ".join(filter(None, clauses))

    @property
    def known(self) -> str:
        """Return how well the failure is known, in words."""
        if self.confidence or self.proof.startswith("https:"):
            return CONFIDENCE[self.confidence or "thread"]
        return f"shown by {self.proof}" if self.proof.startswith(("tests/", "matrix/")) else self.proof

    @property
    def link(self) -> str:
        """Return a page about the failure: ``url``, or else ``proof`` if that is an address."""
        return self.url or (self.proof if self.proof.startswith("https:") else "")


@dataclass(frozen=True, kw_only=True)
class KnownIssue(Known):
    """A known failure of Triton, ptxas or a kernel, which planning looks for in every launch.

    since, fixed_in: releases of Triton.
    ptxas_since, ptxas_fixed_in: releases of ptxas, for failures that depend on the assembler.
    capabilities: half-open range of compute capabilities (major, minor); by default all NVIDIA GPUs.
    amd: prefixes of AMD architectures, for failures on AMD; ``capabilities`` is then ignored.
    traits: the launch must have all of them.
    spared: the launch must have none of these traits.
    min_warps, min_stages: the smallest numbers of warps and stages with which a launch fails.
    remedies: names of the remedies that planning tries; empty if the failure changes no plan.
    """
    confidence: str = "thread"
    ptxas_since: str | None = None
    ptxas_fixed_in: str | None = None
    capabilities: tuple[tuple[int, int], tuple[int, int]] = (PRE_VOLTA, END)
    amd: tuple[str, ...] = ()
    traits: frozenset[str] = frozenset()
    spared: frozenset[str] = frozenset()
    min_warps: int = 1
    min_stages: int = 1
    remedies: tuple[str, ...] = ()

    def here(self, target: Target) -> bool:
        """Return True if the machine has an affected GPU, Triton and ptxas, whatever it launches."""
        low, high = self.capabilities
        card = (target.arch.startswith(self.amd) if self.amd
                else target.backend == "cuda" and low <= target.capability < high)
        return (card and affected(target.triton, self.since, self.fixed_in)
                and (self.ptxas_since is self.ptxas_fixed_in is None
                     or affected(target.ptxas, self.ptxas_since, self.ptxas_fixed_in)))

    @property
    def releases(self) -> str:
        """Return the affected releases of Triton, in words."""
        return between("Triton", self.since, self.fixed_in)

    @property
    def where(self) -> str:
        """Return the GPUs, releases, warps and stages with which the failure occurs, in words."""
        low, high = self.capabilities
        cards = ", ".join(f"{name} (sm{major}{minor})" for (major, minor), (name, _) in USUAL_CARD.items()
                          if low <= (major, minor) < high) or f"sm{low[0]}{low[1]}"
        words = (f"AMD's {', '.join(self.amd)}" if self.amd else
                 "any NVIDIA GPU" if (low, high) == (PRE_VOLTA, END) else
                 "GPUs before sm70" if low == PRE_VOLTA else cards, self.releases,
                 self.ptxas_since is self.ptxas_fixed_in is None or between("ptxas", self.ptxas_since,
                                                                            self.ptxas_fixed_in),
                 self.min_warps > 1 and f"{self.min_warps} warps or more",
                 bool(self.amd) and self.min_stages > 1 and f"{self.min_stages} stages or more")
        return "; ".join(word for word in words if isinstance(word, str))

    def hits(self, traits: frozenset[str], num_warps: int, num_stages: int) -> bool:
        """Return True if a launch with these traits, warps and stages triggers the failure."""
        return (self.traits <= traits and not self.spared & traits
                and num_warps >= self.min_warps and num_stages >= self.min_stages)


class Stack(NamedTuple):
    """The packages that are installed, loaded and patched on this machine.

    versions: the version of each installed package or distribution; ``unknown`` if it states none.
    broken: packages whose import fails.
    gpu: True if the machine has a GPU.
    issues: ids of the known issues that affect this GPU and its Triton.
    models: the loaded modeling files of transformers. It maps the name of a file to a set, which may be
        empty. The set has a pair (kernel, implementation) for each function that the file is bound to.
    patched: packages that ``flashlin.patch`` has patched.
    """
    versions: Mapping[str, str]
    broken: frozenset[str] = frozenset()
    gpu: bool = False
    issues: frozenset[str] = frozenset()
    models: Mapping[str, frozenset[tuple[str, str]]] = {}
    patched: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Flaw(Known):
    """A known flaw: a defect of another package, which doctor looks for in a Stack.

    since, fixed_in: releases of the package.
    always: True if every program is affected. If False, the text ``effect`` begins with the condition under
        which a program is affected ("if ...").
    mended_by: packages; ``flashlin.patch`` of one of them removes the defect. ``()`` if no patch can.
    mended_from: the first release of the package for which the patch removes it.
    beside: pairs (package, fixed_in). These packages must also be installed, in a release before ``fixed_in``
        (None: in any release).
    without: packages, none of which may be installed.
    broken: packages, one of which must be installed and fail to import.
    card: ``gpu``, ``no gpu``, the id of a known issue that must affect the GPU, or ``""`` for any machine.
    models: names of modeling files, one of which must be loaded.
    kernels, bound: names of kernels and of implementations. If given, the modeling file must bind one of the
        kernels to one of the implementations.
    """
    package: str
    always: bool = False
    mended_by: tuple[str, ...] = ()
    mended_from: str | None = None
    beside: tuple[tuple[str, str | None], ...] = ()
    without: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    card: str = ""
    models: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Return the effect with the package as its subject."""
        return f"{self.package}: {self.effect}"

    @property
    def otherwise(self) -> str:
        """Return the fix for users without flashlin: the part of ``need`` that does not use a patch.

        This is all of ``need`` if no patch removes the defect.
        """
        return super().otherwise if self.mended_by else self.need

    def here(self, stack: Stack) -> bool:
        """Return True if the installed packages and the GPU match this flaw, whatever models are loaded."""
        versions = stack.versions
        return (affected(versions.get(self.package, ""), self.since, self.fixed_in)
                and all(affected(versions.get(name, ""), None, fixed) for name, fixed in self.beside)
                and not any(name in versions for name in self.without)
                and (not self.broken or not stack.broken.isdisjoint(self.broken))
                and (not self.card or self.card in stack.issues
                     or self.card == ("gpu" if stack.gpu else "no gpu")))

    @property
    def where(self) -> str:
        """Return the releases, packages, models and machines that have the defect, in words."""
        cards = {"": "any machine", "gpu": "with a GPU", "no gpu": "without a GPU"}
        words = (between(self.package, self.since, self.fixed_in),
                 *(between(name, None, fixed) for name, fixed in self.beside if fixed),
                 *(f"with {name}" for name, fixed in self.beside if not fixed),
                 *(f"without {name}" for name in self.without),
                 f"one of {', '.join(self.broken)} does not import" if self.broken else "",
                 f"models: {', '.join(self.models)}" if self.models else "",
                 cards.get(self.card, f"where {self.card} occurs"))
        return "; ".join(filter(None, words))

    def hits(self, stack: Stack) -> tuple[str, ...]:
        """Return the loaded models that have the defect, or the package; ``()`` if this process has none.

        The package is returned for a defect that does not depend on models.
        """
        if not self.here(stack):
            return ()
        if not self.models:
            return (self.package,)
        return tuple(name for name in self.models if name in stack.models and (
            not (self.kernels or self.bound) or any(
                (not self.kernels or kernel in self.kernels) and (not self.bound or whose in self.bound)
                for kernel, whose in stack.models[name])))

    def mended(self, stack: Stack) -> bool:
        """Return True if a patch that is in force removes the defect."""
        return (not stack.patched.isdisjoint(self.mended_by)
                and (self.mended_from is None
                     or affected(stack.versions.get(self.package, ""), self.mended_from, None)))
