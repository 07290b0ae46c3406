"""Inputs at the limit up to which one decay reference per chunk is used, for the interpreter and for a GPU.

Beyond the limit, kernels halve the chunk recursively. A single reference must be no less accurate than
halving, and it must be correct wherever in the chunk the decays are strong.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch

from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case, Tensors, allowed, judge, results

GATES = {"chunk_gla": "g", "chunk_rwkv6": "w", "chunk_kda": "g", "chunk_gdn2": "g", "chunk_rwkv7": "w"}
SPANS = (119.0, 120.0, 121.0)  # total decay of a chunk in bits; one reference is used up to 120
SIZES = (1e-3, 0.09, 30.0, 300.0)  # scale of the operands, one for each head
WORSE = 1.2  # allowed error of one reference, as a multiple of the error of halving
NEGLIGIBLE = 3e-6  # RMS error that is always allowed: float32 rounding causes it
WEAK = -1e-3


def chunk_of(op: str, dtype: torch.dtype) -> int:
    """Return the number of tokens of a chunk for heads of at most 64 channels."""
    return 64 if dtype != torch.float32 else 32


def gates(chunk: int, positions: Iterable[int], repeats: int = 1,
          spans: Iterable[float] = SPANS) -> dict[str, list[torch.Tensor]]:
    """Return lists of log decays [chunk], by a name that describes them.

    The sequences of one name are judged together, because the error of a single sequence varies by chance.
    positions: positions of a single token with a strong decay.
    repeats: number of sequences for each distribution of the decay that ``positions`` does not set.
    spans: total decays of a chunk, in bits.
    """
    found: dict[str, list[torch.Tensor]] = {}

    def add(name: str, rows: slice, log: float) -> None:
        decays = torch.full((chunk,), WEAK)
        decays[rows] = log
        found.setdefault(name, []).append(decays)
    half, positions = chunk // 2, tuple(positions)
    for span in spans:
        log = -span * math.log(2)
        for position in positions:
            add(f"{span:.0f} bits in one token", slice(position, position + 1), log - (chunk - 2) * WEAK)
        for first, last in ((1, half), (half, chunk), (1, chunk)):
            weak = (chunk - 1 - (last - first)) * WEAK
            for _ in range(repeats):
                add(f"{span:.0f} bits in tokens {first} to {last - 1}", slice(first, last),
                    (log - weak) / (last - first))
    for position in (0, half, chunk - 1) * repeats:
        add(f"token {position} forgets everything", slice(position, position + 1), -math.inf)
    for _ in range(repeats):
        add("hardly anything", slice(0, 0), 0.0)
    return found


def make(dtype: torch.dtype, generator: torch.Generator, of: Case, decays: list[torch.Tensor], K: int,
         V: int) -> Tensors:
    """Return the inputs of a case with one sequence for each list of decays and one head for each of SIZES.

    Three of four channels have the given decays. The fourth has a weak decay. So have all channels in five
    tokens that follow the given ones.
    """
    T = len(decays[0]) + 5
    made = of.make(dtype, generator, B=len(decays), T=T, H=len(SIZES), K=K, V=V)
    size = torch.tensor(SIZES)[:, None]
    delta = {"beta", "b"} & made.keys()  # delta rules need keys of length 1, so k is not scaled
    for name in ("q", "r", "k", "v"):
        if name in made and (name != "k" or not delta):
            made[name] = (made[name].float() * size).to(dtype)
    made["initial_state"] *= (size * size)[..., None]
    log = made[GATES[of.op]]
    log[:, :T - 5, :, torch.arange(K) % 4 > 0] = torch.stack(decays)[:, :, None, None]
    log[:, T - 5:], log[..., torch.arange(K) % 4 == 0] = WEAK, WEAK
    return made


def errors(op: str, device: torch.device, dtype: torch.dtype, decays: list[torch.Tensor], K: int,
           V: int) -> tuple[dict[tuple[str, int, int], float], list[str]]:
    """Return RMS error ratios by (tensor, sequence, head), and descriptions of errors above the op's bounds.

    A tensor without a dimension for sequences, such as du, counts as sequence 0.
    """
    case = next(case for case in CASES if case.op == op and case.id == "random")
    case = case._replace(make=partial(make, of=case, decays=decays, K=K, V=V))
    found, beyond = {}, []
    for name, (ours, right) in results(case, device, dtype).items():
        # [sequences, heads, ...]
        ours, right = (x if "state" in name or name == "ht" else x[None] if name == "du" else x.transpose(1, 2)
                       for x in (ours, right))
        for n in range(right.shape[0]):
            for h in range(right.shape[1]):
                one, exact = ours[n, h].double(), right[n, h]
                size = exact.pow(2).mean().sqrt().clamp(min=1e-30)
                verdict = judge(name, one / size, exact / size, allowed(case, name, dtype))
                found[name, n, h] = verdict.rms
                if not verdict.ok:
                    beyond.append(f"sequence {n}, head {h}: {verdict}")
    return found, beyond


def failures(op: str, device: torch.device, dtype: torch.dtype, halve: Callable[[bool], None],
             positions: Iterable[int] | None = None, repeats: int = 8, spans: Iterable[float] = SPANS,
             K: int = 64, V: int = 64) -> list[str]:
    """Describe errors of one decay reference beyond the op's bounds, or beyond WORSE times those of halving.

    halve: turns halving on or off.
    positions: positions of the single token with a strong decay; None means all positions.
    repeats, spans: see ``gates``.
    """
    chunk = chunk_of(op, dtype)
    special = gates(chunk, range(chunk) if positions is None else positions, repeats, spans)
    decays = [one for several in special.values() for one in several]
    names = [name for name, several in special.items() for _ in several]
    halve(True)
    halved, _ = errors(op, device, dtype, decays, K, V)
    halve(False)
    ours, wrong = errors(op, device, dtype, decays, K, V)
    sums: dict[tuple[str, str, int], tuple[float, float]] = {}
    for (tensor, n, h), error in ours.items():
        key = (tensor, "all" if tensor == "du" else names[n], h)
        before = sums.get(key, (0.0, 0.0))
        sums[key] = before[0] + error ** 2, before[1] + halved[tensor, n, h] ** 2
    for (tensor, name, h), (mine, theirs) in sums.items():
        count = 1 if tensor == "du" else names.count(name)
        mine, theirs = (mine / count) ** 0.5, (theirs / count) ** 0.5
        if not mine <= max(WORSE * theirs, NEGLIGIBLE):
            wrong.append(f"{tensor}, inputs of {SIZES[h]}, {name}: {mine:.2g}, halving {theirs:.2g}")
    return wrong


def check_taken(op: str, device: torch.device, dtype: torch.dtype, halve: Callable[[bool], None],
                K: int) -> None:
    """Fail unless the op uses one decay reference for weak decays.

    Its results then differ from those of halving in the last bits. Equal results would mean that both runs
    halve, so that the other checks compare nothing.
    """
    decays, found = gates(chunk_of(op, dtype), ())["hardly anything"], []
    for halving in (True, False):
        halve(halving)
        found.append(errors(op, device, dtype, decays, K, K)[0])
    assert found[0] != found[1]
