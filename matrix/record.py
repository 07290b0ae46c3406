"""What the scripts share that try things on this machine's GPU: who made a record, where it lies, and the
processes in which each thing is tried, since a failure may end one or poison its CUDA context."""
from __future__ import annotations

import argparse
import datetime
import os
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from flashlin.compat.child import end, messages, python
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


class Child(NamedTuple):
    """said: the JSON objects that it printed, a line each. ending: how it ended, ``""`` if as it should;
    code: its exit status, None if its time was up."""
    said: list[dict[str, Any]]
    ending: str
    stderr: str
    code: int | None

    @property
    def died(self) -> str:
        """Its end as an outcome: that its time was up, or the last line that it had to say."""
        last = self.stderr.strip().rpartition("\n")[2]
        return f"error: {self.ending if self.code is None else last[:200] or self.ending}"


def child(module: str, *arguments: str, seconds: float | None = None, **environment: str) -> Child:
    """Run a module in a child process, for so long at most."""
    process = subprocess.Popen(python(module, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True, env={**os.environ, **environment})
    try:
        text, stderr = process.communicate(timeout=seconds)
        code, ending = process.returncode, f"process ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        end(process)
        text, stderr = process.communicate()
        code, ending = None, f"no answer in {seconds:.0f} s"
    return Child(messages(text), "" if code == 0 else ending, stderr, code)


def parser(about: str | None, **out: Any) -> argparse.ArgumentParser:
    """The options of a script that writes a record; about: the module's docstring."""
    options = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    options.add_argument("--out", type=Path, help="folder for the record", **out)
    return options
