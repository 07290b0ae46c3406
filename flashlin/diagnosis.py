"""doctor: what works on this machine, what is worked around, what does not work, and the command that repairs it. explain: one call's plan.

What doctor says is what happens: its lines are dispatch's own plans. Works with torch and Triton broken or missing. How it is made:
``machine`` asks this machine, ``outlook`` plans typical calls, ``testing.quick`` really runs some, ``report`` shows it.
"""
from __future__ import annotations

import flashlin
from flashlin import dispatch, outlook
from flashlin.compat.known_issues import issues_here
from flashlin.compat.target import Target, parse
from flashlin.dispatch import OPS
from flashlin.guards.problem import Problem, advice
from flashlin.kernels.variants import VARIANTS
from flashlin.machine import CHECKS, Machine, attempt, check_policy, checkup, examine
from flashlin.policy import Policy
from flashlin.policy import current as in_force
from flashlin.report import Device, OpPlan, Ran, Report
from flashlin.testing import quick


def doctor(*, run: bool = False, target: str | Target | None = None, op: str | None = None) -> Report:
    """Examine this machine and say what every op does on it. Offline and read-only, unless ``run``.

    Args:
        run: also run small cases of every op, forward and backward, against the float64 reference, in a child process.
        target: plan for another machine instead: ``"triton=3.2.0,sm=90"`` or a ``Target``.
        op: only this op.

    Raises ValueError for an unknown op or target, or for ``run`` with a target.
    """
    ops = tuple(OPS) if op is None else (known(op),)
    if target is not None and run:
        raise ValueError(f"run: got True with target {target}, need no target: only this machine can run anything")
    machine = examine() if target is None else described(parse(target) if isinstance(target, str) else target)
    checks = checkup(machine, CHECKS if target is None else (check_policy,))
    # Equal cards are one device to the report, and a machine that cannot be asked is planned for as if it had no GPU.
    alike = {found: [name for name in machine.targets if machine.targets[name] == found] for found in machine.targets.values()}
    devices = {", ".join(names): found for found, names in alike.items()}
    devices = devices or {"this machine": Target(machine.triton, "", "", "cpu", (0, 0), "cpu", 0, 1)}
    stopped = {name: machine.stops_everything or ("" if target is not None else attempt(getattr, flashlin, name)[1]) for name in ops}
    rows, issues, ran = [], [], []
    for where, found in devices.items():
        planned = {name: outlook.typical(name, found, machine.policy) for name in ops}
        rows += [outlook.summary(name, where, planned[name]) if not stopped[name] else
                 OpPlan(op=name, where=where, path="cannot run", verdict="problem", because=stopped[name], remedy="see the checks",
                        evidence="no record") for name in ops]
        issues += [outlook.issue_row(issue, where, [plan for some in planned.values() for plan in some.values()]) for issue in issues_here(found)]
        checks += outlook.unreleased(where, found)
        if not machine.stops_everything:
            checks += outlook.upgrade(where, found, planned, machine.policy)
            if run:
                device = where.split(", ")[0]
                ran += [Ran(where=device, **outcome._asdict()) for outcome in quick.watch(device, op, machine.policy)]
    return Report(version=flashlin.__version__, checks=tuple(checks), plans=_merged(rows), issues=tuple(issues), ran=tuple(ran), devices=tuple(
        Device(where=where, sm=found.sm, **{name: value for name, value in found._asdict().items() if name != "capability"})
        for where, found in devices.items()))


def described(target: Target) -> Machine:
    """A machine that is planned for without being asked."""
    policy, error = attempt(in_force)
    return Machine(None, "", target.triton, "", {"named": target}, {}, policy or Policy(), error)


def known(op: str) -> str:
    if op not in OPS:
        raise ValueError(f"op: got {op!r}, need one of {', '.join(OPS)}")
    return op


def _merged(rows: list[OpPlan]) -> tuple[OpPlan, ...]:
    """What holds for several devices alike is one line; the lines of an op stand together."""
    where: dict[OpPlan, list[str]] = {}
    for row in sorted(rows, key=lambda row: list(OPS).index(row.op)):
        where.setdefault(row.model_copy(update={"where": ""}), []).append(row.where)
    return tuple(row.model_copy(update={"where": ", ".join(devices)}) for row, devices in where.items())


def explain(op: str, *, target: str | Target | None = None, B: int = 1, T: int = 2048, H: int = 16, K: int = 128,
            V: int | None = None, N: int | None = None, dtype: str = "bfloat16", varlen: bool = False, needs_grad: bool = True,
            mode: str | None = None, policy: Policy | None = None) -> str:
    """How one call would run, and why: the decision trail of dispatch, then in words.

    Args:
        op: a public op, such as ``chunk_simple_gla``.
        target: a machine as for ``doctor``; None is this one (its first GPU, or its CPU).
        B, T, H, K, V: the sizes, as in the ops, V being 128 if None; a norm or a cross entropy has B * T * H rows of K, a convolution K
            channels and V taps, 4 if None, HGRN K channels, a selective scan V channels of K states in H groups, an elementwise op B * T rows
            of H heads of K, a rotary embedding V pairs, K // 2 if None. N: number of packed sequences, with varlen.
        dtype: torch's name. mode: of an op that has the choice (``simple_gla``): ``auto``, ``chunk`` or ``fused_recurrent``.
        policy: None is the one in force.

    Raises ValueError for an unknown op, mode or target, RuntimeError where this machine cannot be asked.
    """
    family, own = OPS[known(op)]
    modes = ("auto", "chunk", "fused_recurrent") if own == "auto" else (own,)
    if mode is not None and mode not in modes:
        raise ValueError(f"mode: got {mode!r}, need {' or '.join(map(repr, modes))} for {op}")
    if V is None:
        V = outlook.TAPS.get(op, 4) if family in ("conv", "conv_update") else max(K // 2, 1) if family == "rotary" else 128
    for name, size in {"B": B, "T": T, "H": H, "K": K, "V": V, "N": 1 if N is None else N}.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, need 1 or more")
    if family in ("norm", "cross_entropy"):  # know rows and their length only
        B, T, H, V = 1, B * T * H, 1, K
    elif family.startswith("pointwise"):
        B, T, V = 1, B * T, K
    elif family == "rotary":
        B, T, N = 1, B * T, 1
    elif family in ("conv", "conv_update"):
        H = 1
    elif family == "hgrn":
        H, V = 1, K
    problem = Problem(op, family, mode or own, B, T, H, K, V, (N or 1) if varlen else B, dtype.removeprefix("torch."), varlen, needs_grad,
                      outlook.OPTIONS.get(op, ()))
    policy = in_force() if policy is None else policy
    plan = dispatch.plan(problem, _machine_of(target), policy)
    lines = [str(plan), "", f"Policy {policy.policy}, path {policy.path}, ignoring {', '.join(sorted(policy.ignore)) or 'nothing'}."]
    for reason, remedy in plan.steps:
        how = "the usual way" if not reason.forced else "exact" if VARIANTS[remedy].exact else "other arithmetic: equal up to rounding, another speed"
        lines.append(f"{reason.code}: {'needs' if reason.forced else 'takes'} {reason.need}; so it {VARIANTS[remedy].means} ({how}).")
    lines += [f"It cannot run. {advice(plan)}." for _ in plan.refused[:1]]
    lines += [f"It may be wrong: {issue.id}, whose check is switched off." for issue in outlook.unguarded(plan)]
    if not plan.refused:
        starts = f": {len(plan.launches)} launches{', backward included' if needs_grad else ''}" if plan.launches else ""
        lines.append(f"It runs on the path {outlook.way(plan)}{starts}. Evidence: {outlook.evidence([plan])}.")
    return "\n".join(lines)


def _machine_of(target: str | Target | None) -> Target:
    if target is not None:
        return parse(target) if isinstance(target, str) else target
    machine = examine()
    if not machine.targets:
        why = machine.torch_error or "; ".join(f"{name}: {error}" for name, error in machine.lost.items())
        raise RuntimeError(f"target: this machine cannot be asked ({why}); name one, for example triton=3.2.0,sm=90")
    return next(iter(machine.targets.values()))
