"""Holes in what users run today, each tried raw (the installed fla) and through flashlin, every one in a
process of its own.

    python matrix/holes.py --out matrix/results/          needs an NVIDIA GPU; fla-core for the raw column

An outcome is ``right`` (equal to float64 within tolerance, or the refusal that was asked for), ``wrong: ...``
or ``error: ...``.
"""
from __future__ import annotations

import argparse
import datetime
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HOME = {"chunk_simple_gla": "simple_gla", "chunk_retention": "retention", "chunk_linear_attn": "linear_attn",
        "fused_recurrent_simple_gla": "simple_gla", "chunk_delta_rule": "delta_rule",
        "chunk_gated_delta_rule": "gated_delta_rule"}


def op(side: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module("flashlin" if side == "flashlin"
                                                                else f"fla.ops.{HOME[name]}"), name)
    return found


def randn(*shape: int, dtype: Any = None, device: str = "cuda", grad: bool = True) -> Any:
    import torch
    return torch.randn(*shape, device=device, dtype=dtype or torch.bfloat16).requires_grad_(grad)


def decay(*shape: int, device: str = "cuda") -> Any:
    import torch
    return torch.nn.functional.logsigmoid(torch.randn(*shape, device=device)).requires_grad_()


def judged(pairs: list[tuple[str, Any, Any]], allowed: float = 0.008) -> str:
    from flashlin.testing.compare import judge
    bad = [verdict for verdict in (judge(name, a.cpu(), b.cpu(), allowed) for name, a, b in pairs)
           if not verdict.ok]
    return "right" if not bad else "wrong: " + ", ".join(f"{verdict.tensor} off by {verdict.rms:.2g}"
                                                         for verdict in bad)


def reference(q: Any, k: Any, v: Any, g: Any, do: Any, bounds: Any = None) -> list[Any]:
    """o and the gradients of q, k, v, g in float64, token by token on the CPU."""
    import torch

    from flashlin.kernels.simple_gla.reference import recurrence
    leaves = [x.detach().cpu().double().requires_grad_() for x in (q, k, v, g)]
    q, k, v, g = leaves
    o, _ = recurrence(q, k, v, g, bounds=bounds, scale=q.shape[-1] ** -0.5)
    return [o, *torch.autograd.grad(o, leaves, do.cpu().double())]


def trained(side: str, *, B: int, T: int, H: int, D: int, edges: list[int] | None = None,
            check: slice = slice(None)) -> str:
    import torch
    torch.manual_seed(0)
    q, k, v, g = randn(B, T, H, D), randn(B, T, H, D), randn(B, T, H, D), decay(B, T, H)
    extra = {} if edges is None else {"cu_seqlens": torch.tensor(edges, device="cuda", dtype=torch.int32)}
    o, _ = op(side, "chunk_simple_gla")(q, k, v, g, **extra)
    do = torch.randn_like(o)
    o.backward(do)
    names = ("o", "dq", "dk", "dv", "dg")
    ours = [o, q.grad, k.grad, v.grad, g.grad]
    if edges is None:
        ours, at = [x[check] for x in ours], check
        return judged(list(zip(names, ours, reference(q[at], k[at], v[at], g[at], do[at]), strict=True)),
                      0.02)
    length = edges[-1] if check == slice(None) else check.stop
    kept = [n for n in edges if n <= length]
    ours = [x[:, :kept[-1]] for x in ours]
    q, k, v, g = (x[:, :kept[-1]] for x in (q, k, v, g))
    return judged(list(zip(names, ours, reference(q, k, v, g, do[:, :kept[-1]], torch.tensor(kept)),
                           strict=True)), 0.02)


def huge_batch(side: str) -> str:
    return trained(side, B=10923, T=32, H=6, D=16, check=slice(10900, 10923))


def huge_packed(side: str) -> str:
    return trained(side, B=1, T=10923 * 32, H=6, D=16, edges=list(range(0, 10923 * 32 + 1, 32)),
                   check=slice(0, 640))


def gated_backward(side: str) -> str:
    return trained(side, B=2, T=256, H=4, D=64)


def cu_seqlens_beyond(side: str) -> str:
    """T = 256, cu_seqlens = [0, 100, 400]: an error, or numbers that read nothing outside the tensors."""
    import torch
    q, k, v = (randn(1, 256, 4, 64, grad=False) for _ in range(3))
    g, cu = decay(1, 256, 4).detach(), torch.tensor([0, 100, 400], device="cuda", dtype=torch.int32)
    o, _ = op(side, "chunk_simple_gla")(q, k, v, g, cu_seqlens=cu)
    torch.cuda.synchronize()
    if not torch.isfinite(o).all():
        return "wrong: NaN"
    if side == "fla":
        return "wrong: silent, and read and written up to 144 rows beyond the tensors"
    try:
        op(side, "chunk_simple_gla")(q, k, v, g, cu_seqlens=cu, cu_seqlens_cpu=cu.cpu())
    except ValueError as error:
        return f"right: clamped to T on the device; with cu_seqlens_cpu ValueError: {error}"
    return "wrong: cu_seqlens_cpu not checked"


def cu_seqlens_short(side: str) -> str:
    """Rows that cu_seqlens does not cover must be zero in o and in the gradients, whatever the memory
    held."""
    import torch

    from flashlin.testing.compare import poisoned
    q, k, v = randn(1, 256, 4, 64), randn(1, 256, 4, 64), randn(1, 256, 4, 64)
    with poisoned():
        o, _ = op(side, "chunk_retention")(q, k, v,
                                           cu_seqlens=torch.tensor([10, 100], device="cuda",
                                                                   dtype=torch.int32))
        o.backward(torch.ones_like(o))
    outside = [x[:, rows] for x in (o, q.grad, k.grad, v.grad) for rows in (slice(0, 10), slice(100, 256))]
    return "right" if all(bool((x == 0).all())
                          for x in outside) else "wrong: uninitialised rows in o or in gradients"


def cpu_tensors(side: str) -> str:
    import torch
    q, k, v = (randn(1, 64, 2, 32, device="cpu", dtype=torch.float32) for _ in range(3))
    g = decay(1, 64, 2, device="cpu")
    o, _ = op(side, "chunk_simple_gla")(q, k, v, g)
    do = torch.randn_like(o)
    o.backward(do)
    return judged(list(zip(("o", "dq", "dk", "dv", "dg"), (o, q.grad, k.grad, v.grad, g.grad),
                           reference(q, k, v, g, do), strict=True)))


def mixed_dtypes(side: str) -> str:
    import torch
    q, k, v, g = randn(1, 128, 2, 64), randn(1, 128, 2, 64), randn(1, 128, 2, 64,
                                                                   dtype=torch.float32), decay(1, 128, 2)
    o, _ = op(side, "chunk_simple_gla")(q, k, v, g)
    return judged([("o", o, reference(q, k, v, g, torch.zeros_like(o))[0])])


def fewer_key_heads(side: str) -> str:
    q, k, v = randn(1, 128, 4, 64), randn(1, 128, 2, 64), randn(1, 128, 4, 64)
    try:
        o, _ = op(side, "chunk_retention")(q, k, v)
    except ValueError as error:
        return f"right: ValueError: {error}"
    o.sum().backward()
    return "wrong: accepted"


def state_of_wrong_shape(side: str) -> str:
    q, k, v = (randn(2, 64, 2, 64, grad=False) for _ in range(3))
    try:
        op(side, "chunk_retention")(q, k, v, initial_state=randn(1, 2, 64, 32, grad=False).float(),
                                    output_final_state=True)
    except ValueError as error:
        return f"right: ValueError: {error}"
    return "wrong: accepted, and read beyond the state"


def misspelt_keyword(side: str) -> str:
    q, k, v = (randn(1, 64, 2, 64, grad=False) for _ in range(3))
    try:
        op(side, "fused_recurrent_simple_gla")(q, k, v, gate=decay(1, 64, 2).detach())
    except TypeError as error:
        return f"right: TypeError: {error}"
    return "wrong: swallowed, ran ungated"


def float32(side: str) -> str:
    import torch
    torch.manual_seed(0)
    q, k, v = (randn(1, 256, 2, 128, dtype=torch.float32) for _ in range(3))
    g = decay(1, 256, 2)
    o, _ = op(side, "chunk_simple_gla")(q, k, v, g)
    return judged([("o", o, reference(q, k, v, g, torch.zeros_like(o))[0])], 1e-4)


def no_tokens(side: str) -> str:
    import torch
    q, k, v = (randn(2, 0, 2, 64) for _ in range(3))
    h0 = torch.randn(2, 2, 64, 64, device="cuda", requires_grad=True)
    o, ht = op(side, "chunk_retention")(q, k, v, initial_state=h0, output_final_state=True)
    (o.sum() + (ht * 2).sum()).backward()
    torch.cuda.synchronize()
    return judged([("ht", ht, h0), ("dh0", h0.grad, torch.full_like(h0, 2))])


def beyond_31_bits(side: str) -> str:
    """More than 2^31 elements: the last batch row must equal itself computed alone, forward and backward."""
    import torch
    torch.manual_seed(0)
    B, T, H, D = 17, 8192, 128, 128
    q, k, v = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))
    g = decay(B, T, H)
    o, _ = op(side, "chunk_simple_gla")(q, k, v, g)
    do = torch.randn_like(o)
    o.backward(do)
    alone = [x[-1:].detach().clone().requires_grad_() for x in (q, k, v, g)]
    o1, _ = op(side, "chunk_simple_gla")(*alone)
    o1.backward(do[-1:])
    pairs = [("o", o[-1:], o1),
             *((f"d{n}", x.grad[-1:], y.grad) for n, x, y in zip("qkvg", (q, k, v, g), alone, strict=True))]
    wrong = [name for name, a, b in pairs if not torch.equal(a, b)]
    return "right" if not wrong else f"wrong: {', '.join(wrong)} differ from the slice computed alone"


def beyond_31_bits_packed(side: str) -> str:
    """One packed row of more than 2^31 elements."""
    import torch
    torch.manual_seed(0)
    T, H, D = 135168, 128, 128
    q, k, v = (torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))
    g, edges = decay(1, T, H), [0, 131072, 133120, T]
    o, _ = op(side, "chunk_simple_gla")(q, k, v, g, cu_seqlens=torch.tensor(edges, device="cuda"))
    do = torch.randn_like(o)
    o.backward(do)
    tail = slice(133120, T)
    alone = [x[:, tail].detach().clone().requires_grad_() for x in (q, k, v, g)]
    o1, _ = op(side, "chunk_simple_gla")(*alone)
    o1.backward(do[:, tail])
    pairs = [("o", o[:, tail], o1),
             *((f"d{n}", x.grad[:, tail], y.grad)
               for n, x, y in zip("qkvg", (q, k, v, g), alone, strict=True))]
    wrong = [name for name, a, b in pairs if not torch.equal(a, b)]
    return "right" if not wrong else f"wrong: {', '.join(wrong)} differ from the sequence computed alone"


def on_case(side: str, name: str, case_id: str, dtype: str = "bfloat16") -> str:
    """One of the cases that flashlin is tested with, in the op's usual tolerances whatever the case
    allows."""
    from functools import partial

    import torch

    from flashlin.testing.cases import CASES
    from flashlin.testing.cases.delta import TOLERANCES
    from flashlin.testing.cases.op import called
    from flashlin.testing.compare import check
    case = next(case for case in CASES if case.op == name and case.id == case_id)
    assert isinstance(case.call, partial)
    asked, options = case.call.args
    case = case._replace(call=partial(called, asked._replace(call=op(side, name)), options),
                         tolerances=TOLERANCES)
    verdicts = check(case, torch.device("cuda", 0), getattr(torch, dtype))
    bad = [verdict for verdict in verdicts if not verdict.ok]
    return "right" if not bad else "wrong: " + ", ".join(f"{verdict.tensor} off by {verdict.rms:.2g}"
                                                         for verdict in bad)


def huge_delta(side: str) -> str:
    """65,538 heads; what the last sequences give beside the same sequences alone, which every op gets
    right."""
    import torch
    torch.manual_seed(0)
    q, k, v = (torch.nn.functional.normalize(randn(10923, 32, 6, 16, grad=False), dim=-1).requires_grad_()
               for _ in range(3))
    g, beta = decay(10923, 32, 6), torch.rand(10923, 32, 6, device="cuda").requires_grad_()
    o, _ = op(side, "chunk_delta_rule")(q, k, v, beta) if side == "fla" else op(side,
                                                                                "chunk_gated_delta_rule")(q,
                                                                                                          k,
                                                                                                          v,
                                                                                                          g,
                                                                                                          beta)
    o.sum().backward()
    part: list[Any] = [x.detach()[10900:].requires_grad_() for x in (q, k, v, g, beta)]
    alone, _ = op("flashlin", "chunk_delta_rule")(*part[:3], part[4]) if side == "fla" else op("flashlin",
                                                                                               "chunk_gated_delta_rule")(*part)
    alone.sum().backward()
    ours: list[Any] = [q, k, v]
    grads = [(name, x.grad[10900:], y.grad)
             for name, x, y in zip(("dq", "dk", "dv"), ours, part, strict=False)]
    return judged([("o", o[10900:], alone), *grads])


def shielded(side: str) -> str:
    """fla's own chunk_retention with 65,538 heads, raw and under shield: the batch in parts must equal the
    same rows alone."""
    import torch

    import flashlin
    raw = op("fla", "chunk_retention")
    call = raw if side == "fla" else flashlin.shield(raw, batch={"q": 0, "k": 0, "v": 0})
    torch.manual_seed(0)
    q, k, v = (randn(10923, 32, 6, 16) for _ in range(3))
    o = call(q, k, v)[0]
    o.sum().backward()
    part = [x.detach()[10900:].requires_grad_() for x in (q, k, v)]
    alone = raw(*part)[0]
    alone.sum().backward()
    grads = [(name, x.grad[10900:], y.grad)
             for name, x, y in zip(("dq", "dk", "dv"), (q, k, v), part, strict=True)]
    return judged([("o", o[10900:], alone), *grads])


HOLES: dict[str, tuple[str, Callable[[str], str]]] = {
    "B*H > 65,535": ("B=10923 H=6 T=32 D=16, forward and backward", huge_batch),
    "N*H > 65,535, packed": ("10,923 sequences of 32 tokens, forward and backward", huge_packed),
    "gated backward on Hopper": ("chunk_simple_gla with g, Triton 3.4 to 3.7.0 (fla #640)", gated_backward),
    "cu_seqlens beyond T": ("[0, 100, 400] for T = 256", cu_seqlens_beyond),
    "cu_seqlens that leaves rows out": ("[10, 100] for T = 256, memory poisoned with NaN", cu_seqlens_short),
    "CPU tensors": ("forward and backward", cpu_tensors),
    "v in another dtype": ("q, k bfloat16, v float32", mixed_dtypes),
    "k with fewer heads": ("k has 2 heads, q has 4", fewer_key_heads),
    "initial_state of another shape": ("[1, 2, 64, 32] for [2, 2, 64, 64]", state_of_wrong_shape),
    "misspelt keyword": ("gate= for g=", misspelt_keyword),
    "float32": ("within 1e-4 of float64", float32),
    "no tokens": ("T = 0 with a state: it passes through, and so does its gradient", no_tokens),
    "delta: gated backward on Hopper": ("chunk_gated_delta_rule, Triton 3.4 to 3.7.0 (fla #640)",
                                        lambda side: on_case(side, "chunk_gated_delta_rule", "random")),
    "delta: B*H > 65,535": ("B=10923 H=6 T=32 D=16, forward and backward", huge_delta),
    "delta: one key": ("chunk_delta_rule, one key in the whole sequence, beta = 1",
                       lambda side: on_case(side, "chunk_delta_rule", "one-key")),
    "delta: one key, g = 0": ("chunk_gated_delta_rule, one key, beta = 1",
                              lambda side: on_case(side, "chunk_gated_delta_rule", "one-key-g=0")),
    "delta: period 4": ("chunk_delta_rule, four keys in turn, beta = 1",
                        lambda side: on_case(side, "chunk_delta_rule", "period-4")),
    "delta: float32": ("chunk_delta_rule",
                       lambda side: on_case(side, "chunk_delta_rule", "random", "float32")),
    "delta: K = 512": ("chunk_gated_delta_rule",
                       lambda side: on_case(side, "chunk_gated_delta_rule", "K=512,V=64")),
    "delta: one key, beta = 2, bfloat16": ("chunk_delta_rule: every token reflects the state, so roundings "
                                           "add up",
                                           lambda side: on_case(side, "chunk_delta_rule", "one-key-2")),
    "delta: one key, beta = 2, float32": ("chunk_delta_rule",
                                          lambda side: on_case(side, "chunk_delta_rule", "one-key-2",
                                                               "float32")),
    "shield: fla's own op": ("chunk_retention of fla, B=10923 H=6 T=32 D=16, raw and shielded", shielded),
    "more than 2^31 elements": ("B=17 T=8192 H=128 D=128, the last row beside itself alone", beyond_31_bits),
    "more than 2^31 elements, packed": ("T=135168 H=128 D=128, the last sequence beside itself alone",
                                        beyond_31_bits_packed),
}
LARGE = ("more than 2^31 elements", "more than 2^31 elements, packed")


def outcome(hole: str, side: str) -> str:
    """In a child: an error may poison the CUDA context, and the next hole wants a clean one."""
    command = [sys.executable, __file__, "--one", hole, "--side", side]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        return "error: no answer in 240 s"
    lines = [line for line in ran.stdout.splitlines() if line.startswith("outcome ")]
    if lines:
        return lines[-1].removeprefix("outcome ")
    last = ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else ""
    return f"error: {last[:200] or f'process ended with {ran.returncode}'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sides", default="fla,flashlin")
    parser.add_argument("--only", default="",
                        help="those whose names begin so, recorded in a file of their own")
    parser.add_argument("--one", choices=HOLES, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        try:
            print("outcome", HOLES[arguments.one][1](arguments.side))
        except Exception as error:  # whatever is raised is the outcome
            print(f"outcome error: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return 0
    import torch

    from flashlin.compat.target import probe
    target = probe(torch.device("cuda", torch.cuda.current_device()))
    sides, only = arguments.sides.split(","), arguments.only
    # the large ones fill the card: one after the other, when the rest is done
    with ThreadPoolExecutor(6) as pool:
        found = {(hole, side): pool.submit(outcome, hole, side)
                 for hole in HOLES if hole.startswith(only) and hole not in LARGE
                 for side in sides}
    rows: list[dict[str, str]] = []
    for hole, (what, _) in HOLES.items():
        if not hole.startswith(only):
            continue
        rows.append({"hole": hole, "what": what,
                     **{side: outcome(hole, side) if hole in LARGE else found[hole, side].result()
                        for side in sides
                        # fla's tuning alone would take minutes there
                        if side == "flashlin" or hole not in LARGE}})
        print(json.dumps(rows[-1]), flush=True)
    try:
        fla = importlib.import_module("importlib.metadata").version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        fla = "none"
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        record = {"device": target.name, "triton": target.triton, "torch": target.torch, "fla": fla,
                  "date": datetime.date.today().isoformat(), "rows": rows}
        name = "-".join(["holes", *filter(None, [only]), target.name.replace(" ", "-"), "triton",
                         target.triton])
        (arguments.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row.get("flashlin", "").startswith("right") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
