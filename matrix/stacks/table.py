"""Write the tables of real programs, raw and patched, for docs/support/models.md.

Their data are the records of ``python -m matrix stacks``, ``matrix.stacks.gpu`` and ``matrix.stacks.seeds``.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flashlin.testing.compare import NEGLIGIBLE
from matrix import markdown
from matrix.stacks.models import excuse, in_words
from matrix.stacks.records import read
from matrix.stacks.verdicts import GRADIENTS, LOGITS, MEANS, verdict_of

MARKS = {"agrees": "yes", "reference": "yes", "alone": "runs", "as raw": "as raw", "differs": "**differs**",
         "raises": "error", "not patched": "torch", "-": "-"}
REFERENCES = {
    "": "the torch path of the raw program, in float32 and float64",
    "without fla": "the same models without fla",
    "interpreter": "raw fla in Triton's interpreter (logits, gradients and tokens)",
    "transformers": "the model of transformers with the same weights, in float32 and float64"}

AS_ON_A_GPU = (
    "Before transformers 5.15, the layers of Mamba and LFM check whether they are on a GPU. Here the raw "
    "layers run on a CPU with their own torch functions. The layers that are *patched as on a GPU* run "
    "their branch for GPUs, which has limits of its own. For mamba2, nemotron_h and zamba2, the sizes are "
    "chosen so that both branches compute the same: one group, one chunk for each row, and no minimal time "
    "step.")


def table(folder: Path) -> list[str]:
    """Return the tables of programs on a CPU as lines of markdown, or an empty list without records."""
    records = [read(path) for path in sorted(folder.glob("stacks-*.json")) if "-gpu-" not in path.name]
    if not records:
        return []
    lines = ["", "## Real programs", "",
             "`python -m matrix stacks` runs models of other packages on a CPU, raw and under "
             "`flashlin.patched`. A cell with two answers shows the raw program, then the patched program. "
             "The number is the RMS ratio of the patched program, or of its worst gradient; lower is better. "
             f"The bounds are {LOGITS:g} for logits and {GRADIENTS:g} for gradients, and tokens must be "
             f"equal. A tensor also agrees if no element is off by more than {NEGLIGIBLE:g}. Its ratio may "
             "then exceed the bound, if its elements are small, as in the gradients of RWKV7.\n\n"
             "Some columns compare a program with itself:\n\n"
             "- *padding*: a padded row in a batch, with the row alone\n"
             "- *pieces*: a prompt in several calls that pass the cache on, with the prompt in one call\n"
             "- *packed*: documents in one row, marked by the named argument, with the documents one by one\n"
             "- *greedy* and *beams*: tokens of a greedy search and of a beam search with a cache, with "
             "tokens that are generated without a cache", "", AS_ON_A_GPU, "",
             *markdown.table(("", "means"), [(MARKS[verdict], meaning) for verdict, meaning in MEANS.items()
                                             if verdict != "reference"])]
    for record in sorted(records, key=lambda one: (one["of"], _by_number(one["stack"])), reverse=True):
        lines += _of_record(record)
    return [*lines, "", "### Why a patched program has another answer than yes or runs", "",
            "The records `matrix/results/stacks-*.json` have the whole error messages.", "",
            *markdown.table(("answer", "quantity", "where"), _reasons(records))]


def _by_number(stack: str) -> list[tuple[int, str]]:
    """Return a sort key that orders versions by number, so that 5.23.0 comes after 5.8.0."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", stack)]


def on_gpus(folder: Path) -> list[str]:
    """Return the tables of programs of realistic size on GPUs, or an empty list without records."""
    return _by_gpu(
        folder, "stacks-gpu-*.json", "Real programs on GPUs",
        "`python -m matrix.stacks.gpu` measures layers and models of realistic size in bf16. A cell shows "
        "raw / patched. Errors are RMS ratios of the output and of the worst gradient, compared with "
        "flashlin in float32 over the given number of inputs; lower is better. *worst ratio* is the "
        "patched error divided by the raw error, for the tensor with the largest ratio; the limit is 1.2. The "
        "layers of fla are a selection: Gated DeltaNet, DeltaNet, KDA, GLA, RetNet, HGRN2, RWKV-7, Gated "
        "DeltaNet 2, Comba and Gated DeltaProduct. Other layers have not been measured like this. Each row "
        "has its own date; the date above a table is the latest.",
        ("program", "forward, ms", "with backward, ms", "error of the output", "of the worst gradient",
         "worst ratio", "inputs", "loss after 20 steps", "date"),
        lambda record: [_measured(name, one) for name, one in record["programs"].items()])


def seeds(folder: Path) -> list[str]:
    """Return the tables of the first programs that flashlin was made for, or an empty list without records."""
    return _by_gpu(
        folder, "seeds-*.json", "The first programs",
        "`python -m matrix.stacks.seeds` runs layers and functions of fla, raw and under "
        "`flashlin.patched(\"fla\")`. *right*: the result is within bounds of plain torch in float32, or the "
        "program raises the intended error. The rows of a program run one after the other in one process, "
        "so an earlier failure can affect a later row.",
        ("program", "what it does", "raw", "patched"),
        lambda record: [(row["program"], row["part"], row["raw"], row["patched"]) for row in record["rows"]])


def _by_gpu(folder: Path, pattern: str, title: str, said: str, head: tuple[str, ...],
            rows: Callable[[dict[str, Any]], list[tuple[str, ...]]]) -> list[str]:
    lines: list[str] = []
    for path in sorted(folder.glob(pattern)):
        record = json.loads(path.read_text(encoding="utf-8"))
        lines += ["", f"### {title}: {record['device']}, Triton {record['triton']}", "",
                  f"fla {record['fla']}, torch {record['torch']}, {record['date']}.", "",
                  *markdown.table(head, rows(record))]
    return lines and ["", f"## {title}", "", said, *lines]


def _measured(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    def both(of: Callable[[str], Any], form: str) -> str:
        return " / ".join(format(one, form) if isinstance(one, float) else "error" if isinstance(one, str) else "-"
                          for one in map(of, ("raw", "patched")))
    ratio = f"{found['ratio']:.2f} `{found['at'].removeprefix('inner.')}`" if "ratio" in found else "-"
    return (name, both(lambda way: found[way]["forward"], ".2f"), both(lambda way: found[way]["both"], ".2f"),
            both(lambda way: found[way]["output"], ".1e"), both(lambda way: found[way]["gradient"], ".1e"),
            ratio, str(found.get("inputs", 1)),
            both(lambda way: (found["losses"].get(way) or [None])[-1], ".4f"), found["date"])


def _of_record(record: dict[str, Any]) -> Iterable[str]:
    quantities = list(record["rows"][0].get("raw") or record["rows"][0]["patched"])
    patches = ", ".join(map(repr, record["patches"]))

    def said(fact: str) -> str:
        return " and ".join(sorted({row[fact] for row in record["rows"]}))

    yield from ("", f"### {record['stack']}", "",
                f"`patched({patches})`, torch {said('torch')}, {said('date')}; compared with "
                f"{REFERENCES[record['reference']]}{'; patched as on a GPU' * record['on_cuda']}.", "")
    yield from markdown.table(("model", *quantities), [
        (f"`{row['model']}`", *(_cell(row, quantity) for quantity in quantities)) for row in record["rows"]])


def _cell(row: dict[str, Any], quantity: str) -> str:
    raw, patched = (_mark(row.get(way, {}).get(quantity, "alone")) for way in ("raw", "patched"))
    shown = f"{patched} {_figure(row['patched'].get(quantity, ''))}".strip()
    return shown if raw == patched else f"{raw} / {shown}"


def _mark(answer: str) -> str:
    return MARKS[verdict_of(answer)]


def _figure(answer: str) -> str:
    """Return one RMS ratio from an answer as text, or an empty string for tokens.

    An answer may have several ratios, each for another reference. The function prefers the program itself,
    then float64, then float32.
    """
    if answer.endswith(" at tokens"):  # tokens are equal or not
        return ""
    found = (re.search(rf" {name} ([^ /]+)/", answer) for name in ("itself", "fp64", "fp32"))
    return next((one[1] for one in found if one), "")


def _reasons(records: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    where: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for row in record["rows"]:
            for quantity, answer in row["patched"].items():
                if _mark(answer) not in ("yes", "runs"):
                    verdict = verdict_of(answer)
                    before = verdict_of(row.get("raw", {}).get(quantity, "alone"))
                    said = answer if ":" in answer.partition(" ")[0] else verdict
                    if why := (excuse(row["model"], quantity, verdict, before, record["on_cuda"])
                               or in_words(row["model"], answer)):
                        said = f"{verdict}: the model itself: {why}"
                    where.setdefault((_brief(said), quantity), []).append(f"{row['model']} ({record['stack']})")
    quantities: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (said, quantity), places in sorted(where.items()):
        quantities.setdefault((said, tuple(places)), []).append(quantity)
    return [(said, ", ".join(several), _some(places)) for (said, places), several in quantities.items()]


def _brief(said: str) -> str:
    """Return the text of an error without names of kernels and models, if it says that there is no CPU version."""
    if "UnsupportedError" in said and "tensors on the CPU" in said:
        return "raises: it needs a kernel that has no CPU version"
    return re.sub(r"NoCpuVersion: (?:\w+ cannot run this call on a CPU: )?(?:flashlin has no CPU version of .*)?",
                  lambda found: "it needs a function that has no CPU version" if "flashlin has" in found[0] else
                  "it cannot run on a CPU: ", said)


def _some(places: Sequence[str], most: int = 2) -> str:
    return ", ".join(places[:most]) + (f" and {len(places) - most} more" if len(places) > most else "")
