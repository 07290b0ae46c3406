"""The functions ``doctor``, ``plan`` and ``explain``.

``doctor`` reports what works on this machine, what is worked around, what does not work, and the command that
repairs it. ``explain`` reports the plan of one call. Both use the plans of dispatch, so they describe what
really runs. Both work if torch or Triton is broken or missing.

The work is divided as follows: ``machine`` examines this machine, ``typical_plans`` plans typical calls,
``self_test`` runs cases, and ``report`` formats the result.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import flashlin
from flashlin import dispatch
from flashlin.compat import releases
from flashlin.compat.known_issues import issues_here
from flashlin.compat.subprocesses import Process
from flashlin.compat.suggestions import suggests_keywords
from flashlin.compat.target import Target, parse
from flashlin.diagnostics import calls, self_test, typical_plans
from flashlin.diagnostics.advice import advise
from flashlin.diagnostics.checks import CHECKS, check_policy, checkup, unchecked
from flashlin.diagnostics.machine import Machine, attempt, examine
from flashlin.diagnostics.packages import Section, section
from flashlin.diagnostics.report import Device, OpPlan, Ran, Report
from flashlin.dispatch import OPS
from flashlin.guards.plan_types import Plan, Problem, Reason, advice, dtype_name
from flashlin.kernels.families import PUBLIC, family_of
from flashlin.kernels.remedies import REMEDIES
from flashlin.policy import Policy
from flashlin.policy import current as in_force

if TYPE_CHECKING:
    import torch
    from torch import nn


@suggests_keywords
def doctor(model: nn.Module | None = None, batch: Any = None, *, run: bool = False,
           target: str | Target | None = None, op: str | None = None) -> Report:
    """Examine this machine and report what every op does on it.

    The report also covers the installed packages that flashlin can patch. Offline and read-only, unless
    ``run``.

    Args:
        model: also report, for each of its layers, which functions the layer calls, which package they are
            from, and what flashlin plans for them on the device of the weights. Without a batch, the model is
            neither run nor changed.
        batch: arguments of the model: a mapping of keywords, a tuple or list, or one argument. doctor then runs
            one forward and one backward in debug mode. It reports the first layer, op, tensor, token and head
            with a value that is not finite, and inputs with which the state of an op grows. The gradients
            and torch's random state are restored. docs/guides/diagnose.md explains the cost.
        run: also run small cases of every op, forward and backward, in a child process, and compare them with
            the float64 reference.
        target: plan for another machine instead: ``"H100,triton=3.2.0"``, ``"t4,torch=2.6"`` or a ``Target``.
            Only its GPU, torch and Triton are known, so other packages are not reported.
        op: report only this op, and no packages.

    Raises ValueError for an unknown op or target, for ``run`` with a target, for a batch without a model, or
    if ``model`` is not an nn.Module.
    """
    return diagnose(model, run, target, op, batch=batch)


def diagnose(model: Any, run: bool, target: str | Target | None, op: str | None,
             children: Mapping[str, Process] | None = None, batch: Any = None) -> Report:
    """Return the report of ``doctor``, with one more option.

    children: processes that import the packages that are not loaded (``importing.begun``). The command line
        starts them. Without them, packages are imported only if a model needs to know.
    """
    # imported late: torch is certain to be installed only if there is a model
    layers = None if model is None else import_module("flashlin.diagnostics.layers")
    if layers:
        layers.check(model)
    elif batch is not None:
        raise ValueError(f"batch: got {type(batch).__name__} without a model, need doctor(model, batch)")
    op = op and calls.known(op)
    ops = tuple(OPS) if op is None else (op,)
    if target is not None and run:
        raise ValueError(f"run: got True with target {target}, need no target: only this machine can run "
                         "anything")
    named = None if target is None else _named(target)
    machine = examine() if named is None else described(named)
    checks = checkup(machine, CHECKS if target is None else (check_policy,))
    # a machine whose devices cannot be read is planned as if it had no GPU
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
    apart = target is None and op is None
    beside, error = attempt(section, machine, children is not None, children) if apart else (None, "")
    if error:
        checks.append(unchecked("packages", error))
    found, imports = beside or (Section(), {})
    known = found._asdict()
    if layers:
        known["layers"] = tuple(layers.report(model, named, machine.policy, imports))
    if batch is not None:
        checks += import_module("flashlin.diagnostics.one_step").one_step(model, batch)
    advice, error = attempt(advise, machine, ops, [*checks, *found.packages])
    if error:
        checks.append(unchecked("advice", error))
    return Report(version=flashlin.__version__, devices=tuple(shown), checks=tuple(checks), advice=advice,
                  plans=_merged(rows), issues=tuple(issues), ran=tuple(ran), **known)


def described(target: Target) -> Machine:
    """Return the facts of a target as a Machine, without examining anything."""
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
    """Import an op and the kernels of its family, which the op itself imports as late as possible."""
    getattr(flashlin, op)
    if not kernels:
        return
    folder = family_of(op).launches.__module__.rpartition(".")[0]
    for module in iter_modules(import_module(folder).__path__):
        if module.name in ("forward", "backward"):
            import_module(f"{folder}.{module.name}")


def _merged(rows: list[OpPlan]) -> tuple[OpPlan, ...]:
    """Merge rows that are equal on several devices into one, and sort the rows by op."""
    where: dict[OpPlan, list[str]] = {}
    for row in sorted(rows, key=lambda row: list(OPS).index(row.op)):
        where.setdefault(row.model_copy(update={"where": ""}), []).append(row.where)
    return tuple(row.model_copy(update={"where": ", ".join(devices)}) for row, devices in where.items())


@suggests_keywords
def plan(problem: Problem | str, target: str | Target | None = None, policy: Policy | None = None, *,
         B: int = 1, T: int | None = None, H: int | None = None, K: int | None = None, V: int | None = None,
         N: int | None = None, dtype: str | torch.dtype = "bfloat16", varlen: bool = False,
         needs_grad: bool = True, mode: str | None = None, ranks: int = 1) -> Plan:
    """Return the plan of one call, of a Problem or of an op with the keywords of ``explain``.

    Args:
        problem: a Problem, which describes the whole call; or an op, described by the other arguments.
        target: a machine as for ``doctor``; None is this machine (its first GPU, or its CPU).
        policy: None is the policy in force for an op, and the default policy for a Problem.
        B: batch size. This and all further arguments are described in ``explain``.
        T: tokens.
        H: heads.
        K: size of a key.
        V: size of a value.
        N: packed sequences.
        dtype: dtype of the inputs.
        varlen: True for packed sequences.
        needs_grad: True for a call with gradients.
        mode: ``auto``, ``chunk`` or ``fused_recurrent``.
        ranks: ranks that share each sequence.

    A refused call also has a Plan, with its reasons in ``Plan.refused``. Raises ValueError as ``explain``
    does, TypeError for a Problem together with sizes, and RuntimeError if this machine's devices cannot be
    read.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy: got {policy!r}, need a Policy, such as Policy(path='torch')")
    if isinstance(problem, Problem):
        beside = [name for name, given, usual in (
            ("B", B, 1), ("T", T, None), ("H", H, None), ("K", K, None), ("V", V, None), ("N", N, None),
            ("dtype", dtype, "bfloat16"), ("varlen", varlen, False), ("needs_grad", needs_grad, True),
            ("mode", mode, None), ("ranks", ranks, 1)) if given != usual]
        if beside:
            raise TypeError(f"{beside[0]}: got it together with a Problem, which has its own; need the name "
                            "of an op")
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
def explain(op: str, *, target: str | Target | None = None, B: int = 1, T: int | None = None,
            H: int | None = None, K: int | None = None, V: int | None = None, N: int | None = None,
            dtype: str | torch.dtype = "bfloat16", varlen: bool = False, needs_grad: bool = True,
            mode: str | None = None, ranks: int = 1, policy: Policy | None = None) -> str:
    """Return a text that says how one call would run, and why.

    The text has the decision trail of dispatch, and then the same in words. A size that is None is the size
    of the op's typical calls. The sizes mean what they mean in the op:

    - A norm or a cross entropy has B * T * H rows of K. A norm of groups has B * T rows of H groups of K.
    - A convolution has K channels and V taps. HGRN has K channels.
    - A selective scan has V channels of K states in H groups.
    - A state update has H heads of V with K states.
    - An elementwise op has B * T rows of H heads of K. A rotary embedding has V pairs; None means K // 2.

    Args:
        op: a public op, such as ``chunk_simple_gla``, or a short name, such as ``gdn`` or ``mamba2``. The
            table of short names is in ``kernels/families.py``. For a short name, the text names the op.
        target: a machine as for ``doctor``; None is this machine (its first GPU, or its CPU).
        B: batch size.
        T: tokens; typically 2048, or 1 for an op that only decodes.
        H: heads; typically 16.
        K: size of a key; typically 128.
        V: size of a value; typically 128.
        N: number of packed sequences, with ``varlen``; None means B. Their B * T tokens form one row.
        dtype: a torch.dtype, its name, or a short name such as ``bf16``.
        varlen: True for packed sequences.
        needs_grad: True for a call with gradients.
        mode: ``auto``, ``chunk`` or ``fused_recurrent``, for an op that has a choice (``simple_gla``).
        ranks: number of ranks that share each sequence, with T tokens on each rank (``process_group``).
        policy: None is the policy in force.

    Raises ValueError for an unknown op, dtype, mode or target, and for sizes that the op does not support.
    Raises RuntimeError if this machine's devices cannot be read.
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
               else "other arithmetic: equal up to rounding, with a different speed")
        lines.append(f"{reason.code}: {'needs' if reason.forced else 'takes'} {reason.need}; so it "
                     f"{REMEDIES[remedy].means} ({how}).")
    if made.refused:
        lines.append(f"It cannot run. {advice(made)}.")
    lines += [f"It may be wrong: {issue.id}, whose check is switched off."
              for issue in typical_plans.unguarded(made)]
    with_gradients = PUBLIC[op].in_place
    if needs_grad and with_gradients:
        lines.append(f"This is a call without gradients. With gradients, {with_gradients} runs instead and "
                     "copies the state.")
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
        raise RuntimeError(f"target: this machine's devices cannot be read ({why}); name a target, for example "
                           "H100,triton=3.2.0")
    return next(iter(machine.targets.values()))


def explain_as_json(op: str, *, needs_grad: bool = True, **given: Any) -> str:
    """Return the facts of ``explain``, which has the same arguments, as JSON."""
    policy = in_force()
    made = plan(op, policy=policy, needs_grad=needs_grad, **given)
    name = made.asked.op
    return json.dumps({
        "op": name, "asked as": op, "call": str(made.asked), "sizes": dict(family_of(name).axes),
        "target": str(made.target),
        "policy": {"policy": policy.policy, "path": policy.path, "ignore": sorted(policy.ignore)},
        "path": made.path, "way": typical_plans.way(made), "verdict": typical_plans.judged(made),
        "cost": typical_plans.cost(made), "evidence": "" if made.refused else typical_plans.evidence([made]),
        "steps": [{**_told(reason), "forced": reason.forced, "remedy": remedy,
                   "effect": REMEDIES[remedy].means, "exact": REMEDIES[remedy].exact}
                  for reason, remedy in made.steps],
        "refused": [_told(reason) for reason in made.refused], "advice": advice(made) if made.refused else "",
        "may be wrong": [issue.id for issue in typical_plans.unguarded(made)],
        "with gradients": PUBLIC[name].in_place if needs_grad else "",
        "launches": [{**launch._asdict(), "tile": dict(launch.tile), "traits": sorted(launch.traits)}
                     for launch in made.launches]}, indent=1)


def _told(reason: Reason) -> dict[str, str]:
    return {"code": reason.code, "because": reason.got, "need": reason.need, "url": reason.url}
