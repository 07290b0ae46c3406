"""What a push has time to test, and what it leaves to ``TEST_WHOLE=1 make test``."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")
WHOLE = os.environ.get("TEST_WHOLE", "") not in ("", "0")


def share(items: Sequence[Item], number: int, of: int) -> Sequence[Item]:
    """Every ``of``-th item, other ones for the next number, so that neighbours have all of them between them;
    TEST_WHOLE=1: all for each."""
    return items if WHOLE else items[number % of::of]
