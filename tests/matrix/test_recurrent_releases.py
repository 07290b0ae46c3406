"""The token-by-token kernels compile under every Triton release, with a state of any dtype.

They keep their tiles in registers.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashlin
from flashlin.compat.releases import supported
from flashlin.compat.target import parse
from flashlin.testing.compile import Job, Result
from flashlin.testing.record import Recorded, recording
from tests.matrix.test_shield_releases import child
from tests.serving.checks import Layer, decoded

Compile = Callable[[str, list[Job]], list[Result]]


def launches(triton: str, sm: int) -> list[Recorded]:
    """Return launches of training, of decoding from a pool with all input transforms, and of serving."""
    def tensor(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=grad)
    q, v = (tensor(2, 3, heads, 128, dtype=torch.bfloat16, grad=True) for heads in (2, 4))
    g, state = tensor(2, 3, 4, grad=True), tensor(2, 4, 128, 128, grad=True)
    with recording(parse(f"triton={triton},sm={sm}")) as found:
        o, ht = flashlin.fused_recurrent_gdn(q, q, v, g, beta=g, initial_state=state, output_final_state=True)
        assert ht is not None
        torch.autograd.backward([o, ht], [torch.zeros_like(o), torch.zeros_like(ht)])
        flashlin.fused_recurrent_gdn(q.detach()[:1], q.detach()[:1], v.detach()[:1],
                                     g.detach()[:1].bfloat16(), beta=g.detach()[:1].bfloat16(),
                                     initial_state=state.detach(), state_indices=torch.tensor([1, -1]),
                                     cu_seqlens=torch.tensor([0, 1, 3]), use_qk_l2norm_in_kernel=True,
                                     use_gate_in_kernel=True, A_log=tensor(4), dt_bias=tensor(4),
                                     use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
                                     state_v_first=True)
        for kind, states in (("heads, raw", torch.float32), ("channels, raw, bounded", torch.bfloat16)):
            layer = Layer(kind, 2, 4, 128, 128, torch.bfloat16, states if sm >= 80 else torch.float32)
            decoded(layer.parameters(), layer.tokens(4), layer.pool(4), layer.integers([[0, 1], [2, 3]]), 2)
    assert len(found) == 5
    return found


@pytest.mark.filterwarnings("ignore:.*fp32 copies")
@pytest.mark.parametrize(("version", "cards"), [
    ("3.0.0", (75, 90)), ("3.6.0", (90,)), (supported()[-1], (90,))])
@pytest.mark.alternate
def test_training_and_decoding_compile_and_spill_nothing_on_hopper(version: str, cards: tuple[int, ...],
                                                                   compiled: Compile) -> None:
    jobs = [Job(sm, launch) for sm in cards for launch in launches(version, sm)]
    for job, result in zip(jobs, compiled(version, jobs), strict=True):
        assert result.ok and result.shared <= job.launch.shared, (job, result)
        assert job.sm != 90 or result.spills == 0, (job, result)


def test_sequences_without_a_state_of_a_pool_in_the_interpreter_of_39() -> None:
    """A sequence without a state in the pool works in the interpreter of Triton 3.9.

    The masks of the kernel must be blocks, because this interpreter cannot combine comparisons of scalars.
    """
    said = child("3.9.0", """
        q = torch.ones(2, 1, 2, 16)
        pool = torch.zeros(5, 2, 16, 16)
        with flashlin.settings(path="triton"):
            o, after = flashlin.fused_recurrent_delta_rule(q, q, q, torch.ones(2, 1, 2), initial_state=pool, output_final_state=True,
                                                           state_indices=torch.tensor([3, -1]))
        print([x.any().item() for x in o], [x.any().item() for x in after])
        """, "import torch, triton, flashlin", interpret=True)
    assert said.splitlines()[-1] == "[True, False] [False, False, False, True, False]"
