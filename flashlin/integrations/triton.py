"""``patch("triton")``: ``flashlin.autotune`` replaces ``triton.autotune``, also in existing tuners."""
from __future__ import annotations

from flashlin.integrations.patching import Patch
from flashlin.shielding import autotune as tuning


class TritonPatch(Patch):
    """The patch of triton."""
    package = "triton"

    def begin(self) -> None:
        """Replace ``triton.autotune``, and hook the tuners that exist already."""
        import triton
        import triton.runtime
        import triton.runtime.autotuner
        for home in (triton, triton.runtime, triton.runtime.autotuner):
            self.bindings.put(home, "autotune", tuning.autotune, "flashlin.autotune")
        tuning.hook("patch", lambda: True)

    def end(self) -> None:
        """Undo the replacement and remove the hook."""
        super().end()
        tuning.unhook("patch")
