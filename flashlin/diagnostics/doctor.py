"""doctor: what works on this machine, what is worked around, what does not work, and the command that repairs
it. explain: one call's plan.

What doctor says is what happens: its lines are dispatch's own plans. Works with torch and Triton broken or
missing. How it is made: ``machine`` asks this machine, ``typical_plans`` plans typical calls,
``self_test`` really runs some, ``report`` shows it.
"""
from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import flashlin
from flashlin import dispatch
from flashlin.compat import releases
from flashlin.compat.known_issues import issues_here
from flashlin.compat.suggestions import suggests_keywords
from flashlin.compat.target import Target, parse
from flashlin.diagnostics import calls, self_test, typical_plans
from flashlin.diagnostics.advice import advise
from flashlin.diagnostics.checks import CHECKS, check_policy, checkup, unchecked
from flashlin.diagnostics.machine import Machine, attempt, examine
from flashlin.diagnostics.packages import Section, section
from flashlin.diagnostics.report import Device, OpPlan, Ran, Report
from flashlin.dispatch import OPS
from flashlin.guards.plan_types import Plan, Problem, advice, dtype_name
from flashlin.kernels.families import PUBLIC, family_of
from flashlin.kernels.remedies import REMEDIES
from flashlin.policy import Policy
from flashlin.policy import current as in_force

if TYPE_CHECKING:
    import torch
    from torch import nn


@suggests_keywords
def doctor(
    model: nn.Module | None = None,
    *,
    run: bool = False,
    target: str | Target | None = None,
    op: str | None = None,
) -> Report:
    """Examine this machine and say what every op does on it, and what the packages beside flashlin do, as far
    as they are installed. Offline and read-only, unless ``run``.

    Args:
        model: also say of each of its layers which functions it calls, whose they are, and what flashlin
            plans for them on the device of its weights. Nothing of it is run or changed.
        run: also run small cases of every op, forward and backward, against the float64 reference, in a child
            process.
        target: plan for another machine instead: ``"H100,triton=3.2.0"``, ``"t4,torch=2.6"`` or a ``Target``.
            What is installed there beside torch and Triton is not known.
        op: only this op, and no packages.

    Raises ValueError for an unknown op or target, for ``run`` with a target, or for a model that is none.
    """
    return diagnose(model, run, target, op)


def diagnose(model: Any, run: bool, target: str | Target | None, op: str | None,
             import_all: bool = False) -> Report:
    """``doctor``; import_all: also try, in child processes, whether packages that are not loaded can be
    imported, as the command line does."""
    # imported late: only a caller with a model is sure to have torch
    layers = None if model is None else import_module("flashlin.diagnostics.layers")
    if layers:
        layers.check(model)
    op = op and calls.known(op)
    ops = tuple(OPS) if op is None else (op,)
    if target is not None and run:
        raise ValueError(f"run: got True with target {target}, need no target: only this machine can run "
                         "anything")
    named = None if target is None else _named(target)
    machine = examine() if named is None else described(named)
    checks = checkup(machine, CHECKS if target is None else (check_policy,))
    # a machine that cannot be asked is planned for as if it had no GPU
    devices = {", ".join(names): card for card, names in machine.names.items()} or {
        "this machine": Target(machine.triton, "", "", "cpu", (0, 0), "cpu", 0, 1)}
    kernels = machine.on_gpu and not machine.triton_error
    stopped = {name: machine.stops_everything
               or ("" if target is not None else attempt(_load, name, kernels)[1]) for name in ops}
    rows, issues, ran = [], [], list[Ran]()
    for where, card in devices.items():
        planned = {name: typical_plans.typical(name, card, machine.policy) for name in ops}
        rows += [typical_plans.summary(name, where, planned[name]) if not stopped[name] else
                 OpPlan(op=name, where=where, path="cannot run", way="cannot run", verdict="problem",
                        because=stopped[name], remedy="see the checks", evidence="no record") for name in ops]
        plans = [plan for of_op in planned.values() for plan in of_op.values()]
        issues += [typical_plans.issue_row(issue, where, plans) for issue in issues_here(card)]
        checks += typical_plans.unknown(where, card)
        if run and not machine.stops_everything:
            ran += self_test.watch(where.split(", ")[0], op, machine.policy)
    shown = [Device(where=where, **{name: getattr(card, name) for name in Device.model_fields if name != "where"})
             for where, card in devices.items()]
    beside, error = attempt(section, machine, import_all) if target is None and op is None else (None, "")
    if error:
        checks.append(unchecked("packages", error))
    found, imports = beside or (Section(), {})
    known = found._asdict()
    if layers:
        known["layers"] = tuple(layers.report(model, named, machine.policy, imports))
    advice, error = attempt(advise, machine, ops, checks)
    if error:
        checks.append(unchecked("advice", error))
    return Report(version=flashlin.__version__, devices=tuple(shown), checks=tuple(checks), advice=advice,
                  plans=_merged(rows), issues=tuple(issues), ran=tuple(ran), **known)


def described(target: Target) -> Machine:
    """A machine that is planned for without being asked."""
    policy, error = attempt(in_force)
    comes = next((pair.torch for pair in releases.pairs() if pair.triton == target.triton), "")
    torch = target.torch or comes
    cuda = None if target.other_build else releases.wheels(torch).cuda
    wheel = SimpleNamespace(__version__=torch, version=SimpleNamespace(cuda=cuda, hip=None))
    return Machine(wheel, "", target.triton, "" if target.triton else "not installed", {"named": target}, {},
                   policy or Policy(), error)


def _named(target: str | Target) -> Target:
    if not isinstance(target, (str, Target)):
        raise TypeError(f"target: got {target!r}, need a text such as 'H100,triton=3.2.0'")
    return parse(target) if isinstance(target, str) else target


def _load(op: str, kernels: bool) -> None:
    """Import the op and, since it does so as late as it can, the kernels of its family."""
    getattr(flashlin, op)
    if not kernels:
        return
    folder = family_of(op).launches.__module__.rpartition(".")[0]
    for module in iter_modules(import_module(folder).__path__):
        if module.name in ("forward", "backward"):
            import_module(f"{folder}.{module.name}")


def _merged(rows: list[OpPlan]) -> tuple[OpPlan, ...]:
    """What holds for several devices alike is one line; the lines of an op stand together."""
    where: dict[OpPlan, list[str]] = {}
    for row in sorted(rows, key=lambda row: list(OPS).index(row.op)):
        where.setdefault(row.model_copy(update={"where": ""}), []).append(row.where)
    return tuple(row.model_copy(update={"where": ", ".join(devices)}) for row, devices in where.items())


@suggests_keywords
def plan(
    problem: Problem | str,
    target: str | Target | None = None,
    policy: Policy | None = None,
    *,
    B: int = 1,
    T: int | None = None,
    H: int | None = None,
    K: int | None = None,
    V: int | None = None,
    N: int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    varlen: bool = False,
    needs_grad: bool = True,
    mode: str | None = None,
    ranks: int = 1,
) -> Plan:
    """How one call would run, as a value: ``dispatch.plan`` of a Problem, or of an op with the words of
    ``explain``.

    Args:
        problem: a Problem, which says all about the call, or an op; then the rest is as in ``explain``.
        target: a machine as for ``doctor``; None is this one (its first GPU, or its CPU).
        policy: None is the one in force for an op, and the defaults for a Problem.

    Raises ValueError as ``explain`` does, and TypeError for a Problem with sizes beside it, RuntimeError
    where this machine cannot be asked. A call that is refused is a Plan, too: ``Plan.refused``.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy: got {policy!r}, need a Policy, such as Policy(path='torch')")
    if isinstance(problem, Problem):
        beside = [name for name, given, usual in (
            ("B", B, 1), ("T", T, None), ("H", H, None), ("K", K, None), ("V", V, None), ("N", N, None),
            ("dtype", dtype, "bfloat16"), ("varlen", varlen, False), ("needs_grad", needs_grad, True),
            ("mode", mode, None), ("ranks", ranks, 1)) if given != usual]
        if beside:
            raise TypeError(f"{beside[0]}: got it beside a Problem, which has its own; need the name of an "
                            "op")
        return dispatch.plan(problem, _machine_of(target), Policy() if policy is None else policy)
    op = calls.known(problem)
    own = OPS[op][1]
    modes = ("auto", "chunk", "fused_recurrent") if own == "auto" else (own,)
    if mode is not None and mode not in modes:
        raise ValueError(f"mode: got {mode!r}, need {' or '.join(map(repr, modes))} for {op}")
    asked = calls.problem_of(op, {"B": B, "T": T, "H": H, "K": K, "V": V, "N": N}, dtype_name(dtype),
                             mode or own, needs_grad=bool(needs_grad), varlen=varlen)
    if not calls.is_count(ranks) or (ranks != 1 and not PUBLIC[op].takes_ranks):
        raise ValueError(f"ranks: got {ranks!r} for {op}, need 1, or more for an op that takes a process_group")
    if ranks != 1:
        asked = asked._replace(ranks=ranks)
    return dispatch.plan(asked, _machine_of(target), in_force() if policy is None else policy)


@suggests_keywords
def explain(
    op: str,
    *,
    target: str | Target | None = None,
    B: int = 1,
    T: int | None = None,
    H: int | None = None,
    K: int | None = None,
    V: int | None = None,
    N: int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    varlen: bool = False,
    needs_grad: bool = True,
    mode: str | None = None,
    ranks: int = 1,
    policy: Policy | None = None,
) -> str:
    """How one call would run, and why: the decision trail of dispatch, then in words.

    Args:
        op: a public op, such as ``chunk_simple_gla``, or a short name, such as ``gdn`` or ``mamba2`` (the
            table is in ``kernels/families.py``). The text then says which op the name stands for.
        target: a machine as for ``doctor``; None is this one (its first GPU, or its CPU).
        B, T, H, K, V: the sizes, as in the ops; None is what the op's typical calls have (2048 tokens, one
            where it only decodes; 16 heads of 128 for most). A norm or a cross entropy has B * T * H rows of
            K (a norm of groups B * T rows of H groups of K), a convolution K channels and V taps, HGRN K
            channels, a selective scan V channels of K states in H groups, a state update H heads of V with K
            states, an elementwise op B * T rows of H heads of K, a rotary embedding V pairs, K // 2 if None.
        N: number of packed sequences, B if None, with varlen: then their B * T tokens are one row.
        dtype: a torch.dtype, its name or a short one, such as ``bf16``. mode: of an op that has the choice
            (``simple_gla``): ``auto``, ``chunk`` or ``fused_recurrent``.
        ranks: how many share each sequence, of which each has T tokens (``process_group``).
        policy: None is the one in force.

    Raises ValueError for an unknown op, dtype, mode or target, or sizes that the op cannot have, RuntimeError
    where this machine cannot be asked.
    """
    policy = in_force() if policy is None else policy
    made = plan(op, target, policy, B=B, T=T, H=H, K=K, V=V, N=N, dtype=dtype, varlen=varlen,
                needs_grad=needs_grad, mode=mode, ranks=ranks)
    given, op = op, made.asked.op
    axes = ", ".join(f"{axis} {what}" for axis, what in family_of(op).axes.items())
    taken = [] if given in PUBLIC else [f"{given} stands for {op}.", ""]
    lines = [*taken, str(made), "", *([f"Sizes: {axes}."] if axes else [])]
    ignored = ", ".join(sorted(policy.ignore)) or "nothing"
    lines.append(f"Policy {policy.policy}, path {policy.path}, ignoring {ignored}.")
    for reason, remedy in made.steps:
        how = ("the usual way" if not reason.forced else "exact" if REMEDIES[remedy].exact
               else "other arithmetic: equal up to rounding, another speed")
        lines.append(f"{reason.code}: {'needs' if reason.forced else 'takes'} {reason.need}; so it "
                     f"{REMEDIES[remedy].means} ({how}).")
    if made.refused:
        lines.append(f"It cannot run. {advice(made)}.")
    lines += [f"It may be wrong: {issue.id}, whose check is switched off."
              for issue in typical_plans.unguarded(made)]
    with_gradients = PUBLIC[op].in_place
    if needs_grad and with_gradients:
        lines.append(f"That is a call without gradients; one with them is {with_gradients}, and copies the "
                     "state.")
    if not made.refused:
        starts = (f": {len(made.launches)} launches{', backward included' if made.asked.needs_grad else ''}"
                  if made.launches else "")
        lines.append(
            f"It runs on the path {typical_plans.way(made)}{starts}. Evidence: {typical_plans.evidence([made])}.")
    if typical_plans.cost(made):
        lines.append(f"Its cost: {typical_plans.cost(made)}.")
    return "\n".join(lines)


def _machine_of(target: str | Target | None) -> Target:
    if target is not None:
        return _named(target)
    machine = examine()
    if not machine.targets:
        why = machine.torch_error or "; ".join(f"{name}: {error}" for name, error in machine.lost.items())
        raise RuntimeError(f"target: this machine cannot be asked ({why}); name one, for example "
                           "H100,triton=3.2.0")
    return next(iter(machine.targets.values()))
