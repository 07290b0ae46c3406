"""The functions that a benchmark compares: flashlin's, and that of each package which is installed."""
from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.calls import Op, Shape
from matrix import record
from matrix.peer_table import module_of

Function = Callable[..., Any]
# fla as it is installed, which may call other packages; and fla with these packages switched off.
FLA, TRITON = "fla", "fla (Triton)"
WITHIN = "cuDNN (own gate)"
SWITCHES = ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG")
# Names of the packages in records -> names of their distributions.
PACKAGES = {"fla": "fla-core", "mamba_ssm": "mamba_ssm", "FlashQLA": "flash-qla", "TileLang": "tilelang",
            "cuDNN": "nvidia-cudnn-frontend"}


def sides(op: Op, shape: Shape) -> dict[str, Function | str]:
    """Return the function of each package, or the reason why it is missing."""
    import flashlin

    def theirs() -> Function:
        return getattr(module_of(op.home), op.name)  # type: ignore[no-any-return]
    loaders: dict[str, Callable[[], Function]] = {op.peer: theirs}
    if op.peer == FLA:
        loaders = {FLA: lambda: _fla(theirs(), others=True)}
        if op.backends or op.refused:
            loaders[TRITON] = lambda: _fla(theirs(), others=False)
    if op.name == "chunk_gated_delta_rule" and shape.D == 128:
        loaders["FlashQLA"] = _flashqla
    if op.name == "chunk_kda" and shape.D == 128:
        loaders["cuDNN"] = lambda: _cudnn(gates_within=False)
        if op.layer:
            loaders[WITHIN] = lambda: _cudnn(gates_within=True)
    found: dict[str, Function | str] = {"flashlin": getattr(flashlin, op.name)}
    for name, load in loaders.items():
        try:
            found[name] = load()
        # The other package is missing or broken here. Its column shows the reason.
        except Exception as error:
            found[name] = record.raised(error).removeprefix("error: ")
    return found


def refuses() -> bool:
    """Return True if fla's Triton kernels refuse the backward of scalar gates on this machine.

    https://github.com/fla-org/flash-linear-attention/issues/640
    """
    try:
        module: Any = importlib.import_module("fla.ops.common.chunk_o")
    except Exception:  # fla's column shows the reason
        return False
    return bool(module.IS_NVIDIA_HOPPER and module.TRITON_ABOVE_3_4_0 and not module.TRITON_ABOVE_3_7_1)


def stop_refusing() -> bool:
    """Switch this refusal off, and return True if fla would have refused on this machine."""
    if found := refuses():
        importlib.import_module("fla.ops.common.chunk_o").IS_NVIDIA_HOPPER = False  # type: ignore[attr-defined]
    return found


def _fla(function: Function, others: bool) -> Function:
    """Return a function of fla that first selects its backends.

    others: use fla's default backends. If False, only fla's Triton kernels run, and they refuse no backward.
    """
    module: Any = importlib.import_module("fla.ops.common.chunk_o")
    hopper = getattr(module, "really_hopper", module.IS_NVIDIA_HOPPER)
    module.really_hopper = hopper
    for switch in SWITCHES:  # which the user may have set
        os.environ.pop(switch, None)

    def call(**arguments: Any) -> Any:
        if (SWITCHES[0] not in os.environ) != others:
            for switch in SWITCHES:
                if others:
                    del os.environ[switch]
                else:
                    os.environ[switch] = "0"
            module.IS_NVIDIA_HOPPER = hopper and others
        return function(**arguments)
    return call


def _flashqla() -> Function:
    """Return FlashQLA's gated delta rule with the arguments of fla's.

    It takes gates that are ready. flashlin's function computes them first, and its time counts.
    """
    theirs = importlib.import_module("flash_qla").chunk_gated_delta_rule
    from flashlin.ops.gates import fused_gdn_gate

    def call(g: torch.Tensor, beta: torch.Tensor, A_log: torch.Tensor | None = None,
             dt_bias: torch.Tensor | None = None, use_gate_in_kernel: bool = False,
             use_beta_sigmoid_in_kernel: bool = False, **others: Any) -> Any:
        if A_log is not None:
            g, beta = fused_gdn_gate(g, A_log, dt_bias), beta.sigmoid()
        return theirs(g=g, beta=beta, auto_cp=True, **others)
    return call


def _cudnn(gates_within: bool) -> Function:
    """Return cuDNN's Kimi Delta Attention with the arguments of fla's.

    gates_within: its kernel computes gate, norm and sigmoid. It then has no backward on Hopper. If False,
        flashlin's functions compute them first, and their time counts.
    """
    theirs = importlib.import_module("cudnn.linear_attention.ops").kimi_delta_attention
    from flashlin.ops.gates import fused_kda_gate
    from flashlin.ops.norm import l2norm

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
             cu_seqlens: torch.Tensor | None = None, A_log: torch.Tensor | None = None,
             dt_bias: torch.Tensor | None = None, lower_bound: float | None = None,
             **options: Any) -> torch.Tensor:
        B, T, H, K = g.shape
        edges = (torch.arange(0, (B + 1) * T, T, device=q.device, dtype=torch.int32) if cu_seqlens is None
                 else cu_seqlens.int())
        within = {}
        if gates_within:
            within = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": True,
                      "gate_lower_bound": lower_bound, "a_log": A_log,
                      "dt_bias": dt_bias.view(H, K) if dt_bias is not None else None}
        elif A_log is None:
            beta = beta.float()
        else:
            q, k, beta = l2norm(q), l2norm(k), beta.float().sigmoid()
            g = fused_kda_gate(g, A_log, dt_bias, lower_bound, torch.float32)
        tensors = (x.flatten(0, 1) for x in (q, k, v, g, beta))
        o: torch.Tensor = theirs(*tensors, edges, plan_name="kda_hopper_cuda", **within)[0]
        return o.view(v.shape)
    return call
