"""Make the virtual environment that the Makefile runs in: `python tools/setup_env.py .venv [test,dev]`.
Standard library only.

With an NVIDIA GPU (nvidia-smi answers) it is just `pip install -e .`: pip takes the newest torch and the
Triton made for it.

Without one, that would fetch several gigabytes of CUDA libraries nobody can use. So torch is asked for under
the name that only its CPU build bears (2.13.0+cpu): first wherever pip is set up to look, then in TORCH_INDEX
(an environment variable for the index of CPU builds that PyTorch's installation page names). Only if neither
has it (macOS, a closed network) the plain release is taken, and that is said.

A second run sees from a note in the environment that nothing has changed, and is done at once.
"""
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# a pair: torch 2.13 is built with Triton 3.7.1; its CPU build just does not ask for it
TORCH, TRITON = "2.13.0", "3.7.1"
ALSO = ("numpy",)  # flashlin does without; torch warns at its start about every environment that has none


def main(folder: str, extras: str) -> None:
    if sys.version_info < (3, 10):  # noqa: UP036  this file is what tells users of an older Python
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
    project = f"{ROOT}[{extras}]" if extras else str(ROOT)
    print(f"setup_env: installing flashlin{f'[{extras}]' if extras else ''} and what it needs; the first "
          "time takes some minutes", flush=True)
    if has_gpu():
        pip(python, *ALSO, "--editable", project)
    else:
        install_cpu_torch(python)
        # Named again here, so that nothing in the project's own requirements moves it.
        pip(python, f"torch=={TORCH}", f"triton=={TRITON}; platform_system == 'Linux'", *ALSO, "--editable",
            project)
    note.write_text("".join([*done, wanted]))


def make(home: Path) -> None:
    print(f"setup_env: new environment in {home}", flush=True)
    try:
        venv.create(home, with_pip=True, clear=True)
    except subprocess.CalledProcessError:  # Debian and Ubuntu package ensurepip apart from Python
        shutil.rmtree(home, ignore_errors=True)
        raise SystemExit("setup_env: this Python cannot make a virtual environment with pip; on Debian or "
                         "Ubuntu: apt install python3-venv") from None


def has_gpu() -> bool:
    """Whether a driver answers, which is what counts: a card without one is no use to torch."""
    try:
        return subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, timeout=60,
                              check=False).stdout.startswith(b"GPU ")
    except (OSError, subprocess.TimeoutExpired):
        return False


def install_cpu_torch(python: Path) -> None:
    index = os.environ.get("TORCH_INDEX", "")
    print(f"setup_env: no NVIDIA GPU here, so the CPU build of torch {TORCH}", flush=True)
    if pip(python, f"torch=={TORCH}+cpu", may_fail=True):
        return
    if index and pip(python, f"torch=={TORCH}+cpu", "--extra-index-url", index, "--retries", "1",
                     may_fail=True):
        return
    print(f"setup_env: found no CPU build of torch {TORCH} (TORCH_INDEX={index or 'not set'}), so the plain "
          "one: on Linux it brings several gigabytes of CUDA libraries, which TORCH_INDEX=<PyTorch's index of "
          "CPU builds> avoids", flush=True)
    pip(python, f"torch=={TORCH}")


def pip(python: Path, *arguments: str, may_fail: bool = False) -> bool:
    """pip install, silent but for what went wrong, and for that too where there is another way."""
    # without -I, Python would run a pip.py in the current directory
    command = [str(python), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               *arguments]
    done = subprocess.run(command, stderr=subprocess.DEVNULL if may_fail else None, check=False)
    if done.returncode and not may_fail:
        raise SystemExit(f"setup_env: failed: {' '.join(command)}\n(pip says why above; make clean starts "
                         "over)")
    return done.returncode == 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "")
