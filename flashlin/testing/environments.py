"""Environments in which child processes import other Triton releases than the installed one.

    subprocess.run([sys.executable, ...], env={**os.environ, **triton_environment("3.2.0")})

All releases are tested from one Python environment in this way. A release that is not installed is installed
once, without its dependencies, into ``$FLASHLIN_CACHE``, or into ``flashlin/tritons`` in the user's cache.
PYTHONPATH puts it before the installed packages. A release takes 280 to 1,000 MB and some minutes; the
progress is printed on stderr. Delete the folder to free the space.
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
EVERY = 5.0  # seconds between two progress lines of a download


class NotInstallable(RuntimeError):
    """A release cannot be installed: no network, no wheel for this Python, or no safe folder."""


def on_stderr(text: str) -> None:
    """Print a line of progress on stderr, with the prefix ``flashlin:``."""
    print(f"flashlin: {text}", file=sys.stderr, flush=True)


def triton_environment(version: str, *, interpreter: bool = False, cache: Path | None = None,
                       tell: Tell = on_stderr) -> dict[str, str]:
    """Return environment variables with which a child of this Python imports Triton ``version``.

    Installs the release on the first call if it is missing.

    interpreter: also provide the newest numpy that works with this release's interpreter.
    cache: folder for releases, by default `cache_folder`.
    tell: receives the progress lines of a download.

    Raises NotInstallable, which quotes pip.
    """
    here = _site(version)
    wanted = {} if here else {f"triton-{version}": f"triton=={version}"}
    if release(version) < (3, 3) and importlib.util.find_spec("setuptools") is None:
        wanted["setuptools"] = "setuptools"
    if interpreter and (bound := nearest(version).numpy):
        wanted[f"numpy{bound}".replace("<", "-below-")] = f"numpy{bound}"
    folders = [installed([requirement], name, cache, tell=tell) for name, requirement in wanted.items()]
    # The installed packages come last, because they also contain a Triton.
    return searched(*folders, *([here] if here else []))


def searched(*folders: Path) -> dict[str, str]:
    """Return the environment variable PYTHONPATH with these folders first.

    Empty entries are removed, because Python treats them as the current directory.
    """
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), *before]))}


def triton_home(version: str, cache: Path | None = None) -> Path:
    """Return the folder that contains the package ``triton`` of a release. Raises NotInstallable."""
    return _site(version) or installed([f"triton=={version}"], f"triton-{version}", cache)


def _site(version: str) -> Path | None:
    """Return the folder of this Python in which Triton ``version`` is installed, or None."""
    try:
        found = importlib.metadata.distribution("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file(""))) if found.version == version else None


def cache_folder() -> Path:
    """Return the folder for releases: ``$FLASHLIN_CACHE``, or one in the user's cache.

    All projects of a user share it. For a user without a home, it is a folder of this user in the temporary
    folder.
    """
    if named := os.environ.get("FLASHLIN_CACHE"):
        return Path(named)
    try:
        return in_cache() / "tritons"
    except RuntimeError:  # a user without a home directory
        user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
        return Path(tempfile.gettempdir(), f"flashlin-{user}", "flashlin", "tritons")


def place(cache: Path | None = None) -> tuple[Path | None, str]:
    """Return (cache folder, ""), or (None, reason) if nothing may be imported from that folder.

    The folder may not exist yet.
    """
    try:
        folder = (cache or cache_folder()).resolve()
        why = unsafe(folder)
    # No permission, a loop of links, or a zero byte in the path.
    except (OSError, RuntimeError, ValueError) as error:
        return None, f"the cache of releases cannot be used: {error}"
    return (None, why) if why else (folder, "")


def installed(requirements: list[str], name: str, cache: Path | None = None, *, dependencies: bool = False,
              source: Mapping[str, str] | None = None, tell: Tell = on_stderr) -> Path:
    """Return the folder ``name`` of the cache for this Python. Fill it with pip first if it does not exist.

    Its name ends with the cache tag of this Python, because compiled modules fit one version only. Several processes may call this at the same time.

    requirements: packages to install, as pip takes them.
    dependencies: also install the dependencies of these packages.
    source: environment variables for a build from source, for packages without wheels. None: install only
        wheels.
    tell: receives a line at the start, every few seconds, and at the end.

    Raises NotInstallable, which quotes pip, if the installation fails, if the cache is not writable, or if
    another user could change the files to import.
    """
    (folder, why), name = place(cache), f"{name}-{sys.implementation.cache_tag}"
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
    """Run pip, and report its progress as the number of bytes written so far.

    Only newer releases of pip report the total size. Downloads are stored next to the folder `into`, because
    that file system has enough space.
    """
    began = time.monotonic()
    tell(f"downloading {what} into {into.parent}, once")
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
    """Return the number of bytes that are in these folders now.

    Another process may write to them, so files that disappear meanwhile are skipped.
    """
    size = 0
    for folder in folders:
        # A folder that is removed in the meantime is skipped.
        for parent, _, files in os.walk(folder):
            for name in files:
                with suppress(OSError):
                    size += os.lstat(os.path.join(parent, name)).st_size
    return size
