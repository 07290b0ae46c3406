"""``torch.compile(dynamic=True, fullgraph=True)`` traces ops with all sizes symbolic."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, randn

import flashlin
from flashlin import mamba
from tests.hostile import OPS, arguments
from tests.ops.test_composed import inner_inputs
from tests.share import WHOLE


def tensors_of(returned: Any) -> list[Tensor]:
    """Return the tensors in a nest of tuples, in order."""
    if isinstance(returned, tuple):
        return [x for one in returned for x in tensors_of(one)]
    return [] if returned is None else [returned]


def grouped(op: str) -> dict[str, Any]:
    """Return arguments in which two heads share each group of q and k, or of B and C."""
    q, v, g = randn(1, 6, 2, 8), randn(1, 6, 4, 8), -randn(1, 6, 4).abs()
    if op == "mamba3_siso_combined":
        return {**arguments(op), **{name: randn(1, 6, 1, 8) for name in "QK"}}
    if op == "mamba_chunk_scan_combined":
        return {"x": v, "dt": -g, "A": -g[0, 0].exp(), "B": q, "C": q, "chunk_size": 16}
    number = {"num_householder": 1} if op == "chunk_gated_delta_product" else {}
    return {"q": q, "k": q, "v": v, "g": g, "beta": g.exp(), **number}


def short() -> dict[str, Any]:
    """Return only the necessary arguments of mamba_split_conv1d_scan_combined.

    Each argument adds to the time of a trace.
    """
    H, P, N = 2, 4, 3
    return {"zxbcdt": randn(2, 6, 2 * H * P + 2 * N + H), "conv1d_weight": randn(H * P + 2 * N, 4),
            "conv1d_bias": None, "dt_bias": randn(H), "A": -randn(H).exp(), "D": randn(H, P),
            "chunk_size": 16, "rmsnorm_weight": randn(H * P)}


GROUPED = ("chunk_gated_delta_rule", "chunk_gated_delta_product", "mamba3_siso_combined",
           "mamba_chunk_scan_combined")
# The op and the function that makes its arguments, by name. CI tests the two composed layers and one op with
# groups on each push.
CALLS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "mamba_inner_fn": ("mamba_inner_fn", inner_inputs),
    "mamba_split_conv1d_scan_combined, short": ("mamba_split_conv1d_scan_combined", short),
    **{op: (op, partial(arguments, op)) for op in OPS if WHOLE},
    **{f"{op}, groups": (op, partial(grouped, op)) for op in (GROUPED if WHOLE else GROUPED[:1])}}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.alternate
def test_every_size_may_be_symbolic(name: str) -> None:
    torch.manual_seed(0)
    op, make = CALLS[name]
    function = getattr(mamba, op) if op == "mamba_inner_fn" else getattr(flashlin, op)
    given = make()

    def returned(call: Callable[..., Any]) -> list[Tensor]:
        """Return the outputs for copies of the arguments, because some calls write to their arguments."""
        return tensors_of(call(**{key: x.clone() if isinstance(x, Tensor) else x
                                  for key, x in given.items()}))
    compiled = torch.compile(lambda **given: function(**given), dynamic=True, fullgraph=True, backend="eager")
    for got, wanted in zip(returned(compiled), returned(function), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
