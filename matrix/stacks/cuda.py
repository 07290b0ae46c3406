"""Let programs run their GPU branch on a CPU, so that flashlin can replace the functions in that branch."""
from __future__ import annotations

import contextlib
import inspect
from typing import Any
from unittest import mock


def as_on_cuda(model: Any) -> Any:
    """Make the layers of a model run their CUDA branch on a CPU, and return the model.

    Before transformers 5.15, the layers of Mamba and LFM run plain torch unless their weights are on a CUDA
    device. This function also removes their plain torch functions, so that they cannot fall back to them.
    """
    for layer in model.modules():
        if hasattr(layer, "cuda_kernels_forward"):
            layer.slow_forward = layer.torch_forward = None
            known = inspect.signature(layer.cuda_kernels_forward).parameters

            def forward(hidden_states: Any = None, *args: Any, _layer: Any = layer, _known: Any = known,
                        **more: Any) -> Any:
                if hidden_states is None:
                    hidden_states = more.pop("hidden_states")
                with mock.patch("torch.cuda.device", lambda device: contextlib.nullcontext()):
                    return _layer.cuda_kernels_forward(hidden_states, *args,
                                                       **{k: v for k, v in more.items() if k in _known})
            layer.forward = forward
    return model


def no_events() -> Any:
    """Return a context manager that replaces CUDA events, so that they can be created without a GPU.

    The generation loop of mamba_ssm creates timing events even if it does not measure time.
    """
    return mock.patch("torch.cuda.Event", lambda enable_timing: None)
