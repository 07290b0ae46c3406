"""Reproduce failures that users reported, with the installed fla and with flashlin.

    python -m matrix.field_failures --out matrix/results/

This needs an NVIDIA GPU, and fla-core for the column of fla. Each failure runs in a process of its own. An
outcome is ``right``, ``wrong: ...`` or ``error: ...``. It is right if the result equals the float64 reference
within tolerance, or if the call is refused with the intended error.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.gla.reference import recurrence
from flashlin.testing.cases import CASES
from flashlin.testing.cases.delta import TOLERANCES
from flashlin.testing.cases.op import called
from flashlin.testing.compare import Tensors, check, judge, poisoned
from matrix import record

BF16, FP32 = torch.bfloat16, torch.float32
SECONDS = 240  # time limit of one failure


def op(side: str, name: str) -> Callable[..., Any]:
    family = name.removeprefix("chunk_").removeprefix("fused_recurrent_")
    function: Callable[..., Any] = getattr(flashlin if side == "flashlin"
                                           else import_module(f"fla.ops.{family}"), name)
    return function


def qkv(*shape: int, dtype: torch.dtype = BF16, device: str = "cuda", grad: bool = True) -> Tensors:
    return {name: torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad) for name in "qkv"}


def decay(*shape: int, device: str = "cuda", grad: bool = True) -> torch.Tensor:
    return F.logsigmoid(torch.randn(*shape, device=device)).requires_grad_(grad)


def results(call: Callable[..., Any], inputs: Tensors, do: torch.Tensor, **options: Any) -> Tensors:
    """Return o, and the gradients of the inputs for the output gradient ``do``."""
    o = call(**inputs, **options)[0]
    o.backward(do)
    return {"o": o, **{f"d{name}": x.grad for name, x in inputs.items() if x.grad is not None}}


def judged(ours: Tensors, right: Tensors, allowed: float = 0.008) -> str:
    return told(judge(name, ours[name].cpu(), x.cpu(), allowed) for name, x in right.items())


told = partial(record.told, off=" off by ")


def reference(inputs: Tensors, do: torch.Tensor, bounds: torch.Tensor | None = None) -> Tensors:
    """Return o and the gradients of q, k, v and g in float64, computed token by token on the CPU.

    bounds: cu_seqlens if the inputs are packed sequences.
    """
    leaves = {name: x.detach().cpu().double().requires_grad_() for name, x in inputs.items()}
    o, _ = recurrence(**leaves, bounds=bounds, scale=leaves["q"].shape[-1] ** -0.5)
    grads = torch.autograd.grad(o, list(leaves.values()), do.cpu().double())
    return {"o": o, **{f"d{name}": x for name, x in zip(leaves, grads, strict=True)}}


def trained(side: str, *, B: int, T: int, H: int, D: int, edges: list[int] | None = None,
            rows: Any = slice(None), bounds: list[int] | None = None) -> str:
    """Run forward and backward of ``chunk_simple_gla``, and return the outcome compared with float64.

    side: ``fla`` or ``flashlin``, whose op runs.
    edges: cu_seqlens of the call, or None.
    rows: index of the rows that are compared.
    bounds: cu_seqlens of these rows, or None if they are not packed.
    """
    torch.manual_seed(0)
    inputs = {**qkv(B, T, H, D), "g": decay(B, T, H)}
    packed = {} if edges is None else {"cu_seqlens": torch.tensor(edges, device="cuda", dtype=torch.int32)}
    do = torch.randn_like(inputs["v"])
    ours = results(op(side, "chunk_simple_gla"), inputs, do, **packed)
    right = reference({name: x[rows] for name, x in inputs.items()}, do[rows],
                      None if bounds is None else torch.tensor(bounds))
    return judged({name: x[rows] for name, x in ours.items()}, right, 0.02)


def huge_packed(side: str) -> str:
    return trained(side, B=1, T=10923 * 32, H=6, D=16, edges=list(range(0, 10923 * 32 + 1, 32)),
                   rows=(slice(None), slice(640)), bounds=list(range(0, 641, 32)))


def cu_seqlens_beyond(side: str) -> str:
    """Return the outcome for cu_seqlens = [0, 100, 400] with only 256 tokens.

    It is right to raise an error, or to compute without access outside the tensors.
    """
    inputs = {**qkv(1, 256, 4, 64, grad=False), "g": decay(1, 256, 4, grad=False)}
    edges = torch.tensor([0, 100, 400], device="cuda", dtype=torch.int32)
    o, _ = op(side, "chunk_simple_gla")(**inputs, cu_seqlens=edges)
    torch.cuda.synchronize()
    if not torch.isfinite(o).all():
        return "wrong: NaN"
    if side == "fla":
        return "wrong: silent, and read and written up to 144 rows beyond the tensors"
    checked = refused(ValueError, "wrong: cu_seqlens_cpu not checked", op(side, "chunk_simple_gla"), **inputs,
                      cu_seqlens=edges, cu_seqlens_cpu=edges.cpu())
    return checked.replace("right: ", "right: clamped to T on the device; with cu_seqlens_cpu ", 1)


def cu_seqlens_short(side: str) -> str:
    """Return the outcome for cu_seqlens that does not cover all rows.

    The rows outside must be zero in o and in the gradients, even if the memory contained other values.
    """
    with poisoned():
        ours = results(op(side, "chunk_retention"), qkv(1, 256, 4, 64),
                       torch.ones(1, 256, 4, 64, device="cuda", dtype=BF16),
                       cu_seqlens=torch.tensor([10, 100], device="cuda", dtype=torch.int32))
    outside = [ours[name][:, rows] for name in ("o", "dq", "dk", "dv")
               for rows in (slice(10), slice(100, 256))]
    written = not any(bool(x.any()) for x in outside)  # any() is also True for NaN
    return "right" if written else "wrong: uninitialised rows in o or in gradients"


def cpu_tensors(side: str) -> str:
    inputs = {**qkv(1, 64, 2, 32, device="cpu", dtype=FP32), "g": decay(1, 64, 2, device="cpu")}
    do = torch.randn_like(inputs["v"])
    return judged(results(op(side, "chunk_simple_gla"), inputs, do), reference(inputs, do))


def forward(side: str, inputs: Tensors, allowed: float = 0.008) -> str:
    """Return the outcome of forward of ``chunk_simple_gla``, compared with float64."""
    o, _ = op(side, "chunk_simple_gla")(**inputs)
    return judged({"o": o}, {"o": reference(inputs, torch.zeros_like(o))["o"]}, allowed)


def mixed_dtypes(side: str) -> str:
    v = torch.randn(1, 128, 2, 64, device="cuda")
    return forward(side, {**qkv(1, 128, 2, 64), "v": v, "g": decay(1, 128, 2)})


def float32(side: str) -> str:
    torch.manual_seed(0)
    return forward(side, {**qkv(1, 256, 2, 128, dtype=FP32), "g": decay(1, 256, 2)}, 1e-4)


def refused(kind: type[Exception], otherwise: str, call: Callable[..., Any], **arguments: Any) -> str:
    """Return ``right: ...`` if a call raises an error of this kind, else the text ``otherwise``.

    If the call returns, its backward pass also runs.
    """
    try:
        o, _ = call(**arguments)
    except kind as error:
        return f"right: {kind.__name__}: {error}"
    if o.requires_grad:
        o.sum().backward()
    return otherwise


def fewer_key_heads(side: str) -> str:
    k = torch.randn(1, 128, 2, 64, device="cuda", dtype=BF16, requires_grad=True)
    return refused(ValueError, "wrong: accepted", op(side, "chunk_retention"),
                   **{**qkv(1, 128, 4, 64), "k": k})


def state_of_wrong_shape(side: str) -> str:
    return refused(ValueError, "wrong: accepted, and read beyond the state", op(side, "chunk_retention"),
                   **qkv(2, 64, 2, 64, grad=False), output_final_state=True,
                   initial_state=torch.randn(1, 2, 64, 32, device="cuda"))


def misspelt_keyword(side: str) -> str:
    return refused(TypeError, "wrong: swallowed, ran ungated", op(side, "fused_recurrent_simple_gla"),
                   **qkv(1, 64, 2, 64, grad=False), gate=decay(1, 64, 2, grad=False))


def no_tokens(side: str) -> str:
    h0 = torch.randn(2, 2, 64, 64, device="cuda", requires_grad=True)
    o, ht = op(side, "chunk_retention")(**qkv(2, 0, 2, 64), initial_state=h0, output_final_state=True)
    (o.sum() + (ht * 2).sum()).backward()
    torch.cuda.synchronize()
    assert h0.grad is not None
    return judged({"ht": ht, "dh0": h0.grad}, {"ht": h0, "dh0": torch.full_like(h0, 2)})


def beside_alone(call: Callable[..., Any], alone: Callable[..., Any], inputs: Tensors, rows: Any,
                 **options: Any) -> tuple[Tensors, Tensors]:
    """Run forward and backward twice, and return the results of some rows of the inputs for both runs.

    call: runs on all inputs. The first result contains its rows.
    alone: runs on these rows only. The second result is from this run.
    rows: index of the rows.
    options: keywords of ``call``.
    """
    do = torch.randn_like(inputs["v"])
    among = results(call, inputs, do, **options)
    own = {name: x[rows].detach().clone().requires_grad_() for name, x in inputs.items()}
    return {name: x[rows] for name, x in among.items()}, results(alone, own, do[rows])


def beyond_31_bits(side: str, B: int, T: int, rows: Any, what: str, edges: list[int] | None = None) -> str:
    """Return the outcome of ``chunk_simple_gla`` on inputs with more than 2^31 elements.

    Forward and backward of some rows must be bitwise equal to a run of these rows alone.

    side: ``fla`` or ``flashlin``, whose op runs.
    rows: index of the rows that are compared.
    what: word for these rows in the outcome, such as ``sequence``.
    edges: cu_seqlens, or None.
    """
    torch.manual_seed(0)
    inputs, call = {**qkv(B, T, 128, 128), "g": decay(B, T, 128)}, op(side, "chunk_simple_gla")
    packed = {} if edges is None else {"cu_seqlens": torch.tensor(edges, device="cuda")}
    among, alone = beside_alone(call, call, inputs, rows, **packed)
    wrong = [name for name, x in alone.items() if not torch.equal(among[name], x)]
    return "right" if not wrong else f"wrong: {', '.join(wrong)} differ from the {what} computed alone"


def on_case(side: str, name: str, case_id: str, dtype: torch.dtype = BF16) -> str:
    """Return the outcome of a test case of flashlin, with the usual tolerances of the op.

    The tolerances of the case itself are not used, because they may be wider.
    """
    case = next(case for case in CASES if case.op == name and case.id == case_id)
    assert isinstance(case.call, partial)
    asked, options = case.call.args
    case = case._replace(call=partial(called, asked._replace(call=op(side, name)), options),
                         tolerances=TOLERANCES)
    return told(check(case, torch.device("cuda", 0), dtype))


def huge_delta(side: str) -> str:
    """Return the outcome of a delta rule with 65,538 heads.

    The last sequences are compared with flashlin's result for these sequences alone. fla runs the op without
    a gate, because fla refuses the backward pass of the gated op on Hopper.
    """
    torch.manual_seed(0)
    inputs = {name: F.normalize(x, dim=-1).requires_grad_()
              for name, x in qkv(10923, 32, 6, 16, grad=False).items()}
    gate = {"g": decay(10923, 32, 6)} if side == "flashlin" else {}
    inputs |= {**gate, "beta": torch.rand(10923, 32, 6, device="cuda").requires_grad_()}
    name = "chunk_gated_delta_rule" if gate else "chunk_delta_rule"
    among, alone = beside_alone(op(side, name), op("flashlin", name), inputs, slice(10900, None))
    return judged(among, {name: alone[name] for name in ("o", "dq", "dk", "dv")})


def shielded(side: str) -> str:
    """Return the outcome of fla's ``chunk_retention`` with 65,538 heads, raw or under ``flashlin.shield``.

    The last rows must equal a run of fla with these rows alone. The shield splits the batch into slices.

    side: ``fla`` for the raw function, ``flashlin`` for the function under ``flashlin.shield``.
    """
    raw = op("fla", "chunk_retention")
    call = raw if side == "fla" else flashlin.shield(raw, batch={"q": 0, "k": 0, "v": 0})
    torch.manual_seed(0)
    return judged(*beside_alone(call, raw, qkv(10923, 32, 6, 16), slice(10900, None)))


HOLES: dict[str, tuple[str, Callable[[str], str]]] = {
    "B*H > 65,535": ("B=10923 H=6 T=32 D=16, forward and backward",
                     lambda side: trained(side, B=10923, T=32, H=6, D=16, rows=slice(10900, None))),
    "N*H > 65,535, packed": ("10,923 sequences of 32 tokens, forward and backward", huge_packed),
    "gated backward on Hopper": ("chunk_simple_gla with g, Triton 3.4 to 3.7.0 (fla #640)",
                                 lambda side: trained(side, B=2, T=256, H=4, D=64)),
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
                       lambda side: on_case(side, "chunk_delta_rule", "random", FP32)),
    "delta: K = 512": ("chunk_gated_delta_rule",
                       lambda side: on_case(side, "chunk_gated_delta_rule", "K=512,V=64")),
    "delta: one key, beta = 2, bfloat16": (
        "chunk_delta_rule: every token reflects the state, so roundings add up",
        lambda side: on_case(side, "chunk_delta_rule", "one-key-2")),
    "delta: one key, beta = 2, float32": (
        "chunk_delta_rule", lambda side: on_case(side, "chunk_delta_rule", "one-key-2", FP32)),
    "shield: fla's own op": ("chunk_retention of fla, B=10923 H=6 T=32 D=16, raw and shielded", shielded),
    "more than 2^31 elements": ("B=17 T=8192 H=128 D=128, the last row beside itself alone",
                                lambda side: beyond_31_bits(side, 17, 8192, slice(-1, None), "slice")),
    "more than 2^31 elements, packed": (
        "T=135168 H=128 D=128, the last sequence beside itself alone",
        lambda side: beyond_31_bits(side, 1, 135168, (slice(None), slice(133120, None)), "sequence",
                                    [0, 131072, 133120, 135168])),
}
LARGE = ("more than 2^31 elements", "more than 2^31 elements, packed")


def outcome(hole: str, side: str) -> str:
    """Return the outcome of a failure for one side, from a child process.

    An error may make the CUDA context unusable, so each failure needs a process of its own.
    """
    child = record.child("matrix.field_failures", "--one", hole, "--side", side, seconds=SECONDS)
    return str(child.messages[-1]["outcome"]) if child.messages else f"error: {child.ending}"


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--sides", default="fla,flashlin")
    parser.add_argument("--only", default="",
                        help="only failures whose names begin with this text; they get a separate record")
    parser.add_argument("--one", choices=HOLES, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        try:
            outcome_here = HOLES[given.one][1](given.side)
        except Exception as error:  # any error is the outcome
            outcome_here = record.raised(error)
        print(json.dumps({"outcome": outcome_here}))
        return 0
    holes = {hole: what for hole, (what, _) in HOLES.items() if hole.startswith(given.only)}
    sides = given.sides.split(",")
    with ThreadPoolExecutor(6) as pool:
        asked = {(hole, side): pool.submit(outcome, hole, side)
                 for hole in holes if hole not in LARGE for side in sides}
    rows: list[dict[str, str]] = []
    for hole, what in holes.items():
        # These fill the GPU, so they run one after the other. They skip fla, which would tune for minutes.
        if hole in LARGE:
            outcomes = {side: outcome(hole, side) for side in sides if side == "flashlin"}
        else:
            outcomes = {side: asked[hole, side].result() for side in sides}
        rows.append({"hole": hole, "what": what, **outcomes})
        print(json.dumps(rows[-1]), flush=True)
    if given.out:
        kind = f"holes-{given.only}" if given.only else "holes"
        record.write(given.out, kind, record.this_card(), fla=record.version("fla-core"), rows=rows)
    return 0 if all(row.get("flashlin", "").startswith("right") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
