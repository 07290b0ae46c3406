"""patch("triton"): ``triton.autotune`` is flashlin's, and tuners made before ask flashlin, too."""
from __future__ import annotations

from flashlin.integrations.patching import Patch
from flashlin.shielding import autotune as tuning


class TritonPatch(Patch):
    package = "triton"

    def begin(self) -> None:
        import triton
        import triton.runtime
        import triton.runtime.autotuner
        for home in (triton, triton.runtime, triton.runtime.autotuner):
            self.bindings.put(home, "autotune", tuning.autotune, "flashlin.autotune")
        tuning.hook("patch", lambda: True)

    def end(self) -> None:
        super().end()
        tuning.unhook("patch")
