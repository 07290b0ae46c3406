"""Other Triton releases beside the installed one, for child processes: the way every release is tested from
one environment.

    subprocess.run([sys.executable, ...], env={**os.environ, **triton_environment("3.2.0")})

A release is installed once, without its dependencies, into ``.cache/tritons`` of the working directory (or
``$FLASHLIN_CACHE``) and put in front of the installed packages by PYTHONPATH. 280 to 1,000 MB each; delete
the folder to get the space back.
"""
from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from flashlin.compat.child import python
from flashlin.compat.locks import locked
from flashlin.compat.releases import nearest
from flashlin.compat.versions import release


class NotInstallable(RuntimeError):
    """pip could not install that release here: no network, or no wheel for this Python."""


def triton_environment(version: str, *, interpreter: bool = False,
                       cache: Path | None = None) -> dict[str, str]:
    """Environment variables under which a child of this Python imports Triton ``version``; installs it at the
    first call.

    interpreter: also the newest numpy that this release's interpreter works with.
    Raises NotInstallable, which quotes pip.
    """
    folders = [installed([f"triton=={version}"], f"triton-{version}", cache)]
    if release(version) < (3, 3) and importlib.util.find_spec("setuptools") is None:
        folders.append(installed(["setuptools"], "setuptools", cache))
    bound = nearest(version).numpy
    if interpreter and bound:
        folders.append(installed([f"numpy{bound}"], f"numpy{bound}".replace("<", "-below-"), cache))
    paths = [*map(str, folders), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def cache_folder() -> Path:
    return Path(os.environ.get("FLASHLIN_CACHE") or Path(".cache", "tritons"))


def torch_environment(torch: str, triton: str) -> dict[str, str]:
    """The same for an older torch and the Triton that goes with it. With all that torch needs: 5 GB."""
    wanted = [f"torch=={torch}", f"numpy{nearest(triton).numpy}"]
    home = installed(wanted, f"torch-{torch}", dependencies=True)
    return {"PYTHONPATH": os.pathsep.join([str(home), triton_environment(triton)["PYTHONPATH"]])}


def installed(requirements: list[str], name: str, cache: Path | None = None, *,
              dependencies: bool = False) -> Path:
    """The folder ``name`` of the cache, filled by pip if it is not there yet. Safe to call from several
    processes at once."""
    home = (cache or cache_folder()).resolve() / name
    if home.exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with locked(home.with_name(f".{name}.lock")):
        if home.exists():  # another process was faster
            return home
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home.parent))
        try:
            options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--target",
                       str(fresh), *([] if dependencies else ["--no-deps"])]
            ran = subprocess.run(python("pip", "install", *options, *requirements), capture_output=True,
                                 text=True, check=False)
            if ran.returncode:
                raise NotInstallable(f"pip install {' '.join(requirements)}: {ran.stderr.strip()[-1000:]}")
            fresh.chmod(0o755)
            fresh.rename(home)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return home
