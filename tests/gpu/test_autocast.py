"""Autocast changes the results of no op on a GPU. Lazily negated tensors keep their sign.

Ops run eagerly and compiled. tests/autocast.py has the calls. tests/ops/test_entry.py tests the torch path.
"""
from __future__ import annotations

import pytest
import torch

from tests.autocast import BF16, F16, Call, calls, changed, misread, results

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

# One call of each op, calls of packed sequences, and public functions that are not ops.
CALLS = [*{call.op: call for call in reversed([*calls("quick")])}.values(), *calls("packed beside")]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_autocast_and_negation_change_nothing(call: Call) -> None:
    assert changed(call, "cuda") == [] and misread(call, "cuda") == []


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_compiled_ops_are_the_same_under_autocast(call: Call) -> None:
    """Under autocast torch compiles another graph, so the last bits may differ."""
    torch._dynamo.reset()
    compiled = torch.compile(call.function, fullgraph=True)
    wanted = results(call, "cuda", function=compiled)
    for dtype, backward in ((BF16, BF16), (F16, None)):
        found = results(call, "cuda", function=compiled, forward=dtype, backward=backward)
        assert [x.dtype for x in found] == [x.dtype for x in wanted]
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * y.abs().max().item())
