"""Test documents that are packed into one row of a patched model: ``python -m matrix.stacks.documents``.

The script calls each model with each way to mark documents. It compares the logits of all documents, and the
gradients of their loss, with those of the same documents in separate rows. A cell of the record begins with
one of these words. The number or the message that follows is given in parentheses:

  isolated   the results agree within the bound (largest RMS ratio)
  warned     the results differ, and one warning says so (text of the warning)
  leaks      the results differ, and the number of warnings is not one (largest RMS ratio, number of warnings)
  raises     the patched model raises an error (message)
  -          the model also raises an error without flashlin (message)
"""
from __future__ import annotations

import argparse
import datetime
import inspect
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashlin
from matrix import markdown
from matrix.results import one_a_line
from matrix.stacks.models import MODELS, UNPATCHED, Model, NoSuchModel, build
from matrix.stacks.records import packed, read
from matrix.stacks.verdicts import error
from matrix.stacks.versions import OPTIONAL

FILE = "documents.json"
SHOWN = 240  # a warning or an error is cut to this number of characters
EDGES = (0, 9, 33, 50)  # the bounds of three documents in a row
Told = dict[str, Any]  # keywords of a call of a model


class Way(NamedTuple):
    """One way to mark the documents of a row.

    name: its column in the table.
    says: its explanation in the table.
    marks: returns the keywords of the call for the bounds of the documents.
    compiled: True if torch.compile traces the whole model.
    """
    name: str
    says: str
    marks: Callable[[tuple[int, ...]], Told]
    compiled: bool = False


def positions(edges: tuple[int, ...]) -> Tensor:
    """Return positions [1, T] that begin at 0 in each document, from the bounds of the documents."""
    return torch.cat([torch.arange(end - begin) for begin, end in pairwise(edges)])[None]


def numbers(edges: tuple[int, ...]) -> Tensor:
    """Return the number of each token's document [1, T], from 1."""
    return torch.cat([torch.full((end - begin,), at)
                      for at, (begin, end) in enumerate(pairwise(edges), 1)])[None]


def block_mask(edges: tuple[int, ...]) -> Tensor:
    """Return a mask [1, 1, T, T] to add to attention scores, causal within each document."""
    of = numbers(edges)[0]
    seen = (of[:, None] == of) & torch.ones(len(of), len(of), dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


WAYS = (
    Way("[B, T]", "`position_ids` [B, T]", lambda edges: {"position_ids": positions(edges)}),
    Way("[4, B, T]", "`position_ids` [4, B, T], whose row 0 holds the text positions",
        lambda edges: {"position_ids": positions(edges).expand(4, -1, -1)}),
    Way("ones", "`position_ids` [B, T] with an `attention_mask` of ones",
        lambda edges: {"position_ids": positions(edges),
                       "attention_mask": torch.ones(1, edges[-1], dtype=torch.long)}),
    Way("numbers", "`position_ids` [B, T] with an `attention_mask` of document numbers",
        lambda edges: {"position_ids": positions(edges), "attention_mask": numbers(edges)}),
    Way("block mask", "`position_ids` [B, T] with a block `attention_mask` [B, 1, T, T]",
        lambda edges: {"position_ids": positions(edges), "attention_mask": block_mask(edges)}),
    Way("compiled", "`position_ids` [B, T], the whole model under `torch.compile`",
        lambda edges: {"position_ids": positions(edges)}, compiled=True))


def answer(model: Model, way: Way) -> str:
    """Return the cell of the record for a model and a way to mark documents."""
    try:
        with warnings.catch_warnings(record=True) as said, flashlin.patched("transformers"):
            warnings.simplefilter("always")
            made = build(model)
            takes_positions = "position_ids" in inspect.signature(made.forward).parameters
            ids = torch.randint(2, 60, (1, EDGES[-1]), generator=torch.Generator().manual_seed(1))
            spans = [slice(begin, end) for begin, end in pairwise(EDGES)]
            alone = [_logits(made, ids[:, one], {"position_ids": torch.arange(one.stop - one.start)[None]}
                             if takes_positions else {}) for one in spans]
            right = _trained(made, torch.cat(alone, 1), ids)
            said.clear()
            called, broken = _compiled(made, ids, way) if way.compiled else (made, "")
            together = _trained(made, _logits(called, ids, way.marks(EDGES)), ids)
    except NoSuchModel:
        raise
    except Exception as failure:  # an error is also an answer
        why = f"{type(failure).__name__}: {_line(str(failure))[:60]}"
        return f"-: it raises without flashlin, too: {why}" if _raises(model, way) else f"raises: {why}"
    off = error(together, right)
    ours = [_line(str(one.message)) for one in said
            if one.category is RuntimeWarning and "document" in str(one.message)]
    if off.ok:
        return f"isolated {off.rms:.0e}{broken}" + (f": {ours[0]}" if ours else "")
    return f"warned: {ours[0]}" if len(ours) == 1 else f"leaks {off.rms:.0e}, {len(ours)} warnings"


def _raises(model: Model, way: Way) -> bool:
    """Return True if the call also raises without flashlin."""
    made, ids = build(model), torch.ones(1, EDGES[-1], dtype=torch.long)
    try:
        called, _ = _compiled(made, ids, way) if way.compiled else (made, "")
        called(input_ids=ids, **way.marks(EDGES))
    except Exception:
        return True
    return False


def _compiled(made: nn.Module, ids: Tensor, way: Way) -> tuple[Any, str]:
    """Return the compiled model, and the text `` with graph breaks`` or an empty text.

    The model is compiled as a whole, or with graph breaks if its own code needs them.
    """
    for whole in (True, False):
        torch._dynamo.reset()
        called = torch.compile(made, backend="eager", fullgraph=whole)
        try:
            called(input_ids=ids, **way.marks(EDGES))
        except torch._dynamo.exc.Unsupported:
            if not whole:
                raise
        else:
            return called, "" if whole else " with graph breaks"
    raise AssertionError("the second call returns or raises")


def _logits(model: Any, ids: Tensor, marks: Told) -> Tensor:
    logits: Tensor = model(input_ids=ids, **marks).logits
    return logits


def _trained(model: nn.Module, logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Return the logits and the gradients of a loss. Each token of a document predicts the next token."""
    model.zero_grad(set_to_none=True)
    kept = torch.cat([torch.arange(begin, end - 1) for begin, end in pairwise(EDGES)])
    F.cross_entropy(logits[0, kept], ids[0, kept + 1]).backward()  # type: ignore[no-untyped-call]  # torch
    return {"logits": logits.detach(), **{"d" + name: x.grad.clone() for name, x in model.named_parameters()
                                          if x.grad is not None}}


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:SHOWN]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to the record, and keep earlier rows of other models from the same transformers release."""
    facts = {"transformers": metadata.version("transformers"), "date": datetime.date.today().isoformat()}
    before = read(path) if path.exists() else {}
    kept = before["rows"] if before.get("transformers") == facts["transformers"] else []
    known = {one["model"]: one for one in [*kept, *rows]}
    path.write_text(one_a_line(packed({**facts, "rows": [
        known[one.name] for one in (*MODELS, *UNPATCHED) if one.name in known]})), encoding="utf-8")


def run(names: list[str], ways: list[str], out: Path | None) -> int:
    """Run models with several ways to mark documents, and write the record.

    Return 1 if a model raises, or mixes documents without exactly one warning, else 0.

    names: names of the models. Empty means all.
    ways: names of the ways. Empty means all.
    out: folder of the record, or None.
    """
    rows: list[dict[str, Any]] = []
    bad = 0
    for model in (*MODELS, *UNPATCHED):
        if model.package != "transformers" or (names and model.name not in names):
            continue
        try:
            found = {way.name: answer(model, way) for way in WAYS if not ways or way.name in ways}
        except NoSuchModel:
            continue
        rows.append({"model": model.name, "torch": torch.__version__, "ways": found})
        bad += any(one.startswith(("leaks", "raises")) for one in found.values())
        print(json.dumps(rows[-1]), flush=True)
        if out is not None:
            write(out / FILE, rows)
    return 1 if bad else 0


def table(folder: Path) -> list[str]:
    """Return the table as lines of markdown, or an empty list without a record."""
    path = folder / FILE
    if not path.exists():
        return []
    record = read(path)
    rows = [(f"`{row['model']}`", *(row["ways"][way.name].partition(":")[0] for way in WAYS))
            for row in record["rows"]]
    where: dict[str, list[str]] = {}
    for row in record["rows"]:
        for why in {re.sub(r"\b\w+(ForCausalLM|TextModel)\b", "the model", one.partition(": ")[2])
                    for one in row["ways"].values()} - {""}:
            where.setdefault(why, []).append(row["model"])
    return ["", "## Packed documents", "",
            f"Three documents in one row under `flashlin.patched(\"transformers\")`, transformers "
            f"{record['transformers']} on a CPU, {record['date']}, made by "
            "`python -m matrix.stacks.documents`. "
            "*isolated*: logits and gradients equal those of the documents in separate rows; the number is "
            "the largest RMS ratio. *warned*: they differ, and one warning says why and what to do. *-*: the "
            "model does not accept such a call, with or without flashlin. Calls leave `use_cache` at its "
            "default.", "",
            *markdown.table(("columns", "what marks the documents"), [(one.name, one.says) for one in WAYS]),
            "",
            *markdown.table(("model", *(way.name for way in WAYS)), rows), "",
            *markdown.table(("warning or error", "models"),
                            [(why, ", ".join(names)) for why, names in sorted(where.items())])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--way", action="append", default=[])
    parser.add_argument("--out", type=Path)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    logging.disable(logging.WARNING)
    for name in set(OPTIONAL) - {"transformers"}:
        sys.modules[name] = None  # type: ignore[assignment]  # makes imports of it fail, as if not installed
    options = parser.parse_args()
    sys.exit(run(options.model, options.way, options.out))
