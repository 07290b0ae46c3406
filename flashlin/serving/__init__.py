"""Ops for engines that decode many requests at once on pools of states.

The ops process one token or several drafted tokens of each request, and prompts in pieces. They read and
write the slots that indices name. A pool of the delta rules is [slots, HV, V, K], a pool of a convolution
[slots, D, L]. An index below 0 or past the end is padding: its output is zero and nothing is written. No op
waits for the GPU, so steps can be captured in a CUDA graph.

Names are imported at first use, as in the package.
"""
from __future__ import annotations

from collections.abc import Mapping

from flashlin.compat.lazy_imports import attach


def _where() -> Mapping[str, str]:
    return {"decode": "flashlin.serving.delta", "prefill": "flashlin.serving.delta",
            "causal_conv1d_prefill": "flashlin.serving.conv",
            "causal_conv1d_update": "flashlin.ops.causal_conv1d"}


__getattr__, __dir__ = attach(__name__, _where)
