"""The NVIDIA driver and its GPUs, found without torch, so that a GPU that torch cannot see is found as well.

The queries are cheap and cannot hang. nvidia-smi has a time limit of seconds, and /proc/driver/nvidia gives
the facts that nvidia-smi does not. libcuda is never called, since its start may wait for a GPU that is lost.
"""
from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from flashlin.compat.subprocesses import run_to_end
from flashlin.compat.target import card_named

LIMIT = 10.0  # seconds; a driver that is not kept loaded needs two or three for each GPU
FIELDS = ("name", "driver_version", "compute_cap", "memory.free", "memory.total", "compute_mode")
PROC = Path("/proc/driver/nvidia")


class Seen(NamedTuple):
    """One GPU as the driver reports it.

    capability: compute capability; (0, 0) if it is unknown.
    free, total: MiB of memory; -1 if unknown.
    mode: compute mode of the driver, usually ``Default``.
    """
    name: str
    capability: tuple[int, int] = (0, 0)
    free: int = -1
    total: int = -1
    mode: str = ""


class Driver(NamedTuple):
    """The installed NVIDIA driver.

    version: the driver's version; ``""`` if there is no driver.
    failed: reason that nvidia-smi gave no answer; ``""`` if it gave one.
    """
    version: str = ""
    cards: tuple[Seen, ...] = ()
    failed: str = ""

    def __str__(self) -> str:
        names = [card.name for card in self.cards]
        shown = "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return f"{shown or 'no card'}, driver {self.version or 'unknown'}"


def ask() -> Driver:
    """Return the driver and its GPUs from nvidia-smi, or from the driver's own files if nvidia-smi fails."""
    program = shutil.which("nvidia-smi")
    failed = "nvidia-smi is missing"
    if program is not None:
        # an older nvidia-smi refuses the whole query if it does not have one of the fields
        for fields in (FIELDS, FIELDS[:2]):
            found, failed = _asked(program, fields)
            if found.cards:
                return found
    return _proc()._replace(failed=failed)


def _asked(program: str, fields: tuple[str, ...]) -> tuple[Driver, str]:
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    said = run_to_end(command, limit=LIMIT)
    if said.code is None:
        return Driver(), f"nvidia-smi {said.failure}"
    rows = [[cell.strip() for cell in line.split(",")] for line in said.stdout.splitlines() if line.strip()]
    if said.code or not rows or any(len(row) != len(fields) for row in rows):
        return Driver(), f"nvidia-smi: {' '.join((said.stdout + said.stderr).split())[:200] or 'no GPU'}"
    cards = [dict(zip(fields, row, strict=True)) for row in rows]
    return Driver(cards[0]["driver_version"], tuple(_seen(card) for card in cards)), ""


def _seen(card: dict[str, str]) -> Seen:
    major, _, minor = card.get("compute_cap", "").partition(".")
    capability = ((int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else
                  known[1].capability if (known := card_named(card["name"])) else (0, 0))
    free, total = (int(said) if (said := card.get(f"memory.{name}", "")).isdecimal() else -1
                   for name in ("free", "total"))
    return Seen(card["name"], capability, free, total, card.get("compute_mode", ""))


def _proc() -> Driver:
    """Return the driver and its GPUs from /proc/driver/nvidia.

    A container that has only the device files finds nothing there.
    """
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _text(PROC / "version"))
    names = [found[1].strip() for file in sorted(PROC.glob("gpus/*/information"))
             if (found := re.search(r"Model:(.*)", _text(file)))]
    return Driver(version[1] if version else "", tuple(_seen({"name": name}) for name in names))


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
