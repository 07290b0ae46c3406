"""Shared helpers of the scripts that run experiments on the local GPU and record the results.

They describe the GPU and the versions of a record, choose its file name, and run each experiment in a child
process. A failure may end that process or corrupt its CUDA context, but the script itself continues.
"""
from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from flashlin.compat.subprocesses import Ended, python, run_to_end
from flashlin.compat.target import Target
from flashlin.testing.compare import Verdict
from matrix.results import one_a_line


def this_card() -> Target:
    """Return the target of the current CUDA device."""
    import torch

    from flashlin.compat import target
    return target.probe(torch.device("cuda", torch.cuda.current_device()))


def made_by(card: Target) -> dict[str, Any]:
    """Return the GPU and the package versions for which a record is valid."""
    return {"device": card.name, "capability": list(card.capability), "triton": card.triton,
            "ptxas": card.ptxas, "torch": card.torch, **({"arch": card.arch} if card.arch else {})}


def version(package: str) -> str:
    """Return the version of an installed package, or "none" if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def place(folder: Path, kind: str, card: Target) -> Path:
    """Return the path of a record, made from its kind, the GPU name and the Triton release."""
    return folder / f"{kind}-{card.name.replace(' ', '-')}-triton-{card.triton}.json"


def write(folder: Path, kind: str, card: Target, **facts: Any) -> None:
    """Write the results of a GPU as a record with the date of today."""
    folder.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    place(folder, kind, card).write_text(one_a_line({**made_by(card), "date": today, **facts}),
                                         encoding="utf-8")


def told(verdicts: Iterable[Verdict], off: str = " ") -> str:
    """Return ``right``, or the names of the wrong tensors with their RMS errors.

    off: the text between a tensor's name and its error.
    """
    wrong = [f"{verdict.tensor}{off}{verdict.rms:.2g}" for verdict in verdicts if not verdict.ok]
    return f"wrong: {', '.join(wrong)}" if wrong else "right"


def raised(error: Exception, most: int = 200) -> str:
    """Return an error as a one-line outcome, with at most `most` characters of its message."""
    return f"error: {type(error).__name__}: {' '.join(str(error).split())[:most]}"


def child(module: str, *arguments: str, seconds: float | None = None, **environment: str) -> Ended:
    """Run a module in a child process for at most `seconds` seconds."""
    return run_to_end(python(module, *arguments), environment, limit=seconds)


def parser(about: str | None, **out: Any) -> argparse.ArgumentParser:
    """Return an argument parser with ``--out`` for a script that writes a record.

    about: the module's docstring, whose first line becomes the description.
    out: further settings of the ``--out`` option.
    """
    options = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    options.add_argument("--out", type=Path, help="folder for the record", **out)
    return options
