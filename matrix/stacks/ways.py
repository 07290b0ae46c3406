"""Compute the tested quantities of a model, such as logits, and run the model raw, in float64 and patched.

``QUANTITIES`` lists the quantities. ``run`` computes them in one of the ways: raw (with the functions of the
package itself), plain (its plain torch), float64 (its plain torch in float64) or patched
(``flashlin.patched``).
"""
from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import flashlin
from flashlin import dispatch
from flashlin.testing.compare import Tensors
from matrix import record
from matrix.stacks.cuda import as_on_cuda, no_events
from matrix.stacks.models import TINY, Model, NoSuchModel, build
from matrix.stacks.verdicts import Answer

# T: tokens of a training step, more than a chunk of 64. ADDED: tokens that generation adds.
T, ADDED = 66, 8
PADS, LENGTH = 9, 24
PIECES = (0, 10, 21, 24)
DOCUMENTS = (0, 9, 33)


class Lacks(Exception):
    """Raised if a quantity does not apply to a model. The text says what the model lacks."""


class Program:
    """A model with fixed token ids, and the calls that a user's program makes."""

    def __init__(self, model: nn.Module, package: str) -> None:
        self.model: Any = model  # Any, because the classes have more methods than nn.Module
        self.package = package
        self.takes = inspect.signature(model.forward).parameters
        self.ids = torch.randint(2, TINY["vocab_size"], (2, T), generator=torch.Generator().manual_seed(1))
        self.rows = self.ids[:1] if package == "fla" else self.ids  # a row takes minutes in the interpreter

    def __call__(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, **options).logits
        return logits

    def needs(self, *names: str) -> None:
        for name in names:
            if name not in self.takes:
                raise Lacks(f"its forward takes no {name}")

    def gradients(self, loss: torch.Tensor) -> Tensors:
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        return {"d" + name: x.grad.clone() for name, x in self.model.named_parameters() if x.grad is not None}

    def trained(self, logits: torch.Tensor, targets: torch.Tensor) -> Tensors:
        """Return logits [T, vocabulary], and the gradients of their cross-entropy loss for the targets."""
        return {"logits": logits.detach(), **self.gradients(F.cross_entropy(logits, targets))}


def logits(of: Program) -> Answer:
    return Answer({"logits": of(of.rows).detach()})


def gradients(of: Program) -> Answer:
    """Return the gradients of the loss of the model, or of the cross-entropy loss if it computes no loss."""
    if "labels" in of.takes:
        return Answer(of.gradients(of.model(input_ids=of.rows, labels=of.rows).loss))
    return Answer(of.gradients(F.cross_entropy(of(of.rows)[:, :-1].flatten(0, 1), of.rows[:, 1:].flatten())))


def tokens(beams: int) -> Callable[[Program], Answer]:
    """Return a function that generates tokens with a cache, and without a cache for comparison.

    beams: number of beams. 1 means greedy generation.
    """
    def generated(of: Program) -> Answer:
        of.model.eval()
        prompt = of.rows[:, :LENGTH]
        if not hasattr(of.model, "generate"):
            raise Lacks("it generates nothing by itself")
        if of.package == "mamba_ssm":
            if beams > 1:
                raise Lacks("its generate has no beams")
            with no_events():
                found = of.model.generate(prompt, max_length=LENGTH + ADDED, top_k=1)
            return Answer({"tokens": found})
        found, want = (of.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ADDED,
                                         do_sample=False, num_beams=beams, use_cache=cached)
                       for cached in (True, False))
        return Answer({"tokens": found}, {"tokens": want})
    return generated


def padding(of: Program) -> Answer:
    """Return logits and gradients of a row that is padded on the left in a batch with a longer row.

    The expected results come from the same row alone.
    """
    of.needs("attention_mask")
    row = of.ids[:1, :LENGTH]
    padded = torch.cat([torch.cat([torch.zeros(1, PADS, dtype=torch.long), row], 1),
                        of.ids[1:, :PADS + LENGTH]])
    mask = torch.ones_like(padded)
    mask[0, :PADS] = 0
    targets = row[0, 1:]
    found, want = of(padded, attention_mask=mask)[0, PADS:], of(row)[0]
    return Answer(of.trained(found[:-1], targets), of.trained(want[:-1], targets))


@torch.no_grad()
def pieces(of: Program) -> Answer:
    """Return the logits of a prompt that runs in pieces with a cache.

    The expected logits come from the whole prompt in one call.
    """
    of.model.eval()
    row = of.ids[:, :LENGTH]
    want = of(row)
    return Answer({"logits": torch.cat([*_in_pieces(of, row)], 1)}, {"logits": want})


def _in_pieces(of: Program, row: torch.Tensor) -> Iterator[torch.Tensor]:
    if of.package == "mamba_ssm":  # its cache accepts one token at a time
        from mamba_ssm.utils.generation import InferenceParams
        cache = InferenceParams(max_seqlen=LENGTH, max_batch_size=len(row))
        for begin, end in pairwise((0, *range(PIECES[1], LENGTH + 1))):
            yield of(row[:, begin:end], inference_params=cache)
            cache.seqlen_offset = end
        return
    name = next((name for name in ("cache", "past_key_values", "cache_params") if name in of.takes), "")
    if not name:
        raise Lacks("its forward takes no cache")
    state = None
    for begin, end in pairwise(PIECES):
        where = {"cache_position": torch.arange(begin, end)} if "cache_position" in of.takes else {}
        out = of.model(input_ids=row[:, begin:end], use_cache=True, **{name: state}, **where)
        state = getattr(out, name, None)
        if state is None:
            raise Lacks("it returns no cache unless it is given one of its own kind")
        yield out.logits


def packed(by: str) -> Callable[[Program], Answer]:
    """Return a function that computes logits and gradients of two documents packed into one row.

    The expected results come from each document in a row of its own.

    by: the argument that marks the documents: ``cu_seqlens``, ``seq_idx`` or ``position_ids``.
    """
    def both(of: Program) -> Answer:
        edges = torch.tensor(DOCUMENTS, dtype=torch.int32)
        row = of.ids[:1, :DOCUMENTS[-1]]
        spans = [slice(begin, end) for begin, end in pairwise(DOCUMENTS)]
        told = _told(of, by, edges, torch.cat([torch.arange(one.stop - one.start) for one in spans])[None])
        targets = torch.cat([row[0, one][1:] for one in spans])
        found = of(row, **told)[0]
        want = torch.cat([of(row[:, one])[0, :-1] for one in spans])
        return Answer(of.trained(torch.cat([found[one][:-1] for one in spans]), targets),
                      of.trained(want, targets))
    return both


# Package -> the argument that marks documents in its layers. mamba_ssm also accepts the other arguments, but
# uses them only for states.
PACKED_BY = {"fla": "cu_seqlens", "mamba_ssm": "seq_idx"}


def _told(of: Program, by: str, edges: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    """Return the keywords that mark packed documents in a call of a model.

    by: ``cu_seqlens``, ``seq_idx`` or ``position_ids``.
    edges: the bounds of the documents.
    positions: [1, T] positions that begin at 0 in each document.

    For transformers, the positions are passed in addition, because attention without a cache finds documents
    by their positions. Raise Lacks if the model does not accept ``by``.
    """
    marks = (positions == 0).cumsum(1, dtype=torch.int32) - 1
    if of.package != "transformers":
        if by != PACKED_BY[of.package] or not {"kwargs", "mixer_kwargs", by} & set(of.takes):
            raise Lacks(f"{of.package} packs by {PACKED_BY[of.package]}")
        return {by: edges if by == "cu_seqlens" else marks}
    if by == "position_ids" or not any(x.kind is x.VAR_KEYWORD for x in of.takes.values()):
        of.needs(by)
    given: dict[str, Any] = {"use_cache": False}
    if "position_ids" in of.takes:
        given["position_ids"] = positions
    if by == "cu_seqlens":
        longest = int(edges.diff().max())
        given |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest,
                  "max_length_k": longest}
    return {**given, "seq_idx": marks} if by == "seq_idx" else given


QUANTITIES: dict[str, Callable[[Program], Answer]] = {
    "logits": logits, "gradients": gradients, "greedy": tokens(1), "beams": tokens(2), "padding": padding,
    "pieces": pieces, "packed: cu_seqlens": packed("cu_seqlens"), "packed: seq_idx": packed("seq_idx"),
    "packed: position_ids": packed("position_ids")}


# Quantities of the slow ways: FEW in float64, INTERPRETED in Triton's interpreter. The other quantities are
# compared with the same program run differently, so they need no such reference.
FEW = ("logits", "gradients")
INTERPRETED = (*FEW, "greedy", "beams")


class Wide(TorchFunctionMode):
    """A mode that replaces float32 by float64 in every torch call.

    Models convert some tensors to float32 for accuracy. In a run in float64, this would reduce the accuracy.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@contextmanager
def wide() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the ops of flashlin that run in a ``with`` block, by name."""
    ran = Counter[str]()
    with dispatch.watching(lambda plan: ran.update([plan.asked.op])):
        yield ran


def run(model: Model, way: str, patches: Sequence[str] = (), weights: dict[str, torch.Tensor] | None = None,
        quantities: Sequence[str] = (), on_cuda: bool = False) -> tuple[dict[str, Answer], list[str]]:
    """Run a model in one way. Return its answers by quantity, and the names of the flashlin ops that ran.

    way: ``raw``, ``plain``, ``float64`` or ``patched``. ``plain`` uses the options with which the package
        computes in plain torch, and ``float64`` is the same in float64.
    patches: arguments of ``flashlin.patched`` for the way ``patched``.
    weights: weights of another program to load, by name.
    quantities: the quantities to compute. () means all, or ``FEW`` for float64.
    on_cuda: patched layers use their branch for GPUs.
    """
    block = flashlin.patched(*patches) if way == "patched" else nullcontext()
    answers = {}
    with block, counting() as ran:
        for quantity in quantities or (FEW if way == "float64" else QUANTITIES):
            try:
                made = build(model, plain=way in ("plain", "float64"))
                if weights:
                    made.load_state_dict(weights)
                with wide() if way == "float64" else nullcontext():
                    if on_cuda and way == "patched":
                        made = as_on_cuda(made)
                    program = Program(made.double() if way == "float64" else made, model.package)
                    answers[quantity] = QUANTITIES[quantity](program)
            except NoSuchModel:
                raise
            except Lacks as why:
                answers[quantity] = Answer(lacks=str(why))
            except Exception as error:  # any error is the answer
                answers[quantity] = Answer(raises=record.raised(error).removeprefix("error: "))
    return answers, sorted(ran)
