"""Other Triton releases beside the installed one, for child processes: the way every release is tested from
one environment.

    subprocess.run([sys.executable, ...], env={**os.environ, **triton_environment("3.2.0")})

A release that is not the installed one is installed once, without its dependencies, into
``$FLASHLIN_CACHE``, or ``flashlin/tritons`` in the user's cache, and put in front of the installed packages
by PYTHONPATH. 280 to 1,000 MB each, which takes minutes and is told on stderr; delete the folder to get the
space back.
"""
from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from flashlin.compat.folders import in_cache, make, unsafe
from flashlin.compat.locks import locked
from flashlin.compat.releases import nearest
from flashlin.compat.subprocesses import Process, python
from flashlin.compat.versions import release

Tell = Callable[[str], None]
ELSEWHERE = "set FLASHLIN_CACHE to another folder"
EVERY = 5.0  # seconds between two lines about one download


class NotInstallable(RuntimeError):
    """A release could not be installed here: no network, no wheel for this Python, or no safe folder."""


def on_stderr(text: str) -> None:
    print(f"flashlin: {text}", file=sys.stderr, flush=True)


def triton_environment(version: str, *, interpreter: bool = False, cache: Path | None = None,
                       tell: Tell = on_stderr) -> dict[str, str]:
    """Environment variables under which a child of this Python imports Triton ``version``; installs it at the
    first call if it is not here.

    interpreter: also the newest numpy that this release's interpreter works with. tell: takes the lines about
    a download. Raises NotInstallable, which quotes pip.
    """
    here = _site(version)
    wanted = {} if here else {f"triton-{version}": f"triton=={version}"}
    if release(version) < (3, 3) and importlib.util.find_spec("setuptools") is None:
        wanted["setuptools"] = "setuptools"
    bound = nearest(version).numpy
    if interpreter and bound:
        wanted[f"numpy{bound}".replace("<", "-below-")] = f"numpy{bound}"
    folders = [installed([requirement], name, cache, tell=tell) for name, requirement in wanted.items()]
    return searched(*folders, *([here] if here else []))  # last, or it would hide the releases


def searched(*folders: Path) -> dict[str, str]:
    """Return PYTHONPATH with these folders first, and without empty entries, which Python treats as the
    current directory."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), *before]))}


def triton_home(version: str, cache: Path | None = None) -> Path:
    """The folder that holds the package ``triton`` of a release. Raises NotInstallable."""
    return _site(version) or installed([f"triton=={version}"], f"triton-{version}", cache)


def _site(version: str) -> Path | None:
    """Where this Python has that release already."""
    try:
        found = importlib.metadata.distribution("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file(""))) if found.version == version else None


def cache_folder() -> Path:
    """Return ``$FLASHLIN_CACHE``, or a folder in the user's cache, for all projects of that user. Without a
    home, return a folder of this user in the temporary folder."""
    if named := os.environ.get("FLASHLIN_CACHE"):
        return Path(named)
    try:
        return in_cache() / "tritons"
    except RuntimeError:  # a user without a home
        user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
        return Path(tempfile.gettempdir(), f"flashlin-{user}", "flashlin", "tritons")


def place(cache: Path | None = None) -> tuple[Path | None, str]:
    """Return the cache, which may not exist yet; or None, and why nothing may be imported from it."""
    try:
        folder = (cache or cache_folder()).resolve()
        why = unsafe(folder)
    # no permission, a loop of links, or a zero byte
    except (OSError, RuntimeError, ValueError) as error:
        return None, f"the cache of releases cannot be used: {error}"
    return (None, why) if why else (folder, "")


def installed(requirements: list[str], name: str, cache: Path | None = None, *, dependencies: bool = False,
              source: Mapping[str, str] | None = None, tell: Tell = on_stderr) -> Path:
    """Return the folder ``name`` of the cache, filled by pip if it is not there yet. Several processes may
    call this at once.

    source: environment variables with which packages without wheels are built here. tell: takes a line when
    it begins, every few seconds, and when it is done.

    Raises NotInstallable, which quotes pip. It is also raised if the cache cannot be written, or if another
    user could change what is imported from it."""
    folder, why = place(cache)
    try:
        if folder is not None:
            why = unsafe(folder / name)
        if folder is None or why:
            raise NotInstallable(f"{' '.join(requirements)}: {why}; {ELSEWHERE}")
        if not (folder / name).exists():
            make(folder)
            _fill(folder / name, requirements, dependencies, source, tell)
    except OSError as error:
        raise NotInstallable(f"{' '.join(requirements)}: {error}; {ELSEWHERE}") from error
    return folder / name


def _fill(home: Path, requirements: list[str], dependencies: bool, source: Mapping[str, str] | None,
          tell: Tell) -> None:
    with locked(home.with_name(f".{home.name}.lock")):
        if home.exists():  # another process was faster
            return
        fresh = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
        try:
            options = ["--quiet", "--disable-pip-version-check", "--target", str(fresh),
                       *(["--no-build-isolation"] if source else ["--only-binary", ":all:"]),
                       *([] if dependencies else ["--no-deps"])]
            _pip(python("pip", "install", *options, *requirements), fresh,
                 source or {}, " ".join(requirements), tell)
            fresh.chmod(0o755)
            fresh.rename(home)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _pip(command: list[str], into: Path, environment: Mapping[str, str], what: str, tell: Tell) -> None:
    """Run pip, and tell how far it is: by what it has written, since how much that will be only newer ones
    say. What it downloads lies beside the folder, where there is room for it."""
    began = time.monotonic()
    tell(f"fetching {what} into {into.parent}, once")
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=into.parent) as scratch, \
            Process(command, {**environment, "TMPDIR": scratch}) as process:
        while not process.finished(EVERY):
            took = time.monotonic() - began
            tell(f"{what}: {_written(Path(scratch), into) / 1e6:.0f} MB so far, {took:.0f} s")
        ended = process.wait()
    if ended.failure:
        raise NotInstallable(f"pip install {what}: {ended.stderr.strip()[-1000:] or ended.failure}")
    tell(f"{what}: done, {_written(into) / 1e6:.0f} MB in {time.monotonic() - began:.0f} s")


def _written(*folders: Path) -> int:
    """Bytes of what is in them while somebody else writes there."""
    size = 0
    for folder in folders:
        for parent, _, files in os.walk(folder):  # which passes by a folder that is gone meanwhile
            for name in files:
                with suppress(OSError):
                    size += os.lstat(os.path.join(parent, name)).st_size
    return size
