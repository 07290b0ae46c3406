"""Selection of the share of test cases that CI runs; ``TEST_WHOLE=1 make test`` runs all of them."""
from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
WHOLE = os.environ.get("TEST_WHOLE", "") not in ("", "0")
ALTERNATE = not WHOLE and os.environ.get("TEST_ALTERNATE", "") not in ("", "0")


def turn() -> int:
    """Return 0 or 1, alternating from commit to commit; 0 outside a clone."""
    try:
        counted = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=Path(__file__).parent,
                                 capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return 0
    return int(counted.stdout) % 2 if counted.returncode == 0 else 0


def share(items: Sequence[Item], number: int, of: int) -> Sequence[Item]:
    """Return every ``of``-th item, or all items under TEST_WHOLE=1.

    The first one depends on ``number``, so that ``of`` consecutive numbers cover all items together.
    """
    return items if WHOLE else items[number % of::of]
