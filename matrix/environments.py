"""Install other releases of torch and of model packages for child processes.

Releases of Triton are installed by flashlin/testing/environments.py.
"""
from __future__ import annotations

import os
from pathlib import Path

from flashlin.compat.releases import nearest
from flashlin.testing.environments import installed, searched, triton_environment

# Requirements of each package; {} is replaced by the version. Only transformers is installed with its
# dependencies, because fla, kernels and mamba_ssm would install another torch.
PACKAGES: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers=={}",), "fla": ("fla-core=={}", "flash-linear-attention=={}", "einops"),
    "kernels": ("kernels=={}",), "mamba_ssm": ("mamba_ssm=={}",), "causal_conv1d": ("causal_conv1d=={}",)}
SOURCES = ("mamba_ssm", "causal_conv1d")  # installed from source: they have no wheels
# These variables build the packages from their Python files alone, without the CUDA extension. FORCE stops
# them from downloading a wheel first.
NO_CUDA = {f"{package}_{what}_BUILD": "TRUE" for package in ("MAMBA", "CAUSAL_CONV1D")
           for what in ("SKIP_CUDA", "FORCE")}


def torch_environment(torch: str, triton: str) -> dict[str, str]:
    """Return the environment variables for a child process with an older torch and its Triton.

    The first call installs torch with all its dependencies, which takes 5 GB of disk space.
    """
    wanted = [f"torch=={torch}", f"numpy{nearest(triton).numpy}"]
    home = installed(wanted, f"torch-{torch}", dependencies=True)
    return {"PYTHONPATH": os.pathsep.join([str(home), triton_environment(triton)["PYTHONPATH"]])}


def stack_environment(cache: Path | None = None, **versions: str) -> dict[str, str]:
    """Return environment variables with which a child process imports the given package versions.

    An example is ``transformers="5.23.0", fla="0.6.0"``. The first call installs the packages (5 to 150 MB
    each) and keeps the installed torch. Raise NotInstallable, which quotes pip, if the installation fails.
    """
    folders = [installed([one.format(version) for one in PACKAGES[package]], f"{package}-{version}", cache,
                         dependencies=package == "transformers",
                         source=NO_CUDA if package in SOURCES else None)
               for package, version in versions.items()]
    return searched(*folders)
