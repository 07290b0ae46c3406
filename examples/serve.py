"""Serve a small language model to many requests at once, and check every answer.

    python examples/serve.py                     some seconds on a CPU; uses the GPU if there is one
    python examples/serve.py --requests 40 --slots 16 --piece 32
    python examples/serve.py --json              the result as one line of JSON on stdout

This example shows continuous batching, as in serving engines. A Gated DeltaNet remembers a request in one
state per layer, whose size does not depend on the length of the text. So the engine has a pool with a few
slots for such states. A new request takes a free slot, or waits until one is free. It returns the slot when
it has all its tokens. Each step of the engine calls

    flashlin.serving.prefill    for the next piece of each unfinished prompt, all packed in one row
    flashlin.serving.decode     for one more token of each request with a finished prompt

and the corresponding functions of the short convolutions (causal_conv1d_prefill, causal_conv1d_update). The
batch for decode has a fixed size, as a CUDA graph needs it. Its unused rows are padding with slot -1. Slots
are never cleared: has_initial_state tells prefill that the first piece of a prompt starts from a zero state.

The model has random weights, so its text has no meaning. But each request is also generated alone, with its
prompt in one piece, and must get the same tokens.

Exit code: 0 if every request gets the same tokens as alone, 1 if not.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashlin
from flashlin import serving

VOCAB, HIDDEN, LAYERS = 256, 64, 2
# Two value heads share a head of q and k. A state is [HV, V, K].
H, HV, K, V = 2, 4, 16, 32
WIDTH = 4  # filter width of the short convolution
CHANNELS = 2 * H * K + HV * V


@dataclass
class Batch:
    """Tokens of several requests.

    tokens: [rows], int32.
    slots: slot of each request, [N]; -1 for padding.
    edges: bounds of the packed pieces of prompts, [N + 1]; None if each request has one token.
    has: True for pieces that are not the first of their prompt, [N]; None if each request has one token.
    """
    tokens: Tensor
    slots: Tensor
    edges: Tensor | None = None
    has: Tensor | None = None


class Mixer(nn.Module):
    """A Gated DeltaNet layer with its pools.

    The pool of states is [slots, HV, V, K]. The pool of the convolution's last inputs is [slots, CHANNELS,
    WIDTH - 1].
    """

    def __init__(self, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, CHANNELS + 2 * HV, bias=False)
        self.filters = nn.Parameter(torch.randn(CHANNELS, WIDTH) / WIDTH ** 0.5)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HV)), nn.Parameter(torch.linspace(2, -3, HV))
        self.norm = flashlin.RMSNorm(V)
        self.out = nn.Linear(HV * V, HIDDEN, bias=False)
        # The pools start with NaN, to show that no slot is ever cleared.
        self.states = torch.full((slots, HV, V, K), float("nan"), device=device)
        self.window = torch.full((slots, CHANNELS, WIDTH - 1), float("nan"), device=device, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the output [rows, HIDDEN] for x [rows, HIDDEN]."""
        mixed, g, beta = self.project(x).split([CHANNELS, HV, HV], -1)
        options: dict[str, Any] = dict(
            A_log=self.A_log, dt_bias=self.dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True)
        if batch.edges is None or batch.has is None:
            mixed = serving.causal_conv1d_update(mixed, self.window, self.filters, activation="silu",
                                                 conv_state_indices=batch.slots)
            o = serving.decode(*by_heads(mixed, g, beta, 1), self.states, batch.slots, **options)
        else:
            mixed = serving.causal_conv1d_prefill(mixed[None], self.window, self.filters, None, batch.slots,
                                                  batch.edges, batch.has, "silu")[0]
            o = serving.prefill(*by_heads(mixed, g, beta, 0), self.states, batch.slots, batch.edges,
                                batch.has, **options)
        y: Tensor = self.out(self.norm(o.view(-1, HV, V)).flatten(1))
        return y


def by_heads(mixed: Tensor, g: Tensor, beta: Tensor,
             at: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Split rows into q, k, v, g and beta, and add a dimension of one.

    at: position of that dimension: 1 for [rows, 1, heads, ...], 0 for packed [1, rows, heads, ...].
    """
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    return (q.view(-1, H, K).unsqueeze(at), k.view(-1, H, K).unsqueeze(at), v.view(-1, HV, V).unsqueeze(at),
            g.unsqueeze(at), beta.unsqueeze(at))


class Block(nn.Module):
    def __init__(self, *pool: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(flashlin.RMSNorm(HIDDEN) for _ in range(2))
        self.mixer = Mixer(*pool)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.mixer(self.norms[0](x), batch)
        x = x + self.mlp(self.norms[1](x))
        return x


class Model(nn.Module):
    """A language model that returns logits [rows, VOCAB] for a batch's tokens."""

    def __init__(self, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        # Small weights, so that the layers' states matter more than the current token.
        self.tokens = nn.Parameter(torch.randn(VOCAB, HIDDEN) / 4)
        self.blocks = nn.ModuleList(Block(slots, device, dtype) for _ in range(LAYERS))
        self.norm, self.head = flashlin.RMSNorm(HIDDEN), nn.Parameter(torch.randn(VOCAB, HIDDEN))
        self.to(device, dtype)

    def forward(self, batch: Batch) -> Tensor:
        x = F.embedding(batch.tokens, self.tokens)
        for block in self.blocks:
            x = block(x, batch)
        logits: Tensor = self.norm(x) @ self.head.T
        return logits.float()


@dataclass
class Request:
    """One request to the engine, and its progress.

    name: number of the request.
    arrives: step at which it arrives.
    prompt: tokens of the prompt.
    wanted: number of tokens to generate.
    slot: its slot in the pools, -1 before it has one.
    read: number of prompt tokens that the model has seen.
    written: generated tokens.
    """
    name: int
    arrives: int
    prompt: list[int]
    wanted: int
    slot: int = -1
    read: int = 0
    written: list[int] = field(default_factory=list)


class Engine:
    """Continuous batching over a pool of slots.

    `step` reads a piece of each unfinished prompt, and writes one token of each other request.

    piece: maximum number of prompt tokens per request and step.
    """

    def __init__(self, model: Model, slots: int, piece: int, device: torch.device) -> None:
        self.model, self.piece, self.device = model, piece, device
        self.free, self.running = [*range(slots)], list[Request]()
        self.slots, self.used = slots, dict[int, int]()  # slot -> how many requests have used it

    def admit(self, waiting: list[Request]) -> None:
        while waiting and self.free:
            request = waiting.pop(0)
            request.slot = self.free.pop()
            self.used[request.slot] = self.used.get(request.slot, 0) + 1
            self.running.append(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Run one step of the model, and return the requests that it finishes."""
        reading = [request for request in self.running if request.read < len(request.prompt)]
        writing = [request for request in self.running if request.read == len(request.prompt)]
        if writing:  # the batch always has self.slots rows, filled up with padding
            rest = self.slots - len(writing)
            batch = Batch(self.tensor([request.written[-1] for request in writing] + [0] * rest),
                          self.tensor([request.slot for request in writing] + [-1] * rest))
            self.append(writing, self.model(batch))
        if reading:
            pieces = [request.prompt[request.read:request.read + self.piece] for request in reading]
            edges = [0, *accumulate(map(len, pieces))]
            batch = Batch(self.tensor([token for piece in pieces for token in piece]),
                          self.tensor([request.slot for request in reading]), self.tensor(edges),
                          self.tensor([request.read > 0 for request in reading]))
            logits = self.model(batch)[[edge - 1 for edge in edges[1:]]]
            for request, piece in zip(reading, pieces, strict=True):
                request.read += len(piece)
            whole = [n for n, request in enumerate(reading) if request.read == len(request.prompt)]
            self.append([reading[n] for n in whole], logits[whole])
        done = [request for request in self.running if len(request.written) == request.wanted]
        self.running = [request for request in self.running if request not in done]
        self.free += [request.slot for request in done]
        return done

    def append(self, requests: list[Request], logits: Tensor) -> None:
        """Append the most likely next token to each request. logits: [rows, VOCAB]."""
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=False):
            request.written.append(token)

    def tensor(self, values: list[Any]) -> Tensor:
        dtype = torch.bool if isinstance(values[0], bool) else torch.int32
        return torch.tensor(values, dtype=dtype, device=self.device)


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """Yield a function that receives the number of tokens just written.

    It draws a bar on stderr if tqdm is installed and stderr is a terminal.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
        return
    with tqdm(total=total, unit="token", disable=None) as bar:  # None: no bar if stderr is no terminal
        yield bar.update


def serve(engine: Engine, requests: list[Request]) -> tuple[int, int]:
    """Serve all requests, and return (number of steps, maximum number of concurrent requests)."""
    coming, waiting = sorted(requests, key=lambda request: request.arrives), list[Request]()
    step = most = done = 0
    with progress(sum(request.wanted for request in requests)) as show:
        while done < len(requests):
            while coming and coming[0].arrives <= step:
                waiting.append(coming.pop(0))
            engine.admit(waiting)
            most = max(most, len(engine.running))
            before = sum(len(request.written) for request in engine.running)
            running = [*engine.running]
            done += len(engine.step())
            show(sum(len(request.written) for request in running) - before)
            step += 1
    return step, most


def drawn(count: int, seed: int) -> list[Request]:
    """Return random requests that arrive 0 to 6 steps apart.

    Prompts have 1 to 90 tokens, and each request wants 1 to 40 tokens.
    """
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=random))
    arrivals = accumulate(number(0, 6) for _ in range(count))
    return [Request(name, arrives, [number(0, VOCAB - 1) for _ in range(number(1, 90))], number(1, 40))
            for name, arrives in enumerate(arrivals)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device",
                        help="cpu, cuda, cuda:1 ... (default: the GPU if torch sees one, else the CPU)")
    parser.add_argument("--requests", type=int, default=16, help="number of requests (default: 16)")
    parser.add_argument("--slots", type=int, default=6,
                        help="number of requests that run at once; the others wait (default: 6)")
    parser.add_argument("--piece", type=int, default=24,
                        help="number of prompt tokens to read in one step (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and requests (default: 0)")
    parser.add_argument("--json", action="store_true",
                        help="print only the result, as JSON on stdout")
    options = parser.parse_args()
    for name in ("requests", "slots", "piece"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, need 1 or more")
    torch.manual_seed(options.seed)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        torch.set_num_threads(1)  # a second thread does not help with matrices this small

    model = Model(options.slots, device, torch.float32)
    requests, alone = drawn(options.requests, options.seed), drawn(options.requests, options.seed)
    engine = Engine(model, options.slots, options.piece, device)
    began = time.perf_counter()
    steps, most = serve(engine, requests)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    for request in alone:  # one slot, and each prompt in one piece
        request.arrives = 0
        serve(Engine(model, 1, 1 << 20, device), [request])
    seconds_alone = time.perf_counter() - began
    wrong = [request.name for request, other in zip(requests, alone, strict=True)
             if request.written != other.written]

    written = sum(len(request.written) for request in requests)
    found = {"device": str(device), "requests": len(requests), "at_once": most,
             "prompt_tokens": sum(len(request.prompt) for request in requests), "tokens": written,
             "steps": steps, "steps_alone": sum(request.wanted for request in alone),
             "slots": options.slots, "most_requests_of_a_slot": max(engine.used.values()),
             "different_tokens": len({token for request in requests for token in request.written}),
             "tokens_per_second": round(written / seconds),
             "alone_per_second": round(written / seconds_alone), "wrong": wrong}
    if options.json:
        print(json.dumps(found))
    else:
        print(f"requests   {found['requests']}, {most} at once in {options.slots} slots; a slot served up to "
              f"{found['most_requests_of_a_slot']}, never cleared",
              f"tokens     {found['prompt_tokens']} read in pieces of {options.piece}, {written} written, "
              f"{found['different_tokens']} different ones",
              f"steps      {steps}; one by one {found['steps_alone']}",
              f"speed      {found['tokens_per_second']} tokens/s on {device}; one by one "
              f"{found['alone_per_second']}",
              f"answers    {len(requests) - len(wrong)} of {len(requests)} are the same as alone",
              sep="\n")
    if wrong:
        print(f"serve: requests {', '.join(map(str, wrong))} got other tokens than alone, need the same "
              "tokens", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
