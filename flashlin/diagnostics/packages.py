"""The packages beside flashlin: which are installed and can be imported, what their loaded files are bound
to, what they are known to do here, and what ``flashlin.patch`` would change.

Imports none of them. What cannot be told from what is loaded is asked of a child process (``importing.py``):
on the command line for every package, else only for one on whose account a loaded file runs plain torch.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from flashlin.compat.known import Stack
from flashlin.compat.known_flaws import KNOWN_FLAWS
from flashlin.compat.known_issues import issues_here
from flashlin.compat.target import GPUS
from flashlin.compat.versions import affected
from flashlin.diagnostics.importing import Tried, tried
from flashlin.diagnostics.machine import Machine
from flashlin.diagnostics.report import Binding, Flaw, Package, Status
from flashlin.integrations import patching
from flashlin.integrations.patching import CARRIERS, carried, found, some
from flashlin.integrations.probing import OURS, TORCH, Bound, bound_in
from flashlin.integrations.transformers import HOMES
from flashlin.kernels.families import PUBLIC


class Known(NamedTuple):
    """distributions: under which names pip knows it. kernels: the module that must import for them to be
    used; ``""`` where no import is tried, since it changes other packages."""
    distributions: tuple[str, ...]
    kernels: str


PACKAGES = {
    "fla": Known(("flash-linear-attention", "fla-core"), "fla.ops.gated_delta_rule"),
    "transformers": Known(("transformers",), "transformers.modeling_utils"),
    "mamba_ssm": Known(("mamba-ssm",), "mamba_ssm.ops.selective_scan_interface"),
    "causal_conv1d": Known(("causal-conv1d",), "causal_conv1d"),
    "kernels": Known(("kernels",), "kernels"),
    "unsloth": Known(("unsloth",), ""),
    "unsloth_zoo": Known(("unsloth-zoo",), "")}
# transformers' models, copies that unsloth has made of them, and code that came with a checkpoint
FILES = re.compile(r"transformers\.models\.\w+\.(modular|modeling)_\w+|unsloth_compiled_module_\w+"
                   r"|transformers_modules\..*\.modeling_\w+")

SHOWN = 6  # kernels in a line
NEED_A_GPU = ("fla", "mamba_ssm", "causal_conv1d")


class Section(NamedTuple):
    packages: tuple[Package, ...] = ()
    bindings: tuple[Binding, ...] = ()
    flaws: tuple[Flaw, ...] = ()


def section(machine: Machine, import_all: bool) -> tuple[Section, dict[str, Tried]]:
    """What there is to say of them, and of the imports that were tried.

    import_all: try to import every installed package that is not loaded. Without torch none can be, which
    is told already."""
    versions = {name: version for name in PACKAGES for version in [version_of(name)] if version}
    calls = calls_of(versions)
    gpu = any(target.backend in GPUS for target in machine.targets.values())
    # before 5.15 transformers imports them only where there is a GPU
    failed = {HOMES.get(one.kernel, "").partition(".")[0] for where, ones in calls.items() for one in ones
              if FILES.fullmatch(where) and one.implementation == TORCH
              and (gpu or affected(versions.get("transformers", ""), "5.15.0", None))}
    waiting = [name for name in versions if sys.modules.get(name) is None and found(name)
               and PACKAGES[name].kernels and (import_all or name in failed) and machine.torch is not None]
    imports = tried({name: PACKAGES[name].kernels for name in waiting})
    stack = Stack(
        {**versions, **distributions()},
        broken=frozenset(name for name in versions if broken(name, imports)),
        gpu=gpu,
        issues=frozenset(issue.id for target in machine.targets.values() for issue in issues_here(target)),
        # transformers.models.qwen3_next.modeling_qwen3_next -> qwen3_next
        models={re.sub(r"^.*(modeling|modular|unsloth_compiled_module)_", "", where): frozenset((one.kernel, one.implementation) for one in ones)
                for where, ones in calls.items() if FILES.fullmatch(where)},
        patched=frozenset(patching._in_force))
    rows = tuple(_package(name, version, imports, calls, machine.torch is not None)
                 for name, version in versions.items())
    return Section(rows, tuple(_bindings(calls, imports, stack)), tuple(_flaws(stack))), imports


def distributions() -> dict[str, str]:
    """Of these packages, the version of each distribution that pip has installed."""
    found = {}
    for known in PACKAGES.values():
        for name in known.distributions:
            with suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
    return found


def version_of(name: str) -> str:
    """The version of an installed package: of what is loaded, what pip says, or its own file; ``unknown`` if
    none of them says, ``""`` where it is not installed."""
    said = getattr(sys.modules.get(name), "__version__", "")
    pip = [version for known, version in distributions().items() if known in PACKAGES[name].distributions]
    if said or pip or not found(name):
        return str(said or next(iter(pip), ""))
    spec = find_spec(name)
    file = Path(spec.origin) if spec is not None and spec.origin else None
    text = file.read_text(errors="replace") if file is not None and file.is_file() else ""
    written = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return written[1] if written else "unknown"


def calls_of(versions: Collection[str]) -> dict[str, list[Bound]]:
    """Return the functions that the loaded files of these packages are bound to. A file of transformers that
    is bound to none is included, since flaws of its models may be known."""
    calls = {}
    for where, module in list(sys.modules.items()):
        root = where.partition(".")[0]
        if type(getattr(module, "__dict__", None)) is dict and (
                FILES.fullmatch(where) or (root in versions and root in ("fla", "mamba_ssm"))):
            ones = bound_in(module)
            if ones or FILES.fullmatch(where):
                calls[where] = ones
    return calls


def broken(name: str, imports: Mapping[str, Tried]) -> str:
    """Why an installed package cannot be imported, as far as somebody has tried."""
    if sys.modules.get(name) is None and not found(name):
        return "pip says that it is installed, and there is no such package on the path"
    outcome = imports.get(name)
    return outcome.error if outcome is not None and outcome.known else ""


def _file(name: str) -> str:
    """Return the file of a loaded package; ``""`` if it has none."""
    return getattr(sys.modules.get(name), "__file__", None) or ""


def _copy(name: str) -> str:
    """Return whose copy of a package is loaded, if it is a copy."""
    carrier = CARRIERS.get(name)
    return f"the copy that {carrier} has" if carrier in Path(_file(name)).parts else ""


def _package(name: str, version: str, imports: Mapping[str, Tried], calls: Mapping[str, list[Bound]],
             with_torch: bool) -> Package:
    why, outcome = broken(name, imports), imports.get(name)
    status: Status = "degraded" if why else "could not check" if outcome and outcome.error else "ok"
    said = (f"cannot be imported: {why}" if why else outcome.error if outcome is not None and outcome.error
            else f"yes, in {outcome.seconds:.1f} s" if outcome is not None
            else "no: a patch has put modules in its place" if name in sys.modules and not _file(name)
            else ", ".join(filter(None, ("loaded", _copy(name)))) if sys.modules.get(name) is not None
            else "not tried: it changes other packages when it is imported" if not PACKAGES[name].kernels
            else "not tried; flashlin doctor, on the command line, does, in a child process" if with_torch
            else "not tried without torch")
    copies = ", ".join(one for one in CARRIERS if CARRIERS[one] == name and carried(one))
    return Package(name=name, version=version, status=status, patch=_patch(name, calls),
                   imports=said + (f"; has a copy of {copies} to load under that name" if copies else ""))


def _patch(name: str, calls: Mapping[str, list[Bound]]) -> str:
    """What a patch has changed, or would."""
    if name in patching._in_force:
        return f"patched now, in {len(patching._in_force[name].bindings.replaced)} places"
    if name not in patching.PATCHES:
        return ""
    places = sum(one.implementation != OURS and (one.kernel in PUBLIC or one.kernel in HOMES)
                 for where, ones in calls.items() for one in ones
                 if ("transformers" if FILES.fullmatch(where) else where.partition(".")[0]) == name)
    return (f'flashlin.patch("{name}") would put flashlin in {places} places of what is loaded' if places
            else f'flashlin.patch("{name}") would put flashlin into what is imported')


def _bindings(calls: Mapping[str, list[Bound]], imports: Mapping[str, Tried],
              stack: Stack) -> Iterable[Binding]:
    """A line for each file of transformers, for all files of another package together, and for each whose
    functions they call. Of those others only what flashlin has, too: nobody knows which of their layers the
    program uses."""
    grouped: dict[tuple[str, str, str], dict[str, None]] = {}
    for where, ones in calls.items():
        model = FILES.fullmatch(where)
        for one in ones:
            if model or (one.implementation != TORCH and one.kernel in PUBLIC):
                why = reason(one, imports)
                grouped.setdefault((where if model else where.partition(".")[0], one.implementation, why),
                                   {})[one.kernel] = None
    for (place, whose, why), kernels in grouped.items():
        status, said = judged(whose, why, stack.gpu)
        yield Binding(where=place, kernels=some(list(kernels), SHOWN), implementation=whose, status=status,
                      why=said)


def reason(one: Bound, imports: Mapping[str, Tried]) -> str:
    """Why a kernel is what it is, with what its package's import has raised."""
    package = HOMES.get(one.kernel, "").partition(".")[0]
    why = broken(package, imports) if one.implementation == TORCH and package in PACKAGES and found(
        package) else ""
    return f"{package} cannot be imported: {why}" if why else one.why or _copy(one.implementation)


def judged(whose: str, why: str, gpu: bool) -> tuple[Status, str]:
    """What it means here that a function is ``whose``, and why."""
    if whose == TORCH:
        return ("degraded" if gpu else "ok"), why
    if whose in NEED_A_GPU and not gpu:
        return "degraded", f"kernels of {whose} cannot start without a GPU"
    return "ok", why


def _flaws(stack: Stack) -> Iterable[Flaw]:
    for flaw in KNOWN_FLAWS:
        where = flaw.hits(stack)
        if where:
            status: Status = ("worked around" if flaw.mended(stack) else "degraded" if flaw.always
                              else "could not check")
            version = stack.versions.get(flaw.package, "") if where == (flaw.package,) else ""
            yield Flaw(id=flaw.id, where=" ".join(filter(None, (", ".join(where), version))), status=status,
                       effect=flaw.effect, remedy=flaw.need, source=flaw.proof)

