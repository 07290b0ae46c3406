"""``patch("fla")``: flashlin's functions replace those of flash-linear-attention.

The patch reaches fla's layers and models, other packages that imported the functions, and models that are
already built. A function is recognised by name, not by release: a module of fla defines it under the name of
a function of flashlin. A function that flashlin does not have keeps its own code, and its kernels are
launched through ``flashlin.shield``. Classes are not replaced, since they call functions of their modules.
Only some of their methods are wrapped, because of caches, packed rows, and calls on a CPU.
"""
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashlin
import flashlin.mamba
from flashlin.compat.signatures import is_apply, signature_of
from flashlin.integrations.bindings import named_like
from flashlin.integrations.calling import by_name
from flashlin.integrations.model_fixes import mend, warning
from flashlin.integrations.on_a_cpu import explaining
from flashlin.integrations.patching import Patch
from flashlin.kernels.families import PUBLIC
from flashlin.shielding.autotune import innermost

# Names that fla's Mamba layers import from mamba_ssm and causal_conv1d. They are None if those are missing.
BORROWED = ("causal_conv1d_fn", "causal_conv1d_update", "mamba3_siso_combined", "mamba_chunk_scan_combined",
            "mamba_inner_fn", "mamba_split_conv1d_scan_combined", "selective_scan_fn",
            "selective_state_update")
# Names of mamba_ssm and causal_conv1d that flashlin has, and that fla does not have or uses for something else.
NOT_FLA = {*BORROWED, "mamba_causal_conv1d_update"} - {"causal_conv1d_update"}
# Models that accept cu_seqlens and mix the documents anyway, with the reason.
_UNTOLD = "its layers do not support them"
MIXES = {"LinearAttention": "it does not pass them on to its layers", "Mamba": _UNTOLD, "Mamba2": _UNTOLD,
         "Samba": _UNTOLD}
# Models in which a token sees later tokens in training, with the reason.
AHEAD = {"Mom": "in training its convolutions run from one memory, row or document into the next, so "
                "tokens see later tokens. In eval() they do not, and it can also be trained in eval()"}
MODEL_OF = {f"{name}{kind}": name for name in (*MIXES, *AHEAD) for kind in ("Model", "ForCausalLM")}
# Methods that transformers calls with a cache. Since 5.24 it names the argument CACHE, and fla names it KNOWN_AS.
INIT, FORWARD, PREPARE = "__init__", "forward", "prepare_inputs_for_generation"
CACHE, KNOWN_AS = "cache", "past_key_values"
BASES = {"transformers.generation.utils": "GenerationMixin", "transformers.modeling_utils": "PreTrainedModel"}
# Arguments that give the number of new tokens: of transformers, and of fla before 0.6.
NEW, COUNTED_BY = "next_sequence_length", "cache_position"
OTHER_HARDWARE = ("ascend", "tilelang", "gluon", "naive")  # parts of the names of modules that users do not call


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Return silu(x) * y, computed in float32, in the dtype of x."""
    return (F.silu(x.float()) * y.float()).to(x.dtype)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer with this weight and bias to silu(x) * y."""
    return F.linear(swiglu(x, y).to(weight.dtype), weight, bias)


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log of the sigmoid of x, divided by the temperature."""
    return F.logsigmoid(x) / temperature


# Functions that models also need on a machine without a GPU. On a GPU, fla's own functions run.
ON_CPU: dict[str, Callable[..., Any]] = {"swish": F.silu, "swiglu": swiglu, "swiglu_linear": swiglu_linear,
                                         "sigmoid": torch.sigmoid, "logsigmoid": logsigmoid}


OPTIONS = tuple(inspect.signature(flashlin.FusedCrossEntropyLoss).parameters)


class FlaPatch(Patch):
    """The patch of fla."""
    package, distribution = "fla", "flash-linear-attention"
    watched = ("fla",)

    def left(self) -> dict[str, str]:
        """Return the functions of fla that are not replaced, with the reason."""
        ops = sys.modules.get("fla.ops")
        theirs = [name for name in getattr(ops, "__all__", ())
                  if inspect.isroutine(vars(ops).get(name)) and name not in PUBLIC]
        why = "flashlin does not have it; its own code runs, with its kernels under flashlin.shield"
        return {**dict.fromkeys(theirs, why), **self.bindings.left}

    def reads(self, name: str) -> bool:
        """Return True for a module of fla, except for other hardware, other compilers and naive code."""
        return super().reads(name) and not any(part in name for part in OTHER_HARDWARE)

    def read(self, module: ModuleType) -> None:
        """Register a stand-in for each function, method and kernel of this module that needs one."""
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
        """Wrap the methods of a class that fail on a CPU, mix documents, or name the cache differently."""
        for name in (INIT, FORWARD, PREPARE):
            method = vars(kind).get(name)
            if not isinstance(method, FunctionType) or self.bindings.knows(method):
                continue
            stand_in: Callable[..., Any] = method
            does: list[str] = []
            if (name in (INIT, FORWARD) and is_layer(kind)) or (name == FORWARD and is_model(kind)):
                stand_in = explaining(stand_in)
                does.append("names functions without a CPU version")
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
        """Bind flashlin's functions in a module whose own import of them from another package failed.

        If none of these names is then None, a flag ``is_fast_path_available`` of the module is set to True.
        """
        names = vars(module)
        wanted = [name for name in BORROWED if name in names]
        for name in wanted:
            self.bindings.fill(module, name, getattr(flashlin.mamba, name), f"flashlin.mamba.{name}")
        if names.get("is_fast_path_available") is False and wanted and all(names[name] is not None
                                                                           for name in wanted):
            self.bindings.put(module, "is_fast_path_available", True, "its faster path")


def models() -> tuple[type, ...]:
    """Return the base classes of transformers' models whose modules are already imported."""
    return tuple(vars(sys.modules[home])[name] for home, name in BASES.items() if home in sys.modules)


def is_layer(kind: type) -> bool:
    """Return True for a layer class of fla."""
    return kind.__module__.startswith("fla.layers.") and issubclass(kind, torch.nn.Module)


def is_model(kind: type) -> bool:
    """Return True for a model class of fla without the head that computes logits.

    Such a model contains the blocks.
    """
    return (kind.__module__.startswith("fla.models.") and kind.__name__.endswith("Model")
            and issubclass(kind, models()))


def prepares_by(name: str) -> bool:
    """Return True if transformers itself prepares a model's inputs with an argument of this name."""
    return any(takes(getattr(one, PREPARE), name) for one in models() if hasattr(one, PREPARE))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def counting(prepare: Any) -> Any:
    """Return a model's ``prepare_inputs_for_generation``, wrapped to get the positions of the new tokens.

    Newer transformers no longer passes them. Without them, fla before 0.6 drops all tokens of a prompt but
    the last.
    """
    @functools.wraps(prepare)
    def call(self: Any, input_ids: Any = None, *args: Any, **given: Any) -> Any:
        cache = given.get(KNOWN_AS)
        if cache is not None and given.get(COUNTED_BY) is None and given.get("inputs_embeds") is None:
            given[COUNTED_BY] = torch.arange(cache.get_seq_length(), input_ids.shape[1],
                                             device=input_ids.device)
        return prepare(self, input_ids, *args, **given)
    return call


def taking_cache(method: Any) -> Any:
    """Return a model's method, wrapped to accept ``cache`` and pass it under fla's name for it.

    The wrapped method has ``cache`` in its signature, because ``generate`` looks for it there. Without the
    wrapper the method would accept ``cache`` in its ``**kwargs`` and ignore it.
    """
    @functools.wraps(method)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        if (cache := given.pop(CACHE, None)) is not None:
            given[KNOWN_AS] = cache
        result = method(self, *args, **given)
        # the result is passed to forward, which a program's own class may define without ``cache``
        if method.__name__ == PREPARE and CACHE in result and not takes(type(self).forward, CACHE):
            result[KNOWN_AS] = result.pop(CACHE)
        return result
    signature = inspect.signature(method)
    *others, last = signature.parameters.values()
    named = inspect.Parameter(CACHE, inspect.Parameter.KEYWORD_ONLY, default=None)
    more = [named, last] if last.kind is last.VAR_KEYWORD else [last, named]
    vars(call)["__signature__"] = signature.replace(parameters=[*others, *more])
    return call


def defined_in(value: Any, module: ModuleType) -> bool:
    """Return True if a value is a function that this module defines, or ``apply`` of its autograd function.

    The function may be inside a decorator of torch or fla.
    """
    if not callable(value):
        return False
    if is_apply(value):
        return bool(value.__self__.__module__ == module.__name__)
    try:
        inner = inspect.unwrap(value)
    except ValueError:  # the wrappers form a cycle
        return False
    return type(inner) is FunctionType and inner.__module__ == module.__name__


def plainly(apply: Any, name: str) -> Any:
    """Return ``apply``, which accepts no keywords, as a function with the parameters of its forward."""
    signature = signature_of(apply)

    def call(*args: Any, **given: Any) -> Any:
        return apply(*signature.bind(*args, **given).args)
    return named_like(call, apply, module=apply.__self__.__module__, name=name, signature=signature)


def launched(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the Triton kernels that a module defines and launches from the host.

    These are kernels with a tuner or heuristics around them, and kernels that no other kernel of the module
    calls.
    """
    kernels = {name: value for name, value in vars(module).items()
               if callable(getattr(value, "run", None)) and hasattr(value, "arg_names")}
    called = {used for kernel in kernels.values() for used in innermost(kernel).__code__.co_names}
    for name, kernel in kernels.items():
        if innermost(kernel).__module__ == module.__name__ and (
                hasattr(kernel.fn, "arg_names") or (name not in called and started(name, module))):
            yield name, kernel


def started(name: str, module: ModuleType) -> bool:
    """Return True if a function of the module, or a method of a class, names the kernel."""
    functions = [one for value in vars(module).values()
                 for one in (vars(value).values() if isinstance(value, type) else (value,))]
    return any(name in code.co_names for one in functions
               for code in [getattr(inspect.unwrap(getattr(one, "__func__", one)), "__code__", None)
                            if callable(getattr(one, "__func__", one)) else None]
               if code is not None and not hasattr(one, "arg_names"))


def on_cpu(original: Any, name: str, module: str) -> Any:
    """Return ``original``, wrapped to run plain torch for tensors on a CPU."""
    plain = ON_CPU[name]

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (plain if x.device.type == "cpu" else original)(x, *args, **kwargs)
    return named_like(call, original, module=module, name=name)


def any_device(loss: type) -> Any:
    """Return a loss's ``forward`` that also runs without a GPU."""
    original = vars(loss)["forward"]

    def forward(self: Any, input: Tensor, target: Tensor) -> Any:
        if vars(self).get("process_group") is not None:  # only fla supports a vocabulary split over GPUs
            return original(self, input, target)
        options = {name: vars(self)[name] for name in OPTIONS if name in vars(self)}  # older releases have fewer
        return flashlin.FusedCrossEntropyLoss(**options)(input, target)
    return named_like(forward, original, signature=inspect.signature(original))
