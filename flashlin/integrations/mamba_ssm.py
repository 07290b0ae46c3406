"""``patch("mamba_ssm")`` and ``patch("causal_conv1d")``: flashlin's functions in these packages.

The patches work whether the package is installed, is installed with an extension that does not load, or is
not installed.

If the package is installed, flashlin's functions replace its functions wherever a program has bound these.
Classes are not replaced, since they call functions of their modules. A stub module replaces an extension that
is missing or does not load, so that the package can be imported. transformers gets back two classes that
mamba_ssm before 2.3.0 imports from it. The package stays imported after the patch.

If the package is not installed, stub modules with its names offer flashlin's functions until the patch ends.
An import of anything else from them raises an error with advice. Functions that a program has imported from
stub modules continue to work.
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch  # noqa: F401  imported before an extension, which needs torch's libraries

from flashlin import mamba
from flashlin.compat.import_hooks import remove
from flashlin.integrations import extensions
from flashlin.integrations.bindings import Replaced
from flashlin.integrations.calling import by_name
from flashlin.integrations.patching import Patch, found, some
from flashlin.integrations.stub_modules import Contents, StandIns
from flashlin.modules.add_norm import RMSNorm


class Package(NamedTuple):
    """One package that is patched.

    name: name of the package.
    version: ``__version__`` of its stub module, the release whose functions flashlin reproduces.
    extension: the compiled module that the package imports.
    called: the functions that the package's Python files call in the extension.
    functions: flashlin's functions, by the module of the package that defines the originals.
    beside: attributes of the stub modules other than these functions.
    """
    name: str
    version: str
    extension: str
    called: Contents
    functions: Mapping[str, Contents]
    beside: Mapping[str, Contents]


def ours(*names: str) -> Contents:
    """Return these functions of flashlin.mamba by name."""
    return {name: getattr(mamba, name) for name in names}


MAMBA_SSM = Package(
    "mamba_ssm", "2.3.2+flashlin", "selective_scan_cuda", {"fwd": extensions.fwd, "bwd": extensions.bwd},
    functions={
        "mamba_ssm.ops.selective_scan_interface": ours("selective_scan_fn", "mamba_inner_fn"),
        "mamba_ssm.ops.triton.ssd_combined": ours("mamba_chunk_scan_combined",
                                                  "mamba_split_conv1d_scan_combined"),
        "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined": ours("mamba3_siso_combined"),
        "mamba_ssm.ops.triton.selective_state_update": ours("selective_state_update"),
        "mamba_ssm.ops.triton.layer_norm": ours("layer_norm_fn", "rms_norm_fn"),
        "mamba_ssm.ops.triton.layernorm": ours("layer_norm_fn", "rms_norm_fn"),  # its name before 2.0
        "mamba_ssm.ops.triton.layernorm_gated": ours("rmsnorm_fn", "layernorm_fn")},
    beside={
        "mamba_ssm": ours("selective_scan_fn", "mamba_inner_fn"),
        "mamba_ssm.ops.triton.layer_norm": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.layernorm": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.layernorm_gated": ours("RMSNorm", "LayerNorm")})
CAUSAL_CONV1D = Package(
    "causal_conv1d", "1.7.0+flashlin", "causal_conv1d_cuda", {},  # only cpp_functions calls the extension
    functions={
        "causal_conv1d.causal_conv1d_interface": ours("causal_conv1d_fn", "causal_conv1d_update"),
        "causal_conv1d.causal_conv1d_varlen": ours("causal_conv1d_varlen_states"),
        "causal_conv1d.cpp_functions": {
            "causal_conv1d_fwd_function": extensions.causal_conv1d_fwd_function,
            "causal_conv1d_bwd_function": extensions.causal_conv1d_bwd_function,
            "causal_conv1d_update_function": extensions.causal_conv1d_update_function}},
    beside={"causal_conv1d": ours("causal_conv1d_fn", "causal_conv1d_update")})

# Cached functions of transformers that say which packages are installed.
REMEMBERED = ("is_mamba_ssm_available", "is_mamba_2_ssm_available", "is_causal_conv1d_available")


class PackagePatch(Patch):
    """The patch of mamba_ssm or causal_conv1d."""

    def __init__(self, about: Package) -> None:
        self.about, self.package, self.watched = about, about.name, (about.name,)
        super().__init__()
        self._stand_ins: StandIns | None = None

    def begin(self) -> None:
        """Install stub modules if the package or its extension is missing, then patch what is loaded."""
        about = self.about
        if not found(about.name):
            self._stand_in(whole(about), "not installed", partial(not_installed, about))
        elif why := fails(about.extension):
            self._stand_in({about.extension: {**about.called, "__getattr__": lacking(about.extension, why)}},
                           why)
        if self._stand_ins is not None:
            self._fill()
        sys.meta_path.insert(0, self)
        super().begin()

    def end(self) -> None:
        """Remove the stub modules and undo the patch."""
        remove(self)
        if self._stand_ins is not None:
            self._stand_ins.end()
            forget_what_is_available()
        super().end()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Give transformers the classes that it removed in 5.0.0, just before an old mamba_ssm imports them.

        This patch is a finder of ``sys.meta_path`` that finds no modules itself.
        """
        if name == "mamba_ssm.utils.generation" and found("transformers.generation"):
            home = importlib.import_module("transformers.generation")
            for old in ("GreedySearchDecoderOnlyOutput", "SampleDecoderOnlyOutput"):
                if not hasattr(home, old):
                    self.bindings.put(home, old, home.GenerateDecoderOnlyOutput, "a class of transformers")

    def _stand_in(self, modules: Mapping[str, Contents], why: str, advice: Any = None) -> None:
        self._stand_ins = StandIns(modules, advice)
        self._stand_ins.begin()
        forget_what_is_available()
        self.bindings.left[next(iter(modules))] = f"{why}; stub modules of flashlin replace it"
        self.bindings.replaced += [Replaced(module, name, public_name(value))
                                   for module, contents in modules.items()
                                   for name, value in contents.items() if not name.startswith("__")]

    def read(self, module: ModuleType) -> None:
        """Register a stand-in for each function of this module that flashlin has."""
        for name, function in self.about.functions.get(module.__name__, {}).items():
            original = vars(module).get(name)
            if callable(original) and original is not function and not self.bindings.knows(original):
                self.bindings.swap(original, by_name(original, function), public_name(function))

    def _fill(self) -> None:
        """Give flashlin's functions to modules that could not import them and bound None to the name instead.

        Norms are left out, because other packages use the same names.
        """
        functions = {name: function for module, contents in self.about.functions.items()
                     if "norm" not in module for name, function in contents.items()}
        for module in list(sys.modules.values()):
            if type(module) is ModuleType and module.__name__.partition(".")[0] != "flashlin":
                for name, function in functions.items():
                    self.bindings.fill(module, name, function, public_name(function))


mamba_ssm_patch = partial(PackagePatch, MAMBA_SSM)
causal_conv1d_patch = partial(PackagePatch, CAUSAL_CONV1D)


def whole(about: Package) -> dict[str, Contents]:
    """Return the contents of the stub modules for a package, beginning with the package itself."""
    modules: dict[str, dict[str, Any]] = {about.name: {"__version__": about.version}}
    for table in (about.functions, about.beside):
        for name, contents in table.items():
            parts = name.split(".")
            for end in range(1, len(parts)):
                modules.setdefault(".".join(parts[:end]), {})
            modules.setdefault(name, {}).update(contents)
    return {**modules}


def not_installed(about: Package, name: str) -> str:
    """Return the advice for a name that the stub modules of a package do not have."""
    has = list(dict.fromkeys(name for contents in about.functions.values() for name in contents))
    return (f"{name}: {about.name} is not installed, and flashlin.patch provides only functions of it "
            f"({some(has)}). To use the rest of it, install it, with or without its extension: "
            f"{about.name.removesuffix('_ssm').upper()}_SKIP_CUDA_BUILD=TRUE "
            f"pip install --no-build-isolation {about.name.replace('_', '-')}")


def public_name(function: Any) -> str:
    """Return the full name under which users find a function of flashlin."""
    name = function.__name__
    home = "flashlin.mamba" if getattr(mamba, name, None) is function else function.__module__
    return f"{home}.{name}"


def lacking(extension: str, why: str) -> Any:
    """Return the ``__getattr__`` of the stub module for an extension, which raises AttributeError."""
    def of(name: str) -> Any:
        raise AttributeError(f"{extension}.{name}: the extension does not load ({why}), and flashlin has "
                             "no replacement for this function")
    return of


def fails(extension: str) -> str:
    """Return the reason that an extension does not load, or ``""`` if it does."""
    try:
        importlib.import_module(extension)
    except (ImportError, OSError) as error:  # missing, or built for another torch
        return f"{type(error).__name__}: {error}"
    return ""


def forget_what_is_available() -> None:
    """Clear the caches in which transformers keeps which packages are installed.

    A patch changes which packages can be imported.
    """
    checks = sys.modules.get("transformers.utils.import_utils")
    for name in REMEMBERED:
        if (forget := getattr(getattr(checks, name, None), "cache_clear", None)) is not None:
            forget()
