"""Programs of users run unedited under ``flashlin run`` in Triton's interpreter.

The interpreter runs the kernels without a GPU, and the summary on stderr names them.
"""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FLA = """
import torch
from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
torch.manual_seed(0)
model = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(hidden_size=32, num_hidden_layers=1, num_heads=1, head_dim=16,
                                                     vocab_size=17, expand_v=1)).float()
tokens = torch.arange(20).reshape(1, 20) % 17
loss = model(tokens, labels=tokens).loss
loss.backward()
print("trained", loss.item() > 0)
"""
TRANSFORMERS = """
import torch
from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2ForCausalLM
torch.manual_seed(0)
model = Mamba2ForCausalLM(Mamba2Config(hidden_size=16, num_heads=2, head_dim=16, state_size=16, n_groups=1, expand=2,
                                       num_hidden_layers=1, vocab_size=17, chunk_size=16))
tokens = torch.arange(20).reshape(1, 20) % 17
loss = model(tokens, labels=tokens).loss
loss.backward()
print("trained", loss.item() > 0)
"""
MAMBA = """
import torch
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
x = torch.randn(1, 20, 2, 16, requires_grad=True)
y = mamba_chunk_scan_combined(x, torch.rand(1, 20, 2), -torch.rand(2), torch.randn(1, 20, 1, 16),
                              torch.randn(1, 20, 1, 16), 16)
y.sum().backward()
print("trained", x.grad is not None)
"""
CONV = """
import torch
from causal_conv1d import causal_conv1d_fn
x = torch.randn(1, 16, 20, requires_grad=True)
causal_conv1d_fn(x, torch.randn(16, 4), activation="silu").sum().backward()
print("trained", x.grad is not None)
"""


@pytest.mark.parametrize("package, program, op, kernel", [
    ("fla", FLA, "chunk_gated_delta_rule", "delta_scan"),
    ("transformers", TRANSFORMERS, "mamba_chunk_scan_combined", "simple_gla_"),
    ("mamba_ssm", MAMBA, "mamba_chunk_scan_combined", "simple_gla_"),
    ("causal_conv1d", CONV, "causal_conv1d_fn", "conv_")])
@pytest.mark.alternate
def test_a_program_trains_on_flashlin_s_kernels(package: str, program: str, op: str, kernel: str,
                                                tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "flashlin", "run", str(tmp_path / "train.py")], capture_output=True, text=True,
        timeout=300, env={**os.environ, "TRITON_INTERPRET": "1", "FLASHLIN_PATCH": package,
                          "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0 and done.stdout.split() == ["trained", "True"], done.stderr
    assert f"flashlin: {package}: " in done.stderr
    ran = next(line for line in done.stderr.splitlines() if line.startswith(f"flashlin: {op}: "))
    assert "kernels " in ran and kernel in ran, ran
