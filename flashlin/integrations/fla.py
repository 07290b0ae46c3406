"""patch("fla"): flash-linear-attention's functions are flashlin's, for its layers and models, other packages
that imported them, and models built before.

Detected by name, not by release: a function that is defined in a module of fla under the name of one of
flashlin's. What flashlin has no function for keeps its own code, whose kernels are launched through
``flashlin.shield``. Classes are left alone, since they call functions of their modules, but for what their
models do with a cache or packed rows.
"""
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashlin
import flashlin.mamba
from flashlin.integrations.bindings import named_like
from flashlin.integrations.calling import by_name
from flashlin.integrations.model_fixes import mend, warning
from flashlin.integrations.on_a_cpu import explaining
from flashlin.integrations.patching import Patch
from flashlin.kernels.families import PUBLIC

# What fla's Mamba layers take of mamba_ssm and causal_conv1d, None where those are missing.
BORROWED = ("causal_conv1d_fn", "causal_conv1d_update", "mamba3_siso_combined", "mamba_chunk_scan_combined",
            "mamba_inner_fn", "mamba_split_conv1d_scan_combined", "selective_scan_fn",
            "selective_state_update")
# Names of flashlin's that mean something else in fla, or that fla has not: mamba_ssm's and causal_conv1d's.
NOT_FLA = {*BORROWED, "mamba_causal_conv1d_update"} - {"causal_conv1d_update"}
# Models that take cu_seqlens and mix the documents all the same, and why.
_UNTOLD = "its layers do not know them"
MIXES = {"LinearAttention": "it does not hand them on to its layers", "Mamba": _UNTOLD, "Mamba2": _UNTOLD,
         "Samba": _UNTOLD}
# Models whose tokens see later ones in training, and why.
AHEAD = {"Mom": "in training its convolutions run from one memory, row or document into the next, so that "
                "tokens see later ones. In eval() they do not; it can be trained so"}
MODEL_OF = {f"{name}{kind}": name for name in (*MIXES, *AHEAD) for kind in ("Model", "ForCausalLM")}
# What transformers calls of a model with its cache, which it names CACHE from 5.24 on, and fla KNOWN_AS.
INIT, FORWARD, PREPARE = "__init__", "forward", "prepare_inputs_for_generation"
CACHE, KNOWN_AS = "cache", "past_key_values"
BASES = {"transformers.generation.utils": "GenerationMixin", "transformers.modeling_utils": "PreTrainedModel"}
# How many tokens are new, as transformers says it, and as fla before 0.6 knows it.
NEW, COUNTED_BY = "next_sequence_length", "cache_position"
OTHER_HARDWARE = ("ascend", "tilelang", "gluon", "naive")  # parts of module names: not what a user calls


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return (F.silu(x.float()) * y.float()).to(x.dtype)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(swiglu(x, y).to(weight.dtype), weight, bias)


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    return F.logsigmoid(x) / temperature


# What models need besides on a machine without a GPU; elsewhere fla's own run.
ON_CPU: dict[str, Callable[..., Any]] = {"swish": F.silu, "swiglu": swiglu, "swiglu_linear": swiglu_linear,
                                         "sigmoid": torch.sigmoid, "logsigmoid": logsigmoid}


OPTIONS = tuple(inspect.signature(flashlin.FusedCrossEntropyLoss).parameters)


class FlaPatch(Patch):
    package, distribution = "fla", "flash-linear-attention"
    watched = ("fla",)

    def left(self) -> dict[str, str]:
        ops = sys.modules.get("fla.ops")
        theirs = [name for name in getattr(ops, "__all__", ())
                  if inspect.isroutine(vars(ops).get(name)) and name not in PUBLIC]
        why = "flashlin has none; its own code runs, its kernels through flashlin.shield"
        return {**dict.fromkeys(theirs, why), **self.bindings.left}

    def reads(self, name: str) -> bool:
        return super().reads(name) and not any(part in name for part in OTHER_HARDWARE)

    def read(self, module: ModuleType) -> None:
        activations = "activations" in module.__name__
        for name, value in list(vars(module).items()):
            if isinstance(value, type):
                if value.__module__ == module.__name__:
                    self._see_class(value)
            elif self.bindings.knows(value):
                continue
            elif activations and name in ON_CPU and callable(value):
                self.bindings.swap(value, on_cpu(value, name, module.__name__), f"torch's {name} on a CPU")
            elif defined_in(value, module) and name in PUBLIC and name not in NOT_FLA:
                original = plainly(value, name) if is_apply(value) else value
                self.bindings.swap(value, by_name(original, getattr(flashlin, name)), f"flashlin.{name}")
        mend(module, self.bindings)
        self._fill(module)
        for name, kernel in [one for one in launched(module) if not self.bindings.knows(one[1])]:
            try:
                guarded = flashlin.shield(kernel)
            except (TypeError, ValueError) as error:
                self.bindings.left[name] = f"not shielded: {error}"
            else:
                self.bindings.swap(kernel, guarded, f"shield {name}")

    def _see_class(self, kind: type) -> None:
        for name in (INIT, FORWARD, PREPARE):
            method = vars(kind).get(name)
            if not isinstance(method, FunctionType) or self.bindings.knows(method):
                continue
            stand_in: Callable[..., Any] = method
            does: list[str] = []
            if (name in (INIT, FORWARD) and is_layer(kind)) or (name == FORWARD and is_model(kind)):
                stand_in = explaining(stand_in)
                does.append("says what has no CPU version")
            if name == FORWARD and kind.__name__ == "FusedCrossEntropyLoss":
                stand_in = any_device(kind)
                does.append("runs on any device")
            if name == FORWARD and kind.__name__ in MODEL_OF:
                model = MODEL_OF[kind.__name__]
                stand_in = warning(stand_in, model, self.said, mixes=MIXES.get(model, ""),
                                   ahead=AHEAD.get(model, ""))
                does.append(f"warns of {'packed rows' if model in MIXES else 'training'}")
            if name == PREPARE and takes(method, COUNTED_BY) and not takes(method, NEW) and prepares_by(NEW):
                stand_in = counting(stand_in)
                does.append("counts the new tokens")
            if (issubclass(kind, models()) and takes(method, KNOWN_AS) and not takes(method, CACHE)
                    and prepares_by(CACHE)):
                stand_in = taking_cache(stand_in)
                does.append(f"takes {CACHE}=")
            if does:
                self.bindings.stand(kind, name, stand_in, f"its own {name}, which {' and '.join(does)}")

    def _fill(self, module: ModuleType) -> None:
        """Give a module that goes without other packages' functions flashlin's, and its faster way."""
        names = vars(module)
        wanted = [name for name in BORROWED if name in names]
        for name in wanted:
            self.bindings.fill(module, name, getattr(flashlin.mamba, name), f"flashlin.mamba.{name}")
        if names.get("is_fast_path_available") is False and wanted and all(names[name] is not None
                                                                           for name in wanted):
            self.bindings.put(module, "is_fast_path_available", True, "its faster way")


def models() -> tuple[type, ...]:
    """The classes of transformers below which models are."""
    return tuple(vars(sys.modules[home])[name] for home, name in BASES.items() if home in sys.modules)


def is_layer(kind: type) -> bool:
    return kind.__module__.startswith("fla.layers.") and issubclass(kind, torch.nn.Module)


def is_model(kind: type) -> bool:
    """Return True for a model class of fla without the head that computes logits; such a model holds the
    blocks."""
    return (kind.__module__.startswith("fla.models.") and kind.__name__.endswith("Model")
            and issubclass(kind, models()))


def prepares_by(name: str) -> bool:
    """Whether transformers itself prepares a model's inputs by an argument of this name."""
    return any(takes(getattr(one, PREPARE), name) for one in models() if hasattr(one, PREPARE))


def takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def counting(prepare: Any) -> Any:
    """A model's ``prepare``, told which tokens are new where transformers does not say it so: without, all
    of a prompt but its last token is dropped."""
    @functools.wraps(prepare)
    def call(self: Any, input_ids: Any = None, *args: Any, **given: Any) -> Any:
        cache = given.get(KNOWN_AS)
        if cache is not None and given.get(COUNTED_BY) is None and given.get("inputs_embeds") is None:
            given[COUNTED_BY] = torch.arange(cache.get_seq_length(), input_ids.shape[1],
                                             device=input_ids.device)
        return prepare(self, input_ids, *args, **given)
    return call


def taking_cache(method: Any) -> Any:
    """A model's ``method``, which swallows ``cache``, given it under the name that it knows. ``generate``
    looks for it in the signature."""
    prepares = method.__name__ == PREPARE

    @functools.wraps(method)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        cache = given.pop(CACHE, None)
        if cache is not None:
            given[KNOWN_AS] = cache
        result = method(self, *args, **given)
        # what is prepared is for forward, which may be one of a program's own class
        if prepares and CACHE in result and not takes(type(self).forward, CACHE):
            result[KNOWN_AS] = result.pop(CACHE)
        return result
    signature = inspect.signature(method)
    *others, last = signature.parameters.values()
    named = inspect.Parameter(CACHE, inspect.Parameter.KEYWORD_ONLY, default=None)
    more = [named, last] if last.kind is last.VAR_KEYWORD else [last, named]
    vars(call)["__signature__"] = signature.replace(parameters=[*others, *more])
    return call


def defined_in(value: Any, module: ModuleType) -> bool:
    """Whether it is a function of this module, perhaps inside a decorator of torch's or fla's, or ``apply``
    of an autograd function of this module."""
    if not callable(value):
        return False
    if is_apply(value):
        return bool(value.__self__.__module__ == module.__name__)
    try:
        inner = inspect.unwrap(value)
    except ValueError:  # a circle
        return False
    return type(inner) is FunctionType and inner.__module__ == module.__name__


def is_apply(value: Any) -> bool:
    """Whether it is ``apply`` of an autograd function: older releases bind that as the public function."""
    kind = getattr(value, "__self__", None)
    return (isinstance(value, MethodType) and isinstance(kind, type)
            and issubclass(kind, torch.autograd.Function) and value.__name__ == "apply")


def plainly(apply: Any, name: str) -> Any:
    """``apply``, which takes ``*args`` and no keywords, as a function with the parameters of its forward."""
    forward = inspect.signature(apply.__self__.forward)
    _, *parameters = forward.parameters.values()
    signature = forward.replace(parameters=parameters)

    def call(*args: Any, **given: Any) -> Any:
        return apply(*signature.bind(*args, **given).args)
    return named_like(call, apply, module=apply.__self__.__module__, name=name, signature=signature)


def launched(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The Triton kernels that a module defines and the host starts: with a tuner or heuristics around them,
    or named by none of its other kernels (those that are, are parts of them)."""
    kernels = {name: value for name, value in vars(module).items()
               if callable(getattr(value, "run", None)) and hasattr(value, "arg_names")}
    called = {used for kernel in kernels.values() for used in innermost(kernel).__code__.co_names}
    for name, kernel in kernels.items():
        if innermost(kernel).__module__ == module.__name__ and (
                hasattr(kernel.fn, "arg_names") or (name not in called and started(name, module))):
            yield name, kernel


def innermost(kernel: Any) -> Any:
    """The Python function of a kernel."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def started(name: str, module: ModuleType) -> bool:
    """Whether a function of the module, or a method of a class, names the kernel."""
    functions = [one for value in vars(module).values()
                 for one in (vars(value).values() if isinstance(value, type) else (value,))]
    return any(name in code.co_names for one in functions
               for code in [getattr(inspect.unwrap(getattr(one, "__func__", one)), "__code__", None)
                            if callable(getattr(one, "__func__", one)) else None]
               if code is not None and not hasattr(one, "arg_names"))


def on_cpu(original: Any, name: str, module: str) -> Any:
    """``original``, and its plain torch for tensors on a CPU."""
    plain = ON_CPU[name]

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (plain if x.device.type == "cpu" else original)(x, *args, **kwargs)
    return named_like(call, original, module=module, name=name)


def any_device(loss: type) -> Any:
    """A loss's ``forward`` that does not insist on a GPU."""
    original = vars(loss)["forward"]

    def forward(self: Any, input: Tensor, target: Tensor) -> Any:
        if vars(self).get("process_group") is not None:  # a vocabulary split over GPUs is theirs alone
            return original(self, input, target)
        options = {name: vars(self)[name] for name in OPTIONS if name in vars(self)}  # older ones have fewer
        return flashlin.FusedCrossEntropyLoss(**options)(input, target)
    return named_like(forward, original, signature=inspect.signature(original))
