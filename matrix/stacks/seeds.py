"""Run the programs whose failures led to flashlin, raw and under ``flashlin.patched("fla")``.

    python -m matrix.stacks.seeds --out matrix/results          needs an NVIDIA GPU and fla
    python -m matrix.stacks.seeds --device cpu --small          tests the script; raw fla needs a GPU

An outcome is ``right``, ``wrong: ...`` or ``error: ...``. It is right if the result is within bounds of plain
torch in float32, or if the program raises the intended error. Each program runs in a process of its own. The
parts of a program run in the same process, so an earlier failure can affect later parts, as in a user's
program. Autotuners use the first configuration that fits the GPU.
"""
from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import flashlin
from flashlin.compat.subprocesses import Ended
from flashlin.testing.compare import Tensors, judge
from matrix import record

AT_ONCE, SECONDS = 8, 120  # number of processes at the same time, and time limit of each
STEPS = 9  # tokens of a generation after its prompt
VOCABULARY = 50
# Allowed RMS ratios. On a CPU, with plain torch only, rounding to bf16 alone causes up to 0.009 in these
# layers, and 0.043 in the gradients of RWKV6.
OUTPUT, GRADIENT, FP32 = 0.03, 0.1, 1e-4
SIDES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "raw": nullcontext, "patched": partial(flashlin.patched, "fla")}


class Where(NamedTuple):
    """The device and dtype of a program.

    small: use small sizes, for a CPU.
    """
    device: torch.device
    dtype: torch.dtype
    small: bool

    @property
    def rows(self) -> tuple[int, int, int]:
        """Return the rows, tokens and width of the input of a layer."""
        return (2, 70, 64) if self.small else (2, 300, 256)

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


# Layer of fla -> a function that returns its options for a width.
LAYERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "DeltaNet": lambda width: {"num_heads": 2},
    "GatedDeltaNet": lambda width: {"num_heads": 2, "head_dim": width // 2},
    "MultiScaleRetention": lambda width: {"num_heads": 2},
    "RWKV6Attention": lambda width: {"num_heads": 2},
    "RWKV7Attention": lambda width: {"head_dim": min(64, width // 2), "num_hidden_layers": 2},
    "Mamba2": lambda width: {"head_dim": width // 4, "state_size": width // 4, "chunk_size": 64},
}


@contextmanager
def quick() -> Iterator[None]:
    """Save time in a ``with`` block: disable torch.compile, and shorten autotuning.

    The autotuners of fla have dozens of configurations. In the block, an autotuner uses the first
    configuration that fits the GPU, and does not write it to the disk cache.
    """
    from triton.runtime.autotuner import Autotuner
    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def pruned(tuner: Any, *args: Any, **given: Any) -> Any:
        tuner.decided = False
        return prune(tuner, *args, **given)

    def benched(tuner: Any, *args: Any, **given: Any) -> Sequence[float]:
        times: Sequence[float] = [math.inf] * 3 if tuner.decided else bench(tuner, *args, **given)
        tuner.decided |= times[0] < math.inf
        return times

    def measured(tuner: Any, key: Any, configs: Any, measure: Callable[[], None]) -> None:
        measure()
    with mock.patch.multiple(Autotuner, create=True, prune_configs=pruned, _bench=benched,
                             check_disk_cache=measured), torch.compiler.set_stance("force_eager"):
        yield


def layer(name: str, where: Where) -> nn.Module:
    """Return a layer of fla with weights that are not 0.

    A weight of 0 would hide an error in the computation with this weight.
    """
    torch.manual_seed(0)
    width = where.rows[-1]
    made: nn.Module = getattr(import_module("fla.layers"), name)(hidden_size=width, layer_idx=0,
                                                                 **LAYERS[name](width))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return made.to(where.device, where.dtype)


@contextmanager
def plain() -> Iterator[None]:
    with flashlin.patched("fla"), flashlin.settings(path="torch"):
        yield


def trained(layer: nn.Module, x: torch.Tensor, do: torch.Tensor) -> Tensors:
    """Return o, and the gradients of x and of the weights for the output gradient ``do``."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    o = layer(x)[0]
    o.backward(do)
    grads = {"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}
    return {"o": o.detach(), **{f"d{name}": grad for name, grad in grads.items() if grad is not None}}


@torch.no_grad()
def generated(layer: nn.Module, x: torch.Tensor) -> Tensors:
    """Return o of a prompt and of the next ``STEPS`` tokens, which run one by one with a cache."""
    cache, prompt = import_module("fla.models.utils").Cache(), x.shape[1] - STEPS
    layer.eval()
    pieces = [x[:, :prompt], *(x[:, at:at + 1] for at in range(prompt, x.shape[1]))]
    return {"o": torch.cat([layer(piece, past_key_values=cache, use_cache=True)[0] for piece in pieces], 1)}


def compared(ours: Tensors, right: Tensors, dtype: torch.dtype) -> str:
    """Compare results with the expected results, and return the outcome.

    ours: the results by name.
    right: the expected results by name.
    dtype: dtype of the computation, which decides the allowed errors. A gradient may have another dtype.
    """
    def allowed(name: str) -> float:
        return FP32 if dtype == torch.float32 else OUTPUT if name == "o" else GRADIENT
    missing = torch.empty(0)
    return record.told((judge(name, ours.get(name, missing), x, allowed(name))
                        for name, x in right.items()), " off by ")


def training(name: str, where: Where, side: str) -> str:
    made, x = layer(name, where), where.drawn(*where.rows)
    do = torch.randn_like(x)
    with SIDES[side]():
        ours = trained(made, x, do)
    with plain():
        return compared(ours, trained(made.float(), x.float(), do.float()), where.dtype)


def generation(name: str, where: Where, side: str) -> str:
    made, x = layer(name, where), where.drawn(*where.rows)
    with SIDES[side]():
        ours = generated(made, x)
    with plain(), torch.no_grad():
        return compared(ours, {"o": made.float()(x.float())[0]}, where.dtype)


def many_rows(where: Where, side: str) -> str:
    """Return the outcome of training a layer with 65,538 heads, more than the limit of 65,535 of a grid axis.

    Some rows are compared with a batch of only these rows.
    """
    T, head = (4, 8) if where.small else (64, 16)
    torch.manual_seed(0)
    made = import_module("fla.layers").GatedDeltaNet(hidden_size=6 * head, num_heads=6, head_dim=head,
                                                     expand_v=1, layer_idx=0).to(where.device, where.dtype)
    x, rows = where.drawn(10923, T, 6 * head), [0, 1, 5461, 10921, 10922]
    do = torch.randn_like(x)
    with SIDES[side]():
        ours = trained(made, x, do)
    with plain():
        right = trained(made.float(), x[rows].float(), do[rows].float())
    return compared({name: ours[name][rows] for name in ("o", "dx")},
                    {name: right[name] for name in ("o", "dx")}, where.dtype)


def long_row(where: Where, side: str) -> str:
    """Return the outcome of ``chunk_simple_gla`` on a long row, whose last head is compared."""
    T, H, K = (256, 3, 16) if where.small else (8192, 36, 256)
    torch.manual_seed(0)
    inputs = {**{name: where.drawn(1, T, H, K) for name in "qkv"},
              "g": F.logsigmoid(torch.randn(1, T, H, device=where.device))}
    do, last = torch.randn_like(inputs["v"]), slice(H - 1, H)

    def both(inputs: Tensors, do: torch.Tensor) -> Tensors:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        o = import_module("fla.ops.simple_gla").chunk_simple_gla(**leaves)[0]
        o.backward(do)
        return {"o": o.detach(), **{f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}}
    with SIDES[side]():
        ours = both(inputs, do)
    with plain():
        right = both({name: x[:, :, last].float() for name, x in inputs.items()}, do[:, :, last].float())
    return compared({name: x[:, :, last] for name, x in ours.items()}, right, where.dtype)


def _embedded(where: Where) -> tuple[nn.Sequential, torch.Tensor]:
    """Return a model of an embedding and an RMSNorm, and token ids [2, 16] for it."""
    torch.manual_seed(0)
    norm = import_module("fla.modules").RMSNorm(64)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 64), norm).to(where.device, where.dtype)
    return model, torch.randint(0, VOCABULARY, (2, 16), device=where.device)


def token_out_of_range(where: Where, side: str) -> str:
    model, tokens = _embedded(where)
    tokens[1, 3] = wrong = 3 * VOCABULARY - 1
    with SIDES[side](), flashlin.settings(tokens="sync"):
        if side == "patched":
            flashlin.guard_embeddings(model)
        try:
            model(tokens)
            if where.device.type == "cuda":
                torch.cuda.synchronize()
        except ValueError as error:
            said = str(error).replace(f"{Path(__file__).parents[2]}/", "")  # records contain no local paths
            named = str(wrong) in said and str(VOCABULARY) in said
            return f"{'right' if named else 'wrong'}: ValueError: {said}"
    return "wrong: silent"


def tokens_in_range(where: Where, side: str) -> str:
    model, tokens = _embedded(where)
    with SIDES[side](), torch.no_grad():
        ours = model(tokens)
    with torch.no_grad():
        x = model[0](tokens).float()
    return compared({"o": ours}, {"o": F.rms_norm(x, (64,), eps=1e-5)}, where.dtype)


Part = Callable[[Where, str], str]
BOTH_WAYS = "forward and backward"
PROGRAMS: dict[str, dict[str, Part]] = {
    "chunk_simple_gla on a long row": {f"(1, 8192, 36, 256), {BOTH_WAYS}": long_row},
    "GatedDeltaNet, 65,538 heads": {f"B = 10923, 6 heads, {BOTH_WAYS}": many_rows},
    **{name: {BOTH_WAYS: partial(training, name),
              "a prompt, then token by token": partial(generation, name)} for name in LAYERS},
    "RMSNorm after an embedding": {"a token of 3 x vocab_size - 1": token_out_of_range,
                                   "then tokens in range": tokens_in_range},
}


def outcome(part: Part, where: Where, side: str) -> str:
    try:
        return part(where, side)
    except Exception as error:  # any error is the outcome
        return record.raised(error)


def row_of(program: str, part: str, children: dict[str, Ended]) -> dict[str, str]:
    """Return the row of the record about one part of a program.

    It has the outcome in the child process of each side, or how that process ended.

    children: ``raw`` and ``patched`` -> the ended child process.
    """
    said = {side: {one["part"]: one["outcome"] for one in child.messages} for side, child in children.items()}
    return {"program": program, "part": part,
            **{side: said[side].get(part, f"error: {child.ending}") for side, child in children.items()}}


def main() -> int:
    options = record.parser(__doc__)
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--small", action="store_true", help="use small sizes, to test only the script")
    options.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N",
                         help="number of processes at the same time")
    options.add_argument("--seconds", type=float, default=SECONDS, help="time limit of each process")
    options.add_argument("--only", default="",
                         help="only programs whose names begin with this text; without a record")
    options.add_argument("--one", choices=PROGRAMS, help=argparse.SUPPRESS)
    options.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.out and (given.device != "cuda" or given.small or given.only):
        options.error("--out: a record needs all programs in full size on a GPU: leave out --device, --small "
                      "and --only")
    where = Where(torch.device(given.device), torch.bfloat16 if given.device == "cuda" else torch.float32,
                  given.small)
    if given.one:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        with quick():
            for part, run in PROGRAMS[given.one].items():
                print(json.dumps({"part": part, "outcome": outcome(run, where, given.side)}), flush=True)
        return 0
    names = [name for name in PROGRAMS if name.startswith(given.only)]
    arguments = ["--device", given.device, *(["--small"] if given.small else [])]

    def asked(name: str, side: str) -> Ended:
        return record.child("matrix.stacks.seeds", "--one", name, "--side", side, *arguments,
                            seconds=given.seconds, HF_HUB_OFFLINE="1")
    with ThreadPoolExecutor(given.at_once) as pool:
        begun = {name: {side: pool.submit(asked, name, side) for side in SIDES} for name in names}
    rows = [row_of(name, part, {side: child.result() for side, child in begun[name].items()})
            for name in names for part in PROGRAMS[name]]
    if given.out:
        record.write(given.out, "seeds", record.this_card(), fla=record.version("fla-core"), rows=rows)
    for row in rows:
        print(" | ".join((row["program"], row["part"], *(row[side][:60] for side in SIDES))))
    return int(not all(row["patched"].startswith("right") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
