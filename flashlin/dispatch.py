"""plan(problem, target, policy): the only place that decides.

How it works. A family's recipe says which launches the problem would make on the target. The checks look at them in order; the first
one that objects answers with a Reason, which names remedies, best first. The first remedy that the policy allows and that can still
make the problem smaller rewrites it. Then everything is asked again, from the start, so that a remedy that runs into another limit is
caught and remedies combine. When nothing objects, the trail is the Plan; when no remedy is left, the Plan is a refusal, which is a
value too: only ops raise. Pure and cached; imports neither torch nor triton.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from flashlin.compat.target import Target
from flashlin.guards.limits import CHECKS
from flashlin.guards.problem import Launch, Plan, Problem, Reason
from flashlin.kernels.conv import recipe as conv
from flashlin.kernels.cross_entropy import recipe as cross_entropy
from flashlin.kernels.delta import recipe as delta
from flashlin.kernels.dplr import recipe as dplr
from flashlin.kernels.gla import recipe as gla
from flashlin.kernels.hgrn import recipe as hgrn
from flashlin.kernels.mamba import recipe as mamba
from flashlin.kernels.norm import recipe as norm
from flashlin.kernels.pointwise import recipe as pointwise
from flashlin.kernels.recurrent import recipe as recurrent
from flashlin.kernels.rotary import recipe as rotary
from flashlin.kernels.selective import recipe as selective
from flashlin.kernels.shield import recipe as shield
from flashlin.kernels.simple_gla import recipe as simple_gla
from flashlin.kernels.variants import VARIANTS
from flashlin.policy import Policy

RECIPES: dict[str, Callable[[Problem, Target], tuple[Launch, ...]]] = {
    "simple_gla": simple_gla.launches, "delta": delta.launches, "gla": gla.launches, "dplr": dplr.launches, "recurrent": recurrent.launches,
    "hgrn": hgrn.launches, "norm": norm.launches, "conv": conv.launches, "conv_update": conv.launches_of_update, "shield": shield.launches,
    "cross_entropy": cross_entropy.launches, "rotary": rotary.launches, selective.FAMILY: selective.launches,
    **dict.fromkeys((mamba.STATE_UPDATE, mamba.WINDOW), mamba.launches),
    **dict.fromkeys(pointwise.FAMILIES, pointwise.launches)}

# Every public op: its family, and the mode it asks for.
OPS: dict[str, tuple[str, str]] = {
    "chunk_simple_gla": ("simple_gla", "chunk"), "fused_recurrent_simple_gla": ("simple_gla", "fused_recurrent"),
    "fused_chunk_simple_gla": ("simple_gla", "chunk"), "parallel_simple_gla": ("simple_gla", "chunk"), "simple_gla": ("simple_gla", "auto"),
    "chunk_retention": ("simple_gla", "chunk"), "fused_recurrent_retention": ("simple_gla", "fused_recurrent"),
    "fused_chunk_retention": ("simple_gla", "chunk"), "parallel_retention": ("simple_gla", "chunk"), "retention": ("simple_gla", "auto"),
    "chunk_linear_attn": ("simple_gla", "chunk"), "fused_recurrent_linear_attn": ("simple_gla", "fused_recurrent"),
    "fused_chunk_linear_attn": ("simple_gla", "chunk"), "linear_attn": ("simple_gla", "auto"),
    "chunk_lightning_attn": ("simple_gla", "chunk"), "fused_recurrent_lightning_attn": ("simple_gla", "fused_recurrent"),
    "chunk_delta_rule": ("delta", "chunk"), "fused_recurrent_delta_rule": ("recurrent", "fused_recurrent"),
    "delta_rule": ("delta", "auto"),
    "chunk_gated_delta_rule": ("delta", "chunk"), "fused_recurrent_gated_delta_rule": ("recurrent", "fused_recurrent"),
    "gated_delta_rule": ("delta", "auto"),
    "mamba_chunk_scan_combined": ("simple_gla", "chunk"), "mamba_split_conv1d_scan_combined": ("simple_gla", "chunk"),
    "chunk_gla": ("gla", "chunk"), "fused_recurrent_gla": ("recurrent", "fused_recurrent"), "gla": ("gla", "auto"),
    "chunk_kda": ("dplr", "chunk"), "fused_recurrent_kda": ("recurrent", "fused_recurrent"), "kda": ("dplr", "auto"),
    "chunk_rwkv7": ("dplr", "chunk"), "rwkv7": ("dplr", "auto"), "chunk_dplr_delta_rule": ("dplr", "chunk"),
    "chunk_iplr_delta_rule": ("dplr", "chunk"),
    "chunk_rwkv6": ("gla", "chunk"), "fused_recurrent_rwkv6": ("recurrent", "fused_recurrent"), "rwkv6": ("gla", "auto"),
    "fused_recurrent_rwkv7": ("recurrent", "fused_recurrent"), "fused_mul_recurrent_rwkv7": ("recurrent", "fused_recurrent"),
    "fused_recurrent_dplr_delta_rule": ("recurrent", "fused_recurrent"), "fused_recurrent_iplr_delta_rule": ("recurrent", "fused_recurrent"),
    "chunk_hgrn": ("hgrn", ""), "fused_recurrent_hgrn": ("hgrn", ""),
    "rms_norm": ("norm", ""), "layer_norm": ("norm", ""), "l2norm": ("norm", ""), "group_norm": ("norm", ""),
    "rms_norm_gated": ("norm", ""), "layer_norm_gated": ("norm", ""), "rmsnorm_fn": ("norm", ""), "layernorm_fn": ("norm", ""),
    "causal_conv1d": ("conv", ""), "causal_conv1d_update": ("conv_update", ""), "token_shift": ("conv", ""),
    "causal_conv1d_fn": ("conv", ""), "mamba_causal_conv1d_update": (mamba.WINDOW, ""), "selective_state_update": (mamba.STATE_UPDATE, ""),
    "selective_scan_fn": (selective.FAMILY, ""),
    "fused_gdn_gate": (pointwise.GATE, ""), "fused_kda_gate": (pointwise.GATE, ""), "fused_addcmul_rwkv7": (pointwise.MIX, ""),
    "fused_k_rwkv7": (pointwise.KEY, ""), "gate_output_correction": (pointwise.CORRECTION, ""),
    "rotary_embedding": ("rotary", ""), "cross_entropy_loss": ("cross_entropy", ""), "fused_linear_cross_entropy_loss": ("cross_entropy", "")}


@lru_cache(maxsize=4096)
def plan(problem: Problem, target: Target, policy: Policy = Policy()) -> Plan:
    """What this call would do on that machine, and why. Never raises for an unsupported call: see ``Plan.refused``.

    Raises KeyError for a family nobody has a recipe for.
    """
    recipe = RECIPES[problem.family]
    asked, steps = problem, list[tuple[Reason, str]]()
    while True:
        launches = recipe(problem, target) if problem.path == "triton" else ()
        found = _first_reason(problem, launches, target, policy)
        if found is None:
            return Plan(asked, problem, target, launches, tuple(steps))
        remedy = _remedy(found, problem, target, policy)
        if remedy is None:
            return Plan(asked, problem, target, (), tuple(steps), (found,))
        name, problem = remedy
        if not steps or steps[-1] != (found, name):  # 8 warps allowed, then 4: one step to the reader where 4 are in use
            steps.append((found, name))


def _first_reason(problem: Problem, launches: tuple[Launch, ...], target: Target, policy: Policy) -> Reason | None:
    if problem.path == "torch":  # plain torch: none of the limits of a kernel applies
        return None
    for check in CHECKS:
        found = check(problem, launches, target, policy)
        if found is not None:
            return found
    return None


def _remedy(found: Reason, problem: Problem, target: Target, policy: Policy) -> tuple[str, Problem] | None:
    for name in found.remedies:
        variant = VARIANTS[name]
        if policy.policy == "strict" and found.forced and not variant.exact:
            continue
        if policy.path == "triton" and name == "torch_path":
            continue
        smaller = variant.rewrite(problem, target, found)
        if smaller is not None:
            return name, smaller
    return None


def inexact_steps(the_plan: Plan) -> tuple[tuple[Reason, str], ...]:
    """The steps a user should hear about once: forced, and not the same kernels on the same operands."""
    return tuple((reason, name) for reason, name in the_plan.steps if reason.forced and not VARIANTS[name].exact)
