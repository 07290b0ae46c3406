"""Helpers that check that torch.autocast does not change the results of an op.

Each call runs forward and backward, inside and outside of autocast. ``calls`` yields four kinds of calls:

    arguments  every op with all of its arguments, most of them packed (tests/hostile.py)
    quick      the quick cases of every op, which are dense (flashlin/testing/cases)
    packed     packed calls of several chunks (tests/isolation.py)
    beside     public functions that are not ops
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashlin
from flashlin import mamba, serving
from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case
from tests import hostile, isolation

# The linear layer inside these ops multiplies in the autocast dtype, as documented; so does its backward.
LINEAR = {op for op in hostile.OPS if op.endswith("_linear")} | {
    "fused_linear_cross_entropy_loss", "mamba_split_conv1d_scan_combined"}
# Ops write to these arguments in place, so they have no gradients.
WRITTEN = {"state", "states", "conv_state", "cache", "final_states_out"}
BF16, F16 = torch.bfloat16, torch.float16
UNDER = ((BF16, BF16), (F16, F16), (BF16, None), (None, F16))  # (autocast in forward, in backward); None: off
NO_GRADIENTS = {"causal_conv1d_update", "mamba_causal_conv1d_update", "selective_state_update"}


class Call(NamedTuple):
    """One call whose results must not depend on autocast.

    make: returns the tensors and the other arguments by name.
    function: is called with these arguments.
    constant: names of the arguments without gradients.
    """
    op: str
    kind: str
    make: Callable[[], dict[str, Any]]
    function: Callable[..., Any]
    constant: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.op}-{self.kind}"


def _all_arguments(op: str) -> dict[str, Any]:
    torch.manual_seed(0)
    given = hostile.arguments(op)
    if op in LINEAR:
        return {**given, "outproj_weight": None, "outproj_bias": None} if "outproj_weight" in given else given
    return given


def _of_case(case: Case) -> dict[str, Any]:
    return dict(case.make(torch.float32, torch.Generator().manual_seed(0)))


def _of_isolation(call: isolation.Call) -> dict[str, Any]:
    bounds = ({"cu_seqlens": torch.tensor(isolation.EDGES)} if call.packed else
              {"seq_idx": torch.tensor(isolation.NUMBERS)[None]} if call.numbered else {})
    return {**call.make(0), **bounds, **call.extra}


def _beside_ops() -> dict[str, tuple[Callable[..., Any], dict[str, Any], set[str]]]:
    """Return the public functions that are not ops, by name.

    Each comes with its arguments and the names of the arguments without gradients.
    """
    torch.manual_seed(0)
    randn, edges, slots = torch.randn, torch.tensor([0, 2, 6]), torch.tensor([0, 1])
    served = {"q": randn(1, 6, 2, 8), "k": randn(1, 6, 2, 8), "v": randn(1, 6, 2, 8), "g": randn(1, 6, 2),
              "beta": randn(1, 6, 2).sigmoid(), "states": randn(3, 2, 8, 8), "indices": slots,
              "cu_seqlens": edges,
              "A_log": randn(2), "dt_bias": randn(2), "use_gate_in_kernel": True}
    has = torch.tensor([True, False])
    rows = {"x": randn(6, 8), "weight": randn(8), "bias": randn(8), "residual": randn(6, 8), "z": randn(6, 8)}
    added = {"x": randn(6, 8), "weight": randn(8), "bias": randn(8), "residual": randn(6, 8), "prenorm": True}
    filters = {"weight": randn(8, 4), "bias": randn(8)}
    found = {
        "serving.decode": (serving.decode, served, {*served}),
        "serving.prefill": (serving.prefill, {**served, "has_initial_state": has}, {*served}),
        "serving.prefill-tokens": (serving.prefill, {**served, "has_initial_state": has,
                                                     "mode": "fused_recurrent"}, {*served}),
        "serving.causal_conv1d_prefill": (serving.causal_conv1d_prefill, {
            "x": randn(1, 6, 8), "conv_state": randn(3, 8, 4), **filters, "cu_seqlens": edges,
            "conv_state_indices": slots, "has_initial_state": has}, {"x", "conv_state", "weight", "bias"}),
        "mamba.layer_norm_fn": (mamba.layer_norm_fn, added, set[str]()),
        "mamba.rms_norm_fn": (mamba.rms_norm_fn, added, set[str]()),
        "mamba.rmsnorm_fn": (mamba.rmsnorm_fn, {name: x for name, x in rows.items() if name != "residual"},
                             set[str]()),
        "mamba.causal_conv1d_varlen_states": (mamba.causal_conv1d_varlen_states, {
            "x": randn(6, 8), "cu_seqlens": edges, "state_len": 4}, {"x"})}
    return found


def calls(kinds: str = "arguments quick packed beside") -> Iterator[Call]:
    for name, (function, given, constant) in _beside_ops().items() if "beside" in kinds else ():
        yield Call(name, "beside", partial(dict, given), function, frozenset(constant))
    for op in hostile.OPS if "arguments" in kinds else ():
        if op not in LINEAR or op.startswith("mamba"):
            yield Call(op, "arguments", partial(_all_arguments, op), getattr(flashlin, op),
                       frozenset(hostile.parameters(op) if op in NO_GRADIENTS else WRITTEN))
    for case in CASES if "quick" in kinds else ():
        if case.quick and case.op not in LINEAR:
            yield Call(case.op, f"quick-{case.id}", partial(_of_case, case), case.call,
                       frozenset(case.constant))
    for call in isolation.CALLS if "packed" in kinds else ():
        if (call.packed or call.numbered) and call.op not in LINEAR:
            constant = {one.split(":")[0][1:] for one in call.inputs.split() if one.startswith("*")}
            yield Call(call.op, f"several-{call}", partial(_of_isolation, call),
                       call.function or getattr(flashlin, call.op), frozenset(constant))


def tensors_of(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    every = found.values() if isinstance(found, dict) else found if isinstance(found, (tuple, list)) else ()
    return [x for one in every for x in tensors_of(one)]


def results(call: Call, device: str = "cpu", dtype: torch.dtype = torch.float32, forward: Any = None,
            backward: Any = None, function: Any = None, cotangent: Any = None) -> list[Tensor]:
    """Return the outputs of a call, the tensors that it wrote in place, and its gradients.

    dtype: dtype of the floating-point inputs.
    forward, backward: autocast dtype of that pass; None means no autocast.
    function: replaces the function of the call.
    cotangent: is applied to the incoming gradient of each output.
    """
    given: dict[str, Any] = {}
    leaves: list[Tensor] = []

    def placed(name: str, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(placed(name, one) for one in x)
        if not isinstance(x, Tensor):
            return x
        x = x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)
        if not x.is_floating_point() or name in call.constant:
            return x
        leaves.append(x.requires_grad_())
        return x.clone()  # autograd forbids in-place writes to a leaf that requires gradients
    given = {name: placed(name, x) for name, x in call.make().items()}

    def under(kind: Any) -> Any:
        return nullcontext() if kind is None else torch.autocast(device, kind)
    with under(forward):
        made = tensors_of((function or call.function)(**given))
    written = [given[name] for name in call.constant & given.keys() if isinstance(given[name], Tensor)]
    wanted = [x for x in made if x.requires_grad]
    gradients: list[Tensor] = []
    if wanted and leaves:
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in wanted]
        if cotangent is not None:
            cotangents = [*map(cotangent, cotangents)]
        with under(backward):
            found = torch.autograd.grad(wanted, leaves, cotangents, allow_unused=True)
        gradients = [x for x in found if x is not None]
    return [x.detach() for x in [*made, *written, *gradients]]


def differences(wanted: list[Tensor], found: list[Tensor], allowed: float = 0.0) -> list[str]:
    """Describe each tensor that differs by more than ``allowed``, relative to its largest number."""
    if len(wanted) != len(found):
        return [f"{len(found)} tensors, not {len(wanted)}"]
    return [f"{n}: {x.dtype}, not {y.dtype}" if x.dtype != y.dtype else
            f"{n}: off by {(x.double() - y.double()).abs().max().item():.1e}"
            for n, (x, y) in enumerate(zip(found, wanted, strict=True))
            if x.dtype != y.dtype or _off(x.double(), y.double()) > allowed]


def _off(x: Tensor, y: Tensor) -> float:
    """Return the largest difference of two tensors, divided by the largest finite magnitude in y.

    NaN equals only NaN. Any other difference that is not finite counts as infinite.
    """
    if x.numel() == 0 or torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7)):
        return 0.0
    size = y[y.isfinite()].abs().max().item() if y.isfinite().any() else 1.0
    found = ((x - y).abs().max() / max(size, 1e-30)).item()
    return found if math.isfinite(found) else math.inf


def changed(call: Call, device: str = "cpu") -> list[str]:
    """Describe each result of a call that autocast changes, in forward or backward."""
    wanted = results(call, device)
    return [f"autocast {forward} and {backward}: {difference}" for forward, backward in UNDER
            for difference in differences(wanted, results(call, device, forward=forward, backward=backward))]


def negated(x: Any) -> Any:
    """Return the same numbers with torch's negative bit set, so that the memory holds them negated."""
    if isinstance(x, tuple):
        return tuple(map(negated, x))
    return torch._neg_view(-x) if isinstance(x, Tensor) and x.dtype != torch.bool else x


def misread(call: Call, device: str = "cpu") -> list[str]:
    """Describe each result that changes if read-only inputs and incoming gradients have the negative bit."""
    def of(change: Callable[[Any], Any]) -> list[torch.Tensor]:
        def changed(**given: Any) -> Any:
            return call.function(**{name: x if name in WRITTEN else change(x) for name, x in given.items()})
        return results(call, device, function=changed, cotangent=change)
    # ``negated`` makes an expanded tensor contiguous, and on a GPU the kernels may then round differently.
    return differences(of(lambda x: x), of(negated), allowed=1e-5 if device == "cuda" else 0.0)
