"""Serve a small language model to many requests at once, and check every answer.

    python examples/serve.py                     some seconds on a CPU; picks the GPU if there is one
    python examples/serve.py --requests 40 --slots 16 --piece 32
    python examples/serve.py --json              the result as one line of JSON on stdout

What it shows: continuous batching, as engines do it. All that a Gated DeltaNet remembers of a request is a
state per layer, of one size however long the text is. So there is a pool of such states with a few slots; a
request that arrives takes a free slot, waits if there is none, and gives it back when it has its tokens.
Each step of the engine is
    flashlin.serving.prefill    the next piece of each prompt that is still being read, packed in one row
    flashlin.serving.decode     one more token for each request that is past its prompt
and the same for the short convolutions (causal_conv1d_prefill, causal_conv1d_update). The batch for decode
has a fixed size, as a CUDA graph wants it: the places that nobody needs are padding, with slot -1. Slots are
never cleared: has_initial_state says that a prompt's first piece starts from nothing.

The model has random weights, so what it writes means nothing. But each request is also generated alone, its
prompt read in one piece, and must get the same tokens.

Exit code: 0 if every request got the tokens that it gets alone, 1 if not.
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
H, HV, K, V = 2, 4, 16, 32  # two value heads share a head of q and k; a state is [HV, V, K]
WIDTH = 4  # taps of the short convolution
CHANNELS = 2 * H * K + HV * V


@dataclass
class Batch:
    """Tokens of several requests. slots: [N], -1 for padding. edges and has: of pieces of prompts, packed;
    None where each request has one token."""
    tokens: Tensor
    slots: Tensor
    edges: Tensor | None = None
    has: Tensor | None = None


class Mixer(nn.Module):
    """A Gated DeltaNet layer with its pools: of states [slots, HV, V, K], of the last tokens before the
    convolution [slots, CHANNELS, WIDTH - 1]."""

    def __init__(self, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, CHANNELS + 2 * HV, bias=False)
        self.filters = nn.Parameter(torch.randn(CHANNELS, WIDTH) / WIDTH ** 0.5)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HV)), nn.Parameter(torch.linspace(2, -3, HV))
        self.norm = flashlin.RMSNorm(V)
        self.out = nn.Linear(HV * V, HIDDEN, bias=False)
        # garbage, to show that nobody clears a slot
        self.states = torch.full((slots, HV, V, K), float("nan"), device=device)
        self.window = torch.full((slots, CHANNELS, WIDTH - 1), float("nan"), device=device, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [rows, HIDDEN]."""
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
    """q, k, v, g and beta of rows as [rows, 1, heads, ...] or, packed, [1, rows, heads, ...]. at: where the
    dimension of one goes."""
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
    """A batch's tokens -> logits [rows, VOCAB]."""

    def __init__(self, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(VOCAB, HIDDEN) / 4)  # little beside what the layers remember
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
    """arrives: the step at which it comes. wanted: how many tokens it asks for. read: tokens of its prompt
    that the model has seen."""
    name: int
    arrives: int
    prompt: list[int]
    wanted: int
    slot: int = -1
    read: int = 0
    written: list[int] = field(default_factory=list)


class Engine:
    """Continuous batching: ``step`` reads a piece of each unread prompt and writes a token of each other
    request."""

    def __init__(self, model: Model, slots: int, piece: int, device: torch.device) -> None:
        self.model, self.piece, self.device = model, piece, device
        self.free, self.running = [*range(slots)], list[Request]()
        self.slots, self.used = slots, dict[int, int]()  # how many requests a slot has had

    def admit(self, waiting: list[Request]) -> None:
        while waiting and self.free:
            request = waiting.pop(0)
            request.slot = self.free.pop()
            self.used[request.slot] = self.used.get(request.slot, 0) + 1
            self.running.append(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """The requests that are done with it."""
        reading = [request for request in self.running if request.read < len(request.prompt)]
        writing = [request for request in self.running if request.read == len(request.prompt)]
        if writing:  # always self.slots rows: the rest is padding
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
        """The likeliest token of each."""
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=False):
            request.written.append(token)

    def tensor(self, values: list[Any]) -> Tensor:
        dtype = torch.bool if isinstance(values[0], bool) else torch.int32
        return torch.tensor(values, dtype=dtype, device=self.device)


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A function to be told how many tokens were written. A bar on stderr, if tqdm is installed and somebody
    looks."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
        return
    with tqdm(total=total, unit="token", disable=None) as bar:  # None: not where stderr is no terminal
        yield bar.update


def serve(engine: Engine, requests: list[Request]) -> tuple[int, int]:
    """(steps, the most requests at once)."""
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
    """Requests with prompts of 1 to 90 tokens, of which each asks for 1 to 40, some steps apart."""
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
    parser.add_argument("--requests", type=int, default=16, help="how many come (default: 16)")
    parser.add_argument("--slots", type=int, default=6,
                        help="requests that run at once; the others wait (default: 6)")
    parser.add_argument("--piece", type=int, default=24,
                        help="tokens of a prompt that are read in one step (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and requests (default: 0)")
    parser.add_argument("--json", action="store_true",
                        help="print the result as JSON on stdout and nothing else there")
    options = parser.parse_args()
    for name in ("requests", "slots", "piece"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, need 1 or more")
    torch.manual_seed(options.seed)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        torch.set_num_threads(1)  # matrices this small gain nothing from a second thread

    model = Model(options.slots, device, torch.float32)
    requests, alone = drawn(options.requests, options.seed), drawn(options.requests, options.seed)
    engine = Engine(model, options.slots, options.piece, device)
    began = time.perf_counter()
    steps, most = serve(engine, requests)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    for request in alone:  # one slot, and prompts in one piece
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
              f"answers    {len(requests) - len(wrong)} of {len(requests)} are what the request gets alone",
              sep="\n")
    if wrong:
        print(f"serve: requests {', '.join(map(str, wrong))} got other tokens than alone, need the same",
              file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
