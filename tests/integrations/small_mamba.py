"""Small packages mamba_ssm and causal_conv1d, with the names and the structure of the real ones.

Modules, functions and layers are bound and called as in the real packages. A function that is not replaced
returns its own name.
"""
from __future__ import annotations

from pathlib import Path

SITUATIONS = ("working", "missing", "does not load", "absent")
EXTENSIONS = ("selective_scan_cuda", "causal_conv1d_cuda")
BROKEN = 'raise ImportError("undefined symbol: of another torch")\n'

INNER = """xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias,
    A, B=None, C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True,
    checkpoint_lvl=1, b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6"""
SUM = """x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0,
    rowscale=None, prenorm=False, residual_in_fp32=False"""
GATED = "x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True"


def raw(name: str, arguments: str) -> str:
    return f"def {name}({arguments}):\n    return 'raw {name}'\n"


# selective_scan_fn has an argument that flashlin's function lacks
FILES = {
    "mamba_ssm/__init__.py": "__version__ = '9.9'\n"
        "from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn\n",
    "mamba_ssm/ops/__init__.py": "", "mamba_ssm/ops/triton/__init__.py": "",
    "mamba_ssm/modules/__init__.py": "",
    "mamba_ssm/ops/selective_scan_interface.py": "import selective_scan_cuda\n" + raw(
        "selective_scan_fn", "u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, "
        "return_last_state=False, theirs=None") + raw("mamba_inner_fn", INNER),
    "mamba_ssm/ops/triton/ssd_combined.py": raw(
        "mamba_chunk_scan_combined", "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, "
        "initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, "
        "dt_limit=(0.0, float('inf')), return_final_states=False, return_varlen_states=False") + raw(
        "mamba_split_conv1d_scan_combined", "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, "
        "initial_states=None, seq_idx=None, dt_limit=(0.0, float('inf')), return_final_states=False, "
        "activation='silu', rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, "
        "headdim=None, ngroups=1, norm_before_gate=True"),
    "mamba_ssm/ops/triton/selective_state_update.py": raw(
        "selective_state_update", "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, "
                                  "state_batch_indices=None"),
    "mamba_ssm/ops/triton/layer_norm.py":
        raw("layer_norm_fn", SUM + ", is_rms_norm=False, return_dropout_mask=False")
        + raw("rms_norm_fn", SUM + ", return_dropout_mask=False"),
    "mamba_ssm/ops/triton/layernorm_gated.py": raw("rmsnorm_fn", GATED) + raw("layernorm_fn",
                                                                             GATED + ", is_rms_norm=False")
        + """
import torch

class RMSNorm(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight, self.bias = torch.nn.Parameter(torch.ones(hidden_size)), None

    def forward(self, x, z=None):
        return rmsnorm_fn(x, self.weight, self.bias, z=z, eps=self.eps, group_size=self.group_size,
                          norm_before_gate=self.norm_before_gate)
""",
    "causal_conv1d/__init__.py": "__version__ = '9.9'\n"
        "from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update\n",
    "causal_conv1d/cpp_functions.py": "import causal_conv1d_cuda\n" + raw(
        "causal_conv1d_fwd_function", "x, weight, bias, seq_idx, initial_states, final_states_out, "
        "silu_activation") + raw(
        "causal_conv1d_bwd_function", "x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, "
        "return_dinitial_states, silu_activation") + raw(
        "causal_conv1d_update_function", "x, conv_state, weight, bias, silu_activation, cache_seqlens, "
        "conv_state_indices"),
    "causal_conv1d/causal_conv1d_interface.py": "from causal_conv1d.cpp_functions import *\n" + raw(
        "causal_conv1d_fn", "x, weight, bias=None, seq_idx=None, initial_states=None, "
        "return_final_states=False, final_states_out=None, activation=None") + raw(
        "causal_conv1d_update", "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, "
                                "conv_state_indices=None"),
    "causal_conv1d/causal_conv1d_varlen.py": raw("causal_conv1d_varlen_states", "x, cu_seqlens, state_len"),
    "mamba_ssm/modules/mamba_simple.py": '''
import torch
import torch.nn.functional as F
from torch import nn
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
try:
    from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
except ImportError:
    causal_conv1d_fn, causal_conv1d_update = None, None


class Mamba(nn.Module):
    def __init__(self, d_model, d_state=16, d_conv=4, layer_idx=None):
        super().__init__()
        inner, self.rank, self.N = 2 * d_model, 3, d_state
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner)
        self.x_proj = nn.Linear(inner, self.rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, 1 + d_state).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, d_model, bias=False)
        self.layer_idx = layer_idx

    def forward(self, u, inference_params=None):
        A = -self.A_log.float().exp()
        xz = self.in_proj(u).transpose(1, 2)
        if inference_params is None:
            return mamba_inner_fn(
                xz, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight,
                self.out_proj.weight, self.out_proj.bias, A, None, None, self.D.float(),
                delta_bias=self.dt_proj.bias.float(), delta_softplus=True)
        cache = inference_params.key_value_memory_dict
        filters = self.conv1d.weight.squeeze(1)
        if inference_params.seqlen_offset == 0:
            x, z = xz.chunk(2, 1)
            kept = F.pad(x, (filters.shape[1] - x.shape[-1], 0)).clone()
            x = causal_conv1d_fn(x=x, weight=filters, bias=self.conv1d.bias, activation="silu")
            dt, B, C = self.x_proj(x.transpose(1, 2)).split([self.rank, self.N, self.N], -1)
            dt = (dt @ self.dt_proj.weight.T).transpose(1, 2)
            y, last = selective_scan_fn(x, dt, A, B.transpose(1, 2), C.transpose(1, 2), self.D.float(), z=z,
                                        delta_bias=self.dt_proj.bias.float(), delta_softplus=True,
                                        return_last_state=True)
            cache[self.layer_idx] = kept, last
            return self.out_proj(y.transpose(1, 2))
        window, state = cache[self.layer_idx]
        x, z = xz.squeeze(2).chunk(2, -1)
        x = causal_conv1d_update(x, window, filters, self.conv1d.bias, "silu")
        dt, B, C = self.x_proj(x).split([self.rank, self.N, self.N], -1)
        dt = F.linear(dt, self.dt_proj.weight)
        y = selective_state_update(state, x, dt, A, B, C, self.D, z=z, dt_bias=self.dt_proj.bias,
                                   dt_softplus=True)
        return self.out_proj(y)[:, None]
''',
    "mamba_ssm/modules/mamba2.py": '''
import torch
import torch.nn.functional as F
from torch import nn
from mamba_ssm.ops.triton.layernorm_gated import RMSNorm as RMSNormGated
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
try:
    from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
except ImportError:
    causal_conv1d_fn, causal_conv1d_update = None, None


class Mamba2(nn.Module):
    def __init__(self, d_model, d_state=16, d_conv=4, headdim=8, ngroups=1, layer_idx=None):
        super().__init__()
        self.inner, self.d_state, self.headdim, self.ngroups = 2 * d_model, d_state, headdim, ngroups
        self.H, self.layer_idx = self.inner // headdim, layer_idx
        self.mixed = self.inner + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, self.inner + self.mixed + self.H, bias=False)
        self.conv1d = nn.Conv1d(self.mixed, self.mixed, d_conv, groups=self.mixed)
        self.dt_bias, self.A_log = nn.Parameter(torch.randn(self.H)), nn.Parameter(torch.rand(self.H))
        self.D = nn.Parameter(torch.ones(self.H))
        self.norm = RMSNormGated(self.inner, norm_before_gate=False, group_size=self.inner // ngroups)
        self.out_proj = nn.Linear(self.inner, d_model, bias=False)

    def forward(self, u, inference_params=None):
        zxbcdt, filters = self.in_proj(u), self.conv1d.weight.squeeze(1)
        A = -self.A_log.float().exp()
        if inference_params is None:
            return mamba_split_conv1d_scan_combined(
                zxbcdt, filters, self.conv1d.bias, self.dt_bias, A, D=self.D, chunk_size=16, seq_idx=None,
                activation="silu", rmsnorm_weight=self.norm.weight, rmsnorm_eps=self.norm.eps,
                outproj_weight=self.out_proj.weight, outproj_bias=self.out_proj.bias, headdim=self.headdim,
                ngroups=self.ngroups, norm_before_gate=False)
        cache = inference_params.key_value_memory_dict
        z, xBC, dt = zxbcdt.split([self.inner, self.mixed, self.H], -1)
        sizes = [self.inner, self.ngroups * self.d_state, self.ngroups * self.d_state]
        if inference_params.seqlen_offset == 0:
            kept = F.pad(xBC.transpose(1, 2), (filters.shape[1] - xBC.shape[1], 0)).clone()
            xBC = causal_conv1d_fn(xBC.transpose(1, 2), filters, bias=self.conv1d.bias, activation="silu",
                                   seq_idx=None).transpose(1, 2)
            x, B, C = xBC.split(sizes, -1)
            y, last = mamba_chunk_scan_combined(
                x.unflatten(-1, (self.H, -1)), dt, A, B.unflatten(-1, (self.ngroups, -1)),
                C.unflatten(-1, (self.ngroups, -1)), chunk_size=16, D=self.D, z=None, dt_bias=self.dt_bias,
                dt_softplus=True, return_final_states=True)
            cache[self.layer_idx] = kept, last
            return self.out_proj(self.norm(y.flatten(2), z))
        window, state = cache[self.layer_idx]
        xBC = causal_conv1d_update(xBC.squeeze(1), window, filters, self.conv1d.bias, "silu")
        x, B, C = xBC.split(sizes, -1)
        P, N = self.headdim, self.d_state
        y = selective_state_update(
            state, x.unflatten(-1, (self.H, P)), dt.squeeze(1)[..., None].expand(-1, -1, P),
            A[:, None, None].expand(-1, P, N), B.unflatten(-1, (self.ngroups, N)),
            C.unflatten(-1, (self.ngroups, N)), self.D[:, None].expand(-1, P), z=None,
            dt_bias=self.dt_bias[:, None].expand(-1, P), dt_softplus=True)
        return self.out_proj(self.norm(y.flatten(1), z.squeeze(1)))[:, None]
'''}


def write(folder: Path, situation: str) -> None:
    """Write the packages in one of SITUATIONS."""
    for path, text in FILES.items() if situation != "absent" else ():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if situation in ("working", "does not load"):
        for name in EXTENSIONS:
            (folder / f"{name}.py").write_text("" if situation == "working" else BROKEN)
