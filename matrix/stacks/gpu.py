"""Measure layers and models of realistic size on a GPU, raw and patched: errors, times and training losses.

    python -m matrix.stacks.gpu --out matrix/results

A raw program uses the functions of its own package, and a patched program runs under ``flashlin.patched``.
This needs fla, and transformers for the models. First, several processes (``--warm``) fill Triton's cache
(``matrix/warming.py``). Then each program is measured in a process of its own, with the time limit
``--seconds``. Use ``--device cpu --small`` to test the script itself.

Errors are RMS ratios of the output and of all gradients, compared with flashlin in float32. They are computed
over ``--inputs`` random inputs, because a single input says little about a parameter with one element for
each head. The ratio is the patched error divided by the raw error (lower is better); the worst ratio may be
1.2. Times are medians of CUDA events, measured raw and patched in turn. Every backward gets new copies of its
inputs, because fla's RWKV-7 writes to them.
"""
from __future__ import annotations

import argparse
import datetime
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import flashlin
from matrix import record, warming

ROUNDS, STEPS, INPUTS = 5, 20, 8
ALLOWED = 1.2
VOCABULARY = 2048
Tensors = dict[str, torch.Tensor]
Block = Callable[[], AbstractContextManager[Any]]


class Size(NamedTuple):
    """Sizes of a program.

    B: rows of a batch.
    T: tokens of a row.
    D: width of the model.
    H: number of heads.
    K: size of a head.
    """
    B: int = 4
    T: int = 4096
    D: int = 2048
    H: int = 16
    K: int = 128


SMALL = Size(1, 66, 64, 4, 16)


class Whole(nn.Module):
    """A wrapper around a layer or model, whose forward returns one tensor.

    The input is [B, T, D] for a layer and token ids [B, T] for a model. The result is the output of the layer
    or the logits of the model.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        found: torch.Tensor = y[0] if isinstance(y, tuple) else getattr(y, "logits", y)
        return found


def layer(name: str, **options: Callable[[Size], Any]) -> Callable[[Size], nn.Module]:
    def build(size: Size) -> nn.Module:
        import fla.layers
        made = getattr(fla.layers, name)(hidden_size=size.D, layer_idx=0,
                                         **{key: of(size) for key, of in options.items()})
        return Whole(made)
    return build


def model(name: str, **options: Any) -> Callable[[Size], nn.Module]:
    def build(size: Size) -> nn.Module:
        import transformers
        sizes = {"vocab_size": VOCABULARY, "hidden_size": size.D, "intermediate_size": 2 * size.D,
                 "num_hidden_layers": 4, "num_attention_heads": size.H, "pad_token_id": None,
                 "max_position_embeddings": size.T}
        own = {key: of(size) if callable(of) else of for key, of in options.items()}
        return Whole(getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**{**sizes, **own, "use_cache": False})))
    return build


heads, width = attrgetter("H"), attrgetter("K")
MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
BOTH, FLA = ("fla", "transformers"), ("fla",)
PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[[Size], nn.Module]]] = {
    "GatedDeltaNet": (FLA, layer("GatedDeltaNet", num_heads=heads, head_dim=width, expand_v=lambda size: 1)),
    "DeltaNet": (FLA, layer("DeltaNet", num_heads=heads)),
    "KDA": (FLA, layer("KimiDeltaAttention", num_heads=heads, head_dim=width)),
    "GatedDeltaNet2": (FLA, layer("GatedDeltaNet2", num_heads=heads, head_dim=width)),
    "Comba": (FLA, layer("Comba", num_heads=heads, head_dim=width, expand_v=lambda size: 1)),
    "GatedDeltaProduct": (FLA, layer("GatedDeltaProduct", num_heads=heads, head_dim=width,
                                     expand_v=lambda size: 1)),
    "GLA": (FLA, layer("GatedLinearAttention", num_heads=lambda size: max(size.H // 4, 2))),
    "RetNet": (FLA, layer("MultiScaleRetention", num_heads=lambda size: max(size.H // 2, 2))),
    "HGRN2": (FLA, layer("HGRN2Attention", num_heads=heads)),
    "RWKV7": (FLA, layer("RWKV7Attention", num_hidden_layers=lambda size: 12,
                         head_dim=lambda size: 64 if size.K > 64 else size.K)),
    "Qwen3-Next-like": (BOTH, model(
        "Qwen3Next", layer_types=MIXED, mlp_only_layers=[0, 1, 2, 3], num_key_value_heads=2, head_dim=width,
        linear_num_key_heads=heads, linear_num_value_heads=lambda size: 2 * size.H,
        linear_key_head_dim=width, linear_value_head_dim=width)),
    "Kimi-like": (BOTH, model(
        "KimiLinear", layer_types=MIXED, mlp_layer_types=["dense"] * 4, num_key_value_heads=heads,
        linear_num_heads=heads, linear_head_dim=width, kv_lora_rank=64, qk_rope_head_dim=64,
        qk_nope_head_dim=64, v_head_dim=64)),
    "Mamba2-like": (("transformers",), model(
        "Mamba2", num_hidden_layers=2, num_heads=lambda size: 2 * size.D // width(size) * 2,
        head_dim=lambda size: width(size) // 2, state_size=width, n_groups=1, expand=2, chunk_size=256)),
}


def measured(name: str, size: Size, device: torch.device, dtype: torch.dtype, rounds: int = ROUNDS,
             steps: int = STEPS, inputs: int = INPUTS) -> dict[str, Any]:
    """Return the results of one program: errors, times in milliseconds and training losses, raw and patched.

    name: a key of ``PROGRAMS``.
    rounds: number of times that each time is measured.
    steps: number of training steps.
    inputs: number of random inputs for the errors.
    """
    patches, build = PROGRAMS[name]
    torch.manual_seed(0)
    whole = awake(build(size)).to(device)
    layered, rows = not hasattr(whole.inner, "config"), (size.B, size.T)
    state = {key: value.clone() for key, value in whole.state_dict().items()}
    ways: dict[str, Block] = {"raw": nullcontext, "patched": partial(flashlin.patched, *patches)}
    drawn, wanted = list[tuple[torch.Tensor, torch.Tensor]](), list[Tensors]()
    for _ in range(inputs):
        x = (torch.randn(*rows, size.D, device=device) if layered
             else torch.randint(0, VOCABULARY, rows, device=device))
        pull = torch.randn(*rows, size.D if layered else VOCABULARY, device=device)
        with ways["patched"]():
            wanted.append(both(whole, x, pull))
        drawn.append((x.to(dtype) if layered else x, pull.to(dtype)))
    whole.zero_grad(set_to_none=True)  # otherwise ``to`` would round the gradients in ``wanted`` in place
    whole = whole.to(dtype)
    runs: dict[str, Callable[..., Tensors]] = {"forward": partial(forward, whole), "both": partial(both, whole)}
    found: dict[str, Any] = {"inputs": inputs, **{way: {} for way in ways}}
    errors: dict[str, dict[str, float]] = {way: {} for way in ways}
    for way, block in ways.items():
        for what, run in runs.items():
            squares: dict[str, list[float]] = {}
            try:
                with block():
                    for given, want in zip(drawn, wanted, strict=True):
                        for key, tensor in run(*given).items():
                            squares.setdefault(key, []).append(ratio(tensor, want[key]) ** 2)
            except Exception as error:  # any error is the answer
                found[way][what] = record.raised(error).removeprefix("error: ")
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                errors[way] |= {key: math.sqrt(statistics.fmean(of)) for key, of in squares.items()}
        found[way]["output"] = errors[way].get("output")
        found[way]["gradient"] = max((one for key, one in errors[way].items() if key != "output"),
                                     default=None)
    compared = [(one / max(errors["raw"][key], 1e-6), key) for key, one in errors["patched"].items()
                if key in errors["raw"]]
    if compared:
        found["ratio"], found["at"] = max(compared)
    for what, run in runs.items():
        blocks = {way: block for way, block in ways.items() if what not in found[way]}
        for way, taken in timed(partial(run, *drawn[0]), blocks, device, rounds).items():
            found[way][what] = taken
    found["losses"] = {way: trained(build(size), state, drawn[0][0], block, device, dtype, steps)
                       for way, block in ways.items() if isinstance(found[way]["both"], float)}
    return found


def awake(whole: nn.Module) -> nn.Module:
    """Replace the weight matrices that are all zeros by random values, and return the module.

    fla's RWKV-7 initializes some matrices with zeros, including the output projection. With them, all outputs
    would be zeros, and there would be nothing to compare.
    """
    for parameter in whole.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return whole


def forward(whole: nn.Module, x: torch.Tensor, _: torch.Tensor) -> Tensors:
    with torch.no_grad():
        return {"output": whole(x)}


def both(whole: nn.Module, x: torch.Tensor, pull: torch.Tensor) -> Tensors:
    whole.zero_grad(set_to_none=True)
    output = whole(x.clone())
    output.backward(pull.clone())
    return {"output": output.detach(),
            **{key: one.grad for key, one in whole.named_parameters() if one.grad is not None}}


def ratio(one: torch.Tensor, want: torch.Tensor) -> float:
    difference = (one.float() - want.float()).pow(2).mean().sqrt()
    return float(difference / (want.float().pow(2).mean().sqrt() + 1e-12))


def timed(run: Callable[[], Any], ways: dict[str, Block], device: torch.device,
          rounds: int) -> dict[str, float]:
    """Return way -> median time of ``run`` in milliseconds.

    ways: ``raw`` and ``patched`` -> a function that returns a context manager for the run.
    rounds: number of runs of each way. The ways take turns in each round.
    """
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, within in ways.items():
            with within():
                run()
                taken[way].append(once(run, device))
    return {way: round(statistics.median(all_of), 3) for way, all_of in taken.items()}


def once(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]  # torch
    marks[0].record()
    run()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1]))


def trained(whole: nn.Module, state: Tensors, x: torch.Tensor, block: Block, device: torch.device,
            dtype: torch.dtype, steps: int) -> list[float]:
    """Return the loss of each training step, with float32 weights, autocast and a fixed random target.

    state: the weights to start from.
    x: the input of every step.
    block: returns a context manager in which all steps run, raw or patched.
    """
    whole.load_state_dict(state)
    whole = whole.to(device)
    tuner, losses = torch.optim.AdamW(whole.parameters(), lr=1e-3), []
    x = x.float() if x.is_floating_point() else x
    target: torch.Tensor | None = None
    with block():
        for _ in range(steps):
            with torch.autocast(device.type, dtype):
                output = whole(x.clone()).float()
                if target is None:
                    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device)
                loss = (output - target).pow(2).mean()
            loss.backward()
            tuner.step()
            tuner.zero_grad(set_to_none=True)
            losses.append(round(float(loss.detach()), 5))
    return losses


def short(name: str, found: dict[str, Any]) -> str:
    """Return the results of a program as one line of the printed table."""
    if "failed" in found:
        return f"{name:18} {found['failed']}"
    cells = [f"{name:18}"]
    for what in ("forward", "both"):
        cells.append(" / ".join(f"{taken:.2f}" if isinstance(taken, float) else "raises"
                                for taken in (found["raw"][what], found["patched"][what])))
    cells += [f"{found[way][what]:.2e}" if found[way].get(what) is not None else "-"
              for what in ("output", "gradient") for way in ("raw", "patched")]
    cells.append(f"{found['ratio']:.2f} {found['at']}" if "ratio" in found else "-")
    losses = [found["losses"].get(way, [None])[-1] for way in ("raw", "patched")]
    return " | ".join([*cells, f"{losses[0]} / {losses[1]}"])


def main() -> int:
    options = record.parser(__doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    options.add_argument("--small", action="store_true", help="use small sizes, to test only the script")
    options.add_argument("--only", default="", help="only programs whose names begin with one of these texts "
                         "(separated by commas); the record in --out, if made by these versions, keeps the "
                         "others")
    options.add_argument("--seconds", type=float, default=100, help="time limit of each process")
    options.add_argument("--warm", type=int, default=16 if torch.cuda.is_available() else 0, metavar="N",
                         help="number of processes that fill Triton's cache first")
    options.add_argument("--warm-seconds", type=float, default=300, help="time limit for filling the cache")
    options.add_argument("--inputs", type=int, default=INPUTS, metavar="N",
                         help=f"number of random inputs for the errors (default {INPUTS}); use more if a "
                         "ratio is slightly above the limit, which may be chance")
    options.add_argument("--one", choices=PROGRAMS, help=argparse.SUPPRESS)
    options.add_argument("--fill", type=warming.Share.parse, help=argparse.SUPPRESS)
    given = options.parse_args()
    device = torch.device(given.device)
    dtype = torch.bfloat16 if given.dtype == "bf16" else torch.float16
    size = SMALL if given.small else Size()
    names = [name for name in PROGRAMS if name.startswith(tuple(given.only.split(",")))]
    if given.one or given.fill:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        if given.fill:
            warming.walk(names, given.fill,
                         lambda name: measured(name, size, device, dtype, rounds=1, steps=1, inputs=1))
        else:
            warming.hurry()
            print(json.dumps(measured(given.one, size, device, dtype, inputs=given.inputs)))
        return 0
    arguments = ["--device", given.device, "--dtype", given.dtype, *(["--small"] if given.small else [])]
    if given.warm:
        print(warming.fill("matrix.stacks.gpu", "--only", given.only, *arguments, processes=given.warm,
                           seconds=given.warm_seconds, HF_HUB_OFFLINE="1"), flush=True)

    def asked(name: str) -> dict[str, Any]:
        child = record.child("matrix.stacks.gpu", "--one", name, "--inputs", str(given.inputs), *arguments,
                             seconds=given.seconds, HF_HUB_OFFLINE="1")
        return child.messages[-1] if child.messages and not child.failure else {"failed": child.ending}
    print("program | forward ms raw / patched | with backward | output error raw | patched | worst gradient "
          "raw | patched | worst ratio | last loss")
    versions = {"fla": record.version("fla-core"), "transformers": record.version("transformers"),
                "dtype": given.dtype}
    rows = before(given.out, versions) if given.out and given.only else {}
    for name in names:
        rows[name] = {"date": datetime.date.today().isoformat(), **asked(name)}
        print(short(name, rows[name]), flush=True)
        if given.out:  # write after each program, because the GPU may be available for a limited time only
            record.write(given.out, "stacks-gpu", record.this_card(), **versions,
                         programs={name: rows[name] for name in PROGRAMS if name in rows})
    return int(any("failed" in rows[name] or rows[name].get("ratio", 0) > ALLOWED for name in names))


def before(folder: Path, versions: dict[str, str]) -> dict[str, Any]:
    """Return the programs in the existing record of this GPU, or an empty dict.

    The dict is also empty if other versions than ``versions`` made the record.
    """
    card = record.this_card()
    place = record.place(folder, "stacks-gpu", card)
    facts = json.loads(place.read_text()) if place.exists() else {}
    same = {**record.made_by(card), **versions}.items() <= facts.items()
    programs: dict[str, Any] = facts["programs"] if same else {}
    return programs


if __name__ == "__main__":
    sys.exit(main())
