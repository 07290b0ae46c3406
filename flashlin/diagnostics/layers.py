"""Read a built model layer by layer: the kernels that each layer calls, and what flashlin plans for them.

Nothing is run or changed. If something cannot be read from a layer, the report says so instead of guessing.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from flashlin import dispatch
from flashlin.compat.known_issues import KNOWN_ISSUES
from flashlin.compat.target import GPUS, Target, probe
from flashlin.diagnostics import calls, typical_plans
from flashlin.diagnostics.importing import Tried
from flashlin.diagnostics.machine import attempt
from flashlin.diagnostics.packages import NEED_A_GPU, reason
from flashlin.diagnostics.report import Layer, Status
from flashlin.dispatch import OPS
from flashlin.guards.plan_types import DTYPES, advice
from flashlin.integrations.probing import OURS, TORCH, Bound, called_by
from flashlin.kernels.families import PUBLIC, family_of
from flashlin.kernels.remedies import REMEDIES
from flashlin.policy import Policy

# Wrappers whose names do not describe a layer. DDP's "module" is a wrapper only at the root.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
GATED_BACKWARD = next(issue for issue in KNOWN_ISSUES if issue.id == "hopper-gated-backward-640")
GATED = ("chunk_gated_delta_rule", "chunk_gdn", "chunk_simple_gla", "chunk_retention", "chunk_lightning_attn")
# The op that is planned for a kernel, if the op has another name.
PLANNED_AS = {"mamba_inner_fn": "selective_scan_fn"}


class _Unread(Exception):
    """A fact that cannot be read from a layer."""


def read(layer: Any, *names: str) -> int:
    """Return the first of these attributes of a layer that is a positive integer, or raise _Unread."""
    for name in names:
        size = getattr(layer, name, None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    raise _Unread(f"{type(layer).__name__} has no attribute {' or '.join(names)}")


HEADS = ("num_v_heads", "num_heads", "nheads")
STATE = ("ssm_state_size", "d_state")
HEAD = ("head_dim", "headdim")


def over_heads(layer: Any) -> dict[str, int]:
    """Return H, K and V of a layer with heads."""
    H = read(layer, *HEADS)
    return dict(H=H, K=_head(layer, "k", "key_dim", H), V=_head(layer, "v", "value_dim", H))


def _head(layer: Any, side: str, whole: str, H: int) -> int:
    """Return the size of one head of q and k (side ``k``), or of v (side ``v``).

    It comes from the layer's own attribute, from the size of all heads together, or from the size of every
    head.
    """
    try:
        return read(layer, f"head_{side}_dim")
    except _Unread:
        total = getattr(layer, whole, None)
        if isinstance(total, int) and total % H == 0 and total:
            return total // H
        return read(layer, *HEAD)


def mamba2(layer: Any) -> dict[str, int]:
    """Return H, K (size of the state) and V (size of a head) of a Mamba-2 layer."""
    return dict(H=read(layer, *HEADS), K=read(layer, *STATE), V=read(layer, *HEAD))


def mamba(layer: Any) -> dict[str, int]:
    """Return H = 1, K (size of the state) and V (inner size) of a Mamba-1 layer."""
    return dict(H=1, K=read(layer, *STATE), V=read(layer, "intermediate_size", "d_inner"))


def convolution(layer: Any) -> dict[str, int]:
    """Return K (channels) and V (taps) of a layer's only convolution, or raise _Unread."""
    found = [one.weight for one in layer.modules() if isinstance(one, nn.Conv1d)]
    shapes = {tuple(weight.shape) for weight in found if weight.dim() == 3}
    if len(shapes) != 1:
        raise _Unread(f"{type(layer).__name__} has {len(shapes) or 'no'} shapes of filters, need one")
    [(D, _, W)] = shapes
    return dict(K=int(D), V=int(W))


def norm(layer: Any) -> dict[str, int]:
    """Return H = 1 and K (size of a row) of a norm with one weight per column, or raise _Unread."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        raise _Unread(f"{type(layer).__name__} has no weight of one dimension")
    return dict(H=1, K=int(weight.shape[0]))


Reader = Callable[[Any], dict[str, int]]
# The functions that read the sizes of an op from a layer: by op, or else by the op's family. A layer that
# updates a state is of Mamba-2 or, without heads, of Mamba-1.
BY_OP: dict[str, Reader] = {"mamba_chunk_scan_combined": mamba2, "mamba_split_conv1d_scan_combined": mamba2,
                            "mamba3_siso_combined": mamba2, "selective_scan_fn": mamba,
                            "selective_state_update": lambda layer: (
                                mamba2 if any(hasattr(layer, name) for name in HEADS) else mamba)(layer),
                            "mamba_causal_conv1d_update": convolution, "rms_norm": norm, "layer_norm": norm,
                            "rms_norm_gated": norm, "layer_norm_gated": norm}
BY_FAMILY: dict[str, Reader] = {"conv": convolution, "conv_update": convolution, "recurrent": over_heads}


def reader(op: str) -> Reader:
    """Return the function that reads the sizes of an op from a layer, or raise _Unread."""
    family = family_of(op)
    found = BY_OP.get(op) or BY_FAMILY.get(family.name) or (over_heads if family.head_dim else None)
    if found is None:
        raise _Unread(f"flashlin cannot read the sizes of {op} from a layer")
    return found


class Weights(NamedTuple):
    """The device and dtype of a layer's weights.

    device: the device of the calls; None if it cannot be read.
    dtype: the dtype of most of the weights.
    why: reason that a call cannot be planned, or ``""``.
    """
    device: torch.device | None
    dtype: str
    why: str

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.device or ""), self.dtype)))


def weights(layer: nn.Module) -> Weights:
    """Return the device and dtype of a layer's weights.

    A layer without weights has neither. The device cannot be read if the weights are on several devices or
    are not loaded. The dtype cannot be read if the weights are quantised. ``Weights.why`` says so.
    """
    tensors = [one for one in layer.parameters() if not isinstance(one, nn.parameter.UninitializedParameter)]
    if not tensors:
        return Weights(None, "", "it has no weights to read a dtype and a device from")
    counted: Counter[torch.dtype] = Counter()
    for one in tensors:
        counted[one.dtype] += one.numel()
    dtype = str(counted.most_common(1)[0][0]).removeprefix("torch.")
    devices = {one.device for one in tensors}
    # accelerate's hook, which loads offloaded weights
    said = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        return Weights(None, dtype, f"its weights are on {names}: the device of the call cannot be read")
    [device] = devices
    if device.type == "meta":
        if said is None:
            return Weights(device, dtype, "its weights are on the meta device: not loaded, or offloaded by "
                                          "a library that does not say where it loads them")
        device = torch.device(said if not isinstance(said, int) else f"cuda:{said}")
    # quantised weights are integers, or have a class of their own
    return Weights(device, dtype, "" if dtype in DTYPES else
                   f"its weights are {dtype}, quantised: the dtype of the call cannot be read")


def check(model: Any) -> None:
    """Raise ValueError if ``model`` is not a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: got {type(model).__name__}, need a torch.nn.Module (or None)")


def report(model: nn.Module, target: Target | None, policy: Policy,
           imports: Mapping[str, Tried]) -> Iterator[Layer]:
    """Yield a row of the report for each function that layers of the model call; equal layers share one row.

    target: plan for this machine instead of the device of the weights.
    imports: results of the package imports that were tried.
    """
    alike: dict[Layer, list[str]] = {}
    for name, layer in model.named_modules():
        found, error = attempt(_rows, layer, target, policy, imports)
        rows = found if not error else [Layer(
            layers="", kind=_kind(layer), function="", implementation="", on="", path="",
            verdict="could not check", because=f"could not be read: {error}")]
        for row in rows:
            alike.setdefault(row, []).append(_plain(name, model))
    for row, names in alike.items():
        yield row.model_copy(update={"layers": together(names)})


def _rows(layer: nn.Module, target: Target | None, policy: Policy,
          imports: Mapping[str, Tried]) -> list[Layer]:
    where = weights(layer)
    here = target if target is not None else None if where.device is None else attempt(probe, where.device)[0]
    rows = []
    for one in called_by(layer):
        op = op_of(layer, one.kernel)
        path, verdict, because, cost = _planned(layer, op, where, here, target is not None, policy)
        if one.implementation != OURS:
            verdict, said = _theirs(one, op, here, layer.training, reason(one, imports))
            because, cost = "; ".join(filter(None, (said, "" if path else because))), ""
        function = one.attribute if one.attribute == one.kernel else f"{one.attribute} ({one.kernel})"
        rows.append(Layer(layers="", kind=_kind(layer), function=function, implementation=one.implementation,
                          on=str(where), path=path, verdict=verdict, because=because, cost=cost))
    return rows


def _theirs(one: Bound, op: str | None, here: Target | None, training: bool, why: str) -> tuple[Status, str]:
    """Return the status of a call that does not run through flashlin, and the reason for it.

    Whether a layer calls a function may depend on settings that are not visible here. So no problem is
    reported for functions that flashlin does not implement.
    """
    if one.implementation == TORCH:
        gpu = here is not None and here.backend in GPUS
        return ("degraded" if gpu else "ok"), f"the model's own torch function: {why}"
    if here is None:
        return "could not check", why
    if here.backend == "cpu" and one.implementation in NEED_A_GPU:
        return ("problem" if op else "could not check",
                f"kernels of {one.implementation} cannot start without a GPU")
    if training and one.implementation == "fla" and one.kernel in GATED and GATED_BACKWARD.here(here):
        return "problem", ("fla's gated backward gives wrong gradients here, or raises: "
                           f"{GATED_BACKWARD.id}, {GATED_BACKWARD.url}")
    return "ok", why


def _planned(layer: nn.Module, op: str | None, where: Weights, here: Target | None, named: bool,
             policy: Policy) -> tuple[str, Status, str, str]:
    """Return the plan of flashlin's op for a function that a layer calls, as (path, verdict, because, cost).

    path: how it runs, such as kernels or plain torch. verdict: its status in the report. because: the reason.
    cost: the cost of this path, in words.

    op: the op; None if flashlin has no such op.
    here: the target to plan for.
    named: True if ``here`` is a target that the user named.
    """
    if op is None:
        return "", "ok", "not planned: flashlin has no op of this name", ""
    try:
        if where.why and not (named and where.dtype in DTYPES):
            raise _Unread(where.why)
        if here is None:
            raise _Unread(f"the properties of {where.device} cannot be read")
        sizes = reader(op)(layer)
    except _Unread as error:
        return "", "could not check", f"cannot be planned: {error}", ""
    mode = OPS[op][1]
    decoding = mode == "fused_recurrent" or bool(PUBLIC[op].in_place)
    needs_grad = (layer.training and not decoding
                  and any(parameter.requires_grad for parameter in layer.parameters()))
    given = {"T": 1 if decoding else None, **sizes}
    plan = dispatch.plan(calls.problem_of(op, given, where.dtype, mode, needs_grad=needs_grad), here, policy)
    told = [f"{reason_.code}: {reason_.got}; so it {REMEDIES[remedy].means}" for reason_, remedy in plan.steps
            if reason_.forced]
    told += [f"{reason_}; {advice(plan)}" for reason_ in plan.refused]
    told += filter(None, [typical_plans.doubted(plan).because])
    size = " ".join(f"{axis}={number}" for axis, number in sizes.items())
    return f"{typical_plans.way(plan)} ({size})", typical_plans.judged(plan), "; ".join(told), typical_plans.cost(plan)


def op_of(layer: nn.Module, kernel: str) -> str | None:
    """Return the flashlin op that computes the same as a kernel, or None if there is none.

    The name causal_conv1d_update belongs to two functions. Layers of fla and flashlin mean the one of fla,
    and all other layers mean the one of the package causal_conv1d.
    """
    if kernel == "causal_conv1d_update" and not any(
            kind.__module__.partition(".")[0] in ("fla", "flashlin") for kind in type(layer).__mro__):
        kernel = "mamba_causal_conv1d_update"
    kernel = PLANNED_AS.get(kernel, kernel)
    return PUBLIC[kernel].planned_as or kernel if kernel in PUBLIC else None


def _kind(layer: nn.Module) -> str:
    """Return the name of a layer's class, without a subclass that torch's FSDP puts in its place."""
    return next((kind.__name__ for kind in type(layer).__mro__ if not kind.__module__.startswith("torch.")),
                type(layer).__name__)


def _plain(name: str, model: nn.Module) -> str:
    """Return the name of a layer without the names of wrappers."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    wrapped = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    return ".".join(parts[1:] if wrapped and parts[:1] == ["module"] else parts) or "(the model)"


def together(names: Iterable[str]) -> str:
    """Return the names of layers as one text, with numbers joined.

    ``layers.0.attn``, ``layers.1.attn``, ``layers.4.attn`` become ``layers.0-1,4.attn``. Names are grouped by
    the text around their first number.
    """
    kinds: dict[tuple[str, str], list[int]] = {}
    for name in names:
        number = re.search(r"(?<![^.])\d+(?![^.])", name)
        key = (name[:number.start()], name[number.end():]) if number else (name, "")
        kinds.setdefault(key, []).extend([int(number[0])] if number else [])
    return ", ".join(f"{before}{spans(numbers)}{after}" for (before, after), numbers in kinds.items())


def spans(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: 0, 1, 2, 4 become ``0-2,4``."""
    there = set(numbers)
    firsts = sorted(number for number in there if number - 1 not in there)
    lasts = sorted(number for number in there if number + 1 not in there)
    return ",".join(str(first) if first == last else f"{first}-{last}"
                    for first, last in zip(firsts, lasts, strict=True))
