"""What the scripts share that try things on this machine's GPU: who made a record, where it lies, and the
processes in which each thing is tried, since a failure may end one or poison its CUDA context."""
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
    import torch

    from flashlin.compat import target
    return target.probe(torch.device("cuda", torch.cuda.current_device()))


def made_by(card: Target) -> dict[str, Any]:
    """The card and the versions that a record holds for."""
    return {"device": card.name, "capability": list(card.capability), "triton": card.triton,
            "ptxas": card.ptxas, "torch": card.torch, **({"arch": card.arch} if card.arch else {})}


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def place(folder: Path, kind: str, card: Target) -> Path:
    """Where a record lies."""
    return folder / f"{kind}-{card.name.replace(' ', '-')}-triton-{card.triton}.json"


def write(folder: Path, kind: str, card: Target, **facts: Any) -> None:
    """Write a record of what was found on a card today."""
    folder.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    place(folder, kind, card).write_text(one_a_line({**made_by(card), "date": today, **facts}),
                                         encoding="utf-8")


def told(verdicts: Iterable[Verdict], off: str = " ") -> str:
    """``right``, or what is off by how much; off: what is between the two."""
    wrong = [f"{verdict.tensor}{off}{verdict.rms:.2g}" for verdict in verdicts if not verdict.ok]
    return f"wrong: {', '.join(wrong)}" if wrong else "right"


def raised(error: Exception, most: int = 200) -> str:
    """An error as an outcome, on one line; most: characters of what it says."""
    return f"error: {type(error).__name__}: {' '.join(str(error).split())[:most]}"


def child(module: str, *arguments: str, seconds: float | None = None, **environment: str) -> Ended:
    """Run a module in a child process, for so long at most."""
    return run_to_end(python(module, *arguments), environment, limit=seconds)


def parser(about: str | None, **out: Any) -> argparse.ArgumentParser:
    """The options of a script that writes a record; about: the module's docstring."""
    options = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    options.add_argument("--out", type=Path, help="folder for the record", **out)
    return options
