"""Find out why flashlin cannot be imported.

    python first_aid.py > machine.txt

This single file runs on any Python since 3.8, with nothing installed. It does not import the packages that it
examines; child processes do. It works offline and changes nothing. If flashlin can be imported, `flashlin
doctor` says more. Exit code: 0 if flashlin can be imported, 1 if not.
"""
from __future__ import annotations

import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]  # the folder of this file is often a download folder with arbitrary modules

import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from importlib import metadata

WHEELS = "https://download.pytorch.org/whl/"  # some builds of torch are only here
LIMIT = 60  # seconds for an import; other commands have 10
# Each module may need the modules before it. The last three belong to flashlin.
IMPORTED = ("packaging", "pydantic", "numpy", "torch", "triton", "triton.language", "flashlin",
            "flashlin.diagnostics.doctor", "flashlin.ops.simple_gla")
INSTALLED = ("flashlin", "torch", "triton", "pytorch-triton", "triton-nightly", "triton-windows", "packaging",
             "pydantic", "pydantic-core", "numpy", "flash-linear-attention", "mamba-ssm", "causal-conv1d",
             "transformers", "vllm")
VARIABLES = ("FLASHLIN_", "TRITON_", "CUDA_", "PYTORCH_", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH",
             "LD_PRELOAD", "CONDA_PREFIX", "VIRTUAL_ENV", "CC")
# The empty entry is the current directory, which `python -c` puts first.
ASK = """import sys
sys.path[:] = filter(None, sys.path)
import {0}
root = sys.modules[{0!r}.partition(".")[0]]
print("found", getattr(root, "__version__", "no version"), "from", getattr(root, "__file__", "no file"))
"""


def searched() -> dict[str, str]:
    """Return the environment without empty entries of PYTHONPATH.

    Python treats an empty entry as the current directory.
    """
    folders = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**others, "PYTHONPATH": os.pathsep.join(folders)} if folders else others


def said(command: list[str], limit: int = 10) -> tuple[int, str]:
    """Run a command and return (exit status, output). Never raises, even if the command fails.

    limit: seconds.
    """
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=limit, check=False, env=searched())
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {limit} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode(errors="replace").strip()


def imported(module: str) -> tuple[bool, str]:
    """Import a module in a child process, and return (True if it works, last line of output).

    The import may end the child. The output is unbuffered, so that printed text comes before an exception.
    """
    status, text = said([sys.executable, "-u", "-c", ASK.format(module)], LIMIT)
    last = text.splitlines()[-1] if text else ""
    how = f"ended by signal {-status}" if status < 0 else f"exit code {status}"
    return status == 0, last if status == 0 else f"{how}: {last}"


def versions() -> Iterator[str]:
    for name in INSTALLED:
        copies = sorted({(one.version, str(one.locate_file("")))
                         for one in metadata.distributions(name=name)})
        for version, folder in copies:
            yield f"{name} {version} in {folder}" + (f"   (one of {len(copies)})" if copies[1:] else "")


def surroundings() -> Iterator[str]:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    yield f"C compiler: {compiler or 'none, but Triton needs one'}"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    yield f"Python.h: {header}{'' if os.path.exists(header) else ' is missing, but Triton needs it'}"
    status, text = said(["/sbin/ldconfig", "-p"])
    cuda = [line.split()[-1] for line in text.splitlines() if "libcuda.so" in line]
    yield f"libcuda: {', '.join(cuda) or 'not known to ldconfig' if status == 0 else text}"
    home = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
    near = home
    while not os.path.exists(near):
        near = os.path.dirname(near) or "."
    written = "can be written" if os.access(near, os.W_OK) else "CANNOT be written"
    yield f"Triton's cache: {home} {written}, {shutil.disk_usage(near).free >> 20} MiB free"
    status, text = said(["nvidia-smi", "--query-gpu=name,driver_version,memory.free,compute_mode",
                         "--format=csv,noheader"])
    yield f"NVIDIA: {'; '.join(text.splitlines()) if status == 0 else f'nvidia-smi: {text}'}"


def variables() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            yield f"{name}={value}"


def repaired(package: str, text: str) -> str:
    """Return the command that repairs a package, chosen by the message of its failed import."""
    if package == "flashlin":
        return "pip install -e . in flashlin's folder"
    if f"No module named '{package}'" in text:
        return f"pip install {package}"
    version = next((one.version for one in metadata.distributions(name=package)), "")
    public, _, build = version.partition("+")
    known = f"{package}=={public}" if version else package
    # A missing library comes from a dependency, so do not exclude dependencies.
    alone = "" if "cannot open shared object file" in text else " --no-deps"
    index = f" --index-url {WHEELS}{build}" if build and package == "torch" else ""
    return f'pip install --force-reinstall{alone} "{known}"{index}'


def hidden(text: str) -> str:
    """Return the text without home folders and likely secrets."""
    text = text.replace(os.path.expanduser("~"), "~")
    return re.sub(r"(?i)\b(?=\w*?(?:token|password|secret|api_?key))(\w+)=\S+", r"\1=...", text)


def main() -> int:
    fine, repair = True, ""
    print(f"Python {sys.version.split()[0]}, {platform.platform()}\n\nImports")
    for module in IMPORTED:
        good, text = imported(module)
        fine = fine and (good or not module.startswith("flashlin"))
        repair = repair or ("" if good else repaired(module.partition(".")[0], text))
        print(hidden(f"  {'ok ' if good else 'BAD'}  {module}: {text}"))
    for title, lines in (("Installed", versions()), ("What Triton needs", surroundings()),
                         ("Variables", variables())):
        print(f"\n{title}")
        for line in lines:
            print(hidden(f"  {line}"))
    print("\nflashlin imports: flashlin doctor says more." if fine else
          f"\nRepair the first BAD line: {repair}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
