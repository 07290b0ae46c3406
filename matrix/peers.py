"""Compare each op in flash-linear-attention (fla), mamba_ssm and flashlin with a float64 reference on a GPU.

    python -m matrix.peers --out matrix/results/

docs/support/packages.md shows the result as a table. The script needs an NVIDIA GPU, fla-core, and the Python
files of mamba_ssm for their columns.

Every op of every package is tested on the same aspects (``ASPECTS``) in a child process. If an aspect ends
the process, a new process continues with the next aspect. An answer is ``right``, or begins with ``wrong: ``
or ``error: ``. The autotuners of the other packages get a single configuration, with 4 warps if possible,
because otherwise a first call would take minutes. Failures that need another configuration are not found.

The record is written after each row. It keeps earlier rows that were made by the same versions and did not
run again. An op that takes longer than ``--seconds`` is recorded as an error, so repeat it if the machine was
busy.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from flashlin.testing.compare import Case, Tensors, check
from matrix import record
from matrix.peer_table import module_of

# Aspect -> its sizes, its dtype and the tensors that are compared.
ASPECTS: dict[str, str] = {
    "forward": "outputs and final state, bf16", "backward": "gradients through the outputs",
    "states": "gradients of the initial state and through the final one",
    "packed": "cu_seqlens with an empty sequence, with gradients", "CPU": "CPU tensors, with gradients",
    "B*H > 65,535": "10,923 sequences of 6 heads, with gradients", "K > 256": "K = 512, with gradients",
    "fp32": "float32 within 1e-4, with gradients"}
# Allowed RMS ratio in 16 bits: twice the usual bound of the field, because this test separates right from
# wrong, not good from better.
ALLOWED = 0.02


class Op(NamedTuple):
    """One op to compare: its module in the other package, its arguments and its recurrence.

    name: public name of the op.
    home: its module in fla or mamba_ssm.
    arguments: names of its tensors in any order, as ``name`` or ``name:role`` if they differ. The roles are
        described in kernels/recurrent/inputs.py.
    delta: True if the prediction is subtracted from v, as in kda and the delta rules.
    before: True if a token reads the state before its own update, as in rwkv6.
    options: keywords of every call.
    initial: name of the argument with the initial state, or empty. For mamba3: the names of the tensors in
        ``Input_States``, in the order of the returned final states.
    last: name of the argument that requests the final state, or empty.
    packed: ``both`` or ``flashlin``, the packages whose op accepts cu_seqlens. Any other text is recorded as
        the answer to the aspect ``packed``.
    steps: rows of k, v and beta for each token.
    """
    name: str
    home: str
    arguments: str
    delta: bool = False
    before: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    initial: str = "initial_state"
    last: str = "output_final_state"
    packed: str = "both"
    steps: int = 1


def _both(family: str, arguments: str, **facts: Any) -> list[Op]:
    return [Op(f"{mode}_{family}", f"fla.ops.{family}", arguments, **facts)
            for mode in ("chunk", "fused_recurrent")]


OPS: list[Op] = [
    *_both("simple_gla", "q k v g"),
    Op("parallel_simple_gla", "fla.ops.simple_gla", "q k v g", initial="", last=""),
    *_both("retention", "q k v"), Op("parallel_retention", "fla.ops.retention", "q k v", initial="", last=""),
    *_both("linear_attn", "q k v", options=(("normalize", False),)),
    *_both("lightning_attn", "q k v", options=(("layer_idx", 1), ("num_layers", 4))),
    *_both("delta_rule", "q k v beta", delta=True), *_both("gated_delta_rule", "q k v g beta", delta=True),
    *_both("kda", "q k v g:gk beta", delta=True),
    *_both("gdn2", "q k v g:gk b:erase w:write", delta=True), *_both("comba", "q k v p g beta", delta=True),
    Op("chunk_gated_delta_product", "fla.ops.gated_delta_product", "q k v g beta", delta=True,
       options=(("num_householder", 2),), steps=2),
    Op("chunk_gla", "fla.ops.gla", "q k v g:gk"), Op("fused_recurrent_gla", "fla.ops.gla", "q k v gk"),
    *_both("rwkv6", "r:q k v w:gk u:bonus", before=True), *_both("rwkv7", "r:q w:gk k v a b"),
    Op("fused_mul_recurrent_rwkv7", "fla.ops.rwkv7", "r:q w:gk k v kk a:rate"),
    *[op._replace(home="fla.ops.generalized_delta_rule")
      for op in (*_both("dplr_delta_rule", "q k v a b gk"), *_both("iplr_delta_rule", "q k v a b"))],
    Op("chunk_hgrn", "fla.ops.hgrn", "x:v g:gv", packed="flashlin"),
    Op("fused_recurrent_hgrn", "fla.ops.hgrn", "x:v g:gv"),
    Op("mamba_chunk_scan_combined", "mamba_ssm.ops.triton.ssd_combined", "x:v dt A B:k C:q",
       options=(("chunk_size", 64),), initial="initial_states", last="return_final_states",
       packed="see cu_seqlens and seq_idx in the op's own cases"),
    Op("mamba3_siso_combined", "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined",
       "Q K V ADT DT Trap Q_bias K_bias Angles D Z", initial="angle_state ssm_state k_state v_state",
       last="return_final_states"),
    Op("selective_scan_fn", "mamba_ssm.ops.selective_scan_interface", "u:v delta A B:k C:q", initial="",
       last="return_last_state", packed="none")]


class Sizes(NamedTuple):
    """Sizes of the inputs: batch, tokens, heads, key and value size of a head, and cu_seqlens if packed."""
    B: int = 2
    T: int = 130
    H: int = 2
    K: int = 64
    V: int = 64
    edges: tuple[int, ...] = ()


SIZES = {"packed": Sizes(1, 130, edges=(0, 50, 50, 130)), "B*H > 65,535": Sizes(10923, 4, 6, 16, 16),
         "K > 256": Sizes(T=70, K=512)}


def function_of(side: str, op: Op) -> Callable[..., Any]:
    if side != "flashlin":
        hold_tuners()
    function: Callable[..., Any] = getattr(module_of("flashlin" if side == "flashlin" else op.home), op.name)
    return function


def hold_tuners() -> None:
    """Give every autotuner that is created from now on a single configuration, with 4 warps if possible."""
    import triton.runtime.autotuner as tuner
    before = tuner.Autotuner.__init__

    def one_configuration(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.configs = [next((config for config in self.configs if config.num_warps == 4), self.configs[0])]
    tuner.Autotuner.__init__ = one_configuration


def made(op: Op, sizes: Sizes, dtype: Any, generator: Any) -> dict[str, Any]:
    """Return random tensors of an op by public name.

    Keys of delta rules and the low-rank vectors have length 1, because otherwise the delta rules diverge.
    """
    B, T, H, K, V, edges = sizes
    state: tuple[int, ...] = (len(edges) - 1 if edges else B, H, K, V)

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)
    if "hgrn" in op.name:
        given = {"x": randn(B, T, H * V).to(dtype), "g": F.logsigmoid(randn(B, T, H * V)).to(dtype)}
        state = (state[0], H * V)
    elif op.name.startswith("mamba3"):
        given = {**{name: randn(B, T, H, K).to(dtype) for name in "QK"}, "V": randn(B, T, H, V).to(dtype),
                 "ADT": -torch.rand(B, H, T, generator=generator), "DT": F.softplus(randn(B, H, T) - 2),
                 "Trap": randn(B, H, T).to(dtype),
                 **{f"{name}_bias": randn(H, K) / 4 + 1 for name in "QK"}, "Angles": randn(B, T, H, K // 4),
                 "D": randn(H), "Z": randn(B, T, H, V).to(dtype),
                 "angle_state": math.tau * torch.rand(state[0], H, K // 4, generator=generator),
                 "ssm_state": randn(state[0], H, V, K), "k_state": randn(state[0], H, K).to(dtype),
                 "v_state": randn(state[0], H, V).to(dtype)}
    elif op.name.startswith("mamba"):
        given = {"x": randn(B, T, H, V).to(dtype), "dt": F.softplus(randn(B, T, H) - 2),
                 "A": -torch.rand(H, generator=generator) - 0.5, "B": randn(B, T, H, K).to(dtype),
                 "C": randn(B, T, H, K).to(dtype)}
        state = (B, H, V, K)
    elif op.name == "selective_scan_fn":  # H * V channels, each with a state of K columns
        given = {"u": randn(B, H * V, T).to(dtype), "delta": F.softplus(randn(B, H * V, T) - 2).to(dtype),
                 "A": -torch.rand(H * V, K, generator=generator) - 0.5, "B": randn(B, K, T).to(dtype),
                 "C": randn(B, K, T).to(dtype)}
    else:
        unit = F.normalize(randn(B, T, H, K), dim=-1)
        rows = T * op.steps
        key = randn(B, rows, H, K)
        key = F.normalize(key, dim=-1) if op.delta else key
        every = {"q": randn(B, T, H, K).to(dtype), "k": key.to(dtype), "p": (key / 2).to(dtype),
                 "v": randn(B, rows, H, V).to(dtype), "erase": randn(B, T, H, K).sigmoid().to(dtype),
                 "write": randn(B, T, H, V).sigmoid().to(dtype), "g": F.logsigmoid(randn(B, T, H)),
                 "gk": F.logsigmoid(randn(B, T, H, K) + 2), "beta": randn(B, rows, H).sigmoid().to(dtype),
                 "bonus": randn(H, K), "a": -unit.to(dtype),
                 "b": (unit * randn(B, T, H, K).sigmoid()).to(dtype), "kk": unit.to(dtype),
                 "rate": randn(B, T, H, K).sigmoid().to(dtype)}
        given = {name: every[role] for name, role in _roles(op).items()}
    if op.initial and not op.name.startswith("mamba3"):
        given[op.initial] = randn(*state)
    if edges:
        wanted = torch.int64 if op.home.startswith("fla.") else torch.int32
        given["cu_seqlens"] = torch.tensor(edges, dtype=wanted)
    return given


def _roles(op: Op) -> dict[str, str]:
    pairs = [argument.partition(":") for argument in op.arguments.split()]
    return {name: role or name for name, _, role in pairs}


def called(function: Callable[..., Any], op: Op, with_state: bool, **tensors: Any) -> Tensors:
    options = {**dict(op.options), **({op.last: True} if op.last else {})}
    if op.name.startswith("mamba3"):
        options["Input_States"] = tuple(tensors.pop(name) for name in op.initial.split())
    returned = function(**tensors, **options)
    return named(op, with_state, *(returned if isinstance(returned, tuple) else (returned,)))


def named(op: Op, with_state: bool, o: torch.Tensor, *left: torch.Tensor) -> Tensors:
    """Return the outputs of an op by name, including its final states if ``with_state`` is True.

    o: the output.
    left: the final states. Angles become their cosines and sines, because angles that differ by 2 pi are
        equal.
    """
    if not (op.last and with_state):
        return {"o": o}
    if not op.name.startswith("mamba3"):
        return {"o": o, **dict(zip(["ht"], left, strict=True))}
    angle, *others = left
    turn = torch.stack([angle.cos(), angle.sin()], -1)
    return {"o": o, **dict(zip(op.initial.split(), [turn, *others], strict=True))}


def reference(op: Op, with_state: bool, cu_seqlens: Any = None, **tensors: Any) -> Tensors:
    """Return the outputs of an op in float64, computed token by token for all sequences and heads at once."""
    if cu_seqlens is not None:
        parts = [reference(op, with_state, **{name: of_sequence(op, name, x, n, *span)
                                              for name, x in tensors.items()})
                 for n, span in enumerate(pairwise(cu_seqlens.tolist()))]
        return {name: torch.cat([part[name] for part in parts], 1 if name == "o" else 0) for name in parts[0]}
    x = by_role(op, tensors)
    o, ht = recurrence(op, x)
    if op.name.startswith("mamba3"):
        o = (o + tensors["D"][:, None] * tensors["V"]) * F.silu(tensors["Z"])
        return named(op, with_state, o, x["theta"][:, -1], ht.mT, x["k_before"][:, -1], x["v_before"][:, -1])
    if "hgrn" in op.name:
        o, ht = o[:, :, 0], ht[:, 0, 0]
    elif op.name == "selective_scan_fn":
        o, ht = o[..., 0].mT, ht[..., 0]
    elif op.name.startswith("mamba"):
        ht = ht.mT
    return named(op, with_state, o, ht)


def of_sequence(op: Op, name: str, x: torch.Tensor, n: int, first: int, end: int) -> torch.Tensor:
    """Return the rows of a tensor that belong to packed sequence n, with tokens first to end - 1.

    An initial state has one row for each sequence. Parameters without tokens are returned whole.
    """
    if name in ("u", "Q_bias", "K_bias", "D"):
        return x
    if name in op.initial.split():
        return x[n:n + 1]
    if name in ("ADT", "DT", "Trap"):
        return x[..., first:end]
    rows = op.steps if name in ("k", "v", "beta") else 1
    return x[:, first * rows:end * rows]


def by_role(op: Op, tensors: Tensors) -> Tensors:
    """Convert the tensors of an op into the tensors that ``recurrence`` uses, by role.

    The result has q and k [B, T, H, K] and v [B, T, H, V]. It also has the gates and vectors of the op, and
    the initial state S [B, H, K, V] if there is one.
    """
    if "hgrn" in op.name:  # one head with K = 1
        v, gv = tensors["x"][:, :, None], tensors["g"][:, :, None]
        one = torch.ones_like(v[..., :1])
        return {"q": one, "k": one, "v": v, "gv": gv, "S": tensors["initial_state"][:, None, None]}
    if op.name == "selective_scan_fn":  # a head for each channel, with V = 1
        step, u = tensors["delta"].mT[..., None], tensors["u"].mT[..., None]
        k = tensors["B"].mT[:, :, None]
        sizes = (*step.shape[:3], k.shape[3])
        return {"q": tensors["C"].mT[:, :, None].expand(sizes), "k": k.expand(sizes), "v": step * u,
                "gk": step * tensors["A"]}
    if op.name.startswith("mamba3"):
        dt, r = tensors["DT"].mT, tensors["Trap"].mT.sigmoid()
        theta = preceded(tensors["angle_state"], math.pi * tensors["Angles"].tanh() * dt[..., None]).cumsum(1)
        rates = torch.polar(torch.ones_like(theta), theta)[:, 1:]
        q, k = (turned(tensors[name] + tensors[f"{name}_bias"], rates) for name in "QK")
        return {"q": q, "k": k, "v": tensors["V"], "g": tensors["ADT"].mT, "own": dt * r,
                "past": dt * (1 - r), "S": tensors["ssm_state"].mT, "theta": theta,
                "k_before": preceded(tensors["k_state"], k),
                "v_before": preceded(tensors["v_state"], tensors["V"])}
    if op.name.startswith("mamba"):
        dt = tensors["dt"]
        return {"q": tensors["C"], "k": tensors["B"], "v": tensors["x"] * dt[..., None],
                "g": dt * tensors["A"], "S": tensors["initial_states"].mT}
    x = {role: tensors[name] for name, role in _roles(op).items()}
    if "initial_state" in tensors:
        x["S"] = tensors["initial_state"]
    if op.name not in ("chunk_rwkv7", "fused_mul_recurrent_rwkv7"):
        x["q"] = x["q"] * x["q"].shape[-1] ** -0.5
    heads = torch.arange(x["q"].shape[2], dtype=torch.float64)
    if "retention" in op.name:
        x["g"] = torch.log1p(-torch.exp2(-5 - heads)).expand(x["q"].shape[:3])
    if "lightning" in op.name:
        x["g"] = (-(8 / len(heads)) * (1 - 1 / 4) * heads).expand(x["q"].shape[:3])
    if "kk" in x:
        x["a"], x["b"] = -x["kk"], x["kk"] * x["rate"]
    return x


def preceded(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, ...] with ``state`` in front of its first row, so T + 1 rows.

    Row t is the value before token t, and the last row is the value after all tokens.
    """
    return torch.cat([state[:, None], x], 1)


def turned(x: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, H, K] with its first pairs of channels rotated.

    A pair of channels is a complex number. The first pairs are multiplied by ``rates``, one rate for each
    pair, and the other pairs stay the same.
    """
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).contiguous())
    count = rates.shape[-1]
    return torch.view_as_real(torch.cat([pairs[..., :count] * rates, pairs[..., count:]], -1)).flatten(-2)


def recurrence(op: Op, x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, T, H, V] and the state after the last token, computed token by token.

    x: the tensors of the recurrence by role, as returned by ``by_role``.
    """
    S = x.get("S", x["q"].new_zeros(x["q"].shape[0], *x["q"].shape[2:], x["v"].shape[-1]))
    outputs = []
    for row in range(x["v"].shape[1]):
        t, step = divmod(row, op.steps)
        q, k, v = x["q"][:, t], x["k"][:, row], x["v"][:, row]
        old = S
        if "past" in x:
            k_before, v_before = x["k_before"][:, t, :, :, None], x["v_before"][:, t, :, None]
            S = S + x["past"][:, t, :, None, None] * k_before * v_before
        if "g" in x and step == 0:
            S = x["g"][:, t, :, None, None].exp() * S
        if "gk" in x:
            S = x["gk"][:, t, :, :, None].exp() * S
        if "gv" in x:
            S = x["gv"][:, t, :, None].exp() * S
        if "a" in x:
            S = S + x["b"][:, t, :, :, None] * torch.einsum("bhkv,bhk->bhv", old, x["a"][:, t])[:, :, None, :]
        if "erase" in x:
            v = x["write"][:, t] * v - torch.einsum("bhkv,bhk->bhv", S, x["erase"][:, t] * k)
        elif op.delta:
            seen, by = (old, x["p"][:, t]) if "p" in x else (S, k)
            v = x["beta"][:, row, :, None] * (v - torch.einsum("bhkv,bhk->bhv", seen, by))
        v = x["own"][:, t, :, None] * v if "own" in x else v
        S = S + k[..., None] * v[:, :, None, :]
        read = old + (x["bonus"][None] * k)[..., None] * v[:, :, None, :] if op.before else S
        if step == op.steps - 1:
            outputs.append(torch.einsum("bhkv,bhk->bhv", read, q))
    return torch.stack(outputs, 1) if outputs else x["v"], S


def answer(side: str, op: Op, aspect: str) -> str:
    if not op.last and aspect == "states":
        return "none"
    if aspect == "packed" and op.packed not in ("both", "flashlin"):
        return op.packed
    if aspect == "packed" and op.packed == "flashlin" and side != "flashlin":
        return "error: no cu_seqlens"
    with_state = aspect != "backward"
    states = op.initial.split()
    constant = tuple({"forward": [*_roles(op), *states], "backward": states}.get(aspect, []))
    case = Case(op.name, aspect, partial(made, op, SIZES.get(aspect, Sizes())),
                partial(called, function_of(side, op), op, with_state), partial(reference, op, with_state),
                {"*": ALLOWED, "d*": ALLOWED}, constant)
    device = torch.device("cpu" if aspect == "CPU" else "cuda")
    dtype = torch.float32 if aspect in ("CPU", "fp32") else torch.bfloat16
    return record.told(check(case, device, dtype))


def one(side: str, name: str, aspects: list[str]) -> None:
    """Print one JSON line with the answer for each aspect. This runs in a child process.

    Each aspect is announced in a line before it runs, so that it is known if it ends the process.
    """
    torch.set_num_threads(1)  # the references run on the CPU, in several processes at the same time
    op = next(op for op in OPS if op.name == name)
    for aspect in aspects:
        print(json.dumps({"starting": aspect}), flush=True)
        try:
            text = answer(side, op, aspect)
        except Exception as error:  # any error is the answer
            text = record.raised(error, 160)
        print(json.dumps({aspect: text}), flush=True)
        if "CUDA" in text and text.startswith("error") and "invalid argument" not in text:
            return  # the CUDA context may be unusable


def asked(side: str, name: str, seconds: float) -> dict[str, Any]:
    """Return the row of an op of one package: its answer for every aspect.

    The aspects run in a child process. If an aspect ends it, a new child process runs the remaining aspects.

    side: ``fla``, ``mamba_ssm`` or ``flashlin``.
    seconds: time limit of a child process.
    """
    answers: dict[str, str] = {}
    while missing := [aspect for aspect in ASPECTS if aspect not in answers]:
        child = record.child("matrix.peers", "--one", name, "--side", side, *missing, seconds=seconds)
        said = child.messages or [{"starting": missing[0]}]
        for line in said:
            answers.update({aspect: text for aspect, text in line.items() if aspect != "starting"})
        if "starting" in said[-1]:
            answers[said[-1]["starting"]] = f"error: {child.ending}"
    return {"op": name, "side": side, **answers}


def joined(before: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a new record, and the rows of the earlier record that did not run again.

    Earlier rows are kept only if both records have the same device, versions and aspects.

    before: the earlier record.
    facts: the new record.
    """
    rows: list[dict[str, Any]] = facts["rows"]
    if any(before[key] != facts[key] for key in ("device", "triton", "torch", "packages", "aspects")):
        return rows
    names, new = [op.name for op in OPS], {(row["op"], row["side"]) for row in rows}
    old = (row for row in before["rows"] if row["op"] in names and (row["op"], row["side"]) not in new)
    return sorted([*old, *rows],
                  key=lambda row: (names.index(row["op"]), row["side"] == "flashlin"))


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=8, help="processes at the same time (default 8)")
    parser.add_argument("--seconds", type=float, default=240, help="time limit of a process (default 240)")
    parser.add_argument("--op", action="append", default=[],
                        help="only this op (repeatable)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("aspects", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.side, given.one, given.aspects)
        return 0
    from tqdm import tqdm
    work = [(side, op.name) for op in OPS if not given.op or op.name in given.op
            for side in (op.home.partition(".")[0], "flashlin")]
    card, rows = record.this_card(), dict[tuple[str, str], dict[str, Any]]()
    place = record.place(given.out or Path(), "peers", card)
    before = json.loads(place.read_text()) if given.out and place.exists() else None
    with ThreadPoolExecutor(given.jobs) as pool:
        answers = [pool.submit(asked, side, name, given.seconds) for side, name in work]
        for answer in tqdm(as_completed(answers), total=len(work)):
            row = answer.result()
            rows[row["side"], row["op"]] = row
            tqdm.write(" ".join(f"{str(row[key])[:40]!s:<14}" for key in ("op", "side", *ASPECTS)))
            if given.out:  # write after each row, because the GPU may be available for a limited time only
                facts = {"packages": {package: _package(package) for package in ("fla-core", "mamba_ssm")},
                         "aspects": ASPECTS, "rows": [rows[pair] for pair in work if pair in rows]}
                if before:
                    facts["rows"] = joined(before, {**record.made_by(card), **facts})
                record.write(given.out, "peers", card, **facts)
    return 0


def _package(name: str) -> dict[str, str]:
    """Return the installed version of a package, and the Triton releases that it requires."""
    installed = record.version(name)
    wanted = [line for line in (metadata.requires(name) if installed != "none" else None) or []
              if line.startswith("triton>")]
    return {"version": installed,
            "triton": wanted[0].partition(";")[0].removeprefix("triton>=") + " or newer" if wanted else "any"}


if __name__ == "__main__":
    sys.exit(main())
