"""Metrics from the machine code of a compiled kernel that indicate its speed.

The metrics are the number of instructions of the longest loop, and how many of them access local memory.
Local memory contains the values that do not fit in registers.
"""
from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from flashlin.compat.subprocesses import run_to_end

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);")
LABEL = re.compile(r"\s*(\.L_\w+):")
TO = re.compile(r"`\((\.L_\w+)\)")
UNKNOWN_CARD = re.compile(r"is deprecated|Cannot decode architecture")
LOCAL = re.compile(r"(LDL|STL)\b")


class Loop(NamedTuple):
    """The longest loop of a kernel.

    instructions: number of instructions, including nested loops; that of the whole kernel if it has no loop.
    local: number of those instructions that load from or store to local memory.
    """
    instructions: int = 0
    local: int = 0


def longest_loop(listing: str) -> Loop:
    """Return the longest loop in the output of nvdisasm for one kernel.

    A loop extends from a label to the last branch back to it.
    """
    names, labels, backward = list[str](), dict[str, int](), list[tuple[int, int]]()
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := INSTRUCTION.match(line):
            target = TO.search(instruction[2])
            if target and target[1] in labels and instruction[1].startswith("BRA"):
                backward.append((labels[target[1]], len(names) + 1))
            names.append(instruction[1])
    # Every kernel ends with a branch to itself, which is not a loop of the program.
    loops = [(first, end) for first, end in backward if end - first > 1]
    first, end = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, len(names)))
    return Loop(end - first, sum(bool(LOCAL.match(name)) for name in names[first:end]))


def loop_of(machine_code: bytes, disassembler: Path, folder: Path) -> Loop:
    """Disassemble a kernel's cubin and return its longest loop.

    Return an empty Loop if the disassembler does not support the GPU. The disassembler of Triton 3.7 and
    newer supports no GPU before sm_75, and the disassembler of Triton 3.6 does not support sm_103.

    disassembler: path of nvdisasm.
    folder: receives the cubin as a file.

    Raises OSError if the disassembler cannot be started, and RuntimeError if it fails for another reason.
    """
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(machine_code)
    done = run_to_end([str(disassembler), "-c", str(cubin)])
    if done.code is None:
        raise OSError(f"{disassembler} {done.failure}")
    if done.code and not UNKNOWN_CARD.search(done.stderr):
        raise RuntimeError(f"{disassembler.name} failed: {done.stderr.strip()[-300:]}")
    return longest_loop(done.stdout) if not done.code else Loop()
