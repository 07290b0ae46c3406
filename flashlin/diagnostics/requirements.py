"""Doctor's check of the requirements of packages: other packages that are missing, or of another release.

As ``pip check`` it reads only metadata. It covers packages that flashlin can patch. Requirements of torch and
Triton are left to the advice, which compares pairs of them.
"""
from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from flashlin.diagnostics.machine import TRITON_NAMES, Machine
from flashlin.diagnostics.report import Check, line

COVERED = ("flash-linear-attention", "fla-core", "transformers", "mamba-ssm", "causal-conv1d")


def check_requirements(machine: Machine) -> Iterator[Check]:
    """Report requirements of these packages that the installed packages do not meet."""
    for name in COVERED:
        for need in _requires(name):
            has = _version(need.name)
            if need.name not in ("torch", *TRITON_NAMES) and not (
                    has and need.specifier.contains(has, prereleases=True)):
                wanted = f"{need.name}{need.specifier}"
                yield line(name, "degraded", f"{name} {_version(name)} needs {wanted}, but "
                           + (f"{has} is installed" if has else "it is not installed"),
                           f'pip install "{wanted}"')


def _requires(name: str) -> Iterator[Requirement]:
    """Yield the requirements of an installed distribution without extras."""
    if _version(name):
        for text in metadata.requires(name) or ():
            try:
                need = Requirement(text)
            except InvalidRequirement:  # written by old tools
                continue
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                yield need


def _version(name: str) -> str:
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""
