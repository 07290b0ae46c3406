"""The packages next to flashlin, such as fla and transformers, for the report of ``doctor``.

The report says which of them are installed and can be imported, and which functions their loaded files are
bound to. It lists their known flaws on this machine, and what ``flashlin.patch`` would change. This process
imports none of them. An import that must be tried runs in a child process (``importing.py``). The command
line tries every package; ``flashlin.doctor()`` tries only a package whose absence makes a loaded file run
plain torch.
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
from flashlin.compat.subprocesses import Process
from flashlin.compat.target import GPUS
from flashlin.compat.versions import affected, release
from flashlin.diagnostics.extension_code import build_again
from flashlin.diagnostics.importing import EXTENSIONS, Tried, outcomes, tried
from flashlin.diagnostics.machine import Machine
from flashlin.diagnostics.report import Binding, Flaw, Package, Status
from flashlin.integrations import patching
from flashlin.integrations.patching import CARRIERS, carried, found, some
from flashlin.integrations.probing import OURS, TORCH, Bound, bound_in
from flashlin.integrations.transformers import HOMES
from flashlin.kernels.families import PUBLIC


class Known(NamedTuple):
    """A package that the report covers.

    distributions: the names that pip uses for it.
    kernels: the module whose import is tried; the package's kernels work only if it succeeds. ``""`` for a
        package whose import would change other packages.
    newest: the newest release with which flashlin was tested; ``""`` if none was.
    """
    distributions: tuple[str, ...]
    kernels: str
    newest: str = ""


PACKAGES = {
    "fla": Known(("flash-linear-attention", "fla-core"), "fla.ops.gated_delta_rule", "0.6.0"),
    "transformers": Known(("transformers",), "transformers.modeling_utils", "5.24.0"),
    "mamba_ssm": Known(("mamba-ssm",), "mamba_ssm.ops.selective_scan_interface"),
    "causal_conv1d": Known(("causal-conv1d",), "causal_conv1d"),
    "kernels": Known(("kernels",), "kernels"),
    "unsloth": Known(("unsloth",), ""),
    "unsloth_zoo": Known(("unsloth-zoo",), "")}
# modeling files: of transformers, unsloth's copies of them, and files that come with a checkpoint
FILES = re.compile(r"transformers\.models\.\w+\.(modular|modeling)_\w+|unsloth_compiled_module_\w+"
                   r"|transformers_modules\..*\.modeling_\w+")

# errors of an extension that is missing, damaged or was built for another torch
OF_EXTENSION = re.compile(r"undefined symbol|invalid ELF|file too short|No module named '\w+_cuda'"
                          r"|cannot open shared object|DLL load failed")
SHOWN = 6  # maximum number of kernels that a line names
NEED_A_GPU = ("fla", "mamba_ssm", "causal_conv1d")


class Section(NamedTuple):
    """The part of the report that covers other packages."""
    packages: tuple[Package, ...] = ()
    bindings: tuple[Binding, ...] = ()
    flaws: tuple[Flaw, ...] = ()


def to_import() -> dict[str, str]:
    """Return the module to import for each installed package that is not loaded, by the package's name."""
    return {name: known.kernels for name, known in PACKAGES.items()
            if known.kernels and sys.modules.get(name) is None and found(name)}


def section(machine: Machine, import_all: bool,
            children: Mapping[str, Process] | None = None) -> tuple[Section, dict[str, Tried]]:
    """Return the report on other packages, and the results of the imports that were tried.

    import_all: try to import every installed package that is not loaded. Without torch no import is tried,
        since all of them would fail and the report already says that torch is missing.
    children: processes that import packages already (``importing.begun``).
    """
    versions = {name: version for name in PACKAGES for version in [version_of(name)] if version}
    calls = calls_of(versions)
    gpu = any(target.backend in GPUS for target in machine.targets.values())
    # Before 5.15, transformers imports these packages only on a machine with a GPU. Without a GPU a failed
    # import is then no reason for plain torch.
    failed = {HOMES.get(one.kernel, "").partition(".")[0] for where, ones in calls.items() for one in ones
              if FILES.fullmatch(where) and one.implementation == TORCH
              and (gpu or affected(versions.get("transformers", ""), "5.15.0", None))}
    waiting = [name for name in versions if sys.modules.get(name) is None and found(name)
               and PACKAGES[name].kernels and (import_all or name in failed) and machine.torch is not None]
    mine = {name: child for name, child in (children or {}).items() if name in waiting}
    imports = {**outcomes(mine), **tried({name: PACKAGES[name].kernels for name in waiting if name not in mine})}
    stack = Stack(
        {**versions, **distributions()},
        broken=frozenset(name for name in versions if broken(name, imports)),
        gpu=gpu,
        issues=frozenset(issue.id for target in machine.targets.values() for issue in issues_here(target)),
        # transformers.models.qwen3_next.modeling_qwen3_next -> qwen3_next
        models={re.sub(r"^.*(modeling|modular|unsloth_compiled_module)_", "", where):
                frozenset((one.kernel, one.implementation) for one in ones)
                for where, ones in calls.items() if FILES.fullmatch(where)},
        patched=frozenset(patching._in_force))
    rows = tuple(_package(name, version, imports, calls, machine.torch is not None)
                 for name, version in versions.items())
    return Section(rows, tuple(_bindings(calls, imports, stack)), tuple(_flaws(stack))), imports


def distributions() -> dict[str, str]:
    """Return the version of each installed distribution of these packages, by the name that pip uses."""
    found = {}
    for name in (name for known in PACKAGES.values() for name in known.distributions):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def version_of(name: str) -> str:
    """Return the version of an installed package; ``unknown`` if it has none, ``""`` if it is not installed.

    The version is the ``__version__`` of the loaded module, or else the version that pip reports, or else the
    ``__version__`` in the text of the package's main file.
    """
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
    """Return the kernels that the loaded files of these packages are bound to, by module name.

    A modeling file of transformers is included even if it is bound to none, since its model may have known
    flaws.
    """
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
    """Return the reason that an installed package cannot be imported, or ``""`` if none is known."""
    if sys.modules.get(name) is None and not found(name):
        return "pip reports it as installed, but no such package is on the path"
    outcome = imports.get(name)
    return outcome.error if outcome is not None and outcome.known else ""


def _file(name: str) -> str:
    """Return the file of a loaded package; ``""`` if it has none."""
    return getattr(sys.modules.get(name), "__file__", None) or ""


def _copy(name: str) -> str:
    """Return a text that names the carrier of a loaded package, such as unsloth for its copy of fla.

    The text is ``""`` if the loaded package is not a copy.
    """
    carrier = CARRIERS.get(name)
    return f"the copy in {carrier}" if carrier in Path(_file(name)).parts else ""


def _package(name: str, version: str, imports: Mapping[str, Tried], calls: Mapping[str, list[Bound]],
             with_torch: bool) -> Package:
    why, outcome = broken(name, imports), imports.get(name)
    status: Status = "degraded" if why else "could not check" if outcome and outcome.error else "ok"
    said = (f"cannot be imported: {why}" if why
            else f"{outcome.error}; flashlin doctor --imports SECONDS waits longer" if outcome and outcome.error
            else f"yes, in {outcome.seconds:.1f} s" if outcome is not None
            else "no: stub modules of a patch replace it" if name in sys.modules and not _file(name)
            else ", ".join(filter(None, ("loaded", _copy(name)))) if sys.modules.get(name) is not None
            else "not tried: it changes other packages when it is imported" if not PACKAGES[name].kernels
            else "not tried; flashlin doctor on the command line tries it in a child process" if with_torch
            else "not tried without torch")
    newest = PACKAGES[name].newest
    if newest and release(version) > release(newest):
        status = status if why else "could not check"
        said += f"; newer than {newest}, the newest release with which flashlin was tested"
    extension = why and name in EXTENSIONS.values() and OF_EXTENSION.search(why)
    if extension:
        said += f'; flashlin.patch("{name}") runs its functions without the extension'
    copies = ", ".join(one for one in CARRIERS if CARRIERS[one] == name and carried(one))
    return Package(name=name, version=version, status=status, patch=_patch(name, calls),
                   fix=build_again(name) if extension else "",
                   imports=said + (f"; has a copy of {copies} to load under that name" if copies else ""))


def _patch(name: str, calls: Mapping[str, list[Bound]]) -> str:
    """Return a text that says what a patch has changed, or would change."""
    if name in patching._in_force:
        return f"patched now, in {len(patching._in_force[name].bindings.replaced)} places"
    if name not in patching.PATCHES:
        return ""
    places = sum(one.implementation != OURS and (one.kernel in PUBLIC or one.kernel in HOMES)
                 for where, ones in calls.items() for one in ones
                 if ("transformers" if FILES.fullmatch(where) else where.partition(".")[0]) == name)
    return (f'flashlin.patch("{name}") would replace functions in {places} places of loaded modules' if places
            else f'flashlin.patch("{name}") would replace functions in modules imported later')


def _bindings(calls: Mapping[str, list[Bound]], imports: Mapping[str, Tried],
              stack: Stack) -> Iterable[Binding]:
    """Yield a row of the report for each binding of loaded files.

    A modeling file of transformers has rows of its own. The files of any other package are merged into one
    row for each package whose functions they call. These rows list only functions that flashlin also has,
    since it is unknown which of the layers the program uses.
    """
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
    """Return the reason that a binding has its implementation, with the error of a failed import."""
    package = HOMES.get(one.kernel, "").partition(".")[0]
    why = broken(package, imports) if one.implementation == TORCH and package in PACKAGES and found(
        package) else ""
    return f"{package} cannot be imported: {why}" if why else one.why or _copy(one.implementation)


def judged(whose: str, why: str, gpu: bool) -> tuple[Status, str]:
    """Return the status of a binding on this machine, and the reason.

    whose: the package of the function, or ``torch``.
    """
    if whose == TORCH:
        return ("degraded" if gpu else "ok"), why
    if whose in NEED_A_GPU and not gpu:
        return "degraded", f"kernels of {whose} cannot start without a GPU"
    return "ok", why


def _flaws(stack: Stack) -> Iterable[Flaw]:
    for flaw in KNOWN_FLAWS:
        if where := flaw.hits(stack):
            status: Status = ("worked around" if flaw.mended(stack) else "degraded" if flaw.always
                              else "could not check")
            version = stack.versions.get(flaw.package, "") if where == (flaw.package,) else ""
            yield Flaw(id=flaw.id, where=" ".join(filter(None, (", ".join(where), version))), status=status,
                       effect=flaw.effect, remedy=flaw.need, source=flaw.proof)

