"""Train a small character-level language model on Python's standard library, then let it write text.

    python examples/train_lm.py                    about a minute on two CPU cores; uses a GPU if it can
    python examples/train_lm.py --steps 2000       longer, for better text
    python examples/train_lm.py --json             the result as one line of JSON on stdout

The model is a small Gated DeltaNet. Training runs chunk by chunk (``flashlin.chunk_gated_delta_rule``).
Writing runs token by token (``flashlin.fused_recurrent_gated_delta_rule``), and starts from the state that
the chunked op returns for the prompt. Both ops compute the same function, which the example checks. The same
file runs on the CPU, on a T4 and on a B200; the plan in the first lines of output names the kernels.

Exit code: 0 if the loss fell and the two ops agree, 1 if not.
"""
from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashlin
from flashlin.compat.target import probe

VOCAB = 128  # ASCII; other characters become "?"
HIDDEN, HEADS, LAYERS = 128, 8, 2
BATCH, LENGTH = 8, 256
# number of characters at the end of the text that are not used for training
HELD_OUT = 4 * BATCH * LENGTH + 1
ENOUGH = 0.9  # the held-out loss must fall below this fraction of its initial value


class Mixer(nn.Module):
    """A Gated DeltaNet layer.

    Its heads forget (g) and overwrite the earlier value of a key (beta). Both rates are computed from the
    token itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.g, self.beta, self.gate = nn.Linear(HIDDEN, HEADS, bias=False), nn.Linear(HIDDEN,
                                                                                       HEADS), nn.Linear(
                                                                                           HIDDEN, HIDDEN,
                                                                                           bias=False)
        self.A_log = nn.Parameter(torch.zeros(HEADS))
        # A head's log decay is -softplus(g + dt_bias) per token. Initially, heads remember from one to some
        # hundred characters.
        self.dt_bias = nn.Parameter(torch.linspace(2, -5, HEADS))
        self.norm = flashlin.FusedRMSNormGated(HIDDEN // HEADS)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, state: Tensor | None, recurrent: bool) -> tuple[Tensor, Tensor | None]:
        B, T, _ = x.shape
        compute = torch.bfloat16 if x.device.type == "cuda" else x.dtype
        q, k, v = self.qkv(x).to(compute).view(B, T, 3, HEADS, HIDDEN // HEADS).unbind(2)
        op = flashlin.fused_recurrent_gated_delta_rule if recurrent else flashlin.chunk_gated_delta_rule
        o, state = op(F.silu(q), F.silu(k), v, g=self.g(x), beta=self.beta(x), A_log=self.A_log,
                      dt_bias=self.dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                      use_qk_l2norm_in_kernel=True, initial_state=state, output_final_state=not self.training)
        o = self.norm(o, self.gate(x).to(o.dtype).view_as(o))
        return self.out(o.flatten(2).to(x.dtype)), state


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(flashlin.RMSNorm(HIDDEN) for _ in range(2))
        self.mixer = Mixer()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, state: Tensor | None, recurrent: bool) -> tuple[Tensor, Tensor | None]:
        mixed, state = self.mixer(self.norms[0](x), state, recurrent)
        x = x + mixed
        return x + self.mlp(self.norms[1](x)), state


class Model(nn.Module):
    """A language model: tokens [B, T] -> logits [B, T, VOCAB], and one state per layer.

    The states contain everything that the model remembers of earlier tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = flashlin.RMSNorm(HIDDEN)

    def forward(self, tokens: Tensor, states: list[Tensor | None] | None = None,
                recurrent: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        x = flashlin.embedding(tokens, self.tokens)
        states = list(states or [None] * LAYERS)
        for layer, block in enumerate(self.blocks):
            x, states[layer] = block(x, states[layer], recurrent)
        return self.norm(x) @ self.tokens.T, states


class Bar:
    """Progress on stderr: a bar in a terminal, or ten lines in total elsewhere, such as in a log."""

    def __init__(self, total: int) -> None:
        self.total, self.live, self.began = total, sys.stderr.isatty(), time.perf_counter()

    def show(self, done: int, loss: float) -> None:
        seconds = time.perf_counter() - self.began
        text = f"step {done}/{self.total}  loss {loss:.3f}  {seconds:.0f} s"
        if self.live:
            filled = 30 * done // self.total
            end = "\n" if done == self.total else ""
            print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text}", end=end, file=sys.stderr, flush=True)
        elif 10 * done // self.total > 10 * (done - 1) // self.total:
            print(text, file=sys.stderr, flush=True)


def read_text() -> Tensor:
    """Return the top-level modules of the standard library as ASCII codes, about five million characters.

    Every machine with Python has this text.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    if len(text) < 10 * HELD_OUT:
        raise SystemExit(f"found only {len(text)} characters of Python source in "
                         f"{sysconfig.get_paths()['stdlib']}: is the library zipped?")
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)


def loss_of(model: Model, rows: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of each next character, in nats."""
    logits, _ = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(model: Model, text: Tensor, steps: int, device: torch.device) -> float:
    """Train the model, and return the seconds it took, without the setup of the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(steps, 2), pct_start=0.1)
    bar = Bar(steps)
    model.train()
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        rows = text[starts + torch.arange(LENGTH + 1)].long().to(device)
        loss = loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.show(step + 1, loss.item())
    return time.perf_counter() - bar.began


@torch.no_grad()
def held_out_loss(model: Model, rows: Tensor) -> float:
    model.eval()
    return float(loss_of(model, rows))


@torch.no_grad()
def disagreement(model: Model, prompt: Tensor) -> float:
    """Return the largest difference of the logits, chunked or token by token, over the largest logit."""
    model.eval()
    whole, _ = model(prompt)
    states: list[Tensor | None] | None = None
    single = []
    for t in range(prompt.shape[1]):
        logits, states = model(prompt[:, t:t + 1], states, recurrent=True)
        single.append(logits)
    return float((torch.cat(single, 1) - whole).abs().max() / whole.abs().max())


@torch.no_grad()
def write(model: Model, prompt: Tensor, count: int) -> str:
    """Read the prompt at once, and return `count` sampled characters.

    Each character takes the same time, however long the text gets.
    """
    model.eval()
    logits, states = model(prompt)
    written = []
    for _ in range(count):
        token = torch.multinomial(torch.softmax(logits[:, -1].float() / 0.7, -1), 1)
        written.append(int(token))
        logits, states = model(token, states, recurrent=True)
    return "".join(map(chr, written))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device",
                        help="cpu, cuda, cuda:1 ... (default: the GPU if torch sees one, else the CPU)")
    parser.add_argument("--steps", type=int, default=200,
                        help=f"training steps of {BATCH} x {LENGTH} characters (default: 200)")
    parser.add_argument("--seed", type=int, default=0,
                        help="seed of the weights, the batches and the written text (default: 0)")
    parser.add_argument("--json", action="store_true",
                        help="print only the result, as JSON on stdout")
    options = parser.parse_args()
    if options.steps < 0:
        parser.error(f"--steps: got {options.steps}, need 0 or more")
    torch.manual_seed(options.seed)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # A second thread hardly helps with matrices this small, and makes training up to 20 times as slow on a
    # busy machine.
    if device.type == "cpu":
        torch.set_num_threads(1)

    def say(*lines: str) -> None:
        if not options.json:
            print(*lines, sep="\n", flush=True)

    dtype = "bfloat16" if device.type == "cuda" else "float32"
    plan = flashlin.explain("chunk_gated_delta_rule", target=probe(device), B=BATCH, T=LENGTH, H=HEADS,
                            K=HIDDEN // HEADS, V=HIDDEN // HEADS, dtype=dtype)
    say(plan, "")

    text = read_text()
    rows = text[-HELD_OUT:-1].long().view(-1, LENGTH).to(device)
    prompt = torch.tensor([list(b"class Reader:\n    def __init__(self, ")], device=device)
    model = Model().to(device)
    before = held_out_loss(model, rows)
    seconds = train(model, text[:-HELD_OUT], options.steps, device)
    after = held_out_loss(model, rows)
    apart = disagreement(model, prompt)
    allowed = 0.05 if dtype == "bfloat16" else 1e-3
    sample = write(model, prompt, 300)
    fell, agree = after < ENOUGH * before, apart <= allowed

    say("",
        f"held-out loss  {before:.3f} -> {after:.3f} nats per character, {options.steps} steps in "
        f"{seconds:.1f} s on {device}",
        f"two forms      recurrent and chunked logits differ by {apart:.1e} of the largest on the prompt "
        f"({'within' if agree else 'MORE THAN'} {allowed:g})", "",
        "".join(map(chr, prompt[0].tolist())) + sample)
    if options.json:
        print(json.dumps({"plan": plan.splitlines()[0], "device": str(device), "dtype": dtype,
                          "steps": options.steps, "seconds": round(seconds, 2), "loss_before": before,
                          "loss_after": after, "fell": fell, "disagreement": apart, "agree": agree,
                          "sample": sample}))
    if not fell:
        print(f"train_lm: the held-out loss went from {before:.3f} to {after:.3f}, need below "
              f"{ENOUGH * before:.3f}: "
              f"with {options.steps} steps this is "
              f"{'too little training' if options.steps < 20 else 'a failure'}", file=sys.stderr)
    if not agree:
        print(f"train_lm: recurrent and chunked logits differ by {apart:.1e}, need at most {allowed:g}",
              file=sys.stderr)
    return 0 if fell and agree else 1


if __name__ == "__main__":
    sys.exit(main())
