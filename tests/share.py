"""Selection of the share of test cases that CI runs; ``TEST_WHOLE=1 make test`` runs all of them."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")
WHOLE = os.environ.get("TEST_WHOLE", "") not in ("", "0")


def share(items: Sequence[Item], number: int, of: int) -> Sequence[Item]:
    """Return every ``of``-th item, or all items under TEST_WHOLE=1.

    The first one depends on ``number``, so that ``of`` consecutive numbers cover all items together.
    """
    return items if WHOLE else items[number % of::of]
