"""flashlin as a backend of flash-linear-attention 0.6 and newer, by fla's own hook ``fla.backends.register``.

It replaces no function of fla. It covers only the few public functions for which fla supports backends;
``flashlin.patch("fla")`` covers all of them.

    import flashlin.backends
    flashlin.backends.register()        # fla now tries flashlin first; FLA_FLASHLIN=0 switches it off
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import flashlin
from flashlin import dispatch, policy
from flashlin.compat.target import probe
from flashlin.guards import family
from flashlin.guards.family import Sizes
from flashlin.guards.plan_types import Plan
from flashlin.integrations.calling import REFUSED, by_name, unserved
from flashlin.kernels.families import PUBLIC, family_of

__all__ = ["register", "unregister"]
VARIABLE = "FLA_FLASHLIN"
# In fla, a backend is registered for the name of an operation (OPERATIONS) or for one function (FUNCTIONS).
OPERATIONS = {"gated_delta_rule": ("chunk_gated_delta_rule",),
              "generalized_delta_rule.dplr": ("chunk_dplr_delta_rule",)}
FUNCTIONS = ("chunk_kda", "fused_recurrent_simple_gla", "fused_chunk_simple_gla", "parallel_simple_gla")
_registered = False


def register() -> tuple[str, ...]:
    """Register flashlin as a backend of fla. A second call has no effect.

    A call runs on flashlin if flashlin supports every argument, and if its plan launches kernels. For tensors
    that are not on a GPU, a plan of plain torch is accepted as well. Otherwise fla runs the call itself, and
    its log contains the reason.

    Returns the names of the covered functions. Raises ImportError if fla is not installed or has no backends
    (before 0.6).
    """
    global _registered
    try:
        import fla.ops
        from fla import backends
        offer, base = backends.register, backends.BaseBackend
    except (ImportError, AttributeError) as error:
        raise ImportError(f"fla.backends: {error}; need flash-linear-attention 0.6 or newer; with older ones "
                          'flashlin.patch("fla")') from error
    if not _registered:
        for operation, names in OPERATIONS.items():
            offer(operation, env_var=VARIABLE)(backend_of(base, {name: getattr(fla.ops, name, None)
                                                                 for name in names}))
        for name in FUNCTIONS:
            original = getattr(fla.ops, name)
            offer(original, backend=backend_of(base, {}), env_var=VARIABLE, verifier=verifier(original))(
                by_name(inspect.unwrap(original), getattr(flashlin, name)))
    _registered = True
    return (*(name for names in OPERATIONS.values() for name in names), *FUNCTIONS)


def unregister() -> None:
    """Make fla ignore flashlin's backends again. It has no effect if they were not registered."""
    global _registered
    _registered = False


def backend_of(base: type, originals: dict[str, Any]) -> type:
    """Return a subclass of fla's backend class with flashlin's version of each function.

    For each function it also has a verifier, with which fla asks whether the backend accepts a call.

    originals: fla's functions by name.
    """
    members: dict[str, Any] = {"backend_type": "flashlin", "priority": -1,
                               "is_available": classmethod(lambda cls: _registered)}
    for name, original in originals.items():
        members[name] = staticmethod(by_name(inspect.unwrap(original), getattr(flashlin, name)))
        members[f"{name}_verifier"] = staticmethod(verifier(original))
    return type("FlashlinBackend", (base,), members)


def verifier(original: Any) -> Callable[..., tuple[bool, str | None]]:
    """Return a function that checks if flashlin runs a call of ``original``.

    It returns (True, None), or (False, reason).
    """
    signature, name = inspect.signature(inspect.unwrap(original)), original.__name__
    defaults = {key: one.default for key, one in signature.parameters.items()}
    served = frozenset(inspect.signature(getattr(flashlin, name)).parameters) - REFUSED

    def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        given = signature.bind(*args, **kwargs).arguments
        given.pop("kwargs", None)  # fla ignores unknown keywords, and by_name does not pass them on
        missing = unserved(given, served, defaults)
        if missing:
            return False, f"flashlin's {name} has no {missing}"
        plan = plan_of(name, given)
        if plan.refused or (plan.path == "torch" and given["q"].is_cuda):
            return False, f"flashlin's plan: {'; '.join(str(reason) for reason, _ in plan.steps) or plan}"
        return True, None
    return verify


def plan_of(name: str, given: dict[str, Any]) -> Plan:
    """Return the plan of a call, derived from its tensors q, k, v and cu_seqlens."""
    q, v, bounds = given["q"], given["v"], given.get("cu_seqlens")
    (B, T, _, K), (H, V) = q.shape, v.shape[2:]
    sizes = Sizes(B, T, H, K, V, B if bounds is None else len(bounds) - 1, bounds is not None)
    gradients = torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in given.values())
    op = PUBLIC[name].planned_as or name
    problem = family.problem_of(family_of(op), PUBLIC[op], sizes, str(q.dtype).removeprefix("torch."),
                                gradients, PUBLIC[op].mode)
    return dispatch.plan(problem, probe(q.device), policy.current())
