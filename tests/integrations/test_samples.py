"""torch.func on models of transformers: per-sample gradients are equal with and without the patch."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashlin

transformers = pytest.importorskip("transformers")
SIZES: dict[str, dict[str, Any]] = {
    "Mamba2": {"hidden_size": 16, "state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1,
               "chunk_size": 8},
    "FalconH1": {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
                 "num_key_value_heads": 1, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
                 "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8,
                  "attn_implementation": "eager"}}


@pytest.mark.parametrize("kind", SIZES)
def test_gradients_of_samples_and_tangents(kind: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=17, num_hidden_layers=2, use_cache=False,
                                                    **SIZES[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    weights = {name: x.detach() for name, x in model.named_parameters()}
    tangents = {name: torch.randn_like(x) for name, x in weights.items()}
    samples = torch.randint(1, 17, (2, 10))  # without padding, whose row has a tangent but no gradient

    def loss(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (tokens[None],)).logits
        return F.cross_entropy(logits[0, :-1], tokens[1:])

    def found() -> tuple[dict[str, Tensor], Tensor]:
        by_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="same")
        first = torch.func.jvp(lambda weights: loss(weights, samples[0]), (weights,), (tangents,))
        return by_sample(weights, samples), first[1]
    gradients, tangent = found()
    with flashlin.patched("transformers", model=model) as report:
        ours, our_tangent = found()
    assert any(by == "flashlin's mamba_chunk_scan_combined" for _, _, by in report.replaced)
    for name, x in gradients.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(our_tangent, tangent, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_tangent, sum((ours[name][0] * x).sum() for name, x in tangents.items()),
                               rtol=1e-4, atol=1e-5)
