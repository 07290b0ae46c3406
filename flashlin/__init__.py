"""Linear-attention Triton kernels that run correctly and fast on your machine, or report why they cannot.

Names are imported at first use. ``import flashlin`` itself imports neither torch nor Triton, does not access
a GPU and prints nothing. Therefore ``flashlin.doctor()`` works even if torch or Triton is broken. The records
of the families list the public ops, see ``guards/family.py``.

An exported program (a ``.pt2`` file) names torch.library operators of flashlin, and torch looks them up when
it loads the file. Therefore flashlin imports every module that defines operators as soon as torch imports one
of its loaders.
"""
from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module

from flashlin.compat.import_hooks import watch
from flashlin.compat.lazy_imports import attach

__version__ = "0.2.0"

_BESIDE_OPS_AND_MODULES = {
    "flashlin.diagnostics.doctor": ("doctor", "explain", "plan"),
    "flashlin.diagnostics.why": ("why",),
    "flashlin.policy": ("settings", "Policy"),
    "flashlin.compat.target": ("Target",),
    "flashlin.guards.plan_types": ("Problem", "UnsupportedError"),
    "flashlin.diagnostics.report": ("Report",),
    "flashlin.shielding.launcher": ("shield",),
    "flashlin.shielding.autotune": ("autotune",),
    "flashlin.integrations.patching": ("patch", "patched", "unpatch"),
    "flashlin.integrations.hub": ("kernel_mapping",),
    "flashlin.trial.warmup": ("warmup",),
    "flashlin.tokens": ("check_tokens", "embedding", "guard_embeddings", "synchronize"),
}


@lru_cache(maxsize=1)
def _where() -> Mapping[str, str]:
    # The modules imported here must not contain "from flashlin import ...". Such a line would call this
    # function again before it has returned.
    from flashlin.kernels.families import PUBLIC
    from flashlin.modules import _where as of_modules
    ops = {op.name: f"flashlin.ops.{op.module}" for op in PUBLIC.values()}
    others = {name: module for module, names in _BESIDE_OPS_AND_MODULES.items() for name in names}
    return {**ops, **of_modules(), **others}


_SUBMODULES = ("backends", "mamba", "modules", "ops", "serving")
__getattr__, __dir__ = attach(__name__, _where, _SUBMODULES)

# The modules with which torch.export and AOTInductor load programs; AOTInductor looks operators up in C++.
_LOADERS = ("torch._export.serde.serialize", "torch._inductor.package")


def _register_operators(_: object = None) -> None:
    """Import every module that defines torch.library operators."""
    from flashlin.kernels.families import PUBLIC
    _no_longer_watch()
    of_ops = {f"flashlin.ops.{op.module}" for op in PUBLIC.values()}
    for module in sorted({*of_ops, "flashlin.serving.delta", "flashlin.tokens"}):
        import_module(module)


_no_longer_watch = watch(_LOADERS, _register_operators)
if any(module in sys.modules for module in _LOADERS):
    _register_operators()
