"""Other releases of torch, and of packages that programs have beside it, for child processes. The releases of
Triton are those of flashlin/testing/environments.py."""
from __future__ import annotations

import os
from pathlib import Path

from flashlin.compat.releases import nearest
from flashlin.testing.environments import installed, searched, triton_environment

# How a package of other programs is installed: requirements, with a place for the version. fla and kernels
# would bring a torch of their own; so mamba_ssm, of which its Python files are wanted, without the extension.
PACKAGES: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers=={}",), "fla": ("fla-core=={}", "flash-linear-attention=={}", "einops"),
    "kernels": ("kernels=={}",), "mamba_ssm": ("mamba_ssm=={}",), "causal_conv1d": ("causal_conv1d=={}",)}
SOURCES = ("mamba_ssm", "causal_conv1d")  # no wheels
# With these they are built of their Python files alone. FORCE: they ask for no wheel of their own first.
NO_CUDA = {f"{package}_{what}_BUILD": "TRUE" for package in ("MAMBA", "CAUSAL_CONV1D")
           for what in ("SKIP_CUDA", "FORCE")}


def torch_environment(torch: str, triton: str) -> dict[str, str]:
    """Return the environment variables of ``triton_environment`` for an older torch and its Triton. With all that torch needs: 5 GB."""
    wanted = [f"torch=={torch}", f"numpy{nearest(triton).numpy}"]
    home = installed(wanted, f"torch-{torch}", dependencies=True)
    return {"PYTHONPATH": os.pathsep.join([str(home), triton_environment(triton)["PYTHONPATH"]])}


def stack_environment(cache: Path | None = None, **versions: str) -> dict[str, str]:
    """Environment variables under which a child of this Python imports these versions of other packages,
    such as ``transformers="5.23.0", fla="0.6.0"``; installs them at the first call, beside the torch there
    is. 5 to 150 MB each. Raises NotInstallable, which quotes pip."""
    folders = [installed([one.format(version) for one in PACKAGES[package]], f"{package}-{version}", cache,
                         dependencies=package == "transformers",
                         source=NO_CUDA if package in SOURCES else None)
               for package, version in versions.items()]
    return searched(*folders)
