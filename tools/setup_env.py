"""Make the virtual environment of the Makefile: `python tools/setup_env.py .venv [test,dev]`.

This script uses the standard library only. The extra ``docs`` is special: only its own requirements are installed,
without torch, and it is no error if pip cannot install them.

With an NVIDIA GPU (nvidia-smi responds) it runs `pip install -e .`, and pip installs the newest torch with
its Triton.

Without a GPU, this command would download several gigabytes of unused CUDA libraries. So the script requests
the version that only the CPU build of torch has (2.13.0+cpu). It tries pip's configured index first, then
TORCH_INDEX, an environment variable with the address of PyTorch's index of CPU builds (see PyTorch's
installation page). If neither index has this version (macOS, a closed network), the script installs the plain
release and prints a notice.

A note in the environment records what was installed, so that a second run ends at once if nothing has
changed.
"""
from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# These two belong together: torch 2.13 is built with Triton 3.7.1, but its CPU build does not require it.
TORCH, TRITON = "2.13.0", "3.7.1"
# flashlin does not need numpy, but torch prints a warning in every environment without it.
ALSO = ("numpy",)


def main(folder: str, extras: str) -> None:
    if sys.version_info < (3, 10):  # noqa: UP036  this message is for users of an older Python
        raise SystemExit(f"setup_env: got Python {sys.version.split()[0]}, need 3.10 or newer: make "
                         "PYTHON=python3.11 ...")
    home = Path(folder)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    note = home / "flashlin-installed"
    sources = Path(__file__).read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    wanted = f"{extras} {hashlib.sha256(sources).hexdigest()}\n"
    done = note.read_text().splitlines(keepends=True) if python.exists() and note.exists() else []
    if wanted in done:
        return
    if not python.exists():
        make(home)
    if extras == "docs":
        if install_docs(python):
            note.write_text("".join([*done, wanted]))
        return
    project = f"{ROOT}[{extras}]" if extras else str(ROOT)
    print(f"setup_env: installing flashlin{f'[{extras}]' if extras else ''} and its requirements; the "
          "first time takes some minutes", flush=True)
    if has_gpu():
        pip(python, *ALSO, "--editable", project)
    else:
        install_cpu_torch(python)
        # torch and triton are repeated here, so that the project's requirements cannot change their versions.
        pip(python, f"torch=={TORCH}", f"triton=={TRITON}; platform_system == 'Linux'", *ALSO, "--editable",
            project)
    note.write_text("".join([*done, wanted]))


def make(home: Path) -> None:
    print(f"setup_env: new environment in {home}", flush=True)
    try:
        venv.create(home, with_pip=True, clear=True)
    # Debian and Ubuntu package ensurepip separately from Python.
    except subprocess.CalledProcessError:
        shutil.rmtree(home, ignore_errors=True)
        raise SystemExit("setup_env: this Python cannot make a virtual environment with pip; on Debian or "
                         "Ubuntu: apt install python3-venv") from None


def has_gpu() -> bool:
    """Return True if an NVIDIA driver responds. torch cannot use a GPU without a driver."""
    try:
        return subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, timeout=60,
                              check=False).stdout.startswith(b"GPU ")
    except (OSError, subprocess.TimeoutExpired):
        return False


def install_docs(python: Path) -> bool:
    """Install the requirements of the extra ``docs``, and return True if this succeeds."""
    print("setup_env: installing the requirements of the documentation site", flush=True)
    [listed] = re.findall(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if pip(python, *re.findall(r'"(.*?)"', listed), "--retries", "1", may_fail=True):
        return True
    print(f"setup_env: pip could not install them, so the site is not built: {listed}", flush=True)
    return False


def install_cpu_torch(python: Path) -> None:
    index = os.environ.get("TORCH_INDEX", "")
    print(f"setup_env: no NVIDIA GPU found; installing the CPU build of torch {TORCH}", flush=True)
    if pip(python, f"torch=={TORCH}+cpu", may_fail=True):
        return
    if index and pip(python, f"torch=={TORCH}+cpu", "--extra-index-url", index, "--retries", "1",
                     may_fail=True):
        return
    print(f"setup_env: found no CPU build of torch {TORCH} (TORCH_INDEX={index or 'not set'}); "
          "installing the plain build. On Linux it brings several gigabytes of CUDA libraries. To avoid "
          "them, set TORCH_INDEX=<PyTorch's index of CPU builds>", flush=True)
    pip(python, f"torch=={TORCH}")


def pip(python: Path, *arguments: str, may_fail: bool = False) -> bool:
    """Run pip install and return True if it succeeds.

    may_fail: return False on failure and hide pip's errors. Otherwise a failure prints them and raises
        SystemExit.
    """
    # Without -I, Python would run a pip.py in the current directory.
    command = [str(python), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               *arguments]
    done = subprocess.run(command, stderr=subprocess.DEVNULL if may_fail else None, check=False)
    if done.returncode and not may_fail:
        raise SystemExit(f"setup_env: failed: {' '.join(command)}\n(pip's message above says why; to start "
                         "over: make clean)")
    return done.returncode == 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "")
