"""A CPU in a GPU's place, for programs that ask for one before they take the branch that flashlin serves."""
from __future__ import annotations

import contextlib
import inspect
from typing import Any
from unittest import mock


def as_on_cuda(model: Any) -> Any:
    """Before transformers 5.15, the layers of Mamba and LFM ask whether their weights are on a CUDA device,
    and take plain torch where they are not. Here they take the other branch, and have no torch to fall back
    on."""
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
    """While it lasts, CUDA's events can be made: mamba_ssm's loop of generation makes some for timing also
    where it does not time."""
    return mock.patch("torch.cuda.Event", lambda enable_timing: None)
