"""Selection of the share of test cases that CI runs; ``TEST_WHOLE=1 make test`` runs all of them."""
from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar
from zlib import crc32

Item = TypeVar("Item")
WHOLE = os.environ.get("TEST_WHOLE", "") not in ("", "0")
ALTERNATE = not WHOLE and os.environ.get("TEST_ALTERNATE", "") not in ("", "0")


def turn() -> int:
    """Return 0 or 1, from the hash of the commit; 0 outside a clone or without git."""
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True,
                               text=True, check=False)
    except FileNotFoundError:
        return 0
    return int(asked.stdout[:8], 16) % 2 if asked.returncode == 0 else 0


def half(names: Sequence[str], number: int) -> list[str]:
    """Return the names whose hash is even (``number`` 0) or odd (1). Other names do not change the choice."""
    return [name for name in names if (crc32(name.encode()) + number) % 2 == 0]


def share(items: Sequence[Item], number: int, of: int) -> Sequence[Item]:
    """Return every ``of``-th item, or all items under TEST_WHOLE=1.

    The first one depends on ``number``, so that ``of`` consecutive numbers cover all items together.
    """
    return items if WHOLE else items[number % of::of]
